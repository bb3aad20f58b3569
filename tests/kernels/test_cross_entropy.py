"""Linear cross entropy: the reference against float64, the chunked one against both, values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cross_entropy_cases import (
    OPTIONS,
    arrays_for,
    assert_close,
    make_arrays,
    numpy_cross_entropy,
    run,
    sharded,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_cross_entropy
from pallas_kernels.cross_entropy import xla
from pallas_kernels.cross_entropy.blocks import Backward, BlockSizes, Forward

SIZES = BlockSizes(Forward(128, 128, 128, 128), Backward(128, 256, 128, 128))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """The least chunk, 8 tokens."""
    monkeypatch.setattr(xla, "LOGIT_BYTES", 1)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients_match_float64(implementation, name):
    arrays = arrays_for(OPTIONS[name], T=19, V=11)
    assert_close(run(arrays, implementation, **OPTIONS[name]), numpy_cross_entropy(arrays, **OPTIONS[name]))


@pytest.mark.parametrize("T", [1, 8, 9, 16, 31])
def test_chunks_with_and_without_a_tail_match_float64(T):
    arrays = make_arrays(T, V=5)
    assert_close(run(arrays, "xla", z_loss=0.05), numpy_cross_entropy(arrays, z_loss=0.05))


# As many chunks as the bytes allow for, all of one size in whole eights.
@pytest.mark.parametrize(("rows_allowed", "rows_in_a_chunk"), [(8, 8), (12, 16), (24, 24), (25, 24)])
def test_the_chunk_size_follows_the_bytes_of_its_logits(rows_allowed, rows_in_a_chunk, monkeypatch):
    monkeypatch.setattr(xla, "LOGIT_BYTES", rows_allowed * 4 * 10)
    arrays = make_arrays(T=24, V=10)

    def run_xla(x, w):
        return linear_cross_entropy(x, w, jnp.asarray(arrays["labels"]))[0]

    jaxpr = str(jax.make_jaxpr(run_xla)(arrays["x"], arrays["w"]))
    assert f"f32[{rows_in_a_chunk},10]" in jaxpr
    assert (f"f32[{24},10]" in jaxpr) == (rows_allowed >= 24)
    assert_close(run(arrays, "xla"), numpy_cross_entropy(arrays))


@given(st.integers(1, 20), st.integers(1, 9), st.sampled_from(sorted(OPTIONS)))
@settings(max_examples=6, deadline=None)
def test_any_sizes_match_float64(T, V, name):
    arrays = arrays_for(OPTIONS[name], T, V, D=3, seed=T + 100 * V)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(xla, "LOGIT_BYTES", 1)
        assert_close(run(arrays, "xla", **OPTIONS[name]), numpy_cross_entropy(arrays, **OPTIONS[name]))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_large_offset_of_all_logits_changes_nothing(implementation, offset):
    arrays = make_arrays(T=10, V=7)
    # A column of ones in x, and the offset in w, add it to every logit. Powers of two keep the rest exact.
    arrays["x"] = np.concatenate([np.round(arrays["x"] * 8) / 8, np.ones((10, 1))], axis=1).astype(np.float32)
    arrays["w"] = np.concatenate([np.round(arrays["w"] * 8) / 8, np.zeros((7, 1))], axis=1).astype(np.float32)
    plain = run(arrays, implementation)
    moved = arrays | {"w": arrays["w"] + np.array([[0] * 6 + [offset]], np.float32)}
    moved = run(moved, implementation)
    # Float32 numbers near 10,000 lie 0.001 apart.
    np.testing.assert_allclose(moved["loss"], plain["loss"], atol=5e-3)
    np.testing.assert_allclose(moved["lse"], plain["lse"] + offset, atol=5e-3)
    np.testing.assert_allclose(moved["dw"][:, :-1], plain["dw"][:, :-1], atol=3e-2)
    np.testing.assert_array_equal(moved["argmax"], plain["argmax"])


def test_head_gradient_of_bfloat16_states_is_summed_in_float32():
    T, V, D = 1024, 3, 4
    arrays = make_arrays(T, V, D)
    x = jnp.asarray(np.abs(arrays["x"]) + 1, jnp.bfloat16)
    arrays |= {"dloss": np.ones(T, np.float32), "dlse": np.full(T, 0.3, np.float32), "x": x}
    # A weight that bfloat16 holds exactly, so that only the sum can err.
    arrays["w"] = np.asarray(jnp.asarray(arrays["w"], jnp.bfloat16), np.float32)
    dx, dw = (run(arrays, "xla")[name] for name in ("dx", "dw"))
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    truth = numpy_cross_entropy(arrays)["dw"]

    in_bfloat16 = jnp.zeros((V, D), jnp.bfloat16)
    for first in range(0, T, 8):
        chunk = {name: a if name == "w" else a[first : first + 8] for name, a in arrays.items()}
        in_bfloat16 += jnp.asarray(numpy_cross_entropy(chunk)["dw"], jnp.bfloat16)
    error, rounded = (np.abs(np.asarray(sum_, np.float64) - truth).max() for sum_ in (dw, in_bfloat16))
    assert error < rounded / 20
    assert error < 1e-3 * np.abs(truth).max()


@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_vocabulary_split_over_devices_gives_the_same_values_and_gradients(mesh_of, name):
    arrays = arrays_for(OPTIONS[name], T=40, V=12)
    mesh_of(2, 1, 4)
    assert_close(sharded(arrays, "xla", "tensor", **OPTIONS[name]), numpy_cross_entropy(arrays, **OPTIONS[name]))


def test_a_head_that_devices_share_gets_the_sum_of_their_gradients(mesh_of):
    arrays = make_arrays(T=16, V=4)
    arrays |= {"dloss": np.ones(16, np.float32), "dlse": np.zeros(16, np.float32)}
    wanted = numpy_cross_entropy(arrays)
    mesh_of(2, 1, 1)
    run = jax.shard_map(linear_cross_entropy, in_specs=(P("data", None), P(), P("data")), out_specs=P("data"))
    x, labels = (jax.device_put(arrays[name], P("data")) for name in ("x", "labels"))
    dw = jax.jit(jax.grad(lambda w: jnp.sum(run(x, w, labels)[0])))(jnp.asarray(arrays["w"]))
    np.testing.assert_allclose(dw, wanted["dw"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint32])
def test_a_label_that_is_no_row_makes_its_loss_nan_and_passes_no_gradient(implementation, dtype):
    arrays = make_arrays(T=12, V=110, weights=True)
    labels = arrays["labels"].astype(dtype)
    labels[[1, 3, 8]] = [110, 127, 0 if dtype == np.uint32 else -100]
    labels[10] = np.iinfo(dtype).max  # as an int32, -1 if it is a uint32
    got = run(arrays | {"labels": labels}, implementation)
    wanted = numpy_cross_entropy(arrays | {"labels": labels.astype(np.int64)})
    bad = [1, 3, 10] if dtype == np.uint32 else [1, 3, 8, 10]
    weightless = [t for t in bad if arrays["weights"][t] == 0]
    assert np.isnan(wanted["loss"][bad]).sum() == len(bad) - len(weightless)
    got.pop("dweights"), wanted.pop("dweights")
    assert_close(got, wanted)


def test_a_label_past_int32_does_not_wrap_round_to_a_row():
    with jax.enable_x64(True):
        arrays = make_arrays(T=8, V=7, weights=True)
        labels = arrays["labels"].astype(np.int64)
        labels[2] += 2**32
        got = run(arrays | {"labels": labels}, "xla")
    assert np.flatnonzero(np.isnan(got["loss"])).tolist() == [2]


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
        ({"w_VD": jnp.zeros((0, 3))}, r"x \[4, 3\] and w \[0, 3\] must not be empty"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5; it must be from 0 to 1"),
        ({"label_smoothing": float("nan")}, "label_smoothing=nan; it must be from 0 to 1"),
        ({"weights_T": jnp.ones(5)}, r"weights float32\[5\] must be floats of shape \[4\]"),
        ({"weights_T": jnp.ones(4, jnp.int32)}, r"weights int32\[4\] must be floats of shape \[4\]"),
        ({"ignore_id": -100, "labels_T": jnp.zeros(4, jnp.uint8)}, "ignore_id=-100 is no uint8, as the labels are"),
        ({"x_TD": jnp.zeros((4, 3), jnp.int8)}, "x is int8 and w is float32; they must be floats"),
        ({"block_sizes": SIZES}, "xla takes no block_sizes; pallas and interpret do"),
        ({"implementation": "fused"}, "no implementation 'fused'; it has reference, xla, pallas, interpret"),
        ({"implementation": "reference", "vocab_axis": "tensor"}, "can't take a sharded vocabulary; use 'xla'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    arguments: dict[str, Any] = {"x_TD": jnp.zeros((4, 3)), "w_VD": jnp.zeros((5, 3))}
    arguments["labels_T"] = jnp.zeros(4, jnp.int32)
    assert linear_cross_entropy(**arguments)[0].shape == (4,)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(arguments | changes))
