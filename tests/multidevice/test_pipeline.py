"""Three steps through the stages of a pipeline against the same three on one device."""

import jax
import numpy as np
import pytest

from tpu_train import blame
from tpu_train.mesh import check_fits
from tpu_train.precision import resolve
from tpu_train.train_step import make_train_step

BASE = ("optim.clip_norm=0.5", "optim.z_loss=0.01")
LAYERS = "model.num_layers=4", "model.window_pattern=5"
EXPERTS = (
    *("model.num_layers=2", "model.window_pattern=0", "model.num_experts=4", "model.expert_dim=8"),
    *("model.aux_loss_coefficient=3.0", "model.remat=full"),
)
VARIANTS = {
    "rounds": (*BASE, *LAYERS, "mesh.stage_rounds=2", "model.qk_norm=true", "model.attention_soft_cap=20.0"),
    "many words, parts": (
        *(*BASE, *LAYERS, "mesh.stage_microbatches=2", "model.vocab_size=256", "model.tie_embeddings=false"),
        *("optim.accumulation_steps=2", "data.batch_size=16", "optim.optimizer=muon", "model.remat=dots"),
    ),
    "two groups a stage": (
        *(*BASE, "model.num_layers=8", "model.remat=full", "model.scan_unroll=2", "model.logit_soft_cap=9.0"),
        *("data.packing=false", "optim.ema_decay=0.9"),
    ),
    "aux loss": (*BASE, *EXPERTS),
    "bias": (*BASE, *EXPERTS, "model.balance=bias", "model.bias_update_rate=0.1", "model.capacity_factor=0.8"),
}
# (data, fsdp, tensor, context, expert, stage)
CASES = [
    ((1, 1, 1, 1, 1, 2), "rounds"),
    ((1, 1, 1, 1, 1, 4), "two groups a stage"),
    ((2, 1, 1, 1, 1, 2), "rounds"),
    ((1, 2, 1, 1, 1, 2), "many words, parts"),
    ((1, 1, 2, 1, 1, 2), "two groups a stage"),
    ((1, 1, 1, 2, 1, 2), "many words, parts"),
    ((1, 2, 1, 1, 2, 2), "aux loss"),
    ((1, 1, 2, 1, 1, 2), "bias"),
    ((2, 2, 1, 1, 1, 2), "rounds"),
    ((1, 1, 2, 2, 1, 2), "rounds"),
]


@pytest.fixture(scope="module")
def three_steps(tiny, random_batch, fresh_state, place, mesh_of):
    done = {}

    def run(shape, variant, *overrides):
        key = (shape, variant, overrides)
        if key not in done:
            mesh = mesh_of(*shape)
            config = tiny(*VARIANTS[variant], *overrides)
            check_fits(config, mesh)
            step = make_train_step(config, resolve(config.run, "cpu", config.mesh))
            state, metrics = fresh_state(config), []
            for seed in range(3):
                state, measured = step(state, place(random_batch(config, seed)))
                metrics.append({name: float(x) for name, x in measured.items()})
            with_paths = jax.tree_util.tree_leaves_with_path
            weights = {jax.tree_util.keystr(path): np.asarray(x) for path, x in with_paths(state.model)}
            done[key] = metrics, weights
        return done[key]

    return run


def assert_same(got, wanted):
    for mine, right in zip(got[0], wanted[0], strict=True):
        assert mine == pytest.approx(right, rel=1e-5)
    for name, w in wanted[1].items():
        np.testing.assert_allclose(got[1][name], w, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_equals_single_device(three_steps, case):
    assert_same(three_steps(*case), three_steps((1, 1, 1, 1, 1, 1), case[1]))


def test_a_bad_step_is_looked_into_block_by_block(tiny, random_batch, fresh_state, place, mesh_of):
    config = tiny("model.window_pattern=0")
    mesh_of(stage=2)
    state = fresh_state(config)
    for w, factor in ((state.model.blocks[0].mlp.up_DF, 1e20), (state.model.blocks[0].mlp.down_FD, 1e30)):
        w[...] = w[...].at[1].multiply(factor)
    lines = blame.look_into(state, place(random_batch(config)), config, resolve(config.run, "cpu"))
    assert lines[1].startswith("weights: all finite")
    assert lines[-1] == "first bad tensor, of the activations: blocks.0.mlp of layer 1"
