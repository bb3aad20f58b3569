"""The gated product's case for the schedule reader: a training step's three kernels."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.gated_mlp import gated_mlp
from pallas_kernels.matmul.blocks import Problem
from pallas_kernels.matmul.counts import counts, runs

__all__ = ["cases", "gated", "runs"]


def cases() -> list[Case]:
    """bf16, silu; small, since the compiler's time goes with the size of a block."""
    return [gated(2048, 1024, 4096)]


def gated(T: int, D: int, F: int, **options) -> Case:
    """Forward, then backward, of T tokens."""
    x, w, h = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, D), (D, F), (T, F)))

    def train(x_TD, w_gate_DF, w_up_DF, dh_TF):
        h_TF, vjp = jax.vjp(functools.partial(gated_mlp, implementation="pallas", **options), x_TD, w_gate_DF, w_up_DF)
        return h_TF, vjp(dh_TF)

    problem = Problem(T, F, D, 2, 2, 2, factors=True)
    return Case(
        f"gated_mlp/{T}x{D}x{F}",
        train,
        (x, w, w, h),
        functools.partial(counts, "gated_mlp", problem, recompute=options.get("recompute", False)),
        flops=6 * 2 * T * D * F,  # two products forward, four backward
    )
