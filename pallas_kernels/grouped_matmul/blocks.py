"""Block sizes of the grouped kernels: per TPU generation, measured ones (tuned.json), else the fastest by a model of
cycles, within one of VMEM.

How the rows fall on the groups is known only when a kernel runs. The model takes each group to begin and end anywhere,
so that a tile is visited once, and once more for each further group.
"""

import dataclasses
import functools
import itertools

from pallas_kernels.grouped_matmul.groups import most_visits
from pallas_kernels.matmul.blocks import (
    HBM_SHARE,
    LANES,
    RATES,
    SHARE,
    Block,
    check_block,
    measured,
    padded,
    passes,
    unrolled,
    wide,
)
from pallas_kernels.runtime import CHIPS, Chip

OP = "grouped_matmul"  # in tuned.json


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call, as far as blocks depend on it: dims, groups, bytes an element."""

    T: int
    F: int
    D: int
    E: int
    itemsize: int


# Cycles of the schedules that tpu-train kernels shows: the start and end of an unrolled body, by the size of the matrix
# unit; a visit; to transpose 1,024 weights, which dx does for each body; 1,024 sums of dw, read and written.
BODY = {"forward": {128: 170, 256: 265}, "dx": {128: 210, 256: 330}, "dw": {128: 320, 256: 350}}
VISIT, TRANSPOSE, SUMS = 240, 0.71, 1.1
PARTS = (128, 256, 512)  # rows of a body
LONGEST = 1024  # rows of a tile


def choose(kernel: str, problem: Problem, chip: Chip | None) -> Block:
    """The block of a kernel ("forward", "dx" or "dw") on `chip` (None, where kernels are interpreted: as on v5e)."""
    return measured(OP, kernel, problem, chip, vmem_bytes) or _choose(kernel, problem, chip or CHIPS["v5e"])


@functools.cache
def _choose(kernel: str, problem: Problem, chip: Chip) -> Block:
    sizes = [_sizes(min(problem.T, LONGEST)), _sizes(problem.F), _sizes(problem.D)]
    blocks = [Block(*each) for each in itertools.product(*sizes)]
    fitting = [b for b in blocks if vmem_bytes(kernel, problem, b, chip) <= SHARE * chip.vmem_bytes]
    return min(fitting or blocks[-1:], key=lambda block: cost(kernel, problem, block, chip))


def _sizes(length: int) -> list[int]:
    """Multiples of 128 that cut the length into few even blocks, from one down to one of 128."""
    wanted = {padded(-(-length // count), LANES) for count in (*range(1, 9), *(1 << i for i in range(4, 12)))}
    return sorted(wanted | {LANES}, reverse=True)


@dataclasses.dataclass(frozen=True)
class Cut:
    """What the unrolled bodies of a kernel take: `rows`, and what is left of a group `rests`, by `columns`."""

    rows: int
    rests: tuple[int, ...]
    columns: int


def cut(kernel: str, problem: Problem, block: Block, chip: Chip | None) -> Cut:
    """How a block is worked on; a choice by cycles."""
    return _cut(kernel, problem, block, chip or CHIPS["v5e"])


@functools.cache
def _cut(kernel: str, problem: Problem, block: Block, chip: Chip) -> Cut:
    across, along = (block.F, block.D) if kernel == "forward" else (block.D, block.F)
    most = unrolled(chip) // passes(problem.itemsize)
    # With fewer rows a body takes as long: half a matrix unit's hide the loading of its weights, dw contracts the rows.
    least = chip.mxu_size if kernel == "dw" else chip.mxu_size // 2
    cuts = [
        Cut(rows, tuple(rest for rest in (rows // 2, rows // 4) if rest >= least), columns)
        for rows in PARTS
        for columns in (across // n for n in range(1, across // LANES + 1) if across % (n * LANES) == 0)
        if block.T % rows == 0 and rows * columns * along <= most
    ]
    return min(cuts or [Cut(LANES, (), LANES)], key=lambda cut: _body_cycles(kernel, problem, block, cut, chip))


def _body_cycles(kernel: str, problem: Problem, block: Block, cut: Cut, chip: Chip) -> float:
    """Cycles of all bodies for one block of columns and of the contraction."""

    def body(rows: int) -> float:
        size = block.F * block.D
        busy = passes(problem.itemsize) * wide(block.F, chip) * wide(block.D, chip) * rows / RATES[chip.name][0]
        if kernel == "dx":
            busy = max(busy, TRANSPOSE * size / 1024)
        if kernel == "dw":
            busy = max(busy * wide(rows, chip) / rows, SUMS * size / 1024)
        return busy + BODY[kernel][chip.mxu_size] * (block.F if kernel == "forward" else block.D) / cut.columns

    # A group has up to two tiles that it only has a part of. What each rounds up is half a shortest body's.
    ragged = min(2 * problem.E, most_visits(problem.T, problem.E, block.T))
    return -(-problem.T // cut.rows) * body(cut.rows) + ragged / 2 * body(min((cut.rows, *cut.rests)))


def vmem_bytes(kernel: str, problem: Problem, block: Block, chip: Chip | None) -> int:
    """What a kernel's blocks take: two buffers for what is copied, one for what is kept, and room for values."""
    T, F, D, item = block.T, block.F, block.D, problem.itemsize
    some = cut(kernel, problem, block, chip)
    copied = T * D + D * F + T * F
    if kernel == "dw":
        return 2 * copied * item + D * F * 4 + 2 * some.columns * F * 4 + some.rows * (some.columns + F) * item
    out, steps = (F, D < problem.D) if kernel == "forward" else (D, F < problem.F)
    return 2 * copied * item + T * out * 4 * steps + 2 * some.rows * some.columns * 4


def hbm_bytes(kernel: str, problem: Problem, block: Block) -> int:
    """What a kernel copies between HBM and VMEM: a block that two steps in a row share is copied once."""
    T, F, D, item = problem.T, problem.F, problem.D, problem.itemsize
    steps = {dim: -(-getattr(problem, dim) // getattr(block, dim)) for dim in "TFD"}
    weights = problem.E * D * F
    if kernel == "dw":
        return item * (steps["F"] * T * D + steps["D"] * T * F + weights)
    (out, contracted), (rows, result) = (("FD", (T * D, T * F)), ("DF", (T * F, T * D)))[kernel == "dx"]
    if steps[contracted] == 1:
        return item * (steps[out] * rows + weights + result)
    visits = most_visits(problem.T, problem.E, block.T)
    return item * (steps[out] * visits * block.T * rows // T + visits * D * F + result)


def cost(kernel: str, problem: Problem, block: Block, chip: Chip) -> float:
    """Predicted cycles: the schedule's or HBM's, whichever is more."""
    rate, per_byte, cores = RATES[chip.name]
    steps = {dim: -(-getattr(problem, dim) // getattr(block, dim)) for dim in "TFD"}
    visits = most_visits(problem.T, problem.E, block.T)
    cycles = visits * VISIT + _body_cycles(kernel, problem, block, cut(kernel, problem, block, chip), chip)
    outer = steps["D" if kernel == "dx" else "F"]
    copies = hbm_bytes(kernel, problem, block) * per_byte / rate / HBM_SHARE
    return padded(outer, cores) / outer * max(steps["F"] * steps["D"] * cycles, copies)


def check(op: str, kernel: str, problem: Problem, block: Block, chip: Chip | None) -> None:
    """Raises ValueError for a block that can't be: what is wrong, the limit, and a block that fits."""
    needs = functools.partial(vmem_bytes, kernel, problem, chip=chip)
    check_block(op, kernel, block, chip, needs, _choose(kernel, problem, chip or CHIPS["v5e"]))
