"""Disturbs training runs until they can't take it any more: kills, full disks, damaged checkpoints, clocks that jump.

    python benchmarks/soak.py --faults=200 [--processes=2] [--seed=0]

A run of a tiny model is done once undisturbed. Then the same run is started again and again, and each start suffers one
fault, drawn at random; what it left behind is continued until the run is complete, and a next run begins. A fault is

- survived: the completed run has the undisturbed one's losses, every step of them, and its last weights, bit for bit;
- lost: a start that nothing disturbed failed, or the run came to an end without its last step;
- silent: the run completed with another loss or weight. There must be none.

Prints a table of them by fault, and exits with 1 if any is not survived; Ctrl-C or SIGTERM ends it with the table of
the runs that are done. Processes are forked from one that has
imported the program, so that a start takes little more than its work; with --processes each run is several processes of
their own, which takes longer, and whose clocks stay as they are. It needs Linux.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from soak_faults import (
    FAULTS,
    LIMIT,
    STEPS,
    Lost,
    Start,
    checkpoints,
    clock_jumps,
    complete,
    kill_of_a_data_worker,
    metrics,
)

ROOT = Path(__file__).resolve().parent.parent
SAVE_EVERY = 20
CONFIG = f'''"""The model of the soak."""
from tpu_train.config import *


def config():
    return Config(
        model=ModelConfig(num_layers=1, model_dim=16, num_heads=2, mlp_dim=32),
        data=DataConfig(seq_len=16, batch_size=4),
        optim=OptimConfig(peak_lr=1e-2, warmup_steps=2),
        checkpoint=CheckpointConfig(every_steps={SAVE_EVERY}),
        run=RunConfig(steps={STEPS}, log_every=1, eval_every=60, eval_batches=1, sample_tokens=0),
    )
'''


def train(arguments: list[str], log: Path, cache: Path, seed: int | None) -> None:
    """In a forked process: the command, its output in a file; with a seed its clock jumps each second."""
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}  # for processes that it starts
    os.environ["XLA_FLAGS"] = re.sub(r"(device_count)=\d+", r"\1=1", os.environ.get("XLA_FLAGS", ""))
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if seed is not None:
        # Not at each call: Orbax times its saves by it, and none would ever be done.
        clock = time.time
        time.time = lambda: clock() + random.Random(seed + int(time.monotonic())).choice([-7200.0, 0.0, 7200.0])
    from tpu_train import main

    sys.exit(main.main(["tpu-train", "train", *arguments]))


class Soak:
    """Runs in `folder`; `flags` go to every start of the program."""

    def __init__(self, folder: Path, flags: list[str], seed: int):
        self._folder, self._flags, self._draw = folder, flags, random.Random(seed)
        (folder / "config.py").write_text(CONFIG)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["soak", "tpu_train.train", "tensorboardX", "grain"])
        _start_server()
        whole = folder / "whole"
        self._finish(whole)
        self.wanted = metrics(whole), final_arrays(whole)
        self.tally: Counter[tuple[str, str]] = Counter()
        self.reasons: list[str] = []

    def suffer(self, faults: int, kinds: tuple[Callable[[Start, random.Random], bool], ...] = FAULTS) -> None:
        """Runs until that many faults came about, of each kind as many; fills `tally` with (fault, outcome): count."""
        waiting, number = [kinds[i % len(kinds)] for i in range(faults)], 0
        while waiting:
            if number > 10 * faults:
                raise RuntimeError(f"in {number} runs these never came about: {waiting}")
            workdir, suffered = self._folder / f"run{number}", Counter[str]()
            number += 1
            try:
                for fault in self._one_run(workdir, waiting):
                    suffered[fault] += 1
                outcome = self.compare(workdir)
            except Lost as lost:
                outcome = f"lost: {lost}"
            if outcome != "survived":
                self.reasons.append(f"{workdir.name}, {', '.join(suffered)}: {outcome}")
            self.tally.update({(fault, outcome.partition(":")[0]): n for fault, n in suffered.items()})
            shutil.rmtree(workdir, ignore_errors=True)

    def _one_run(self, workdir: Path, waiting: list[Callable[[Start, random.Random], bool]]) -> Iterator[str]:
        """Takes faults from `waiting` until the run is complete; gives the names of those that came about."""
        while waiting and not complete(workdir):
            fault = self._draw.choice(waiting)
            seed = self._draw.randrange(1 << 30) if fault is clock_jumps else None
            start = self._start(workdir, seed, ["--set=data.workers=1"] if fault is kill_of_a_data_worker else [])
            try:
                came = fault(start, self._draw)
                start.process.join(LIMIT)
            finally:
                start.kill()
            took = time.monotonic() - start.begun
            how = f"{fault.__name__}{'' if came else ' (did not come about)'}"
            print(f"{workdir.name}: {how}, {took:.1f} s, step {start.step()}", file=sys.stderr)
            if came:
                waiting.remove(fault)
                yield fault.__name__
            elif start.process.exitcode not in (0, -signal.SIGKILL):
                raise Lost(f"a start failed with {start.process.exitcode}: {start.text[-400:]}")
        if not complete(workdir):
            self._finish(workdir)

    def _start(self, workdir: Path, clock_seed: int | None = None, flags: Sequence[str] = ()) -> Start:
        arguments = [f"--config={self._folder / 'config.py'}", f"--workdir={workdir}", *self._flags, *flags]
        log = workdir.with_suffix(".log")
        log.unlink(missing_ok=True)
        resumes = bool(checkpoints(workdir))
        process = self._context.Process(target=train, args=(arguments, log, self._folder / "compiled", clock_seed))
        process.start()
        return Start(process, workdir, log, time.monotonic(), resumes)

    def _finish(self, workdir: Path) -> None:
        """Starts it undisturbed, and waits."""
        start = self._start(workdir)
        start.wait_until(lambda: False)
        if start.process.exitcode != 0 or not complete(workdir):
            raise Lost(f"an undisturbed start ended with {start.process.exitcode}: {start.text[-400:]}")

    def compare(self, workdir: Path) -> str:
        lines, arrays = self.wanted
        for wanted, got in itertools.zip_longest(map(_numbers, lines), map(_numbers, metrics(workdir))):
            if wanted != got:
                return f"silent: {got} where the undisturbed run has {wanted}"
        found = final_arrays(workdir)
        differ = [name for name in arrays | found if found.get(name) != arrays.get(name)]
        return f"silent: {differ[0]} differs" if differ else "survived"


def _numbers(line: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same in every run; times do not."""
    return {name: line.get(name) for name in ("step", "loss", "grad_norm", "validation_loss")}


def _start_server() -> None:
    """The process that others are forked from; what it imports it finds by PYTHONPATH alone."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    forkserver.ensure_running()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


def final_arrays(workdir: Path) -> dict[str, bytes]:
    """The arrays of the last checkpoint, as bytes."""
    from tpu_train.checkpoint import Checkpoints

    with Checkpoints(workdir, keep_last=None) as saved:
        return {name: np.asarray(x).tobytes() for name, x in saved.arrays(STEPS).items()}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    alone = (clock_jumps, kill_of_a_data_worker)  # what they do is for one process
    kinds = tuple(fault for fault in FAULTS if arguments.processes == 1 or fault not in alone)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            soak = Soak(Path(folder), [f"--processes={arguments.processes}"], arguments.seed)
        except Lost as lost:
            print(f"soak: {lost}", file=sys.stderr)
            return 1
        try:
            soak.suffer(arguments.faults, kinds)
        except KeyboardInterrupt:
            print(f"stopped: {soak.tally.total()} of {arguments.faults} faults, seed {arguments.seed}")
    print(f"| {'fault':<22} | survived | lost | silent |\n|{'-' * 24}|---------:|-----:|-------:|")
    for fault in kinds:
        counts = [soak.tally[fault.__name__, outcome] for outcome in ("survived", "lost", "silent")]
        print(f"| {fault.__name__.replace('_', ' '):<22} | {counts[0]:>8} | {counts[1]:>4} | {counts[2]:>6} |")
    print("".join(f"{reason}\n" for reason in soak.reasons), end="")
    return int(bool(soak.reasons))


if __name__ == "__main__":
    sys.exit(main())
