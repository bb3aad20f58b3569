"""Predicted cycles of linear cross entropy on TPUs, ours beside XLA's, from the TPU compiler; needs libtpu, not a TPU.

    python benchmarks/loss_schedule.py
    python benchmarks/loss_schedule.py --topologies=v6e:1x1 --tokens=8192 --model_dim=2048 --vocab_size=32000

A training step's forward and backward of bf16 hidden states and a float32 head. Ours are read from the kernels'
schedules: the cycles that one core's program and matrix units need if no copy is waited for. `bound` is what four
products (logits twice, both gradients) take at the device's bf16 peak, `HBM` the bytes that the kernels' copies move,
beside what the device's HBM could move in those cycles, `temporaries` what the program keeps in HBM beside its
arguments and results.
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from pallas_kernels import schedule
from pallas_kernels.cross_entropy import blocks, cases
from pallas_kernels.runtime import CHIPS

HBM_BYTES_A_CYCLE = {"v4": 1170, "v5e": 546, "v5p": 1580, "v6e": 937, "tpu7x": 1676}  # of a device; published figures


def moved_bytes(sizes: blocks.BlockSizes, T: int, D: int, V: int, cores: int) -> int:
    """What the copies of both kernels move: x once a block of the head, the head once a block of tokens, and back."""
    forward, backward = sizes.forward, sizes.backward
    vocab_blocks = -(-V // backward.vocab)
    read_forward = 2 * T * D + 4 * V * D * -(-T // forward.tokens)
    head = (4 + 4) * V * D
    dx = 4 * T * D * (2 * vocab_blocks - cores) if backward.tokens < T else 4 * T * D * cores
    return read_forward + head + 2 * T * D * vocab_blocks + dx


def temporary_bytes(report: schedule.Report, job: schedule.Job) -> int:
    results = jax.eval_shape(job.fn, *job.args)
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((job.args, results)))
    return report.hbm_bytes - held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", default="v5e:1x1,v5p:1x1,v6e:1x1,7x:1x1")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--model_dim", type=int, default=4096)
    parser.add_argument("--vocab_size", type=int, default=128256)
    flags = parser.parse_args()
    T, D, V = flags.tokens, flags.model_dim, flags.vocab_size
    case = cases.train(T, D, V)
    print("| chip | forward | backward | both | bound | both / bound | HBM, GB (could) | temporaries, GB |")
    print("|" + "---|" * 8)
    for topology in flags.topologies.split(","):
        job = case.job(topology)
        (report,) = schedule.measure_all([job])
        generation, _ = schedule.parse_topology(topology)
        if isinstance(report, schedule.ScheduleError):
            print(f"| {generation} | refused: {report} |")
            continue
        chip = CHIPS[generation]
        sizes = blocks.choose(blocks.Shape(T, D, V, 2, 4), chip)
        forward, backward = (kernel.cycles for kernel in report.kernels)
        bound = 4 * 2 * T * D * V / (chip.cores * report.core.peak_bf16_flops)
        both = forward + backward
        row = [generation, *(f"{n / 1e6:.1f} M" for n in (forward, backward, both, bound)), f"{both / bound:.3f}"]
        moved, could = moved_bytes(sizes, T, D, V, chip.cores), both * HBM_BYTES_A_CYCLE[generation]
        row += [f"{moved / 1e9:.1f} ({could / 1e9:.0f})", f"{temporary_bytes(report, job) / 1e9:.3f}"]
        print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
