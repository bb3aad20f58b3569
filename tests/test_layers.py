"""Norm, rotary positions, attention and the MLP against float64 numpy written from their papers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from tpu_train.config import RunConfig
from tpu_train.models.layers import MLP, Attention, Context, rotary_angles
from tpu_train.precision import resolve
from tpu_train.sharding import SPECS

COMPUTE = resolve(RunConfig(), "cpu")


def numbers(param) -> np.ndarray:
    return np.asarray(param[...], np.float64)


def numpy_norm(x, scale, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * scale


def numpy_rope(x_BTNH, positions_BT, theta):
    half = x_BTNH.shape[-1] // 2
    angles = positions_BT[:, :, None, None] * theta ** (-np.arange(half) / half)
    turned = (x_BTNH[..., :half] + 1j * x_BTNH[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


NUMPY_ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
}


def numpy_attention(x_BTD, weights, positions_BT, segments_BT, *, window, theta, soft_cap, eps):
    """`weights`: float64 q, k, v, out and, with q/k norm, q_norm and k_norm."""
    q, k, v = (np.einsum("BTD,DNH->BTNH", x_BTD, weights[name]) for name in "qkv")
    if "q_norm" in weights:
        q, k = numpy_norm(q, weights["q_norm"], eps), numpy_norm(k, weights["k_norm"], eps)
    q, k = numpy_rope(q, positions_BT, theta), numpy_rope(k, positions_BT, theta)
    k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    T = x_BTD.shape[1]
    behind = np.arange(T)[:, None] - np.arange(T)[None, :]
    seen = (behind >= 0) & ((behind < window) | (window == 0))
    seen = seen & (segments_BT[:, :, None] == segments_BT[:, None, :]) & (segments_BT > 0)[:, :, None]
    p = np.where(seen[:, None], np.exp(scores), 0)
    p /= np.maximum(p.sum(axis=-1, keepdims=True), 1e-300)
    return np.einsum("BTNH,NHD->BTD", np.einsum("BNTS,BSNH->BTNH", p, v), weights["out"])


def numpy_mlp(x_BTD, weights, activation):
    gate_DF, up_DF, down_FD = weights
    activate = NUMPY_ACTIVATIONS[activation]
    hidden = x_BTD @ up_DF
    return (activate(hidden) if gate_DF is None else activate(x_BTD @ gate_DF) * hidden) @ down_FD


def attention_weights(attention: Attention) -> dict[str, np.ndarray]:
    weights = {"q": attention.q_DNH, "k": attention.k_DKH, "v": attention.v_DKH, "out": attention.out_NHD}
    if attention.q_norm is not None and attention.k_norm is not None:
        weights |= {"q_norm": attention.q_norm.scale_D, "k_norm": attention.k_norm.scale_D}
    return {name: numbers(param) for name, param in weights.items()}


def mlp_weights(mlp: MLP) -> list[np.ndarray | None]:
    return [None if w is None else numbers(w) for w in (mlp.gate_DF, mlp.up_DF, mlp.down_FD)]


def correctly_rounded(got, exact) -> float:
    """The share of bfloat16 numbers that are the nearest to the exact ones."""
    nearest = np.asarray(jnp.asarray(exact, jnp.float32).astype(jnp.bfloat16), np.float32)
    return float(np.mean(np.asarray(got, np.float32) == nearest))


@pytest.fixture
def first_block(random_model):
    """The first block of a model with random weights, norm scales included."""

    def take(config):
        return jax.tree.map(lambda x: x[0], random_model(config).blocks[0])

    return take


@pytest.mark.parametrize("mean", [0.0, 1e4, -1e6])
def test_norm_matches_float64_whatever_the_mean(tiny, random_model, mean):
    norm = random_model(tiny()).final_norm
    x = (np.random.default_rng(0).normal(size=(3, 5, 16)) + mean).astype(np.float32)
    wanted = numpy_norm(x.astype(np.float64), numbers(norm.scale_D), tiny().model.norm_eps)
    np.testing.assert_allclose(norm(jnp.asarray(x)), wanted, rtol=2e-6, atol=1e-6)


def test_norm_of_bfloat16_is_computed_in_float32(tiny, random_model):
    norm = random_model(tiny()).final_norm
    x = jnp.asarray(np.random.default_rng(0).normal(3, 1, size=(100, 16)), jnp.bfloat16)
    got = norm(x)
    assert got.dtype == jnp.bfloat16
    assert correctly_rounded(got, numpy_norm(np.asarray(x, np.float64), numbers(norm.scale_D), 1e-6)) > 0.99


def test_norm_of_zeros_is_zero(tiny, random_model):
    np.testing.assert_array_equal(random_model(tiny()).final_norm(jnp.zeros((2, 16))), 0.0)


def rope(x, positions, theta=10_000.0):
    return pallas_kernels.apply_rope(x, *rotary_angles(jnp.asarray(positions, jnp.int32), x.shape[-1], theta, COMPUTE))


@pytest.mark.parametrize(("first", "tolerance"), [(0, 1e-5), (1000, 3e-4), (100_000, 3e-2)])
def test_rope_matches_float64_at_far_positions(first, tolerance):
    positions = first + np.arange(6)[None]
    x = np.random.default_rng(0).normal(size=(1, 6, 2, 8)).astype(np.float32)
    got = np.asarray(rope(jnp.asarray(x), positions))
    np.testing.assert_allclose(got, numpy_rope(x.astype(np.float64), positions, 10_000.0), atol=tolerance)
    same_vector = np.asarray(rope(jnp.ones((1, 6, 1, 8)), positions))[0, :, 0]
    assert np.abs(np.diff(same_vector, axis=0)).max(axis=1).min() > 0.3  # neighbours differ, however far


@pytest.mark.parametrize(("shift", "tolerance"), [(100, 1e-4), (100_000, 5e-2)])
def test_rope_scores_depend_on_the_distance_alone(shift, tolerance):
    q, k = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, 4, 1, 8)), jnp.float32)
    at_q, at_k = np.array([[5, 9, 2, 7]]), np.array([[3, 0, 2, 6]])

    def scores(by):
        return np.sum(np.asarray(rope(q, at_q + by)) * np.asarray(rope(k, at_k + by)), axis=-1)

    np.testing.assert_allclose(scores(shift), scores(0), atol=tolerance)
    assert np.abs(np.sum(np.asarray(rope(q, at_q + 1)) * np.asarray(rope(k, at_k)), axis=-1) - scores(0)).max() > 0.3


def test_rope_of_bfloat16_keeps_its_angles_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40, 2, 8)), jnp.bfloat16)
    positions = 260 + np.arange(40)[None]  # bfloat16 holds whole numbers to 256
    assert all(angle.dtype == jnp.float32 for angle in rotary_angles(jnp.asarray(positions), 8, 10_000.0, COMPUTE))
    got = rope(x, positions)
    assert got.dtype == jnp.bfloat16
    assert correctly_rounded(got, numpy_rope(np.asarray(x, np.float64), positions, 10_000.0)) > 0.97


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_mlp_matches_float64_with_every_activation(tiny, first_block, gated):
    mlp = first_block(tiny(f"model.gated_mlp={gated}", "model.mlp_dim=24")).mlp
    assert (mlp.gate_DF is not None) == gated
    rng = np.random.default_rng(0)
    x, cotangent, direction = rng.normal(size=(3, 2, 3, 16)).astype(np.float32)
    weights = mlp_weights(mlp)

    @jax.jit
    def value_and_slope(mlp, x):
        y, vjp = jax.vjp(lambda mlp, x: mlp(x, COMPUTE), mlp, x)
        return y, jnp.sum(vjp(jnp.asarray(cotangent))[1] * direction)

    for name in NUMPY_ACTIVATIONS:
        mlp.activation = name
        y, slope = value_and_slope(mlp, jnp.asarray(x))
        np.testing.assert_allclose(y, numpy_mlp(x, weights, name), rtol=1e-5, atol=1e-6, err_msg=name)
        step = 1e-6 * direction.astype(np.float64)
        ahead, behind = (np.sum(numpy_mlp(x + h, weights, name) * cotangent) for h in (step, -step))
        np.testing.assert_allclose(slope, (ahead - behind) / 2e-6, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("overrides", "window"),
    [
        ([], 0),
        (["model.qk_norm=true", "model.attention_soft_cap=1.5"], 3),
        (["model.num_kv_heads=8", "model.head_dim=6", "model.rope_theta=100"], 4),
    ],
)
def test_attention_matches_float64(tiny, first_block, overrides, window):
    config = tiny(*overrides, f"model.window_pattern={window}")
    attention, config = first_block(config).attention, config.model
    assert (attention.q_norm is not None) == config.qk_norm
    x = np.random.default_rng(0).normal(size=(2, 9, 16)).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 2, 0], [3] * 9], np.int32)
    positions = np.array([[0, 1, 2, 0, 1, 2, 3, 4, 0], list(range(9))], np.int32)

    @jax.jit
    def run(attention, x, positions, segments):
        angles = rotary_angles(positions, config.head_size, config.rope_theta, COMPUTE)
        return attention(x, Context(*angles, segments, COMPUTE))

    got, cache = run(attention, *(jax.device_put(a, SPECS["BTD"[: a.ndim]]) for a in (x, positions, segments)))
    options = {"window": window, "theta": config.rope_theta, "soft_cap": config.attention_soft_cap, "eps": 1e-6}
    wanted = numpy_attention(x.astype(np.float64), attention_weights(attention), positions, segments, **options)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    assert cache is None
