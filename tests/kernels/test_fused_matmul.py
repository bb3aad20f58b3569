"""The product with its epilogue: the reference against float64, the others against it, and what is refused."""

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

from pallas_kernels import fused_matmul
from pallas_kernels.matmul.activations import ACTIVATIONS
from pallas_kernels.matmul.blocks import Block, BlockSizes


def draw(T, D, F, dtype=np.float32, bias=True, residual=True):
    shapes = {"x_TD": (T, D), "w_DF": (D, F), "dy": (T, F)}
    shapes |= {"bias_F": (F,)} if bias else {}
    shapes |= {"residual_TF": (T, F)} if residual else {}
    return normal(np.random.default_rng(0), dtype, **shapes)


def numpy_fused(arrays, activation):
    exact = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    x, w, dy = exact["x_TD"], exact["w_DF"], exact["dy"]
    z = x @ w + exact.get("bias_F", 0.0)
    dz = dy * slope(activation, z)
    results = {
        "y": NUMPY_ACTIVATIONS[activation](z) + exact.get("residual_TF", 0.0),
        "x_TD": dz @ w.T,
        "w_DF": x.T @ dz,
    }
    results |= {"bias_F": dz.sum(axis=0)} if "bias_F" in arrays else {}
    return results | ({"residual_TF": dy} if "residual_TF" in arrays else {})


def run(arrays, implementation, **options):
    options |= {"block_sizes": SMALL} if implementation == "interpret" and "block_sizes" not in options else {}
    return value_and_grads(fused_matmul, arrays, implementation=implementation, **options)


def plainly(x_TD, w_DF, bias_F, residual_TF):
    return jax.nn.silu(x_TD @ w_DF + bias_F[None]) + residual_TF


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_values_and_gradients_match_float64(implementation, activation):
    arrays = draw(9, 13, 11)
    assert_close(run(arrays, implementation, activation=activation), numpy_fused(arrays, activation))


# What a kernel holds depends on these: a slope kept or not, dz formed or taken as it comes, one block or several.
CASES = {
    "plain_in_whole_blocks": ((256, 128, 256), {"bias": False, "residual": False}, {}),
    "plain_with_tails": ((257, 140, 130), {"bias": False, "residual": False}, {}),
    "bias_in_whole_blocks": ((256, 128, 128), {"residual": False}, {}),
    "everything": ((150, 260, 130), {}, {"activation": "gelu_tanh"}),
    "residual_alone": ((140, 60, 130), {"bias": False}, {"block_sizes": BlockSizes(dw=Block(128, 128, 128))}),
}


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_the_reference(name):
    shape, operands, options = CASES[name]
    arrays = draw(*shape, **operands)
    wanted = run(arrays, "reference", activation=options.get("activation"))
    assert_close(run(arrays, "interpret", **options), wanted)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_any_shapes_match_the_reference(implementation):
    @given(lengths, lengths, lengths)
    @settings(max_examples=2 if implementation == "interpret" else 5, deadline=None)
    def check(T, D, F):
        arrays = draw(T, D, F)
        assert_close(run(arrays, implementation, activation="silu"), run(arrays, "reference", activation="silu"))

    check()


def test_bfloat16_errs_at_most_twice_as_much_as_plain_jax():
    arrays = draw(200, 300, 150, jnp.bfloat16)
    truth = run({name: x.astype(jnp.float32) for name, x in arrays.items()}, "reference", activation="silu")
    plain = value_and_grads(plainly, arrays)
    for implementation in ("xla", "interpret"):
        assert_at_most_twice_the_error(run(arrays, implementation, activation="silu"), plain, truth)


@pytest.mark.parametrize("implementation", ["reference", "xla", "interpret"])
def test_result_and_gradients_have_the_dtypes_that_are_said(implementation):
    arrays = draw(9, 8, 7, jnp.bfloat16) | {"bias_F": jnp.zeros(7)}
    got = run(arrays, implementation, out_dtype=jnp.float32, activation="relu")
    wanted = {"y": "float32", "x_TD": "bfloat16", "w_DF": "bfloat16", "bias_F": "float32", "residual_TF": "bfloat16"}
    assert {name: str(x.dtype) for name, x in got.items()} == wanted
    exact = numpy_fused(arrays, "relu")
    np.testing.assert_allclose(got["y"], exact["y"], rtol=1e-5, atol=1e-5)  # not rounded to bfloat16 on its way


TOKENS, OUT = P(("data", "fsdp"), None), P(("data", "fsdp"), "tensor")
SPECS = {"x_TD": TOKENS, "w_DF": P(None, "tensor"), "bias_F": P("tensor"), "residual_TF": OUT, "y": OUT}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_shard_map_over_batch_and_features_gives_the_same_gradients(mesh_of, implementation):
    arrays = draw(16, 10, 12)
    options = {"implementation": implementation, "activation": "silu"}
    got = sharded_value_and_grads(fused_matmul, arrays, mesh_of(2, 2, 2), SPECS, **options)
    assert_close(got, numpy_fused(arrays, "silu"))


@pytest.mark.slow
def test_kernels_in_shard_map_give_the_same_gradients(mesh_of, simulated_tpu):
    arrays, mesh = draw(16, 10, 12), mesh_of(2, 1, 2)
    options = {"implementation": "pallas", "activation": "silu", "block_sizes": SMALL}
    with simulated_tpu():
        got = sharded_value_and_grads(fused_matmul, arrays, mesh, SPECS, **options)
    assert_close(got, numpy_fused(arrays, "silu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_TD": jnp.zeros((2, 3, 4))}, "takes x_TD and w_DF, none of them empty; got shapes"),
        ({"x_TD": jnp.zeros((3, 5))}, "takes x_TD and w_DF, none of them empty; got shapes"),
        ({"w_DF": jnp.zeros((4, 0))}, "takes x_TD and w_DF, none of them empty; got shapes"),
        (
            {"w_DF": jnp.zeros((4, 5), jnp.int32)},
            "wants one dtype, float32, bfloat16 or float16; got float32 and int32",
        ),
        ({"bias_F": jnp.zeros((1, 5))}, r"bias_F float32\(1, 5\) should be \(5,\)"),
        ({"residual_TF": jnp.zeros((3, 4))}, r"residual_TF float32\(3, 4\) should be \(3, 5\)"),
        ({"activation": "tanh"}, "no activation 'tanh'; it has None, silu, gelu, gelu_tanh, relu, relu_squared"),
        ({"out_dtype": jnp.int32}, "out_dtype=int32; it must be float32, bfloat16 or float16"),
        ({"implementation": "cudnn"}, "no implementation 'cudnn'; it has reference, xla, pallas, interpret"),
        ({"block_sizes": SMALL}, "xla takes no block_sizes; pallas and interpret do"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        fused_matmul(**({"x_TD": jnp.zeros((3, 4)), "w_DF": jnp.zeros((4, 5))} | changes))
