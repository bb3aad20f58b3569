"""Damage to any file of a checkpoint is found, named and passed over; what an older version saved is still read."""

import json
import shutil
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import abstract_like, state_of, steps_in
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_train import data, precision
from tpu_train.checkpoint import PARTS, Checkpoints, manifest
from tpu_train.config import UserError
from tpu_train.train_step import abstract_state

CPU = precision.Compute(jnp.dtype("float32"), "xla", "cpu")


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory, text_config):
    """A workdir with checkpoints of steps 1 and 2; not to be changed."""
    workdir = tmp_path_factory.mktemp("two")
    batches = data.train_batches(text_config.data, vocab_size=256)
    with Checkpoints(workdir, keep_last=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), batches, text_config)
    batches.close()
    return workdir


@pytest.fixture
def two(two_saved, tmp_path):
    """A copy of it."""
    return shutil.copytree(two_saved, tmp_path / "run")


def files_of(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def restored(checkpoints, step):
    return np.asarray(checkpoints.restore(step, abstract_like(state_of(0)))["w"])


def flip(path, at=0.5):
    content = bytearray(path.read_bytes() or b"x")
    content[int(at * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1] if path.stat().st_size else b"x")


def test_the_manifest_names_every_file_but_itself(two_saved):
    folder = two_saved / "checkpoints" / "2"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted({*listed, "manifest.json"}) == files_of(folder)
    assert {name.split("/")[0] for name in listed} >= set(PARTS)


@pytest.mark.parametrize("harm", [flip, cut, Path.unlink], ids=["flipped", "cut", "gone"])
def test_harm_to_any_file_is_found_and_the_one_before_is_used(two, harm, capsys):
    folder = two / "checkpoints" / "2"
    for name in json.loads((folder / "manifest.json").read_text())["files"]:
        before = (folder / name).read_bytes()
        harm(folder / name)
        with Checkpoints(two, keep_last=None) as checkpoints:
            assert checkpoints.latest() == 1, name
            with pytest.raises(UserError, match=rf"checkpoints/2 is damaged: {name} "):
                checkpoints.find(2)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"tpu-train: {folder} is damaged and skipped: {name} ")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(before)
    with Checkpoints(two, keep_last=None) as checkpoints:
        assert checkpoints.latest() == 2
        assert checkpoints.find(2) == 2


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_flipped_bit_is_found(two_saved, tmp_path_factory, draw):
    folder = two_saved / "checkpoints" / "2"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    name = draw.draw(st.sampled_from([name for name, (size, _) in listed.items() if size]))
    content = bytearray((folder / name).read_bytes())
    content[draw.draw(st.integers(0, len(content) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("copy") / "2")
    (copy / name).write_bytes(content)
    with pytest.raises(manifest.Damaged, match=f"^{name} has another checksum than was saved$"):
        manifest.check(copy)


BAD = ["", "{", "[]", "7", '{"format": 2}', {"format": 2, "files": {"a": 1}}, {"format": 2, "files": {"a": [1, 2, 3]}}]


@pytest.mark.parametrize("content", [None, "flip", *BAD])
def test_a_checkpoint_without_a_good_manifest_is_a_torn_one(two, content, capsys):
    path = two / "checkpoints" / "2" / "manifest.json"
    if content is None:
        path.unlink()
    elif content == "flip":
        path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    else:
        sealed = isinstance(content, dict) and json.dumps(content | {"checksum": manifest._checksum(content)})
        path.write_text(sealed or content)
    with Checkpoints(two, keep_last=None) as checkpoints:
        assert checkpoints.latest() == 1
    assert "checkpoints/2 is damaged and skipped: manifest.json " in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"custom_metadata": 7, "item_handlers": {"state": "os.system"}}'])
def test_hostile_metadata_neither_stops_a_run_nor_is_read(two, save, content):
    (two / "checkpoints" / "2" / "_CHECKPOINT_METADATA").write_text(content)
    with Checkpoints(two, keep_last=2) as checkpoints:
        assert checkpoints.latest() == 1
        save(checkpoints, 3)
    assert steps_in(two) == [1, 2, 3]


def test_a_checkpoint_that_is_deleted_while_it_is_looked_at_is_none(two, monkeypatch):
    read = Path.read_bytes

    def late(path):
        if path.name == "manifest.json" and path.parent.name == "1":
            shutil.rmtree(path.parent, ignore_errors=True)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", late)
    with Checkpoints(two, keep_last=None) as checkpoints:
        assert checkpoints.latest() == 2
        assert checkpoints.steps() == [2]


def test_none_good_is_an_error_and_no_fresh_start(two):
    for step in (1, 2):
        flip(next((two / "checkpoints" / str(step) / "state" / "d").iterdir()))
    before = files_of(two)
    for keep_last in (None, 3):
        with Checkpoints(two, keep_last=keep_last) as checkpoints, pytest.raises(UserError) as refused:
            checkpoints.latest()
        line = str(refused.value)
        assert line.startswith(f"{two / 'checkpoints'} has no good checkpoint (step 1: state/d/")
        assert "; step 2: state/d/" in line
        assert line.endswith("move them away to start anew")
    assert files_of(two) == before


def test_a_damaged_newer_step_makes_room_when_training_reaches_it_again(two, save):
    flip(next((two / "checkpoints" / "2" / "state" / "d").iterdir()))
    with Checkpoints(two, keep_last=1) as checkpoints:
        assert checkpoints.latest() == 1
        save(checkpoints, 2, state_of(20))
        checkpoints.wait()
        assert checkpoints.latest() == 2
    assert steps_in(two) == [2]
    with Checkpoints(two, keep_last=None) as checkpoints:
        assert checkpoints.latest() == 2
        np.testing.assert_array_equal(restored(checkpoints, 2), np.full(4, 20.0))


@pytest.mark.parametrize("name", ["3.unfinished.orbax-checkpoint-tmp", "3.unfinished", "3.orbax-checkpoint-tmp"])
def test_what_a_killed_save_leaves_is_no_checkpoint_and_goes_at_the_next_start(two, save, name):
    folder = two / "checkpoints"
    shutil.copytree(folder / "2", folder / name)
    with Checkpoints(two, keep_last=None) as checkpoints:
        assert checkpoints.latest() == 2
        with pytest.raises(UserError, match="no checkpoint of step 3; it has 1, 2"):
            checkpoints.find(3)
    assert (folder / name / "manifest.json").exists()
    with Checkpoints(two, keep_last=2) as checkpoints:
        assert checkpoints.latest() == 2
        assert not (folder / name).exists()
        save(checkpoints, 3)
    assert steps_in(two) == [2, 3]


def test_a_good_checkpoint_of_that_step_is_not_written_again(two, save):
    with Checkpoints(two, keep_last=2) as checkpoints:
        save(checkpoints, 2, state_of(20))
    with Checkpoints(two, keep_last=None) as checkpoints:
        np.testing.assert_array_equal(restored(checkpoints, 2), np.full(4, 2.0))


def test_damaged_ones_are_not_counted_among_those_kept(two, save):
    cut(next((two / "checkpoints" / "2" / "state" / "d").iterdir()))
    with Checkpoints(two, keep_last=2) as checkpoints:
        save(checkpoints, 3)
    assert steps_in(two) == [1, 2, 3]


def test_a_newer_format_is_refused_in_one_line(two):
    path = two / "checkpoints" / "2" / "manifest.json"
    content = json.loads(path.read_text()) | {"format": 3}
    del content["checksum"]
    path.write_text(json.dumps(content | {"checksum": manifest._checksum(content)}))
    with pytest.raises(UserError, match=r"checkpoints/2 is of format 3, this version reads formats up to 2; take a"):
        Checkpoints(two, keep_last=2)


def test_a_checkpoint_from_before_manifests_is_read_and_said_to_be_unverified(tmp_path, capsys):
    """format_1.zip was written by the version before manifests: two steps of a tiny model."""
    with zipfile.ZipFile(Path(__file__).parent / "format_1.zip") as archive:
        archive.extractall(tmp_path)
    with Checkpoints(tmp_path, keep_last=None) as checkpoints:
        step = checkpoints.find(None)
        assert checkpoints.find(2) == step == 2
        saved = checkpoints.saved_config(2)
        state = checkpoints.restore(2, abstract_state(saved, CPU))
    assert saved.model.model_dim == 4
    assert int(state.step) == 2
    total = sum(np.abs(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(state))
    assert total == pytest.approx(82.61403202991507, rel=1e-9)
    said = f"tpu-train: {tmp_path}/checkpoints/2 is from an older version, without checksums: read unverified\n"
    assert capsys.readouterr().err == said
