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
    segmented: bool


def attention_xla(q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset, *, mask, scale, soft_cap):
    """Same contract as `attention_reference`."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    segmented = q_segment_ids_BT is not None
    options = _Options(mask, scale, soft_cap, T, S, min(BLOCK, T), min(BLOCK, S), segmented)
    q = _blocks(q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4), options.q_block, 3)
    k = _blocks(k_BSKH.transpose(0, 2, 1, 3), options.k_block, 2)
    v = _blocks(v_BSKH.transpose(0, 2, 1, 3), options.k_block, 2)
    if segmented:
        q_segments = _blocks(q_segment_ids_BT, options.q_block, 1)
        k_segments = _blocks(kv_segment_ids_BS, options.k_block, 1)
    else:
        q_segments = k_segments = vary_like(jnp.zeros((), jnp.int32), q_BTNH)
    o = _attend(options, q, k, v, q_segments, k_segments, vary_like(q_offset, q_BTNH))
    o_BKGTH = jnp.moveaxis(o, 0, 3).reshape(B, K, N // K, -1, v_BSKH.shape[-1])[:, :, :, :T]
    return o_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1)


def _blocks(x, size, axis):
    """Cuts `axis` into blocks of `size` rows, the last padded with zeros, and moves the block dim to the front."""
    count = -(-x.shape[axis] // size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, count * size - x.shape[axis])
    x = jnp.pad(x, padding) if padding[axis][1] else x
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, q, k, v, q_segments, k_segments, q_offset):
    return _attend_fwd(options, q, k, v, q_segments, k_segments, q_offset)[0]


def _attend_fwd(options, q, k, v, q_segments, k_segments, q_offset):
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

        rows = q_i.shape[:-1]
        empty = (jnp.full((*rows, 1), -jnp.inf), jnp.zeros((*rows, 1)), jnp.zeros((*rows, v.shape[-1])))
        m, total, acc = _loop(_key_blocks(options, i, q_offset), len(k), step, tuple(vary_like(x, q) for x in empty))
        lse = jnp.where(total > 0, m + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
        return (acc / jnp.where(total > 0, total, 1.0)).astype(q.dtype), lse

    o, lse = _map(one_q_block, q)
    return o, (q, k, v, q_segments, k_segments, q_offset, o, lse)


def _attend_bwd(options, residuals, do):
    q, k, v, q_segments, k_segments, q_offset, o, lse = residuals
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1, keepdims=True)
    lse_safe = jnp.where(jnp.isfinite(lse), lse, 0.0)

    def one_k_block(dq, j, k_j, v_j):
        def step(i, carry):
            dq, dk, dv = carry
            s, slope = _scores(options, q[i], k_j, i, j, q_segments, k_segments, q_offset)
            p = jnp.exp(s - lse_safe[i])
            dp = einsum_f32("BKGTH,BKSH->BKGTS", do[i], v_j)
            ds = (p * (dp - delta[i]) * slope * options.scale).astype(q.dtype)
            dv = dv + einsum_f32("BKGTS,BKGTH->BKSH", p.astype(do.dtype), do[i])
            dk = dk + einsum_f32("BKGTS,BKGTH->BKSH", ds, q[i])
            dq_i = einsum_f32("BKGTS,BKSH->BKGTH", ds, k_j)
            return dq.at[i].add(dq_i), dk, dv

        empty = vary_like(jnp.zeros(k_j.shape), q), vary_like(jnp.zeros(v_j.shape), q)
        return _loop(_query_blocks(options, j, q_offset), len(q), step, (dq, *empty))

    dq = vary_like(jnp.zeros(q.shape), q)
    if len(k) == 1:
        dq, dk, dv = one_k_block(dq, 0, k[0], v[0])
        dk, dv = dk[None], dv[None]
    else:

        def body(dq, block):
            dq, dk, dv = one_k_block(dq, *block)
            return dq, (dk, dv)

        dq, (dk, dv) = jax.lax.scan(body, dq, (jnp.arange(len(k)), k, v))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


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
    if options.segmented:
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


def cudnn_can_run(q, k, v, q_segment_ids, q_offset, mask, soft_cap) -> str:
    """Why cuDNN's fused attention can't take these arguments; empty where it can."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype} (it wants bfloat16 or float16)"
    if q.shape[-1] > 128 or q.shape[-1] % 8 or v.shape[-1] != q.shape[-1]:
        return f"head dims {q.shape[-1]} and {v.shape[-1]} (it wants one, a multiple of 8, up to 128)"
    if q_segment_ids is not None:
        return "segment ids"
    if soft_cap is not None:
        return "a logit soft cap"
    if not isinstance(q_offset, (int, np.integer)) or q_offset != 0:
        return "a query offset"
    if q.shape[1] != k.shape[1]:
        return f"{q.shape[1]} queries with {k.shape[1]} keys"
    if mask.window is not None and not mask.causal:
        return "a window without a causal mask"
    return ""


def cudnn_attention(q_BTNH, k_BSKH, v_BSKH, *, mask, scale):
    """cuDNN's fused attention through jax.nn."""
    window = None if mask.window is None else (mask.window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BSKH, v_BSKH, scale=scale, is_causal=mask.causal, local_window_size=window, implementation="cudnn"
    )
