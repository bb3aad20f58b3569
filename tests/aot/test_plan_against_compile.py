"""The plan's memory beside what the TPU compiler assigns; more pairs in benchmarks/plan_against_compile.py."""

import dataclasses
import sys
from pathlib import Path

import pytest

from tpu_train import aot
from tpu_train.config import Config, UserError

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import plan_against_compile

pytestmark = pytest.mark.aot

PAIRS = {pair.name: pair for pair in plan_against_compile.PAIRS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["remat dots", "experts"])
def test_the_plan_is_within_a_tenth_of_what_the_compiler_assigns(name):
    found = plan_against_compile.row(PAIRS[name])
    parameters = found["plan weights"] / 4
    assert found["assigned"] > 12 * parameters  # weights and two moments are arguments
    assert found["plan"] == pytest.approx(found["assigned"], rel=plan_against_compile.LIMIT)


def test_there_are_ten_pairs_of_every_generation_and_axis():
    pairs = plan_against_compile.PAIRS
    assert len({(pair.topology, pair.overrides, pair.num_slices) for pair in pairs}) >= 10
    assert {pair.topology.partition(":")[0] for pair in pairs} == {"v4", "v5e", "v5p", "v6e", "tpu7x"}
    settings = " ".join(setting for pair in pairs for setting in pair.overrides)
    for axis in ("mesh.data=2", "mesh.fsdp", "mesh.tensor", "mesh.context", "mesh.expert"):
        assert axis in settings
    assert max(pair.num_slices for pair in pairs) == 2


def test_what_is_refused_before_memory_is_assigned_is_one_line():
    step = aot.Step(dataclasses.replace(Config()), "v5e:3x5")
    with pytest.raises(UserError, match="no topology 'v5e:3x5'"):
        aot.assigned_bytes(step)
