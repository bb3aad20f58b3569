"""Runs of two real processes on loopback: their losses, how they stop and continue, and who is named if one is lost."""

import contextlib
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_processes import Child
from test_train import CPU, TINY, losses, saved_steps, steps_logged

from tpu_train import config, data, main, mesh, metrics
from tpu_train.checkpoint import Checkpoints
from tpu_train.evaluate import evaluate, make_eval_step
from tpu_train.sharding import SPECS
from tpu_train.train_step import abstract_state, init_state, make_train_step

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
# A run that is read to step 5 is held up before its first save, one that is read a little past that before its end.
SAVE_EVERY = 10 + Child.AHEAD
STEPS = 3 * SAVE_EVERY
REASON = r"tpu-train: process 1 of 2 was ended by SIGKILL; the others were stopped"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A config over 45 documents: the shards of the training part and the last validation batch are unequal."""
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("documents")
    lines = [{"text": "".join(rng.choices("abcdefgh ", k=rng.randint(20, 400)))} for _ in range(45)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = config.Config()
    source = ("data.source=jsonl", f"data.paths={folder / 'documents.jsonl'}", "data.validation_fraction=0.1")
    often = (f"run.steps={STEPS}", f"run.eval_every={STEPS // 2}", "run.eval_batches=99")
    often += (f"checkpoint.every_steps={SAVE_EVERY}",)
    for override in (*TINY, *source, *often):
        made = config.apply_override(made, override)
    (folder / "config.py").write_text(f"from tpu_train.config import *\n\n\ndef config():\n    return {made!r}\n")
    return made, folder / "config.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The folder of compiled programs."""
    return tmp_path_factory.getbasetemp() / "compiled"


@pytest.fixture
def start(made, cache, tmp_path):
    """start(flags...): two processes that train in tmp_path/run."""
    children = []

    def begin(*flags):
        children.append(Child(made[1], tmp_path / "run", cache, "--processes=2", *flags))
        return children[-1]

    yield begin
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        child.process.wait()


@pytest.fixture(scope="module")
def whole(made, cache, tmp_path_factory):
    """(child, workdir) of a run in one go."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    child = Child(made[1], workdir, cache, "--processes=2")
    assert child.finish() == 0, child.err
    return child, workdir


def test_two_processes_have_the_losses_of_one(whole, made, mesh_of):
    made, (child, workdir) = made[0], whole
    assert child.err == ""
    assert "devices: 2 x cpu, mesh: data 2" in child.out.splitlines()
    assert "Gloo" not in child.out
    lengths = [len(line) for line in child.out.splitlines() if line.startswith("step ")]
    assert min(lengths[1:]) >= 4096 // Child.AHEAD
    assert steps_logged(workdir) == list(range(1, STEPS + 1))
    assert saved_steps(workdir) == [SAVE_EVERY, 2 * SAVE_EVERY, STEPS]
    assert (workdir / "loss.png").exists()
    assert len(list((workdir / "tensorboard").iterdir())) == 1

    two = mesh_of(data=2)
    vocab = made.model.vocab_size
    batches = data.train_batches(made.data, vocab_size=vocab)  # of one process: the rows are the same
    sharding = jax.NamedSharding(two, SPECS["ABT"])
    state, step = init_state(made, CPU), make_train_step(made, CPU)
    wanted, validation = [], {}
    for number in range(1, STEPS + 1):
        batch = {name: array[None] for name, array in next(batches).items()}
        state, values = step(state, jax.device_put(batch, sharding))
        wanted.append((float(values["loss"]), float(values["grad_norm"])))
        if number % (STEPS // 2) == 0:
            held_out = data.validation_batches(made.data, vocab_size=vocab)
            validation[number] = evaluate(make_eval_step(CPU), state.model, held_out, two)
    batches.close()
    lines = metrics.read(workdir)
    got = [(line["loss"], line["grad_norm"]) for line in lines]
    np.testing.assert_allclose(got, wanted, rtol=2e-4)
    got = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert got == pytest.approx(validation, rel=2e-4)
    assert got[STEPS] < got[STEPS // 2] < 5


def test_the_documents_of_this_file_make_unequal_shards(made):
    made = made[0]
    sizes = []
    for index in range(2):
        batches = data.validation_batches(
            made.data, vocab_size=made.model.vocab_size, process_index=index, process_count=2
        )
        sizes.append([np.count_nonzero(batch["weights"].sum(axis=1)) for batch in batches])
    assert len(sizes[0]) == len(sizes[1])
    assert sizes[0][-1] != sizes[1][-1]


def test_sigterm_then_a_killed_process_change_no_bit(start, whole, tmp_path):
    workdir = tmp_path / "run"
    child = start()
    child.read_to_step(5)
    child.process.send_signal(signal.SIGTERM)
    assert child.finish() == 143, child.err
    assert child.err == "SIGTERM: finishing this step and saving, 120 s at most; once more to stop at once\n"
    (stopped,) = saved_steps(workdir)
    assert 5 <= stopped < SAVE_EVERY
    assert child.out.splitlines()[-1].startswith(f"SIGTERM: saved step {stopped} in {workdir}; ")
    assert sum("saved step" in line for line in child.out.splitlines()) == 1

    child = start("--set=checkpoint.every_minutes=0.001", "--set=checkpoint.every_steps=0")
    child.read_to_step(stopped + 3)
    child.wait_for(lambda: saved_steps(workdir)[-1] > stopped)
    pids = subprocess.run(["pgrep", "-P", str(child.process.pid)], capture_output=True, text=True, check=True)
    os.kill(next(pid for pid in map(int, pids.stdout.split()) if place_of(pid) == "1"), signal.SIGKILL)
    began = time.monotonic()
    assert child.finish() == 128 + signal.SIGKILL
    assert time.monotonic() - began < 60  # JAX's own heartbeat takes 100 s
    assert re.search(rf"^{REASON}$", child.err, re.MULTILINE), child.err
    assert "Traceback" not in child.err

    left = saved_steps(workdir)
    child = start()
    assert child.finish() == 0, child.err
    assert f"continuing from step {left[-1]} in {workdir}" in child.out.splitlines()
    assert losses(workdir) == losses(whole[1])
    for file in ("process_0-of-2.json", "process_1-of-2.json"):
        there = Path("checkpoints") / str(STEPS) / "data" / file
        assert json.loads((workdir / there).read_text()) == json.loads((whole[1] / there).read_text())
    for got, want in zip(last_arrays(workdir), last_arrays(whole[1]), strict=True):
        np.testing.assert_array_equal(got, want)


REFUSING = """
import importlib.util
from tpu_train.checkpoint import manifest

spec = importlib.util.spec_from_file_location("real", {real!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)


def config():
    return real.config()


def refuse(*parts):
    raise OSError(28, "No space left on device")


manifest.write = refuse
"""


def test_a_background_save_that_fails_in_one_process_ends_the_run_at_once_with_the_reason(made, cache, tmp_path):
    refusing = tmp_path / "refusing.py"
    refusing.write_text(REFUSING.format(real=str(made[1])))
    flags = ("--processes=2", "--set=run.steps=100000", "--set=checkpoint.retry_minutes=0")
    child = Child(refusing, tmp_path / "run", cache, *flags)
    child.read_to_step(SAVE_EVERY)
    began = time.monotonic()
    assert child.finish() == 1
    assert time.monotonic() - began < 240
    folder = tmp_path / "run" / "checkpoints"
    reason = (
        f"tpu-train: process 0 of 2: saving step {SAVE_EVERY} in {folder} failed: [Errno 28] No space left on device; "
        "kept: no checkpoint"
    )
    assert set(child.err.splitlines()[:-1]) == {reason}  # said by each
    assert re.fullmatch(r"tpu-train: process . of 2 failed with exit code 1; the others were stopped", last(child.err))
    assert saved_steps(tmp_path / "run") == []


def last(text):
    return text.splitlines()[-1]


def test_a_full_disk_of_one_process_is_tried_again_by_both(start, whole, tmp_path):
    """Files of that process can't grow past 40 kB, as on a full disk, from step 5 until two saves were refused."""
    workdir = tmp_path / "run"
    child = start()
    child.read_to_step(5)
    pids = subprocess.run(["pgrep", "-P", str(child.process.pid)], capture_output=True, text=True, check=True)
    full = next(pid for pid in map(int, pids.stdout.split()) if place_of(pid) == "1")
    resource.prlimit(full, resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    child.read_to_step(2 * SAVE_EVERY)
    resource.prlimit(full, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert child.finish() == 0, child.err
    said = [line for line in child.err.splitlines() if line.startswith("tpu-train: ")]  # TensorStore says more
    assert said[0] == (
        f"tpu-train: process 1 of 2: saving step {SAVE_EVERY} in {workdir}/checkpoints failed: [Errno 27] "
        "File too large; kept: no checkpoint; training goes on, next try in 1 s, giving up after 10 min"
    )
    assert said[-1] == "tpu-train: saving works again"
    assert saved_steps(workdir)[-1] == STEPS
    assert losses(workdir) == losses(whole[1])
    for got, want in zip(last_arrays(workdir), last_arrays(whole[1]), strict=True):
        np.testing.assert_array_equal(got, want)


def last_arrays(workdir):
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        wanted = abstract_state(checkpoints.saved_config(STEPS), CPU)
        return [np.asarray(x) for x in jax.tree.leaves(checkpoints.restore(STEPS, wanted))]


def test_another_number_of_processes_continues_with_the_same_batches(whole, made, tmp_path, capfd, monkeypatch):
    workdir = tmp_path / "run"
    shutil.copytree(whole[1], workdir)
    for step in (2 * SAVE_EVERY, STEPS):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    monkeypatch.setattr(mesh, "make_mesh", functools.partial(mesh.make_mesh, devices=jax.devices()[:1]))
    assert main.main(["tpu-train", "train", f"--config={made[1]}", f"--workdir={workdir}"]) == 0
    said = capfd.readouterr().out
    assert f"continuing from step {SAVE_EVERY} in {workdir}" in said
    assert steps_logged(workdir) == list(range(1, STEPS + 1))
    for a, b in zip(losses(workdir).values(), losses(whole[1]).values(), strict=True):
        assert a[:2] == pytest.approx(b[:2], rel=2e-4)
    # The counts of both processes go on as one.
    begun = sum(position_of(whole[1], i, 2)["counts"][0] for i in range(2))
    assert position_of(workdir, 0, 1)["counts"][0] == begun
    assert f"data: {begun} documents begun, " in said


def position_of(workdir, index, count):
    return json.loads((workdir / "checkpoints" / str(STEPS) / "data" / f"process_{index}-of-{count}.json").read_text())


def place_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable)["TPU_TRAIN_PROCESS_ID"]
