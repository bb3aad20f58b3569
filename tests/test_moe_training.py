"""A mixture of experts learns, balances its loads, evaluates, decodes, and goes through a checkpoint."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_train import data, examine
from tpu_train.checkpoint import Checkpoints
from tpu_train.loss import hidden_states, weighted_loss
from tpu_train.models.transformer import empty_cache
from tpu_train.precision import resolve
from tpu_train.sharding import SPECS
from tpu_train.train_step import abstract_state, batch_names, init_state, make_train_step

ONE_LAYER = ("model.num_layers=1", "model.window_pattern=0", "model.num_experts=8", "model.expert_dim=16")


@pytest.fixture(scope="module")
def forty_steps(tiny, random_batch, place, mesh_of):
    """forty_steps(overrides): the metrics of each step on one batch."""
    mesh_of()

    def run(*overrides):
        config = tiny(*ONE_LAYER, "optim.eps=1e-8", "optim.warmup_steps=3", *overrides)
        compute = resolve(config.run, "cpu")
        step, state, batch = make_train_step(config, compute), init_state(config, compute), place(random_batch(config))
        metrics = []
        for _ in range(40):
            state, measured = step(state, batch)
            metrics.append({name: float(x) for name, x in measured.items()})
        return metrics

    return run


@pytest.mark.slow
def test_loss_falls_and_either_way_of_balancing_evens_the_loads_out(forty_steps):
    metrics = {
        balance: forty_steps(
            f"model.balance={balance}", "model.bias_update_rate=0.01", "model.aux_loss_coefficient=0.1"
        )
        for balance in ("none", "aux_loss", "bias")
    }
    last = {balance: np.mean([m["load_imbalance"] for m in steps[-5:]]) for balance, steps in metrics.items()}
    for steps in metrics.values():
        assert steps[0]["loss"] == pytest.approx(np.log(64), abs=0.2)
        assert steps[-1]["loss"] < steps[0]["loss"] / 2
        assert {m["dropped_share"] for m in steps} == {0.0}
    assert last["aux_loss"] < last["none"] - 0.1
    assert last["bias"] < last["none"] - 0.1


def test_padding_changes_neither_loss_nor_loads(tiny, random_batch, random_model, place):
    """The same rows in longer ones; and a token without weight is no padding."""
    config = tiny(*ONE_LAYER, "model.router=sigmoid", "model.balance=bias")
    model, compute = random_model(config), resolve(config.run, "cpu")

    @jax.jit
    def measure(model, batch):
        return weighted_loss(model, batch, 0.0, compute)[0], hidden_states(model, batch, compute)[1][0]

    batch = {name: x[0] for name, x in random_batch(config).items()}
    loss, load = measure(model, place(batch))
    assert int(load.chosen_E.sum()) == 2 * batch["weights"].sum()
    wider = {name: np.pad(x, ((0, 0), (0, 8))) for name, x in batch.items()}
    wider["tokens"][:, -8:] = 7
    wide_loss, wide_load = measure(model, place(wider))
    assert float(wide_loss) == pytest.approx(float(loss), rel=1e-6)
    np.testing.assert_array_equal(wide_load.chosen_E, load.chosen_E)
    np.testing.assert_allclose(wide_load.shares_E, load.shares_E, rtol=1e-5)

    # A prompt's tokens have no weight in the loss, and go through experts all the same.
    prompted = batch | {"weights": batch["weights"] * (np.arange(16) > 2)[None]}
    assert prompted["weights"].sum() < batch["weights"].sum()
    np.testing.assert_array_equal(measure(model, place(prompted))[1].chosen_E, load.chosen_E)
    assert "segment_ids" in batch_names(tiny(*ONE_LAYER, "data.packing=false"))
    assert "segment_ids" not in batch_names(tiny("data.packing=false"))

    # The same layers one by one, as `blame` looks into them.
    tensors = list(examine.activations(model, place(batch), compute))
    assert [t.name for t in tensors if "mlp" in t.name] == ["blocks.0.mlp_norm of layer 0", "blocks.0.mlp of layer 0"]
    last, _ = jax.jit(hidden_states, static_argnums=2)(model, place(batch), compute)
    assert tensors[-1].largest == pytest.approx(float(np.abs(last).max()), rel=1e-5)


def test_decoding_a_token_at_a_time_gives_what_the_whole_row_gives(tiny, random_model, mesh_of):
    config = tiny(*ONE_LAYER, "model.num_shared_experts=1")
    compute = resolve(config.run, "cpu")
    tokens_BT = np.random.default_rng(0).integers(0, 64, (2, 5), dtype=np.int32)
    positions_BT = np.broadcast_to(np.arange(5, dtype=np.int32)[None], (2, 5))

    @jax.jit
    def whole(model, tokens_BT, positions_BT):
        return model(tokens_BT, positions_BT, None, compute)[0]

    @jax.jit
    def one(model, tokens_BT, positions_BT, cache, position):
        return model(tokens_BT, positions_BT, None, compute, cache, position)

    mesh_of()
    wanted = np.asarray(
        whole(random_model(config), *(jax.device_put(a, SPECS["BT"]) for a in (tokens_BT, positions_BT)))
    )
    mesh_of(expert=2)
    model, cache = random_model(config), empty_cache(config.model, 2, 5, compute.dtype)
    for t in range(5):
        step = (jax.device_put(a[:, t : t + 1], SPECS["BT"]) for a in (tokens_BT, positions_BT))
        x_BTD, cache = one(model, *step, cache, jnp.int32(t))
        np.testing.assert_allclose(x_BTD[:, 0], wanted[:, t], rtol=1e-4, atol=1e-5)


def test_biases_survive_a_checkpoint_onto_another_mesh(tiny, fresh_state, mesh_of, tmp_path):
    (tmp_path / "a.txt").write_text("some words of a document " * 40)
    config = tiny(*ONE_LAYER, "model.balance=bias", "data.source=text", f"data.paths={tmp_path}/*.txt")
    compute = resolve(config.run, "cpu")
    mesh_of(expert=4)
    state = fresh_state(config)
    wanted = [np.asarray(x) for x in jax.tree.leaves(state.model)]
    with (
        contextlib.closing(data.train_batches(config.data, vocab_size=256)) as batches,
        Checkpoints(tmp_path, keep_last=1) as checkpoints,
    ):
        checkpoints.save(1, state, batches, config)
    mesh_of(data=2, expert=2)
    with Checkpoints(tmp_path, keep_last=None) as checkpoints:
        assert checkpoints.saved_config(1).model.balance == "bias"
        restored = checkpoints.restore(1, abstract_state(config, compute))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(restored.model)]
    assert any("bias_E" in name for name in names)
    for mine, right in zip(jax.tree.leaves(restored.model), wanted, strict=True):
        np.testing.assert_array_equal(mine, right)
