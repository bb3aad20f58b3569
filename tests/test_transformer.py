"""The whole model against float64 numpy, packing, remat, initial weights and the FLOP formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_layers import attention_weights, mlp_weights, numbers, numpy_attention, numpy_mlp, numpy_norm

from tpu_train import ops
from tpu_train.config import ModelConfig
from tpu_train.flops import train_flops_per_token
from tpu_train.loss import weighted_loss
from tpu_train.models.transformer import REMAT_POLICIES, Transformer, num_params
from tpu_train.precision import resolve


def numpy_forward(model, batch, config: ModelConfig):
    """(hidden states, loss and lse per token) in float64; layer l is block l % P of group l // P."""
    embed = numbers(model.embed_VD)
    head = embed if model.head_VD is None else numbers(model.head_VD)
    x = embed[batch["tokens"]]
    options = {"theta": config.rope_theta, "soft_cap": config.attention_soft_cap, "eps": config.norm_eps}
    for layer in range(config.num_layers):
        group, entry = divmod(layer, len(config.window_pattern))
        block = jax.tree.map(lambda leaf, at=group: leaf[at], model.blocks[entry])
        normed = numpy_norm(x, numbers(block.attention_norm.scale_D), config.norm_eps)
        weights, window = attention_weights(block.attention), config.window_pattern[entry]
        x = x + numpy_attention(normed, weights, batch["positions"], batch["segment_ids"], window=window, **options)
        normed = numpy_norm(x, numbers(block.mlp_norm.scale_D), config.norm_eps)
        x = x + numpy_mlp(normed, mlp_weights(block.mlp), config.activation)
    x = numpy_norm(x, numbers(model.final_norm.scale_D), config.norm_eps)
    logits = x @ head.T
    if config.logit_soft_cap is not None:
        logits = config.logit_soft_cap * np.tanh(logits / config.logit_soft_cap)
    lse = np.log(np.exp(logits).sum(axis=-1))
    return x, lse - np.take_along_axis(logits, batch["labels"][..., None], axis=-1)[..., 0], lse


def make_forward(config):
    """A jitted (model, batch of [B, T]) -> (hidden states, loss and lse per token)."""
    compute = resolve(config.run, "cpu")

    @jax.jit
    def forward(model, batch):
        x_BTD, _ = model(batch["tokens"], batch["positions"], batch["segment_ids"], compute)
        options = {"z_loss": 0.0, "soft_cap": config.model.logit_soft_cap, "compute": compute}
        return x_BTD, *ops.linear_cross_entropy(x_BTD, model.output_VD, batch["labels"], **options)

    return forward


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_layers=4", "model.qk_norm=true", "model.attention_soft_cap=2", "model.logit_soft_cap=3"],
        [
            *("model.tie_embeddings=false", "model.gated_mlp=false", "model.activation=gelu", "model.num_kv_heads=8"),
            *("model.window_pattern=0", "model.num_layers=3", "run.implementation=reference"),
        ],
    ],
    ids=["tied_grouped_windows_caps", "untied_plain_reference"],
)
def test_forward_matches_float64(tiny, random_model, random_batch, place, overrides):
    config = tiny(*overrides)
    model, batch = random_model(config), {name: x[0] for name, x in random_batch(config).items()}
    got = make_forward(config)(model, place(batch))
    real = batch["weights"] > 0
    for name, mine, right in zip(("x", "loss", "lse"), got, numpy_forward(model, batch, config.model), strict=True):
        np.testing.assert_allclose(np.asarray(mine)[real], right[real], rtol=2e-4, atol=2e-4, err_msg=name)


def test_packed_documents_have_the_losses_of_each_alone(tiny, random_model, place):
    config = tiny("data.seq_len=24", "model.num_layers=4")
    model, forward, rng = random_model(config), make_forward(config), np.random.default_rng(0)
    lengths, T = (4, 9, 7), 24
    tokens, labels = rng.integers(0, 64, (2, sum(lengths)), dtype=np.int32)
    packed = {name: np.zeros((3, T), np.int32) for name in ("tokens", "labels", "positions", "segment_ids")}
    alone = {name: x.copy() for name, x in packed.items()}
    first = 0
    for i, length in enumerate(lengths):
        here, there = slice(first, first + length), slice(0, length)
        for batch, row, at, segment in ((packed, 0, here, i + 1), (alone, i, there, 1)):
            batch["tokens"][row, at] = tokens[here]
            batch["labels"][row, at] = labels[here]
            batch["positions"][row, at] = np.arange(length)
            batch["segment_ids"][row, at] = segment
        first += length
    packed_loss, alone_loss = (np.asarray(forward(model, place(batch))[1]) for batch in (packed, alone))
    wanted = np.concatenate([alone_loss[i, :length] for i, length in enumerate(lengths)])
    np.testing.assert_allclose(packed_loss[0, : sum(lengths)], wanted, rtol=1e-5, atol=1e-5)
    packed["segment_ids"][0, :first] = 1  # as one document the losses are others
    assert (
        np.abs(np.asarray(forward(model, place(packed))[1])[0, lengths[0] : first] - wanted[lengths[0] :]).max() > 0.1
    )


def test_remat_and_unrolling_change_no_gradient(tiny, random_model, random_batch, place):
    def gradients(*overrides):
        config = tiny("model.num_layers=4", *overrides)
        batch = place({name: x[0] for name, x in random_batch(config).items()})
        compute = resolve(config.run, "cpu")
        run = jax.jit(jax.grad(lambda model: weighted_loss(model, batch, 0.01, compute)[0]))
        traced = str(run.trace(random_model(config)).jaxpr)
        assert ("remat" in traced) == (config.model.remat != "none")
        return jax.tree.leaves(run(random_model(config)))

    wanted = gradients()
    assert max(np.abs(g).max() for g in wanted) > 1
    for policy in REMAT_POLICIES.keys() - {"none"}:
        for a, b in zip(gradients(f"model.remat={policy}", "model.scan_unroll=2"), wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=policy)


def test_initial_weights_do_not_depend_on_the_mesh(tiny, mesh_of):
    config = tiny("model.tie_embeddings=false", "model.qk_norm=true", "model.num_layers=4").model
    models = []
    for shape in ((1, 1, 1), (2, 2, 2)):
        mesh_of(*shape)
        models.append(jax.device_get(jax.jit(functools.partial(Transformer, config))(jax.random.key(3))))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(models[0]), jax.tree.leaves(models[1]), strict=True):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype == jnp.float32, name
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=name)
        if "scale" in name:
            np.testing.assert_array_equal(np.asarray(a), 1.0, err_msg=name)
        elif "embed" in name or "head" in name:
            assert 0.03 < np.abs(a).max() <= 0.04, name
            assert 0.8 < np.std(a) / 0.02 < 1, name
        else:
            assert np.std(a) > 0.01, name
    block = models[0].blocks[0]
    assert 0.75 < np.std(block.attention.q_DNH[...]) * 16**0.5 < 1
    assert 0.75 < np.std(block.mlp.down_FD[...]) * (32 * 2 * 4) ** 0.5 < 1
    # No two matrices start alike, across layers and kinds.
    assert np.abs(np.diff(block.mlp.up_DF[...], axis=0)).max() > 0.1
    assert np.abs(block.attention.k_DKH[...] - block.attention.v_DKH[...]).max() > 0.1
    assert np.abs(block.mlp.up_DF[...] - models[0].blocks[1].mlp.up_DF[...]).max() > 0.1


def test_num_params_counts_a_tied_embedding_once(tiny, random_model):
    # D 16, N 8, K 4, H 4, F 32, V 64, L 2
    block = 16 * 4 * (8 + 2 * 4) + 8 * 4 * 16 + 3 * 16 * 32 + 2 * 16
    assert num_params(random_model(tiny())) == 64 * 16 + 2 * block + 16
    untied = random_model(tiny("model.tie_embeddings=false", "model.qk_norm=true", "model.gated_mlp=false"))
    assert num_params(untied) == 2 * 64 * 16 + 2 * (block - 16 * 32 + 2 * 4) + 16


def test_flops_match_a_case_worked_by_hand():
    config = ModelConfig(
        vocab_size=100, num_layers=4, model_dim=8, num_heads=4, num_kv_heads=2, head_dim=3, mlp_dim=10,
        window_pattern=(2, 0),
    )  # fmt: skip
    # Weights of a layer: q 8*12, k and v 8*6 each, output 12*8, three of 8*10.
    matrices = 2 * (96 + 48 + 48 + 96 + 240)
    # Keys seen over 4 tokens: 1 + 2 + 2 + 2 with the window, 1 + 2 + 3 + 4 without; 2 products of 12 columns each.
    windowed, full = 2 * 2 * 12 * 7 / 4, 2 * 2 * 12 * 10 / 4
    forward = 4 * matrices + 2 * windowed + 2 * full + 2 * 8 * 100
    assert train_flops_per_token(config, 4) == pytest.approx(3 * forward)
    plain = ModelConfig(vocab_size=100, num_layers=1, model_dim=8, num_heads=2, mlp_dim=10, gated_mlp=False)
    assert train_flops_per_token(plain, 1) == 3 * (2 * (4 * 64 + 160) + 4 * 8 + 1600)


def test_flops_agree_with_the_compiler(tiny, random_model, random_batch, place):
    # One layer, since the compiler counts a loop's body once; the reference, which multiplies all T x T pairs.
    config = tiny(
        *(
            "model.num_layers=1",
            "model.window_pattern=0",
            "model.model_dim=64",
            "model.head_dim=8",
            "model.mlp_dim=256",
        ),
        *("model.vocab_size=512", "run.implementation=reference"),
    )
    batch = place({name: x[0] for name, x in random_batch(config).items()})
    B, T = batch["tokens"].shape
    analysis = make_forward(config).lower(random_model(config), batch).compile().cost_analysis()
    unseen = 4 * 8 * 8 * (T - (T + 1) / 2)  # pairs that the formula leaves out: 4 N H each
    ours = B * T * (train_flops_per_token(config.model, T) / 3 + unseen)
    # The compiler also counts what is not a matmul: norms, softmaxes, activations.
    assert 0.98 < analysis["flops"] / ours < 1.1
