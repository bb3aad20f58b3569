"""What a run is: a config file, `--set section.field=value` overrides, and the checks made before anything runs.

A config file is Python with `def config() -> Config`; its docstring is the command and the expected result.
fields.py has the fields and their dims, overrides.py the parsing, checks.py the checks.
"""

import dataclasses
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tpu_train.config.checks import check, profile_range
from tpu_train.config.fields import (
    CheckpointConfig,
    Config,
    DataConfig,
    MeshConfig,
    MixtureSource,
    ModelConfig,
    OptimConfig,
    RunConfig,
    UserError,
    points_of,
    weight_at,
)
from tpu_train.config.overrides import apply_override, did_you_mean, flatten

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "MeshConfig",
    "MixtureSource",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "UserError",
    "apply_override",
    "check",
    "differences",
    "flatten",
    "from_dict",
    "load",
    "points_of",
    "profile_range",
    "to_dict",
    "weight_at",
]


def load(path: str, overrides: Iterable[str] = ()) -> Config:
    """Runs the config file at `path`, applies `section.field=value` overrides and checks the result."""
    file = Path(path)
    if not file.is_file():
        beside = sorted(str(p) for p in (file.parent if file.parent.is_dir() else Path("configs")).glob("*.py"))
        raise UserError(f"no config file {path!r}{did_you_mean(path, beside) or _listing(beside)}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "config"):
        raise UserError(f"{path} has no function config(); write `def config() -> Config`")
    config = module.config()
    if not isinstance(config, Config):
        raise UserError(f"config() in {path} returned {type(config).__name__}, not tpu_train.config.Config")
    for override in overrides:
        config = apply_override(config, override)
    if not config.run.workdir:
        config = apply_override(config, f"run.workdir=runs/{file.stem}")
    check(config)
    return config


def differences(config: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """(name, value here, value there) for each field that differs."""
    return [(name, a, b) for (name, a), (_, b) in zip(flatten(config), flatten(other), strict=True) if a != b]


def to_dict(config: Config) -> dict[str, Any]:
    """Plain JSON types, for keeping beside a checkpoint."""
    return {name: _plain(value) for name, value in flatten(config)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(part) for name, part in vars(value).items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _frozen(value: Any) -> Any:
    """The inverse of `_plain`, for the fields there are."""
    if isinstance(value, dict):
        return MixtureSource(**{name: _frozen(part) for name, part in value.items()})
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value


def from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `to_dict`; fields that a newer version added take their defaults."""
    config = Config()
    known = dict(flatten(config))
    for name, value in values.items():
        if name not in known:
            raise UserError(f"saved config has the unknown field {name!r}{did_you_mean(name, known)}")
        section_name, field_name = name.split(".")
        value = _frozen(value)
        section = dataclasses.replace(getattr(config, section_name), **{field_name: value})
        config = dataclasses.replace(config, **{section_name: section})
    return config


def _listing(names: list[str]) -> str:
    return f"; there are {', '.join(names)}" if names else ""
