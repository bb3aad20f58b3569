"""The gated product by XLA's own products, in x's dtype with float32 accumulation."""

import jax.numpy as jnp

from pallas_kernels.matmul.activations import activate


def gated_mlp_xla(x_TD, w_gate_DF, w_up_DF, *, activation):
    """Same contract as `gated_mlp_reference`; both products are rounded to x's dtype."""
    precision = "highest" if x_TD.dtype == jnp.float32 else "default"
    gate_TF, up_TF = (jnp.einsum("TD,DF->TF", x_TD, w, precision=precision) for w in (w_gate_DF, w_up_DF))
    return activate(activation, gate_TF) * up_TF
