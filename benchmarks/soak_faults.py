"""What a start of the program can suffer, for soak.py, and how one looks from outside."""

import contextlib
import dataclasses
import json
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS = 120
LIMIT = 300  # seconds that one start may take; past it, it hangs


class Lost(Exception):
    """The run can't be continued; says why."""


@dataclasses.dataclass
class Start:
    """One process of the program that trains, or the first of several, and what it leaves behind."""

    process: Any
    workdir: Path
    log: Path
    begun: float
    resumes: bool  # a checkpoint was there when it began

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def step(self) -> int:
        """The last step in the metrics."""
        return max((line["step"] for line in metrics(self.workdir)), default=0)

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """False if the process ended before."""
        while not condition():
            if self.process.exitcode is not None:
                return False
            if time.monotonic() > self.begun + LIMIT:
                raise Lost(f"nothing for {LIMIT} s: {self.text[-400:]}")
            time.sleep(0.002)
        return True

    def kill(self) -> None:
        """At once, with all that it started."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join()


def descendants(pid: int) -> list[int]:
    """Processes that `pid` started, and that those started."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                found += [child, *descendants(child)]
    return found


def is_spawned(pid: int) -> bool:
    """Whether multiprocessing started it to run our code, as data workers are."""
    with contextlib.suppress(OSError):
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; one that is half written is left out."""
    file = workdir / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def checkpoints(workdir: Path) -> list[Path]:
    """Complete ones, oldest first."""
    folder = workdir / "checkpoints"
    there = [path for path in folder.glob("*") if path.name.isdigit()] if folder.exists() else []
    return sorted(there, key=lambda path: int(path.name))


def complete(workdir: Path) -> bool:
    """Whether the last step's checkpoint is there."""
    return bool(there := checkpoints(workdir)) and there[-1].name == str(STEPS)


# Each fault: disturbs a start, and says whether it came to it before the start ended by itself.


def kill_in_start_up(start: Start, draw: random.Random) -> bool:
    time.sleep(draw.uniform(0, 1.5))
    return killed(start)


def kill_in_a_step(start: Start, draw: random.Random) -> bool:
    return training(start, draw) and killed(start)


def kill_in_a_save(start: Start, draw: random.Random) -> bool:
    folder = start.workdir / "checkpoints"
    begun = training(start, draw) and start.wait_until(lambda: any(folder.glob("*.unfinished*")))
    time.sleep(draw.uniform(0, 0.03))
    return begun and killed(start)


def kill_in_a_restore(start: Start, draw: random.Random) -> bool:
    if not start.resumes:  # the next start will
        start.wait_until(lambda: bool(checkpoints(start.workdir)))
        start.kill()
        return False
    begun = start.wait_until(lambda: "continuing from step" in start.text)
    time.sleep(draw.uniform(0, 0.1))
    return begun and killed(start)


def kill_of_one_process(start: Start, draw: random.Random) -> bool:
    """Of those that the start consists of, its parent and workers among them."""
    if not training(start, draw):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice([start.process.pid, *descendants(start.process.pid)]), signal.SIGKILL)
    start.wait_until(lambda: False)
    start.kill()
    return True


def stop_signal(start: Start, draw: random.Random) -> bool:
    if not training(start, draw):
        return False
    start.process.terminate()
    start.wait_until(lambda: False)
    # Once all is saved, while it draws its chart, a signal ends it as it ends any program.
    done = complete(start.workdir) and start.process.exitcode == -signal.SIGTERM
    if not done and start.process.exitcode not in (0, 128 + signal.SIGTERM):
        raise Lost(f"SIGTERM gave the exit code {start.process.exitcode}: {start.text[-400:]}")
    return True


def full_disk(start: Start, draw: random.Random) -> bool:
    """No file may grow, for a moment or for good."""
    if not training(start, draw):
        return False
    pids = [start.process.pid, *descendants(start.process.pid)]
    for limit in (draw.choice([0, 100, 4000]), resource.RLIM_INFINITY):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        time.sleep(draw.uniform(0.1, 1))
    start.wait_until(lambda: False)
    return True


def truncated_checkpoint(start: Start, draw: random.Random) -> bool:
    """A file of the newest checkpoint, after a kill."""
    return damage(start, draw, lambda data: data[: draw.randrange(len(data))])


def flipped_bit(start: Start, draw: random.Random) -> bool:
    """In a file of the newest checkpoint, after a kill."""

    def flip(data: bytes) -> bytes:
        at = draw.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]

    return damage(start, draw, flip)


def kill_of_a_data_worker(start: Start, draw: random.Random) -> bool:
    """Of a start that has one; it has to go on by itself."""
    workers = training(start, draw) and [pid for pid in descendants(start.process.pid) if is_spawned(pid)]
    if not workers:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(workers), signal.SIGKILL)
    start.wait_until(lambda: False)
    if start.process.exitcode != 0:
        raise Lost(f"without its data worker it ended with {start.process.exitcode}: {start.text[-400:]}")
    return "starting the workers again" in start.text  # else it had all its batches


def clock_jumps(start: Start, draw: random.Random) -> bool:
    """The start's clock jumps by hours from the beginning on (see `train`); it is killed too."""
    return kill_in_a_step(start, draw)


FAULTS = (
    kill_in_start_up,
    kill_in_a_step,
    kill_in_a_save,
    kill_in_a_restore,
    kill_of_one_process,
    stop_signal,
    full_disk,
    truncated_checkpoint,
    flipped_bit,
    kill_of_a_data_worker,
    clock_jumps,
)


def training(start: Start, draw: random.Random) -> bool:
    """Waits for one of its first steps; False if it ended before."""
    first = start.step()
    begun = start.wait_until(lambda: start.step() > first)
    time.sleep(draw.uniform(0, 0.5))
    return begun and start.process.exitcode is None


def killed(start: Start) -> bool:
    there = start.process.exitcode is None
    start.kill()
    return there


def damage(start: Start, draw: random.Random, change: Callable[[bytes], bytes]) -> bool:
    """Kills it between an older checkpoint to go on from and the last one, and changes a file of the newest."""
    if not start.wait_until(lambda: len(checkpoints(start.workdir)) > 1) or not killed(start):
        return False
    if complete(start.workdir):  # what it ended with is what is compared
        return False
    newest = checkpoints(start.workdir)[-1]
    file = draw.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
    file.write_bytes(change(file.read_bytes()))
    return True
