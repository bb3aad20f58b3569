"""The product with its epilogue by the kernels, and its gradient; the backward pass keeps the activation's slope."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.matmul import calls
from pallas_kernels.matmul.blocks import BlockSizes, Problem


def fused_matmul_pallas(
    x_TD, w_DF, bias_F, residual_TF, *, activation, out_dtype, sizes: BlockSizes | None, interpret: bool
):
    """Same contract as `fused_matmul_reference`. `interpret`: run the kernels in jnp, on any platform.

    Raises:
      ValueError: float16; blocks that can't be; a mesh with Explicit axes in use.
    """
    (T, D), F = x_TD.shape, w_DF.shape[1]
    dtype, residual = x_TD.dtype, residual_TF is not None
    problem = Problem(T, F, D, 1, dtype.itemsize, out_dtype.itemsize, activation is not None, residual)
    options = {"activation": activation, "bias": bias_F is not None, "residual": residual, "y_dtype": out_dtype}
    call = calls.prepare("fused_matmul", problem, sizes, dtype, interpret, **options)
    return _fused(call, x_TD, w_DF, bias_F, residual_TF)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(call, x_TD, w_DF, bias_F, residual_TF):
    return calls.forward(call, x_TD, (w_DF,), bias_F, residual_TF)[0]


def _forward(call, x_TD, w_DF, bias_F, residual_TF):
    y_TF, *factors = calls.forward(call, x_TD, (w_DF,), bias_F, residual_TF, factors=call.problem.factors)
    # Of bias and residual the backward pass needs the dtypes alone.
    empty = [None if x is None else jnp.zeros((0,), x.dtype) for x in (bias_F, residual_TF)]
    return y_TF, (x_TD, w_DF, factors, empty)


def _backward(call, residuals, dy_TF):
    x_TD, w_DF, factors, (bias, residual) = residuals
    dx_TD = calls.dx(call, dy_TF, factors, (w_DF,))
    dw_DF, *dbias = calls.dw(call, dy_TF, factors, x_TD)
    dbias_F = None if bias is None else dbias[0].reshape(-1).astype(bias.dtype)
    return dx_TD, dw_DF, dbias_F, None if residual is None else dy_TF.astype(residual.dtype)


_fused.defvjp(_forward, _backward)
