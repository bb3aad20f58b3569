"""Runs that are disturbed end as the undisturbed run does, bit for bit; `benchmarks/soak.py --faults=200` does more."""

import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import soak
import soak_faults as faults_of

pytestmark = pytest.mark.slow
OTHERS = [kind for kind in faults_of.FAULTS if kind is not faults_of.kill_of_a_data_worker]


@pytest.mark.parametrize(
    ("processes", "faults", "kinds"),
    [
        # A start with a data worker is a slow one: it suffers once.
        (1, 31, (*OTHERS, *OTHERS, *OTHERS, faults_of.kill_of_a_data_worker)),
        pytest.param(2, 4, (faults_of.kill_in_a_step, faults_of.kill_of_one_process), marks=pytest.mark.multiprocess),
    ],
)
def test_disturbed_runs_end_as_the_undisturbed_one(processes, faults, kinds, tmp_path):
    disturbed = soak.Soak(tmp_path, [f"--processes={processes}"], seed=0)
    disturbed.suffer(faults, kinds)
    assert disturbed.reasons == []
    survived = {fault: n for (fault, outcome), n in disturbed.tally.items() if outcome == "survived"}
    assert survived == Counter(kinds[i % len(kinds)].__name__ for i in range(faults))


def test_another_loss_and_another_weight_are_seen(tmp_path):
    """The harness itself: a run that differs is silent, one whose end is missing lost."""
    disturbed = soak.Soak(tmp_path, [], seed=0)
    whole = tmp_path / "whole"
    assert disturbed.compare(whole) == "survived"
    lines = (whole / "metrics.jsonl").read_text()
    first = lines.index('"loss": ') + len('"loss": ')
    (whole / "metrics.jsonl").write_text(lines[:first] + "9" + lines[first + 1 :])
    assert disturbed.compare(whole).startswith("silent: {'step': 1, 'loss': 9")
    (whole / "metrics.jsonl").write_text(lines)
    disturbed.wanted[1]["model.final_norm_D"] = b"another"
    assert disturbed.compare(whole) == "silent: model.final_norm_D differs"
