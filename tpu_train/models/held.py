"""Weights held in int8, for inference: those of the blocks' dense products, a float32 scale for each output.

The embedding, the head and the norms stay as they are.
"""

import dataclasses
from typing import Any

import jax
from flax import nnx

from tpu_train import ops
from tpu_train.config import UserError
from tpu_train.sharding import SHARDS, SPECS, P, dims_of_path

CONTRACTED = {"DNH": 1, "DKH": 1, "NHD": 2, "DF": 1, "FD": 1}  # how many of a weight's first dims its product contracts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """In the place of a weight: int8 values with its dims and sharding, and scales with those that are not contracted.

    Both may have a leading L, of stacked layers.
    """

    values: jax.Array
    scales: jax.Array


def scales_spec(dims: str, num_in: int) -> P:
    """The sharding of a weight's scales: that of its outputs, whole where these are gathered for the product."""
    return P(*(None if axis == SHARDS else axis for axis in SPECS[dims][num_in:]))


def hold_in_int8(model: Any) -> tuple[Any, int, int]:
    """(`model`, a Transformer, with its blocks' matrices held in int8; their bytes before; their bytes now).

    Raises UserError for a mixture of experts.
    """
    if model.config.num_experts:
        raise UserError("--weights=int8 holds the weights of dense layers, and this model has experts; leave it out")
    before = now = 0

    def hold(path, w):
        nonlocal before, now
        dims, in_block = dims_of_path((*path, jax.tree_util.GetAttrKey("value")))
        if not in_block or dims not in CONTRACTED:
            return w
        held = _held(w[...], dims, CONTRACTED[dims])
        before, now = before + w[...].nbytes, now + held.values.nbytes + held.scales.nbytes
        return held

    return jax.tree_util.tree_map_with_path(hold, model, is_leaf=lambda x: isinstance(x, nnx.Param)), before, now


def _held(w: jax.Array, dims: str, num_in: int) -> Held:
    """Of a weight stacked along L."""

    @jax.jit
    def hold(w):
        contracted = tuple(range(1, 1 + num_in))
        values, scales = ops.hold_in_int8(w, contracted)
        scales = scales.reshape(
            scales.shape[:1] + scales.shape[1 + num_in :], out_sharding=P(None, *SPECS[dims][num_in:])
        )
        return Held(values, jax.reshard(scales, P(None, *scales_spec(dims, num_in))))

    return hold(w)
