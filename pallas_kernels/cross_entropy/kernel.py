"""Linear cross entropy on TPU: the forward and the backward kernel.

Logits stand vocabulary down, tokens across: `s_VT = w x^T`, with the whole of D in one product. The running maximum,
the sum and the label's logit are then rows that broadcast over sublanes for free. A block of tokens stays in VMEM while
the head goes by, and each product of logits is issued before the vector unit takes the one before it.

The backward pass keeps a block of the head, and its gradient in float32, in VMEM while all tokens go by: it makes their
logits again, then both gradients from them, four products a step with the forward's. So the head is read once and its
gradient written once. That of the tokens is summed in float32 in HBM, a block being read and written back for each
block of the head: 8 D bytes a token and block of V rows, against 6 V D multiply-adds. So at 2 bytes an operand a block
of 1,024 rows moves 10 bytes for 6,144 multiply-adds, half of what v6e's HBM can.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cross_entropy.blocks import BlockSizes

CAST_ROWS = 32  # at a time: as many as registers hold; all of a task's at once would be spilled to VMEM
LOWEST = -1e30  # a maximum of nothing; finite, so that -inf minus it is -inf


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a kernel is built for. `rows`: of the head, on this device; `padded_rows`: of its copy that is read."""

    sizes: BlockSizes
    rows: int
    padded_rows: int
    token_blocks: int
    soft_cap: float | None
    with_total: bool
    with_argmax: bool
    casts: bool  # the head has another dtype than x

    def forward_refs(self, refs) -> "_Forward":
        """The refs by name, None for those that are not there."""
        there = {"total": self.with_total, "sum_logits": self.with_total, "w_cast": self.casts}
        there |= {name: self.with_argmax for name in ("highest", "argmax", "top", "best")}
        given = iter(refs)
        return _Forward(*(next(given) if there.get(name, True) else None for name in _Forward._fields))


class _Forward(NamedTuple):
    """Refs of the forward kernel: inputs, outputs, scratch."""

    labels: Any
    x: Any
    w: Any
    lse: Any
    at_label: Any
    total: Any  # None where it was not asked for, as the next two
    highest: Any
    argmax: Any
    w_cast: Any  # None where w has x's dtype
    waiting: Any  # the logits of the task before
    sum: Any
    m: Any
    at: Any
    sum_logits: Any
    top: Any  # the highest logit before the cap, under which several may become one
    best: Any  # and its id


class _Backward(NamedTuple):
    """Refs of the backward kernel: inputs, outputs, scratch."""

    labels: Any
    statistics: Any  # [4, T]: lse, and the cotangents of lse, at_label and total
    x: Any
    w_hbm: Any
    dx_hbm: Any
    dw_hbm: Any
    w: Any
    w_stage: Any
    dw: Any
    ds: Any
    ds_TV: Any
    dx: Any
    w_sem: Any
    dw_sem: Any
    read_sem: Any
    write_sem: Any


def _product(a, b, a_dim: int, b_dim: int):
    """Contracts dim `a_dim` of a with `b_dim` of b, in float32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _loop(count: int, body) -> None:
    def step(n, carry):
        body(n)
        return carry

    jax.lax.fori_loop(jnp.int32(0), jnp.int32(count), step, jnp.int32(0))


def forward_kernel(spec: Spec, *refs):
    """A block of tokens against a block of the head. grid = (T // tokens, V // vocab)."""
    refs, cut = spec.forward_refs(refs), spec.sizes.forward
    j = pl.program_id(1)
    tiles = [pl.ds(first, cut.tile) for first in range(0, cut.tokens, cut.tile)]

    @pl.when(j == 0)
    def _():
        refs.waiting[...] = jnp.full_like(refs.waiting, -jnp.inf)
        for ref in (refs.m, refs.top):
            if ref is not None:
                ref[...] = jnp.full_like(ref, LOWEST)
        for ref in (refs.sum, refs.at, refs.sum_logits, refs.best):
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)

    def group(k):
        rows = pl.ds(pl.multiple_of(k * cut.rows, cut.rows), cut.rows)
        first = j * cut.vocab + k * cut.rows
        w_ref = refs.w.at[rows, :]
        if refs.w_cast is not None:
            refs.w_cast[...] = w_ref[...].astype(refs.w_cast.dtype)
            w_ref = refs.w_cast
        s_VT, tile, at = refs.waiting[...], tiles[-1], first - cut.rows
        for next_tile in tiles:
            next_VT = _product(w_ref[...], refs.x[next_tile, :], 1, 1)
            _absorb(spec, refs, s_VT, tile, at)
            s_VT, tile, at = next_VT, next_tile, first
        refs.waiting[...] = s_VT

    _loop(cut.vocab // cut.rows, group)

    @pl.when(j == pl.num_programs(1) - 1)
    def _():
        _absorb(spec, refs, refs.waiting[...], tiles[-1], (j + 1) * cut.vocab - cut.rows)
        refs.lse[...] = refs.m[...] + jnp.log(refs.sum[...])
        refs.at_label[...] = refs.at[...]
        if spec.with_total:
            refs.total[...] = refs.sum_logits[...]
        if spec.with_argmax:
            refs.highest[...] = refs.top[...]
            refs.argmax[...] = refs.best[...]


def _absorb(spec: Spec, refs: _Forward, s_VT, tile, first):
    """Takes the logits of the rows from `first` on into the statistics of a tile of tokens."""
    row_VT = jax.lax.broadcasted_iota(jnp.int32, s_VT.shape, 0)
    exists_VT = row_VT < spec.rows - first
    if spec.with_argmax:
        top, raw_VT = refs.top[:, tile], jnp.where(exists_VT, s_VT, -jnp.inf)
        here = jnp.max(raw_VT, axis=0, keepdims=True)
        lowest_id = jnp.min(jnp.where(raw_VT == here, row_VT, jnp.int32(2**30)), axis=0, keepdims=True) + first
        refs.best[:, tile] = jnp.where(here > top, lowest_id, refs.best[:, tile])
        refs.top[:, tile] = jnp.maximum(top, here)
    if spec.soft_cap is not None:
        s_VT = jnp.float32(spec.soft_cap) * jnp.tanh(s_VT * jnp.float32(1 / spec.soft_cap))
    if spec.with_total or spec.soft_cap is not None:
        # The first task finds -inf waiting, as of rows before the first, which neither a sum nor a cap keeps out.
        exists_VT = exists_VT & (row_VT >= -first)
    if spec.with_total:
        refs.sum_logits[:, tile] += jnp.sum(jnp.where(exists_VT, s_VT, 0.0), axis=0, keepdims=True)
    s_VT = jnp.where(exists_VT, s_VT, -jnp.inf)
    before = refs.m[:, tile]
    highest = jnp.maximum(before, jnp.max(s_VT, axis=0, keepdims=True))
    refs.m[:, tile] = highest
    new = jnp.sum(jnp.exp(s_VT - highest), axis=0, keepdims=True)
    refs.sum[:, tile] = refs.sum[:, tile] * jnp.exp(before - highest) + new
    is_label_VT = row_VT == refs.labels[:, tile] - first
    refs.at[:, tile] += jnp.sum(jnp.where(is_label_VT, s_VT, 0.0), axis=0, keepdims=True)


def backward_kernel(spec: Spec, *refs):
    """A block of tokens against a block of the head. grid = (cores, V // vocab // cores, T // tokens)."""
    refs, cut = _Backward(*refs), spec.sizes.backward
    core, j, i = (pl.program_id(axis) for axis in range(3))
    subs = cut.vocab // cut.rows
    first_sub = (core * pl.num_programs(1) + j) * subs  # of this block, in the whole head
    is_last_block = j == pl.num_programs(1) - 1
    is_last = i == pl.num_programs(2) - 1

    def fetch(sub, slot: int, start: bool):
        def copy(size: int):
            rows = pl.ds(sub * cut.rows, size)
            target = refs.w_stage.at[slot, pl.ds(0, size), :]
            _run(pltpu.make_async_copy(refs.w_hbm.at[rows, :], target, refs.w_sem.at[slot]), start)

        _if_there(spec, sub, copy)

    def save(sub, at, start: bool):
        def copy(size: int):
            source = refs.dw.at[pl.ds(at * cut.rows, size), :]
            target = refs.dw_hbm.at[pl.ds(sub * cut.rows, size), :]
            _run(pltpu.make_async_copy(source, target, refs.dw_sem.at[at]), start)

        _if_there(spec, sub, copy)

    @pl.when((j == 0) & (i == 0))
    def _():
        for slot in range(cut.ahead):
            fetch(first_sub + slot, slot, start=True)

    def group(g):
        at = [g * cut.ahead + slot for slot in range(cut.ahead)]
        rows = [pl.ds(pl.multiple_of(k * cut.rows, cut.rows), cut.rows) for k in at]

        @pl.when(i == 0)
        def _():
            for slot, k in enumerate(at):
                fetch(first_sub + k, slot, start=False)
                _cast(refs, slot, k * cut.rows, cut.rows, spec.rows - (first_sub + k) * cut.rows)

                @pl.when((k + cut.ahead < subs) | jnp.logical_not(is_last_block))
                def _(k=k, slot=slot):
                    fetch(first_sub + k + cut.ahead, slot, start=True)

                @pl.when(j > 0)
                def _(k=k):
                    save(first_sub + k - subs, k, start=False)

        logits = [_product(refs.w[r, :], refs.x[...], 1, 1) for r in rows]
        for slot, (k, s_VT) in enumerate(zip(at, logits, strict=True)):
            ds_VT = _dlogits(spec, refs, s_VT, (first_sub + k) * cut.rows).astype(refs.x.dtype)
            refs.ds[slot] = ds_VT
            refs.ds_TV[:, rows[slot]] = ds_VT.T
        for slot in range(cut.ahead):
            before = jnp.where(i == 0, 0.0, refs.dw[rows[slot], :])
            refs.dw[rows[slot], :] = before + _product(refs.ds[slot], refs.x[...], 1, 0)

        @pl.when(is_last)
        def _():
            for k in at:
                save(first_sub + k, k, start=True)

    _loop(subs // cut.ahead, group)
    _add_dx(spec, refs, core, j, i)

    @pl.when(is_last & is_last_block)
    def _():
        def wait(k):
            save(first_sub + k, k, start=False)

        _loop(subs, wait)


def _cast(refs: _Backward, slot: int, first, rows: int, left) -> None:
    """Rows of the head from where they came in to where the products read them; zeros past the `left` that exist."""

    def piece(n):
        at = pl.multiple_of(n * CAST_ROWS, CAST_ROWS)
        exists_V1 = jax.lax.broadcasted_iota(jnp.int32, (CAST_ROWS, 1), 0) < left - at
        w_VD = jnp.where(exists_V1, refs.w_stage[slot, pl.ds(at, CAST_ROWS), :], 0)
        target = pl.ds(pl.multiple_of(first + at, CAST_ROWS), CAST_ROWS)
        refs.w[target, :] = w_VD.astype(refs.w.dtype)

    _loop(rows // CAST_ROWS, piece)


def _run(copy, start: bool) -> None:
    if start:
        copy.start()
    else:
        copy.wait()


def _if_there(spec: Spec, sub, copy) -> None:
    """copy(rows) for a whole task of the head, or for the rows that are left; nothing past its end."""
    step = spec.sizes.backward.rows
    whole, left = divmod(spec.padded_rows, step)

    @pl.when(sub < whole)
    def _():
        copy(step)

    if left:

        @pl.when(sub == whole)
        def _():
            copy(left)


def _dlogits(spec: Spec, refs: _Backward, s_VT, first):
    """The cotangents of the logits before the soft cap. Rows past the head's end meet zeros of w, if finite."""
    lse, dlse, dlabel, dtotal = (refs.statistics[row : row + 1, :] for row in range(4))
    bent_VT = None
    if spec.soft_cap is not None:
        bent_VT = jnp.tanh(s_VT * jnp.float32(1 / spec.soft_cap))
        s_VT = jnp.float32(spec.soft_cap) * bent_VT
    p_VT = jnp.exp(jnp.minimum(s_VT - lse, 0.0))
    is_label_VT = jax.lax.broadcasted_iota(jnp.int32, s_VT.shape, 0) == refs.labels[...] - first
    ds_VT = p_VT * dlse + jnp.where(is_label_VT, dlabel, 0.0)
    if spec.with_total:
        ds_VT = ds_VT + dtotal
    return ds_VT if bent_VT is None else ds_VT * (1.0 - bent_VT * bent_VT)


def _add_dx(spec: Spec, refs: _Backward, core, j, i) -> None:
    """Adds this block of the head's part to dx, which waits in HBM between blocks; alone, it stays in VMEM."""
    cut = spec.sizes.backward
    steps, blocks = pl.num_programs(2), pl.num_programs(1)
    n = j * steps + i
    alone = spec.token_blocks == 1
    slot = 0 if alone else n & 1
    last = n == steps * blocks - 1

    def copy(i, slot, write: bool):
        hbm = refs.dx_hbm.at[core, pl.ds(i * cut.tokens, cut.tokens), :]
        if write:
            return pltpu.make_async_copy(refs.dx.at[slot], hbm, refs.write_sem.at[slot])
        return pltpu.make_async_copy(hbm, refs.dx.at[slot], refs.read_sem.at[slot])

    if not alone:

        @pl.when(n > 0)
        def _():
            copy(jnp.where(i == 0, steps - 1, i - 1), 1 - slot, write=True).wait()

        @pl.when((n + 1 >= steps) & jnp.logical_not(last))
        def _():
            copy(jnp.where(i == steps - 1, 0, i + 1), 1 - slot, write=False).start()

        @pl.when(j > 0)
        def _():
            copy(i, slot, write=False).wait()

    def columns(c):
        some = pl.ds(pl.multiple_of(c * cut.columns, cut.columns), cut.columns)
        before = jnp.where(j == 0, 0.0, refs.dx[slot, :, some])
        refs.dx[slot, :, some] = before + _product(refs.ds_TV[...], refs.w[:, some], 1, 0)

    _loop(refs.x.shape[1] // cut.columns, columns)
    if not alone:
        copy(i, slot, write=True).start()

    @pl.when(last)
    def _():
        if alone:
            copy(i, slot, write=True).start()
        copy(i, slot, write=True).wait()
