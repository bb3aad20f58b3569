"""The kernels: products with an epilogue, and the two products of their gradient.

z_i = x w_i for one weight or two. With one, y = act(z + bias) + residual; gated, with two, y = act(z_0) z_1. Where a
gradient will be asked for, the forward kernel also writes the factors dy_i / dz_i: the slope of the activation, or
u act'(g) and act(g). The backward kernels then need one multiplication to form dz_i = dy factor_i of a block in VMEM,
so dz reaches no HBM, and the factors take the room that the products would take.

Contractions are as long as VMEM allows: what is added up in a scratch is read and written back each step. A tail of a
contraction is cleared in both operands, since a block reads whatever lies beyond its array; tails of other dims fall
off when a block is written.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.matmul.activations import ACTIVATIONS
from pallas_kernels.matmul.blocks import Block


@dataclasses.dataclass(frozen=True)
class Spec:
    """What one kernel is built for: dims of the arrays, its block, and what it reads and writes besides."""

    T: int
    F: int
    D: int
    block: Block
    tile: int  # how much of a block one unrolled body takes: of its T, and in the dw kernel of its D
    gated: bool
    activation: str | None = None
    bias: bool = False
    residual: bool = False
    writes_y: bool = True
    factors: bool = False
    forms_dz: bool = True  # False: the cotangent is dz as it is

    @property
    def products(self) -> int:
        return 2 if self.gated else 1

    def steps(self, dim: str) -> int:
        """Blocks along a dim."""
        return -(-getattr(self, dim) // getattr(self.block, dim))

    def has_tail(self, dim: str) -> bool:
        return getattr(self, dim) % getattr(self.block, dim) != 0


def forward_kernel(spec: Spec, *refs):
    """y and the factors of one block. grid = (T // t, F // f, D // d)."""
    d, steps, take = pl.program_id(2), spec.steps("D"), _taker(refs)
    (x_ref,), w_refs, bias_refs, residual_refs = take(1), take(spec.products), take(spec.bias), take(spec.residual)
    y_refs, factor_refs, acc_refs = take(spec.writes_y), take(spec.products * spec.factors), take(None)

    def finish(rows, z):
        for ref in bias_refs:
            z = [z[0] + ref[...]]
        y, slope = ACTIVATIONS[spec.activation](z[0])
        factors = (z[1] * slope, y) if spec.gated else (slope,)
        for ref, factor in zip(factor_refs, factors, strict=bool(factor_refs)):
            ref[rows, :] = factor.astype(ref.dtype)
        for y_ref in y_refs:
            if spec.gated:
                y = y * z[1]
            for ref in residual_refs:
                y = y + ref[rows, :].astype(jnp.float32)
            y_ref[rows, :] = y.astype(y_ref.dtype)

    def step(cleared):
        def tile(rows):
            x = clear(x_ref[rows, :], 1, d, spec, "D", cleared)
            z = [product(x, clear(ref[...], 0, d, spec, "D", cleared), 1, 0) for ref in w_refs]
            if steps == 1:
                finish(rows, z)
            for ref, part in zip(acc_refs, z, strict=bool(acc_refs)):
                ref[rows, :] += part

        each_tile(spec.block.T, spec.tile, tile)

    if steps > 1:
        _zero_when(d == 0, acc_refs)
    run_step(spec, "D", d, step)
    if steps > 1:

        @pl.when(d == steps - 1)
        def _():
            each_tile(spec.block.T, spec.tile, lambda rows: finish(rows, [ref[rows, :] for ref in acc_refs]))


def dx_kernel(spec: Spec, *refs):
    """dx = sum of (dy factor_i) w_i^T, a block of it each step, summed over F. grid = (T // t, F // f, D // d)."""
    f, d, steps, take = pl.program_id(1), pl.program_id(2), spec.steps("F"), _taker(refs)
    dy_refs, w_refs, (dx_ref,) = take(1 + spec.products * spec.factors), take(spec.products), take(1)
    dz_refs, acc_refs = take(spec.products) if spec.forms_dz else dy_refs, take(None)

    if spec.forms_dz:

        @pl.when(d == 0)
        def _():
            _form_dz(spec, dy_refs, dz_refs, 1, f, "F")

    def step(cleared):
        def tile(rows):
            weights = [clear(ref[...], 1, f, spec, "F", cleared) for ref in w_refs]
            total = sum(product(dz[rows, :], w, 1, 1) for dz, w in zip(dz_refs, weights, strict=True))
            if steps == 1:
                dx_ref[rows, :] = total.astype(dx_ref.dtype)
            else:
                acc_refs[0][d, rows, :] += total

        each_tile(spec.block.T, spec.tile, tile)

    if steps > 1:
        _zero_when(f == 0, [ref.at[d] for ref in acc_refs])
    run_step(spec, "F", f, step)
    if steps > 1:

        @pl.when(f == steps - 1)
        def _():
            dx_ref[...] = acc_refs[0][d].astype(dx_ref.dtype)


def dw_kernel(spec: Spec, *refs):
    """dw_i = x^T (dy factor_i), a block each step, and the bias's gradient. grid = (F // f, T // t, D // d)."""
    t, d, steps, take = pl.program_id(1), pl.program_id(2), spec.steps("T"), _taker(refs)
    dy_refs, (x_ref,), dw_refs, dbias_refs = (
        *(take(1 + spec.products * spec.factors), take(1)),
        *(take(spec.products), take(spec.bias)),
    )
    dz_refs, acc_refs = take(spec.products) if spec.forms_dz else dy_refs, take(None)

    if spec.forms_dz or spec.bias:

        @pl.when(d == 0)
        def _():
            if spec.forms_dz:
                _form_dz(spec, dy_refs, dz_refs, 0, t, "T")
            for ref in dbias_refs:
                total = jnp.sum(dz_refs[0][...].astype(jnp.float32), axis=0, keepdims=True)
                ref[...] = jnp.where(t == 0, total, total + ref[...])

    def step(cleared):
        def tile(rows):
            x = clear(x_ref[:, rows], 0, t, spec, "T", cleared)
            for i, dz_ref in enumerate(dz_refs):
                part = product(x, dz_ref[...], 0, 0)
                if steps == 1:
                    dw_refs[i][rows, :] = part.astype(dw_refs[i].dtype)
                else:
                    acc_refs[i][d, rows, :] += part

        each_tile(spec.block.D, spec.tile, tile)

    if steps > 1:
        _zero_when(t == 0, [ref.at[d] for ref in acc_refs])
    run_step(spec, "T", t, step)
    if steps > 1:

        @pl.when(t == steps - 1)
        def _():
            for dw_ref, acc_ref in zip(dw_refs, acc_refs, strict=True):
                dw_ref[...] = acc_ref[d].astype(dw_ref.dtype)


def product(a, b, a_dim: int, b_dim: int):
    """Contracts dim `a_dim` of a with `b_dim` of b, in float32; of integers in int32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims, total = (((a_dim,), (b_dim,)), ((), ())), _widest(a.dtype)
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=total)


def _taker(refs) -> Callable[[int | None], list]:
    """take(count) gives the next refs, take(None) what is left."""
    waiting = iter(refs)
    return lambda count: list(itertools.islice(waiting, count))


def _form_dz(spec: Spec, dy_refs, dz_refs, axis: int, at, dim: str):
    """dz of the block, its tail along the contraction `dim` cleared. A product of two bf16 rounds as in float32."""
    for i, dz_ref in enumerate(dz_refs):
        dz = dy_refs[0][...]
        if spec.factors:
            dz = dz * dy_refs[1 + i][...]
        dz_ref[...] = clear(dz, axis, at, spec, dim, spec.has_tail(dim)).astype(dz_ref.dtype)


def clear(x, axis: int, at, spec: Spec, dim: str, wanted: bool):
    """Zeros in `x`, block `at` along `dim`, where it lies beyond the array."""
    if not wanted:
        return x
    position = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + at * getattr(spec.block, dim)
    return jnp.where(position < getattr(spec, dim), x.astype(_widest(x.dtype)), 0).astype(x.dtype)


def _widest(dtype) -> type:
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


def run_step(spec: Spec, dim: str, at, step: Callable[[bool], None]) -> None:
    """step(False), or step(True) for the last block of a dim that ends within it."""
    last = spec.steps(dim) - 1
    if not spec.has_tail(dim) or last == 0:
        step(spec.has_tail(dim))
        return
    pl.when(at < last)(lambda: step(False))
    pl.when(at == last)(lambda: step(True))


def _zero_when(condition, refs: Sequence) -> None:
    @pl.when(condition)
    def _():
        for ref in refs:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)


def each_tile(size: int, tile: int, body: Callable) -> None:
    """body(rows) for each tile of `size` rows: a loop, so that the program stays small."""
    if tile == size:
        body(pl.ds(0, size))
        return

    def step(i, carry):
        body(pl.ds(pl.multiple_of(i * tile, tile), tile))
        return carry

    jax.lax.fori_loop(jnp.int32(0), jnp.int32(size // tile), step, jnp.int32(0))
