"""`compile --search`: meshes, remat policies and micro-batches of a config, each through the compiler.

For each way to split the devices it goes from what recomputes least to what needs least memory and stops at the first
that fits: remat none, dots, full, then full with the batch in 2, 4, 8 parts. The batch of a step, and so what is
learned, stays as the config says. What fits is ranked by its predicted time.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tpu_train.aot.table import Report, gb
from tpu_train.config import Config, MeshConfig, UserError, differences
from tpu_train.layout import DATA_ALONE

# (remat, parts of the batch), from the quickest to the smallest.
LADDER = (("none", 1), ("dots", 1), ("full", 1), ("full", 2), ("full", 4), ("full", 8))
TENSOR = (1, 2, 4, 8)


def show(step: Any, devices: int, compile_steps: Callable[[Sequence[Any]], list[dict[str, Any]]], as_json: bool) -> int:
    """Prints the candidates that fit, the quickest first; 1 if none does."""
    found = list(search(step, devices, compile_steps))
    if not found:
        raise UserError(
            f"no mesh of {devices} devices divides the model and data.batch_size={step.config.data.batch_size}"
        )
    fitting = sorted((r for _, r in found if r.fits), key=lambda report: report.seconds or float("inf"))
    if as_json:
        print(json.dumps([{"settings": settings(config, step.config), **r.as_dict()} for config, r in found], indent=2))
        return 0 if fitting else 1
    for config, report in sorted(found, key=lambda one: (not one[1].fits, one[1].seconds or float("inf"))):
        time = f"{report.seconds * 1e3:8,.0f} ms predicted" if report.seconds else " " * 21
        word = "fits" if report.fits else "does not fit"
        print(f"{gb(report.hbm_bytes)} {word:<12} {time}  {settings(config, step.config) or 'as it stands'}")
    return 0 if fitting else 1


def search(
    step: Any, devices: int, compile_steps: Callable[[Sequence[Any]], list[dict[str, Any]]]
) -> Iterator[tuple[Config, Report]]:
    """(config, report) of every candidate that was compiled."""
    for mesh in meshes(step.config, devices, step.num_slices):
        rows = step.config.data.batch_size // (mesh.data * mesh.stage * mesh.fsdp)
        for remat, parts in LADDER:
            if rows % parts:
                continue
            config = dataclasses.replace(
                step.config,
                mesh=mesh,
                model=dataclasses.replace(step.config.model, remat=remat),
                optim=dataclasses.replace(step.config.optim, accumulation_steps=parts),
            )
            (answer,) = compile_steps([dataclasses.replace(step, config=config)])
            report = Report(step.topology, step.num_slices, answer)
            yield config, report
            if report.fits:
                break


def meshes(config: Config, devices: int, num_slices: int) -> Iterator[MeshConfig]:
    """Those that divide the devices, the model and the batch: `data` over the slices, the rest to `fsdp`.

    `context`, `expert` and `stage` stay as the config has them.
    """
    model, context, expert = config.model, max(config.mesh.context, 1), max(config.mesh.expert, 1)
    stage = max(config.mesh.stage, 1)
    width = model.expert_size if model.num_experts else model.mlp_dim
    for tensor in TENSOR if config.mesh.gradient_scatter == "xla" else (1,):
        fsdp, left = divmod(devices, num_slices * stage * context * expert * tensor)
        rows, parts = num_slices * stage * expert * fsdp, stage * expert * fsdp * context
        if left or config.data.batch_size % rows or model.model_dim % parts:
            continue
        if any(n % tensor for n in (model.num_heads, model.kv_heads, width, model.vocab_size)):
            continue
        mesh = dataclasses.replace(config.mesh, data=num_slices, stage=stage, fsdp=fsdp, tensor=tensor)
        yield dataclasses.replace(mesh, context=context, expert=expert, **DATA_ALONE)  # type: ignore[arg-type]


def settings(config: Config, base: Config) -> str:
    """The --set flags that make `config` of `base`."""
    return " ".join(f"--set {name}={value}" for name, value, _ in differences(config, base))
