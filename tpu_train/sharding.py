"""The one table of PartitionSpecs, named by the dims they shard (legend in config/fields.py).

A weight is stored split over SHARDS along D and over `tensor` along heads, feed-forward or vocabulary. `gather` brings
it together over SHARDS just before use, in the compute dtype; its transpose scatters the gradient back. A row's tokens
are split over `context`. Experts' weights are whole experts over `expert`, and within each split as other weights are.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

BATCH = ("data", "expert", "fsdp")
# Over `context` weights could be whole, as over `data`: but a long row needs the memory, a gradient that is scattered
# sends half of one that is summed, and `mesh.for_decoding` finds every weight in its place.
SHARDS = ("expert", "fsdp", "context")
EXPERT_SHARDS = ("fsdp", "context")
TOKENS = (*BATCH, "context")

SPECS = {
    # Weights as stored. Stacked layers have a leading L, never split.
    "VD": P("tensor", SHARDS),
    "DNH": P(SHARDS, "tensor", None),
    "DKH": P(SHARDS, "tensor", None),
    "NHD": P("tensor", None, SHARDS),
    "DF": P(SHARDS, "tensor"),
    "FD": P("tensor", SHARDS),
    "D": P(None),
    "DE": P(SHARDS, None),
    "EDF": P("expert", EXPERT_SHARDS, "tensor"),
    "EFD": P("expert", "tensor", EXPERT_SHARDS),
    "E": P(None),
    # Activations.
    "BT": P(BATCH, "context"),
    "BTD": P(BATCH, "context", None),
    "BTF": P(BATCH, "context", "tensor"),
    "BTNH": P(BATCH, "context", "tensor", None),
    "BTKH": P(BATCH, "context", "tensor", None),
    "BSKH": P(BATCH, "context", "tensor", None),
    "BV": P(BATCH, "tensor"),
    # A step's batch: micro-batches first.
    "ABT": P(None, BATCH, "context"),
}


def dims_of(name: str) -> str:
    """The dims a parameter's name ends with: "w_DNH" -> "DNH"."""
    return name.rsplit("_", 1)[-1]


def dims_of_path(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The dims of the parameter at a path of the model, without the stacked L, and whether it lies in a block."""
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return dims_of(next(name for name in reversed(names) if name != "value")), "blocks" in names


def gather(w: jax.Array, dims: str, dtype: jnp.dtype) -> jax.Array:
    """The weight `w`, stored as SPECS[dims], cast to `dtype` and whole along the dims that SHARDS split."""
    whole = P(*(None if axis == SHARDS else axis for axis in SPECS[dims]))
    return jax.reshard(w.astype(dtype), whole)


def gather_inside(w: jax.Array, dims: str) -> jax.Array:
    """`gather` inside shard_map, of this device's shard of a weight; no cast.

    Its transpose scatters the gradient's sum over SHARDS and then adds up the shards over `data`, where summing a whole
    gradient and cutting it after would send twice as much.
    """
    w = jax.lax.pcast(w, ("data",), to="varying")
    axis = dims.index("D")
    shards = SPECS[dims][axis]
    return w if num_shards(shards) == 1 else jax.lax.all_gather(w, shards, axis=axis, tiled=True)


def num_shards(axes: tuple[str, ...] = SHARDS) -> int:
    """Parts that the mesh in use splits an array's dim into: of a weight, its D."""
    size = jax.sharding.get_abstract_mesh().shape
    return math.prod(size[axis] for axis in axes)
