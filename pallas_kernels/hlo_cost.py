"""Reads the text of a compiled module: its instructions in the order of the schedule, its loops, and its source lines.

Written for what the TPU compiler of libtpu 0.0.52 prints, and XLA for NVIDIA cards. A loop's trip count is what XLA
says, or the constant that its condition compares the counter with: JAX counts from 0 by 1.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%(\S+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\](?:\{([\d,]*):?([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_FACTS = re.compile(r"kernel_metadata=(\{[^{}]*\})")
KERNEL = 'custom_call_target="tpu_custom_call"'  # a Pallas kernel's call
_BITS = {"pred": 8, "bf16": 16, "token": 0}


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result; `space` 0 is HBM."""

    dtype: str
    dims: tuple[int, ...]
    space: int
    padded: int  # elements, with what the layout's tiles add

    @property
    def bytes(self) -> int:
        """As it lies in memory."""
        return self.padded * _bits(self.dtype) // 8

    @property
    def content_bytes(self) -> int:
        """Without the padding of its layout."""
        return math.prod(self.dims) * _bits(self.dtype) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`shape` and `rest` (operands and attributes) as printed."""

    name: str
    shape: str
    op: str
    rest: str

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, a tuple's one after the other."""
        return tuple(_array(*match) for match in _ARRAY.findall(self.shape))

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the instructions that it reads."""
        return tuple(re.findall(r"%([\w.-]+)", self.rest[: _closing(self.rest)]))

    def attribute(self, name: str) -> str | None:
        """The computation that an attribute names: "body", "condition", "calls", ..."""
        found = re.search(rf"\b{name}=%([\w.-]+)", self.rest)
        return found[1] if found else None

    @property
    def facts(self) -> dict[str, str]:
        """What a Pallas kernel's call says of itself (runtime.facts); {} where it says nothing."""
        found = _FACTS.search(self.rest)
        return json.loads(found[1]) if found else {}

    @property
    def cycles(self) -> int:
        """The compiler's own estimate; 0 where it gives none, as for copies, collectives and Pallas kernels."""
        found = _CYCLES.search(self.rest)
        return int(found[1]) if found else 0


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name, each in the order of the schedule."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]
    frames: dict[int, tuple[str, int, int]]  # id: file, line, id of the frame that called it (0: none)
    kernel_cycles: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of Pallas kernels' calls, by name

    def source(self, instruction: Instruction, root: str = "") -> str:
        """file:line of the innermost frame whose file is under `root`, without it; "" where there is none."""
        found = _FRAME.search(instruction.rest)
        at = int(found[1]) if found else 0
        while at in self.frames:
            file, line, at = self.frames[at]
            if file.startswith(root):
                return f"{file.removeprefix(f'{root}/') if root else file}:{line}"
        return ""

    def operation(self, instruction: Instruction) -> str:
        """JAX's own name of what it computes, as "jit(f)/transpose(jvp())/scatter-add"; "" where it has none."""
        found = re.search(r'op_name="([^"]*)"', instruction.rest)
        return found[1] if found else ""

    def trips(self, loop: Instruction) -> int | None:
        """How often a while's body runs; None where neither XLA nor its condition says."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
            return int(known[1])
        condition = self.computations[loop.attribute("condition") or ""]
        limits = [int(n) for i in condition if i.op == "constant" for n in re.findall(r"^(\d+)\)", i.rest)]
        return limits[0] if len(limits) == 1 else None

    @property
    def total_cycles(self) -> float:
        """The compiler's estimate for the whole program, and what kernel_cycles has of its Pallas kernels."""
        return self._sum(self.entry)

    def cycles(self, instruction: Instruction) -> float:
        """`Instruction.cycles`, and of what it calls: a loop's body as often as it runs, a conditional's dearest side.

        A loop whose trips are not known counts once.
        """
        if instruction.op == "while":
            return (self.trips(instruction) or 1) * self._sum(instruction.attribute("body"))
        if instruction.op in ("call", "conditional"):
            return max((self._sum(name) for name in branches(instruction)), default=0)
        return instruction.cycles + self.kernel_cycles.get(instruction.name, 0)

    def _sum(self, computation: str | None) -> float:
        return sum(self.cycles(instruction) for instruction in self.computations[computation or ""])

    def walk(self) -> Iterator[tuple[int, str, int, Instruction]]:
        """(runs in a step, computation, position in it, instruction) of all that is scheduled, fusions as a whole."""
        yield from self._walk(self.entry, 1)

    def _walk(self, computation: str, runs: int) -> Iterator[tuple[int, str, int, Instruction]]:
        for at, instruction in enumerate(self.computations[computation]):
            yield runs, computation, at, instruction
            if instruction.op == "while":
                times = runs * (self.trips(instruction) or 1)
                yield from self._walk(instruction.attribute("body") or "", times)
            elif instruction.op in ("call", "conditional"):
                for name in branches(instruction):
                    yield from self._walk(name, runs)


def branches(instruction: Instruction) -> list[str]:
    """The computations of a conditional's sides, or the one that a call runs."""
    if listed := re.search(r"branch_computations=\{([^}]*)\}", instruction.rest):
        return re.findall(r"%([\w.-]+)", listed[1])
    names = ("to_apply", "true_computation", "false_computation")
    return [found for name in names if (found := instruction.attribute(name))]


def parse(text: str) -> Module:
    """The module that `compiled.as_text()` prints. Raises ValueError where it has no entry."""
    computations: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in on_one_line(text).splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            computations[name] = []
            entry = name if start[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name and (found := _INSTRUCTION.match(line)):
            computations[name].append(_instruction(found[1], found[2]))
    if not entry:
        raise ValueError("the compiled module's text has no ENTRY computation")
    return Module(entry, {name: tuple(body) for name, body in computations.items()}, _frames(text))


def on_one_line(text: str) -> str:
    """The text with each instruction on a line: XLA prints what a kernel says of itself on several."""
    return _FACTS.sub(lambda found: found[0].replace("\n", ""), text)


def _instruction(name: str, body: str) -> Instruction:
    shape = body[: _closing(body[1:]) + 2] if body.startswith("(") else body.partition(" ")[0]
    op, _, rest = body[len(shape) + 1 :].partition("(")
    return Instruction(name, shape, op, rest)


def _closing(text: str) -> int:
    """Where the bracket that stands open before `text` closes."""
    depth = 1
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return at
    return len(text)


def _array(dtype: str, dims_text: str, order_text: str, layout: str) -> Array:
    dims = tuple(int(n) for n in dims_text.split(",") if n)
    space = re.search(r"S\((\d+)\)", layout)
    padded = list(dims)
    tile = _TILE.search(layout)
    minor_first = [int(n) for n in order_text.split(",") if n]
    if tile:
        sides = [int(n) for n in tile[1].split(",")]
        for dim, side in zip(minor_first, reversed(sides), strict=False):
            padded[dim] = -(-padded[dim] // side) * side
    return Array(dtype, dims, int(space[1]) if space else 0, math.prod(padded))


def _bits(dtype: str) -> int:
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return _BITS[dtype] if dtype in _BITS else int(digits[1]) if digits else 32


def _frames(text: str) -> dict[int, tuple[str, int, int]]:
    files = {int(n): file for n, file in re.findall(r'^(\d+) "(.*)"$', _table(text, "FileNames"), re.M)}
    places = {
        int(n): (files[int(file)], int(line))
        for n, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _table(text, "FileLocations"), re.M
        )
    }
    frames = re.findall(
        r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(text, "StackFrames"), re.M
    )
    # A parent's id is printed one higher than the frame's own; the first frame names itself so.
    return {int(n): (*places[int(place)], int(parent or 1) - 1) for n, place, parent in frames}


def _table(text: str, name: str) -> str:
    found = re.search(rf"^{name}\n(.*?)\n\n", text, re.M | re.S)
    return found[1] if found else ""
