"""A product with its epilogue: one function, several implementations with the same results and the same errors."""

import jax
import jax.numpy as jnp

from pallas_kernels.fused_matmul.reference import fused_matmul_reference
from pallas_kernels.fused_matmul.vjp import fused_matmul_pallas
from pallas_kernels.fused_matmul.xla import fused_matmul_xla
from pallas_kernels.matmul.activations import ACTIVATIONS
from pallas_kernels.matmul.blocks import BlockSizes
from pallas_kernels.runtime import vary_alike

KERNELS = ("pallas", "interpret")
IMPLEMENTATIONS = ("reference", "xla", *KERNELS)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def fused_matmul(
    x_TD: jax.Array,
    w_DF: jax.Array,
    *,
    bias_F: jax.Array | None = None,
    activation: str | None = None,
    residual_TF: jax.Array | None = None,
    out_dtype: jnp.dtype | None = None,
    block_sizes: BlockSizes | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """act(x w + bias) + residual.

    Args:
      x_TD: float32, bfloat16 or float16.
      w_DF: of x's dtype.
      bias_F, residual_TF: any of these dtypes; added in float32.
      activation: None, "silu", "gelu" (exact), "gelu_tanh", "relu" or "relu_squared".
      out_dtype: one of these dtypes; None is x's.
      block_sizes: of "pallas" and "interpret"; None chooses them for the TPU generation of the mesh in use.
      implementation: "reference", "xla", "pallas" (on a TPU) or "interpret" (the same kernels anywhere, slowly).

    Returns:
      y_TF in `out_dtype`; the product accumulates in float32 and is rounded once, after the epilogue (by xla with an
      activation also before it). Gradients have their operands' dtype; those of w and bias are summed over all of T in
      float32 and rounded once. The cotangent times the activation's slope is rounded to x's dtype for the products.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or an option that `implementation` can't honour.
    """
    out_dtype = jnp.dtype(x_TD.dtype if out_dtype is None else out_dtype)
    _check(x_TD, w_DF, bias_F, residual_TF, activation, out_dtype)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"fused_matmul has no implementation {implementation!r}; it has {', '.join(IMPLEMENTATIONS)}")
    operands = vary_alike(x_TD, w_DF, bias_F, residual_TF)
    options = {"activation": activation, "out_dtype": out_dtype}
    if implementation in KERNELS:
        interpret = implementation == "interpret"
        return fused_matmul_pallas(*operands, **options, sizes=block_sizes, interpret=interpret)
    if block_sizes is not None:
        raise ValueError(f"fused_matmul: {implementation} takes no block_sizes; {' and '.join(KERNELS)} do")
    run = fused_matmul_reference if implementation == "reference" else fused_matmul_xla
    return run(*operands, **options)


def _check(x, w, bias, residual, activation, out_dtype):
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or 0 in (*x.shape, *w.shape):
        raise ValueError(f"fused_matmul takes x_TD and w_DF, none of them empty; got shapes {x.shape} and {w.shape}")
    if x.dtype != w.dtype or x.dtype not in DTYPES:
        raise ValueError(f"fused_matmul wants one dtype, float32, bfloat16 or float16; got {x.dtype} and {w.dtype}")
    shape = (x.shape[0], w.shape[1])
    for name, given, wanted in (("bias_F", bias, shape[1:]), ("residual_TF", residual, shape)):
        if given is not None and (given.shape != wanted or given.dtype not in DTYPES):
            raise ValueError(
                f"fused_matmul: {name} {given.dtype}{given.shape} should be {wanted}, float32, bfloat16 or float16"
            )
    if activation not in ACTIVATIONS:
        known = ", ".join(str(name) for name in ACTIVATIONS)
        raise ValueError(f"fused_matmul has no activation {activation!r}; it has {known}")
    if out_dtype not in DTYPES:
        raise ValueError(f"fused_matmul: out_dtype={out_dtype}; it must be float32, bfloat16 or float16")
