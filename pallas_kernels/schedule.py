"""Compiles Pallas kernels for a TPU that is not there, and reads what the compiler made of them.

    report = schedule.measure(fn, *shape_dtype_structs, topology="v6e:1x1")
    print(report.table())

`fn` is anything jax.jit takes, with one Pallas kernel or several in it, ours or not. It is lowered here, by jax.export
under a mesh of one device of that generation, and compiled in another process, since libtpu reads its dump flags once,
when it loads. `measure_all` compiles several programs in that one process, whose start takes seconds.

The figures are predictions: what the program's bundles, idle ones among them, and the matrix units need, if no copy
between HBM and VMEM is ever waited for. There is no TPU in it, no numerics and no clock. `schedule_dump.py` says what
is read, and what the dumps show of the matrix units.

Regions and their counts. A kernel is cut where its program branches: `Region.name` is "top", "grid" (the loop over the
grid), "grid/when2" (the second region of it that may be skipped). How often each runs is the op's own arithmetic, so
the caller states it: `counts={"kernel": {"grid/when1": 64, "grid/when1/when2": 36}}`, or a function of the region. A
region that is not named runs as often as the region around it, "top" once, and "grid" once a step of the grid. Without
counts every region is thus taken to run once a grid step: too high for masked blocks, too low for loops inside the
kernel.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from pallas_kernels import hlo_cost
from pallas_kernels.runtime import CHIPS
from pallas_kernels.schedule_dump import CORES, SLOTS, Core, DumpError, Program, Region, kernels, read

Counts = Mapping[str, float] | Callable[[Region], float | None]

# MiB of VMEM that a kernel's blocks may take unless it sets vmem_limit_bytes: what the compiler's refusals name.
# Scratch alone may take all that the chip has.
_VMEM_LIMIT = {"v4": 16, "v5e": 16, "v5p": 16, "v6e": 32, "tpu7x": 32}
_SPELLINGS = {"7x": "tpu7x", "v7x": "tpu7x", "tpu7": "tpu7x", "v5litepod": "v5e", "v5lite": "v5e", "v6": "v6e"}


class ScheduleError(Exception):
    """In one line: no libtpu, an unknown topology, a kernel that the compiler refuses, a dump that can't be read."""


@dataclass(frozen=True)
class Job:
    """A program to compile: a function and its arguments' shapes, and how often the regions of its kernels run.

    `counts` holds, by the kernel's name, what `measure` takes as counts; `flops` the useful work of the whole op.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    topology: str = "v5e:1x1"
    counts: Mapping[str, Counts] = dataclasses.field(default_factory=dict)
    flops: float | None = None


@dataclass(frozen=True)
class Kernel:
    """One kernel's schedule; each region has `runs` set."""

    name: str
    regions: tuple[Region, ...]
    capacity: dict[str, int]
    steps: int | None
    vmem_bytes: int
    vmem_limit_bytes: int
    vmem_capacity_bytes: int

    @property
    def cycles(self) -> float:
        """Predicted cycles of the whole kernel on one core."""
        return sum(region.runs * region.cycles for region in self.regions)

    @property
    def mxu_cycles(self) -> float:
        """What the busiest matrix unit alone would need."""
        return sum(region.runs * region.mxu_cycles for region in self.regions)

    @property
    def dma_bytes(self) -> float:
        """Bytes copied if each copy in a region that runs is made; a block that stays in VMEM is in truth not."""
        return sum(region.runs * region.dma_bytes for region in self.regions)

    def region(self, name: str) -> Region:
        """The region of that name; raises ScheduleError."""
        return _named(self.regions, name, self.name)


@dataclass(frozen=True)
class Report:
    """What the compiler made of one program; `hbm_bytes` and `bytes_accessed` are the whole program's.

    `xla_cycles` is the compiler's own estimate for what is no Pallas kernel: a cost model's figure, not a schedule's.
    None where JAX can't print the module that libtpu made, which 7x's often can't be.
    """

    topology: str
    kernels: tuple[Kernel, ...]
    hbm_bytes: int
    temporary_bytes: int
    bytes_accessed: float
    xla_cycles: float | None
    flops: float | None
    core: Core
    versions: dict[str, str]

    @property
    def cycles(self) -> float:
        """Predicted cycles of all the kernels, each run once."""
        return sum(kernel.cycles for kernel in self.kernels)

    @property
    def peak_share(self) -> float | None:
        """Useful FLOPs over what one core could do in the predicted cycles, in bf16."""
        return self.flops / (self.cycles * self.core.peak_bf16_flops) if self.flops and self.cycles else None

    def as_dict(self) -> dict[str, Any]:
        """Everything in plain types, for JSON."""
        own = vars(self) | {"kernels": [_plain(kernel) for kernel in self.kernels]}
        del own["core"]
        return own | {"cycles": self.cycles, "peak_share": self.peak_share}

    def table(self) -> str:
        """For a terminal. Slots are shares of what the region's bundles could hold, spills shares of loads, stores."""
        lines = []
        for kernel in self.kernels:
            vmem = f"{kernel.vmem_bytes / 2**20:.1f} of {kernel.vmem_limit_bytes / 2**20:.0f} MiB VMEM allowed"
            vmem += f" ({kernel.vmem_capacity_bytes / 2**20:.0f} there)"
            lines.append(f"{kernel.name} on {self.topology}: {kernel.cycles:,.0f} predicted cycles, {vmem}")
            if kernel.steps is None:
                lines.append(
                    "  its grid is not in the dump, since XLA put every block in VMEM: state how often loop1 runs"
                )
            lines += _region_rows(kernel)
        share = "" if self.peak_share is None else f", {self.peak_share:.0%} of one core's bf16 peak"
        hbm = f"{self.hbm_bytes / 2**20:,.1f} MiB HBM, {self.bytes_accessed / 2**20:,.1f} MiB accessed"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        xla = f"; {self.xla_cycles:,.0f} more by XLA's estimate outside them" if self.xla_cycles else ""
        if self.xla_cycles is None:
            xla = "; XLA's estimate of what is outside them can't be read"
        return "\n".join([*lines, f"all: {self.cycles:,.0f} predicted cycles{share}{xla}; {hbm}; {versions}"])


def measure(
    fn: Callable[..., Any],
    *args: Any,
    topology: str = "v5e:1x1",
    counts: Mapping[str, Counts] | None = None,
    flops: float | None = None,
) -> Report:
    """Compiles fn(*args) for the first device of a topology; `args` are arrays or jax.ShapeDtypeStructs.

    `counts`: {kernel's name: its regions' counts}. Raises ScheduleError, also for a kernel the compiler refuses.
    """
    (result,) = measure_all([Job(fn, args, topology, counts or {}, flops)])
    if isinstance(result, ScheduleError):
        raise result
    return result


def measure_all(jobs: Sequence[Job]) -> list[Report | ScheduleError]:
    """Compiles each job, all in one process; a job that is refused has its error in its place."""
    topologies = [parse_topology(job.topology) for job in jobs]
    if missing := [name for name in ("libtpu", "flatbuffers") if util.find_spec(name) is None]:
        raise ScheduleError(f"compiling for a TPU that is not here needs {missing[0]}: pip install libtpu flatbuffers")
    with tempfile.TemporaryDirectory(prefix="schedule-") as name:
        folder = Path(name)
        for i, job in enumerate(jobs):
            with jax.sharding.use_abstract_mesh(_absent(topologies[i][0])):
                exported = export.export(jax.jit(job.fn), platforms=["tpu"])(*job.args)
            (folder / f"{i}.export").write_bytes(exported.serialize())
        answer = _compile(folder, [topology for _, topology in topologies])
        return [
            _report(job, said, folder / str(i), topology, answer["versions"])
            for i, (job, said, topology) in enumerate(zip(jobs, answer["programs"], topologies, strict=True))
        ]


def parse_topology(text: str) -> tuple[str, str]:
    """("tpu7x", "tpu7x:1x1") for "7x:1x1", "7x" or "tpu7x"; raises ScheduleError with the generations there are."""
    name, _, shape = text.strip().lower().partition(":")
    generation = _SPELLINGS.get(name, name)
    if generation not in CORES:
        known = ", ".join(CORES)
        raise ScheduleError(f"no TPU generation {name!r}; there are {known} (or 7x), as in v6e:1x1")
    return generation, f"{generation}:{shape or '1x1'}"


def _absent(generation: str) -> AbstractMesh:
    """A mesh of one device of the generation, for kernels that ask what they are lowered for."""
    device = AbstractDevice(CHIPS[generation].kinds[0], num_cores=1, platform="tpu")
    return AbstractMesh((1,), ("device",), axis_types=(AxisType.Auto,), abstract_device=device)


def compiler_environment(flags: str = "") -> dict[str, str]:
    """Variables for a process that compiles with libtpu where there is no TPU; `flags` are more LIBTPU_INIT_ARGS."""
    # XLA_FLAGS would change what is compiled, and may name what libtpu does not know.
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",  # keeps libtpu from asking, and warning, who its neighbours are
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip(),
    }


def dump_flags(folder: Path) -> str:
    """LIBTPU_INIT_ARGS that have libtpu write into `folder` what schedule_dump.py reads."""
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    return f"{flags} --xla_jf_dump_category_filter=original,utilization,program"  # "codegen" takes nine times as long


def _compile(folder: Path, topologies: list[str]) -> dict[str, Any]:
    (folder / "dump").mkdir()
    (folder / "request.json").write_text(json.dumps(topologies))
    environment = compiler_environment(dump_flags(folder / "dump")) | {
        "JAX_ENABLE_COMPILATION_CACHE": "false"
    }  # a found one dumps nothing
    child = [sys.executable, "-P", str(Path(__file__).with_name("schedule_child.py")), str(folder)]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, check=False)
    answer_file = folder / "answer.json"
    if not answer_file.exists():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ScheduleError(f"the TPU compiler ended with status {done.returncode}: {last}")
    return json.loads(answer_file.read_text())


def _report(
    job: Job, said: dict[str, Any], dump: Path, topology: tuple[str, str], versions: dict[str, str]
) -> Report | ScheduleError:
    generation, name = topology
    if "no topology" in said:
        return ScheduleError(f"no topology {name!r}: {_essential(said['no topology'])}")
    if "error" in said:
        return ScheduleError(f"the compiler for {name} refuses it: {_essential(said['error'])}")
    core = CORES[generation]
    module = (dump / "module.txt").read_text()
    try:
        programs = [read(dump, name, core) for name in kernels(dump, module)]
        limits = said["vmem_limits"]
        found = tuple(counted(program, job.counts.get(program.name, {}), generation, limits) for program in programs)
        _check_names(job.counts, [kernel.name for kernel in found])
    except DumpError as error:
        return ScheduleError(f"can't read the dump of libtpu {versions['libtpu']}: {error}")
    except ScheduleError as error:
        return error
    costs = {name: said[name] for name in ("hbm_bytes", "temporary_bytes", "bytes_accessed")}
    xla_cycles = hlo_cost.parse(module).total_cycles if said["has_estimates"] else None
    return Report(name, found, **costs, xla_cycles=xla_cycles, flops=job.flops, core=core, versions=versions)


def counted(program: Program, counts: Counts, generation: str, limits: Mapping[str, int]) -> Kernel:
    """A kernel whose regions run as often as `counts` says; `limits`: VMEM that kernels ask for, by name.

    Raises ScheduleError where counts name a region that there is not.
    """
    if not callable(counts):
        for name in counts:
            _named(program.regions, name, program.name)
    runs: dict[str, float] = {"top": 1}
    for region in program.regions:
        stated = counts(region) if callable(counts) else counts.get(region.name)
        default = runs[_around(region.name, runs)]
        if region.name == "grid" and program.steps:
            default = program.steps
        region.runs = runs[region.name] = default if stated is None else stated
    fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
    allowed = limits.get(fields.pop("hlo_name"), _VMEM_LIMIT[generation] << 20)
    return Kernel(**fields, vmem_limit_bytes=allowed, vmem_capacity_bytes=CHIPS[generation].vmem_bytes)


def _around(name: str, known: Mapping[str, float]) -> str:
    """The innermost region around it that has bundles of its own."""
    while "/" in name:
        name = name.rpartition("/")[0]
        if name in known:
            return name
    return "top"


def _check_names(counts: Mapping[str, Counts], kernels: list[str]) -> None:
    if unknown := [name for name in counts if name not in kernels]:
        raise ScheduleError(f"counts for a kernel {unknown[0]!r}, but the program has {', '.join(kernels) or 'none'}")


def _named(regions: tuple[Region, ...], name: str, kernel: str) -> Region:
    found = next((region for region in regions if region.name == name), None)
    if found is None:
        known = ", ".join(region.name for region in regions)
        raise ScheduleError(f"{kernel} has no region {name!r}; it has {known}")
    return found


def _essential(message: str) -> str:
    """The line of a compiler's message that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = next((line for line in lines if re.search(r"Ran out of memory|[Ee]xceeded|[Nn]ot implemented", line)), "")
    if scoped := re.search(r"Scoped allocation with size \S+ and limit \S+ exceeded[^.]*(?:\.\d[^.]*)*", message):
        telling = f"out of scoped VMEM: {scoped[0]}"
    telling = re.sub(r"^.*?(?=Ran out of memory)", "", telling)
    return (telling or (lines or ["no message"])[0])[:300]


def _plain(kernel: Kernel) -> dict[str, Any]:
    regions = [
        vars(region) | {"cycles": region.cycles, "mxu_cycles": region.mxu_cycles, "slots": dict(region.slots)}
        for region in kernel.regions
    ]
    totals = {"cycles": kernel.cycles, "mxu_cycles": kernel.mxu_cycles, "dma_bytes": kernel.dma_bytes}
    return vars(kernel) | totals | {"regions": regions}


def _region_rows(kernel: Kernel) -> list[str]:
    header = f"  {'region':<22}{'runs':>9}{'bundles':>9}{'idle':>7}{'MXU':>8}{'cycles':>8}"
    header += "".join(f"{slot:>8}" for slot in SLOTS) + "   spilled: stores, loads"
    rows = [header]
    for region in kernel.regions:
        row = f"  {region.name:<22}{region.runs:>9,.0f}{region.bundles:>9,}{region.idle:>7,}{region.mxu_cycles:>8,}"
        row += f"{region.cycles:>8,}"
        for slot in SLOTS:
            row += f"{region.slots[slot] / max(region.bundles * kernel.capacity[slot], 1):>8.0%}"
        stores = region.spill_stores / max(region.slots["store"], 1)
        rows.append(f"{row}   {stores:.0%}, {region.spill_loads / max(region.slots['load'], 1):.0%}")
    return rows
