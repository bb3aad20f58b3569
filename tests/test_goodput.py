"""Where the time of a run goes: shares worked by hand, kills between starts, and a clock of the test's own."""

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_train import goodput
from tpu_train.watchdog import Watchdog


def test_time_of_the_host_is_in_steps_while_the_device_is_busy():
    spans = [("data", 0.0, 3.0), ("step", 3.0, 8.0), ("eval", 8.0, 10.0), ("data", 10.0, 11.0)]
    seconds = goodput.attribute(spans, [(1.0, 2.0), (3.0, 7.0), (9.5, 10.5)])
    assert seconds == {"step": 1.0 + 4.0 + 0.5 + 0.5, "data": 2.0 + 0.5, "other": 1.0, "eval": 1.5}


@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=9), st.lists(st.floats(0.01, 9), max_size=9), st.floats(0, 50))
def test_no_time_is_lost_or_counted_twice(lengths, pauses, until):
    at, spans = 0.0, []
    for name, length in zip("abcabcabc", lengths, strict=False):
        spans.append((name, at, at + length))
        at += length
    busy, began = [], 0.0
    for length in pauses:
        busy.append((began, began + length / 2))
        began += length
    before, after = goodput.cut(spans, until)
    assert sum(end - begin for _, begin, end in before + after) == pytest.approx(at)
    assert all(end <= until for _, _, end in before)
    assert all(begin >= until for _, begin, _ in after)
    assert sum(goodput.attribute(spans, busy).values()) == pytest.approx(at)


class Times:
    """Stands in for the module `time`."""

    now = 100.0

    def monotonic(self):
        return self.now


class Values:
    """What a step leaves: there at once, once `ready` is set."""

    def __init__(self, times, seconds):
        self.times, self.seconds = times, seconds

    def block_until_ready(self):
        self.times.now += self.seconds
        return self


@pytest.fixture
def times(monkeypatch):
    times = Times()
    monkeypatch.setattr(goodput, "time", times)
    return times


def test_a_slow_loader_is_data_and_one_hidden_behind_steps_is_not(times):
    for slow, wanted in ((False, {"start": 5.0, "step": 6.0}), (True, {"start": 5.0, "step": 6.0, "data": 12.0})):
        times.now = 100.0
        clock = goodput.Clock(95.0, Watchdog(None))
        for step in range(3):
            clock.enter("data", step)
            times.now += 4.0 if slow else 0.0
            clock.enter("step")
            clock.dispatched(Values(times, 2.0))
            clock.settle(all_done=True)
        assert clock.seconds == pytest.approx(wanted)
        clock.close()


def test_a_step_under_way_is_counted_once_it_is_done():
    class Values:
        done = threading.Event()

        def block_until_ready(self):
            assert self.done.wait(20)

    clock = goodput.Clock(time.monotonic(), Watchdog(None))
    clock.enter("step", 1)
    clock.dispatched(Values())
    clock.enter("data")
    time.sleep(0.2)
    clock.settle()
    assert "step" not in clock.seconds
    time.sleep(0.2)
    Values.done.set()
    clock.settle(all_done=True)
    assert 0.4 <= clock.seconds["step"] < 15
    assert clock.seconds.get("data", 0.0) < clock.seconds["step"]
    clock.close()


@pytest.mark.parametrize(("shared", "factor"), [(False, 1.0), (True, 1.5)])
def test_a_process_that_waits_for_another_hangs_later_than_the_other(shared, factor):
    seen = []
    watchdog = Watchdog(None)
    watchdog.watch = lambda what, factor: seen.append((what, factor))
    clock = goodput.Clock(0.0, watchdog, shared=shared)
    for what in ("data", "step", "save"):
        clock.enter(what, 4)
    clock.close()
    assert seen == [("data at step 4", 1.0), ("step 4", factor), ("save at step 4", factor)]


def ledger(path, step, *lines):
    """A start that goes on from `step` and wrote `lines` of (step, seconds)."""
    made = goodput.Ledger(path, step)
    for at, seconds in lines:
        made.write(at, seconds)
    return made


def test_steps_that_a_kill_took_are_redone_and_not_goodput(tmp_path):
    first = ledger(tmp_path, 0, (10, {"start": 5.0, "step": 10.0}), (14, {"start": 5.0, "step": 15.0}))
    assert first.goodput({"start": 5.0, "step": 15.0}) == 0.75
    assert first.summary({"start": 5.0, "step": 15.0}) == "0:20, 75.0% of it in steps; start 25.0%"
    second = ledger(tmp_path, 10)
    assert (second.start, second.redone_steps) == (2, 4)
    assert second.earlier == {"start": 5.0, "step": 10.0, "redone": 5.0}
    now = {"start": 5.0, "step": 15.0}
    assert second.goodput(now) == 25 / 40
    second.write(20, now)
    said = "0:40 over 2 starts, 62.5% of it in steps; start 25.0%, redone 12.5%; 4 steps were done again"
    assert second.summary(now) == said
    third = ledger(tmp_path, 20)
    assert third.earlier == {"start": 10.0, "step": 25.0, "redone": 5.0}
    assert (third.start, third.redone_steps) == (3, 4)


def test_a_start_that_was_killed_before_its_first_checkpoint_is_redone_whole(tmp_path):
    ledger(tmp_path, 10, (12, {"step": 3.0}), (13, {"step": 4.0}))
    again = ledger(tmp_path, 10)
    assert again.earlier == {"step": 0.0, "redone": 4.0}
    assert again.redone_steps == 3


def test_lines_that_are_torn_or_strange_are_passed_over(tmp_path):
    ledger(tmp_path, 0, (10, {"step": 10.0}))
    path = tmp_path / goodput.FILE_NAME
    strange = ['{"start": 1}', "[]", '{"start": 1, "from": 0, "step": 11, "seconds": {"step": "x"}}', "\x00\xff"]
    path.write_text(path.read_text() + "".join(line + "\n" for line in strange) + '{"start": 1, "fr')
    second = ledger(tmp_path, 10, (20, {"step": 9.0}))
    assert second.earlier == {"step": 10.0}
    assert json.loads(path.read_text().splitlines()[-1])["seconds"] == {"step": 9.0}
    assert ledger(tmp_path, 20).earlier == {"step": 19.0}
