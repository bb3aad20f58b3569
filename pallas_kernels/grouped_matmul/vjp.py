"""Calls of the grouped kernels: grids of as many visits as the groups' sizes ask for, block specs, the gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul import blocks
from pallas_kernels.grouped_matmul.blocks import Problem
from pallas_kernels.grouped_matmul.groups import Visits, visits
from pallas_kernels.grouped_matmul.kernel import Grouped, dw_kernel, rows_kernel
from pallas_kernels.matmul.blocks import KERNELS, Block, BlockSizes, vmem_limit
from pallas_kernels.matmul.calls import refuse_what_pallas_cannot_take
from pallas_kernels.runtime import CHIPS, Chip, chip_in_use, facts, shape_like


@dataclasses.dataclass(frozen=True)
class Call:
    """The static side of a call: what its kernels share."""

    problem: Problem
    sizes: BlockSizes
    chip_name: str | None
    interpret: bool

    def spec(self, kernel: str) -> Grouped:
        """What one of the kernels is built for."""
        problem, block = self.problem, self.block(kernel)
        cut = blocks.cut(kernel, problem, block, self.chip)
        dims = (problem.T, problem.F, problem.D)
        return Grouped(*dims, block, cut.rows, gated=False, columns=cut.columns, rests=cut.rests)

    def block(self, kernel: str) -> Block:
        """The caller's block, or one chosen."""
        return getattr(self.sizes, kernel) or blocks.choose(kernel, self.problem, self.chip)

    @property
    def chip(self) -> Chip | None:
        """The generation to choose blocks for; None where kernels are interpreted."""
        return None if self.chip_name is None else CHIPS[self.chip_name]


def grouped_matmul_pallas(x_TD, w_EDF, group_sizes_E, *, sizes: BlockSizes | None, interpret: bool):
    """Same contract as `grouped_matmul_reference`. `interpret`: run the kernels in jnp, on any platform.

    Raises:
      ValueError: float16; blocks that can't be; a mesh with Explicit axes in use.
    """
    refuse_what_pallas_cannot_take("grouped_matmul", x_TD.dtype)
    (T, D), (E, _, F) = x_TD.shape, w_EDF.shape
    chip = chip_in_use()
    problem = Problem(T, F, D, E, x_TD.dtype.itemsize)
    call = Call(problem, sizes or BlockSizes(), None if chip is None else chip.name, interpret)
    for kernel in KERNELS:
        blocks.check("grouped_matmul", kernel, problem, call.block(kernel), chip)
    return _grouped(call, x_TD, w_EDF, group_sizes_E)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(call, x_TD, w_EDF, group_sizes_E):
    return rows_times_weights(call, "forward", x_TD, w_EDF, group_sizes_E)


def _forward(call, x_TD, w_EDF, group_sizes_E):
    return _grouped(call, x_TD, w_EDF, group_sizes_E), (x_TD, w_EDF, group_sizes_E)


def _backward(call, residuals, dy_TF):
    x_TD, w_EDF, group_sizes_E = residuals
    dx_TD = rows_times_weights(call, "dx", dy_TF, w_EDF, group_sizes_E)
    return dx_TD, weight_gradients(call, x_TD, dy_TF, group_sizes_E), None


_grouped.defvjp(_forward, _backward)


def rows_times_weights(call: Call, kernel: str, x, w_EDF, group_sizes_E):
    """The kernel "forward": y_TF of x_TD; "dx": dx_TD of dy_TF."""
    spec = call.spec(kernel)
    out, contracted = ("F", "D") if kernel == "forward" else ("D", "F")
    block = spec.block
    block_out, block_contracted = getattr(block, out), getattr(block, contracted)

    def x_map(o, v, c, group_ref, tile_ref, first_ref, end_ref, edges_ref):  # where rows are nobody's: the last again
        return jnp.minimum(tile_ref[v], edges_ref[1]), c

    def w_map(o, v, c, group_ref, *_):  # a block of the group's weights
        return (group_ref[v], c, o) if kernel == "forward" else (group_ref[v], o, c)

    def y_map(o, v, c, group_ref, tile_ref, *_):
        return tile_ref[v], o

    each = visits(group_sizes_E, spec.T, block.T, every="tile")
    return _pallas_call(
        call,
        kernel,
        functools.partial(rows_kernel, spec, out, contracted),
        each,
        [x, w_EDF],
        # grid = (out // o, visits, contracted // c)
        grid=(spec.steps(out), each.count, spec.steps(contracted)),
        in_specs=[
            pl.BlockSpec((block.T, block_contracted), x_map),
            pl.BlockSpec((None, block.D, block.F), w_map),
        ],
        out_specs=pl.BlockSpec((block.T, block_out), y_map),
        out_shape=shape_like((spec.T, getattr(spec, out)), x.dtype, x),
        scratch_shapes=[pltpu.VMEM((block.T, block_out), jnp.float32)] * (spec.steps(contracted) > 1),
    )


def weight_gradients(call: Call, x_TD, dy_TF, group_sizes_E):
    """dw_EDF in x's dtype, each group's sum in float32 and rounded once."""
    spec = call.spec("dw")
    block = spec.block

    def x_map(f, d, v, group_ref, tile_ref, *_):
        return tile_ref[v], d

    def dy_map(f, d, v, group_ref, tile_ref, *_):
        return tile_ref[v], f

    def dw_map(f, d, v, group_ref, *_):
        return group_ref[v], d, f

    each = visits(group_sizes_E, spec.T, block.T, every="group")
    return _pallas_call(
        call,
        "dw",
        functools.partial(dw_kernel, spec),
        each,
        [x_TD, dy_TF],
        # grid = (F // f, D // d, visits)
        grid=(spec.steps("F"), spec.steps("D"), each.count),
        in_specs=[pl.BlockSpec((block.T, block.D), x_map), pl.BlockSpec((block.T, block.F), dy_map)],
        out_specs=pl.BlockSpec((None, block.D, block.F), dw_map),
        out_shape=shape_like((call.problem.E, spec.D, spec.F), x_TD.dtype, x_TD),
        scratch_shapes=[pltpu.VMEM((block.D, block.F), jnp.float32)],
    )


def _pallas_call(call: Call, kernel_name, kernel, each: Visits, operands, *, out_shape, **grid_spec):
    problem = call.problem
    # Kernels count in int32; x64 mode would make Python's ints int64, which Mosaic does not have.
    with jax.enable_x64(False):
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=5, **grid_spec),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=vmem_limit(call.chip)
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * problem.T * problem.F * problem.D,
                bytes_accessed=blocks.hbm_bytes(kernel_name, problem, call.block(kernel_name)),
                transcendentals=0,
            ),
            interpret=call.interpret,
            name=f"grouped_matmul_{kernel_name}",
            metadata=facts("grouped_matmul", kernel_name, dataclasses.asdict(problem)),
        )(each.group_V, each.tile_V, each.first_V, each.end_V, each.edges_2, *operands)
