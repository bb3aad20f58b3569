"""One product of quantised operands by each implementation. The kernels' is in calls.py."""

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.blocks import Block
from pallas_kernels.quantized_matmul.calls import Product, scaled_product
from pallas_kernels.quantized_matmul.quantize import Quantized, dequantize
from pallas_kernels.runtime import einsum_f32


def multiply(call: Product, a, b: Quantized, *, implementation: str, block: Block | None = None):
    """y_TF in call.y_dtype: `a` (an array, or Quantized) times `b`, contracting the dims that `call` says."""
    if implementation == "reference":
        return _plainly(call, a, b).astype(call.y_dtype)
    if implementation == "xla":
        return _by_xla(call, a, b).astype(call.y_dtype)
    rows, values = (a.scales, a.values) if isinstance(a, Quantized) else (None, a)
    # As a column for the rows of the result, and as a row for its columns.
    rows = rows.reshape(-1, 1) if rows is not None else None
    columns = b.scales if b.axis == 0 else b.scales.reshape(1, -1)
    interpret = implementation == "interpret"
    return scaled_product(call, values, b.values, rows, columns, block=block, interpret=interpret)


def _plainly(call: Product, a, b: Quantized):
    """In float32: the truth that the others are held to."""
    a = dequantize(a) if isinstance(a, Quantized) else a.astype(jnp.float32)
    letters = "TD" if call.a_dim == 1 else "DT", "DF" if call.b_dim == 0 else "FD"
    return einsum_f32(f"{letters[0]},{letters[1]}->TF", a, dequantize(b))


def _by_xla(call: Product, a, b: Quantized):
    dims = (((call.a_dim,), (call.b_dim,)), ((), ()))
    if not isinstance(a, Quantized):
        # A scale for each block is multiplied in first, and rounds once more in bfloat16: sums of blocks kept apart
        # would be T F D / block numbers where XLA doesn't fuse them with the product.
        w = b.values.astype(a.dtype) if call.scale_block is None else dequantize(b).astype(a.dtype)
        y = jax.lax.dot_general(a, w, dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        return y if call.scale_block else y * b.scales
    total = jnp.int32 if a.values.dtype == jnp.int8 else jnp.float32
    y = jax.lax.dot_general(a.values, b.values, dims, precision=jax.lax.Precision.DEFAULT, preferred_element_type=total)
    return y.astype(jnp.float32) * a.scales.reshape(-1, 1) * b.scales.reshape(1, -1)
