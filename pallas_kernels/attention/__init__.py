"""Attention over packed sequences: one function, several implementations with the same results and the same errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import short
from pallas_kernels.attention.blocks import BlockSizes
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.reference import attention_reference
from pallas_kernels.attention.rotary import apply_rope
from pallas_kernels.attention.rotary import check as check_rotary
from pallas_kernels.attention.vjp import attention_pallas
from pallas_kernels.attention.xla import attention_xla, cudnn_attention, cudnn_can_run
from pallas_kernels.runtime import vary_alike

KERNELS = ("pallas", "interpret")
IMPLEMENTATIONS = ("reference", "xla", "cudnn", *KERNELS)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def flash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    q_segment_ids_BT: jax.Array | None = None,
    kv_segment_ids_BS: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    rotary: tuple[jax.Array, jax.Array] | None = None,
    return_lse: bool = False,
    block_sizes: BlockSizes | None = None,
    implementation: str = "xla",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(q k^T scale) v per head (Vaswani et al., arXiv:1706.03762) in memory linear in T and S.

    Args:
      q_BTNH: queries, float32, bfloat16 or float16.
      k_BSKH, v_BSKH: keys and values of q's dtype; K divides N and query head n reads key head n // (N // K).
        The head dim of v may differ from that of q and k.
      causal: query t sees keys s <= t.
      window: an int: query t sees keys with t - s < window (and, if not causal, s - t < window). A tuple (left, right):
        keys with t - s <= left and s - t <= right, None being no bound; causal makes right 0.
      q_segment_ids_BT, kv_segment_ids_BS: int; a query sees keys of its own segment only; an id <= 0 is padding,
        which matches nothing.
      q_offset: position of the first query, the first key being at 0; an int or an int scalar.
      scale: of the scores; None is H ** -0.5.
      logit_soft_cap: cap * tanh(score / cap), after the scale.
      sinks_N: a logit per query head, float32, bfloat16 or float16, that joins the softmax's denominator and has no
        value (gpt-oss; the idea is arXiv:2309.17453's). Neither scaled nor capped.
      rotary: cos and sin, float32 [B, T, H / 2], of the angles by which q and k are turned first (`apply_rope`); for
        T = S. They have no gradient.
      return_lse: also return the lse.
      block_sizes: of "pallas" and "interpret"; None chooses them for the TPU generation of the mesh in use.
      implementation: "reference", "xla" (blocked), "cudnn" (on an NVIDIA GPU, fewer options), "pallas" (on a TPU) or
        "interpret" (the same kernels anywhere, slowly).

    Returns:
      o_BTNH in q's dtype; with `return_lse` also lse_BNT, float32: the natural log of the softmax's denominator, the
      sink included. Both have gradients. A query that sees nothing gets o = 0 and lse = -inf, and passes no gradient,
      to its sink neither.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or an option that `implementation` can't honour.
    """
    _check(q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset, logit_soft_cap, sinks_N)
    if rotary is not None:
        check_rotary(rotary, q_BTNH, k_BSKH)
        if implementation not in KERNELS:  # they turn them as they read them
            q_BTNH, k_BSKH = (apply_rope(x, *rotary) for x in (q_BTNH, k_BSKH))
            rotary = None
    mask = Mask.of(causal, window)
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else float(scale)
    if implementation == "cudnn":
        reason = cudnn_can_run(
            *(q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, q_offset, mask, logit_soft_cap, sinks_N, return_lse)
        )
        if reason:
            raise ValueError(f"flash_attention: cudnn can't take {reason}; use implementation='xla'")
        return cudnn_attention(q_BTNH, k_BSKH, v_BSKH, mask=mask, scale=scale)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"flash_attention has no implementation {implementation!r}; it has {', '.join(IMPLEMENTATIONS)}"
        )
    run: Any = attention_reference if implementation == "reference" else attention_xla
    # An implementation may build on an offset that is known when it is traced.
    q_offset = int(q_offset) if isinstance(q_offset, (int, np.integer)) else q_offset.astype(jnp.int32)
    short_enough = max(q_BTNH.shape[1], k_BSKH.shape[1]) <= short.LONGEST
    if implementation in KERNELS:
        run = functools.partial(attention_pallas, sizes=block_sizes, interpret=implementation == "interpret")
    elif implementation == "xla" and isinstance(q_offset, int) and short_enough:
        run = short.attention_short
    elif isinstance(q_offset, int):
        q_offset = jnp.int32(q_offset)
    if block_sizes is not None and implementation not in KERNELS:
        raise ValueError(f"flash_attention: {implementation} takes no block_sizes; {' and '.join(KERNELS)} do")
    sinks_N = None if sinks_N is None else sinks_N.astype(jnp.float32)
    operands = q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset, sinks_N
    *operands, cos_BTR, sin_BTR = vary_alike(*operands, *(rotary or (None, None)))
    if rotary is not None:
        run = functools.partial(run, rotary=(cos_BTR, sin_BTR))
    o_BTNH, lse_BNT = run(
        *operands,
        mask=mask,
        scale=scale,
        soft_cap=None if logit_soft_cap is None else float(logit_soft_cap),
    )
    return (o_BTNH, lse_BNT) if return_lse else o_BTNH


def _check(q, k, v, q_segment_ids, kv_segment_ids, q_offset, soft_cap, sinks):
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"flash_attention takes q_BTNH, k_BSKH, v_BSKH; got shapes {q.shape}, {k.shape}, {v.shape}")
    (B, T, N, H), (_, S, K, _) = q.shape, k.shape
    if k.shape != (B, S, K, H) or v.shape[:3] != (B, S, K) or 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"flash_attention: k {k.shape} and v {v.shape} do not fit q {q.shape}, or one is empty")
    if N % K:
        raise ValueError(f"flash_attention: {N} query heads are not a multiple of {K} key heads")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        raise ValueError(
            f"flash_attention wants one dtype, float32, bfloat16 or float16; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    _check_segment_ids(q_segment_ids, kv_segment_ids, (B, T), (B, S))
    if jnp.shape(q_offset) != () or not jnp.issubdtype(jnp.result_type(q_offset), jnp.integer):
        raise ValueError(f"flash_attention: q_offset={q_offset}; it must be an int or an int scalar")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"flash_attention: logit_soft_cap={soft_cap}; it must be above 0, or None for no cap")
    if sinks is not None and (sinks.shape != (N,) or sinks.dtype not in DTYPES):
        raise ValueError(
            f"flash_attention: sinks {sinks.dtype}{sinks.shape} should be {(N,)}, float32, bfloat16 or float16"
        )


def _check_segment_ids(q_ids, kv_ids, q_shape, kv_shape):
    if (q_ids is None) != (kv_ids is None):
        raise ValueError("flash_attention wants segment ids of both the queries and the keys, or of neither")
    if q_ids is None:
        return
    if q_ids.shape != q_shape or kv_ids.shape != kv_shape:
        raise ValueError(
            f"flash_attention: segment ids {q_ids.shape} and {kv_ids.shape} should be {q_shape} and {kv_shape}"
        )
    if not all(jnp.issubdtype(x.dtype, jnp.integer) for x in (q_ids, kv_ids)):
        raise ValueError(f"flash_attention: segment ids are {q_ids.dtype} and {kv_ids.dtype}; they must be integers")
