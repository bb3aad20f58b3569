"""Statistics of the logits, chunked over tokens: at most one chunk of logits lives at a time.

The backward recomputes a chunk's logits (a fourth product) and adds its part of the head's gradient in float32. With
`vocab_axis` each device holds a slice of the vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.statistics import Options, Statistics, over_shards
from pallas_kernels.runtime import einsum_f32, vary_like

LOGIT_BYTES = 256 * 2**20  # of float32 logits in a chunk, at most


def statistics_xla(options: Options, x_TD, w_VD, labels_T) -> Statistics:
    """Same contract as `statistics_reference`, sharded vocabulary included."""
    w_VD = vary_like(w_VD, x_TD)  # devices that share a head get the sum of their gradients
    T, V = x_TD.shape[0], w_VD.shape[0]
    chunk = max(8, LOGIT_BYTES // (4 * V))
    chunk = -(-T // (8 * -(-T // chunk))) * 8  # as many chunks, all of about one size: less padding
    if chunk >= T:
        x_CTD, labels_CT = x_TD[None], labels_T[None]
    else:
        padding = -T % chunk
        x_CTD = jnp.pad(x_TD, ((0, padding), (0, 0))).reshape(-1, chunk, x_TD.shape[1])
        labels_CT = jnp.pad(labels_T, (0, padding)).reshape(-1, chunk)
    return jax.tree.map(lambda row: row.reshape(-1)[:T], _statistics(options, x_CTD, w_VD, labels_CT))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(options, x_CTD, w_VD, labels_CT):
    return _statistics_fwd(options, x_CTD, w_VD, labels_CT)[0]


def _statistics_fwd(options: Options, x_CTD, w_VD, labels_CT):
    w = w_VD.astype(x_CTD.dtype)

    def one_chunk(chunk):
        x_TD, labels_T = chunk
        raw_TV = einsum_f32("TD,VD->TV", x_TD, w)
        logits_TV, _ = _capped(options, raw_TV)
        highest_T = jnp.max(logits_TV, axis=-1)
        found = Statistics(
            lse=highest_T + jnp.log(jnp.sum(jnp.exp(logits_TV - highest_T[:, None]), axis=-1)),
            at_label=jnp.sum(jnp.where(_is_label(labels_T, w), logits_TV, 0.0), axis=-1),
            total=jnp.sum(logits_TV, axis=-1) if options.with_total else None,
            argmax=jnp.argmax(raw_TV, axis=-1).astype(jnp.int32) if options.with_argmax else None,
        )
        return over_shards(options, found, jnp.max(raw_TV, axis=-1) if options.with_argmax else None, len(w))

    found = _map(one_chunk, (x_CTD, labels_CT))
    return found, (x_CTD, w_VD, labels_CT, found.lse)


def _statistics_bwd(options: Options, residuals, cotangents):
    x_CTD, w_VD, labels_CT, lse_CT = residuals
    w = w_VD.astype(x_CTD.dtype)

    def one_chunk(dw_VD, chunk):
        x_TD, labels_T, lse_T, dlse_T, dlabel_T, dtotal_T = chunk
        logits_TV, slope = _capped(options, einsum_f32("TD,VD->TV", x_TD, w))
        p_TV = jnp.exp(logits_TV - lse_T[:, None])
        dlogits_TV = p_TV * dlse_T[:, None] + jnp.where(_is_label(labels_T, w), dlabel_T[:, None], 0.0)
        if dtotal_T is not None:
            dlogits_TV += dtotal_T[:, None]
        dlogits_TV = (dlogits_TV * slope).astype(x_TD.dtype)
        dx_TD = einsum_f32("TV,VD->TD", dlogits_TV, w)
        if options.vocab_axis is not None:
            dx_TD = jax.lax.psum(dx_TD, options.vocab_axis)
        return dw_VD + einsum_f32("TV,TD->VD", dlogits_TV, x_TD), dx_TD.astype(x_TD.dtype)

    chunks = (x_CTD, labels_CT, lse_CT, cotangents.lse, cotangents.at_label, cotangents.total)
    dw_VD = jnp.zeros(w_VD.shape, jnp.float32)
    if len(x_CTD) == 1:
        dw_VD, dx_TD = one_chunk(dw_VD, jax.tree.map(lambda c: c[0], chunks))
        return dx_TD[None], dw_VD.astype(w_VD.dtype), None
    dw_VD, dx_CTD = jax.lax.scan(one_chunk, vary_like(dw_VD, x_CTD, w_VD), chunks)
    return dx_CTD, dw_VD.astype(w_VD.dtype), None


_statistics.defvjp(_statistics_fwd, _statistics_bwd)


def _capped(options: Options, logits_TV):
    """Logits under the soft cap, and its slope at each."""
    if options.soft_cap is None:
        return logits_TV, 1.0
    bent = jnp.tanh(logits_TV / options.soft_cap)
    return options.soft_cap * bent, 1.0 - bent * bent


def _is_label(labels_T, w_VD):
    return labels_T[:, None] == jnp.arange(len(w_VD), dtype=labels_T.dtype)[None, :]


def _map(f, chunks):
    """f of each chunk, stacked; without a loop where there is one."""
    if len(jax.tree.leaves(chunks)[0]) == 1:
        return jax.tree.map(lambda x: x[None], f(jax.tree.map(lambda c: c[0], chunks)))
    return jax.lax.map(f, chunks)
