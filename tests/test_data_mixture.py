"""Sources by weight: shares of tokens, weights that change by step, an epoch for each source, resuming."""

import dataclasses
import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest

from tpu_train import config as config_lib
from tpu_train.config import Config, DataConfig, MixtureSource, UserError, apply_override, check, weight_at
from tpu_train.data import train_batches, validation_batches, write_tokens

EOD, VOCAB = 0, 20_000
SIZES = {"a": (150, 40), "b": (40, 90), "c": (7, 300)}  # how many documents, how long at most


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """(data config, {source: its documents}): every id occurs in one document."""
    folder = tmp_path_factory.mktemp("mixed")
    ids, documents = iter(range(1, VOCAB)), {}
    rng = np.random.default_rng(0)
    for name, (count, longest) in SIZES.items():
        documents[name] = [tuple(itertools.islice(ids, int(n))) for n in rng.integers(1, longest, count)]
        write_tokens(folder / f"{name}.bin", np.array([i for d in documents[name] for i in (*d, EOD)]), VOCAB, EOD)
    weights = {"a": 0.5, "b": ((0, 0.5), (100, 0.5), (200, 0.0)), "c": ((100, 0.0), (200, 0.5))}
    sources = [MixtureSource(name, "tokens", (str(folder / f"{name}.bin"),), weights[name]) for name in SIZES]
    return DataConfig(mixture=tuple(sources), seq_len=32, batch_size=4, validation_fraction=0.1), documents


def steps(config, count, processes=1, states=None):
    """(whole batches, the states after them, counts of all processes)."""
    parts = [
        train_batches(config, vocab_size=VOCAB, process_index=i, process_count=processes) for i in range(processes)
    ]
    for part in parts if states else ():
        part.set_states(json.loads(json.dumps(states)))
    made = []
    for _ in range(count):
        batches = [next(part) for part in parts]
        made.append({name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]})
    states = [part.get_state() for part in parts]
    counts = sum((Counter(part.counts) for part in parts), Counter())
    for part in parts:
        part.close()
    return made, states, counts


def shares(batches, documents):
    """Tokens by source."""
    source_of = {i: name for name, found in documents.items() for document in found for i in document}
    labels = np.concatenate([batch["labels"].ravel() for batch in batches])
    return Counter(source_of[i] for i in labels.tolist() if i != EOD)


def test_tokens_follow_the_weights_and_their_changes_by_step(mixed):
    config, documents = mixed
    batches, _, counts = steps(config, 300)
    early = shares(batches[:100], documents)
    assert early["c"] == 0
    assert early["a"] / early["b"] == pytest.approx(1, abs=0.05)
    late = shares(batches[220:], documents)
    assert late["b"] < 100  # the rest of what was begun before
    assert late["a"] / late["c"] == pytest.approx(1, abs=0.15)  # c's documents are up to two rows and a half of a batch
    middle = shares(batches[100:200], documents)
    assert middle["b"] / middle["c"] == pytest.approx(1, abs=0.2)
    whole = shares(batches, documents)
    ends = sum((b["labels"] == EOD).sum() for b in batches)
    assert sum(counts[name] for name in SIZES) == counts["tokens"] == sum(whole.values()) + ends == 300 * 4 * 32
    assert all(0 <= counts[name] - whole[name] <= ends for name in SIZES)


def test_each_source_has_epochs_of_its_own_and_each_document_is_in_all(mixed):
    config, documents = mixed
    batches, _, _ = steps(config, 300)
    held_out = {int(i) for b in validation_batches(config, vocab_size=VOCAB) for i in b["labels"].ravel()} - {EOD}
    begun = Counter()
    for batch in batches:
        begun.update(batch["labels"][(batch["tokens"] == EOD) & (batch["weights"] == 1)].tolist())
    epochs = {}
    for name, found in documents.items():
        times = [begun[d[0]] for d in found if d[0] not in held_out]
        assert len(times) == len(found) - max(1, round(len(found) * 0.1))
        assert max(times) - min(times) <= 1
        epochs[name] = max(times)
    assert epochs["c"] > 2
    assert epochs["b"] > 2
    assert not held_out & set(begun)


def test_validation_has_some_of_each_source_at_once(mixed):
    config, documents = mixed
    batches = list(validation_batches(config, vocab_size=VOCAB))
    whole = shares(batches, documents)
    assert set(whole) == set(SIZES)
    assert set(shares(batches[: len(batches) // 2], documents)) == set(SIZES)


def test_the_shares_are_said(mixed):
    batches = train_batches(mixed[0], vocab_size=VOCAB, process_count=2)
    for _ in range(50):
        next(batches)
    said = batches.describe()
    batches.close()
    found = re.fullmatch(
        r"data: (\d+) documents begun, (\d+) of them longer than a row; tokens: a (.*)%, b (.*)%, c 0.0% "
        r"\(in 2 of 4 rows\)",
        said,
    )
    assert found, said
    assert [float(share) for share in found.groups()[2:]] == pytest.approx([50, 50], abs=5)


def test_another_number_of_processes_goes_on_with_the_same_batches(mixed):
    config, _ = mixed
    whole, _, counts = steps(config, 60)
    got, states = [], None
    for processes, count in ((2, 13), (4, 20), (1, 7), (2, 20)):
        made, states, counted = steps(config, count, processes, states)
        got += made
    assert counted == counts
    for a, b in zip(got, whole, strict=True):
        for name in b:
            np.testing.assert_array_equal(a[name], b[name])


def test_a_position_of_other_weights_is_refused(mixed):
    config, _ = mixed
    _, (state,), _ = steps(config, 2)
    other = dataclasses.replace(config.mixture[0], weight=0.6)
    batches = train_batches(dataclasses.replace(config, mixture=(other, *config.mixture[1:])), vocab_size=VOCAB)
    with pytest.raises(UserError, match=r"data\.mixture"):
        batches.set_state(state)
    batches.close()


def test_text_in_a_mixture_goes_through_the_cache(tmp_path):
    for name in "xy":
        lines = [json.dumps({"q": "ask ", "a": name * 20}) + "\n" for _ in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    sources = [
        MixtureSource("x", "jsonl", (str(tmp_path / "x.jsonl"),), 3.0, text_key="a", prompt_key="q"),
        MixtureSource("y", "jsonl", (str(tmp_path / "y.jsonl"),), text_key="a"),
    ]
    config = DataConfig(mixture=tuple(sources), cache=str(tmp_path / "cache"), seq_len=16, batch_size=4)
    check(dataclasses.replace(Config(), data=config))
    batches, _, counts = steps(config, 60)
    assert counts["x"] / counts["y"] == pytest.approx(3, abs=0.1)
    x = sum((b["labels"] == ord("x")).sum() for b in batches)
    assert counts["untrained"] == sum((b["weights"] == 0).sum() for b in batches)
    assert counts["untrained"] / x == pytest.approx(4 / 20, abs=0.02)


def test_weights_are_joined_by_straight_lines():
    source = MixtureSource("a", "tokens", ("a.bin",), ((10, 1.0), (20, 3.0), (40, 0.0)))
    assert [weight_at(source, step) for step in (0, 10, 15, 20, 30, 40, 99)] == [1, 1, 2, 3, 1.5, 0, 0]
    assert weight_at(MixtureSource("a", "tokens", ("a.bin",), 0.25), 7) == 0.25


def test_a_mixture_is_saved_with_the_config(mixed):
    config = dataclasses.replace(Config(), data=mixed[0])
    assert config_lib.from_dict(json.loads(json.dumps(config_lib.to_dict(config)))) == config
    assert apply_override(config, "data.mixture=").data.mixture == ()
    with pytest.raises(UserError, match="is written in the config file"):
        apply_override(config, "data.mixture=a:0.5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "b"}, "'b': names are letters, digits, - and _, and each is given once"),
        ({"name": "a b"}, "names are letters"),
        ({"name": "tokens"}, "'tokens': that is the name of another count"),
        ({"source": "csv"}, "source='csv' is not one of"),
        ({"paths": ()}, "source=tokens needs paths"),
        ({"source": "python_stdlib"}, "source=python_stdlib reads no paths"),
        ({"source": "jsonl"}, "weights count tokens, so its text must be tokenized first; set data.cache"),
        ({"prompt_key": "q"}, "source=tokens has no fields"),
        ({"weight": -1.0}, "its weight is -1.0; weights are 0 or more"),
        ({"weight": float("nan")}, "weights are 0 or more"),
        ({"weight": ()}, "the steps of its weight are []"),
        ({"weight": ((5, 1.0), (5, 2.0))}, "the steps of its weight are [5, 5]; they must be 0 or more and rise"),
        ({"weight": ((0, 1.0), (200, 0.0))}, None),
    ],
)
def test_a_mixture_that_can_not_be_is_one_line(mixed, change, message):
    first = dataclasses.replace(mixed[0].mixture[0], **change)
    config = dataclasses.replace(Config(), data=dataclasses.replace(mixed[0], mixture=(first, *mixed[0].mixture[1:])))
    if message is None:
        check(config)
        return
    with pytest.raises(UserError, match=re.escape(message)):
        check(config)


def test_a_mixture_needs_some_weight_at_every_step(mixed):
    sources = (dataclasses.replace(mixed[0].mixture[0], weight=((0, 1.0), (50, 0.0))), mixed[0].mixture[2])
    config = dataclasses.replace(Config(), data=dataclasses.replace(mixed[0], mixture=sources))
    with pytest.raises(UserError, match="no source of a weight above 0 at step 50"):
        check(config)
    config = dataclasses.replace(Config(), data=dataclasses.replace(mixed[0], source="text", paths=("a",)))
    with pytest.raises(UserError, match=r"data\.source is set beside data\.mixture"):
        check(config)


def test_a_source_of_one_document_is_named(tmp_path, mixed):
    write_tokens(tmp_path / "one.bin", np.array([5, EOD]), VOCAB, EOD)
    one = MixtureSource("one", "tokens", (str(tmp_path / "one.bin"),))
    with pytest.raises(UserError, match="one: the data is a single document too short"):
        train_batches(dataclasses.replace(mixed[0], mixture=(one, *mixed[0].mixture)), vocab_size=VOCAB)
