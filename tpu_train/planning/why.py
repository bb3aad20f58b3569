"""The suggestion in words: what to set, and what each choice was weighed against."""

import dataclasses

from tpu_train.chips import Fleet
from tpu_train.config import Config, UserError
from tpu_train.layout import DATA_ALONE, USUAL
from tpu_train.planning import advice, memory
from tpu_train.planning.advice import Choice
from tpu_train.planning.split import Split
from tpu_train.planning.units import bytes_text, count_text, seconds_text


def settings(choice: Choice, config: Config) -> list[str]:
    """The --set arguments that make a run of the choice of `config`."""
    split = choice.split
    return [
        *(f"mesh.{name}={slices}" for name, slices in DATA_ALONE.items() if getattr(config.mesh, name) != slices),
        *(f"mesh.{axis}={size}" for axis, size in split.sizes.items() if axis in USUAL or size > 1),
        f"optim.accumulation_steps={split.accumulation}",
        f"model.remat={split.remat}",
    ]


def reasons(config: Config, fleet: Fleet, choice: Choice) -> list[str]:
    """One sentence each on the state, the remat policy, the mesh, the micro-batches and the batch."""
    found = [_state(config, choice)]
    if not choice.fits and choice.room is not None:
        more = advice.enough_chips(config, fleet)
        found.append(
            f"no way fits: this one needs least, {bytes_text(choice.memory.total)} of {bytes_text(choice.room)}"
            + (f"; {more} chips are enough" if more else "; nor do more chips help at this batch")
        )
    split = choice.split
    for policy in advice.REMAT:
        if policy != split.remat:
            found.append(f"remat={split.remat}: {policy} {_against(config, fleet, choice, remat=policy)}")
    if split.tensor % 2 == 0:
        other = _against(config, fleet, choice, tensor=split.tensor // 2, fsdp=split.fsdp * 2)
        found.append(f"tensor={split.tensor}: tensor={split.tensor // 2} with fsdp={split.fsdp * 2} {other}")
    if split.fsdp % 2 == 0:
        other = _against(config, fleet, choice, fsdp=split.fsdp // 2, data=split.data * 2)
        found.append(f"fsdp={split.fsdp}: fsdp={split.fsdp // 2} with data={split.data * 2} {other}")
        other = _against(config, fleet, choice, fsdp=split.fsdp // 2, tensor=split.tensor * 2)
        found.append(f"fsdp={split.fsdp}: fsdp={split.fsdp // 2} with tensor={split.tensor * 2} {other}")
    if split.context % 2 == 0:
        other = _against(config, fleet, choice, context=split.context // 2, fsdp=split.fsdp * 2)
        found.append(f"context={split.context}: context={split.context // 2} with fsdp={split.fsdp * 2} {other}")
    if split.accumulation > 1:
        other = _against(config, fleet, choice, accumulation=split.accumulation // 2)
        found.append(f"accumulation_steps={split.accumulation}: {split.accumulation // 2} {other}")
    return [*found, _batch(config, fleet, choice)]


def _state(config: Config, choice: Choice) -> str:
    size = memory.state(config, Split(dtype=choice.split.dtype))
    text = f"weights, gradients and moments are {bytes_text(size)}"
    if choice.room is None:
        return f"{text}; the memory of this chip is unknown"
    shards = choice.split.shards * choice.split.tensor
    if shards == 1:
        return f"{text}, within the {bytes_text(choice.room)} of a device, so none is split"
    compared = "more than" if size > choice.room else "within"
    return f"{text}, {compared} the {bytes_text(choice.room)} of a device; split over {shards} devices"


def _against(config: Config, fleet: Fleet, choice: Choice, **change) -> str:
    """What the choice with `change` made to its split would need or take."""
    try:
        other = advice.weigh(config, fleet, dataclasses.replace(choice.split, **change))
    except UserError:
        return "does not divide"
    if not other.fits and other.room is not None:
        return f"needs {bytes_text(other.memory.total)} of {bytes_text(other.room)}"
    return f"would take {other.seconds / choice.seconds:.2f} times as long"


def _batch(config: Config, fleet: Fleet, choice: Choice) -> str:
    tokens = config.data.batch_size * config.data.seq_len
    times = f"traffic {seconds_text(choice.step.network)}, work {seconds_text(choice.step.work)}"
    if choice.step.network <= choice.step.work:
        return f"batch of {count_text(tokens)} tokens: enough to hide traffic behind work ({times})"
    enough = advice.enough_batch(config, fleet)
    text = f"batch of {count_text(tokens)} tokens: traffic takes longer than work ({times})"
    if enough is None:
        return f"{text}; no batch up to 64 times as large changes that"
    return (
        f"{text}; data.batch_size={enough[0]} is enough to hide it, if the loss can use so large a batch "
        "(critical batch size: arXiv:1812.06162)"
    )
