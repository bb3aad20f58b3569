"""The kernel's call: grid, block specs, scratch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.matmul.blocks import Block, vmem_limit
from pallas_kernels.matmul.calls import refuse_what_pallas_cannot_take
from pallas_kernels.quantized_matmul import blocks
from pallas_kernels.quantized_matmul.blocks import Problem
from pallas_kernels.quantized_matmul.kernel import Scaled, scaled_kernel
from pallas_kernels.runtime import Chip, chip_in_use, shape_like


@dataclasses.dataclass(frozen=True)
class Product:
    """The static side of a call. `name` is the op's, and which of its products it is."""

    name: str
    y_dtype: jnp.dtype
    a_dim: int = 1  # that are contracted
    b_dim: int = 0
    scale_block: int | None = None


def scaled_product(call: Product, a, b, row_scales_T1, column_scales_CF, *, block: Block | None, interpret: bool):
    """y_TF of a and b, `b` of eight bits; row_scales_T1 is None where `a` is none. `interpret`: in jnp, anywhere.

    Raises:
      ValueError: float16; blocks that can't be; a mesh with Explicit axes in use.
    """
    refuse_what_pallas_cannot_take(call.name, call.y_dtype)
    chip = chip_in_use()
    T, D = a.shape[1 - call.a_dim], a.shape[call.a_dim]
    dtype = b.dtype.name
    problem = Problem(
        T, b.shape[1 - call.b_dim], D, a.dtype.itemsize, dtype, call.y_dtype.itemsize, call.scale_block, call.a_dim == 0
    )
    block = block or blocks.choose(problem, chip)
    blocks.check(call.name, problem, block, chip)
    rows = blocks.tile(problem, block, chip)
    spec = Scaled(
        *(problem.T, problem.F, problem.D, block, rows),
        gated=False,
        a_dim=call.a_dim,
        b_dim=call.b_dim,
        row_scales=row_scales_T1 is not None,
        scale_block=call.scale_block,
    )
    operands = [a, b, *([] if row_scales_T1 is None else [row_scales_T1]), column_scales_CF]
    return _call(call, spec, problem, chip, operands, interpret)


def _call(call: Product, spec: Scaled, problem: Problem, chip: Chip | None, operands, interpret: bool):
    block = spec.block

    # Two cores share the first dim of the grid, which few rows don't have to share.
    rows_first = spec.steps("T") > 1

    def placed(index_map):
        return index_map if rows_first else lambda f, t, d: index_map(t, f, d)

    def a_map(t, f, d):
        return (t, d) if spec.a_dim == 1 else (d, t)

    def b_map(t, f, d):
        return (d, f) if spec.b_dim == 0 else (f, d)

    def rows_map(t, f, d):  # a scale for each row of the result
        return t, 0

    def columns_map(t, f, d):  # for each column, and each block of the contraction
        return d if spec.scale_block else 0, f

    def y_map(t, f, d):
        return t, f

    scales = min(problem.scales, spec.of_scales.block.D)
    in_specs = [
        pl.BlockSpec((block.T, block.D) if spec.a_dim == 1 else (block.D, block.T), placed(a_map)),
        pl.BlockSpec((block.D, block.F) if spec.b_dim == 0 else (block.F, block.D), placed(b_map)),
        *[pl.BlockSpec((block.T, 1), placed(rows_map))] * spec.row_scales,
        pl.BlockSpec((scales, block.F), placed(columns_map)),
    ]
    exact = jnp.issubdtype(operands[0].dtype, jnp.integer)
    # Kernels count in int32; x64 mode would make Python's ints int64, which Mosaic does not have.
    with jax.enable_x64(False):
        return pl.pallas_call(
            functools.partial(scaled_kernel, spec),
            # grid = (T // t, F // f, D // d), or (F // f, T // t, D // d)
            grid=tuple(spec.steps(dim) for dim in ("TFD" if rows_first else "FTD")),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((block.T, block.F), placed(y_map)),
            out_shape=shape_like((spec.T, spec.F), call.y_dtype, operands[0]),
            scratch_shapes=[pltpu.VMEM((block.T, block.F), jnp.int32 if exact else jnp.float32)]
            * (spec.steps("D") > 1),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit(chip)
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * spec.T * spec.F * spec.D,
                bytes_accessed=blocks.hbm_bytes(problem, block),
                transcendentals=0,
            ),
            interpret=interpret,
            name=call.name,
        )(*operands)
