"""The one table of PartitionSpecs, named by the dims they shard (legend in config/fields.py).

A weight is stored split over `fsdp` along D and over `tensor` along heads, feed-forward or vocabulary. `gather` brings
it together over `fsdp` just before use, in the compute dtype; its transpose scatters the gradient back.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

BATCH = ("data", "fsdp")

SPECS = {
    # Weights as stored. Stacked layers have a leading L, never split.
    "VD": P("tensor", "fsdp"),
    "DNH": P("fsdp", "tensor", None),
    "DKH": P("fsdp", "tensor", None),
    "NHD": P("tensor", None, "fsdp"),
    "DF": P("fsdp", "tensor"),
    "FD": P("tensor", "fsdp"),
    "D": P(None),
    # Activations.
    "BT": P(BATCH, None),
    "BTD": P(BATCH, None, None),
    "BTF": P(BATCH, None, "tensor"),
    "BTNH": P(BATCH, None, "tensor", None),
    "BTKH": P(BATCH, None, "tensor", None),
    "BSKH": P(BATCH, None, "tensor", None),
    "BV": P(BATCH, "tensor"),
    # A step's batch: micro-batches first.
    "ABT": P(None, BATCH, None),
}


def dims_of(name: str) -> str:
    """The dims a parameter's name ends with: "w_DNH" -> "DNH"."""
    return name.rsplit("_", 1)[-1]


def dims_of_path(path: tuple[Any, ...]) -> tuple[str, bool]:
    """The dims of the parameter at a path of the model, without the stacked L, and whether it lies in a block."""
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return dims_of(next(name for name in reversed(names) if name != "value")), "blocks" in names


def gather(w: jax.Array, dims: str, dtype: jnp.dtype) -> jax.Array:
    """The weight `w`, stored as SPECS[dims], cast to `dtype` and whole along the dims that `fsdp` splits."""
    whole = P(*(None if axis == "fsdp" else axis for axis in SPECS[dims]))
    return jax.reshard(w.astype(dtype), whole)


def gather_inside(w: jax.Array, dims: str) -> jax.Array:
    """`gather` inside shard_map, of this device's shard of a weight; no cast.

    Its transpose scatters the gradient's sum over `fsdp` and then adds up the shards over `data`, where summing a whole
    gradient and cutting it after would send twice as much.
    """
    w = jax.lax.pcast(w, ("data",), to="varying")
    if jax.sharding.get_abstract_mesh().shape["fsdp"] == 1:
        return w
    return jax.lax.all_gather(w, "fsdp", axis=SPECS[dims].index("fsdp"), tiled=True)
