"""Metrics of a run: WORKDIR/metrics.jsonl, the same numbers for TensorBoard, and the progress line.

metrics.jsonl holds one object a line, `{"step": 120, "loss": 2.31, ...}`, and is the record; TensorBoard's files beside
it are a view. Each line is flushed as it is written, so a killed run loses none, and a reader sees whole lines.
"""

import contextlib
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_train import paths
from tpu_train.config import UserError

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends to WORKDIR/metrics.jsonl and WORKDIR/tensorboard. For one process of a run only.

    On opening, the lines of steps after `resume_step` go, since those steps run again; so does a last line that was cut
    short. Everything else stays byte for byte. A damaged line elsewhere raises UserError and nothing is changed.

    Lines that a full or absent disk refuses wait until it takes them; TensorBoard does without them. In a bucket there
    is no TensorBoard, and lines are there within 10 s, or when `flush` is called.
    """

    def __init__(self, workdir: Path, resume_step: int) -> None:
        workdir.mkdir(parents=True, exist_ok=True)
        path = workdir / FILE_NAME
        _keep_up_to(path, resume_step)
        self._file = paths.open_to_append(path)
        self._waiting = b""
        self._refusal: OSError | None = None  # why
        self._remote = paths.is_remote(workdir)
        self._tensorboard_dir = workdir / "tensorboard"
        self._resume_step = resume_step
        self._tensorboard: Any = None

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """One line. JSON has no NaN or infinity: they become null, like None. TensorBoard gets finite values only."""
        if "step" in values:
            raise ValueError("values holds 'step', which write() puts in itself")
        numbers = {name: _finite(value) for name, value in values.items()}
        line = json.dumps({"step": int(step), **numbers}, allow_nan=False)
        self._waiting += line.encode() + b"\n"
        self._write_waiting()
        with contextlib.suppress(OSError):
            for name, number in numbers.items():
                if number is not None and not self._waiting and not self._remote:
                    self._tensorboard_writer().add_scalar(name, number, step)

    def flush(self) -> None:
        """What was written is where it belongs. Raises OSError if the disk or the bucket refuses; then it waits."""
        self._write_waiting(flush=True)
        if self._refusal is not None:
            raise OSError(self._refusal.errno, f"{self._refusal.strerror}, and lines of {FILE_NAME} wait")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.flush()
        with contextlib.suppress(OSError):
            self._file.close()
        if self._tensorboard is not None:
            with contextlib.suppress(OSError):
                self._tensorboard.close()

    def _write_waiting(self, flush: bool = False) -> None:
        try:
            while self._waiting:  # a disk that fills up takes a part
                self._waiting = self._waiting[self._file.write(self._waiting) :]
            if flush:
                self._file.flush()
            self._refusal = None
        except OSError as error:
            if self._refusal is None:
                print(f"tpu-train: {self._file.name}: {error.strerror}; its lines wait", file=sys.stderr, flush=True)
            self._refusal = error

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _tensorboard_writer(self) -> Any:
        if self._tensorboard is None:
            from tensorboardX import SummaryWriter  # here, because it takes part of a second to import

            # purge_step tells TensorBoard to forget what an earlier run wrote from that step on.
            # Its thread ends when a disk is full, and a short queue would then hold up the run.
            self._tensorboard = SummaryWriter(
                str(self._tensorboard_dir), max_queue=30_000, purge_step=self._resume_step + 1, flush_secs=10
            )
        return self._tensorboard


def read(workdir: Path) -> list[dict[str, Any]]:
    """The lines of WORKDIR/metrics.jsonl in order, none if there is no file; safe while a run is writing it."""
    path = workdir / FILE_NAME
    return [record for _, record in _parse(path, path.read_bytes())] if path.exists() else []


def format_progress(step: int, steps: int, values: Mapping[str, float | None], eta_seconds: float | None) -> str:
    """One line for the terminal, of the values that are there.

    Reads the names that metrics.jsonl uses (mfu as a fraction); others are not shown.
    """
    shown = {
        "loss": lambda v: f"loss {v:.4f}",
        "validation_loss": lambda v: f"validation {v:.4f}",
        "skipped": lambda v: f"skipped {v}" if v else None,
        "learning_rate": lambda v: f"lr {v:.1e}",
        "grad_norm": lambda v: f"grad {v:.2f}" if abs(v) < 1000 else f"grad {v:.1e}",
        "tokens_per_second": lambda v: f"{_with_unit(v)} tok/s",
        "step_seconds": lambda v: f"{v * 1e3:.1f} ms/step",
        "mfu": lambda v: f"mfu {v:.1%}",
    }
    parts = [f"step {step:>{len(str(steps))}}/{steps}"]
    told = [form(value) for name, form in shown.items() if (value := values.get(name)) is not None]
    parts += [text for text in told if text is not None]
    if eta_seconds is not None and math.isfinite(eta_seconds):
        parts.append(f"eta {format_duration(eta_seconds)}")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """0:14, 3:05, 2:03:05 or 1d 02:03:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def _with_unit(value: float) -> str:
    # 999.95 would round to 1000.0 of the smaller unit.
    for limit, divisor, unit in ((999.5, 1, ""), (999_950, 1e3, "k"), (999_950_000, 1e6, "M")):
        if value < limit:
            return f"{value / divisor:.1f}{unit}" if unit else f"{value:.0f}"
    return f"{value / 1e9:.1f}B"


def _finite(value: float | None) -> float | None:
    if value is None or isinstance(value, int):
        return value
    number = float(value)  # also of numpy's and JAX's scalars
    return number if math.isfinite(number) else None


def _parse(path: Path, content: bytes) -> list[tuple[bytes, dict[str, Any]]]:
    """(line, its object) for every line but a last one that was cut short; raises UserError on any other bad line."""
    lines = content.split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise ValueError("not an object with a whole number for step")
        except ValueError as error:
            if number == len(lines):  # no newline after it: its write never finished
                break
            raise UserError(
                f"{path}:{number} is not a line of metrics ({error}); mend or remove that line, or use another workdir"
            ) from None
        records.append((line, record))
    return records


def _keep_up_to(path: Path, last_step: int) -> None:
    """Drops later steps and a torn last line. The file is replaced in one move, so a kill leaves the old or the new."""
    if not path.exists():
        return
    content = path.read_bytes()
    kept = b"".join(line + b"\n" for line, record in _parse(path, content) if record["step"] <= last_step)
    if kept == content:
        return
    paths.write_whole(path, kept)
