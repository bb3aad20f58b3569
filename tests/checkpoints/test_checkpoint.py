"""Checkpoints: what is kept, what counts as one, what comes back on another mesh, and how failures are told."""

import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import abstract_like, state_of, steps_in

from tpu_train import data, precision
from tpu_train.checkpoint import PARTS, Checkpoints, SaveFailed, refuse_other_run, store
from tpu_train.config import Config, UserError, apply_override
from tpu_train.sharding import P
from tpu_train.train_step import abstract_state, init_state

CPU = precision.Compute(jnp.dtype("float32"), "xla", "cpu")


def test_keep_last_keeps_that_many(tmp_path, save):
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        for step in (1, 2, 3, 4, 5):
            save(checkpoints, step)
        checkpoints.wait()
        assert steps_in(tmp_path) == [4, 5]
        assert checkpoints.latest() == 5


def test_reading_deletes_nothing(tmp_path, save):
    with Checkpoints(tmp_path, keep_last=3) as checkpoints:
        for step in (1, 2, 3):
            save(checkpoints, step)
    half = tmp_path / "checkpoints" / "4.orbax-checkpoint-tmp"
    half.mkdir()
    with Checkpoints(tmp_path, keep_last=None) as checkpoints:
        assert checkpoints.find(None) == 3
        assert checkpoints.find(1) == 1
    assert steps_in(tmp_path) == [1, 2, 3]
    assert half.is_dir()


def test_relative_workdir_is_saved_and_restored(tmp_path, save, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Checkpoints("runs/here", keep_last=2) as checkpoints:
        save(checkpoints, 1)
    with Checkpoints("runs/here", keep_last=2) as checkpoints:
        restored = checkpoints.restore(1, abstract_like(state_of(0)))
    assert steps_in(tmp_path / "runs" / "here") == [1]
    np.testing.assert_array_equal(restored["w"], np.full(4, 1, np.float32))


def test_what_is_no_checkpoint_is_never_taken_for_one_nor_counted_nor_deleted(tmp_path, save):
    folder = tmp_path / "checkpoints"
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    (folder / "9.unfinished.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    for name in ("7", "8", "9"):
        (folder / name).mkdir()
    (folder / "8" / "state").mkdir()
    (folder / "notes").write_text("by hand")
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        assert checkpoints.latest() == 2
        assert checkpoints.find(None) == 2
        with pytest.raises(UserError, match="no checkpoint of step 7; it has 1, 2"):
            checkpoints.find(7)
        with pytest.raises(UserError, match="8 is damaged: it lacks data, config"):
            checkpoints.find(8)
        save(checkpoints, 3)
        checkpoints.wait()
        assert steps_in(tmp_path) == [2, 3, 7, 8, 9]
        assert checkpoints.latest() == 3
        save(checkpoints, 7)  # takes the place of the folder of that name
        checkpoints.wait()
        assert checkpoints.latest() == 7
        np.testing.assert_array_equal(checkpoints.restore(7, abstract_like(state_of(0)))["w"], np.full(4, 7.0))
    assert steps_in(tmp_path) == [3, 7, 8, 9]
    assert (folder / "notes").read_text() == "by hand"


@pytest.mark.parametrize("part", PARTS)
def test_a_checkpoint_without_one_of_its_parts_is_none(tmp_path, save, part):
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    (tmp_path / "checkpoints" / "2" / part).rename(tmp_path / part)
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        assert checkpoints.latest() == 1


def test_an_empty_folder_has_no_latest(tmp_path):
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(UserError, match=r"checkpoints has no complete checkpoint$"):
            checkpoints.find(None)


@pytest.mark.parametrize("devices", [1, 8])
def test_a_snapshot_does_not_share_memory_with_donated_buffers(tmp_path, batches, text_config, mesh_of, devices):
    mesh = mesh_of(fsdp=devices)
    sharding = jax.NamedSharding(mesh, P("fsdp"))
    state = {f"w{i}": jax.device_put(np.full((1 << 19,), 1000.0 + i, np.float32), sharding) for i in range(8)}
    wanted = {name: np.asarray(x) for name, x in state.items()}
    go_on = jax.jit(lambda state: jax.tree.map(lambda x: x - 7.0, state), donate_argnums=0)
    abstract = abstract_like(state)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2, 3):
            wanted = {name: np.array(x) for name, x in state.items()}
            checkpoints.save(step, state, batches, text_config)
            for _ in range(30):
                state = go_on(state)
            jax.block_until_ready(state)
            checkpoints.wait()
            restored = checkpoints.restore(step, abstract)
            for name in wanted:
                np.testing.assert_array_equal(restored[name], wanted[name])


@pytest.mark.parametrize("devices", [1, 8])
def test_what_orbax_is_given_has_memory_of_its_own(tmp_path, save, mesh_of, monkeypatch, devices):
    state = {"w": jax.device_put(np.ones(64, np.float32), jax.NamedSharding(mesh_of(fsdp=devices), P("fsdp")))}
    given = []
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        write = store.ocp.save_checkpointables_async
        monkeypatch.setattr(
            store.ocp,
            "save_checkpointables_async",
            lambda path, parts, **options: given.append(parts["state"]) or write(path, parts, **options),
        )
        save(checkpoints, 1, state)
        pointers = [
            {shard.data.unsafe_buffer_pointer() for shard in tree["w"].addressable_shards} for tree in (state, *given)
        ]
    assert [len(found) for found in pointers] == [devices, devices]
    assert pointers[0].isdisjoint(pointers[1])


@pytest.mark.parametrize(
    ("then", "now"), [((1, 1, 1), (1, 8, 1)), ((1, 8, 1), (1, 1, 1)), ((1, 4, 2), (1, 2, 1, 2, 1, 2))]
)
def test_a_state_comes_back_equal_on_another_mesh(tmp_path, tiny, mesh_of, batches, then, now):
    config = tiny()
    mesh_of(*then)
    state = init_state(config, CPU)
    wanted = jax.tree.leaves(jax.device_get(state))
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, state, batches, config)
    mesh = mesh_of(*now)
    with Checkpoints(tmp_path, keep_last=None) as checkpoints:
        restored = checkpoints.restore(1, abstract_state(config, CPU))
    leaves = jax.tree.leaves(restored)
    assert len(leaves) == len(wanted)
    for got, want in zip(leaves, wanted, strict=True):
        assert got.sharding.mesh == mesh
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    if now[1] > 1:
        assert any("fsdp" in str(x.sharding.spec) for x in leaves)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"w": ((5,), "float32"), "b": ((), "int32")}, r"has 'w' as float32\[4\], this run needs float32\[5\]"),
        ({"w": ((4,), "bfloat16"), "b": ((), "int32")}, r"has 'w' as float32\[4\], this run needs bfloat16\[4\]"),
        ({"w": ((4,), "float32"), "b": ((), "int32"), "c": ((), "int32")}, "has no array 'c', which this model needs"),
        ({"w": ((4,), "float32")}, "has the array 'b', which this run does not know"),
    ],
)
def test_other_arrays_than_the_saved_ones_are_refused_in_one_line(tmp_path, save, wanted, message):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        save(checkpoints, 1, {"w": jnp.ones(4), "b": jnp.int32(3)})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {name: jax.ShapeDtypeStruct(*x, sharding=device) for name, x in wanted.items()}
    with Checkpoints(tmp_path, keep_last=None) as checkpoints, pytest.raises(UserError, match=message) as refused:
        checkpoints.restore(1, abstract)
    assert str(refused.value).startswith(str(tmp_path / "checkpoints" / "1"))
    assert "\n" not in str(refused.value)


def test_a_damaged_checkpoint_is_refused_in_one_line(tmp_path, save):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        save(checkpoints, 1)
    files = [path for path in (tmp_path / "checkpoints" / "1" / "state").rglob("*") if path.parent.name == "d"]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:40])
    reading = Checkpoints(tmp_path, keep_last=None)
    with reading, pytest.raises(UserError, match=r"checkpoints/1 can't be read: .*; move it away") as refused:
        reading.restore(1, abstract_like(state_of(0)))
    assert "\n" not in str(refused.value)


def test_the_saved_config_comes_back_whole(tmp_path, batches):
    config = apply_override(Config(), "model.window_pattern=128,0")
    config = apply_override(apply_override(config, "data.packing=false"), "optim.clip_norm=none")
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(1, state_of(1), batches, config)
    with Checkpoints(tmp_path, keep_last=None) as checkpoints:
        assert checkpoints.saved_config(1) == config


def test_the_data_position_comes_back(tmp_path, batches, text_config):
    for _ in range(3):
        next(batches)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.save(3, state_of(3), batches, text_config)
    wanted = [next(batches) for _ in range(3)]
    again = data.train_batches(text_config.data, vocab_size=256)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        checkpoints.restore(3, abstract_like(state_of(0)), again)
    for want in wanted:
        got = next(again)
        assert got.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
    again.close()


def test_other_data_than_the_saved_position_belongs_to_is_refused_in_one_line(tmp_path, save, text_config):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        save(checkpoints, 1)
    other = data.train_batches(dataclasses.replace(text_config.data, seed=5), vocab_size=256)
    with Checkpoints(tmp_path, keep_last=1) as checkpoints, pytest.raises(UserError, match=r"data\.seed=0, this run 5"):
        checkpoints.restore(1, abstract_like(state_of(0)), other)
    other.close()


class Failing:
    """A pending save whose background thread has failed."""

    def result(self):
        raise OSError(28, "No space left on device")


@pytest.fixture
def failing(tmp_path, save, monkeypatch):
    """A workdir with a checkpoint of step 1; its Checkpoints' next save fails in the background."""
    with Checkpoints(tmp_path, keep_last=2) as checkpoints:
        save(checkpoints, 1)
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    monkeypatch.setattr(store.ocp, "save_checkpointables_async", lambda *args, **options: Failing())
    return checkpoints


LINE = r"^saving step 2 in .*checkpoints failed: \[Errno 28\] No space left on device; kept: checkpoint of step 1$"


def test_the_error_of_a_failed_save_comes_at_the_next_save(failing, save):
    save(failing, 2)
    with pytest.raises(SaveFailed, match=LINE):
        save(failing, 3)


def test_the_error_of_a_failed_save_comes_on_waiting(failing, save):
    save(failing, 2)
    with pytest.raises(SaveFailed, match=LINE):
        failing.wait()


def test_the_error_of_a_failed_save_comes_on_leaving(failing, save):
    with pytest.raises(SaveFailed, match=LINE), failing:
        save(failing, 2)


def test_the_error_of_a_failed_save_is_added_to_the_one_under_way(failing, save):
    def fail_otherwise():
        with failing:
            save(failing, 2)
            raise UserError("something else")

    with pytest.raises(UserError, match="something else") as raised:
        fail_otherwise()
    (note,) = raised.value.__notes__
    assert re.match(LINE, note)


def test_a_save_that_can_not_start_is_told_in_one_line(failing, save, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store.ocp, "save_checkpointables_async", refuse)
    with pytest.raises(SaveFailed, match=r"saving step 2 in .* failed: \[Errno 13\] Permission denied"):
        save(failing, 2)


def test_leaving_waits_for_the_save_but_not_after_an_interrupt(tmp_path, save, monkeypatch):
    allowed, finished = threading.Event(), threading.Event()
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    write = store.ocp.save_checkpointables_async

    class Slow:
        def __init__(self, *args, **options):
            self.saving = write(*args, **options)

        def result(self):
            allowed.wait(60)
            self.saving.result()
            finished.set()

    monkeypatch.setattr(store.ocp, "save_checkpointables_async", Slow)

    def interrupt():
        with checkpoints:
            save(checkpoints, 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert not finished.is_set()
    assert steps_in(tmp_path) == []
    allowed.set()
    with checkpoints:
        save(checkpoints, 2)
    assert finished.is_set()
    assert steps_in(tmp_path) == [2]


@pytest.mark.parametrize("name", ["checkpoints", "."])
def test_a_file_where_a_folder_must_be_is_refused_in_one_line(tmp_path, name):
    workdir = tmp_path / "run"
    path = workdir / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("a file")
    with pytest.raises(UserError, match=r"can't make the folder .*run/checkpoints"):
        Checkpoints(workdir, keep_last=1)
    assert path.read_text() == "a file"


@pytest.mark.parametrize(
    "override",
    ["run.steps=7", "run.log_every=3", "mesh.fsdp=2", "checkpoint.keep_last=9", "run.sample_tokens=0", "run.workdir=x"],
)
def test_what_does_not_change_the_numbers_may_change_on_resume(tmp_path, override):
    config = apply_override(Config(), override)
    assert config != Config()
    refuse_other_run(Config(), config, tmp_path)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.num_layers=8", "model.num_layers=4, this run has 8"),
        ("optim.peak_lr=0.5", "optim.peak_lr=0.001, this run has 0.5"),
        ("data.seed=3", "data.seed=0, this run has 3"),
        ("run.seed=3", "run.seed=0, this run has 3"),
        ("run.precision=bfloat16", "run.precision=auto, this run has bfloat16"),
    ],
)
def test_what_makes_it_another_run_is_refused_on_resume(tmp_path, override, line):
    with pytest.raises(UserError) as refused:
        refuse_other_run(Config(), apply_override(Config(), override), tmp_path)
    assert str(refused.value) == f"{tmp_path} was trained with {line}; set it back or choose another --workdir"
