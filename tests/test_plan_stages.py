"""The plan of a pipeline: a step and its memory worked by hand."""

import dataclasses

import pytest

from tpu_train import chips
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, UserError
from tpu_train.planning import advice, memory, roofline, text
from tpu_train.planning.memory import Split
from tpu_train.planning.report import Inputs, report

# D 8, N 2, K 1, H 4, F 16, V 32, four layers; 4 rows of 4 tokens.
STAGED = Config(
    model=ModelConfig(vocab_size=32, num_layers=4, model_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=16),
    data=DataConfig(seq_len=4, batch_size=4),
    mesh=MeshConfig(data=1, stage=2, stage_rounds=2, stage_microbatches=2),
)


def test_a_step_in_stages_worked_by_hand():
    """Two stages, two rounds of one layer each; 4 rows as 2 micro-batches of 2: 5 ticks for 4 that work."""
    config, fleet = STAGED, chips.parse("v5e-2")
    split = advice.own(config, fleet).split
    assert (split.schedule.ticks, split.schedule.bubble) == (5, 1 / 5)
    alone = {block.name: block for block in roofline.step(config, Split(fsdp=2), fleet).blocks}
    blocks = {block.name: block for block in roofline.step(config, split, fleet).blocks}
    for name in ("projections", "attention", "mlp"):
        assert blocks[name].flops == 5 / 4 * alone[name].flops
        assert blocks[name].network == 0
    assert (blocks["embedding"], blocks["update"]) == (
        dataclasses.replace(alone["embedding"], fast=blocks["embedding"].fast),
        alone["update"],
    )
    assert blocks["embedding"].fast["stage"] == alone["embedding"].fast["fsdp"]
    # A device takes 5 layers, each with 8 tokens, and reads 384 weights of its MLP and 8 x (24 + 24 + 24) numbers.
    assert blocks["mlp"].bytes == 3 * 2 * 5 * (384 + 8 * 72)
    # Weights: half of 4 * 576 in bfloat16, exchanged there and back; 16 tokens gathered and scattered, there and back;
    # 8 tokens of 8 numbers sent on in each of 5 ticks, there and back.
    sent = 2 * 4 * 576 * 2 / 2 / 4 + 4 * 16 * 8 * 2 / 2 + 2 * 5 * 8 * 8 * 2
    assert blocks["stages"].fast["stage"] == pytest.approx(sent / 50e9)
    # Of a weight 4 bytes read and 2 written, 2 read and 2 written; of its gradient 4 and 4 for each of 5 of 4 layers.
    assert blocks["stages"].bytes == 4 * 576 * (10 / 2 + 8 * 5 / 4)
    # The moments are split as over fsdp. In the blocks gradients are float32.
    assert memory.moments(config, split) == memory.moments(config, Split(fsdp=2))
    assert memory.gradients(config.model, split)[0] == 4 * 4 * 576 / 2 + 4 * 4 * 16


def test_a_mixture_of_experts_in_stages_is_refused():
    model = dataclasses.replace(STAGED.model, num_experts=4, expert_dim=8)
    config = dataclasses.replace(STAGED, model=model)
    with pytest.raises(UserError, match=r"no mixture of experts in stages \(mesh\.stage=2\); `tpu-train compile` does"):
        report(config, chips.parse("v5e-2"), Inputs())


def test_the_plan_says_how_long_a_stage_is_idle():
    lines = text.render(report(STAGED, chips.parse("v5e-2"), Inputs())).splitlines()
    assert "note:       pipeline: 2 stages, 2 micro-batches, 2 rounds: idle 20.0% of the time in the blocks" in lines
    assert any(line.startswith("  stage   fast    2 at 50 GB/s: ") and "rule" not in line for line in lines)
