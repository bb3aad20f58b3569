"""Attention over packed sequences: one function, several implementations with the same results and the same errors."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import short
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.reference import attention_reference
from pallas_kernels.attention.xla import attention_xla, cudnn_attention, cudnn_can_run

IMPLEMENTATIONS = ("reference", "xla", "cudnn")


def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    q_segment_ids_BT: jax.Array | None = None,
    kv_segment_ids_BS: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """softmax(q k^T scale) v per head (Vaswani et al., arXiv:1706.03762) in memory linear in T and S.

    Args:
      q_BTNH: queries, float32, bfloat16 or float16.
      k_BSKH, v_BSKH: keys and values of q's dtype; K divides N and query head n reads key head n // (N // K).
        The head dim of v may differ from that of q and k.
      causal: query t sees keys s <= t.
      window: query t sees keys with t - s < window (and, if not causal, s - t < window).
      q_segment_ids_BT, kv_segment_ids_BS: int; a query sees keys of its own segment only; an id <= 0 is padding,
        which matches nothing.
      q_offset: position of the first query, the first key being at 0; an int or an int scalar.
      scale: of the scores; None is H ** -0.5.
      logit_soft_cap: cap * tanh(score / cap), after the scale.
      implementation: "reference", "xla" (blocked) or "cudnn" (on an NVIDIA GPU, fewer options).

    Returns:
      o_BTNH in q's dtype. A query that sees nothing gets zeros and passes no gradient.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or an option that `implementation` can't honour.
    """
    _check(q_BTNH, k_BSKH, v_BSKH, window, q_segment_ids_BT, kv_segment_ids_BS, logit_soft_cap)
    mask = Mask(causal, window)
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    if implementation == "cudnn":
        reason = cudnn_can_run(q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, q_offset, mask, logit_soft_cap)
        if reason:
            raise ValueError(f"flash_attention: cudnn can't take {reason}; use implementation='xla'")
        return cudnn_attention(q_BTNH, k_BSKH, v_BSKH, mask=mask, scale=scale)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"flash_attention has no implementation {implementation!r}; it has {', '.join(IMPLEMENTATIONS)}"
        )
    run = attention_reference if implementation == "reference" else attention_xla
    known_offset = isinstance(q_offset, (int, np.integer))
    if implementation == "xla" and known_offset and max(q_BTNH.shape[1], k_BSKH.shape[1]) <= short.LONGEST:
        run = short.attention_short
    elif known_offset:
        q_offset = jnp.asarray(q_offset, jnp.int32)
    return run(
        *(q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset),
        mask=mask,
        scale=scale,
        soft_cap=logit_soft_cap,
    )


def _check(q, k, v, window, q_segment_ids, kv_segment_ids, soft_cap):
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"flash_attention takes q_BTNH, k_BSKH, v_BSKH; got shapes {q.shape}, {k.shape}, {v.shape}")
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    if k.shape != (B, S, K, H) or v.shape[:3] != (B, S, K):
        raise ValueError(f"flash_attention: k {k.shape} and v {v.shape} do not fit q {q.shape}")
    if N % K:
        raise ValueError(f"flash_attention: {N} query heads are not a multiple of {K} key heads")
    if not q.dtype == k.dtype == v.dtype or not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"flash_attention wants one float dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("flash_attention wants segment ids of both the queries and the keys, or of neither")
    if q_segment_ids is not None and (q_segment_ids.shape != (B, T) or kv_segment_ids.shape != (B, S)):
        raise ValueError(
            f"flash_attention: segment ids {q_segment_ids.shape} and {kv_segment_ids.shape} "
            f"should be {(B, T)} and {(B, S)}"
        )
    if window is not None and window < 1:
        raise ValueError(f"flash_attention: window={window}; it must be at least 1, or None for no window")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"flash_attention: logit_soft_cap={soft_cap}; it must be above 0, or None for no cap")
