"""A blocked matmul as a stand-in for an op's kernel: an answer that is known, and the cases an op would register."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cases import Case

BLOCK = 512


def matmul(x_MK: jax.Array, y_KN: jax.Array, vmem_limit_bytes: int | None = None) -> jax.Array:
    (M, K), N = x_MK.shape, y_KN.shape[1]

    def kernel(x_ref, y_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += jnp.dot(
            x_ref[...], y_ref[...], precision=jax.lax.Precision.DEFAULT, preferred_element_type=jnp.float32
        )

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o_ref[...] = acc_ref[...].astype(o_ref.dtype)

    # grid = (M // BLOCK, N // BLOCK, K // BLOCK)
    return pl.pallas_call(
        kernel,
        grid=(M // BLOCK, N // BLOCK, K // BLOCK),
        in_specs=[
            pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k)),
            pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((M, N), x_MK.dtype),
        scratch_shapes=[pltpu.VMEM((BLOCK, BLOCK), jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_limit_bytes),
        name="matmul_kernel",
    )(x_MK, y_KN)


def operands(M: int, K: int, N: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((M, K), jnp.bfloat16), jax.ShapeDtypeStruct((K, N), jnp.bfloat16)


def cases() -> list[Case]:
    M, K, N = 1024, 2048, 1024
    blocks = M * N // BLOCK**2
    # The first and the last step of each output block's contraction.

    def counts(generation):
        return {"matmul_kernel": {"grid/when1/when1": blocks, "grid/when1/when2": blocks}}

    return [Case("matmul/forward/1024x2048x1024", matmul, operands(M, K, N), counts, flops=2 * M * K * N)]
