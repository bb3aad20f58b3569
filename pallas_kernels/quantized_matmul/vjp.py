"""The product of two operands that are quantised as they come, and its straight-through gradient.

Each operand has a scale for each row of the result that it takes part in, or column: x one a row and w one a column
forward, and others in the two products of the gradient, which contract other dims. So each is quantised twice, from the
values that came in. The gradient is that of the product of the exact values, its operands quantised or not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.blocks import BlockSizes
from pallas_kernels.quantized_matmul.calls import Product
from pallas_kernels.quantized_matmul.products import multiply
from pallas_kernels.quantized_matmul.quantize import quantize
from pallas_kernels.runtime import einsum_f32


@dataclasses.dataclass(frozen=True)
class Training:
    """The static side of a call."""

    dtype: jnp.dtype  # int8, or float8_e4m3fn, with gradients in float8_e5m2
    quantized_backward: bool
    sizes: BlockSizes
    implementation: str

    @property
    def gradient_dtype(self) -> jnp.dtype:
        return self.dtype if self.dtype == jnp.int8 else jnp.dtype(jnp.float8_e5m2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dynamic(call: Training, x_TD, w_DF, key):
    """y_TF in x's dtype; `key` is of the gradients' rounding, or None."""
    x, w = quantize(x_TD, dtype=call.dtype, axis=1), quantize(w_DF, dtype=call.dtype, axis=0)
    product = Product("dynamic_quantized_matmul_forward", jnp.dtype(x_TD.dtype))
    return multiply(product, x, w, implementation=call.implementation, block=call.sizes.forward)


def _backward(call, residuals, dy_TF):
    x_TD, w_DF, key = residuals
    if not call.quantized_backward:
        dx_TD = einsum_f32("TF,DF->TD", dy_TF, w_DF)
        return dx_TD.astype(x_TD.dtype), einsum_f32("TD,TF->DF", x_TD, dy_TF).astype(w_DF.dtype), None
    keys = (None, None) if key is None else jax.random.split(key)
    run = functools.partial(multiply, implementation=call.implementation)
    dy = quantize(dy_TF, dtype=call.gradient_dtype, axis=1, key=keys[0])
    product = Product("dynamic_quantized_matmul_dx", jnp.dtype(x_TD.dtype), b_dim=1)
    dx_TD = run(product, dy, quantize(w_DF, dtype=call.dtype, axis=1), block=call.sizes.dx)
    dy = quantize(dy_TF, dtype=call.gradient_dtype, axis=0, key=keys[1])
    product = Product("dynamic_quantized_matmul_dw", jnp.dtype(w_DF.dtype), a_dim=0)
    dw_DF = run(product, quantize(x_TD, dtype=call.dtype, axis=0), dy, block=call.sizes.dw)
    return dx_TD, dw_DF, None


dynamic.defvjp(lambda call, x_TD, w_DF, key: (dynamic(call, x_TD, w_DF, key), (x_TD, w_DF, key)), _backward)
