"""What the ops share."""

import functools

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


def vary_alike(*operands):
    """The operands, each varying over every mesh axis that any of them varies over; None and Python numbers as is.

    A hand-written gradient then has the type that its operand has: where one is shared along an axis (key heads, sinks)
    it is summed over it.
    """
    arrays = [x for x in operands if hasattr(x, "shape")]
    return tuple(vary_like(x, *arrays) if hasattr(x, "shape") else x for x in operands)
