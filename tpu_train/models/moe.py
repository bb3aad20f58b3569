"""Mixture of experts: every token goes through `experts_per_token` of E MLPs, and through the shared ones.

The router's weights, product, scores and gates are float32. No token is dropped unless `capacity_factor` says so: an
expert then takes the first ceil(T k / E factor) of a row's choices, in the order of its tokens. Rows are the groups of
arXiv:2006.16668, and not the devices', so that what is dropped does not depend on the mesh. Padding is routed nowhere,
counts for nothing and gets zero from the experts.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_train import ops
from tpu_train.config import ModelConfig
from tpu_train.models import dispatch
from tpu_train.models.balance import Load
from tpu_train.models.init import Init
from tpu_train.models.layers import MLP, activate
from tpu_train.precision import Compute
from tpu_train.sharding import SPECS, TOKENS, P, gather_inside, on_devices


def route(
    logits_ME: jax.Array, bias_E: jax.Array | None, config: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(gates_MK, chosen_MK, shares_ME), all float32 but the chosen experts' numbers.

    The k largest scores are chosen, softmax (arXiv:2101.03961, eq. 1) or sigmoid of the logits (arXiv:2412.19437, eq.
    15); a bias counts in the choice alone (the same, eq. 16). Of equal scores the expert of the lower number is chosen.
    Gates are the chosen scores, by `normalize_gates` over their sum; shares all scores over their sum.
    """
    scores_ME = jax.nn.softmax(logits_ME) if config.router == "softmax" else jax.nn.sigmoid(logits_ME)
    ranked_ME = scores_ME if bias_E is None else scores_ME + bias_E[None]
    chosen_MK = jax.lax.top_k(jax.lax.stop_gradient(ranked_ME), config.experts_per_token)[1]
    gates_MK = jnp.take_along_axis(scores_ME, chosen_MK, axis=1)
    return (
        _over_sum(gates_MK) if config.normalize_gates else gates_MK,
        chosen_MK,
        scores_ME if config.router == "softmax" else _over_sum(scores_ME),
    )


def _over_sum(x):
    # Sigmoids of very low logits are all zero.
    return x / jnp.maximum(jnp.sum(x, axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny)


def capacity(config: ModelConfig, row_length: int) -> int | None:
    """Of a row's choices, how many an expert takes; None: all."""
    if config.capacity_factor is None:
        return None
    # What rounding adds to a whole number is no more room.
    share = row_length * config.experts_per_token * config.capacity_factor / config.num_experts
    return math.ceil(share - 1e-9 * share)


def rows_at_home(config: ModelConfig, devices: int, rows: int, length: int, parts: int = 1) -> int:
    """The most rows that can come for a device's experts, from tokens [rows, length] of each of `devices`.

    `length` is one of the `parts` that a row is cut into along `context`.
    """
    here, most = config.num_experts // devices, capacity(config, parts * length)
    each = length * min(config.experts_per_token, here)
    return devices * rows * (each if most is None else min(each, here * most))


class MoE(nnx.Module):
    """The mixture of experts of a layer, in place of its MLP."""

    def __init__(self, config: ModelConfig, init: Init):
        D, E, F = config.model_dim, config.num_experts, config.expert_size
        self.router_DE = init.weight("router_DE", (D, E), D**-0.5)
        self.bias_E = init.zeros(E) if config.balance == "bias" else None  # train_step.py moves it, no gradient does
        self.gate_EDF = init.weight("gate_EDF", (E, D, F), D**-0.5) if config.gated_mlp else None
        self.up_EDF = init.weight("up_EDF", (E, D, F), D**-0.5)
        self.down_EFD = init.weight("down_EFD", (E, F, D), (F * 2 * config.num_layers) ** -0.5)
        shared = config.num_shared_experts * F
        self.shared = MLP(config, init.of("shared"), shared) if shared else None
        self.config = config

    @jax.named_scope("experts")
    def __call__(self, x_BTD: jax.Array, real_BT: jax.Array | None, compute: Compute) -> tuple[jax.Array, Load]:
        """(y_BTD, the experts' loads over all devices). `real_BT` is false at padding; None: there is none."""
        if real_BT is None:
            real_BT = jnp.ones(x_BTD.shape[:2], bool, out_sharding=SPECS["BT"])
        weights = [None if w is None else w[...].astype(x_BTD.dtype) for w in (self.gate_EDF, self.up_EDF)]
        arrays = (x_BTD, real_BT, self.router_DE[...], None if self.bias_E is None else self.bias_E[...])
        dims = ("BTD", "BT", "DE", "E", "EDF", "EDF", "EFD")
        y_BTD, load = on_devices(
            lambda *arrays: self._local(*arrays, compute=compute),
            in_specs=tuple(SPECS[name] for name in dims),
            out_specs=(SPECS["BTD"], P()),
        )(*arrays, *weights, self.down_EFD[...].astype(x_BTD.dtype))
        return (y_BTD if self.shared is None else y_BTD + self.shared(x_BTD, compute)), load

    def _local(self, x_BTD, real_BT, router_DE, bias_E, gate_EDF, up_EDF, down_EFD, *, compute):
        """One device's tokens."""
        E, k = self.config.num_experts, self.config.experts_per_token
        real_M1 = real_BT.reshape(-1, 1)
        # Whatever padding holds reaches no gate and no gradient.
        x_MD = jnp.where(real_M1, x_BTD.reshape(real_M1.shape[0], -1), 0)
        router_DE = gather_inside(router_DE, "DE")
        logits_ME = jnp.einsum("MD,DE->ME", x_MD.astype(jnp.float32), router_DE, precision=jax.lax.Precision.HIGHEST)
        gates_MK, chosen_MK, shares_ME = route(logits_ME, bias_E, self.config)
        chosen_MK = jnp.where(real_M1, chosen_MK, E)
        kept_MK = self._within_capacity(chosen_MK, real_BT.shape[1])
        count_E = _count(kept_MK, E)
        load = Load(
            jax.lax.psum(_count(chosen_MK, E), TOKENS),
            jax.lax.psum(jnp.sum(jnp.where(real_M1, shares_ME, 0.0), axis=0), TOKENS),
            jax.lax.psum(jnp.sum((chosen_MK != kept_MK).astype(jnp.int32)), TOKENS),
        )
        # Here, on M rows, and not on R: the gradient is summed over `tensor` where x begins to vary over it.
        x_MD = jax.lax.pcast(x_MD, ("tensor",), to="varying")
        order_R, place_R = dispatch.sort_by_expert(kept_MK.reshape(-1))
        x_RD = dispatch.take_rows(x_MD, order_R, place_R, k)

        def experts(x, sizes):
            up = ops.grouped_matmul(x, gather_inside(up_EDF, "EDF"), sizes, compute=compute)
            if gate_EDF is None:
                hidden = activate(self.config.activation, up)
            else:
                gate = ops.grouped_matmul(x, gather_inside(gate_EDF, "EDF"), sizes, compute=compute)
                hidden = activate(self.config.activation, gate) * up
            return ops.grouped_matmul(hidden, gather_inside(down_EFD, "EFD"), sizes, compute=compute)

        if jax.lax.axis_size("expert") == 1:
            y_RD = experts(x_RD, count_E)
        else:
            there, back, sizes = dispatch.slices(count_E)
            size = {axis: jax.lax.axis_size(axis) for axis in ("expert", "context")}
            B, T = real_BT.shape
            rows = rows_at_home(self.config, size["expert"], B, T, size["context"])
            ragged = compute.platform == "tpu"
            y_SD = experts(dispatch.exchange(x_RD, there, back, rows, ragged), sizes)
            y_RD = dispatch.exchange(y_SD, back, there, x_RD.shape[0], ragged)
        y_MKD = dispatch.put_back(y_RD, order_R, place_R).reshape(-1, k, y_RD.shape[1])
        y_MD = jnp.sum(y_MKD.astype(jnp.float32) * gates_MK[:, :, None], axis=1)
        return jax.lax.psum(y_MD.astype(x_BTD.dtype), "tensor").reshape(x_BTD.shape), load

    def _within_capacity(self, chosen_MK, length: int):
        """E, nobody, in place of a chosen expert that is full. Of each row the device has `length` tokens."""
        C, E = jax.lax.axis_size("context"), self.config.num_experts
        most = capacity(self.config, C * length)
        if most is None:
            return chosen_MK
        chunks = 1 if C == 1 else 2
        chosen_BcR = chosen_MK.reshape(-1, chunks, length // chunks * chosen_MK.shape[1])
        of_BcRE = jax.nn.one_hot(chosen_BcR, E, dtype=jnp.int32)
        nth_BcRE = jnp.cumsum(of_BcRE, axis=2)  # from 1
        if C > 1:
            nth_BcRE += _chosen_in_chunks_before(nth_BcRE[:, :, -1])[:, :, None]
        nth_BcR = jnp.sum(nth_BcRE * of_BcRE, axis=3)
        return jnp.where(nth_BcR <= most, chosen_BcR, E).reshape(chosen_MK.shape)


def _chosen_in_chunks_before(count_BcE: jax.Array) -> jax.Array:
    """Of the rows whose chunks lie along `context`, two a device (context.py): what those before in the row count."""
    C, me = jax.lax.axis_size("context"), jax.lax.axis_index("context")
    count_CBcE = jax.lax.all_gather(count_BcE, "context")
    number_1Cc = jnp.stack([jnp.arange(C), 2 * C - 1 - jnp.arange(C)], axis=1)[None]
    mine_c11 = jnp.stack([me, 2 * C - 1 - me])[:, None, None]
    return jnp.einsum("cCd,CBdE->BcE", (number_1Cc < mine_c11).astype(jnp.int32), count_CBcE)


def _count(chosen, num_experts: int) -> jax.Array:
    """How often each expert is chosen, int32 [E]; E itself is nobody."""
    return jnp.sum((chosen[:, :, None] == jnp.arange(num_experts)[None, None]).astype(jnp.int32), axis=(0, 1))
