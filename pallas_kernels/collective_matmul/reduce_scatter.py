"""A weight's gradient scattered over a mesh axis: one function, several implementations, the same errors."""

import jax
import jax.numpy as jnp

from pallas_kernels.collective_matmul.calls import matmul_reduce_scatter_pallas
from pallas_kernels.collective_matmul.reference import matmul_reduce_scatter_reference
from pallas_kernels.collective_matmul.xla import matmul_reduce_scatter_xla
from pallas_kernels.runtime import vary_alike, vary_over

KERNELS = ("pallas", "interpret")
IMPLEMENTATIONS = ("reference", "xla", *KERNELS)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def matmul_reduce_scatter(
    x_TD: jax.Array,
    dy_TF: jax.Array,
    *,
    axis: str,
    factor_TF: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """This device's rows of the sum over a mesh axis of x^T (dy factor), a weight's gradient; inside jax.shard_map.

    "pallas" sends partial sums round the ring of the axis, in the order of its indices, half of the way to a block's
    home from either side, while the next block's product runs (arXiv:2305.06942 is one account of the idea). It is
    fast where neighbours along the axis are neighbours in the torus.

    Args:
      x_TD: float32, bfloat16 or float16; this device's tokens.
      dy_TF: of x's dtype.
      axis: the mesh axis, of n > 1 devices; D is a multiple of n.
      factor_TF: of x's dtype; what dy is multiplied by first, rounded to x's dtype.
      implementation: "reference", "xla", "pallas" (on TPUs) or "interpret" (the same kernel in JAX's TPU simulator).

    Returns:
      dw_dF with d = D / n, in x's dtype. Each device's product accumulates in float32. A sum of n devices is rounded to
      x's dtype as often as it is sent on, at most n / 2 times; both halves and the last product are added in float32.
      There is no gradient of it.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or what `implementation` can't honour.
    """
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"matmul_reduce_scatter has no implementation {implementation!r}; it has {known}")
    n = _devices("matmul_reduce_scatter", axis)
    _check(x_TD, dy_TF, factor_TF, axis, n)
    operands = vary_alike(*(vary_over(x, axis) for x in (x_TD, dy_TF)), factor_TF)
    if implementation in KERNELS:
        return matmul_reduce_scatter_pallas(*operands, axis=axis, interpret=implementation == "interpret")
    run = matmul_reduce_scatter_reference if implementation == "reference" else matmul_reduce_scatter_xla
    return run(*operands, axis=axis)


def _devices(op: str, axis: str) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    if axis not in mesh.shape or not mesh.are_all_axes_manual:
        raise ValueError(f"{op} runs inside jax.shard_map over all mesh axes, of which {axis!r} must be one")
    n = mesh.shape[axis]
    if n == 1:
        raise ValueError(
            f"{op}: the mesh axis {axis!r} has one device, so there is nothing to send; take a plain product"
        )
    return n


def _check(x, dy, factor, axis: str, n: int) -> None:
    name = "matmul_reduce_scatter"
    if x.ndim != 2 or dy.ndim != 2 or x.shape[0] != dy.shape[0] or 0 in (*x.shape, *dy.shape):
        raise ValueError(f"{name} takes x_TD and dy_TF, none of them empty; got shapes {x.shape} and {dy.shape}")
    if x.dtype != dy.dtype or x.dtype not in DTYPES:
        raise ValueError(f"{name} wants one dtype, float32, bfloat16 or float16; got {x.dtype} and {dy.dtype}")
    if factor is not None and (factor.shape, factor.dtype) != (dy.shape, dy.dtype):
        raise ValueError(f"{name}: factor_TF {factor.dtype}{factor.shape} should be as dy_TF, {dy.dtype}{dy.shape}")
    if x.shape[1] % n:
        raise ValueError(f"{name}: D={x.shape[1]} does not divide over the {n} devices of mesh axis {axis!r}")
