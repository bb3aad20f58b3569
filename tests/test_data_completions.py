"""Loss on completions alone, documents longer than a row, documents left out: what is trained on, and the counts."""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest

from tpu_train.config import DataConfig, UserError
from tpu_train.data import train_batches, validation_batches

PAIRS = [(chr(97 + i % 26) * (i % 13), chr(65 + i % 26) * (1 + i * 7 % 60)) for i in range(40)]


def config_for(folder, pairs=PAIRS, **fields):
    lines = [json.dumps({"q": q, "a": a}) + "\n" for q, a in pairs]
    (folder / "a.jsonl").write_text("".join(lines))
    fields = {"seq_len": 16, "batch_size": 4, "validation_fraction": 0.1, "text_key": "a", "prompt_key": "q", **fields}
    return DataConfig(source="jsonl", paths=(str(folder / "a.jsonl"),), **fields)


def rows(batches):
    """labels, weights of each row of the batch, over all batches."""
    for row in range(len(batches[0]["labels"])):
        yield tuple(np.concatenate([b[name][row] for b in batches]) for name in ("labels", "weights", "segment_ids"))


def documents(batches):
    """(labels, weights) of the whole documents in each row of the batch."""
    for labels, weights, segments in rows(batches):
        labels, weights = labels[segments > 0], weights[segments > 0]
        ends = [0, *(np.flatnonzero(labels == 255) + 1)]
        yield from ((bytes(labels[a:b].astype(np.uint8)), weights[a:b].tolist()) for a, b in itertools.pairwise(ends))


@pytest.mark.parametrize("cached", [False, True])
def test_only_completions_and_ends_are_trained_on_and_nothing_is_dropped(tmp_path, cached):
    config = config_for(tmp_path, cache=str(tmp_path / "cache") if cached else "")
    wanted = {(q + a).encode() + b"\xff": [0.0] * len(q) + [1.0] * (len(a) + 1) for q, a in PAIRS}
    batches = train_batches(config, vocab_size=256)
    made = [next(batches) for _ in range(60)]
    counts = batches.counts
    batches.close()
    found = list(documents(made))
    assert {labels for labels, _ in found} | held_out(config) == set(wanted)
    assert all(wanted[labels] == weights for labels, weights in found)
    labels = np.stack([b["labels"] for b in made])
    weights = np.stack([b["weights"] for b in made])
    assert counts["tokens"] == labels.size == 60 * 4 * 16
    assert counts["untrained"] == (weights == 0).sum() == np.isin(labels, range(97, 123)).sum()
    assert counts["dropped"] == counts["lost"] == 0
    begun = Counter(labels for labels, _ in found)
    assert counts["documents"] - 4 <= sum(begun.values()) <= counts["documents"]
    long = sum(times for labels, times in begun.items() if len(labels) > 16)
    assert 0 < long <= counts["split"] <= long + 4


def held_out(config):
    return {labels for labels, _ in documents([joined(validation_batches(config, vocab_size=256))])}


def joined(batches):
    """Validation goes through the rows of a batch one after the other."""
    batches = list(batches)
    return {name: np.concatenate([b[name].reshape(1, -1) for b in batches], axis=1) for name in batches[0]}


def test_validation_counts_completions_alone(tmp_path):
    config = config_for(tmp_path)
    wanted = {(q + a).encode() + b"\xff": len(q) for q, a in PAIRS}
    found = list(documents([joined(validation_batches(config, vocab_size=256))]))
    assert len(found) == 4
    assert all(weights == [0.0] * wanted[labels] + [1.0] * (len(labels) - wanted[labels]) for labels, weights in found)


def test_without_packing_what_is_cut_off_is_counted(tmp_path):
    pairs = PAIRS[:26]  # no two begin alike
    config = config_for(tmp_path, pairs, packing=False)
    batches = train_batches(config, vocab_size=256)
    made = [next(batches) for _ in range(30)]
    counts = batches.counts
    batches.close()
    lengths = {(q + a)[:16]: len(q + a) + 1 for q, a in pairs}
    dropped = 0
    for batch in made:
        for labels, segments in zip(batch["labels"], batch["segment_ids"], strict=True):
            text = bytes(labels[segments > 0].astype(np.uint8)).rstrip(b"\xff").decode()
            dropped += lengths[text] - int((segments > 0).sum())
    assert counts["documents"] == 120
    assert counts["dropped"] == dropped > 0


def test_a_line_without_a_prompt_is_named(tmp_path):
    config = config_for(tmp_path)
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"a": "text"}\n')
    batches = train_batches(config, vocab_size=256)
    with pytest.raises(UserError, match=r"a.jsonl:41 has the keys a, not 'q'; set data.prompt_key"):
        list(itertools.islice(batches, 200))
    batches.close()


def test_documents_that_can_not_be_read_are_named_counted_and_left_out(tmp_path, capfd):
    config = config_for(tmp_path, on_corrupt="skip")
    path = tmp_path / "a.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[5], lines[9] = b"{not json\n", b'{"q": "\xff", "a": ""}\n'
    path.write_bytes(b"".join(lines))
    batches = train_batches(config, vocab_size=256)
    made = [next(batches) for _ in range(120)]
    counts = batches.counts
    batches.close()
    list(validation_batches(config, vocab_size=256))
    said = capfd.readouterr().err.splitlines()
    assert sorted(line.split(" is ")[0] for line in said) == [f"data: {path}:{n}" for n in (10, 6)]
    assert all(line.endswith("; left out") for line in said)
    found = {labels for labels, _ in documents(made)} | held_out(config)
    assert found == {(q + a).encode() + b"\xff" for i, (q, a) in enumerate(PAIRS) if i not in (5, 9)}
    epochs = counts["documents"] / 34  # two of 36 are lost, each epoch
    assert counts["lost"] == pytest.approx(2 * epochs, abs=2)
    stop = train_batches(dataclasses.replace(config, on_corrupt="stop"), vocab_size=256)
    state = stop.get_state()
    skip = train_batches(config, vocab_size=256)
    with pytest.raises(UserError, match=r"data\.on_corrupt=stop, this run skip"):
        skip.set_state(state)
    stop.close()
    skip.close()


def test_nothing_that_can_be_read_does_not_spin(tmp_path):
    (tmp_path / "a.jsonl").write_text("{not json\n" * 50)
    config = dataclasses.replace(config_for(tmp_path), on_corrupt="skip")
    (tmp_path / "a.jsonl").write_text("{not json\n" * 50)
    with pytest.raises(UserError, match="the training documents hold no text"):
        train_batches(config, vocab_size=256)
