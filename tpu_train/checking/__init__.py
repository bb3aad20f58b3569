"""The `check` command: a config computes the same on every mesh, in any cut, by any kernel; CPU devices will do.

A small copy of the config (shrink.py) takes a few steps in float32 on one device and on each mesh; nothing is read from
its data, whose place random documents take.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from tpu_train import config as config_lib
from tpu_train import train_step
from tpu_train.checking import gradients, meshes, shrink, steps, table
from tpu_train.checking.meshes import Case, Sizes
from tpu_train.checking.results import Check
from tpu_train.config import Config, UserError
from tpu_train.layout import AXES

ALONE = dict.fromkeys(AXES, 1)


def show(config: Config, flag: Mapping[str, Any]) -> int:
    """Runs the checks and prints them as they end, or JSON after the last; returns 1 if one failed, else 0."""
    say = (lambda line: None) if flag["json"] else (lambda line: print(line, flush=True))
    devices = _devices(flag["devices"])
    asked = meshes.parse(flag["meshes"]) if flag["meshes"] else None
    cases, skipped = _cases(config, asked, devices)
    own = meshes.own_mesh(config, devices)
    sizes = [case.sizes for case in cases] or [ALONE]
    small = shrink.with_steps(config, flag["steps"]) if flag["full"] else shrink.shrunk(config, sizes, flag["steps"])
    changed = {name: (b, a) for name, a, b in config_lib.differences(small, config)}
    say(f"{devices} x {jax.devices()[0].device_kind}; {flag['steps']} steps in float32 on random documents, with")
    for name, (before, after) in changed.items():
        say(f"  {name} = {after}, in place of {before}")
    done = []
    limit = round(flag["replicated_limit"] * 1e6)
    sharding, lines = table.check(config, own, limit)
    say("\n".join(["", f"the state at full size, on {meshes.name_of(own)}:", *(f"  {line}" for line in lines), ""]))
    for check in itertools.chain([sharding], skipped, run(small, config, cases)):
        done.append(check)
        say(check.line())
    failed = [check.name for check in done if not check.ok]
    if flag["json"]:
        report = {
            "devices": devices,
            "changed": {name: {"from": before, "to": after} for name, (before, after) in changed.items()},
            "state": lines,
            "checks": [check.as_dict() for check in done],
        }
        print(json.dumps(report, indent=2))
    say(f"{len(failed)} of {len(done)} checks FAILED: {'; '.join(failed)}" if failed else f"all {len(done)} checks ok")
    return 1 if failed else 0


def run(small: Config, full: Config, cases: list[Case]) -> Iterator[Check]:
    """Every check that takes steps, as it ends."""
    alone = Case(ALONE, "auto")
    yield from steps.on_meshes(small, cases, alone)
    on_one, mesh, compute = steps.on_mesh(small, alone)
    with jax.set_mesh(mesh):
        begin = steps.named(train_step.init_state(on_one, compute))
    spread = next((case for case in cases if case.sizes == ALONE | {"data": 2, "tensor": 2}), None)
    yield from gradients.checks(small, full, alone, spread, begin)


def _devices(asked: int | None) -> int:
    there = jax.device_count()
    if asked is not None and asked > there:
        raise UserError(f"--devices={asked}, and there are {there} x {jax.devices()[0].device_kind}")
    return asked or there


def _cases(config: Config, asked: list[Sizes] | None, devices: int) -> tuple[list[Case], list[Check]]:
    """The meshes to run on, and a line for each that the config does not fit; UserError where one was asked for."""
    cases, skipped = [], []
    for sizes in meshes.usual(config, devices) if asked is None else asked:
        needs = math.prod(sizes.values())
        if needs > devices:
            raise UserError(f"--meshes: {meshes.name_of(sizes)} needs {needs} devices; there are {devices}")
        try:
            cases += meshes.cases(config, sizes)
        except UserError as error:
            if asked is not None:
                raise UserError(f"--meshes: {meshes.name_of(sizes)}: {error}") from error
            skipped.append(Check(f"steps on {meshes.name_of(sizes)}", note=str(error), skipped=True))
    return cases, skipped
