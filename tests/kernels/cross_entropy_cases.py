"""What the tests of linear cross entropy share: arrays, the answer in float64, and a call with every gradient."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_cross_entropy

IGNORED = -100
# z-loss, soft cap, smoothing, ignored labels and weights, alone and together.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z_loss": {"z_loss": 0.1},
    "soft_cap": {"logit_soft_cap": 2.0},
    "smoothing": {"label_smoothing": 0.3},
    "ignored": {"ignore_id": IGNORED},
    "all": {"z_loss": 0.03, "logit_soft_cap": 4.0, "label_smoothing": 0.1, "ignore_id": IGNORED},
}


def make_arrays(T: int, V: int, D: int = 6, seed: int = 0, ignored: bool = False, weights: bool = False):
    """x, w, labels, dloss, dlse and, if asked for, weights, some of them 0; every third label may be IGNORED."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        "x": rng.normal(size=(T, D)).astype(np.float32),
        "w": rng.normal(size=(V, D)).astype(np.float32),
        "labels": rng.integers(0, V, T, dtype=np.int32),
        "dloss": rng.normal(size=T).astype(np.float32),
        "dlse": rng.normal(size=T).astype(np.float32),
    }
    if ignored:
        arrays["labels"][::3] = IGNORED
    if weights:
        arrays["weights"] = rng.normal(size=T).astype(np.float32)
        arrays["weights"][::4] = 0
    return arrays


def arrays_for(options: dict[str, Any], T: int, V: int, D: int = 6, seed: int = 0):
    """Arrays with ignored labels where the options ignore them, and with weights where there are other options."""
    return make_arrays(T, V, D, seed, ignored="ignore_id" in options, weights=bool(options))


def numpy_cross_entropy(
    arrays: dict[str, Any],
    z_loss: float = 0.0,
    logit_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    ignore_id: int | None = None,
) -> dict[str, np.ndarray]:
    """loss, lse, argmax, dx, dw and, with weights, dweights, in float64."""
    x, w, dloss, dlse = (np.asarray(arrays[name], np.float64) for name in ("x", "w", "dloss", "dlse"))
    labels, V = np.asarray(arrays["labels"]), len(w)
    weights = np.asarray(arrays.get("weights", np.ones(len(x))), np.float64)
    logits, slope = x @ w.T, np.ones(())
    argmax = logits.argmax(axis=1)
    if logit_soft_cap is not None:
        bent = np.tanh(logits / logit_soft_cap)
        logits, slope = logit_soft_cap * bent, 1 - bent**2
    highest = logits.max(axis=1)
    lse = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    q = (1 - label_smoothing) * (labels[:, None] == np.arange(V)) + label_smoothing / V
    loss = lse - (logits * q).sum(axis=1) + z_loss * lse**2
    counts = (labels >= 0) & (labels < V)
    loss[~counts] = np.where(weights[~counts] == 0, 0.0, np.nan)
    if ignore_id is not None:
        counts &= labels != ignore_id
        loss[labels == ignore_id] = 0
    through_loss = np.where(counts, dloss * weights, 0)
    through_lse = through_loss * (1 + 2 * z_loss * lse) + dlse
    p = np.exp(logits - lse[:, None])
    dlogits = (p * through_lse[:, None] - q * through_loss[:, None]) * slope
    wanted = {"loss": loss * weights, "lse": lse, "argmax": argmax}
    wanted |= {"dx": dlogits @ w, "dw": dlogits.T @ x}
    return wanted | ({"dweights": np.where(counts, dloss * loss, 0)} if "weights" in arrays else {})


def run(arrays: dict[str, Any], implementation: str, **options) -> dict[str, np.ndarray]:
    """What `numpy_cross_entropy` returns, from an implementation."""
    go = functools.partial(value_and_grads, implementation=implementation, **options)
    if implementation == "interpret":  # the interpreter can't run under a mesh with Explicit axes
        go = jax.shard_map(go, in_specs=P(), out_specs=P())
    return jax.tree.map(np.asarray, jax.jit(go)(arrays))


def sharded(arrays: dict[str, Any], implementation: str, vocab_axis, **options) -> dict[str, np.ndarray]:
    """The same on the mesh in use: tokens split over `data`, the vocabulary over the axis or axes given."""
    tokens, head = P("data"), P(vocab_axis, None)
    specs = {"x": P("data", None), "w": head} | dict.fromkeys(("labels", "weights", "dloss", "dlse"), tokens)
    out_specs = {"dx": P("data", None), "dw": head} | dict.fromkeys(("loss", "lse", "argmax", "dweights"), tokens)
    if "weights" not in arrays:
        del out_specs["dweights"]
    go = functools.partial(value_and_grads, implementation=implementation, vocab_axis=vocab_axis, **options)
    split = jax.shard_map(go, in_specs=({name: specs[name] for name in arrays},), out_specs=out_specs)
    mesh = jax.sharding.get_mesh()
    placed = {name: jax.device_put(a, jax.NamedSharding(mesh, specs[name])) for name, a in arrays.items()}
    return jax.tree.map(np.asarray, jax.jit(split)(placed))


def value_and_grads(arrays: dict[str, Any], implementation: str, **options) -> dict[str, jax.Array]:
    """The same, to be traced."""
    inputs = {name: arrays[name] for name in ("x", "w", "weights") if name in arrays}

    def losses(inputs):
        loss, lse, argmax = linear_cross_entropy(
            inputs["x"],
            inputs["w"],
            arrays["labels"],
            weights_T=inputs.get("weights"),
            return_argmax=True,
            implementation=implementation,
            **options,
        )
        return (loss, lse), argmax

    (loss, lse), vjp, argmax = jax.vjp(losses, inputs, has_aux=True)
    (grads,) = vjp((arrays["dloss"], arrays["dlse"]))
    return {"loss": loss, "lse": lse, "argmax": argmax} | {"d" + name: grad for name, grad in grads.items()}


def assert_close(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = 2e-5) -> None:
    assert got.keys() == wanted.keys()
    for name, want in wanted.items():
        scale = max(1.0, float(np.nanmax(np.abs(want), initial=0)))
        np.testing.assert_allclose(got[name], want, rtol=tolerance, atol=tolerance * scale, err_msg=name)
