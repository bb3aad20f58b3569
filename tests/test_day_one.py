"""benchmarks/tpu.py and gpu.py before their devices are there: interpreted kernels, stand-in timers, tiny sizes."""

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import test_tuned

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import measuring  # noqa: E402  (of the folder above)
import tpu  # noqa: E402
import tpu_numerics  # noqa: E402
import tpu_tuner  # noqa: E402

from pallas_kernels import cases, tuned  # noqa: E402
from pallas_kernels.attention import blocks as attention_blocks  # noqa: E402
from pallas_kernels.runtime import CHIPS  # noqa: E402
from tpu_train.config import Config, DataConfig, ModelConfig, UserError  # noqa: E402

V5E, V5P = CHIPS["v5e"], CHIPS["v5p"]
table = test_tuned.table
TINY = [
    tpu_numerics.attention("tail", 1, 130, 130, 2, 1, 16, window=70, segments=True, logit_soft_cap=5.0),
    tpu_numerics.attention("rotary", 1, 130, 130, 2, 1, 32, rotary=True),
    tpu_numerics.gated(70, 40, 130),
    tpu_numerics.fused(70, 40, 130),
    tpu_numerics.grouped(40, 130, (30, 0, 45), 7),
    tpu_numerics.quantized(40, 70, 130),
    tpu_numerics.cross_entropy(70, 40, 300, z_loss=1e-2, cap=3.0),
]


def test_every_registered_op_is_checked_with_tails():
    found = tpu_numerics.problems()
    assert set(cases.OPS) <= {problem.op for problem in found} == {problem.op for problem in TINY}
    assert len({(problem.op, problem.name) for problem in found}) == len(found)


@pytest.mark.slow
def test_right_kernels_pass():
    rows = tpu_numerics.report(TINY, "interpret")
    assert [row["wrong"] for row in rows] == [""] * len(TINY)
    assert all(row["ok"] and 0 < row["ratio"] <= 2 for row in rows)
    assert set(rows[0]["errors"]) == {"o", "lse", "dq", "dk", "dv"}


def test_a_wrong_kernel_and_a_refused_one_are_reported_and_end_with_1(monkeypatch, capsys):
    right = tpu_numerics.gated(20, 16, 30)

    def gradient_off(x, implementation):  # right values, a gradient 3 % off: 4 times the error of bfloat16
        (h,) = right.ours(x, "xla" if implementation == "interpret" else implementation)
        return (
            h if implementation == "reference" else h + 0.03 * (x["x"] - jax.lax.stop_gradient(x["x"])) @ x["w_up"],
        )

    def refused(x, implementation):
        if implementation == "reference":
            return right.ours(x, implementation)
        raise ValueError("out of scoped VMEM\nmore")

    found = [dataclasses.replace(right, ours=gradient_off), dataclasses.replace(right, ours=refused)]
    rows = tpu_numerics.report(found, "interpret")
    assert [row["ok"] for row in rows] == [False, False]
    assert rows[0]["wrong"].startswith("dx errs by ")
    assert rows[1]["wrong"] == "ValueError: out of scoped VMEM"
    assert tpu_numerics.is_wrong((float("nan"), 1.0))

    monkeypatch.setattr(tpu.cpu, "has_accelerator", lambda: True)
    monkeypatch.setattr(tpu.tpu_tuner, "chip_of", lambda device: V5E)
    monkeypatch.setitem(tpu.PARTS, "numerics", lambda flags, chip: {"rows": rows, "ok": False})
    monkeypatch.setitem(tpu.PARTS, "times", lambda flags, chip: 1 / 0)
    monkeypatch.setitem(tpu.PARTS, "tune", lambda flags, chip: {"rows": [], "ok": True, "table": ""})
    assert tpu.main(["--parts=numerics,times,tune"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: dx errs by" in out
    assert "| times |  |  |  | FAILED: ZeroDivisionError: division by zero |" in out
    assert tpu.main(["--parts=tune"]) == 0


def test_without_a_tpu_it_says_so_in_one_line_and_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(tpu.cpu, "has_accelerator", lambda: False)
    assert tpu.main([]) == 2
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", [err.strip()])
    assert err.startswith("tpu.py: needs a TPU VM of v4, v5e, v5p, v6e, tpu7x; devices here: none but the CPU")


def small_case(name, fn=lambda x: x * 2):
    return cases.Case(name, fn, (jax.ShapeDtypeStruct((4,), jnp.float32),), flops=8.0)


def test_times_stand_beside_predictions_and_one_failure_stops_no_other():
    def refuse(x):
        raise RuntimeError("the compiler refuses it")

    found = [small_case("a"), small_case("b", refuse), small_case("c")]
    rows = tpu.timed(
        found, {"a": 1000, "b": 5}, 1e-9, lambda call: call() is None or measuring.Timing(3e-6, 2e-6, 4e-6)
    )
    assert rows[0]["predicted_ms"] == pytest.approx(1e-3)
    assert rows[0]["ratio"] == pytest.approx(3.0)
    assert rows[0]["tflops"] == pytest.approx(8 / 3e-6 / 1e12)
    assert rows[1]["error"] == "RuntimeError: the compiler refuses it"
    assert rows[2]["predicted_ms"] is None
    assert "ratio" not in rows[2]
    shown = [row[-1] for row in tpu.lines({"times": {"rows": rows, "source": "here", "ok": False}})]
    assert shown == ["3.00 of it", "FAILED: RuntimeError: the compiler refuses it", "", "from here"]


def test_a_case_runs_with_the_values_that_its_counts_are_of():
    (case,) = cases.all_cases("grouped_matmul")
    drawn = tpu.arguments(case)
    assert [(x.shape, x.dtype) for x in drawn] == [(x.shape, x.dtype) for x in case.args]
    assert 6 * int(drawn[-1].sum()) * case.args[0].shape[1] * case.args[2].shape[1] == case.flops


def test_a_cycle_is_as_long_as_the_peak_says():
    for kind, name, ghz in (("TPU v5e", "v5e", 1.5), ("TPU v5p", "v5p", 1.75), ("TPU v6 lite", "v6e", 1.75)):
        assert 1e-9 / tpu.seconds_of_cycle(CHIPS[name], SimpleNamespace(device_kind=kind)) == pytest.approx(ghz, 0.01)
    with pytest.raises(UserError, match="no peak for TPU v99"):
        tpu.seconds_of_cycle(V5E, SimpleNamespace(device_kind="TPU v99"))


def test_predictions_come_from_the_compiler_or_else_from_the_budget(monkeypatch):
    def answers(text, status=0):
        done = subprocess.CompletedProcess([], status, stdout=text, stderr="first\nno libtpu")
        monkeypatch.setattr(subprocess, "run", lambda command, **options: done)

    answers(
        json.dumps({"a": {"cycles": 10, "xla_cycles": 5}, "b": {"cycles": 10, "xla_cycles": None}, "c": {"error": "x"}})
    )
    found, source = tpu.predictions(V5E)
    assert found == {"a": 15, "b": 10}
    assert source.startswith("the compiler on this machine")
    answers("", 2)
    found, source = tpu.predictions(V5E)
    assert found == json.loads((ROOT / "tests/aot/budget.json").read_text())["v5e:1x1"]
    assert "budget.json" in source
    assert "no libtpu" in source
    slow = subprocess.TimeoutExpired([], 900)
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: (_ for _ in ()).throw(slow))
    assert "it took over 900 s" in tpu.predictions(V5P)[1]
    assert tpu.predictions(V5P)[0] == {}


def test_times_are_medians_of_warm_calls():
    ticks = itertools.count()
    calls = []
    timing = measuring.time_calls(
        lambda: calls.append(0) or jnp.ones(4), repeats=3, lasting=4.0, profiled=False, clock=lambda: float(next(ticks))
    )
    assert (timing.median, timing.low, timing.high, timing.device) == (0.25, 0.25, 0.25, None)
    assert len(calls) == 1 + 1 + 4 + 3 * 4  # compiled, one timed to see how long it takes, warm, and the repeats
    assert measuring.time_calls(lambda: jnp.ones(4), repeats=1, lasting=1e-4).device is None  # of a CPU's profile


def test_the_device_s_own_time_is_that_of_its_programs():
    def plane(name, **lines):
        made = [
            SimpleNamespace(name=n.replace("_", " "), events=[SimpleNamespace(duration_ns=t) for t in ts])
            for n, ts in lines.items()
        ]
        return SimpleNamespace(name=name, lines=made)

    host = plane("/host:CPU", XLA_Modules=[9e9])
    assert measuring.module_seconds([host, plane("/device:TPU:0", XLA_Modules=[2e6, 4e6], XLA_Ops=[1e6])], 2) == 3e-3
    assert measuring.module_seconds([host], 1) is None


TUNED = Config(
    model=ModelConfig(vocab_size=256, num_layers=1, model_dim=128, num_heads=1, mlp_dim=128),
    data=DataConfig(seq_len=256, batch_size=1),
)


@pytest.fixture
def space():
    """Attention's, whose first candidates are faster the fewer queries a block has."""
    return next(space for space in tpu_tuner.spaces(TUNED, V5E, interpret=True) if space.op == "flash_attention")


def seconds_by(**of):
    """A timer for spaces whose `run` notes its sizes: seconds by q, 1.0 for others."""
    return lambda call: of.get(f"q{call()[0]}", 1.0)


def noted(space, wrong=(), refused=()):
    """The space with a run that computes its own sizes in place of attention."""

    def run(sizes, *args):
        if sizes["q"] in refused:
            raise RuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem\nmore")
        return jnp.float32(7 if sizes["q"] in wrong else 1), jnp.ones(3)

    return dataclasses.replace(space, run=run)


@pytest.mark.slow
def test_the_tuner_finds_the_fastest_and_the_kernels_take_it(space, table, monkeypatch):
    assert space.first["q"] == 256
    made = []
    alone = measuring.alone

    def noting(run):  # the timer sees the sizes of the call that it times
        call = alone(run)

        def noted(*args):
            made.append(run.args[0])
            return call(*args)

        return noted

    monkeypatch.setattr(measuring, "alone", noting)

    def timer(call):
        call()
        return 1.0 if made[-1]["q"] == 256 else 0.5 + made[-1]["k"] / 1e4

    found = tpu_tuner.tune(space, timer, most=3)
    assert (found.first, found.best["q"], found.kept, found.wrong) == (space.first, 128, True, [])
    assert found.best_seconds < found.first_seconds == 1.0
    tpu_tuner.write(found, space, V5E, table)
    chosen = attention_blocks.choose(256, 256, 128, 128, 2, V5E)
    assert dataclasses.asdict(chosen) == found.best


def test_the_tuner_skips_what_is_refused_and_reports_what_is_wrong(space):
    times = iter([1.0, *[0.1] * 100])
    found = tpu_tuner.tune(noted(space, refused=(128,)), lambda call: next(times), most=30)
    assert any("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem" in line for line in found.refused)
    assert found.best["q"] != 128
    slower = tpu_tuner.tune(noted(space, wrong=(128,)), lambda call: 1.0, most=30)
    assert slower.wrong
    assert all("'q': 128" in line and "differ by 6 of their size" in line for line in slower.wrong)
    assert (slower.best, slower.kept) == (slower.first, False)
    shown = tpu.lines({"tune": {"rows": [vars(found), vars(slower)], "table": "t", "ok": False}})
    assert any("WRONG" in row[-1] for row in shown)
    assert any(row[-2] == "refused" for row in shown)


def test_the_tuner_does_not_try_what_can_not_be_in_vmem(space):
    tried = []
    small = dataclasses.replace(V5E, vmem_bytes=8 * 2**20)
    made = tpu_tuner._attention(1, 1024, 1, 1, 128, small, "interpret")
    made = dataclasses.replace(made, run=lambda sizes, *args: tried.append(sizes) or jnp.ones(2))
    found = tpu_tuner.tune(made, lambda call: 1.0)
    assert any("MiB of VMEM" in line for line in found.refused)
    for sizes in tried:
        attention_blocks.check(attention_blocks.from_plain(sizes), 128, 128, 2, small)


def test_spaces_start_where_the_kernels_do(table):
    found = {space.op: space for space in tpu_tuner.spaces(TUNED, V5E, interpret=True)}
    assert set(found) == {"flash_attention", "gated_mlp", "linear_cross_entropy"}
    for space in found.values():
        space.check(space.first)
        assert len(list(tpu_tuner.neighbours(space.first))) >= 10
        for op, entry in space.entries(space.first):
            tuned.write(table, op, "v5e", entry)
    again = {space.op: space.first for space in tpu_tuner.spaces(TUNED, V5E, interpret=True)}
    assert again == {op: space.first for op, space in found.items()}


def test_a_config_is_cut_to_what_fits():
    config = Config(
        model=ModelConfig(
            vocab_size=1024, num_layers=4, model_dim=256, num_heads=4, mlp_dim=1024, window_pattern=(8, 0)
        ),
        data=DataConfig(seq_len=256, batch_size=8),
    )
    whole = measuring.cut_to_fit(config, 1, 2**40)
    assert (whole.model.num_layers, whole.model.remat, whole.data.batch_size) == (4, "none", 8)
    sizes = []
    for room in (120e6, 80e6, 55e6):
        made = measuring.cut_to_fit(config, 1, room)
        sizes.append((made.model.num_layers, made.data.batch_size))
        assert made.model.remat == "full"
        assert made.model.num_layers % 2 == 0
    assert sizes == sorted(sizes, reverse=True)
    with pytest.raises(UserError, match="not even 2 layer"):
        measuring.cut_to_fit(config, 1, 1e6)


@pytest.mark.slow
def test_a_step_is_timed_with_its_mfu(one_device, tiny):
    ticks = itertools.count()
    config = tiny()
    row = measuring.time_step(config, jax.devices()[:1], 1e9, steps=2, repeats=2, clock=lambda: float(next(ticks)))
    tokens = config.data.batch_size * config.data.seq_len
    assert (row["seconds"], row["tokens_per_second"]) == (0.5, 2 * tokens)
    assert row["mfu"] == pytest.approx(2 * tokens * measuring.train_flops_per_token(config.model, 16) / 1e9)
    assert len(row["losses"]) == 3
    assert row["losses"][-1] < row["losses"][0]
    assert row["memory_bytes"] > 0
    flags = argparse.Namespace(config=str(ROOT / "configs" / "tiny.py"), set=["model.num_layers=1"])
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 10**9}, device_kind="TPU v5e")
    assert tpu.cut(flags, [device]).model.num_layers == 1
    with pytest.raises(UserError, match="does not say how much memory"):
        tpu.cut(flags, [SimpleNamespace(memory_stats=lambda: None, device_kind="TPU v99")])
