"""What `compile` makes of the compiler's answers: predicted time, the search, the configs that ship. No compiler."""

import dataclasses

import pytest

from tpu_train import aot
from tpu_train import config as config_lib
from tpu_train.aot import search, table
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, UserError, apply_override

SMALL = Config(
    model=ModelConfig(vocab_size=512, num_layers=3, model_dim=256, num_heads=2, num_kv_heads=1, mlp_dim=512),
    data=DataConfig(seq_len=128, batch_size=8),
    mesh=MeshConfig(data=1, fsdp=-1),
)


def step(topology, *overrides):
    config = SMALL
    for override in overrides:
        config = apply_override(config, override)
    return aot.Step(config, topology)


def test_search_climbs_the_ladder_until_a_step_fits_and_ranks_what_does(capsys):
    """No compiler: whatever is kept of a block does not fit, nor does `full` in one part on fewer than four shards."""
    tried = []

    def compiler(steps):
        (one,) = steps
        config = one.config
        tried.append((config.mesh.fsdp, config.mesh.tensor, config.model.remat, config.optim.accumulation_steps))
        fits = config.model.remat == "full" and (config.mesh.fsdp == 4 or config.optim.accumulation_steps > 1)
        answer = {"collectives": [], "mesh": {"data": 1, "fsdp": config.mesh.fsdp, "tensor": config.mesh.tensor}}
        answer |= {"cycles": 1e6 * config.mesh.tensor, "kernel_flops": 0.0, "model_flops_per_token": 1.0, "tokens": 1}
        answer |= {"schedules": [], "flops_by_kernel": {}}
        answer |= {"num_devices": 4}
        size = {"argument_bytes": 1, "output_bytes": 0, "aliased_bytes": 0, "temporary_bytes": 1}
        return [answer | (size if fits else {"out of memory": "x", "needed_bytes": 9, "available_bytes": 8})]

    base = step("v5e:2x2", "model.num_kv_heads=2")
    assert search.show(base, 4, compiler, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tried == [
        (4, 1, "none", 1), (4, 1, "dots", 1), (4, 1, "full", 1),
        (2, 2, "none", 1), (2, 2, "dots", 1), (2, 2, "full", 1), (2, 2, "full", 2),
    ]  # fmt: skip
    assert "--set mesh.fsdp=4" in lines[0]
    assert " fits " in lines[1]
    assert all("does not fit" in line for line in lines[2:])
    assert len(lines) == len(tried)
    with pytest.raises(UserError, match="no mesh of 3 devices"):
        search.show(base, 3, compiler, as_json=False)
    split = step("v5e:2x2", "model.num_kv_heads=2", "mesh.context=2", "mesh.context_method=ring").config
    by_two = MeshConfig(data=1, context=2, context_method="ring")
    wanted = [dataclasses.replace(by_two, fsdp=2), dataclasses.replace(by_two, tensor=2)]
    assert [*search.meshes(split, 4, 1)] == wanted


def test_predicted_time_is_cycles_at_the_clock_and_what_is_waited_for():
    """16 v5e: 131,072 FLOPs a cycle, 197 TFLOP/s, two lines of 50 GB/s; the second collective is hidden. One kernel's
    schedule is known, of two calls; the other counts with its FLOPs, and is named."""
    collective = {
        "kind": "all-gather",
        "axes": ["fsdp"],
        "devices": 16,
        "runs": 2,
        "wire_bytes": 1e9,
        "cycles_meanwhile": 0.0,
    }
    known = {"name": "flash_attention_forward", "runs": 2.0, "cycles": 0.2e9, "mxu_cycles": 0.1e9, "why": ""}
    lost = {"name": "mine", "runs": 1.0, "cycles": None, "mxu_cycles": None, "why": "no op says so"}
    answer = {
        "mesh": {"data": 1, "fsdp": 16, "tensor": 1}, "num_devices": 16, "tokens": 16, "cycles": 1.5e9,
        "kernel_flops": 131_072 * 1.2e9, "model_flops_per_token": 197e12, "schedules": [known, known, lost],
        "flops_by_kernel": {
            "flash_attention_forward": 131_072 * 0.3e9, "flash_attention_forward_whole": 131_072 * 0.2e9,
            "mine": 131_072 * 0.7e9,
        },
        "collectives": [collective, collective | {"cycles_meanwhile": 1e12}],
    }  # fmt: skip
    report = table.Report("v5e:4x4", 1, answer)
    assert report.clock_hz == pytest.approx(1.503e9, rel=1e-3)
    assert report.kernels == (
        table.KernelRow("flash_attention_forward", 4, 0.8e9, 0.5e9, ""),
        table.KernelRow("mine", 1, None, 0.7e9, "no op says so"),
    )
    assert report.compute_seconds == pytest.approx(3e9 / report.clock_hz)
    assert report.network_seconds == pytest.approx(2 * 1e9 / 100e9)
    assert report.mfu == pytest.approx(1 / report.seconds)
    assert report.seconds == report.compute_seconds + report.network_seconds
    assert any("mine counts with its least: no op says so" in line for line in report._kernels())
    two = table.Report("v5e:4x4", 2, answer | {"mesh": {"data": 2, "fsdp": 16, "tensor": 1}, "collectives": [
        collective | {"axes": ["data"], "devices": 2}]})  # fmt: skip
    assert two.network_seconds == pytest.approx(2 * 1e9 / two.fleet.chip.slow_bytes)
    unknown = table.Report("v5e:4x4", 1, answer | {"flops_by_kernel": {}})
    assert (unknown.kernel_cycles, unknown.seconds) == (None, None)


def test_shipped_configs_load():
    for name in ("llama3_8b", "llama3_70b"):
        config = config_lib.load(f"configs/{name}.py")
        assert config.mesh.fsdp == -1
