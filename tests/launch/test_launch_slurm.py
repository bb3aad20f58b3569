"""launch/slurm.sh, its batch script run for real under stand-ins for SLURM's programs; and launch/Dockerfile."""

import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest
from launch_sandbox import HOSTILE, ROOT

JOB = ("--name=run1", "--gpus=8", "--time=1-00:00:00")
TRAIN = ("--", "tpu-train", "train", "--config=configs/tiny.py")
RECORD = f"""#!{sys.executable} -IS
import json, os, sys
with open(os.environ["CLOUD"] + "/calls", "a") as calls:
    calls.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
sys.stderr.write(os.environ.get("WORDS", ""))
if os.environ.get("CODE"):
    sys.exit(int(os.environ["CODE"]))
"""
# As SLURM's: the script runs in a process of its own. As srun's: signals reach the command.
SBATCH = RECORD + 'open(os.environ["CLOUD"] + "/script", "w").write(sys.stdin.read())\n'
SRUN = RECORD + "os.execvp(next(a for a in sys.argv[1:] if a[0] != '-'), sys.argv[2:])\n"


@pytest.fixture
def cluster(sandbox):
    """A login node with .venv set up."""
    for name, content in {
        "sbatch": SBATCH,
        "srun": SRUN,
        "scontrol": RECORD,
        "squeue": RECORD,
        "scancel": RECORD,
    }.items():
        sandbox.add(name, content)
    (sandbox.repo / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(sandbox.folder / "show", sandbox.repo / ".venv" / "bin" / "tpu-train")
    return sandbox


def start_job(cluster, *command):
    """The batch job's process, of the script that submit hands over."""
    assert cluster.run("slurm.sh", "submit", *JOB, "--", *command).returncode == 0
    cluster.calls()
    environment = cluster.environment(SLURM_JOB_ID="42")
    return subprocess.Popen([cluster.bin / "bash", cluster.cloud / "script"], cwd=cluster.folder, env=environment)


def test_submit_hands_over_a_script_that_runs_the_command_as_written(cluster):
    flags = ("--partition=p q", "--account=$(touch owned)", "--cpus=32", "--log=my log")
    result = cluster.run("slurm.sh", "submit", *JOB, *flags, *TRAIN)
    assert result.returncode == 0, result.stderr
    (call,) = cluster.calls()
    expected = "--nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --time=1-00:00:00 --open-mode=append --requeue"
    assert {*expected.split(), "--partition=p q", "--account=$(touch owned)", "--cpus-per-task=32"} <= set(call)
    assert {"--job-name=run1", "--output=my log", "--signal=B:USR1@120"} <= set(call)
    assert start_job(cluster, "tpu-train", *HOSTILE).wait(240) == 0
    assert not list(cluster.folder.rglob("owned"))
    assert cluster.trained() == [["1", *HOSTILE]]


def test_dry_run_prints_what_runs(cluster):
    command = ("--", "tpu-train", "\nEND\n", "it's")
    dry = cluster.run("slurm.sh", "submit", *JOB, "--dry_run", *command)
    assert cluster.calls() == []
    cluster.paste(dry.stdout)
    pasted, script = cluster.calls(), (cluster.cloud / "script").read_text()
    cluster.run("slurm.sh", "submit", *JOB, *command)
    assert cluster.calls() == pasted
    assert (cluster.cloud / "script").read_text() == script
    assert cluster.run("slurm.sh", "script", *JOB, *command).stdout == script


def test_the_script_passes_shellcheck(cluster):
    shellcheck = shutil.which("shellcheck")
    script = cluster.run("slurm.sh", "script", *JOB, "--image=a b", "--", "tpu-train", *HOSTILE).stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if shellcheck:  # .ci/run installs it where it can
        # The command's words are the user's own: what looks like a slip in them is meant.
        subprocess.run([shellcheck, "--exclude=SC2016,SC1003,SC2088", "-"], input=script, text=True, check=True)


def test_exit_codes_are_kept_and_end_the_job(cluster):
    assert start_job(cluster, "bash", "-c", "exit 3").wait(240) == 3
    assert [call[0] for call in cluster.calls()] == ["srun"]


def test_a_job_whose_time_is_up_saves_and_goes_back_into_the_queue(cluster):
    go = "trap 'sleep 0.3; touch saved; exit 143' TERM; touch going; while true; do sleep 0.05; done"
    job = start_job(cluster, "bash", "-c", go)
    while not (cluster.folder / "going").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(240) == 0
    assert (cluster.folder / "saved").exists()
    assert cluster.calls()[1:] == [["scontrol", "requeue", "42"]]


def test_a_command_that_ends_well_in_its_last_minutes_is_not_run_again(cluster):
    go = "trap 'exit 0' TERM; touch going; while true; do sleep 0.05; done"
    job = start_job(cluster, "bash", "-c", go)
    while not (cluster.folder / "going").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(240) == 0
    assert [call[0] for call in cluster.calls()] == ["srun"]


def test_several_nodes_have_a_process_for_each_gpu(cluster):
    assert cluster.run("slurm.sh", "submit", *JOB, "--nodes=2", "--cpus=32", *TRAIN).returncode == 0
    assert {"--nodes=2", "--ntasks-per-node=8", "--cpus-per-task=4"} <= set(cluster.calls()[0])
    assert "TPU_TRAIN_PROCESSES=16 " in (cluster.cloud / "script").read_text()


def test_cancel_asks_and_failures_keep_their_words_and_code(cluster):
    assert cluster.run("slurm.sh", "cancel", "--name=run1").returncode == 2
    assert cluster.run_answering("no\n", "slurm.sh", "cancel", "--name=run1").returncode == 1
    assert cluster.calls() == []
    assert cluster.run("slurm.sh", "cancel", "--name=run1", "--yes").returncode == 0
    assert cluster.calls() == [["scancel", "--me", "--name=run1"]]
    failed = cluster.run("slurm.sh", "submit", *JOB, *TRAIN, CODE="6", WORDS="sbatch: error: QOS limit\n")
    assert failed.returncode == 6
    assert "sbatch: error: QOS limit\n" in failed.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpus=0",), "--gpus=0 is not a whole number of 1 or more"),
        (("--time=soon",), "--time=soon is no time for SLURM"),
        (("--time=1:00\n#SBATCH --x",), "is no time for SLURM"),
        (("--log=a%j",), "SLURM reads % and"),
        (("--cpus=4",), "--cpus=4 is not a whole number of 8 or more"),
        (("--nodes=two",), "--nodes=two"),
        (("--name=a b",), "--name=a b does not fit"),
    ],
)
def test_bad_input_is_refused_and_calls_nothing(cluster, flags, words):
    result = cluster.run("slurm.sh", "submit", *JOB, *flags, *TRAIN)
    assert result.returncode == 2
    assert words in result.stderr
    assert cluster.calls() == []


def test_an_environment_that_is_not_set_up_is_said_before_the_queue(cluster):
    (cluster.repo / ".venv" / "bin" / "tpu-train").unlink()
    result = cluster.run("slurm.sh", "submit", *JOB, *TRAIN)
    assert result.returncode == 2
    assert "is not set up: TPU_TRAIN_EXTRAS=cuda ./launch/local.sh train --help" in result.stderr
    assert cluster.run("slurm.sh", "submit", *JOB, "--image=registry/image:1", *TRAIN).returncode == 0
    assert "--container-image=registry/image:1" in (cluster.cloud / "script").read_text()


def test_the_dockerfile_copies_what_is_there_and_installs_extras_that_are():
    lines = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    admitted = {
        line[1:] for line in (ROOT / "launch" / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    assert set(sources) == admitted
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {project["project"]["readme"], *project["project"]["license-files"]} <= set(sources)
    extras = set(re.findall(r"EXTRAS=(\w+)", "\n".join(lines)))
    assert extras == {"tpu", "cuda"} <= set(project["project"]["optional-dependencies"])
