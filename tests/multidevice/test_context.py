"""Rows split along context: packed documents against documents alone, evaluation, and the layout of a batch."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_train.config import MeshConfig
from tpu_train.context import reorder
from tpu_train.evaluate import evaluate, make_eval_step
from tpu_train.loss import weighted_loss
from tpu_train.precision import resolve

ONE_LAYER = ("model.num_layers=1", "model.window_pattern=0", "data.batch_size=4")
ROWS, LENGTH = 4, 16


@pytest.fixture
def documents():
    """The same two documents a row: packed, and each in a row of its own, padded. Every row's lengths differ."""
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, 64, (2, ROWS, LENGTH), dtype=np.int32)
    at, ends = np.arange(LENGTH)[None], rng.permutation(np.arange(3, LENGTH - 2))[:ROWS, None]
    first = at < ends
    packed = {
        "tokens": tokens,
        "labels": labels,
        "positions": np.where(first, at, at - ends).astype(np.int32),
        "segment_ids": np.where(first, 1, 2).astype(np.int32),
        "weights": np.ones((ROWS, LENGTH), np.float32),
    }

    def alone(x):
        rows = [part for row, end in zip(x, ends[:, 0], strict=True) for part in (row[:end], row[end:])]
        return np.stack([np.pad(row, (0, LENGTH - len(row))) for row in rows])

    return packed, {name: alone(np.ones_like(x) if name == "segment_ids" else x) for name, x in packed.items()}


def test_packed_rows_have_the_loss_and_gradients_of_their_documents(tiny, random_model, place, mesh_of, documents):
    mesh_of(2, context=2)
    config = tiny(*ONE_LAYER)
    compute, model = resolve(config.run, "cpu", MeshConfig(context_method="ring")), random_model(config)
    loss_of = lambda model, batch: weighted_loss(model, batch, 0.0, compute)[0]  # noqa: E731
    step = jax.jit(jax.value_and_grad(loss_of))
    (packed, grads), (alone, wanted) = (step(model, place(batch)) for batch in documents)
    assert float(packed) == pytest.approx(float(alone), rel=1e-5)
    for got, right in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5 * np.abs(right).max())


def test_evaluation_is_that_of_one_device(tiny, random_model, mesh_of, documents):
    config = tiny(*ONE_LAYER)

    def loss(*shape):
        mesh = mesh_of(*shape)
        return evaluate(make_eval_step(resolve(config.run, "cpu")), random_model(config), documents[:1], mesh)

    assert loss(1, 1, 1, 4) == pytest.approx(loss(), rel=1e-6)


@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([(), (2,), (2, 3)]))
def test_every_device_holds_an_early_and_the_matching_late_chunk(devices, chunk, leading):
    tokens = np.broadcast_to(np.arange(2 * devices * chunk), (*leading, 2 * devices * chunk))
    parts = np.split(reorder(tokens, devices), devices, axis=-1)
    for i, part in enumerate(parts):
        late = (2 * devices - 1 - i) * chunk
        wanted = [*range(i * chunk, (i + 1) * chunk), *range(late, late + chunk)]
        np.testing.assert_array_equal(part, np.broadcast_to(wanted, part.shape))
