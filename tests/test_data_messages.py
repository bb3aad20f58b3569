"""Conversations: what is trained on, with and without the cache, and records that are none."""

import dataclasses
import functools
import gzip
import itertools
import json
import random
import shutil

import numpy as np
import pytest
from test_data_completions import documents, held_out

from tpu_train.config import Config, DataConfig, MixtureSource, UserError, apply_override, check
from tpu_train.data import train_batches
from tpu_train.data.records import ROLES, BadDocument, Fields, parse_line


def conversations(count=30):
    draw = random.Random(0)
    for number in range(count):
        roles = draw.choices(ROLES, k=draw.randrange(1, 6))
        roles.insert(draw.randrange(len(roles) + 1), "assistant")
        yield [{"role": r, "content": draw.choice(["", "ü{role}", "a{content}b"]) + f"{number}" * 9} for r in roles]


def wanted(messages):
    """The bytes of a conversation with 255 at the end: which are trained on, said here message by message."""
    text, weights = b"", []
    for message in messages:
        header, said = f"[{message['role']}:".encode(), f"{message['content']}]".encode()
        text += header + said
        weights += [0.0] * len(header) + [float(message["role"] == "assistant")] * len(said)
    return text + b"\xff", [*weights, weights[-1]]


@pytest.fixture
def config(tmp_path):
    lines = [json.dumps({"chat": messages, "id": 1}) + "\n" for messages in conversations()]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    return DataConfig(
        source="jsonl",
        paths=(str(tmp_path / "a.jsonl"),),
        messages_key="chat",
        message_template="[{role}:{content}]",
        seq_len=32,
        batch_size=4,
        validation_fraction=0.1,
    )


@pytest.mark.parametrize("kind", ["read", "cached", "gzip", "mixture"])
def test_only_assistants_are_trained_on(config, tmp_path, kind):
    if kind != "read":
        config = dataclasses.replace(config, cache=str(tmp_path / "cache"))
    if kind == "gzip":
        with open(tmp_path / "a.jsonl", "rb") as plain, gzip.open(tmp_path / "a.jsonl.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        config = dataclasses.replace(config, paths=(str(tmp_path / "a.jsonl.gz"),))
    if kind == "mixture":
        source = MixtureSource("chats", "jsonl", config.paths, messages_key="chat")
        config = dataclasses.replace(config, source="python_stdlib", paths=(), messages_key="", mixture=(source,))
    check(dataclasses.replace(Config(), data=config))
    want = dict(wanted(messages) for messages in conversations())
    batches = train_batches(config, vocab_size=256)
    made = [next(batches) for _ in range(100)]
    counts = batches.counts
    batches.close()
    found = list(documents(made))
    assert {labels for labels, _ in found} | held_out(config) == set(want)
    assert all(weights == want[labels] for labels, weights in found)
    assert counts["untrained"] == sum(int((b["weights"] == 0).sum()) for b in made)
    assert 0 < counts["untrained"] < counts["tokens"] == 100 * 4 * 32


def test_a_damaged_byte_of_what_is_trained_on_is_named(config, tmp_path):
    config = dataclasses.replace(config, cache=str(tmp_path / "cache"))
    train_batches(config, vocab_size=256).close()
    (file,) = (tmp_path / "cache").rglob("*.trained")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"\.trained is damaged near byte 0; start again"):
        train_batches(config, vocab_size=256)


def test_another_template_makes_other_tokens_and_another_position(config, tmp_path):
    config = dataclasses.replace(config, cache=str(tmp_path / "cache"))
    first = train_batches(config, vocab_size=256)
    other = train_batches(dataclasses.replace(config, message_template=r"{role}: {content}\n"), vocab_size=256)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert not np.array_equal(next(first)["tokens"], next(other)["tokens"])
    with pytest.raises(UserError, match="data fingerprint"):
        other.set_state(first.get_state())
    first.close()
    other.close()


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"text": "a"}, "has the keys text, not 'chat'; set data.messages_key"),
        ([], "has a list, not 'chat'; set data.messages_key"),
        ({"chat": "hello"}, "has a str under 'chat', not a list of messages"),
        ({"chat": []}, "has no message of an assistant, so nothing of it would be trained on"),
        ({"chat": [{"role": "user", "content": "a"}]}, "has no message of an assistant"),
        ({"chat": ["a"]}, ": message 1 is a str, not an object with role and content"),
        ({"chat": [{"role": "User", "content": "a"}]}, ": message 1 has the role 'User', not one of system, user, "),
        ({"chat": [{"role": "assistant"}]}, ": message 1 has no string as its content, but NoneType"),
        ({"chat": [{"role": "assistant", "content": [1]}]}, ": message 1 has no string as its content, but list"),
        (
            {"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]},
            ": message 2 has 'weight' beside role and content, which the template can't show",
        ),
    ],
)
def test_a_record_that_is_no_conversation_is_named(record, why):
    with pytest.raises(BadDocument) as refused:
        parse_line(json.dumps(record).encode(), Fields("text", "", "chat", "{role}{content}"), "a.jsonl:7")
    assert str(refused.value).startswith(("a.jsonl:7 " if why[0] != ":" else "a.jsonl:7") + why)


def test_its_file_and_line_are_named_when_it_is_read(config, tmp_path):
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"chat": [{"role": "bot", "content": "a"}]}\n')
    batches = train_batches(config, vocab_size=256)
    with pytest.raises(UserError, match=r"a\.jsonl:31: message 1 has the role 'bot', not one of"):
        list(itertools.islice(batches, 200))
    batches.close()
    with pytest.raises(UserError, match=r"a\.jsonl:31: message 1 has the role 'bot'.*; data\.on_corrupt=skip would"):
        train_batches(dataclasses.replace(config, cache=str(tmp_path / "cache")), vocab_size=256)


def test_a_backslash_and_an_n_in_the_template_are_a_line_break():
    record = {"m": [{"role": "user", "content": r"a\n"}, {"role": "assistant", "content": "b"}]}
    text = parse_line(json.dumps(record).encode(), Fields("text", "", "m", DataConfig().message_template), "a.jsonl:1")
    assert text.turns == (("<|user|>\na\\n\n<|assistant|>\n", False), ("b\n", True))


JSONL = ("data.source=jsonl", "data.paths=a.jsonl", "data.messages_key=m")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((*JSONL, "data.text_key=t"), "data.text_key is set beside messages_key, which takes its place; leave one out"),
        ((*JSONL, "data.prompt_key=t"), "data.prompt_key is set beside messages_key"),
        (("data.messages_key=m",), "data.messages_key is set, but source=python_stdlib; only jsonl has messages"),
        (("data.message_template={role} {content}",), "data.message_template is set, but no messages_key; set"),
        ((*JSONL, "data.message_template={role}\n{content}"), "has a line break; write \\n, a backslash and an n"),
        ((*JSONL, "data.message_template={content}"), "must have {role} once, and after it {content} once"),
        ((*JSONL, "data.message_template={content} {role}"), "must have {role} once, and after it {content} once"),
        ((*JSONL, "data.message_template={role}{role}{content}"), "must have {role} once"),
    ],
)
def test_settings_that_can_not_be_are_refused(overrides, why):
    config = functools.reduce(apply_override, overrides, Config())
    with pytest.raises(UserError) as refused:
        check(config)
    assert why in str(refused.value)
