"""Activations with their slopes, in float32: what the kernels compute, and XLA's implementations with them."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp


def _identity(z):
    return z, jnp.ones_like(z)


def _silu(z):
    sigmoid = jax.nn.sigmoid(z)
    value = z * sigmoid
    return value, sigmoid + value * (1.0 - sigmoid)


def _gelu(z):
    below = 0.5 * (1.0 + jax.lax.erf(z * math.sqrt(0.5)))
    density = jnp.exp(-0.5 * z * z) * (1.0 / math.sqrt(2.0 * math.pi))
    return z * below, below + z * density


def _gelu_tanh(z):
    bend, inner = 0.044715, math.sqrt(2.0 / math.pi)
    t = jnp.tanh(inner * (z + bend * z * z * z))
    half = 0.5 * (1.0 + t)
    return z * half, half + 0.5 * z * (1.0 - t * t) * inner * (1.0 + 3.0 * bend * z * z)


def _relu(z):
    return jnp.maximum(z, 0.0), jnp.where(z > 0.0, 1.0, 0.0)


def _relu_squared(z):
    above = jnp.maximum(z, 0.0)
    return above * above, 2.0 * above


# Name: a function of z to (value, slope). gelu is the exact one (arXiv:1606.08415), gelu_tanh its approximation.
ACTIVATIONS: dict[str | None, Callable[[jax.Array], tuple[jax.Array, jax.Array]]] = {
    None: _identity,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "relu_squared": _relu_squared,
}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def activate(name: str | None, z: jax.Array) -> jax.Array:
    """The activation of `z` in z's dtype, computed in float32; the backward pass keeps z alone."""
    return ACTIVATIONS[name](z.astype(jnp.float32))[0].astype(z.dtype)


def _backward(name, z, cotangent):
    slope = ACTIVATIONS[name](z.astype(jnp.float32))[1]
    return ((cotangent.astype(jnp.float32) * slope).astype(z.dtype),)


activate.defvjp(lambda name, z: (activate(name, z), z), _backward)
