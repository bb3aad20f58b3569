"""The gated product by the kernels, and its gradient.

The backward pass wants u act'(g) and act(g). Kept, the forward kernel writes them beside h, in the room that g and u
would take; recomputed, the forward kernel runs again in the backward pass and writes nothing else.

Weights that a mesh axis splits are gathered before the kernels; their gradients then come from a kernel each, which
forms dz as the dw kernel does and sends what it has round the axis.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.collective_matmul.vjp import gather, scatter
from pallas_kernels.matmul import calls
from pallas_kernels.matmul.blocks import BlockSizes, Problem


def gated_mlp_pallas(
    x_TD,
    w_gate_DF,
    w_up_DF,
    *,
    activation,
    recompute: bool,
    sharded_over: str | None,
    sizes: BlockSizes | None,
    interpret: bool,
):
    """Same contract as `gated_mlp_reference`. `interpret`: run the kernels in jnp, on any platform.

    Raises:
      ValueError: float16; blocks that can't be; a mesh with Explicit axes in use.
    """
    (T, D), F = x_TD.shape, w_gate_DF.shape[1]
    dtype = x_TD.dtype
    problem = Problem(T, F, D, 2, dtype.itemsize, dtype.itemsize, factors=True)
    options = {"activation": activation, "bias": False, "residual": False, "y_dtype": jnp.dtype(dtype)}
    call = calls.prepare("gated_mlp", problem, sizes, dtype, interpret, **options)
    return _gated(call, recompute, sharded_over, x_TD, w_gate_DF, w_up_DF)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gated(call, recompute, axis, x_TD, w_gate_DF, w_up_DF):
    return calls.forward(call, x_TD, _whole(axis, w_gate_DF, w_up_DF))[0]


def _whole(axis, *weights):
    return weights if axis is None else tuple(gather(w, axis, 0) for w in weights)


def _forward(call, recompute, axis, x_TD, w_gate_DF, w_up_DF):
    weights = _whole(axis, w_gate_DF, w_up_DF)
    h_TF, *factors = calls.forward(call, x_TD, weights, factors=not recompute)
    return h_TF, (x_TD, weights, factors)


def _backward(call, recompute, axis, residuals, dh_TF):
    x_TD, weights, factors = residuals
    if recompute:
        factors = calls.forward(call, x_TD, weights, writes_y=False, factors=True)
    dx_TD = calls.dx(call, dh_TF, factors, weights)
    if axis is None:
        return dx_TD, *calls.dw(call, dh_TF, factors, x_TD)
    implementation = "interpret" if call.interpret else "pallas"
    send = functools.partial(scatter, axis=axis, dim=0, implementation=implementation)
    return dx_TD, *(send(x_TD, dh_TF, factor) for factor in factors)


_gated.defvjp(_forward, _backward)
