"""Predicted cycles of the matmul kernels beside XLA's own program, on absent TPUs; needs libtpu, not a TPU.

    python benchmarks/matmul_schedule.py
    python benchmarks/matmul_schedule.py --topologies=v6e:1x1 --what=gated

Forward and backward, bf16: gated is act(x w_gate) * (x w_up) with its factors kept, recomputed takes the products again
in the backward pass, plain is x w. Cycles of ours are schedules, without waits for HBM; XLA's are its own estimates for
its fusions and copies, so the two are not of one kind. Of v5p the chip's two cores share the work on both sides.
`bound`: what the matrix units need. `bytes`: each operand and result of a kernel or fusion once, which is how XLA
counts; `copied`: what our blocks copy from and to HBM, and the share of the schedule's time that this takes.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.experimental import topologies

from pallas_kernels import fused_matmul, gated_mlp, hlo_cost, schedule
from pallas_kernels.cases import Case
from pallas_kernels.fused_matmul.cases import plain
from pallas_kernels.gated_mlp.cases import gated
from pallas_kernels.matmul import blocks
from pallas_kernels.matmul.blocks import KERNELS, RATES, Problem
from pallas_kernels.runtime import CHIPS

OPS: dict[str, tuple[Callable[..., Case], Callable[..., Any], int]] = {  # ours, XLA's, products
    "gated": (gated, gated_mlp, 2),
    "recomputed": (functools.partial(gated, recompute=True), gated_mlp, 2),
    "plain": (plain, fused_matmul, 1),
}


def by_xla(what: str, text: str, topology: str) -> dict[str, float | None]:
    """{"cycles", "bytes"} of the same forward and backward pass by XLA, from a process of its own; None: not known."""
    settings = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    settings |= {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "XLA_FLAGS": ""}
    child = [sys.executable, __file__, "--child", what, text, topology]
    done = subprocess.run(child, env=os.environ | settings, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compile_by_xla(what: str, text: str, topology: str) -> dict[str, float | None]:
    make, op, _ = OPS[what]
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    there = jax.sharding.SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in make(*dims(text)).args]

    def train(*arrays):
        y, vjp = jax.vjp(functools.partial(op, implementation="xla"), *arrays[:-1])
        return y, vjp(arrays[-1])

    compiled = jax.jit(train).lower(*args).compile()
    try:
        cycles = hlo_cost.parse(compiled.as_text()).total_cycles
    except jax.errors.JaxRuntimeError:  # libtpu 0.0.52 can't print its own program for 7x
        cycles = None
    return {"cycles": cycles, "bytes": compiled.cost_analysis()["bytes accessed"]}


def dims(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def row(what: str, text: str, topology: str) -> str:
    make, _, products = OPS[what]
    T, D, F = dims(text)
    case = make(T, D, F)
    ours = schedule.measure_all([case.job(topology)])[0]
    if isinstance(ours, schedule.ScheduleError):
        return f"refused: {ours}"
    xla = by_xla(what, text, schedule.parse_topology(topology)[1])
    generation = schedule.parse_topology(topology)[0]
    rate, per_byte, cores = RATES[generation]
    problem = Problem(T, F, D, products, 2, 2, factors=products == 2)
    kernels = [*KERNELS, *["forward"] * (what == "recomputed")]
    chosen = {kernel: blocks.choose(kernel, problem, CHIPS[generation]) for kernel in KERNELS}
    copied = sum(blocks.hbm_bytes(kernel, problem, chosen[kernel]) for kernel in kernels)
    counted = counted_bytes(problem, what == "recomputed")
    bound = (case.flops or 0) / (2 * rate * cores)
    mine = f"{ours.cycles / 1e6:.2f} M | {ours.cycles / bound:.2f}"
    theirs = "not printed | "
    if xla["cycles"]:
        theirs = f"{xla['cycles'] / 1e6:.2f} M | {ours.cycles / xla['cycles']:.2f}"
    moved = f"{counted / 1e9:.2f} of {xla['bytes'] / 1e9:.2f} GB | {counted / xla['bytes']:.2f}"
    share = copied * per_byte / rate / cores / ours.cycles
    return f"{mine} | {theirs} | {moved} | {copied / 1e9:.2f} GB, {share:.0%}"


def counted_bytes(problem: Problem, recompute: bool) -> int:
    """Each operand and result of our kernels once; bf16."""
    x, w, y = problem.T * problem.D, problem.products * problem.D * problem.F, problem.T * problem.F
    factors = problem.products * y * problem.factors
    forward = x + w + y + factors * (not recompute) + (x + w + factors) * recompute
    return 2 * (forward + 2 * (y + factors + w + x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", default="v5e:1x1,v5p:1x1x1,v6e:1x1,7x:1x1")
    parser.add_argument("--what", default="gated,plain", help=f"some of {', '.join(OPS)}")
    parser.add_argument("--gated", default="4096x4096x14336", help="T x D x F")
    parser.add_argument("--plain", default="8192x8192x8192", help="T x D x F")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(compile_by_xla(*flags.child)))
        return
    columns = "op | T x D x F | TPU | ours, cycles | ours / bound | XLA's estimate | ours / XLA | bytes, ours of XLA's"
    print(f"| {columns} | ours / XLA | copied by ours |\n|{'---|' * 10}")
    for what in flags.what.split(","):
        text = flags.plain if what == "plain" else flags.gated
        for topology in flags.topologies.split(","):
            print(f"| {what} | {text} | {topology} | {row(what, text, topology)} |", flush=True)


if __name__ == "__main__":
    main()
