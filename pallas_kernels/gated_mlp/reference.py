"""The gated product in plain float32 jnp: the truth that every other implementation is held to."""

import jax
import jax.numpy as jnp

from pallas_kernels.runtime import einsum_f32

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda z: jnp.square(jax.nn.relu(z)),
}


def gated_mlp_reference(x_TD, w_gate_DF, w_up_DF, *, activation):
    """act(x w_gate) * (x w_up) in x's dtype, everything before that in float32."""
    x_TD, w_gate_DF, w_up_DF, dtype = *(x.astype(jnp.float32) for x in (x_TD, w_gate_DF, w_up_DF)), x_TD.dtype
    gate_TF = einsum_f32("TD,DF->TF", x_TD, w_gate_DF)
    up_TF = einsum_f32("TD,DF->TF", x_TD, w_up_DF)
    return (ACTIVATIONS[activation](gate_TF) * up_TF).astype(dtype)
