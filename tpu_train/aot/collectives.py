"""What crosses the mesh in a compiled step: kind, mesh axes, bytes, and whether other work runs meanwhile.

A Pallas kernel that sends round a ring, as its call says (runtime.facts), is one beside its own work: kind RING. A
collective overlaps if it is a pair, start and done, with instructions between them that the compiler gives cycles: a
`-start` operation, or a fusion called async-collective-start that holds the collective. Any other holds up the core.
"""

import ast
import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from pallas_kernels.hlo_cost import KERNEL, Instruction, Module

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
RING = "reduce-scatter-ring"  # of a kernel of collective_matmul
BETWEEN_SLICES = ("send",)  # each has its recv on another slice


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the schedule; bytes are those of the whole array, of one run, on one device."""

    kind: str
    axes: tuple[str, ...]
    devices: int  # that take part together
    bytes: int
    runs: int
    overlaps: bool
    cycles_meanwhile: float  # the compiler's estimate of what runs between start and done, and kernels' schedules
    kernels_meanwhile: int  # Pallas kernels there
    source: str

    @property
    def wire_bytes(self) -> float:
        """What one device sends in a run, by the ring: (n - 1) / n of the array, twice that for an all-reduce."""
        if self.kind == "collective-permute" or self.kind in BETWEEN_SLICES:
            return self.bytes
        return self.bytes * (self.devices - 1) / self.devices * (2 if self.kind == "all-reduce" else 1)


def find(module: Module, mesh: Mapping[str, int], root: str = "") -> list[Collective]:
    """All collectives of the module, on a mesh of these axis sizes, its devices in the mesh's order."""
    found = []
    for runs, computation, at, instruction in module.walk():
        if instruction.facts.get("op") == "collective_matmul":
            found.append(_of_kernel(module, runs, instruction, root))
        inner = _inside(module, instruction)
        if inner is None:
            continue
        kind = inner.op.removesuffix("-start")
        if "all-reduce-scatter" in instruction.name:
            kind = "reduce-scatter"
        groups = replica_groups(inner.rest, math.prod(mesh.values()))
        done = _done(module.computations[computation], at)
        between = module.computations[computation][at + 1 : at + 1 if done is None else done]
        meanwhile = sum(map(module.cycles, between))
        axes = () if kind in BETWEEN_SLICES else axes_of(groups, mesh)
        found.append(
            Collective(
                kind,
                axes,
                groups.shape[1] if groups.size else 1,
                _payload(module, computation, inner, kind, inner is not instruction),
                runs,
                meanwhile > 0,
                meanwhile,
                sum(KERNEL in other.rest for other in between),
                module.source(inner, root),
            )
        )
    return found


def _of_kernel(module: Module, runs: int, kernel: Instruction, root: str) -> Collective:
    """What a kernel sends round a ring: n - 1 of the n blocks of a whole array."""
    facts = {name: ast.literal_eval(kernel.facts[name]) for name in ("axis", "n", "D", "F", "itemsize")}
    size, cycles = facts["D"] * facts["F"] * facts["itemsize"], module.cycles(kernel)
    return Collective(RING, (facts["axis"],), facts["n"], size, runs, True, cycles, 1, module.source(kernel, root))


def _inside(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction is or starts."""
    if instruction.op.removesuffix("-start") in (*KINDS, *BETWEEN_SLICES):
        return instruction
    if instruction.op not in ("fusion", "async-start") or _is_done(instruction):
        return None
    body = module.computations.get(instruction.attribute("calls") or "", ())
    inner = next((inner for inner in body if inner.op in KINDS), None)
    # Work that the collective runs beside is fused with a piece of it, which the pair's start has counted.
    piece = inner is not None and "chain_id" in inner.rest and "collective-start" not in instruction.name
    return None if piece else inner


def _is_done(instruction: Instruction) -> bool:
    return "collective-done" in instruction.name or instruction.op.endswith("-done")


def _done(body: tuple[Instruction, ...], start: int) -> int | None:
    """Where the collective that starts at `start` is waited for; None where it is no pair."""
    first = body[start]
    if not (first.op.endswith("-start") or "collective-start" in first.name or first.op in BETWEEN_SLICES):
        return None
    known = {first.name}
    for at in range(start + 1, len(body)):
        if known.intersection(body[at].operands):
            if _is_done(body[at]):
                return at
            if body[at].op in ("get-tuple-element", "bitcast", "tuple", "fusion"):
                known.add(body[at].name)
    return None


def _payload(module: Module, computation: str, inner: Instruction, kind: str, wrapped: bool) -> int:
    """Bytes of the whole array: what a gather makes, what a reduction takes; of a ragged exchange, whose one side has
    room for the worst case, the other."""
    if kind in ("reduce-scatter", "ragged-all-to-all", *BETWEEN_SLICES):
        home = next(body for body in module.computations.values() if inner in body) if wrapped else None
        body = home or module.computations[computation]
        shapes = {instruction.name: instruction.arrays for instruction in body}
        if kind == "ragged-all-to-all":
            return min(shapes[name][0].content_bytes for name in inner.operands[:2])
        return sum(array.content_bytes for name in inner.operands for array in shapes[name] if array.dtype != "token")
    arrays = inner.arrays
    if inner.op.endswith("-start") and kind in ("all-gather", "collective-permute"):
        arrays = arrays[len(inner.operands) :][: len(inner.operands)]  # (operands, results, ...)
    return sum(array.content_bytes for array in arrays)


def replica_groups(attributes: str, devices: int) -> np.ndarray:
    """The groups of devices, one a row, from any of the forms that a module prints."""
    if pairs := re.search(r"source_target_pairs=\{(\{[^=]*\})\}", attributes):
        return np.array([[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", attributes):
        return np.array([[int(n) for n in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", listed[1])])
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, dims = ([int(n) for n in text.split(",")] for text in (iota[1], iota[2]))
        order = [int(n) for n in iota[3].split(",")] if iota[3] else range(len(dims))
        return np.arange(math.prod(dims)).reshape(dims).transpose(*order).reshape(shape)
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = [int(n) for n in re.findall(r"'=(\d+)", named[1])]
        names = re.findall(r"'([^']+)'=", named[1])
        inside = [names.index(name) for name in re.findall(r"'([^']+)'", named[2])]
        outside = [axis for axis in range(len(names)) if axis not in inside]
        ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(*outside, *inside)
        return ids.reshape(-1, math.prod(sizes[axis] for axis in inside))
    return np.arange(devices)[None]


def axes_of(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    sizes = list(mesh.values())
    places = np.stack(np.unravel_index(groups, sizes), axis=-1)
    differs = (places != places[:, :1]).any(axis=(0, 1))
    return tuple(axis for axis, yes in zip(mesh, differs, strict=True) if yes)
