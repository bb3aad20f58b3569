"""What the tests of the matmul ops share: activations in float64, ways to run an op, how errors are compared."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.matmul.blocks import Block, BlockSizes

NUMPY_ACTIVATIONS: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda z: z,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "gelu": lambda z: z / 2 * (1 + np.vectorize(math.erf)(z / math.sqrt(2))),
    "gelu_tanh": lambda z: z / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "relu": lambda z: np.maximum(z, 0),
    "relu_squared": lambda z: np.maximum(z, 0) ** 2,
}
_ONE = Block(128, 128, 128)
SMALL = BlockSizes(_ONE, _ONE, _ONE)

# One less and one more than a block or two, and what is no multiple of anything.
lengths = st.sampled_from([1, 7, 127, 128, 129, 255, 257, 283])


def slope(name: str | None, z: np.ndarray) -> np.ndarray:
    """The activation's slope in float64, by a central difference."""
    return (NUMPY_ACTIVATIONS[name](z + 1e-5) - NUMPY_ACTIVATIONS[name](z - 1e-5)) / 2e-5


def value_and_grads(op: Callable, arrays: dict[str, Any], **options) -> dict[str, np.ndarray]:
    """The op's result "y" and the gradient of each array but the cotangent "dy", under its name.

    Inside shard_map over the mesh of one device that every test starts with, since kernels run nowhere else.
    """

    everywhere = jax.shard_map(functools.partial(_value_and_grads, op, options), in_specs=P(), out_specs=P())
    return {name: np.asarray(x) for name, x in jax.jit(everywhere)(arrays).items()}


def sharded_value_and_grads(op: Callable, arrays: dict[str, Any], mesh: Mesh, specs: dict[str, P], **options):
    """The same on a mesh, `specs` of the arrays and "y"; gradients are taken outside shard_map, as in a model."""

    def split(**inputs):
        local = jax.shard_map(
            lambda inputs: op(**inputs, **options),
            in_specs=({name: specs[name] for name in inputs},),
            out_specs=specs["y"],
        )
        return local(inputs)

    specs = specs | {"dy": specs["y"]}
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    results = jax.jit(functools.partial(_value_and_grads, split, {}))(placed)
    return {name: np.asarray(x) for name, x in results.items()}


def _value_and_grads(op, options, arrays):
    inputs = {name: x for name, x in arrays.items() if name != "dy"}
    y, vjp = jax.vjp(lambda inputs: op(**inputs, **options), inputs)
    return {"y": y} | vjp(arrays["dy"].astype(y.dtype))[0]


def normal(rng: np.random.Generator, dtype=np.float32, **shapes) -> dict[str, Any]:
    """Normal numbers of each name and shape; weights of a size that keeps the products' near one."""
    drawn = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    scaled = {name: x / math.sqrt(len(x)) if name.startswith("w_") else x for name, x in drawn.items()}
    return {name: jnp.asarray(x, dtype) for name, x in scaled.items()}


def assert_close(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = 2e-5) -> None:
    assert got.keys() == wanted.keys()
    for name, right in wanted.items():
        np.testing.assert_allclose(
            got[name], right, rtol=tolerance, atol=tolerance * max(1, np.abs(right).max()), err_msg=name
        )


def assert_at_most_twice_the_error(ours: dict[str, Any], plain: dict[str, Any], truth: dict[str, Any]) -> None:
    """Root mean square errors, one result at a time."""
    assert ours.keys() == plain.keys() == truth.keys()
    for name, right in truth.items():
        mine, theirs = (np.sqrt(np.mean((x[name].astype(np.float64) - right) ** 2)) for x in (ours, plain))
        # An ulp of what is exact in both, such as a cotangent passed on.
        assert mine <= 2 * theirs + 1e-6 * np.abs(right).max(), f"{name}: {mine} against {theirs}"
