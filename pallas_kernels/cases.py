"""The kernels' cases: each a kernel at one shape, with what its op's own arithmetic says of it.

`tpu-train kernels` measures them, and the schedule budget holds each to what it once took (tests/aot). An op adds its
own: functions `cases() -> list[Case]` and `runs(kernel, values, generation, filled) -> Counts` in
pallas_kernels/<op>/cases.py, and its name here in OPS. `runs` serves a kernel in any program (tpu-train compile).
"""

import ast
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pallas_kernels.schedule import Counts, Job, ScheduleError, parse_topology

OPS = {
    "flash_attention": "pallas_kernels.attention.cases",
    "gated_mlp": "pallas_kernels.gated_mlp.cases",
    "grouped_matmul": "pallas_kernels.grouped_matmul.cases",
    "linear_cross_entropy": "pallas_kernels.cross_entropy.cases",
    "quantized_matmul": "pallas_kernels.quantized_matmul.cases",
}  # op: the module with its cases()
# Ops whose kernels send to other devices: schedule.py compiles for one, so these have `runs` and no cases.
OF_SEVERAL = {"collective_matmul": "pallas_kernels.collective_matmul.cases"}


@dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    `name` is unique and starts with the op's, as in "flash_attention/forward/causal-4096x128". `fn` holds one Pallas
    kernel or several, `args` are jax.ShapeDtypeStructs. `counts` says how often the kernels' regions run, by kernel and
    for each generation alike or, where the program's regions differ, as a function of the generation. `flops` is the
    useful work: what a mask hides does not count. `ids` are values of integer arguments by their place in `args`, where
    the counts are of these values; a run on a device takes them.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    counts: Mapping[str, Counts] | Callable[[str], Mapping[str, Counts]] = field(default_factory=dict)
    flops: float | None = None
    ids: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def job(self, topology: str) -> Job:
        """What `schedule.measure_all` takes; raises ScheduleError for an unknown topology."""
        generation, topology = parse_topology(topology)
        counts = self.counts(generation) if callable(self.counts) else self.counts
        return Job(self.fn, self.args, topology, counts, self.flops)


def all_cases(op: str | None = None) -> list[Case]:
    """The cases of one op, or of all."""
    found: list[Case] = []
    for name, module in OPS.items():
        if op in (None, name):
            found += importlib.import_module(module).cases()
    return found


def runs_of(facts: Mapping[str, str], generation: str, filled: float = 1.0) -> Counts:
    """How often the regions of a kernel run on one core, from what its call says of itself (runtime.facts).

    `filled`: of the rows that a grouped product has room for, the share that comes, evenly to all groups. Raises
    ScheduleError where no op knows.
    """
    values = {name: ast.literal_eval(text) for name, text in facts.items() if name not in ("op", "kernel")}
    module = (OPS | OF_SEVERAL).get(facts.get("op", ""))
    if module is None:
        raise ScheduleError("no op says how often its regions run")
    return importlib.import_module(module).runs(facts["kernel"], values, generation, filled)
