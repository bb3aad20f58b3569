"""Attention: the reference against loops in float64, the other implementations against both, value and gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import flash_attention
from pallas_kernels.attention import short, xla
from pallas_kernels.attention.mask import Mask

NAMES = ("o", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes and options of one call."""

    B: int = 2
    T: int = 9
    S: int = 9
    K: int = 2
    G: int = 2
    H: int = 4
    HV: int = 4
    causal: bool = True
    window: int | None = None
    segments: bool = False
    q_offset: int = 0
    scale: float | None = None
    soft_cap: float | None = None

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v and the cotangent."""
        N = self.K * self.G
        return (
            *((self.B, self.T, N, self.H), (self.B, self.S, self.K, self.H)),
            *((self.B, self.S, self.K, self.HV), (self.B, self.T, N, self.HV)),
        )

    def arrays(self, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        arrays: dict[str, Any] = {
            name: rng.normal(size=s).astype(np.float32) for name, s in zip("qkvd", self.shapes, strict=True)
        }
        if self.segments:  # 0 and below are padding
            arrays["q_segments"] = rng.integers(-1, 3, (self.B, self.T), dtype=np.int32)
            arrays["kv_segments"] = rng.integers(-1, 3, (self.B, self.S), dtype=np.int32)
        return arrays


def numpy_attention(case: Case, arrays: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """(o, dq, dk, dv) in float64, a row at a time, from nothing but the definition."""
    q, k, v, do = (np.asarray(arrays[name], np.float64) for name in "qkvd")
    o, dq, dk, dv = np.zeros_like(do), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    scale = 1 / np.sqrt(case.H) if case.scale is None else case.scale
    for b, t, n in np.ndindex(q.shape[:3]):
        head, at = n // case.G, t + case.q_offset
        seen = []
        for s in range(case.S):
            sees = (s <= at or not case.causal) and (case.window is None or abs(at - s) < case.window)
            if case.segments:
                mine, theirs = arrays["q_segments"][b, t], arrays["kv_segments"][b, s]
                sees = sees and mine == theirs and mine > 0
            if sees:
                seen.append(s)
        if not seen:
            continue
        keys, values = k[b, seen, head], v[b, seen, head]
        scores, slope = keys @ q[b, t, n] * scale, np.ones(())
        if case.soft_cap is not None:
            bent = np.tanh(scores / case.soft_cap)
            scores, slope = case.soft_cap * bent, 1 - bent**2
        p = np.exp(scores - scores.max())
        p /= p.sum()
        o[b, t, n] = p @ values
        dp = values @ do[b, t, n]
        ds = p * (dp - p @ dp) * slope * scale
        dq[b, t, n] = ds @ keys
        dk[b, seen, head] += np.outer(ds, q[b, t, n])
        dv[b, seen, head] += np.outer(p, do[b, t, n])
    return o, dq, dk, dv


def value_and_grads(case: Case, implementation: str, traced_offset: bool = False):
    """A jitted function of `Case.arrays` and the offset to (o, dq, dk, dv)."""

    @jax.jit
    def run(arrays, traced):
        def attend(q, k, v):
            return flash_attention(
                *(q, k, v),
                causal=case.causal,
                window=case.window,
                q_segment_ids_BT=arrays.get("q_segments"),
                kv_segment_ids_BS=arrays.get("kv_segments"),
                q_offset=traced if traced_offset else case.q_offset,
                scale=case.scale,
                logit_soft_cap=case.soft_cap,
                implementation=implementation,
            )

        o, vjp = jax.vjp(attend, arrays["q"], arrays["k"], arrays["v"])
        return o, *vjp(arrays["d"])

    return run


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 rows, so that a dozen rows make several."""
    monkeypatch.setattr(xla, "BLOCK", 4)
    monkeypatch.setattr(short, "CHUNK", 4)


# How the public function is made to take each of its ways.
WAYS: dict[str, Any] = {
    "reference": {"implementation": "reference"},
    "blocked": {"implementation": "xla", "traced_offset": True},
    "short": {"implementation": "xla", "traced_offset": False},
}


def run(case: Case, way: str, arrays: dict[str, Any]) -> list[np.ndarray]:
    return [np.asarray(x) for x in value_and_grads(case, **WAYS[way])(arrays, jnp.int32(case.q_offset))]


def assert_close(got, wanted, tolerance=2e-5):
    for name, a, b in zip(NAMES, got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


CASES = {
    "plain": Case(),
    "one_row": Case(T=1, S=1),
    "one_row_of_a_long_cache": Case(T=1, S=11, q_offset=7),
    "exact_blocks": Case(T=8, S=8),
    "one_more_than_a_block": Case(T=5, S=5),
    "not_causal_prime_lengths": Case(T=7, S=13, causal=False),
    "one_key_head_for_all": Case(T=7, S=7, K=1, G=4),
    "window": Case(T=13, S=13, window=3),
    "window_both_ways": Case(T=13, S=11, causal=False, window=4),
    "soft_cap_and_scale": Case(soft_cap=1.5, scale=2.0),
    "values_of_another_width": Case(HV=7, H=2),
    "segments_window_offset_cap": Case(T=9, S=13, segments=True, window=6, q_offset=4, soft_cap=2.0),
    "queries_before_every_key": Case(T=9, S=9, q_offset=-5),
    "queries_after_every_window": Case(T=9, S=9, q_offset=11, window=4),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_match_float64_loops(name, way):
    case = CASES[name]
    arrays = case.arrays()
    assert_close(run(case, way, arrays), numpy_attention(case, arrays))


lengths = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 12, 13])
cases = st.builds(
    Case,
    B=st.integers(1, 2),
    T=lengths,
    S=lengths,
    K=st.integers(1, 3),
    G=st.integers(1, 3),
    H=st.sampled_from([1, 2, 8]),
    HV=st.sampled_from([1, 3, 8]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 14),
    segments=st.booleans(),
    q_offset=st.integers(-4, 14),
    scale=st.none() | st.sampled_from([0.1, 3.0]),
    soft_cap=st.none() | st.sampled_from([0.7, 20.0]),
)


@pytest.mark.parametrize("way", ["blocked", "short"])
def test_any_shape_and_options_match_float64_loops(way):
    @given(cases)
    @settings(max_examples=6, deadline=None)
    def check(case):
        arrays = case.arrays()
        assert_close(run(case, way, arrays), numpy_attention(case, arrays), tolerance=5e-5)

    check()


@pytest.mark.parametrize("options", [Case(T=9, S=10, segments=True), Case(T=9, S=10, segments=True, window=4, B=1)])
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
            assert_close([np.asarray(x) for x in go(arrays, jnp.int32(q_offset))], wanted)

    check()


@given(
    causal=st.booleans(),
    window=st.none() | st.integers(1, 12),
    first=st.integers(-15, 15),
    count=st.integers(1, 8),
    offset=st.integers(-15, 15),
    num=st.integers(1, 12),
)
@settings(max_examples=500, deadline=None)
def test_key_and_query_ranges_are_exact(causal, window, first, count, offset, num):
    mask, last = Mask.of(causal, window), first + count - 1
    t, s = np.arange(first, last + 1)[:, None], np.arange(num)[None, :]
    keys = np.flatnonzero(mask.visible(t, s).any(axis=0))
    low, high = mask.key_range(first, last, num)
    assert (low, high) == (keys[0], keys[-1] + 1) if len(keys) else low >= high

    first = abs(first)  # keys stand at 0 and later
    rows, s = np.arange(num)[:, None], np.arange(first, first + count)[None, :]
    seeing = np.flatnonzero(mask.visible(rows + offset, s).any(axis=1))
    low, high = mask.query_range(first, first + count - 1, offset, num)
    assert (low, high) == (seeing[0], seeing[-1] + 1) if len(seeing) else low >= high


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_see_nothing_are_zero_and_leak_nothing(way):
    case = Case(T=9, S=9, segments=True)
    arrays = case.arrays()
    arrays["q_segments"] = np.array([[0, 0, 1, 1, 1, 2, 2, -1, -1], [5] * 8 + [0]], np.int32)
    arrays["kv_segments"] = np.array([[0, 0, 1, 1, 1, 2, 2, -1, -1], [7] * 9], np.int32)
    blind, unseen = arrays["q_segments"] <= 0, arrays["kv_segments"] <= 0
    blind[1], unseen[1] = True, True
    wanted = numpy_attention(case, arrays)
    arrays["q"][blind], arrays["d"][blind], arrays["k"][unseen], arrays["v"][unseen] = 1e15, 1e15, -1e15, 1e15
    o, dq, dk, dv = run(case, way, arrays)
    for got, hidden in ((o, blind), (dq, blind), (dk, unseen), (dv, unseen)):
        np.testing.assert_array_equal(got[hidden], 0.0)
    assert_close((o, dq, dk, dv), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_keys_after_the_query_do_not_reach_it(way):
    case = Case(T=9, S=9)
    arrays = case.arrays()
    before = run(case, way, arrays)[0]
    arrays["k"][:, 6:], arrays["v"][:, 6:] = 1e30, -1e30
    after = run(case, way, arrays)[0]
    np.testing.assert_array_equal(after[:, :6], before[:, :6])
    assert np.abs(after[:, 6:]).max() > 1e29


@pytest.mark.parametrize("way", WAYS)
def test_logits_of_ten_thousand_do_not_overflow(way):
    case = Case(T=9, S=9, scale=1.0)
    arrays = case.arrays()
    arrays["q"], arrays["k"] = arrays["q"] * 80, arrays["k"] * 80
    arrays["k"][:, 1::2] = arrays["k"][:, :-1:2]  # in pairs, so that a softmax this sharp still has a gradient
    logits = np.einsum("BTNH,BSNH->BNTS", arrays["q"], np.repeat(arrays["k"], case.G, axis=2))
    assert np.abs(logits).max() > 1e4
    wanted = numpy_attention(case, arrays)
    for name, got, right in zip(NAMES, run(case, way, arrays), wanted, strict=True):
        # Float32 logits of this size are known to about a thousandth, and so are the probabilities.
        np.testing.assert_allclose(got, right, rtol=1e-2, atol=2e-3 * max(1, np.abs(right).max()), err_msg=name)
    assert min(np.abs(wanted[2]).max(), np.abs(wanted[3]).max()) > 1


@pytest.mark.parametrize("way", ["blocked", "short"])
def test_bfloat16_errs_at_most_twice_as_much_as_plain_jax(way, monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", 16)
    monkeypatch.setattr(short, "CHUNK", 16)
    case = Case(T=60, S=60, K=2, G=2, H=16, HV=16)
    half = {name: jnp.asarray(x, jnp.bfloat16) for name, x in case.arrays().items()}
    truth = run(case, "reference", {name: x.astype(jnp.float32) for name, x in half.items()})

    @jax.jit
    def plainly(q, k, v, d):
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla")
        o, vjp = jax.vjp(attend, q, k, v)
        return o, *vjp(d)

    ours, plain = run(case, way, half), plainly(**half)

    def error(got, right):
        return np.sqrt(np.mean((np.asarray(got, np.float64) - right) ** 2))

    for name, mine, theirs, right in zip(NAMES, ours, plain, truth, strict=True):
        assert mine.dtype == jnp.bfloat16, name
        assert 0 < error(mine, right) <= 2 * error(theirs, right), name


@pytest.mark.parametrize("offset", [0, jnp.int32(0)], ids=["short", "blocked"])
def test_checkpoint_vmap_and_scan_change_nothing(offset):
    case = Case(T=6, S=6, window=4)
    q, k, v, d = (jnp.stack([jnp.asarray(case.arrays(seed)[name]) for seed in range(3)]) for name in "qkvd")

    def loss(q, k, v, d):
        return jnp.sum(flash_attention(q, k, v, window=case.window, q_offset=offset) * d)

    def scanned(q, k, v, d):
        return jax.lax.scan(lambda total, x: (total + loss(*x), None), 0.0, (q, k, v, d))[0]

    def mapped(q, k, v, d):
        return jnp.sum(jax.vmap(jax.checkpoint(loss))(q, k, v, d))

    plain = [jax.jit(jax.grad(loss, (0, 1, 2)))(q[i], k[i], v[i], d[i]) for i in range(3)]
    wanted = [jnp.stack(grads) for grads in zip(*plain, strict=True)]
    for f in (scanned, mapped):
        for name, got, right in zip(NAMES[1:], jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v, d), wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("batch_axes", [("data", "fsdp"), ("data",)], ids=["all_split", "one_axis_replicates"])
@pytest.mark.parametrize("traced_offset", [False, True], ids=["short", "blocked"])
def test_shard_map_over_batch_and_heads_gives_the_same_gradients(mesh_of, batch_axes, traced_offset):
    case = Case(B=4, T=6, S=6, segments=True, soft_cap=3.0)
    arrays = case.arrays()
    wanted = numpy_attention(case, arrays)
    mesh = mesh_of(2, 2, 2)
    heads, rows = P(batch_axes, None, "tensor", None), P(batch_axes, None)
    specs = {"q": heads, "k": heads, "v": heads, "d": heads, "q_segments": rows, "kv_segments": rows}

    def local(q, k, v, q_segments, kv_segments):
        offset = jnp.int32(0) if traced_offset else 0
        ids = {"q_segment_ids_BT": q_segments, "kv_segment_ids_BS": kv_segments}
        return flash_attention(q, k, v, **ids, q_offset=offset, logit_soft_cap=case.soft_cap)

    attend = jax.shard_map(local, in_specs=(heads, heads, heads, rows, rows), out_specs=heads)

    @jax.jit
    def both(q, k, v, d, q_segments, kv_segments):
        o, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, q_segments, kv_segments), q, k, v)
        return o, *vjp(d)

    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    assert_close([np.asarray(x) for x in both(**placed)], wanted)


def test_memory_grows_linearly_with_the_sequence(monkeypatch):
    monkeypatch.undo()

    def temporary_bytes(T):
        q, kv = (jax.ShapeDtypeStruct((1, T, heads, 8), jnp.float32) for heads in (2, 1))
        loss = lambda q, k, v: jnp.sum(flash_attention(q, k, v))  # noqa: E731
        analysis = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, kv).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = temporary_bytes(2048), temporary_bytes(4096)
    assert 0 < large < 2.6 * small
    assert large < 4096 * 4096 * 4  # one head's float32 scores


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
