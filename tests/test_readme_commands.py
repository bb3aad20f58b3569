"""Commands of the README that other tests don't run, as far as they can run on this machine."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tpu_train import main, mesh

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_profile_s_command_traces(monkeypatch, tmp_path):
    """As it stands but for the folder and a smaller model."""
    (command,) = re.findall(r"`tpu-train (train [^`]*--profile_steps=[^`]*)`", README)
    make = mesh.make_mesh
    monkeypatch.setattr(mesh, "make_mesh", lambda config: make(config, jax.devices()[:1]))
    monkeypatch.chdir(ROOT)
    small = ("run.steps=14", "model.num_layers=1", "model.model_dim=16", "data.seq_len=16", "data.batch_size=2")
    rest = (
        "run.sample_tokens=0",
        "run.eval_batches=1",
        "optim.warmup_steps=2",
        f"data.paths={ROOT}/launch/*.sh",
        "data.source=text",
    )
    settings = [f"--set={each}" for each in (*small, *rest)]
    assert main.main(["tpu-train", *shlex.split(command), f"--workdir={tmp_path}", *settings]) == 0
    assert len(list(tmp_path.glob("profile/plugins/profile/*/*.xplane.pb"))) == 1
    assert (tmp_path / "profile" / "memory_step13.prof").exists()


@pytest.mark.parametrize("script", ["tpu", "gpu"])
def test_benchmarks_of_devices_that_are_not_here_end_with_2_and_one_line(script):
    commands = re.findall(rf"`python (benchmarks/{script}\.py[^`]*)`", README)
    assert commands
    device = {"tpu": "TPU VM", "gpu": "GPU"}[script]
    command = [sys.executable, *shlex.split(commands[-1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(rf"{script}\.py: needs a {device}.*; devices here: none but the CPU", line)
