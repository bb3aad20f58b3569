"""Cross entropy from hidden states, chunked over tokens: at most one chunk of logits lives at a time.

The backward recomputes a chunk's logits (a fourth product) and adds its part of the head's gradient in float32. With
`vocab_axis` each device holds a slice of the vocabulary, and the max, the sum and the label's logit are psummed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.runtime import einsum_f32, vary_like

LOGIT_BYTES = 256 * 2**20  # of float32 logits in a chunk, at most


@dataclasses.dataclass(frozen=True)
class _Options:
    z_loss: float
    soft_cap: float | None
    vocab_axis: str | tuple[str, ...] | None


def cross_entropy_xla(x_TD, w_VD, labels_T, *, z_loss, soft_cap, vocab_axis):
    """Same contract as `cross_entropy_reference`, sharded vocabulary included."""
    options = _Options(z_loss, soft_cap, vocab_axis)
    w_VD = vary_like(w_VD, x_TD)  # devices that share a head get the sum of their gradients
    T, V = x_TD.shape[0], w_VD.shape[0]
    chunk = max(8, LOGIT_BYTES // (4 * V))
    chunk = -(-T // (8 * -(-T // chunk))) * 8  # as many chunks, all of about one size: less padding
    if chunk >= T:
        loss, lse = _losses(options, x_TD[None], w_VD, labels_T[None])
    else:
        padding = -T % chunk
        x = jnp.pad(x_TD, ((0, padding), (0, 0))).reshape(-1, chunk, x_TD.shape[1])
        loss, lse = _losses(options, x, w_VD, jnp.pad(labels_T, (0, padding)).reshape(-1, chunk))
    return loss.reshape(-1)[:T], lse.reshape(-1)[:T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(options, x_CTD, w_VD, labels_CT):
    return _losses_fwd(options, x_CTD, w_VD, labels_CT)[0]


def _losses_fwd(options, x_CTD, w_VD, labels_CT):
    w = w_VD.astype(x_CTD.dtype)

    def one_chunk(chunk):
        x_TD, labels_T = chunk
        logits_TV, _ = _logits(options, x_TD, w)
        highest_T = _over_vocab(options, jax.lax.pmax, jnp.max(logits_TV, axis=-1))
        total_T = _over_vocab(options, jax.lax.psum, jnp.sum(jnp.exp(logits_TV - highest_T[:, None]), axis=-1))
        lse_T = highest_T + jnp.log(total_T)
        at_label_T = jnp.sum(jnp.where(_is_label(options, labels_T, w), logits_TV, 0.0), axis=-1)
        label_logit_T = _over_vocab(options, jax.lax.psum, at_label_T)
        return lse_T - label_logit_T + options.z_loss * lse_T**2, lse_T

    loss, lse = _map(one_chunk, (x_CTD, labels_CT))
    return (loss, lse), (x_CTD, w_VD, labels_CT, lse)


def _losses_bwd(options, residuals, cotangents):
    x_CTD, w_VD, labels_CT, lse_CT = residuals
    dloss_CT, dlse_CT = cotangents
    w = w_VD.astype(x_CTD.dtype)

    def one_chunk(dw_VD, chunk):
        x_TD, labels_T, lse_T, dloss_T, dlse_T = chunk
        logits_TV, slope = _logits(options, x_TD, w)
        p_TV = jnp.exp(logits_TV - lse_T[:, None])
        through_lse_T = dloss_T * (1.0 + 2.0 * options.z_loss * lse_T) + dlse_T
        at_label_TV = jnp.where(_is_label(options, labels_T, w), dloss_T[:, None], 0.0)
        dlogits_TV = ((p_TV * through_lse_T[:, None] - at_label_TV) * slope).astype(x_TD.dtype)
        dx_TD = _over_vocab(options, jax.lax.psum, einsum_f32("TV,VD->TD", dlogits_TV, w))
        return dw_VD + einsum_f32("TV,TD->VD", dlogits_TV, x_TD), dx_TD.astype(x_TD.dtype)

    chunks = (x_CTD, labels_CT, lse_CT, dloss_CT, dlse_CT)
    dw_VD = jnp.zeros(w_VD.shape, jnp.float32)
    if len(x_CTD) == 1:
        dw_VD, dx_TD = one_chunk(dw_VD, jax.tree.map(lambda c: c[0], chunks))
        return dx_TD[None], dw_VD.astype(w_VD.dtype), None
    dw_VD, dx_CTD = jax.lax.scan(one_chunk, vary_like(dw_VD, x_CTD, w_VD), chunks)
    return dx_CTD, dw_VD.astype(w_VD.dtype), None


_losses.defvjp(_losses_fwd, _losses_bwd)


def _logits(options, x_TD, w_VD):
    """Float32 logits and the slope of the soft cap at each."""
    logits_TV = einsum_f32("TD,VD->TV", x_TD, w_VD)
    if options.soft_cap is None:
        return logits_TV, 1.0
    bent = jnp.tanh(logits_TV / options.soft_cap)
    return options.soft_cap * bent, 1.0 - bent * bent


def _is_label(options, labels_T, w_VD):
    V = w_VD.shape[0]
    first = 0 if options.vocab_axis is None else jax.lax.axis_index(options.vocab_axis) * V
    return (labels_T - first)[:, None] == jnp.arange(V)[None, :]


def _over_vocab(options, collective, x):
    return x if options.vocab_axis is None else collective(x, options.vocab_axis)


def _map(f, chunks):
    """f of each chunk, stacked; without a loop where there is one."""
    if len(jax.tree.leaves(chunks)[0]) == 1:
        return jax.tree.map(lambda x: x[None], f(jax.tree.map(lambda c: c[0], chunks)))
    return jax.lax.map(f, chunks)
