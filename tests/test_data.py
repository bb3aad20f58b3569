"""Order, split, sharding, packing and resume, on token documents whose ids tell which document they come from."""

import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from tpu_train.config import DataConfig, UserError
from tpu_train.data import train_batches, validation_batches, write_tokens

EOD, VOCAB = 0, 5000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A config over 40 documents of 1 to 60 tokens; every id but eod occurs once."""
    lengths = np.random.default_rng(0).integers(1, 60, 40)
    ids = iter(range(1, VOCAB))
    documents = [tuple(itertools.islice(ids, int(n))) for n in lengths]
    path = tmp_path_factory.mktemp("corpus") / "tokens.bin"
    write_tokens(path, np.array([i for d in documents for i in (*d, EOD)]), VOCAB, EOD)
    config = DataConfig(source="tokens", paths=(str(path),), seq_len=16, batch_size=6, validation_fraction=0.1, seed=3)
    return config, documents


def take(config, count, **kwargs):
    batches = train_batches(config, vocab_size=VOCAB, **kwargs)
    result = [next(batches) for _ in range(count)]
    batches.close()
    return result


def equal(a, b):
    return len(a) == len(b) and all(
        (x[k] == y[k]).all() and x.keys() == y.keys() for x, y in zip(a, b, strict=True) for k in x
    )


def documents_of_rows(labels):
    """Splits one lane's labels at eod; the last, unfinished document is left out."""
    documents, current = [], []
    for i in labels:
        if i == EOD:
            documents.append(tuple(current))
            current = []
        else:
            current.append(int(i))
    return documents


def starts(batches):
    """The first id of each document, in the order in which the documents were begun."""
    first = []
    for batch in batches:
        at = (batch["tokens"] == EOD) & (batch["weights"] == 1)
        first += batch["labels"].T[at.T].tolist()
    return first


def validation_documents(config, **kwargs):
    rows = np.concatenate([b["labels"] for b in validation_batches(config, vocab_size=VOCAB, **kwargs)]).ravel()
    weights = np.concatenate([b["weights"] for b in validation_batches(config, vocab_size=VOCAB, **kwargs)]).ravel()
    return documents_of_rows(rows[weights == 1])


def test_batches_have_the_promised_shapes_and_dtypes(corpus):
    (batch,) = take(corpus[0], 1)
    assert list(map(str, sorted(batch))) == ["labels", "positions", "segment_ids", "tokens", "weights"]
    for name, array in batch.items():
        assert array.shape == (6, 16)
        assert array.dtype == (np.float32 if name == "weights" else np.int32)


def test_same_seed_gives_same_batches_and_another_seed_others(corpus):
    config, _ = corpus
    assert equal(take(config, 30), take(config, 30))
    assert not equal(take(config, 3), take(dataclasses.replace(config, seed=4), 3))


def test_each_epoch_takes_every_training_document_once_in_another_order(corpus):
    config, documents = corpus
    training = {d[0] for d in documents} - {d[0] for d in validation_documents(config)}
    order = starts(take(config, 60))
    epochs = [order[i : i + len(training)] for i in range(0, len(order) - len(training), len(training))]
    assert len(epochs) >= 3
    assert all(set(epoch) == training and len(epoch) == len(training) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_lanes_hold_whole_training_documents_in_order(corpus):
    config, documents = corpus
    batches = take(config, 60)
    for lane in range(6):
        seen = documents_of_rows(np.concatenate([b["labels"][lane] for b in batches]))
        assert len(seen) > 10
        assert set(seen) <= set(documents)


def test_validation_and_training_are_disjoint_in_every_epoch_for_any_seed_and_process_count(corpus):
    config, _ = corpus
    held_out = validation_documents(config)
    assert len(held_out) == 4
    ids = {i for d in held_out for i in d}
    for seed, process_count in ((0, 1), (3, 1), (9, 3)):
        other = dataclasses.replace(config, seed=seed)
        assert validation_documents(other) == held_out
        for index in range(process_count):
            batches = take(other, 60, process_index=index, process_count=process_count)
            assert not ids & {int(i) for b in batches for i in b["labels"].ravel()}


def test_no_label_crosses_a_document_and_positions_restart(corpus):
    config, documents = corpus
    following = {a: b for d in documents for a, b in zip(d, (*d[1:], EOD), strict=True)}
    first = {d[0] for d in documents}
    for batch in take(config, 40):
        assert (batch["weights"] == 1).all()
        assert (batch["segment_ids"][:, 0] == 1).all()
        for row in range(6):
            tokens, labels, segments, positions = (
                batch[k][row].tolist() for k in ("tokens", "labels", "segment_ids", "positions")
            )
            for t in range(16):
                assert labels[t] in first if tokens[t] == EOD else labels[t] == following[tokens[t]]
                starts_here = t == 0 or tokens[t] == EOD
                assert positions[t] == (0 if starts_here else positions[t - 1] + 1)
                assert t == 0 or segments[t] == segments[t - 1] + (tokens[t] == EOD)


@pytest.mark.parametrize("packing", [True, False])
def test_processes_hold_the_rows_of_one_process(corpus, packing):
    config = dataclasses.replace(corpus[0], packing=packing)
    whole = take(config, 60)
    for process_count in (2, 3, 6):
        parts = [take(config, 60, process_index=i, process_count=process_count) for i in range(process_count)]
        assert parts[0][0]["tokens"].shape == (6 // process_count, 16)
        joined = [{k: np.concatenate([b[k] for b in step]) for k in step[0]} for step in zip(*parts, strict=True)]
        assert equal(joined, whole)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("process_count", [1, 2, 3])
def test_validation_covers_every_token_once_in_equally_many_batches(corpus, process_count, packing):
    config = dataclasses.replace(corpus[0], validation_fraction=0.35, packing=packing)
    whole = list(validation_batches(config, vocab_size=VOCAB))
    parts = [
        list(validation_batches(config, vocab_size=VOCAB, process_index=i, process_count=process_count))
        for i in range(process_count)
    ]
    assert {len(part) for part in parts} == {len(whole)}
    joined = [{k: np.concatenate([b[k] for b in step]) for k in whole[0]} for step in zip(*parts, strict=True)]
    assert equal(joined, whole)
    weights = np.concatenate([b["weights"] for b in whole])
    padded = {k: np.concatenate([b[k] for b in whole])[weights == 0] for k in whole[0]}
    assert (padded["segment_ids"] == 0).all()
    labels = np.concatenate([b["labels"] for b in whole])[weights == 1]
    ids = labels[labels != EOD]
    assert len(set(ids.tolist())) == len(ids)
    if packing:
        assert (labels == EOD).sum() == 14
        assert set(documents_of_rows(labels)) <= set(corpus[1])


def test_validation_batches_can_be_iterated_again(corpus):
    batches = validation_batches(corpus[0], vocab_size=VOCAB)
    assert equal(list(batches), list(batches))


def test_without_packing_a_row_is_the_start_of_one_document(corpus):
    config, documents = corpus
    by_first = {d[0]: d for d in documents}
    for batch in take(dataclasses.replace(config, packing=False), 20):
        for row in range(6):
            document = by_first[int(batch["labels"][row, 0])]
            expected = (*document, EOD)[:16]
            length = len(expected)
            assert tuple(batch["labels"][row, :length].tolist()) == expected
            assert batch["weights"][row].tolist() == [1] * length + [0] * (16 - length)
            assert batch["segment_ids"][row].tolist() == [1] * length + [0] * (16 - length)
            assert batch["positions"][row].tolist() == [*range(length)] + [0] * (16 - length)


@pytest.mark.parametrize("packing", [True, False])
def test_resume_continues_exactly_twice_in_a_row(corpus, packing):
    config = dataclasses.replace(corpus[0], packing=packing)
    batches = train_batches(config, vocab_size=VOCAB)
    states, rows = [batches.get_state()], []
    for _ in range(40):
        rows.append(next(batches))
        states.append(batches.get_state())
    batches.close()
    batches = train_batches(config, vocab_size=VOCAB)
    for first, second in ((0, 3), (7, 12), (25, 33)):
        batches.set_state(json.loads(json.dumps(states[first])))
        assert json.loads(json.dumps(batches.get_state())) == json.loads(json.dumps(states[first]))
        assert equal([next(batches) for _ in range(second - first)], rows[first:second])
        saved = json.loads(json.dumps(batches.get_state()))
        batches.close()
        batches = train_batches(config, vocab_size=VOCAB)
        batches.set_state(saved)
        assert equal([next(batches) for _ in range(7)], rows[second : second + 7])
    batches.close()


def test_every_position_of_the_stream_can_be_resumed(corpus):
    config = corpus[0]
    batches = train_batches(config, vocab_size=VOCAB)
    states, rows = [], []
    for _ in range(30):
        states.append(json.dumps(batches.get_state()))
        rows.append(next(batches))
    for i, state in enumerate(states):
        batches.set_state(json.loads(state))
        assert equal([next(batches) for _ in range(min(3, 30 - i))], rows[i : i + 3])
    batches.close()


def test_a_state_is_not_changed_by_later_batches(corpus):
    batches = train_batches(corpus[0], vocab_size=VOCAB)
    next(batches)
    state = batches.get_state()
    before = json.dumps(state)
    for _ in range(20):
        next(batches)
    assert json.dumps(state) == before
    batches.close()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"seed": 4}, "data.seed=3, this run 4"),
        ({"batch_size": 3}, "data.batch_size=6, this run 3"),
        ({"seq_len": 8}, "data.seq_len"),
        ({"packing": False}, "data.packing=True, this run False"),
    ],
)
def test_resume_with_another_layout_is_an_error(corpus, change, name):
    batches = train_batches(corpus[0], vocab_size=VOCAB)
    state = batches.get_state()
    batches.close()
    other = train_batches(dataclasses.replace(corpus[0], **change), vocab_size=VOCAB)
    with pytest.raises(UserError, match=name):
        other.set_state(state)
    with pytest.raises(UserError, match="not a data position"):
        other.set_state({"next_index": 3})
    other.close()


def test_workers_run_from_a_script(corpus, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from tpu_train.config import DataConfig\n"
        "from tpu_train.data import train_batches\n"
        "def main():\n"
        f"    batches = train_batches({dataclasses.replace(corpus[0], workers=1)!r}, vocab_size={VOCAB})\n"
        "    print(int(next(batches)['weights'].sum()))\n"
        "    batches.close()\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["96"]
    assert "leaked" not in done.stderr


def test_importing_the_package_does_not_import_jax():
    code = "import sys, tpu_train.data; sys.exit('jax' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
