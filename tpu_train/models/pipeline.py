"""The blocks as stages of a pipeline: each device along `stage` has some of the layers, and micro-batches go round.

When which stage computes what stands in stages.py. One shard_map over the whole mesh holds the loop over ticks: in it
arrays are a device's own, and the blocks' code runs as it is (sharding.is_local). The gradient is JAX's own of that
loop, with the ticks in reverse; a tick that has nothing to do computes on zeros, whose gradient is zero.

Weights wait outside split over `stage` along D, as over `fsdp`, so that a checkpoint, the optimizer and decoding know
no stages. A step brings each stage its layers by one all-to-all in the compute dtype, and takes their gradients back by
another. What a stage has of them is still split over the other axes of SHARDS, and gathered in every tick.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpu_train.config import ModelConfig
from tpu_train.models.dropout import Dropout
from tpu_train.models.layers import Context, rotary_angles
from tpu_train.precision import KEPT_FLOAT32, Compute
from tpu_train.sharding import (
    BATCH,
    EXPERT_SHARDS,
    SHARDS,
    SPECS,
    TOKENS,
    P,
    dims_of_path,
    num_shards,
    outside,
    vary_over,
)
from tpu_train.stages import Schedule, microbatches


def num_stages() -> int:
    """Devices along `stage` in the mesh in use."""
    return num_shards(("stage",))


def through_stages(
    group: Callable,
    x_BTD: jax.Array,
    tokens: tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None],
    blocks: Any,
    config: ModelConfig,
    compute: Compute,
    key: jax.Array | None,
    remat: Callable,
):
    """(x_BTD after all blocks, the experts' loads) by way of the stages; arrays as `sharding.outside` has them.

    `group(x_BTD, blocks, context)` is one group of layers, (x_BTD, caches, loads), and `remat` wraps it. `tokens`:
    positions, segments or None, which are real or None, and for dropout, whose `key` is not None then, the places, all
    [B, T]. `blocks` are stacked along a leading L of groups.
    """
    rows = x_BTD.shape[0] // num_shards(BATCH)
    plan = Schedule(num_stages(), compute.stage_rounds, microbatches(compute.stage_microbatches, num_stages(), rows))
    leaves, tree = jax.tree.flatten(blocks)
    dims = [dims_of_path(path)[0] for path, _ in jax.tree_util.tree_leaves_with_path(blocks)]
    weights = [w.astype(_dtype(names, w, compute)) for w, names in zip(leaves, dims, strict=True)]

    def local(x_BTD, tokens, weights, key):
        stacks = [_to_stage(w, names, plan) for w, names in zip(weights, dims, strict=True)]
        x_ABTD, positions_ABT = _of_all_stages(x_BTD, plan), _of_all_stages(tokens[0], plan)
        cos_ABTH, sin_ABTH = _angles(positions_ABT, config, compute)
        others = [None if x is None else _of_all_stages(x, plan) for x in tokens[1:]]

        def layers(x_BTD, blocks, group_number, a, working):
            segments_BT, real_BT, places_BT = (None if x is None else x[a] for x in others)
            real_BT = None if real_BT is None else real_BT & working
            context = Context(cos_ABTH[a], sin_ABTH[a], segments_BT, compute, real_BT=real_BT)
            if key is not None and places_BT is not None:
                first = group_number * len(config.window_pattern)
                context = dataclasses.replace(context, dropout=Dropout(config.dropout, key, places_BT, first))
            x_BTD, _, loads = group(x_BTD, jax.tree.unflatten(tree, blocks), context)
            return x_BTD, loads

        x_ABTD, loads = _ticks(layers, x_ABTD, stacks, plan, remat, config.scan_unroll)
        last = jax.lax.axis_index("stage") == plan.stages - 1
        # Zeros from all but the last stage: the sum changes no bit.
        x_BTD = jnp.where(last, x_ABTD, 0).reshape(-1, *x_ABTD.shape[2:])
        x_BTD = jax.lax.psum_scatter(x_BTD, "stage", scatter_dimension=0, tiled=True)
        return x_BTD, jax.tree.map(lambda load: jnp.expand_dims(load, 1), loads)

    by_token = tuple(None if x is None else outside("BT") for x in tokens)
    in_specs = outside("BTD"), by_token, [P(None, *outside(names)) for names in dims], P()
    run = jax.shard_map(local, in_specs=in_specs, out_specs=(outside("BTD"), P(None, "stage")))
    x_BTD, loads_RSK = run(x_BTD, tokens, weights, key)
    return x_BTD, jax.tree.map(lambda x: jax.reshard(x, P()).reshape(-1, *x.shape[3:]), loads_RSK)


def _angles(positions_ABT: jax.Array, config: ModelConfig, compute: Compute) -> list[jax.Array]:
    """cos and sin, each [A, B, T, H // 2]."""
    flat = positions_ABT.reshape(-1, positions_ABT.shape[2])
    angles = rotary_angles(flat, config.head_size, config.rope_theta, compute)
    return [x.reshape(*positions_ABT.shape, -1) for x in angles]


def _ticks(layers: Callable, x_ABTD: jax.Array, stacks: list[jax.Array], plan: Schedule, remat: Callable, unroll: int):
    """(x_ABTD, in which the last stage's rows are done; loads stacked [R, K]), of one device."""
    S, R, stage = plan.stages, plan.rounds, jax.lax.axis_index("stage")
    groups = stacks[0].shape[1]
    values = jax.lax.stop_gradient(stacks)

    @remat
    def one_group(x_BTD, sums, r, k, a, working):
        blocks = [_with_sum(w[r, k], s) for w, s in zip(values, sums, strict=True)]
        return layers(x_BTD, blocks, (r * S + stage) * groups + k, a, working)

    def piece(x_BTD, sums, r, a, working):
        def one(carry, k):
            x_BTD, sums = carry
            of_layer, sums = _sums_of_layer(sums, r, k)
            x_BTD, loads = one_group(x_BTD, of_layer, r, k, a, working)
            return (x_BTD, sums), loads

        return jax.lax.scan(one, (x_BTD, sums), jnp.arange(groups), unroll=min(unroll, groups))

    def tick(carry, t):
        x_ABTD, came_BTD, sums = carry
        working = (t >= stage) & (t - stage < plan.busy)
        r, a = _turn(jnp.clip(t - stage, 0, plan.busy - 1), plan)
        waiting_BTD = jax.lax.dynamic_index_in_dim(x_ABTD, a, keepdims=False)
        x_BTD = jnp.where((stage == 0) & (r == 0), waiting_BTD, came_BTD)
        x_BTD = jnp.where(working, x_BTD, 0)
        (x_BTD, sums), loads = piece(x_BTD, sums, r, a, working)
        done = working & (stage == S - 1) & (r == R - 1)
        x_ABTD = jax.lax.dynamic_update_index_in_dim(x_ABTD, jnp.where(done, x_BTD, waiting_BTD), a, 0)
        came_BTD = jax.lax.ppermute(x_BTD, "stage", [(s, (s + 1) % S) for s in range(S)])
        return (x_ABTD, came_BTD, sums), loads

    came_BTD = vary_over(jnp.zeros(x_ABTD.shape[1:], x_ABTD.dtype), jax.typeof(x_ABTD).manual_axis_type.varying)
    times = jnp.arange(plan.ticks)
    (x_ABTD, _, _), loads = jax.lax.scan(tick, (x_ABTD, came_BTD, [_sum_of(w) for w in stacks]), times)
    # Idle ticks have no real tokens, so their loads are zero, whichever round they are added to.
    rounds, _ = _turn(jnp.clip(times - stage, 0, plan.busy - 1), plan)
    return x_ABTD, jax.tree.map(lambda load: jax.ops.segment_sum(load, rounds, R), loads)


def _turn(u: jax.Array, plan: Schedule) -> tuple[jax.Array, jax.Array]:
    """(round, micro-batch) of a stage's `u`-th busy tick: S micro-batches round after round, then the next S."""
    S = plan.stages
    return u // S % plan.rounds, u // (S * plan.rounds) * S + u % S


def _dtype(dims: str, w: jax.Array, compute: Compute) -> jnp.dtype:
    return compute.dtype if len(dims) > 1 and dims not in KEPT_FLOAT32 else w.dtype


def _of_all_stages(x: jax.Array, plan: Schedule) -> jax.Array:
    """The rows of all stages on each, by micro-batch."""
    x = jax.lax.all_gather(x, "stage", tiled=True)
    return x.reshape(plan.microbatches, -1, *x.shape[1:])


def _to_stage(w: jax.Array, dims: str, plan: Schedule) -> jax.Array:
    """This stage's layers [R, K, ...] of a weight of all layers, whose D comes together over `stage`."""
    w = w.reshape(plan.rounds, plan.stages, -1, *w.shape[1:])
    split = [i for i, axes in enumerate(SPECS[dims]) if axes in (SHARDS, EXPERT_SHARDS)]
    if split:
        w = jax.lax.all_to_all(w, "stage", split_axis=1, concat_axis=3 + split[0], tiled=True)[:, 0]
    else:
        w = jax.lax.dynamic_index_in_dim(w, jax.lax.axis_index("stage"), 1, keepdims=False)
    # Here and not where it is used: the gradient is summed over these axes once, not in every tick.
    return vary_over(w, TOKENS)


@jax.custom_vjp
def _sum_of(w: jax.Array) -> jax.Array:
    """What stands for `w` where gradients of its layers add up, tick after tick, in float32."""
    return vary_over(jnp.zeros(w.shape, jnp.float32), jax.typeof(w).manual_axis_type.varying)


_sum_of.defvjp(lambda w: (_sum_of(w), jnp.zeros((), w.dtype)), lambda like, g: (g.astype(like.dtype),))


@jax.custom_vjp
def _sums_of_layer(sums: list[jax.Array], r: jax.Array, k: jax.Array):
    """(those of layers [r, k], sums); a gradient of the first is added to that of the second in place.

    JAX's own gradient of the indexing would be as large as the stack, and added to it in every tick.
    """
    return [s[r, k] for s in sums], sums


_sums_of_layer.defvjp(
    lambda sums, r, k: (_sums_of_layer(sums, r, k), (r, k)),
    lambda at, g: ([s.at[at].add(of_layer) for of_layer, s in zip(*g, strict=True)], None, None),
)


@jax.custom_vjp
def _with_sum(w: jax.Array, of_layer: jax.Array) -> jax.Array:
    """`w`, whose gradient goes to `of_layer`."""
    return w


_with_sum.defvjp(lambda w, of_layer: (w, None), lambda _, g: (None, g.astype(jnp.float32)))
