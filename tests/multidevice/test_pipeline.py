"""Three steps through the stages of a pipeline against the same three on one device."""

import jax
import numpy as np
import pytest

from tpu_train.mesh import check_fits
from tpu_train.precision import resolve
from tpu_train.train_step import make_train_step

BASE = ("optim.clip_norm=0.5", "optim.z_loss=0.01", "model.num_layers=4", "model.window_pattern=5")
VARIANTS = {"adamw": BASE}
CASES = [((1, 1, 1, 1, 1, 2), "adamw")]


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
