"""Block sizes of the kernel: per TPU generation, measured ones (tuned.json), else the fastest by a model of cycles,
within one of VMEM. Few rows make the product wait for HBM, and the model then takes what begins soonest."""

import dataclasses
import functools
import itertools
import math

from pallas_kernels.matmul.blocks import (
    HBM_SHARE,
    LANES,
    RATES,
    SHARE,
    STEP,
    TILES,
    Block,
    check_block,
    measured,
    padded,
    passes,
    unrolled,
    wide,
)
from pallas_kernels.runtime import CHIPS, Chip
from pallas_kernels.schedule_dump import CORES

OP = "quantized_matmul"  # in tuned.json
ROWS = 32  # that fill a register of eight bits: what a block of fewer than 128 rows is a multiple of


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call, as far as blocks depend on it: dims of the product and its operands' types.

    `b_dtype` is of eight bits; a's is that too, or a float's of `a_itemsize` bytes, to which b is widened.
    """

    T: int
    F: int
    D: int
    a_itemsize: int
    b_dtype: str
    y_itemsize: int
    scale_block: int | None = None
    transposed: bool = False  # a is a_DT

    @property
    def widened(self) -> bool:
        return self.a_itemsize > 1

    @property
    def scales(self) -> int:
        """Of a column."""
        return 1 if self.scale_block is None else -(-self.D // self.scale_block)


# Cycles of the schedules that tpu-train kernels shows, by the size of the matrix units: the start and end of an
# unrolled body; weights that are widened and loaded in a cycle; of 1,024 numbers: sums that are scaled and added, sums
# that are read and written, values that are transposed.
BODY, WIDENED, SCALED, ADDED, TRANSPOSED = {128: 150, 256: 250}, {128: 1370, 256: 1640}, 0.5, 0.5, 0.9
MOST_WEIGHTS = 2**21  # of a block that is widened: what compiles in seconds


def choose(problem: Problem, chip: Chip | None) -> Block:
    """The block on `chip` (None, where kernels are interpreted: as on v5e)."""
    return measured(OP, "product", problem, chip, _needs) or _choose(problem, chip or CHIPS["v5e"])


def unit(problem: Problem) -> Block:
    """What each size of a block is a multiple of."""
    rows = ROWS if problem.T <= LANES and not problem.transposed else LANES  # transposed, they are lanes
    return Block(rows, LANES, LANES if problem.scale_block is None else problem.scale_block)


@functools.cache
def _choose(problem: Problem, chip: Chip) -> Block:
    units = unit(problem)
    lengths = dict(zip("TFD", (problem.T, problem.F, problem.D), strict=True))
    sizes = [_sizes(length, getattr(units, dim)) for dim, length in lengths.items()]
    blocks = [b for b in (Block(*each) for each in itertools.product(*sizes)) if _can_be(problem, b)]
    small = [b for b in blocks if _work(problem, b, chip) <= unrolled(chip)]
    small = [b for b in small if not problem.widened or b.F * b.D <= MOST_WEIGHTS]
    fitting = [b for b in small if vmem_bytes(problem, b, chip) <= SHARE * chip.vmem_bytes]
    least = min(blocks, key=lambda b: vmem_bytes(problem, b, chip))
    return min(fitting or [least], key=lambda block: cost(problem, block, chip))


def _sizes(length: int, unit: int) -> list[int]:
    """Multiples of the unit that cut the length into few even blocks, down to one of the unit."""
    wanted = {padded(-(-length // count), unit) for count in (*range(1, 9), *(1 << i for i in range(4, 12)))}
    return sorted({size for size in wanted if size <= 4096 or length <= size} | {unit})


def _can_be(problem: Problem, block: Block) -> bool:
    """A block of scales is a multiple of 8 rows, a register's, or has all of them."""
    return problem.scale_block is None or block.D >= problem.D or block.D // problem.scale_block % 8 == 0


def tile(problem: Problem, block: Block, chip: Chip | None) -> int:
    """How many of the block's rows one unrolled body takes."""
    chip = chip or CHIPS["v5e"]
    fitting = [rows for rows in TILES if block.T % rows == 0]
    if not fitting:
        return block.T
    one_row = block.F * block.D * passes(problem.a_itemsize) // _speed(problem, chip)
    return next((rows for rows in fitting if rows * one_row <= unrolled(chip)), fitting[-1])


def _speed(problem: Problem, chip: Chip) -> int:
    """Times the rate of bfloat16."""
    kind = {"int8": "s8"}.get(problem.b_dtype, "f8")
    return 2 if not problem.widened and kind in CORES[chip.name].fast_8bit else 1


def _work(problem: Problem, block: Block, chip: Chip) -> int:
    """Multiplications of an unrolled body, as of bfloat16."""
    rows = tile(problem, block, chip)
    return passes(problem.a_itemsize) * rows * block.F * block.D // _speed(problem, chip)


def _copied(problem: Problem, block: Block) -> tuple[int, int]:
    """Bytes of a step's blocks, in and out; a row of scales of the rows fills a register's row."""
    scales = padded(1 if problem.scale_block is None else -(-block.D // problem.scale_block), 8) * block.F * 4
    rows = 0 if problem.widened else block.T * LANES * 4
    weights = block.D * block.F
    return block.T * block.D * problem.a_itemsize + weights + scales + rows, block.T * block.F * problem.y_itemsize


def vmem_bytes(problem: Problem, block: Block, chip: Chip | None) -> int:
    """What the blocks take: two buffers for what is copied, one for sums, and room for values."""
    kept = block.T * block.F * 4 * (block.D < problem.D)
    values = 2 * tile(problem, block, chip) * block.F * 4 + block.D * block.F * problem.a_itemsize
    return 2 * sum(_copied(problem, block)) + kept + values


def _needs(kernel: str, problem: Problem, block: Block, chip: Chip) -> int:
    return vmem_bytes(problem, block, chip)


def hbm_bytes(problem: Problem, block: Block) -> int:
    """What is copied between HBM and VMEM: a block that two steps in a row share is copied once."""
    blocks = {dim: -(-getattr(problem, dim) // getattr(block, dim)) for dim in "TFD"}
    a_reads = 1 if blocks["D"] == 1 else blocks["F"]
    b_reads = 1 if blocks["D"] * blocks["F"] == 1 else blocks["T"]
    a = problem.T * problem.D * problem.a_itemsize + (0 if problem.widened else problem.T * LANES * 4)
    b = problem.D * problem.F + problem.scales * problem.F * 4
    return a_reads * a + b_reads * b + problem.T * problem.F * problem.y_itemsize


def cost(problem: Problem, block: Block, chip: Chip) -> float:
    """Predicted cycles: the schedule's or HBM's, whichever is more, and what no step hides of the copies."""
    rate, per_byte, cores = RATES[chip.name]
    blocks = {dim: -(-getattr(problem, dim) // getattr(block, dim)) for dim in "TFD"}
    rows = tile(problem, block, chip)
    filled = rows * wide(block.F, chip) * wide(block.D, chip)
    body = passes(problem.a_itemsize) * filled / rate / _speed(problem, chip)
    if problem.widened:
        body = max(body, block.F * block.D / WIDENED[chip.mxu_size])
    if problem.scale_block is not None:
        body += SCALED * rows * block.F / 1024 * block.D / problem.scale_block
    if problem.transposed:
        body += TRANSPOSED * rows * block.D / 1024
    once = block.T // rows * (body + BODY[chip.mxu_size])
    steps = math.prod(blocks.values())
    if blocks["D"] > 1:
        once += ADDED * block.T * block.F / 1024
    copies = hbm_bytes(problem, block) * per_byte / rate / HBM_SHARE
    arriving, leaving = (size * per_byte / rate for size in _copied(problem, block))
    moves = blocks["T"] * blocks["F"]
    idle = padded(moves, cores) / moves
    # A step is begun and ended while nothing is copied, too.
    return idle * (max(steps * once, copies) + steps * STEP) + arriving + leaving


def check(op: str, problem: Problem, block: Block, chip: Chip | None) -> None:
    """Raises ValueError for a block that can't be: what is wrong, the limit, and a block that fits."""
    best = _choose(problem, chip or CHIPS["v5e"])
    units = unit(problem)
    check_block(op, "product", block, chip, lambda b: vmem_bytes(problem, b, chip), best, units)
    if not _can_be(problem, block):
        raise ValueError(
            f"{op}: block {block}: D must be a multiple of {8 * units.D}, eight blocks of scales; {best} fits"
        )
