"""What the implementations of linear_cross_entropy compute, one row a token; the loss is plain arithmetic on it.

Each differentiates its own statistics, by the rules d lse = softmax(logits), d at_label = one-hot, d total = 1.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

NOWHERE = -(2**30)  # in place of a label that is no row of the head, or one of another device's


@dataclasses.dataclass(frozen=True)
class Options:
    """What changes the statistics. `vocab_axis`: the mesh axis or axes that split the head's rows."""

    soft_cap: float | None
    vocab_axis: str | tuple[str, ...] | None
    with_total: bool
    with_argmax: bool


class Statistics(NamedTuple):
    """Of each token's logits, [T]: float32, but the id in `argmax` is int32. None where it was not asked for."""

    lse: jax.Array
    at_label: jax.Array  # 0 without a label
    total: jax.Array | None  # sum over the vocabulary
    argmax: jax.Array | None  # before the cap, which may make several equal; the lowest id where several are


def over_shards(options: Options, shard: Statistics, highest_T: jax.Array | None, rows: int) -> Statistics:
    """The statistics of the whole vocabulary from each device's `rows` rows, `highest_T` being its highest logit."""
    axis = options.vocab_axis
    if axis is None:
        return shard
    greatest_T = jax.lax.pmax(shard.lse, axis)
    lse_T = greatest_T + jnp.log(jax.lax.psum(jnp.exp(shard.lse - greatest_T), axis))
    total_T = None if shard.total is None else jax.lax.psum(shard.total, axis)
    argmax_T = None
    if shard.argmax is not None:
        ids_T = shard.argmax + jax.lax.axis_index(axis).astype(jnp.int32) * rows
        is_highest_T = highest_T == jax.lax.pmax(highest_T, axis)
        argmax_T = jax.lax.pmin(jnp.where(is_highest_T, ids_T, jnp.iinfo(jnp.int32).max), axis)
    return Statistics(lse_T, jax.lax.psum(shard.at_label, axis), total_T, argmax_T)
