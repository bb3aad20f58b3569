"""Predicted cycles of products of eight bits beside XLA's own programs, on absent TPUs; needs libtpu, not a TPU.

    python benchmarks/quantized_schedule.py
    python benchmarks/quantized_schedule.py --what=held --topologies=v6e:1x1 --rows=1,64

held: T rows of bf16 times weights held in int8, one scale a column or one for each 128 of the contraction, and by XLA
the same and with the weights in bf16. `bytes` are what a call has to move; `HBM` the cycles that takes at the chip's
rate, `schedule` those of our kernel's program, with no copy waited for: the call takes the larger. XLA's cycles are its
own estimate; it holds nothing for a copy into VMEM ahead of the product, so take weights that don't fit there.
trained: forward and backward from bf16, everything int8 (or float8 where the chip takes it). `products` are our three
kernels' schedules, `quantising` XLA's estimate for what is around them; beside XLA's int8 and bf16 programs.
"""

import argparse
import functools
import json
import os
import subprocess
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from pallas_kernels import hlo_cost, schedule
from pallas_kernels.matmul.blocks import RATES
from pallas_kernels.quantized_matmul import Quantized, dynamic_quantized_matmul, quantized_matmul
from pallas_kernels.quantized_matmul.cases import held, trained


def by_xla(what: str, dims: tuple[int, ...], topology: str) -> float | None:
    """Cycles of XLA's program, from a process of its own; None: not known."""
    settings = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    settings |= {"TPU_ACCELERATOR_TYPE": "v5litepod-1", "XLA_FLAGS": ""}
    child = [sys.executable, __file__, "--child", what, "x".join(map(str, dims)), topology]
    done = subprocess.run(child, env=os.environ | settings, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compile_by_xla(what: str, text: str, topology: str) -> float | None:
    T, D, F = (int(size) for size in text.split("x"))
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    there = jax.sharding.SingleDeviceSharding(device)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=there)

    def plain(x, w):
        return jnp.einsum("TD,DF->TF", x, w, preferred_element_type=jnp.float32).astype(x.dtype)

    def from_held(x, values, scales, block=None):
        return quantized_matmul(x, Quantized(values, scales, 0, block))

    def train(op, x, w, dy):
        y, vjp = jax.vjp(op, x, w)
        return y, vjp(dy)

    x, w, y = array(T, D), array(D, F), array(T, F)
    values, scales = array(D, F, dtype=jnp.int8), functools.partial(array, dtype=jnp.float32)
    fn, args = {
        "bf16": (plain, (x, w)),
        "int8": (from_held, (x, values, scales(1, F))),
        "int8-128": (functools.partial(from_held, block=128), (x, values, scales(-(-D // 128), F))),
        "train-bf16": (functools.partial(train, plain), (x, w, y)),
        "train-int8": (functools.partial(train, dynamic_quantized_matmul), (x, w, y)),
        "train-float8": (
            functools.partial(train, functools.partial(dynamic_quantized_matmul, values="float8")),
            (x, w, y),
        ),
    }[what]
    compiled = jax.jit(fn).lower(*args).compile()
    try:
        return hlo_cost.parse(compiled.as_text()).total_cycles
    except jax.errors.JaxRuntimeError:  # libtpu 0.0.52 can't print some of its programs for 7x
        return None


def said(cycles: float | None) -> str:
    return "not printed" if cycles is None else f"{cycles / 1e3:,.0f} k"


def held_rows(topology: str, rows: list[int], D: int, F: int) -> None:
    generation, name = schedule.parse_topology(topology)
    rate, per_byte, cores = RATES[generation]
    for T in rows:
        blocks = {"int8": None, "int8-128": 128}
        reports = schedule.measure_all([held(T, D, F, block).job(topology) for block in blocks.values()])
        wide = (2 * (T * D + D * F + T * F)) * per_byte / rate / cores
        print(
            f"| {topology} | {T} | bf16 | {2 * D * F / 1e6:,.0f} MB | {said(wide)} | "
            f"| {said(by_xla('bf16', (T, D, F), name))} |"
        )
        for (what, block), report in zip(blocks.items(), reports, strict=True):
            moved = D * F + 4 * F * (1 if block is None else -(-D // block)) + 2 * T * (D + F)
            ours = str(report) if isinstance(report, schedule.ScheduleError) else said(report.cycles)
            theirs = said(by_xla(what, (T, D, F), name))
            waits = said(moved * per_byte / rate / cores)
            print(f"| {topology} | {T} | {what} | {moved / 1e6:,.0f} MB | {waits} | {ours} | {theirs} |", flush=True)


def trained_row(topology: str, values: str, T: int, D: int, F: int) -> None:
    generation, name = schedule.parse_topology(topology)
    rate, _, cores = RATES[generation]
    (report,) = schedule.measure_all([trained(T, D, F, values).job(topology)])
    ours = f"{report} | | "
    if not isinstance(report, schedule.ScheduleError):
        whole = None if report.xla_cycles is None else report.cycles + report.xla_cycles
        ours = f"{said(report.cycles)} | {said(report.xla_cycles)} | {said(whole)}"
    theirs = [said(by_xla(what, (T, D, F), name)) for what in (f"train-{values}", "train-bf16")]
    bound = 3 * T * D * F / rate / cores
    print(f"| {topology} | {values} | {said(bound)} | {ours} | {' | '.join(theirs)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", default="v5e:1x1,v5p:1x1x1,v6e:1x1,7x:1x1")
    parser.add_argument("--what", default="held,trained")
    parser.add_argument("--rows", default="1,16,64", help="T of held")
    parser.add_argument("--held", default="8192x28672", help="D x F")
    parser.add_argument("--trained", default="4096x4096x14336", help="T x D x F")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(compile_by_xla(*flags.child)))
        return
    if "held" in flags.what.split(","):
        print("| TPU | T | weights | bytes | HBM, cycles | schedule | XLA's estimate |\n|" + "---|" * 7)
        for topology in flags.topologies.split(","):
            held_rows(topology, [int(T) for T in flags.rows.split(",")], *(int(n) for n in flags.held.split("x")))
    if "trained" in flags.what.split(","):
        print(
            "| TPU | values | bf16 bound | products | quantising | both | XLA, the same | XLA, bf16 |\n|" + "---|" * 8
        )
        for topology in flags.topologies.split(","):
            dims = [int(n) for n in flags.trained.split("x")]
            trained_row(topology, "float8" if "7x" in topology else "int8", *dims)


if __name__ == "__main__":
    main()
