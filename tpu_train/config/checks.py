"""The checks of a config's values against each other, made before anything is built."""

import dataclasses
import math
import typing
from typing import Literal

from tpu_train.config.fields import Config, ModelConfig, UserError
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
    _check_data(config)
    _check_optim(config)
    if "://" in config.run.workdir:
        raise UserError(
            f"run.workdir={config.run.workdir} is not a folder of this machine; give a local or a mounted one"
        )


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


def _check_data(config: Config) -> None:
    data = config.data
    if data.source != "python_stdlib" and not data.paths:
        raise UserError(f"data.source={data.source} needs data.paths; give files or globs, comma separated")
    if data.source == "python_stdlib" and data.paths:
        raise UserError(
            "data.paths is set, but data.source=python_stdlib reads none; set data.source=text (or jsonl, ...)"
        )
    if not 0 < data.validation_fraction < 1:
        raise UserError(f"data.validation_fraction is {data.validation_fraction}; it must lie between 0 and 1")


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


_POSITIVE = {
    "model": "vocab_size num_layers model_dim num_heads num_kv_heads head_dim mlp_dim norm_eps rope_theta "
    "attention_soft_cap logit_soft_cap scan_unroll experts_per_token expert_dim capacity_factor",
    "data": "seq_len batch_size",
    "optim": "peak_lr muon_lr eps clip_norm accumulation_steps",
    "checkpoint": "every_steps keep_last",
    "run": "steps log_every eval_every eval_batches",
}
_NOT_NEGATIVE = {
    "model": "num_experts num_shared_experts aux_loss_coefficient bias_update_rate",
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
