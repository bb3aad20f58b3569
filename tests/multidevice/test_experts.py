"""Three steps of a mixture of experts: however devices share it and however the batch is cut, the same numbers."""

import jax
import numpy as np
import pytest
from jax.tree_util import GetAttrKey

from tpu_train.mesh import check_fits
from tpu_train.precision import resolve
from tpu_train.sharding import SPECS, P, dims_of_path
from tpu_train.train_step import make_train_step

BASE = (
    *("model.window_pattern=0", "model.num_experts=4", "model.expert_dim=8", "data.batch_size=16"),
    "optim.clip_norm=0.5",
)
VARIANTS = {
    "aux loss": (*BASE, "model.aux_loss_coefficient=3.0", "model.dropout=0.2"),
    "bias": (
        *(*BASE, "model.balance=bias", "model.bias_update_rate=0.1", "model.router=sigmoid", "optim.optimizer=muon"),
        *("model.num_shared_experts=1", "model.capacity_factor=0.8", "model.remat=dots", "optim.accumulation_steps=2"),
    ),
}
# (data, fsdp, tensor, context, expert)
CASES = [
    ((1, 1, 1, 1, 4), "aux loss"),
    ((2, 2, 1, 1, 2), "bias"),
    ((1, 1, 2, 2, 2), "aux loss"),
    ((1, 1, 1, 4, 2), "bias"),  # a capacity counts along a row that lies in eight chunks on four devices
    ((2, 1, 1, 2, 1), "bias"),
]
ALONE = (1, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def three_steps(tiny, random_batch, fresh_state, place, mesh_of):
    """(mesh shape, variant, more overrides) -> (metrics of each step, weights, the state's shardings)."""
    done = {}

    def run(shape, variant, *overrides):
        key = (shape, variant, overrides)
        if key not in done:
            mesh = mesh_of(*shape)
            config = tiny(*VARIANTS[variant], *overrides)
            check_fits(config, mesh)
            step, state = make_train_step(config, resolve(config.run, "cpu")), fresh_state(config)
            metrics = []
            for seed in range(3):
                state, measured = step(state, place(random_batch(config, seed)))
                metrics.append({name: float(x) for name, x in measured.items()})
            with_paths = jax.tree_util.tree_leaves_with_path
            weights = {jax.tree_util.keystr(path): np.asarray(x) for path, x in with_paths(state.model)}
            splits = [(path, x.ndim, x.sharding) for path, x in with_paths(state)]
            done[key] = metrics, weights, splits
        return done[key]

    return run


def assert_same(got, wanted):
    for mine, right in zip(got[0], wanted[0], strict=True):
        assert mine == pytest.approx(right, rel=1e-5)
    for name, w in wanted[1].items():
        np.testing.assert_allclose(got[1][name], w, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_equals_single_device(three_steps, case):
    variant = case[1]
    wanted = three_steps(ALONE, variant)
    assert all(m["grad_norm"] > 0.5 for m in wanted[0])  # so the clipping is at work
    assert all((m["dropped_share"] > 0.01) == (variant == "bias") for m in wanted[0])
    assert all(m["load_imbalance_worst"] >= m["load_imbalance"] > 1 for m in wanted[0])
    assert_same(three_steps(*case), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_weight_and_moment_is_split_as_the_table_says(three_steps, mesh_of, case):
    splits, mesh = three_steps(*case)[2], mesh_of(*case[0])
    experts = set()
    for path, ndim, sharding in splits:
        dims, _ = dims_of_path(path) if any(key == GetAttrKey("blocks") for key in path) else ("", False)
        if dims not in SPECS:
            continue  # no array of a block
        wanted = jax.NamedSharding(mesh, P(*(None,) * (ndim - len(dims)), *SPECS[dims]))
        assert sharding.is_equivalent_to(wanted, ndim), (path, sharding.spec, wanted.spec)
        if dims in ("EDF", "EFD"):
            experts.add(sharding.shard_shape((2, 4, 32, 32))[1])
    assert experts == {4 // mesh.shape["expert"]}


@pytest.mark.slow
def test_micro_batches_change_nothing(three_steps):
    """The balance loss among it, a product of two sums over the step's tokens; its parts have unequal numbers."""
    assert_same(three_steps(ALONE, "aux loss"), three_steps(ALONE, "aux loss", "optim.accumulation_steps=2"))


@pytest.mark.slow
def test_biases_move_by_their_rate_and_by_nothing_else(three_steps, tiny, random_model):
    moved = three_steps(ALONE, "bias")[1]
    start = {
        jax.tree_util.keystr(p): x
        for p, x in jax.tree_util.tree_leaves_with_path(random_model(tiny(*VARIANTS["bias"])))
    }
    (name,) = (name for name in moved if "bias_E" in name)
    steps = (moved[name] - np.asarray(start[name])) / 0.1
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-5)
    assert set(np.abs(np.round(steps)).ravel()) <= {0, 1, 2, 3}
    assert (np.round(steps) > 0).any()
    assert (np.round(steps) < 0).any()
