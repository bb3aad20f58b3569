"""`section.field=value`: text as the type that a field's annotation names, and what to say where it is none."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from tpu_train.config.fields import Config, UserError


def apply_override(config: Config, override: str) -> Config:
    """A copy of `config` with one `section.field=value` applied. Raises UserError on an unknown key or wrong type."""
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set {override!r} has no value; write --set section.field=value")
    names = [name for name, _ in flatten(config)]
    if key not in names:
        raise UserError(f"unknown config field {key!r}{did_you_mean(key, names)}")
    section_name, field_name = key.split(".")
    section = getattr(config, section_name)
    value = parse(text, typing.get_type_hints(type(section))[field_name], key)
    return dataclasses.replace(config, **{section_name: dataclasses.replace(section, **{field_name: value})})


def flatten(config: Config) -> Iterator[tuple[str, Any]]:
    """("section.field", value) for every field."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for field in dataclasses.fields(values):
            yield f"{section.name}.{field.name}", getattr(values, field.name)


def parse(text: str, hint: Any, key: str) -> Any:
    """`text` as the type that the field's annotation names."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        inner = next(arg for arg in args if arg is not type(None))
        return None if text.lower() == "none" else parse(text, inner, key)
    if origin is Literal:
        if text not in args:
            raise UserError(f"{key}={text!r} is not one of {', '.join(args)}{did_you_mean(text, args)}")
        return text
    if origin is tuple and dataclasses.is_dataclass(args[0]):
        if text:
            raise UserError(f"{key} is written in the config file; --set can only take it away, with {key}=")
        return ()
    if origin is tuple:
        return tuple(parse(part.strip(), args[0], key) for part in text.split(",") if part.strip())
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{key}={text!r} is not true or false")
        return text.lower() == "true"
    try:
        return hint(text)
    except ValueError:
        article = {int: "a whole number", float: "a number"}[hint]
        raise UserError(f"{key}={text!r} is not {article}") from None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" with the closest of `known`, or nothing where none is close."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:  # the right field under the wrong section, or none at all
        by_field = {name.split(".")[-1]: name for name in known}
        close = [by_field[m] for m in difflib.get_close_matches(word.split(".")[-1], list(by_field), n=1, cutoff=0.6)]
    return f"; did you mean {close[0]!r}?" if close else ""
