"""How often the regions of the kernels that send round a ring run, in any program (tpu-train compile).

They have no case of their own: the schedule reader compiles for one device, and a ring has several.
"""

from collections.abc import Mapping
from typing import Any

from pallas_kernels.collective_matmul import blocks
from pallas_kernels.collective_matmul.blocks import Problem
from pallas_kernels.collective_matmul.ring import left
from pallas_kernels.runtime import CHIPS
from pallas_kernels.schedule import Counts


def runs(kernel: str, values: Mapping[str, Any], generation: str, filled: float = 1.0) -> Counts:
    """By region, of one core, which does it all: of a call that says of itself that it has these values."""
    problem, chip = Problem(**{name: value for name, value in values.items() if name != "axis"}), CHIPS[generation]
    block = blocks.choose(problem, chip)
    waves, parts, n = problem.F // block.F, problem.T // block.T, problem.n
    whens = [1.0]  # the skippable regions, in the order of the program: the barrier
    if problem.factor and parts == 1:
        whens.append(waves)  # dz is formed
    whens += [waves * (n - 1), waves]  # a sum is sent on; a block is at home
    found = {f"grid/when1/when{i}": count for i, count in enumerate(whens, 1)}
    starts = 2 if left(n) else 1
    found[f"grid/when1/when{len(whens) - 1}/when1"] = waves * (n - 1 - starts)  # what came is added
    tiles = problem.rows // blocks.tile(problem, block, chip)
    if tiles > 1:
        found["grid/when1/loop1"] = waves * n * parts * tiles
    found["grid"] = waves * n * parts
    # By a function: of a small kernel the compiler leaves regions out, and where XLA has put all blocks into VMEM the
    # grid is a loop like any other.
    return lambda region: found.get(
        "grid" + region.name.removeprefix("loop1") if region.name.startswith("loop1") else region.name
    )
