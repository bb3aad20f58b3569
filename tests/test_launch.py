"""launch/local.sh, run for real in copies of the repository with stand-ins for Python and the installers."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# All that the script may call, so that no Python or uv of this machine is found by chance.
TOOLS = [
    "bash",
    "cat",
    "chmod",
    "cksum",
    "cp",
    "dirname",
    "env",
    "find",
    "flock",
    "grep",
    "mkdir",
    "mktemp",
    "mv",
    "paste",
]
TOOLS += ["rm", "rmdir", "sed", "sh", "sleep", "sort", "touch", "tr", "true"]

# Answers like uv, writes each call to $CALLS and "installs" a tpu-train that prints its arguments and its folder.
FAKE_UV = """\
#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
case "$1 ${2:-}" in
--version*) echo "uv 0" ;;
venv*)
  venv=${!#}
  mkdir -p "$venv/bin"
  cp "$FAKES/venv-python" "$venv/bin/python"
  ;;
"pip install")
  [[ -z ${FAIL:-} ]] || { echo "no such package: jaxx"; exit 3; }
  [[ -z ${SLOW:-} ]] || { touch "$SLOW"; sleep 60; }
  printf '#!/usr/bin/env bash\\necho "tpu-train [$*] in [$PWD]"\\n' >"${6%/python}/tpu-train"
  chmod +x "${6%/python}/tpu-train"
  ;;
esac
"""
# The environment's Python: shows how pytest would be started, has a pip if $PIP_WORKS, else is a real one.
VENV_PYTHON = """\
#!/usr/bin/env bash
case "$1 ${{2:-}}" in
"-m pytest") shift 2; echo "pytest [$*] in [$PWD]" ;;
"-m compileall") shift 2; echo "compiled: $*" >>"$CALLS" ;;
"-m pip")
  [[ -n ${{PIP_WORKS:-}} ]] || exit 1
  [[ $3 == --version ]] || cp "$(type -P true)" "${{0%/python}}/tpu-train"
  ;;
-m*) echo "No module named ${{2:-}}" >&2; exit 1 ;;
*) exec {python} "$@" ;;
esac
"""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
REAL = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
BROKEN = "#!/bin/sh\necho 'shim: version not installed' >&2\nexit 127\n"
OLD = "#!/bin/sh\necho '3.9 /usr/bin/python3.9'\n"
CHATTY = "#!/bin/sh\necho hello\n"
NO_ENSUREPIP = f"""#!/bin/sh
case "$*" in
*version_info*) echo "{VERSION} $0" ;;
*) exit 1 ;;
esac
"""


class Sandbox:
    """A copy of the repository whose path has spaces, and a PATH that holds only what the test puts there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repo = folder / "a copy"
        self.bin, self.fakes, self.calls = folder / "some bin", folder / "fakes", folder / "calls"
        for path in (self.repo / "launch", self.bin, self.fakes):
            path.mkdir(parents=True)
        shutil.copy(ROOT / "launch" / "local.sh", self.repo / "launch")
        shutil.copy(ROOT / "pyproject.toml", self.repo)
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.calls.touch()
        self.add("../fakes/venv-python", VENV_PYTHON.format(python=sys.executable))

    def add(self, name: str, content: str) -> None:
        path = self.bin / name
        path.write_text(content)
        path.chmod(0o755)

    def environment(self, **variables: str) -> dict[str, str]:
        folders = {"HOME": str(self.folder), "CALLS": str(self.calls), "FAKES": str(self.fakes)}
        return {"PATH": str(self.bin), **folders, **variables}

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            [self.repo / "launch" / "local.sh", *arguments],
            cwd=self.folder,
            env=self.environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        process = self.start(*arguments, **variables)
        stdout, stderr = process.communicate(timeout=240)
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    def installs(self) -> list[str]:
        """What each `uv pip install` so far was asked for."""
        return [line.split(" -e ")[1] for line in self.calls.read_text().splitlines() if line.startswith("pip install")]

    def created(self) -> int:
        return sum(line.startswith("venv") for line in self.calls.read_text().splitlines())


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


@pytest.fixture
def ready(sandbox):
    """A sandbox with a Python and uv."""
    sandbox.add("python3", REAL)
    sandbox.add("uv", FAKE_UV)
    return sandbox


def test_no_arguments_shows_usage_and_sets_nothing_up(sandbox):
    result = sandbox.run()
    assert result.returncode == 2
    assert result.stderr.startswith("usage: ./launch/local.sh")
    assert not (sandbox.repo / ".venv").exists()
    assert sandbox.run("--help").returncode == 0


def test_first_run_sets_up_once_and_passes_everything_on(ready):
    first = ready.run("train", "--config=my config.py", "--set", "run.steps=3")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"tpu-train [train --config=my config.py --set run.steps=3] in [{ready.folder}]\n"
    assert first.stderr == f"local.sh: setting up .venv with Python {VERSION} (once)...\n"
    second = ready.run("anything", "else")
    assert second.stdout == f"tpu-train [anything else] in [{ready.folder}]\n"
    assert second.stderr == ""
    assert ready.installs() == ["."]
    calls = ready.calls.read_text()
    assert " --compile-bytecode " in calls
    assert calls.endswith("\ncompiled: -q tpu_train pallas_kernels\n")


def test_tests_run_in_the_repository_and_extras_are_remembered(ready):
    ready.run("train")
    result = ready.run("test", "-k", "a or b")
    assert result.stdout == f"pytest [-k a or b] in [{ready.repo}]\n"
    for command in ("train", "test"):
        assert ready.run(command).stderr == ""
    assert ready.installs() == [".", ".[test]"]
    ready.run("train", TPU_TRAIN_EXTRAS="hf, cuda")
    assert ready.run("test").stderr == ""
    assert ready.installs() == [".", ".[test]", ".[cuda,hf,test]"]
    assert ready.created() == 1


def test_changed_pyproject_installs_again_in_the_same_environment(ready):
    ready.run("test")
    with (ready.repo / "pyproject.toml").open("a") as file:
        file.write("# another line\n")
    assert "updating .venv" in ready.run("train").stderr
    assert ready.run("train").stderr == ""
    assert ready.installs() == [".[test]", ".[test]"]
    assert ready.created() == 1


def test_another_python_version_or_a_broken_one_makes_a_new_environment(ready):
    ready.run("train")
    (ready.repo / ".venv" / "lib-of-the-old-one").touch()
    ready.add("../a copy/.venv/bin/python", OLD)
    assert "setting up .venv" in ready.run("train").stderr
    (ready.repo / ".venv" / "bin" / "python").unlink()
    assert "setting up .venv" in ready.run("train").stderr
    assert ready.run("train").stderr == ""
    assert not (ready.repo / ".venv" / "lib-of-the-old-one").exists()


def test_moved_repository_makes_a_new_environment(ready):
    ready.run("test")
    ready.repo = ready.repo.rename(ready.folder / "moved")
    assert "setting up .venv" in ready.run("train").stderr
    assert ready.installs() == [".[test]", ".[test]"]


def test_interrupted_setup_is_redone_from_the_start(ready):
    slow = ready.folder / "installing"
    process = ready.start("train", SLOW=str(slow))
    while not slow.exists():
        assert process.poll() is None
    os.killpg(process.pid, 9)
    process.communicate()
    (ready.repo / ".venv" / "half").touch()
    result = ready.run("train")
    assert result.stdout.startswith("tpu-train")
    assert "setting up .venv" in result.stderr
    assert not (ready.repo / ".venv" / "half").exists()
    assert ready.run("train").stderr == ""


def test_failing_installer_shows_its_words_and_what_to_do(ready):
    result = ready.run("train", FAIL="1")
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert "no such package: jaxx" in lines
    assert lines[-1].startswith("local.sh: setting up .venv failed (above): mend that and run the same again")
    assert ready.run("train").returncode == 0


def test_pip_installs_where_uv_fails(ready):
    result = ready.run("train", FAIL="1", PIP_WORKS="1")
    assert (result.returncode, len(result.stderr.splitlines())) == (0, 1)
    assert ready.run("train").stderr == ""


def test_two_at_once_set_up_once(ready):
    if not shutil.which("flock"):
        pytest.skip("this machine has no flock, so neither has the script")
    both = [ready.start("train"), ready.start("test")]
    assert [process.communicate(timeout=240) and process.returncode for process in both] == [0, 0]
    assert ready.created() == 1


def test_environment_made_by_hand_is_kept(ready):
    venv = ready.repo / ".venv"
    (venv / "bin").mkdir(parents=True)
    shutil.copy(ready.fakes / "venv-python", venv / "bin" / "python")
    (venv / "mine").touch()
    assert "installing into the .venv that was there already" in ready.run("train").stderr
    assert ready.run("train").stderr == ""
    assert (venv / "mine").exists()
    assert ready.created() == 0


def test_folder_that_is_no_environment_is_never_emptied(ready):
    (ready.folder / "papers").mkdir()
    (ready.folder / "papers" / "thesis").touch()
    result = ready.run("train", TPU_TRAIN_VENV="papers")
    assert result.returncode == 1
    assert "remove it, or set TPU_TRAIN_VENV" in result.stderr.splitlines()[-1]
    assert (ready.folder / "papers" / "thesis").exists()


def test_another_folder_for_the_environment(ready):
    assert ready.run("train", TPU_TRAIN_VENV=str(ready.folder / "its own")).returncode == 0
    assert not (ready.repo / ".venv").exists()


def test_search_passes_over_broken_and_old_pythons(ready):
    ready.add("python3.14", BROKEN)
    ready.add("python3.13", OLD)
    ready.add("python3.12", CHATTY)
    result = ready.run("train")
    assert result.returncode == 0
    assert f"with Python {VERSION} (once)" in result.stderr


def test_search_looks_behind_a_broken_shim_of_the_same_name(ready):
    behind = ready.folder / "behind"
    behind.mkdir()
    (ready.bin / "python3").rename(behind / "python3")
    ready.add("python3", BROKEN)
    assert ready.run("train", PATH=f"{ready.bin}:{behind}").returncode == 0


def test_no_python_lists_what_was_tried(sandbox):
    sandbox.add("python3.13", BROKEN)
    sandbox.add("python3", OLD)
    sandbox.add("python", NO_ENSUREPIP)
    sandbox.add("uv", BROKEN)
    result = sandbox.run("train")
    assert result.returncode == 1
    expected = f"""\
        local.sh: no Python here can set up the environment; tried:
          {sandbox.bin}/python3.13: does not run
          {sandbox.bin}/python3: is Python 3.9
          {sandbox.bin}/python: is Python {VERSION} without ensurepip (Debian: apt-get install python{VERSION}-venv)
        local.sh: install Python 3.11 or newer, or name one: TPU_TRAIN_PYTHON=/path/to/python ./launch/local.sh ...
        """
    assert result.stderr == textwrap.dedent(expected)


def test_no_python_at_all_says_so(sandbox):
    assert "nothing: no python is on PATH" in sandbox.run("train").stderr


def test_python_without_ensurepip_serves_uv(sandbox):
    sandbox.add("python3", NO_ENSUREPIP)
    sandbox.add("uv", FAKE_UV)
    assert sandbox.run("train").returncode == 0


def test_named_python_is_the_only_one_tried(ready):
    result = ready.run("train", TPU_TRAIN_PYTHON="/no/such/python")
    assert result.returncode == 1
    assert "/no/such/python: does not run" in result.stderr
    assert "python3" not in result.stderr
    assert ready.run("train", TPU_TRAIN_PYTHON=sys.executable).returncode == 0
