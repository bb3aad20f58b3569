"""Predicted cycles of attention kernels on TPUs, side by side, from the TPU compiler; needs libtpu, not a TPU.

    python benchmarks/attention_schedule.py --what=block
    python benchmarks/attention_schedule.py --what=op --topologies=v5e:1x1,v6e:1x1 --seq_lens=1024,2048 --head_dims=128
    python benchmarks/attention_schedule.py --what=op --peers=splash,tokamax  # with Tokamax installed

block: bundles of one 1024 x 1024 block, full mask, bf16, head dim 128: of the whole program, which begins and ends an
output block too, and of its busiest region, beside what the matrix unit alone needs there. op: one whole causal op, 32
query and 8 key heads, forward with lse and backward: regions times how often each runs. Ours chooses its block sizes;
of each peer it is the best of `--blocks`, in its default layout, with one chunk of keys a block.
`HBM moved` is what XLA's cost analysis counts for the training program.
Results are kept in ~/.cache/tpu_train/schedule by kernel, shape, topology and versions.
"""

import argparse
import functools
import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pallas_kernels import flash_attention, schedule
from pallas_kernels.attention import cases

CACHE = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "tpu_train" / "schedule"


@dataclass(frozen=True)
class Shape:
    """Queries and keys of one sequence, in bf16."""

    seq_len: int
    head_dim: int
    num_heads: int
    num_kv_heads: int
    causal: bool

    def arrays(self, heads_first: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k and v: [N, S, H] or [1, S, N, H]."""
        T, H = self.seq_len, self.head_dim
        dims = [(n, T, H) if heads_first else (1, T, n, H) for n in (self.num_heads, *[self.num_kv_heads] * 2)]
        return tuple(jax.ShapeDtypeStruct(dim, jnp.bfloat16) for dim in dims)


def our_job(shape: Shape, topology: str, blocks: None) -> schedule.Job:
    """Forward with lse, and backward; the block sizes are chosen."""
    if shape.causal:
        return cases.causal(shape.seq_len, shape.head_dim, shape.num_heads, shape.num_kv_heads).job(topology)
    attend = functools.partial(flash_attention, causal=False, implementation="pallas")

    def train(q_BTNH, k_BSKH, v_BSKH):
        return jax.vjp(attend, q_BTNH, k_BSKH, v_BSKH)[1](q_BTNH)

    return schedule.Job(train, shape.arrays(heads_first=False), topology)


def splash_job(shape: Shape, topology: str, blocks: tuple[int, int]) -> schedule.Job:
    """JAX's splash attention: forward with lse, and backward (one kernel for dq, dk and dv)."""
    block_q, block_kv = blocks
    one_mask = (masks.CausalMask if shape.causal else masks.FullMask)((shape.seq_len, shape.seq_len))
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        use_fused_bwd_kernel=True,
    )
    mask = masks.MultiHeadMask([one_mask] * shape.num_heads)
    attend = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    def train(q_NTH, k_KSH, v_KSH):
        return jax.vjp(attend, q_NTH, k_KSH, v_KSH)[1](q_NTH)

    rows, columns = shape.seq_len // block_q, shape.seq_len // block_kv
    last_row = [(j * block_kv) // block_q for j in range(columns)]  # the first block of queries that sees key block j
    active = sum(rows - row for row in last_row) if shape.causal else rows * columns
    by_q = functools.partial(splash_counts, shape.num_heads * active, shape.num_heads * rows)
    by_kv = functools.partial(splash_counts, shape.num_heads * active, shape.num_heads * columns)
    counts = {"splash_mha_fwd_residuals": by_q, "splash_mha_dkv_no_residuals": by_kv}
    return schedule.Job(train, shape.arrays(heads_first=True), topology, counts)


def splash_counts(active: int, outer: int, region: schedule.Region) -> float | None:
    """What multiplies runs for each active block; what is skipped otherwise begins or ends an output block."""
    if region.matmuls:
        return active
    return outer if region.name.count("when") > 1 else None


def tokamax_job(shape: Shape, topology: str, blocks: tuple[int, int]) -> schedule.Job:
    """Tokamax's splash attention: forward with lse, and backward (one kernel for dk, dv and parts of dq)."""
    theirs, masks = (importlib.import_module(f"{TOKAMAX}.splash_attention_{name}") for name in ("kernel", "mask"))
    block_q, block_kv = blocks
    sizes = {"block_q": block_q, "block_kv": block_kv, "block_kv_compute": block_kv}
    sizes |= {"block_q_dkv": block_q, "block_kv_dkv": block_kv, "block_kv_dkv_compute": block_kv}
    mask = (masks.CausalMask if shape.causal else masks.FullMask)((shape.seq_len, shape.seq_len))
    attend = theirs.make_splash_mha(mask, config=theirs.SplashConfig(**sizes), q_seq_shards=1)

    def train(q_NTH, k_KSH, v_KSH):
        return jax.vjp(attend, q_NTH, k_KSH, v_KSH)[1](q_NTH)

    rows, columns = shape.seq_len // block_q, shape.seq_len // block_kv
    whole = masked = 0
    for i, j in itertools.product(range(rows), range(columns)):
        first_key, last_key = j * block_kv, (j + 1) * block_kv - 1
        if not shape.causal or last_key <= i * block_q:
            whole += 1
        elif first_key <= (i + 1) * block_q - 1:
            masked += 1
    # The forward grid holds the blocks that the mask leaves, the backward one all.
    forward = {"grid": whole + masked, "when2": whole, "when3": masked, "": rows}
    backward = {"grid": rows * columns, "when2": whole, "when3": masked, "": columns}
    counts = {
        name: functools.partial(tokamax_counts, {part: shape.num_heads * count for part, count in each.items()})
        for name, each in (("splash_mha_fwd_residuals", forward), ("splash_mha_dkv_no_residuals", backward))
    }
    return schedule.Job(train, shape.arrays(heads_first=True), topology, counts)


def tokamax_counts(counts: dict[str, int], region: schedule.Region) -> float | None:
    """Of bodies that multiply the first is for whole blocks; what else is skipped begins or ends an output block."""
    end = region.name.split("/")[-1]
    if region.matmuls:
        return counts.get(end)
    if region.name.count("when") > 1:
        return counts[""]
    return counts["grid"] if "grid" in region.name or "loop" in region.name else None


TOKAMAX = "tokamax._src.ops.experimental.tpu.splash_attention"  # it is public nowhere else
# Name: the training program of a shape for a topology, at block sizes that are chosen here or (None) by the kernel.
KERNELS: dict[str, Callable[[Shape, str, Any], schedule.Job]] = {
    "ours": our_job,
    "JAX splash": splash_job,
    "Tokamax": tokamax_job,
}
PEERS = {"splash": "JAX splash", "tokamax": "Tokamax"}


def measure(kernel: str, shape: Shape, topology: str, blocks: tuple[int, int] | None) -> dict[str, Any]:
    """The report, as `Report.as_dict` has it, or {"error"}."""
    packages = ("jax", "libtpu", *["tokamax"] * (kernel == "Tokamax"))
    versions = {name: metadata.version(name) for name in packages}
    key = json.dumps([kernel, asdict(shape), topology, blocks, versions, _sources()])
    file = CACHE / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if not file.exists():
        try:
            (report,) = schedule.measure_all([KERNELS[kernel](shape, topology, blocks)])
        except schedule.ScheduleError as error:
            report = error
        plain = {"error": str(report)} if isinstance(report, schedule.ScheduleError) else report.as_dict()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(plain))
    return json.loads(file.read_text())


@functools.cache
def _sources() -> str:
    """Changes with the code that is measured and the code that reads schedules."""
    package = Path(schedule.__file__).parent
    files = [Path(__file__), package / "runtime.py", *package.glob("schedule*.py"), *package.glob("attention/*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


def compare_blocks(kernels: list[str], topologies: list[str]) -> None:
    print("| kernel | TPU | pass | bundles | busiest region | its cycles | MXU alone | spills of stores | of loads |")
    print("|" + "---|" * 9)
    shape = Shape(1024, 128, 1, 1, causal=False)
    for name in kernels:
        for topology in topologies:
            report = measure(name, shape, topology, None if name == "ours" else (1024, 1024))
            if "error" in report:
                print(f"| {name} | {topology} | refused: {report['error']} |")
            for kernel in report.get("kernels", []):
                region = max(kernel["regions"], key=lambda region: region["cycles"])
                whole = sum(region["bundles"] for region in kernel["regions"])
                spills = [region[f"spill_{what}s"] / max(region["slots"][what], 1) for what in ("store", "load")]
                row = [name, topology, kernel["name"]]
                row += [f"{n:,}" for n in (whole, region["bundles"], region["cycles"], region["mxu_cycles"])]
                print("|", " | ".join([*row, *(f"{share:.0%}" for share in spills)]), "|", flush=True)


def compare_ops(
    kernels: list[str],
    topologies: list[str],
    seq_lens: list[int],
    head_dims: list[int],
    candidates: list[tuple[int, int]],
) -> None:
    print("| TPU | S | H | kernel | blocks | forward + lse | backward | both | HBM moved | ours / this |")
    print("|" + "---|" * 10)
    for topology in topologies:
        for S in seq_lens:
            for H in head_dims:
                best = {
                    name: best_op(name, topology, S, H, [None] if name == "ours" else candidates) for name in kernels
                }
                ours = best["ours"][1].get("cycles")
                for name, (blocks, report) in best.items():
                    theirs = report.get("cycles")
                    ratio = f"{ours / theirs:.2f}" if ours and theirs else ""
                    print(f"| {topology} | {S} | {H} | {name} | {_op_row(blocks, report)} | {ratio} |", flush=True)


def best_op(name: str, topology: str, S: int, H: int, candidates: list[Any]) -> tuple[Any, dict[str, Any]]:
    """(blocks, report) of the fewest cycles."""
    reports = [
        (blocks, measure(name, Shape(S, H, 32, 8, causal=True), topology, blocks))
        for blocks in candidates
        if blocks is None or max(blocks) <= S
    ]
    return min(reports, key=lambda pair: pair[1].get("cycles", float("inf")))


def _op_row(blocks: tuple[int, int] | None, report: dict[str, Any]) -> str:
    if "error" in report:
        return f"refused: {report['error']} | | | | "
    sizes = f"{blocks[0]} x {blocks[1]}" if blocks else "chosen"
    cycles = [*(kernel["cycles"] for kernel in report["kernels"]), report["cycles"]]
    moved = report["bytes_accessed"] / 2**20
    return " | ".join([sizes, *(f"{n:,.0f}" for n in cycles), f"{moved:,.0f} MiB"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("block", "op"), default="block")
    parser.add_argument("--topologies", default="v5e:1x1,v5p:1x1,v6e:1x1,7x:1x1")
    parser.add_argument("--seq_lens", default="1024,2048,8192")
    parser.add_argument("--head_dims", default="64,128,256")
    parser.add_argument("--blocks", default="512x512,1024x512,1024x1024", help="of the peers: queries x keys")
    parser.add_argument("--peers", default="splash", help=f"of {', '.join(PEERS)}; empty for none")
    flags = parser.parse_args()
    peers = [name for name in flags.peers.split(",") if name]
    if unknown := [name for name in peers if name not in PEERS]:
        parser.error(f"--peers: no {unknown[0]!r}; there are {', '.join(PEERS)}")
    if "tokamax" in peers and util.find_spec("tokamax") is None:
        parser.error("--peers=tokamax needs Tokamax: pip install tokamax")
    kernels = ["ours", *(PEERS[name] for name in peers)]
    topologies = flags.topologies.split(",")
    if flags.what == "block":
        compare_blocks(kernels, topologies)
        return
    seq_lens, head_dims = ([int(n) for n in text.split(",")] for text in (flags.seq_lens, flags.head_dims))
    candidates = [(int(q), int(k)) for q, _, k in (text.partition("x") for text in flags.blocks.split(","))]
    compare_ops(kernels, topologies, seq_lens, head_dims, candidates)


if __name__ == "__main__":
    main()
