"""Which process holds up the others: by numbers, and two real ones on loopback of which one reads slowly."""

import re

import numpy as np
import pytest
import test_processes
from test_processes import Child

from tpu_train.stragglers import slow_process

cache, config_file = test_processes.cache, test_processes.config_file
SLOW = """
def slow():
    import os, time
    from tpu_train import data
    make = data.train_batches
    def train_batches(*args, **more):
        batches = make(*args, **more)
        class Batches(type(batches)):
            def __next__(self):
                time.sleep(0.5)
                return super().__next__()
        batches.__class__ = Batches
        return batches
    if os.environ.get("TPU_TRAIN_PROCESS_ID") == "1":
        data.train_batches = train_batches
slow()
"""


@pytest.mark.parametrize(
    ("own", "slowest"),
    [
        ([10, 11, 9, 12], None),
        ([10, 11, 60, 12], 2),
        ([10, 60], 1),
        ([1, 9], None),  # nine times as much, but nothing of a step of 100
        ([40, 60], None),
        ([0, 0], None),
        ([70, 65, 10, 66, 68], None),  # most are alike; one waits for them
    ],
)
def test_a_process_is_slow_if_it_alone_takes_long_and_it_matters(own, slowest):
    numbers = np.array([[ms / 1e3, ms / 2e3, 0.1] for ms in own], np.float32)
    line = slow_process(30, numbers)
    if slowest is None:
        assert line is None
    else:
        assert line.startswith(
            f"step 30: process {slowest} of {len(own)} holds up the others: 60 ms of its own a step "
        )
        assert line.endswith(f"(30 ms waiting for data), the median is {sorted(own)[(len(own) - 1) // 2]} ms")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_one_of_two_processes_that_reads_slowly_is_named(config_file, cache, tmp_path):
    faulty = tmp_path / "faulty.py"
    faulty.write_text(config_file.read_text() + SLOW)
    flags = ("--processes=2", "--set=run.steps=12", "--set=run.log_every=4", "--set=run.sample_tokens=0")
    child = Child(faulty, tmp_path / "run", cache, *flags)
    assert child.finish() == 0, child.err
    named = re.findall(
        r"^step (\d+): process (\d) of 2 holds up the others: (\d+) ms of its own", child.out, re.MULTILINE
    )
    assert {process for _, process, _ in named} == {"1"}
    # By step 4 process 0 may have been as slow, with imports of its own.
    assert [step for step, _, _ in named if step != "4"] == ["8", "12"]
    named = [line for line in named if line[0] != "4"]
    assert all(float(ms) >= 370 for _, _, ms in named)  # the last four steps hold three waits, one lies before
