"""What the tests of attention share: a call's shapes and options, the answer from float64 loops, the ways to run it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels import flash_attention


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
    window: int | tuple[int | None, int | None] | None = None
    segments: bool = False
    q_offset: int = 0
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    rotary: bool = False  # for T = S and an even H

    def arrays(self, seed: int = 0) -> dict[str, Any]:
        """q, k, v, the cotangents do and dlse and, where the case has them, sinks and segment ids."""
        rng, N = np.random.default_rng(seed), self.K * self.G
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.B, self.T, N, self.H),
            "k": (self.B, self.S, self.K, self.H),
            "v": (self.B, self.S, self.K, self.HV),
            "do": (self.B, self.T, N, self.HV),
            "dlse": (self.B, N, self.T),
        }
        if self.sinks:
            shapes["sinks"] = (N,)
        arrays: dict[str, Any] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        if self.rotary:
            angles = rng.uniform(0, 7, (self.B, self.T, self.H // 2))
            arrays |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
        if self.segments:  # 0 and below are padding
            arrays["q_segments"] = rng.integers(-1, 3, (self.B, self.T), dtype=np.int32)
            arrays["kv_segments"] = rng.integers(-1, 3, (self.B, self.S), dtype=np.int32)
        return arrays

    def sees(self, t: int, s: int) -> bool:
        """Whether the mask lets the query at position t see key s, said in other words than `Mask` does."""
        if self.causal and s > t:
            return False
        if isinstance(self.window, tuple):
            before, after = self.window
            return s in range(t - (10**6 if before is None else before), t + (10**6 if after is None else after) + 1)
        return self.window is None or abs(t - s) < self.window


def numpy_attention(case: Case, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """o, lse, dq, dk, dv and, with sinks, dsinks in float64, a row at a time, from nothing but the definition."""
    arrays = {name: np.asarray(x, np.int64 if "segments" in name else np.float64) for name, x in arrays.items()}
    q, k, v, do, dlse = (arrays[name] for name in ("q", "k", "v", "do", "dlse"))
    wanted = {"o": np.zeros_like(do), "lse": np.full_like(dlse, -np.inf)}
    wanted |= {"d" + name: np.zeros_like(arrays[name]) for name in ("q", "k", "v", "sinks") if name in arrays}
    turns = numpy_turns(arrays["cos"], arrays["sin"]) if case.rotary else None
    if turns is not None:
        q, k = (np.einsum("btij,btnj->btni", turns, x) for x in (q, k))
    scale = 1 / np.sqrt(case.H) if case.scale is None else case.scale
    for b, t, n in np.ndindex(q.shape[:3]):
        head, seen = n // case.G, [s for s in range(case.S) if case.sees(t + case.q_offset, s)]
        if case.segments:
            mine, theirs = arrays["q_segments"][b, t], arrays["kv_segments"][b]
            seen = [s for s in seen if mine == theirs[s] and mine > 0]
        if not seen:
            continue
        keys, values = k[b, seen, head], v[b, seen, head]
        scores, slope = keys @ q[b, t, n] * scale, np.ones(())
        if case.soft_cap is not None:
            bent = np.tanh(scores / case.soft_cap)
            scores, slope = case.soft_cap * bent, 1 - bent**2
        logits = np.append(scores, arrays["sinks"][n] if case.sinks else -np.inf)
        lse = wanted["lse"][b, n, t] = logits.max() + np.log(np.exp(logits - logits.max()).sum())
        p, p_sink = np.exp(scores - lse), np.exp(logits[-1] - lse)
        wanted["o"][b, t, n] = p @ values
        dp = values @ do[b, t, n]
        ds = p * (dp - p @ dp + dlse[b, n, t]) * slope * scale
        wanted["dq"][b, t, n] = ds @ keys
        wanted["dk"][b, seen, head] += np.outer(ds, q[b, t, n])
        wanted["dv"][b, seen, head] += np.outer(p, do[b, t, n])
        if case.sinks:
            wanted["dsinks"][n] += p_sink * (dlse[b, n, t] - p @ dp)
    for name in ("dq", "dk") if turns is not None else ():
        wanted[name] = np.einsum("btij,btni->btnj", turns, wanted[name])
    return wanted


def numpy_turns(cos_BTR, sin_BTR):
    """Matrices [B, T, H, H] that turn the pairs (h, h + H/2)."""
    turns = np.zeros((*cos_BTR.shape[:2], 2, cos_BTR.shape[2], 2, cos_BTR.shape[2]))
    for r in range(cos_BTR.shape[2]):
        turns[:, :, 0, r, 0, r] = turns[:, :, 1, r, 1, r] = cos_BTR[..., r]
        turns[:, :, 1, r, 0, r], turns[:, :, 0, r, 1, r] = sin_BTR[..., r], -sin_BTR[..., r]
    return turns.reshape(*cos_BTR.shape[:2], 2 * cos_BTR.shape[2], -1)


# How the public function is made to take each of its ways. A way more is a line here, and every test takes it too.
WAYS: dict[str, Any] = {
    "reference": {"implementation": "reference"},
    "blocked": {"implementation": "xla", "traced_offset": True},
    "short": {"implementation": "xla"},
}
FAST_WAYS = [way for way in WAYS if way != "reference"]


def attend(
    case: Case, arrays: dict[str, Any], implementation: str, q_offset, return_lse: bool = True, block_sizes=None
):
    """flash_attention of the case's options."""
    return flash_attention(
        *(arrays["q"], arrays["k"], arrays["v"]),
        causal=case.causal,
        window=case.window,
        q_segment_ids_BT=arrays.get("q_segments"),
        kv_segment_ids_BS=arrays.get("kv_segments"),
        q_offset=q_offset,
        scale=case.scale,
        logit_soft_cap=case.soft_cap,
        sinks_N=arrays.get("sinks"),
        rotary=(arrays["cos"], arrays["sin"]) if case.rotary else None,
        return_lse=return_lse,
        block_sizes=block_sizes,
        implementation=implementation,
    )


def value_and_grads(case: Case, implementation: str, traced_offset: bool = False):
    """A jitted function of `Case.arrays` and the offset to what `numpy_attention` returns."""

    @jax.jit
    def run(arrays, traced):
        offset = traced if traced_offset else case.q_offset
        inputs = {name: x for name, x in arrays.items() if name in ("q", "k", "v", "sinks")}
        (o, lse), vjp = jax.vjp(lambda inputs: attend(case, arrays | inputs, implementation, offset), inputs)
        (grads,) = vjp((arrays["do"], arrays["dlse"]))
        return {"o": o, "lse": lse} | {"d" + name: x for name, x in grads.items()}

    return lambda arrays, q_offset=case.q_offset: jax.tree.map(np.asarray, run(arrays, jnp.int32(q_offset)))


def run(case: Case, way: str, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    return value_and_grads(case, **WAYS[way])(arrays)


def assert_close(got: dict[str, Any], wanted: dict[str, Any], tolerance=2e-5):
    assert got.keys() == wanted.keys()
    for name, right in wanted.items():
        np.testing.assert_allclose(got[name], right, rtol=tolerance, atol=tolerance, err_msg=name)


bounds = st.none() | st.integers(0, 13)
windows = st.none() | st.integers(1, 14) | st.tuples(bounds, bounds)
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
    window=windows,
    segments=st.booleans(),
    q_offset=st.integers(-4, 14),
    scale=st.none() | st.sampled_from([0.1, 3.0]),
    soft_cap=st.none() | st.sampled_from([0.7, 20.0]),
    sinks=st.booleans(),
)
