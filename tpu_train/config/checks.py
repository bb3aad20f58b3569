"""The checks of a config's values against each other, made before anything is built."""

import dataclasses
import math
import re
import typing
from typing import Literal

from tpu_train.config.fields import (
    Config,
    DataConfig,
    MixtureSource,
    ModelConfig,
    SourceName,
    UserError,
    points_of,
    weight_at,
)
from tpu_train.config.overrides import flatten, parse


def check(config: Config) -> None:
    """Raises UserError on values that can't work together, before anything is built."""
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for name, hint in typing.get_type_hints(type(values)).items():
            if typing.get_origin(hint) is Literal:
                parse(getattr(values, name), hint, f"{section.name}.{name}")
    for name, value in flatten(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}; it must be a finite number")
    _check_signs(config)
    _check_model(config)
    _check_experts(config.model)
    if config.run.quantized != "none" and config.model.num_experts:
        raise UserError(
            f"run.quantized={config.run.quantized} is for dense layers, and model.num_experts is "
            f"{config.model.num_experts}; set run.quantized=none"
        )
    _check_rings(config)
    _check_data(config)
    _check_optim(config)
    if config.run.init_from_ema and not config.run.init_from:
        raise UserError("run.init_from_ema is set, but run.init_from names no run; set run.init_from=WORKDIR[@STEP]")
    if "://" in config.run.workdir and not re.fullmatch(r"gs://[^/]+/.*[^/].*", config.run.workdir):
        raise UserError(
            f"run.workdir={config.run.workdir} is neither a folder of this machine nor gs://BUCKET/FOLDER; give one"
        )


def profile_range(text: str | None, config: Config) -> range | None:
    """The steps of --profile_steps=FIRST:LAST, both included; None where it is not given. Raises UserError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+):(\d+)", text)
    if found is None:
        raise UserError(f"--profile_steps={text} is not FIRST:LAST, as in --profile_steps=10:13 for steps 10 to 13")
    first, last = int(found[1]), int(found[2])
    if not 1 <= first <= last:
        raise UserError(f"--profile_steps={text}: steps count from 1, and the last must not come before the first")
    if last > config.run.steps:
        raise UserError(f"--profile_steps={text} goes past the run's last step, run.steps={config.run.steps}")
    return range(first, last + 1)


def _check_model(config: Config) -> None:
    model = config.model
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
    if not 0 <= model.dropout < 1:
        raise UserError(f"model.dropout is {model.dropout}; it must be 0 or more, and below 1")
    if model.dropout and config.data.batch_size * config.data.seq_len > 2**31:
        raise UserError(
            f"model.dropout numbers a batch's tokens in 32 bits, and data.batch_size={config.data.batch_size} x "
            f"data.seq_len={config.data.seq_len} is more than 2^31; set model.dropout=0 or take a smaller batch"
        )


_OF_EXPERTS = (
    "experts_per_token expert_dim num_shared_experts router normalize_gates balance aux_loss_coefficient "
    "bias_update_rate capacity_factor"
)


def _check_experts(model: ModelConfig) -> None:
    if not model.num_experts:
        for name in _OF_EXPERTS.split():
            if getattr(model, name) != getattr(ModelConfig(), name):
                raise UserError(f"model.{name} is set, but model.num_experts is 0; set model.num_experts")
        return
    if model.experts_per_token > model.num_experts:
        raise UserError(
            f"model.experts_per_token={model.experts_per_token} is more than model.num_experts={model.num_experts}"
        )
    if model.experts_per_token == 1 and model.normalize_gates:
        raise UserError(
            "model.experts_per_token=1 with model.normalize_gates=true makes every gate 1, so that the router learns "
            "nothing; set model.normalize_gates=false"
        )


def _check_rings(config: Config) -> None:
    if config.mesh.gradient_scatter == "xla":
        return
    wants = f"mesh.gradient_scatter={config.mesh.gradient_scatter} is for"
    if config.model.num_experts:
        raise UserError(f"{wants} dense layers, and model.num_experts={config.model.num_experts}; set it to xla")
    if config.run.quantized != "none":
        raise UserError(f"{wants} run.quantized=none, not {config.run.quantized}; set it to xla")


def _check_data(config: Config) -> None:
    data = config.data
    if data.source != "python_stdlib" and not data.paths:
        raise UserError(f"data.source={data.source} needs data.paths; give files or globs, comma separated")
    if data.source == "python_stdlib" and data.paths:
        raise UserError(
            "data.paths is set, but data.source=python_stdlib reads none; set data.source=text (or jsonl, ...)"
        )
    if data.prompt_key and data.source not in _WITH_KEYS:
        raise UserError(f"data.prompt_key is set, but data.source={data.source} has no fields; jsonl and parquet have")
    _check_messages(data)
    if {source.source for source in data.mixture or (data,)} == {"tokens"}:
        for name, unset in (("cache", ""), ("on_corrupt", "stop")):
            if getattr(data, name) != unset:
                raise UserError(f"data.{name}={getattr(data, name)} is for text, and token files hold none")
    if data.mixture:
        _check_mixture(data)
    if not 0 < data.validation_fraction < 1:
        raise UserError(f"data.validation_fraction is {data.validation_fraction}; it must lie between 0 and 1")


_WITH_KEYS = ("jsonl", "parquet")


def _check_messages(data: DataConfig) -> None:
    sources: list[tuple[str, DataConfig | MixtureSource]] = [("data.", data)]
    if data.mixture:
        sources = [(f"data.mixture source {mixed.name!r}: ", mixed) for mixed in data.mixture]
    for where, source in sources:
        if not source.messages_key:
            continue
        if source.source != "jsonl":
            raise UserError(f"{where}messages_key is set, but source={source.source}; only jsonl has messages")
        for name in ("text_key", "prompt_key"):
            if getattr(source, name) != getattr(DataConfig(), name):
                raise UserError(f"{where}{name} is set beside messages_key, which takes its place; leave one out")
    if [data.message_template.count(part) for part in ("{role}", "{content}")] != [1, 1] or (
        data.message_template.find("{role}") > data.message_template.find("{content}")
    ):
        raise UserError(
            f"data.message_template={data.message_template!r} must have {{role}} once, and after it {{content}} once"
        )
    if "\n" in data.message_template:
        raise UserError(r"data.message_template has a line break; write \n, a backslash and an n, for each")
    template = DataConfig().message_template
    if data.message_template != template and not any(source.messages_key for _, source in sources):
        raise UserError("data.message_template is set, but no messages_key; set data.messages_key")


def _check_mixture(data: DataConfig) -> None:
    default = DataConfig()
    for name in ("source", "paths", "text_key", "prompt_key", "messages_key"):
        if getattr(data, name) != getattr(default, name):
            raise UserError(f"data.{name} is set beside data.mixture, whose sources have their own; leave one out")
    names = [source.name for source in data.mixture]
    for source in data.mixture:
        where = f"data.mixture source {source.name!r}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", source.name) or names.count(source.name) > 1:
            raise UserError(f"{where}: names are letters, digits, - and _, and each is given once")
        if source.name in ("documents", "split", "tokens", "untrained", "dropped", "lost"):
            raise UserError(f"{where}: that is the name of another count; choose another")
        parse(source.source, SourceName, f"{where}: source")
        if (source.source == "python_stdlib") == bool(source.paths):
            raise UserError(f"{where}: source={source.source} {'reads no' if source.paths else 'needs'} paths")
        if source.prompt_key and source.source not in _WITH_KEYS:
            raise UserError(f"{where}: prompt_key is set, but source={source.source} has no fields")
        if source.source != "tokens" and not data.cache:
            raise UserError(f"{where}: weights count tokens, so its text must be tokenized first; set data.cache")
        points = points_of(source)
        steps = [step for step, _ in points]
        if not points or steps != sorted(set(steps)) or steps[0] < 0:
            raise UserError(f"{where}: the steps of its weight are {steps}; they must be 0 or more and rise")
        if not all(math.isfinite(weight) and weight >= 0 for _, weight in points):
            raise UserError(f"{where}: its weight is {source.weight}; weights are 0 or more")
    for step in sorted({step for source in data.mixture for step, _ in points_of(source)}):
        if not sum(weight_at(source, step) for source in data.mixture):
            raise UserError(f"data.mixture has no source of a weight above 0 at step {step}")


def _check_optim(config: Config) -> None:
    optim = config.optim
    if config.data.batch_size % optim.accumulation_steps:
        raise UserError(
            f"optim.accumulation_steps={optim.accumulation_steps} does not divide "
            f"data.batch_size={config.data.batch_size}"
        )
    if optim.warmup_steps > config.run.steps:
        raise UserError(f"optim.warmup_steps={optim.warmup_steps} is more than run.steps={config.run.steps}")
    for name in ("b1", "b2", "decay_fraction", "final_lr_fraction"):
        value = getattr(optim, name)
        if not 0 <= value <= 1 or (name in ("b1", "b2") and value == 1):
            raise UserError(f"optim.{name} is {value}; it must lie between 0 and 1")
    if optim.ema_decay is not None and not 0 < optim.ema_decay < 1:
        raise UserError(f"optim.ema_decay is {optim.ema_decay}; it must lie between 0 and 1, or be none")
    if optim.offload and optim.optimizer == "muon":
        raise UserError(
            "optim.offload takes the update layer by layer from the host's memory, as AdamW's can be, and "
            "optim.optimizer=muon can't; set optim.offload=false"
        )
    if config.run.spike_factor is not None and config.run.spike_factor <= 1:
        raise UserError(f"run.spike_factor is {config.run.spike_factor}; it must be above 1, or none")


_POSITIVE = {
    "model": "vocab_size num_layers model_dim num_heads num_kv_heads head_dim mlp_dim norm_eps rope_theta "
    "attention_soft_cap logit_soft_cap scan_unroll experts_per_token expert_dim capacity_factor",
    "data": "seq_len batch_size",
    "optim": "peak_lr muon_lr eps clip_norm accumulation_steps",
    "mesh": "stage_rounds stage_microbatches",
    "checkpoint": "keep_last stop_seconds",
    "run": "steps log_every eval_every eval_batches hang_seconds",
}
_NOT_NEGATIVE = {
    "model": "num_experts num_shared_experts aux_loss_coefficient bias_update_rate",
    "checkpoint": "every_steps every_minutes keep_every keep_best retry_minutes",
    "data": "workers seed",
    "optim": "warmup_steps weight_decay z_loss",
    "run": "sample_tokens seed max_skipped",
}


def _check_signs(config: Config) -> None:
    for least, table in (("above 0", _POSITIVE), ("0 or more", _NOT_NEGATIVE)):
        for section, names in table.items():
            for name in names.split():
                value = getattr(getattr(config, section), name)
                if value is not None and (value < 0 or (value == 0 and table is _POSITIVE)):
                    raise UserError(f"{section}.{name} is {value}; it must be {least}")
