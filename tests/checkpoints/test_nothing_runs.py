"""Nothing in a checkpoint runs: no pickle is written or read, and hostile values are only values."""

import io
import json
import os
import pickle
import pickletools

import pytest
from checkpoint_cases import abstract_like, state_of

from tpu_train.checkpoint import Checkpoints, manifest
from tpu_train.config import UserError


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def workdir(tmp_path, save):
    with Checkpoints(tmp_path / "run", keep_last=1) as checkpoints:
        save(checkpoints, 1)
    return tmp_path / "run"


def is_pickle(content):
    try:
        return len(list(pickletools.genops(io.BytesIO(content)))) > 1
    except ValueError:
        return False


def read_all(workdir, batches):
    """Everything that reads a checkpoint; what can't be read is refused in one line."""
    refused = []
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        steps = (
            lambda: checkpoints.find(None),
            lambda: checkpoints.saved_config(1),
            lambda: checkpoints.restore(1, abstract_like(state_of(0)), batches),
        )
        for step in steps:
            try:
                step()
            except UserError as error:
                refused.append(str(error))
    assert not any("\n" in line for line in refused)
    return refused


def test_no_file_of_a_checkpoint_is_a_pickle(workdir):
    assert is_pickle(pickle.dumps({"a": 1}))
    files = [path for path in workdir.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if is_pickle(path.read_bytes())]


def test_pickles_in_place_of_its_files_are_refused_and_not_run(workdir, batches, tmp_path):
    folder, ran = workdir / "checkpoints" / "1", tmp_path / "ran"
    for name in sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file()):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(pickle.dumps(Bomb(ran)))
        refused = read_all(workdir, batches)
        assert refused, name
        # Whoever can write the files can write a manifest that agrees with them.
        if name.name != manifest.FILE_NAME:
            seal(folder)
            read_all(workdir, batches)
        (folder / name).write_bytes(before)
        seal(folder)
        assert not ran.exists(), name
    assert not read_all(workdir, batches)
    pickle.loads(pickle.dumps(Bomb(ran)))
    assert ran.exists()


def seal(folder):
    (folder / manifest.FILE_NAME).unlink(missing_ok=True)
    manifest.write(folder, None)


@pytest.mark.parametrize(
    "values",
    [
        {"state": "os.system"},
        {"state": "builtins.exec", "data": "subprocess.Popen", "config": "pickle.loads"},
        {"state": {"__reduce__": ["os.mkdir", "ran"]}},
    ],
)
def test_handlers_that_the_metadata_names_are_not_imported(workdir, batches, tmp_path, values, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = workdir / "checkpoints" / "1"
    metadata = json.loads((folder / "_CHECKPOINT_METADATA").read_text())
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata | {"item_handlers": values}))
    seal(folder)
    read_all(workdir, batches)
    assert not (tmp_path / "ran").exists()


def test_hostile_values_of_a_config_stay_values(tmp_path, batches, text_config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "__import__('os').mkdir('ran')"
    hostile = {"data.tokenizer": code, "run.sample_prompt": "{0.__class__}" + code, "data.text_key": "$(mkdir ran)"}
    config = text_config
    for name, value in hostile.items():
        section, field = name.split(".")
        part = type(getattr(config, section))(**(vars(getattr(config, section)) | {field: value}))
        config = type(config)(**(vars(config) | {section: part}))
    with Checkpoints(tmp_path / "run", keep_last=1) as checkpoints:
        checkpoints.save(1, state_of(1), batches, config)
    with Checkpoints(tmp_path / "run", keep_last=None) as checkpoints:
        assert checkpoints.saved_config(1) == config
    assert not (tmp_path / "ran").exists()
