"""Numerics of every kernel on a device: values and gradients, beside plain bfloat16 code and a float32 reference.

The rule is the tests': the root mean square error of a kernel, one result at a time, is at most twice that of the plain
code, both in bfloat16 and on the same inputs, against the reference in float32 at the highest precision. Shapes have
tails: lengths that are no multiple of a block.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import measuring
import numpy as np

import pallas_kernels

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """One call. `shapes` are of its inputs, `float32` those of them that stay so; ours(inputs, implementation)."""

    op: str
    name: str
    shapes: dict[str, tuple[int, ...]]
    ours: Callable[[Arrays, str], Any]
    plain: Callable[[Arrays], Any]
    outputs: tuple[str, ...]
    float32: frozenset[str] = frozenset()


@jax.custom_vjp
def round_gradient(x: jax.Array) -> jax.Array:
    """`x`; its gradient in bfloat16, since that is what products take as operands, on a TPU by default and here too."""
    return x


round_gradient.defvjp(lambda x: (x, None), lambda _, g: (g.astype(jnp.bfloat16).astype(g.dtype),))


def attention(name, B, T, S, N, K, H, *, segments=False, sinks=False, rotary=False, **options) -> Problem:
    """`options` are of flash_attention: causal, window, logit_soft_cap."""
    angles = np.arange(T)[:, None] * 10_000.0 ** (-np.arange(0, H, 2) / H)
    turns = tuple(jnp.asarray(np.broadcast_to(f(angles), (B, *angles.shape)), jnp.float32) for f in (np.cos, np.sin))
    ids = np.sort(np.random.default_rng(0).integers(1, 4, (B, T)), axis=1).astype(np.int32) if segments else None
    shapes: dict[str, tuple[int, ...]] = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, H)}
    shapes |= {"sinks": (N,)} if sinks else {}

    def ours(x, implementation):
        return pallas_kernels.flash_attention(
            *(x["q"], x["k"], x["v"]),
            q_segment_ids_BT=None if ids is None else jnp.asarray(ids),
            kv_segment_ids_BS=None if ids is None else jnp.asarray(ids),
            sinks_N=x.get("sinks"),
            rotary=turns if rotary else None,
            return_lse=True,
            implementation=implementation,
            **options,
        )

    def plain(x):
        q, k = (pallas_kernels.apply_rope(x[name], *turns) if rotary else x[name] for name in ("q", "k"))
        s = jnp.einsum("BTKGH,BSKH->BKGTS", q.reshape(B, T, K, N // K, H), k, preferred_element_type=jnp.float32)
        s = round_gradient(s) * H**-0.5
        if cap := options.get("logit_soft_cap"):
            s = cap * jnp.tanh(s / cap)
        t, at = np.arange(T)[:, None], np.arange(S)[None]
        seen = (at <= t) if options.get("causal", True) else np.ones((T, S), bool)
        if window := options.get("window"):
            seen = seen & (t - at < window)
        seen = seen[None] if ids is None else seen[None] & (ids[:, :, None] == ids[:, None, :])
        s = jnp.where(seen[:, None, None], s, -1e30)
        # The lse is that of scores as plain code has them, in bfloat16.
        rounded = s.astype(x["q"].dtype).astype(jnp.float32)
        if sinks:
            sinks_1KG11 = x["sinks"].astype(jnp.float32).reshape(1, K, N // K, 1, 1)
            logit = jnp.broadcast_to(sinks_1KG11, (*s.shape[:-1], 1))
            s, rounded = (jnp.concatenate([each, logit], axis=-1) for each in (s, rounded))
        p = jax.nn.softmax(s, axis=-1)[..., :S].astype(x["q"].dtype)
        o = jnp.einsum("BKGTS,BSKH->BTKGH", p, x["v"]).reshape(B, T, N, H)
        return o, jax.nn.logsumexp(rounded, axis=-1).reshape(B, N, T)

    return Problem("flash_attention", name, shapes, ours, plain, ("o", "lse"))


def gated(T, D, F, **options) -> Problem:
    """`options` are of gated_mlp's kernels."""

    def ours(x, implementation):
        more = options if implementation in ("pallas", "interpret") else {}
        operands = x["x"], x["w_gate"], x["w_up"]
        return (pallas_kernels.gated_mlp(*operands, implementation=implementation, **more),)

    def plain(x):
        return (jax.nn.silu(x["x"] @ x["w_gate"]) * (x["x"] @ x["w_up"]),)

    name = "x".join(map(str, (T, D, F))) + "".join(f", {option}" for option in options)
    return Problem("gated_mlp", name, {"x": (T, D), "w_gate": (D, F), "w_up": (D, F)}, ours, plain, ("h",))


def fused(T, D, F) -> Problem:
    """With every part of the epilogue."""

    def ours(x, implementation):
        more = {"bias_F": x["bias"], "residual_TF": x["residual"], "activation": "gelu_tanh"}
        return (pallas_kernels.fused_matmul(x["x"], x["w"], implementation=implementation, **more),)

    def plain(x):
        return (jax.nn.gelu(x["x"] @ x["w"] + x["bias"][None], approximate=True) + x["residual"],)

    shapes = {"x": (T, D), "w": (D, F), "bias": (F,), "residual": (T, F)}
    return Problem("fused_matmul", f"{T}x{D}x{F}", shapes, ours, plain, ("y",))


def grouped(D, F, sizes: tuple[int, ...], rest: int) -> Problem:
    """Groups of these sizes, some of them empty, and `rest` rows of none."""
    T, ends = sum(sizes) + rest, np.cumsum(sizes)

    def ours(x, implementation):
        return (
            pallas_kernels.grouped_matmul(x["x"], x["w"], jnp.asarray(sizes, jnp.int32), implementation=implementation),
        )

    def plain(x):
        parts = [x["x"][end - size : end] @ w for size, end, w in zip(sizes, ends, x["w"], strict=True)]
        return (jnp.concatenate([*parts, jnp.zeros((rest, F), x["x"].dtype)]),)

    shapes = {"x": (T, D), "w": (len(sizes), D, F)}
    return Problem("grouped_matmul", f"{T}x{D}x{F} in {len(sizes)} groups", shapes, ours, plain, ("y",))


def quantized(T, D, F, block: int | None = None) -> Problem:
    """Weights held in int8, with no gradient, and both operands quantised as they come. The plain code is XLA's way of
    the same, since against products that are not quantised there is only the rounding to see."""

    def ours(x, implementation):
        held_DF = pallas_kernels.quantize(jax.lax.stop_gradient(x["w"]), block=block)
        held = pallas_kernels.quantized_matmul(jax.lax.stop_gradient(x["x"]), held_DF, implementation=implementation)
        return held, pallas_kernels.dynamic_quantized_matmul(x["x"], x["w"], implementation=implementation)

    shapes = {"x": (T, D), "w": (D, F)}
    name = f"{T}x{D}x{F}" + (f", blocks of {block}" if block else "")
    return Problem(
        "quantized_matmul", name, shapes, ours, functools.partial(ours, implementation="xla"), ("held", "trained")
    )


def cross_entropy(T, D, V, z_loss=0.0, cap=None) -> Problem:
    """The head in float32, as in training."""
    labels = np.random.default_rng(0).integers(0, V, T).astype(np.int32)

    def ours(x, implementation):
        more = {"z_loss": z_loss, "logit_soft_cap": cap}
        return pallas_kernels.linear_cross_entropy(
            x["x"], x["w"], jnp.asarray(labels), implementation=implementation, **more
        )

    def plain(x):
        logits = jnp.dot(x["x"], x["w"].astype(x["x"].dtype).T, preferred_element_type=jnp.float32)
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        lse = jax.nn.logsumexp(logits, axis=-1)
        return lse - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0] + z_loss * lse**2, lse

    name = f"{T}x{D}x{V}" + (f", soft cap {cap:g}" if cap else "")
    shapes = {"x": (T, D), "w": (V, D)}
    return Problem("linear_cross_entropy", name, shapes, ours, plain, ("loss", "lse"), frozenset({"w"}))


def problems() -> list[Problem]:
    """Of every op, the last ones with tails."""
    return [
        attention("causal 1024, 8 and 2 heads of 128", 1, 1024, 1024, 8, 2, 128),
        attention("causal 1000, rotary, heads of 64", 2, 1000, 1000, 4, 4, 64, rotary=True),
        attention("window 256, 1500, heads of 128", 1, 1500, 1500, 4, 2, 128, window=256),
        attention("packed, soft cap 20, 1100", 2, 1100, 1100, 4, 1, 128, segments=True, logit_soft_cap=20.0),
        # Many heads, since a gradient of four numbers says little of its error.
        attention("all see all, sinks, 300 and 500, heads of 256", 1, 300, 500, 64, 8, 256, sinks=True, causal=False),
        gated(2048, 1024, 2816),
        gated(1000, 640, 1500),
        gated(1000, 640, 1500, recompute=True),
        fused(1000, 640, 1500),
        grouped(512, 640, (200, 0, 1, 300, 129, 128, 70, 100), 72),
        quantized(16, 4096, 1024),
        quantized(300, 640, 1500, block=128),
        cross_entropy(1024, 512, 8192),
        cross_entropy(777, 640, 5003, z_loss=1e-3, cap=30.0),
    ]


def value_and_grads(f: Callable[[Arrays], Any], inputs: Arrays, outputs: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The results of `f` and the gradient of each input, for cotangents that depend on the results' shapes alone."""
    rng = np.random.default_rng(1)
    found = jax.eval_shape(f, inputs)
    cotangents = tuple(jnp.asarray(rng.standard_normal(x.shape), jnp.bfloat16).astype(x.dtype) for x in found)

    def run(inputs, cotangents):
        values, vjp = jax.vjp(f, inputs)
        (grads,) = vjp(cotangents)
        return dict(zip(outputs, values, strict=True)) | {f"d{name}": x for name, x in grads.items()}

    return {name: np.asarray(x, np.float64) for name, x in measuring.alone(run)(inputs, cotangents).items()}


def check(problem: Problem, implementation: str = "pallas") -> dict[str, tuple[float, float]]:
    """By result (error of ours, error of the plain code), each root mean square over the reference's size."""
    rng = np.random.default_rng(0)
    whole = {}
    for name, shape in problem.shapes.items():
        size = min(shape[-2:]) ** -0.5 if name.startswith("w") else 1.0
        whole[name] = jnp.asarray(rng.standard_normal(shape) * size, jnp.bfloat16).astype(jnp.float32)
    half = {name: x if name in problem.float32 else x.astype(jnp.bfloat16) for name, x in whole.items()}
    run = functools.partial(value_and_grads, outputs=problem.outputs)
    with jax.default_matmul_precision("highest"):
        truth = run(functools.partial(problem.ours, implementation="reference"), whole)
    ours = run(functools.partial(problem.ours, implementation=implementation), half)
    plain = run(problem.plain, half)
    errors = {}
    for name, right in truth.items():
        size = max(float(np.sqrt(np.mean(right**2))), 1e-30)
        errors[name] = tuple(float(np.sqrt(np.mean((x[name] - right) ** 2))) / size for x in (ours, plain))
    return errors


def is_wrong(errors: tuple[float, float]) -> bool:
    """More than twice the plain code's error, but for what is exact in both; NaN is wrong."""
    mine, plain = errors
    return not mine <= 2 * plain + 1e-6


def report(found: list[Problem], implementation: str = "pallas") -> list[dict[str, Any]]:
    """One row a problem: its largest ratio of errors, and what is wrong, if anything is. A refusal is wrong too."""
    rows = []
    for problem in found:
        row: dict[str, Any] = {"op": problem.op, "shape": problem.name, "ok": False}
        try:
            errors = check(problem, implementation)
        except Exception as error:  # a compiler's refusal has many types
            row["wrong"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            row["errors"] = errors
            row["ratio"] = max((mine / plain for mine, plain in errors.values() if plain > 1e-6), default=None)
            wrong = [f"{name} errs by {a:.2g}, plain by {b:.2g}" for name, (a, b) in errors.items() if is_wrong((a, b))]
            row |= {"wrong": "; ".join(wrong), "ok": not wrong}
        rows.append(row)
    return rows
