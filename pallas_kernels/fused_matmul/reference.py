"""The product with its epilogue in plain float32 jnp: the truth that every other implementation is held to."""

import jax.numpy as jnp

from pallas_kernels.gated_mlp.reference import ACTIVATIONS
from pallas_kernels.runtime import einsum_f32


def fused_matmul_reference(x_TD, w_DF, bias_F, residual_TF, *, activation, out_dtype):
    """act(x w + bias) + residual in `out_dtype`, everything before that in float32."""
    z_TF = einsum_f32("TD,DF->TF", x_TD.astype(jnp.float32), w_DF.astype(jnp.float32))
    if bias_F is not None:
        z_TF = z_TF + bias_F.astype(jnp.float32)[None]
    y_TF = z_TF if activation is None else ACTIVATIONS[activation](z_TF)
    if residual_TF is not None:
        y_TF = y_TF + residual_TF.astype(jnp.float32)
    return y_TF.astype(out_dtype)
