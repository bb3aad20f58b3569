"""Three steps through the stages of a pipeline against the same three on one device."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_experts import assert_same

from tpu_train import blame
from tpu_train.config import UserError
from tpu_train.mesh import check_fits
from tpu_train.models import pipeline
from tpu_train.precision import resolve
from tpu_train.stages import Schedule, microbatches
from tpu_train.train_step import loss_and_grads, make_train_step

BASE = ("optim.clip_norm=0.5", "optim.z_loss=0.01")
LAYERS = "model.num_layers=4", "model.window_pattern=5"
VARIANTS = {
    "two rounds": (*BASE, *LAYERS, "mesh.stage_rounds=2", "model.qk_norm=true", "model.attention_soft_cap=20.0"),
    "many words, accumulated": (
        *(*BASE, *LAYERS, "mesh.stage_microbatches=2", "model.vocab_size=256", "model.tie_embeddings=false"),
        *("optim.accumulation_steps=2", "data.batch_size=16", "optim.optimizer=muon", "model.remat=dots"),
    ),
    # Groups of two layers: four a stage, two in each round.
    "dropout": (
        *(*BASE, "model.num_layers=16", "mesh.stage_rounds=2", "model.dropout=0.3", "model.remat=full"),
        *("optim.accumulation_steps=2", "data.batch_size=16"),
    ),
    # A window pattern, so groups of two layers; of these two a stage.
    "two groups a stage": (
        *(*BASE, "model.num_layers=8", "model.remat=full", "model.scan_unroll=2", "model.logit_soft_cap=9.0"),
        "data.packing=false",
    ),
    "experts": (
        *(*BASE, "model.num_layers=2", "model.window_pattern=0", "model.num_experts=4", "model.expert_dim=8"),
        *("model.aux_loss_coefficient=3.0", "model.capacity_factor=0.8", "model.remat=full", "data.batch_size=16"),
    ),
}
# (data, fsdp, tensor, context, expert, stage)
CASES = [
    ((2, 1, 1, 1, 1, 2), "two rounds"),
    ((1, 1, 2, 2, 1, 2), "two rounds"),
    ((1, 2, 1, 1, 1, 2), "many words, accumulated"),
    ((1, 1, 2, 1, 1, 2), "two groups a stage"),
    ((1, 2, 1, 1, 2, 2), "experts"),
    ((2, 1, 1, 1, 1, 2), "dropout"),
    ((1, 1, 1, 2, 1, 2), "dropout"),
]
ALONE = (1, 1, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def three_steps(tiny, random_batch, fresh_state, place, mesh_of):
    """(mesh shape, variant) -> (metrics of each step, weights)."""
    done = {}

    def run(shape, variant):
        if (shape, variant) not in done:
            mesh = mesh_of(*shape)
            config = tiny(*VARIANTS[variant])
            check_fits(config, mesh)
            step = make_train_step(config, resolve(config.run, "cpu", config.mesh))
            state, metrics = fresh_state(config), []
            for seed in range(3):
                state, measured = step(state, place(random_batch(config, seed)))
                metrics.append({name: float(x) for name, x in measured.items()})
            with_paths = jax.tree_util.tree_leaves_with_path
            weights = {jax.tree_util.keystr(path): np.asarray(x) for path, x in with_paths(state.model)}
            done[shape, variant] = metrics, weights
        return done[shape, variant]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_equals_single_device(three_steps, case):
    wanted = three_steps(ALONE, case[1])
    assert all(m["grad_norm"] > 0.5 for m in wanted[0])  # so the clipping is at work
    if case[1] == "experts":
        assert all(m["dropped_share"] > 0.01 for m in wanted[0])
    assert_same(three_steps(*case), wanted)


@pytest.mark.slow
def test_gradients_in_bfloat16_are_as_close_as_those_of_one_device(tiny, random_batch, fresh_state, place, mesh_of):
    """Though they are sums over eight micro-batches and not one product's."""

    def gradients(precision, **sizes):
        mesh_of(**sizes)
        config = tiny(*BASE, "model.window_pattern=0", f"run.precision={precision}", "mesh.stage_microbatches=8")
        compute = resolve(config.run, "cpu", config.mesh)
        batch = place(random_batch(config))
        grads = jax.jit(lambda s, b: loss_and_grads(s, b, 0.0, compute)[1])(fresh_state(config), batch)
        return [np.asarray(g, np.float64) for g in jax.tree.leaves(grads.blocks)]

    wanted, alone, staged = gradients("float32"), gradients("bfloat16"), gradients("bfloat16", stage=2)
    for w, one, two in zip(wanted, alone, staged, strict=True):
        assert 0 < np.linalg.norm(two - w) < 1.5 * np.linalg.norm(one - w)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 4))
def test_what_a_stage_sends_is_what_the_next_one_takes_a_tick_later(stages, rounds, each):
    plan = Schedule(stages, rounds, stages * each)
    ticks = {}
    for stage in range(stages):
        for u in range(plan.busy):
            r, a = pipeline._turn(u, plan)
            assert ticks.setdefault((r * stages + stage, a), u + stage) == u + stage
    assert len(ticks) == stages * rounds * plan.microbatches  # every piece with every micro-batch
    assert all(ticks[piece, a] == ticks[0, a] + piece for piece, a in ticks)
    assert max(ticks.values()) == plan.ticks - 1
    assert plan.bubble == pytest.approx(1 - len(ticks) / (stages * plan.ticks))
    assert microbatches(None, stages, 12 * stages * each) == 4 * stages


def test_a_cache_is_not_for_stages(tiny, random_model, mesh_of):
    config = tiny("model.window_pattern=0")
    mesh_of(stage=2)
    tokens = np.zeros((2, 4), np.int32)
    with pytest.raises(UserError, match=r"mesh\.stage splits training alone; decode on a mesh with mesh\.stage=1"):
        random_model(config)(tokens, tokens, None, resolve(config.run, "cpu"), cache=[])


@pytest.mark.slow
def test_a_bad_step_is_looked_into_block_by_block(tiny, random_batch, fresh_state, place, mesh_of):
    config = tiny("model.window_pattern=0")
    mesh_of(stage=2)
    state = fresh_state(config)
    for w, factor in ((state.model.blocks[0].mlp.up_DF, 1e20), (state.model.blocks[0].mlp.down_FD, 1e30)):
        w[...] = w[...].at[1].multiply(factor)
    lines = blame.look_into(state, place(random_batch(config)), config, resolve(config.run, "cpu"))
    assert lines[1].startswith("weights: all finite")
    assert lines[-1] == "first bad tensor, of the activations: blocks.0.mlp of layer 1"
