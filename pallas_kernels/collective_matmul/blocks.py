"""Block sizes of the products that go round a ring, by what VMEM holds and HBM has to bring."""

import dataclasses
import functools

from pallas_kernels.matmul.blocks import LANES, RATES, SHARE, STEP, TILES, passes, unrolled
from pallas_kernels.runtime import CHIPS, Chip

SIZES = tuple(LANES << i for i in range(8))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call: a device's tokens T, the weight's D and F, n devices round the ring; bytes of an element."""

    T: int
    D: int
    F: int
    n: int
    itemsize: int
    factor: bool

    @property
    def rows(self) -> int:
        """Of D, in a block that is sent."""
        return self.D // self.n

    @property
    def sent_bytes(self) -> int:
        """By a device: n - 1 blocks."""
        return (self.n - 1) * self.rows * self.F * self.itemsize


@dataclasses.dataclass(frozen=True)
class Block:
    """Tokens and columns of the cotangent in VMEM."""

    T: int
    F: int


def choose(problem: Problem, chip: Chip | None) -> Block:
    """The fastest block that fits on `chip` (None, where the kernel is interpreted: as on v5e).

    Raises ValueError for arrays that the kernel can't take: what is wrong, and what fits.
    """
    op = "matmul_reduce_scatter"
    sizes = ("T", problem.T), ("F", problem.F), (f"D / {problem.n} devices", problem.D / problem.n)
    for name, size in sizes:
        if size % LANES:
            raise ValueError(
                f"{op}: pallas wants {name}={size:g} to be a multiple of {LANES}; use implementation='xla'"
            )
    return _choose(problem, chip or CHIPS["v5e"])


@functools.cache
def _choose(problem: Problem, chip: Chip) -> Block:
    found = [Block(t, f) for t in (*SIZES, problem.T) for f in SIZES if problem.T % t == 0 and problem.F % f == 0]
    limit = SHARE * chip.vmem_bytes
    fitting = [block for block in found if vmem_bytes(problem, block, chip) <= limit]
    if not fitting:
        least = vmem_bytes(problem, found[0], chip)
        most = int(limit * problem.rows // least) // LANES * LANES
        raise ValueError(
            f"matmul_reduce_scatter: blocks of {problem.rows} rows need {least / 2**20:.1f} MiB of VMEM; {chip.name} "
            f"has {limit / 2**20:.1f} MiB for them; about {most} rows fit: more devices, or implementation='xla'"
        )
    # A body of 128 rows of 256 keeps v5e's four matrix units busy for half as long again.
    widest = max(tile(problem, block, chip) for block in fitting)
    return min(
        (block for block in fitting if tile(problem, block, chip) == widest),
        key=lambda block: (cost(problem, block, chip), -block.F),
    )


def tile(problem: Problem, block: Block, chip: Chip | None) -> int:
    """Rows of a sent block that one unrolled body takes."""
    fitting = [rows for rows in TILES if problem.rows % rows == 0]
    most = unrolled(chip) // (passes(problem.itemsize) * block.T * block.F)
    return next((rows for rows in fitting if rows <= most), fitting[-1])


def vmem_bytes(problem: Problem, block: Block, chip: Chip | None) -> int:
    """Two buffers for what is copied, the slots of both ways, the float32 sum, and room for values."""
    item, sent = problem.itemsize, problem.rows * block.F
    copied = block.T * problem.rows + (1 + problem.factor) * block.T * block.F + sent
    rows = tile(problem, block, chip)
    values = 2 * rows * block.F * 4 + block.T * rows * item
    return 2 * copied * item + 8 * sent * item + sent * 4 + block.T * block.F * item * problem.factor + values


def hbm_bytes(problem: Problem, block: Block) -> int:
    """Between HBM and VMEM: x once a wave; the cotangent once, or, where its tokens come in parts, in every turn."""
    cotangent = problem.T * problem.F * (1 + problem.factor) * (problem.n if block.T < problem.T else 1)
    return problem.itemsize * (problem.T * problem.D * (problem.F // block.F) + cotangent + problem.rows * problem.F)


def cost(problem: Problem, block: Block, chip: Chip) -> float:
    """Predicted cycles: the products' or HBM's, whichever is more, and what a step costs beside."""
    rate, per_byte, _ = RATES[chip.name]
    steps = problem.F // block.F * problem.n * (problem.T // block.T)
    products = passes(problem.itemsize) * problem.T * problem.D * problem.F / rate
    return max(products, hbm_bytes(problem, block) * per_byte / rate / 0.8) + steps * STEP * 2
