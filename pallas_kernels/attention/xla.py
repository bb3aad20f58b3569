"""Attention in jnp that XLA compiles for any platform, in memory linear in T and S.

The flash algorithm (Dao, arXiv:2307.08691) over blocks of queries and keys: an online softmax forward, a backward that
recomputes the probabilities from the lse. Blocks that the mask empties are never visited: loop bounds are closed forms.
Blocks are laid out batch dims first, `[block, B, K, G, rows, H]`, so that each product is a plain batched matmul.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.mask import Mask
from pallas_kernels.runtime import einsum_f32, vary_like

BLOCK = 256  # rows of queries and of keys in a block


@dataclasses.dataclass(frozen=True)
class _Options:
    mask: Mask
    scale: float
    soft_cap: float | None
    num_queries: int
    num_keys: int
    q_block: int
    k_block: int


def attention_xla(
    q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset, sinks_N, *, mask, scale, soft_cap
):
    """Same contract as `attention_reference`."""
    B, T, N, _ = q_BTNH.shape
    options = options_of(q_BTNH, k_BSKH, mask, scale, soft_cap)
    q, k, v, *segments = laid_out(options, q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS)
    K = k_BSKH.shape[2]
    sinks = None if sinks_N is None else sinks_N.reshape(1, K, N // K, 1, 1)
    o, lse = _attend(options, q, k, v, *segments, q_offset, sinks)
    o_BKGTH, lse_BKGT1 = (jnp.moveaxis(x, 0, 3).reshape(B, K, N // K, -1, x.shape[-1])[:, :, :, :T] for x in (o, lse))
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1), lse_BKGT1.reshape(B, N, T)


def options_of(q_BTNH, k_BSKH, mask, scale, soft_cap) -> _Options:
    """A call's static side."""
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    return _Options(mask, scale, soft_cap, T, S, min(BLOCK, T), min(BLOCK, S))


def laid_out(options, q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS):
    """Blocks of q, k, v and both segment ids."""
    q = query_blocks(options, q_BTNH, q_BTNH.shape[2] // k_BSKH.shape[2])
    k, v = (_blocks(x.transpose(0, 2, 1, 3), options.k_block, 2) for x in (k_BSKH, v_BSKH))
    q_segments = None if q_segment_ids_BT is None else _blocks(q_segment_ids_BT, options.q_block, 1)
    k_segments = None if kv_segment_ids_BS is None else _blocks(kv_segment_ids_BS, options.k_block, 1)
    return q, k, v, q_segments, k_segments


def query_blocks(options, x_BTNH, group):
    """Blocks of what there is for each query, `group` query heads to a key head."""
    B, T, N, H = x_BTNH.shape
    return _blocks(x_BTNH.reshape(B, T, N // group, group, H).transpose(0, 2, 3, 1, 4), options.q_block, 3)


def _blocks(x, size, axis):
    """Cuts `axis` into blocks of `size` rows, the last padded with zeros, and moves the block dim to the front."""
    count = -(-x.shape[axis] // size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, count * size - x.shape[axis])
    x = jnp.pad(x, padding) if padding[axis][1] else x
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, q_segments, k_segments, q_offset, sinks):
    return _attend_fwd(options, q, k, v, q_segments, k_segments, q_offset, sinks)[0]


def _attend_fwd(options, q, k, v, q_segments, k_segments, q_offset, sinks):
    def one_q_block(i, q_i):
        def step(j, carry):
            m, total, acc = carry
            s = _scores(options, q_i, k[j], i, j, q_segments, k_segments, q_offset)[0]
            m_new = jnp.maximum(m, jnp.max(s, axis=-1, keepdims=True))
            # A row that has seen nothing yet keeps m = -inf; subtracting it from itself would give NaN.
            m_safe = jnp.where(jnp.isfinite(m_new), m_new, 0.0)
            p, shrink = jnp.exp(s - m_safe), jnp.exp(m - m_safe)
            total = total * shrink + jnp.sum(p, axis=-1, keepdims=True)
            pv = einsum_f32("BKGTS,BKSH->BKGTH", p.astype(v.dtype), v[j])
            return m_new, total, acc * shrink + pv

        shapes = (*q_i.shape[:-1], 1), (*q_i.shape[:-1], 1), (*q_i.shape[:-1], v.shape[-1])
        empty = (jnp.full(shape, fill, jnp.float32) for shape, fill in zip(shapes, (-jnp.inf, 0, 0), strict=True))
        seen = _loop(_key_blocks(options, i, q_offset), len(k), step, tuple(vary_like(x, q) for x in empty))
        o, lse = _finish(seen, sinks)
        return o.astype(q.dtype), lse

    o, lse = _map(one_q_block, q)
    return (o, lse), (q, k, v, q_segments, k_segments, q_offset, sinks, o, lse)


def _finish(seen, sinks):
    """o and lse of rows from their highest score, sum and values so far; 0 and -inf of those that saw no key."""
    m, total, acc = seen
    blind = m == -jnp.inf
    highest = jnp.where(blind, 0.0, m if sinks is None else jnp.maximum(m, sinks))
    if sinks is not None:
        shrink, from_sink = jnp.exp(m - highest), jnp.where(blind, 0.0, jnp.exp(sinks - highest))
        total, acc = total * shrink + from_sink, acc * shrink
    return acc / jnp.where(blind, 1.0, total), highest + jnp.log(total)


def attend_backward(options, residuals, cotangents):
    """Gradients in blocks, from `_attend_fwd`'s residuals, whose o and lse may be of more keys than are there."""
    q, k, v, q_segments, k_segments, q_offset, sinks, o, lse = residuals
    do, dlse = cotangents
    # Of a row that saw nothing no cotangent counts, whatever it is.
    blind = lse == -jnp.inf
    lse_safe = jnp.where(blind, 0.0, lse)
    delta = jnp.where(blind, 0.0, jnp.sum(o.astype(jnp.float32) * do, axis=-1, keepdims=True) - dlse)

    def one_k_block(dq, j, k_j, v_j):
        def step(i, carry):
            dq, dk, dv = carry
            s, slope = _scores(options, q[i], k_j, i, j, q_segments, k_segments, q_offset)
            p = jnp.exp(s - lse_safe[i])
            do_i = jnp.where(blind[i], 0.0, do[i])  # in the loop: over all rows at once it made a step on CPU 7% slower
            dp = einsum_f32("BKGTH,BKSH->BKGTS", do_i, v_j)
            ds = (p * (dp - delta[i]) * slope * options.scale).astype(q.dtype)
            dv = dv + einsum_f32("BKGTS,BKGTH->BKSH", p.astype(do.dtype), do_i)
            dk = dk + einsum_f32("BKGTS,BKGTH->BKSH", ds, q[i])
            dq_i = einsum_f32("BKGTS,BKSH->BKGTH", ds, k_j)
            return dq.at[i].add(dq_i), dk, dv

        empty = (vary_like(jnp.zeros(x.shape, jnp.float32), q) for x in (k_j, v_j))
        return _loop(_query_blocks(options, j, q_offset), len(q), step, (dq, *empty))

    dq = vary_like(jnp.zeros(q.shape, jnp.float32), q)
    if len(k) == 1:
        dq, dk, dv = one_k_block(dq, 0, k[0], v[0])
        dk, dv = dk[None], dv[None]
    else:

        def body(dq, block):
            dq, dk, dv = one_k_block(dq, *block)
            return dq, (dk, dv)

        dq, (dk, dv) = jax.lax.scan(body, dq, (jnp.arange(len(k)), k, v))
    dsinks = None
    if sinks is not None:
        p_sink = jnp.exp(jnp.where(blind, -jnp.inf, sinks[None] - lse))
        dsinks = -jnp.sum(p_sink * delta, axis=(0, 1, 4))[None, ..., None]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None, dsinks


_attend.defvjp(_attend_fwd, attend_backward)


def _scores(options, q_i, k_j, i, j, q_segments, k_segments, q_offset):
    """Masked float32 scores of query block i against key block j, and the slope of the soft cap at each."""
    s = einsum_f32("BKGTH,BKSH->BKGTS", q_i, k_j) * options.scale
    slope = jnp.ones_like(s)
    if options.soft_cap is not None:
        bent = jnp.tanh(s / options.soft_cap)
        s, slope = options.soft_cap * bent, 1.0 - bent * bent
    rows = jnp.arange(options.q_block)[:, None] + i * options.q_block
    keys = jnp.arange(options.k_block)[None, :] + j * options.k_block
    visible = options.mask.visible(rows + q_offset, keys) & (keys < options.num_keys) & (rows < options.num_queries)
    visible = visible[None]
    if q_segments is not None:
        t, s_ids = q_segments[i][:, :, None], k_segments[j][:, None, :]
        visible = visible & (t == s_ids) & (t > 0)
    return jnp.where(visible[:, None, None], s, -jnp.inf), slope


def _key_blocks(options, i, q_offset):
    first = q_offset + i * options.q_block
    low, high = options.mask.key_range(first, first + options.q_block - 1, options.num_keys)
    return low // options.k_block, -(-high // options.k_block)


def _query_blocks(options, j, q_offset):
    first = j * options.k_block
    low, high = options.mask.query_range(first, first + options.k_block - 1, q_offset, options.num_queries)
    return low // options.q_block, -(-high // options.q_block)


def _loop(block_range, count, step, carry):
    """`step` over the blocks of the range; without a loop where `count`, all that there are, is one."""
    low, high = block_range
    return step(0, carry) if count == 1 else jax.lax.fori_loop(low, high, step, carry)


def _map(f, blocks):
    """f(i, blocks[i]) stacked; without a loop where there is one block."""
    if len(blocks) == 1:
        return jax.tree.map(lambda x: x[None], f(0, blocks[0]))
    return jax.lax.map(lambda block: f(*block), (jnp.arange(len(blocks)), blocks))


def cudnn_can_run(q, k, v, q_segment_ids, q_offset, mask, soft_cap, sinks=None, return_lse=False) -> str:
    """Why cuDNN's fused attention can't take these arguments; empty where it can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype} (it wants bfloat16 or float16)"
    if q.shape[-1] > 128 or q.shape[-1] % 8 or v.shape[-1] != q.shape[-1]:
        return f"head dims {q.shape[-1]} and {v.shape[-1]} (it wants one, a multiple of 8, up to 128)"
    if q_segment_ids is not None:
        return "segment ids"
    if soft_cap is not None:
        return "a logit soft cap"
    if sinks is not None:
        return "sinks"
    if return_lse:
        return "return_lse"
    if not isinstance(q_offset, (int, np.integer)) or q_offset != 0:
        return "a query offset"
    if q.shape[1] != k.shape[1]:
        return f"{q.shape[1]} queries with {k.shape[1]} keys"
    if mask.right != 0 and mask != Mask(None, None):
        return "a window without a causal mask"
    return ""


def cudnn_attention(q_BTNH, k_BSKH, v_BSKH, *, mask, scale):
    """o_BTNH of cuDNN's fused attention through jax.nn."""
    window = None if mask.left is None else (mask.left, 0)
    return jax.nn.dot_product_attention(
        *(q_BTNH, k_BSKH, v_BSKH),
        scale=scale,
        is_causal=mask.right == 0,
        local_window_size=window,
        implementation="cudnn",
    )
