"""The one table of PartitionSpecs, named by the dims they shard (legend in config/fields.py).

A weight is stored split over SHARDS along D and over `tensor` along heads, feed-forward or vocabulary. `gather` brings
it together over SHARDS just before use, in the compute dtype; its transpose scatters the gradient back. A row's tokens
are split over `context`. Experts' weights are whole experts over `expert`, and within each split as other weights are.

The table is that of the blocks, which `stage` splits by layers (models/pipeline.py). Outside them, and in what waits
there between steps, `stage` is one more axis of the batch and of a weight's D: see `outside`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

BATCH = ("data", "expert", "fsdp")
# Over `context` weights could be whole, as over `data`: but a long row needs the memory, a gradient that is scattered
# sends half of one that is summed, and `mesh.for_decoding` finds every weight in its place.
SHARDS = ("expert", "fsdp", "context")
EXPERT_SHARDS = ("fsdp", "context")
TOKENS = (*BATCH, "context")
# Outside the blocks. `stage` is last in D, so that leaving it out (`mesh.for_decoding`) moves nothing.
OUTSIDE = {
    BATCH: ("data", "stage", "expert", "fsdp"),
    SHARDS: (*SHARDS, "stage"),
    EXPERT_SHARDS: (*EXPERT_SHARDS, "stage"),
}

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


def outside(dims: str, mesh: Mesh | AbstractMesh | None = None) -> P:
    """SPECS[dims] outside the blocks, on `mesh` (default: the one in use); the same where it has one stage."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if mesh.shape.get("stage", 1) == 1:
        return SPECS[dims]
    return P(*(OUTSIDE.get(axes, axes) for axes in SPECS[dims]))


def axes_outside(axes: tuple[str, ...]) -> tuple[str, ...]:
    """BATCH or SHARDS as they are outside the blocks."""
    return OUTSIDE[axes] if jax.sharding.get_abstract_mesh().shape["stage"] > 1 else axes


def without_stage(spec: P) -> P:
    """A spec of `outside` as SPECS has it."""
    return P(*({there: axes for axes, there in OUTSIDE.items()}.get(axes, axes) for axes in spec))


def is_local() -> bool:
    """Whether arrays are a device's own, in a shard_map over all of the mesh, as those of a stage are."""
    return jax.sharding.get_abstract_mesh().are_all_axes_manual


def on_devices(local: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """shard_map over the mesh in use; `local` itself where arrays are a device's own already."""
    return local if is_local() else jax.shard_map(local, in_specs=in_specs, out_specs=out_specs)


def own_shape(x: jax.Array, dims: str) -> tuple[int, ...]:
    """Of a device's part of `x`, in a block."""
    if is_local():
        return x.shape
    axes = [(axis,) if isinstance(axis, str) else axis or () for axis in SPECS[dims]]
    return tuple(size // num_shards(over) for size, over in zip(x.shape, axes, strict=True))


def vary_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`x` varying over all of `axes`, inside shard_map. The transpose is a sum over those that it did not vary over."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, missing, to="varying") if missing else x


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


def gather_inside(w: jax.Array, dims: str, over: tuple[str, ...] | None = None) -> jax.Array:
    """`gather` inside shard_map, of this device's shard of a weight; no cast. `over`: in place of the table's axes.

    Its transpose scatters the gradient's sum over SHARDS and then adds up the shards over `data`, where summing a whole
    gradient and cutting it after would send twice as much.
    """
    w = vary_over(w, ("data",))
    axis = dims.index("D")
    shards = over or SPECS[dims][axis]
    return w if num_shards(shards) == 1 else jax.lax.all_gather(w, shards, axis=axis, tiled=True)


def num_shards(axes: tuple[str, ...] = SHARDS) -> int:
    """Parts that the mesh in use splits an array's dim into: of a weight, its D."""
    size = jax.sharding.get_abstract_mesh().shape
    return math.prod(size[axis] for axis in axes)
