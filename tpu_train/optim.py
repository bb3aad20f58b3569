"""Optimizers, schedules and the decay rule, all from Optax."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_train import offload
from tpu_train.config import OptimConfig
from tpu_train.sharding import dims_of_path

Tree = Any


def make_schedule(config: OptimConfig, steps: int, peak: float) -> optax.Schedule:
    """Learning rate by optimizer step: linear warm-up, then cosine, constant, or flat with a linear end (wsd)."""
    warmup, end = config.warmup_steps, peak * config.final_lr_fraction
    if config.schedule == "cosine":
        body = optax.cosine_decay_schedule(peak, max(1, steps - warmup), config.final_lr_fraction)
    elif config.schedule == "constant":
        body = optax.constant_schedule(peak)
    else:
        # arXiv:2404.06395: the decay takes the last share of the whole run.
        decay = max(1, min(round(steps * config.decay_fraction), steps - warmup))
        flat = optax.constant_schedule(peak)
        body = optax.join_schedules([flat, optax.linear_schedule(peak, end, decay)], [steps - warmup - decay])
    if warmup == 0:
        return body
    # The first step moves too: it takes peak / warmup, not 0.
    rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
    return optax.join_schedules([rise, body], [warmup])


def make_optimizer(config: OptimConfig, steps: int) -> optax.GradientTransformation:
    """AdamW, or Muon for the matrices of the blocks with AdamW for the rest; clipped by the global norm first."""
    moment_dtype = jnp.dtype(config.moment_dtype)
    adamw = optax.adamw(
        make_schedule(config, steps, config.peak_lr),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
        mu_dtype=moment_dtype,
    )
    optimizer = adamw
    if config.optimizer == "muon":
        muon = optax.contrib.muon(
            make_schedule(config, steps, config.muon_lr),
            weight_decay=config.weight_decay,
            mu_dtype=moment_dtype,
            muon_weight_dimension_numbers=muon_dimension_numbers,
        )
        optimizer = _in_auto_mode(optax.partition({"muon": muon, "adamw": adamw}, muon_labels))
    return (
        optimizer if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    )


def update_from_host(config: OptimConfig, steps: int) -> Callable[..., tuple[Tree, Tree]]:
    """`make_optimizer`'s update and its application in one, of moments that wait in the host's memory.

    (gradients, state, weights, updating) -> (weights, state): the old ones where `updating` is false. See offload.py.
    """
    by_weight = make_optimizer(dataclasses.replace(config, clip_norm=None), steps)

    def update(grads, state, params, updating):
        stacked = jax.tree_util.tree_map_with_path(lambda path, _: dims_of_path(path)[1], params)
        if config.clip_norm is None:
            return offload.update(by_weight, grads, state, params, stacked, updating)
        clip = optax.clip_by_global_norm(config.clip_norm)
        grads, clip_state = clip.update(grads, state[0])
        params, state = offload.update(by_weight, grads, state[1], params, stacked, updating)
        return params, (clip_state, state)

    return update


def _in_auto_mode(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer`, its update sharded by the compiler: Muon multiplies matrices without saying how they are split."""

    def update(grads, state, params):
        shardings = jax.tree.map(lambda x: jax.typeof(x).sharding, (grads, state))
        return jax.sharding.auto_axes(optimizer.update, out_sharding=shardings)(grads, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def moving_average(average: Tree, params: Tree, decay: float, updates: jax.Array) -> Tree:
    """The exponential moving average of the weights after update number `updates` (from 1), in their float32.

    The decay rises to `decay` as min(decay, (1 + updates) / (10 + updates)), so that the first weights, which are
    noise, are soon forgotten; the rule of TensorFlow's ExponentialMovingAverage.
    """
    share = 1 - jnp.minimum(decay, (1 + updates) / (10 + updates)).astype(jnp.float32)
    return jax.tree.map(lambda a, p: a + share * (p - a), average, params)


def decay_mask(params: Tree) -> Tree:
    """True for matrices. By the dims in the name, not by rank: a stacked norm scale is [L, D] and must not decay."""
    return jax.tree_util.tree_map_with_path(lambda path, _: len(dims_of_path(path)[0]) > 1, params)


def muon_labels(params: Tree) -> Tree:
    """ "muon" for the matrices inside blocks; "adamw" for the embedding, the head, the norms and the routers.

    A router is a head of E words: its columns are no features of one space.
    """

    def label(path, _):
        dims, in_block = dims_of_path(path)
        return "muon" if in_block and len(dims) > 1 and dims != "DE" else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


def muon_dimension_numbers(params: Tree) -> Tree:
    """Which dims of each matrix are its input and its output; heads count with their side, L and E with none."""

    def numbers(path, leaf):
        dims, _ = dims_of_path(path)
        stacked = leaf.ndim - len(dims.removeprefix("E"))
        inputs = {"DNH": 1, "DKH": 1, "NHD": 2, "DF": 1, "FD": 1}[dims.removeprefix("E")]
        axes = tuple(range(stacked, leaf.ndim))
        return optax.contrib.MuonDimensionNumbers(axes[:inputs], axes[inputs:])

    return jax.tree_util.tree_map_with_path(numbers, params)
