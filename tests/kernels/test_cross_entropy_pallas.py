"""The Pallas kernels of linear cross entropy, interpreted, over several blocks and shards; what they refuse."""

import dataclasses
import functools
import itertools

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
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import cross_entropy, linear_cross_entropy
from pallas_kernels.cross_entropy import blocks, tpu
from pallas_kernels.cross_entropy.blocks import Backward, BlockSizes, Forward, Shape
from pallas_kernels.runtime import CHIPS

SMALL = BlockSizes(Forward(128, 128, 128, 128), Backward(128, 128, 128, 128, ahead=1))
TASKS = BlockSizes(Forward(256, 256, 128, 128), Backward(128, 256, 128, 128))  # several tasks a block


@pytest.mark.parametrize("name", ["smoothing", "all"])
def test_many_blocks_match_float64(name):
    arrays = arrays_for(OPTIONS[name], T=300, V=641, D=150)
    got = run(arrays, "interpret", block_sizes=TASKS, **OPTIONS[name])
    assert_close(got, numpy_cross_entropy(arrays, **OPTIONS[name]))


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 140), st.sampled_from(sorted(OPTIONS)))
@example(1, 1, 1, "plain")
@example(257, 127, 127, "ignored")
@example(128, 384, 128, "soft_cap")
@settings(max_examples=2, deadline=None)
def test_any_sizes_match_float64(T, V, D, name):
    arrays = arrays_for(OPTIONS[name], T, V, D, seed=T)
    got = run(arrays, "interpret", block_sizes=SMALL, **OPTIONS[name])
    assert_close(got, numpy_cross_entropy(arrays, **OPTIONS[name]), tolerance=5e-5)


def test_the_cores_of_a_device_share_the_head(monkeypatch):
    monkeypatch.setattr(tpu, "chip_in_use", lambda: dataclasses.replace(CHIPS["v5e"], cores=2))
    arrays = make_arrays(T=150, V=300)  # three blocks: the second core has one, and one past the end
    assert_close(run(arrays, "interpret", block_sizes=SMALL), numpy_cross_entropy(arrays))


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_large_offset_of_all_logits_changes_nothing(offset):
    arrays = make_arrays(T=140, V=130, D=8)
    # A column of ones in x, and the offset in w, add it to every logit; what else there is stays exact.
    arrays["x"] = np.round(arrays["x"] * 4) / 4
    arrays["w"] = np.round(arrays["w"] * 4) / 4
    arrays["x"][:, -1], arrays["w"][:, -1] = 1, 0
    moved = arrays | {"w": arrays["w"] + np.float32(offset) * (np.arange(8) == 7).astype(np.float32)}
    got, wanted = run(moved, "interpret", block_sizes=SMALL), numpy_cross_entropy(arrays)
    np.testing.assert_allclose(got["loss"], wanted["loss"], atol=5e-3)
    np.testing.assert_allclose(got["lse"], wanted["lse"] + offset, atol=5e-3)
    np.testing.assert_allclose(got["dw"], wanted["dw"], atol=0.05)
    np.testing.assert_array_equal(got["argmax"], wanted["argmax"])


def test_labels_that_are_no_rows_make_the_loss_nan_and_pass_no_gradient():
    arrays = make_arrays(T=20, V=110, weights=True)
    arrays["labels"][[1, 3, 9]] = [110, 127, -100]
    got, wanted = run(arrays, "interpret"), numpy_cross_entropy(arrays)
    assert np.isnan(got["loss"][[1, 3, 9]]).all()
    del got["dweights"], wanted["dweights"]
    assert_close(got, wanted)


def test_bfloat16_errs_at_most_twice_as_much_as_plain_jax():
    arrays = make_arrays(T=200, V=300, D=140)
    arrays["x"], arrays["w"] = (jnp.asarray(arrays[name] * 0.3, jnp.bfloat16) for name in ("x", "w"))
    truth = numpy_cross_entropy(arrays)
    arrays["w"] = arrays["w"].astype(jnp.float32)  # cast back inside, a block at a time; its gradient is float32

    @jax.jit
    def plainly(x, w):
        def losses(x, w):
            logits = jnp.dot(x, w.astype(x.dtype).T, preferred_element_type=jnp.float32)
            lse = jax.nn.logsumexp(logits, axis=-1)
            return lse - jnp.take_along_axis(logits, arrays["labels"][:, None], axis=-1)[:, 0], lse

        (loss, lse), vjp = jax.vjp(losses, x, w)
        return dict(zip(("loss", "lse", "dx", "dw"), (loss, lse, *vjp((arrays["dloss"], arrays["dlse"]))), strict=True))

    got = run(arrays, "interpret", block_sizes=TASKS)
    assert (got["dx"].dtype, got["dw"].dtype) == (jnp.bfloat16, jnp.float32)
    for name, plain in plainly(arrays["x"], arrays["w"]).items():
        errors = [np.sqrt(np.mean((np.asarray(x, np.float64) - truth[name]) ** 2)) for x in (got[name], plain)]
        assert errors[0] <= 2 * errors[1] + 1e-7, name


def test_x64_changes_nothing():
    arrays = make_arrays(T=20, V=30)
    plain = run(arrays, "interpret")
    with jax.enable_x64(True):
        wide = run(arrays | {"labels": arrays["labels"].astype(np.int64)}, "interpret")
    for name, x in plain.items():
        assert wide[name].dtype == x.dtype
        np.testing.assert_array_equal(wide[name], x, err_msg=name)


def test_a_vocabulary_split_over_two_axes_gives_the_same_values_and_gradients(mesh_of):
    mesh_of(2, 2, 2)
    arrays, options = arrays_for(OPTIONS["all"], T=300, V=520), OPTIONS["all"]
    wanted = numpy_cross_entropy(arrays, **options)
    assert_close(sharded(arrays, "interpret", ("tensor", "fsdp"), block_sizes=SMALL, **options), wanted)


def test_simulated_memory_of_nan_shows_no_race_and_no_read_of_what_was_not_written(monkeypatch):
    simulator = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    kernels = functools.partial(tpu.statistics_pallas, sizes=TASKS)
    monkeypatch.setattr(
        cross_entropy, "statistics_pallas", lambda *args, sizes, interpret: kernels(*args, interpret=simulator)
    )
    arrays, options = arrays_for(OPTIONS["all"], T=200, V=401, D=130), OPTIONS["all"]
    got = run(arrays, "interpret", **options)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found
    assert_close(got, numpy_cross_entropy(arrays, **options))


SHAPES = [Shape(T, D, V, 2, 4) for T, D, V in itertools.product((1, 300, 4096, 2**20), (64, 2048, 4096), (11, 128256))]


@pytest.mark.parametrize("chip", CHIPS)
def test_chosen_sizes_fit_the_chip(chip):
    for shape in SHAPES:
        sizes = blocks.choose(shape, CHIPS[chip])
        blocks.check(sizes, shape, CHIPS[chip])
        assert blocks.vmem_limit(sizes, shape, CHIPS[chip]) < CHIPS[chip].vmem_bytes


def test_hidden_states_too_wide_for_any_blocks_are_refused():
    with pytest.raises(ValueError, match="hidden states 65536 wide fit the 16 MiB of VMEM that v4 has; use implem"):
        blocks.choose(Shape(4096, 65536, 128256, 2, 4), CHIPS["v4"])


def test_sizes_that_do_not_fit_name_the_limit_and_some_that_do():
    sizes = BlockSizes(Forward(2048, 512, 256, 256), Backward(512, 4096, 256, 512))
    message = r"needs 134\.\d MiB of VMEM at D=4096; v5e has 120\.3 MiB for it; BlockSizes\(forward=.* fits"
    with pytest.raises(ValueError, match=message):
        blocks.check(sizes, Shape(4096, 4096, 128256, 2, 4), CHIPS["v5e"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dataclasses.replace(SMALL, forward=Forward(128, 128, 64, 128)), "must be multiples of 128"),
        (dataclasses.replace(SMALL, backward=Backward(128, 128, 128, 128, 0)), "ahead at least 1"),
        (dataclasses.replace(SMALL, forward=Forward(128, 384, 256, 128)), "rows must divide vocab"),
        (dataclasses.replace(SMALL, backward=Backward(128, 128, 128, 128, 2)), "rows x ahead must divide vocab"),
        (dataclasses.replace(SMALL, backward=Backward(128, 256, 128, 384)), "columns divide D=256"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        blocks.check(sizes, Shape(128, 200, 128, 4, 4), None)


def test_what_pallas_cannot_take_is_refused(mesh_of):
    def arguments(dtype):
        return jnp.zeros((8, 4), dtype), jnp.zeros((8, 4)), jnp.zeros(8, jnp.int32)

    loss = functools.partial(linear_cross_entropy, implementation="interpret")
    inside = jax.shard_map(loss, mesh=mesh_of(1, 1, 1), in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="pallas can't take float16"):
        inside(*arguments(jnp.float16))
    mesh_of(8, 1, 1)
    with pytest.raises(ValueError, match=r"under a mesh with Explicit axes pallas runs inside jax\.shard_map only"):
        loss(*arguments(jnp.float32))
