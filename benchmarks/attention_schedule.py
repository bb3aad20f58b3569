"""Predicted cycles of attention kernels on TPUs, side by side, from the TPU compiler; needs libtpu, not a TPU.

    python benchmarks/attention_schedule.py --what=block
    python benchmarks/attention_schedule.py --what=op --topologies=v5e:1x1,v6e:1x1 --seq_lens=1024,2048 --head_dims=128

block: bundles of one 1024 x 1024 block, full mask, bf16, head dim 128: of the whole program, which begins and ends an
output block too, and of its busiest region, beside what the matrix unit alone needs there. op: one whole causal op, 32
query and 8 key heads, forward with lse and backward: regions times how often each runs, the best of a few block sizes.
`HBM moved` is what XLA's cost analysis counts for the training program.
Results are kept in ~/.cache/tpu_train/schedule by kernel, shape, topology and versions.
"""

import argparse
import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pallas_kernels import schedule

CACHE = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "tpu_train" / "schedule"


@dataclass(frozen=True)
class Shape:
    """Queries and keys of one sequence; bf16."""

    seq_len: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    causal: bool

    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        dims = [(heads, self.seq_len, self.head_dim) for heads in (self.num_heads, *[self.num_kv_heads] * 2)]
        return tuple(jax.ShapeDtypeStruct(dim, jnp.bfloat16) for dim in dims)


def splash_jobs(shape: Shape, topology: str, block_q: int, block_kv: int) -> tuple[schedule.Job, schedule.Job]:
    """JAX's splash attention: forward alone, and forward with lse and backward (one kernel for dq, dk and dv)."""
    one_mask = (masks.CausalMask if shape.causal else masks.FullMask)((shape.seq_len, shape.seq_len))
    blocks = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        use_fused_bwd_kernel=True,
    )
    mask = masks.MultiHeadMask([one_mask] * shape.num_heads)
    attend = splash.make_splash_mha(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1)

    def train(q_NTH, k_KSH, v_KSH):
        return jax.vjp(attend, q_NTH, k_KSH, v_KSH)[1](q_NTH)

    rows, columns = shape.seq_len // block_q, shape.seq_len // block_kv
    last_row = [(j * block_kv) // block_q for j in range(columns)]  # the first block of queries that sees key block j
    active = sum(rows - row for row in last_row) if shape.causal else rows * columns
    by_q = functools.partial(splash_counts, shape.num_heads * active, shape.num_heads * rows)
    by_kv = functools.partial(splash_counts, shape.num_heads * active, shape.num_heads * columns)
    return (
        schedule.Job(attend, shape.arrays(), topology, {"splash_mha_fwd_no_residuals": by_q}),
        schedule.Job(
            train, shape.arrays(), topology, {"splash_mha_fwd_residuals": by_q, "splash_mha_dkv_no_residuals": by_kv}
        ),
    )


def splash_counts(active: int, outer: int, region: schedule.Region) -> float | None:
    """What multiplies runs for each active block; what is skipped otherwise begins or ends an output block."""
    if region.matmuls:
        return active
    return outer if region.name.count("when") > 1 else None


# Name: jobs (forward, training step) of a shape for a topology and block sizes. `tpu-train kernels` measures ours.
KERNELS: dict[str, Callable[[Shape, str, int, int], tuple[schedule.Job, schedule.Job]]] = {"JAX splash": splash_jobs}


def measure(kernel: str, shape: Shape, topology: str, blocks: tuple[int, int]) -> list[dict[str, Any]]:
    """Reports of the forward and of the training step, or {"error"} in their place."""
    versions = {name: metadata.version(name) for name in ("jax", "libtpu")}
    key = json.dumps([kernel, asdict(shape), topology, blocks, versions, _reader()])
    file = CACHE / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if not file.exists():
        results = schedule.measure_all(list(KERNELS[kernel](shape, topology, *blocks)))
        plain = [{"error": str(r)} if isinstance(r, schedule.ScheduleError) else r.as_dict() for r in results]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(plain))
    return json.loads(file.read_text())


@functools.cache
def _reader() -> str:
    """Changes with the code that reads schedules, here and in pallas_kernels."""
    files = [Path(__file__), *sorted(Path(schedule.__file__).parent.glob("schedule*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def compare_blocks(topologies: list[str]) -> None:
    print(
        "| kernel | TPU | pass | bundles | busiest region | MXU alone | spills of stores | of loads |\n|" + "---|" * 8
    )
    shape = Shape(1024, 128, 1, 1, causal=False)
    for name in KERNELS:
        for topology in topologies:
            for report in measure(name, shape, topology, (1024, 1024)):
                if "error" in report:
                    print(f"| {name} | {topology} | refused: {report['error']} |")
                for kernel in report.get("kernels", []):
                    region = max(kernel["regions"], key=lambda region: region["cycles"])
                    whole = sum(region["bundles"] for region in kernel["regions"])
                    spills = [region[f"spill_{what}s"] / max(region["slots"][what], 1) for what in ("store", "load")]
                    row = [name, topology, kernel["name"]]
                    row += [f"{n:,}" for n in (whole, region["bundles"], region["mxu_cycles"])]
                    print("|", " | ".join([*row, *(f"{share:.0%}" for share in spills)]), "|", flush=True)


def compare_ops(topologies: list[str], seq_lens: list[int], head_dims: list[int]) -> None:
    print("| kernel | TPU | S | H | blocks | forward + lse | backward | both | HBM moved |\n|" + "---|" * 9)
    for name in KERNELS:
        for topology in topologies:
            for S in seq_lens:
                for H in head_dims:
                    print(f"| {name} | {topology} | {S} | {H} | {best_op(name, topology, S, H)} |", flush=True)


def best_op(name: str, topology: str, S: int, H: int) -> str:
    candidates = [(512, 512), (1024, 512), (1024, 1024)]
    reports = {
        blocks: measure(name, Shape(S, H, 32, 8, causal=True), topology, blocks)[1]
        for blocks in candidates
        if max(blocks) <= S
    }
    done = {blocks: report for blocks, report in reports.items() if "error" not in report}
    if not done:
        return f"refused: {next(iter(reports.values()))['error']} | | | |"
    blocks = min(done, key=lambda blocks: done[blocks]["cycles"])
    forward, backward = (kernel["cycles"] for kernel in done[blocks]["kernels"])
    moved = done[blocks]["bytes_accessed"] / 2**20
    return (
        f"{blocks[0]} x {blocks[1]} | {forward:,.0f} | {backward:,.0f} | {forward + backward:,.0f} | {moved:,.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("block", "op"), default="block")
    parser.add_argument("--topologies", default="v5e:1x1,v5p:1x1,v6e:1x1,7x:1x1")
    parser.add_argument("--seq_lens", default="1024,2048,8192")
    parser.add_argument("--head_dims", default="64,128,256")
    flags = parser.parse_args()
    topologies = flags.topologies.split(",")
    if flags.what == "block":
        compare_blocks(topologies)
    else:
        compare_ops(topologies, *([int(n) for n in text.split(",")] for text in (flags.seq_lens, flags.head_dims)))


if __name__ == "__main__":
    main()
