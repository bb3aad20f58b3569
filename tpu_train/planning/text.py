"""The plan for a terminal."""

from typing import Any

from tpu_train.planning.units import bytes_text, count_text, known, plain_text, seconds_text

BAR = 30  # characters of a full bar
NO_CURVE = "none of 1, 2, 4, ... chips holds it at this batch"


def render(plan: dict[str, Any]) -> str:
    """All sections, a blank line between them."""
    sections = (
        *(_head(plan), _memory(plan), _flops(plan), _roofline(plan), _network(plan), _scaling(plan), _cost(plan)),
        *(_serving(plan), _suggestion(plan)),
    )
    return "\n\n".join("\n".join(lines) for lines in sections)


def _head(plan: dict[str, Any]) -> list[str]:
    way, batch, model = plan["way"], plan["batch"], plan["model"]
    parts = ", ".join(f"{name} {count_text(count)}" for name, count in model["by_block"].items() if count)
    return [
        "predicted by formulas; no compiler and no device has seen this",
        f"chips:      {plan['chips']['text']}",
        f"parameters: {model['parameters']:,} ({parts})"
        + (f", {model['active']:,} of them active" if model["active"] < model["parameters"] else ""),
        f"batch:      {batch['rows']:,} rows, {count_text(batch['tokens'])} tokens a step",
        f"mesh:       {way['mesh']}, micro-batches "
        f"{way['accumulation']}, remat {way['remat']}, {way['dtype']} ({way['whose']})",
        *(f"note:       {note}" for note in plan["notes"]),
    ]


def _memory(plan: dict[str, Any]) -> list[str]:
    memory = plan["memory"]
    whole = max(memory["room"] or 0, memory["total"])
    verdict = {None: "memory of this chip is unknown", True: "fits", False: "DOES NOT FIT"}[memory["fits"]]
    lines = [f"memory of a device, at its peak in the {memory['peak_in']}"]
    for name, size in memory["parts"].items():
        lines.append(f"  {name:<12} {bytes_text(size):>11}  {_bar(size / whole)}".rstrip())
    room = known(memory["room"], bytes_text)
    return [*lines, f"  {'all':<12} {bytes_text(memory['total']):>11}  of {room}: {verdict}"]


def _flops(plan: dict[str, Any]) -> list[str]:
    flops = plan["flops"]
    lines = ["FLOPs of a token, forward"]
    for name, value in flops["forward_per_token"].items():
        lines.append(f"  {name:<12} {count_text(value):>8}  {flops['formulas'][name]}")
    return [
        *lines,
        f"  with the backward pass (x 3) {count_text(flops['per_token'])}; 6 a parameter would be "
        f"{count_text(flops['six_per_parameter'])}; a step {count_text(flops['per_step'])}",
    ]


def _roofline(plan: dict[str, Any]) -> list[str]:
    roofline, step = plan["roofline"], plan["step"]
    ridge = known(roofline["ridge"], lambda value: f"{value:.0f} FLOPs a byte")
    lines = [
        f"roofline of a device: {count_text(roofline['peak'])} FLOP/s, ridge at {ridge}",
        f"  {'block':<26}{'FLOPs/byte':>10}{'compute':>10}{'memory':>10}{'network':>10}  bound by",
    ]
    for block in roofline["blocks"]:
        cells = "".join(f"{seconds_text(block[name]):>10}" for name in ("compute", "memory", "network"))
        lines.append(f"  {block['name']:<26}{block['intensity']:>10.0f}{cells}  {bound(block)}")
    return [
        *lines,
        f"  step: {seconds_text(step['best'])} if all traffic is hidden, {seconds_text(step['worst'])} if none is; "
        f"MFU at most {step['most_mfu']:.0%}",
    ]


def _network(plan: dict[str, Any]) -> list[str]:
    lines = ["traffic of a step by mesh axis (fast: within a slice; slow: between slices)"]
    for axis in plan["network"]:
        if axis["fast"] * axis["slow"] == 1:
            continue
        fast = known(axis["fast_bytes"], lambda value: f"{value / 1e9:.0f} GB/s")
        slow = known(axis["slow_bytes"], lambda value: f"{value / 1e9:.3g} GB/s")
        text = f"  {axis['name']:<7} fast {axis['fast']:>4} at {fast}: {seconds_text(axis['fast_seconds'])}"
        if axis["slow"] > 1:
            text += f"; slow {axis['slow']} at {slow}: {seconds_text(axis['slow_seconds'])}"
        if axis["enough"]:
            unit = "devices at most" if axis["name"] == "tensor" else "tokens a device at least"
            text += f" (rule of thumb: {axis['enough']:,.0f} {unit})"
        lines.append(text)
    return lines if len(lines) > 1 else [*lines, "  none: one device"]


def _scaling(plan: dict[str, Any]) -> list[str]:
    scaling = plan["scaling"]
    lines = ["more chips at this batch (bar: the MFU that the roofline allows, of 100 %)"]
    for point in scaling["points"]:
        lines.append(
            f"  {point['chips']:>6} chips {_bar(point['mfu']):<{BAR}} {point['mfu']:>4.0%}  work "
            f"{seconds_text(point['work'])}, traffic {seconds_text(point['network'])}"
        )
    return [*lines, f"  {dominated(scaling) if scaling['points'] else NO_CURVE}"]


def dominated(scaling: dict[str, Any]) -> str:
    """Where traffic takes longer than work, in words."""
    if not scaling["network_known"]:
        return "where traffic dominates is unknown, since the speed of this chip's network is"
    if scaling["dominated_from"] is None:
        return f"traffic dominates nowhere up to {scaling['points'][-1]['chips']} chips"
    return f"traffic dominates from {scaling['dominated_from']} chips"


def bound(block: dict[str, Any]) -> str:
    """What bounds a block, and by how much."""
    if block["times"] is None:
        return f"{block['bound']}"
    return f"{block['bound']}, {block['times']:.1f} times the next"


def _cost(plan: dict[str, Any]) -> list[str]:
    cost, table = plan["cost"], plan["chips"]["table"]
    each = plan["model"]["parameters"]
    return [
        f"cost of {count_text(cost['tokens'])} tokens at {cost['mfu']:.0%} MFU: {count_text(cost['flops'])} FLOPs, "
        f"{seconds_text(cost['hours'] * 3600)}, {plain_text(cost['chip_hours'])} chip-hours",
        f"  energy of the chips: {known(cost['kwh'], lambda value: f'{plain_text(value)} kWh')}"
        + (f" at {cost['watts']:g} W: {table['watts']['source']}" if cost["watts"] is not None else "; give --watts"),
        f"  money: {known(cost['usd'], lambda value: f'{plain_text(value)} USD')}"
        + (
            f" at {cost['usd_hour']:g} USD: {table['usd_hour']['source']}"
            if cost["usd"] is not None
            else "; give --price"
        ),
        f"  {count_text(cost['tokens'] / each)} tokens a parameter; a hint (arXiv:2203.15556): about 20 are best, "
        f"{count_text(plan['optimal']['tokens'])} tokens for this model, or {count_text(plan['optimal']['params'])} "
        "parameters for this compute",
    ]


def _serving(plan: dict[str, Any]) -> list[str]:
    lines = [
        f"inference needs (training: {plan['memory']['state_per_parameter']:g} bytes a parameter, and activations)"
    ]
    for need in plan["serving"]:
        name = {2: "bfloat16", 1: "int8 (not in this trainer)"}[need["width"]]
        devices = known(need["devices"], lambda value: f"{value} device{'' if value == 1 else 's'}")
        token = known(need["seconds_per_token"], seconds_text)
        sequences = known(need["sequences_on_these"], lambda value: f"{value:,}")
        lines.append(
            f"  {name}: weights {bytes_text(need['weights'])}, cache of a sequence {bytes_text(need['cache'])}; from "
            f"{devices}, where a token takes at least {token}; these chips hold {sequences} sequences"
        )
    return lines


def _suggestion(plan: dict[str, Any]) -> list[str]:
    suggestion = plan["suggestion"]
    setting = " ".join(f"--set {setting}" for setting in suggestion["set"])
    return ["suggestion", f"  {setting}", *(f"  - {reason}" for reason in suggestion["why"])]


def _bar(share: float) -> str:
    return "#" * round(BAR * min(share, 1.0))
