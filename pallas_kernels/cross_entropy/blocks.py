"""Block sizes of the linear cross entropy kernels: per TPU generation, measured ones (tuned.json), else within a byte
model of VMEM."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallas_kernels import tuned
from pallas_kernels.runtime import CHIPS, Chip

OP = "linear_cross_entropy"  # in tuned.json
LANES = 128
SHARE = 0.94  # of VMEM that blocks may fill; the rest is for values that the compiler spills


@dataclasses.dataclass(frozen=True)
class Forward:
    """`tokens` x `vocab` a grid step; a task makes the logits of `rows` of the head and `tile` of the tokens."""

    tokens: int
    vocab: int
    rows: int
    tile: int


@dataclasses.dataclass(frozen=True)
class Backward:
    """`tokens` x `vocab` a grid step; tasks of `rows` of the head, `ahead` at a time; dx by `columns` of D."""

    tokens: int
    vocab: int
    rows: int
    columns: int
    ahead: int = 2


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """What the kernels work on at once. All but `ahead` are multiples of 128."""

    forward: Forward
    backward: Backward


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the sizes depend on: hidden states [T, D], this device's V rows of the head, bytes of a number of each."""

    T: int
    D: int
    V: int
    itemsize: int
    w_itemsize: int

    @property
    def width(self) -> int:
        """D in whole lanes."""
        return _up(self.D, LANES)


# Tokens and rows of the head a grid step, the best first.
FORWARD = ((2048, 512), (1024, 512), (512, 512), (256, 256), (128, 128))
BACKWARD = ((512, 2048), (256, 2048), (512, 1024), (256, 1024), (256, 512), (128, 512), (128, 256), (128, 128))


def choose(shape: Shape, chip: Chip | None) -> BlockSizes:
    """Sizes for `chip` (None, where kernels are interpreted: as on v5e). Raises ValueError where none fit."""
    found = tuned.nearest(OP, chip, *shape_key(shape))
    if found is not None:
        try:
            sizes = _fitted(found, shape)
            check(sizes, shape, chip)
            return sizes
        except ValueError:
            pass  # measured for another shape, and not to be had for this one
    return _by_model(shape, chip or CHIPS["v5e"])


def shape_key(shape: Shape) -> tuple[dict[str, int], dict[str, int]]:
    """(exact, near) of an entry of tuned.json."""
    exact = {"D": shape.D, "itemsize": shape.itemsize, "w_itemsize": shape.w_itemsize}
    return exact, {"T": shape.T, "V": shape.V}


def from_plain(plain: Mapping[str, Any]) -> BlockSizes:
    """The sizes that `dataclasses.asdict` made `plain` of."""
    return BlockSizes(Forward(**plain["forward"]), Backward(**plain["backward"]))


def _fitted(entry: tuned.Entry, shape: Shape) -> BlockSizes:
    """An entry's sizes for this shape, in blocks that pad it least. Raises ValueError where a task can't cut them."""
    sizes = from_plain(entry.sizes)
    if entry.near == {"T": shape.T, "V": shape.V}:
        return sizes
    first, second = sizes.forward, sizes.backward
    return BlockSizes(
        dataclasses.replace(first, tokens=_block(shape.T, first.tokens), vocab=_block(shape.V, first.vocab)),
        dataclasses.replace(second, tokens=_block(shape.T, second.tokens), vocab=_block(shape.V, second.vocab)),
    )


def _by_model(shape: Shape, chip: Chip) -> BlockSizes:
    forward = next((cut for cut in _forwards(shape, chip) if forward_bytes(cut, shape) <= _allowed(chip)), None)
    backward = next((cut for cut in _backwards(shape, chip) if backward_bytes(cut, shape) <= _allowed(chip)), None)
    if forward is None or backward is None:
        raise ValueError(
            f"linear_cross_entropy: no blocks of hidden states {shape.D} wide fit the {chip.vmem_bytes >> 20} MiB of "
            f"VMEM that {chip.name} has; use implementation='xla'"
        )
    return BlockSizes(forward, backward)


def pays(shape: Shape, chip: Chip) -> bool:
    """Whether the kernels beat XLA: tokens fill the lanes, and the copies of dx hide behind the products.

    Those move 10 bytes a token and number of D for each block of the head (kernel.py), so it takes large ones; 1,024
    rows for a matrix unit of 256 that 937 bytes a cycle from v6e's HBM feed, half of it for one of 128.
    """
    try:
        sizes = choose(shape, chip)
    except ValueError:
        return False
    return shape.T >= LANES and sizes.backward.vocab >= min(4 * chip.mxu_size, _up(shape.V, LANES))


def _forwards(shape: Shape, chip: Chip):
    for tokens, vocab in FORWARD:
        if chip.mxu_size == 128:
            tokens = min(tokens, 1024)
        tokens, vocab = _block(shape.T, tokens), _block(shape.V, vocab)
        yield Forward(tokens, vocab, _divisor(chip.mxu_size, vocab), _divisor(256, tokens))


def _backwards(shape: Shape, chip: Chip):
    for tokens, vocab in BACKWARD:
        if chip.mxu_size == 128:
            tokens = min(tokens, 256)
        tokens, vocab = _block(shape.T, tokens), _block(shape.V, vocab)
        rows = _divisor(chip.mxu_size, vocab)
        ahead = 2 if vocab % (2 * rows) == 0 else 1
        yield Backward(tokens, vocab, rows, _divisor(4 * chip.mxu_size, shape.width), ahead)


def _divisor(most: int, size: int) -> int:
    """The largest of most, half of it, ... that divides `size`, a multiple of 128."""
    while size % most:
        most //= 2
    return most


def _block(length: int, most: int) -> int:
    """A multiple of 128 up to `most` that pads `length` least, of 256 and 512 where it is long enough for it."""
    count = -(-length // most)
    unit = next(unit for unit in (512, 256, 128) if unit == LANES or length >= 2 * unit)
    return min(most, _up(-(-length // count), min(unit, most)))


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _allowed(chip: Chip) -> int:
    return int(SHARE * chip.vmem_bytes)


def forward_bytes(cut: Forward, shape: Shape) -> int:
    """Two buffers for what is streamed; a task's logits waiting, made and worked on; a dozen rows of 8 sublanes."""
    streamed = 2 * shape.width * (cut.tokens * shape.itemsize + cut.vocab * shape.w_itemsize)
    cast = cut.rows * shape.width * shape.itemsize
    return streamed + cast + 3 * 4 * cut.rows * cut.tile + 12 * 8 * 4 * cut.tokens


def backward_bytes(cut: Backward, shape: Shape) -> int:
    """The head's block, its tasks on their way in, its gradient; two blocks of x and dx; logits and their gradients."""
    head = shape.width * (cut.vocab * (shape.itemsize + 4) + cut.ahead * cut.rows * shape.w_itemsize)
    dx_blocks = 1 if cut.tokens >= shape.T else 2
    tokens = shape.width * cut.tokens * (2 * shape.itemsize + 4 * dx_blocks)
    logits = cut.tokens * (cut.vocab * shape.itemsize + cut.ahead * cut.rows * (shape.itemsize + 2 * 4))
    return head + tokens + logits + 8 * 8 * 4 * cut.tokens


def vmem_limit(sizes: BlockSizes, shape: Shape, chip: Chip | None) -> int:
    """Bytes of VMEM to ask for: what the blocks need and a quarter more, within what the chip has."""
    needed = max(forward_bytes(sizes.forward, shape), backward_bytes(sizes.backward, shape))
    return min(needed * 5 // 4 + 2**20, (chip or CHIPS["v5e"]).vmem_bytes * 31 // 32)


def check(sizes: BlockSizes, shape: Shape, chip: Chip | None) -> None:
    """Raises ValueError for sizes that can't be: what is wrong, the limit, and sizes that fit."""
    forward, backward = sizes.forward, sizes.backward
    for cut in (forward, backward):
        numbers = dataclasses.asdict(cut)
        ahead = numbers.pop("ahead", 1)
        if min(ahead, *numbers.values()) < 1 or any(size % LANES for size in numbers.values()):
            raise ValueError(f"linear_cross_entropy: {cut}: sizes must be multiples of 128, and ahead at least 1")
    if forward.vocab % forward.rows or forward.tokens % forward.tile:
        raise ValueError(f"linear_cross_entropy: {forward}: rows must divide vocab, and tile divide tokens")
    if backward.vocab % (backward.rows * backward.ahead) or shape.width % backward.columns:
        raise ValueError(
            f"linear_cross_entropy: {backward}: rows x ahead must divide vocab, and columns divide D={shape.width}"
        )
    if chip is None:
        return
    needed = max(forward_bytes(sizes.forward, shape), backward_bytes(sizes.backward, shape))
    if needed > _allowed(chip):
        raise ValueError(
            f"linear_cross_entropy: {sizes} needs {needed / 2**20:.1f} MiB of VMEM at D={shape.D}; {chip.name} has "
            f"{_allowed(chip) / 2**20:.1f} MiB for it; {_by_model(shape, chip)} fits"
        )
