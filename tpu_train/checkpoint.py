"""Checkpoints of a run, through Orbax: the train state, this process's data position and the config, as one step.

WORKDIR/checkpoints/<step> appears by a rename once all of it is written, so a killed save is never taken for a
checkpoint. Saves run in the background; the error of one that failed is raised by the next call here.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from tpu_train import config as config_lib
from tpu_train.config import Config, UserError

PARTS = ("state", "data", "config")


class SaveFailed(Exception):
    """A checkpoint was not written; one line that says which, why and what is kept. `main` prints it, exit code 1."""


class Checkpoints:
    """The checkpoints of one workdir; use as a context manager, so that a pending save is finished on the way out.

    `keep_last` None only reads: nothing is deleted, not even what another process is saving right now. A folder that
    is named like a step but holds no checkpoint is never read, counted or deleted.
    """

    def __init__(self, workdir: str | Path, keep_last: int | None):
        # Orbax takes a relative path only to fail late.
        self.directory = Path(workdir).absolute() / "checkpoints"
        if keep_last is not None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"can't make the folder {self.directory}: {error.strerror}") from None
        policies = ocp.training.preservation_policies
        self._orbax = ocp.training.Checkpointer(
            self.directory,
            save_decision_policy=ocp.training.save_decision_policies.AnySavePolicy([]),
            preservation_policy=_LatestComplete(keep_last, self) if keep_last else policies.PreserveAll(),
            cleanup_tmp_directories=keep_last is not None,
        )
        self.not_checkpoints = {c.step for c in self._orbax.checkpoints if not self._is_complete(c.step)}
        self._pending: tuple[int, Any] | None = None
        self._failed = False

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, exception_type: object, exception: BaseException | None, traceback: object) -> None:
        if isinstance(exception, KeyboardInterrupt):
            return  # stop at once: what is half written stays a half
        try:
            self.wait()
        except SaveFailed as failed:
            if exception is None:
                raise
            exception.add_note(str(failed))
        finally:
            # After a failed save Orbax would raise its error once more.
            with contextlib.suppress(*[Exception] if self._failed else []):
                self._orbax.close()

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return max(self._steps(), default=None)

    def find(self, step: int | None) -> int:
        """`step`, or the newest where it is None. Raises UserError where there is none such."""
        steps = self._steps()
        if not steps:
            raise UserError(f"{self.directory} has no complete checkpoint")
        if step is not None and step not in steps:
            raise UserError(f"{self.directory} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
        return steps[-1] if step is None else step

    def save(self, step: int, state: Any, data: Any, config: Config) -> None:
        """Starts saving `step`; returns once the values are copied, so `state` may then be donated.

        Raises SaveFailed if this save can't start or the one before failed.
        """
        self.wait()
        arrays = jax.tree.map(_for_writing, _to_flat(state))
        checkpointables = {"state": arrays, "data": data, "config": config_lib.to_dict(config)}
        with self._save_errors(step):
            overwrite = step in self.not_checkpoints
            self.not_checkpoints.discard(step)
            saving = self._orbax.save_checkpointables_async(step, checkpointables, force=True, overwrite=overwrite)
            self._pending = step, saving

    def wait(self) -> None:
        """Blocks until the pending save is complete. Raises SaveFailed if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._save_errors(pending[0]):
                pending[1].result()

    def saved_config(self, step: int) -> Config:
        """The config that `step` was saved with."""
        with self._load_errors(step):
            values = self._orbax.load_checkpointables(step, {"config": None})["config"]
        return config_lib.from_dict(values)

    def restore(self, step: int, abstract_state: Any, data: Any = None) -> Any:
        """The state at `step`, sharded as `abstract_state` says; sets `data`, a batch iterator, to its position.

        Raises UserError if the checkpoint's arrays are not those of `abstract_state` by name, shape or dtype.
        """
        flat = _to_flat(abstract_state)
        with self._load_errors(step):
            saved = self._orbax.metadata(step).metadata
            if saved is None:
                raise ValueError("its arrays are damaged")
            _check_same_arrays(flat, saved, self.directory / str(step))
            if data is not None:
                _check_same_processes(self.directory / str(step))
                # Alone: its error would leave the other's coroutine unawaited, and Python warns.
                self._orbax.load_checkpointables(step, {"data": data})
            loaded = self._orbax.load_checkpointables(step, {"state": flat})["state"]
        leaves = [loaded[name] for name in flat]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    def arrays(self, step: int) -> dict[str, jax.Array]:
        """The state at `step` by name, whole on one device whatever mesh it was saved from: to look at."""
        with self._load_errors(step):
            saved = self._orbax.metadata(step).metadata
            if saved is None:
                raise ValueError("its arrays are damaged")
            one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for name, x in saved.items()}
            return self._orbax.load_checkpointables(step, {"state": wanted})["state"]

    def steps(self) -> list[int]:
        """The complete steps, in order."""
        return self._steps()

    def _steps(self) -> list[int]:
        return sorted(c.step for c in self._orbax.checkpoints if self._is_complete(c.step))

    def _is_complete(self, step: int) -> bool:
        return all((self.directory / str(step) / part).is_dir() for part in PARTS)

    @contextlib.contextmanager
    def _save_errors(self, step: int) -> Iterator[None]:
        """Orbax lets through whatever the file system or a library below it raised."""
        try:
            yield
        except Exception as error:
            self._failed = True
            complete = [there for there in self._steps() if there != step]
            kept = f"checkpoint of step {complete[-1]}" if complete else "no checkpoint"
            raise SaveFailed(
                f"saving step {step} in {self.directory} failed: {_first_line(error)}; kept: {kept}"
            ) from error

    @contextlib.contextmanager
    def _load_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UserError):
                cause = cause.__cause__ or cause.__context__
            if cause is not None:  # Orbax wraps what a data iterator raises
                raise cause from None
            raise UserError(
                f"{self.directory / str(step)} can't be read: {_first_line(error)}; move it away to use an older one"
            ) from error


class _LatestComplete:
    """Orbax's preservation policy: the `count` newest checkpoints, and what is none."""

    def __init__(self, count: int, checkpoints: Checkpoints):
        self._count, self._checkpoints = count, checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        ours = sorted({c.step for c in checkpoints} - self._checkpoints.not_checkpoints)
        return [c.step not in ours or c.step in ours[-self._count :] for c in checkpoints]


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
    )
    for name, now, then in config_lib.differences(config, saved):
        if name in may_change or name.startswith(("mesh.", "checkpoint.", "run.sample")):
            continue
        raise UserError(
            f"{directory} was trained with {name}={then}, this run has {now}; set it back or choose another --workdir"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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


def _check_same_processes(where: Path) -> None:
    """Each process saves a data position of its own, in a file that Grain names after it."""
    counts = {int(path.stem.rpartition("-of-")[2]) for path in (where / "data").glob("process_*-of-*.json")}
    if counts and jax.process_count() not in counts:
        raise UserError(
            f"{where} was saved by {max(counts)} process(es), this run has {jax.process_count()}; records would be "
            "lost or repeated, so resume with the same number or start a new run directory"
        )


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
