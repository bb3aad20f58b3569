"""Cases of the products of eight bits for the schedule reader, and how often their kernel's regions run."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.matmul.blocks import RATES
from pallas_kernels.matmul.counts import NAMES
from pallas_kernels.quantized_matmul import Quantized, blocks, dynamic_quantized_matmul, quantized_matmul
from pallas_kernels.quantized_matmul.blocks import Problem
from pallas_kernels.runtime import CHIPS


def cases() -> list[Case]:
    """Few rows times weights held in int8, with one scale a column and several; a training step's three products."""
    return [held(16, 2048, 4096), held(16, 2048, 4096, block=128), trained(512, 1024, 1024)]


def held(T: int, D: int, F: int, block: int | None = None, dtype=jnp.int8) -> Case:
    """bf16 rows times weights of eight bits."""
    scales = (1 if block is None else -(-D // block), F)
    x, w, s = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((T, D), jnp.bfloat16), ((D, F), dtype), (scales, jnp.float32))
    )

    def run(x_TD, values_DF, scales_CF):
        return quantized_matmul(x_TD, Quantized(values_DF, scales_CF, 0, block), implementation="pallas")

    problem = Problem(T, F, D, 2, jnp.dtype(dtype).name, 2, block)
    name = f"quantized_matmul/held-{T}x{D}x{F}" + ("" if block is None else f"-{block}")
    name += "" if dtype == jnp.int8 else f"-{jnp.dtype(dtype).name}"
    counts = functools.partial(_counts, {"quantized_matmul": problem})
    return Case(name, run, (x, w, s), counts, flops=2 * T * D * F)


def trained(T: int, D: int, F: int, values: str = "int8") -> Case:
    """Forward, then backward, bf16 in and out, all of it quantised."""
    x, w, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, D), (D, F), (T, F)))

    def train(x_TD, w_DF, dy_TF):
        run = functools.partial(dynamic_quantized_matmul, values=values, implementation="pallas")
        y_TF, vjp = jax.vjp(run, x_TD, w_DF)
        return y_TF, vjp(dy_TF)

    dtypes = dict.fromkeys(("forward", "dx", "dw"), "int8")
    if values == "float8":
        dtypes = {"forward": "float8_e4m3fn", "dx": "float8_e4m3fn", "dw": "float8_e5m2"}
    dims = {"forward": (T, F, D), "dx": (T, D, F), "dw": (D, F, T)}
    problems = {
        NAMES[kernel].format("dynamic_quantized_matmul"): Problem(
            *dims[kernel], 1, dtypes[kernel], 2, transposed=kernel == "dw"
        )
        for kernel in dims
    }
    counts = functools.partial(_counts, problems)
    return Case(f"quantized_matmul/trained-{T}x{D}x{F}", train, (x, w, y), counts, flops=6 * T * D * F)


def _counts(problems: dict[str, Problem], generation: str) -> dict[str, dict[str, float]]:
    """By kernel and region; of one core where two share the grid."""
    return {name: _kernel_counts(problem, generation) for name, problem in problems.items()}


def _kernel_counts(problem: Problem, generation: str) -> dict[str, float]:
    chip, cores = CHIPS[generation], RATES[generation][2]
    block = blocks.choose(problem, chip)
    n = {dim: -(-getattr(problem, dim) // getattr(block, dim)) for dim in "TFD"}
    outer = "T" if n["T"] > 1 else "F"
    n[outer] = -(-n[outer] // cores)
    results, tiles = n["T"] * n["F"], block.T // blocks.tile(problem, block, chip)
    steps = results * n["D"]
    found = {"grid/when1/loop1": steps * tiles} if tiles > 1 else {}
    if n["D"] > 1:
        found["grid/when1/when1/loop1" if tiles > 1 else "grid/when1/when1"] = results * tiles
    return found
