"""A new run's first weights from another run's checkpoint: the model's arrays alone, compared by name and shape."""

from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from tpu_train import paths
from tpu_train.checkpoint.restore import to_flat
from tpu_train.checkpoint.store import Checkpoints
from tpu_train.config import UserError

_SHOWN = 20  # names of each kind


def initial_model(source: str, abstract_model: Any, ema: bool = False) -> tuple[Any, str]:
    """(the model saved in `source`, with the shardings and dtypes of `abstract_model`; a line that says so).

    `source` is WORKDIR, for its newest good checkpoint, or WORKDIR@STEP. `ema` takes the moving average of its weights.
    Raises UserError with all arrays that are missing, too many or of another shape.
    """
    part = "average" if ema else "model"
    workdir, _, at = source.rpartition("@")
    if not (workdir and at.isdecimal()):
        workdir, at = source, ""
    if not (paths.at(workdir) / "checkpoints").is_dir():
        raise UserError(
            f"run.init_from={source}: {workdir} has no checkpoints; give the workdir of a run that has saved"
        )
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        step = checkpoints.find(int(at) if at else None)
        wanted = to_flat({part: abstract_model})
        with checkpoints.load_errors(step):
            saved = {name: x for name, x in checkpoints.shapes(step).items() if name.startswith(f"{part}.")}
            if ema and not saved:
                raise UserError(
                    f"run.init_from_ema: {checkpoints.directory / str(step)} has no moving average (optim.ema_decay "
                    "was none); leave it out to take the weights"
                )
            _refuse_another_model(saved, wanted, checkpoints.directory / str(step))
            context = ocp.Context()
            context.pytree.loading.partial_load = True  # of the state: no moments, no step
            with context:
                loaded = ocp.load_checkpointables(checkpoints.directory / str(step), {"state": wanted})["state"]
    model = jax.tree.unflatten(jax.tree.structure(abstract_model), [loaded[name] for name in wanted])
    whose = "the moving average at " if ema else ""
    casts = _casts(saved, wanted)
    return model, f"initial weights: {whose}step {step} of {workdir}{casts}; optimizer and data start anew"


def _refuse_another_model(saved: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    shapes = {name: (tuple(saved[name].shape), tuple(wanted[name].shape)) for name in wanted.keys() & saved.keys()}
    kinds = {
        "missing": [_of(wanted, name) for name in wanted if name not in saved],
        "not in this model": [_of(saved, name) for name in saved if name not in wanted],
        "of another shape": [
            f"{_of(saved, name)} for {list(shapes[name][1])}"
            for name in wanted
            if name in shapes and shapes[name][0] != shapes[name][1]
        ],
    }
    found = [f"{kind}: {_list(names)}" for kind, names in kinds.items() if names]
    if found:
        raise UserError(f"{where} is of another model; {'; '.join(found)}")


def _of(arrays: dict[str, Any], name: str) -> str:
    return f"{name.partition('.')[2]}{list(arrays[name].shape)}"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _casts(saved: dict[str, Any], wanted: dict[str, Any]) -> str:
    pairs = [(str(saved[name].dtype), str(wanted[name].dtype)) for name in wanted]
    kinds = {f"{pairs.count(pair)} arrays cast from {pair[0]} to {pair[1]}" for pair in pairs if pair[0] != pair[1]}
    return "".join(f", {kind}" for kind in sorted(kinds))
