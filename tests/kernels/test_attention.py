"""Attention: the reference against loops in float64, the other implementations against both, value and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import FAST_WAYS, WAYS, Case, assert_close, attend, cases, numpy_attention, run, value_and_grads
from attention_cases import windows as any_window
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import flash_attention
from pallas_kernels.attention import short, xla
from pallas_kernels.attention.mask import Mask


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 rows, so that a dozen rows make several."""
    monkeypatch.setattr(xla, "BLOCK", 4)
    monkeypatch.setattr(short, "CHUNK", 4)


CASES = {
    "plain": Case(),
    "one_row": Case(T=1, S=1, sinks=True),
    "one_row_of_a_long_cache": Case(T=1, S=11, q_offset=7),
    "not_causal_prime_lengths": Case(T=7, S=13, causal=False),
    "one_key_head_for_all": Case(T=7, S=7, K=1, G=4, sinks=True),
    "window": Case(window=3),
    "window_both_ways": Case(S=11, causal=False, window=4, sinks=True),
    "window_to_the_left": Case(S=7, causal=False, window=(2, None)),
    "window_to_the_right": Case(T=9, S=13, causal=False, window=(None, 3), q_offset=-5, sinks=True),
    "itself_only_in_exact_blocks": Case(T=8, S=8, causal=False, window=(0, 0), sinks=True),
    "rotary": Case(B=2, T=9, S=9, H=6, HV=4, rotary=True, segments=True, sinks=True),
    "soft_cap_and_scale": Case(soft_cap=1.5, scale=2.0, sinks=True),
    "head_dims_192_and_128": Case(B=1, T=5, S=5, K=1, H=192, HV=128, sinks=True),
    "segments_window_offset_cap": Case(T=9, S=13, segments=True, window=6, q_offset=4, soft_cap=2.0, sinks=True),
    "queries_before_every_key": Case(T=9, S=9, q_offset=-5, sinks=True),
    "queries_after_every_window_and_causal": Case(T=9, S=9, q_offset=11, window=(3, 5)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_match_float64_loops(name, way):
    case = CASES[name]
    arrays, go = case.arrays(), value_and_grads(case, **WAYS[way])
    assert_close(go(arrays), numpy_attention(case, arrays))
    for alone in ("do", "dlse"):
        one = arrays | {name: np.zeros_like(arrays[name]) for name in ("do", "dlse") if name != alone}
        assert_close(go(one), numpy_attention(case, one))


@pytest.mark.parametrize("way", FAST_WAYS)
def test_any_shape_and_options_match_float64_loops(way):
    @given(cases)
    @settings(max_examples=6, deadline=None)
    def check(case):
        arrays = case.arrays()
        assert_close(run(case, way, arrays), numpy_attention(case, arrays), tolerance=5e-5)

    check()


@pytest.mark.parametrize(
    "options",
    [
        Case(T=9, S=10, segments=True, sinks=True),
        Case(T=9, S=10, segments=True, causal=False, window=(3, 1), B=1),
    ],
    ids=["sinks", "window"],
)
def test_any_segments_and_offset_match_float64_loops(options):
    run_any = {way: value_and_grads(options, traced_offset=True, implementation=way) for way in ("reference", "xla")}

    @given(st.integers(-12, 14), st.data())
    @settings(max_examples=40, deadline=None)
    def check(q_offset, data):
        case = dataclasses.replace(options, q_offset=q_offset)
        arrays = case.arrays(data.draw(st.integers(0, 1000)))
        ids = st.lists(st.integers(-1, 2), min_size=20, max_size=20)
        draw = np.array(data.draw(ids), np.int32)
        arrays["q_segments"] = np.stack([draw[: case.T], draw[-case.T :]])[: case.B]
        arrays["kv_segments"] = np.stack([draw[: case.S], draw[-case.S :]])[: case.B]
        wanted = numpy_attention(case, arrays)
        for go in run_any.values():
            assert_close(go(arrays, q_offset), wanted)

    check()


@given(
    causal=st.booleans(),
    window=any_window,
    first=st.integers(-15, 15),
    count=st.integers(1, 8),
    offset=st.integers(-15, 15),
    num=st.integers(1, 12),
)
@settings(max_examples=500, deadline=None)
def test_key_and_query_ranges_are_exact(causal, window, first, count, offset, num):
    mask, last = Mask.of(causal, window), first + count - 1
    t, s = np.arange(first, last + 1)[:, None], np.arange(num)[None, :]
    visible = mask.visible(t, s)
    by_definition = [
        [Case(causal=causal, window=window).sees(t, s) for s in range(num)] for t in range(first, last + 1)
    ]
    np.testing.assert_array_equal(visible, by_definition)
    keys = np.flatnonzero(visible.any(axis=0))
    low, high = mask.key_range(first, last, num)
    assert (low, high) == (keys[0], keys[-1] + 1) if len(keys) else low >= high

    first = abs(first)  # keys stand at 0 and later
    rows, s = np.arange(num)[:, None], np.arange(first, first + count)[None, :]
    seeing = np.flatnonzero(mask.visible(rows + offset, s).any(axis=1))
    low, high = mask.query_range(first, first + count - 1, offset, num)
    assert (low, high) == (seeing[0], seeing[-1] + 1) if len(seeing) else low >= high


@pytest.mark.parametrize("sinks", [False, True], ids=["no_sinks", "sinks"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_that_see_nothing_are_zero_and_leak_nothing(way, sinks):
    case = Case(T=9, S=9, segments=True, sinks=sinks)
    arrays = case.arrays()
    arrays["q_segments"] = np.array([[0, 0, 1, 1, 1, 2, 2, -1, -1], [5] * 8 + [0]], np.int32)
    arrays["kv_segments"] = np.array([[0, 0, 1, 1, 1, 2, 2, -1, -1], [7] * 9], np.int32)
    blind, unseen = arrays["q_segments"] <= 0, arrays["kv_segments"] <= 0
    blind[1], unseen[1] = True, True
    if sinks:
        arrays["sinks"] = np.array([200.0, 0.5, -np.inf, -1.0], np.float32)  # exp(200) is no float32
    wanted = numpy_attention(case, arrays)
    go = value_and_grads(case, **WAYS[way])
    arrays["q"][blind], arrays["k"][unseen], arrays["v"][unseen] = 1e15, -1e15, 1e15
    for cotangent in (1e15, np.inf, np.nan):
        arrays["do"][blind] = arrays["dlse"].transpose(0, 2, 1)[blind] = cotangent
        got = go(arrays)
        for name, hidden in (("o", blind), ("dq", blind), ("dk", unseen), ("dv", unseen)):
            np.testing.assert_array_equal(got[name][hidden], 0.0)
        np.testing.assert_array_equal(got["lse"].transpose(0, 2, 1)[blind], -np.inf)
        assert_close(got, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_no_gradient_reaches_a_sink_of_rows_that_all_see_nothing(way):
    case = Case(T=5, S=5, q_offset=-5, sinks=True)
    arrays = case.arrays()
    arrays["do"][:], arrays["dlse"][:] = np.inf, -np.inf
    got = run(case, way, arrays)
    assert np.all(got.pop("lse") == -np.inf)
    for name, x in got.items():
        np.testing.assert_array_equal(x, 0.0, err_msg=name)


@pytest.mark.parametrize("way", WAYS)
def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_takes_all(way):
    case = Case(T=5, S=5, sinks=True)
    arrays = case.arrays()
    plain = numpy_attention(dataclasses.replace(case, sinks=False), {n: x for n, x in arrays.items() if n != "sinks"})
    go = value_and_grads(case, **WAYS[way])
    assert_close(go(arrays | {"sinks": np.full(4, -np.inf, np.float32)}), plain | {"dsinks": np.zeros(4)})
    got = go(arrays | {"sinks": np.full(4, 1e6, np.float32)})
    np.testing.assert_array_equal(got["lse"], 1e6)
    np.testing.assert_allclose(got["dsinks"], arrays["dlse"].sum(axis=(0, 2)), rtol=1e-5, atol=1e-5)
    for name in ("o", "dq", "dk", "dv"):
        np.testing.assert_array_equal(got[name], 0.0)


@pytest.mark.parametrize("way", WAYS)
def test_without_the_lse_value_and_gradients_are_the_same(way):
    case = Case(T=9, S=9, window=(4, 0), sinks=True)
    arrays = case.arrays()
    arrays["dlse"][:] = 0.0
    traced = WAYS[way].get("traced_offset", False)

    @jax.jit
    def go(inputs, do):
        offset, implementation = jnp.int32(0) if traced else 0, WAYS[way]["implementation"]
        o, vjp = jax.vjp(lambda x: attend(case, x, implementation, offset, return_lse=False), inputs)
        return {"o": o} | {"d" + name: x for name, x in vjp(do)[0].items()}

    wanted = numpy_attention(case, arrays)
    del wanted["lse"]
    assert_close(go({name: arrays[name] for name in ("q", "k", "v", "sinks")}, arrays["do"]), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_keys_after_the_query_do_not_reach_it(way):
    case = Case(T=9, S=9)
    arrays, go = case.arrays(), value_and_grads(case, **WAYS[way])
    before = go(arrays)["o"]
    arrays["k"][:, 6:], arrays["v"][:, 6:] = 1e30, -1e30
    after = go(arrays)["o"]
    np.testing.assert_array_equal(after[:, :6], before[:, :6])
    assert np.abs(after[:, 6:]).max() > 1e29


@pytest.mark.parametrize("way", WAYS)
def test_logits_of_ten_thousand_do_not_overflow(way):
    case = Case(T=9, S=9, scale=1.0, sinks=True)
    arrays = case.arrays()
    arrays["q"], arrays["k"] = arrays["q"] * 80, arrays["k"] * 80
    arrays["k"][:, 1::2] = arrays["k"][:, :-1:2]  # in pairs, so that a softmax this sharp still has a gradient
    logits = np.einsum("BTNH,BSNH->BNTS", arrays["q"], np.repeat(arrays["k"], case.G, axis=2))
    assert np.abs(logits).max() > 1e4
    wanted, got = numpy_attention(case, arrays), run(case, way, arrays)
    for name, right in wanted.items():
        # Float32 logits of this size are known to about a thousandth, and so are the probabilities.
        atol = 2e-3 * max(1, np.abs(right).max())
        np.testing.assert_allclose(got[name], right, rtol=1e-2, atol=atol, err_msg=name)
    assert min(np.abs(wanted["dk"]).max(), np.abs(wanted["dv"]).max()) > 1


@pytest.mark.parametrize("way", FAST_WAYS)
def test_bfloat16_errs_at_most_twice_as_much_as_plain_jax(way, monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", 16)
    monkeypatch.setattr(short, "CHUNK", 16)
    case = Case(T=60, S=60, K=2, G=2, H=16, HV=16)
    arrays = case.arrays() | {"dlse": np.zeros((2, 4, 60), np.float32)}  # plain JAX has no gradient of the lse
    half = arrays | {name: jnp.asarray(arrays[name], jnp.bfloat16) for name in ("q", "k", "v", "do")}
    truth = run(case, "reference", {name: np.asarray(x, np.float32) for name, x in half.items()})

    @jax.jit
    def plainly(q, k, v, do):
        plain = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
        o, vjp = jax.vjp(plain, q, k, v)
        return o, *vjp(do)

    ours, plain = run(case, way, half), plainly(*(half[name] for name in ("q", "k", "v", "do")))

    def error(got, right):
        return np.sqrt(np.mean((np.asarray(got, np.float64) - right) ** 2))

    assert ours["lse"].dtype == np.float32
    np.testing.assert_allclose(ours["lse"], truth["lse"], atol=1e-5)
    for name, theirs in zip(("o", "dq", "dk", "dv"), plain, strict=True):
        assert ours[name].dtype == jnp.bfloat16, name
        assert 0 < error(ours[name], truth[name]) <= 2 * error(theirs, truth[name]), name


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_scale_defaults_to_the_head_dim(implementation):
    arrays = Case().arrays()

    @jax.jit
    def three(q, k, v):
        attend = functools.partial(flash_attention, q, k, v, implementation=implementation)
        return attend(), attend(scale=Case().H ** -0.5), attend(scale=1.0)

    default, said, other = three(*(arrays[name] for name in "qkv"))
    np.testing.assert_allclose(default, said, rtol=1e-6)
    assert np.abs(default - other).max() > 0.01
