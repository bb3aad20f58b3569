"""Predicted cycles of the grouped matmul kernels beside JAX's megablox, on absent TPUs; needs libtpu, not a TPU.

    python benchmarks/grouped_schedule.py
    python benchmarks/grouped_schedule.py --topologies=v6e:1x1 --shapes=8192x4096x14336x8

Each kernel of a step (forward, dx, dw), bf16, for groups of even sizes, and for skewed ones: group i of E has a share
of the rows that goes with i^-1.2, in a shuffled order. Cycles are schedules, without waits for HBM; both sides' from
the bundles of their regions and how often these run for such sizes. Megablox has the best of its tilings of TILINGS for
each figure. `bound`: what the matrix units need. `HBM`: what the operands and results take at the HBM's full rate, each
read or written once, over that bound; where it is above one, no schedule reaches the bound. `copied`: the same for what
our blocks copy.
"""

import argparse
import importlib
import os
import random
from collections.abc import Callable, Sequence
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

from pallas_kernels import schedule
from pallas_kernels.grouped_matmul import blocks
from pallas_kernels.grouped_matmul.blocks import Problem
from pallas_kernels.grouped_matmul.cases import counts, grouped, work
from pallas_kernels.matmul.blocks import KERNELS, RATES
from pallas_kernels.matmul.counts import NAMES
from pallas_kernels.runtime import CHIPS
from pallas_kernels.schedule_dump import Region

backend = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
TILINGS = ((512, 1024, 1024), (256, 1024, 1024), (256, 2048, 1024), (128, 1024, 1024))
SKEW = 1.2


def even(T: int, E: int) -> list[int]:
    return [(i + 1) * T // E - i * T // E for i in range(E)]


def skewed(T: int, E: int) -> list[int]:
    shares = [(i + 1) ** -SKEW for i in range(E)]
    random.Random(0).shuffle(shares)
    ends = [round(T * sum(shares[: i + 1]) / sum(shares)) for i in range(E)]
    return [end - first for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def cycles(kernel: schedule.Kernel, runs: Callable[[Region], float]) -> float:
    return sum(runs(region) * region.cycles for region in kernel.regions)


def megablox(kernel: str, problem: Problem, tiling: tuple[int, int, int], topology: str) -> schedule.Job:
    """The kernel alone, given the visits that its caller computes: libtpu can't print that program for every TPU."""
    T, F, D, E = problem.T, problem.F, problem.D, problem.E
    x, w, y = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, D), (E, D, F), (T, F)))
    visits = [jax.ShapeDtypeStruct((length,), jnp.int32) for length in (E + 1, *[T // tiling[0] + E - 1] * 2)]
    sizes, count = jax.ShapeDtypeStruct((E,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    options = {"preferred_element_type": jnp.bfloat16, "tiling": tiling}

    def run(rows, other, sizes, visits, count):
        with mock.patch.object(backend, "make_group_metadata", return_value=(tuple(visits), count)):
            if kernel == "dw":
                return backend.tgmm.__wrapped__(rows.swapaxes(0, 1), other, sizes, **options)
            return backend.gmm.__wrapped__(rows, other, sizes, **options, transpose_rhs=kernel == "dx")

    operands = {"forward": (x, w), "dx": (y, w), "dw": (x, y)}[kernel]
    return schedule.Job(run, (*operands, sizes, visits, count), topology)


def megablox_tiling(kernel: str, problem: Problem, tiling: tuple[int, int, int]) -> tuple[int, int, int]:
    """(rows, contracted, columns), none longer than its array; of tgmm rows, D and F."""
    across, along = (problem.D, problem.F) if kernel == "dx" else (problem.F, problem.D)
    return min(tiling[0], problem.T), min(tiling[1], along), min(tiling[2], across)


def megablox_runs(
    kernel: str, problem: Problem, tiling: tuple[int, int, int], sizes: Sequence[int], regions: Sequence[Region]
) -> Callable[[Region], float]:
    """How often a region runs: its sums begin, go on, and end with a store."""
    across, along = (problem.D, problem.F) if kernel == "dx" else (problem.F, problem.D)
    outer, steps = -(-across // tiling[2]), -(-along // tiling[1])
    visits = work(problem.T, sizes, tiling[0], tiling[:1], "group" if kernel == "dw" else "tile").visits
    longest = max(regions, key=lambda region: region.bundles if region.mxu_cycles else 0)
    empty = sum(size == 0 for size in sizes)

    def runs(region: Region) -> float:
        if not region.name.startswith("grid"):
            return 1
        if kernel == "dw":
            whole = outer * steps
            if region.mxu_cycles:
                return whole * (visits - empty)
            return whole * (len(sizes) if region.slots["store"] > 0.2 * region.bundles else visits)
        if region.mxu_cycles:
            return outer * visits * (1 if region is longest else steps - 1)
        return outer * visits * (1 if region.slots["store"] > 0.5 * region.bundles else steps)

    return runs


def rows(problem: Problem, topology: str) -> list[str]:
    T, F, D, E = problem.T, problem.F, problem.D, problem.E
    generation = schedule.parse_topology(topology)[0]
    rate, per_byte, cores = RATES[generation]
    tilings = {(kernel, megablox_tiling(kernel, problem, tiling)) for kernel in KERNELS for tiling in TILINGS}
    their_jobs = {key: megablox(key[0], problem, key[1], topology) for key in sorted(tilings)}
    ours, *theirs = schedule.measure_all([grouped(D, F, even(T, E)).job(topology), *their_jobs.values()])
    if isinstance(ours, schedule.ScheduleError):
        return [f"refused: {ours}"]
    by_name = {kernel.name: kernel for kernel in ours.kernels}
    lines = []
    for name, sizes in (("even", even(T, E)), (f"skewed, {max(skewed(T, E))} to {min(skewed(T, E))}", skewed(T, E))):
        for kernel in KERNELS:
            full_name = NAMES[kernel].format("grouped_matmul")
            mine = cycles(by_name[full_name], counts(problem, sizes, generation)[full_name])
            best = None
            for (other, tiling), report in zip(their_jobs, theirs, strict=True):
                if other != kernel or isinstance(report, schedule.ScheduleError):
                    continue
                (found,) = report.kernels
                taken = cycles(found, megablox_runs(kernel, problem, tiling, sizes, found.regions))
                best = min(best or (taken, tiling), (taken, tiling))
            bound = T * F * D / rate / cores
            least = 2 * (T * D + T * F + E * D * F) * per_byte / rate / cores / bound
            copied = blocks.hbm_bytes(kernel, problem, blocks.choose(kernel, problem, CHIPS[generation]))
            line = f"{name} | {kernel} | {mine / 1e6:.3f} M | {bound / mine:.0%} | "
            line += "refused | | " if best is None else f"{best[0] / 1e6:.3f} M, {best[1]} | {mine / best[0]:.2f} | "
            lines.append(line + f"{least:.2f} | {copied * per_byte / rate / cores / bound:.2f}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", default="v5e:1x1,v6e:1x1,7x:1x1")
    parser.add_argument("--shapes", default="8192x4096x14336x8,32768x2048x768x128", help="T x D x F x E")
    flags = parser.parse_args()
    columns = "TPU | T x D x F x E | sizes | kernel | ours, cycles | of bound | megablox, cycles, tiling | ours / it"
    print(f"| {columns} | HBM / bound | copied / bound |\n|{'---|' * 10}")
    for topology in flags.topologies.split(","):
        for shape in flags.shapes.split(","):
            T, D, F, E = (int(size) for size in shape.split("x"))
            for line in rows(Problem(T, F, D, E, 2), topology):
                print(f"| {topology} | {shape} | {line} |", flush=True)


if __name__ == "__main__":
    main()
