"""Steps whose gradient is far larger than those before: what counts as one, and what is remembered for it.

The rule: a step is a spike where its gradient norm, before clipping, is more than `run.spike_factor` times the median
norm of the last WINDOW updates. Not updating on such batches is what PaLM's authors did by hand (arXiv:2204.02311,
section 5.1: they started again before a spike and left its batches out). A median, so that one large norm that was let
through does not raise the bar for the next. Skipped steps are not remembered: a norm that is high for good therefore
stops the run after `run.max_skipped` steps, with what it saw, and never trains on in silence at another level.
"""

import jax
import jax.numpy as jnp

WINDOW = 64


def no_norms() -> jax.Array:
    """[WINDOW] float32; 0 is a place not yet filled."""
    return jnp.zeros(WINDOW, jnp.float32)


def typical_norm(norms_W: jax.Array) -> jax.Array:
    """The median, a float32 scalar; infinite, so that nothing is a spike, until more than half of the places are
    filled."""
    return jnp.median(jnp.where(norms_W > 0, norms_W, jnp.inf))


def remember(norms_W: jax.Array, norm: jax.Array, updates: jax.Array) -> jax.Array:
    """`norms_W` with the norm of update number `updates` in the place of the oldest."""
    W = norms_W.shape[0]
    return jnp.where(jnp.arange(W) == updates % W, norm, norms_W)
