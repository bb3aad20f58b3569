"""Calls of the kernels that send round a ring: grids, block specs, scratch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.collective_matmul import blocks, ring
from pallas_kernels.collective_matmul.blocks import Problem
from pallas_kernels.collective_matmul.kernel import Spec, reduce_scatter_kernel
from pallas_kernels.matmul.blocks import vmem_limit
from pallas_kernels.matmul.calls import refuse_what_pallas_cannot_take
from pallas_kernels.runtime import chip_in_use, facts, shape_like, vary_like

OP = "collective_matmul"
COLLECTIVE_ID = 0  # which barrier; kernels that run one after the other may share it


def matmul_reduce_scatter_pallas(x_TD, dy_TF, factor_TF, *, axis: str, interpret: bool):
    """Same contract as `matmul_reduce_scatter_reference`. `interpret`: in JAX's TPU simulator, on any platform.

    Raises:
      ValueError: float16; T, F or D / n that is no multiple of 128; blocks that do not fit into VMEM.
    """
    refuse_what_pallas_cannot_take("matmul_reduce_scatter", x_TD.dtype)
    (T, D), F, n, dtype = x_TD.shape, dy_TF.shape[1], jax.sharding.get_abstract_mesh().shape[axis], x_TD.dtype
    chip, problem = chip_in_use(), Problem(T, D, F, n, dtype.itemsize, factor_TF is not None)
    block = blocks.choose(problem, chip)
    waves, parts, rows = F // block.F, T // block.T, problem.rows
    spec = Spec(n, waves, parts, rows, blocks.tile(problem, block, chip), problem.factor)

    def x_map(wave, turn, part, plan_ref):  # the tokens' columns of this turn's block of D
        return part, plan_ref[turn]

    def dy_map(wave, turn, part, plan_ref):  # of the cotangent and its factor, as long as the wave goes round
        return part, wave

    def dw_map(wave, turn, part, plan_ref):
        return 0, wave

    operands = [x_TD, dy_TF, *([] if factor_TF is None else [factor_TF])]
    slots = pltpu.VMEM((2, ring.SLOTS, rows, block.F), dtype)
    # Kernels count in int32; x64 mode would make Python's ints int64, which Mosaic does not have.
    with jax.enable_x64(False):
        return pl.pallas_call(
            functools.partial(reduce_scatter_kernel, spec),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(waves, n, parts),  # grid = (F // f, n, T // t)
                in_specs=[pl.BlockSpec((block.T, rows), x_map)]
                + [pl.BlockSpec((block.T, block.F), dy_map)] * (1 + problem.factor),
                out_specs=pl.BlockSpec((rows, block.F), dw_map),
                scratch_shapes=[
                    pltpu.VMEM((rows, block.F), jnp.float32),
                    *(slots, slots),
                    *[pltpu.SemaphoreType.DMA((2, ring.SLOTS))] * 2,
                    pltpu.SemaphoreType.REGULAR((2,)),
                    *[pltpu.VMEM((block.T, block.F), dtype)] * problem.factor,
                ],
            ),
            out_shape=shape_like((rows, F), dtype, x_TD),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",) * 3,
                vmem_limit_bytes=vmem_limit(chip),
                collective_id=COLLECTIVE_ID,
                has_side_effects=True,
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * T * D * F,
                bytes_accessed=blocks.hbm_bytes(problem, block),
                transcendentals=0,
                remote_bytes_transferred=problem.sent_bytes,
            ),
            interpret=pltpu.InterpretParams() if interpret else False,
            name=f"{OP}_reduce_scatter",
            metadata=facts(OP, "reduce_scatter", dataclasses.asdict(problem) | {"axis": repr(axis)}),
        )(vary_like(ring.plan(n, axis), x_TD), *operands)
