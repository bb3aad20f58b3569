"""Block sizes that were measured on a chip. `choose` of each op's blocks.py asks here before it asks its model.

tuned.json holds them, by op and TPU generation; benchmarks/tpu.py --parts=tune writes it. An entry stands for calls
whose `exact` values are its own and whose `near` values, dims of arrays, lie within a factor of NEAR of its own: the
nearest one counts, by the sum of |log2| of those factors. The op fits its sizes to the call's dims, and where they
can't be there, its model chooses. In an empty table nothing is near.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.runtime import CHIPS, Chip

FILE = Path(__file__).with_name("tuned.json")
NEAR = 2.0


@dataclass(frozen=True)
class Entry:
    """What was found for one shape. `sizes` is as the op's blocks.py writes them down."""

    exact: Mapping[str, Any]
    near: Mapping[str, int]
    sizes: Mapping[str, Any]


def nearest(op: str, chip: Chip | None, exact: Mapping[str, Any], near: Mapping[str, int]) -> Entry | None:
    """The entry for a call on `chip`; None where there is none, or no chip (kernels are interpreted).

    Raises ValueError for a table that can't be read: what is wrong, and where.
    """
    if chip is None:
        return None
    found = [
        entry for entry in table().get((op, chip.name), ()) if entry.exact == exact and entry.near.keys() == near.keys()
    ]
    close = [(_distance(entry.near, near), i) for i, entry in enumerate(found)]
    best = min(close, default=(math.inf, 0))
    return found[best[1]] if math.isfinite(best[0]) else None


def _distance(there: Mapping[str, int], here: Mapping[str, int]) -> float:
    steps = [abs(math.log2(here[name] / there[name])) for name in here]
    return sum(steps) if max(steps) <= math.log2(NEAR) else math.inf


@functools.cache
def table() -> dict[tuple[str, str], tuple[Entry, ...]]:
    """tuned.json by op and generation, read once."""
    return read(FILE)


def read(file: Path) -> dict[tuple[str, str], tuple[Entry, ...]]:
    """A table by op and generation, empty where there is no file; raises ValueError for one that can't be right."""
    if not file.exists():
        return {}
    try:
        found = {
            (op, generation): tuple(Entry(**entry) for entry in entries)
            for op, by_generation in json.loads(file.read_text()).items()
            for generation, entries in by_generation.items()
        }
        dims = [size for entries in found.values() for entry in entries for size in entry.near.values()]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no table of tuned block sizes: {error}") from error
    if unknown := {generation for _, generation in found} - set(CHIPS):
        raise ValueError(f"{file}: no TPU generation {sorted(unknown)[0]!r}; there are {', '.join(CHIPS)}")
    if any(type(size) is not int or size < 1 for size in dims):
        raise ValueError(f"{file}: dims must be whole numbers above 0")
    return found


def write(file: Path, op: str, generation: str, entry: Entry) -> None:
    """Puts an entry into the table at `file`, in place of one for the same shape."""
    found = read(file)
    others = [e for e in found.get((op, generation), ()) if (e.exact, e.near) != (entry.exact, entry.near)]
    found[op, generation] = (*others, entry)
    plain: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for (name, where), entries in sorted(found.items()):
        rows = [{"exact": dict(e.exact), "near": dict(e.near), "sizes": dict(e.sizes)} for e in entries]
        plain.setdefault(name, {})[where] = sorted(rows, key=json.dumps)
    file.write_text(json.dumps(plain, indent=2) + "\n")
    table.cache_clear()
