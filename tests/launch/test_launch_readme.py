"""The launchers' commands that the README shows, run dry."""

import re

import pytest
from launch_sandbox import ROOT

BLOCKS = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if re.match(r"./launch/(tpu_vm|gke|slurm)", line)]
FLAGS = [block for block in BLOCKS if block.startswith("--name=")]


def test_the_readme_shows_each_launcher():
    assert {re.split(r"[/.]", line)[3] for line in COMMANDS} == {"tpu_vm", "gke", "slurm"}
    assert len(FLAGS) == 1


@pytest.mark.parametrize("line", COMMANDS)
def test_command_runs_dry(sandbox, line):
    (sandbox.folder / "run1.flags").write_text(FLAGS[0])
    (sandbox.folder / "mount.sh").touch()
    script, action, *arguments = line.removeprefix("./launch/").split()
    result = sandbox.run(script, action, "--dry_run", *arguments)
    assert result.returncode == 0, result.stderr
    assert re.match("gcloud compute tpus|mkdir|kubectl create|xpk workload create|sbatch", result.stdout)
    assert sandbox.calls() == []
    for config in re.findall(r"--config=(\S+)", line):
        assert (ROOT / config).exists()
