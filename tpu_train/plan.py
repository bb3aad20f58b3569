"""The `plan` command: what a config means on given chips, by formulas, before anything is rented. Imports no jax."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpu_train import chips
from tpu_train import config as config_lib
from tpu_train.config import UserError
from tpu_train.planning import page, text
from tpu_train.planning.report import Inputs, report


def show(flag: Mapping[str, Any]) -> int:
    """Prints the plan that the flags ask for, as text or JSON, and writes the page; returns the exit code."""
    for name, example in (("config", "--config=configs/llama_1b.py"), ("chips", "--chips=v5p-256")):
        if not flag[name]:
            raise UserError(f"plan needs --{name}, such as {example}; chips are {', '.join(chips.CHIPS)}")
    config = config_lib.load(flag["config"], flag["set"])
    fleet = chips.parse(flag["chips"], flag["slices"])
    inputs = Inputs(flag["tokens"], flag["mfu"], flag["watts"], flag["price"])
    plan = {"config": flag["config"], **report(config, fleet, inputs)}
    if flag["html"]:
        path = Path(flag["html"])
        try:
            path.write_text(page.render(plan), encoding="utf-8")
        except OSError as error:
            raise UserError(f"can't write --html={path}: {error.strerror}") from error
    print(json.dumps(plan, indent=2) if flag["json"] else text.render(plan))
    return 0
