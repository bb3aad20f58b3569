"""Attention over at most 512 queries and keys in jnp, unrolled over chunks of queries: what a CPU runs fastest.

Each chunk meets only the keys that its mask lets it see, known at trace time, and keeps its unnormalised probabilities
for the backward pass: at most 512 numbers a row, where the blocked form in xla.py recomputes them.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.mask import Mask
from pallas_kernels.runtime import einsum_f32

LONGEST = 512
CHUNK = 64


@dataclasses.dataclass(frozen=True)
class _Options:
    mask: Mask
    scale: float
    soft_cap: float | None
    q_offset: int


def attention_short(
    q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset: int, *, mask, scale, soft_cap
):
    """Same contract as `attention_reference`, for a `q_offset` that is an int."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    o_BKGTH = _attend(
        _Options(mask, scale, soft_cap, q_offset),
        q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4),
        k_BSKH.transpose(0, 2, 1, 3),
        v_BSKH.transpose(0, 2, 1, 3),
        q_segment_ids_BT,
        kv_segment_ids_BS,
    )
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, q_segments, k_segments):
    return _attend_fwd(options, q, k, v, q_segments, k_segments)[0]


def _attend_fwd(options, q, k, v, q_segments, k_segments):
    outputs, kept = [], []
    for rows, keys in _chunks(options, q.shape[3], k.shape[2]):
        s, slope = _scores(options, q, k, q_segments, k_segments, rows, keys)
        highest = jnp.max(s, axis=-1, keepdims=True)
        p = jnp.exp(s - jnp.where(jnp.isfinite(highest), highest, 0.0))
        total = jnp.sum(p, axis=-1, keepdims=True)
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)
        outputs.append(einsum_f32("BKGTS,BKSH->BKGTH", p.astype(v.dtype), v[:, :, keys]) * inverse)
        kept.append((p, inverse, slope))
    o = _join(outputs, 3).astype(q.dtype)
    return o, (q, k, v, o, kept)


def _attend_bwd(options, residuals, do):
    q, k, v, o, kept = residuals
    # A row sum as a product with ones: as a sum XLA on CPU would take it again for every key.
    delta = einsum_f32("BKGTH,HI->BKGTI", o.astype(jnp.float32) * do.astype(jnp.float32), jnp.ones((o.shape[-1], 1)))
    dq, dk_parts, dv_parts = [], [], []
    chunks = _chunks(options, q.shape[3], k.shape[2])
    for (rows, keys), (p, inverse, slope) in zip(chunks, kept, strict=True):
        do_i, q_i = do[:, :, :, rows], q[:, :, :, rows]
        dp = einsum_f32("BKGTH,BKSH->BKGTS", do_i, v[:, :, keys])
        ds = p * ((dp - delta[:, :, :, rows]) * (inverse * options.scale))
        ds = (ds if slope is None else ds * slope).astype(q.dtype)
        dq.append(einsum_f32("BKGTS,BKSH->BKGTH", ds, k[:, :, keys]))
        dk_parts.append((keys, einsum_f32("BKGTS,BKGTH->BKSH", ds, q_i)))
        scaled_do = (do_i * inverse).astype(do.dtype)
        dv_parts.append((keys, einsum_f32("BKGTS,BKGTH->BKSH", p.astype(do.dtype), scaled_do)))
    dk, dv = _sum_over_keys(dk_parts, k.shape[2]), _sum_over_keys(dv_parts, v.shape[2])
    return _join(dq, 3).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _chunks(options, num_queries, num_keys):
    """(rows, keys) slices: each chunk of queries and the keys that it may see, at least one."""
    chunks = []
    for first in range(0, num_queries, CHUNK):
        last = min(first + CHUNK, num_queries) - 1
        low, high = options.mask.key_range(first + options.q_offset, last + options.q_offset, num_keys)
        low = min(low, num_keys - 1)
        chunks.append((slice(first, last + 1), slice(low, max(high, low + 1))))
    return chunks


def _scores(options, q, k, q_segments, k_segments, rows, keys):
    """Masked float32 scores of a chunk, and the slope of the soft cap at each or None."""
    s = einsum_f32("BKGTH,BKSH->BKGTS", q[:, :, :, rows], k[:, :, keys]) * options.scale
    slope = None
    if options.soft_cap is not None:
        bent = jnp.tanh(s / options.soft_cap)
        s, slope = options.soft_cap * bent, 1.0 - bent * bent
    t, at = np.arange(rows.start, rows.stop)[:, None] + options.q_offset, np.arange(keys.start, keys.stop)[None, :]
    visible = jnp.asarray(options.mask.visible(t, at))[None]
    if q_segments is not None:
        mine, theirs = q_segments[:, rows, None], k_segments[:, None, keys]
        visible = visible & (mine == theirs) & (mine > 0)
    return jnp.where(visible[:, None, None], s, -jnp.inf), slope


def _join(parts, axis):
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _sum_over_keys(parts, num_keys):
    """Adds up [B, K, keys, H] parts, each over its own slice of the keys; cut at every slice's ends first."""
    cuts = sorted({0, num_keys} | {end for keys, _ in parts for end in (keys.start, keys.stop)})
    pieces = []
    for low, high in itertools.pairwise(cuts):
        inside = [
            part[:, :, low - keys.start : high - keys.start] for keys, part in parts if keys.start <= low < keys.stop
        ]
        shape = (*parts[0][1].shape[:2], high - low, parts[0][1].shape[3])
        pieces.append(functools.reduce(jnp.add, inside) if inside else jnp.zeros(shape))
    return _join(pieces, 2)
