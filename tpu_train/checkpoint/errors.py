"""A save that failed: what is said of it, and whether its storage was the reason."""

import os
import re
import sys

import jax

_OF_TENSORSTORE = re.compile(r"os_error_code=|OS error \d|^(UNAVAILABLE|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED):")


class SaveFailed(Exception):
    """A checkpoint was not written; one line that says which, why and what is kept. `main` prints it, exit code 1.

    `by_storage`: the file system refused it, which may pass.
    """

    def __init__(self, line: str, by_storage: bool = False):
        super().__init__(line)
        self.by_storage = by_storage


def reason_of(error: Exception) -> str:
    """The first line of its message; of TensorStore's long ones the system's own error."""
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        return f"[Errno {found[1]}] {os.strerror(int(found[1]))}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_of_storage(error: BaseException | None) -> bool:
    """Whether the file system refused; TensorStore's errors are ValueErrors that quote the system's or name a state."""
    while error is not None:
        if isinstance(error, OSError) or _OF_TENSORSTORE.search(str(error)):
            return True
        error = error.__cause__
    return False


def warn(line: str) -> None:
    """Prints to stderr, in process 0 only."""
    if jax.process_index() == 0:
        print("tpu-train:", line, file=sys.stderr, flush=True)
