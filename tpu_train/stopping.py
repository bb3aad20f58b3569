"""Ctrl-C and SIGTERM: a run finishes its step, saves and leaves, within checkpoint.stop_seconds."""

import contextlib
import dataclasses
import os
import signal as signals
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tpu_train import processes
from tpu_train.checkpoint import SAVE


@dataclasses.dataclass
class Stop:
    """The signal that asked this process to stop, and the one that all processes of the run stop for, if any."""

    signal: signals.Signals | None = None
    agreement: processes.Agreement | None = None  # None: this process is the whole run
    seconds: float = 0.0  # that stopping may take
    deadline: float | None = None  # on the monotonic clock, once asked to stop
    _agreed: int = 0

    @property
    def agreed(self) -> signals.Signals | None:
        if self.agreement is None:
            return self.signal
        return signals.Signals(self._agreed) if self._agreed else None

    def ask(self, other: int) -> int:
        """What any process asks for, in all at the same step: a signal's number, or `other`, SAVE or 0. Once a step."""
        asked = self.signal or other
        if self.agreement is not None:
            asked = self.agreement.ask(asked)
            self._agreed = asked if asked > SAVE else 0
            if self._agreed:
                self.begin()
        return asked

    def begin(self) -> None:
        """Time runs from here on."""
        self.deadline = self.deadline or time.monotonic() + self.seconds


@contextlib.contextmanager
def stop_signals(seconds: float, kept: Callable[[], str]) -> Iterator[Stop]:
    """Notes the first Ctrl-C or SIGTERM in the `Stop` it gives; one more of either acts as it would without us.

    If we are still here `seconds` later, the process ends with one line that has what `kept` returns, exit code 1.
    """
    stop, left = Stop(seconds=seconds), threading.Event()

    def note(number: int, _frame: Any) -> None:
        stop.signal = signals.Signals(number)
        stop.begin()
        restore()
        if jax.process_index() == 0:
            # Not print: the signal may have come in the middle of one, which may be waiting for its reader.
            _write(
                f"{stop.signal.name}: finishing this step and saving, {seconds:g} s at most; once more to stop at once"
            )

    def restore() -> None:
        for number, handler in before.items():
            signals.signal(number, handler)

    def watch() -> None:  # looks, since a handler may take no lock that the code it interrupts may hold
        while not left.wait(0.2):
            if stop.deadline is not None and time.monotonic() > stop.deadline:
                _write(f"tpu-train: the last save did not finish within checkpoint.stop_seconds={seconds:g}; {kept()}")
                os._exit(1)

    before = {number: signals.signal(number, note) for number in (signals.SIGINT, signals.SIGTERM)}
    threading.Thread(target=watch, name="stop deadline", daemon=True).start()
    try:
        yield stop
    finally:
        left.set()
        restore()


def _write(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
