"""Everything that the plan says, as one dict of plain JSON values; text.py and page.py only set it."""

import dataclasses
import math
from typing import Any

from tpu_train.chips import Fleet
from tpu_train.config import Config, MeshConfig, UserError
from tpu_train.flops import active_params, forward_flops_per_token, num_params, params, train_flops_per_token
from tpu_train.layout import USUAL
from tpu_train.planning import advice, cost, memory, network, why
from tpu_train.planning.advice import Choice
from tpu_train.planning.split import Split
from tpu_train.planning.units import bytes_text, seconds_text

# Bytes/s between a host and a chip, one way: what How to Scale Your Model (jax-ml.github.io/scaling-book) takes for a
# v6e, read 2026-12-01. Google publishes none.
PCIE = 1.5e10

FORMULAS = {
    "projections": "2 L (D H (N + 2 K) + N H D)",
    "attention": "4 L N H x keys seen",
    "mlp": "2 L x {matrices} D F",
    "head": "2 D V",
}


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the user says beside the config; None takes the table's or the config's value."""

    tokens: float | None = None
    mfu: float = cost.USUAL_MFU
    watts: float | None = None
    usd_hour: float | None = None


def report(config: Config, fleet: Fleet, inputs: Inputs) -> dict[str, Any]:
    """The plan of `config` on `fleet`. Raises UserError where no mesh divides or a number is out of range."""
    suggested = advice.best(config, fleet)
    if suggested is None:
        raise UserError(_no_mesh(config, fleet))
    chosen, whose = _chosen(config, fleet, suggested)
    flops_per_token = train_flops_per_token(config.model, config.data.seq_len)
    budget = config.run.steps * config.data.batch_size * config.data.seq_len
    tokens = budget if inputs.tokens is None else inputs.tokens
    watts = fleet.chip.watts if inputs.watts is None else inputs.watts
    usd = fleet.chip.usd_hour if inputs.usd_hour is None else inputs.usd_hour
    spent = cost.cost(chosen.step, fleet, flops_per_token, tokens, inputs.mfu, watts, usd)
    return {
        "chips": _chips(fleet, watts, usd, inputs),
        "model": {
            "parameters": num_params(config.model),
            "active": active_params(config.model),
            "by_block": params(config.model),
        },
        "batch": {"rows": config.data.batch_size, "tokens": config.data.batch_size * config.data.seq_len},
        "way": {**dataclasses.asdict(chosen.split), "mesh": _mesh(chosen), "whose": whose},
        "memory": _memory(config, chosen),
        "memory_by_remat": [
            {"remat": policy, "parts": memory.training(config, dataclasses.replace(chosen.split, remat=policy)).parts}
            for policy in advice.REMAT
        ],
        "flops": _flops(config, flops_per_token),
        "roofline": _roofline(chosen, fleet),
        "network": _network(config, chosen, fleet),
        "step": _step(chosen),
        "scaling": _scaling(config, fleet),
        "cost": dataclasses.asdict(spent) | {"watts": watts, "usd_hour": usd},
        "optimal": dataclasses.asdict(cost.optimal(config.model, tokens)),
        "serving": [_serving(config, fleet, width) for width in (2, 1)],
        "suggestion": {"set": why.settings(suggested, config), "why": why.reasons(config, fleet, suggested)},
        "notes": _notes(config, fleet, chosen),
    }


def _chosen(config: Config, fleet: Fleet, suggested: Choice) -> tuple[Choice, str]:
    if config.mesh == MeshConfig():
        return suggested, "suggested, since the config sets no mesh"
    try:
        return advice.own(config, fleet), "the config's"
    except UserError as error:
        error.add_note("what divides: " + " ".join(f"--set {setting}" for setting in why.settings(suggested, config)))
        raise


def _no_mesh(config: Config, fleet: Fleet) -> str:
    rows = advice.least_batch(config, fleet)
    text = f"no mesh spreads data.batch_size={config.data.batch_size} over the {fleet.devices} devices of {fleet}"
    if rows is None:
        return f"{text}, nor any other batch: heads, mlp_dim and vocab_size do not divide; take fewer chips"
    return f"{text}; the smallest batch that spreads is --set data.batch_size={rows}"


def _mesh(choice: Choice) -> str:
    return " x ".join(f"{name} {size}" for name, size in choice.split.sizes.items() if name in USUAL or size > 1)


def _chips(fleet: Fleet, watts: float | None, usd: float | None, inputs: Inputs) -> dict[str, Any]:
    row = dataclasses.asdict(fleet.chip)
    sources = row.pop("sources")
    for name, given in (("watts", inputs.watts), ("usd_hour", inputs.usd_hour)):
        if given is not None:
            sources[name] = "given by you"
    values = {name: row[name] for name in sources} | {"watts": watts, "usd_hour": usd}
    return {
        "text": str(fleet),
        "name": fleet.chip.name,
        "count": fleet.chips,
        "devices": fleet.devices,
        "slices": fleet.slices,
        "shape": list(fleet.shape),
        "table": {name: {"value": value, "source": sources[name]} for name, value in values.items()},
    }


def _memory(config: Config, choice: Choice) -> dict[str, Any]:
    room = choice.room
    state = memory.state(config, Split(dtype=choice.split.dtype))
    return {
        "parts": choice.memory.parts,
        "total": choice.memory.total,
        "room": room,
        "fits": None if room is None else choice.fits,
        "peak_in": choice.memory.peak_in,
        "state_per_parameter": round(state / num_params(config.model), 2),
    }


def _flops(config: Config, per_token: float) -> dict[str, Any]:
    matrices = 3 if config.model.gated_mlp else 2
    forward = forward_flops_per_token(config.model, config.data.seq_len)
    formulas = {name: formula.format(matrices=matrices) for name, formula in FORMULAS.items()}
    if config.model.num_experts:
        formulas["mlp"] = f"2 L ((k + shared) x {matrices} D F + D E), F of an expert"
    return {
        "forward_per_token": forward,
        "formulas": formulas,
        "per_token": per_token,
        "per_step": per_token * config.data.batch_size * config.data.seq_len,
        "six_per_parameter": 6.0 * num_params(config.model),
    }


def _roofline(choice: Choice, fleet: Fleet) -> dict[str, Any]:
    bandwidth = fleet.chip.per_device("memory_bytes")
    blocks = []
    for block in choice.step.blocks:
        bound, times = block.bound
        blocks.append(
            {
                **{name: getattr(block, name) for name in ("name", "flops", "bytes", "intensity")},
                **{name: getattr(block, name) for name in ("compute", "memory", "network", "seconds")},
                "bound": bound,
                "times": times if math.isfinite(times) else None,
            }
        )
    ridge = None if bandwidth is None else choice.step.peak / bandwidth
    return {"peak": choice.step.peak, "bandwidth": bandwidth, "ridge": ridge, "blocks": blocks}


def _network(config: Config, choice: Choice, fleet: Fleet) -> list[dict[str, Any]]:
    """By axis; `enough` is the book's rule of thumb for when the axis' traffic hides behind work.

    data and fsdp: peak / bandwidth tokens on each device. tensor: mlp_dim / (peak / bandwidth) devices at most (of
    experts, expert_dim).
    """
    found = []
    times = choice.step.by_axis()
    width = config.model.expert_size if config.model.num_experts else config.model.mlp_dim
    for name, axis in network.axes(fleet, choice.split.sizes, choice.split.slices).items():
        tokens = choice.step.peak / axis.fast_bytes if axis.fast_bytes else None
        enough = None
        if axis.fast > 1 and tokens and name != "stage":
            enough = width / tokens if name == "tensor" else tokens
        found.append(
            {
                **dataclasses.asdict(axis),
                "fast_seconds": times[name][0],
                "slow_seconds": times[name][1],
                "enough": enough,
            }
        )
    return found


def _step(choice: Choice) -> dict[str, Any]:
    names = ("work", "network", "best", "worst", "most_mfu")
    return {name: getattr(choice.step, name) for name in names} | {"useful_flops": choice.step.useful_flops}


def _scaling(config: Config, fleet: Fleet) -> dict[str, Any]:
    points = advice.curve(config, fleet)
    return {
        "points": [dataclasses.asdict(point) for point in points],
        "dominated_from": advice.dominated_from(points),
        "network_known": fleet.chip.link_bytes is not None,
    }


def _serving(config: Config, fleet: Fleet, width: int) -> dict[str, Any]:
    """Weights are read once a token, whatever the batch; so are each sequence's keys and values."""
    need = memory.serving(config, width)
    room, bandwidth = advice.room(fleet), fleet.chip.per_device("memory_bytes")
    devices = None if room is None else math.ceil((need.weights + need.cache) / room)
    token = None if devices is None or bandwidth is None else (need.weights + need.cache) / bandwidth / devices
    sequences = None if room is None else max(0, math.floor((room * fleet.devices - need.weights) / need.cache))
    return {
        **dataclasses.asdict(need),
        "devices": devices,
        "seconds_per_token": token,
        "sequences_on_these": sequences,
    }


def _notes(config: Config, fleet: Fleet, choice: Choice) -> list[str]:
    found = [f"{name}: unknown, and counted as free" for name in choice.step.unknown]
    if choice.split.stage > 1:
        found.append(f"pipeline: {choice.split.schedule}")
    if fleet.chip.devices > 1:
        found.append(f"a {fleet.chip.name} chip is {fleet.chip.devices} devices to JAX: figures are of one device")
    if fleet.chip.name in ("v4", "v5p"):
        found.append(f"Google names this slice {fleet.chip.name}-{2 * fleet.chips // fleet.slices}, counting cores")
    if config.optim.optimizer == "muon":
        found.append("memory leaves out what Muon's orthogonalisation holds for a moment")
    if size := memory.on_host(config, choice.split):
        found.append(
            f"{bytes_text(size)} of a device go to its host's memory and back in a step: {seconds_text(size / PCIE)} "
            f"either way at {PCIE / 1e9:.0f} GB/s, which no time here counts"
        )
    if config.run.quantized != "none":
        found.append(f"time and memory are without run.quantized={config.run.quantized}, which the plan does not know")
    if config.model.num_experts:
        found.append("memory has room for the rows of the worst case, as the trainer has; time takes loads to be even")
    if fleet.chip.platform != "tpu":
        found.append("memory is that of the TPU kernels; other implementations keep a little more or less")
    return found
