"""How several processes save together, and fail together.

The process whose files are refused knows at once; the others wait for it within Orbax, for minutes. So it asks all to
meet at the next step (Agreement of processes.py), there each hears what failed, nobody waits any more, and the run goes
on. Process 0 alone decides when to try again and when to stop, by its clock; since all meet for it, all save or stop at
the same step. A save never starts before all have met and know how the one before it went.

What a process that gave up a save left waiting in Orbax ends with Orbax's own time limits, or with the run.
"""

import time
from collections.abc import Callable
from typing import Any

import jax

from tpu_train import processes
from tpu_train.checkpoint.errors import SaveFailed
from tpu_train.checkpoint.saver import SAVE, Saver
from tpu_train.checkpoint.store import Checkpoints
from tpu_train.config import CheckpointConfig, Config

_POLL = 0.05  # seconds


class SharedSaver(Saver):
    """A `Saver` for one of several processes. All call its methods at the same steps."""

    def __init__(self, checkpoints: Checkpoints, config: CheckpointConfig):
        super().__init__(checkpoints, config)
        self._failed: SaveFailed | None = None  # what the others have not heard yet
        self._wants = False  # process 0: to save when all have met

    def asks(self) -> int:
        """SAVE where this process has something to tell, or wants to save: for all to meet."""
        if jax.process_index() == 0 and (self._clock.is_up() or self._may_try_again()):
            self._clock.reset()
            self._wants = True
        return SAVE if self._wants or self._failed is not None else 0

    def due(self, step: int, asked: int) -> bool:
        """Whether to save now, the same in all; `asked` is what any asked for. Raises as `Saver.due` does."""
        self._listen()
        every = self._config.every_steps
        return (asked == SAVE and self._meet()) or (every > 0 and step % every == 0)

    def save(self, step: int, state: Any, data: Any, config: Config, validation_loss: float | None) -> bool:
        """Starts a save as `Saver.save` does, once all know of the one before; `due` raises where it can't start."""
        self._clock.reset()
        self._settle()
        try:
            self.checkpoints.save(step, state, data, config, validation_loss)
        except SaveFailed as failed:
            self._failed = failed
            return False
        if not self.checkpoints.is_saving:  # it is there already
            self._worked()
        return True

    def is_best(self, validation_loss: float | None) -> bool:
        """Process 0's answer, for a save under way is noted by each in its own time."""
        return processes.from_all(super().is_best(validation_loss))[0]

    def finish(self, save: Callable[[], Any]) -> None:
        """Blocks until the last save is complete in all; `save` starts it again if it fails. Raises like `due`."""
        self._settle()
        while self._failing_since is not None:
            time.sleep(max(0.0, self._next_try - time.monotonic()))
            save()
            self._settle()

    def _may_try_again(self) -> bool:
        return (
            self._failing_since is not None
            and not self.checkpoints.is_saving
            and self._failed is None
            and time.monotonic() >= self._next_try
        )

    def _listen(self) -> None:
        """Takes note of how this process's part of the save under way went, if it is over."""
        try:
            if self._failed is None and self.checkpoints.poll():
                self._worked()
        except SaveFailed as failed:
            self._failed = failed

    def _settle(self) -> None:
        """Meets until no process has a save under way."""
        while True:
            self._listen()
            parts = processes.from_all([self.checkpoints.is_saving, self._failed is not None])
            if any(failed for _, failed in parts) or not any(saving for saving, _ in parts):
                break
            time.sleep(_POLL)
        self._meet()

    def _meet(self) -> bool:
        """Hears what failed in any process, and returns whether process 0 wants to save. Raises as `Saver.due` does."""
        mine, wants = self._failed, self._wants
        self._failed, self._wants = None, False
        told = processes.from_all([f"{processes.name()}: {mine}", mine.by_storage] if mine is not None else None)
        failures = [SaveFailed(line, by_storage) for line, by_storage in filter(None, told)]
        wants, over = processes.from_all([wants, self._is_over()])[0]
        if not failures:
            return wants
        self.checkpoints.give_up()
        # One that is not the storage's fault ends the run, whatever the others say.
        self._note(min(failures, key=lambda failed: failed.by_storage), over)
        return False
