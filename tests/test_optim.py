"""Schedules at points worked by hand, decay by the dims' names, Muon's matrices, clipping and what moments are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpu_train.config import OptimConfig
from tpu_train.optim import decay_mask, make_optimizer, make_schedule, muon_dimension_numbers, muon_labels

STEPS = 100


@pytest.mark.parametrize(
    ("schedule", "overrides", "points"),
    [
        # Half-way down the cosine from step 10 to 100: the mean of 2 and 0.2.
        ("cosine", {}, {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 55: 1.1, 100: 0.2}),
        ("cosine", {"final_lr_fraction": 0.0}, {9: 2.0, 40: 1.5, 100: 0.0}),
        ("cosine", {"warmup_steps": 0}, {0: 2.0, 50: 1.1, 100: 0.2}),
        ("cosine", {"warmup_steps": 1}, {0: 2.0, 1: 2.0, 100: 0.2}),
        ("constant", {}, {0: 0.2, 9: 2.0, 10: 2.0, 99: 2.0}),
        # The last fifth of the whole run goes down in a line.
        ("wsd", {}, {0: 0.2, 9: 2.0, 10: 2.0, 80: 2.0, 90: 1.1, 95: 0.65, 100: 0.2}),
        ("wsd", {"decay_fraction": 0.5, "final_lr_fraction": 0.0}, {50: 2.0, 75: 1.0, 99: 0.04, 100: 0.0}),
        ("wsd", {"warmup_steps": 0, "decay_fraction": 1.0}, {0: 2.0, 50: 1.1, 100: 0.2}),
        # The warm-up leaves no room for all of the decay.
        ("wsd", {"warmup_steps": 90, "decay_fraction": 0.5}, {89: 2.0, 90: 2.0, 95: 1.1, 100: 0.2}),
    ],
)
def test_schedule_at_points_worked_by_hand(schedule, overrides, points):
    config = OptimConfig(**({"schedule": schedule, "warmup_steps": 10, "final_lr_fraction": 0.1} | overrides))
    rate = make_schedule(config, STEPS, peak=2.0)
    for step, wanted in points.items():
        assert float(rate(step)) == pytest.approx(wanted, abs=1e-6), step


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 2, 50, 100])
def test_schedule_moves_at_every_step_and_never_passes_its_peak(schedule, warmup):
    rate = make_schedule(OptimConfig(schedule=schedule, warmup_steps=warmup), STEPS, peak=3.0)
    rates = np.array([float(rate(step)) for step in range(STEPS)])
    assert rates.min() > 0
    assert rates.max() == pytest.approx(3.0)
    assert (np.diff(rates[:warmup]) > 0).all()
    assert (np.diff(rates[warmup:]) <= 1e-7).all()


def names_of(tree) -> dict[str, Any]:
    """The parameter's name, ("attention.q_DNH"), to what stands there."""
    flat = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, optax.contrib.MuonDimensionNumbers)
    )
    return {
        ".".join(k.name for k in path if isinstance(k, jax.tree_util.GetAttrKey)).removesuffix(".value"): leaf
        for path, leaf in flat
    }


MATRICES = ("q_DNH", "k_DKH", "v_DKH", "out_NHD", "gate_DF", "up_DF", "down_FD")
OUTSIDE = ("embed_VD", "head_VD")
EVERYTHING = ("model.qk_norm=true", "model.tie_embeddings=false", "model.num_layers=4")


def last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def test_decay_reaches_every_matrix_and_no_norm(tiny, random_model):
    mask = names_of(decay_mask(random_model(tiny(*EVERYTHING))))
    assert {last(name) for name, decays in mask.items() if decays} == {*MATRICES, *OUTSIDE}
    assert {last(name) for name, decays in mask.items() if not decays} == {"scale_D"}


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(tiny, random_model):
    labels = names_of(muon_labels(random_model(tiny(*EVERYTHING))))
    assert {last(name) for name, label in labels.items() if label == "muon"} == set(MATRICES)
    assert {last(name) for name, label in labels.items() if label == "adamw"} == {*OUTSIDE, "scale_D"}


def test_muon_dimension_numbers_split_inputs_from_outputs_and_leave_the_stack(tiny, random_model):
    blocks = random_model(tiny("model.num_layers=4")).blocks[0]
    attention, mlp = blocks.attention, blocks.mlp
    found = names_of(muon_dimension_numbers({"a": attention, "m": mlp}))
    wanted = {
        **dict.fromkeys(("q_DNH", "k_DKH", "v_DKH"), ((1,), (2, 3))),
        "out_NHD": ((1, 2), (3,)),
        **dict.fromkeys(("gate_DF", "up_DF", "down_FD"), ((1,), (2,))),
    }
    assert {name: (n.reduction_axis, n.output_axis) for name, n in found.items()} == wanted


def one_update(config, model, grads):
    optimizer = make_optimizer(config.optim, config.run.steps)
    return jax.jit(optimizer.update)(grads, jax.jit(optimizer.init)(model), model)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_without_a_gradient_matrices_decay_and_norms_stay(tiny, random_model, optimizer):
    config = tiny(*EVERYTHING, f"optim.optimizer={optimizer}", "optim.weight_decay=0.5", "optim.muon_lr=0.1")
    model = random_model(config)
    updates, _ = one_update(config, model, jax.tree.map(jnp.zeros_like, model))
    for (path, update), w in zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(model), strict=True):
        name = jax.tree_util.keystr(path)
        in_block = "blocks" in name
        rate = 0.1 if optimizer == "muon" and in_block else config.optim.peak_lr
        wanted = 0.0 if "scale" in name else -0.5 * rate * np.asarray(w)
        np.testing.assert_allclose(update, np.broadcast_to(wanted, w.shape), rtol=1e-5, atol=1e-8, err_msg=name)


def random_grads(model, size=1.0, seed=7):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jax.device_put(rng.normal(0, size, x.shape).astype(np.float32), x.sharding), model)


def test_muon_step_is_nearly_orthogonal_for_every_matrix_of_every_layer(tiny, random_model, mesh_of):
    config = tiny(
        *("optim.optimizer=muon", "optim.weight_decay=0", "optim.clip_norm=none", "optim.muon_lr=0.1"),
        *("model.num_layers=4", "model.mlp_dim=48"),
    )
    model = random_model(config)
    updates, state = one_update(config, model, random_grads(model))
    numbers = muon_dimension_numbers({"a": model.blocks[0].attention, "m": model.blocks[0].mlp})
    inputs = {name: len(n.reduction_axis) for name, n in names_of(numbers).items()}
    seen = set()
    for block, grads in zip(updates.blocks, random_grads(model).blocks, strict=True):
        for (name, update), gradient in zip(names_of(block).items(), names_of(grads).values(), strict=True):
            if last(name) not in MATRICES:
                continue
            seen.add(last(name))
            for layer, whole in zip(np.asarray(update), np.asarray(gradient), strict=True):
                rows = int(np.prod(layer.shape[: inputs[last(name)]]))
                step, matrix = -layer.reshape(rows, -1) / 0.1, whole.reshape(rows, -1)
                step /= np.sqrt(max(1.0, step.shape[1] / step.shape[0]))
                u, _, vt = np.linalg.svd(matrix, full_matrices=False)
                turned = u.T @ step @ vt.T  # the identity, were the five Newton-Schulz turns exact
                singular = np.linalg.svd(step, compute_uv=False)
                assert singular.min() > 0.1, name
                assert 0.6 < np.median(singular) < singular.max() < 1.3, name
                np.testing.assert_allclose(turned, np.diag(np.diag(turned)), atol=0.02, err_msg=name)
    assert seen == set(MATRICES)

    mesh_of(2, 2, 2)
    sharded = random_model(config)
    sharded_updates, sharded_state = one_update(config, sharded, random_grads(sharded))
    for a, b, w in zip(*(jax.tree.leaves(t) for t in (updates, sharded_updates, sharded)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-5)
        assert b.sharding.is_equivalent_to(w.sharding, w.ndim)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(sharded_state), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 1e15])
def test_gradients_are_clipped_to_the_global_norm(tiny, random_model, size):
    # With so large an eps a step of Adam is the gradient times peak_lr / eps.
    config = tiny("optim.clip_norm=0.5", "optim.weight_decay=0", "optim.eps=1e6", "optim.peak_lr=1e6")
    model = random_model(config)
    grads = random_grads(model, size)
    norm = np.sqrt(sum(np.sum(np.asarray(g, np.float64) ** 2) for g in jax.tree.leaves(grads)))
    updates, _ = one_update(config, model, grads)
    for update, g in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        wanted = -np.asarray(g, np.float64) * min(1.0, 0.5 / max(norm, 1e-30))
        np.testing.assert_allclose(update, wanted, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_first_moments_take_the_dtype_asked_for_and_second_ones_float32(tiny, fresh_state, optimizer, dtype):
    config = tiny(f"optim.optimizer={optimizer}", f"optim.moment_dtype={dtype}")
    state = fresh_state(config)
    model, before = state.model, state.opt_state
    updates, after = jax.eval_shape(make_optimizer(config.optim, config.run.steps).update, model, before, model)
    for state in (before, after):
        kept: dict[str, list] = {"mu": [], "nu": []}
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            for name in kept:
                if f".{name}" in jax.tree_util.keystr(path):
                    kept[name].append(leaf.dtype)
        assert set(kept["mu"]) == {jnp.dtype(dtype)}
        assert len(kept["mu"]) == len(jax.tree.leaves(model))
        assert set(kept["nu"]) == {jnp.dtype("float32")}
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
