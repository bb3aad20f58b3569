"""`tpu-train diff`: two runs of the same bits, the first step where others part, checkpoints, and bad input."""

import os
import shutil

import numpy as np
import pytest
import test_train
from test_train import run

from tpu_train import checkpoint, diff, main, metrics, train
from tpu_train.config import UserError

cache, compiled_once, traced_once = test_train.cache, test_train.compiled_once, test_train.traced_once
devices, texts, config_of = test_train.devices, test_train.texts, test_train.config_of


@pytest.fixture
def tpu_train(capsys):
    def call(*arguments):
        capsys.readouterr()
        code = main.main(["tpu-train", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def test_two_runs_of_one_config_are_the_same_bits_and_others_part_where_they_do(
    config_of, tpu_train, tmp_path, devices
):
    for name in ("a", "b"):
        assert run(config_of("run.deterministic=true", f"run.workdir={tmp_path / name}")) == 0
    same = (
        "config: the same\nmetrics: the same at all 8 steps that both logged\ncheckpoints: the same at the steps 4, 8\n"
    )
    assert tpu_train("diff", tmp_path / "a", tmp_path / "b") == (0, same, "")

    # Goes on from step 4 of the same run, at another rate.
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "checkpoints" / "8")
    other = ("optim.peak_lr=2e-3", "run.log_every=2", f"run.workdir={tmp_path / 'c'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "refuse_other_run", lambda *args: None)
        assert run(config_of(*other)) == 0
    code, out, err = tpu_train("diff", tmp_path / "a", tmp_path / "c", "--arrays=3")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[:2] == ["config: 3 field(s) differ", "  optim.peak_lr = 0.001 | 0.002"]
    here, there = ({line["step"]: line for line in metrics.read(tmp_path / name)} for name in "ac")
    assert lines[4:6] == [
        "metrics: the same up to step 4, other at step 5",
        f"  learning_rate = {here[5]['learning_rate']!r} | {there[5]['learning_rate']!r}, apart by "
        f"{abs(here[5]['learning_rate'] - there[5]['learning_rate']):.3g}",
    ]
    assert lines[6] == "checkpoints: the same up to step 4, other at step 8"
    assert all(line.startswith("  model.blocks") and "apart by" in line for line in lines[7:10])
    assert lines[10].endswith("more (--arrays)")


def test_arrays_are_compared_by_name_shape_and_bits():
    here = {"a": np.zeros(3, np.float32), "b": np.zeros(2), "c": np.array([1.0, 2.0, np.nan]), "e": np.ones(1)}
    there = {"a": np.array([0, -0.5, 0], np.float32), "b": np.zeros((2, 1)), "c": here["c"].copy(), "d": np.ones(1)}
    assert diff._arrays(here, there, 9) == [
        "  a: 1 of 3 values, apart by 0.5 at most",
        "  b is float64[2] | float64[2, 1]",
        "  d is in the second run alone",
        "  e is in the first run alone",
    ]
    assert diff._arrays({"z": np.zeros(1)}, {"z": -np.zeros(1)}, 9) != []  # another sign of zero is another bit


def test_a_step_that_was_not_finite_in_one_run_is_a_difference(tmp_path, capsys):
    for name, loss in (("a", 2.0), ("b", float("nan"))):
        with metrics.MetricsWriter(tmp_path / name, 0) as writer:
            writer.write(1, {"loss": 3.0, "tokens_per_second": hash(name) % 7})
            writer.write(3, {"loss": loss})
    assert diff.show(str(tmp_path / "a"), str(tmp_path / "b"), 5) == 1
    said = "metrics: the same up to step 1, other at step 3\n  loss = 2.0 | not finite\n"
    assert capsys.readouterr().out == said
    assert diff.show(str(tmp_path / "b"), str(tmp_path / "b"), 5) == 0


def test_runs_with_nothing_in_common_or_that_are_none_are_refused(tmp_path, tpu_train):
    for name, step in (("a", 1), ("b", 2)):
        with metrics.MetricsWriter(tmp_path / name, 0) as writer:
            writer.write(step, {"loss": 3.0})
    a, b, none = tmp_path / "a", tmp_path / "b", tmp_path / "none"
    for arguments, message in (
        ([a, b], f"{a} and {b} have no logged step and no checkpoint in common"),
        ([a, none], f"{none} is no run: it has neither metrics.jsonl nor checkpoints"),
        ([a], "diff takes two workdirs, not 1: tpu-train diff runs/a runs/b"),
        ([a, b, a], "diff takes two workdirs, not 3: tpu-train diff runs/a runs/b"),
    ):
        assert tpu_train("diff", *arguments) == (2, "", f"tpu-train: {message}\n")
    (a / metrics.FILE_NAME).write_text("{}\n{}\n")
    assert tpu_train("diff", a, b)[0] == 2


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_tells_xla_before_it_starts(config_of, tmp_path, monkeypatch, wanted):
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    seen = []
    monkeypatch.setattr(train, "train", lambda *args, **kwargs: seen.append(os.environ["XLA_FLAGS"]) or 0)
    file = tmp_path / "config.py"
    file.write_text("from tpu_train.config import Config\n\n\ndef config():\n    return Config()\n")
    assert main.main(["tpu-train", "train", f"--config={file}", f"--set=run.deterministic={wanted}"]) == 0
    assert seen == ["--a=1 --xla_gpu_deterministic_ops=true" if wanted else "--a=1"]


def test_a_workdir_without_checkpoints_is_refused_by_none(tmp_path):
    with pytest.raises(UserError, match="is no run"):
        diff.show(str(tmp_path), str(tmp_path), 1)
