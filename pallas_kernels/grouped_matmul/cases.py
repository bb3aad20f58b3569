"""The grouped product's case for the schedule reader, and how often its regions run for given sizes of groups."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.grouped_matmul import blocks, grouped_matmul
from pallas_kernels.grouped_matmul.blocks import Problem
from pallas_kernels.grouped_matmul.kernel import ALIGN
from pallas_kernels.matmul.blocks import RATES
from pallas_kernels.matmul.counts import NAMES
from pallas_kernels.runtime import CHIPS
from pallas_kernels.schedule_dump import Region


def cases() -> list[Case]:
    """bf16; groups of many rows, of few and of none, and a rest of nobody's."""
    return [grouped(1024, 1024, (800, 0, 300, 36, 512, 200, 0, 100), 2048)]


def grouped(D: int, F: int, sizes: Sequence[int], T: int | None = None) -> Case:
    """Forward, then backward, with groups of these sizes; of T rows, or of all the groups'."""
    T, E = sum(sizes) if T is None else T, len(sizes)
    x, w, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, D), (E, D, F), (T, F)))

    def train(x_TD, w_EDF, dy_TF, group_sizes):
        run = functools.partial(grouped_matmul, group_sizes=group_sizes, implementation="pallas")
        y_TF, vjp = jax.vjp(run, x_TD, w_EDF)
        return y_TF, vjp(dy_TF)

    return Case(
        f"grouped_matmul/{T}x{D}x{F}-{E}",
        train,
        (x, w, y, jax.ShapeDtypeStruct((E,), jnp.int32)),
        functools.partial(counts, Problem(T, F, D, E, 2), sizes),
        flops=3 * 2 * sum(sizes) * D * F,
        ids={3: tuple(sizes)},
    )


def runs(kernel: str, values: Mapping[str, int], generation: str, filled: float) -> Callable[[Region], float]:
    """By region, of one core: of a call with these values (runtime.facts); groups of one size fill so much of T."""
    problem = Problem(**values)
    even = [int(filled * problem.T * (i + 1) / problem.E) for i in range(-1, problem.E)]
    return _kernel_counts(kernel, problem, [end - first for first, end in itertools.pairwise(even)], generation)


def counts(problem: Problem, sizes: Sequence[int], generation: str) -> dict[str, Callable[[Region], float]]:
    """By kernel, of one forward and backward pass; of one core where two share the grid."""
    return {
        name.format("grouped_matmul"): _kernel_counts(kernel, problem, sizes, generation)
        for kernel, name in NAMES.items()
    }


def _kernel_counts(kernel: str, problem: Problem, sizes: Sequence[int], generation: str) -> Callable[[Region], float]:
    block = blocks.choose(kernel, problem, CHIPS[generation])
    cut = blocks.cut(kernel, problem, block, CHIPS[generation])
    steps = {dim: -(-getattr(problem, dim) // getattr(block, dim)) for dim in "FD"}
    parallel = "D" if kernel == "dx" else "F"
    steps[parallel] = -(-steps[parallel] // RATES[generation][2])
    times = steps["F"] * steps["D"]
    done = work(problem.T, sizes, block.T, (cut.rows, *cut.rests), "group" if kernel == "dw" else "tile")
    across, along = (block.F, block.D) if kernel == "forward" else (block.D, block.F)
    row = cut.columns * along / RATES[generation][0]  # cycles of the matrix units

    def runs(region: Region) -> float:
        if not region.name.startswith("grid"):
            return 1
        if region.mxu_cycles:
            rows = min(done.bodies, key=lambda rows: abs(rows * row - region.mxu_cycles))
            return times * done.bodies[rows] * (across // cut.columns)
        if region.name.endswith("/loop1"):  # over the parts, around one over their columns
            return times * done.bodies[cut.rows]
        filling = region.slots["store"] > 0.5 * region.bundles
        return times * (done.fills if filling else done.visits)

    return runs


@dataclasses.dataclass
class Work:
    """Of one block of columns: visits of tiles, bodies in them by their rows, and blocks set to zero."""

    visits: int
    bodies: dict[int, int]
    fills: int


def work(T: int, sizes: Sequence[int], tile: int, rows: Sequence[int], every: str) -> Work:
    """What the kernel does, by the same rules; `rows` of its bodies, from the longest on."""
    total = min(sum(sizes), T)
    done, first = Work(0, dict.fromkeys(rows, 0), 0), 0
    for size in sizes:
        end = min(first + size, T)
        for at in range(first // tile * tile, end, tile) if first < end else ():
            done.visits += 1
            done.fills += every == "tile" and first <= at and at + tile > total
            left = min(end - at, tile) - max(first - at, 0) // ALIGN * ALIGN
            for i, size_of_body in enumerate(rows):
                count = max(0, -(-(left - sum(rows[i + 1 :])) // size_of_body))
                done.bodies[size_of_body] += count
                left -= count * size_of_body
        if every == "group" and first == end:
            done.visits, done.fills = done.visits + 1, done.fills + 1
        first = end
    nobodys = -(-T // tile) - -(-total // tile) if every == "tile" else 0
    return Work(done.visits + nobodys, done.bodies, done.fills + nobodys)
