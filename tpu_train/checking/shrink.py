"""A small copy of a config for the checks to run: every choice is kept, sizes are not. Without jax.

Choices are what picks code: activation, norms, caps, windows, grouped heads, experts, optimizer, accumulation, packing,
remat. Of sizes only what picks code is kept: whether heads are grouped, whether there are fewer tokens than words,
whether a window is shorter than a row.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from tpu_train import config as config_lib
from tpu_train.config import Config, ModelConfig

ROW = 32  # tokens
GROUPS = 2  # of layers, so that the scan over them has a carry
# Every step by this much, so that three of them are far above the weights' rounding, and steps show gradients' sizes:
# with the usual eps of 1e-8 Adam divides them away, and what is left of a gradient that should be 0 as well.
LEARNING_RATE, EPS = 1e-2, 1e-3


def shrunk(config: Config, meshes: Sequence[Mapping[str, int]], steps: int) -> Config:
    """`config` made small enough to compile on every mesh in seconds, with all dims divisible over `meshes`."""

    def parts(*axes: str) -> int:
        return math.lcm(*(math.prod(sizes.get(axis, 1) for axis in axes) for sizes in meshes))

    row, width = math.lcm(ROW, 2 * parts("context")), parts("expert", "fsdp", "context", "stage")
    mesh = dataclasses.replace(config.mesh, stage_rounds=min(config.mesh.stage_rounds, 2), stage_microbatches=None)
    mesh = dataclasses.replace(mesh, gradient_scatter="xla")  # which every mesh takes
    pieces = parts("stage") * mesh.stage_rounds if parts("stage") > 1 else 1
    model = _model(config, row, width, parts("tensor"), parts("tensor", "context"), pieces)
    micro = min(config.optim.accumulation_steps, 2)
    rows = math.lcm(4, parts("data", "stage", "expert", "fsdp"))
    if config.model.num_experts:
        model = _experts(model, config.model, parts("expert"), parts("tensor"))
    # Fewer tokens than words: the head is not gathered, the tokens are (ops.linear_cross_entropy).
    tokens = config.data.batch_size // config.optim.accumulation_steps * config.data.seq_len
    words = 2 * rows * row if tokens < config.model.vocab_size else 64
    shards = parts("tensor") * width
    small = dataclasses.replace(
        config,
        model=dataclasses.replace(model, vocab_size=math.lcm(words, shards)),
        data=dataclasses.replace(config.data, seq_len=row, batch_size=rows * micro),
        mesh=mesh,
    )
    return with_steps(small, steps, micro)


def with_steps(config: Config, steps: int, micro: int | None = None) -> Config:
    """`config` for a few steps in float32 that show what gradients are."""
    optim = dataclasses.replace(
        config.optim,
        accumulation_steps=config.optim.accumulation_steps if micro is None else micro,
        peak_lr=LEARNING_RATE,
        muon_lr=LEARNING_RATE,
        eps=EPS,
        warmup_steps=0,
    )
    # Kernels have a check of their own.
    implementation = "auto" if config.run.implementation == "pallas" else config.run.implementation
    # Devices add up sums that were rounded to int8 apart, so meshes agree within that rounding alone.
    run = dataclasses.replace(
        config.run, steps=steps, precision="float32", quantized="none", implementation=implementation
    )
    config = dataclasses.replace(config, optim=optim, run=run)
    config_lib.check(config)
    return config


def _model(
    config: Config, row: int, of_width: int, of_heads: int, of_heads_and_tokens: int, of_groups: int
) -> ModelConfig:
    model = config.model
    grouped, shared = model.kv_heads < model.num_heads, model.kv_heads == 1
    kv_heads = 1 if shared else math.lcm(2, of_heads_and_tokens)
    windows = tuple(_window(window, config.data.seq_len, row) for window in model.window_pattern)
    groups = math.lcm(min(model.num_layers // len(windows), GROUPS), of_groups)
    return dataclasses.replace(
        model,
        num_layers=groups * len(windows),
        model_dim=math.lcm(16, of_width),
        num_heads=math.lcm(4, of_heads) if shared else kv_heads * (2 if grouped else 1),
        num_kv_heads=None if model.num_kv_heads is None else kv_heads,
        head_dim=8,
        mlp_dim=math.lcm(32, of_heads),
        window_pattern=windows,
        scan_unroll=1,
    )


def _window(window: int, row: int, small_row: int) -> int:
    """As large a part of a row as it was."""
    return window and max(2, window * small_row // row)


def _experts(model: ModelConfig, full: ModelConfig, of_experts: int, of_width: int) -> ModelConfig:
    experts = math.lcm(min(full.num_experts, 8), of_experts)
    return dataclasses.replace(
        model,
        num_experts=experts,
        experts_per_token=min(full.experts_per_token, max(1, experts // 2) if full.experts_per_token > 1 else 1),
        expert_dim=math.lcm(16, of_width),
        num_shared_experts=min(full.num_shared_experts, 1),
    )
