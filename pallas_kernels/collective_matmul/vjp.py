"""A product with a weight that devices hold in parts: gathered for it, and its gradient scattered round the ring."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.collective_matmul.reduce_scatter import matmul_reduce_scatter
from pallas_kernels.runtime import vary_alike, vary_over


def sharded_matmul(x_MI: jax.Array, w: jax.Array, *, axis: str, dim: int, implementation: str = "xla") -> jax.Array:
    """x w, inside jax.shard_map, for this device's part `w` of w_IO, which `axis` splits along `dim` (0 or 1).

    The weight is gathered by XLA, and kept whole for dx. Its gradient is matmul_reduce_scatter's, by `implementation`;
    along dim 1 that of the transposed weight, turned afterwards. y_MO has x's dtype, which w has too.

    Raises:
      ValueError: what matmul_reduce_scatter raises, when the gradient is traced.
    """
    if dim not in (0, 1):
        raise ValueError(f"sharded_matmul: dim={dim}; a weight has dims 0 and 1")
    x_MI, w = vary_alike(x_MI, vary_over(w, axis))
    return _sharded(axis, dim, implementation, x_MI, w)


def scatter(x_MI, dy_MO, factor_MO=None, *, axis: str, dim: int, implementation: str):
    """This device's part of the gradient of a weight that `axis` splits along `dim`."""
    run = functools.partial(matmul_reduce_scatter, axis=axis, implementation=implementation)
    return run(x_MI, dy_MO, factor_TF=factor_MO) if dim == 0 else run(dy_MO, x_MI).T


def gather(w: jax.Array, axis: str, dim: int) -> jax.Array:
    """The whole weight."""
    return jax.lax.all_gather(w, axis, axis=dim, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _sharded(axis, dim, implementation, x_MI, w):
    return _forward(axis, dim, implementation, x_MI, w)[0]


def _forward(axis, dim, implementation, x_MI, w):
    w_IO = gather(w, axis, dim)
    return jnp.einsum("MI,IO->MO", x_MI, w_IO), (x_MI, w_IO)


def _backward(axis, dim, implementation, kept, dy_MO):
    x_MI, w_IO = kept
    dw = scatter(x_MI, dy_MO, axis=axis, dim=dim, implementation=implementation)
    return jnp.einsum("MO,IO->MI", dy_MO, w_IO), dw


_sharded.defvjp(_forward, _backward)
