"""The training loss: cross entropy of the next token, weighted so that it does not depend on how a batch is cut."""

import chex
import jax
import jax.numpy as jnp

from tpu_train import ops
from tpu_train.models.dropout import Dropout
from tpu_train.models.transformer import Transformer
from tpu_train.precision import Compute


def weighted_loss(
    model: Transformer, batch: dict[str, jax.Array], z_loss: float, compute: Compute, masters=None, key=None
):
    """Sums over the batch's tokens, each times its weight: (cross entropy + z-loss, cross entropy), float32 scalars.

    Third come the experts' loads, of `hidden_states`.

    `batch` holds tokens, labels, positions and, if rows are packed, segment_ids [B, T] int32 and weights [B, T]
    float32. Divide by the sum of the weights of the whole step, never of a part of it. `key` is that of the step's
    dropout (models/dropout.py), which reads places [B, T] of the batch; None: there is none.
    """
    # Weights of another shape would broadcast and give another loss without a word.
    chex.assert_rank(batch["tokens"], 2)
    chex.assert_equal_shape(list(batch.values()))
    x_BTD, loads = hidden_states(model, batch, compute, masters, key)
    with jax.named_scope("loss"):
        loss_BT, lse_BT = ops.linear_cross_entropy(
            x_BTD,
            model.output_VD,
            batch["labels"],
            z_loss=z_loss,
            soft_cap=model.config.logit_soft_cap,
            compute=compute,
        )
        # A row of padding has no defined loss: where, not a product, so that a NaN there can't leak.
        total = jnp.sum(jnp.where(batch["weights"] > 0, loss_BT * batch["weights"], 0.0))
        z_part = z_loss * jnp.sum(jnp.where(batch["weights"] > 0, jnp.square(lse_BT) * batch["weights"], 0.0))
    return total, total - jax.lax.stop_gradient(z_part), loads


def hidden_states(model: Transformer, batch: dict[str, jax.Array], compute: Compute, masters=None, key=None):
    """x_BTD and the experts' loads (see Transformer.with_loads)."""
    inputs = batch["tokens"], batch["positions"], batch.get("segment_ids")
    dropout = None if key is None else Dropout(model.config.dropout, key, batch["places"])
    x_BTD, _, loads = model.with_loads(*inputs, compute, masters=masters, real_BT=real_tokens(batch), dropout=dropout)
    return x_BTD, loads


def real_tokens(batch: dict[str, jax.Array]) -> jax.Array:
    """False at padding: segment 0, or weight 0 where there are no segments (a prompt has weight 0 too)."""
    return batch.get("segment_ids", batch["weights"]) > 0
