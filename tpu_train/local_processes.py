"""Starts the processes of one run on this machine and watches them; needs no jax.

Process 0 speaks for all. What the others write to stderr is kept and shown if they fail. The first that fails ends the
run: the rest get a moment to leave by themselves, since an error may be everyone's, and are then killed, since they may
be waiting for the lost one for ever.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from tpu_train.config import UserError
from tpu_train.watchdog import EXIT_CODE as HANGS

GRACE_SECONDS = 3.0  # after a failure
STOP_SECONDS = 30.0  # after one process left because of a signal


def wanted(count: int) -> bool:
    """Whether this process is the one to start the `count` processes of a run. Raises UserError on what can't be."""
    if count < 1:
        raise UserError(f"--processes={count} must be 1 or more")
    there = os.environ.get("TPU_TRAIN_PROCESSES")
    if count == 1 or there == str(count):
        return False
    if there not in (None, "", "1"):
        raise UserError(
            f"--processes={count} starts processes here, but TPU_TRAIN_PROCESSES={there} says they run already"
        )
    return True


def run(count: int, argv: Sequence[str]) -> int:
    """Runs `tpu-train` with `argv` (without the program) as `count` processes; returns the exit code of the run.

    That is the code of the first process that failed, or 128 + its signal. Ctrl-C and SIGTERM go to all of them.
    """
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)]
        children: list[subprocess.Popen] = []
        stack.callback(_kill, children)
        stack.enter_context(_forwarded_signals(children))
        address = f"127.0.0.1:{_free_port()}"
        for index in range(count):
            children.append(_start(index, count, address, argv, logs[index]))
        return _watch(children, logs)


def follow_parent() -> None:
    """In a process that `run` started: saves and leaves, as at SIGTERM, when its parent is gone."""

    def wait() -> None:
        os.read(0, 1)  # nothing is ever written
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ.get("TPU_TRAIN_FOLLOWS") == "stdin":
        threading.Thread(target=wait, daemon=True).start()


def _start(index: int, count: int, address: str, argv: Sequence[str], log: IO[bytes]) -> subprocess.Popen:
    environment = {"JAX_PLATFORMS": "cpu"} | os.environ  # of one accelerator they would each take all
    environment |= {
        "TPU_TRAIN_PROCESSES": str(count),
        "TPU_TRAIN_PROCESS_ID": str(index),
        "TPU_TRAIN_COORDINATOR": address,
        "TPU_TRAIN_FOLLOWS": "stdin",
    }
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tpu_train.main", *argv],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=None if index == 0 else subprocess.DEVNULL,
            stderr=None if index == 0 else log,
            start_new_session=True,  # else a terminal's Ctrl-C comes beside the one passed on, and two mean "at once"
        )
    except OSError as error:
        raise UserError(f"process {index} of {count} did not start: {error}") from None


def _watch(children: Sequence[subprocess.Popen], logs: Sequence[IO[bytes]]) -> int:
    ended: queue.Queue[int] = queue.Queue()

    def wait(index: int) -> None:
        children[index].wait()
        ended.put(index)

    for index in range(len(children)):
        threading.Thread(target=wait, args=(index,), daemon=True).start()
    for _ in children:
        index = ended.get()
        code = children[index].returncode
        if code:
            stopped = code in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            _end_rest(children, STOP_SECONDS if stopped else GRACE_SECONDS)
            if stopped and all(child.returncode == code for child in children):
                return code
            if code == HANGS:  # the one that hangs may not be the first to say so
                for other in set(range(1, len(children))) - {index}:
                    if children[other].returncode == HANGS:
                        _show(logs[other])
            return _failed(index, children, logs[index])
    return 0


def _end_rest(children: Sequence[subprocess.Popen], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and any(child.poll() is None for child in children):
        time.sleep(0.05)
    _kill(children)


def _kill(children: Sequence[subprocess.Popen]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
    for child in children:
        child.wait()


def _failed(index: int, children: Sequence[subprocess.Popen], log: IO[bytes]) -> int:
    """Shows what the process at `index` said, and who it was; returns its exit code."""
    code = children[index].returncode
    if code == 2 and children[0].returncode == 2:
        return 2  # bad input, which all found; process 0 has said so
    if index == 0 and code == 128 + signal.SIGPIPE:
        return code  # our reader went away, as `| head` does
    _show(log)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    print(f"tpu-train: process {index} of {len(children)} {how}; the others were stopped", file=sys.stderr)
    return 128 - code if code < 0 else code


def _show(log: IO[bytes]) -> None:
    log.seek(0)
    sys.stderr.write(log.read().decode(errors="replace"))


@contextlib.contextmanager
def _forwarded_signals(children: Sequence[subprocess.Popen]) -> Iterator[None]:
    def forward(number: int, _frame: Any) -> None:
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
