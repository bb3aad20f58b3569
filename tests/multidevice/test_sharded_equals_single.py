"""Three steps on eight devices, however they are laid out, against the same three on one; and what is split how."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tpu_train.mesh import check_fits
from tpu_train.precision import resolve
from tpu_train.sharding import SPECS, dims_of
from tpu_train.train_step import make_train_step

BASE = ("optim.clip_norm=0.5", "optim.z_loss=0.01")
VARIANTS = {
    "adamw": (*BASE,),
    "adamw_untied_in_two_parts": (
        *BASE,
        "optim.accumulation_steps=2",
        "model.tie_embeddings=false",
        "data.batch_size=16",
    ),
    # Then the tokens come together for the head, and not the head for the tokens.
    "more_words_than_tokens": (*BASE, "model.vocab_size=256", "model.tie_embeddings=false"),
    "dropout_in_two_parts": (
        *(*BASE, "model.dropout=0.3", "model.remat=full", "model.num_layers=4"),
        *("optim.accumulation_steps=2", "data.batch_size=16"),
    ),
    "rings": (*BASE, "mesh.gradient_scatter=ring", "model.remat=full"),
    "muon_with_qk_norm_and_remat": (*BASE, "optim.optimizer=muon", "model.qk_norm=true", "model.remat=full"),
}
CASES = [
    ((8, 1, 1), "adamw"),
    ((1, 8, 1), "adamw"),
    ((1, 1, 4), "adamw"),
    ((1, 8, 1), "rings"),
    ((2, 4, 1), "rings"),
    ((2, 2, 2), "adamw_untied_in_two_parts"),
    ((2, 2, 2), "more_words_than_tokens"),
    ((1, 4, 2), "muon_with_qk_norm_and_remat"),
    ((2, 2, 1), "dropout_in_two_parts"),
    ((1, 2, 2), "dropout_in_two_parts"),
    # The fourth is context, and so is the method after the variant.
    ((2, 1, 1, 2), "muon_with_qk_norm_and_remat", "ring"),
    ((1, 2, 1, 2), "more_words_than_tokens", "all_gather"),
    ((1, 1, 2, 2), "adamw", "all_to_all"),
    ((2, 1, 1, 2), "dropout_in_two_parts", "ring"),
]


@pytest.fixture(scope="module")
def three_steps(tiny, random_batch, fresh_state, place, mesh_of):
    """(mesh shape, variant, method) -> (losses and norms, weights, the state's shardings, the compiled step's text)."""
    done = {}

    def run(shape, variant, method="auto"):
        if (shape, variant, method) not in done:
            mesh = mesh_of(*shape)
            config = tiny(*VARIANTS[variant], f"mesh.context_method={method}")
            check_fits(config, mesh)
            state, batches = fresh_state(config), [place(random_batch(config, seed)) for seed in range(3)]
            step = make_train_step(config, resolve(config.run, "cpu", config.mesh)).lower(state, batches[0]).compile()
            metrics = []
            for batch in batches:
                state, measured = step(state, batch)
                metrics.append([float(measured[name]) for name in ("loss", "grad_norm", "tokens")])
            weights = {
                jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree_util.tree_leaves_with_path(state.model)
            }
            shardings = {
                jax.tree_util.keystr(path): (x.ndim, x.sharding)
                for path, x in jax.tree_util.tree_leaves_with_path((state.model, state.opt_state))
            }
            done[shape, variant, method] = (np.array(metrics), weights, shardings, step.as_text())
        return done[shape, variant, method]

    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sharded_equals_single_device(three_steps, case):
    metrics, weights, _, _ = three_steps(*case)
    variant = case[1]
    wanted_metrics, wanted_weights, _, _ = three_steps((1, 1, 1), variant)
    np.testing.assert_allclose(metrics, wanted_metrics, rtol=1e-5)
    assert (np.diff(wanted_metrics[:, 0]) != 0).all()
    assert (wanted_metrics[:, 1] > 0.5).all()  # so the clipping is at work
    for name, w in wanted_weights.items():
        np.testing.assert_allclose(weights[name], w, rtol=1e-4, atol=2e-5, err_msg=name)


def parameter(path: str) -> str:
    """The parameter's name in a tree path: 'q_DNH' of ".blocks[0].attention.q_DNH.value"."""
    return re.findall(r"\w+_[A-Z]+", path)[-1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_weight_and_moment_is_split_as_the_table_says(three_steps, mesh_of, case):
    _, weights, shardings, _ = three_steps(*case)
    shape = case[0]
    mesh = mesh_of(*shape)
    split = 0
    for path, (ndim, sharding) in shardings.items():
        if ndim < 2 and "scale" not in path:
            continue  # counts and coefficients
        spec = SPECS[dims_of(parameter(path))]
        stacked = ndim - len(dims_of(parameter(path)))
        assert stacked in (0, 1), path
        wanted = jax.NamedSharding(mesh, P(*(None,) * stacked, *spec))
        assert sharding.is_equivalent_to(wanted, ndim), (path, sharding.spec, wanted.spec)
        axes = [axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)]
        expected = int(np.prod([mesh.shape[axis] for axis in axes]))
        assert sharding.num_devices // (int(np.prod(shape)) // expected) == expected
        split += not sharding.is_fully_replicated
    matrices = [name for name in weights if "scale" not in name]
    # Weights and at least one moment of each.
    assert split >= 2 * len(matrices) if max(shape[1:]) > 1 else split == 0


def test_fsdp_step_gathers_weights_and_reduces_gradients(three_steps):
    sharded, single = (three_steps(shape, "adamw")[3] for shape in ((1, 8, 1), (1, 1, 1)))
    assert "all-gather" in sharded
    assert "reduce-scatter" in sharded or "all-reduce" in sharded
    assert "all-gather" not in single


def test_data_parallel_step_gathers_no_weight(three_steps):
    text = three_steps((8, 1, 1), "adamw")[3]
    assert "all-reduce" in text
    assert "all-gather" not in text


def test_no_device_of_an_fsdp_mesh_holds_a_whole_matrix(three_steps):
    _, weights, shardings, _ = three_steps((1, 8, 1), "adamw")
    for name, w in weights.items():
        if "scale" not in name:
            _, sharding = next(found for path, found in shardings.items() if path.endswith(name))
            assert np.prod(sharding.shard_shape(w.shape)) == w.size / 8, name
