"""Who is there, before jax.distributed starts: its own wait ends in an abort that names nobody. Needs no jax.

Process 0 listens on the coordinator's port, which jax.distributed takes over afterwards. The others connect, say which
they are of how many, and wait for one line: that all are there, or what is wrong.
"""

import contextlib
import re
import socket
import time

from tpu_train.config import UserError

ALL_HERE = "all here"
ANSWER_SECONDS = 5.0  # for one that connected to say who it is, and beyond the limit for process 0 to answer


def hold(address: str, index: int, count: int, seconds: float) -> None:
    """Returns once processes 0 to `count` - 1 have met at `address`, host:port of process 0.

    Raises UserError after `seconds` with those that are missing, or where two claim one place or another count.
    """
    host, _, port = address.rpartition(":")
    if index:
        outcome = _answer((host, int(port)), index, count, seconds)
    else:
        outcome = _call((host if host.startswith("127.") else "", int(port)), count, seconds)
    if outcome != ALL_HERE:
        raise UserError(outcome)


def _call(address: tuple[str, int], count: int, seconds: float) -> str:
    """Process 0: collects the others, tells them the outcome and returns it."""
    limit = time.monotonic() + seconds
    here = {0}
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(socket.create_server(address))
        except OSError as error:
            return f"process 0 can't listen on port {address[1]}: {error.strerror}"
        connections, outcome = [], None
        while outcome is None and len(here) < count:
            server.settimeout(max(limit - time.monotonic(), 0.001))
            try:
                connections.append(stack.enter_context(server.accept()[0]))
            except TimeoutError:
                missing = ", ".join(str(index) for index in range(count) if index not in here)
                outcome = f"{len(here)} of {count} processes joined within {seconds:g} s; missing: {missing}"
            else:
                outcome = _take(connections[-1], count, here)
        outcome = outcome or ALL_HERE
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(f"{outcome}\n".encode())
        return outcome


def _take(connection: socket.socket, count: int, here: set[int]) -> str | None:
    """Adds the process at the other end to `here`, or says what is wrong with it; a stranger is passed over."""
    connection.settimeout(ANSWER_SECONDS)
    text = ""
    with contextlib.suppress(OSError):
        text = _line(connection)
    said = re.fullmatch(r"tpu-train process (\d+) of (\d+)", text)
    if said is None:
        return None
    index, of = int(said[1]), int(said[2])
    if of != count:
        return f"process {index} was started as one of {of}, process 0 as one of {count}"
    if index in here:
        return f"two processes were started as process {index} of {count}"
    here.add(index)
    return None


def _answer(address: tuple[str, int], index: int, count: int, seconds: float) -> str:
    """Another process: finds process 0, says who it is and returns the outcome."""
    lost = f"process 0 of {count} was not found at {address[0]}:{address[1]} within {seconds:g} s"
    limit = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection(address, timeout=seconds + ANSWER_SECONDS) as connection:
                connection.sendall(f"tpu-train process {index} of {count}\n".encode())
                return _line(connection) or "process 0 ended before all processes were there"
        except OSError as error:
            if time.monotonic() > limit:
                return f"{lost}: {error.strerror or error}"
        time.sleep(0.1)


def _line(connection: socket.socket) -> str:
    with connection.makefile("r", encoding="utf-8", errors="replace") as file:
        return file.readline(1000).strip()
