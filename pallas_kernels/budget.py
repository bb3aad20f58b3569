"""Schedule budgets: the predicted cycles that each case took when it was last accepted, in a JSON file.

{"v5e:1x1": {"flash_attention/forward/...": 123456, ...}, ...}. More than 5 % above fails the test; less is written
down by `tpu-train kernels --update_budget=FILE`, so that a gain is kept too.
"""

import json
from collections.abc import Mapping
from pathlib import Path

SLACK = 0.05


def load(file: Path) -> dict[str, dict[str, float]]:
    """{topology: {case: cycles}}; empty where there is no file yet."""
    return json.loads(file.read_text()) if file.exists() else {}


def update(file: Path, topology: str, cycles: Mapping[str, float]) -> None:
    """Writes the cycles of these cases down; the others keep theirs."""
    budget = load(file)
    budget[topology] = dict(sorted({**budget.get(topology, {}), **cycles}.items()))
    file.write_text(json.dumps(dict(sorted(budget.items())), indent=2) + "\n")


def exceeded(budget: Mapping[str, float], cycles: Mapping[str, float]) -> list[str]:
    """A line for each case that is over its budget by more than SLACK, or has none, and for each budget of no case."""
    lines = [f"{name}: no budget; it takes {taken:,.0f}" for name, taken in cycles.items() if name not in budget]
    for name, allowed in budget.items():
        if name not in cycles:
            lines.append(f"{name}: has a budget, but there is no such case")
        elif cycles[name] > allowed * (1 + SLACK):
            over = cycles[name] / allowed - 1
            lines.append(f"{name}: {cycles[name]:,.0f} predicted cycles, {over:.1%} over its budget of {allowed:,.0f}")
    return lines
