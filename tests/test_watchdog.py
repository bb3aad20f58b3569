"""A process that hangs ends with its stacks, one line and exit code 75; one that is slow but alive does not."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_processes
from test_processes import Child

ROOT = Path(__file__).parent.parent
cache, config_file = test_processes.cache, test_processes.config_file


def watched(code):
    """A process that runs `code` under `watchdog`, whose limit is 1 s."""
    before = "import time\nfrom tpu_train.watchdog import Watchdog\nwatchdog = Watchdog(1.0, 'process 3 of 4')\n"
    return subprocess.Popen(
        [sys.executable, "-c", f"{before}print('there', flush=True)\n{code}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip


def test_what_hangs_ends_with_its_stack_and_a_line():
    code = "def stuck():\n    time.sleep(600)\nwatchdog.watch('eval at step 7')\nstuck()"
    process = watched(code)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 75
    assert re.search(r'File "<string>", line \d+ in stuck', errors)
    line = "process 3 of 4 hangs: eval at step 7 takes longer than 1 s (run.hang_seconds=1); its threads'"
    assert errors.splitlines()[-1] == f"tpu-train: {line} stacks are above; ending with exit code 75"


def test_what_goes_on_or_may_take_longer_or_has_ended_does_not_hang():
    goes_on = "for i in range(8):\n    watchdog.watch('eval')\n    time.sleep(0.2)"
    process = watched(f"{goes_on}\nwatchdog.watch('compile', 4)\ntime.sleep(2.4)\nwatchdog.close()\ntime.sleep(2.0)")
    assert process.communicate(timeout=240)[1] == ""
    assert process.returncode == 0


def test_a_process_that_was_stopped_for_long_does_not_hang():
    process = watched("watchdog.watch('step 3')\ntime.sleep(0.6)\nwatchdog.watch('step 4')\ntime.sleep(0.2)")
    assert process.stdout.readline() == "there\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=240)[1] == ""
    assert process.returncode == 0


FAULTS = {
    "data": """
def hang():
    from tpu_train import data
    make = data.train_batches
    def train_batches(*args, **more):
        batches = make(*args, **more)
        class Batches(type(batches)):
            def __next__(self):
                self.taken = getattr(self, "taken", 0) + 1
                return super().__next__() if self.taken < 4 else time.sleep(1e6)
        batches.__class__ = Batches
        return batches
    if os.environ.get("TPU_TRAIN_PROCESS_ID") != "0":
        data.train_batches = train_batches
""",
    "step": """
def hang():
    import jax
    from tpu_train import train
    make = train.compile_step
    def sleep(x, step):
        if step == 4:
            time.sleep(1e6)
        return x
    def compile_step(*args):
        step = make(*args)
        stuck = jax.jit(lambda x, step: jax.pure_callback(sleep, x, x, step))
        def stepped(state, batch):
            state, values = step(state, batch)
            return state, values | {"loss": stuck(values["loss"], state.step)}
        return stepped
    train.compile_step = compile_step
""",
}


@pytest.fixture
def start(config_file, cache, tmp_path):
    """start(fault, flags...): a run that meets the fault, under a limit of 20 s, which gives the start 80."""
    children = []

    def begin(fault, *flags):
        faulty = tmp_path / "faulty.py"
        faulty.write_text(f"import os\nimport time\n{config_file.read_text()}\n{FAULTS[fault]}\nhang()\n")
        children.append(Child(faulty, tmp_path / "run", cache, "--set=run.hang_seconds=20", *flags))
        return children[-1]

    yield begin
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
        child.process.wait()
        child._out.close()


@pytest.mark.slow
def test_a_run_whose_step_hangs_ends_with_exit_code_75(start):
    child = start("step")
    assert child.process.wait(200) == 75, child.err
    line = r"tpu-train: this process hangs: step [45] takes longer than 20 s \(run\.hang_seconds=20\); its "
    assert re.match(line, child.err.splitlines()[-1]), child.err
    assert re.search(r"in (_fetch|dispatched)$", child.err, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_of_two_processes_the_one_whose_data_hangs_is_named(start):
    child = start("data", "--processes=2")
    assert child.process.wait(200) == 75, child.err
    line = r"^tpu-train: process 1 of 2 hangs: data at step 4 takes longer than 20 s"
    assert re.search(line, child.err, re.MULTILINE), child.err
    assert re.search(r"in __next__$", child.err, re.MULTILINE)
    last = r"tpu-train: process [01] of 2 failed with exit code 75; the others were stopped"
    assert re.fullmatch(last, child.err.splitlines()[-1])
