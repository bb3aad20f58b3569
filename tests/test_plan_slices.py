"""The plan over several slices: which axis pays for the slower network, worked by hand."""

import dataclasses

import pytest

from tpu_train import chips, layout
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, UserError
from tpu_train.planning import advice, network, why

LLAMA = Config(
    model=ModelConfig(128_256, 32, 4096, 32, 8, None, 14_336, tie_embeddings=False),
    data=DataConfig(seq_len=1024, batch_size=64),
)


def test_slices_are_spanned_by_data_and_cost_a_shard():
    axes = network.axes(chips.parse("v5e-512"), {"data": 32, "fsdp": 16, "tensor": 1})
    assert [(axis.fast, axis.slow) for axis in axes.values()] == [(16, 2), (1, 1), (1, 1), (16, 1), (1, 1), (1, 1)]
    # 1 GB: 15/16 of it at 100 GB/s within the slice, then half of a sixteenth at 3.125 GB/s.
    assert axes["data"].gather(1e9) == (pytest.approx(0.9375e9 / 100e9), pytest.approx(1e9 / 16 / 2 / 3.125e9))
    assert axes["data"].reduce(1e9) == tuple(2 * seconds for seconds in axes["data"].gather(1e9))
    with pytest.raises(UserError, match=r"mesh.data=3 is not a multiple of the 2 slices that it is spread over"):
        network.axes(chips.parse("v5e-32", 2), {"data": 3, "fsdp": 1, "tensor": 1})


def test_an_axis_over_slices_pays_for_the_slower_network():
    """The same mesh of 32 v5e; weights gathered between slices cost more than gradients summed, stages the least."""
    over = {}
    for axis, mesh in (
        ("data", MeshConfig(2, 16)),
        ("fsdp", MeshConfig(2, 16, fsdp_slices=2)),
        ("stage", MeshConfig(1, 16, stage=2, stage_slices=2)),
    ):
        choice = advice.own(dataclasses.replace(LLAMA, mesh=mesh), chips.parse("v5e-32", 2))
        slow = {name: seconds for name, (_, seconds) in choice.step.by_axis().items() if seconds}
        assert [*slow] == [axis]
        over[axis] = slow[axis]
    assert over["stage"] < over["data"] < over["fsdp"]
    stages = dict.fromkeys(layout.AXES, 1) | {"stage": 2}
    apart = network.axes(chips.parse("v5e-32", 2), stages | {"fsdp": 16}, stages)
    assert apart["stage"].permute(1e9) == (0, pytest.approx(1e9 / 3.125e9))


def test_a_suggestion_sends_data_across_slices_and_says_so_where_the_config_does_not():
    config = dataclasses.replace(LLAMA, mesh=MeshConfig(2, 16, data_slices=1, fsdp_slices=2))
    best = advice.best(config, chips.parse("v5e-32", 2))
    assert best.split.data % 2 == 0
    assert {"mesh.data_slices=-1", "mesh.fsdp_slices=1"} <= set(why.settings(best, config))
    assert not any("slices" in setting for setting in why.settings(best, LLAMA))
