"""Every document once an epoch, whichever processes and workers read it and wherever they stop; positions as JSON."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tpu_train.config import DataConfig, UserError
from tpu_train.data import train_batches, write_tokens

EOD, VOCAB = 0, 5000
BATCH = 6  # rows; 1, 2, 3 and 6 processes divide it


def corpus(folder, lengths, **fields):
    """A config over documents of these lengths; every id but eod occurs once."""
    ids = iter(range(1, VOCAB))
    documents = [tuple(itertools.islice(ids, n)) for n in lengths]
    path = folder / "tokens.bin"
    write_tokens(path, np.array([i for d in documents for i in (*d, EOD)]), VOCAB, EOD)
    config = DataConfig(source="tokens", paths=(str(path),), seq_len=8, batch_size=BATCH, validation_fraction=0.01)
    return dataclasses.replace(config, **fields), documents


class Run:
    """All processes of a run."""

    def __init__(self, config, processes, positions=None):
        self._all = [
            train_batches(config, vocab_size=VOCAB, process_index=i, process_count=processes) for i in range(processes)
        ]
        if positions is not None:
            for batches in self._all:
                batches.set_states(json.loads(json.dumps(positions)))

    def steps(self, count):
        """The whole batches."""
        made = [[next(batches) for batches in self._all] for _ in range(count)]
        return [{name: np.concatenate([part[name] for part in parts]) for name in parts[0]} for parts in made]

    def stop(self):
        """The positions that its processes save."""
        positions = [batches.get_state() for batches in self._all]
        for batches in self._all:
            batches.close()
        return positions

    def counts(self):
        return sum((Counter(batches.counts) for batches in self._all), Counter())


def begun_and_read(batches):
    """How often each document (by its first id) was begun, after checking that each row reads whole documents."""
    begun = Counter()
    for row in range(BATCH):
        labels = np.concatenate([batch["labels"][row][batch["weights"][row] == 1] for batch in batches]).tolist()
        at = 0
        while at < len(labels):
            stop = labels.index(EOD, at) if EOD in labels[at:] else len(labels)
            assert labels[at:stop] == list(range(labels[at], labels[at] + stop - at)), "a document is cut or mixed"
            begun[labels[at]] += 1
            at = stop + 1
    return begun


runs = st.lists(st.tuples(st.sampled_from([1, 2, 3, 6]), st.integers(0, 9)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=8, max_size=30), runs=runs, packing=st.booleans())
def test_every_document_is_read_once_an_epoch_over_any_processes_and_stops(tmp_path_factory, lengths, runs, packing):
    config, documents = corpus(tmp_path_factory.mktemp("c"), lengths, packing=packing, seed=len(lengths))
    assume(sum(lengths) - max(lengths) >= 2 * BATCH * 8 and sum(count for _, count in runs))
    whole = Run(config, 1)
    positions, batches = None, []
    for processes, count in runs:
        run = Run(config, processes, positions)
        batches += run.steps(count)
        counts = run.counts()
        positions = run.stop()
    wanted = whole.steps(len(batches))
    for got, want in zip(batches, wanted, strict=True):
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])
    begun = begun_and_read(batches) if packing else Counter(b["labels"][r, 0] for b in batches for r in range(BATCH))
    held_out = 1
    times = [begun[document[0]] for document in documents]
    # Each document was begun once an epoch, all of an epoch before any of the next; the one held out never.
    assert sorted(times)[:held_out] == [0] * held_out
    assert max(times) - min(sorted(times)[held_out:]) <= 1
    assert counts == whole.counts()
    assert counts["documents"] == sum(times)
    assert counts["tokens"] == sum(int(b["weights"].sum()) for b in batches)
    whole.stop()


@pytest.mark.slow
def test_workers_change_nothing_and_may_change_between_runs(tmp_path):
    config, _ = corpus(tmp_path, np.random.default_rng(0).integers(1, 60, 40).tolist())
    whole = Run(config, 1).steps(24)
    positions, got = None, []
    for workers, processes in ((0, 2), (2, 1), (0, 3)):
        run = Run(dataclasses.replace(config, workers=workers), processes, positions)
        got += run.steps(8)
        positions = run.stop()
    for a, b in zip(got, whole, strict=True):
        for name in b:
            np.testing.assert_array_equal(a[name], b[name])


def test_documents_long_and_few_fill_every_row(tmp_path):
    """Fewer documents than rows, and one longer than all others together."""
    config, documents = corpus(tmp_path, [900, 3, 3, 3])
    run = Run(config, 2)
    batches = run.steps(40)
    assert all(batch["weights"].all() for batch in batches)
    begun = begun_and_read(batches)
    assert set(begun) <= {document[0] for document in documents}
    assert max(begun.values()) - min(begun.values()) <= 1
    assert run.counts()["split"] == begun[documents[0][0]]
    # A position in the middle of the long document is still a small one.
    assert all(len(json.dumps(position)) < 2000 for position in run.stop())


def test_text_without_exact_sizes_is_read_once_an_epoch_too(tmp_path):
    """Some lines spell a character in 6 bytes and others in 2, so rows drift, and may be in different epochs."""
    texts = [chr(0x100 + i) * (1 + 37 * i % 50) for i in range(60)]
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    config = DataConfig(source="jsonl", paths=(str(tmp_path / "a.jsonl"),), seq_len=8, batch_size=BATCH)
    config = dataclasses.replace(config, validation_fraction=0.01)
    whole, split = Run(config, 1).steps(600), Run(config, 3).steps(600)
    begun = Counter()
    for row in range(BATCH):
        for run in (whole, split):
            assert all((a["labels"][row] == b["labels"][row]).all() for a, b in zip(whole, run, strict=True))
        read = np.concatenate([batch["labels"][row] for batch in whole]).astype(np.uint8).tobytes()
        pieces = [piece.decode() for piece in read.split(b"\xff")[:-1]]
        assert set(pieces) <= set(texts)
        begun.update(pieces)
    assert len(begun) == 59
    assert max(begun.values()) - min(begun.values()) <= 2


def test_positions_of_some_processes_are_not_enough(tmp_path):
    config, _ = corpus(tmp_path, [9] * 20)
    run = Run(config, 3)
    run.steps(3)
    positions = run.stop()
    batches = train_batches(config, vocab_size=VOCAB)
    with pytest.raises(UserError, match="has 4 of 6 rows of the batch, and not row 2, which this process needs"):
        batches.set_states([positions[0], positions[2]])
    batches.close()


def test_processes_that_hold_the_same_rows_are_counted_once(tmp_path):
    config, _ = corpus(tmp_path, [9] * 20)
    run = Run(config, 2)
    run.steps(3)
    positions = run.stop()
    batches = train_batches(config, vocab_size=VOCAB)
    batches.set_states([positions[0], positions[0], positions[1], positions[1]])
    assert batches.counts["tokens"] == 3 * BATCH * 8
    assert batches.counts == dict(run.counts()) | {name: 0 for name in batches.counts if not run.counts()[name]}
    batches.close()


def test_a_position_of_the_format_before_is_refused_in_one_line(tmp_path):
    config, _ = corpus(tmp_path, [9] * 20)
    batches = train_batches(config, vocab_size=VOCAB)
    old = {"layout": {"data.seed": 0, "process_count": 1}, "position": {"documents": {}, "lanes": []}}
    with pytest.raises(
        UserError, match=r"is of an older version of tpu_train, .* start a new run directory"
    ) as refused:
        batches.set_state(old)
    assert "\n" not in str(refused.value)
    batches.close()
