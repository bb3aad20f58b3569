"""How a checkpoint comes back: names of arrays, data positions, and what may differ from the run that saved it."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tpu_train import config as config_lib
from tpu_train import offload
from tpu_train.config import Config, UserError


def refuse_other_run(saved: Config, config: Config, directory: Path) -> None:
    """Raises UserError if continuing a run saved with `saved` under `config` would silently make it another one."""
    may_change = (
        "run.workdir",
        "run.steps",
        "run.implementation",
        "run.log_every",
        "run.eval_every",
        "run.eval_batches",
        "run.max_skipped",
        "run.deterministic",
        "run.hang_seconds",
        # These begin or end where the run goes on: see train_step.with_features.
        "run.spike_factor",
        "optim.ema_decay",
        "data.workers",
        "optim.offload",
        "data.cache",  # where it is; the data position knows whether there is one, and what it holds
    )
    for name, now, then in config_lib.differences(config, saved):
        if name in may_change or name.startswith(("mesh.", "checkpoint.", "run.sample")):
            continue
        raise UserError(
            f"{directory} was trained with {name}={then}, this run has {now}; set it back or choose another --workdir"
        )


def for_writing(x: jax.Array) -> jax.Array:
    """An array that Orbax can read while the step that `x` is donated to runs."""
    devices: set[jax.Device] = x.sharding.device_set
    # Of what is on the host the background writer reads the array's own buffer; else it has a copy there by now.
    if offload.waits(x):
        x = jax.device_put(x, x.sharding, may_alias=False)
    elif any(device.platform == "cpu" for device in devices):
        x = jnp.copy(x)
    # Orbax 0.12 asks an array on one device for its device, and an Explicit mesh answers with a sharding.
    return x.addressable_shards[0].data if len(devices) == 1 else x


def to_flat(tree: Any) -> dict[str, Any]:
    """{"model.blocks.0.mlp.up_DF": array, ...}: names that don't depend on how Optax nests its states."""
    flat = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
        flat[".".join(part for part in parts if part != "value")] = leaf
    return flat


def check_same_arrays(wanted: dict[str, Any], saved: dict[str, Any], where: Path) -> None:
    """Raises UserError if the arrays differ by name, shape or dtype."""
    for name, array in wanted.items():
        if name not in saved:
            raise UserError(f"{where} has no array {name!r}, which this model needs; its config differs")
        there = saved[name]
        if tuple(there.shape) != tuple(array.shape) or there.dtype != array.dtype:
            raise UserError(
                f"{where} has {name!r} as {there.dtype}{list(there.shape)}, "
                f"this run needs {array.dtype}{list(array.shape)}"
            )
    extra = sorted(set(saved) - set(wanted))
    if extra:
        raise UserError(f"{where} has the array {extra[0]!r}, which this run does not know; its config differs")


def set_position(data: Any, where: Path) -> None:
    """Continues `data`, a batch iterator, from the positions saved in `where`.

    Each process saves what its get_state() gives, in a file that Grain names after it. `data` is given all of them, by
    process, with set_states(list), since another number of processes or another mesh gives a process other rows.
    (Processes whose devices hold the same rows have saved the same one.) Without that method each process takes its own
    back with set_state(), if they are as many as then. Raises UserError where they are not, or a file is missing.
    """
    files = {}
    for path in (where / "data").iterdir():
        if found := re.fullmatch(r"process_(\d+)-of-(\d+)\.json", path.name):
            files[int(found[1]), int(found[2])] = path
    count = max((count for _, count in files), default=jax.process_count())
    missing = [index for index in range(count) if (index, count) not in files]
    if missing:
        raise UserError(f"{where} lacks the data position of process {missing[0]} of {count}")
    positions = [json.loads(files[index, count].read_bytes()) for index in range(count)]
    if hasattr(data, "set_states"):
        data.set_states(positions)
    elif count == jax.process_count():
        data.set_state(positions[jax.process_index()])
    else:
        raise UserError(
            f"{where} was saved by {count} process(es), this run has {jax.process_count()}; records would be "
            "lost or repeated, so resume with the same number or start a new run directory"
        )
