"""What a run says of itself: each step's metrics, one step late, checked, timed, written and printed."""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from tpu_train import chart, devices, goodput, metrics, paths, processes, stragglers
from tpu_train.config import Config
from tpu_train.flops import train_flops_per_token

Sources = tuple[int, dict[str, int]]  # see data.position.Batches.of_sources
OF_EXPERTS = ("load_imbalance", "load_imbalance_worst", "balance_loss", "dropped_share")  # of models/balance.py


class RunFailed(Exception):
    """The run can't go on, though its input was right; one line that says why and what is kept."""


def say(line: str) -> None:
    """Prints on the first process only."""
    if jax.process_index() == 0:
        print(line, flush=True)


class Reporter:
    """Holds the metrics of the step under way until the next is dispatched, so that reading them makes nothing wait.

    The time between two fetches is true step time: a fetch returns when its step is done. What happens inside
    `pause` is not counted, nor is the first step, which compiles.
    """

    def __init__(self, config: Config, mesh: jax.sharding.Mesh, step: int, start_time: float, clock: goodput.Clock):
        self.validation_loss: float | None = None
        self.last_good = step or None  # the newest checkpoint
        self.skipped_in_row = 0  # since the start of this process; a float16 step that overflowed is not one
        self._config, self._start_time, self._clock = config, start_time, clock
        workdir, speaks = paths.at(config.run.workdir), jax.process_index() == 0
        self._writer = metrics.MetricsWriter(workdir, step) if speaks else None
        self._ledger = goodput.Ledger(workdir, step) if speaks else None
        self._flops_per_token = train_flops_per_token(config.model, config.data.seq_len)
        peak = devices.peak_flops(mesh.devices.flat[0].device_kind)
        self._peak_flops = None if peak is None else peak * mesh.devices.size
        self._first_step = step + 1
        self._pending: tuple[int, dict[str, jax.Array], Sources | None] | None = None
        self._fetched: tuple[int, dict[str, float], Sources | None] | None = None
        self._timed_from = 0.0
        self._timed_steps, self._timed_tokens = 0, 0.0
        self._step_seconds: float | None = None
        self._waited, self._data_before = 0.0, 0.0  # for the device, since the last line; for data, until then
        self._stragglers = stragglers.Stragglers(mesh) if jax.process_count() > 1 else None

    def dispatched(self, step: int, values: dict[str, jax.Array], sources: Sources | None = None) -> None:
        """Reports the step before this one and takes this one's metrics, without waiting for them.

        `sources` are the `of_sources` of a mixture's batches up to this step.
        """
        self._clock.dispatched(values)
        previous, self._pending = self._pending, (step, values, sources)
        if previous is not None:
            self._fetch(*previous)
            self.log()

    def fetch(self) -> None:
        """Waits for the step under way. Raises RunFailed if one more was skipped than run.max_skipped allows."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._fetch(*pending)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """For work between steps; call `fetch` first."""
        began = time.monotonic()
        yield
        self._timed_from += time.monotonic() - began

    def log(self) -> None:
        """Writes and prints the fetched step if it is one to log."""
        if self._fetched is None:
            return
        (step, values, sources), self._fetched = self._fetched, None
        last = self._config.run.steps
        validation_loss, self.validation_loss = self.validation_loss, None
        asked = step % self._config.run.log_every == 0 or step in (self._first_step, last)
        if not asked and validation_loss is None and not self.skipped_in_row:
            return
        line: dict[str, float | None] = {name: values[name] for name in ("loss", "learning_rate", "grad_norm")}
        line |= self._speed(step)
        line |= {name: values[name] for name in ("loss_scale", *OF_EXPERTS) if name in values}
        line["skipped"] = int(values["skipped"])
        if sources is not None:
            parts = dict(processes.from_all(sources))  # by rows: processes may hold the same
            line |= {f"tokens_{name}": sum(tokens[name] for tokens in parts.values()) for name in sources[1]}
        self._clock.settle()
        if self._ledger is not None:
            line["goodput"] = round(self._ledger.goodput(self._clock.seconds), 4)
            self._ledger.write(step, self._clock.seconds)
        if validation_loss is not None:
            line["validation_loss"] = validation_loss
        if self._writer is not None:
            self._writer.write(step, line)
        eta = None if self._step_seconds is None else self._step_seconds * (last - step)
        say(metrics.format_progress(step, last, line, eta))
        if step == self._first_step:
            say(f"first step done {time.monotonic() - self._start_time:.1f} s after the start")

    def failure(self, what: str, first_bad: int | None = None) -> str:
        """One line for RunFailed: what happened, what is kept, what may help; `first_bad` is a step to look into."""
        kept = f"checkpoint of step {self.last_good}" if self.last_good else "no checkpoint"
        workdir = self._config.run.workdir
        blame = f"tpu-train blame --workdir={workdir} --step={first_bad} names the first bad tensor; "
        return (
            f"{what}; kept: {kept} in {workdir}; {blame if first_bad else ''}"
            "try a lower optim.peak_lr or more optim.warmup_steps"
        )

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is on its way: from there a next start would go on."""
        self.last_good = step
        self._clock.settle(all_done=True)
        if self._ledger is not None:
            self._ledger.write(step, self._clock.seconds)

    def say_time(self) -> None:
        """Where the time went; the last line of a run's own."""
        slow = self._stragglers.last() if self._stragglers is not None else None
        if slow is not None:
            say(slow)
        self._clock.settle(all_done=True)
        if self._ledger is not None and self._first_step <= self._config.run.steps:
            say(f"time: {self._ledger.summary(self._clock.seconds)}")

    def flush(self) -> None:
        """Before a checkpoint: a start from there does not write the lines up to it again. Raises OSError."""
        for file in (self._ledger, self._writer):
            if file is not None:
                file.flush()

    def close(self) -> None:
        """Closes the files."""
        if self._ledger is not None:
            self._ledger.flush()
        if self._writer is not None:
            self._writer.close()

    def _fetch(self, step: int, on_device: dict[str, jax.Array], sources: Sources | None) -> None:
        began = time.monotonic()
        values = {name: float(value) for name, value in jax.device_get(on_device).items()}
        now = time.monotonic()
        self._waited += now - began
        if step == self._first_step:
            self._timed_from, self._waited = now, 0.0
            self._data_before = self._clock.host_seconds("data")
        else:
            self._timed_steps += 1
            self._timed_tokens += values["tokens"]
        self._fetched = (step, values, sources)
        self._count_skipped(step, values)

    def _count_skipped(self, step: int, values: dict[str, float]) -> None:
        why = why_skipped(values, self._config.run.spike_factor)
        if why is None:
            self.skipped_in_row = 0
            return
        before, self.skipped_in_row = self.skipped_in_row, self.skipped_in_row + 1
        if before >= self._config.run.max_skipped:
            self.log()
            also = f", and the {before} step(s) before it were skipped too" if before else ""
            raise RunFailed(self.failure(f"{why} at step {step}{also}", first_bad=step - before))
        say(f"step {step} changed nothing: {why} ({before + 1} in a row of at most {self._config.run.max_skipped})")

    def _say_slow(self, step: int, seconds: float, processes: stragglers.Stragglers) -> None:
        data, steps = self._clock.host_seconds("data"), self._timed_steps
        own = max(0.0, seconds - self._waited) / steps
        said = processes.report(step, own, (data - self._data_before) / steps, seconds / steps)
        self._waited, self._data_before = 0.0, data
        if said is not None:
            say(said)

    def _speed(self, step: int) -> dict[str, float | None]:
        """tokens_per_second, step_seconds and mfu since the last call; None before the second step."""
        now = time.monotonic()
        if not self._timed_steps:
            return {"tokens_per_second": None, "step_seconds": None, "mfu": None}
        seconds = now - self._timed_from
        if self._stragglers is not None:
            self._say_slow(step, seconds, self._stragglers)
        tokens_per_second = self._timed_tokens / seconds
        self._step_seconds = seconds / self._timed_steps
        mfu = None if self._peak_flops is None else tokens_per_second * self._flops_per_token / self._peak_flops
        self._timed_from, self._timed_steps, self._timed_tokens = now, 0, 0.0
        return {"tokens_per_second": tokens_per_second, "step_seconds": self._step_seconds, "mfu": mfu}


def why_skipped(values: dict[str, float], spike_factor: float | None) -> str | None:
    """Why the step of these metrics changed nothing; None if it did, or if float16's loss scale will mend it."""
    if values["updated"]:
        return None
    for name in ("loss", "grad_norm"):
        if not math.isfinite(values[name]):
            overflowed = name == "grad_norm" and values.get("loss_scale", 1.0) > 1.0
            return None if overflowed else f"{name} is {values[name]}"
    return (
        f"grad_norm {values['grad_norm']:.4g} is over {spike_factor:g} times its median {values['typical_norm']:.4g} "
        "(run.spike_factor)"
    )


def write_charts(workdir: Path) -> str:
    """Writes WORKDIR/loss.png from metrics.jsonl; returns the chart for the terminal and the file's path."""
    lines = metrics.read(workdir)
    series: dict[str, Any] = {}
    for name, key in (("training", "loss"), ("validation", "validation_loss")):
        points = [(line["step"], line[key]) for line in lines if key in line]
        if points:
            series[name] = tuple(zip(*points, strict=True))
    drawn = chart.write_png(workdir / "loss.png", series, title=f"Loss of {workdir.name}")
    return f"{chart.terminal_chart(series)}\n{workdir / 'loss.png'}" if drawn else "no finite loss to draw"
