"""The grouped product in plain float32 jnp: the truth that every other implementation is held to."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.groups import bounds
from pallas_kernels.runtime import einsum_f32, vary_like


def grouped_matmul_reference(x_TD, w_EDF, group_sizes_E):
    """Every group's product of all rows, its own rows kept; in x's dtype, everything before that in float32."""
    rows_T = jnp.arange(x_TD.shape[0])

    def add(y_TF, group):
        first, end, w_DF = group
        own_T1 = ((first <= rows_T) & (rows_T < end))[:, None]
        # Cleared before the product as well, so that no gradient multiplies what another group's rows hold by zero.
        group_TD = jnp.where(own_T1, x_TD.astype(jnp.float32), 0.0)
        product_TF = einsum_f32("TD,DF->TF", group_TD, w_DF.astype(jnp.float32))
        return jnp.where(own_T1, product_TF, y_TF), None

    y_TF = vary_like(jnp.zeros((x_TD.shape[0], w_EDF.shape[2]), jnp.float32), x_TD)
    groups = (*bounds(group_sizes_E, x_TD.shape[0]), w_EDF)
    return jax.lax.scan(add, y_TF, groups)[0].astype(x_TD.dtype)
