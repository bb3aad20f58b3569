"""Reads what the TPU compiler writes about one kernel: its VLIW program and the slots that each bundle fills.

Three of the dump's files matter, read here as libtpu 0.0.52 writes them (see `schedule.py` for how they come about):

- `*-final_bundles.txt` is the program, one bundle a line: `0x1f : > { ... ;; ... }`. A label before the colon marks a
  loop's body (`LB`) or the place where a skipped region ends (`PF`). `sbr.rel (%p) target = $region36` skips forward
  to the next unclaimed `PF`, so these nest like brackets: each is a `pl.when`, or a `lax.cond` side, that was not
  turned into predicated instructions. A branch back to the region that starts at an `LB` line closes that loop. The
  bundles in a branch's shadow run either way: 4 of them, 6 on 7x.
- `*-final_hlo-static-per-bundle-utilization.txt` has a row of slot counts per bundle, under a row of capacities.
- `*-pre-delay_hlo-static-per-bundle-utilization.txt` has the same a stage earlier, with a row for each cycle: those in
  which nothing issues, since a unit is still busy, are left out of the program, where the hardware waits by itself (a
  transposed `vmatpush` is two bundles apart in the one and 19 rows in the other). Rows with work that takes one cycle
  (vector arithmetic, loads, stores, scalars) are the same ones in both; the rows missing between two of them are waits.

A kernel of the dump holds its pipeline too: the loop over the grid is the region `grid`, and the block copies and the
test of whether this turn of the loop computes (`grid/when1`, once per grid step) are in it. A grid of one step has no
loop. Which `pl.when` is which differs between generations: 7x has regions that elsewhere are predicated instructions.

What occupies the matrix units, found by compiling products of known size for v4, v5e, v5p, v6e and 7x:

- One `vmatmul` streams the rows of one vector register past the weights of one array: 8 rows of float32 (a bf16 pass;
  HIGHEST issues six), 16 of bf16, 32 of an 8-bit type. v4, v5e and v5p have 4 arrays of 128 x 128 a core that take a
  row a cycle, so 8, 16 and 32 cycles; v6e and 7x have 2 of 256 x 256 that take two rows a cycle, so 4, 8 and 16.
  Twice the rows a cycle: int8 everywhere it exists, fp8 on 7x alone. fp8 elsewhere (`f8e5m2.bf16`) runs as bf16.
- The compiler knows this only roughly: it issues a 16-row bf16 product every 12 bundles on v5e and every 6 on 7x
  (8 on v6e). Hence cycles of a region = max(bundles + waits, busiest array's occupancy).
- On a 256-wide array a contraction of 128, or an output of 128 columns, costs what 256 would. Only if both are 128
  does `vmatpush3` hold two blocks, which is half the array again and not a quarter.
- `vmatpush` (v5), `vmatpush1`, `2` and `3` (v6e, 7x) load 16 rows of bf16 weights and may stand 3 or 4 bundles apart:
  `msra` and `msrb` are two sets of weights, one filled while the other works. They are counted, not added.
- Results come back by `vpop`, 8 rows of float32 each: one per array on v4 and v5, where the accumulation over several
  128-deep (v6e: 256-deep) contraction blocks is vector adds; 7x accumulates in its result buffer (`mrb[i]`).
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_BUNDLE = re.compile(r"^ *(?:0x([0-9a-f]+)|0) +(LH|LB|LE|PB|PF|CT)? *:(?: >+)* *\{")
_BRANCH = re.compile(r"sbr\.rel (?:\([^)]*\) )?target = \$region(\d+)")
_STARTED = re.compile(r"Start region (\d+)")
_MATMUL = re.compile(r"\bvmatmul\.(\S*?)mxu(\d)")
_PUSH = re.compile(r"\bvmatpush")
_DMA = re.compile(r"\bdma\.(?:hbm_to|vmem_to_hbm|smem_to_hbm)\S* .*?/\*size_in_granules=\*/(\d+)")
_BOUNDS = re.compile(r"iteration_bounds: \(([\d, ]+)\)")
_VMEM = re.compile(r"^ *#allocation\d+ \[.*space=vmem, size = 0x([0-9a-f]+)", re.M)

SLOTS = {
    "matmul": "MATMUL",
    "push": "MATPUSH",
    "xlu": "XLU",
    "valu": "VALU",
    "eup": "EUP",
    "load": "VLOAD",
    "store": "VSTORE",
}


class DumpError(Exception):
    """The dump is not in the form that this module reads."""


@dataclass(frozen=True)
class Core:
    """One TensorCore, as far as the matrix units and the branches of its program go."""

    arrays: int
    width: int
    rows_per_cycle: int
    fast_8bit: tuple[str, ...]
    branch_shadow: int = 4
    granule: int = 32  # bytes that a copy is counted in

    @property
    def peak_bf16_flops(self) -> int:
        """Per cycle."""
        return 2 * self.arrays * self.width**2 * self.rows_per_cycle

    def matmul_cycles(self, kind: str) -> int:
        """Cycles that a vmatmul of this kind ("mubr.bf16.gmra.", ...) keeps its array busy."""
        rows = 32 if re.search(r"\b[suf][48]|\bbf8", kind) else 8 if "f32" in kind.replace("bf16", "") else 16
        fast = any(kind_8bit in kind for kind_8bit in self.fast_8bit) and "bf16" not in kind
        return rows // (self.rows_per_cycle * (2 if fast else 1))


CORES = {
    "v4": Core(4, 128, 1, ("s8", "u8"), granule=512),
    "v5e": Core(4, 128, 1, ("s8", "u8")),
    "v5p": Core(4, 128, 1, ("s8", "u8")),
    "v6e": Core(2, 256, 2, ("s8", "u8")),
    "tpu7x": Core(2, 256, 2, ("f8",), branch_shadow=6),
}


@dataclass
class Region:
    """A piece of the program that runs as often as nothing inside it: its own bundles, its inner regions' left out.

    `name` is the path to it: "top", "grid", "grid/when2" (the second skippable region in the grid's loop), "loop1".
    """

    name: str
    bundles: int = 0
    waits: int = 0  # cycles in which nothing issues
    mxu_by_array: Counter[str] = field(default_factory=Counter)
    matmuls: int = 0
    pushes: int = 0
    slots: Counter[str] = field(default_factory=Counter)
    spill_stores: int = 0
    spill_loads: int = 0
    dma_bytes: int = 0
    runs: float = 1

    @property
    def mxu_cycles(self) -> int:
        """Cycles that the busiest matrix unit needs for what one run gives it."""
        return max(self.mxu_by_array.values(), default=0)

    @property
    def cycles(self) -> int:
        """Predicted cycles of one run, if no copy is waited for."""
        return max(self.bundles + self.waits, self.mxu_cycles)


@dataclass(frozen=True)
class Program:
    """One kernel's schedule. `capacity` is what a bundle can hold of each of SLOTS; `steps` is None where not known."""

    name: str
    hlo_name: str
    regions: tuple[Region, ...]
    capacity: dict[str, int]
    steps: int | None
    vmem_bytes: int


@dataclass
class _Open:
    region: Region
    target: str = ""  # the region that the branch over this one jumps to
    headers: frozenset[str] = frozenset()  # of a loop: the numbers a branch back may name
    children: Counter[str] = field(default_factory=Counter)


def kernel_files(dump: Path) -> list[Path]:
    """The programs of Pallas kernels in a folder of dumps, in the order in which they were compiled."""
    found = []
    for path in sorted(dump.glob("*-final_bundles.txt")):
        if (match := _FILE.fullmatch(path.name)) and f"%{match[1]} = custom-call(" in path.read_text():
            found.append(path)
    return found


def read(bundles_file: Path, core: Core) -> Program:
    """The schedule in `<stamp>-<kernel>-<stage>-final_bundles.txt` and its neighbours; raises DumpError."""
    match = _FILE.fullmatch(bundles_file.name)
    if not match:
        raise DumpError(f"no kernel's name in {bundles_file.name!r}")
    text = bundles_file.read_text()
    bundles = list(_bundles(text))
    columns, capacity = _utilization(_neighbour(bundles_file, match[1], "final_hlo-static-per-bundle-utilization"))
    scheduled, _ = _utilization(_neighbour(bundles_file, match[1], "pre-delay_hlo-static-per-bundle-utilization"))
    if len(columns) != len(bundles):
        raise DumpError(f"{match[1]}: {len(bundles)} bundles but {len(columns)} rows of slots")
    regions = _regions(bundles, core)
    for region, (_, body, _), row in zip(regions, bundles, columns, strict=True):
        _add(region, body, row, core)
    for i, cycles in _waits(columns, scheduled):
        regions[i].waits += cycles
    bounds = _BOUNDS.search(text)
    steps = math.prod(int(bound) for bound in bounds[1].split(",")) if bounds else None
    original = _neighbour(bundles_file, match[1], "original").read_text()
    vmem = sum(int(size, 16) for size in _VMEM.findall(original))
    unique = tuple(dict((id(region), region) for region in regions).values())
    if steps and steps > 1:
        _name_grid(unique)
    return Program(re.sub(r"\.\d+$", "", match[1]), match[1], unique, capacity, steps, vmem)


def _name_grid(regions: tuple[Region, ...]) -> None:
    """Calls the first loop "grid". v5p wraps it in a test of whether its core has work, which says nothing here."""
    loop = next((region.name for region in regions if re.search(r"loop\d+$", region.name)), None)
    for region in regions:
        if loop and (region.name == loop or region.name.startswith(loop + "/")):
            region.name = "grid" + region.name.removeprefix(loop)


def _neighbour(file: Path, kernel: str, stage: str) -> Path:
    name = re.compile(rf"\d+-{re.escape(kernel)}-\d+-{stage}\.txt")
    found = [path for path in file.parent.glob(f"*-{stage}.txt") if name.fullmatch(path.name)]
    if len(found) != 1:
        raise DumpError(f"{len(found)} files of stage {stage} for {kernel}")
    return found[0]


def _bundles(text: str) -> Iterator[tuple[str, str, int]]:
    """(label, text, address) of each bundle; a bundle's comments may span lines."""
    lines: list[str] = []
    label, address = "", -1
    for line in text.splitlines():
        if match := _BUNDLE.match(line):
            if lines:
                yield label, "\n".join(lines), address
            lines, label, address = [line[match.end() :]], match[2] or "", int(match[1] or "0", 16)
        elif lines:
            lines.append(line)
    if not lines:
        raise DumpError("no bundles")
    yield label, "\n".join(lines), address


def _utilization(file: Path) -> tuple[list[dict[str, int]], dict[str, int]]:
    lines = file.read_text().splitlines()
    at = next((i for i, line in enumerate(lines) if "MATMUL" in line), None)
    if at is None:
        raise DumpError(f"no slot names in {file.name}")
    names = [name.strip() for name in lines[at].split(",")]
    if missing := [slot for slot in (*SLOTS.values(), "VLOAD:FILL", "VSTORE:SPILL") if slot not in names]:
        raise DumpError(f"no column {missing[0]} in {file.name}")
    numbers = [line for line in lines[at + 1 :] if line and not line.startswith("=")]
    rows = [dict(zip(names, map(int, line.split()), strict=True)) for line in numbers]
    return rows[1:], {slot: rows[0][column] for slot, column in SLOTS.items()}


def _waits(final: list[dict[str, int]], scheduled: list[dict[str, int]]) -> Iterator[tuple[int, int]]:
    """(bundle, cycles that pass after it with nothing issued), where there are some."""
    one_cycle = ("VALU", "VLOAD", "VSTORE", "SALU")
    work_of = [[tuple(row[slot] for slot in one_cycle) for row in rows] for rows in (final, scheduled)]
    at, at_scheduled = ([i for i, work in enumerate(rows) if any(work)] for rows in work_of)
    if [work_of[0][i] for i in at] != [work_of[1][j] for j in at_scheduled]:
        raise DumpError("the schedule before delays does other work than the program")
    before = before_scheduled = 0
    for i, j in [*zip(at, at_scheduled, strict=True), (len(final), len(scheduled))]:
        if waited := (j - before_scheduled) - (i - before):
            yield before, waited
        before, before_scheduled = i, j


def _regions(bundles: list[tuple[str, str, int]], core: Core) -> list[Region]:
    """The region of each bundle."""
    stack = [_Open(Region("top"))]
    found: list[Region] = []
    opening: list[tuple[int, str]] = []  # (bundle at which it opens, target)
    closing = -1  # the bundle at which the innermost loop ends
    for i, (label, body, _) in enumerate(bundles):
        if i == closing:
            stack.pop()
        if label in ("PF", "LB"):
            opening = _open_all(stack, opening, i, now=True)
        else:
            opening = _open_all(stack, opening, i, now=False)
        if label == "PF":
            if closing > i:  # the loop's last branch casts its shadow past its end
                stack.pop()
                closing = -1
            _close_when(stack)
        if label == "LB":
            stack.append(_child(stack[-1], "loop", headers=frozenset(_STARTED.findall(body))))
        if branch := _BRANCH.search(body):
            if branch[1] in stack[-1].headers:
                closing = i + 1 + core.branch_shadow
            else:
                opening.append((i + 1 + core.branch_shadow, branch[1]))
        found.append(stack[-1].region)
    return found


def _open_all(stack: list[_Open], opening: list[tuple[int, str]], i: int, now: bool) -> list[tuple[int, str]]:
    """Opens the skippable regions that begin at bundle i; `now`: also those whose branch's shadow reaches past it."""
    for start, target in opening:
        if now or start <= i:
            stack.append(_child(stack[-1], "when", target=target))
    return [] if now else [(start, target) for start, target in opening if start > i]


def _child(parent: _Open, kind: str, target: str = "", headers: frozenset[str] = frozenset()) -> _Open:
    parent.children[kind] += 1
    path = "" if parent.region.name == "top" else parent.region.name + "/"
    return _Open(Region(f"{path}{kind}{parent.children[kind]}"), target, headers)


def _close_when(stack: list[_Open]) -> None:
    if not stack[-1].target:
        raise DumpError(f"a skipped region ends inside {stack[-1].region.name}, which no branch skips")
    target = stack.pop().target
    while stack[-1].target == target:
        stack.pop()


def _add(region: Region, body: str, row: dict[str, int], core: Core) -> None:
    region.bundles += 1
    for kind, array in _MATMUL.findall(body):
        region.matmuls += 1
        region.mxu_by_array[array] += core.matmul_cycles(kind)
    region.pushes += len(_PUSH.findall(body))
    region.slots.update({slot: row[column] for slot, column in SLOTS.items()})
    region.spill_stores += row["VSTORE:SPILL"]
    region.spill_loads += row["VLOAD:FILL"]
    region.dma_bytes += core.granule * sum(int(granules) for granules in _DMA.findall(body))
