"""What `compile` prints: the compiler's answer, whether it fits, and the predicted time of a step.

Every time here is predicted: XLA's own estimate of cycles for what XLA compiled; for Pallas kernels, which XLA does not
estimate, their schedules, in which no copy is waited for, or, where one can't be had, what the matrix units alone need
for their FLOPs, a lower bound; and the time that a collective takes by the formulas of the plan (planning/network.py),
as far as no other work of that many cycles runs beside it. For NVIDIA cards XLA has no estimate: there each operation
counts with its roofline (cards_time.py), which is a bound.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pallas_kernels.schedule_dump import CORES
from tpu_train import chips, stages
from tpu_train.aot import cards
from tpu_train.aot.collectives import RING
from tpu_train.config import Config
from tpu_train.planning import network
from tpu_train.planning.advice import SHORTEST_CHUNK

GIB = 2**30
# GiB of HBM that a program may fill on one JAX device: what the compiler's refusals name (libtpu 0.0.52).
HBM_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74}
DEVICE_CORES = {"v4": 2, "v5e": 1, "v5p": 2, "v6e": 1, "tpu7x": 1}  # that work as one JAX device


@dataclasses.dataclass(frozen=True)
class KernelRow:
    """A Pallas kernel in a step: predicted cycles by its schedule (None: not known, for `why`) and by its FLOPs."""

    name: str
    runs: float
    cycles: float | None
    bound: float | None
    why: str


@dataclasses.dataclass(frozen=True)
class Report:
    """The child's answer for one step, with what follows from it."""

    topology: str
    num_slices: int
    answer: Mapping[str, Any]

    @property
    def generation(self) -> str:
        return self.topology.partition(":")[0]

    @property
    def card(self) -> cards.Card | None:
        """None for a TPU."""
        return cards.of_topology(self.topology)

    @property
    def fits(self) -> bool:
        return "out of memory" not in self.answer

    @property
    def hbm_bytes(self) -> int:
        """HBM that a device needs: what XLA assigns, or what its refusal names, which has the arguments in it too."""
        a = self.answer
        if not self.fits:
            return a["needed_bytes"]
        return a["argument_bytes"] + a["output_bytes"] - a["aliased_bytes"] + a["temporary_bytes"]

    @property
    def capacity_bytes(self) -> float:
        available = self.answer.get("available_bytes")
        return HBM_GIB[self.generation] * GIB if available is None else available

    @property
    def flops_per_cycle(self) -> float:
        """Of one device, in bf16; of a card in a nanosecond."""
        if self.card:
            return (self.card.chip.bf16_flops or 0.0) / 1e9
        return CORES[self.generation].peak_bf16_flops * DEVICE_CORES[self.generation]

    @property
    def kernel_bound(self) -> float | None:
        """Cycles of the matrix units for the Pallas kernels' FLOPs; None where a kernel's FLOPs are not known."""
        flops = self.answer["kernel_flops"]
        return None if flops is None else flops / self.flops_per_cycle

    @property
    def kernels(self) -> tuple[KernelRow, ...]:
        """By kernel, in a step."""
        flops: dict[str, list[float | None]] = {}
        for name, count in self.answer["flops_by_kernel"].items():
            flops.setdefault(name.removesuffix("_whole"), []).append(count)
        rows = []
        for name in dict.fromkeys(call["name"] for call in self.answer["schedules"]):
            calls = [call for call in self.answer["schedules"] if call["name"] == name]
            known = [call["runs"] * call["cycles"] for call in calls if call["cycles"] is not None]
            counts = flops.get(name, [None])
            stated = [count for count in counts if count is not None]
            bound = sum(stated) / self.flops_per_cycle if len(stated) == len(counts) else None
            cycles = sum(known) if len(known) == len(calls) else None
            why = next((call["why"] for call in calls if call["why"]), "")
            rows.append(KernelRow(name, sum(call["runs"] for call in calls), cycles, bound, why))
        return tuple(rows)

    @property
    def kernel_cycles(self) -> float | None:
        """Of the Pallas kernels' schedules, of one that has none its bound; None where that is not known either."""
        known = [kernel.bound if kernel.cycles is None else kernel.cycles for kernel in self.kernels]
        cycles = [count for count in known if count is not None]
        return sum(cycles) if len(cycles) == len(known) else None

    @property
    def fleet(self) -> chips.Fleet:
        return chips.parse(self.topology.removeprefix("tpu"), self.num_slices)

    @property
    def clock_hz(self) -> float:
        """The device's peak over its FLOPs per cycle."""
        return (self.fleet.chip.per_device("bf16_flops") or 0.0) / self.flops_per_cycle

    @property
    def compute_seconds(self) -> float | None:
        """Predicted for a step, without the network."""
        if self.card:
            return self.answer["roofline_seconds"]
        xla, kernels = self.answer["cycles"], self.kernel_cycles
        return None if xla is None or kernels is None else (xla + kernels) / self.clock_hz

    @property
    def network_seconds(self) -> float:
        """Predicted waiting for collectives: their time, less that of the work beside them."""
        axes = network.axes(self.fleet, self.answer["mesh"], self.answer.get("slices"))
        waits = 0.0
        for c in self.answer["collectives"]:
            speeds = [axes[name].fast_bytes or math.inf for name in c["axes"] if axes[name].fast > 1]
            if c["kind"] == RING:  # one link either way, where neighbours on the axis are neighbours in the torus
                links = [2 * (axes[name].link_bytes or math.inf) for name in c["axes"]]
                speeds = [min(*speeds, *links)] if speeds else links
            slow = self.fleet.chip.per_device("slow_bytes") or math.inf
            seconds = c["wire_bytes"] / (slow if crosses_slices(c, axes) else min(speeds, default=math.inf))
            waits += c["runs"] * max(0.0, seconds - c["cycles_meanwhile"] / self.clock_hz)
        return waits

    @property
    def seconds(self) -> float | None:
        """Predicted for a step."""
        compute = self.compute_seconds
        return None if compute is None else compute + self.network_seconds

    @property
    def mfu(self) -> float | None:
        """Predicted: the model's FLOPs over the peak in that time."""
        if not self.seconds:
            return None
        flops = self.answer["model_flops_per_token"] * self.answer["tokens"] / self.answer["num_devices"]
        return flops / (self.seconds * self.flops_per_cycle * self.clock_hz)

    def as_dict(self) -> dict[str, Any]:
        """Everything in plain types, for JSON; what is predicted is named so."""
        return {
            "topology": self.topology,
            "num_slices": self.num_slices,
            "fits": self.fits,
            "hbm_bytes": self.hbm_bytes,
            "hbm_capacity_bytes": self.capacity_bytes,
            **self.answer,
            "kernel_cycles": self.kernel_cycles,
            "kernel_cycles_at_least": self.kernel_bound,
            "kernels_by_name": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "predicted_compute_seconds": self.compute_seconds,
            "predicted_network_seconds": self.network_seconds,
            "predicted_seconds": self.seconds,
            "predicted_mfu": self.mfu,
        }

    def table(self, config: Config) -> str:
        """For a terminal."""
        a = self.answer
        over = {axis: f" over {n} slices" for axis, n in a.get("slices", {}).items() if n > 1 and axis != "data"}
        axes = " x ".join(f"{axis} {n}{over.get(axis, '')}" for axis, n in a["mesh"].items() if n > 1) or "one device"
        word = "hosts" if self.card else "slices"
        slices = f"{self.num_slices} {word} of " if self.num_slices > 1 else ""
        lines = [
            f"{a['num_devices']} x {a['device_kind']} ({slices}{self.topology}), mesh: {axes}",
            f"{a['parameters']:,} parameters, {a['tokens']:,} tokens a step, compute {a['compute']}, "
            f"{a['implementation']} kernels: {kernel_runs(a['kernels'])}",
            *([f"pipeline: {stages.schedule(config, a['mesh'])}"] if a["mesh"].get("stage", 1) > 1 else []),
            *([f"compiled with {a['xla_flags']}"] if a.get("xla_flags") else []),
            "",
            *self._memory(),
        ]
        if not self.fits:
            lines += ["", *advice(config, a, self.card is not None)]
        return "\n".join([*lines, "", *self._work(), "", *self._collectives()])

    def _memory(self) -> Iterator[str]:
        a = self.answer
        word = "fits" if self.fits else "DOES NOT FIT"
        yield f"HBM of a device: {gb(self.hbm_bytes)} of {gb(self.capacity_bytes)}: {word}"
        yield f"  parameters      {gb(a['parameter_bytes'])}"
        yield f"  optimizer state {gb(a['optimizer_bytes'])}"
        if waiting := a.get("host_bytes", 0) + a.get("host_temporary_bytes", 0):
            yield f"  in the host's memory {gb(waiting)}: there and back in each step, which no time here counts"
        yield f"  gradients       {gb(a['gradient_bytes'])} (by shape; part of the temporaries)"
        if self.fits:
            yield f"  temporaries     {gb(a['temporary_bytes'])}"
        both = ", the host's memory included" if waiting else ""
        yield f"  largest temporaries at the peak of {gb(a['peak_bytes'])}{both}:"
        for buffer in a["buffers"][: 8 if self.fits else 16]:
            yield f"    {gb(buffer['bytes'])}  {buffer['shape']:<26} {buffer['source']}"

    def _work(self) -> Iterator[str]:
        a = self.answer
        flops = a["xla_flops"] + (a["kernel_flops"] or 0)
        yield f"work of a device and step: {flops / 1e12:,.1f} TFLOP (recomputation included),"
        yield f"  {a['bytes_accessed'] / 1e9:,.1f} GB between HBM and core"
        if self.card and self.seconds:
            yield (
                f"  predicted: at least {self.seconds * 1e3:,.0f} ms a step, MFU at most {self.mfu:.1%}: "
                f"{self.answer['roofline_seconds'] * 1e3:,.0f} ms if each operation takes no more than its products at "
                f"{(self.card.chip.bf16_flops or 0) / 1e12:,.0f} TFLOP/s or its bytes at "
                f"{(self.card.chip.memory_bytes or 0) / 1e12:,.1f} TB/s, and {self.network_seconds * 1e3:,.0f} ms of "
                "waiting for collectives"
            )
            return
        if a["cycles"] is None:
            yield "  no cycles: the compiler stopped, or its program can't be read back, before it gave an estimate"
            if self.fits:
                yield from self._kernels()
            return
        yield f"  predicted: {a['cycles'] / 1e6:,.0f} M cycles, XLA's own estimate, without the Pallas kernels"
        if self.kernel_cycles is None or self.seconds is None or self.compute_seconds is None:
            yield "  the Pallas kernels' FLOPs are not known here, so there is no predicted time"
            return
        yield (
            f"  predicted: {self.kernel_cycles / 1e6:,.0f} M cycles for the Pallas kernels, by their schedules"
            f"{'' if self.kernel_bound is None else f' (matrix units alone: {self.kernel_bound / 1e6:,.0f} M)'}"
        )
        yield (
            f"  predicted: {self.seconds * 1e3:,.0f} ms a step, MFU {self.mfu:.1%}: {self.compute_seconds * 1e3:,.0f} "
            f"ms at {self.clock_hz / 1e9:.2f} GHz and {self.network_seconds * 1e3:,.0f} ms of waiting for collectives"
        )
        yield from self._kernels()
        if a["unknown_loops"]:
            yield f"  {a['unknown_loops']} loops have no known number of turns and count once"

    def _kernels(self) -> Iterator[str]:
        if self.kernels:
            yield f"  {'kernel':<32}{'runs':>8}{'M cycles':>10}{'at least':>10}"
        for kernel in self.kernels:
            cycles, bound = ("not known" if n is None else f"{n / 1e6:,.1f}" for n in (kernel.cycles, kernel.bound))
            yield f"  {kernel.name:<32}{kernel.runs:>8,.0f}{cycles:>10}{bound:>10}"
        for kernel in self.kernels:
            if kernel.cycles is None:
                yield f"  {kernel.name} counts with its least: {kernel.why}"

    def _collectives(self) -> Iterator[str]:
        merged: dict[tuple[Any, ...], list[float]] = {}
        for c in self.answer["collectives"]:
            row = merged.setdefault(
                (c["kind"], "+".join(c["axes"]) or "slices", "yes" if c["overlaps"] else "no"), [0, 0, 0]
            )
            row[0] += c["runs"]
            row[1] += c["runs"] * c["bytes"]
            row[2] += c["runs"] * c["wire_bytes"]
        if not merged:
            yield "no collectives"
            return
        yield f"  {'collective':<20}{'axis':<14}{'runs':>6}{'GB':>9}{'GB sent':>9}  beside other work"
        for (kind, axes, overlaps), (runs, size, wire) in sorted(merged.items(), key=lambda item: -item[1][2]):
            yield f"  {kind:<20}{axes:<14}{runs:>6,.0f}{size / 1e9:>9.2f}{wire / 1e9:>9.2f}  {overlaps}"


def crosses_slices(collective: Mapping[str, Any], axes: Mapping[str, network.Axis]) -> bool:
    """Whether it goes over the slow network: a send between slices, or more devices than a slice has on its axes."""
    within = math.prod(axes[name].fast for name in collective["axes"])
    return not collective["axes"] or collective["devices"] > within


def kernel_runs(kernels: Mapping[str, float]) -> str:
    """ "flash_attention_forward 64 times" for each."""
    return ", ".join(f"{name} x {runs:,.0f}" for name, runs in kernels.items()) or "none"


def gb(size: float) -> str:
    """Bytes as GB."""
    return f"{size / 1e9:6.2f} GB"


def advice(config: Config, answer: Mapping[str, Any], on_cards: bool = False) -> list[str]:
    """What to change where a step does not fit, most telling first."""
    lines = []
    if config.model.remat != "full":
        lines.append("--set model.remat=full keeps only each block's input for the backward pass")
    per_device = config.data.batch_size // math.prod(answer["mesh"][axis] for axis in ("data", "expert", "fsdp"))
    micro = per_device // config.optim.accumulation_steps
    if micro > 1:
        lines.append(
            f"--set optim.accumulation_steps={config.optim.accumulation_steps * 2} halves the {micro} rows that a "
            "device works on at once"
        )
    elif config.data.seq_len >= 2 * SHORTEST_CHUNK * (more := 2 * answer["mesh"].get("context", 1)):
        lines.append(f"--set mesh.context={more} splits the one row that a device works on")
    if answer["mesh"]["data"] > 1:
        lines.append("--set mesh.fsdp=-1 --set mesh.data=1 splits weights and moments over all devices")
    if config.optim.moment_dtype == "float32":
        lines.append("--set optim.moment_dtype=bfloat16 halves the first moment")
    if on_cards:
        lines.append(
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 gives JAX more of a card than the three quarters counted here"
        )
    lines.append("more devices, or a chip with more HBM; --search tries remat, batch and mesh")
    return ["what may help:", *(f"  {line}" for line in lines)]
