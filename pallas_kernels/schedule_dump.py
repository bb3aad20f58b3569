"""Reads what the TPU compiler writes about one kernel: its VLIW schedule, and the regions of its program.

Three of the dump's files matter, read here as libtpu 0.0.52 writes them (see `schedule.py` for how they come about):

- `*-pre-delay_hlo-static-per-bundle-utilization.txt` has a row of slot counts for each cycle of the schedule, under a
  row of capacities. In some nothing issues, since a unit is still busy; the encoded program leaves those out, and the
  hardware waits by itself. A product fills its slot for as long as it keeps its matrix unit busy.
- `*-post-delay-converter.txt` lists the instructions of that schedule, basic block by basic block, without the rows.
  `$region31: ... parent=29 // pred_region` is skipped where a branch before it is taken: a `pl.when`, or a `lax.cond`
  side, that was not turned into predicated instructions. `// loop_body` begins a loop; its footer and header, which
  follow, turn with it. One bundle's instructions are not next to each other.
- `*-original.txt` has the memory that the program allots.

Which rows a block has follows from counting: a schedule keeps to basic blocks, so the rows of the first blocks hold as
many stores, pops, scalar instructions ... as their text does. Rows at a seam in which
only arithmetic issues, or nothing, count with the block before it, as do the bundles in a branch's shadow.

The final bundles are in the dump too (`*-final_bundles.txt`), but to print them libtpu packs each program anew, several
times: 157 core-seconds for attention's two kernels in place of 18. Read both ways, the cycles of the registered kernels
differ by 1.3 % at most.

A kernel of the dump holds its pipeline too: the loop over the grid is the region `grid`, and the block copies and the
test of whether this turn of the loop computes (`grid/when1`, once per grid step) are in it. A grid of one step has no
loop. Which `pl.when` is which differs between generations: 7x has regions that elsewhere are predicated instructions.

What occupies the matrix units, found by compiling products of known size for v4, v5e, v5p, v6e and 7x:

- One `vmatmul` streams the rows of one vector register past the weights of one array: 8 rows of float32 (a bf16 pass;
  HIGHEST issues six), 16 of bf16, 32 of an 8-bit type. v4, v5e and v5p have 4 arrays of 128 x 128 a core that take a
  row a cycle, so 8, 16 and 32 cycles; v6e and 7x have 2 of 256 x 256 that take two rows a cycle, so 4, 8 and 16.
  Twice the rows a cycle: int8 everywhere it exists, fp8 on 7x alone. fp8 elsewhere (`f8e5m2.bf16`) runs as bf16.
- The compiler knows this only roughly: it issues a 16-row bf16 product every 12 bundles on v5e and every 6 on 7x
  (8 on v6e). Hence cycles of a region = max(bundles, busiest array's occupancy).
- On a 256-wide array a contraction of 128, or an output of 128 columns, costs what 256 would. Only if both are 128
  does `vmatpush3` hold two blocks, which is half the array again and not a quarter.
- `vmatpush` (v5), `vmatpush1`, `2` and `3` (v6e, 7x) load 16 rows of bf16 weights and may stand 3 or 4 bundles apart:
  `msra` and `msrb` are two sets of weights, one filled while the other works. They are counted, not added.
- Results come back by `vpop`, 8 rows of float32 each: one per array on v4 and v5, where the accumulation over several
  128-deep (v6e: 256-deep) contraction blocks is vector adds; 7x accumulates in its result buffer (`mrb[i]`).
"""

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

_CALL = re.compile(r'^ *(?:ROOT )?%(\S+) = .* custom-call\(.*custom_call_target="tpu_custom_call"', re.M)
_PROGRAM = re.compile(r"\d+-(.+)-\d+-post-delay-converter\.txt")
_REGION = re.compile(r" *\$region(\d+):.*?(?: parent=(\d+))?(?: // (\w+))?$")
_INSTRUCTION = re.compile(r" *%\S+ = ([a-z_0-9]+(?:\.done)?)")
_MATMUL = re.compile(r"= vmatmul\.(\S*?)mxu(\d)")
_DMA = re.compile(r"= dma\.(?:hbm_to|vmem_to_hbm|smem_to_hbm)\S* .*?/\*size_in_granules=\*/(\d+)")
_BOUNDS = re.compile(r"iteration_bounds: \(([\d, ]+)\)")
_VMEM = re.compile(r"^ *#allocation\d+ \[.*space=vmem, size = 0x([0-9a-f]+)", re.M)

_EUP = ("vexp2", "vlog2", "vpow2", "vrcp", "vrsqrt", "vtanh", "verf", "vsigshft")

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
    "tpu7x": Core(2, 256, 2, ("f8",)),
}


@dataclass
class Region:
    """A piece of the program that runs as often as nothing inside it: its own bundles, its inner regions' left out.

    `name` is the path to it: "top", "grid", "grid/when2" (the second skippable region in the grid's loop), "loop1".
    """

    name: str
    bundles: int = 0  # cycles of the schedule
    idle: int = 0  # those of them in which nothing issues
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
        return max(self.bundles, self.mxu_cycles)


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
class _Block:
    """Instructions in a row of one region, as the text has them."""

    region: Region
    lines: list[str] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)


def read(folder: Path, hlo_name: str, core: Core) -> Program:
    """The schedule of the instruction `hlo_name` of the module in a folder of dumps; raises DumpError."""
    text = _file(folder, hlo_name, "post-delay-converter").read_text()
    rows, capacity = _utilization(_file(folder, hlo_name, "pre-delay_hlo-static-per-bundle-utilization"))
    blocks = list(_blocks(text))
    start = 0
    for block, stop in zip(blocks, _stops(blocks, rows, hlo_name), strict=True):
        _add(block, rows[start:stop], core)
        start = stop
    distinct = {id(block.region): block.region for block in blocks}.values()
    regions = tuple(region for region in distinct if region.bundles)
    bounds = _BOUNDS.search(text)
    steps = math.prod(int(bound) for bound in bounds[1].split(",")) if bounds else None
    if steps and steps > 1:
        _name_grid(regions)
    vmem = sum(int(size, 16) for size in _VMEM.findall(_file(folder, hlo_name, "original").read_text()))
    return Program(re.sub(r"\.\d+$", "", hlo_name), hlo_name, regions, capacity, steps, vmem)


def kernels(folder: Path, module: str) -> list[str]:
    """The Pallas kernels of a compiled module's text that the dump has programs of, in the order of their compiling."""
    calls = set(_CALL.findall(module))
    programs = [_PROGRAM.fullmatch(path.name) for path in sorted(folder.glob("*-post-delay-converter.txt"))]
    return [match[1] for match in programs if match and match[1] in calls]


def is_there(folder: Path, hlo_name: str) -> bool:
    """Whether the folder has the program of the instruction `hlo_name`."""
    return bool(_files(folder, hlo_name, "post-delay-converter"))


def _files(folder: Path, hlo_name: str, stage: str) -> list[Path]:
    name = re.compile(rf"\d+-{re.escape(hlo_name)}-\d+-{stage}\.txt")
    return [path for path in folder.glob(f"*-{stage}.txt") if name.fullmatch(path.name)]


def _file(folder: Path, hlo_name: str, stage: str) -> Path:
    found = _files(folder, hlo_name, stage)
    if len(found) != 1:
        raise DumpError(f"{len(found)} files of stage {stage} for {hlo_name}")
    return found[0]


def _blocks(text: str) -> Iterator[_Block]:
    regions: dict[str, Region] = {}  # by the dump's number
    children: Counter[tuple[str, str]] = Counter()
    last_loop: dict[str, Region] = {}  # the loop last begun in each region
    block = None
    for line in text.splitlines():
        if match := _REGION.match(line):
            number, parent, kind = match[1], match[2], match[3] or ""
            if parent is not None and parent not in regions:
                raise DumpError(f"region {number} is in a region {parent} that has not begun")
            around = Region("top") if parent is None else regions[parent]
            if kind in ("pred_region", "loop_body"):
                region = _child(around, "when" if kind == "pred_region" else "loop", children)
                if kind == "loop_body":
                    last_loop[around.name] = region
            elif kind.startswith(("loop_footer", "loop_header")):
                if around.name not in last_loop:
                    raise DumpError(f"region {number} ends a loop that has not begun")
                region = last_loop[around.name]
            else:
                region = around
            regions[number] = region
            if block is not None:
                yield block
            block = _Block(region)
        elif block is not None and (match := _INSTRUCTION.match(line)):
            block.lines.append(line)
            block.operations[match[1]] += 1
    if block is None:
        raise DumpError("no regions")
    yield block


def _child(around: Region, kind: str, children: Counter[tuple[str, str]]) -> Region:
    children[around.name, kind] += 1
    path = "" if around.name == "top" else around.name + "/"
    return Region(f"{path}{kind}{children[around.name, kind]}")


def _slot(operation: str) -> str | None:
    """The column that counts an operation, as far as one does exactly; arithmetic may fill several."""
    if operation == "vpop":
        return "VPOP"
    if operation in _EUP:
        return "EUP"
    if operation in ("vst", "vpush"):
        return "VSTORE"
    if operation in ("vld", "vsyncpa", "vsyncadd", "dma.done"):
        return "VLOAD"
    return "SALU" if operation == "dma" or (operation[0] in "sp" and operation != "sphi") else None


_COUNTED = ("SALU", "VLOAD", "VSTORE", "VPOP", "EUP")


def _stops(blocks: list[_Block], rows: list[dict[str, int]], hlo_name: str) -> Iterator[int]:
    """The row after the last of each block: where the rows before it fill the slots that its text and theirs do."""
    filled = {slot: list(accumulate((row[slot] for row in rows), initial=0)) for slot in _COUNTED}
    listed: dict[str, list[int]] = {slot: [] for slot in _COUNTED}
    counts = Counter[str]()
    for block in blocks:
        for operation, count in block.operations.items():
            if slot := _slot(operation):
                counts[slot] += count
        for slot in _COUNTED:
            listed[slot].append(counts[slot])
    exact = [slot for slot in _COUNTED if abs(filled[slot][-1] - counts[slot]) <= 2 + counts[slot] / 200]
    if len(exact) < 3:
        raise DumpError(f"{hlo_name}: its text and its rows differ in all slots but {', '.join(exact) or 'none'}")
    stop = 0
    for i in range(len(blocks) - 1):
        targets = [(filled[slot], listed[slot][i]) for slot in exact]

        def misfit(row: int, targets: list[tuple[list[int], int]] = targets) -> int:
            return sum(abs(total[row] - wanted) for total, wanted in targets)

        # Between two of these rows nothing that is counted issues.
        stop = max(stop, min((bisect_right(total, wanted) - 1 for total, wanted in targets), key=misfit))
        yield stop
    yield len(rows)


def _name_grid(regions: tuple[Region, ...]) -> None:
    """Calls the first loop "grid". v5p wraps it in a test of whether its core has work, which says nothing here."""
    loop = next((region.name for region in regions if re.search(r"loop\d+$", region.name)), None)
    for region in regions:
        if loop and (region.name == loop or region.name.startswith(loop + "/")):
            region.name = "grid" + region.name.removeprefix(loop)
    _name_copies(regions)


def _name_copies(regions: tuple[Region, ...]) -> None:
    """Calls "grid/copy1" what stands before the region that computes: some programs only begin copies there."""
    work = Counter[int]()
    inside = {id(region): match for region in regions if (match := re.match(r"grid/when(\d+)", region.name))}
    for region in regions:
        if match := inside.get(id(region)):
            work[int(match[1])] += region.matmuls
    first = max(work, key=lambda at: work[at], default=1)
    for region in regions:
        if (match := inside.get(id(region))) and first > 1:
            at = int(match[1])
            name = f"copy{at}" if at < first else f"when{at - first + 1}"
            region.name = f"grid/{name}{region.name.removeprefix(match[0])}"


def _utilization(file: Path) -> tuple[list[dict[str, int]], dict[str, int]]:
    lines = file.read_text().splitlines()
    at = next((i for i, line in enumerate(lines) if "MATMUL" in line), None)
    if at is None:
        raise DumpError(f"no slot names in {file.name}")
    names = [name.strip() for name in lines[at].split(",")]
    needed = (*SLOTS.values(), *_COUNTED, "VLOAD:FILL", "VSTORE:SPILL")
    if missing := [slot for slot in needed if slot not in names]:
        raise DumpError(f"no column {missing[0]} in {file.name}")
    numbers = [line for line in lines[at + 1 :] if line and not line.startswith("=")]
    rows = [dict(zip(names, map(int, line.split()), strict=True)) for line in numbers]
    return rows[1:], {slot: rows[0][column] for slot, column in SLOTS.items()}


def _add(block: _Block, rows: list[dict[str, int]], core: Core) -> None:
    region = block.region
    region.bundles += len(rows)
    for row in rows:
        region.idle += not any(row[slot] for slot in row if slot not in ("MATMUL", "MATPUSH"))
        region.slots.update({slot: row[column] for slot, column in SLOTS.items()})
        region.spill_stores += row["VSTORE:SPILL"]
        region.spill_loads += row["VLOAD:FILL"]
    for line in block.lines:
        if match := _MATMUL.search(line):
            region.matmuls += 1
            region.mxu_by_array[match[2]] += core.matmul_cycles(match[1])
        elif match := _DMA.search(line):
            region.dma_bytes += core.granule * int(match[1])
    region.pushes += sum(n for operation, n in block.operations.items() if operation.startswith("vmatpush"))
