"""Predicted cycles of linear cross entropy on TPUs, ours beside XLA's, from the TPU compiler; needs libtpu, not a TPU.

    python benchmarks/loss_schedule.py
    python benchmarks/loss_schedule.py --topologies=v6e:1x1 --tokens=8192 --model_dim=2048 --vocab_size=32000

A training step's forward and backward of bf16 hidden states and a float32 head. Ours are schedules: the cycles that the
program and the matrix units of one core need if no copy is waited for, and XLA's estimate for what stands around the
kernels. XLA's are its own estimates for implementation="xla": `whole` with the logits of all tokens at once in HBM,
`chunked` as it is by default. `bound` is what four products take at the device's bf16 peak; `HBM` the bytes that our
kernels' copies move and, in brackets, what the device could move in that time; `temporaries` what a program keeps in
HBM beside its arguments and results.
"""

import argparse
import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from pallas_kernels import linear_cross_entropy, schedule
from pallas_kernels.cases import Case
from pallas_kernels.cross_entropy import blocks, cases, xla
from pallas_kernels.runtime import CHIPS

HBM_BYTES_A_CYCLE = {"v4": 1170, "v5e": 546, "v5p": 1580, "v6e": 937, "tpu7x": 1676}  # of a device; published figures
AGAINST = {"whole": 2**40, "chunked": xla.LOGIT_BYTES}  # bytes of logits at once


def moved_bytes(sizes: blocks.BlockSizes, T: int, D: int, V: int, cores: int) -> int:
    """What the copies of both kernels move: x once a block of the head, the head once a block of tokens, and back."""
    forward, backward = sizes.forward, sizes.backward
    vocab_blocks = -(-V // backward.vocab)
    read_forward = 2 * T * D + 4 * V * D * -(-T // forward.tokens)
    head = (4 + 4) * V * D
    dx = 4 * T * D * (2 * vocab_blocks - cores) if backward.tokens < T else 4 * T * D * cores
    return read_forward + head + 2 * T * D * vocab_blocks + dx


def xla_job(case: Case, topology: str, logit_bytes: int) -> schedule.Job:
    def step(x_TD, w_VD, labels_T):
        kept, xla.LOGIT_BYTES = xla.LOGIT_BYTES, logit_bytes
        (loss_T, lse_T), vjp = jax.vjp(lambda x, w: linear_cross_entropy(x, w, labels_T), x_TD, w_VD)
        results = loss_T, vjp((loss_T, lse_T))
        xla.LOGIT_BYTES = kept
        return results

    return schedule.Job(step, case.args, topology)


def with_estimate(result: schedule.Report | schedule.ScheduleError) -> schedule.Report | schedule.ScheduleError:
    """An error in place of a report without XLA's estimate."""
    if isinstance(result, schedule.Report) and result.xla_cycles is None:
        return schedule.ScheduleError("libtpu's module can't be printed")
    return result


def row(case: Case, topology: str, against: list[str], T: int, D: int, V: int) -> str:
    generation, _ = schedule.parse_topology(topology)
    jobs = [case.job(topology), *(xla_job(case, topology, AGAINST[name]) for name in against)]
    ours, *theirs = map(with_estimate, schedule.measure_all(jobs))
    if isinstance(ours, schedule.ScheduleError):
        return f"| {generation} | refused: {ours} |"
    chip = CHIPS[generation]
    bound = 4 * 2 * T * D * V / (chip.cores * ours.core.peak_bf16_flops)
    forward, backward = (
        sum(kernel.cycles for kernel in ours.kernels if f"entropy_{what}" in kernel.name)
        for what in ("forward", "backward")
    )
    total = ours.cycles + ours.xla_cycles
    cells = [generation, *(f"{n / 1e6:.1f}" for n in (forward, backward, ours.xla_cycles, bound))]
    cells.append(f"{total / bound:.3f}")
    sizes = blocks.choose(blocks.Shape(T, D, V, 2, 4), chip)
    moved, could = moved_bytes(sizes, T, D, V, chip.cores), total * HBM_BYTES_A_CYCLE[generation]
    cells += [f"{moved / 1e9:.0f} ({could / 1e9:.0f})", f"{ours.temporary_bytes / 1e9:.2f}"]
    for report in theirs:
        if isinstance(report, schedule.ScheduleError):
            cells += [str(report), "", ""]
        else:
            cells += [f"{report.xla_cycles / 1e6:.1f}", f"{total / report.xla_cycles:.2f}"]
            cells.append(f"{report.temporary_bytes / 1e9:.2f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", default="v5e:1x1,v5p:1x1,v6e:1x1,7x:1x1")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--model_dim", type=int, default=4096)
    parser.add_argument("--vocab_size", type=int, default=128256)
    parser.add_argument("--against", default=",".join(AGAINST), help="chunked takes minutes to compile")
    flags = parser.parse_args()
    T, D, V = flags.tokens, flags.model_dim, flags.vocab_size
    case, against = cases.train(T, D, V), flags.against.split(",")
    print("M cycles; GB")
    print("| chip | forward | backward | around | bound | ours / bound | HBM | temporaries ", end="")
    print("".join(f"| XLA {name} | ours / it | its temporaries " for name in against), end="|\n")
    print("|" + "---|" * (8 + 3 * len(against)))
    for topology in flags.topologies.split(","):
        print(row(case, topology, against, T, D, V), flush=True)


if __name__ == "__main__":
    main()
