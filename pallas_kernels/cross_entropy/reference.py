"""Statistics of the logits in plain float32 jnp, logits and all: the truth for the other implementations."""

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.statistics import Options, Statistics


def statistics_reference(options: Options, x_TD, w_VD, labels_T) -> Statistics:
    """The statistics of logits x w^T; a label that is no row is NOWHERE."""
    if options.vocab_axis is not None:
        raise ValueError("linear_cross_entropy: implementation='reference' can't take a sharded vocabulary; use 'xla'")
    logits_TV = jnp.einsum(
        "TD,VD->TV", x_TD.astype(jnp.float32), w_VD.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    argmax_T = jnp.argmax(logits_TV, axis=-1).astype(jnp.int32) if options.with_argmax else None
    if options.soft_cap is not None:
        logits_TV = options.soft_cap * jnp.tanh(logits_TV / options.soft_cap)
    at_label_T = jnp.take_along_axis(logits_TV, jnp.maximum(labels_T, 0)[:, None], axis=-1)[:, 0]
    return Statistics(
        lse=jax.nn.logsumexp(logits_TV, axis=-1),
        at_label=jnp.where(labels_T >= 0, at_label_T, 0.0),
        total=jnp.sum(logits_TV, axis=-1) if options.with_total else None,
        argmax=argmax_T,
    )
