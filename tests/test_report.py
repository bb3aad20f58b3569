"""What the reporter counts, writes, prints and refuses, with a clock of the test's own."""

import math
import types

import jax
import numpy as np
import pytest

from tpu_train import devices, goodput, metrics, report, watchdog
from tpu_train.config import Config, DataConfig, ModelConfig, RunConfig
from tpu_train.report import Reporter, RunFailed

TOKENS = 64.0


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(report, "time", clock)
    monkeypatch.setattr(goodput, "time", clock)
    return clock


@pytest.fixture
def reporter_of(tmp_path):
    """reporter_of(step, mesh, log_every=...): a Reporter that writes to tmp_path, for a run of 100 steps."""
    opened = []

    def make(step=0, mesh=None, **run):
        # FLOPs per token, see test_mfu_matches_a_hand_computed_case.
        config = Config(
            model=ModelConfig(vocab_size=32, num_layers=2, model_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=16),
            data=DataConfig(seq_len=4),
            run=RunConfig(workdir=str(tmp_path), steps=100, **{"log_every": 1, **run}),
        )
        clock = goodput.Clock(1000.0, watchdog.Watchdog(None))
        opened.append(Reporter(config, mesh or jax.sharding.get_mesh(), step, 1000.0, clock))
        return opened[-1]

    yield make
    for reporter in opened:
        reporter.close()


def values(loss=2.0, **more):
    made = {"loss": loss, "learning_rate": 1e-3, "grad_norm": 0.5, "tokens": TOKENS, "skipped": 0, **more}
    return {"updated": float(math.isfinite(made["loss"]) and math.isfinite(made["grad_norm"]))} | made


def test_step_time_leaves_out_compilation_evaluation_and_saving(reporter_of, clock, tmp_path):
    reporter = reporter_of()
    reporter.dispatched(1, values())
    clock.now += 60  # compiling
    reporter.dispatched(2, values())
    clock.now += 2
    reporter.dispatched(3, values())
    clock.now += 3
    reporter.fetch()
    with reporter.pause():
        clock.now += 500
    reporter.log()
    clock.now += 0.5  # dispatching is part of a step
    reporter.dispatched(4, values())
    clock.now += 3.5
    reporter.fetch()
    reporter.log()
    assert [line["step_seconds"] for line in metrics.read(tmp_path)] == [None, 2.0, 3.0, 4.0]
    assert [line["tokens_per_second"] for line in metrics.read(tmp_path)] == [None, 32.0, TOKENS / 3, 16.0]


def test_step_time_is_the_mean_of_the_steps_since_the_last_line(reporter_of, clock, tmp_path):
    reporter = reporter_of(log_every=4)
    for step, seconds in enumerate([60, 1, 2, 3, 2, 2, 2, 4], start=1):
        reporter.dispatched(step, values())
        clock.now += seconds
        if step == 6:  # a save at a step without a line
            reporter.fetch()
            with reporter.pause():
                clock.now += 900
            reporter.log()
    reporter.fetch()
    reporter.log()
    lines = {line["step"]: line["step_seconds"] for line in metrics.read(tmp_path)}
    assert lines == {1: None, 4: (1 + 2 + 3) / 3, 8: (2 + 2 + 2 + 4) / 4}


def test_what_experts_do_is_written_where_there_are_any(reporter_of, clock, tmp_path):
    of_experts = {name: 0.5 + i for i, name in enumerate(report.OF_EXPERTS)}
    for step, more in ((1, of_experts), (2, {})):
        reporter = reporter_of(step=step - 1)
        reporter.dispatched(step, values(**more))
        reporter.fetch()
        reporter.log()
    first, second = metrics.read(tmp_path)
    assert of_experts.items() <= first.items()
    assert not set(of_experts) & set(second)


def test_pause_at_the_first_step_is_not_counted_in_the_second(reporter_of, clock, tmp_path):
    reporter = reporter_of()
    reporter.dispatched(1, values())
    clock.now += 60
    reporter.fetch()
    with reporter.pause():
        clock.now += 500
    reporter.log()
    reporter.dispatched(2, values())
    clock.now += 2
    reporter.fetch()
    reporter.log()
    assert [line["step_seconds"] for line in metrics.read(tmp_path)] == [None, 2.0]


def test_first_step_has_no_speed_and_says_when_it_was_done(reporter_of, clock, tmp_path, capsys):
    reporter = reporter_of(step=40)
    reporter.dispatched(41, values())
    clock.now += 12.34
    reporter.fetch()
    reporter.log()
    (line,) = metrics.read(tmp_path)
    assert (line["tokens_per_second"], line["step_seconds"], line["mfu"]) == (None, None, None)
    out = capsys.readouterr().out
    assert "first step done 12.3 s after the start" in out
    assert "tok/s" not in out


def test_mfu_matches_a_hand_computed_case(reporter_of, clock, tmp_path, monkeypatch):
    # A layer: q, k, v and output 8 x 4 x (2 + 2 + 2) = 192 weights, MLP 3 x 8 x 16 = 384; 2 FLOPs each: 1152. Keys
    # seen (1 + 2 + 3 + 4) / 4 = 2.5, times 4 x 2 heads x 4: 80. Two layers 2464, head 2 x 8 x 32 = 512, forward 2976,
    # with the backward pass 8928. 64 tokens in 2 s on two devices of 1e6 FLOP/s.
    monkeypatch.setattr(devices, "peak_flops", {"cpu": 1e6}.get)
    mesh = types.SimpleNamespace(devices=np.array(jax.devices()[:2]))
    reporter = reporter_of(mesh=mesh)
    for step in (1, 2):
        reporter.dispatched(step, values())
        clock.now += 2
    reporter.fetch()
    reporter.log()
    assert metrics.read(tmp_path)[-1]["mfu"] == pytest.approx(8928 * 32 / 2e6, rel=1e-12)


def test_mfu_of_an_unknown_device_is_null(reporter_of, clock, tmp_path, capsys):
    reporter = reporter_of()
    for step in (1, 2):
        reporter.dispatched(step, values())
        clock.now += 2
    reporter.fetch()
    reporter.log()
    assert metrics.read(tmp_path)[-1]["mfu"] is None
    assert "mfu" not in capsys.readouterr().out


def test_eta_is_the_step_time_times_the_steps_left(reporter_of, clock, capsys):
    reporter = reporter_of(step=90)
    for step in (91, 92):
        reporter.dispatched(step, values())
        clock.now += 10
    reporter.fetch()
    reporter.log()
    assert "eta 1:20" in capsys.readouterr().out


def test_only_steps_to_log_are_written_and_each_once(reporter_of, clock, tmp_path):
    reporter = reporter_of(step=82, log_every=5)
    for step in range(83, 101):
        reporter.dispatched(step, values(loss=float(step)))
        clock.now += 1
        if step == 97:
            reporter.fetch()
            reporter.validation_loss = 1.5
            reporter.log()
    reporter.fetch()
    reporter.log()
    reporter.log()
    lines = metrics.read(tmp_path)
    assert [line["step"] for line in lines] == [83, 85, 90, 95, 97, 100]
    assert [line["loss"] for line in lines] == [line["step"] for line in lines]
    assert [line["step"] for line in lines if "validation_loss" in line] == [97]


def test_a_step_is_reported_only_when_the_next_is_dispatched(reporter_of, clock, tmp_path):
    reporter = reporter_of()
    reporter.dispatched(1, values())
    assert metrics.read(tmp_path) == []
    reporter.dispatched(2, values())
    assert [line["step"] for line in metrics.read(tmp_path)] == [1]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_stops_the_run_with_one_line(reporter_of, clock, tmp_path, name, value):
    reporter = reporter_of(log_every=50, max_skipped=0)
    reporter.dispatched(1, values())
    reporter.last_good = 2
    reporter.dispatched(3, values(**{name: value}))
    clock.now += 1
    with pytest.raises(RunFailed) as failed:
        reporter.dispatched(4, values())
    message = str(failed.value)
    assert message.startswith(
        f"{name} is {value} at step 3; kept: checkpoint of step 2 in {tmp_path}; tpu-train blame "
    )
    assert " --step=3 names the first bad tensor; " in message
    assert "\n" not in message
    assert [line["step"] for line in metrics.read(tmp_path)] == [1, 3]


def test_a_run_that_fails_before_its_first_checkpoint_says_that_none_is_kept(reporter_of, clock):
    reporter = reporter_of(max_skipped=0)
    reporter.dispatched(1, values(loss=math.nan))
    with pytest.raises(RunFailed, match="at step 1; kept: no checkpoint in"):
        reporter.fetch()


def test_the_failing_step_is_in_the_metrics(reporter_of, clock, tmp_path):
    reporter = reporter_of(max_skipped=0)
    reporter.dispatched(1, values(loss=math.nan, skipped=1))
    with pytest.raises(RunFailed):
        reporter.fetch()
    assert [(line["step"], line["loss"], line["skipped"]) for line in metrics.read(tmp_path)] == [(1, None, 1)]


def test_skipped_steps_are_said_and_written_and_one_too_many_in_a_row_stops_the_run(
    reporter_of, clock, tmp_path, capsys
):
    reporter = reporter_of(log_every=50, max_skipped=2)
    finite = [True, False, False, True, False, False, False]

    def step(number):
        loss = 2.0 if finite[number - 1] else math.nan
        reporter.dispatched(number, values(loss=loss, skipped=finite[:number].count(False)))
        clock.now += 1
        reporter.fetch()
        reporter.log()

    for number in range(1, 7):
        step(number)
    with pytest.raises(
        RunFailed, match=r"^loss is nan at step 7, and the 2 step\(s\) before it were skipped too; kept"
    ):
        step(7)
    written = {line["step"]: line["skipped"] for line in metrics.read(tmp_path)}
    assert written == {1: 0, 2: 1, 3: 2, 5: 3, 6: 4, 7: 5}
    said = capsys.readouterr().out
    assert "step 3 changed nothing: loss is nan (2 in a row of at most 2)\n" in said
    assert "step 5 changed nothing: loss is nan (1 in a row of at most 2)\n" in said
    assert "skipped 4" in said


def test_a_spike_is_told_from_a_nan(reporter_of, clock, capsys):
    reporter = reporter_of(max_skipped=1, spike_factor=5.0)
    spike = {"grad_norm": 12.34, "typical_norm": 1.5, "updated": 0.0}
    reporter.dispatched(1, values(**spike))
    reporter.dispatched(2, values(**spike))
    clock.now += 1
    why = "grad_norm 12.34 is over 5 times its median 1.5 (run.spike_factor)"
    assert f"step 1 changed nothing: {why} (1 in a row of at most 1)\n" in capsys.readouterr().out
    with pytest.raises(RunFailed) as failed:
        reporter.fetch()
    assert str(failed.value).startswith(f"{why} at step 2, and the 1 step(s) before")


def test_float16_overflows_lower_the_scale_and_stop_nothing_but_a_nan_loss_does(reporter_of, clock, tmp_path, capsys):
    reporter = reporter_of(max_skipped=0)
    for step in range(1, 6):
        reporter.dispatched(step, values(grad_norm=math.inf, loss_scale=2.0 ** (16 - step), skipped=step))
        clock.now += 1
    assert reporter.skipped_in_row == 0
    assert "changed nothing" not in capsys.readouterr().out
    reporter.dispatched(6, values(loss=math.nan, loss_scale=16384.0))
    clock.now += 1
    assert [line["loss_scale"] for line in metrics.read(tmp_path)] == [2.0**15, 2.0**14, 2.0**13, 2.0**12, 2.0**11]
    with pytest.raises(RunFailed, match="loss is nan at step 6"):
        reporter.fetch()


def test_float16_whose_gradients_overflow_without_a_scale_stops(reporter_of, clock):
    reporter = reporter_of(max_skipped=0)
    reporter.dispatched(1, values(grad_norm=math.inf, loss_scale=1.0))
    with pytest.raises(RunFailed, match="grad_norm is inf at step 1"):
        reporter.fetch()


def test_only_the_first_process_prints_and_writes(reporter_of, clock, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    reporter = reporter_of()
    reporter.dispatched(1, values())
    reporter.fetch()
    reporter.log()
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_chart_shows_both_losses_and_is_written(tmp_path):
    with metrics.MetricsWriter(tmp_path, 0) as writer:
        for step in range(1, 6):
            writer.write(
                step, {"loss": 6.0 - step, "validation_loss": 6.5 - step} if step % 2 else {"loss": 6.0 - step}
            )
    shown = report.write_charts(tmp_path)
    assert shown.splitlines()[-1] == str(tmp_path / "loss.png")
    assert "training 1" in shown
    assert "validation 1.5" in shown
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_chart_of_a_run_without_a_finite_loss_says_so(tmp_path):
    with metrics.MetricsWriter(tmp_path, 0) as writer:
        writer.write(1, {"loss": math.nan})
    assert report.write_charts(tmp_path) == "no finite loss to draw"
    assert not (tmp_path / "loss.png").exists()


def test_tokens_of_a_mixtures_sources_are_those_of_the_step_they_stand_by(reporter_of, tmp_path, monkeypatch):
    reporter = reporter_of(log_every=2)
    # The other process has other rows; a third holds the same rows as this one.
    others = lambda sources: [list(sources), [4, {"web": 1, "books": 2}], list(sources)]  # noqa: E731
    monkeypatch.setattr(report.processes, "from_all", others)
    for step in range(1, 5):
        reporter.dispatched(step, values(), (0, {"web": 30 * step, "books": 10 * step}))
    reporter.fetch()
    reporter.log()
    lines = [(line["step"], line["tokens_web"], line["tokens_books"]) for line in metrics.read(tmp_path)]
    assert lines == [(1, 31, 12), (2, 61, 22), (4, 121, 42)]
