"""The product with its epilogue by XLA's own product, in x's dtype with float32 accumulation."""

import jax.numpy as jnp

from pallas_kernels.matmul.activations import activate
from pallas_kernels.runtime import einsum_f32


def fused_matmul_xla(x_TD, w_DF, bias_F, residual_TF, *, activation, out_dtype):
    """Same contract as `fused_matmul_reference`; z is kept for the backward pass in `out_dtype`."""
    z_TF = einsum_f32("TD,DF->TF", x_TD, w_DF)
    if bias_F is not None:
        z_TF = z_TF + bias_F.astype(jnp.float32)[None]
    y_TF = z_TF if activation is None else activate(activation, z_TF.astype(out_dtype))
    if residual_TF is not None:
        y_TF = y_TF.astype(jnp.float32) + residual_TF.astype(jnp.float32)
    return y_TF.astype(out_dtype)
