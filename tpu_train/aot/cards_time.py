"""What each operation of a step compiled for NVIDIA cards takes at least: XLA gives no estimate there.

The larger of its FLOPs over the card's peak and of its bytes over the memory's speed (a roofline). Products are those
that stand in the module's text, within a fusion or as a call of cuBLAS; cuDNN's attention the traced step counts.
"""

import math
import re
from collections.abc import Mapping

from pallas_kernels.hlo_cost import Instruction, Module
from tpu_train.aot import traffic
from tpu_train.aot.cards import Card

# Names under which the traced step counts cuDNN's attention (aot/flops.py), and its calls in the module.
CUDNN = {
    "cudnn_attention_forward": '"__cudnn$fmhaSoftmax"',
    "cudnn_attention_backward": '"__cudnn$fmhaSoftmaxBackward"',
}
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')


def nanoseconds(module: Module, card: Card, attention: Mapping[str, float | None]) -> dict[str, float]:
    """Of one run of each instruction that moves or multiplies anything. `attention`: FLOPs of a step, by name."""
    walked = list(module.walk())
    runs = {name: sum(r for r, _, _, i in walked if target in i.rest) for name, target in CUDNN.items()}
    found: dict[str, float] = {}
    for _, instruction, size in traffic.by_instruction(module):
        if _waits(module, instruction):  # for the network, which is counted by itself
            continue
        flops = next((attention.get(name) or 0.0 for name, target in CUDNN.items() if target in instruction.rest), None)
        if flops is None:
            half, full = _products(module, instruction, {})
        else:
            name = next(name for name, target in CUDNN.items() if target in instruction.rest)
            half, full = flops / runs[name], 0.0
        peak, memory = card.chip.bf16_flops or math.inf, card.chip.memory_bytes or math.inf
        seconds = max(half / peak + full / card.float32_flops, size / memory)
        if seconds:
            found[instruction.name] = seconds * 1e9
    return found


def _waits(module: Module, instruction: Instruction) -> bool:
    """Whether it is a collective, or the start or end of one."""
    body = module.computations.get(instruction.attribute("calls") or "", ())
    names = [instruction.op, *(inner.op for inner in body if instruction.op.startswith("async-"))]
    return instruction.op.endswith("-done") or any(re.match(r"all-|reduce-scatter|collective-", name) for name in names)


def _products(module: Module, instruction: Instruction, shapes: dict[str, tuple[str, tuple[int, ...]]]):
    """(FLOPs of products of 16 bits, of float32) in an instruction and what it calls; `shapes` of its operands."""
    half = full = 0.0
    body = module.computations.get(instruction.attribute("calls") or "", ())
    inside = {i.name: (i.arrays[0].dtype, i.arrays[0].dims) for i in body if i.arrays}
    for inner in body:
        more = _products(module, inner, inside)
        half, full = half + more[0], full + more[1]
    if instruction.op == "dot" or "__cublas" in instruction.rest:
        if not shapes:
            home = next(body for body in module.computations.values() if instruction in body)
            shapes = {i.name: (i.arrays[0].dtype, i.arrays[0].dims) for i in home if i.arrays}
        dtype, dims = shapes[instruction.operands[0]]
        contracted = _CONTRACTED.search(instruction.rest)
        depth = math.prod(dims[int(n)] for n in re.findall(r"\d+", contracted[1])) if contracted else 1
        flops = 2.0 * depth * math.prod(instruction.arrays[0].dims)
        return (half, full + flops) if dtype == "f32" else (half + flops, full)
    return half, full
