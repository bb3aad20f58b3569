"""Checkpoints of a run, through Orbax: the train state, this process's data position and the config, as one step.

WORKDIR/checkpoints/<step> appears by a rename once all of it is written, so a killed save is never taken for a
checkpoint. Saves run in the background; the error of one that failed is raised by the next call here.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from tpu_train import config as config_lib
from tpu_train.config import Config, UserError


class Checkpoints:
    """The checkpoints of one workdir; use as a context manager, so that a pending save is finished on the way out.

    `keep_last` None only reads: nothing is deleted, not even what another process is saving right now.
    """

    def __init__(self, workdir: str | Path, keep_last: int | None):
        # Orbax takes a relative path only to fail late.
        self.directory = Path(workdir).absolute() / "checkpoints"
        policies = ocp.training.preservation_policies
        self._orbax = ocp.training.Checkpointer(
            self.directory,
            save_decision_policy=ocp.training.save_decision_policies.AnySavePolicy([]),
            preservation_policy=policies.LatestN(keep_last) if keep_last else policies.PreserveAll(),
            cleanup_tmp_directories=keep_last is not None,
        )
        self._pending: Any = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, exception_type: object, *rest: object) -> None:
        try:
            self.wait()
        finally:
            self._orbax.close()

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    def find(self, step: int | None) -> int:
        """`step`, or the newest where it is None. Raises UserError where there is none such."""
        steps = sorted(c.step for c in self._orbax.checkpoints)
        if not steps or (step is not None and step not in steps):
            there = f"it has {', '.join(map(str, steps))}" if steps else "it is empty"
            raise UserError(f"{self.directory} has no checkpoint of step {'any' if step is None else step}; {there}")
        return steps[-1] if step is None else step

    def save(self, step: int, state: Any, data: Any, config: Config) -> None:
        """Starts saving `step`; returns once the values are copied, so `state` may then be donated."""
        self.wait()
        arrays = jax.tree.map(_for_writing, _to_flat(state))
        checkpointables = {"state": arrays, "data": data, "config": config_lib.to_dict(config)}
        self._pending = self._orbax.save_checkpointables_async(step, checkpointables, force=True)

    def wait(self) -> None:
        """Blocks until the pending save is complete and raises its error if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def saved_config(self, step: int) -> Config:
        """The config that `step` was saved with."""
        return config_lib.from_dict(self._orbax.load_checkpointables(step, {"config": None})["config"])

    def restore(self, step: int, abstract_state: Any, data: Any = None) -> Any:
        """The state at `step`, sharded as `abstract_state` says; sets `data`, a batch iterator, to its position.

        Raises UserError if the checkpoint's arrays are not those of `abstract_state` by name, shape or dtype.
        """
        flat = _to_flat(abstract_state)
        _check_same_arrays(flat, self._orbax.metadata(step).metadata, self.directory / str(step))
        wanted = {"state": flat} if data is None else {"state": flat, "data": data}
        loaded = self._orbax.load_checkpointables(step, wanted)["state"]
        leaves = [loaded[name] for name in flat]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)


def refuse_other_run(saved: Config, config: Config, directory: Path) -> None:
    """Raises UserError if continuing a run saved with `saved` under `config` would silently make it another one."""
    may_change = (
        "run.workdir",
        "run.steps",
        "run.implementation",
        "run.log_every",
        "run.eval_every",
        "run.eval_batches",
    )
    for name, now, then in config_lib.differences(config, saved):
        if name in may_change or name.startswith(("mesh.", "checkpoint.", "run.sample")):
            continue
        raise UserError(
            f"{directory} was trained with {name}={then}, this run has {now}; set it back or choose another --workdir"
        )


def abstract_like(tree: Any) -> Any:
    """ShapeDtypeStructs with the shardings of `tree`'s arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _for_writing(x: jax.Array) -> jax.Array:
    """An array that Orbax can read while the step that `x` is donated to runs."""
    devices: set[jax.Device] = x.sharding.device_set
    if any(device.platform == "cpu" for device in devices):
        # There the background writer reads the array's own buffer; elsewhere it has a copy on the host by now.
        x = jnp.copy(x)
    # Orbax 0.12 asks an array on one device for its device, and an Explicit mesh answers with a sharding.
    return x.addressable_shards[0].data if len(devices) == 1 else x


def _to_flat(tree: Any) -> dict[str, Any]:
    """{"model.blocks.0.mlp.up_DF": array, ...}: names that don't depend on how Optax nests its states."""
    flat = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
        flat[".".join(part for part in parts if part != "value")] = leaf
    return flat


def _check_same_arrays(wanted: dict[str, Any], saved: dict[str, Any], where: Path) -> None:
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
