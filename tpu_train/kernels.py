"""The `kernels` command: what the TPU compiler makes of the kernels, without a TPU."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import budget, cases, schedule
from tpu_train.config import UserError


def show(flag: Mapping[str, Any]) -> int:
    """Measures the cases that the flags pick, prints a table or JSON; 1 if the compiler refuses one of them."""
    picked = _pick(flag["op"])
    try:
        _, topology = schedule.parse_topology(flag["topology"])
        results = schedule.measure_all([case.job(topology) for case in picked])
    except schedule.ScheduleError as error:
        raise UserError(str(error)) from error
    reports = {
        case.name: result for case, result in zip(picked, results, strict=True) if isinstance(result, schedule.Report)
    }
    if flag["update_budget"]:
        cycles = {name: report.cycles for name, report in reports.items()}
        budget.update(Path(flag["update_budget"]), topology, cycles)
    refused = {
        case.name: str(result)
        for case, result in zip(picked, results, strict=True)
        if isinstance(result, schedule.ScheduleError)
    }
    if flag["json"]:
        print(json.dumps({name: report.as_dict() for name, report in reports.items()} | _errors(refused), indent=2))
    else:
        print("\n\n".join([*(f"{name}\n{report.table()}" for name, report in reports.items()), *_lines(refused)]))
    return 1 if refused else 0


def _errors(refused: Mapping[str, str]) -> dict[str, dict[str, str]]:
    return {name: {"error": error} for name, error in refused.items()}


def _lines(refused: Mapping[str, str]) -> list[str]:
    return [f"{name}\n  {error}" for name, error in refused.items()]


def _pick(op: str | None) -> list[cases.Case]:
    if op is not None and op not in cases.OPS:
        close = difflib.get_close_matches(op, cases.OPS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(cases.OPS) or 'none yet'}"
        raise UserError(f"no op {op!r} with kernels; {hint}")
    if not (picked := cases.all_cases(op)):
        raise UserError("no op has cases to measure yet; pallas_kernels.schedule.measure takes any kernel")
    return picked
