"""Storage that fails under a run: files that can't grow, a folder that goes away; what is said, and tried again."""

import contextlib
import errno
import resource
import shutil
import time

import numpy as np
import pytest
from checkpoint_cases import abstract_like, state_of, steps_in

from tpu_train.checkpoint import Checkpoints, SaveFailed, Saver, saver, store
from tpu_train.config import CheckpointConfig

LARGE = 200_000  # numbers; more than files may hold while they can't grow


@contextlib.contextmanager
def no_large_files():
    """The kernel refuses to let files of this process grow past 100 kB, as it would on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(saver, "_FIRST_WAIT", 0.05)
    monkeypatch.setattr(saver, "_LONGEST_WAIT", 0.2)


@pytest.fixture
def opened(tmp_path, save, quick):
    """Checkpoints of a workdir with one of step 1."""
    checkpoints = Checkpoints(tmp_path / "run", keep_last=2)
    save(checkpoints, 1, random_state(1))
    checkpoints.wait()
    return checkpoints


def random_state(step):
    return {"w": np.random.default_rng(step).standard_normal(LARGE, np.float32) * state_of(1, LARGE)["w"]}


def until_told(step, checkpoints):
    limit = time.monotonic() + 240
    while not checkpoints.poll():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_save_that_fails_in_the_background_is_told_at_the_next_step(opened, save, tmp_path):
    with no_large_files():
        save(opened, 2, random_state(2))
        with pytest.raises(
            SaveFailed, match=r"^saving step 2 in .*: \[Errno 27\] File too large; kept: checkpoint of step 1$"
        ) as failed:
            until_told(2, opened)
    assert failed.value.by_storage
    assert [path.name for path in opened.directory.iterdir()] == ["1"]  # nothing half-written fills the disk
    save(opened, 3, random_state(3))
    until_told(3, opened)
    assert steps_in(tmp_path / "run") == [1, 3]
    with Checkpoints(tmp_path / "run", keep_last=None) as reading:
        assert reading.latest() == 3
        got = reading.restore(3, abstract_like(state_of(0, LARGE)))["w"]
    np.testing.assert_array_equal(got, random_state(3)["w"])


def train(saver, parts, steps, enough=lambda saved: False):
    """Steps through `steps`, or until `enough` saves were started; returns the steps at which they were."""
    saved, limit = [], time.monotonic() + 240
    for step in steps:
        time.sleep(0.01)
        assert time.monotonic() < limit
        if saver.due(step, 0):
            saved.append(step)
            saver.save(step, *parts(step))
        if enough(saved):
            break
    return saved


@pytest.fixture
def parts(batches, text_config):
    return lambda step: (random_state(step), batches, text_config, None)


def test_a_full_disk_is_tried_again_with_later_states_until_there_is_room(opened, parts, tmp_path, capsys):
    saving = Saver(opened, CheckpointConfig(every_steps=100_000, retry_minutes=1.0))
    with no_large_files():
        tried = train(saving, parts, range(99_998, 199_999), lambda saved: len(saved) == 4)
        assert tried[0] == 100_000
        while opened.is_saving:
            saving.due(tried[-1], 0)
    lines = capsys.readouterr().err.splitlines()
    for step, wait, line in zip(tried, ("0.05", "0.1", "0.2", "0.2"), lines, strict=True):
        assert line.startswith(f"tpu-train: saving step {step} in ")
        assert line.endswith(
            "failed: [Errno 27] File too large; kept: checkpoint of step 1; training goes on, "
            f"next try in {wait} s, giving up after 1 min"
        )
    (recovered,) = train(saving, parts, range(tried[-1] + 1, 199_999), lambda saved: opened.newest > 1)
    saving.finish(lambda: pytest.fail("nothing is left to save"))
    assert capsys.readouterr().err.splitlines() == ["tpu-train: saving works again"]
    assert steps_in(tmp_path / "run") == [1, recovered]
    assert [path for path in opened.directory.iterdir() if not path.name.isdigit()] == []
    assert train(saving, parts, [recovered + 1, 200_000]) == [200_000]
    saving.finish(lambda: None)


def test_a_folder_that_vanishes_is_not_made_again_and_used_when_it_is_back(opened, parts, tmp_path, capsys):
    saving = Saver(opened, CheckpointConfig(every_steps=5, retry_minutes=1.0))
    folder = tmp_path / "run"
    folder.rename(tmp_path / "away")
    tried = train(saving, parts, range(2, 10_000), lambda saved: len(saved) == 3)
    assert not folder.exists()
    line = capsys.readouterr().err.splitlines()[0]
    assert f"saving step 5 in {folder}/checkpoints failed: [Errno 2] the folder is gone; kept: no checkpoint; " in line
    (tmp_path / "away").rename(folder)
    saved = train(saving, parts, range(tried[-1] + 1, 20_000), lambda saved: saved and saved[-1] % 5 == 0)
    saving.finish(lambda: None)
    assert steps_in(folder)[-1] == saved[-1]


def test_a_file_in_the_folders_place_is_told(opened, parts, tmp_path, capsys):
    saving = Saver(opened, CheckpointConfig(every_steps=5, retry_minutes=1.0))
    shutil.rmtree(opened.directory)
    opened.directory.write_text("in the way")
    train(saving, parts, range(2, 8))
    assert "failed: [Errno 2] the folder is gone" in capsys.readouterr().err
    assert opened.directory.read_text() == "in the way"


def test_when_the_time_for_trying_is_over_the_run_stops_with_the_reason(opened, parts, tmp_path):
    saving = Saver(opened, CheckpointConfig(every_steps=5, retry_minutes=0.5 / 60))
    began = time.monotonic()
    with no_large_files(), pytest.raises(SaveFailed) as failed:
        train(saving, parts, range(2, 10_000))
    assert 0.5 < time.monotonic() - began < 240
    line = str(failed.value)
    assert "File too large" in line
    assert line.endswith("; kept: checkpoint of step 1; gave up after trying for 0.00833333 min")
    assert steps_in(tmp_path / "run") == [1]


def test_the_last_save_is_tried_again_too(opened, parts, tmp_path, capsys):
    saving = Saver(opened, CheckpointConfig(retry_minutes=1.0))
    folder = tmp_path / "run"
    folder.rename(tmp_path / "away")
    assert not saving.save(7, *parts(7))
    tries = []

    def save_again():
        tries.append(time.monotonic())
        if len(tries) == 3:
            (tmp_path / "away").rename(folder)
        saving.save(7, *parts(7))

    saving.finish(save_again)
    assert len(tries) == 3
    assert np.diff(tries).min() > 0.05
    assert steps_in(folder) == [1, 7]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE, errno.EDQUOT, errno.EACCES])
def test_refusals_of_the_file_system_are_tried_again(opened, parts, monkeypatch, number):
    saving = Saver(opened, CheckpointConfig(retry_minutes=1.0))
    with monkeypatch.context() as patch:

        def refuse(*args, **options):
            raise OSError(number, "refused")

        patch.setattr(store.ocp, "save_checkpointables_async", refuse)
        assert not saving.save(2, *parts(2))
    time.sleep(0.06)
    assert saving.due(3, 0)
    assert saving.save(3, *parts(3))
    saving.finish(lambda: None)
    assert opened.newest == 3


def test_any_other_error_stops_the_run_at_once(opened, parts, monkeypatch):
    saving = Saver(opened, CheckpointConfig(retry_minutes=1.0))

    def refuse(*args, **options):
        raise ValueError("no such handler")

    monkeypatch.setattr(store.ocp, "save_checkpointables_async", refuse)
    with pytest.raises(SaveFailed, match=r"failed: no such handler; kept: checkpoint of step 1$"):
        saving.save(2, *parts(2))
