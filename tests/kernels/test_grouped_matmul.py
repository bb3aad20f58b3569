"""The grouped product: the reference against float64, the others against it, and what is refused."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from matmul_problems import assert_at_most_twice_the_error, assert_close, lengths, normal

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul import blocks
from pallas_kernels.grouped_matmul.blocks import Problem
from pallas_kernels.grouped_matmul.cases import work
from pallas_kernels.grouped_matmul.groups import bounds, most_visits, visits
from pallas_kernels.matmul.blocks import KERNELS, Block, BlockSizes
from pallas_kernels.runtime import CHIPS

ROOMY = ("reference", "xla")
ALL = (*ROOMY, "interpret")
SMALL = BlockSizes(*[Block(128, 128, 128)] * 3)

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


def run(arrays, sizes, implementation, block_sizes=None):
    return gradients(_op(implementation, block_sizes), arrays, sizes)


@functools.cache
def _op(implementation, block_sizes):
    if implementation == "interpret":
        block_sizes = block_sizes or SMALL
    return functools.partial(grouped_matmul, implementation=implementation, block_sizes=block_sizes)


def gradients(op, arrays, sizes):
    """Inside shard_map over the mesh of one device that every test starts with, since kernels run nowhere else."""
    results = _everywhere(op)(arrays["x_TD"], arrays["w_EDF"], arrays["dy"], jnp.asarray(sizes, jnp.int32))
    return {name: np.asarray(x) for name, x in results.items()}


@functools.cache
def _everywhere(op):
    """Compiled once for all sizes of as many groups."""

    def local(x_TD, w_EDF, dy_TF, sizes_E):
        y, vjp = jax.vjp(lambda x, w: op(x, w, sizes_E), x_TD, w_EDF)
        return {"y": y} | dict(zip(("x_TD", "w_EDF"), vjp(dy_TF), strict=True))

    return jax.jit(lambda *arrays: jax.shard_map(local, in_specs=P(), out_specs=P())(*arrays))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("implementation", ROOMY)
def test_values_and_gradients_match_float64(implementation, name):
    T, sizes = SIZES[name]
    arrays = draw(T, 13, 11, len(sizes))
    assert_close(run(arrays, sizes, implementation), numpy_grouped(arrays, sizes))


@pytest.mark.parametrize("implementation", ALL)
def test_sizes_that_no_rows_can_have_are_cut(implementation):
    arrays = draw(40, 5, 6, 4)
    for sizes in ([30, 30, 5, 2], [-7, 10, -1, 60], [2**31 - 1] * 4):
        assert_close(run(arrays, sizes, implementation), numpy_grouped(arrays, sizes))


# What a kernel does depends on these: tails, a contraction in one step or two, tiles of one part or of several.
CUTS = {
    "tails_everywhere": ((300, 140, 130, 5), SMALL),
    "a_part_and_a_shorter_one": ((520, 60, 40, 4), BlockSizes(*[Block(256, 128, 128)] * 3)),
    "three_parts_and_two_steps": ((400, 140, 130, 4), BlockSizes(*[Block(384, 128, 128)] * 3)),
    "one_tile_longer_than_all": ((37, 8, 8, 3), None),
}


@pytest.mark.parametrize("name", CUTS)
def test_kernels_match_float64_however_the_rows_fall(name):
    (T, D, F, E), block_sizes = CUTS[name]
    arrays = draw(T, D, F, E)

    @given(st.lists(st.integers(0, T // 2) | st.just(0), min_size=E, max_size=E))
    @example([0] * E)
    @example([0] * (E - 1) + [T])
    @example([T // 2 + 7, *[T // 4] * (E - 1)])
    @settings(max_examples=12, deadline=None)
    def check(sizes):
        assert_close(run(arrays, sizes, "interpret", block_sizes), numpy_grouped(arrays, sizes))

    check()


def test_any_shapes_match_float64_in_kernels():
    @given(lengths, lengths, lengths, st.lists(st.integers(0, 90), min_size=1, max_size=9))
    @settings(max_examples=2, deadline=None)
    def check(T, D, F, sizes):
        arrays = draw(T, D, F, len(sizes))
        assert_close(run(arrays, sizes, "interpret"), numpy_grouped(arrays, sizes))

    check()


@given(
    sizes=st.lists(st.integers(0, 700), min_size=6, max_size=6),
    num_rows=st.sampled_from([1, 128, 500, 1024, 1700]),
    tile=st.sampled_from([128, 384]),
    every=st.sampled_from(["tile", "group"]),
)
@settings(max_examples=60, deadline=None)
def test_visits_are_those_that_a_loop_finds(sizes, num_rows, tile, every):
    sizes_E = jnp.asarray(sizes, jnp.int32)
    first_E, end_E = (np.asarray(x) for x in _bounds(sizes_E, num_rows))
    got = _visits(sizes_E, num_rows, tile, every)
    wanted = []
    for e, (first, end) in enumerate(zip(first_E, end_E, strict=True)):
        wanted += [(e, t) for t in range(first // tile, -(-end // tile)) if first < end]
        if every == "group" and first == end:
            wanted.append((e, min(first // tile, (num_rows - 1) // tile)))
    if every == "tile":
        e = max([e for e, _ in wanted], default=0)
        wanted += [(e, t) for t in range(-(-end_E[-1] // tile), -(-num_rows // tile))]
    count = int(got.count)
    assert len(got.group_V) == most_visits(num_rows, 6, tile) >= count == len(wanted)
    assert list(zip(got.group_V.tolist(), got.tile_V.tolist(), strict=True))[:count] == wanted
    rows = [(int(first_E[e] - t * tile), int(end_E[e] - t * tile)) for e, t in wanted]
    assert list(zip(got.first_V.tolist(), got.end_V.tolist(), strict=True))[:count] == rows
    assert work(num_rows, sizes, tile, (128,), every).visits == count


_bounds = jax.jit(bounds, static_argnums=1)
_visits = jax.jit(visits, static_argnums=(1, 2, 3))


def test_any_shapes_match_float64():
    @given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 40), st.lists(st.integers(0, 90), min_size=1))
    @settings(max_examples=6, deadline=None)
    def check(T, D, F, sizes):
        arrays = draw(T, D, F, len(sizes))
        assert_close(run(arrays, sizes, "xla"), numpy_grouped(arrays, sizes))

    check()


@pytest.mark.parametrize("implementation", ALL)
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
    for implementation in ("xla", "interpret"):
        got = run(arrays, sizes, implementation)
        assert {str(x.dtype) for x in got.values()} == {"bfloat16"}
        assert_at_most_twice_the_error(got, plain, truth)


def test_x64_mode_changes_nothing():
    arrays, sizes = draw(40, 8, 8, 3), [11, 0, 20]
    with jax.enable_x64(True):
        for implementation in ("xla", "interpret"):
            got = run(arrays, sizes, implementation)
            assert {str(x.dtype) for x in got.values()} == {"float32"}
            assert_close(got, numpy_grouped(arrays, sizes))


@pytest.mark.parametrize("implementation", ROOMY)
def test_shard_map_gives_the_same_gradients(mesh_of, implementation):
    check_on_a_mesh(mesh_of(2, 1, 2), functools.partial(grouped_matmul, implementation=implementation))


def test_kernels_match_float64_where_unwritten_memory_is_nan(simulated_tpu):
    arrays, sizes = draw(300, 140, 130, 4), [0, 130, 7, 100]
    with simulated_tpu():
        got = run(arrays, sizes, "pallas", SMALL)
    assert_close(got, numpy_grouped(arrays, sizes))


def test_kernels_in_shard_map_give_the_same_gradients(mesh_of, simulated_tpu):
    mesh = mesh_of(2, 1, 2)
    with simulated_tpu():
        check_on_a_mesh(mesh, functools.partial(grouped_matmul, implementation="pallas", block_sizes=SMALL))


def check_on_a_mesh(mesh, op):
    """Devices have tokens and sizes of their own; a weight's gradient is summed over those that share it."""
    arrays = draw(280, 10, 12, 3)
    sizes = np.array([[10, 0, 120], [7, 33, 0]], np.int32)
    parts = [
        numpy_grouped({k: x if k == "w_EDF" else x[i * 140 :][:140] for k, x in arrays.items()}, sizes[i])
        for i in (0, 1)
    ]
    wanted = {name: np.concatenate([part[name] for part in parts]) for name in ("y", "x_TD")}
    wanted["w_EDF"] = parts[0]["w_EDF"] + parts[1]["w_EDF"]
    specs = {"x_TD": P("data"), "w_EDF": P(None, None, "tensor"), "y": P("data", "tensor")}

    @jax.jit
    def sharded(arrays, sizes):
        def split(x_TD, w_EDF):
            in_specs = (specs["x_TD"], specs["w_EDF"], P("data"))
            local = jax.shard_map(lambda x, w, s: op(x, w, s[0]), in_specs=in_specs, out_specs=specs["y"])
            return local(x_TD, w_EDF, sizes)

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
        ({"implementation": "cudnn"}, "no implementation 'cudnn'; it has reference, xla, pallas, interpret"),
        ({"block_sizes": SMALL}, "xla takes no block_sizes; pallas and interpret do"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    arguments = {"x_TD": jnp.zeros((3, 4)), "w_EDF": jnp.zeros((2, 4, 5)), "group_sizes": jnp.zeros(2, jnp.int32)}
    with pytest.raises(ValueError, match=message):
        grouped_matmul(**(arguments | changes))


def test_what_pallas_cannot_take_is_refused(mesh_of):
    arrays, sizes = draw(3, 4, 5, 2), [1, 2]
    with pytest.raises(ValueError, match="grouped_matmul: pallas can't take float16"):
        run({name: x.astype(jnp.float16) for name, x in arrays.items()}, sizes, "interpret")
    with pytest.raises(ValueError, match=r"dx block T=128, F=100, D=128: each must be a multiple of 128"):
        run(arrays, sizes, "interpret", BlockSizes(dx=Block(128, 100, 128)))
    mesh_of(8, 1, 1)
    with pytest.raises(ValueError, match=r"under a mesh with Explicit axes pallas runs inside jax\.shard_map only"):
        grouped_matmul(arrays["x_TD"], arrays["w_EDF"], jnp.zeros(2, jnp.int32), implementation="interpret")


@pytest.mark.parametrize(("name", "shape"), list(itertools.product(CHIPS, [(8192, 14336, 4096, 8), (9, 50, 1, 200)])))
def test_chosen_blocks_fit_the_chip_and_others_name_one_that_does(name, shape):
    chip = CHIPS[name]
    for kernel, itemsize in itertools.product(KERNELS, (2, 4)):
        problem = Problem(*shape, itemsize)
        chosen = blocks.choose(kernel, problem, chip)
        blocks.check("op", kernel, problem, chosen, chip)
        with pytest.raises(ValueError, match=rf"op: {kernel} block .* MiB of VMEM; {name} has .*; {chosen} fits"):
            blocks.check("op", kernel, problem, Block(8192, 8192, 8192), chip)
