"""Whole runs whose checkpoints are damaged, whose folder goes away, or that keep the best."""

import resource
import shutil

import numpy as np
import test_train
from test_train import losses, run, saved_arrays, saved_steps, steps_logged

from tpu_train.checkpoint import saver

cache, compiled_once, traced_once = test_train.cache, test_train.compiled_once, test_train.traced_once
devices, texts, config_of = test_train.devices, test_train.texts, test_train.config_of
ends, at_step = test_train.ends, test_train.at_step


def test_the_best_by_validation_loss_are_saved_when_they_are_found_and_kept(config_of):
    made = config_of("run.eval_every=1", "checkpoint.every_steps=0", "checkpoint.keep_last=1", "checkpoint.keep_best=2")
    assert run(made) == 0
    validation = {step: values[2] for step, values in losses(made.run.workdir).items()}
    assert sorted(validation) == [1, 2, 3, 4, 5, 6, 7, 8]
    best = sorted(validation, key=validation.get)[:2]
    assert saved_steps(made.run.workdir) == sorted({*best, 8})


def test_a_folder_that_is_gone_for_some_steps_costs_no_step(config_of, at_step, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(saver, "_FIRST_WAIT", 0.0)
    made = config_of()
    folder, away = tmp_path / "run" / "checkpoints", tmp_path / "away"
    at_step({4: move(folder, away), 6: move(away, folder)})
    assert run(made) == 0
    err = capsys.readouterr().err.splitlines()
    assert "saving step 4 in" in err[0]
    assert err[-1] == "tpu-train: saving works again"
    assert {6, 8} <= set(saved_steps(made.run.workdir))
    assert steps_logged(made.run.workdir) == list(range(1, 9))
    assert run(made) == 0


def test_the_line_of_a_step_is_written_before_its_checkpoint(config_of, monkeypatch):
    made, save, last_line = config_of(), saver.Checkpoints.save, {}

    def noted(self, step, *parts):
        last_line[step] = steps_logged(made.run.workdir)[-1]
        save(self, step, *parts)

    monkeypatch.setattr(saver.Checkpoints, "save", noted)
    assert run(made) == 0
    assert last_line == {4: 4, 8: 8}


def test_no_checkpoint_while_lines_wait_for_the_disk(config_of, at_step, monkeypatch, capsys):
    """A start from it would not write them: a run that was killed then would lack them for ever."""
    monkeypatch.setattr(saver, "_FIRST_WAIT", 0.0)
    made = config_of()
    at_step({4: full(True), 6: full(False)})
    try:
        assert run(made) == 0
    finally:
        full(False)()
    err = capsys.readouterr().err.splitlines()
    assert any(
        "saving step 4 in" in line and "failed: [Errno 27] File too large, and lines of metrics.jsonl wait" in line
        for line in err
    )
    assert err[-1] == "tpu-train: saving works again"
    assert 4 not in saved_steps(made.run.workdir)
    assert steps_logged(made.run.workdir) == list(range(1, 9))


def full(is_full):
    """No file may grow past 100 bytes, which metrics.jsonl has by then."""

    def act(*done):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if is_full else hard, hard))
        return done

    return act


def move(source, target):
    def act(*done):
        source.rename(target)
        return done

    return act


def test_damage_to_the_newest_checkpoint_costs_only_the_steps_since_the_one_before(config_of, ends, capsys, tmp_path):
    assert run(config_of()) == 0
    array = max((tmp_path / "run" / "checkpoints" / "8" / "state" / "d").iterdir())
    array.write_bytes(array.read_bytes()[:-1])
    assert run(config_of()) == 0
    said = capsys.readouterr()
    assert f"run/checkpoints/8 is damaged and skipped: state/d/{array.name} has" in said.err
    assert f"continuing from step 4 in {config_of().run.workdir}" in said.out
    (wanted, _), (state, _) = ends
    for name in wanted:
        np.testing.assert_array_equal(state[name], wanted[name], err_msg=name)
    assert saved_steps(config_of().run.workdir) == [4, 8]
    assert saved_arrays(config_of().run.workdir, 8)


def test_first_weights_come_from_another_run_and_only_once(config_of, capsys, tmp_path):
    first = config_of(f"run.workdir={tmp_path / 'first'}")
    assert run(first) == 0
    made = config_of(f"run.init_from={tmp_path}/first@8", "data.seed=1")
    assert run(made) == 0
    assert f"initial weights: step 8 of {tmp_path}/first; optimizer and data start anew" in capsys.readouterr().out
    first_loss, fresh_loss = losses(made.run.workdir)[1][0], losses(first.run.workdir)[1][0]
    assert first_loss < fresh_loss - 0.01
    wanted = losses(made.run.workdir)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    shutil.rmtree(tmp_path / "first")
    assert run(made) == 0
    said = capsys.readouterr().out
    assert "initial weights" not in said
    assert f"continuing from step 4 in {made.run.workdir}" in said
    assert {step: found[:2] for step, found in losses(made.run.workdir).items()} == {
        step: found[:2] for step, found in wanted.items()
    }


def test_the_last_step_is_saved_once_when_it_is_one_to_save_anyway(config_of):
    assert run(config_of("run.steps=8", "checkpoint.every_steps=4")) == 0
    assert saved_steps(config_of().run.workdir) == [4, 8]
