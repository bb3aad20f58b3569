"""Data positions saved by another number of processes go to the iterator all at once, if it takes them."""

import json

import pytest
from checkpoint_cases import abstract_like, state_of

from tpu_train.checkpoint import Checkpoints
from tpu_train.config import UserError


class Iterator:
    """Stands in for batches; notes the positions it is given."""

    def __init__(self):
        self.given = None

    def set_state(self, position):
        self.given = position


class ManyIterator(Iterator):
    def set_states(self, positions):
        self.given = positions


@pytest.fixture
def by_three(tmp_path, save):
    """A workdir whose checkpoint of step 1 has the positions of three processes."""
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        save(checkpoints, 1)
    folder = tmp_path / "checkpoints" / "1"
    (folder / "data" / "process_0-of-1.json").unlink()
    for index in range(3):
        (folder / "data" / f"process_{index}-of-3.json").write_text(json.dumps({"row": index}))
    return tmp_path


def restore(workdir, data):
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        checkpoints.restore(1, abstract_like(state_of(0)), data)
    return data.given


def test_all_positions_are_given_by_process(by_three):
    assert restore(by_three, ManyIterator()) == [{"row": 0}, {"row": 1}, {"row": 2}]


def test_the_same_number_of_processes_gets_each_its_own(tmp_path, save, batches):
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        save(checkpoints, 1)
    assert restore(tmp_path, Iterator()) == batches.get_state()
    assert restore(tmp_path, ManyIterator()) == [batches.get_state()]


def test_an_iterator_that_takes_no_others_refuses_in_one_line(by_three):
    with pytest.raises(
        UserError, match=r"^.*checkpoints/1 was saved by 3 process\(es\), this run has 1; records would"
    ):
        restore(by_three, Iterator())


def test_a_missing_position_is_named(by_three):
    (by_three / "checkpoints" / "1" / "data" / "process_1-of-3.json").unlink()
    with pytest.raises(UserError, match=r"1 lacks the data position of process 1 of 3$"):
        restore(by_three, ManyIterator())
