"""The plan as one HTML page that needs nothing else: charts are inline SVG, and no address is loaded.

It is well-formed XML too. Everything that comes from outside is escaped.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tpu_train.planning import svg, text
from tpu_train.planning.units import bytes_text, count_text, known, seconds_text

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 900px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 2em 0 .4em; }
table { border-collapse: collapse; width: 100%; font-size: .93em; }
td, th { border-bottom: 1px solid #dfe3e8; padding: .25em .7em; text-align: right; vertical-align: top; }
td:first-child, th:first-child, .words td, .words th { text-align: left; }
svg { width: 100%; height: auto; font: 13px system-ui, sans-serif; }
pre { background: #f6f8fa; padding: .7em; white-space: pre-wrap; } .faint { color: #656d76; }
"""


def render(plan: dict[str, Any]) -> str:
    """The page of a plan as `report.report` gives it, with the config's name under "config"."""
    way, memory = plan["way"], plan["memory"]
    verdict = {None: "memory unknown", True: "fits", False: "does not fit"}[memory["fits"]]
    summary = [
        ("chips", plan["chips"]["text"]),
        ("parameters", f"{plan['model']['parameters']:,}"),
        ("batch", f"{plan['batch']['rows']:,} rows, {plan['batch']['tokens']:,} tokens"),
        ("mesh", f"{way['mesh']} ({way['whose']})"),
        ("micro-batches, remat, dtype", f"{way['accumulation']}, {way['remat']}, {way['dtype']}"),
        ("memory of a device", f"{bytes_text(memory['total'])} of {known(memory['room'], bytes_text)}: {verdict}"),
        ("step", f"{seconds_text(plan['step']['best'])} to {seconds_text(plan['step']['worst'])}"),
        ("most MFU", f"{plan['step']['most_mfu']:.0%}"),
    ]
    title = f"Plan of {plan['config']} on {plan['chips']['text']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        '<p class="faint">Predicted by formulas; no compiler and no device has seen this.</p>',
        table((), summary, words=True),
        *(f'<p class="faint">{escape(note)}</p>' for note in plan["notes"]),
        "<h2>Memory</h2>",
        svg.memory_bars([(bar["remat"], bar["parts"]) for bar in plan["memory_by_remat"]], memory["room"]),
        "<h2>Roofline</h2>",
        *_roofline(plan),
        "<h2>Scaling at this batch</h2>",
        *_scaling(plan),
        "<h2>Suggestion</h2>",
        f"<pre>{escape(' '.join(f'--set {setting}' for setting in plan['suggestion']['set']))}</pre>",
        f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in plan['suggestion']['why'])}</ul>",
        "<h2>Where the numbers of the chip come from</h2>",
        table(("", "value", "source"), _chip_rows(plan["chips"]["table"]), words=True),
        "<h2>The whole plan</h2>",
        f"<pre>{escape(text.render(plan))}</pre>",
    ]
    lines = "\n".join(body)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n{lines}\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: bool = False) -> str:
    """An HTML table; `words`: cells are set to the left."""
    lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"] if head else []
    lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    mark = ' class="words"' if words else ""
    return f"<table{mark}>{''.join(lines)}</table>"


def _roofline(plan: dict[str, Any]) -> list[str]:
    roof = plan["roofline"]
    rows = [
        (
            block["name"],
            f"{block['intensity']:.0f}",
            *(seconds_text(block[name]) for name in ("compute", "memory", "network")),
            text.bound(block),
        )
        for block in roof["blocks"]
    ]
    shown = table(("block", "FLOPs a byte", "compute", "memory", "network", "bound by"), rows)
    if roof["bandwidth"] is None:
        return [shown, '<p class="faint">No roof to draw: the memory bandwidth is unknown.</p>']
    points = [
        (block["name"], block["intensity"], block["flops"] / block["seconds"])
        for block in roof["blocks"]
        if block["flops"]
    ]
    return [svg.roofline(roof["peak"], roof["bandwidth"], points), shown]


def _scaling(plan: dict[str, Any]) -> list[str]:
    scaling = plan["scaling"]
    points = [(point["chips"], point["work"], point["network"]) for point in scaling["points"]]
    if not points:
        return [f"<p>{escape(text.NO_CURVE)}</p>"]
    return [
        svg.scaling(points, plan["chips"]["count"], scaling["dominated_from"]),
        f"<p>{escape(text.dominated(scaling))}</p>",
    ]


def _chip_rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    names = {
        "bf16_flops": "dense bf16 FLOP/s",
        "int8_ops": "dense int8 op/s",
        "memory": "memory",
        "memory_bytes": "memory bandwidth, bytes/s",
        "torus": "largest slice",
        "link_bytes": "fast network, bytes/s one way (TPU: a link)",
        "slow_bytes": "slow network, bytes/s one way",
        "watts": "power, W",
        "usd_hour": "price, USD an hour",
    }
    rows = []
    for name, label in names.items():
        value = figures[name]["value"]
        if value is None:
            rows.append((label, "unknown", ""))
        else:
            shown = "x".join(map(str, value)) if isinstance(value, tuple | list) else _figure(name, value)
            rows.append((label, shown, figures[name]["source"]))
    return rows


def _figure(name: str, value: float) -> str:
    if name == "memory":
        return bytes_text(value)
    return f"{value:g}" if name in ("watts", "usd_hour") else count_text(value)
