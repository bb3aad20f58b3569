"""Block sizes of the matmul kernels: per TPU generation, measured ones (tuned.json), else the fastest by a model of
cycles, within one of VMEM."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

from pallas_kernels import tuned
from pallas_kernels.runtime import CHIPS, Chip

OP = "matmul"  # in tuned.json
LANES = 128
KERNELS = ("forward", "dx", "dw")


@dataclasses.dataclass(frozen=True)
class Block:
    """What one grid step works on, in elements of each dim; all multiples of 128. A dim may end within a block."""

    T: int
    F: int
    D: int

    def __str__(self) -> str:
        return f"T={self.T}, F={self.F}, D={self.D}"


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Blocks of the kernels: the forward one contracts D, `dx` contracts F, `dw` contracts T. None: chosen."""

    forward: Block | None = None
    dx: Block | None = None
    dw: Block | None = None


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call, as far as blocks depend on it: dims, products, bytes an element of x and w, and of y."""

    T: int
    F: int
    D: int
    products: int
    itemsize: int
    y_itemsize: int
    factors: bool
    residual: bool = False


# Multiplications a core does in a cycle, and in the time that a byte takes from HBM; cores that share a grid. Source:
# jax.experimental.pallas.tpu.get_tpu_info_for_chip.
RATES = {
    "v4": (65536, 112, 2),
    "v5e": (65536, 120, 1),
    "v5p": (65536, 93, 2),
    "v6e": (262144, 280, 1),
    "tpu7x": (262144, 156, 1),
}
HBM_SHARE = 0.8  # of its rate that copies are taken to reach
SHARE = 0.85  # of VMEM that a kernel's blocks may fill
# Cycles that a body without a loop may keep the matrix units busy, by their size: what compiles in seconds.
UNROLLED = {128: 16384, 256: 8192}
TILES = (512, 256, 128)
FLOAT32_PASSES = 6  # of bf16 products, at the highest precision
# Cycles of the schedules that tpu-train kernels shows: the start and end of a body of 512 rows, by the size of the
# matrix unit (of fewer rows: more, since each weight then waits for its rows); a grid step; dz of 1,024 elements.
BODY, STEP, FORM = {128: 150, 256: 250}, 150, 0.5
# Cycles to begin and end 1,024 sums that take several steps, and to read and write them once more in a step.
ADDED, READ = {"forward": 2.4, "dx": 0.9, "dw": 0.9}, 0.1
_MOST = tuple(LANES << i for i in range(8))


def choose(kernel: str, problem: Problem, chip: Chip | None) -> Block:
    """The block of a kernel ("forward", "dx" or "dw") on `chip` (None, where kernels are interpreted: as on v5e)."""
    return measured(OP, kernel, problem, chip, vmem_bytes) or _choose(kernel, problem, chip or CHIPS["v5e"])


def shape_key(kernel: str, problem: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """(exact, near) of an entry of tuned.json, for a kernel of this problem or a grouped one."""
    values = dataclasses.asdict(problem)
    near: dict[str, int] = {str(name): values.pop(name) for name in "TFDE" if name in values}
    return {"kernel": kernel, **values}, near


def measured(op: str, kernel: str, problem: Any, chip: Chip | None, needs: Callable[..., int]) -> Block | None:
    """The block that was measured for such a problem, fitted to its dims; None where there is none or it can't be."""
    exact, near = shape_key(kernel, problem)
    found = tuned.nearest(op, chip, exact, near)
    if found is None or chip is None:
        return None
    block = Block(**found.sizes)
    if found.near != near:
        block = Block(*(_block(near[dim], size) for dim, size in found.sizes.items()))
    bad = any(size < 1 or size % LANES for size in dataclasses.astuple(block))
    return None if bad or needs(kernel, problem, block, chip) > SHARE * chip.vmem_bytes else block


@functools.cache
def _choose(kernel: str, problem: Problem, chip: Chip) -> Block:
    sizes = [sorted({_block(length, most) for most in _MOST}) for length in (problem.T, problem.F, problem.D)]
    blocks = [Block(*each) for each in itertools.product(*sizes)]
    small = [b for b in blocks if _work(problem, b) <= unrolled(chip) * _bodies(kernel, problem, b, chip)]
    fitting = [b for b in small if vmem_bytes(kernel, problem, b, chip) <= SHARE * chip.vmem_bytes]
    return min(fitting or blocks[:1], key=lambda block: cost(kernel, problem, block, chip))


def _block(length: int, most: int) -> int:
    """A multiple of 128, or of 256 or 512 where it is long, up to `most`, that pads `length` least."""
    count = -(-length // most)
    unit = min(512, LANES << max(0, (length // count // LANES).bit_length() - 1))
    return min(-(-length // (count * unit)) * unit, max(most, LANES))


def tile(kernel: str, problem: Problem, block: Block, chip: Chip | None) -> int:
    """How much of the block one unrolled body takes, of its T or, for dw, of its D."""
    size, one_row = (block.D, block.F * block.T) if kernel == "dw" else (block.T, block.F * block.D)
    one_row *= passes(problem.itemsize) * problem.products
    fitting = [rows for rows in TILES if size % rows == 0]
    return next((rows for rows in fitting if rows * one_row <= unrolled(chip)), fitting[-1])


def unrolled(chip: Chip | None) -> int:
    """Multiplications that a body may hold."""
    chip = chip or CHIPS["v5e"]
    return UNROLLED[chip.mxu_size] * RATES[chip.name][0]


def passes(itemsize: int) -> int:
    """Of the matrix units, for a product."""
    return FLOAT32_PASSES if itemsize == 4 else 1


def _bodies(kernel: str, problem: Problem, block: Block, chip: Chip) -> int:
    """How often the unrolled body runs in a step."""
    return (block.D if kernel == "dw" else block.T) // tile(kernel, problem, block, chip)


def _work(problem: Problem, block: Block) -> int:
    """Multiplications of a step."""
    return passes(problem.itemsize) * problem.products * block.T * block.F * block.D


def vmem_bytes(kernel: str, problem: Problem, block: Block, chip: Chip | None) -> int:
    """What a kernel's blocks take: two buffers for what is copied, one for what is kept, and room for values."""
    T, F, D, products, item = block.T, block.F, block.D, problem.products, problem.itemsize
    rows = tile(kernel, problem, block, chip)
    if kernel == "forward":
        kept = products * T * F * 4 * (D < problem.D)
        values = 2 * products * rows * F * 4
    elif kernel == "dx":
        kept = products * T * F * item + T * padded(problem.D, D) * 4 * (F < problem.F)
        values = 2 * rows * D * 4
    else:
        kept = products * T * F * item + products * padded(problem.D, D) * F * 4 * (T < problem.T)
        values = 2 * products * rows * F * 4 + T * rows * item
    return 2 * sum(_copied(kernel, problem, block)) + kept + values


def _copied(kernel: str, problem: Problem, block: Block) -> tuple[int, int]:
    """Bytes of a step's blocks, in and out."""
    rows = block.T * block.D * problem.itemsize
    weights = problem.products * block.D * block.F * problem.itemsize
    y = block.T * block.F * problem.y_itemsize
    factors = problem.products * block.T * block.F * problem.itemsize * problem.factors
    if kernel == "forward":
        return rows + weights + y * problem.residual, y + factors
    return (y + factors + weights, rows) if kernel == "dx" else (y + factors + rows, weights)


def wide(size: int, chip: Chip) -> int:
    """The size in whole matrix units."""
    return padded(size, chip.mxu_size)


def padded(length: int, block: int) -> int:
    """The length in whole blocks."""
    return -(-length // block) * block


def hbm_bytes(kernel: str, problem: Problem, block: Block) -> int:
    """What a kernel copies between HBM and VMEM: a block that two steps in a row share is copied once."""
    T, F, D, products, item = problem.T, problem.F, problem.D, problem.products, problem.itemsize
    blocks = {dim: -(-getattr(problem, dim) // getattr(block, dim)) for dim in "TFD"}
    dy = T * F * (problem.y_itemsize + products * item * problem.factors)
    weights = products * D * F * item
    if kernel == "forward":
        x_reads = 1 if blocks["D"] == 1 else blocks["F"]
        w_reads = 1 if blocks["D"] * blocks["F"] == 1 else blocks["T"]
        residual = T * F * problem.y_itemsize * problem.residual
        return x_reads * T * D * item + w_reads * weights + dy + residual
    if kernel == "dx":
        return dy + (1 if blocks["F"] * blocks["D"] == 1 else blocks["T"]) * weights + T * D * item
    return dy + (1 if blocks["T"] * blocks["D"] == 1 else blocks["F"]) * T * D * item + weights


def cost(kernel: str, problem: Problem, block: Block, chip: Chip) -> float:
    """Predicted cycles: the schedule's or HBM's, whichever is more, and what no step hides of the copies."""
    rate, per_byte, cores = RATES[chip.name]
    blocks = {dim: -(-getattr(problem, dim) // getattr(block, dim)) for dim in "TFD"}
    steps = math.prod(blocks.values())
    contracted = {"forward": "D", "dx": "F", "dw": "T"}[kernel]
    filled = wide(block.F, chip) * (wide(block.T, chip) * block.D if kernel == "dw" else block.T * wide(block.D, chip))
    once = passes(problem.itemsize) * problem.products * filled / rate
    body = BODY[chip.mxu_size] * TILES[0] / tile(kernel, problem, block, chip)
    cycles = steps * (once + STEP + body * _bodies(kernel, problem, block, chip))
    formed = block.T * block.F * blocks["T"] * blocks["F"] * problem.products / 1024
    if kernel != "forward":
        cycles += FORM * formed
    if blocks[contracted] > 1:
        sums = {"forward": block.T * block.F, "dx": block.T * block.D / problem.products, "dw": block.D * block.F}
        ends = ADDED[kernel] / blocks[contracted] + READ
        cycles += steps * ends * sums[kernel] * problem.products / 1024
    copies = hbm_bytes(kernel, problem, block) * per_byte / rate / HBM_SHARE
    # Where the outer dims move on all of a step's blocks are new, with one step to hide them and, at first, none.
    arriving, leaving = (size * per_byte / rate for size in _copied(kernel, problem, block))
    moves = blocks["T"] if kernel == "forward" else blocks["T"] * blocks["F"]
    outer = blocks["F" if kernel == "dw" else "T"]
    idle = padded(outer, cores) / outer
    return idle * (max(cycles, copies) + moves * max(0.0, arriving - once)) + arriving + leaving


def vmem_limit(chip: Chip | None) -> int:
    """Bytes of VMEM to ask for: all but a little. XLA would put operands into the rest, for the core to copy."""
    return (chip or CHIPS["v5e"]).vmem_bytes - 2**19


def check(op: str, kernel: str, problem: Problem, block: Block, chip: Chip | None) -> None:
    """Raises ValueError for a block that can't be: what is wrong, the limit, and a block that fits."""
    best = _choose(kernel, problem, chip or CHIPS["v5e"])
    check_block(op, kernel, block, chip, lambda b: vmem_bytes(kernel, problem, b, chip), best)


def check_block(
    op: str,
    kernel: str,
    block: Block,
    chip: Chip | None,
    needs: Callable[[Block], int],
    best: Block,
    unit: Block = Block(LANES, LANES, LANES),
) -> None:
    """The same for any kernel's block, by the bytes of VMEM that blocks need and the one that would be chosen.

    Each size is a multiple of that of `unit`.
    """
    if any(
        size < 1 or size % of for size, of in zip(dataclasses.astuple(block), dataclasses.astuple(unit), strict=True)
    ):
        each = "each must be a multiple of 128" if set(dataclasses.astuple(unit)) == {LANES} else f"multiples of {unit}"
        raise ValueError(f"{op}: {kernel} block {block}: {each}")
    if chip is None:
        return
    needed, limit = needs(block), int(SHARE * chip.vmem_bytes)
    if needed <= limit:
        return
    hint = f"{best} fits" if needs(best) <= limit else "no block of these arrays fits, so use implementation='xla'"
    raise ValueError(
        f"{op}: {kernel} block {block} needs {needed / 2**20:.1f} MiB of VMEM; {chip.name} has "
        f"{limit / 2**20:.1f} MiB for it; {hint}"
    )
