"""One optimizer step: micro-batches, z-loss, loss scale, dtypes, donation; and the evaluation of a model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_train import spikes
from tpu_train import train_step as module
from tpu_train.evaluate import evaluate, make_eval_step
from tpu_train.loss import weighted_loss
from tpu_train.precision import resolve
from tpu_train.sharding import SPECS
from tpu_train.train_step import abstract_state, init_state, make_train_step

# A step of plain Adam hides the size of its gradient. With so large an eps it is the gradient times peak_lr / eps.
BY_THE_GRADIENT = ("optim.eps=1e6", "optim.peak_lr=1e6", "optim.weight_decay=0", "optim.clip_norm=none")


def leaves(tree) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(tree)]


def plain_loss(model, batch, z_loss, config):
    """(loss with z-loss, cross entropy) per token, from whole logits and no op of the loss's own."""
    x_BTD, _ = model(batch["tokens"], batch["positions"], batch["segment_ids"], resolve(config.run, "cpu"))
    logits = jnp.einsum("BTD,VD->BTV", x_BTD, model.output_VD, precision="highest")
    lse = jax.nn.logsumexp(logits, axis=-1)
    at_label = jnp.sum(jax.nn.one_hot(batch["labels"], logits.shape[-1]) * logits, axis=-1)
    mean = lambda x: jnp.sum(x * batch["weights"]) / jnp.sum(batch["weights"])  # noqa: E731
    return mean(lse - at_label + z_loss * lse**2), mean(lse - at_label)


@pytest.mark.parametrize(("parts", "z_loss"), [(1, 0.0), (4, 0.1)], ids=["whole", "four_parts_with_z_loss"])
def test_step_takes_the_gradient_of_the_mean_over_all_tokens(tiny, random_batch, fresh_state, place, parts, z_loss):
    """The reported loss is the cross entropy alone; the z-loss is in the gradient."""
    config = tiny(f"optim.accumulation_steps={parts}", f"optim.z_loss={z_loss}", *BY_THE_GRADIENT)
    batch = random_batch(config)
    tokens = batch["weights"].sum(axis=(1, 2))
    assert len(set(tokens)) == min(parts, 3)  # parts of unequal numbers of tokens
    state = fresh_state(config)
    before = leaves(state.model)
    after, metrics = make_train_step(config, resolve(config.run, "cpu"))(state, place(batch))

    whole = place({name: x.reshape(-1, x.shape[-1]) for name, x in batch.items()})
    wanted = jax.jit(jax.value_and_grad(lambda m: plain_loss(m, whole, z_loss, config), has_aux=True))
    (loss, cross_entropy), grads = wanted(fresh_state(config).model)
    assert (float(loss) - float(cross_entropy) > 0.5) == (z_loss > 0)
    assert float(metrics["loss"]) == pytest.approx(float(cross_entropy), rel=1e-5)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in leaves(grads)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    assert float(metrics["tokens"]) == tokens.sum()
    assert int(after.step) == 1
    for new, old, gradient in zip(leaves(after.model), before, leaves(grads), strict=True):
        np.testing.assert_allclose(old - new, gradient, rtol=1e-3, atol=2e-5 * np.abs(gradient).max() + 1e-6)


def test_gradients_kept_in_the_compute_dtype_are_those_of_the_float32_weights(tiny, random_batch, fresh_state, place):
    config = tiny("run.precision=bfloat16", "optim.z_loss=0.01")
    compute = resolve(config.run, "cpu")
    state, batch = fresh_state(config, compute), place(random_batch(config))
    _, grads, _ = jax.jit(lambda s, b: module.loss_and_grads(s, b, config.optim.z_loss, compute))(state, batch)
    one = jax.tree.map(lambda x: x[0], batch)

    def mean_loss(model):
        return weighted_loss(model, one, config.optim.z_loss, compute)[0] / jnp.sum(one["weights"])

    wanted = jax.jit(jax.grad(mean_loss))(state.model)
    assert str(jax.tree.structure(grads)) == str(jax.tree.structure(wanted))
    for (path, gradient), direct in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert gradient.dtype == direct.dtype == jnp.float32
        largest = float(jnp.max(jnp.abs(direct)))
        np.testing.assert_allclose(gradient, direct, rtol=0.02, atol=0.01 * largest, err_msg=name)
        if "blocks" in name and "scale" not in name:
            np.testing.assert_array_equal(gradient, gradient.astype(jnp.bfloat16).astype(jnp.float32), err_msg=name)


@pytest.mark.parametrize("overrides", [["optim.optimizer=adamw"], ["optim.optimizer=muon", "run.precision=bfloat16"]])
def test_loss_falls_on_a_fixed_batch(tiny, random_batch, place, overrides):
    config = tiny(*overrides, "optim.peak_lr=2e-2", "optim.eps=1e-8", "optim.muon_lr=5e-2", "optim.warmup_steps=3")
    compute = resolve(config.run, "cpu")
    step, state, batch = make_train_step(config, compute), init_state(config, compute), place(random_batch(config))
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(config.model.vocab_size), abs=0.2)
    assert losses[-1] < losses[10] < losses[0]
    assert losses[-1] < losses[0] / 2
    assert int(state.step) == 30


def test_learning_rate_reported_is_that_of_the_step_and_old_states_are_donated(tiny, random_batch, fresh_state, place):
    config = tiny("optim.warmup_steps=2", "optim.peak_lr=0.5", "optim.schedule=cosine")
    step, state = make_train_step(config, resolve(config.run, "cpu")), fresh_state(config)
    rates = []
    for _ in range(3):
        old = jax.tree.leaves((state.model, state.opt_state))
        state, metrics = step(state, place(random_batch(config)))
        assert all(x.is_deleted() for x in old)
        rates.append(float(metrics["learning_rate"]))
    assert rates == pytest.approx([0.25, 0.5, 0.5])


def test_float16_skips_a_step_that_overflows_and_moves_its_scale(tiny, random_batch, fresh_state, place, monkeypatch):
    monkeypatch.setattr(module, "GROWTH_INTERVAL", 2)
    config = tiny("run.precision=float16", "optim.warmup_steps=5")
    compute = resolve(config.run, "cpu")
    step, batch = make_train_step(config, compute), random_batch(config)
    state = dataclasses.replace(fresh_state(config, compute), loss_scale=jnp.float32(2.0**24), good_steps=jnp.int32(1))
    before = leaves((state.model, state.opt_state))

    # A gradient of one token's logit, 2^24 over a hundred tokens, is more than float16 holds.
    state, metrics = step(state, place(batch))
    assert not np.isfinite(metrics["grad_norm"])
    assert np.isfinite(metrics["loss"])
    assert float(metrics["loss_scale"]) == 2.0**24
    assert (float(state.loss_scale), int(state.good_steps), int(state.step)) == (2.0**23, 0, 1)
    for a, b in zip(leaves((state.model, state.opt_state)), before, strict=True):
        np.testing.assert_array_equal(a, b)

    skipped_rate = float(metrics["learning_rate"])
    state = dataclasses.replace(state, loss_scale=jnp.float32(2.0**10))
    scales, rates = [], []
    for _ in range(4):
        state, metrics = step(state, place(batch))
        assert np.isfinite(metrics["grad_norm"])
        scales.append((float(state.loss_scale), int(state.good_steps)))
        rates.append(float(metrics["learning_rate"]))
    assert scales == [(2.0**10, 1), (2.0**11, 0), (2.0**11, 1), (2.0**12, 0)]
    assert rates[0] == skipped_rate < rates[1]  # the schedule counts updates, and the skipped step made none
    assert max(np.abs(a - b).max() for a, b in zip(leaves(state.model), before, strict=False)) > 1e-3

    # Without tokens there is no gradient to overflow, and the scale may grow to its limit only.
    state = dataclasses.replace(state, loss_scale=jnp.float32(2.0**23), good_steps=jnp.int32(1))
    empty = batch | {"weights": np.zeros_like(batch["weights"])}
    for _ in range(3):
        state, metrics = step(state, place(empty))
        assert float(state.loss_scale) == 2.0**24
    assert all(np.isfinite(x).all() for x in leaves(state.model))


def state_leaves(state):
    return leaves((state.model, state.opt_state, state.average, state.norms))


@pytest.mark.parametrize("part", ["batch", "weight"])
@pytest.mark.parametrize(
    "overrides", [[], ["run.precision=bfloat16", "optim.optimizer=muon", "optim.accumulation_steps=2"]]
)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(
    tiny, random_batch, fresh_state, place, overrides, part
):
    config = tiny("optim.warmup_steps=5", "optim.ema_decay=0.9", "run.spike_factor=4", *overrides)
    compute = resolve(config.run, "cpu")
    step, batch = make_train_step(config, compute), random_batch(config)
    state, metrics = step(fresh_state(config, compute), place(batch))
    assert (bool(metrics["updated"]), int(metrics["skipped"]), int(state.step)) == (True, 0, 1)

    bad, broken = batch, state
    if part == "batch":
        bad = batch | {"weights": batch["weights"] * np.float32(np.nan)}
    else:
        whole = state.model.final_norm.scale_D[...]
        state.model.final_norm.scale_D[...] = whole.at[3].set(jnp.inf)
    before, rate = state_leaves(broken), float(metrics["learning_rate"])
    old = jax.tree.leaves((state.model, state.opt_state))
    state, metrics = step(broken, place(bad))
    assert all(x.is_deleted() for x in old)
    assert not np.isfinite(metrics["loss"])
    assert (bool(metrics["updated"]), int(metrics["skipped"]), int(state.step)) == (False, 1, 2)
    for a, b in zip(state_leaves(state), before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert float(metrics["learning_rate"]) == pytest.approx(2 * rate)
    if part == "batch":  # the next good batch goes on as if nothing had been
        state, metrics = step(state, place(batch))
        assert float(metrics["learning_rate"]) == pytest.approx(2 * rate)
        assert (bool(metrics["updated"]), int(metrics["skipped"]), int(state.step)) == (True, 1, 3)
        assert any(np.any(a != b) for a, b in zip(state_leaves(state), before, strict=True))


def test_the_average_of_the_weights_is_numpys(tiny, random_batch, fresh_state, place):
    config = tiny("optim.ema_decay=0.25")
    step, state = make_train_step(config, resolve(config.run, "cpu")), fresh_state(config)
    wanted = [x.astype(np.float64) for x in leaves(state.model)]
    for update in range(1, 5):
        state, _ = step(state, place(random_batch(config, update)))
        decay = min(0.25, (1 + update) / (10 + update))
        wanted = [decay * a + (1 - decay) * p for a, p in zip(wanted, leaves(state.model), strict=True)]
    for got, want, weight in zip(leaves(state.average), wanted, leaves(state.model), strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
        assert np.any(got != weight)


def test_a_spike_is_a_norm_over_so_many_times_the_median_of_the_last_updates():
    rng = np.random.default_rng(0)
    norms, seen = spikes.no_norms(), []
    for update in range(150):
        typical = float(jax.jit(spikes.typical_norm)(norms))
        last = seen[-spikes.WINDOW :]
        if len(last) <= spikes.WINDOW // 2:
            assert typical == np.inf
        elif len(last) == spikes.WINDOW:
            assert typical == pytest.approx(np.median(last), rel=1e-6)
        seen.append(rng.lognormal())
        norms = jax.jit(spikes.remember)(norms, jnp.float32(seen[-1]), jnp.int32(update))


def test_a_spike_changes_nothing_and_is_not_remembered(tiny, random_batch, fresh_state, place):
    config = tiny("run.spike_factor=1.5", "optim.peak_lr=1e-6")
    step, state = make_train_step(config, resolve(config.run, "cpu")), fresh_state(config)
    state = dataclasses.replace(state, norms=jnp.zeros(4))
    calm = random_batch(config)
    # The last row alone: fewer tokens, so a gradient that is averaged over less and larger.
    wild = calm | {"weights": calm["weights"] * (np.arange(8) == np.argmin(calm["weights"].sum((0, 2))))[None, :, None]}
    norms = []
    for batch in (calm, wild, calm, calm, calm):
        state, metrics = step(state, place(batch))
        assert metrics["updated"]
        norms.append(float(metrics["grad_norm"]))
    assert norms[1] > 2 * norms[0]
    before = state_leaves(state)
    state, metrics = step(state, place(wild))
    assert (bool(metrics["updated"]), int(metrics["skipped"])) == (False, 1)
    assert float(metrics["typical_norm"]) == pytest.approx(np.median(norms[1:]), rel=1e-6)
    for a, b in zip(state_leaves(state), before, strict=True):
        np.testing.assert_array_equal(a, b)
    state, metrics = step(state, place(calm))
    assert (bool(metrics["updated"]), int(metrics["skipped"])) == (True, 1)


def test_loss_scale_is_taken_out_of_the_gradient(tiny, random_batch, fresh_state, place):
    norms = {}
    for precision in ("float32", "float16"):
        config = tiny(f"run.precision={precision}", "optim.z_loss=0.01")
        compute = resolve(config.run, "cpu")
        state = fresh_state(config, compute)
        assert float(state.loss_scale) == (2.0**15 if precision == "float16" else 1.0)
        state = dataclasses.replace(state, loss_scale=state.loss_scale / (2.0**7 if precision == "float16" else 1.0))
        _, metrics = make_train_step(config, compute)(state, place(random_batch(config)))
        norms[precision] = (float(metrics["loss"]), float(metrics["grad_norm"]))
    assert norms["float16"] == pytest.approx(norms["float32"], rel=1e-2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weights_and_moments_are_float32_whatever_computes(tiny, random_batch, precision, optimizer):
    config = tiny(f"run.precision={precision}", f"optim.optimizer={optimizer}", "optim.accumulation_steps=2")
    compute = resolve(config.run, "cpu")
    state = abstract_state(config, compute)
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), SPECS["ABT"])
    batch = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for k, x in random_batch(config).items()}
    after, metrics = jax.eval_shape(make_train_step(config, compute), state, batch)
    for kept in (state, after):
        tree = (kept.model, kept.opt_state, kept.loss_scale)
        assert {x.dtype for x in jax.tree.leaves(tree)} == {jnp.dtype("float32"), jnp.dtype("int32")}
        assert {x.dtype for x in jax.tree.leaves(kept.model)} == {jnp.dtype("float32")}
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32
    assert str(jax.tree.structure(after)) == str(jax.tree.structure(state))


def test_initial_state_is_what_abstract_state_says(tiny, mesh_of):
    mesh_of(2, 2, 2)
    config = tiny("optim.optimizer=muon", "model.qk_norm=true")
    compute = resolve(config.run, "cpu")
    state, said = init_state(config, compute), abstract_state(config, compute)
    assert str(jax.tree.structure(state)) == str(jax.tree.structure(said))
    for x, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(said), strict=True):
        assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype)
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim)
    assert (int(state.step), int(state.good_steps), float(state.loss_scale)) == (0, 0, 1.0)
    for path, moment in jax.tree_util.tree_leaves_with_path(state.opt_state):
        if moment.ndim > 1:
            np.testing.assert_array_equal(np.asarray(moment), 0.0, err_msg=jax.tree_util.keystr(path))


def test_evaluation_weighs_tokens_and_not_batches(tiny, random_batch, random_model, place, one_device):
    config = tiny()
    model = random_model(config)
    first, second = ({name: x[0] for name, x in random_batch(config, seed).items()} for seed in (0, 1))
    second["weights"][1:] = 0
    second["labels"][1:] = 0
    step = make_eval_step(resolve(config.run, "cpu"))
    sums = [[float(x) for x in step(model, place(batch))] for batch in (first, second)]
    wanted = (sums[0][0] + sums[1][0]) / (first["weights"].sum() + second["weights"].sum())
    assert evaluate(step, model, [first, second], one_device) == pytest.approx(wanted, rel=1e-6)
    assert evaluate(step, model, [first, second], one_device, limit=1) == pytest.approx(
        sums[0][0] / sums[0][1], rel=1e-6
    )
    placed = place(first)
    plain = jax.jit(lambda model: plain_loss(model, placed, 0.0, config)[1])(model)
    assert sums[0][0] / sums[0][1] == pytest.approx(float(plain), rel=1e-5)


def test_weights_of_another_shape_are_refused_and_not_broadcast(tiny, random_batch):
    config = tiny()
    batch = random_batch(config)
    batch["weights"] = batch["weights"][..., :1]
    state = abstract_state(config, resolve(config.run, "cpu"))
    with pytest.raises(AssertionError, match="shape"):
        jax.eval_shape(make_train_step(config, resolve(config.run, "cpu")), state, batch)
