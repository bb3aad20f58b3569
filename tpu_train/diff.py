"""Where two runs part: the first logged step with other numbers, and the first checkpoint with other arrays.

Numbers are compared as they are, bit for bit: two runs on the same mesh with the same config should have none that
differ (on a GPU with run.deterministic=true). What only tells of speed is not compared.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tpu_train import config as config_lib
from tpu_train import metrics, paths
from tpu_train.checkpoint import Checkpoints
from tpu_train.config import UserError

COMPARED = ("loss", "grad_norm", "learning_rate", "validation_loss", "loss_scale", "skipped")


@dataclasses.dataclass
class Part:
    """One thing that was compared: whether it differs, and the lines that say so."""

    differs: bool
    lines: list[str]


def show(first: str, second: str, limit: int) -> int:
    """Prints how the runs in two workdirs differ, `limit` arrays at most; returns 1 if numbers differ, else 0.

    Raises UserError where there is nothing to compare.
    """
    runs = paths.at(first), paths.at(second)
    for run in runs:
        if not (run / metrics.FILE_NAME).is_file() and not (run / "checkpoints").is_dir():
            raise UserError(f"{run} is no run: it has neither {metrics.FILE_NAME} nor checkpoints")
    if (runs[0] / "checkpoints").is_dir() and (runs[1] / "checkpoints").is_dir():
        with Checkpoints(runs[0], keep_last=None) as here, Checkpoints(runs[1], keep_last=None) as there:
            parts = [_configs(here, there), _metrics(*runs), _checkpoints(here, there, limit)]
    else:
        parts = [_metrics(*runs)]
    found = [part for part in parts if part is not None]
    if not any(part.lines for part in found if part is not parts[0] or len(parts) == 1):
        raise UserError(f"{runs[0]} and {runs[1]} have no logged step and no checkpoint in common")
    for part in found:
        print("\n".join(part.lines))
    return int(any(part.differs for part in found))


def _configs(here: Checkpoints, there: Checkpoints) -> Part | None:
    """Fields that differ; they alone don't make runs differ, since many change no number."""
    steps = here.latest(), there.latest()
    if steps[0] is None or steps[1] is None:
        return None
    pairs = config_lib.differences(here.saved_config(steps[0]), there.saved_config(steps[1]))
    lines = [f"  {name} = {a} | {b}" for name, a, b in pairs if name != "run.workdir"]
    return Part(False, [f"config: {len(lines)} field(s) differ", *lines] if lines else ["config: the same"])


def _metrics(first: Path, second: Path) -> Part:
    here, there = ({line["step"]: line for line in metrics.read(run)} for run in (first, second))
    both = sorted(set(here) & set(there))
    before = None
    for step in both:
        names = [name for name in COMPARED if name in here[step] and name in there[step]]
        other = [name for name in names if here[step][name] != there[step][name]]
        if other:
            after = f"the same up to step {before}, " if before is not None else ""
            lines = [f"metrics: {after}other at step {step}"]
            return Part(True, lines + [_number(name, here[step][name], there[step][name]) for name in other])
        before = step
    return Part(False, [f"metrics: the same at all {len(both)} steps that both logged"] if both else [])


def _number(name: str, a: float | None, b: float | None) -> str:
    text = f"  {name} = {a!r} | {b!r}".replace("None", "not finite")
    return text if a is None or b is None else f"{text}, apart by {abs(a - b):.3g}"


def _checkpoints(here: Checkpoints, there: Checkpoints, limit: int) -> Part:
    both = sorted(set(here.steps()) & set(there.steps()))
    before = None
    for step in both:
        lines = _arrays(here.arrays(step), there.arrays(step), limit)
        if _positions(here, step) != _positions(there, step):
            lines.append("  the position in the data")
        if lines:
            after = f"the same up to step {before}, " if before is not None else ""
            return Part(True, [f"checkpoints: {after}other at step {step}", *lines])
        before = step
    return Part(False, [f"checkpoints: the same at the steps {', '.join(map(str, both))}"] if both else [])


def _arrays(here: dict[str, Any], there: dict[str, Any], limit: int) -> list[str]:
    lines = []
    for name in sorted(set(here) | set(there)):
        if name not in here or name not in there:
            lines.append(f"  {name} is in the {'first' if name in here else 'second'} run alone")
            continue
        a, b = np.asarray(here[name]), np.asarray(there[name])
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            lines.append(f"  {name} is {a.dtype}{list(a.shape)} | {b.dtype}{list(b.shape)}")
        elif a.tobytes() != b.tobytes():
            with np.errstate(invalid="ignore", over="ignore"):
                apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
            largest = np.max(apart[np.isfinite(apart)], initial=0.0)
            lines.append(f"  {name}: {np.count_nonzero(apart)} of {a.size} values, apart by {largest:.3g} at most")
    more = len(lines) - limit
    return [*lines[:limit], *([f"  and {more} more (--arrays)"] if more > 0 else [])]


def _positions(checkpoints: Checkpoints, step: int) -> dict[str, bytes]:
    folder = checkpoints.directory / str(step) / "data"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("process_*.json"))}
