"""Closed formulas against the real model: parameters, and the one formula of FLOPs."""

import functools

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_train import flops, report
from tpu_train.config import ModelConfig
from tpu_train.models.transformer import Transformer, num_params

KEY = jax.eval_shape(lambda: jax.random.key(0))


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 3), st.sampled_from([1, 2, 4]), st.booleans(), st.booleans(), st.booleans(), st.sampled_from([2, 6])
)
def test_parameters_are_those_of_the_real_model(layers, kv_heads, gated, tied, qk_norm, head_dim):
    config = ModelConfig(
        *(50, 2 * layers, 24, 4, kv_heads, head_dim, 36, gated),
        tie_embeddings=tied,
        qk_norm=qk_norm,
        window_pattern=(3, 0),
    )
    model = jax.eval_shape(functools.partial(Transformer, config), KEY)
    assert flops.num_params(config) == num_params(model)
    counted = flops.params(config)
    assert counted["embedding"] == model.embed_VD.size
    assert counted["head"] == (0 if tied else model.head_VD.size)
    for name in ("attention", "mlp"):
        parts = [jax.tree.leaves(getattr(block, name)) for block in model.blocks]
        matrices = sum(leaf.size for leaves in parts for leaf in leaves if leaf.ndim > 2)
        assert counted[name] == matrices


@pytest.mark.parametrize("balance", ["aux_loss", "bias"])
@pytest.mark.parametrize("gated", [True, False])
def test_parameters_of_experts_are_those_of_the_real_model(balance, gated):
    shape = {"num_experts": 6, "experts_per_token": 2, "expert_dim": 20, "num_shared_experts": 3}
    config = ModelConfig(50, 2, 24, 4, mlp_dim=36, gated_mlp=gated, balance=balance, **shape)
    model = jax.eval_shape(functools.partial(Transformer, config), KEY)
    assert flops.num_params(config) == num_params(model)
    (block,) = model.blocks
    assert flops.params(config)["mlp"] == sum(x.size for x in jax.tree.leaves(block.mlp))
    # Without four of six experts, and without the biases, which no token is multiplied with.
    expert = (3 if gated else 2) * 24 * 20
    idle = 2 * (4 * expert + (6 if balance == "bias" else 0))
    assert flops.active_params(config) == flops.num_params(config) - idle
    assert flops.forward_flops_per_token(config, 8)["mlp"] == 2 * 2 * (5 * expert + 24 * 6)


def test_parameters_of_mixtral():
    # arXiv:2401.04088: 47B parameters, of which 13B are used for a token; Hugging Face counts 46,702,792,704.
    config = ModelConfig(
        *(32_000, 32, 4096, 32, 8, None, 14_336), tie_embeddings=False, num_experts=8, experts_per_token=2
    )
    assert flops.num_params(config) == 46_702_792_704
    assert flops.active_params(config) == pytest.approx(12.9e9, rel=0.01)


def test_parameters_of_llama_3_8b():
    # arXiv:2407.21783, table 3; Hugging Face's card of Llama-3.1-8B says 8,030,261,248.
    config = ModelConfig(128_256, 32, 4096, 32, 8, None, 14_336, tie_embeddings=False)
    assert flops.num_params(config) == 8_030_261_248


def test_the_mfu_and_the_plan_count_with_one_formula():
    assert report.train_flops_per_token is flops.train_flops_per_token


def test_blocks_add_up_and_attention_alone_grows_with_the_row():
    config = ModelConfig(100, 4, 8, 4, 2, 3, 10, window_pattern=(2, 0))
    short, long = (flops.forward_flops_per_token(config, length) for length in (4, 40))
    assert flops.train_flops_per_token(config, 4) == pytest.approx(3 * sum(short.values()))
    assert {name for name in short if short[name] != long[name]} == {"attention"}
    # Two layers see at most two keys, two see (T + 1) / 2; 4 N H = 48 FLOPs a key.
    assert short["attention"] == 48 * (2 * 7 / 4 + 2 * 2.5)
    assert long["attention"] == 48 * (2 * (1 + 39 * 2) / 40 + 2 * 20.5)


@given(st.integers(1, 300), st.integers(0, 300))
def test_keys_seen_is_the_mean_over_positions(seq_len, window):
    each = [min(t + 1, window or seq_len) for t in range(seq_len)]
    assert flops.keys_seen(seq_len, window) == pytest.approx(sum(each) / seq_len)
