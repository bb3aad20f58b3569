"""Calls of the linear cross entropy kernels: padding, block specs, the gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cross_entropy import blocks
from pallas_kernels.cross_entropy.blocks import BlockSizes
from pallas_kernels.cross_entropy.kernel import Spec, backward_kernel, forward_kernel
from pallas_kernels.cross_entropy.statistics import NOWHERE, Options, Statistics, over_shards
from pallas_kernels.runtime import chip_in_use, facts, shape_like, vary_alike, vary_like

ROW_TILE = 16  # rows of the head that a copy moves at least: a packed tile of bfloat16


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call's static side."""

    options: Options
    shape: blocks.Shape
    sizes: BlockSizes
    cores: int
    vmem_limit: int
    interpret: bool


def statistics_pallas(
    options: Options, x_TD, w_VD, labels_T, *, sizes: BlockSizes | None = None, interpret: bool = False
) -> Statistics:
    """Same contract as `statistics_reference`, sharded vocabulary included.

    `sizes`: None chooses them. `interpret`: run the kernels in jnp, on any platform.

    Raises:
      ValueError: float16; block sizes that can't be, or none that fit; a mesh with Explicit axes in use.
    """
    if jnp.float16 in (x_TD.dtype, w_VD.dtype):
        raise ValueError("linear_cross_entropy: pallas can't take float16; use bfloat16 or implementation='xla'")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and jax.sharding.AxisType.Explicit in mesh.axis_types:
        raise ValueError("linear_cross_entropy: under a mesh with Explicit axes pallas runs inside jax.shard_map only")
    chip, shape = chip_in_use(), _shape(x_TD, w_VD)
    if sizes is None:
        sizes = blocks.choose(shape, chip)
    else:
        blocks.check(sizes, shape, chip)
    cores = 1 if chip is None else chip.cores
    call = _Call(options, shape, sizes, cores, blocks.vmem_limit(sizes, shape, chip), interpret)
    return _statistics(call, x_TD, vary_like(w_VD, x_TD), labels_T)


def kernels_pay(x_TD, w_VD) -> bool:
    """Whether the kernels are worth their while on the TPU generation of the mesh in use; False where there is none."""
    chip = chip_in_use()
    return chip is not None and blocks.pays(_shape(x_TD, w_VD), chip)


def _shape(x_TD, w_VD) -> blocks.Shape:
    (T, D), V = x_TD.shape, len(w_VD)
    return blocks.Shape(T, D, V, x_TD.dtype.itemsize, w_VD.dtype.itemsize)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(call, x_TD, w_VD, labels_T):
    return _statistics_fwd(call, x_TD, w_VD, labels_T)[0]


def _statistics_fwd(call: _Call, x_TD, w_VD, labels_T):
    options, cut = call.options, call.sizes.forward
    T, V = len(x_TD), len(w_VD)
    x, w, labels = vary_alike(*_padded(x_TD, w_VD, labels_T, cut.tokens, cut.vocab))
    spec = _spec(call, x, w, V)

    def row_map(i, j):  # one number a token
        return 0, i

    def x_map(i, j):
        return i, 0

    def w_map(i, j):
        return j, 0

    row = pl.BlockSpec((1, cut.tokens), row_map)
    dtypes = [jnp.float32] * (2 + options.with_total + options.with_argmax) + [jnp.int32] * options.with_argmax
    scratch = [pltpu.VMEM((cut.rows, cut.tile), jnp.float32)]
    if spec.casts:
        scratch.insert(0, pltpu.VMEM((cut.rows, x.shape[1]), x.dtype))
    running = [jnp.float32] * (3 + options.with_total + options.with_argmax) + [jnp.int32] * options.with_argmax
    scratch += [pltpu.VMEM((1, cut.tokens), dtype) for dtype in running]
    found = _pallas_call(
        call,
        spec,
        forward_kernel,
        # grid = (T // tokens, V // vocab)
        grid=(len(x) // cut.tokens, -(-V // cut.vocab)),
        semantics=("parallel", "arbitrary"),
        in_specs=[row, pl.BlockSpec((cut.tokens, x.shape[1]), x_map), pl.BlockSpec((cut.vocab, x.shape[1]), w_map)],
        out_specs=[row] * len(dtypes),
        out_shape=[shape_like((1, len(x)), dtype, x) for dtype in dtypes],
        scratch_shapes=scratch,
    )(labels[None], x, w)
    rows = iter(row[0, :T] for row in found)
    lse_T, at_label_T, total_T = next(rows), next(rows), next(rows) if options.with_total else None
    highest_T, argmax_T = (next(rows), next(rows)) if options.with_argmax else (None, None)
    whole = over_shards(options, Statistics(lse_T, at_label_T, total_T, argmax_T), highest_T, V)
    return whole, (x_TD, w_VD, labels_T, whole.lse)


def _statistics_bwd(call: _Call, residuals, cotangents):
    x_TD, w_VD, labels_T, lse_T = residuals
    options, cut = call.options, call.sizes.backward
    (T, D), V = x_TD.shape, len(w_VD)
    total_T = jnp.zeros_like(lse_T) if cotangents.total is None else cotangents.total
    rows_4T = jnp.stack([lse_T, cotangents.lse, cotangents.at_label, total_T])
    x, w, labels = _padded(x_TD, w_VD, labels_T, cut.tokens, cut.vocab)
    x, w, labels, rows_4T = vary_alike(x, w, labels, jnp.pad(rows_4T, ((0, 0), (0, len(x) - T))))
    spec = _spec(call, x, w, V)
    width = x.shape[1]
    blocks_a_core = -(-V // (cut.vocab * call.cores))

    def row_map(core, j, i):  # one number a token
        return 0, i

    def x_map(core, j, i):
        return i, 0

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    alone = spec.token_blocks == 1
    dma = pltpu.SemaphoreType.DMA
    dx, dw = _pallas_call(
        call,
        spec,
        backward_kernel,
        # grid = (cores, V // vocab // cores, T // tokens)
        grid=(call.cores, blocks_a_core, spec.token_blocks),
        semantics=("parallel", "arbitrary", "arbitrary"),
        in_specs=[
            pl.BlockSpec((1, cut.tokens), row_map),
            pl.BlockSpec((4, cut.tokens), row_map),
            pl.BlockSpec((cut.tokens, width), x_map),
            anywhere,
        ],
        out_specs=[anywhere, anywhere],
        out_shape=[
            shape_like((call.cores, len(x), width), jnp.float32, x),
            shape_like((len(w), width), jnp.float32, x),
        ],
        scratch_shapes=[
            pltpu.VMEM((cut.vocab, width), x.dtype),
            pltpu.VMEM((cut.ahead, cut.rows, width), w.dtype),
            pltpu.VMEM((cut.vocab, width), jnp.float32),
            pltpu.VMEM((cut.ahead, cut.rows, cut.tokens), x.dtype),
            pltpu.VMEM((cut.tokens, cut.vocab), x.dtype),
            pltpu.VMEM((1 if alone else 2, cut.tokens, width), jnp.float32),
            dma((cut.ahead,)),
            dma((cut.vocab // cut.rows,)),
            dma((2,)),
            dma((2,)),
        ],
    )(labels[None], rows_4T, x, w)
    dx_TD = jnp.sum(dx, axis=0)[:T, :D]
    if options.vocab_axis is not None:
        dx_TD = jax.lax.psum(dx_TD, options.vocab_axis)
    return dx_TD.astype(x_TD.dtype), dw[:V, :D].astype(w_VD.dtype), None


_statistics.defvjp(_statistics_fwd, _statistics_bwd)


def _spec(call: _Call, x, w, rows: int) -> Spec:
    options = call.options
    return Spec(
        sizes=call.sizes,
        rows=rows,
        padded_rows=len(w),
        token_blocks=len(x) // call.sizes.backward.tokens,
        soft_cap=options.soft_cap,
        with_total=options.with_total,
        with_argmax=options.with_argmax,
        casts=w.dtype != x.dtype,
    )


def _padded(x_TD, w_VD, labels_T, tokens: int, vocab: int):
    """Whole blocks of tokens, D in whole lanes, and a head that copies can take apart; as they are where that fits."""
    T, D = x_TD.shape
    more_tokens, more_dims = -T % tokens, -D % blocks.LANES
    more_rows = max(vocab - len(w_VD), -len(w_VD) % ROW_TILE)
    x = _pad(x_TD, more_tokens, more_dims)
    labels = jnp.pad(labels_T, (0, more_tokens), constant_values=NOWHERE) if more_tokens else labels_T
    return x, _pad(w_VD, more_rows, more_dims), labels


def _pad(x, rows: int, columns: int):
    return jnp.pad(x, ((0, rows), (0, columns))) if rows or columns else x


def _pallas_call(call: _Call, spec: Spec, kernel, *, grid, semantics, in_specs, out_specs, out_shape, scratch_shapes):
    # Kernels count in int32; x64 mode would make Python's ints int64, which Mosaic does not have.
    products = 1 if kernel is forward_kernel else 3
    name = kernel.__name__.removesuffix("_kernel")

    def run(*operands):
        x, w = operands[-2:]
        with jax.enable_x64(False):
            return pl.pallas_call(
                functools.partial(kernel, spec),
                grid=grid,
                in_specs=in_specs,
                out_specs=out_specs,
                out_shape=out_shape,
                scratch_shapes=scratch_shapes,
                compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=call.vmem_limit),
                cost_estimate=pl.CostEstimate(
                    flops=products * 2 * len(x) * x.shape[1] * len(w),
                    bytes_accessed=sum(array.size * array.dtype.itemsize for array in (*operands, *out_shape)),
                    transcendentals=len(x) * len(w),
                ),
                interpret=call.interpret,
                name=f"linear_cross_entropy_{name}",
                metadata=facts("linear_cross_entropy", name, dataclasses.asdict(call.shape)),
            )(*operands)

    return run
