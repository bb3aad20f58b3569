"""Whole runs as processes of their own: what they write and say, signals, a kill, a reader or a folder that goes away.

They run on one CPU device and share one cache of compiled programs.
"""

import contextlib
import fcntl
import functools
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_train import CPU, TINY, finite_checkpoints, losses, saved_arrays, saved_steps, steps_logged

from tpu_train import main, mesh, metrics
from tpu_train.checkpoint import Checkpoints
from tpu_train.train_step import abstract_state

ROOT = Path(__file__).parent.parent
STEPS = 240  # of the runs in child processes
CHILD = ("data.source=python_stdlib", "data.paths=", f"run.steps={STEPS}", "run.eval_every=120", "optim.peak_lr=1e-2")
CHILD += ("checkpoint.every_steps=25", "run.sample_tokens=20")
KEYS = ["step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "step_seconds", "mfu", "skipped", "goodput"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The folder of compiled programs."""
    return tmp_path_factory.getbasetemp() / "compiled"


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "real.py"
    made = "config.Config()"
    for override in (*TINY, *CHILD):
        made = f"config.apply_override({made}, {override!r})"
    path.write_text(f"from tpu_train import config as config_lib\nconfig = config_lib\n\nmade = {made}\n\n\n")
    path.write_text(path.read_text() + "def config():\n    return made\n")
    return path


class Child:
    """`tpu-train train` as a process, held up by its output: a full pipe stops it AHEAD lines after the last read."""

    AHEAD = 60  # at most: the line of a step has 70 characters or more, but the first's

    def __init__(self, config_file, workdir, cache, *flags):
        reading, writing = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        self._errors = Path(workdir).with_suffix(".stderr")
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": re.sub(r"(device_count)=\d+", r"\1=1", os.environ["XLA_FLAGS"]),
            "PYTHONPATH": str(ROOT),
        }
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tpu_train.main", "train", f"--config={config_file}", f"--workdir={workdir}"]
                + list(flags),
                stdout=writing,
                stderr=errors,
                env=environment,
            )
        os.close(writing)
        self._out = os.fdopen(reading, "rb", buffering=0)  # what is read ahead would let it go on
        self._lines = []

    def read_to_step(self, step):
        while line := self._out.readline().decode():
            self._lines.append(line)
            if (found := re.match(r"step +(\d+)/", line)) and int(found[1]) >= step:
                return
        raise AssertionError(f"ended before step {step}: {self.out}{self.err}")

    def wait_for(self, condition):
        """While the child is held up."""
        limit = time.monotonic() + 240
        while not condition():
            assert time.monotonic() < limit, f"nothing after four minutes: {self.out}{self.err}"
            time.sleep(0.02)

    def finish(self, limit=240):
        """Reads the rest and gives the exit code."""
        self._lines.append(self._out.read().decode())
        self._out.close()
        return self.process.wait(limit)

    @property
    def out(self):
        return "".join(self._lines)

    @property
    def err(self):
        return self._errors.read_text()


@pytest.fixture
def start(config_file, cache, tmp_path):
    """start(flags...): a child that trains in tmp_path/run; killed at the end of the test if it still runs."""
    children = []

    def make(*flags):
        children.append(Child(config_file, tmp_path / "run", cache, *flags))
        return children[-1]

    yield make
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        child.process.wait()


@pytest.fixture(scope="module")
def whole(config_file, cache, tmp_path_factory):
    """(child, workdir) of a run in one go on the sources of the standard library."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    child = Child(config_file, workdir, cache)
    assert child.finish() == 0, child.err
    return child, workdir


def assert_same_run(workdir, whole):
    assert steps_logged(workdir) == list(range(1, STEPS + 1))
    assert losses(workdir) == losses(whole)
    arrays, position = saved_arrays(workdir, STEPS)
    wanted, wanted_position = saved_arrays(whole, STEPS)
    assert position == wanted_position
    for got, want in zip(arrays, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_run_on_real_text_learns_and_leaves_all_it_should(whole):
    child, workdir = whole
    lines = metrics.read(workdir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        evaluated = line["step"] in (120, 240)
        assert list(line) == KEYS + ["validation_loss"] * evaluated
        assert (line["step_seconds"] is None) == (line["step"] == 1)
        assert line["mfu"] is None
    assert lines[0]["loss"] == pytest.approx(math.log(256), abs=0.1)
    assert np.mean([line["loss"] for line in lines[-10:]]) < 3.2
    assert lines[239]["validation_loss"] < lines[119]["validation_loss"] < 3.7
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((workdir / "tensorboard").glob("events.out.tfevents.*"))
    assert saved_steps(workdir) == [200, 225, 240]
    assert child.err == ""


def test_a_run_says_what_differs_from_the_defaults_and_what_it_runs_on(whole):
    child, workdir = whole
    said = child.out.splitlines()
    fields = [line.strip() for line in said if line.startswith("  ") and " = " in line]
    changed = [override.split("=") for override in (*TINY, *CHILD)]
    names = {name for name, _ in changed} - {"data.source", "data.paths"}  # set to their defaults
    assert {field.split(" = ")[0] for field in fields} == names | {"run.workdir"}
    assert f"run.workdir = {workdir}" in fields
    assert f"run.steps = {STEPS}" in fields
    assert "devices: 1 x cpu, mesh: one device" in said
    parameters = sum(x.size for x in jax.tree.leaves(abstract_state(saved_config(workdir), CPU).model))
    assert f"parameters: {parameters:,}, tokens per step: 256" in said
    assert sum("first step done" in line for line in said) == 1
    lengths = [len(line) for line in said if re.match(r"step +\d+/240 ", line)]
    assert len(lengths) == STEPS
    assert min(lengths[1:]) >= 4096 // Child.AHEAD
    assert re.search(r"sample after 'def ':\ndef .", child.out)
    assert "training " in child.out
    assert str(workdir / "loss.png") in said


def saved_config(workdir):
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        return checkpoints.saved_config(checkpoints.find(None))


def test_sigterm_then_ctrl_c_then_a_kill_change_no_bit(start, whole, tmp_path):
    workdir = tmp_path / "run"
    child = start()
    child.read_to_step(20)
    time.sleep(0.5)  # by now it waits in the middle of a print; what the signal says must not wait for that
    child.process.send_signal(signal.SIGTERM)
    child.wait_for(lambda: child.err)
    assert child.finish() == 143
    assert child.err == "SIGTERM: finishing this step and saving, 120 s at most; once more to stop at once\n"
    (stopped,) = saved_steps(workdir)[-1:]
    assert 20 <= stopped < STEPS
    said = f"SIGTERM: saved step {stopped} in {workdir}; the same command continues from there"
    assert child.out.splitlines()[-1] == said

    child = start()
    child.read_to_step(stopped + 3)
    child.process.send_signal(signal.SIGINT)
    assert child.finish() == 130
    assert child.err == "SIGINT: finishing this step and saving, 120 s at most; once more to stop at once\n"
    assert f"continuing from step {stopped} in {workdir}" in child.out.splitlines()
    again = saved_steps(workdir)[-1]
    assert stopped + 3 <= again < STEPS

    moment = random.randint(again + 2, again + 30)
    child = start()
    child.read_to_step(moment)
    time.sleep(random.random() / 10)
    child.process.kill()
    assert child.finish() == -signal.SIGKILL
    left = saved_steps(workdir)

    child = start()
    assert child.finish() == 0, f"killed after reading step {moment}, {left} were there: {child.err}"
    assert f"continuing from step {left[-1]} in {workdir}" in child.out.splitlines()
    assert_same_run(workdir, whole[1])
    assert re.search(r"^time: \d.* over 4 starts, \d+\.\d% of it in steps; ", child.out, re.MULTILINE)


def test_a_second_ctrl_c_stops_at_once(start):
    child = start()
    child.read_to_step(10)
    time.sleep(0.5)  # it waits for us to read, and we won't
    child.process.send_signal(signal.SIGINT)
    child.wait_for(lambda: "once more to stop at once" in child.err)
    child.process.send_signal(signal.SIGINT)
    assert child.process.wait(120) == 130
    assert child.err.splitlines()[1:] == ["tpu-train: stopped at once"]


SLOW = """
import importlib.util, time
from tpu_train.checkpoint import manifest

spec = importlib.util.spec_from_file_location("real", {real!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
manifest.write = lambda *parts: time.sleep(600)


def config():
    return real.config()
"""


def test_a_last_save_that_takes_longer_than_it_may_is_told_and_ended(config_file, cache, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(SLOW.format(real=str(config_file)))
    flags = ("--set=checkpoint.every_steps=0", "--set=checkpoint.stop_seconds=2")
    child = Child(slow, tmp_path / "run", cache, *flags)
    child.read_to_step(5)
    child.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert child.finish() == 1
    assert 1 < time.monotonic() - began < 300
    assert child.err.splitlines() == [
        "SIGTERM: finishing this step and saving, 2 s at most; once more to stop at once",
        "tpu-train: the last save did not finish within checkpoint.stop_seconds=2; kept: no checkpoint",
    ]
    assert saved_steps(tmp_path / "run") == []


def test_a_failed_save_that_is_not_to_be_tried_again_ends_the_run_soon_and_with_one_line(start, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    child = start("--set=checkpoint.retry_minutes=0")
    child.read_to_step(20)
    child.wait_for((folder / "25").is_dir)
    folder.rename(tmp_path / "moved")
    folder.write_text("in the way")
    began = time.monotonic()
    assert child.finish() == 1, child.out
    assert time.monotonic() - began < 240
    assert re.fullmatch(
        rf"tpu-train: saving step \d+ in {folder} failed: .*the folder is gone; kept: no checkpoint\n", child.err
    )


def test_a_reader_that_goes_away_ends_the_run_without_a_traceback(start):
    child = start()
    child.read_to_step(5)
    child._out.close()
    assert child.process.wait(240) == 128 + signal.SIGPIPE, child.err
    assert child.err == ""


@pytest.mark.parametrize("peak_lr", ["1e30", "1e38"])
def test_a_diverging_run_stops_with_one_line_and_keeps_only_finite_checkpoints(
    config_file, tmp_path, capsys, monkeypatch, peak_lr
):
    monkeypatch.setattr(mesh, "make_mesh", functools.partial(mesh.make_mesh, devices=jax.devices()[:1]))
    workdir = tmp_path / "run"
    flags = [f"--set=optim.peak_lr={peak_lr}", "--set=checkpoint.every_steps=1", "--set=optim.warmup_steps=1"]
    assert main.main(["tpu-train", "train", f"--config={config_file}", f"--workdir={workdir}", *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    step, kept = re.search(r" step (\d+).*; kept: checkpoint of step (\d+) in ", line).groups()
    assert line.startswith("tpu-train: ")
    assert finite_checkpoints(workdir)[-1] == int(kept) < int(step)
