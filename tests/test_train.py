"""Whole runs: what they write, that stopping and continuing changes no bit, and how they fail.

Runs that must be real processes (signals, a reader that goes away) are children on one CPU device; the others are calls
of `train.train` here. All share one cache of compiled programs.
"""

import contextlib
import dataclasses
import fcntl
import functools
import json
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
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tpu_train import config, main, mesh, metrics, precision, train
from tpu_train.checkpoint import Checkpoints
from tpu_train.report import Reporter
from tpu_train.train_step import abstract_state, make_train_step

ROOT = Path(__file__).parent.parent
CPU = precision.Compute(np.dtype("float32"), "xla", "cpu")
TINY = (
    *("model.model_dim=32", "model.num_layers=2", "model.mlp_dim=64", "data.seq_len=32", "data.batch_size=8"),
    *("optim.warmup_steps=2", "run.steps=8", "run.log_every=1", "run.eval_every=4", "run.eval_batches=2"),
    *("run.sample_tokens=0", "checkpoint.every_steps=4"),
)
STEPS = 240  # of the runs in child processes
CHILD = ("data.source=python_stdlib", "data.paths=", f"run.steps={STEPS}", "run.eval_every=120", "optim.peak_lr=1e-2")
CHILD += ("checkpoint.every_steps=25", "run.sample_tokens=20")
KEYS = ["step", "loss", "learning_rate", "grad_norm", "tokens_per_second", "step_seconds", "mfu"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The folder of compiled programs."""
    return tmp_path_factory.getbasetemp() / "compiled"


@pytest.fixture(scope="module", autouse=True)
def compiled_once(cache):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(cache), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@functools.cache
def step_of(model, optim, steps, compute):
    """The train step without what it does not depend on, so that runs in this process share one trace."""
    made = config.Config(model=model, optim=optim, run=config.RunConfig(steps=steps))
    return make_train_step(made, compute)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
    monkeypatch.setattr(train, "make_eval_step", functools.cache(train.make_eval_step))
    monkeypatch.setattr(
        train, "make_train_step", lambda made, compute: step_of(made.model, made.optim, made.run.steps, compute)
    )


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    """devices(n) makes the runs of this test use n devices; one without."""
    make = mesh.make_mesh

    def use(count):
        monkeypatch.setattr(mesh, "make_mesh", lambda config: make(config, jax.devices()[:count]))

    use(1)
    return use


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A glob of text files with something to learn."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(20):
        lines = [f"def f{i}_{j}(x): return x + {i * j}\n" for j in range(30)]
        (folder / f"{i:02}.py").write_text("".join(lines))
    return f"{folder}/*.py"


@pytest.fixture
def config_of(tmp_path, texts):
    """config_of("section.field=value", ...): a tiny run in tmp_path/run."""

    def make(*overrides):
        made = config.Config()
        own = ("data.source=text", f"data.paths={texts}", f"run.workdir={tmp_path / 'run'}")
        for override in (*TINY, *own, *overrides):
            made = config.apply_override(made, override)
        config.check(made)
        return made

    return make


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "real.py"
    made = "config.Config()"
    for override in (*TINY, *CHILD):
        made = f"config.apply_override({made}, {override!r})"
    path.write_text(f"from tpu_train import config as config_lib\nconfig = config_lib\n\nmade = {made}\n\n\n")
    path.write_text(path.read_text() + "def config():\n    return made\n")
    return path


@pytest.fixture
def ends(monkeypatch):
    """(leaves of the state, next batch) with which each run in this process left its loop."""
    seen = []
    loop = train.Run.loop

    def watch(run, state):
        state = loop(run, state)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        seen.append(({jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}, next(run.batches)))
        return state

    monkeypatch.setattr(train.Run, "loop", watch)
    return seen


@pytest.fixture
def at_step(monkeypatch):
    """at_step({3: act}) calls act(state, values) -> (state, values) after the third step that a run dispatches."""

    def set_acts(acts):
        make = train.make_train_step

        def make_watched(*args):
            step, count = make(*args), 0

            def watched(state, batch):
                nonlocal count
                count += 1
                done = step(state, batch)
                return acts[count](*done) if count in acts else done

            return watched

        monkeypatch.setattr(train, "make_train_step", make_watched)

    return set_acts


def run(made):
    return train.train(made, time.monotonic())


def send(number):
    def act(*done):
        os.kill(os.getpid(), number)
        return done

    return act


def losses(workdir):
    lines = metrics.read(Path(workdir))
    return {line["step"]: (line["loss"], line["grad_norm"], line.get("validation_loss")) for line in lines}


def steps_logged(workdir):
    return [line["step"] for line in metrics.read(Path(workdir))]


def saved_steps(workdir):
    return sorted(int(path.name) for path in (Path(workdir) / "checkpoints").iterdir() if path.name.isdigit())


def saved_arrays(workdir, step):
    """The arrays of a checkpoint and its data position."""
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        saved = checkpoints.saved_config(step)
        leaves = jax.tree.leaves(checkpoints.restore(step, abstract_state(saved, CPU)))
    position = Path(workdir) / "checkpoints" / str(step) / "data" / "process_0-of-1.json"
    return [np.asarray(x) for x in leaves], json.loads(position.read_text())


class Child:
    """`tpu-train train` as a process, held up by its output: a full pipe stops it some 40 lines after the last read."""

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
        self._out = os.fdopen(reading)
        self._lines = []

    def read_to_step(self, step):
        for line in self._out:
            self._lines.append(line)
            if (found := re.match(r"step +(\d+)/", line)) and int(found[1]) >= step:
                return
        raise AssertionError(f"ended before step {step}: {self.out}{self.err}")

    def wait_for(self, condition):
        """While the child is held up."""
        limit = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < limit, f"nothing after a minute: {self.out}{self.err}"
            time.sleep(0.02)

    def finish(self, limit=120):
        """Reads the rest and gives the exit code."""
        self._lines += self._out.readlines()
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
    assert sum(bool(re.match(r"step +\d+/240 ", line)) for line in said) == STEPS
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
    assert child.err == "SIGTERM: finishing this step and saving; once more to stop at once\n"
    (stopped,) = saved_steps(workdir)[-1:]
    assert 20 <= stopped < STEPS
    said = f"SIGTERM: saved step {stopped} in {workdir}; the same command continues from there"
    assert child.out.splitlines()[-1] == said

    child = start()
    child.read_to_step(stopped + 3)
    child.process.send_signal(signal.SIGINT)
    assert child.finish() == 130
    assert child.err == "SIGINT: finishing this step and saving; once more to stop at once\n"
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


def test_a_second_ctrl_c_stops_at_once(start):
    child = start()
    child.read_to_step(10)
    time.sleep(0.5)  # it waits for us to read, and we won't
    child.process.send_signal(signal.SIGINT)
    child.wait_for(lambda: "once more to stop at once" in child.err)
    child.process.send_signal(signal.SIGINT)
    assert child.process.wait(20) == 130
    assert child.err.splitlines()[1:] == ["tpu-train: stopped at once"]


def test_a_failed_save_ends_the_run_soon_and_with_one_line(start, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    child = start()
    child.read_to_step(20)
    child.wait_for((folder / "25").is_dir)
    folder.rename(tmp_path / "moved")
    folder.write_text("in the way")
    began = time.monotonic()
    assert child.finish() == 1, child.out
    assert time.monotonic() - began < 60
    assert re.fullmatch(rf"tpu-train: saving step \d+ in {folder} failed: .*Not a directory.*\n", child.err)


def test_a_reader_that_goes_away_ends_the_run_without_a_traceback(start):
    child = start()
    child.read_to_step(5)
    child._out.close()
    assert child.process.wait(60) == 128 + signal.SIGPIPE, child.err
    assert child.err == ""


@pytest.mark.parametrize(
    "overrides",
    [
        ("run.steps=9",),
        ("run.steps=9", "data.workers=1"),
        ("run.steps=9", "optim.optimizer=muon", "optim.accumulation_steps=2", "run.precision=float16"),
    ],
    ids=["adamw", "workers", "muon-float16"],
)
def test_resume_is_bitwise(config_of, ends, at_step, overrides, tmp_path):
    whole = config_of(*overrides)
    assert run(whole) == 0
    stopped = config_of(*overrides, f"run.workdir={tmp_path / 'stopped'}")
    acts = {3: send(signal.SIGTERM)}
    at_step(acts)
    assert run(stopped) == 143
    assert run(stopped) == 143
    assert saved_steps(stopped.run.workdir)[-1] == 6
    acts.clear()
    assert run(stopped) == 0
    (wanted, wanted_batch), *_, (state, batch) = ends
    assert state.keys() == wanted.keys()
    assert int(state[".step"]) == 9
    for name in wanted:
        np.testing.assert_array_equal(state[name], wanted[name], err_msg=name)
    assert batch.keys() == wanted_batch.keys()
    for name in batch:
        np.testing.assert_array_equal(batch[name], wanted_batch[name], err_msg=name)
    assert steps_logged(stopped.run.workdir) == list(range(1, 10))
    assert {k: v[:2] for k, v in losses(stopped.run.workdir).items()} == {
        k: v[:2] for k, v in losses(whole.run.workdir).items()
    }


def test_more_steps_may_be_asked_for_and_fewer_are_refused(config_of, capsys):
    assert run(config_of()) == 0
    assert run(config_of("run.steps=9")) == 0
    workdir = config_of().run.workdir
    assert steps_logged(workdir) == list(range(1, 10))
    capsys.readouterr()
    assert run(config_of("run.steps=9")) == 0
    assert (
        f"the run in {workdir} is complete at step 9; a higher run.steps would continue it" in capsys.readouterr().out
    )
    with pytest.raises(config.UserError, match=r"is at step 9, past run\.steps=8; raise run\.steps or choose another"):
        run(config_of())
    assert saved_steps(workdir) == [4, 8, 9]


def test_another_model_in_the_same_workdir_is_refused_and_nothing_is_lost(config_of):
    assert run(config_of()) == 0
    workdir = Path(config_of().run.workdir)
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    with pytest.raises(config.UserError, match=r"was trained with model\.mlp_dim=64, this run has 128; set it back or"):
        run(config_of("model.mlp_dim=128"))
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


def test_a_folder_that_is_no_checkpoint_does_not_stop_a_run_from_continuing(config_of):
    assert run(config_of()) == 0
    folder = Path(config_of().run.workdir) / "checkpoints"
    for name in ("9", "20", "12.orbax-checkpoint-tmp"):
        (folder / name).mkdir()
    assert run(config_of("run.steps=9")) == 0
    assert steps_logged(folder.parent) == list(range(1, 10))
    assert saved_arrays(folder.parent, 9)[1] != saved_arrays(folder.parent, 8)[1]


def test_one_run_goes_on_over_eight_devices_and_back(config_of, devices):
    assert run(config_of("run.steps=4", "optim.schedule=constant")) == 0
    devices(8)
    assert run(config_of("run.steps=8", "optim.schedule=constant", "mesh.fsdp=4")) == 0
    devices(1)
    assert run(config_of("run.steps=12", "optim.schedule=constant")) == 0
    here = losses(config_of().run.workdir)
    alone = config_of("run.steps=12", "optim.schedule=constant", "run.workdir=" + config_of().run.workdir + "-alone")
    assert run(alone) == 0
    for step, (loss, grad_norm, _) in losses(alone.run.workdir).items():
        assert here[step][:2] == pytest.approx((loss, grad_norm), rel=1e-4), step


def finite_checkpoints(workdir):
    for step in saved_steps(workdir):
        assert all(np.all(np.isfinite(x)) for x in saved_arrays(workdir, step)[0]), step
    return saved_steps(workdir)


@pytest.mark.parametrize("peak_lr", ["1e30", "1e38"])
def test_a_diverging_run_stops_with_one_line_and_keeps_only_finite_checkpoints(config_file, tmp_path, capsys, peak_lr):
    workdir = tmp_path / "run"
    flags = [f"--set=optim.peak_lr={peak_lr}", "--set=checkpoint.every_steps=1", "--set=optim.warmup_steps=1"]
    assert main.main(["tpu-train", "train", f"--config={config_file}", f"--workdir={workdir}", *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    step, kept = re.search(r" step (\d+).*; kept: checkpoint of step (\d+) in ", line).groups()
    assert line.startswith("tpu-train: ")
    assert finite_checkpoints(workdir)[-1] == int(kept) < int(step)


@pytest.mark.parametrize("part", ["model", "opt_state"])
def test_an_update_that_turns_nan_is_never_saved(config_of, at_step, part):
    @jax.jit
    def spoil(tree):
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten([leaves[0], *(x * jnp.nan if x.dtype == jnp.float32 else x for x in leaves[1:])])

    at_step({6: lambda state, values: (dataclasses.replace(state, **{part: spoil(getattr(state, part))}), values)})
    made = config_of("checkpoint.every_steps=2")
    with pytest.raises(train.RunFailed) as failed:
        run(made)
    said = "the update of step 6 made weights or moments NaN or infinite; kept: checkpoint of step 4 in"
    assert str(failed.value).startswith(f"{said} {made.run.workdir};")
    assert finite_checkpoints(made.run.workdir) == [2, 4]


def test_an_array_of_the_host_that_slips_into_the_loop_raises(config_of, at_step):
    at_step({2: lambda state, values: (state, values | {"loss": values["loss"] + np.ones((), np.float32)})})
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        run(config_of())
    assert steps_logged(config_of().run.workdir) == []


def test_metrics_are_fetched_after_the_next_step_is_dispatched(config_of, one_device, monkeypatch, tmp_path):
    events = []
    fetch = Reporter._fetch

    def note_fetch(reporter, step, values):
        events.append(f"fetch {step}")
        fetch(reporter, step, values)

    def step(state, batch):
        events.append(f"dispatch {int(state.step) + 1}")
        values = {"loss": 1.0, "learning_rate": 0.0, "grad_norm": 1.0, "tokens": 1.0}
        return State(state.step + 1), values

    class State:
        def __init__(self, step):
            self.step = step

    class Checkpoint:
        def save(self, step, *parts):
            events.append(f"save {step}")

        def wait(self):
            events.append("wait")

    monkeypatch.setattr(Reporter, "_fetch", note_fetch)
    monkeypatch.setattr(train.Run, "_next_batch", lambda run: None)
    monkeypatch.setattr(train.Run, "_evaluate", lambda run, state: events.append("evaluate") or 1.0)
    monkeypatch.setattr(train, "_is_finite", lambda state: True)
    made = config_of("run.steps=5", "run.eval_every=3", "checkpoint.every_steps=3")
    reporter = Reporter(made, one_device, 0, 0.0)
    looping = train.Run(made, one_device, step, None, iter(()), None, Checkpoint(), reporter, train.Stop())
    assert looping.loop(State(0)).step == 5
    reporter.close()
    assert events == [
        *("dispatch 1", "dispatch 2", "fetch 1", "dispatch 3", "fetch 2", "fetch 3", "evaluate", "save 3"),
        *("dispatch 4", "dispatch 5", "fetch 4", "fetch 5", "evaluate", "save 5", "wait"),
    ]


def test_the_last_step_is_saved_once_when_it_is_one_to_save_anyway(config_of):
    assert run(config_of("run.steps=8", "checkpoint.every_steps=4")) == 0
    assert saved_steps(config_of().run.workdir) == [4, 8]


def test_a_relative_workdir_works(config_of, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    made = config_of("run.workdir=here/run")
    assert run(made) == 0
    assert run(config_of("run.workdir=here/run", "run.steps=9")) == 0
    assert steps_logged(tmp_path / "here" / "run") == list(range(1, 10))


def test_text_that_changed_since_is_refused_in_one_line(config_of, texts, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for path in Path(texts).parent.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    paths = f"data.paths={folder}/*.py"
    assert run(config_of(paths)) == 0
    (folder / "00.py").write_text("another text\n")
    with pytest.raises(config.UserError, match=r"^the saved data position has data fingerprint=.*; records would"):
        run(config_of(paths, "run.steps=9"))


@pytest.fixture(scope="module")
def plain():
    """The losses of the run that the variants below are compared with."""
    return {}


@pytest.mark.parametrize(
    ("override", "first", "all_steps"),
    [
        ("run.seed=0", 0, 0),
        ("optim.accumulation_steps=2", 1e-6, 1e-4),
        ("optim.optimizer=muon", 1e-6, None),
        ("run.precision=bfloat16", 2e-2, 2e-2),
        ("run.precision=float16", 2e-3, 2e-3),
        ("data.packing=false", None, None),
    ],
)
def test_every_variant_trains(config_of, plain, override, first, all_steps):
    made = config_of("run.steps=3", override)
    assert run(made) == 0
    lines = metrics.read(Path(made.run.workdir))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert ("loss_scale" in lines[0]) == (override == "run.precision=float16")
    here = [line["loss"] for line in lines]
    assert here[0] == pytest.approx(math.log(256), abs=0.1)
    assert here[2] < here[0]
    assert saved_steps(made.run.workdir) == [3]
    wanted = plain.setdefault("losses", here)
    if first is not None:
        assert here[0] == pytest.approx(wanted[0], rel=first)
    if all_steps is not None:
        assert here == pytest.approx(wanted, rel=all_steps)
    elif first is not None:
        assert here[2] != pytest.approx(wanted[2], rel=1e-6)
