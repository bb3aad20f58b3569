"""The schedule budget: every registered kernel is held to the predicted cycles that budget.json gives it."""

import json
from pathlib import Path

import matmul_cases
import pytest

from pallas_kernels import budget, cases, schedule
from tpu_train import main

BUDGET = Path(__file__).parent / "budget.json"
TOPOLOGIES = ("v5e:1x1", "v6e:1x1", "tpu7x:1x1")
UPDATE = "tpu-train kernels --topology=... --update_budget=tests/aot/budget.json"


@pytest.fixture
def matmul_is_registered(monkeypatch):
    monkeypatch.setattr(cases, "OPS", {"matmul": matmul_cases.__name__})


@pytest.mark.aot
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_no_kernel_is_over_its_budget(topology):
    registered = cases.all_cases()
    results = schedule.measure_all([case.job(topology) for case in registered])
    reports = {case.name: result for case, result in zip(registered, results, strict=True)}
    refused = {name: str(report) for name, report in reports.items() if isinstance(report, schedule.ScheduleError)}
    assert not refused
    cycles = {name: report.cycles for name, report in reports.items()}
    lines = budget.exceeded(budget.load(BUDGET)[topology], cycles)
    assert not lines, f"{lines}; if that is meant: {UPDATE}"


def test_five_per_cent_over_fails_and_less_does_not():
    assert budget.exceeded({"op/a": 1000}, {"op/a": 1050}) == []
    (line,) = budget.exceeded({"op/a": 1000}, {"op/a": 1051})
    assert line == "op/a: 1,051 predicted cycles, 5.1% over its budget of 1,000"
    assert budget.exceeded({}, {"op/a": 1051}) == ["op/a: no budget; it takes 1,051"]
    assert budget.exceeded({"op/a": 1000}, {}) == ["op/a: has a budget, but there is no such case"]


@pytest.mark.aot
def test_kernels_command_prints_json_and_updates_a_budget(matmul_is_registered, capsys, tmp_path):
    file = tmp_path / "budget.json"
    file.write_text('{"v6e:1x1": {"op/a": 7}}')
    code = main.main(["tpu-train", "kernels", "--topology=v6e", "--op=matmul", "--json", f"--update_budget={file}"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    (case,) = matmul_cases.cases()
    report = json.loads(out)[case.name]
    assert report["topology"] == "v6e:1x1"
    assert 0.3 < report["peak_share"] < 1
    assert budget.load(file) == {"v6e:1x1": {case.name: report["cycles"], "op/a": 7}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op=matmull"], "no op 'matmull' with kernels; did you mean 'matmul'?"),
        (["--op=x"], "no op 'x' with kernels; there are matmul"),
        (["--topology=v9"], "no TPU generation 'v9'; there are v4, v5e, v5p, v6e, tpu7x (or 7x), as in v6e:1x1"),
    ],
)
def test_kernels_command_refuses_in_one_line(matmul_is_registered, capsys, arguments, message):
    assert main.main(["tpu-train", "kernels", *arguments]) == 2
    assert capsys.readouterr() == ("", f"tpu-train: {message}\n")
