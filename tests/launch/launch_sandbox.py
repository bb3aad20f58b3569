"""A copy of the launchers, a PATH that holds only what a test puts there, and a stand-in for gcloud.

The stand-in writes each call down, answers as the test says, and runs what comes over ssh for real, in a folder for
each host: launch/worker.sh, its processes and signals are the real ones.
"""

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TOOLS = ["awk", "bash", "cat", "cp", "dirname", "env", "grep", "gzip", "head", "hostname", "mkdir", "mv", "rm", "sed"]
TOOLS += ["setsid", "sh", "sleep", "sort", "tail", "tar", "touch", "tr", "true"]

# What a user may write anywhere. Each must arrive as it is, as one argument, and make no file called owned.
HOSTILE = [
    "two  words ",
    "it's",
    'a "quote"',
    "$(touch owned)",
    "`touch owned`",
    "'; touch owned; '",
    "a && touch owned",
    "line\nbreak\n",
    "\ttab\\back\\\\slash",
    "$HOME ${HOME} $$ $(HOME) $$(HOME)",
    "--flag=*?[a-z]{1,2}",
    "~ # ! % ; & | < >",
    "é ü 漢",
    "{{ x }} : - @",
]

# Answers are {verb: [answer, ...]}; the last one stays. Before it answers it waits for the file `await` and makes the
# file `touch`; wipe: the hosts are gone, as after a preemption.
GCLOUD = r"""#!{python} -IS
import fcntl, json, os, shutil, signal, subprocess, sys, time
from pathlib import Path

cloud, arguments = Path(os.environ["CLOUD"]), sys.argv[1:]
words = [argument for argument in arguments if not argument.startswith("--")]
flags = dict(argument[2:].split("=", 1) for argument in arguments if argument.startswith("--") and "=" in argument)
verb, node = " ".join(words[2:4]), words[5 if words[3] == "scp" else 4]
command = flags.get("command", "")
if "worker.sh" in command:
    verb += " " + command.rpartition("worker.sh ")[2].split(" ")[0]
with (cloud / "lock").open("w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    with (cloud / "calls").open("a") as calls:
        calls.write(json.dumps(arguments) + "\n")
    answers = json.loads((cloud / "answers").read_text())
    mine = answers.get(verb, [dict()])
    answer = mine.pop(0) if len(mine) > 1 else mine[0]
    (cloud / "answers.new").write_text(json.dumps(answers))
    os.replace(cloud / "answers.new", cloud / "answers")  # Ctrl-C may come between
hosts = [cloud / (node.partition(":")[0] + "-w%d" % i) for i in range(int(os.environ.get("HOSTS", 1)))]
if "await" in answer:
    while not Path(answer["await"]).exists():
        time.sleep(0.02)
if "touch" in answer:
    Path(answer["touch"]).touch()
if answer.get("wipe"):
    for host in cloud.glob("*-w[0-9]"):
        for pid in host.glob("tpu-train/.run/pid"):
            try:
                os.killpg(int(pid.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(host)
sys.stderr.write(answer.get("err", ""))
states = {"queued-resources describe": "ACTIVE", "tpu-vm describe": "READY"}
print(answer.get("out", states.get(verb, "")))
if answer.get("status"):
    sys.exit(answer["status"])
if words[3] == "scp":
    for host in hosts:
        host.mkdir(exist_ok=True)
        shutil.copy(words[4], host / words[5].partition(":")[2])
if words[3] == "ssh":
    for host in hosts:
        host.mkdir(exist_ok=True)
    run = [
        subprocess.Popen(["bash", "-c", command], cwd=host, env=dict(os.environ, HOME=str(host), LABEL=host.name))
        for host in hosts
    ]
    sys.exit(next((code for code in [process.wait() for process in run] if code), 0))
"""
GCLOUD = GCLOUD.replace("{python}", sys.executable)

# For the hosts: sets up nothing but a command that shows its arguments.
LOCAL_SH = """#!/usr/bin/env bash
mkdir -p .venv/bin
printf '%s\\n' "$TPU_TRAIN_EXTRAS $*" >>"$HOME/set-up"
cp "$SHOW" .venv/bin/tpu-train
"""
SHOW = f"""#!{sys.executable} -IS
import json, os, sys
open(os.environ["ARGUMENTS"], "a").write(json.dumps([os.environ["TPU_TRAIN_PROCESSES"], *sys.argv[1:]]) + "\\n")
"""


class Sandbox:
    def __init__(self, folder: Path) -> None:
        self.folder, self.repo, self.bin = folder, folder / "a copy", folder / "some bin"
        self.cloud, self.arguments = folder / "cloud", folder / "arguments"
        self.bin.mkdir()
        self.cloud.mkdir()
        shutil.copytree(ROOT / "launch", self.repo / "launch", ignore=shutil.ignore_patterns("local.sh"))
        self.write(self.repo / "launch" / "local.sh", LOCAL_SH)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.repo)
        for name in ("tpu_train", "pallas_kernels", "configs"):
            (self.repo / name).mkdir()
            (self.repo / name / "__init__.py").touch()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.add("gcloud", GCLOUD)
        self.add("python3.12", "#!/bin/sh\n")
        self.write(folder / "show", SHOW)
        self.answer({})

    def write(self, path: Path, content: str) -> None:
        path.write_text(content)
        path.chmod(0o755)

    def add(self, name: str, content: str) -> None:
        self.write(self.bin / name, content)

    def answer(self, answers: dict[str, list[dict]]) -> None:
        (self.cloud / "answers").write_text(json.dumps(answers))

    def environment(self, **variables: str) -> dict[str, str]:
        paths = {"PATH": self.bin, "HOME": self.folder, "CLOUD": self.cloud, "ARGUMENTS": self.arguments}
        return {name: str(path) for name, path in {**paths, "SHOW": self.folder / "show", **variables}.items()}

    def start(self, script: str, *arguments: str, stdin: int = subprocess.DEVNULL, **variables: str):
        return subprocess.Popen(
            [self.repo / "launch" / script, *arguments],
            cwd=self.folder,
            env=self.environment(**variables),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        process = self.start(script, *arguments, **variables)
        stdout, stderr = process.communicate(timeout=240)
        assert not list(self.folder.rglob("owned"))
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def run_answering(self, answer: str, script: str, *arguments: str) -> subprocess.CompletedProcess:
        """With a terminal, on which a person types `answer`."""
        ours, theirs = pty.openpty()
        process = self.start(script, *arguments, stdin=theirs)
        os.write(ours, answer.encode())
        stdout, stderr = process.communicate(timeout=240)
        os.close(ours)
        os.close(theirs)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def paste(self, commands: str) -> None:
        """Runs what a dry run printed."""
        environment = self.environment()
        subprocess.run(
            [self.bin / "bash", "-e"], input=commands, text=True, cwd=self.folder, env=environment, check=True
        )

    def end_commands(self) -> None:
        """Kills what a failed test left running on the hosts."""
        for file in self.cloud.glob("*/tpu-train/.run/pid"):
            pid = int(file.read_text())
            with contextlib.suppress(OSError):
                if b"worker.sh" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.killpg(pid, signal.SIGKILL)

    def calls(self) -> list[list[str]]:
        """The arguments of each call so far, and forgets them."""
        path = self.cloud / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    def verbs(self) -> list[str]:
        return [" ".join(call[2:4]) for call in self.calls()]

    def trained(self) -> list[list[str]]:
        """The number of processes and the arguments of each tpu-train so far."""
        lines = self.arguments.read_text().splitlines() if self.arguments.exists() else []
        return [json.loads(line) for line in lines]
