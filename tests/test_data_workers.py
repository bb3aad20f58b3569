"""Workers that die: the same batches follow, the counts too, and a run is told what it can't go on from."""

import multiprocessing
import os
import pickle
import signal
import time

import numpy as np
import pytest

from tpu_train.config import DataConfig
from tpu_train.data import WorkerDied, read_tokens, train_batches, write_tokens
from tpu_train.data.position import Batches


@pytest.fixture
def config(tmp_path):
    """Batches of more than a pipe holds, so that a worker waits in the middle of one."""
    write_tokens(tmp_path / "a.bin", np.random.default_rng(0).integers(0, 256, 300_000), 256, 0)
    return DataConfig(source="tokens", paths=(str(tmp_path / "a.bin"),), seq_len=1024, batch_size=8)


def workers():
    return [process for process in multiprocessing.active_children() if process.name == "data worker"]


@pytest.mark.slow
def test_batches_after_a_kill_are_those_of_an_undisturbed_run(config, capfd):
    alone = train_batches(config, vocab_size=256)
    wanted = [next(alone) for _ in range(12)]
    batches = train_batches(DataConfig(**{**vars(config), "workers": 1}), vocab_size=256)
    got = [next(batches) for _ in range(3)]
    (worker,) = workers()
    time.sleep(0.5)  # until the pipe is full
    os.kill(worker.pid, signal.SIGKILL)
    got += [next(batches) for _ in range(9)]
    assert batches.counts == alone.counts
    assert batches.get_state() == alone.get_state()
    alone.close()
    batches.close()
    assert not workers()
    for mine, other in zip(got, wanted, strict=True):
        for name in other:
            np.testing.assert_array_equal(mine[name], other[name])
    assert capfd.readouterr().err == (
        "tpu-train: a data worker was killed by SIGKILL; the kernel does that when memory runs out; starting the "
        "workers again\n"
    )


class Dies:
    """Gives `elements` elements, then dies."""

    def __init__(self, elements):
        self._left, self._given = elements, 0

    def __next__(self):
        if not self._left:
            raise WorkerDied("a data worker ended with exit code 3")
        self._left, self._given = self._left - 1, self._given + 1
        zeros = np.zeros(1, np.int64)
        place = {"rows": np.zeros((1, 5), np.int64), "block": 0, "loads": zeros, "taken": zeros, "owed": zeros}
        return {"batch": {}, "place": {**place, "counts": np.full(7, self._given)}}

    def close(self):
        pass


def test_workers_that_die_before_their_first_batch_end_the_run(capsys):
    lives = iter([2, 1, 0])
    batches = Batches(lambda places, deal: Dies(next(lives)), range(1), 1, ["text"], {})
    for _ in range(3):
        next(batches)
    assert batches.counts["tokens"] == 3  # over both lives
    with pytest.raises(WorkerDied, match=r"^a data worker ended with exit code 3, before its first batch; what it"):
        next(batches)
    assert capsys.readouterr().err.count("starting the workers again") == 2


def test_a_worker_is_sent_where_tokens_are_not_the_tokens(config):
    file = read_tokens(config.paths[0])
    sent = pickle.dumps(file)
    assert len(sent) < 500
    again = pickle.loads(sent)
    assert (again.path, again.vocab_size, again.eod_id) == (file.path, 256, 0)
    np.testing.assert_array_equal(again.ids, file.ids)
