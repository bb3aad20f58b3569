"""Ring attention (Liu et al., arXiv:2310.01889): keys and values travel round a mesh axis, causal, inside shard_map.

Device i holds chunks i and 2 C - 1 - i of the sequence (context.py), and at a stop `s` of the ring has the keys of
device j = i - s. Under a causal mask its later chunk then sees the earlier chunk of j; and one more pair, of the two
that are on one side, is left to see: the earlier chunks if j is before i, the later ones if it is behind. So every
device has the same two pairs of chunks to work on, and no device waits. Only a window leaves pairs out.

Outputs of the pairs are merged in float32 by their lse. The backward pass takes each pair's gradients from the whole
row's lse and output; gradients of keys and values are summed in float32 and travel after their keys. Each block is sent
on before it is worked on, so that the two overlap.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import flash_attention
from pallas_kernels.attention.blocks import BlockSizes
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.part import part_backward
from pallas_kernels.runtime import vary_alike, vary_like

IMPLEMENTATIONS = ("xla", "pallas", "interpret")
UNROLLED = 4  # stops; a longer way round is a loop
WHOLE = Mask(None, None)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """One call's static side; `chunk` tokens in each of the 2 C chunks."""

    axis: str
    devices: int
    chunk: int
    mask: Mask
    scale: float
    soft_cap: float | None
    sizes: BlockSizes | None
    implementation: str

    @property
    def stops(self) -> tuple[int, ...]:
        return shifts(self.devices, self.chunk, self.mask)

    def view(self, distance: int) -> tuple[Mask, int] | None:
        """What queries `distance` chunks behind the keys see: a mask and their offset; None where it is nothing."""
        nearest, farthest = ((distance * self.chunk) + sign * (self.chunk - 1) for sign in (-1, 1))
        if self.mask.left is not None and nearest > self.mask.left:
            return None
        if distance and (self.mask.left is None or farthest <= self.mask.left):
            return WHOLE, 0
        return self.mask, distance * self.chunk


def shifts(devices: int, chunk: int, mask: Mask) -> tuple[int, ...]:
    """How many devices back, round the ring, keys lie that some device needs; ascending, its own, 0, first."""
    on = lambda number: min(number, 2 * devices - 1 - number)  # noqa: E731
    back = 2 * devices if mask.left is None else -(-mask.left // chunk)
    pairs = ((q, k) for q in range(2 * devices) for k in range(max(0, q - back), q + 1))
    return tuple(sorted({(on(q) - on(k)) % devices for q, k in pairs}))


def ring_attention(
    q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, sinks_N, *, axis, mask, scale, soft_cap, sizes, implementation
):
    """o_BTNH and lse_BNT of this device's queries, as `context_attention` has them."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"context_attention: {implementation} has no ring; {', '.join(IMPLEMENTATIONS)} do")
    B, T, N = q_BTNH.shape[:3]
    chunk, devices = T // 2, jax.lax.axis_size(axis)
    ring = _Ring(axis, devices, chunk, mask, scale, soft_cap, sizes, implementation)
    sinks_N = None if sinks_N is None else sinks_N.astype(jnp.float32)
    q, k, v, ids = (
        None if x is None else jnp.moveaxis(x.reshape(B, 2, chunk, *x.shape[2:]), 1, 0)
        for x in (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
    )
    o, lse = _attend(ring, *vary_alike(q, k, v, ids, sinks_N))
    return jnp.moveaxis(o, 0, 1).reshape(B, T, N, -1), jnp.moveaxis(lse, 0, 2).reshape(B, N, T)


class _Pair(NamedTuple):
    """A chunk of queries and one of keys, by their place on their devices, and how many chunks lie between them.

    BOTH is each of the device's chunks with itself. `possible`: the distances that it may be on any device.
    """

    queries: Any
    keys: Any
    distance: Any
    possible: tuple[int, ...]


BOTH = None


def _pairs(ring: _Ring, stop, among: tuple[int, ...]) -> list[_Pair]:
    """What there is to see at `stop`, which is one of `among`."""
    C, i = ring.devices, jax.lax.axis_index(ring.axis)
    j = (i - stop) % C
    met = [(a, (a - s) % C) for a in range(C) for s in among]
    later = _Pair(1, 0, 2 * C - 1 - i - j, tuple(sorted({2 * C - 1 - a - b for a, b in met})))
    if among == (0,):
        return [_Pair(BOTH, BOTH, 0, (0,)), later]
    side = jnp.where(i > j, 0, 1)
    return [later, _Pair(side, side, jnp.abs(i - j), tuple(sorted({abs(a - b) for a, b in met})))]


def _take(tree, half):
    """Of arrays [2, B, ...]: one half, [B, ...], or BOTH as rows of a batch."""

    def of(x):
        if half is BOTH:
            return x.reshape(-1, *x.shape[2:])
        return jax.lax.dynamic_index_in_dim(x, half, keepdims=False)

    return jax.tree.map(of, tree)


def _put(tree, half, new):
    """The inverse of `_take`."""

    def of(x, y):
        return y.reshape(x.shape) if half is BOTH else jax.lax.dynamic_update_index_in_dim(x, y, half, 0)

    return jax.tree.map(of, tree, new)


def _visit(ring: _Ring, see: Callable, pair: _Pair, rows, keys, of_rows, of_keys):
    """`see(view, rows, keys, of_rows, of_keys)` of a pair: its results, of queries and of keys, updated."""
    views = {distance: ring.view(distance) for distance in pair.possible}
    kinds = list(dict.fromkeys(views.values()))
    state = _take(of_rows, pair.queries), _take(of_keys, pair.keys)
    operands = _take(rows, pair.queries), _take(keys, pair.keys), *state
    branches = [(lambda rows, keys, *state: state) if kind is None else functools.partial(see, *kind) for kind in kinds]
    if len(kinds) == 1:
        new = branches[0](*operands)
    else:
        table = np.array([kinds.index(views.get(d, kinds[0])) for d in range(2 * ring.devices)], np.int32)
        new = jax.lax.switch(jnp.asarray(table)[pair.distance], branches, *operands)
    return _put(of_rows, pair.queries, new[0]), _put(of_keys, pair.keys, new[1])


def _go_round(ring: _Ring, see: Callable, rows, keys, of_rows, of_keys):
    """(of_rows, of_keys) after `see` of all pairs; `keys` go round, `of_keys` a stop behind, as far as the last."""
    stops, C = ring.stops, ring.devices

    def at(stop, among, jump, next_jump, carry):
        keys, of_rows, of_keys = carry
        ahead, of_keys = _send(ring, keys, next_jump), _send(ring, of_keys, jump)
        for pair in _pairs(ring, stop, among):
            of_rows, of_keys = _visit(ring, see, pair, rows, keys, of_rows, of_keys)
        # Else XLA, to which a kernel is free, sends all blocks ahead of the first: none hidden, and all in memory.
        return jax.lax.optimization_barrier((ahead, of_rows, of_keys))

    jumps = (0, *(b - a for a, b in itertools.pairwise(stops)), 0)
    carry = keys, of_rows, of_keys
    if C > UNROLLED and stops == tuple(range(C)):
        carry = at(0, (0,), 0, 1, carry)
        between = stops[1:-1]
        carry, _ = jax.lax.scan(
            lambda carry, stop: (at(stop, between, 1, 1, carry), None), carry, jnp.array(between, jnp.int32)
        )
        carry = at(C - 1, (C - 1,), 1, 0, carry)
    else:
        for n, stop in enumerate(stops):
            carry = at(stop, (stop,), jumps[n], jumps[n + 1], carry)
    return carry[1], carry[2]


def _send(ring: _Ring, tree, jump: int):
    """To the device `jump` places on, round the ring."""
    C = ring.devices
    if jump % C == 0:
        return tree
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.axis, [(i, (i + jump) % C) for i in range(C)]), tree)


def _merge(o, lse, o_more, lse_more):
    """o and lse of two disjoint sets of keys as those of both; of none they are 0 and -inf."""
    highest = jnp.maximum(lse, lse_more)
    # What has seen nothing has -inf in all three; subtracted from itself that would be NaN.
    highest = jnp.where(highest == -jnp.inf, 0.0, highest)
    share, more = jnp.exp(lse - highest), jnp.exp(lse_more - highest)
    total = share + more
    inverse = 1.0 / jnp.where(total == 0, 1.0, total)
    o = o * _per_row(share * inverse) + o_more.astype(jnp.float32) * _per_row(more * inverse)
    return o, highest + jnp.log(total)


def _per_row(x_BNT):
    """[..., N, T] as [..., T, N, 1], to multiply outputs with."""
    return x_BNT.swapaxes(-1, -2)[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q, k, v, ids, sinks_N):
    return _attend_fwd(ring, q, k, v, ids, sinks_N)[0]


def _attend_fwd(ring: _Ring, q, k, v, ids, sinks_N):
    def see(mask, offset, rows, keys, seen, nothing):
        (q, q_ids), (k, v, k_ids) = rows, keys
        found = flash_attention(
            *(q, k, v),
            causal=False,
            window=(mask.left, mask.right),
            q_segment_ids_BT=q_ids,
            kv_segment_ids_BS=k_ids,
            q_offset=offset,
            scale=ring.scale,
            logit_soft_cap=ring.soft_cap,
            return_lse=True,
            block_sizes=ring.sizes,
            implementation=ring.implementation,
        )
        return _merge(*seen, *found), nothing

    o = vary_like(jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32), q)
    lse = vary_like(jnp.full((*q.shape[:2], q.shape[3], q.shape[2]), -jnp.inf, jnp.float32), q)
    (o, lse), _ = _go_round(ring, see, (q, ids), (k, v, ids), (o, lse), ())
    if sinks_N is not None:
        blind = lse == -jnp.inf
        with_sink = jnp.where(blind, lse, jnp.logaddexp(lse, sinks_N[None, None, :, None]))
        o = o * _per_row(jnp.where(blind, 0.0, jnp.exp(lse - with_sink)))
        lse = with_sink
    o = o.astype(q.dtype)
    return (o, lse), (q, k, v, ids, sinks_N, o, lse)


def _attend_bwd(ring: _Ring, residuals, cotangents):
    q, k, v, ids, sinks_N, o, lse = residuals
    do, dlse = cotangents

    def see(mask, offset, rows, keys, dq, dkv):
        (q, q_ids, *whole), (k, v, k_ids) = rows, keys
        found = part_backward(
            *(q, k, v, q_ids, k_ids, whole),
            mask=mask,
            offset=offset,
            scale=ring.scale,
            soft_cap=ring.soft_cap,
            sizes=ring.sizes,
            how=ring.implementation,
        )
        more_q, *more_kv = (x.astype(jnp.float32) for x in found)
        return dq + more_q, tuple(x + more for x, more in zip(dkv, more_kv, strict=True))

    dq, dk, dv = (vary_like(jnp.zeros(x.shape, jnp.float32), q) for x in (q, k, v))
    dq, dkv = _go_round(ring, see, (q, ids, o, lse, do, dlse), (k, v, ids), dq, (dk, dv))
    # Summed now, so the way home is of the operands' dtype.
    home = tuple(x.astype(like.dtype) for x, like in zip(dkv, (k, v), strict=True))
    dk, dv = _send(ring, home, ring.devices - ring.stops[-1])
    dsinks_N = None
    if sinks_N is not None:
        blind = lse == -jnp.inf
        rows = jnp.sum(o.astype(jnp.float32) * do, axis=-1).swapaxes(2, 3) - dlse
        p = jnp.exp(sinks_N[None, None, :, None] - jnp.where(blind, jnp.inf, lse))
        dsinks_N = -jnp.sum(jnp.where(blind, 0.0, p * rows), axis=(0, 1, 3))
    return dq.astype(q.dtype), dk, dv, None, dsinks_N


_attend.defvjp(_attend_fwd, _attend_bwd)
