"""The products that cross a mesh axis, in plain float32 jnp: the truth that every other implementation is held to."""

import jax
import jax.numpy as jnp

from pallas_kernels.runtime import einsum_f32


def matmul_reduce_scatter_reference(x_TD, dy_TF, factor_TF, *, axis):
    """This device's rows of the sum over `axis` of x^T (dy factor), in x's dtype; everything before that in float32."""
    dz_TF = dy_TF.astype(jnp.float32)
    if factor_TF is not None:
        dz_TF = dz_TF * factor_TF.astype(jnp.float32)
    dw_DF = einsum_f32("TD,TF->DF", x_TD.astype(jnp.float32), dz_TF)
    return jax.lax.psum_scatter(dw_DF, axis, scatter_dimension=0, tiled=True).astype(x_TD.dtype)
