"""An iterator in a process of its own.

Not Grain's mp_prefetch: there (0.2.18) this process too holds the writing end of the pipe, so a worker that is killed
in the middle of a batch, which is most of the time, leaves it waiting for the rest for ever. Here that is an end of
file, and so is the end of this process for the worker.
"""

import multiprocessing
import signal
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

from tpu_train.config import UserError

_AHEAD = 2  # elements that a worker has ready, beside the one that it is sending


class WorkerDied(Exception):
    """A worker ended that should not have; one line that says how."""


class Worker:
    """The elements of `elements`, an IterDataset, read ahead in another process. What that raises is raised here."""

    def __init__(self, elements: Iterable[Any]):
        context = multiprocessing.get_context("spawn")
        self._receiving, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_send_all, args=(elements, sending), name="data worker", daemon=True)
        self._process.start()
        sending.close()

    def __next__(self) -> Any:
        try:
            element, error = self._receiving.recv()
        except (EOFError, OSError):
            self._process.join()
            raise WorkerDied(f"a data worker {_ended(self._process.exitcode or 0)}") from None
        if error is not None:
            raise error
        return element

    def close(self) -> None:
        """Ends it at once; it has nothing to lose."""
        self._process.kill()
        self._process.join()
        self._receiving.close()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    more = "; the kernel does that when memory runs out" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{more}"


def _send_all(elements: Iterable[Any], sending: Connection) -> None:
    from grain.experimental import ThreadPrefetchIterDataset

    # A terminal sends Ctrl-C to the workers too, while the run still needs their batches to stop well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        try:
            for element in ThreadPrefetchIterDataset(elements, prefetch_buffer_size=_AHEAD):
                sending.send((element, None))
        except BrokenPipeError:
            raise
        except Exception as error:
            if not isinstance(error, UserError):
                error.add_note(f"in a data worker:\n{traceback.format_exc()}")
            sending.send((None, error))
    except BrokenPipeError:
        pass  # the process that trains is gone
