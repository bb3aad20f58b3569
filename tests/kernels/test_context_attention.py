"""Attention over a split sequence, each method on 2 and 4 devices, against float64 loops over the whole one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, assert_close, numpy_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import context_attention, flash_attention
from pallas_kernels.attention import ring, xla
from pallas_kernels.attention.blocks import BlockSizes, Cut
from pallas_kernels.attention.mask import Mask
from tpu_train.context import Layer, reorder

METHODS = ("all_gather", "ring", "all_to_all")
ALL = Case(B=1, T=16, S=16, K=4, G=2, segments=True, soft_cap=2.0, sinks=True)
NARROW = Case(B=2, T=16, S=16, K=4, G=1, window=3, sinks=True)
WIDE = Case(B=1, T=16, S=16, K=4, G=1, window=7, segments=True, scale=0.4)
PLAIN = Case(B=1, T=16, S=16, K=4, G=1)
SPECS = {"sinks": P(), "dsinks": P(), "lse": P(None, None, "context"), "dlse": P(None, None, "context")}
TOKENS = P(None, "context")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 2 rows, so that a chunk of 2 or 4 makes one or two."""
    monkeypatch.setattr(xla, "BLOCK", 2)


def packed(case, seed=0):
    """The case's arrays; documents in a row, one of them over chunks' ends, then padding."""
    arrays = case.arrays(seed)
    if case.segments:
        ids = np.repeat([1, 2, 3, 0], [3, case.T - 7, 2, 2]).astype(np.int32)
        arrays["q_segments"] = arrays["kv_segments"] = np.broadcast_to(ids, (case.B, case.T))
    return arrays


def local_attention(case, method, arrays, **options):
    return context_attention(
        *(arrays["q"], arrays["k"], arrays["v"]),
        axis="context",
        method=method,
        causal=case.causal,
        window=case.window,
        segment_ids_BT=arrays.get("q_segments"),
        scale=case.scale,
        logit_soft_cap=case.soft_cap,
        sinks_N=arrays.get("sinks"),
        return_lse=True,
        **options,
    )


def layout(name, x, devices, back=False):
    """`x` with its tokens as the devices hold them, or `back` in their order."""
    if name in ("sinks", "dsinks"):
        return np.asarray(x)
    dim = 2 if "lse" in name else 1
    x = np.moveaxis(np.asarray(x), dim, -1)
    if back:
        order = reorder(np.arange(x.shape[-1]), devices)
        return np.moveaxis(x[..., np.argsort(order)], -1, dim)
    return np.moveaxis(reorder(np.ascontiguousarray(x), devices), -1, dim)


def gradients(case, method, **options):
    """A function of the case's arrays to o, lse and gradients, over the mesh in use."""

    def run(arrays):
        inputs = {name: x for name, x in arrays.items() if name in ("q", "k", "v", "sinks")}
        rest = {name: x for name, x in arrays.items() if name == "q_segments"}
        specs = ({name: SPECS.get(name, TOKENS) for name in inputs | rest},)
        local = lambda arrays: local_attention(case, method, arrays, **options)  # noqa: E731
        split = jax.shard_map(local, in_specs=specs, out_specs=(TOKENS, SPECS["lse"]))
        (o, lse), vjp = jax.vjp(lambda inputs: split(inputs | rest), inputs)
        (grads,) = vjp((arrays["do"], arrays["dlse"]))
        return {"o": o, "lse": lse} | {"d" + name: x for name, x in grads.items()}

    return jax.jit(run)


def placed(arrays, mesh):
    devices = mesh.shape["context"]
    return {
        name: jax.device_put(layout(name, x, devices), NamedSharding(mesh, SPECS.get(name, TOKENS)))
        for name, x in arrays.items()
        if name != "kv_segments"
    }


def run_split(case, method, arrays, mesh, **options):
    devices = mesh.shape["context"]
    found = gradients(case, method, **options)(placed(arrays, mesh))
    return {name: layout(name, x, devices, back=True) for name, x in found.items()}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("devices", "case"),
    [(4, ALL), (2, NARROW), (4, WIDE)],
    ids=["packed_4", "narrow_window_2", "window_4"],
)
def test_values_and_gradients_are_those_of_the_whole_sequence(mesh_of, devices, case, method):
    arrays = packed(case)
    assert_close(run_split(case, method, arrays, mesh_of(context=devices)), numpy_attention(case, arrays))


def test_a_long_way_round_is_a_loop_with_the_same_results(mesh_of, monkeypatch):
    monkeypatch.setattr(ring, "UNROLLED", 2)
    case = dataclasses.replace(ALL, window=13)  # wide enough for every stop
    arrays = packed(case)
    assert_close(run_split(case, "ring", arrays, mesh_of(context=4)), numpy_attention(case, arrays))


def test_keys_may_be_gathered_for_masks_that_are_not_causal(mesh_of):
    case = Case(B=1, T=8, S=8, K=2, causal=False, window=(2, 3))
    arrays = case.arrays()
    assert_close(run_split(case, "all_gather", arrays, mesh_of(context=2)), numpy_attention(case, arrays))


def test_bfloat16_is_as_close_as_on_one_device(mesh_of):
    case = Case(B=1, T=32, S=32, K=1, H=16, HV=16)
    arrays = {name: np.asarray(jnp.bfloat16(x)) if name != "dlse" else x for name, x in case.arrays().items()}
    wanted = numpy_attention(case, {name: x.astype(np.float32) for name, x in arrays.items()})
    mesh_of()

    @jax.jit
    def whole(arrays):
        attend = lambda q, k, v: flash_attention(q, k, v, return_lse=True)  # noqa: E731
        (o, lse), vjp = jax.vjp(attend, arrays["q"], arrays["k"], arrays["v"])
        dq, dk, dv = vjp((arrays["do"], arrays["dlse"]))
        return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    plain = whole(arrays)
    error = lambda x, right: np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - right)))  # noqa: E731
    split = run_split(case, "ring", arrays, mesh_of(context=2))
    for name, right in wanted.items():
        assert error(split[name], right) <= 2 * error(plain[name], right) + 1e-6, name


def traced(case, method, mesh):
    return jax.make_jaxpr(gradients(case, method))(placed(packed(case), mesh))


def inside(jaxpr, name=None):
    """Equations of the primitive `name`, or all, at any depth."""
    for equation in jaxpr.eqns:
        if name in (None, equation.primitive.name):
            yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else [value]:
                if hasattr(getattr(one, "jaxpr", one), "eqns"):
                    yield from inside(getattr(one, "jaxpr", one), name)


def test_no_device_waits_in_a_branch_for_another(mesh_of):
    """A collective inside a branch that not all devices take would hang."""
    jaxpr = traced(NARROW, "ring", mesh_of(context=4)).jaxpr
    branches = [branch.jaxpr for cond in inside(jaxpr, "cond") for branch in cond.params["branches"]]
    assert branches
    assert any(inside(jaxpr, "ppermute"))
    assert not [
        one for branch in branches for name in ("ppermute", "psum", "all_gather") for one in inside(branch, name)
    ]


def test_a_window_sends_keys_to_neighbours_alone(mesh_of):
    """Keys and values go round twice, k and v, and their gradients with them and home."""
    mesh = mesh_of(context=4)
    for case, stops in ((PLAIN, 4), (dataclasses.replace(NARROW, window=2), 3)):
        assert len(ring.shifts(4, 2, Mask.of(True, case.window))) == stops
        sent = list(inside(traced(case, "ring", mesh).jaxpr, "ppermute"))
        assert len(sent) == 2 * (stops - 1) + 2 * (stops - 1) + 2 * stops


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 8), st.none() | st.integers(1, 100))
def test_stops_are_the_devices_whose_keys_are_seen(devices, chunk, window):
    """By looking at every pair of tokens; and the links of the plan's formula are those between these stops."""
    tokens = 2 * devices * chunk
    on = reorder(np.arange(tokens), devices).argsort() // (2 * chunk)  # the device of each token
    t, s = np.arange(tokens)[:, None], np.arange(tokens)[None]
    seen = (s <= t) & (t - s < (window or tokens))
    wanted = sorted({int(x) for x in ((on[:, None] - on[None]) % devices)[seen]})
    stops = ring.shifts(devices, chunk, Mask.of(True, window))
    assert list(stops) == wanted
    jumps = np.diff([*stops, devices])
    jumps = np.minimum(jumps, devices - jumps)
    assert Layer(devices, 1, tokens, 1, 1, 1, 2, window or 0).links == (sum(jumps[:-1]), jumps[-1])


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from([-np.inf, -1e4, -3.0, 0.0, 2.0, 500.0]), min_size=2, max_size=2))
def test_merging_is_safe_where_either_side_saw_nothing(lse):
    first, second = (jnp.full((1, 1, 1), x, jnp.float32) for x in lse)
    ones = lambda x, value: jnp.where(x == -jnp.inf, 0.0, value).reshape(1, 1, 1, 1)  # noqa: E731
    o, merged = ring._merge(ones(first, 1.0), first, ones(second, 3.0), second)
    with np.errstate(all="ignore"):
        wanted = np.logaddexp(*lse) if max(lse) > -np.inf else -np.inf
        share = np.exp(np.array(lse) - wanted) if max(lse) > -np.inf else np.zeros(2)
    assert float(merged[0, 0, 0]) == pytest.approx(wanted, rel=1e-6)
    assert float(o[0, 0, 0, 0]) == pytest.approx(share @ [1.0, 3.0], rel=1e-6)


@pytest.mark.parametrize("way", ["unrolled", "loop"])
def test_nothing_in_the_ring_is_larger_than_a_part_of_the_sequence(mesh_of, monkeypatch, way):
    """Queries, float32 sums of their chunks, blocks of scores: all of a device's own tokens at most."""
    monkeypatch.setattr(ring, "UNROLLED", 4 if way == "unrolled" else 1)
    case, own = Case(B=1, T=256, S=256, K=1, G=1, H=32, HV=32), 256 // 4 * 32
    mesh = mesh_of(context=4)

    def largest(method):
        splits = inside(traced(case, method, mesh).jaxpr, "shard_map")
        return max(x.aval.size for split in splits for one in inside(split.params["jaxpr"]) for x in one.outvars)

    assert largest("ring") == own
    assert largest("all_gather") == 4 * own


@pytest.mark.parametrize(
    ("case", "method", "options", "message"),
    [
        (Case(T=12, S=12), "ring", {}, "two chunks of one length"),
        (Case(T=16, S=16, K=2, G=2), "all_to_all", {}, "4 query and 2 key heads do not divide over the 4 devices"),
        (Case(T=16, S=16, causal=False), "ring", {}, "the ring is for causal masks; use 'all_gather' or 'all_to_all'"),
        (Case(T=16, S=16), "ring", {"implementation": "reference"}, "reference has no ring; xla, pallas, interpret do"),
        (Case(T=16, S=16), "rings", {}, "no method 'rings'; it has all_gather, ring, all_to_all"),
    ],
)
def test_what_cannot_be_is_said(mesh_of, case, method, options, message):
    mesh = mesh_of(context=4)
    specs = {name: NamedSharding(mesh, SPECS.get(name, TOKENS)) for name in case.arrays()}
    arrays = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=specs[n]) for n, x in case.arrays().items()}
    with pytest.raises(ValueError, match=message):
        gradients(case, method, **options).trace(arrays)


SMALL = BlockSizes(128, 128, 128, Cut(128, 128, 1), Cut(128, 128, 1))


@pytest.mark.slow
def test_the_ring_of_pallas_kernels_in_the_simulator(mesh_of, simulated_tpu):
    # No window: the simulator starts each kernel on all devices at once, and a window leaves them unequally many.
    case = Case(B=1, T=256, S=256, K=1, G=1, H=8, HV=8, segments=True, soft_cap=3.0, sinks=True)
    arrays = packed(case)
    wanted = numpy_attention(case, arrays)
    mesh = mesh_of(context=2)
    with simulated_tpu():
        got = run_split(case, "ring", arrays, mesh, implementation="pallas", block_sizes=SMALL)
    assert_close(got, wanted, tolerance=5e-5)
