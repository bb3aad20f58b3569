"""Cases of the fused product for the schedule reader; measured by benchmarks/matmul_schedule.py."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.fused_matmul import fused_matmul
from pallas_kernels.matmul.blocks import Problem
from pallas_kernels.matmul.counts import counts


def plain(T: int, D: int, F: int) -> Case:
    """A product without an epilogue, forward, then backward, bf16."""
    x, w, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, D), (D, F), (T, F)))

    def train(x_TD, w_DF, dy_TF):
        y_TF, vjp = jax.vjp(functools.partial(fused_matmul, implementation="pallas"), x_TD, w_DF)
        return y_TF, vjp(dy_TF)

    problem = Problem(T, F, D, 1, 2, 2, factors=False)
    counted = functools.partial(counts, "fused_matmul", problem)
    return Case(f"fused_matmul/{T}x{D}x{F}", train, (x, w, y), counted, flops=3 * 2 * T * D * F)
