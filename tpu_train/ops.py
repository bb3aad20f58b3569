"""The border to pallas_kernels: picks an implementation by the mesh's platform and wraps it in shard_map.

Kernels see one device's shard: whole sequences, some of the batch, some of the heads or of the vocabulary.
"""

import math

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.vjp import LARGEST_HEAD_DIM
from pallas_kernels.attention.xla import cudnn_can_run
from tpu_train.config import UserError
from tpu_train.precision import Compute
from tpu_train.sharding import BATCH, SPECS, P, gather

# Fewer rows than this leave most of a kernel's block empty; decoding a token reads cache and weights once, as XLA does.
SHORTEST = 128


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int,
    soft_cap: float | None,
    q_offset: int | jax.Array = 0,
    compute: Compute,
) -> jax.Array:
    """Causal attention, o_BTNH. `window` 0 is none; `segment_ids_BT` serve queries and keys (so T = S with them)."""
    mask = Mask.of(causal=True, window=window or None)
    implementation = compute.implementation
    if implementation == "pallas" and q_BTNH.shape[1] < SHORTEST:
        implementation = "xla"
    if implementation == "pallas" and q_BTNH.shape[-1] > LARGEST_HEAD_DIM:
        raise UserError(
            f"model.head_dim={q_BTNH.shape[-1]}: the Pallas kernel takes at most {LARGEST_HEAD_DIM}; "
            "set run.implementation=xla"
        )
    cudnn_can = not cudnn_can_run(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, q_offset, mask, soft_cap)
    if compute.platform == "gpu" and implementation == "xla" and cudnn_can:
        implementation = "cudnn"

    def local(q, k, v, segment_ids, offset=q_offset):
        return pallas_kernels.flash_attention(
            *(q, k, v),
            window=window or None,
            q_segment_ids_BT=segment_ids,
            kv_segment_ids_BS=segment_ids,
            q_offset=offset,
            logit_soft_cap=soft_cap,
            implementation=implementation,
        )

    segments = None if segment_ids_BT is None else SPECS["BT"]
    # An int stays one: implementations may build on an offset that they know when they are traced.
    traced_offset = [q_offset] if isinstance(q_offset, jax.Array) else []
    return jax.shard_map(
        local,
        in_specs=(SPECS["BTNH"], SPECS["BSKH"], SPECS["BSKH"], segments, *(P() for _ in traced_offset)),
        out_specs=SPECS["BTNH"],
    )(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT, *traced_offset)


def takes_gated_mlp(x_BTD: jax.Array, compute: Compute) -> bool:
    """Whether `gated_mlp` runs here; elsewhere XLA's own products do, which a CPU takes side by side."""
    devices = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in BATCH)
    return compute.implementation == "pallas" and x_BTD.shape[0] * x_BTD.shape[1] // devices >= SHORTEST


def gated_mlp(
    x_BTD: jax.Array, w_gate_DF: jax.Array, w_up_DF: jax.Array, *, activation: str, compute: Compute
) -> jax.Array:
    """act(x w_gate) * (x w_up), h_BTF; the weights as stored."""

    def local(x_BTD, w_gate_DF, w_up_DF):
        B, T, D = x_BTD.shape
        h_MF = pallas_kernels.gated_mlp(
            *(x_BTD.reshape(B * T, D), w_gate_DF, w_up_DF),
            activation=activation,
            implementation=compute.implementation,
        )
        return h_MF.reshape(B, T, -1)

    weights = (gather(w_gate_DF, "DF", x_BTD.dtype), gather(w_up_DF, "DF", x_BTD.dtype))
    w_spec = P(None, "tensor")
    run = jax.shard_map(local, in_specs=(SPECS["BTD"], w_spec, w_spec), out_specs=SPECS["BTF"])
    return run(x_BTD, *weights)


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
    # Pallas has no kernel for it yet. The reference takes the whole vocabulary; xla a slice each, summed over the axis.
    implementation = "xla" if compute.implementation == "pallas" else compute.implementation
    vocab_axis = None if implementation == "reference" else "tensor"

    def local(x_BTD, w_VD, labels_BT):
        loss, lse = pallas_kernels.linear_cross_entropy(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            w_VD,
            labels_BT.reshape(-1),
            z_loss=z_loss,
            logit_soft_cap=soft_cap,
            vocab_axis=vocab_axis,
            implementation=implementation,
        )
        return loss.reshape(labels_BT.shape), lse.reshape(labels_BT.shape)

    w_spec = P(vocab_axis, None)
    run = jax.shard_map(local, in_specs=(SPECS["BTD"], w_spec, SPECS["BT"]), out_specs=(SPECS["BT"], SPECS["BT"]))
    # Gathered in float32: the op casts for its products and returns a float32 gradient.
    return run(x_BTD, jax.reshard(gather(w_VD, "VD", jnp.dtype("float32")), w_spec), labels_BT)
