"""Block sizes of the Pallas kernels by TPU generation: measured ones (tuned.json), else within a byte model of VMEM."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from pallas_kernels import tuned
from pallas_kernels.runtime import CHIPS, Chip

OP = "flash_attention"  # in tuned.json
LANES = 128


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a kernel cuts a pair of blocks into tasks: tiles of `queries` by chunks of `keys`.

    The scores of a task are issued `ahead` tasks before the softmax that uses them.
    """

    queries: int
    keys: int
    ahead: int


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """What a kernel works on at once: blocks of `q` queries by `k` keys, and `resident` keys of a head in VMEM.

    All are multiples of 128, `resident` one of `k`; blocks are multiples of their cuts.
    """

    q: int
    k: int
    resident: int
    forward: Cut
    backward: Cut


# Forward and backward cuts by the size of the matrix unit; the log in WORKSPACE.md has the trials, at head dim 128.
CUTS = {
    128: (Cut(256, 128, 4), Cut(256, 256, 1)),
    256: (Cut(256, 256, 4), Cut(256, 256, 2)),
}
BLOCKS = (1024, 512, 256)  # most rows of a block; the largest that fits is taken
SHARE = 0.85  # of VMEM that blocks may fill; the rest is for values that the compiler spills


def choose(
    num_queries: int, num_keys: int, head_dim: int, value_dim: int, itemsize: int, chip: Chip | None
) -> BlockSizes:
    """Sizes for a head of the given shape on `chip` (None, where kernels are interpreted: as on v5e)."""
    found = tuned.nearest(OP, chip, *shape_key(num_queries, num_keys, head_dim, value_dim, itemsize))
    if found is not None:
        try:
            sizes = _fitted(found, num_queries, num_keys)
            check(sizes, head_dim, value_dim, itemsize, chip)
            return sizes
        except ValueError:
            pass  # measured at another length, and too large at this one
    return _by_model(num_queries, num_keys, head_dim, value_dim, itemsize, chip or CHIPS["v5e"])


def shape_key(
    num_queries: int, num_keys: int, head_dim: int, value_dim: int, itemsize: int
) -> tuple[dict[str, int], dict[str, int]]:
    """(exact, near) of an entry of tuned.json."""
    exact = {"head_dim": head_dim, "value_dim": value_dim, "itemsize": itemsize}
    return exact, {"queries": num_queries, "keys": num_keys}


def from_plain(plain: Mapping[str, Any]) -> BlockSizes:
    """The sizes that `dataclasses.asdict` made `plain` of."""
    cuts = {name: Cut(**plain[name]) for name in ("forward", "backward")}
    return BlockSizes(**{**plain, **cuts})


def _fitted(entry: tuned.Entry, num_queries: int, num_keys: int) -> BlockSizes:
    """An entry's sizes for these lengths: blocks that pad them least, keys in as many parts."""
    sizes = from_plain(entry.sizes)
    if entry.near == {"queries": num_queries, "keys": num_keys}:
        return sizes
    q, k = _block(num_queries, sizes.q), _block(num_keys, sizes.k)
    parts = -(-entry.near["keys"] // sizes.resident)
    resident = -(-num_keys // (parts * k)) * k
    return BlockSizes(q, k, resident, _fit(sizes.forward, q, k), _fit(sizes.backward, q, k))


def _by_model(num_queries: int, num_keys: int, head_dim: int, value_dim: int, itemsize: int, chip: Chip) -> BlockSizes:
    forward, backward = CUTS[chip.mxu_size]
    for most in BLOCKS:
        q, k = _block(num_queries, most), _block(num_keys, most)
        sizes = BlockSizes(q, k, -(-num_keys // k) * k, _fit(forward, q, k), _fit(backward, q, k))
        while sizes.resident > k and not fits(sizes, head_dim, value_dim, itemsize, chip):
            sizes = dataclasses.replace(sizes, resident=-(-sizes.resident // (2 * k)) * k)
        if fits(sizes, head_dim, value_dim, itemsize, chip):
            break
    return sizes


def _block(length: int, most: int) -> int:
    """A multiple of 128 up to `most` that pads `length` least."""
    count = -(-length // most)
    tile = LANES if length <= LANES else 2 * LANES
    return -(-length // (count * tile)) * tile


def _fit(cut: Cut, q: int, k: int) -> Cut:
    """The cut, no larger than the block and dividing it."""
    queries, keys = min(cut.queries, q), min(cut.keys, k)
    if k % keys:
        keys = LANES
    return Cut(queries, keys, cut.ahead)


def vmem_bytes(sizes: BlockSizes, head_dim: int, value_dim: int, itemsize: int) -> dict[str, int]:
    """What each kernel's blocks take, in bytes: two buffers for what is streamed, one for what is kept."""
    both = head_dim + value_dim
    q_block = 2 * sizes.q * both * itemsize
    keys = 2 * sizes.resident * both * itemsize
    rows = 16 * 8 * sizes.q * 4
    kept = (sizes.q + sizes.resident) * head_dim * itemsize  # q and k, turned
    angles = 2 * (sizes.q + sizes.resident) * head_dim * 4
    forward = q_block + keys + kept + angles + sizes.q * value_dim * 4 + rows
    backward = q_block + 3 * sizes.q * value_dim * itemsize + 2 * sizes.q * head_dim * (itemsize + 4) + rows
    # k and v come in and are kept the other way round, dk and dv are summed in float32 and go out.
    backward += 2 * keys + sizes.resident * both * (itemsize + 4) + kept + angles
    return {"forward": forward, "backward": backward}


def fits(sizes: BlockSizes, head_dim: int, value_dim: int, itemsize: int, chip: Chip) -> bool:
    """Whether the kernels' blocks fit the chip's VMEM."""
    return _needed(sizes, head_dim, value_dim, itemsize) <= SHARE * chip.vmem_bytes


def _needed(sizes: BlockSizes, head_dim: int, value_dim: int, itemsize: int) -> int:
    return max(vmem_bytes(sizes, head_dim, value_dim, itemsize).values()) + _working_bytes(sizes.q, sizes.k)


def _working_bytes(q: int, k: int) -> int:
    """Room for the scores, their gradients and what else the compiler spills."""
    return 2 * 4 * q * k


def vmem_limit(sizes: BlockSizes, head_dim: int, value_dim: int, itemsize: int, chip: Chip | None) -> int:
    """Bytes of VMEM to ask for: what the blocks need and half again, within what the chip has."""
    needed = _needed(sizes, head_dim, value_dim, itemsize)
    return min(needed * 3 // 2, (chip or CHIPS["v5e"]).vmem_bytes * 15 // 16)


def check(sizes: BlockSizes, head_dim: int, value_dim: int, itemsize: int, chip: Chip | None) -> None:
    """Raises ValueError for sizes that can't be: what is wrong, the limit, and sizes that fit."""
    if sizes.q % LANES or sizes.k % LANES or sizes.resident % sizes.k or min(sizes.q, sizes.k, sizes.resident) < 1:
        raise ValueError(f"flash_attention: {sizes}: q and k must be multiples of 128, and resident one of k")
    for cut in (sizes.forward, sizes.backward):
        if min(cut.queries, cut.keys) < 1 or cut.ahead < 0 or sizes.q % cut.queries or sizes.k % cut.keys:
            raise ValueError(f"flash_attention: {cut} does not divide a block of {sizes.q} queries by {sizes.k} keys")
        if cut.queries % LANES or cut.keys % LANES:
            raise ValueError(f"flash_attention: {cut}: queries and keys must be multiples of 128")
    if chip is None:
        return
    needed = _needed(sizes, head_dim, value_dim, itemsize)
    limit = int(SHARE * chip.vmem_bytes)
    if needed > limit:
        best = _by_model(sizes.q, sizes.resident, head_dim, value_dim, itemsize, chip)
        raise ValueError(
            f"flash_attention: blocks of {sizes.q} x {sizes.k} with {sizes.resident} keys resident need "
            f"{needed / 2**20:.1f} MiB of VMEM; {chip.name} has {limit / 2**20:.1f} MiB for them; "
            f"q={best.q}, k={best.k}, resident={best.resident} fit"
        )
