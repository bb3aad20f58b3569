"""Whole runs in this process: that stopping and continuing changes no bit, on any mesh, and how they fail.

All share one cache of compiled programs. Runs in processes of their own are in test_processes.
"""

import dataclasses
import functools
import json
import math
import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tpu_train import config, goodput, mesh, metrics, precision, train, train_step, watchdog
from tpu_train.checkpoint import Checkpoints, Saver
from tpu_train.report import Reporter
from tpu_train.train_step import abstract_state, make_train_step

ROOT = Path(__file__).parent.parent
CPU = precision.Compute(np.dtype("float32"), "xla", "cpu")
TINY = (
    *("model.model_dim=32", "model.num_layers=2", "model.mlp_dim=64", "data.seq_len=32", "data.batch_size=8"),
    *("optim.warmup_steps=2", "run.steps=8", "run.log_every=1", "run.eval_every=4", "run.eval_batches=2"),
    *("run.sample_tokens=0", "checkpoint.every_steps=4"),
)


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
def step_of(model, optim, steps, spike_factor, compute):
    """The train step without what it does not depend on, so that runs in this process share one trace."""
    made = config.Config(model=model, optim=optim, run=config.RunConfig(steps=steps, spike_factor=spike_factor))
    return make_train_step(made, compute)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
    monkeypatch.setattr(train, "make_eval_step", functools.cache(train.make_eval_step))

    def make(made, compute):
        return step_of(made.model, made.optim, made.run.steps, made.run.spike_factor, compute)

    monkeypatch.setattr(train_step, "make_train_step", make)


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
        make = train.compile_step

        def make_watched(*args):
            step, count = make(*args), 0

            def watched(state, batch):
                nonlocal count
                count += 1
                done = step(state, batch)
                return acts[count](*done) if count in acts else done

            return watched

        monkeypatch.setattr(train, "compile_step", make_watched)

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


@pytest.mark.parametrize(
    "overrides",
    [
        ("run.steps=9",),
        ("run.steps=9", "data.workers=1"),
        (
            *("run.steps=9", "optim.optimizer=muon", "optim.accumulation_steps=2", "run.precision=float16"),
            *("optim.ema_decay=0.9", "run.spike_factor=50", "model.dropout=0.2"),
        ),
    ],
    ids=["adamw", "workers", "muon-float16-average-spikes-dropout"],
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
    spread = "mesh.fsdp=2", "mesh.context=2", "mesh.stage=2"
    assert run(config_of("run.steps=8", "optim.schedule=constant", *spread)) == 0
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

    def note_fetch(reporter, step, *values):
        events.append(f"fetch {step}")
        fetch(reporter, step, *values)

    def step(state, batch):
        events.append(f"dispatch {int(state.step) + 1}")
        values = {"loss": 1.0, "learning_rate": 0.0, "grad_norm": 1.0, "tokens": 1.0, "updated": 1.0, "skipped": 0}
        return State(state.step + 1), values

    class State:
        def __init__(self, step):
            self.step = step

    class Checkpoint:
        is_saving = False

        def save(self, step, *parts):
            events.append(f"save {step}")
            self.is_saving = True

        def wait(self):
            events.append("wait")
            self.is_saving = False

        def poll(self):
            return False

        def is_best(self, loss):
            return False

    monkeypatch.setattr(Reporter, "_fetch", note_fetch)
    monkeypatch.setattr(train.Run, "_next_batch", lambda run: None)
    monkeypatch.setattr(train.Run, "_evaluate", lambda run, state: events.append("evaluate") or 1.0)
    monkeypatch.setattr(train, "_is_finite", lambda state: True)
    made = config_of("run.steps=5", "run.eval_every=3", "checkpoint.every_steps=3")
    clock = goodput.Clock(0.0, watchdog.Watchdog(None))
    reporter = Reporter(made, one_device, 0, 0.0, clock)
    saving = Saver(Checkpoint(), made.checkpoint)
    looping = train.Run(made, one_device, step, None, iter(()), None, saving, reporter, train.Stop(), clock)
    assert looping.loop(State(0)).step == 5
    reporter.close()
    assert events == [
        *("dispatch 1", "dispatch 2", "fetch 1", "dispatch 3", "fetch 2", "fetch 3", "evaluate", "save 3"),
        *("dispatch 4", "dispatch 5", "fetch 4", "fetch 5", "evaluate", "save 5", "wait"),
    ]


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
