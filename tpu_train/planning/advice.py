"""Which mesh, micro-batches and remat policy to take, and how far more chips help.

Every mesh that divides is tried. Of those that fit in memory the fastest is taken, with half of the traffic hidden
behind work: the mean of a step where all overlaps and one where nothing does.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from tpu_train import chips, layout, stages
from tpu_train.chips import Fleet
from tpu_train.config import Config, UserError
from tpu_train.planning import memory, roofline
from tpu_train.planning.memory import Memory
from tpu_train.planning.roofline import Step
from tpu_train.planning.split import Remat, Split

REMAT: tuple[Remat, ...] = ("none", "dots", "full")  # from least recomputed to least kept
MOST_MICRO_BATCHES = 64
MOST_CHIPS = 2**14  # of the scaling curve
SHORTEST_CHUNK = 2048  # tokens; rows are not suggested to be cut finer along context


@dataclasses.dataclass(frozen=True)
class Choice:
    """A way to run the config on a fleet. `room`: bytes of a device that a program can get; None where unknown."""

    split: Split
    memory: Memory
    step: Step
    room: float | None

    @property
    def fits(self) -> bool:
        return self.room is None or self.memory.total <= self.room

    @property
    def seconds(self) -> float:
        """Of a step with half of its traffic hidden."""
        return (self.step.best + self.step.worst) / 2


def dtype_of(config: Config, fleet: Fleet) -> str:
    """The compute dtype of the run on these chips; "auto" is what precision.AUTO says.

    Raises UserError where precision.resolve would.
    """
    platform = fleet.chip.platform
    if config.run.precision == "float16" and platform == "tpu":
        raise UserError("run.precision=float16 has no TPU hardware; use bfloat16, which needs no loss scale")
    if config.run.implementation == "pallas" and platform != "tpu":
        raise UserError(f"run.implementation=pallas runs on TPUs, and {fleet.chip.name} is none; use xla or auto")
    if config.run.precision != "auto":
        return config.run.precision
    return "float32" if platform == "cpu" else "bfloat16"


def _loss_cores(config: Config, fleet: Fleet) -> int:
    return memory.loss_cores(config.model, fleet.chip.name, config.run.implementation, dtype_of(config, fleet))


def room(fleet: Fleet) -> float | None:
    """Bytes of one device that a program can get; None where the chip's memory is unknown."""
    whole = fleet.chip.per_device("memory")
    return None if whole is None else whole * memory.USABLE[fleet.chip.platform]


def weigh(config: Config, fleet: Fleet, split: Split) -> Choice:
    """The memory and time of one way. Raises UserError where an array's dim does not divide."""
    layout.check_fits(_cut(config, split.accumulation), split.sizes)
    return Choice(split, memory.training(config, split), roofline.step(config, split, fleet), room(fleet))


def own(config: Config, fleet: Fleet) -> Choice:
    """The config's own mesh, micro-batches and remat policy."""
    sizes = dict(zip(layout.AXES, layout.mesh_shape(config.mesh, fleet.devices), strict=True))
    layout.check_fits(config, sizes)
    if sizes["stage"] > 1 and config.model.num_experts:
        raise UserError(
            f"plan knows no mixture of experts in stages (mesh.stage={sizes['stage']}); `tpu-train compile` does, or "
            "take mesh.stage=1"
        )
    plan = stages.schedule(config, sizes)
    split = Split(
        **sizes,
        stage_rounds=plan.rounds,
        stage_microbatches=plan.microbatches,
        accumulation=config.optim.accumulation_steps,
        remat=config.model.remat,
        dtype=dtype_of(config, fleet),
        context_method=config.mesh.context_method,
        loss_cores=_loss_cores(config, fleet),
        slices=layout.across_slices(config.mesh, sizes, fleet.slices),
    )
    return weigh(config, fleet, split)


def best(config: Config, fleet: Fleet) -> Choice | None:
    """The fastest way that fits; where none fits, the one that needs least memory; None if no mesh divides."""
    fitting, least = None, None
    for split in splits(config, fleet):
        need = memory.training(config, split)
        limit = room(fleet)
        if limit is not None and need.total > limit:
            if least is None or need.total < least[0]:
                least = need.total, split
            continue
        choice = weigh(config, fleet, split)
        if fitting is None or choice.seconds < fitting.seconds:
            fitting = choice
    if fitting is None and least is not None:
        return weigh(config, fleet, least[1])
    return fitting


def least_batch(config: Config, fleet: Fleet) -> int | None:
    """The smallest batch, in rows, that some mesh of the fleet's devices divides; None if there is no such mesh."""
    found = []
    for split in _meshes(config, fleet):
        rows = split.data * split.expert * split.fsdp
        if _divides(_with_batch(config, rows), split, fleet):
            found.append(rows)
    return min(found, default=None)


def enough_batch(config: Config, fleet: Fleet, most: int = 64) -> tuple[int, Choice] | None:
    """The smallest batch, of the config's times a power of two, whose traffic is no longer than its work."""
    factor = 1
    while factor <= most:
        rows = config.data.batch_size * factor
        choice = best(_with_batch(config, rows), fleet)
        if choice is not None and choice.fits and choice.step.network <= choice.step.work:
            return rows, choice
        factor *= 2
    return None


def enough_chips(config: Config, fleet: Fleet) -> int | None:
    """The fewest chips, of the fleet's times a power of two, on which the config fits; None if none does."""
    for bigger in _growing(fleet, fleet.chips):
        choice = best(config, bigger)
        if choice is not None and choice.fits:
            return bigger.chips
    return None


@dataclasses.dataclass(frozen=True)
class Point:
    """The config at its own batch on so many chips, by the best way there."""

    chips: int
    work: float
    network: float
    mfu: float  # the most that the roofline allows


def curve(config: Config, fleet: Fleet) -> list[Point]:
    """Strong scaling: the same batch on 1, 2, 4, ... chips, as far as it fits in memory and divides over them."""
    points = []
    for other in _growing(fleet, 1):
        choice = best(config, other)
        # On a network of unknown speed the curve would be a straight line of no meaning.
        if choice is not None and choice.fits and not any("network" in name for name in choice.step.unknown):
            points.append(Point(other.chips, choice.step.work, choice.step.network, choice.step.most_mfu))
    return points


def dominated_from(points: Sequence[Point]) -> int | None:
    """The fewest chips at which traffic takes longer than work; None if it never does."""
    return next((point.chips for point in points if point.network > point.work), None)


def _growing(fleet: Fleet, first: int) -> Iterator[Fleet]:
    """Fleets of first, 2 first, 4 first, ... chips, in as few slices as can be."""
    count = first
    while count <= max(MOST_CHIPS, fleet.chips):
        with contextlib.suppress(UserError):  # no slice of that size is made
            yield chips.parse(f"{fleet.chip.name}-{count}")
        count *= 2


def splits(config: Config, fleet: Fleet) -> Iterator[Split]:
    """For each mesh and policy the fewest micro-batches that fit, or the most there can be."""
    dtype, limit = dtype_of(config, fleet), room(fleet)
    for mesh in _meshes(config, fleet):
        mesh = dataclasses.replace(
            mesh, dtype=dtype, context_method=config.mesh.context_method, loss_cores=_loss_cores(config, fleet)
        )
        if not _divides(config, mesh, fleet):
            continue
        for policy in REMAT:
            split, count = None, 1
            while (
                count <= MOST_MICRO_BATCHES
                and config.data.batch_size % (count * mesh.data * mesh.expert * mesh.fsdp) == 0
            ):
                split = dataclasses.replace(mesh, accumulation=count, remat=policy)
                if limit is None or memory.training(config, split).total <= limit:
                    break
                count *= 2
            if split is not None:
                yield split


def _meshes(config: Config, fleet: Fleet) -> Iterator[Split]:
    """All of the fleet's devices; along context only where rows are long, along expert where there are experts."""
    for tensor in _divisors(fleet.devices):
        for context in _divisors(fleet.devices // tensor):
            if context > 1 and config.data.seq_len < 2 * context * SHORTEST_CHUNK:
                continue
            left = fleet.devices // tensor // context
            for expert in [
                n for n in _divisors(left) if n == 1 or (config.model.num_experts and config.model.num_experts % n == 0)
            ]:
                for fsdp in _divisors(left // expert):
                    yield Split(left // expert // fsdp, fsdp, tensor, context=context, expert=expert)


def _divides(config: Config, split: Split, fleet: Fleet) -> bool:
    try:
        layout.check_fits(_cut(config, split.accumulation), split.sizes)
    except UserError:
        return False
    return split.data % fleet.slices == 0


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _cut(config: Config, accumulation: int) -> Config:
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, accumulation_steps=accumulation))


def _with_batch(config: Config, rows: int) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=rows))
