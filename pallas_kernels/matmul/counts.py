"""How often the regions of the matmul kernels run, for the schedule reader; blocks as chosen, tails nowhere."""

from collections.abc import Mapping
from typing import Any

from pallas_kernels.matmul import blocks
from pallas_kernels.matmul.blocks import KERNELS, RATES, Problem
from pallas_kernels.runtime import CHIPS

NAMES = {"forward": "jvp_{}_forward_", "dx": "transpose_jvp_{}_dx__", "dw": "transpose_jvp_{}_dw__"}
RECOMPUTED = "transpose_jvp_{}_forward__"


def counts(op: str, problem: Problem, generation: str, recompute: bool = False) -> dict[str, dict[str, float]]:
    """By kernel and region, of one forward and backward pass; of one core where two share the grid."""
    names = [(NAMES[kernel], kernel) for kernel in KERNELS] + [(RECOMPUTED, "forward")] * recompute
    return {name.format(op): _kernel_counts(kernel, problem, generation) for name, kernel in names}


def runs(kernel: str, values: Mapping[str, Any], generation: str, filled: float = 1.0) -> dict[str, float]:
    """By region, of one core: of a call that says of itself that it has these values (runtime.facts)."""
    return _kernel_counts(kernel, Problem(**values), generation)


def _kernel_counts(kernel: str, problem: Problem, generation: str) -> dict[str, float]:
    chip, cores = CHIPS[generation], RATES[generation][2]
    block = blocks.choose(kernel, problem, chip)
    n = {dim: -(-getattr(problem, dim) // getattr(block, dim)) for dim in "TFD"}
    outer, contracted = {"forward": ("T", "D"), "dx": ("T", "F"), "dw": ("F", "T")}[kernel]
    n[outer] = -(-n[outer] // cores)
    steps = n["T"] * n["F"] * n["D"]
    whens: list[float] = []  # the skippable regions, in the order of the program
    if kernel != "forward" and problem.factors and n["D"] > 1:
        whens.append(steps / n["D"])  # dz is formed; with one step along D in every step
    summed = n[contracted] > 1
    if summed:
        whens += [steps / n[contracted]] * 2  # sums begin, and end
    around = "grid/when1/" if steps > 1 else ""  # one step is no loop
    found = {f"{around}when{i + 1}": count for i, count in enumerate(whens)}
    tiles = (block.D if kernel == "dw" else block.T) // blocks.tile(kernel, problem, block, chip)
    if tiles > 1:
        found[f"{around}loop1"] = steps * tiles
        if kernel == "forward" and summed:
            found[f"{around}when2/loop1"] = found.pop(f"{around}when2") * tiles
    return found
