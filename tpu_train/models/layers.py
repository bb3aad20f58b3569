"""The parts of a block: RMSNorm, rotary positions, attention and the MLP."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_train import ops
from tpu_train.config import ModelConfig
from tpu_train.models.dropout import Dropout
from tpu_train.models.held import Held, scales_spec
from tpu_train.models.init import Init
from tpu_train.precision import Compute
from tpu_train.sharding import SPECS, P, gather, gather_inside, is_local


@dataclasses.dataclass(frozen=True)
class Context:
    """What every block reads beside its input: rotary angles, segments, how to compute, and where decoding stands."""

    cos_BTH: jax.Array
    sin_BTH: jax.Array
    segment_ids_BT: jax.Array | None
    compute: Compute
    cache_position: jax.Array | None = None
    real_BT: jax.Array | None = None  # false at padding; None: there is none
    dropout: Dropout | None = None  # in training alone

    def layers_on(self, layers: jax.Array | int) -> "Context":
        """The same for a block that is `layers` further up."""
        return self if self.dropout is None else dataclasses.replace(self, dropout=self.dropout.layers_on(layers))


ACTIVATIONS = {
    "silu": jax.nn.silu,
    # By erf, as PyTorch does: jax.nn.gelu's erfc costs a CPU twice as much and is no closer in absolute terms.
    "gelu": lambda x: 0.5 * x * (1.0 + jax.lax.erf(x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(name: str, x: jax.Array) -> jax.Array:
    """ACTIVATIONS[name] of `x`; the backward pass keeps only x, so less memory is written and read again."""
    return ACTIVATIONS[name](x)


activate.defvjp(
    lambda name, x: (ACTIVATIONS[name](x), x),
    lambda name, x, cotangent: jax.vjp(ACTIVATIONS[name], x)[1](cotangent),
)


def project(x: jax.Array, w: nnx.Param | Held, dims: str, num_in: int = 1, *, compute: Compute) -> jax.Array:
    """x_BT... times the weight: contracts the last `num_in` dims of x with the first ones of w, in x's dtype.

    One product of matrices, [B T, in] x [in, out]: contracting B and T separately in the weight's gradient would make
    XLA on CPU transpose the activations first (measured: 1.5 times the whole step).
    """
    spec, in_spec, out_spec = SPECS[dims], SPECS["BT" + dims[:num_in]], SPECS["BT" + dims[num_in:]]
    if isinstance(w, Held) or compute.quantized != "none":
        return _project_quantized(x, w, dims, num_in, compute)
    w_ = w[...].astype(x.dtype)
    if jax.sharding.get_abstract_mesh().size == 1:  # XLA on CPU keeps a sum over one device
        return jax.reshard(_product(jax.reshard(x, P()), jax.reshard(w_, P()), num_in), out_spec)

    def local(x, w):
        rings = ops.has_rings(compute)
        y = _ring_product(x, w, dims, num_in, compute) if rings else _product(x, gather_inside(w, dims), num_in)
        return jax.lax.psum(y, "tensor") if spec[0] == "tensor" else y

    if is_local():
        return local(x, w_)
    return jax.shard_map(local, in_specs=(in_spec, spec), out_specs=out_spec)(jax.reshard(x, in_spec), w_)


def _project_quantized(x: jax.Array, w: nnx.Param | Held, dims: str, num_in: int, compute: Compute) -> jax.Array:
    """`project` by ops.product. Along `tensor` each device quantises its own part of what is contracted."""
    spec, in_spec, out_spec = SPECS[dims], SPECS["BT" + dims[:num_in]], SPECS["BT" + dims[num_in:]]

    def local(x, w, scales):
        w = gather_inside(w, dims)
        x_MI = x.reshape(-1, math.prod(w.shape[:num_in]))
        w_IO = w.reshape(x_MI.shape[1], -1)
        y_MO = ops.product(x_MI, w_IO if scales is None else (w_IO, scales.reshape(1, -1)), compute=compute)
        y = y_MO.reshape(*x.shape[:2], *w.shape[num_in:])
        return jax.lax.psum(y, "tensor") if spec[0] == "tensor" else y

    if isinstance(w, Held):
        values, scales, of_scales = w.values, w.scales, scales_spec(dims, num_in)
    else:
        values, scales, of_scales = w[...].astype(x.dtype), None, None
    if is_local():
        return local(x, values, scales)
    run = jax.shard_map(local, in_specs=(in_spec, spec, of_scales), out_specs=out_spec)
    return run(jax.reshard(x, in_spec), values, scales)


def _product(x: jax.Array, w: jax.Array, num_in: int) -> jax.Array:
    x_MI = x.reshape(-1, math.prod(w.shape[:num_in]))
    y_MO = jnp.einsum("MI,IO->MO", x_MI, w.reshape(x_MI.shape[1], -1))
    return y_MO.reshape(*x.shape[:2], *w.shape[num_in:])


def _ring_product(x: jax.Array, w: jax.Array, dims: str, num_in: int, compute: Compute) -> jax.Array:
    """`_product` with the whole of a weight's part; D is all of what is contracted or of what comes out."""
    x_MI = x.reshape(-1, math.prod(x.shape[2:]))
    w_IO = w.reshape(math.prod(w.shape[:num_in]), -1)
    y_MO = ops.ring_product(x_MI, w_IO, 1 if dims[-1] == "D" else 0, compute=compute)
    return y_MO.reshape(*x.shape[:2], *([-1] if dims[-1] == "D" else w.shape[num_in:]))


def project_each(x_BTD: jax.Array, *weights: tuple[nnx.Param | Held, str], compute: Compute) -> list[jax.Array]:
    """`project` of x by each (weight, dims).

    On a CPU that holds whole weights, one product with all of them side by side: narrow ones run at half the speed.
    """
    size = jax.sharding.get_abstract_mesh().shape
    arrays = [(w, dims) for w, dims in weights if not isinstance(w, Held)]
    apart = compute.platform != "cpu" or size["tensor"] > 1 or size["context"] > 1 or is_local()
    apart |= ops.has_rings(compute)
    if apart or compute.quantized != "none" or len(arrays) < len(weights):
        return [project(x_BTD, w, dims, compute=compute) for w, dims in weights]
    B, T, D = x_BTD.shape
    whole = [jax.reshard(gather(w[...], dims, x_BTD.dtype), P()).reshape(D, -1) for w, dims in arrays]
    y_MO = jnp.einsum("MD,DO->MO", x_BTD.reshape(B * T, D), jnp.concatenate(whole, axis=1))
    parts = jnp.split(y_MO, np.cumsum([w.shape[1] for w in whole])[:-1], axis=1)
    return [
        part.reshape(B, T, *w.shape[1:], out_sharding=SPECS["BT" + dims[1:]])
        for part, (w, dims) in zip(parts, arrays, strict=True)
    ]


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last dim (arXiv:1910.07467), in float32; x's dtype out."""

    def __init__(self, dim: int, eps: float, init: Init):
        self.scale_D = init.scale(dim)
        self.eps = eps

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` of any leading dims."""
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = self.scale_D[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (x32 * inverse * scale).astype(x.dtype)


def rotary_angles(
    positions_BT: jax.Array, head_dim: int, theta: float, compute: Compute
) -> tuple[jax.Array, jax.Array]:
    """Float32 cos and sin, each [B, T, H // 2]: positions are exact there, which bfloat16's stop being past 256."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions_BT.astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    if compute.platform != "cpu":
        return jnp.cos(angles), jnp.sin(angles)
    # XLA on CPU drops optimization barriers and fuses: it would take the cosine again for every head of every layer.
    # What a conditional returns, it computes once; both sides are right, but not so that XLA could tell.
    some = jnp.max(positions_BT) >= 0
    return jax.lax.cond(some, lambda: (jnp.cos(angles), jnp.sin(angles)), lambda: (jnp.cos(-angles), -jnp.sin(-angles)))


class Attention(nnx.Module):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions and optional q/k norm."""

    def __init__(self, config: ModelConfig, window: int, init: Init):
        D, N, K, H = config.model_dim, config.num_heads, config.kv_heads, config.head_size
        self.q_DNH = init.weight("q_DNH", (D, N, H), D**-0.5)
        self.k_DKH = init.weight("k_DKH", (D, K, H), D**-0.5)
        self.v_DKH = init.weight("v_DKH", (D, K, H), D**-0.5)
        self.out_NHD = init.weight("out_NHD", (N, H, D), (N * H * 2 * config.num_layers) ** -0.5)
        self.q_norm = RMSNorm(H, config.norm_eps, init) if config.qk_norm else None
        self.k_norm = RMSNorm(H, config.norm_eps, init) if config.qk_norm else None
        self.window = window
        self.soft_cap = config.attention_soft_cap

    @jax.named_scope("attention")
    def __call__(self, x_BTD, context, cache=None):
        """(output_BTD, cache). `cache` is (k_BSKH, v_BSKH), written at `context.cache_position`."""
        q_BTNH, k_BTKH, v_BTKH = project_each(
            x_BTD, (self.q_DNH, "DNH"), (self.k_DKH, "DKH"), (self.v_DKH, "DKH"), compute=context.compute
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        rotary: tuple[jax.Array, jax.Array] | None = (context.cos_BTH, context.sin_BTH)
        offset: int | jax.Array = 0
        k_BSKH, v_BSKH = k_BTKH, v_BTKH
        if cache is not None:
            q_BTNH, k_BTKH = (ops.apply_rope(x, context.cos_BTH, context.sin_BTH) for x in (q_BTNH, k_BTKH))
            rotary = None
            offset = context.cache_position
            k_BSKH = jax.lax.dynamic_update_slice_in_dim(cache[0], k_BTKH, offset, axis=1)
            v_BSKH = jax.lax.dynamic_update_slice_in_dim(cache[1], v_BTKH, offset, axis=1)
            cache = (k_BSKH, v_BSKH)
        o_BTNH = ops.attention(
            *(q_BTNH, k_BSKH, v_BSKH, context.segment_ids_BT),
            window=self.window,
            soft_cap=self.soft_cap,
            q_offset=offset,
            rotary=rotary,
            compute=context.compute,
        )
        return project(o_BTNH, self.out_NHD, "NHD", num_in=2, compute=context.compute), cache


class MLP(nnx.Module):
    """act(x gate) * (x up), then down (arXiv:2002.05202); without a gate, act(x up), then down."""

    def __init__(self, config: ModelConfig, init: Init, dim: int | None = None):
        D, F = config.model_dim, config.mlp_dim if dim is None else dim
        self.gate_DF = init.weight("gate_DF", (D, F), D**-0.5) if config.gated_mlp else None
        self.up_DF = init.weight("up_DF", (D, F), D**-0.5)
        self.down_FD = init.weight("down_FD", (F, D), (F * 2 * config.num_layers) ** -0.5)
        self.activation = config.activation

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: jax.Array, compute: Compute) -> jax.Array:
        if self.gate_DF is None:
            hidden_BTF = activate(self.activation, project(x_BTD, self.up_DF, "DF", compute=compute))
        elif not isinstance(self.gate_DF, Held) and ops.takes_gated_mlp(x_BTD, compute):
            weights = self.gate_DF[...], self.up_DF[...]
            hidden_BTF = ops.gated_mlp(x_BTD, *weights, activation=self.activation, compute=compute)
        else:
            gate_BTF, up_BTF = project_each(x_BTD, (self.gate_DF, "DF"), (self.up_DF, "DF"), compute=compute)
            hidden_BTF = activate(self.activation, gate_BTF) * up_BTF
        return project(hidden_BTF, self.down_FD, "FD", compute=compute)
