"""Arrays as values of eight bits with float32 scales, to nearest or stochastically.

A scale is the largest magnitude of what shares it over the largest value of the dtype (symmetric, no zero point), so
int8 holds -127 to 127. NaN or infinity in an array makes the scale so, and with it every product.
"""

import dataclasses

import jax
import jax.numpy as jnp

LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0, jnp.dtype(jnp.float8_e5m2): 57344.0}
SMALLEST_SCALE = 2.0**-100  # and what it divides by is no infinity
DTYPES = ", ".join(dtype.name for dtype in LARGEST)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A matrix as `values` times `scales`, float32.

    Of values_DF contracted along D (`axis` 0) scales_CF, a row for each `block` of D, or one where block is None; along
    F (`axis` 1) scales_DC.
    """

    values: jax.Array
    scales: jax.Array
    axis: int = dataclasses.field(default=0, metadata={"static": True})
    block: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def quantize(
    w_DF: jax.Array, *, dtype=jnp.int8, axis: int = 0, block: int | None = None, key: jax.Array | None = None
) -> Quantized:
    """`w_DF` in eight bits; `dequantize` gives it back within half a step of the scale, with a key within a whole one.

    Args:
      w_DF: float32, bfloat16 or float16.
      dtype: int8, float8_e4m3fn or float8_e5m2.
      axis: the dim that a product will contract; a scale for each index of the other one.
      block: a scale for each so many elements of `axis` too; the last block may be shorter. None: one for all of them.
      key: round stochastically, up with the probability that makes the mean the exact value; None: to nearest, even.

    Raises ValueError for anything else.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in LARGEST:
        raise ValueError(f"quantize: dtype={dtype}; it must be one of {DTYPES}")
    if w_DF.ndim != 2 or 0 in w_DF.shape or not jnp.issubdtype(w_DF.dtype, jnp.floating):
        raise ValueError(f"quantize takes floats of two dims, none of them empty; got {w_DF.dtype}{w_DF.shape}")
    if axis not in (0, 1) or (block is not None and block < 1):
        raise ValueError(f"quantize: axis={axis} and block={block} must be 0 or 1, and at least 1 or None")
    # As one group of rows for each scale: [D, F] -> [C, block, F], or [D, C, block].
    values, scales = quantize_over(_blocks(w_DF, axis, block), (axis + 1,), dtype, key)
    merged = values.reshape(*(w_DF.shape[:axis]), -1, *(w_DF.shape[axis + 1 :]))
    return Quantized(
        jax.lax.slice_in_dim(merged, 0, w_DF.shape[axis], axis=axis), scales.squeeze(axis + 1), axis, block
    )


def quantize_over(x: jax.Array, axes: tuple[int, ...], dtype, key: jax.Array | None = None):
    """(values, scales) of `x`, whose elements along `axes`, of size 1 in the scales, share one;
    rounded as in `quantize`.
    """
    dtype = jnp.dtype(dtype)
    largest = jnp.max(jnp.abs(x), axis=axes, keepdims=True).astype(jnp.float32)
    scales = jnp.maximum(largest * (1.0 / LARGEST[dtype]), SMALLEST_SCALE)
    values = x.astype(jnp.float32) * (1.0 / scales)
    if key is not None:  # else the largest is within a rounding of LARGEST, and rounds to it
        values = jnp.clip(_round_stochastically(values, dtype, key), -LARGEST[dtype], LARGEST[dtype])
    return (jnp.round(values) if dtype == jnp.int8 else values).astype(dtype), scales


def dequantize(w: Quantized) -> jax.Array:
    """The matrix in float32."""
    blocks = _blocks(w.values.astype(jnp.float32), w.axis, w.block) * jnp.expand_dims(w.scales, w.axis + 1)
    merged = blocks.reshape(*(w.values.shape[: w.axis]), -1, *(w.values.shape[w.axis + 1 :]))
    return jax.lax.slice_in_dim(merged, 0, w.values.shape[w.axis], axis=w.axis)


def _blocks(x: jax.Array, axis: int, block: int | None) -> jax.Array:
    size = x.shape[axis]
    block = size if block is None else block
    missing = -size % block
    if missing:
        x = jnp.pad(x, [(0, missing if dim == axis else 0) for dim in range(2)])
    return x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])


def _round_stochastically(x: jax.Array, dtype: jnp.dtype, key: jax.Array) -> jax.Array:
    """`x` on one of the two values of `dtype` around it, in float32."""
    step = jnp.float32(1.0)
    if dtype != jnp.int8:
        info = jnp.finfo(dtype)
        exponent = jnp.frexp(x)[1] - 1  # of the leading bit; below `minexp` values lie as far apart as there
        step = jnp.ldexp(jnp.float32(1.0), jnp.maximum(exponent, info.minexp) - info.nmant)
    return jnp.floor(x / step + jax.random.uniform(key, x.shape)) * step
