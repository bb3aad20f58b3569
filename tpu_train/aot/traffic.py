"""Bytes between HBM and the core in a compiled step, as often as its loops run.

The compiler's own count takes a loop's body once. An instruction reads its operands and writes its result, as far as
these lie in HBM; where a fusion takes a slice of an operand, or updates a part of it in place, only that part counts.
"""

from collections.abc import Iterator, Sequence

from pallas_kernels.hlo_cost import Array, Instruction, Module

# What moves nothing: names for what is there already, and control flow, whose inside is walked.
FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
    *("optimization-barrier", "partition-id", "replica-id", "iota", "after-all"),
)
ALLOCATES = ('custom_call_target="AllocateBuffer"', 'custom_call_target="ConcatBitcast"')


def hbm_bytes(module: Module) -> float:
    """Of all the module's instructions, on one device."""
    return sum(runs * size for runs, _, size in by_instruction(module))


def by_instruction(module: Module) -> Iterator[tuple[int, Instruction, int]]:
    """(runs in a step, instruction, bytes of one run) of all that is scheduled."""
    shapes = {
        name: {instruction.name: instruction.arrays for instruction in body}
        for name, body in module.computations.items()
    }
    for runs, computation, _, instruction in module.walk():
        operands = [shapes[computation].get(name, ()) for name in instruction.operands]
        yield runs, instruction, _of(module, instruction, operands)


def _of(module: Module, instruction: Instruction, operands: Sequence[tuple[Array, ...]]) -> int:
    waits = instruction.op.endswith("-done") or "collective-done" in instruction.name
    if instruction.op in FREE or waits or any(target in instruction.rest for target in ALLOCATES):
        return 0
    if instruction.op.endswith("-start"):  # (operand, result, flags): both sides of a copy
        return _size(instruction.arrays)
    body = module.computations.get(instruction.attribute("calls") or "", ())
    if not body:
        return _plain(instruction, operands)
    parameters = {int(i.rest.partition(")")[0]): i.name for i in body if i.op == "parameter"}
    read = sum(_read(body, parameters.get(at, ""), _size(arrays)) for at, arrays in enumerate(operands))
    updates = [i for i in body if i.op == "dynamic-update-slice"]
    by_name = {i.name: i for i in body}
    written = _size(instruction.arrays)
    for update in updates:
        whole, part = (by_name[name].arrays for name in update.operands[:2])
        if written >= (size := sum(array.bytes for array in whole)):
            written -= size - sum(array.bytes for array in part)
    return read + written


def _plain(instruction: Instruction, operands: Sequence[tuple[Array, ...]]) -> int:
    if instruction.op == "dynamic-slice":
        return 2 * _size(instruction.arrays)
    if instruction.op == "dynamic-update-slice":
        return 2 * _size(operands[1])
    return _size(instruction.arrays) + sum(map(_size, operands))


def _read(body: tuple[Instruction, ...], parameter: str, whole: int) -> int:
    """Bytes of a fusion's operand that it reads: all, or what it slices; none of what it only updates."""
    names, parts = {parameter}, 0
    for instruction in body:
        if not names.intersection(instruction.operands):
            continue
        if instruction.op == "bitcast":
            names.add(instruction.name)
        elif instruction.op == "dynamic-slice":
            parts += sum(array.bytes for array in instruction.arrays)
        elif instruction.op != "dynamic-update-slice" or instruction.operands[0] not in names:
            return whole
    return min(parts, whole)


def _size(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays if array.space == 0)
