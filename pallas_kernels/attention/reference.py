"""Attention in plain float32 jnp: the truth that every other implementation is held to."""

import jax
import jax.numpy as jnp


def attention_reference(
    q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset, *, mask, scale, soft_cap
):
    """softmax(soft_cap(scale * q k^T) + mask) v, with a row that sees nothing equal to zero. O(T * S) memory.

    `mask` is a `Mask`; the output has q's dtype.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTKGH = q_BTNH.astype(jnp.float32).reshape(B, T, K, N // K, H)
    s_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    s_BKGTS = s_BKGTS * scale
    if soft_cap is not None:
        s_BKGTS = soft_cap * jnp.tanh(s_BKGTS / soft_cap)
    visible_BTS = jnp.broadcast_to(
        mask.visible(q_offset + jnp.arange(T)[:, None], jnp.arange(S)[None, :])[None], (B, T, S)
    )
    if q_segment_ids_BT is not None:
        same_BTS = q_segment_ids_BT[:, :, None] == kv_segment_ids_BS[:, None, :]
        visible_BTS &= same_BTS & (q_segment_ids_BT > 0)[:, :, None]
    visible_BKGTS = visible_BTS[:, None, None]
    s_BKGTS = jnp.where(visible_BKGTS, s_BKGTS, -jnp.inf)
    highest = jnp.max(s_BKGTS, axis=-1, keepdims=True)
    p_BKGTS = jnp.exp(s_BKGTS - jnp.where(jnp.isfinite(highest), highest, 0.0))
    total = jnp.sum(p_BKGTS, axis=-1, keepdims=True)
    p_BKGTS = p_BKGTS / jnp.where(total == 0, 1.0, total)
    o_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", p_BKGTS, v_BSKH.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return o_BTKGH.reshape(B, T, N, v_BSKH.shape[-1]).astype(q_BTNH.dtype)
