"""The checkpoints of one workdir: which are there and good, saving another, reading one.

WORKDIR/checkpoints/<step> appears by a rename once all of it and its manifest are written, so a killed save is never
taken for a checkpoint. Saves run in the background; the error of one that failed is raised by the next call here.
Orbax's own Checkpointer is not used for it: of several processes, the one whose save fails would tell nobody, but wait
at a barrier for the others, and it would delete old steps before we have read the new one back.
"""

import contextlib
import errno
import math
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from tpu_train import config as config_lib
from tpu_train import paths, processes
from tpu_train.checkpoint import manifest
from tpu_train.checkpoint.errors import SaveFailed, is_of_storage, reason_of, warn
from tpu_train.checkpoint.policies import Kept
from tpu_train.checkpoint.restore import check_same_arrays, for_writing, set_position, to_flat
from tpu_train.config import Config, UserError

_UNFINISHED = ".unfinished"  # of a folder's name until its manifest is there; while Orbax writes, more follows


class Checkpoints:
    """The checkpoints of one workdir; use as a context manager, so that a pending save is finished on the way out.

    Kept are, of the good ones, the `keep_last` newest, those whose step is a multiple of `keep_every` and the
    `keep_best` with the lowest validation loss. `keep_last` None only reads: nothing is deleted, not even what another
    process is saving right now. A folder that is named like a step but holds no checkpoint, or a damaged one, is never
    read, counted or deleted; a save of that step takes its place.
    """

    def __init__(self, workdir: str | Path, keep_last: int | None, keep_every: int = 0, keep_best: int = 0):
        # Orbax takes a relative path only to fail late.
        self.directory = paths.absolute(paths.at(workdir)) / "checkpoints"
        self._remote = paths.is_remote(self.directory)  # then a step's folder has its name from the beginning
        if keep_last is not None:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"can't make the folder {self.directory}: {error.strerror}") from None
        self.damaged: dict[int, str] = {}  # step: how; "" for a folder that holds none of a checkpoint's parts
        self._steps: set[int] = set()  # not damaged as far as is known
        self._verified: set[int] = set()
        self._losses: dict[int, float] = {}  # on validation
        self._scan()
        self._kept = Kept(keep_last, keep_every, keep_best)
        # Puts on disk what a start from a new checkpoint takes for granted; raises OSError where it can't.
        self.before_save: Callable[[], None] = lambda: None
        self._pending: tuple[int, Future] | None = None
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._given_up = 0  # saves
        if keep_last is not None:
            self._remove_halves()

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

    def latest(self) -> int | None:
        """The newest good step, None if there is no checkpoint at all; damaged ones are passed over with a warning.

        Raises UserError if all are damaged.
        """
        while self._steps and (reason := self._verify(max(self._steps))):
            step = max(self._steps)
            self._steps.remove(step)
            self.damaged[step] = reason
            self._losses.pop(step, None)
        newest = max(self._steps, default=-1)
        skipped = {step: reason for step, reason in sorted(self.damaged.items()) if reason and step > newest}
        if skipped and not self._steps:
            reasons = "; ".join(f"step {step}: {reason}" for step, reason in skipped.items())
            raise UserError(f"{self.directory} has no good checkpoint ({reasons}); move them away to start anew")
        for step, reason in skipped.items():
            warn(f"{self.directory / str(step)} is damaged and skipped: {reason}")
        return newest if self._steps else None

    def find(self, step: int | None) -> int:
        """`step`, or the newest good one where it is None. Raises UserError where there is none such."""
        if step is None:
            newest = self.latest()
            if newest is None:
                raise UserError(f"{self.directory} has no complete checkpoint")
            return newest
        reason = self._verify(step) if step in self._steps else self.damaged.get(step)
        if reason:
            raise UserError(f"{self.directory / str(step)} is damaged: {reason}")
        if step not in self._steps:
            there = ", ".join(map(str, self.steps()))
            raise UserError(f"{self.directory} has no checkpoint of step {step}; it has {there or 'none'}")
        return step

    def steps(self) -> list[int]:
        """The steps that are there and good as far as is known, in order."""
        return sorted(self._steps)

    @property
    def newest(self) -> int | None:
        """The newest of `steps` whose folder is still there."""
        return max((step for step in self._steps if (self.directory / str(step)).is_dir()), default=None)

    def kept(self) -> str:
        """For messages: "kept: checkpoint of step 20"."""
        return "kept: no checkpoint" if self.newest is None else f"kept: checkpoint of step {self.newest}"

    @property
    def is_saving(self) -> bool:
        """Whether a save was started and neither `wait` nor `poll` has told how it went."""
        return self._pending is not None

    def is_best(self, validation_loss: float | None) -> bool:
        """Whether a checkpoint of this validation loss would be kept for it."""
        return self._kept.is_best(validation_loss, self._losses)

    def save(self, step: int, state: Any, data: Any, config: Config, validation_loss: float | None = None) -> None:
        """Starts saving `step`; returns once the values are copied, so `state` may then be donated.

        A good checkpoint of that step stays as it is. Raises SaveFailed if this save can't start or the one before
        failed.
        """
        self.wait()
        if step in self._steps:
            return
        arrays = jax.tree.map(for_writing, to_flat(state))
        checkpointables = {"state": arrays, "data": data, "config": config_lib.to_dict(config)}
        loss = validation_loss if validation_loss is not None and math.isfinite(validation_loss) else None
        with self._save_errors(step):
            # Of one process that can't, the others would wait within Orbax.
            for refusal in filter(None, processes.from_all(self._refusal())):
                raise OSError(*refusal)
            if self._given_up:
                self._remove_halves()  # that were still being written when they were given up
            folder = self.directory / (str(step) if self._remote else f"{step}{_UNFINISHED}{self._given_up or ''}")
            saving = ocp.save_checkpointables_async(
                folder, checkpointables, overwrite=True, custom_metadata={"format": manifest.FORMAT}
            )
            self._pending = step, self._background.submit(self._complete, step, folder, saving, loss, self._given_up)

    def _refusal(self) -> tuple[int | None, str] | None:
        """Why this process can't save now, as OSError takes it."""
        try:
            self.before_save()
        except OSError as error:
            return error.errno, error.strerror or str(error)
        # Orbax would make it again, where a disk may have been mounted before.
        return None if self._remote or self.directory.is_dir() else (errno.ENOENT, "the folder is gone")

    def wait(self) -> None:
        """Blocks until the pending save is complete. Raises SaveFailed if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._save_errors(pending[0]):
                pending[1].result()

    def poll(self) -> bool:
        """Whether a pending save has been completed since the last call. Raises SaveFailed if it failed."""
        if self._pending is None or not self._pending[1].done():
            return False
        self.wait()
        return True

    def give_up(self) -> None:
        """All processes: none waits for the save under way any more, and process 0's view is everybody's again."""
        self._pending = None
        self._given_up += 1
        self._background.shutdown(wait=False)  # it may wait for a process that failed
        self._background = ThreadPoolExecutor(1, "checkpoint")
        steps, losses = processes.from_all([sorted(self._steps), sorted(self._losses.items())])[0]
        self._steps, self._losses = set(steps), dict(losses)
        self._remove_halves()

    def _remove_halves(self) -> None:
        """Process 0: what is half written would keep a full disk full."""
        there = jax.process_index() == 0 and self.directory.is_dir()
        for folder in self.directory.iterdir() if there else ():
            unfinished = re.fullmatch(rf"\d+({re.escape(_UNFINISHED)}|\.orbax-checkpoint-tmp).*", folder.name)
            if unfinished or self._is_remote_half(folder):
                paths.remove_folder(folder)

    def _is_remote_half(self, folder: Any) -> bool:
        """Where folders can't be renamed, one without a manifest was never finished: none is older than manifests."""
        return self._remote and folder.name.isdecimal() and not (folder / manifest.FILE_NAME).exists()

    def _complete(self, step: int, unfinished: Any, saving: Any, validation_loss: float | None, given_up: int) -> None:
        """In the background: waits for all processes' files, then process 0 gives the folder its manifest and its name.

        Only then do old ones go.
        """
        saving.result()
        if given_up != self._given_up:
            return
        folder = self.directory / str(step)
        losses = self._losses | ({} if validation_loss is None else {step: validation_loss})
        kept = self._kept.of(self._steps | {step}, losses)
        if jax.process_index() == 0:
            manifest.write(unfinished, validation_loss)
            if unfinished != folder:
                if folder.is_dir():  # damaged
                    shutil.rmtree(folder)
                unfinished.rename(folder)
            for old in self._steps - kept:  # one that stays for now goes after the next start
                paths.remove_folder(self.directory / str(old))
        self._steps, self._losses = kept, {step: loss for step, loss in losses.items() if step in kept}
        self._verified.add(step)
        self.damaged.pop(step, None)

    def saved_config(self, step: int) -> Config:
        """The config that `step` was saved with."""
        with self.load_errors(step):
            values = ocp.load_checkpointables(self.directory / str(step), {"config": None})["config"]
        return config_lib.from_dict(values)

    def shapes(self, step: int) -> dict[str, Any]:
        """Flat name: shape and dtype, of the state at `step`."""
        saved = ocp.metadata(self.directory / str(step)).metadata
        if saved is None:
            raise ValueError("its arrays are damaged")
        return saved

    def restore(self, step: int, abstract_state: Any, data: Any = None) -> Any:
        """The state at `step`, sharded as `abstract_state` says; sets `data`, a batch iterator, to its position.

        Raises UserError if the checkpoint's arrays are not those of `abstract_state` by name, shape or dtype.
        """
        flat, folder = to_flat(abstract_state), self.directory / str(step)
        with self.load_errors(step):
            check_same_arrays(flat, self.shapes(step), folder)
            if data is not None:
                set_position(data, folder)
            loaded = ocp.load_checkpointables(folder, {"state": flat})["state"]
        leaves = [loaded[name] for name in flat]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)

    def arrays(self, step: int) -> dict[str, jax.Array]:
        """The state at `step` by name, whole on one device whatever mesh it was saved from: to look at."""
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        with self.load_errors(step):
            wanted = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one) for name, x in self.shapes(step).items()
            }
            return ocp.load_checkpointables(self.directory / str(step), {"state": wanted})["state"]

    def _scan(self) -> None:
        """Sorts the folders named like steps by whether all their files are there; process 0's view is everybody's."""
        seen: dict[str, Any] = {}  # name: how it is damaged, or the validation loss as [loss]
        if jax.process_index() == 0 and self.directory.is_dir():
            for folder in self.directory.iterdir():
                if not (folder.name.isdecimal() and folder.is_dir()) or self._is_remote_half(folder):
                    continue
                try:
                    seen[folder.name] = [(manifest.read(folder) or {}).get("validation_loss")]
                except manifest.Damaged as damage:
                    seen[folder.name] = str(damage) if any((folder / part).is_dir() for part in manifest.PARTS) else ""
        for name, found in processes.from_all(seen)[0].items():
            if isinstance(found, str):
                self.damaged[int(name)] = found
                continue
            self._steps.add(int(name))
            if isinstance(found[0], float):
                self._losses[int(name)] = found[0]

    def _verify(self, step: int) -> str | None:
        """What is wrong with the files of `step`, None if nothing; each process reads a share of them."""
        if step in self._verified:
            return None
        reason, known = "", True
        try:
            known = manifest.check(self.directory / str(step), jax.process_index(), jax.process_count())
        except manifest.Damaged as damage:
            reason = str(damage)
        reason = next(filter(None, processes.from_all(reason)), "")
        if reason:
            return reason
        if not known:
            warn(f"{self.directory / str(step)} is from an older version, without checksums: read unverified")
        self._verified.add(step)
        return None

    @contextlib.contextmanager
    def _save_errors(self, step: int) -> Iterator[None]:
        """Orbax lets through whatever the file system or a library below it raised."""
        try:
            yield
        except Exception as error:
            if jax.process_count() == 1:
                self._remove_halves()
            raise SaveFailed(
                f"saving step {step} in {self.directory} failed: {reason_of(error)}; {self.kept()}",
                by_storage=is_of_storage(error),
            ) from error

    @contextlib.contextmanager
    def load_errors(self, step: int) -> Iterator[None]:
        """Makes one line of what Orbax raises while it reads `step`."""
        try:
            yield
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UserError):
                cause = cause.__cause__ or cause.__context__
            if cause is not None:  # Orbax wraps what a data iterator raises
                raise cause from None
            raise UserError(
                f"{self.directory / str(step)} can't be read: {reason_of(error)}; move it away to use an older one"
            ) from error
