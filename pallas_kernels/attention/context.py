"""Attention over a sequence that is split along a mesh axis, inside shard_map.

The sequence is cut into 2 C chunks; device i of the C along the axis holds chunks i and 2 C - 1 - i, one after the
other. Under a causal mask all devices then see equally many keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import flash_attention
from pallas_kernels.attention.blocks import BlockSizes
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.ring import ring_attention

METHODS = ("all_gather", "ring", "all_to_all")


def context_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    axis: str,
    method: str,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    segment_ids_BT: jax.Array | None = None,
    scale: float | None = None,
    logit_soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    return_lse: bool = False,
    block_sizes: BlockSizes | None = None,
    implementation: str = "xla",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`flash_attention` of a sequence's queries to its own keys, T being this device's part: chunks i and 2 C - 1 - i.

    Args:
      axis: the mesh axis, of C devices, that splits the sequence.
      method: "all_gather": keys and values are brought together and their gradients scattered. "ring": they travel
        from device to device, and so do their gradients (Liu et al., arXiv:2310.01889); memory linear in T; causal
        only. "all_to_all": whole sequences of a C-th of the heads (Jacobs et al., arXiv:2309.14509).
      The rest as in `flash_attention`; `segment_ids_BT` serve queries and keys.

    Returns:
      As `flash_attention`, of this device's queries.

    Raises:
      ValueError: an odd T; heads that do not divide over the axis with "all_to_all"; a mask that is not causal, or an
        implementation without a ring, with "ring"; what `flash_attention` raises.
    """
    C = jax.lax.axis_size(axis)
    if q_BTNH.shape[1] % 2 or q_BTNH.shape[1] != k_BTKH.shape[1]:
        raise ValueError(
            f"context_attention: queries {q_BTNH.shape} and keys {k_BTKH.shape} should be of the same tokens, two "
            "chunks of one length"
        )
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "logit_soft_cap": logit_soft_cap}
    options |= {"block_sizes": block_sizes, "implementation": implementation}
    if method == "all_gather":
        o_BTNH, lse_BNT = _gathered(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N, axis, C, options)
    elif method == "all_to_all":
        o_BTNH, lse_BNT = _exchanged(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N, axis, C, options)
    elif method == "ring":
        if not causal:
            raise ValueError("context_attention: the ring is for causal masks; use 'all_gather' or 'all_to_all'")
        o_BTNH, lse_BNT = ring_attention(
            *(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N),
            axis=axis,
            mask=Mask.of(causal, window),
            scale=q_BTNH.shape[-1] ** -0.5 if scale is None else float(scale),
            soft_cap=logit_soft_cap,
            sizes=block_sizes,
            implementation=implementation,
        )
    else:
        raise ValueError(f"context_attention has no method {method!r}; it has {', '.join(METHODS)}")
    return (o_BTNH, lse_BNT) if return_lse else o_BTNH


def _gathered(q_BTNH, k_BTKH, v_BTKH, ids_BT, sinks_N, axis, C, options):
    """Each chunk of queries against all keys, in their order."""
    gather = functools.partial(jax.lax.all_gather, axis_name=axis, axis=1, tiled=True)
    k_BSKH, v_BSKH = (_in_order(gather(x), C) for x in (k_BTKH, v_BTKH))
    ids_BS = None if ids_BT is None else _in_order(gather(ids_BT), C)
    chunk, i = q_BTNH.shape[1] // 2, jax.lax.axis_index(axis)
    found = []
    for half, number in enumerate((i, 2 * C - 1 - i)):
        rows = slice(half * chunk, (half + 1) * chunk)
        found.append(
            flash_attention(
                *(q_BTNH[:, rows], k_BSKH, v_BSKH),
                q_segment_ids_BT=None if ids_BT is None else ids_BT[:, rows],
                kv_segment_ids_BS=ids_BS,
                q_offset=number * chunk,
                sinks_N=sinks_N,
                return_lse=True,
                **options,
            )
        )
    (o_lo, lse_lo), (o_hi, lse_hi) = found
    return jnp.concatenate([o_lo, o_hi], 1), jnp.concatenate([lse_lo, lse_hi], 2)


def _exchanged(q_BTNH, k_BTKH, v_BTKH, ids_BT, sinks_N, axis, C, options):
    """Whole sequences of this device's heads."""
    N, K = q_BTNH.shape[2], k_BTKH.shape[2]
    if N % C or K % C:
        raise ValueError(
            f"context_attention: {N} query and {K} key heads do not divide over the {C} devices of {axis}; use 'ring' "
            "or 'all_gather'"
        )
    swap = functools.partial(jax.lax.all_to_all, axis_name=axis, tiled=True)
    q, k, v = (_in_order(swap(x, split_axis=2, concat_axis=1), C) for x in (q_BTNH, k_BTKH, v_BTKH))
    ids = None
    if ids_BT is not None:
        ids = _in_order(jax.lax.all_gather(ids_BT, axis, axis=1, tiled=True), C)
    if sinks_N is not None:
        own = jax.lax.axis_index(axis) * (N // C)
        sinks_N = jax.lax.dynamic_slice_in_dim(sinks_N, own, N // C)
    o, lse = flash_attention(
        q, k, v, q_segment_ids_BT=ids, kv_segment_ids_BS=ids, sinks_N=sinks_N, return_lse=True, **options
    )
    o_BTNH = swap(_dealt(o, C), split_axis=1, concat_axis=2)
    lse_BTN = swap(_dealt(lse.swapaxes(1, 2), C), split_axis=1, concat_axis=2)
    return o_BTNH, lse_BTN.swapaxes(1, 2)


def _in_order(x_BS, C: int):
    """The chunks of [B, S, ...], as devices hold them one after the other, in the sequence's order."""
    x = x_BS.reshape(x_BS.shape[0], C, 2, -1, *x_BS.shape[2:])
    return jnp.concatenate([x[:, :, 0], x[:, ::-1, 1]], axis=1).reshape(x_BS.shape)


def _dealt(x_BS, C: int):
    """The inverse of `_in_order`."""
    x = x_BS.reshape(x_BS.shape[0], 2, C, -1, *x_BS.shape[2:])
    return jnp.stack([x[:, 0], x[:, 1, ::-1]], axis=2).reshape(x_BS.shape)
