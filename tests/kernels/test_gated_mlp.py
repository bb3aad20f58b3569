"""The gated product: the reference against float64, the others against it, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import PartitionSpec as P
from matmul_problems import (
    NUMPY_ACTIVATIONS,
    SMALL,
    assert_at_most_twice_the_error,
    assert_close,
    lengths,
    normal,
    sharded_value_and_grads,
    slope,
    value_and_grads,
)

from pallas_kernels import gated_mlp
from pallas_kernels.gated_mlp.reference import ACTIVATIONS
from pallas_kernels.matmul.blocks import Block, BlockSizes

RESULTS = ("y", "x_TD", "w_gate_DF", "w_up_DF")


def draw(T, D, F, dtype=np.float32, seed=0):
    return normal(np.random.default_rng(seed), dtype, x_TD=(T, D), w_gate_DF=(D, F), w_up_DF=(D, F), dy=(T, F))


def numpy_gated(arrays, activation):
    x, w_gate, w_up, dy = (np.asarray(arrays[name], np.float64) for name in (*RESULTS[1:], "dy"))
    gate, up = x @ w_gate, x @ w_up
    value = NUMPY_ACTIVATIONS[activation](gate)
    dgate, dup = dy * up * slope(activation, gate), dy * value
    results = value * up, dgate @ w_gate.T + dup @ w_up.T, x.T @ dgate, x.T @ dup
    return dict(zip(RESULTS, results, strict=True))


def run(arrays, implementation, **options):
    return value_and_grads(gated_mlp, arrays, implementation=implementation, **options)


def plainly(x_TD, w_gate_DF, w_up_DF, activation):
    return ACTIVATIONS[activation](x_TD @ w_gate_DF) * (x_TD @ w_up_DF)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_values_and_gradients_match_float64(implementation, activation):
    arrays = draw(9, 13, 11)
    assert_close(run(arrays, implementation, activation=activation), numpy_gated(arrays, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_match_the_reference_with_each_activation(activation):
    arrays = draw(60, 40, 70)
    got = run(arrays, "interpret", activation=activation, recompute=activation == "gelu")
    assert_close(got, run(arrays, "reference", activation=activation))


CASES = {
    "tails_everywhere": ((300, 200, 260), SMALL),
    "whole_blocks": ((256, 256, 256), SMALL),
    "one_block_and_tiles_of_it": ((600, 90, 70), BlockSizes(*[Block(1024, 128, 128)] * 2, Block(128, 128, 1024))),
}


@pytest.mark.parametrize("name", CASES)
def test_several_blocks_match_the_reference(name):
    shape, sizes = CASES[name]
    arrays = draw(*shape)
    wanted = run(arrays, "reference")
    assert_close(run(arrays, "interpret", block_sizes=sizes), wanted)


def test_recomputed_products_give_the_same_bits():
    arrays = draw(130, 120, 140, jnp.bfloat16)
    kept = run(arrays, "interpret", block_sizes=SMALL)
    for name, again in run(arrays, "interpret", block_sizes=SMALL, recompute=True).items():
        np.testing.assert_array_equal(again, kept[name], err_msg=name)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_any_shapes_match_the_reference(implementation):
    options = {"block_sizes": SMALL} if implementation == "interpret" else {}

    @given(lengths, lengths, lengths)
    @settings(max_examples=2 if options else 4, deadline=None)
    def check(T, D, F):
        arrays = draw(T, D, F)
        assert_close(run(arrays, implementation, **options), run(arrays, "reference"))

    check()


def test_bfloat16_errs_at_most_twice_as_much_as_plain_jax():
    arrays = draw(200, 300, 150, jnp.bfloat16)
    truth = run({name: x.astype(jnp.float32) for name, x in arrays.items()}, "reference")
    plain = value_and_grads(plainly, arrays, activation="silu")
    assert_at_most_twice_the_error(run(arrays, "xla"), plain, truth)
    ours = run(arrays, "interpret", block_sizes=SMALL)
    assert_at_most_twice_the_error(ours, plain, truth)


def test_a_weights_gradient_is_summed_in_float32_over_many_tokens():
    # A sum in bfloat16 would stop growing at 256.
    x, w, dy = jnp.ones((1100, 1), jnp.bfloat16), jnp.ones((1, 1), jnp.bfloat16), jnp.ones((1100, 1), jnp.bfloat16)
    arrays = {"x_TD": x, "w_gate_DF": w, "w_up_DF": w, "dy": dy}
    for implementation in ("xla", "interpret"):
        options = {"block_sizes": SMALL} if implementation == "interpret" else {}
        got = run(arrays, implementation, activation="relu", **options)
        np.testing.assert_array_equal(got["w_up_DF"].astype(np.float32), 1104.0)  # 1100 in eight bits


@pytest.mark.slow
def test_memory_beyond_the_arrays_is_never_read_into_a_result(simulated_tpu):
    arrays = draw(150, 140, 130)
    wanted = run(arrays, "reference")
    with simulated_tpu():
        got = run(arrays, "pallas", block_sizes=SMALL)
    assert_close(got, wanted)


def test_x64_mode_changes_nothing():
    arrays = draw(130, 20, 140)
    with jax.enable_x64(True):
        got = run(arrays, "interpret", block_sizes=SMALL)
    assert {x.dtype for x in got.values()} == {np.dtype(np.float32)}
    assert_close(got, run(arrays, "reference"))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_checkpoint_and_vmap_change_nothing(implementation):
    arrays = [draw(9, 8, 7, seed=seed) for seed in range(2)]
    stacked = [jnp.stack([each[name] for each in arrays]) for name in (*RESULTS[1:], "dy")]

    def loss(x, w_gate, w_up, dy):
        return jnp.sum(gated_mlp(x, w_gate, w_up, implementation=implementation) * dy)

    def mapped(*arrays):
        return jnp.sum(jax.vmap(jax.checkpoint(loss))(*arrays))

    grads = jax.jit(jax.grad(mapped, (0, 1, 2)))(*stacked)
    for i, each in enumerate(arrays):
        wanted = numpy_gated(each, "silu")
        assert_close(dict(zip(RESULTS[1:], (x[i] for x in grads), strict=True)), {k: wanted[k] for k in RESULTS[1:]})


TOKENS, WEIGHT = P(("data", "fsdp"), None), P(None, "tensor")
SPECS = {"x_TD": TOKENS, "w_gate_DF": WEIGHT, "w_up_DF": WEIGHT, "y": P(("data", "fsdp"), "tensor")}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_shard_map_over_batch_and_features_gives_the_same_gradients(mesh_of, implementation):
    arrays = draw(16, 10, 12)
    got = sharded_value_and_grads(gated_mlp, arrays, mesh_of(2, 2, 2), SPECS, implementation=implementation)
    assert_close(got, numpy_gated(arrays, "silu"))


def test_kernels_in_shard_map_give_the_same_gradients(mesh_of, simulated_tpu):
    arrays, mesh = draw(16, 10, 12), mesh_of(2, 1, 2)  # a simulated device each, and threads for it
    with simulated_tpu():
        got = sharded_value_and_grads(gated_mlp, arrays, mesh, SPECS, implementation="pallas", block_sizes=SMALL)
    assert_close(got, numpy_gated(arrays, "silu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TD": jnp.zeros((2, 3, 4))}, "takes x_TD, w_gate_DF, w_up_DF; got shapes"),
        ({"w_up_DF": jnp.zeros((4, 6))}, "takes x_TD, w_gate_DF, w_up_DF; got shapes"),
        ({"x_TD": jnp.zeros((3, 5))}, "takes x_TD, w_gate_DF, w_up_DF; got shapes"),
        ({"x_TD": jnp.zeros((0, 4))}, "an operand is empty"),
        ({"w_up_DF": jnp.zeros((4, 5), jnp.bfloat16)}, "wants one dtype, float32, bfloat16 or float16; got float32"),
        ({"activation": "tanh"}, "no activation 'tanh'; it has silu, gelu, gelu_tanh, relu, relu_squared"),
        ({"implementation": "cudnn"}, "no implementation 'cudnn'; it has reference, xla, pallas, interpret"),
        ({"block_sizes": SMALL}, "xla takes no block_sizes; pallas and interpret do"),
        ({"recompute": True}, "xla takes no recompute; pallas and interpret do"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    good = {"x_TD": jnp.zeros((3, 4)), "w_gate_DF": jnp.zeros((4, 5)), "w_up_DF": jnp.zeros((4, 5))}
    with pytest.raises(ValueError, match=message):
        gated_mlp(**(good | changes))


def test_what_the_kernels_cannot_take_is_refused(mesh_of):
    half, single = jnp.zeros((4, 4), jnp.float16), jnp.zeros((4, 4))
    interpreted = functools.partial(gated_mlp, implementation="interpret")
    with pytest.raises(ValueError, match="pallas can't take float16"):
        interpreted(half, half, half)
    with pytest.raises(ValueError, match=r"forward block T=100, F=128, D=128: each must be a multiple of 128"):
        interpreted(single, single, single, block_sizes=BlockSizes(forward=Block(100, 128, 128)))
    mesh_of(8, 1, 1)
    with pytest.raises(ValueError, match=r"under a mesh with Explicit axes pallas runs inside jax\.shard_map only"):
        interpreted(single, single, single)
