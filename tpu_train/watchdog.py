"""Ends a process whose run hangs: every thread's stack to stderr, one line that says where, exit code 75.

A thread counts its own short waits since the run last said what it does. So neither a clock that is set nor a process
that was stopped for an hour (its waits stop too) looks like a hang, and a run that goes on to its next piece of work, a
step, a batch of validation or a save, starts again at 0. It needs the interpreter's lock, which JAX gives back wherever
it waits; native code that holds it for ever is not noticed.
"""

import faulthandler
import os
import sys
import threading

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: what failed may work when tried again
START_FACTOR = 4  # times run.hang_seconds before the first step, and to write a trace: both take long
WAITING_FACTOR = 1.5  # times run.hang_seconds where a process may wait for another that hangs


class Watchdog:
    """Watches what `watch` names until `close`; `seconds` None watches nothing."""

    def __init__(self, seconds: float | None, name: str = "this process"):
        self._seconds, self._name = seconds, name
        self._closed = threading.Event()
        self._what, self._limit, self._waited = "the start", 0.0, 0.0
        if seconds is not None:
            self.watch(self._what, START_FACTOR)
            threading.Thread(target=self._run, args=(seconds,), daemon=True, name="watchdog").start()

    def watch(self, what: str, factor: float = 1.0) -> None:
        """From now on `what` may take `factor` times the limit."""
        self._waited = 0.0
        self._what, self._limit = what, factor * (self._seconds or 0.0)

    def close(self) -> None:
        self._closed.set()

    def _run(self, seconds: float) -> None:
        tick = min(seconds / 20, 5.0)
        while not self._closed.wait(tick):
            self._waited += tick
            if self._waited > self._limit:
                self._bark()

    def _bark(self) -> None:
        sys.stderr.flush()
        faulthandler.dump_traceback(file=2, all_threads=True)
        line = (
            f"tpu-train: {self._name} hangs: {self._what} takes longer than {self._limit:g} s (run.hang_seconds="
            f"{self._seconds:g}); its threads' stacks are above; ending with exit code {EXIT_CODE}\n"
        )
        os.write(2, line.encode())
        os._exit(EXIT_CODE)
