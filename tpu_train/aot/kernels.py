"""The Pallas kernels of a compiled step: how often each runs, and the cycles that its schedule says it takes.

The compile of the step dumps each kernel's program (pallas_kernels/schedule_dump.py reads it). The loops around a call
say how often it runs; what the call says of itself (runtime.facts), how often its regions do. A device goes one way at
a conditional, and which differs between devices: each side counts as an equal part of a run.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from pallas_kernels import cases, schedule
from pallas_kernels.hlo_cost import KERNEL, Instruction, Module, branches
from pallas_kernels.schedule_dump import CORES, DumpError, is_there, read


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the compiled module.

    `cycles`, and those of the matrix units alone: of one run, on one core; None where they are not known, for `why`.
    """

    name: str
    instruction: str
    runs: float
    cycles: float | None
    mxu_cycles: float | None
    why: str = ""


def find(module: Module, dump: Path, generation: str, filled: float = 1.0) -> list[Call]:
    """All calls of Pallas kernels; `filled` as cases.runs_of has it."""
    calls = list(_calls(module))
    return [
        _call(runs, instruction, [other for _, other in calls], dump, generation, filled) for runs, instruction in calls
    ]


def _calls(module: Module) -> Iterator[tuple[float, Instruction]]:
    share = {module.entry: 1.0}
    for runs, computation, _, instruction in module.walk():
        inside = [instruction.attribute("body") or ""] if instruction.op == "while" else branches(instruction)
        if instruction.op in ("while", "call", "conditional"):
            share |= {name: share[computation] / len(inside) for name in inside}
        elif KERNEL in instruction.rest:
            yield runs * share[computation], instruction


def _call(
    runs: float, instruction: Instruction, others: list[Instruction], dump: Path, generation: str, filled: float
) -> Call:
    facts = instruction.facts
    name = f"{facts['op']}_{facts['kernel']}" if "op" in facts else instruction.name
    try:
        counts = cases.runs_of(facts, generation, filled)
        program = read(dump, _dumped(instruction, others, dump), CORES[generation])
        kernel = schedule.counted(program, counts, generation, {})
        return Call(name, instruction.name, runs, kernel.cycles, kernel.mxu_cycles)
    except (schedule.ScheduleError, DumpError) as error:
        return Call(name, instruction.name, runs, None, None, str(error))


def _dumped(instruction: Instruction, others: list[Instruction], dump: Path) -> str:
    """The call itself, or one of the same kernel: libtpu compiles what is equal once, under one of the names."""
    types = [(array.dtype, array.dims) for array in instruction.arrays]
    same = [
        other
        for other in (instruction, *others)
        if other.facts == instruction.facts and [(array.dtype, array.dims) for array in other.arrays] == types
    ]
    return next((one.name for one in same if is_there(dump, one.name)), instruction.name)
