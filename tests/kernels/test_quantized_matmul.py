"""Products of eight bits: rounding, the references against float64, the others against them, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matmul_problems import assert_at_most_twice_the_error, assert_close, lengths, normal, value_and_grads

from pallas_kernels import dynamic_quantized_matmul, quantize, quantized_matmul
from pallas_kernels.matmul.blocks import Block, BlockSizes
from pallas_kernels.quantized_matmul import Quantized, dequantize
from pallas_kernels.quantized_matmul.quantize import LARGEST

EIGHT = [dtype.name for dtype in LARGEST]
# Half the distance of two values, in scales, at the largest one: int8 1, e4m3 32, e5m2 8192.
HALF_STEP = {"int8": 0.5, "float8_e4m3fn": 16, "float8_e5m2": 4096}
draw = functools.partial(normal, np.random.default_rng(0))


def numpy_dequantized(w: Quantized) -> np.ndarray:
    values, scales = np.asarray(w.values).astype(np.float64), np.asarray(w.scales, np.float64)
    repeated = np.repeat(scales, w.block or values.shape[w.axis], axis=w.axis)
    return values * (repeated[: len(values)] if w.axis == 0 else repeated[:, : values.shape[1]])


@pytest.mark.parametrize("dtype", EIGHT)
@pytest.mark.parametrize(("axis", "block"), [(0, None), (1, None), (0, 4), (1, 5)])
def test_quantised_values_are_the_nearest_ones(dtype, axis, block):
    w = draw(w=(10, 7))["w"].at[3].set(0.0).at[:, 2].set(0.0)
    q = quantize(w, dtype=dtype, axis=axis, block=block)
    exact, scales = np.asarray(w, np.float64), np.asarray(q.scales, np.float64)
    step = np.repeat(scales, block or w.shape[axis], axis=axis)[:10, :7]
    assert q.scales.shape == tuple(-(-n // (block or n)) if d == axis else n for d, n in enumerate(w.shape))
    assert (np.abs(numpy_dequantized(q) - exact) <= step * HALF_STEP[dtype] * (1 + 1e-6)).all()
    np.testing.assert_allclose(dequantize(q), numpy_dequantized(q), rtol=1e-6)
    # The largest of each scale is met exactly, and numpy's own rounding agrees.
    assert np.abs(np.asarray(q.values).astype(np.float64)).max() == LARGEST[jnp.dtype(dtype)]
    wanted = np.rint(exact / step) if dtype == "int8" else (exact / step).astype(getattr(ml_dtypes, dtype))
    near = np.abs(np.asarray(q.values).astype(np.float64) - wanted.astype(np.float64)) == 0
    assert near.mean() > 0.98  # a tie may fall otherwise in float32


@pytest.mark.parametrize("dtype", EIGHT)
def test_stochastic_rounding_is_unbiased_and_goes_to_a_neighbour(dtype):
    w = draw(w=(1, 64))["w"] * jnp.logspace(-3, 0, 64)[None]  # float8's subnormal values too
    run = jax.jit(jax.vmap(lambda key: dequantize(quantize(w, dtype=dtype, axis=1, key=key))))
    got = np.asarray(run(jax.random.split(jax.random.key(0), 4000)), np.float64)[:, 0]
    exact = np.asarray(w, np.float64)[0]
    distinct = [np.unique(column) for column in got.T]
    assert max(len(values) for values in distinct) == 2
    for values, x in zip(distinct, exact, strict=True):  # one value alone is the exact one, but for its rounding
        assert values[0] - 1e-6 * abs(x) <= x <= values[-1] + 1e-6 * abs(x)
    error = got.mean(axis=0) - exact
    assert (np.abs(error) <= 4.5 * got.std(axis=0) / np.sqrt(4000) + 1e-6 * np.abs(exact)).all()
    assert np.abs(np.asarray(dequantize(quantize(w, dtype=dtype, axis=1)))[0] - exact).max() > 0.0


@pytest.mark.parametrize("dtype", EIGHT)
def test_zeros_stay_zero_tiny_ones_finite_and_what_is_not_finite_shows(dtype):
    w = jnp.zeros((4, 3)).at[:, 1].set(1e-38)
    assert (dequantize(quantize(w, dtype=dtype))[:, 0] == 0).all()
    assert jnp.isfinite(dequantize(quantize(w, dtype=dtype))).all()
    for bad in (jnp.nan, jnp.inf):
        y = quantized_matmul(jnp.ones((2, 4)), quantize(w.at[2, 0].set(bad), dtype=dtype))
        assert not jnp.isfinite(y[:, 0]).any()
        assert jnp.isfinite(y[:, 1:]).all()


def run_held(x, w, implementation, **options):
    if implementation == "interpret":
        options["block_sizes"] = Block(32 if len(x) <= 128 else 128, 128, 1024 if w.block else 128)
    run = functools.partial(quantized_matmul, implementation=implementation, **options)
    return np.asarray(jax.jit(jax.shard_map(run, in_specs=P(), out_specs=P()))(x, w))


@pytest.mark.parametrize("block", [None, 3])
@pytest.mark.parametrize("dtype", EIGHT)
def test_reference_and_xla_of_held_weights_match_float64(dtype, block):
    arrays = draw(x=(5, 11), w_DF=(11, 6))
    w = quantize(arrays["w_DF"], dtype=dtype, block=block)
    exact = np.asarray(arrays["x"], np.float64) @ numpy_dequantized(w)
    for implementation in ("reference", "xla"):
        np.testing.assert_allclose(run_held(arrays["x"], w, implementation), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "block"), [((16, 256, 128), None), ((5, 300, 200), None), ((1, 1100, 130), 128), ((140, 200, 60), 128)]
)
def test_kernel_matches_the_reference(shape, block):
    T, D, F = shape
    arrays = draw(x=(T, D), w_DF=(D, F))
    for dtype in ("int8", "float8_e4m3fn"):
        w = quantize(arrays["w_DF"], dtype=dtype, block=block)
        wanted = run_held(arrays["x"], w, "reference")
        np.testing.assert_allclose(run_held(arrays["x"], w, "interpret"), wanted, rtol=2e-5, atol=2e-5)


def test_held_weights_of_any_shape_match_the_reference():
    @given(lengths, lengths, lengths)
    @settings(max_examples=3, deadline=None)
    def check(T, D, F):
        arrays = draw(x=(T, D), w_DF=(D, F))
        w = quantize(arrays["w_DF"])
        wanted = run_held(arrays["x"], w, "reference")
        for implementation in ("xla", "interpret"):
            np.testing.assert_allclose(run_held(arrays["x"], w, implementation), wanted, rtol=2e-5, atol=2e-5)

    check()


@pytest.mark.parametrize("block", [None, 128])
def test_held_weights_in_bfloat16_err_at_most_twice_as_much_as_plain_jax(block):
    arrays = draw(jnp.bfloat16, x=(40, 300), w_DF=(300, 150))
    w = quantize(arrays["w_DF"], block=block)
    truth = {"y": run_held(arrays["x"].astype(jnp.float32), w, "reference")}
    plain = {"y": np.asarray(arrays["x"] @ dequantize(w).astype(jnp.bfloat16))}
    for implementation in ("xla", "interpret"):
        assert_at_most_twice_the_error({"y": run_held(arrays["x"], w, implementation)}, plain, truth)


SMALL = BlockSizes(*[Block(128, 128, 128)] * 3)


def run_dynamic(arrays, implementation, **options):
    options |= {"block_sizes": SMALL} if implementation == "interpret" else {}
    return value_and_grads(dynamic_quantized_matmul, arrays, implementation=implementation, **options)


def numpy_dynamic(arrays, values="int8", quantized_backward=True):
    x, w, dy = (np.asarray(arrays[name], np.float64) for name in ("x_TD", "w_DF", "dy"))
    forward, backward = ("int8", "int8") if values == "int8" else ("float8_e4m3fn", "float8_e5m2")

    def q(name, axis, dtype):
        return numpy_dequantized(quantize(arrays[name], dtype=dtype, axis=axis))

    y = q("x_TD", 1, forward) @ q("w_DF", 0, forward)
    if not quantized_backward:
        return {"y": y, "x_TD": dy @ w.T, "w_DF": x.T @ dy}
    return {
        "y": y,
        "x_TD": q("dy", 1, backward) @ q("w_DF", 1, forward).T,
        "w_DF": q("x_TD", 0, forward).T @ q("dy", 0, backward),
    }


OPTIONS = [{}, {"values": "float8"}, {"quantized_backward": False}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_dynamic_values_and_gradients_match_float64(implementation, options):
    arrays = draw(x_TD=(9, 13), w_DF=(13, 11), dy=(9, 11))
    assert_close(run_dynamic(arrays, implementation, **options), numpy_dynamic(arrays, **options))


@pytest.mark.parametrize(("shape", "options"), [((140, 257, 130), {}), ((128, 128, 256), {"values": "float8"})])
def test_dynamic_kernels_match_the_reference(shape, options):
    T, D, F = shape
    arrays = draw(x_TD=(T, D), w_DF=(D, F), dy=(T, F))
    assert_close(run_dynamic(arrays, "interpret", **options), run_dynamic(arrays, "reference", **options))


def test_dynamic_products_of_any_shape_match_the_reference():
    @given(lengths, lengths, lengths)
    @settings(max_examples=2, deadline=None)
    def check(T, D, F):
        arrays = draw(x_TD=(T, D), w_DF=(D, F), dy=(T, F))
        wanted = run_dynamic(arrays, "reference")
        for implementation in ("xla", "interpret"):
            assert_close(run_dynamic(arrays, implementation), wanted)

    check()


@pytest.mark.parametrize("values", ["int8", "float8"])
def test_dynamic_products_in_bfloat16_err_at_most_twice_as_much_as_plain_jax(values):
    arrays = draw(jnp.bfloat16, x_TD=(100, 120), w_DF=(120, 90), dy=(100, 90))
    truth = numpy_dynamic(arrays, values)
    rounded = {name: jnp.asarray(x, jnp.bfloat16) for name, x in arrays.items()}
    forward, backward = ("int8", "int8") if values == "int8" else ("float8_e4m3fn", "float8_e5m2")

    def back(name, axis, dtype):
        return dequantize(quantize(rounded[name], dtype=dtype, axis=axis)).astype(jnp.bfloat16)

    plain = {
        "y": back("x_TD", 1, forward) @ back("w_DF", 0, forward),
        "x_TD": back("dy", 1, backward) @ back("w_DF", 1, forward).T,
        "w_DF": back("x_TD", 0, forward).T @ back("dy", 0, backward),
    }
    plain = {name: np.asarray(x) for name, x in plain.items()}
    for implementation in ("xla", "interpret"):
        assert_at_most_twice_the_error(run_dynamic(arrays, implementation, values=values), plain, truth)


def test_gradients_rounded_stochastically_are_right_on_average_and_differ_by_key():
    arrays = draw(x_TD=(6, 5), w_DF=(5, 4), dy=(6, 4))

    def dx(key):
        run = functools.partial(dynamic_quantized_matmul, key=key)
        return jax.vjp(run, arrays["x_TD"], arrays["w_DF"])[1](arrays["dy"])

    grads = jax.jit(jax.vmap(dx))(jax.random.split(jax.random.key(0), 3000))
    exact = {
        "x": np.asarray(arrays["dy"], np.float64) @ numpy_dequantized(quantize(arrays["w_DF"], axis=1)).T,
        "w": numpy_dequantized(quantize(arrays["x_TD"], axis=0)).T @ np.asarray(arrays["dy"], np.float64),
    }
    for got, right in zip(grads, exact.values(), strict=True):
        got = np.asarray(got, np.float64)
        assert (got.std(axis=0) > 0).all()
        assert (np.abs(got.mean(axis=0) - right) <= 5 * got.std(axis=0) / np.sqrt(3000)).all()


SPECS = {"x_TD": P(("data", "fsdp"), None), "w_DF": P(None, "tensor"), "y": P(("data", "fsdp"), "tensor")}


def in_shard_map(mesh, arrays, **options):
    """Value and gradients of `dynamic_quantized_matmul` of each device's rows and columns."""
    run = functools.partial(dynamic_quantized_matmul, **options)
    local = jax.shard_map(run, in_specs=(SPECS["x_TD"], SPECS["w_DF"]), out_specs=SPECS["y"])
    specs = SPECS | {"dy": SPECS["y"]}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    y, vjp = jax.jit(functools.partial(jax.vjp, local))(placed["x_TD"], placed["w_DF"])
    return dict(zip(("y", "x_TD", "w_DF"), map(np.asarray, (y, *vjp(placed["dy"]))), strict=True))


def by_parts(arrays, rows, columns):
    """The same by numpy: a scale is of a device's part, and a gradient the sum over the devices that share it."""
    T, F = len(arrays["x_TD"]) // rows, arrays["w_DF"].shape[1] // columns
    y, dx, dw = (np.zeros(arrays[name].shape) for name in ("dy", "x_TD", "w_DF"))
    for i in range(rows):
        for j in range(columns):
            t, f = slice(i * T, (i + 1) * T), slice(j * F, (j + 1) * F)
            part = {"x_TD": arrays["x_TD"][t], "w_DF": arrays["w_DF"][:, f], "dy": arrays["dy"][t, f]}
            one = numpy_dynamic(part)
            y[t, f] = one["y"]
            dx[t] += one["x_TD"]
            dw[:, f] += one["w_DF"]
    return {"y": y, "x_TD": dx, "w_DF": dw}


def test_shard_map_sums_the_gradients_of_each_devices_part(mesh_of):
    arrays = draw(x_TD=(16, 10), w_DF=(10, 12), dy=(16, 12))
    wanted = by_parts(arrays, 4, 2)
    assert_close(in_shard_map(mesh_of(2, 2, 2), arrays), wanted)


@pytest.mark.slow
def test_kernels_in_the_simulator_read_no_unwritten_memory(mesh_of, simulated_tpu):
    arrays = draw(x_TD=(16, 10), w_DF=(10, 12), dy=(16, 12))
    x, w = draw(x=(3, 1100))["x"], draw(w_DF=(1100, 60))["w_DF"]
    wanted, mesh = by_parts(arrays, 2, 2), mesh_of(2, 1, 2)
    sizes = BlockSizes(*[Block(32, 128, 128)] * 2, Block(128, 128, 128))
    with simulated_tpu():
        got = in_shard_map(mesh, arrays, implementation="pallas", block_sizes=sizes)
    assert_close(got, wanted)
    mesh_of()
    for block in (None, 128):
        held = quantize(w, block=block)
        run = functools.partial(quantized_matmul, implementation="pallas", block_sizes=Block(32, 128, 1024))
        with simulated_tpu():
            y = np.asarray(jax.jit(jax.shard_map(run, in_specs=P(), out_specs=P()))(x, held))
        np.testing.assert_allclose(y, np.asarray(x, np.float64) @ numpy_dequantized(held), rtol=1e-5, atol=1e-4)


HELD = quantize(np.ones((4, 5), np.float32))


@pytest.mark.parametrize(
    ("op", "arguments", "options", "message"),
    [
        (quantize, (jnp.ones((2, 2)),), {"dtype": jnp.int4}, "dtype=int4; it must be one of int8, float8_e4m3fn"),
        (quantize, (jnp.ones(2),), {}, r"takes floats of two dims, none of them empty; got float32\(2,\)"),
        (quantize, (jnp.ones((2, 2), jnp.int32),), {}, "takes floats of two dims"),
        (quantize, (jnp.ones((2, 2)),), {"block": 0}, "axis=0 and block=0 must be 0 or 1, and at least 1 or None"),
        (quantized_matmul, (jnp.ones((3, 4)), jnp.ones((4, 5))), {}, "takes weights that `quantize` gave"),
        (quantized_matmul, (jnp.ones((3, 5)), HELD), {}, "takes x_TD and w_DF, none of them empty; got shapes"),
        (quantized_matmul, (jnp.ones((3, 4)), quantize(jnp.ones((4, 5)), axis=1)), {}, "along axis 1 should be"),
        (quantized_matmul, (jnp.ones((3, 4), jnp.int8), HELD), {}, "x_TD is int8; it must be float32"),
        (quantized_matmul, (jnp.ones((3, 4)), HELD), {"block_sizes": Block(32, 128, 128)}, "xla takes no block_sizes"),
        (quantized_matmul, (jnp.ones((3, 4)), HELD), {"implementation": "cudnn"}, "no implementation 'cudnn'; it"),
        (
            quantized_matmul,
            (jnp.ones((3, 4)), quantize(jnp.ones((4, 5)), block=2)),
            {"implementation": "interpret"},
            "interpret takes blocks of scales that are multiples of 128, not of 2; use implementation='xla'",
        ),
        (
            quantized_matmul,
            (jnp.ones((3, 4)), HELD),
            {"implementation": "interpret", "block_sizes": Block(16, 128, 128)},
            "product block T=16, F=128, D=128: multiples of T=32, F=128, D=128",
        ),
        (dynamic_quantized_matmul, (jnp.ones((3, 4)), jnp.ones((5, 4))), {}, "takes x_TD and w_DF, none of them empty"),
        (dynamic_quantized_matmul, (jnp.ones((3, 4)), jnp.ones((4, 5), jnp.bfloat16)), {}, "wants one dtype, float32"),
        (dynamic_quantized_matmul, (jnp.ones((3, 4)), jnp.ones((4, 5))), {"values": "int4"}, "no values 'int4'; it"),
        (
            dynamic_quantized_matmul,
            (jnp.ones((3, 4)), jnp.ones((4, 5))),
            {"key": jax.random.key(0), "quantized_backward": False},
            "key rounds the gradient, which quantized_backward=False leaves as it is",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(op, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        op(*arguments, **options)


def test_held_weights_refuse_a_gradient():
    with pytest.raises(
        ValueError, match="has no gradient: its weights are held in eight bits; train with dynamic_quant"
    ):
        jax.grad(lambda x: quantized_matmul(x, HELD).sum())(jnp.ones((3, 4)))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "TPU v6 lite",
            {"values": "float8"},
            r"the matrix units of v6e take no float8 \(those of tpu7x do\); use int8",
        ),
        ("TPU v4", {"implementation": "pallas"}, "pallas can't take int8 on v4, only on later TPUs; use implement"),
    ],
)
def test_generations_without_the_matrix_units_are_named(kind, options, message):
    device = jax.sharding.AbstractDevice(kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    run = functools.partial(dynamic_quantized_matmul, **options)
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(run, jnp.ones((3, 4)), jnp.ones((4, 5)))
