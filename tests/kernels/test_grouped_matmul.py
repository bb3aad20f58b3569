"""The grouped product: the reference against float64, the others against it, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from matmul_problems import assert_at_most_twice_the_error, assert_close, normal

from pallas_kernels import grouped_matmul

ROOMY = ("reference", "xla")

# Groups of no row, of one, smaller than a tile, of several; sums that fall short; tile - 1 and + 1.
SIZES = {
    "even": (60, [20, 20, 20]),
    "empty_groups": (70, [0, 33, 0, 0, 37, 0]),
    "one_group_has_all": (50, [0, 0, 50, 0]),
    "nobody_has_any": (40, [0, 0, 0]),
    "a_rest_of_nobody": (131, [15, 1, 17, 33, 2]),
    "one_row": (1, [0, 1]),
}


def draw(T, D, F, E, dtype=np.float32):
    return normal(np.random.default_rng(0), dtype, x_TD=(T, D), w_EDF=(E, D, F), dy=(T, F))


def numpy_grouped(arrays, sizes):
    exact = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    y, dx, dw = np.zeros_like(exact["dy"]), np.zeros_like(exact["x_TD"]), np.zeros_like(exact["w_EDF"])
    ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), len(y))
    for e, (first, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        x, dy, w = exact["x_TD"][first:end], exact["dy"][first:end], exact["w_EDF"][e]
        y[first:end], dx[first:end], dw[e] = x @ w, dy @ w.T, x.T @ dy
    return {"y": y, "x_TD": dx, "w_EDF": dw}


def run(arrays, sizes, implementation, **options):
    op = functools.partial(grouped_matmul, implementation=implementation, **options)
    return gradients(op, arrays, sizes)


def gradients(op, arrays, sizes):
    """Inside shard_map over the mesh of one device that every test starts with, since kernels run nowhere else."""

    def local(x_TD, w_EDF, dy_TF, sizes_E):
        y, vjp = jax.vjp(lambda x, w: op(x, w, sizes_E), x_TD, w_EDF)
        return {"y": y} | dict(zip(("x_TD", "w_EDF"), vjp(dy_TF), strict=True))

    everywhere = jax.jit(jax.shard_map(local, in_specs=P(), out_specs=P()))
    results = everywhere(arrays["x_TD"], arrays["w_EDF"], arrays["dy"], jnp.asarray(sizes, jnp.int32))
    return {name: np.asarray(x) for name, x in results.items()}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("implementation", ROOMY)
def test_values_and_gradients_match_float64(implementation, name):
    T, sizes = SIZES[name]
    arrays = draw(T, 13, 11, len(sizes))
    assert_close(run(arrays, sizes, implementation), numpy_grouped(arrays, sizes))


@pytest.mark.parametrize("implementation", ROOMY)
def test_sizes_that_no_rows_can_have_are_cut(implementation):
    arrays = draw(40, 5, 6, 4)
    for sizes in ([30, 30, 5, 2], [-7, 10, -1, 60], [2**31 - 1] * 4):
        assert_close(run(arrays, sizes, implementation), numpy_grouped(arrays, sizes))


def test_any_shapes_match_the_reference():
    @given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(0, 90), min_size=1))
    @settings(max_examples=6, deadline=None)
    def check(T, D, F, sizes):
        arrays = draw(T, D, F, len(sizes))
        assert_close(run(arrays, sizes, "xla"), numpy_grouped(arrays, sizes))

    check()


@pytest.mark.parametrize("implementation", ROOMY)
def test_what_one_group_holds_reaches_no_other(implementation):
    arrays, sizes = draw(100, 8, 6, 4), [30, 0, 25, 20]
    wanted = run(arrays, sizes, implementation)
    rest = slice(75, None)
    assert not wanted["y"][rest].any()
    assert not wanted["x_TD"][rest].any()
    spoiled = {name: np.array(x) for name, x in arrays.items()}
    spoiled["x_TD"][30:55], spoiled["dy"][30:55], spoiled["w_EDF"][1:3] = np.nan, np.inf, np.nan
    spoiled["x_TD"][rest], spoiled["dy"][rest] = np.inf, np.nan
    got = run({name: jnp.asarray(x) for name, x in spoiled.items()}, sizes, implementation)
    rows = np.r_[0:30, 55:100]
    for name in ("y", "x_TD"):
        np.testing.assert_array_equal(got[name][rows], wanted[name][rows], err_msg=name)
        assert np.isnan(got[name][30:55]).all()
    np.testing.assert_array_equal(got["w_EDF"][[0, 1, 3]], wanted["w_EDF"][[0, 1, 3]])


def test_bfloat16_errs_at_most_twice_as_much_as_plain_jax():
    arrays, sizes = draw(200, 120, 90, 3, jnp.bfloat16), [90, 3, 100]
    truth = run({name: x.astype(jnp.float32) for name, x in arrays.items()}, sizes, "reference")
    plain = gradients(jax.lax.ragged_dot, arrays, sizes)
    assert_at_most_twice_the_error(run(arrays, sizes, "xla"), plain, truth)


@pytest.mark.parametrize("implementation", ROOMY)
def test_shard_map_gives_the_same_gradients(mesh_of, implementation):
    """Devices have tokens and sizes of their own; a weight's gradient is summed over those that share it."""
    mesh = mesh_of(2, 1, 2)
    arrays = draw(80, 10, 12, 3)
    sizes = np.array([[10, 0, 25], [7, 33, 0]], np.int32)
    parts = [
        numpy_grouped({k: x if k == "w_EDF" else x[i * 40 :][:40] for k, x in arrays.items()}, sizes[i]) for i in (0, 1)
    ]
    wanted = {name: np.concatenate([part[name] for part in parts]) for name in ("y", "x_TD")}
    wanted["w_EDF"] = parts[0]["w_EDF"] + parts[1]["w_EDF"]
    specs = {"x_TD": P("data"), "w_EDF": P(None, None, "tensor"), "y": P("data", "tensor")}

    @jax.jit
    def sharded(arrays, sizes):
        def split(x_TD, w_EDF):
            local = lambda x, w, s: grouped_matmul(x, w, s[0], implementation=implementation)  # noqa: E731
            in_specs = (specs["x_TD"], specs["w_EDF"], P("data"))
            return jax.shard_map(local, in_specs=in_specs, out_specs=specs["y"])(x_TD, w_EDF, sizes)

        y, vjp = jax.vjp(split, arrays["x_TD"], arrays["w_EDF"])
        return {"y": y} | dict(zip(("x_TD", "w_EDF"), vjp(arrays["dy"]), strict=True))

    placed = {
        name: jax.device_put(x, jax.NamedSharding(mesh, specs["y" if name == "dy" else name]))
        for name, x in arrays.items()
    }
    got = sharded(placed, jax.device_put(sizes, jax.NamedSharding(mesh, P("data"))))
    assert_close({name: np.asarray(x) for name, x in got.items()}, wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TD": jnp.zeros((2, 3, 4))}, "takes x_TD and w_EDF, none of them empty; got shapes"),
        ({"x_TD": jnp.zeros((3, 5))}, "takes x_TD and w_EDF, none of them empty; got shapes"),
        ({"w_EDF": jnp.zeros((0, 4, 5))}, "takes x_TD and w_EDF, none of them empty; got shapes"),
        ({"w_EDF": jnp.zeros((2, 4, 5), jnp.float16)}, "wants one dtype, .*; got float32 and float16"),
        ({"group_sizes": jnp.zeros(3, jnp.int32)}, r"group_sizes int32\(3,\) should be int32 \(2,\)"),
        ({"group_sizes": jnp.zeros(2)}, r"group_sizes float32\(2,\) should be int32 \(2,\)"),
        ({"implementation": "cudnn"}, "no implementation 'cudnn'; it has reference, xla"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    arguments = {"x_TD": jnp.zeros((3, 4)), "w_EDF": jnp.zeros((2, 4, 5)), "group_sizes": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**(arguments | changes))
