"""What the ops share."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

# Products of any float dtype with float32 results. HIGHEST matters for float32 operands alone: a TPU's default would
# round them to bfloat16.
einsum_f32 = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def vary_like(x: jax.Array, *operands: jax.Array) -> jax.Array:
    """`x` varying over every mesh axis that an operand varies over.

    Inside shard_map a loop's carry must enter with the type that it leaves with, so zeros that sharded values are
    added to have to vary as these do. The transpose is a psum over the added axes. Outside shard_map: `x` itself.
    """
    varying = frozenset().union(*(jax.typeof(operand).manual_axis_type.varying for operand in operands))
    missing = tuple(sorted(varying - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_over(x: jax.Array, axis: str) -> jax.Array:
    """`x` varying over a mesh axis too, inside shard_map."""
    return x if axis in jax.typeof(x).manual_axis_type.varying else jax.lax.pcast(x, (axis,), to="varying")


def vary_alike(*operands):
    """The operands, each varying over every mesh axis that any of them varies over; None and Python numbers as is.

    A hand-written gradient then has the type that its operand has: where one is shared along an axis (key heads, sinks)
    it is summed over it.
    """
    arrays = [x for x in operands if hasattr(x, "shape")]
    return tuple(vary_like(x, *arrays) if hasattr(x, "shape") else x for x in operands)


def shape_like(shape: tuple[int, ...], dtype, operand: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a kernel's result that varies over the mesh axes that `operand` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(operand).manual_axis_type)


def facts(op: str, kernel: str, values: Mapping[str, int | bool | str | None]) -> dict[str, str]:
    """A pallas_call's metadata: what it is and what its grid and its masks follow from, as cases.runs_of reads it."""
    return {"op": op, "kernel": kernel} | {name: str(value) for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a kernel has to know of a TPU generation. Source: jax.experimental.pallas.tpu.get_tpu_info_for_chip."""

    name: str
    kinds: tuple[str, ...]  # what jax calls its devices
    vmem_bytes: int
    mxu_size: int  # rows and columns of the matrix unit
    cores: int = 1  # that make one device and share a kernel's parallel grid dims


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", ("TPU v4",), 16 * 2**20, 128, cores=2),
        Chip("v5e", ("TPU v5 lite", "TPU v5e"), 128 * 2**20, 128),
        Chip("v5p", ("TPU v5", "TPU v5p"), 64 * 2**20, 128, cores=2),
        Chip("v6e", ("TPU v6 lite", "TPU v6e"), 128 * 2**20, 256),
        Chip("tpu7x", ("TPU7x",), 64 * 2**20, 256),
    )
}


def chip_in_use() -> Chip | None:
    """The generation that the mesh in use is made of, else that of the default device; None where neither is known."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = jax.devices()[0].device_kind if device is None else device.device_kind
    return next((chip for chip in CHIPS.values() if kind in chip.kinds), None)


def divide(x: jax.Array, by: int) -> jax.Array:
    """x // by for x >= 0. // would ask for a sign, which Mosaic lowers only where it knows the generation."""
    return jax.lax.div(x, jnp.int32(by))
