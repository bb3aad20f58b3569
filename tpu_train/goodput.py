"""Where a run's wall time goes: the share of it spent in steps, and what took the rest, over restarts too.

Goodput is the time in steps that count over all time that processes of the run lived, as ml-goodput-measurement
(github.com/AI-Hypercomputer) has it; the rest is named after what it went to:

    start     imports, devices, data set-up      compile   waiting for the compiler
    restore   a checkpoint or first weights      data      the device was idle and the next batch not there
    eval      validation                         save      what a save keeps the loop from, and the last one's end
    profile   starting and writing a trace
    redone    steps that a kill took and the next start repeated
    other     all else with the device idle

The loop runs a step ahead of the device, so what the host does is mostly hidden behind a step. A thread notes when each
step is done; the device was busy from when it was handed a step, or the end of the step before, until then. That time
is in steps, whatever the host did meanwhile, and only what is left goes to the host's work. Time in which no process of
the run lived is not known and not counted.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from tpu_train import paths
from tpu_train.metrics import format_duration
from tpu_train.watchdog import START_FACTOR, WAITING_FACTOR, Watchdog

FILE_NAME = "goodput.jsonl"
BEFORE_STEPS = ("start", "compile", "restore")
Span = tuple[str, float, float]  # what the host did, from, to


class Clock:
    """What the run is doing: `enter` names it. Also keeps the watchdog from taking progress for a hang.

    With `shared`, several processes make up the run: one that waits in a step for another, whose data hang, is given
    more time than that one, so that the watchdog names the other.
    """

    def __init__(self, start_time: float, watchdog: Watchdog, *, shared: bool = False):
        self._watchdog, self._waiting_factor = watchdog, WAITING_FACTOR if shared else 1.0
        self.seconds: dict[str, float] = {}
        self._doing, self._since = "start", start_time
        self._step = 0
        self._idle_since = 0.0  # the end of the last step that was counted
        self._spans: list[Span] = []
        self._host: dict[str, float] = {}
        self._steps: list[tuple[float, Future[float]]] = []
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="step-end")

    def enter(self, what: str, step: int | None = None) -> None:
        """From now on the host does `what`, one of the names above or "step"."""
        self._end_span()
        self._doing = what
        self._step = self._step if step is None else step
        self._watchdog.watch(*self._watched(what))

    def alive(self, x: Any) -> Any:
        """`x`; what is done now has come a piece further."""
        self._watchdog.watch(*self._watched(self._doing))
        return x

    def dispatched(self, values: Any) -> None:
        """A step was handed over that ends when `values` are there; since `enter("step")`, if that is what is done."""

        def end() -> float:
            jax.block_until_ready(values)
            return time.monotonic()

        # Not from now: where a device runs a step before the call returns, as CPUs may, that was the step.
        began = self._since if self._doing == "step" else time.monotonic()
        self.settle()  # so that little is ever left to settle
        self._steps.append((began, self._waiter.submit(end)))

    def settle(self, all_done: bool = False) -> None:
        """Counts the time up to the dispatch of the step under way, or up to now if there is none (`all_done`)."""
        until, busy = math.inf, []
        while self._steps:
            began, ended = max(self._steps[0][0], self._idle_since), self._steps[0][1]
            if len(self._steps) == 1 and not all_done and not ended.done():
                until = began
                break
            self._steps.pop(0)
            self._idle_since = ended.result()
            busy.append((began, self._idle_since))
        self._end_span()
        settled, self._spans = cut(self._spans, until)
        for name, seconds in attribute(settled, busy).items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def host_seconds(self, what: str) -> float:
        """How long the host did `what` so far, hidden behind steps or not; what it does now not counted."""
        return self._host.get(what, 0.0)

    def close(self) -> None:
        self._watchdog.close()
        self._waiter.shutdown(wait=False)

    def _end_span(self) -> None:
        now = time.monotonic()
        self._spans.append((self._doing, self._since, now))
        self._host[self._doing] = self._host.get(self._doing, 0.0) + now - self._since
        self._since = now

    def _watched(self, what: str) -> tuple[str, float]:
        if what in BEFORE_STEPS:
            return f"{what}, before the first step,", START_FACTOR
        if what == "profile":
            return f"the profile at step {self._step}", START_FACTOR
        if what == "data":  # each process has its own
            return f"data at step {self._step}", 1.0
        return f"{what} at step {self._step}" if what != "step" else f"step {self._step}", self._waiting_factor


def cut(spans: Iterable[Span], until: float) -> tuple[list[Span], list[Span]]:
    """(what lies before `until`, what lies after)."""
    spans = list(spans)
    before = [(name, began, min(ended, until)) for name, began, ended in spans if began < until]
    after = [(name, max(began, until), ended) for name, began, ended in spans if ended > until]
    return before, after


def attribute(spans: Iterable[Span], busy: list[tuple[float, float]]) -> dict[str, float]:
    """Seconds by name: of `spans`, what lies in one of `busy` (which don't overlap) is "step"; the rest keeps its name.

    A host that waits for a step with the device idle is "other".
    """
    seconds: dict[str, float] = {}
    for name, began, ended in spans:
        inside = sum(max(0.0, min(ended, b) - max(began, a)) for a, b in busy)
        outside = ended - began - inside
        name = "other" if name == "step" else name
        for to, some in (("step", inside), (name, outside)):
            if some > 0:
                seconds[to] = seconds.get(to, 0.0) + some
    return seconds


class Ledger:
    """WORKDIR/goodput.jsonl: what each start of a run spent so far, a line a logged or saved step.

    One process writes it. `earlier` holds the seconds of the starts before this one, which goes on from `step`; their
    steps past the one from which the next start went on are "redone".
    """

    def __init__(self, workdir: Path, step: int):
        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / FILE_NAME
        lines = _read(self._path)
        self._remote = paths.open_to_append(self._path) if paths.is_remote(self._path) else None
        if self._remote is None:
            with self._path.open("a+b") as file:
                if file.tell() and self._path.read_bytes()[-1:] != b"\n":
                    file.write(b"\n")  # after a line that was cut short
        self.start = 1 + max((line["start"] for line in lines), default=0)
        self._from = step
        self.earlier, self.redone_steps = _sum(lines, step)

    def write(self, step: int, seconds: dict[str, float]) -> None:
        rounded = {name: round(value, 3) for name, value in seconds.items()}
        line = json.dumps({"start": self.start, "from": self._from, "step": step, "seconds": rounded})
        # A disk that refuses this line is no reason to stop.
        with contextlib.suppress(OSError):
            if self._remote is not None:
                self._remote.write(f"{line}\n".encode())
                return
            with self._path.open("a") as file:  # each time, since the folder may come back
                file.write(line + "\n")

    def flush(self) -> None:
        """What was written is where it belongs, unless a bucket refuses."""
        with contextlib.suppress(OSError):
            if self._remote is not None:
                self._remote.flush()

    def goodput(self, seconds: dict[str, float]) -> float:
        """The share of steps that count in all time so far, with `seconds` of this start; from 0 to 1."""
        both = self._with(seconds)
        return both.get("step", 0.0) / max(sum(both.values()), 1e-9)

    def summary(self, seconds: dict[str, float]) -> str:
        """One line."""
        both = self._with(seconds)
        total = sum(both.values())
        rest = sorted(((s, name) for name, s in both.items() if name != "step" and s >= total / 1000), reverse=True)
        parts = ", ".join(f"{name} {s / total:.1%}" for s, name in rest)
        again = f"; {self.redone_steps} steps were done again" if self.redone_steps else ""
        starts = "" if self.start == 1 else f" over {self.start} starts"
        return f"{format_duration(total)}{starts}, {self.goodput(seconds):.1%} of it in steps; {parts}{again}"

    def _with(self, seconds: dict[str, float]) -> dict[str, float]:
        return {name: self.earlier.get(name, 0.0) + seconds.get(name, 0.0) for name in self.earlier | seconds}


def _sum(lines: list[dict[str, Any]], step: int) -> tuple[dict[str, float], int]:
    """(seconds of all starts by name, steps done again), where the start after the last goes on from `step`."""
    starts: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        starts.setdefault(line["start"], []).append(line)
    seconds: dict[str, float] = {}
    redone_steps = 0
    went_on = [lines[0]["from"] for lines in starts.values()] + [step]
    for lines, resumed in zip(starts.values(), went_on[1:], strict=True):
        last = lines[-1]
        spent = dict(last["seconds"])
        if last["step"] > resumed:
            kept = [line["seconds"].get("step", 0.0) for line in lines if line["step"] <= resumed]
            lost = spent.get("step", 0.0) - (kept[-1] if kept else 0.0)
            spent |= {"step": spent.get("step", 0.0) - lost, "redone": lost}
            redone_steps += last["step"] - max(resumed, last["from"])
        for name, value in spent.items():
            seconds[name] = seconds.get(name, 0.0) + value
    return seconds, redone_steps


def _read(path: Path) -> list[dict[str, Any]]:
    """Lines that are whole; a kill may have cut one short, and a figure of the past is not worth stopping a run for."""
    lines = []
    for text in path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
            ok = all(type(line[name]) is int for name in ("start", "from", "step"))
            if ok and all(isinstance(s, int | float) for s in line["seconds"].values()):
                lines.append(line)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return lines
