"""What a run is: frozen dataclasses, `--set section.field=value` overrides, and the checks made before anything runs.

A config file is Python with `def config() -> Config`; its docstring is the command and the expected result.
`None` in a field means "derived from the others" and is filled in by the field's property.

Dims, one letter each, used in array names (`x_BTD`) everywhere:
    B batch           data.batch_size         T query tokens    data.seq_len
    D model           model.model_dim         S key tokens
    L layers          model.num_layers        N query heads     model.num_heads
    K key/value heads model.num_kv_heads      G = N // K
    H head dim        model.head_dim          F feed-forward    model.mlp_dim
    V vocabulary      model.vocab_size        A micro-batches   optim.accumulation_steps
"""

import dataclasses
import difflib
import importlib.util
import math
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal


class UserError(Exception):
    """Bad input: one line that says what is wrong and what would be right. `main` prints it and exits with 2."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 256
    num_layers: int = 4
    model_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: model_dim // num_heads
    mlp_dim: int = 512
    gated_mlp: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"] = "silu"
    tie_embeddings: bool = True
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    attention_soft_cap: float | None = None  # None: no cap
    logit_soft_cap: float | None = None
    # One entry per layer of a repeating group, in tokens; 0 sees all earlier tokens. Must divide num_layers.
    window_pattern: tuple[int, ...] = (0,)
    # Groups of layers per turn of the scan over them. All at once is quicker on a CPU; 1 compiles soonest on a TPU.
    scan_unroll: int = 1
    # What the backward pass keeps of a block: everything, matmul outputs, or only the block's input.
    remat: Literal["none", "dots", "full"] = "none"

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_dim if self.head_dim is not None else self.model_dim // self.num_heads


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: Literal["python_stdlib", "text", "jsonl", "tokens", "array_record"] = "python_stdlib"
    paths: tuple[str, ...] = ()  # files or globs; none for python_stdlib
    text_key: str = "text"  # the field of a JSONL line that holds the text
    tokenizer: str = "bytes"  # "bytes" or the path of a Hugging Face tokenizer.json
    seq_len: int = 256
    batch_size: int = 16  # sequences per optimizer step, over all processes and micro-batches
    packing: bool = True  # False: one document a row, cut at seq_len and padded
    validation_fraction: float = 0.05  # of the documents; never trained on
    seed: int = 0  # order of the documents
    workers: int = 0  # processes that read and tokenize; 0: a thread of this one


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    optimizer: Literal["adamw", "muon"] = "adamw"
    peak_lr: float = 1e-3
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 10
    decay_fraction: float = 0.2  # wsd: the share of the steps spent going down
    final_lr_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # matrices only
    clip_norm: float | None = 1.0  # None: no clipping
    muon_lr: float = 0.02  # peak, for the matrices inside the blocks; the rest takes peak_lr with AdamW
    z_loss: float = 0.0
    accumulation_steps: int = 1
    # The first moment only. The second stays float32: in bfloat16 its small updates would be lost.
    moment_dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; at most one may be -1 and takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 100
    keep_last: int = 3


@dataclasses.dataclass(frozen=True)
class RunConfig:
    workdir: str = ""  # empty: runs/<name of the config file>
    steps: int = 100
    seed: int = 0  # initial weights and sampling
    # auto: bfloat16 compute on TPU and GPU, float32 on CPU. Weights and moments are float32 in all of them.
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    implementation: Literal["auto", "reference", "xla", "pallas"] = "auto"
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    sample_tokens: int = 200
    sample_prompt: str = "def "


@dataclasses.dataclass(frozen=True)
class Config:
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()


def load(path: str, overrides: Iterable[str] = ()) -> Config:
    """Runs the config file at `path`, applies `section.field=value` overrides and checks the result."""
    file = Path(path)
    if not file.is_file():
        beside = sorted(str(p) for p in (file.parent if file.parent.is_dir() else Path("configs")).glob("*.py"))
        raise UserError(f"no config file {path!r}{_did_you_mean(path, beside) or _listing(beside)}")
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


def apply_override(config: Config, override: str) -> Config:
    """A copy of `config` with one `section.field=value` applied. Raises UserError on an unknown key or wrong type."""
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set {override!r} has no value; write --set section.field=value")
    names = [name for name, _ in flatten(config)]
    if key not in names:
        raise UserError(f"unknown config field {key!r}{_did_you_mean(key, names)}")
    section_name, field_name = key.split(".")
    section = getattr(config, section_name)
    value = _parse(text, typing.get_type_hints(type(section))[field_name], key)
    return dataclasses.replace(config, **{section_name: dataclasses.replace(section, **{field_name: value})})


def flatten(config: Config) -> Iterator[tuple[str, Any]]:
    """("section.field", value) for every field."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for field in dataclasses.fields(values):
            yield f"{section.name}.{field.name}", getattr(values, field.name)


def differences(config: Config, other: Config) -> list[tuple[str, Any, Any]]:
    """(name, value here, value there) for each field that differs."""
    return [(name, a, b) for (name, a), (_, b) in zip(flatten(config), flatten(other), strict=True) if a != b]


def to_dict(config: Config) -> dict[str, Any]:
    """Plain JSON types, for keeping beside a checkpoint."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in flatten(config)}


def from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `to_dict`; fields that a newer version added take their defaults."""
    config = Config()
    known = dict(flatten(config))
    for name, value in values.items():
        if name not in known:
            raise UserError(f"saved config has the unknown field {name!r}{_did_you_mean(name, known)}")
        section_name, field_name = name.split(".")
        value = tuple(value) if isinstance(value, list) else value
        section = dataclasses.replace(getattr(config, section_name), **{field_name: value})
        config = dataclasses.replace(config, **{section_name: section})
    return config


def check(config: Config) -> None:
    """Raises UserError on values that can't work together, before anything is built."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for name, hint in typing.get_type_hints(type(values)).items():
            if typing.get_origin(hint) is Literal:
                _parse(getattr(values, name), hint, f"{section.name}.{name}")
    for name, value in flatten(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}; it must be a finite number")
    _check_signs(config)
    model, data, optim, run = config.model, config.data, config.optim, config.run
    if model.head_dim is None and model.model_dim % model.num_heads:
        raise UserError(
            f"model.model_dim={model.model_dim} is not a multiple of model.num_heads={model.num_heads}; "
            "set model.head_dim"
        )
    if model.num_heads % model.kv_heads:
        raise UserError(f"model.num_kv_heads={model.kv_heads} does not divide model.num_heads={model.num_heads}")
    if model.head_size % 2:
        raise UserError(f"the head dim is {model.head_size}; rotary positions need an even one")
    if not model.window_pattern or model.num_layers % len(model.window_pattern):
        raise UserError(
            f"model.window_pattern has {len(model.window_pattern)} entries; it needs a number that divides "
            f"model.num_layers={model.num_layers}"
        )
    if any(window < 0 for window in model.window_pattern):
        raise UserError(f"model.window_pattern={model.window_pattern} has a negative window; 0 means no window")
    if data.source != "python_stdlib" and not data.paths:
        raise UserError(f"data.source={data.source} needs data.paths; give files or globs, comma separated")
    if data.source == "python_stdlib" and data.paths:
        raise UserError(
            "data.paths is set, but data.source=python_stdlib reads none; set data.source=text (or jsonl, ...)"
        )
    if not 0 < data.validation_fraction < 1:
        raise UserError(f"data.validation_fraction is {data.validation_fraction}; it must lie between 0 and 1")
    if data.batch_size % optim.accumulation_steps:
        raise UserError(
            f"optim.accumulation_steps={optim.accumulation_steps} does not divide data.batch_size={data.batch_size}"
        )
    if "://" in run.workdir:
        raise UserError(f"run.workdir={run.workdir} is not a folder of this machine; give a local or a mounted one")
    if optim.warmup_steps > run.steps:
        raise UserError(f"optim.warmup_steps={optim.warmup_steps} is more than run.steps={run.steps}")
    for name in ("b1", "b2", "decay_fraction", "final_lr_fraction"):
        value = getattr(optim, name)
        if not 0 <= value <= 1 or (name in ("b1", "b2") and value == 1):
            raise UserError(f"optim.{name} is {value}; it must lie between 0 and 1")


_POSITIVE = {
    "model": "vocab_size num_layers model_dim num_heads num_kv_heads head_dim mlp_dim norm_eps rope_theta "
    "attention_soft_cap logit_soft_cap scan_unroll",
    "data": "seq_len batch_size",
    "optim": "peak_lr muon_lr eps clip_norm accumulation_steps",
    "checkpoint": "every_steps keep_last",
    "run": "steps log_every eval_every eval_batches",
}
_NOT_NEGATIVE = {
    "data": "workers seed",
    "optim": "warmup_steps weight_decay z_loss",
    "run": "sample_tokens seed",
}


def _check_signs(config: Config) -> None:
    for least, table in (("above 0", _POSITIVE), ("0 or more", _NOT_NEGATIVE)):
        for section, names in table.items():
            for name in names.split():
                value = getattr(getattr(config, section), name)
                if value is not None and (value < 0 or (value == 0 and table is _POSITIVE)):
                    raise UserError(f"{section}.{name} is {value}; it must be {least}")


def _parse(text: str, hint: Any, key: str) -> Any:
    """`text` as the type that the field's annotation names."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        inner = next(arg for arg in args if arg is not type(None))
        return None if text.lower() == "none" else _parse(text, inner, key)
    if origin is Literal:
        if text not in args:
            raise UserError(f"{key}={text!r} is not one of {', '.join(args)}{_did_you_mean(text, args)}")
        return text
    if origin is tuple:
        return tuple(_parse(part.strip(), args[0], key) for part in text.split(",") if part.strip())
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise UserError(f"{key}={text!r} is not true or false")
        return text.lower() == "true"
    try:
        return hint(text)
    except ValueError:
        article = {int: "a whole number", float: "a number"}[hint]
        raise UserError(f"{key}={text!r} is not {article}") from None


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:  # the right field under the wrong section, or none at all
        by_field = {name.split(".")[-1]: name for name in known}
        close = [by_field[m] for m in difflib.get_close_matches(word.split(".")[-1], list(by_field), n=1, cutoff=0.6)]
    return f"; did you mean {close[0]!r}?" if close else ""


def _listing(names: list[str]) -> str:
    return f"; there are {', '.join(names)}" if names else ""
