"""How evenly the experts are used: counted over the tokens of the whole step, and what keeps it even.

Loads are sums over the real tokens of every device and micro-batch; only sums are ever divided.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Load:
    """Sums over tokens of one layer, or stacked along a leading L of several."""

    chosen_E: jax.Array  # int32: how many tokens chose the expert
    shares_E: jax.Array  # float32: the tokens' scores, each token's over their sum
    dropped: jax.Array  # int32: choices that met a full expert


def balance_loss(loads: Sequence[Load], of_step: Sequence[Load], experts_per_token: int) -> jax.Array:
    """The auxiliary loss, summed over layers: E sum_e f_e P_e for each, 1 where all experts are used alike.

    f_e is the share of the choices that went to expert e and P_e the mean of the tokens' shares of e (arXiv:2101.03961,
    eq. 4 to 6, whose f counts one choice a token; arXiv:2412.19437, eq. 17 to 20, over all tokens in place of a
    sequence's). f and the number of tokens are `of_step`, the whole step's; P's sum is that of `loads`, a part of it:
    over the parts of a step the results add up to the loss of the step, and so do their gradients.
    """
    total = jnp.float32(0.0)
    for load, whole in zip(loads, of_step, strict=True):
        chosen_LE = jax.lax.stop_gradient(whole.chosen_E.astype(jnp.float32))
        choices_L1 = jnp.maximum(jnp.sum(chosen_LE, axis=-1, keepdims=True), 1.0)
        mean_LE = load.shares_E * (experts_per_token / choices_L1)
        total += chosen_LE.shape[-1] * jnp.sum(chosen_LE / choices_L1 * mean_LE)
    return total


def moved_bias(bias_LE: jax.Array, load: Load, rate: float) -> jax.Array:
    """The bias after a step: up by `rate` for an expert chosen less than the mean, down for one chosen more.

    arXiv:2408.15664, algorithm 1.
    """
    chosen_LE = load.chosen_E.astype(jnp.float32)
    return bias_LE + rate * jnp.sign(jnp.mean(chosen_LE, axis=-1, keepdims=True) - chosen_LE)


def measures(loads: Sequence[Load], experts_per_token: int) -> dict[str, jax.Array]:
    """What is logged of a step. A layer's imbalance is its busiest expert's load over the mean of its experts.

    load_imbalance, load_imbalance_worst: the mean over layers, and the largest. balance_loss: the mean over layers,
    without its coefficient. dropped_share: of all choices.
    """
    chosen_LE = jnp.concatenate([load.chosen_E for load in loads]).astype(jnp.float32)
    choices_L = jnp.maximum(jnp.sum(chosen_LE, axis=1), 1.0)
    imbalance_L = jnp.max(chosen_LE, axis=1) * chosen_LE.shape[1] / choices_L
    dropped = sum(jnp.sum(load.dropped.astype(jnp.float32)) for load in loads)
    return {
        "load_imbalance": jnp.mean(imbalance_L),
        "load_imbalance_worst": jnp.max(imbalance_L),
        "balance_loss": balance_loss(loads, loads, experts_per_token) / chosen_LE.shape[0],
        "dropped_share": dropped / jnp.sum(choices_L),
    }
