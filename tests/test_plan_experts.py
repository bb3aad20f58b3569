"""The plan of a mixture of experts, worked by hand; against the trainer itself in test_plan_memory.py and _work.py."""

import dataclasses

import pytest

from tpu_train import chips
from tpu_train.config import Config, DataConfig, ModelConfig
from tpu_train.flops import active_params, num_params
from tpu_train.planning import experts, memory, roofline
from tpu_train.planning.split import Split

# D 8, N 2, K 1, H 4, V 32, two layers; rows of 4 tokens.
TINY = Config(
    model=ModelConfig(vocab_size=32, num_layers=2, model_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=16),
    data=DataConfig(seq_len=4, batch_size=4),
)


def test_a_mixture_of_experts_worked_by_hand():
    """TINY with 4 experts of 6 columns, 2 a token and one shared, over two devices along expert: 2 rows, 8 tokens."""
    model = dataclasses.replace(TINY.model, num_experts=4, experts_per_token=2, expert_dim=6, num_shared_experts=1)
    config = dataclasses.replace(TINY, model=model)
    split = Split(expert=2)
    # A layer: attention 192, experts 5 * 3 * 8 * 6 = 720, router 32, norms 16; embedding 256, final norm 8.
    assert (num_params(model), active_params(model)) == (2 * 960 + 264, 2 * (960 - 2 * 144) + 264)
    assert memory.sharded_params(model, split) == (2 * (192 + 720 + 32) + 256) / 2 + 40
    # Room for both devices' 8 tokens, twice each: 32 rows. Two experts are here, and the shared one.
    assert experts.room(model, split, 8, 4) == 32
    assert experts.gathered(model, split) == 2 * 3 * 144 + 4 * 32
    weights = 2 * 192 + 2 * 3 * 144 + 4 * 32
    attention = 2 * 8 * 8 * 3 + 2 * 8 * (3 * 2 + 2) * 4 + 4 * 8 * 2  # inputs; heads; lse
    norms = 6 * 4 * 8 * 8 + 4 * 4 * 8 + 4 * 16
    routed = 4 * 8 * 8 + 4 * 8 * 4 + 5 * 4 * 8 * 2 + 5 * 4 * 8  # x, scores, numbers of choices and of tokens
    rows = 2 * 32 * (8 + 4 * 6) + 4 * 8 * 2 * 8  # at home, and their results
    shared = 2 * 8 * (8 + 3 * 6)
    assert memory.kept_by_layer(model, split, 8, 4) == weights + attention + norms + routed + rows + shared
    # Gradients: bfloat16 of the matrices, float32 of router and norms; the embedding's.
    assert memory.gradients(model, split) == (2 * 2 * 912 / 2 + 4 * (32 + 32), 4 * (128 + 8))
    blocks = {block.name: block for block in roofline.step(config, split, chips.parse("v5e-2")).blocks}
    assert blocks["experts"].flops == 8 * 3 * 2 * 2 * (3 * 144 + 32)
    # Of each layer, over one link of 50 GB/s: shared expert and router, whole and bfloat16, gathered and scattered;
    # the 2 * 16 rows of 8 columns to the experts and back, and their gradients, a quarter of a gather each.
    sent = 2 * (2 * (144 + 32) * 2 / 2 + 4 * (32 * 8 * 2) / 2 / 4)
    assert blocks["experts"].fast["expert"] == pytest.approx(sent / 50e9)
    assert (blocks["experts"].fast["fsdp"], blocks["experts"].slow["data"]) == (0, 0)
    over_both = roofline.step(config, Split(expert=2, fsdp=2), chips.parse("v5e-4"))
    fsdp = next(block for block in over_both.blocks if block.name == "experts").fast["fsdp"]
    # Two whole experts of each layer, and what expert does not bring of the rest: half of it.
    assert fsdp == pytest.approx(2 * 2 * 2 * (2 * 144 + (144 + 32) / 2) / 2 / 50e9)
