"""Dropout: which elements are kept, by what, and that the gradient and every cut of a batch see the same ones."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from tpu_train import blame, examine
from tpu_train.config import UserError
from tpu_train.evaluate import make_eval_step
from tpu_train.loss import hidden_states
from tpu_train.mesh import make_mesh
from tpu_train.models import dropout
from tpu_train.models.dropout import Dropout
from tpu_train.precision import resolve
from tpu_train.train_step import batch_names, batch_on_mesh, loss_and_grads, trace_step

STEP = jnp.int32(3)


def masks(rate=0.5, rows=16, length=64, features=128, seed=0, step=STEP, site=0):
    places = dropout.places(rows, length)
    return np.asarray(dropout.kept(rate, places, dropout.key_of(seed, step), jnp.uint32(site), features))


def of_config(config, **more):
    return resolve(dataclasses.replace(config.run, **more), "cpu")


def test_the_hash_of_a_token_is_threefry():
    rng = np.random.default_rng(0)
    key, counters = (rng.integers(0, 2**32, (2, n), dtype=np.uint32) for n in (1, 50))
    ours = dropout._threefry(*(jnp.asarray(x) for x in (*key, *counters)))
    wanted = threefry_2x32(jnp.asarray(key[:, 0]), jnp.asarray(counters.reshape(-1)))
    np.testing.assert_array_equal(np.concatenate(ours), wanted)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_every_element_is_kept_with_the_same_chance(rate):
    """Over all elements, of each token and of each feature, within six standard deviations of independent draws."""
    kept = masks(rate).reshape(-1, 128)
    for share in (kept.mean(), kept.mean(axis=0), kept.mean(axis=1)):
        draws = kept.size / np.size(share)
        assert np.abs(share - (1 - rate)).max() < 6 * math.sqrt(rate * (1 - rate) / draws)


def test_masks_of_neighbours_are_independent():
    """Of the next feature, token, row, layer, step and seed: they agree in half of the elements."""
    one = masks()
    pairs = {
        "feature": (one[..., 1:], one[..., :-1]),
        "token": (one[:, 1:], one[:, :-1]),
        "row": (one[1:], one[:-1]),
        "site": (one, masks(site=1)),
        "step": (one, masks(step=STEP + 1)),
        "seed": (one, masks(seed=1)),
        "seed past 32 bits": (one, masks(seed=2**32)),
    }
    for name, (a, b) in pairs.items():
        assert abs((a == b).mean() - 0.5) < 6 * 0.5 / math.sqrt(a.size), name


def test_what_is_kept_is_scaled_and_a_rate_of_zero_keeps_all():
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 32)), jnp.bfloat16)
    key = dropout.key_of(0, STEP)
    for rate in (0.0, 0.3):
        y_BTD = np.asarray(Dropout(rate, key, dropout.places(2, 8)).of_part(x_BTD, 1), np.float32)
        kept = np.asarray(dropout.kept(rate, dropout.places(2, 8), key, jnp.uint32(1), 32))
        wanted = np.asarray((x_BTD.astype(jnp.float32) / (1 - rate)).astype(jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(y_BTD, np.where(kept, wanted, 0))
        assert kept.all() == (rate == 0)


def test_the_sites_of_a_model_are_all_different():
    key, places = dropout.key_of(0, STEP), dropout.places(2, 8)
    ones = jnp.ones((2, 8, 32))
    found = [np.asarray(Dropout(0.5, key, places).of_embedding(ones))]
    for layer, part in itertools.product(range(3), range(2)):
        found.append(np.asarray(Dropout(0.5, key, places).layers_on(layer).of_part(ones, part)))
    assert len({x.tobytes() for x in found}) == len(found)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_gradient_sees_the_masks_of_the_forward_pass(tiny, random_batch, fresh_state, place, remat):
    """Along a random direction, beside the difference of two losses; another mask in it would be far off."""
    config = tiny("model.dropout=0.4", f"model.remat={remat}")
    compute, state, batch = of_config(config), fresh_state(config), place(random_batch(config))
    run = jax.jit(lambda state: loss_and_grads(state, batch, 0.0, compute)[:2])
    rng = np.random.default_rng(0)
    way = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), jnp.float32), state.model)
    low, high = (
        float(run(dataclasses.replace(state, model=jax.tree.map(lambda w, d, by=by: w + by * d, state.model, way)))[0])
        for by in (-1e-3, 1e-3)
    )
    slope = sum(np.vdot(g, d) for g, d in zip(*map(jax.tree.leaves, (run(state)[1], way)), strict=True))
    assert abs(slope) > 0.1
    assert (high - low) / 2e-3 == pytest.approx(slope, rel=0.02)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_mask_is_kept_for_the_backward_pass(tiny, random_batch, random_model, place, remat):
    def kept(*overrides):
        config = tiny(f"model.remat={remat}", *overrides)
        batch = place({name: x[0] for name, x in random_batch(config).items()})
        key = dropout.key_of(0, STEP) if config.model.dropout else None
        forward = lambda model: jnp.sum(hidden_states(model, batch, of_config(config), key=key)[0])  # noqa: E731
        found = jax.eval_shape(lambda model: jax.vjp(forward, model)[1], random_model(config))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(found) if x.ndim > 2)

    assert kept("model.dropout=0.4") == kept()


def test_the_loss_hangs_on_seed_and_step_and_on_no_cut_of_the_batch(tiny, random_batch, fresh_state, place):
    def loss(seed=0, step=0, parts=1, rate=0.3):
        config = tiny(f"optim.accumulation_steps={parts}", f"model.dropout={rate}")
        state = dataclasses.replace(fresh_state(config), step=jnp.int32(step))
        compute, batch = of_config(config, seed=seed), place(random_batch(config))
        return float(jax.jit(lambda s, b: loss_and_grads(s, b, 0.0, compute)[0])(state, batch))

    first = loss()
    assert loss() == first
    assert loss(parts=4) == pytest.approx(first, rel=1e-5)
    assert all(abs(other - first) > 1e-3 for other in (loss(seed=1), loss(step=1), loss(rate=0.0)))


def test_places_are_those_of_the_rows_of_all_processes(tiny, monkeypatch, mesh_of):
    """Each gives part of its own rows to every micro-batch."""
    config = tiny("model.dropout=0.1", "optim.accumulation_steps=2", "data.seq_len=8")
    mesh, halves = mesh_of(), []
    rows = {name: np.zeros((4, 8), np.int32) for name in ("tokens", "labels", "positions", "segment_ids", "weights")}
    given = []
    monkeypatch.setattr(jax, "make_array_from_process_local_data", lambda _, x, shape: given.append((x, shape)) or x)
    for index in range(2):
        share = {"process_index": index, "process_count": 2}
        monkeypatch.setattr("tpu_train.processes.batch_share", lambda mesh, share=share: share)
        halves.append(batch_on_mesh(rows, config, mesh)["places"])
    wanted = np.arange(64).reshape(2, 2, 2, 8)  # process, micro-batch
    np.testing.assert_array_equal(np.stack(halves), wanted)
    assert {shape for _, shape in given} == {(2, 4, 8)}


def test_places_follow_the_tokens_along_context(tiny, mesh_of):
    config = tiny("model.dropout=0.1")
    mesh = mesh_of(context=2)
    names = ("tokens", "labels", "positions", "segment_ids", "weights")
    tokens = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    batch = batch_on_mesh(dict.fromkeys(names, tokens), config, mesh)
    np.testing.assert_array_equal(batch["places"], batch["tokens"])
    assert not (np.asarray(batch["tokens"])[0] == tokens).all()


def test_off_is_no_part_of_the_program_and_evaluation_has_none(tiny, random_batch, random_model, place):
    config, off = tiny("model.dropout=0.3"), tiny()
    assert "places" in batch_names(config)
    assert "places" not in batch_names(off)
    mesh = make_mesh(off.mesh, jax.devices()[:1])
    texts = [trace_step(made, of_config(made, seed=seed), mesh).lower().as_text() for made, seed in
             ((off, 0), (off, 1), (config, 0), (config, 1))]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]
    assert texts[2] != texts[3]
    batch = place({name: x[0] for name, x in random_batch(off).items() if name != "places"})
    sums = [make_eval_step(of_config(made))(random_model(made), batch) for made in (config, off)]
    np.testing.assert_array_equal(*sums)


def test_a_bad_step_is_looked_into_with_its_masks(tiny, random_batch, fresh_state, place):
    config = tiny("model.dropout=0.3", "model.num_layers=4")
    state, batch = fresh_state(config), place(random_batch(config))
    key, one = dropout.key_of(0, state.step), {name: x[0] for name, x in batch.items()}
    tensors = list(examine.activations(state.model, one, of_config(config), key))
    wanted = jax.jit(lambda model, b, key: hidden_states(model, b, of_config(config), None, key)[0])
    assert tensors[-1].largest == pytest.approx(float(jnp.abs(wanted(state.model, one, key)).max()), rel=1e-5)
    assert tensors[-1].largest != pytest.approx(
        list(examine.activations(state.model, one, of_config(config)))[-1].largest
    )
    lines = blame.look_into(state, batch, config, of_config(config))
    assert lines[3] == f"activations: all finite; the largest: {max(tensors, key=lambda tensor: tensor.largest)}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dropout=1.0", r"model\.dropout is 1\.0; it must be 0 or more, and below 1"),
        ("model.dropout=-0.1", r"model\.dropout is -0\.1; it must be 0 or more, and below 1"),
        ("data.seq_len=536870912", r"numbers a batch's tokens in 32 bits, and data\.batch_size=8 x data\.seq_len=5"),
    ],
)
def test_a_rate_that_can_not_be_is_refused(tiny, override, message):
    with pytest.raises(UserError, match=message):
        tiny("model.dropout=0.1", override)
