"""Validation loss: cross entropy per token, padding never counted, whatever the batches' sizes."""

import itertools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from tpu_train import context, processes
from tpu_train.loss import weighted_loss
from tpu_train.precision import Compute
from tpu_train.sharding import outside


def make_eval_step(compute: Compute) -> Callable:
    """The jitted (model, batch of [B, T]) -> (summed cross entropy, summed weights)."""

    @jax.jit
    def eval_step(model, batch):
        return weighted_loss(model, batch, 0.0, compute)[1], jnp.sum(batch["weights"])

    return eval_step


def evaluate(eval_step: Callable, model, batches: Iterable, mesh: jax.sharding.Mesh, limit: int | None = None) -> float:
    """Mean cross entropy per token over the first `limit` batches, all if None; summed in float64."""
    sharding, parts = jax.NamedSharding(mesh, outside("BT", mesh)), processes.batch_share(mesh)["process_count"]

    def place(x_BT):
        rows, length = x_BT.shape
        x_BT = context.reorder(x_BT, mesh.shape["context"])
        return jax.make_array_from_process_local_data(sharding, x_BT, (rows * parts, length))

    sums = []
    for batch in itertools.islice(batches, limit):
        sums.append(eval_step(model, {name: place(x) for name, x in batch.items()}))
    totals = np.sum(np.asarray(jax.device_get(sums), np.float64), axis=0)
    return float(totals[0] / totals[1])
