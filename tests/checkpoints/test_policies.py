"""Which checkpoints are kept and when one is saved: by step, by time and by validation loss."""

import time

import pytest
from checkpoint_cases import state_of, steps_in
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_train.checkpoint import SAVE, Checkpoints, Saver
from tpu_train.checkpoint.policies import Kept
from tpu_train.config import CheckpointConfig

losses = st.one_of(st.none(), st.floats(0, 9))


@given(st.dictionaries(st.integers(1, 60), losses, min_size=1), st.integers(1, 4), st.integers(0, 7), st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_what_the_three_rules_say(saved, last, every, best):
    there = {step: loss for step, loss in saved.items() if loss is not None}
    kept = Kept(last, every, best).of(saved.keys(), there)
    for step in saved:
        must = step in sorted(saved)[-last:] or (every and step % every == 0)
        if must or (step in there and sum(loss <= there[step] for loss in there.values()) <= best):
            assert step in kept
        elif step not in there or sum(loss < there[step] for loss in there.values()) >= best:
            assert step not in kept
    in_cycle = sum(step % every == 0 for step in saved) if every else 0
    assert len(kept) <= last + best + in_cycle


def test_the_three_rules_hold_on_disk_and_over_a_restart(tmp_path, save, batches, text_config):
    found = {1: 3.0, 2: None, 3: 1.0, 4: 2.0, 5: None, 6: 4.0, 7: float("nan"), 8: None}

    def save_steps(*steps):
        with Checkpoints(tmp_path, keep_last=1, keep_every=5, keep_best=2) as checkpoints:
            for step in steps:
                checkpoints.save(step, state_of(step), batches, text_config, found[step])
            checkpoints.wait()
            return checkpoints.is_best(2.5), checkpoints.is_best(1.5), checkpoints.is_best(float("nan"))

    assert save_steps(1, 2, 3) == (True, True, False)
    assert steps_in(tmp_path) == [1, 3]
    assert save_steps(4, 5) == (False, True, False)
    assert steps_in(tmp_path) == [3, 4, 5]
    assert save_steps(6, 7, 8) == (False, True, False)
    assert steps_in(tmp_path) == [3, 4, 5, 8]


def test_an_old_step_goes_only_when_the_new_one_is_complete(tmp_path, save, monkeypatch):
    from tpu_train.checkpoint import manifest

    write, seen = manifest.write, []
    monkeypatch.setattr(manifest, "write", lambda *args: seen.append(steps_in(tmp_path)) or write(*args))
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        for step in (1, 2, 3):
            save(checkpoints, step)
    assert seen == [[], [1], [2]]
    assert steps_in(tmp_path) == [3]


class Nothing:
    """Checkpoints that are never in the middle of a save."""

    is_saving = False

    def poll(self):
        return False

    def save(self, *parts):
        pass


@pytest.fixture
def clock(monkeypatch):
    """clock[0] is the monotonic clock; the wall clock jumps about."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0] * -7)
    return now


def test_saves_by_time_come_so_many_minutes_after_the_last_save(clock):
    saver = Saver(Nothing(), CheckpointConfig(every_steps=0, every_minutes=2.0))
    due = []
    for step in range(1, 13):
        clock[0] += 50
        if saver.due(step, saver.asks()) or step == 5:
            due.append(step)
            saver.save(step, None, None, None, None)
    assert due == [3, 5, 8, 11]


def test_saves_by_step_and_by_time_go_together(clock):
    saver = Saver(Nothing(), CheckpointConfig(every_steps=10, every_minutes=1.0))
    due = []
    for step in range(1, 31):
        clock[0] += 13
        if saver.due(step, saver.asks()):
            due.append(step)
            saver.save(step, None, None, None, None)
    assert due == [5, 10, 15, 20, 25, 30]


def test_only_process_0s_clock_counts(clock, monkeypatch):
    import jax

    saver = Saver(Nothing(), CheckpointConfig(every_steps=0, every_minutes=1.0))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    clock[0] += 1000
    assert saver.asks() == 0
    assert not saver.due(1, 0)
    assert saver.due(2, SAVE)


def test_by_default_time_never_asks_for_a_save(clock):
    saver = Saver(Nothing(), CheckpointConfig())
    clock[0] += 1e9
    assert saver.asks() == 0
    assert [step for step in range(1, 301) if saver.due(step, 0)] == [100, 200, 300]
