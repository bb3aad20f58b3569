"""The buffers that fill HBM at the fullest moment of a step, from what XLA dumps beside the module.

XLA writes `*.after_optimizations-live-range.txt` (with --xla_dump_to) also for a program that does not fit. Under
"Live ranges at 7 (peak):" it lists what is alive then, each with the instruction that makes it.
"""

import dataclasses
import re

from pallas_kernels.hlo_cost import Instruction, Module

_PEAK = re.compile(r"^ *Live ranges at \d+ \(peak\):\n((?: +\S+\{[\d,]*\}: \d+ bytes.*\n)*)", re.M)
_LINE = re.compile(r"^ +(\S+)\{([\d,]*)\}: (\d+) bytes", re.M)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer alive at the peak; `argument`: it is the step's own (weights, moments, batch)."""

    bytes: int
    shape: str
    instruction: str
    source: str
    argument: bool


def at_peak(live_ranges: str, module: Module, root: str = "") -> list[Buffer]:
    """The buffers in HBM at the peak, largest first. Raises ValueError where the dump has no peak."""
    found = _PEAK.search(live_ranges)
    if found is None:
        raise ValueError("no peak in the dump of live ranges")
    made = {instruction.name: instruction for body in module.computations.values() for instruction in body}
    buffers = []
    for name, index, size in _LINE.findall(found[1]):
        instruction = made.get(name)
        if instruction is None:
            buffers.append(Buffer(int(size), "", name, "", False))
            continue
        at = int(index.split(",")[0]) if index else 0
        array = instruction.arrays[at] if at < len(instruction.arrays) else None
        if array is not None and array.space:
            continue
        source = _source(module, instruction, root) or module.operation(instruction)
        buffers.append(Buffer(int(size), str(array or ""), name, source, instruction.op == "parameter"))
    return sorted(buffers, key=lambda buffer: -buffer.bytes)


def _source(module: Module, instruction: Instruction, root: str) -> str:
    """Its own line; for a buffer that was only set aside, that of what fills it, inside a loop that carries it too."""
    if own := module.source(instruction, root):
        return own
    body = next(body for body in module.computations.values() if instruction in body)
    readers = [one for one in body if instruction.name in one.operands]
    for carry in [one for one in readers if one.op == "tuple"]:
        at = carry.operands.index(instruction.name)
        for loop in [one for one in body if one.op == "while" and carry.name in one.operands]:
            inside = module.computations[loop.attribute("body") or ""]
            names = {i.name for i in inside if i.op == "get-tuple-element" and f"index={at}" in i.rest.split(", ")}
            readers += [one for one in inside if names.intersection(one.operands)]
    return next((line for one in readers if (line := module.source(one, root))), "")
