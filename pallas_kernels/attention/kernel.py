"""Flash attention on TPU: the forward and the backward kernel.

Scores stand keys down, queries across: `s_KQ = k q^T`. The running maximum, the sum and the lse are then rows that
broadcast over sublanes for free, sums over keys are plain vector adds, and accumulators are `[H, queries]`. A pair of
blocks is unrolled into tasks (tiles of queries by chunks of keys); each task's scores are issued some tasks early, so
that the matrix unit works while the vector unit takes the softmax of earlier ones. Exponentials are of base 2, with
log2(e) and the scale folded into q.

The keys of a head, or as many as fit, stay in VMEM while its blocks of queries go by; a loop inside the kernel visits
the key blocks that the mask leaves (visits.py). The backward pass keeps dk and dv of the resident keys in VMEM in
float32 and finishes dq of a block of queries in one visit: five products, nothing partial in HBM.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention.blocks import BlockSizes, Cut
from pallas_kernels.attention.rotary import turn
from pallas_kernels.attention.visits import View, Visits
from pallas_kernels.runtime import divide

LOG2_E = 1.4426950408889634
NOTHING = -1e30  # the maximum of a row that has seen nothing; finite, so that -inf minus it is -inf
BLIND = 1e30  # in place of the lse of a row that saw nothing: its probabilities come out as 0


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a kernel is built for. `bend`: the scores, tanh(q k^T) times this is the exponent; None: no soft cap."""

    visits: Visits
    sizes: BlockSizes
    bend: float | None
    dq_scale: float
    dk_scale: float
    q_scale: float
    has_sinks: bool
    rotary: bool
    interpreted: bool


class _Forward(NamedTuple):
    """Refs of the forward kernel: inputs, outputs, scratch. `t` after a name: head dim first."""

    qt: Any
    kt: Any
    vt: Any
    ot: Any
    lse: Any
    q: Any  # [H, q], scaled
    k: Any
    m: Any
    total: Any
    acc: Any  # [H, q]
    fresh: Any  # whether a tile of `acc` is still to be started


class _Backward(NamedTuple):
    """Refs of the backward kernel: inputs, outputs, scratch."""

    qt: Any
    ot: Any
    dot: Any
    lse: Any
    dlse: Any
    kt: Any
    vt: Any
    dqt: Any
    dkt: Any
    dvt: Any
    q: Any  # [H, q], scaled
    k: Any
    v: Any
    do: Any  # [H, q], 0 where a row saw nothing, whatever its cotangents
    exponent: Any  # [1, q], lse of base 2
    delta: Any  # [1, q]
    dq_acc: Any  # [H, q]
    dk_acc: Any  # [H, resident]
    dv_acc: Any
    turned_kt: Any = None  # [H, resident], where there are rotary positions


def forward_kernel(spec: Spec, offset_ref, *refs):
    """One block of queries of one head against the resident keys. grid = (B, K, N // K, T // q, parts of S)."""
    segments, refs = _take_segments(spec, refs)
    angles, refs = _take_angles(spec, refs)
    sinks_ref, refs = (refs[0], _Forward(*refs[1:])) if spec.has_sinks else (None, _Forward(*refs))
    g, i, part = (pl.program_id(axis) for axis in (2, 3, 4))
    n = pl.program_id(1) * pl.num_programs(2) + g

    @pl.when((g == 0) & (i == 0) | (pl.num_programs(4) > 1))
    def _():
        _each_block(spec, lambda keys: _set_keys(refs.kt, refs.k, keys, angles))

    @pl.when(part == 0)
    def _():
        _set_queries(spec, refs, angles)
        refs.m[...] = jnp.full_like(refs.m, NOTHING)
        refs.total[...] = jnp.zeros_like(refs.total)
        for tile in range(spec.sizes.q // spec.sizes.forward.queries):
            refs.fresh[tile] = 1

    low, high, first = _resident(spec, i, part, offset_ref[0], from_low=True)

    def body(j, view):
        _forward_block(spec, view, j - first, refs, segments)

    spec.visits.run(i, offset_ref[0], low, high, _meeting(segments, i), body)

    @pl.when(part == pl.num_programs(4) - 1)
    def _():
        m, total = refs.m[...], refs.total[...]
        seen = total > 0
        highest, shrink = m, jnp.float32(1)
        if sinks_ref is not None:
            sink = sinks_ref[n] * jnp.float32(LOG2_E)
            highest = jnp.maximum(m, sink)
            shrink = jnp.exp2(m - highest)
            total = total * shrink + jnp.exp2(sink - highest)
        total = jnp.where(seen, total, 1.0)
        refs.lse[...] = jnp.where(seen, (highest + jnp.log2(total)) * jnp.float32(1 / LOG2_E), -jnp.inf)
        refs.ot[...] = jnp.where(seen, refs.acc[...] * (shrink / total), 0.0).astype(refs.ot.dtype)


def backward_kernel(spec: Spec, scalars_ref, *refs):
    """One block of queries of one head against the resident keys; dk, dv summed over the heads that share them.

    grid = (B, K, N // K, T // q)
    """
    segments, refs = _take_segments(spec, refs)
    angles, refs = _take_angles(spec, refs)
    refs = _Backward(*refs)
    g, i = pl.program_id(2), pl.program_id(3)

    @pl.when((g == 0) & (i == 0))
    def _():
        def begin(keys):
            if angles is not None:
                _write(refs.turned_kt, keys, refs.kt[:, keys].astype(jnp.float32), angles.keys)
            _set_keys(refs.kt, refs.k, keys, angles)
            _set_keys(refs.vt, refs.v, keys)
            for acc in (refs.dk_acc, refs.dv_acc):
                acc[:, keys] = jnp.zeros((acc.shape[0], spec.sizes.k), jnp.float32)

        _each_block(spec, begin)

    _set_queries(spec, refs, angles)
    _begin_rows(refs)
    low, high, first = _resident(spec, i, scalars_ref[1], scalars_ref[0], from_low=False)

    def body(j, view):
        _backward_block(spec, view, j - first, refs, segments)

    spec.visits.run(i, scalars_ref[0], low, high, _meeting(segments, i), body)
    _write(refs.dqt, slice(None), refs.dq_acc[...] * spec.dq_scale, angles and angles.queries, back=True)

    @pl.when((g == pl.num_programs(2) - 1) & (i == pl.num_programs(3) - 1))
    def _():
        def finish(keys):
            _write(refs.dkt, keys, refs.dk_acc[:, keys] * spec.dk_scale, angles and angles.keys, back=True)
            refs.dvt[:, keys] = refs.dv_acc[:, keys].astype(refs.dvt.dtype)

        _each_block(spec, finish)


def _begin_rows(refs: _Backward):
    """What the tasks need of a block of queries: a row that saw nothing passes nothing."""
    blind = refs.lse[...] == -jnp.inf
    do_HQ = jnp.where(blind, 0.0, refs.dot[...].astype(jnp.float32))
    delta = jnp.sum(refs.ot[...].astype(jnp.float32) * do_HQ, axis=0, keepdims=True) - refs.dlse[...]
    refs.do[...] = do_HQ.astype(refs.do.dtype)
    refs.delta[...] = jnp.where(blind, 0.0, delta)
    refs.exponent[...] = jnp.where(blind, BLIND, refs.lse[...] * jnp.float32(LOG2_E))
    refs.dq_acc[...] = jnp.zeros_like(refs.dq_acc)


def _each_block(spec: Spec, run):
    """`run` of the slice of each block of the resident keys."""

    def step(j, carry):
        run(pl.ds(pl.multiple_of(j * spec.sizes.k, spec.sizes.k), spec.sizes.k))
        return carry

    jax.lax.fori_loop(jnp.int32(0), jnp.int32(spec.sizes.resident // spec.sizes.k), step, jnp.int32(0))


def _set_queries(spec: Spec, refs: _Forward | _Backward, angles):
    """`refs.q` from the block of queries."""
    q_HQ = refs.qt[...].astype(jnp.float32) * jnp.float32(spec.q_scale)
    _write(refs.q, slice(None), q_HQ, angles and angles.queries)


def _set_keys(source_ref, target_ref, keys, angles=None):
    """[H, keys] into [keys, H]."""
    x_HK = source_ref[:, keys].astype(jnp.float32)
    target_ref[keys, :] = _turned(x_HK, angles and angles.keys, keys).T.astype(target_ref.dtype)


def _write(target_ref, columns, x_HT, angles, back: bool = False):
    """Writes `x_HT`, turned by the angles of its columns, or turned back, if there are any."""
    target_ref[:, columns] = _turned(x_HT, angles, columns, back).astype(target_ref.dtype)


def _turned(x_HT, angles, columns, back: bool = False):
    if angles is None:
        return x_HT
    cos, sin = (ref[:, columns] for ref in angles)
    half = x_HT.shape[0] // 2
    return jnp.concatenate(turn(x_HT[:half], x_HT[half:], cos, -sin if back else sin))


def _resident(spec: Spec, i, part, offset, from_low: bool):
    """(low, high, first): the key blocks of a part that block i of the queries meets, and the part's first block.

    `from_low` counts parts from the first that the queries meet, so that a window takes few.
    """
    low, high = spec.visits.key_blocks(i, offset)
    blocks = spec.sizes.resident // spec.sizes.k
    first = (part + divide(low, blocks) if from_low else part) * blocks
    return jnp.maximum(low, first), jnp.minimum(high, first + blocks), first


@dataclasses.dataclass(frozen=True)
class _Segments:
    """Ids of the queries and the keys, [1, rows], and least, greatest and only id of each block, [3, blocks]."""

    q_ref: object
    k_ref: object
    q_blocks_ref: object
    k_blocks_ref: object


class _Angles(NamedTuple):
    """(cos, sin) of rotary positions, each [H / 2, rows]."""

    queries: Any
    keys: Any


def _take_angles(spec, refs):
    return (_Angles(refs[:2], refs[2:4]), refs[4:]) if spec.rotary else (None, refs)


def _take_segments(spec, refs):
    return (_Segments(*refs[:4]), refs[4:]) if spec.visits.segmented else (None, refs)


def _meeting(segments, i):
    """A function of the key block: whether segments of both blocks may meet, and whether both hold one and the same."""

    def of(j):
        q, k = segments.q_blocks_ref, segments.k_blocks_ref
        meet = (q[0, i] <= k[1, j]) & (k[0, j] <= q[1, i])
        return meet, q[2, i] == k[2, j]

    return of


class _Tasks:
    """The tasks of a pair of blocks that may see anything, and slices of the refs that each works on."""

    def __init__(self, spec: Spec, cut: Cut, view: View, block):
        self.cut, self.view = cut, view
        self.first_key = pl.multiple_of(block * spec.sizes.k, spec.sizes.k)
        self.todo = [
            (query, key)
            for key in range(0, spec.sizes.k, cut.keys)
            for query in range(0, spec.sizes.q, cut.queries)
            if view.sees(query, cut.queries, key, cut.keys)
        ]

    def queries(self, task):
        return pl.ds(task[0], self.cut.queries)

    def keys(self, task):
        return pl.ds(self.first_key + task[1], self.cut.keys)

    def mask(self, s_KQ, task, segments):
        q_segments = k_segments = None
        if self.view.segmented:
            q_segments = segments.q_ref[:, self.queries(task)]
            k_segments = jnp.broadcast_to(segments.k_ref[:, self.keys(task)], s_KQ.shape[::-1]).T
        query, key = task
        return self.view.apply(s_KQ, query, key, q_segments, k_segments)

    def pipelined(self, early):
        """(task, early(task)) for each task, `early` called some tasks ahead."""
        waiting: list[Any] = []
        for at, task in enumerate(self.todo):
            waiting += [early(later) for later in self.todo[at + len(waiting) : at + self.cut.ahead + 1]]
            yield task, waiting.pop(0)


def _product(spec: Spec, a, b, a_dim: int, b_dim: int):
    """Contracts dim `a_dim` of a with `b_dim` of b, in float32."""
    if spec.interpreted:  # XLA on CPU may fold a transpose into a product of bfloat16, which it then refuses to run
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _forward_block(spec, view, block, refs: _Forward, segments):
    tasks = _Tasks(spec, spec.sizes.forward, view, block)
    tiles = sorted({query for query, _ in tasks.todo})
    rows = {tile: pl.ds(tile, tasks.cut.queries) for tile in tiles}
    m = {tile: refs.m[:, rows[tile]] for tile in tiles}
    total = {tile: refs.total[:, rows[tile]] for tile in tiles}
    fresh = {}
    for tile in tiles:
        fresh[tile] = refs.fresh[tile // tasks.cut.queries] == 1
        refs.fresh[tile // tasks.cut.queries] = 0

    def scores(task):
        return _product(spec, refs.k[tasks.keys(task), :], refs.q[:, tasks.queries(task)], 1, 0)

    for task, s_KQ in tasks.pipelined(scores):
        tile = task[0]
        if spec.bend is not None:
            s_KQ = spec.bend * jnp.tanh(s_KQ)
        s_KQ = tasks.mask(s_KQ, task, segments)
        highest = jnp.maximum(m[tile], jnp.max(s_KQ, axis=0, keepdims=True))
        p_KQ, shrink = jnp.exp2(s_KQ - highest), jnp.exp2(m[tile] - highest)
        m[tile] = highest
        total[tile] = total[tile] * shrink + jnp.sum(p_KQ, axis=0, keepdims=True)
        before = refs.acc[:, rows[tile]]
        if tile in fresh:  # the accumulator still holds what another block left
            before = jnp.where(fresh.pop(tile), 0.0, before)
        pv_HQ = _product(spec, refs.vt[:, tasks.keys(task)], p_KQ.astype(refs.vt.dtype), 1, 0)
        refs.acc[:, rows[tile]] = before * shrink + pv_HQ
    for tile in tiles:
        refs.m[:, rows[tile]] = m[tile]
        refs.total[:, rows[tile]] = total[tile]


def _backward_block(spec, view, block, refs: _Backward, segments):
    kt_ref = refs.turned_kt if spec.rotary else refs.kt
    tasks = _Tasks(spec, spec.sizes.backward, view, block)

    def scores(task):
        queries, keys = tasks.queries(task), tasks.keys(task)
        s_KQ = _product(spec, refs.k[keys, :], refs.q[:, queries], 1, 0)
        return s_KQ, _product(spec, refs.v[keys, :], refs.do[:, queries], 1, 0)

    for task, (s_KQ, dp_KQ) in tasks.pipelined(scores):
        queries, keys = tasks.queries(task), tasks.keys(task)
        if spec.bend is not None:
            bent_KQ = jnp.tanh(s_KQ)
            s_KQ = spec.bend * bent_KQ
        s_KQ = tasks.mask(s_KQ, task, segments)
        p_KQ = jnp.exp2(s_KQ - refs.exponent[:, queries])
        ds_KQ = p_KQ * (dp_KQ - refs.delta[:, queries])
        if spec.bend is not None:
            ds_KQ = ds_KQ * (1.0 - bent_KQ * bent_KQ)
        p_KQ, ds_KQ = p_KQ.astype(refs.qt.dtype), ds_KQ.astype(refs.qt.dtype)
        refs.dv_acc[:, keys] += _product(spec, refs.do[:, queries], p_KQ, 1, 1)
        refs.dk_acc[:, keys] += _product(spec, refs.q[:, queries], ds_KQ, 1, 1)
        refs.dq_acc[:, queries] += _product(spec, kt_ref[:, keys], ds_KQ, 1, 0)
