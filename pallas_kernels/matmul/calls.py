"""Calls of the matmul kernels: grids, block specs, scratch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.matmul import blocks
from pallas_kernels.matmul.blocks import Block, BlockSizes, Problem
from pallas_kernels.matmul.kernel import Spec, dw_kernel, dx_kernel, forward_kernel
from pallas_kernels.runtime import CHIPS, Chip, chip_in_use, facts, shape_like


@dataclasses.dataclass(frozen=True)
class Call:
    """The static side of an op's call: what its kernels share. `op` names them."""

    op: str
    problem: Problem
    sizes: BlockSizes
    activation: str | None
    bias: bool
    residual: bool
    y_dtype: jnp.dtype
    chip_name: str | None
    interpret: bool

    def spec(self, kernel: str, **options) -> Spec:
        """What one of the kernels is built for."""
        problem, block = self.problem, self.block(kernel)
        options = {"activation": self.activation, "bias": self.bias, "factors": problem.factors} | options
        dims = (problem.T, problem.F, problem.D)
        rows = blocks.tile(kernel, problem, block, self.chip)
        return Spec(*dims, block, rows, gated=problem.products == 2, **options)

    def block(self, kernel: str) -> Block:
        """The caller's block, or one chosen."""
        return getattr(self.sizes, kernel) or blocks.choose(kernel, self.problem, self.chip)

    @property
    def chip(self) -> Chip | None:
        """The generation to choose blocks for; None where kernels are interpreted."""
        return None if self.chip_name is None else CHIPS[self.chip_name]


def prepare(op: str, problem: Problem, sizes: BlockSizes | None, dtype, interpret: bool, **options) -> Call:
    """A call, once what pallas can't take is refused.

    Raises:
      ValueError: float16; blocks that can't be; a mesh with Explicit axes in use.
    """
    refuse_what_pallas_cannot_take(op, dtype)
    chip, sizes = chip_in_use(), sizes or BlockSizes()
    call = Call(op, problem, sizes, chip_name=None if chip is None else chip.name, interpret=interpret, **options)
    for kernel in blocks.KERNELS:
        blocks.check(op, kernel, problem, call.block(kernel), chip)
    return call


def refuse_what_pallas_cannot_take(op: str, dtype) -> None:
    """Raises ValueError: float16; a mesh with Explicit axes in use."""
    if dtype == jnp.float16:
        raise ValueError(f"{op}: pallas can't take float16; use bfloat16 or implementation='xla'")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and jax.sharding.AxisType.Explicit in mesh.axis_types:
        raise ValueError(f"{op}: under a mesh with Explicit axes pallas runs inside jax.shard_map only")


def forward(call: Call, x_TD, weights, bias_F=None, residual_TF=None, *, writes_y=True, factors=False):
    """[y_TF] and, with `factors`, dy/dz_i for each product, in x's dtype."""
    spec = call.spec("forward", residual=call.residual, writes_y=writes_y, factors=factors)
    block, dtype, (T, F) = spec.block, x_TD.dtype, (spec.T, spec.F)

    def x_map(t, f, d):  # rows of x
        return t, d

    def w_map(t, f, d):  # columns of a weight
        return d, f

    def bias_map(t, f, d):
        return 0, f

    def y_map(t, f, d):  # a block of the result, and of what is added to it
        return t, f

    in_specs = [pl.BlockSpec((block.T, block.D), x_map)]
    in_specs += [pl.BlockSpec((block.D, block.F), w_map)] * spec.products
    operands = [x_TD, *weights]
    if spec.bias:
        in_specs.append(pl.BlockSpec((1, block.F), bias_map))
        operands.append(bias_F.astype(jnp.float32).reshape(1, F))
    if spec.residual:
        in_specs.append(pl.BlockSpec((block.T, block.F), y_map))
        operands.append(residual_TF)
    dtypes = [call.y_dtype] * writes_y + [dtype] * (spec.products * factors)
    return _pallas_call(
        call,
        "forward",
        functools.partial(forward_kernel, spec),
        operands,
        # grid = (T // t, F // f, D // d)
        grid=(spec.steps("T"), spec.steps("F"), spec.steps("D")),
        semantics=("parallel", "parallel", "arbitrary"),
        in_specs=in_specs,
        out_specs=[pl.BlockSpec((block.T, block.F), y_map)] * len(dtypes),
        out_shape=[shape_like((T, F), each, x_TD) for each in dtypes],
        scratch_shapes=[pltpu.VMEM((block.T, block.F), jnp.float32)] * (spec.products * (spec.steps("D") > 1)),
    )


def dx(call: Call, dy_TF, factors, weights):
    """dx_TD in the weights' dtype, from the cotangent of y."""
    dtype = weights[0].dtype
    spec = _backward_spec(call, "dx", "F", factors, dy_TF.dtype != dtype)
    block, steps = spec.block, spec.steps("F")

    def dy_map(t, f, d):  # a block of the cotangent or of a factor
        return t, f

    def w_map(t, f, d):
        return d, f

    def dx_map(t, f, d):  # written in the last step along F, so it moves on only then
        return t, jnp.where(f == steps - 1, d, 0)

    dz = [pltpu.VMEM((block.T, block.F), dtype)] * (spec.products * spec.forms_dz)
    acc = [pltpu.VMEM((spec.steps("D"), block.T, block.D), jnp.float32)] * (steps > 1)
    (dx_TD,) = _pallas_call(
        call,
        "dx",
        functools.partial(dx_kernel, spec),
        [dy_TF, *factors, *weights],
        # grid = (T // t, F // f, D // d)
        grid=(spec.steps("T"), steps, spec.steps("D")),
        semantics=("parallel", "arbitrary", "arbitrary"),
        in_specs=[pl.BlockSpec((block.T, block.F), dy_map)] * (1 + len(factors))
        + [pl.BlockSpec((block.D, block.F), w_map)] * spec.products,
        out_specs=[pl.BlockSpec((block.T, block.D), dx_map)],
        out_shape=[shape_like((spec.T, spec.D), dtype, dy_TF)],
        scratch_shapes=[*dz, *acc],
    )
    return dx_TD


def dw(call: Call, dy_TF, factors, x_TD):
    """[dw_DF for each weight] in x's dtype, summed over T in float32 and rounded once; with a bias its gradient too."""
    dtype = x_TD.dtype
    spec = _backward_spec(call, "dw", "T", factors, dy_TF.dtype != dtype)
    block, steps = spec.block, spec.steps("T")

    def dy_map(f, t, d):  # a block of the cotangent or of a factor
        return t, f

    def x_map(f, t, d):
        return t, d

    def dw_map(f, t, d):  # written in the last step along T, so it moves on only then
        return jnp.where(t == steps - 1, d, 0), f

    def dbias_map(f, t, d):
        return 0, f

    out_specs = [pl.BlockSpec((block.D, block.F), dw_map)] * spec.products
    out_shape = [shape_like((spec.D, spec.F), dtype, x_TD)] * spec.products
    if spec.bias:
        out_specs.append(pl.BlockSpec((1, block.F), dbias_map))
        out_shape.append(shape_like((1, spec.F), jnp.float32, x_TD))
    dz = [pltpu.VMEM((block.T, block.F), dtype)] * (spec.products * spec.forms_dz)
    acc = [pltpu.VMEM((spec.steps("D"), block.D, block.F), jnp.float32)] * (spec.products * (steps > 1))
    return _pallas_call(
        call,
        "dw",
        functools.partial(dw_kernel, spec),
        [dy_TF, *factors, x_TD],
        # grid = (F // f, T // t, D // d)
        grid=(spec.steps("F"), steps, spec.steps("D")),
        semantics=("parallel", "arbitrary", "arbitrary"),
        in_specs=[pl.BlockSpec((block.T, block.F), dy_map)] * (1 + len(factors))
        + [pl.BlockSpec((block.T, block.D), x_map)],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[*dz, *acc],
    )


def _backward_spec(call: Call, kernel: str, contracted: str, factors, converts: bool) -> Spec:
    spec = call.spec(kernel)
    forms_dz = bool(factors) or converts or spec.has_tail(contracted)
    return dataclasses.replace(spec, forms_dz=forms_dz)


def _pallas_call(call: Call, kernel_name, kernel, operands, *, grid, semantics, **specs):
    problem = call.problem
    # Kernels count in int32; x64 mode would make Python's ints int64, which Mosaic does not have.
    with jax.enable_x64(False):
        return pl.pallas_call(
            kernel,
            grid=grid,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=semantics, vmem_limit_bytes=blocks.vmem_limit(call.chip)
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * problem.products * problem.T * problem.F * problem.D,
                bytes_accessed=blocks.hbm_bytes(kernel_name, problem, call.block(kernel_name)),
                transcendentals=problem.T * problem.F if kernel_name == "forward" else 0,
            ),
            interpret=call.interpret,
            name=f"{call.op}_{kernel_name}",
            metadata=facts(call.op, kernel_name, dataclasses.asdict(problem)),
            **specs,
        )(*operands)
