"""The mixture of experts against float64 numpy, a token and an expert at a time; routing, capacity, padding, loads."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_train import ops
from tpu_train.aot import flops
from tpu_train.config import ModelConfig, RunConfig, UserError
from tpu_train.models import balance, dispatch, moe
from tpu_train.models.balance import Load
from tpu_train.precision import Compute, resolve
from tpu_train.report import OF_EXPERTS
from tpu_train.sharding import SPECS, P

COMPUTE = resolve(RunConfig(), "cpu")
NUMPY_ACTIVATIONS = {"silu": lambda x: x / (1 + np.exp(-x)), "relu": lambda x: np.maximum(x, 0)}


def numbers(param) -> np.ndarray | None:
    return None if param is None else np.asarray(param[...], np.float64)


def put(x) -> jax.Array:
    return jax.device_put(x, SPECS["BTD"[: x.ndim]])


def numpy_route(logits_E, bias_E, config):
    """(chosen experts, their gates, every expert's share) of one token."""
    scores = np.exp(logits_E) / np.exp(logits_E).sum() if config.router == "softmax" else 1 / (1 + np.exp(-logits_E))
    order = sorted(range(len(scores)), key=lambda e: (-(scores[e] + (0 if bias_E is None else bias_E[e])), e))
    chosen = order[: config.experts_per_token]
    gates = scores[chosen]
    return chosen, gates / gates.sum() if config.normalize_gates else gates, scores / scores.sum()


def numpy_mlp(x_D, gate_DF, up_DF, down_FD, activation):
    act = NUMPY_ACTIVATIONS[activation]
    return (act(x_D @ up_DF) if gate_DF is None else act(x_D @ gate_DF) * (x_D @ up_DF)) @ down_FD


def numpy_moe(x_BTD, real_BT, weights, config):
    """(y_BTD, chosen, shares, dropped), token by token in the order of each row."""
    E, T = config.num_experts, x_BTD.shape[1]
    y_BTD, chosen_E, shares_E, dropped = np.zeros(x_BTD.shape), np.zeros(E), np.zeros(E), 0
    most = math.inf
    if config.capacity_factor is not None:
        most = math.ceil(T * config.experts_per_token / E * config.capacity_factor)
    for row, x_TD in enumerate(x_BTD):
        taken_E = np.zeros(E)
        for t in np.flatnonzero(real_BT[row]):
            chosen, gates, shares = numpy_route(x_TD[t] @ weights["router"], weights["bias"], config)
            shares_E += shares
            for e, gate in zip(chosen, gates, strict=True):
                chosen_E[e] += 1
                taken_E[e] += 1
                if taken_E[e] > most:
                    dropped += 1
                    continue
                expert = [None if w is None else w[e] for w in (weights["gate"], weights["up"], weights["down"])]
                y_BTD[row, t] += gate * numpy_mlp(x_TD[t], *expert, config.activation)
        if weights["shared"] is not None:
            for t in range(T):
                y_BTD[row, t] += numpy_mlp(x_TD[t], *weights["shared"], config.activation)
    return y_BTD, chosen_E, shares_E, dropped


def weights_of(layer):
    names = {"router": "router_DE", "bias": "bias_E", "gate": "gate_EDF", "up": "up_EDF", "down": "down_EFD"}
    weights = {name: numbers(getattr(layer, attribute)) for name, attribute in names.items()}
    shared = layer.shared
    return weights | {
        "shared": shared and [numbers(w) for w in (shared.gate_DF, shared.up_DF, shared.down_FD)],
    }


@pytest.fixture
def layer_of(tiny, random_model):
    """layer_of(overrides): a layer with random weights, its bias too, and its config."""

    def make(*overrides):
        config = tiny("model.num_experts=5", "model.expert_dim=12", *overrides)
        return jax.tree.map(lambda x: x[0], random_model(config, seed=3).blocks[0]).mlp, config.model

    return make


SHAPE = (2, 7, 16)
VARIANTS = {
    "softmax": (),
    "sigmoid, bias, shared": (
        *("model.router=sigmoid", "model.balance=bias", "model.num_shared_experts=2", "model.experts_per_token=3"),
    ),
    "one choice, its own gate, plain": (
        *("model.experts_per_token=1", "model.normalize_gates=false", "model.gated_mlp=false", "model.activation=relu"),
    ),
    "with a capacity": ("model.capacity_factor=0.6", "model.router=sigmoid"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_loads_and_slopes_match_float64(layer_of, variant):
    layer, config = layer_of(*VARIANTS[variant])
    rng = np.random.default_rng(1)
    x, cotangent, direction = rng.normal(size=(3, *SHAPE)).astype(np.float32)
    real = np.ones(SHAPE[:2], bool)
    real[0, 5:] = False
    turn = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape), w.dtype), layer)

    @jax.jit
    def run(layer, x):
        (y, load), vjp = jax.vjp(lambda layer, x: layer(x, put(real), COMPUTE), layer, x)
        zero = jax.tree.map(lambda a: np.zeros(a.shape, jax.dtypes.float0), load)
        zero = Load(zero.chosen_E, jnp.zeros_like(load.shares_E), zero.dropped)
        of_layer, of_x = vjp((put(cotangent), zero))
        return y, load, of_layer, of_x

    y, load, of_layer, of_x = run(layer, put(x))
    weights = weights_of(layer)
    wanted, chosen, shares, dropped = numpy_moe(x.astype(np.float64), real, weights, config)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(load.chosen_E, chosen)
    np.testing.assert_allclose(load.shares_E, shares, rtol=1e-5)
    assert int(load.dropped) == dropped
    assert (dropped > 0) == (config.capacity_factor is not None)
    assert of_layer.bias_E is None or not np.any(of_layer.bias_E[...])

    def loss(step):
        moved = jax.tree.map(lambda w, d: np.asarray(w, np.float64) + step * np.asarray(d, np.float64), layer, turn)
        at = weights_of(moved) | {"bias": weights["bias"]}
        return np.sum(numpy_moe(x + step * direction.astype(np.float64), real, at, config)[0] * cotangent)

    slope = np.sum(np.asarray(of_x, np.float64) * direction)
    for gradient, turned in zip(jax.tree.leaves(of_layer), jax.tree.leaves(turn), strict=True):
        slope += np.sum(np.asarray(gradient, np.float64) * turned)
    assert slope == pytest.approx((loss(1e-6) - loss(-1e-6)) / 2e-6, rel=1e-4)


def test_padding_is_routed_nowhere_whatever_it_holds(layer_of):
    layer, config = layer_of()
    rng = np.random.default_rng(2)
    x = rng.normal(size=SHAPE).astype(np.float32)
    real = np.zeros(SHAPE[:2], bool)
    real[0, :4] = True  # a row of padding alone beside

    @jax.jit
    def run(layer, x):
        def total(layer, x):
            y, load = layer(x, put(real), COMPUTE)
            return jnp.sum(jnp.square(y)) + jnp.sum(jnp.square(load.shares_E)), (y, load)

        return jax.value_and_grad(total, (0, 1), has_aux=True)(layer, x)

    dirty = np.where(real[..., None], x, np.nan).astype(np.float32)
    ((_, (y, load)), grads), ((_, (_, clean_load)), clean) = (run(layer, put(a)) for a in (dirty, x))
    assert int(load.chosen_E.sum()) == 4 * config.experts_per_token
    assert not np.any(np.asarray(y)[~real])
    assert np.abs(np.asarray(y)[real]).max() > 0.01
    assert not np.any(np.asarray(grads[1])[~real])
    for mine, wanted in zip(jax.tree.leaves((load, grads)), jax.tree.leaves((clean_load, clean)), strict=True):
        np.testing.assert_array_equal(mine, wanted)


def test_the_router_is_float32_where_the_experts_are_bfloat16(layer_of):
    layer, _ = layer_of("model.experts_per_token=1", "model.normalize_gates=false")
    # Two experts a hair apart, which bfloat16 can't tell from each other.
    router = np.tile(numbers(layer.router_DE)[:, :1], (1, 5)).astype(np.float32)
    x = np.asarray(jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 16)), jnp.bfloat16), np.float32)
    router[:, 3] += 1e-4 * np.abs(router[:, 3])
    layer.router_DE[...] = jnp.asarray(router)
    exact = np.argmax(x[0].astype(np.float64) @ router.astype(np.float64), axis=1)
    wanted = np.bincount(exact, minlength=5)
    assert 10 < wanted[3] < 54
    compute = Compute(jnp.dtype(jnp.bfloat16), "xla", "cpu")
    y, load = jax.jit(lambda layer, x: layer(x, None, compute))(layer, put(jnp.asarray(x, jnp.bfloat16)))
    assert y.dtype == jnp.bfloat16
    assert load.shares_E.dtype == jnp.float32
    np.testing.assert_array_equal(load.chosen_E, wanted)


def test_a_bias_changes_who_is_chosen_and_no_gate():
    config = ModelConfig(num_experts=4, experts_per_token=2, router="sigmoid", normalize_gates=False)
    logits = jnp.array([[2.0, 1.0, 0.0, -1.0]])
    gates, chosen, shares = moe.route(logits, None, config)
    np.testing.assert_array_equal(chosen, [[0, 1]])
    moved_gates, moved, same_shares = moe.route(logits, jnp.array([0.0, -9.0, 0.0, 0.9]), config)
    np.testing.assert_array_equal(moved, [[3, 0]])
    np.testing.assert_array_equal(moved_gates, jax.nn.sigmoid(jnp.array([[-1.0, 2.0]])))
    np.testing.assert_array_equal(shares, same_shares)
    assert float(gates[0, 0]) == float(moved_gates[0, 1])


def test_logits_that_underflow_give_no_nan():
    config = ModelConfig(num_experts=3, experts_per_token=2, router="sigmoid")
    gates, _, shares = moe.route(jnp.full((1, 3), -1e4), None, config)
    assert np.isfinite(gates).all()
    assert np.isfinite(shares).all()


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(2, 6), st.integers(0, 2**31 - 1))
def test_balance_loss_of_parts_adds_up_to_that_of_the_whole(parts, experts, seed):
    rng = np.random.default_rng(seed)
    k = min(2, experts)
    tokens = rng.integers(0, 9, parts)
    tokens[0] += 1
    scores = [rng.dirichlet(np.ones(experts), n) for n in tokens]
    loads = [
        Load(
            jnp.asarray(np.bincount(np.argsort(-s)[:, :k].ravel(), minlength=experts)[None], jnp.int32),
            jnp.asarray(s.sum(0, keepdims=True), jnp.float32),
            jnp.zeros((1,), jnp.int32),
        )
        for s in scores
    ]
    whole = jax.tree.map(lambda *x: sum(x), *loads)
    every = np.concatenate(scores)
    chosen_share = np.bincount(np.argsort(-every)[:, :k].ravel(), minlength=experts) / (k * len(every))
    wanted = experts * np.sum(chosen_share * every.mean(axis=0))
    assert float(balance.balance_loss([whole], [whole], k)) == pytest.approx(wanted, rel=1e-5)
    total = sum(float(balance.balance_loss([part], [whole], k)) for part in loads)
    assert total == pytest.approx(wanted, rel=1e-5)


def test_measures_are_of_sums_over_layers_and_one_at_perfect_balance():
    even = Load(jnp.full((2, 4), 6, jnp.int32), jnp.full((2, 4), 3.0), jnp.zeros(2, jnp.int32))
    got = {name: float(x) for name, x in balance.measures([even], 2).items()}
    assert set(got) == set(OF_EXPERTS)
    assert got == {"load_imbalance": 1.0, "load_imbalance_worst": 1.0, "balance_loss": 1.0, "dropped_share": 0.0}
    skewed = Load(jnp.array([[12, 12, 0, 0]], jnp.int32), jnp.full((1, 4), 3.0), jnp.array([6], jnp.int32))
    got = {name: float(x) for name, x in balance.measures([even, skewed], 2).items()}
    assert got["load_imbalance"] == pytest.approx((1 + 1 + 2) / 3)
    assert (got["load_imbalance_worst"], got["dropped_share"]) == (2.0, pytest.approx(6 / 72))
    nothing = jax.tree.map(jnp.zeros_like, even)
    assert all(np.isfinite(float(x)) for x in balance.measures([nothing], 2).values())


def test_biases_follow_the_sign_of_the_load_error_and_rest_without_tokens():
    load = Load(jnp.array([[5, 1, 3, 3], [0, 0, 0, 0]], jnp.int32), jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32))
    moved = balance.moved_bias(jnp.array([[1.0, 1.0, 1.0, -1.0]] * 2), load, 0.25)
    np.testing.assert_array_equal(moved, [[0.75, 1.25, 1.0, -1.0], [1.0, 1.0, 1.0, -1.0]])


@pytest.mark.parametrize(
    ("length", "choices", "experts", "factor", "room"),
    [(10, 3, 10, 0.1, 1), (16, 2, 8, 1.0, 4), (16, 2, 8, 1.01, 5), (100, 1, 10, 1.1, 11), (1, 2, 64, 1.0, 1)],
)
def test_capacity_is_rounded_up_and_no_further(length, choices, experts, factor, room):
    config = ModelConfig(num_experts=experts, experts_per_token=choices, capacity_factor=factor)
    assert moe.capacity(config, length) == room
    # Two devices with three rows each have room for all that may come, and for no more choices than there are.
    assert moe.rows_at_home(config, 2, 3, length) == 2 * 3 * min(length * choices, experts // 2 * room)


def test_compile_counts_no_loops_over_rows_that_only_the_run_knows():
    def product(x, sizes):
        return ops.grouped_matmul(x, jnp.zeros((2, 4, 8)), sizes, compute=COMPUTE)

    traced = jax.make_jaxpr(product)(jnp.zeros((200, 4)), jnp.zeros(2, jnp.int32))
    with pytest.raises(UserError, match=r"can't count; set run\.implementation=auto"):
        flops.count(traced.jaxpr, 1, ModelConfig(num_experts=2))


def test_rows_are_exchanged_as_ragged_all_to_all_says(mesh_of):
    """By its documentation, written out in numpy, two slices a device; and the gradient comes back the same way."""
    mesh = mesh_of(expert=2)
    counts = np.array([[2, 0, 1, 3], [1, 2, 0, 1]], np.int32)  # device, expert; two experts a device
    rows = np.arange(2 * 6, dtype=np.float32).reshape(12, 1) + 1
    split = P("expert")

    def local(x, counts):
        there, back, sizes = dispatch.slices(counts.reshape(-1))
        out, vjp = jax.vjp(lambda x: dispatch.exchange(x, there, back, 8, False), x)
        return out, sizes, vjp(out)[0], jnp.concatenate(there)

    run = jax.jit(functools.partial(jax.shard_map, out_specs=(split,) * 4, in_specs=(split, split))(local))
    placed = [jax.device_put(a, jax.NamedSharding(mesh, split)) for a in (rows, counts)]
    out, sizes, returned, there = (np.asarray(a) for a in run(*placed))
    # Device 0 has experts 0 and 1: of expert 0 rows 1, 2 and then device 1's first; of expert 1 device 1's next two.
    np.testing.assert_array_equal(out[:8, 0], [1, 2, 7, 8, 9, 0, 0, 0])
    np.testing.assert_array_equal(out[8:, 0], [3, 4, 5, 6, 10, 0, 0, 0])
    np.testing.assert_array_equal(sizes, [3, 2, 1, 4])
    np.testing.assert_array_equal(returned[:, 0], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 0])

    received = np.zeros((2, 8))
    for source, (begin, size, at, _) in enumerate(there.reshape(2, 4, 4)):
        for i in range(4):
            sent = rows[6 * source :, 0][begin[i] : begin[i] + size[i]]
            received[i // 2, at[i] : at[i] + size[i]] = sent
    np.testing.assert_array_equal(out.reshape(2, 8), received)
