"""Which tensor went bad first: a step that was skipped, done again from the checkpoint before it and looked into.

The steps between are trained again on the same batches, which the data position in the checkpoint gives, so that the
step under suspicion meets the very weights and tokens that it met in the run; on the same mesh to the same bits.
"""

from pathlib import Path
from typing import Any

import jax
import optax

from tpu_train import config as config_lib
from tpu_train import data, examine, metrics, paths, precision, processes
from tpu_train import mesh as mesh_lib
from tpu_train.checkpoint import Checkpoints
from tpu_train.config import Config, UserError
from tpu_train.models import dropout
from tpu_train.report import say
from tpu_train.sharding import SPECS, without_stage
from tpu_train.train import first_state
from tpu_train.train_step import (
    TrainState,
    abstract_state,
    batch_on_mesh,
    loss_and_grads,
    make_train_step,
)


def show(flag: dict[str, Any]) -> int:
    """Prints what of the step is not finite. Raises UserError where there is no such step or no way to it."""
    workdir = paths.at(flag["workdir"])
    target = first_bad_step(workdir) if flag["step"] is None else flag["step"]
    if target < 1:
        raise UserError(f"--step={target} must be 1 or more")
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        before = max((step for step in checkpoints.steps() if step < target), default=0)
        if before:
            checkpoints.find(before)  # raises if it is damaged
        config = _config(flag, checkpoints, before)
        mesh = mesh_lib.make_mesh(config.mesh)
        mesh_lib.check_fits(config, mesh)
        compute = precision.resolve(config.run, mesh_lib.platform(mesh), config.mesh)
        vocab = config.model.vocab_size
        batches = data.train_batches(config.data, vocab_size=vocab, **processes.batch_share(mesh))
        try:
            if before:
                state = checkpoints.restore(before, abstract_state(config, compute), batches)
            else:
                state = first_state(config, compute)
            state, batch = _replay(state, batches, config, compute, mesh, before, target)
        finally:
            batches.close()
    for line in look_into(state, batch, config, compute):
        say(line)
    return 0


def first_bad_step(workdir: Path) -> int:
    """The first of the last row of steps whose loss or gradient was not finite. Raises UserError if none was."""
    bad = [line["step"] for line in metrics.read(workdir) if _is_bad(line)]
    if not bad:
        raise UserError(f"{workdir} has no step whose loss or gradient was not finite; name one with --step")
    first = bad.pop()
    while bad and bad[-1] == first - 1:
        first = bad.pop()
    return first


def _is_bad(line: dict[str, Any]) -> bool:
    lowers_scale = line.get("loss") is not None and (line.get("loss_scale") or 1.0) > 1.0
    return line.get("loss") is None or (line.get("grad_norm") is None and not lowers_scale)


def _config(flag: dict[str, Any], checkpoints: Checkpoints, before: int) -> Config:
    if before:
        config = checkpoints.saved_config(before)
    elif flag["config"]:
        config = config_lib.load(flag["config"])
    else:
        raise UserError(
            f"{checkpoints.directory} has no checkpoint before that step; with --config=FILE (and its --set) the run "
            "is done again from its start"
        )
    for override in flag["set"]:
        config = config_lib.apply_override(config, override)
    config_lib.check(config)
    return config


def _replay(state, batches, config, compute, mesh, before: int, target: int) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state before step `target` and its batch."""
    where = f"the checkpoint of step {before}" if before else "the start"
    say(f"step {target}, from {where}" + (f" over {target - 1 - before} step(s)" if target - 1 > before else ""))
    step = make_train_step(config, compute)
    for _ in range(before + 1, target):
        state, _ = step(state, batch_on_mesh(next(batches), config, mesh))
    return state, batch_on_mesh(next(batches), config, mesh)


def look_into(state: TrainState, batch: dict[str, jax.Array], config: Config, compute) -> list[str]:
    """Lines: loss and gradient norm, then the first bad tensor of each kind, and in the last one the verdict."""
    layers = config.model.num_layers
    loss, grads, _ = jax.jit(lambda s, b: loss_and_grads(s, b, config.optim.z_loss, compute))(state, batch)
    lines = [f"loss {float(loss):.6g}, gradient norm {float(optax.tree.norm(grads)):.6g}"]
    kinds = {
        "weights": examine.arrays(state.model, "model", layers),
        "moments": examine.arrays(state.opt_state, "opt_state", layers),
        "activations": _activations(state, batch, compute),
        "gradients": examine.in_backward_order(examine.arrays(grads, "model", layers), layers),
    }
    first = None
    for kind, tensors in kinds.items():
        bad = [tensor for tensor in tensors if tensor.bad]
        if not bad:
            largest = max(tensors, key=lambda tensor: tensor.largest)
            lines.append(f"{kind}: all finite; the largest: {largest}")
            continue
        lines.append(f"{kind}: {len(bad)} of {len(tensors)} not finite; the first: {bad[0]}")
        # A moment only reaches the next weights.
        if first is None and kind != "moments":
            first = f"first bad tensor, of the {kind}: {bad[0].name}"
    if first is None:
        lines += ["the largest gradients:", *(f"  {line}" for line in examine.largest_gradients(grads, 5))]
    return [*lines, first or "no bad tensor: this step is finite here"]


def _activations(state: TrainState, batch: dict[str, jax.Array], compute) -> list[examine.Tensor]:
    """Of the first micro-batch with one that is not finite, or else of the first."""
    mesh, model = jax.sharding.get_mesh(), state.model
    if mesh.shape["stage"] > 1:  # stages compute side by side, and this goes block by block
        mesh = mesh_lib.without_stages(mesh)
        on = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))  # noqa: E731
        model = jax.tree.map(lambda x: on(x, without_stage(x.sharding.spec)), model)
        batch = {name: on(x, SPECS["ABT"]) for name, x in batch.items()}
    found = []
    with jax.set_mesh(mesh):
        key = dropout.key_of(compute.seed, jax.device_get(state.step)) if model.config.dropout else None
        for micro in range(batch["tokens"].shape[0]):
            one = {name: x[micro] for name, x in batch.items()}
            found.append(list(examine.activations(model, one, compute, key)))
            if any(tensor.bad for tensor in found[-1]):
                return found[-1]
    return found[0]
