"""A mixture of experts learns, balances its loads, evaluates, decodes, and goes through a checkpoint."""

import jax
import numpy as np
import pytest

from tpu_train.checkpoint import Checkpoints
from tpu_train.data import Tokenizer, load_tokenizer
from tpu_train.generate import sample_text
from tpu_train.loss import hidden_states, weighted_loss
from tpu_train.precision import resolve
from tpu_train.train_step import abstract_state, init_state, make_train_step

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
        balance: forty_steps(f"model.balance={balance}", "model.bias_update_rate=0.01", "model.aux_loss_coefficient=0.1")
        for balance in ("none", "aux_loss", "bias")
    }
    last = {balance: np.mean([m["load_imbalance"] for m in steps[-5:]]) for balance, steps in metrics.items()}
    print(last, {balance: steps[-1]["loss"] for balance, steps in metrics.items()})
    for steps in metrics.values():
        assert steps[0]["loss"] == pytest.approx(np.log(64), abs=0.2)
        assert steps[-1]["loss"] < steps[0]["loss"] / 2
        assert {m["dropped_share"] for m in steps} == {0.0}
    assert last["aux_loss"] < last["none"] - 0.1
    assert last["bias"] < last["none"] - 0.1
