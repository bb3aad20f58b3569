"""Cross entropy from hidden states in plain float32 jnp, logits and all: the truth for the other implementations."""

import jax
import jax.numpy as jnp


def cross_entropy_reference(x_TD, w_VD, labels_T, *, z_loss, soft_cap, vocab_axis):
    """loss_T and lse_T in float32; see `linear_cross_entropy`."""
    if vocab_axis is not None:
        raise ValueError("linear_cross_entropy: implementation='reference' can't take a sharded vocabulary; use 'xla'")
    logits_TV = jnp.einsum(
        "TD,VD->TV", x_TD.astype(jnp.float32), w_VD.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    if soft_cap is not None:
        logits_TV = soft_cap * jnp.tanh(logits_TV / soft_cap)
    lse_T = jax.nn.logsumexp(logits_TV, axis=-1)
    label_logit_T = jnp.take_along_axis(logits_TV, labels_T[:, None], axis=-1)[:, 0]
    return lse_T - label_logit_T + z_loss * lse_T**2, lse_T
