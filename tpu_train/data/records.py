r"""What a record holds: a text, a text after its prompt, or a conversation; each fault of one named by its place.

A conversation is a list of messages, {"role": ..., "content": ...}, under `messages_key`. Each becomes
data.message_template with role and content filled in, one after the other; a \n in it is a line break. Loss is on
assistants' content, with what the template has after it, so that a model learns to stop: what stands before is given to
it at inference. What is trained on, and each stretch of what is not, is tokenized by itself. The template is plain
text, also to a tokenizer that has special tokens of that spelling, so content that spells it out looks like another
message.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tpu_train.config import UserError

ROLES = ("system", "user", "assistant", "tool")
Where = Callable[[], str] | str  # what to call a record in a message


class BadDocument(UserError):
    """A document that can't be read, though its file can: data.on_corrupt=skip leaves it out."""


class Text(NamedTuple):
    """The text of a document."""

    text: str
    ends: bool = True  # whether the document ends with it
    prompt: str = ""  # stands before the text and is not trained on
    turns: tuple[tuple[str, bool], ...] = ()  # in place of both: (text, whether it is trained on), in turns

    @property
    def parts(self) -> tuple[tuple[str, bool], ...]:
        """(text, whether it is trained on) one after the other."""
        prompt = ((self.prompt, False),) if self.prompt else ()
        return self.turns or (*prompt, (self.text, True))


class Fields(NamedTuple):
    """Where a record has its text: `text_key` and before it `prompt_key`, or `messages_key`."""

    text_key: str
    prompt_key: str = ""
    messages_key: str = ""
    template: str = ""  # data.message_template


def parse_line(line: bytes, fields: Fields, where: Where) -> Text:
    """The text of a line of JSON. Raises BadDocument if it has none."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadDocument(f"{_name(where)} is not valid UTF-8; convert the file to UTF-8") from None
    except json.JSONDecodeError as error:
        raise BadDocument(f"{_name(where)} is not JSON ({error.msg}); every line must be one object") from None
    except RecursionError:
        raise BadDocument(f"{_name(where)} is nested too deep for JSON") from None
    return check_messages(record, fields, where) if fields.messages_key else check_text(record, fields, where)


def check_text(record: Any, fields: Fields, where: Where) -> Text:
    """The strings of `record` under its keys. Raises BadDocument if there are none."""
    for key, field in ((fields.text_key, "text_key"), (fields.prompt_key, "prompt_key")):
        if not key or (isinstance(record, dict) and isinstance(record.get(key), str)):
            continue
        _refuse_without(record, key, field, where)
        raise BadDocument(f"{_name(where)} has no string under {key!r}; set data.{field}")
    return Text(record[fields.text_key], prompt=record[fields.prompt_key] if fields.prompt_key else "")


def check_messages(record: Any, fields: Fields, where: Where) -> Text:
    """The conversation of `record`. Raises BadDocument if it is none, or if nothing of it would be trained on."""
    key = fields.messages_key
    _refuse_without(record, key, "messages_key", where)
    messages = record[key]
    if not isinstance(messages, list):
        raise BadDocument(f"{_name(where)} has a {type(messages).__name__} under {key!r}, not a list of messages")
    for number, message in enumerate(messages, 1):
        if wrong := _wrong(message):
            raise BadDocument(f"{_name(where)}: message {number} {wrong}")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadDocument(f"{_name(where)} has no message of an assistant, so nothing of it would be trained on")
    return Text("", turns=_turns(messages, fields.template))


def _wrong(message: Any) -> str | None:
    if not isinstance(message, dict):
        return f"is a {type(message).__name__}, not an object with role and content"
    if message.get("role") not in ROLES:
        return f"has the role {message.get('role')!r}, not one of {', '.join(ROLES)}"
    if not isinstance(message.get("content"), str):
        return f"has no string as its content, but {type(message.get('content')).__name__}"
    extra = [name for name in message if name not in ("role", "content")]
    return f"has {extra[0]!r} beside role and content, which the template can't show" if extra else None


def _turns(messages: list[dict[str, str]], template: str) -> tuple[tuple[str, bool], ...]:
    before, _, after = template.replace(r"\n", "\n").partition("{content}")
    turns: list[tuple[str, bool]] = []
    given = ""
    for message in messages:
        given += before.replace("{role}", message["role"])
        said = message["content"] + after
        if message["role"] == "assistant":
            turns += [(given, False), (said, True)]
            given = ""
        else:
            given += said
    return (*turns, (given, False)) if given else tuple(turns)


def _refuse_without(record: Any, key: str, field: str, where: Where) -> None:
    if not isinstance(record, dict) or key not in record:
        found = f"the keys {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise BadDocument(f"{_name(where)} has {found}, not {key!r}; set data.{field}")


def _name(where: Where) -> str:
    return where if isinstance(where, str) else where()
