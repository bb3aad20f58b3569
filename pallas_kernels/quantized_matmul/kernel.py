"""The kernel: a product with an operand, or both, of eight bits, and its scales.

y = (a b) row_scale column_scale. Weights alone of eight bits are widened to the dtype of `a` in VMEM, a block at a
time, so HBM gives half the bytes of bfloat16. Two operands of eight bits go to the matrix units as they are; int8 adds
up in int32, exactly. Scales multiply the sums: no weight is rounded again. Where each block of the contraction has
scales of its own, each block's sum is scaled before it is added.
"""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.matmul.kernel import Spec, clear, each_tile, product, run_step


@dataclasses.dataclass(frozen=True)
class Scaled(Spec):
    """T rows and F columns of the result, D contracted: as dim `a_dim` of a, and `b_dim` of b."""

    a_dim: int = 1
    b_dim: int = 0
    row_scales: bool = False
    scale_block: int | None = None  # so many elements of D have a column scale each; None: all have one

    @property
    def of_scales(self) -> Spec:
        """The same with blocks of scales for D."""
        block, size = self.block, self.scale_block or self.D
        scales = dataclasses.replace(block, D=-(-block.D // size))
        return dataclasses.replace(self, D=-(-self.D // size), block=scales)


def scaled_kernel(spec: Scaled, a_ref, b_ref, *refs):
    """A block of y, summed over D. grid = (T // t, F // f, D // d)."""
    row_refs, (column_ref, y_ref, *acc_refs) = refs[: spec.row_scales], refs[spec.row_scales :]
    d, steps = pl.program_id(2), spec.steps("D")

    def finish(rows, total):
        total = total.astype(jnp.float32)
        for ref in row_refs:
            total = total * ref[rows, :]
        if spec.scale_block is None:
            total = total * column_ref[...]
        y_ref[rows, :] = total.astype(y_ref.dtype)

    def step(cleared):
        def tile(rows):
            a = a_ref[rows, :] if spec.a_dim == 1 else a_ref[:, rows]
            a, b = clear(a, spec.a_dim, d, spec, "D", cleared), b_ref[...]
            if jnp.issubdtype(b.dtype, jnp.floating):  # what lies beyond the array may be NaN
                b = clear(b, spec.b_dim, d, spec, "D", cleared)
            b = b.astype(a.dtype) if a.dtype.itemsize > 1 else b
            total = _sum(spec, a, b, column_ref, d, cleared)
            if steps == 1:
                finish(rows, total)
            for ref in acc_refs:
                ref[rows, :] = jnp.where(d == 0, total, ref[rows, :] + total)

        each_tile(spec.block.T, spec.tile, tile)

    run_step(spec, "D", d, step)
    if steps > 1:

        @pl.when(d == steps - 1)
        def _():
            each_tile(spec.block.T, spec.tile, lambda rows: finish(rows, acc_refs[0][rows, :]))


def _sum(spec: Scaled, a, b, column_ref, d, cleared):
    if spec.scale_block is None:
        return product(a, b, spec.a_dim, spec.b_dim)
    scales = clear(column_ref[...], 0, d, spec.of_scales, "D", cleared)
    total = None
    for c in range(scales.shape[0]):
        part = slice(c * spec.scale_block, (c + 1) * spec.scale_block)
        scaled = product(a[:, part], b[part], 1, 0) * scales[c : c + 1]
        total = scaled if total is None else total + scaled
    return total
