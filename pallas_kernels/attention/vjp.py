"""Calls of the attention kernels: grids, block specs, the gradient.

Operands and results are [B, N, H, T], tokens in the lanes: so XLA lays out what comes of the projections anyway, and
copies nothing but to pad tokens to whole blocks. Keys beyond what VMEM holds are cut into parts: the forward kernel
walks them in its grid; the backward pass runs once per part and adds up dq in float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import blocks, layouts
from pallas_kernels.attention.kernel import LOG2_E, Spec, backward_kernel, forward_kernel
from pallas_kernels.attention.rotary import apply_rope
from pallas_kernels.attention.visits import Visits
from pallas_kernels.runtime import chip_in_use, divide, facts, shape_like, vary_like

LARGEST_HEAD_DIM = 256
TURNED_IN_KERNEL = 32  # head dims that are a multiple of it: their halves fill whole tiles of bfloat16


def attention_pallas(
    q_BTNH,
    k_BSKH,
    v_BSKH,
    q_segment_ids_BT,
    kv_segment_ids_BS,
    q_offset,
    sinks_N,
    *,
    mask,
    scale,
    soft_cap,
    rotary=None,
    sizes: blocks.BlockSizes | None = None,
    interpret: bool = False,
):
    """Same contract as `attention_reference`; a `q_offset` that is an int gives a faster kernel than a traced one.

    `sizes`: None chooses them. `interpret`: run the kernels in jnp, on any platform.

    Raises:
      ValueError: float16; a head dim over 256; block sizes that can't be; a mesh with Explicit axes in use.
    """
    if rotary is not None and q_BTNH.shape[3] % TURNED_IN_KERNEL:
        q_BTNH, k_BSKH = (apply_rope(x, *rotary) for x in (q_BTNH, k_BSKH))
        rotary = None
    operands = (q_BTNH, k_BSKH, v_BSKH, q_segment_ids_BT, kv_segment_ids_BS, q_offset)
    has = {"has_sinks": sinks_N is not None, "rotary": rotary is not None}
    call, segments, offset_1 = prepare(*operands, mask, scale, soft_cap, sizes, interpret, **has)
    angles = None if rotary is None else layouts.angles(call, *rotary)
    return _attend(call, q_BTNH, k_BSKH, v_BSKH, segments, angles, offset_1, sinks_N)


def prepare(
    q_BTNH, k_BSKH, v_BSKH, q_ids_BT, kv_ids_BS, q_offset, mask, scale, soft_cap, sizes, interpret, *,
    has_sinks=False, rotary=False,
):  # fmt: skip
    """(call, segments, offset as an array) of `attention_pallas`'s operands; raises what that raises."""
    B, T, N, H = q_BTNH.shape
    S, K, HV = k_BSKH.shape[1], k_BSKH.shape[2], v_BSKH.shape[3]
    dtype = q_BTNH.dtype
    if dtype == jnp.float16:
        raise ValueError("flash_attention: pallas can't take float16; use bfloat16 or implementation='xla'")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size > 1 and jax.sharding.AxisType.Explicit in mesh.axis_types:
        raise ValueError("flash_attention: under a mesh with Explicit axes pallas runs inside jax.shard_map only")
    if max(H, HV) > LARGEST_HEAD_DIM:
        raise ValueError(
            f"flash_attention: pallas can't take head dims {H} and {HV}, the most is {LARGEST_HEAD_DIM}; use 'xla'"
        )
    chip = chip_in_use()
    if sizes is None:
        sizes = blocks.choose(T, S, H, HV, dtype.itemsize, chip)
    else:
        blocks.check(sizes, H, HV, dtype.itemsize, chip)
    offset = int(q_offset) if isinstance(q_offset, (int, np.integer)) else None
    visits = Visits(mask, T, S, sizes.q, sizes.k, offset, segmented=q_ids_BT is not None)
    bend = None if soft_cap is None else soft_cap * LOG2_E
    q_scale = scale * LOG2_E if soft_cap is None else scale / soft_cap
    spec = Spec(visits, sizes, bend, scale, scale / q_scale, q_scale, has_sinks, rotary, interpret)
    limit = blocks.vmem_limit(sizes, H, HV, dtype.itemsize, chip)
    call = layouts.Call(spec, B, T, S, N, K, H, HV, limit, interpret)
    segments = None
    if q_ids_BT is not None:
        segments = layouts.segments(call, q_ids_BT, kv_ids_BS)
    offset_1 = vary_like(jnp.asarray(q_offset, jnp.int32).reshape(1), q_BTNH)
    return call, segments, offset_1


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call, q_BTNH, k_BSKH, v_BSKH, segments, angles, offset_1, sinks_N):
    return _attend_fwd(call, q_BTNH, k_BSKH, v_BSKH, segments, angles, offset_1, sinks_N)[0]


def _attend_fwd(call: layouts.Call, q_BTNH, k_BSKH, v_BSKH, segments, angles, offset_1, sinks_N):
    sizes, visits = call.spec.sizes, call.spec.visits
    group = call.N // call.K
    blocks_per_part = sizes.resident // sizes.k

    def part_of(i, part, offset_ref):
        """The part of the keys that step `part` of block i works on; one already there where none is left."""
        if call.parts == 1:
            return 0 * part
        low, high = visits.key_blocks(i, offset_ref[0])
        last = divide(jnp.maximum(high - 1, low), blocks_per_part)
        return jnp.minimum(divide(low, blocks_per_part) + part, last)

    def q_map(b, k, g, i, part, offset_ref):  # a block of queries
        return b, k * group + g, 0, i

    def k_map(b, k, g, i, part, offset_ref):  # the keys and values of a part
        return b, k, 0, part_of(i, part, offset_ref)

    in_specs, operands = layouts.row_specs(
        call,
        *(segments, angles),
        lambda b, k, g, i, part, ref: (b, i),
        lambda b, k, g, i, part, ref: (b, part_of(i, part, ref)),
    )
    if sinks_N is not None:
        in_specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
        operands.append(sinks_N)
    in_specs += [
        pl.BlockSpec((None, None, call.H, sizes.q), q_map),
        pl.BlockSpec((None, None, call.H, sizes.resident), k_map),
        pl.BlockSpec((None, None, call.HV, sizes.resident), k_map),
    ]
    operands += [layouts.queries(call, q_BTNH), layouts.keys(call, k_BSKH), layouts.keys(call, v_BSKH)]
    o, lse = _pallas_call(
        call,
        forward_kernel,
        offset_1,
        operands,
        # grid = (B, K, N // K, T // q, parts of S)
        grid=(call.B, call.K, group, call.q_blocks, _parts_met(call)),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"),
        in_specs=in_specs,
        out_specs=[
            pl.BlockSpec((None, None, call.HV, sizes.q), q_map),
            pl.BlockSpec((None, None, 1, sizes.q), q_map),
        ],
        out_shape=[
            shape_like((call.B, call.N, call.HV, call.padded_queries), q_BTNH.dtype, q_BTNH),
            shape_like((call.B, call.N, 1, call.padded_queries), jnp.float32, q_BTNH),
        ],
        scratch_shapes=[
            pltpu.VMEM((call.H, sizes.q), q_BTNH.dtype),
            pltpu.VMEM((sizes.resident, call.H), k_BSKH.dtype),
            pltpu.VMEM((1, sizes.q), jnp.float32),
            pltpu.VMEM((1, sizes.q), jnp.float32),
            pltpu.VMEM((call.HV, sizes.q), jnp.float32),
            pltpu.SMEM((sizes.q // sizes.forward.queries,), jnp.int32),
        ],
    )
    o_BTNH, lse_BNT = layouts.tokens_first(o, call.T), lse[:, :, 0, : call.T]
    return (o_BTNH, lse_BNT), (q_BTNH, k_BSKH, v_BSKH, segments, angles, offset_1, sinks_N, o_BTNH, lse_BNT)


def attend_backward(call: layouts.Call, residuals, cotangents):
    """Gradients of q, k, v and sinks, from `_attend_fwd`'s residuals; o and lse may be those of more keys."""
    q_BTNH, k_BSKH, v_BSKH, segments, angles, offset_1, sinks_N, o_BTNH, lse_BNT = residuals
    do_BTNH, dlse_BNT = cotangents
    dsinks_N = None
    if sinks_N is not None:
        delta_BNT = jnp.einsum("BTNH,BTNH->BNT", o_BTNH.astype(jnp.float32), do_BTNH.astype(jnp.float32)) - dlse_BNT
        blind_BNT = jnp.isneginf(lse_BNT)
        p_BNT = jnp.exp(sinks_N[None, :, None] - jnp.where(blind_BNT, jnp.inf, lse_BNT))
        dsinks_N = -jnp.sum(jnp.where(blind_BNT, 0.0, p_BNT * delta_BNT), axis=(0, 2))
    operands = [
        *(layouts.queries(call, x) for x in (q_BTNH, o_BTNH, do_BTNH)),
        *(layouts.rows(call, x) for x in (lse_BNT, dlse_BNT)),
        *(layouts.keys(call, x) for x in (k_BSKH, v_BSKH)),
    ]
    if call.parts == 1:
        dq, dk, dv = _backward_part(call, offset_1, 0, segments, angles, operands, q_BTNH.dtype)
    else:

        def add_part(dq, part):
            dq_part, dk, dv = _backward_part(call, offset_1, part, segments, angles, operands, jnp.float32)
            return dq + dq_part, (dk, dv)

        zeros = vary_like(jnp.zeros(operands[0].shape, jnp.float32), operands[0])
        dq, parts = jax.lax.scan(add_part, zeros, jnp.arange(call.parts, dtype=jnp.int32))
        dk, dv = (jnp.moveaxis(x, 0, 3).reshape(*x.shape[1:4], call.padded_keys) for x in parts)
    dq_BTNH = layouts.tokens_first(dq, call.T).astype(q_BTNH.dtype)
    dk_BSKH, dv_BSKH = (layouts.tokens_first(x, call.S) for x in (dk, dv))
    return dq_BTNH, dk_BSKH, dv_BSKH, None, None, None, dsinks_N


_attend.defvjp(_attend_fwd, attend_backward)


def _backward_part(call: layouts.Call, offset_1, part, segments, angles, operands, dq_dtype):
    """dq from one part of the keys, [B, N, H, T] in whole blocks, and that part's dk and dv, [B, K, H, resident]."""
    sizes = call.spec.sizes
    group = call.N // call.K

    def q_map(b, k, g, i, scalars_ref):  # a block of queries, and its statistics
        return b, k * group + g, 0, i

    def k_map(b, k, g, i, scalars_ref):  # the part's keys and values
        return b, k, 0, scalars_ref[1]

    def dk_map(b, k, g, i, scalars_ref):  # gradients of the part
        return b, k, 0, 0

    def block(shape, index_map):
        return pl.BlockSpec((None, None, *shape), index_map)

    in_specs, of_rows = layouts.row_specs(
        call, segments, angles, lambda b, k, g, i, ref: (b, i), lambda b, k, g, i, ref: (b, ref[1])
    )
    in_specs += [
        *(block((rows, sizes.q), q_map) for rows in (call.H, call.HV, call.HV, 1, 1)),
        *(block((rows, sizes.resident), k_map) for rows in (call.H, call.HV)),
    ]
    like, dtype = operands[-1], operands[-1].dtype
    part_1 = vary_like(jnp.asarray(part, jnp.int32).reshape(1), offset_1)
    return _pallas_call(
        call,
        backward_kernel,
        jnp.concatenate([offset_1, part_1]),
        of_rows + operands,
        # grid = (B, K, N // K, T // q)
        grid=(call.B, call.K, group, call.q_blocks),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        in_specs=in_specs,
        out_specs=[
            block((call.H, sizes.q), q_map),
            block((call.H, sizes.resident), dk_map),
            block((call.HV, sizes.resident), dk_map),
        ],
        out_shape=[
            shape_like((call.B, call.N, call.H, call.padded_queries), dq_dtype, like),
            shape_like((call.B, call.K, call.H, sizes.resident), dtype, like),
            shape_like((call.B, call.K, call.HV, sizes.resident), dtype, like),
        ],
        scratch_shapes=[
            pltpu.VMEM((call.H, sizes.q), dtype),
            pltpu.VMEM((sizes.resident, call.H), dtype),
            pltpu.VMEM((sizes.resident, call.HV), dtype),
            pltpu.VMEM((call.HV, sizes.q), dtype),
            pltpu.VMEM((1, sizes.q), jnp.float32),
            pltpu.VMEM((1, sizes.q), jnp.float32),
            pltpu.VMEM((call.H, sizes.q), jnp.float32),
            pltpu.VMEM((call.H, sizes.resident), jnp.float32),
            pltpu.VMEM((call.HV, sizes.resident), jnp.float32),
            *([pltpu.VMEM((call.H, sizes.resident), dtype)] if call.spec.rotary else []),
        ],
    )


def _pallas_call(
    call: layouts.Call, kernel, scalars, operands, *, grid, semantics, in_specs, out_specs, out_shape, scratch_shapes
):
    mask = call.spec.visits.mask
    whole = "_whole" if mask.left is None and mask.right is None else ""  # so that its FLOPs can be told
    name = kernel.__name__.removesuffix("_kernel")
    # Kernels count in int32; x64 mode would make Python's ints int64, which Mosaic does not have.
    with jax.enable_x64(False):
        return pl.pallas_call(
            functools.partial(kernel, call.spec),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=in_specs,
                out_specs=out_specs,
                scratch_shapes=scratch_shapes,
            ),
            out_shape=out_shape,
            compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=call.vmem_limit),
            interpret=call.interpret,
            name=f"flash_attention_{name}{whole}",
            metadata=facts("flash_attention", name, call.facts),
        )(scalars, *operands)


def _parts_met(call: layouts.Call) -> int:
    """Most parts of the keys that a block of queries meets."""
    mask, sizes = call.spec.visits.mask, call.spec.sizes
    if mask.left is None or mask.right is None:
        return call.parts
    return min(call.parts, (sizes.q + mask.left + mask.right - 1) // sizes.resident + 2)
