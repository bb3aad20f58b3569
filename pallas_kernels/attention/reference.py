"""Attention in plain float32 jnp: the truth that every other implementation is held to."""

import jax
import jax.numpy as jnp

from pallas_kernels.runtime import einsum_f32


def attention_reference(
    q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset, sinks_N, *, mask, scale, soft_cap
):
    """softmax(soft_cap(scale * q k^T) + mask) v in q's dtype, and the lse_BNT in float32. O(T * S) memory.

    `mask` is a `Mask`; `sinks_N` float32 or None. A row that sees nothing has o = 0 and lse = -inf.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.astype(jnp.float32).reshape(B, T, K, N // K, H)
    s_BKGTS = einsum_f32("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH.astype(jnp.float32)) * scale
    if soft_cap is not None:
        s_BKGTS = soft_cap * jnp.tanh(s_BKGTS / soft_cap)
    visible_BTS = jnp.broadcast_to(
        mask.visible(q_offset + jnp.arange(T)[:, None], jnp.arange(S)[None, :])[None], (B, T, S)
    )
    if q_segment_ids_BT is not None:
        same_BTS = q_segment_ids_BT[:, :, None] == kv_segment_ids_BS[:, None, :]
        visible_BTS &= same_BTS & (q_segment_ids_BT > 0)[:, :, None]
    s_BKGTS = jnp.where(visible_BTS[:, None, None], s_BKGTS, -jnp.inf)

    highest_BKGT1 = jnp.max(s_BKGTS, axis=-1, keepdims=True)
    blind_BKGT1 = highest_BKGT1 == -jnp.inf
    sinks_1KG11 = jnp.full((1, K, N // K, 1, 1), -jnp.inf) if sinks_N is None else sinks_N.reshape(1, K, N // K, 1, 1)
    # Whatever is subtracted cancels, so it needs no gradient. Infinities are picked out before the exponential and
    # after the output: a `where` on one side alone would let 0 * inf into the gradients.
    highest_BKGT1 = jax.lax.stop_gradient(jnp.where(blind_BKGT1, 0.0, jnp.maximum(highest_BKGT1, sinks_1KG11)))
    p_BKGTS = jnp.exp(s_BKGTS - highest_BKGT1)
    sink_BKGT1 = jnp.exp(jnp.where(blind_BKGT1, -jnp.inf, sinks_1KG11 - highest_BKGT1))
    total_BKGT1 = jnp.where(blind_BKGT1, 1.0, jnp.sum(p_BKGTS, axis=-1, keepdims=True) + sink_BKGT1)
    o_BKGTH = einsum_f32("BKGTS,BSKH->BKGTH", p_BKGTS / total_BKGT1, v_BSKH.astype(jnp.float32))
    o_BKGTH = jnp.where(blind_BKGT1, 0.0, o_BKGTH)
    lse_BKGT1 = jnp.where(blind_BKGT1, -jnp.inf, highest_BKGT1 + jnp.log(total_BKGT1))
    o_BTNH = o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1).astype(q_BTNH.dtype)
    return o_BTNH, lse_BKGT1.reshape(B, N, T)
