"""Linear cross entropy: the reference against float64, the chunked one against both, values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_cross_entropy
from pallas_kernels.cross_entropy import xla

NAMES = ("loss", "lse", "dx", "dw")


def make_arrays(T: int, V: int, D: int = 6, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(T, D)).astype(np.float32),
        "w": rng.normal(size=(V, D)).astype(np.float32),
        "labels": rng.integers(0, V, T, dtype=np.int32),
        "dloss": rng.normal(size=T).astype(np.float32),
        "dlse": rng.normal(size=T).astype(np.float32),
    }


def numpy_cross_entropy(arrays: dict[str, Any], z_loss: float = 0.0, soft_cap: float | None = None):
    """(loss, lse, dx, dw) in float64."""
    x, w, dloss, dlse = (np.asarray(arrays[name], np.float64) for name in ("x", "w", "dloss", "dlse"))
    logits, slope = x @ w.T, np.ones(())
    if soft_cap is not None:
        bent = np.tanh(logits / soft_cap)
        logits, slope = soft_cap * bent, 1 - bent**2
    highest = logits.max(axis=1)
    lse = highest + np.log(np.exp(logits - highest[:, None]).sum(axis=1))
    one_hot = np.eye(len(w))[arrays["labels"]]
    loss = lse - (logits * one_hot).sum(axis=1) + z_loss * lse**2
    p = np.exp(logits - lse[:, None])
    dlogits = (p * (dloss * (1 + 2 * z_loss * lse) + dlse)[:, None] - one_hot * dloss[:, None]) * slope
    return loss, lse, dlogits @ w, dlogits.T @ x


def run(arrays: dict[str, Any], implementation: str, z_loss: float = 0.0, soft_cap: float | None = None):
    @jax.jit
    def both(x, w, labels, dloss, dlse):
        options: dict[str, Any] = {"z_loss": z_loss, "logit_soft_cap": soft_cap, "implementation": implementation}
        outputs, vjp = jax.vjp(lambda x, w: linear_cross_entropy(x, w, labels, **options), x, w)
        return *outputs, *vjp((dloss, dlse))

    return both(**arrays)


def assert_close(got, wanted, tolerance=2e-5):
    for name, a, b in zip(NAMES, got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """The least chunk, 8 tokens."""
    monkeypatch.setattr(xla, "LOGIT_BYTES", 1)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(("z_loss", "soft_cap"), [(0.0, None), (0.1, None), (0.0, 2.0), (0.03, 1.0)])
def test_value_and_gradients_match_float64(implementation, z_loss, soft_cap):
    arrays = make_arrays(T=19, V=11)
    assert_close(run(arrays, implementation, z_loss, soft_cap), numpy_cross_entropy(arrays, z_loss, soft_cap))


@pytest.mark.parametrize("T", [1, 8, 9, 16, 31])
def test_chunks_with_and_without_a_tail_match_float64(T):
    arrays = make_arrays(T, V=5)
    assert_close(run(arrays, "xla", 0.05), numpy_cross_entropy(arrays, 0.05))


@pytest.mark.parametrize("rows_in_a_chunk", [8, 12, 24, 25])
def test_the_chunk_size_follows_the_bytes_of_its_logits(rows_in_a_chunk, monkeypatch):
    monkeypatch.setattr(xla, "LOGIT_BYTES", rows_in_a_chunk * 4 * 10)
    arrays = make_arrays(T=24, V=10)

    def run_xla(x, w):
        return linear_cross_entropy(x, w, jnp.asarray(arrays["labels"]))[0]

    jaxpr = str(jax.make_jaxpr(run_xla)(arrays["x"], arrays["w"]))
    assert f"f32[{min(rows_in_a_chunk, 24)},10]" in jaxpr
    assert (f"f32[{24},10]" in jaxpr) == (rows_in_a_chunk >= 24)
    assert_close(run(arrays, "xla"), numpy_cross_entropy(arrays))


@given(st.integers(1, 20), st.integers(1, 9), st.sampled_from([0.0, 0.2]), st.sampled_from([None, 3.0]))
@settings(max_examples=6, deadline=None)
def test_any_sizes_match_float64(T, V, z_loss, soft_cap):
    arrays = make_arrays(T, V, D=3, seed=T + 100 * V)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(xla, "LOGIT_BYTES", 1)
        assert_close(run(arrays, "xla", z_loss, soft_cap), numpy_cross_entropy(arrays, z_loss, soft_cap))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("offset", [3000.0, -3000.0])
def test_a_large_offset_of_all_logits_changes_nothing(implementation, offset):
    arrays = make_arrays(T=10, V=7)
    # A column of ones in x, and the offset in w, add it to every logit. Powers of two keep the rest exact.
    arrays["x"] = np.concatenate([np.round(arrays["x"] * 8) / 8, np.ones((10, 1))], axis=1).astype(np.float32)
    arrays["w"] = np.concatenate([np.round(arrays["w"] * 8) / 8, np.zeros((7, 1))], axis=1).astype(np.float32)
    loss, lse, _, dw = run(arrays, implementation)
    moved = arrays | {"w": arrays["w"] + np.array([[0] * 6 + [offset]], np.float32)}
    moved_loss, moved_lse, _, moved_dw = run(moved, implementation)
    # Float32 numbers near 3000 lie 0.00024 apart.
    np.testing.assert_allclose(moved_loss, loss, atol=1e-3)
    np.testing.assert_allclose(moved_lse, lse + offset, atol=1e-3)
    np.testing.assert_allclose(moved_dw, dw, atol=1e-2)


def test_head_gradient_of_bfloat16_states_is_summed_in_float32():
    T, V, D = 1024, 3, 4
    arrays = make_arrays(T, V, D)
    x = jnp.asarray(np.abs(arrays["x"]) + 1, jnp.bfloat16)
    arrays |= {"dloss": np.ones(T, np.float32), "dlse": np.full(T, 0.3, np.float32), "x": x}
    # A weight that bfloat16 holds exactly, so that only the sum can err.
    arrays["w"] = np.asarray(jnp.asarray(arrays["w"], jnp.bfloat16), np.float32)
    dx, dw = run(arrays, "xla")[2:]
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    truth = numpy_cross_entropy(arrays)[3]

    in_bfloat16 = jnp.zeros((V, D), jnp.bfloat16)
    for first in range(0, T, 8):
        chunk = {name: a if name == "w" else a[first : first + 8] for name, a in arrays.items()}
        in_bfloat16 += jnp.asarray(numpy_cross_entropy(chunk)[3], jnp.bfloat16)
    error, rounded = (np.abs(np.asarray(sum_, np.float64) - truth).max() for sum_ in (dw, in_bfloat16))
    assert error < rounded / 20
    assert error < 1e-3 * np.abs(truth).max()


@pytest.mark.parametrize(("z_loss", "soft_cap"), [(0.0, None), (0.1, 2.0)])
def test_a_vocabulary_split_over_devices_gives_the_same_values_and_gradients(mesh_of, z_loss, soft_cap):
    T, V = 40, 12
    arrays = make_arrays(T, V)
    wanted = numpy_cross_entropy(arrays, z_loss, soft_cap)
    mesh = mesh_of(2, 1, 4)

    def local(x, w, labels):
        w = jax.lax.pcast(w, "data", to="varying")
        options: dict[str, Any] = {"z_loss": z_loss, "logit_soft_cap": soft_cap, "vocab_axis": "tensor"}
        return linear_cross_entropy(x, w, labels, **options)

    tokens, head = P("data"), P("tensor", None)
    split = jax.shard_map(local, in_specs=(P("data", None), head, tokens), out_specs=(tokens, tokens))

    @jax.jit
    def both(x, w, labels, dloss, dlse):
        outputs, vjp = jax.vjp(lambda x, w: split(x, w, labels), x, w)
        return *outputs, *vjp((dloss, dlse))

    specs = {"x": P("data", None), "w": head, "labels": tokens, "dloss": tokens, "dlse": tokens}
    placed = {name: jax.device_put(a, jax.NamedSharding(mesh, specs[name])) for name, a in arrays.items()}
    loss, lse, dx, dw = both(**placed)
    assert dw.sharding.spec == head
    assert_close([np.asarray(a) for a in (loss, lse, dx, dw)], wanted)


def test_a_head_that_devices_share_gets_the_sum_of_their_gradients(mesh_of):
    arrays = make_arrays(T=16, V=4)
    arrays |= {"dloss": np.ones(16, np.float32), "dlse": np.zeros(16, np.float32)}
    wanted = numpy_cross_entropy(arrays)
    mesh_of(2, 1, 1)
    run = jax.shard_map(linear_cross_entropy, in_specs=(P("data", None), P(), P("data")), out_specs=P("data"))
    x, labels = (jax.device_put(arrays[name], P("data")) for name in ("x", "labels"))
    dw = jax.jit(jax.grad(lambda w: jnp.sum(run(x, w, labels)[0])))(jnp.asarray(arrays["w"]))
    np.testing.assert_allclose(dw, wanted[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TD": jnp.zeros((2, 4, 3))}, "takes x_TD, w_VD, labels_T; got shapes"),
        ({"w_VD": jnp.zeros((5, 4))}, "takes x_TD, w_VD, labels_T; got shapes"),
        ({"w_VD": jnp.zeros(3)}, "takes x_TD, w_VD, labels_T; got shapes"),
        ({"labels_T": jnp.zeros(5, jnp.int32)}, "takes x_TD, w_VD, labels_T; got shapes"),
        ({"labels_T": jnp.zeros((4, 1), jnp.int32)}, "takes x_TD, w_VD, labels_T; got shapes"),
        ({"labels_T": jnp.zeros(4)}, "labels are float32; they must be integers"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap=0.0; it must be above 0"),
        ({"logit_soft_cap": -2.0}, "logit_soft_cap=-2.0; it must be above 0"),
        ({"implementation": "fused"}, "no implementation 'fused'; it has reference, xla"),
        ({"implementation": "reference", "vocab_axis": "tensor"}, "can't take a sharded vocabulary; use 'xla'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    arguments: dict[str, Any] = {"x_TD": jnp.zeros((4, 3)), "w_VD": jnp.zeros((5, 3))}
    arguments["labels_T"] = jnp.zeros(4, jnp.int32)
    assert linear_cross_entropy(**arguments)[0].shape == (4,)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(arguments | changes))
