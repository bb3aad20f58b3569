"""The border to pallas_kernels: picks an implementation by the mesh's platform and wraps it in shard_map.

Kernels see one device's shard: whole sequences or, along `context`, two chunks of them (context.py), some of the batch,
some of the heads or of the vocabulary.
"""

import math

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import apply_rope
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.vjp import LARGEST_HEAD_DIM
from pallas_kernels.attention.xla import cudnn_can_run
from pallas_kernels.cross_entropy.tpu import kernels_pay
from pallas_kernels.quantized_matmul import Quantized
from pallas_kernels.quantized_matmul import kernels_pay as eight_bit_kernels_pay
from pallas_kernels.quantized_matmul.quantize import quantize_over
from tpu_train import context
from tpu_train.config import UserError
from tpu_train.precision import Compute
from tpu_train.sharding import (
    BATCH,
    SHARDS,
    SPECS,
    P,
    axes_outside,
    gather_inside,
    num_shards,
    on_devices,
    outside,
    own_shape,
    vary_over,
)

# Fewer rows than this leave most of a kernel's block empty; decoding a token reads cache and weights once, as XLA does.
SHORTEST = 128
RING = "fsdp"  # the mesh axis round which gradients are sent


def _enough(rows: int, compute: Compute) -> bool:
    """Whether the kernels are worth their while for so many rows, where they are asked for."""
    return compute.implementation != "pallas" or compute.kernels_always or rows >= SHORTEST


@jax.named_scope("embed")
def embed(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of the table as stored, x_BTD in `dtype`.

    A device looks up its slice of D for all tokens that share the table with it, and they exchange what they found:
    a few rows cross the mesh, and neither the table nor its gradient is ever whole.
    """
    size = jax.sharding.get_abstract_mesh().shape
    if math.prod(size.values()) == 1:  # XLA on CPU keeps a sum over one device
        return table_VD.at[tokens_BT].get(out_sharding=SPECS["BTD"]).astype(dtype)
    shards = axes_outside(SHARDS)

    def local(table_VD, tokens_BT):
        if num_shards(shards) > 1:
            tokens_BT = jax.lax.all_gather(tokens_BT, shards, tiled=True)
        if size["tensor"] == 1:
            x_BTD = table_VD.at[tokens_BT].get()
        else:
            rows_BT = tokens_BT - jax.lax.axis_index("tensor") * table_VD.shape[0]
            x_BTD = table_VD.at[rows_BT].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        x_BTD = x_BTD.astype(dtype)
        if num_shards(shards) > 1:
            x_BTD = jax.lax.all_to_all(x_BTD, shards, split_axis=0, concat_axis=2, tiled=True)
        return jax.lax.psum(x_BTD, "tensor")

    return jax.shard_map(local, in_specs=(outside("VD"), outside("BT")), out_specs=outside("BTD"))(
        table_VD, jax.reshard(tokens_BT, outside("BT"))
    )


@jax.named_scope("flash_attention")
def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int,
    soft_cap: float | None,
    q_offset: int | jax.Array = 0,
    rotary: tuple[jax.Array, jax.Array] | None = None,
    compute: Compute,
) -> jax.Array:
    """Causal attention, o_BTNH. `window` 0 is none; `segment_ids_BT` serve queries and keys (so T = S with them).

    `rotary`: cos and sin, [B, T, H / 2], by which q and k are turned first; only the kernels do that as they go.
    """
    if jax.sharding.get_abstract_mesh().shape["context"] > 1:
        if rotary is not None:
            q_BTNH, k_BSKH = (apply_rope(x, *rotary) for x in (q_BTNH, k_BSKH))
        return _context_attention(
            *(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT),
            window=window,
            soft_cap=soft_cap,
            q_offset=q_offset,
            compute=compute,
        )
    mask = Mask.of(causal=True, window=window or None)
    implementation = compute.implementation
    if not _enough(q_BTNH.shape[1], compute):
        implementation = "xla"
    _check_head_dim(q_BTNH, implementation)
    cudnn_can = not cudnn_can_run(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, q_offset, mask, soft_cap)
    if compute.platform == "gpu" and implementation == "xla" and cudnn_can:
        implementation = "cudnn"

    def local(q, k, v, segment_ids, rotary, offset=q_offset):
        return pallas_kernels.flash_attention(
            *(q, k, v),
            window=window or None,
            q_segment_ids_BT=segment_ids,
            kv_segment_ids_BS=segment_ids,
            q_offset=offset,
            logit_soft_cap=soft_cap,
            rotary=rotary,
            implementation=implementation,
        )

    segments = None if segment_ids_BT is None else SPECS["BT"]
    angles = None if rotary is None else SPECS["BT"]
    # An int stays one: implementations may build on an offset that they know when they are traced.
    traced_offset = [q_offset] if isinstance(q_offset, jax.Array) else []
    return on_devices(
        local,
        in_specs=(*(SPECS[dims] for dims in ("BTNH", "BSKH", "BSKH")), segments, angles, *(P() for _ in traced_offset)),
        out_specs=SPECS["BTNH"],
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, rotary, *traced_offset)


def _check_head_dim(q_BTNH: jax.Array, implementation: str) -> None:
    if implementation == "pallas" and q_BTNH.shape[-1] > LARGEST_HEAD_DIM:
        raise UserError(
            f"model.head_dim={q_BTNH.shape[-1]}: the Pallas kernel takes at most {LARGEST_HEAD_DIM}; "
            "set run.implementation=xla"
        )


def _context_attention(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, *, window, soft_cap, q_offset, compute: Compute):
    """`attention` of rows whose tokens `context` splits, by the method that context.py chooses for this layer."""
    if not isinstance(q_offset, int) or q_offset or k_BTKH.shape[1] != q_BTNH.shape[1]:
        raise UserError("mesh.context splits training rows alone; decode on a mesh with mesh.context=1")
    C = jax.sharding.get_abstract_mesh().shape["context"]
    (b, t, n, H), k_ = own_shape(q_BTNH, "BTNH"), own_shape(k_BTKH, "BTKH")[2]
    implementation = compute.implementation
    if not _enough(t // 2, compute):
        implementation = "xla"
    _check_head_dim(q_BTNH, implementation)
    layer = context.Layer(C, b, t * C, n, k_, H, q_BTNH.dtype.itemsize, window)
    method = context.choose(compute.context_method, layer, has_ring=implementation != "reference")

    def local(q, k, v, segment_ids):
        return pallas_kernels.context_attention(
            *(q, k, v),
            axis="context",
            method=method,
            window=window or None,
            segment_ids_BT=segment_ids,
            logit_soft_cap=soft_cap,
            implementation=implementation,
        )

    segments = None if segment_ids_BT is None else SPECS["BT"]
    in_specs = SPECS["BTNH"], SPECS["BTKH"], SPECS["BTKH"], segments
    return on_devices(local, in_specs, SPECS["BTNH"])(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)


def takes_gated_mlp(x_BTD: jax.Array, compute: Compute) -> bool:
    """Whether `gated_mlp` runs here; elsewhere XLA's own products do, which a CPU takes side by side."""
    if compute.quantized != "none":
        return False
    rows, tokens, _ = own_shape(x_BTD, "BTD")
    return compute.implementation == "pallas" and _enough(rows * tokens, compute)


@jax.named_scope("gated_mlp")
def gated_mlp(
    x_BTD: jax.Array, w_gate_DF: jax.Array, w_up_DF: jax.Array, *, activation: str, compute: Compute
) -> jax.Array:
    """act(x w_gate) * (x w_up), h_BTF; the weights as stored."""

    def local(x_BTD, w_gate_DF, w_up_DF):
        B, T, D = x_BTD.shape
        rings = has_rings(compute)
        weights = [vary_over(w, ("data",)) if rings else gather_inside(w, "DF") for w in (w_gate_DF, w_up_DF)]
        h_MF = pallas_kernels.gated_mlp(
            *(x_BTD.reshape(B * T, D), *weights),
            activation=activation,
            sharded_over=RING if rings else None,
            implementation=compute.implementation,
        )
        return h_MF.reshape(B, T, -1)

    run = on_devices(local, (SPECS["BTD"], SPECS["DF"], SPECS["DF"]), SPECS["BTF"])
    return run(x_BTD, w_gate_DF.astype(x_BTD.dtype), w_up_DF.astype(x_BTD.dtype))


def has_rings(compute: Compute) -> bool:
    """Whether gradients of the blocks' weights go round the ring of RING: asked for, and there is more than one device.

    layout.check_fits sees to it that no other axis splits these weights then.
    """
    return compute.gradient_scatter == "ring" and jax.sharding.get_abstract_mesh().shape[RING] > 1


def ring_product(x_MI: jax.Array, w_IO: jax.Array, dim: int, *, compute: Compute) -> jax.Array:
    """x w in x's dtype, of a device's part of a weight that RING splits along `dim`: call it inside shard_map.

    The gradient's sum over `data` is of scattered parts, as in sharding.gather_inside.
    """
    w_IO = vary_over(w_IO, ("data",))
    return pallas_kernels.sharded_matmul(x_MI, w_IO, axis=RING, dim=dim, implementation=compute.implementation)


def hold_in_int8(w: jax.Array, contracted: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """(int8 values, float32 scales) of a weight that a product will contract along these dims, of size 1 in scales."""
    return quantize_over(w, contracted, jnp.int8)


def product(x_MI: jax.Array, w_IO: jax.Array | tuple[jax.Array, jax.Array], *, compute: Compute) -> jax.Array:
    """x w in x's dtype, of a device's own arrays: call it inside shard_map.

    `w_IO` is an array, quantised as it comes where run.quantized says so, or int8 values with their scales_1O.
    """
    implementation = compute.implementation
    if implementation == "pallas" and not (compute.kernels_always or eight_bit_kernels_pay()):
        implementation = "xla"
    if isinstance(w_IO, tuple):
        with jax.named_scope("quantized_matmul"):
            return pallas_kernels.quantized_matmul(x_MI, Quantized(*w_IO), implementation=implementation)
    if compute.quantized == "none":
        return jnp.einsum("MI,IO->MO", x_MI, w_IO)
    with jax.named_scope("dynamic_quantized_matmul"):
        try:
            return pallas_kernels.dynamic_quantized_matmul(
                *(x_MI, w_IO),
                quantized_backward=compute.quantized == "int8",
                implementation=implementation if _enough(x_MI.shape[0], compute) else "xla",
            )
        except ValueError as error:
            raise UserError(f"run.quantized={compute.quantized}: {error}") from error


@jax.named_scope("grouped_matmul")
def grouped_matmul(x_TD: jax.Array, w_EDF: jax.Array, group_sizes_E: jax.Array, *, compute: Compute) -> jax.Array:
    """Each row times the weights of its group, y_TF. Of a device's own arrays: call it inside shard_map."""
    implementation = compute.implementation
    if not _enough(x_TD.shape[0], compute):
        implementation = "xla"
    return pallas_kernels.grouped_matmul(x_TD, w_EDF, group_sizes_E, implementation=implementation)


@jax.named_scope("linear_cross_entropy")
def linear_cross_entropy(
    x_BTD: jax.Array,
    w_VD: jax.Array,
    labels_BT: jax.Array,
    *,
    z_loss: float,
    soft_cap: float | None,
    compute: Compute,
) -> tuple[jax.Array, jax.Array]:
    """Per-token loss_BT (z-loss included) and lse_BT in float32; `w_VD` as stored."""
    # The reference takes the whole vocabulary; the others a slice each, summed over the axes.
    size = jax.sharding.get_abstract_mesh().shape
    B, T, _ = x_BTD.shape
    axes, V, b = axes_outside(SHARDS), w_VD.shape[0], B // num_shards(axes_outside(BATCH))
    shards = num_shards(axes)
    # Devices that share the head bring together what is less: the head, or their tokens, each with a slice of it then.
    spread = B * T // size["data"] < V and V % (size["tensor"] * shards) == 0 and shards > 1
    vocab_axis = {"reference": None}.get(compute.implementation, ("tensor", *axes) if spread else "tensor")

    def local(x_BTD, w_VD, labels_BT):
        if vocab_axis == ("tensor", *axes):
            w_VD = jax.lax.all_to_all(w_VD, axes, split_axis=0, concat_axis=1, tiled=True)
            x_BTD, labels_BT = (jax.lax.all_gather(x, axes, tiled=True, to="invarying") for x in (x_BTD, labels_BT))
        elif vocab_axis is not None:
            w_VD = gather_inside(w_VD, "VD", axes)
        x_TD, implementation = x_BTD.reshape(-1, x_BTD.shape[-1]), compute.implementation
        if implementation == "pallas" and not (compute.kernels_always or kernels_pay(x_TD, w_VD)):
            implementation = "xla"
        loss, lse = pallas_kernels.linear_cross_entropy(
            x_TD,
            w_VD,
            labels_BT.reshape(-1),
            z_loss=z_loss,
            logit_soft_cap=soft_cap,
            vocab_axis=vocab_axis,
            implementation=implementation,
        )
        loss_BT, lse_BT = loss.reshape(labels_BT.shape), lse.reshape(labels_BT.shape)
        if vocab_axis == ("tensor", *axes):
            own = lambda y: jax.lax.dynamic_slice_in_dim(y, b * jax.lax.axis_index(axes), b)  # noqa: E731
            return own(loss_BT), own(lse_BT)
        return loss_BT, lse_BT

    w_VD = jax.reshard(w_VD, P()) if vocab_axis is None else w_VD
    w_spec, x_spec, each = P() if vocab_axis is None else outside("VD"), outside("BTD"), outside("BT")
    run = jax.shard_map(local, in_specs=(x_spec, w_spec, each), out_specs=(each, each))
    # As stored, in float32: the op casts for its products and returns a float32 gradient.
    return run(x_BTD, w_VD, labels_BT)
