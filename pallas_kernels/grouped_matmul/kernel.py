"""The kernels: rows times the weights of their group (y, and dx with the weights transposed), and dw.

One visit works on a tile of rows for one group. A tile in which groups meet is visited for each in turn, and each
writes its own rows only; of the tile only those parts are multiplied that hold some of the group's rows. Rows of other
groups are left out by selection, never by a product with zero, so nothing that they hold gets through.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.matmul.kernel import Spec, clear, each_tile, product, run_step
from pallas_kernels.runtime import divide

ALIGN = 16  # rows of bf16 that fill one register: where a body may begin


@dataclasses.dataclass(frozen=True)
class Grouped(Spec):
    """`tile`: rows of an unrolled body; `columns`: how many it takes of the result's (in the dw kernel: of dw's D).

    `rests`: rows of shorter bodies, for what is left of a group in a tile, each half of the one before.
    """

    columns: int = 0
    rests: tuple[int, ...] = ()


def rows_kernel(spec: Grouped, out: str, contracted: str, group_ref, tile_ref, first_ref, end_ref, edges_ref, *refs):
    """A group's rows of y = x w (`out` is F), or of dx = dy w^T (D). grid = (out // o, visits, contracted // c)."""
    x_ref, w_ref, y_ref, *acc_refs = refs
    c, w_dim = pl.program_id(2) if acc_refs else 0, 0 if out == "F" else 1
    visit = pl.program_id(1)
    first, end = first_ref[visit], end_ref[visit]

    @pl.when((first <= 0) & (tile_ref[visit] >= edges_ref[0]) & (c == 0))
    def _():  # the first visit of a tile that nobody else will write all of
        y_ref[...] = jnp.zeros(y_ref.shape, y_ref.dtype)

    def step(cleared):
        def multiply(start, rows, counted, begins):
            def some(columns):
                x = clear(x_ref[rows, :], 1, c, spec, contracted, cleared)
                w = w_ref[:, columns] if w_dim == 0 else w_ref[columns, :]
                z = product(x, clear(w, w_dim, c, spec, contracted, cleared), 1, w_dim)
                for ref in acc_refs:
                    before = ref[rows, columns]
                    new = _within(counted - start, spec.tile, z.shape)
                    z = ref[rows, columns] = jnp.where(new, z + jnp.where(c == 0, 0.0, before), before)
                own = _within(first - start, end - start, z.shape)
                y_ref[rows, columns] = jnp.where(own, z, y_ref[rows, columns].astype(jnp.float32)).astype(y_ref.dtype)

            each_tile(getattr(spec.block, out), spec.columns, some)

        _each_part(spec, first, end, multiply)

    run_step(spec, contracted, c, step)


def dw_kernel(spec: Grouped, group_ref, tile_ref, first_ref, end_ref, edges_ref, x_ref, dy_ref, dw_ref, acc_ref):
    """A block of a group's dw = x^T dy, summed over its tiles. grid = (F // f, D // d, visits)."""
    first, end = first_ref[pl.program_id(2)], end_ref[pl.program_id(2)]

    @pl.when(first >= end)
    def _():
        dw_ref[...] = jnp.zeros(dw_ref.shape, dw_ref.dtype)

    def add(start, rows, counted, begins):
        def own(x):
            inside = _within(jnp.maximum(first, counted) - start, end - start, x.shape)
            return jnp.where(inside, x.astype(jnp.float32), 0.0).astype(x.dtype)

        dy, begins = own(dy_ref[rows, :]), begins & (first >= 0)

        def some(columns):
            total = product(own(x_ref[rows, columns]), dy, 0, 0) + jnp.where(begins, 0.0, acc_ref[columns, :])
            acc_ref[columns, :] = total
            dw_ref[columns, :] = total.astype(dw_ref.dtype)  # the group's last part has the last word

        each_tile(spec.block.D, spec.columns, some)

    _each_part(spec, first, end, add)


def _each_part(spec: Grouped, first, end, body: Callable) -> None:
    """body(start, rows, counted, is_first) for each part of the tile that holds some rows from first to end.

    A part that would reach past the tile begins sooner: its rows before `counted` are then in the part before too.
    """
    low = divide(jnp.maximum(first, 0), ALIGN) * ALIGN
    length = jnp.where(first < end, jnp.minimum(end, spec.block.T) - low, 0)

    def part(done, size):
        counted = low + done
        start = pl.multiple_of(jnp.minimum(counted, spec.block.T - size), ALIGN)
        body(start, pl.ds(start, size), counted, done == 0)

    def step(i, carry):
        part(i * spec.tile, spec.tile)
        return carry

    # As many whole parts as leave no more than all the shorter ones hold.
    done = divide(length + (spec.tile - sum(spec.rests) - 1), spec.tile) * spec.tile
    jax.lax.fori_loop(jnp.int32(0), divide(done, spec.tile), step, jnp.int32(0))
    for i, rows in enumerate(spec.rests):
        needed = length > done + sum(spec.rests[i + 1 :])
        pl.when(needed)(functools.partial(part, done, rows))
        done = jnp.where(needed, done + rows, done)


def _within(first, end, shape):
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (first <= row) & (row < end)
