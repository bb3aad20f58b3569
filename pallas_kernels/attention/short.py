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
    q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset: int, sinks_N, *, mask, scale, soft_cap
):
    """Same contract as `attention_reference`, for a `q_offset` that is an int."""
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    o_BKGTH, lse_BKGT1 = _attend(
        _Options(mask, scale, soft_cap, q_offset),
        q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4),
        k_BSKH.transpose(0, 2, 1, 3),
        v_BSKH.transpose(0, 2, 1, 3),
        q_segment_ids_BT,
        kv_segment_ids_BS,
        None if sinks_N is None else sinks_N.reshape(1, K, N // K, 1, 1),
    )
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1), lse_BKGT1.reshape(B, N, T)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, q_segments, k_segments, sinks):
    return _attend_fwd(options, q, k, v, q_segments, k_segments, sinks)[0]


def _attend_fwd(options, q, k, v, q_segments, k_segments, sinks):
    outputs, lses, kept = [], [], []
    for rows, keys in _chunks(options, q.shape[3], k.shape[2]):
        s, slope = _scores(options, q, k, q_segments, k_segments, rows, keys)
        p, from_sink, inverse, lse = _softmax(s, sinks)
        outputs.append(einsum_f32("BKGTS,BKSH->BKGTH", p.astype(v.dtype), v[:, :, keys]) * inverse)
        lses.append(lse)
        kept.append((p, from_sink, inverse, slope))
    o = _join(outputs, 3).astype(q.dtype)
    return (o, _join(lses, 3)), (q, k, v, o, kept)


def _softmax(s, sinks):
    """Unnormalised probabilities of the keys and of the sink, 1 / their sum, and the lse; 0, 0, 0, -inf of no keys."""
    highest = jnp.max(s, axis=-1, keepdims=True)
    blind = highest == -jnp.inf
    highest = jnp.where(blind, 0.0, highest if sinks is None else jnp.maximum(highest, sinks))
    p = jnp.exp(s - highest)
    total, from_sink = jnp.sum(p, axis=-1, keepdims=True), None
    if sinks is not None:
        from_sink = jnp.where(blind, 0.0, jnp.exp(sinks - highest))
        total = total + from_sink
    return p, from_sink, jnp.where(blind, 0.0, 1.0 / total), highest + jnp.log(total)


def _attend_bwd(options, residuals, cotangents):
    q, k, v, o, kept = residuals
    do, dlse = cotangents
    ones = jnp.ones((o.shape[-1], 1), jnp.float32)
    dq, dk_parts, dv_parts, dsinks = [], [], [], []
    chunks = _chunks(options, q.shape[3], k.shape[2])
    for (rows, keys), (p, from_sink, inverse, slope) in zip(chunks, kept, strict=True):
        # Both cotangents over the row's sum, and 0 where it saw nothing, whatever they are there.
        do_i, dlse_i = (jnp.where(inverse == 0, 0.0, x[:, :, :, rows] * inverse) for x in (do, dlse))
        do_i = do_i.astype(do.dtype)
        # A row sum as a product with ones: as a sum XLA on CPU would take it again for every key.
        delta = einsum_f32("BKGTH,HI->BKGTI", o[:, :, :, rows].astype(jnp.float32) * do_i, ones) - dlse_i
        dp = einsum_f32("BKGTH,BKSH->BKGTS", do_i, v[:, :, keys])
        ds = p * ((dp - delta) * options.scale)
        ds = (ds if slope is None else ds * slope).astype(q.dtype)
        dq.append(einsum_f32("BKGTS,BKSH->BKGTH", ds, k[:, :, keys]))
        dk_parts.append((keys, einsum_f32("BKGTS,BKGTH->BKSH", ds, q[:, :, :, rows])))
        dv_parts.append((keys, einsum_f32("BKGTS,BKGTH->BKSH", p.astype(do.dtype), do_i)))
        if from_sink is not None:
            dsinks.append(-jnp.sum(from_sink * delta, axis=(0, 3), keepdims=True))
    dk, dv = _sum_over_keys(dk_parts, k.shape[2]), _sum_over_keys(dv_parts, v.shape[2])
    dq = _join(dq, 3)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, sum(dsinks) if dsinks else None


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
        pieces.append(functools.reduce(jnp.add, inside) if inside else jnp.zeros(shape, jnp.float32))
    return _join(pieces, 2)
