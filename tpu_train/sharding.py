"""The one table of PartitionSpecs, named by the dims they shard (legend in config.py).

A weight is stored split over `fsdp` along D and over `tensor` along heads, feed-forward or vocabulary. `gather` brings
it together over `fsdp` just before use, in the compute dtype; its transpose scatters the gradient back.
"""

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


def gather(w: jax.Array, dims: str, dtype: jnp.dtype) -> jax.Array:
    """The weight `w`, stored as SPECS[dims], cast to `dtype` and whole along the dims that `fsdp` splits."""
    whole = P(*(None if axis == "fsdp" else axis for axis in SPECS[dims]))
    return jax.reshard(w.astype(dtype), whole)
