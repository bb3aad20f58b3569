"""When a run saves, and how it goes on after a save that its storage refused.

A disk that is full, read-only or gone may come back: the run keeps training and tries again, each time with the state
it has by then, waiting twice as long as before, for checkpoint.retry_minutes. Any other error stops it at once. What
several processes do besides is in shared_saver.py.
"""

import time
from collections.abc import Callable
from typing import Any

import jax

from tpu_train.checkpoint.errors import SaveFailed, warn
from tpu_train.checkpoint.policies import Clock
from tpu_train.checkpoint.store import Checkpoints
from tpu_train.config import CheckpointConfig, Config

SAVE = 1  # what process 0 asks all for when its clock is up; the numbers of the signals that stop a run are higher
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds


class Saver:
    """Saves in `checkpoints` by step and by time; `config` says how often and how long to try again."""

    def __init__(self, checkpoints: Checkpoints, config: CheckpointConfig):
        self.checkpoints, self._config = checkpoints, config
        self._clock = Clock(config.every_minutes)
        self._failing_since: float | None = None
        self._wait, self._next_try = _FIRST_WAIT, 0.0

    def asks(self) -> int:
        """SAVE in process 0 when it is time to save, else 0: for all processes to hear of at the same step."""
        if jax.process_index() == 0 and self._clock.is_up():
            self._clock.reset()
            return SAVE
        return 0

    def due(self, step: int, asked: int) -> bool:
        """Whether to save now; `asked` is what process 0 asked for. Call it once a step.

        Raises SaveFailed as soon as a save under way has failed, unless it is to be tried again.
        """
        try:
            if self.checkpoints.poll():
                self._worked()
        except SaveFailed as failed:
            self._note(failed, self._is_over())
        if self._failing_since is not None:
            return not self.checkpoints.is_saving and time.monotonic() >= self._next_try
        every = self._config.every_steps
        return asked == SAVE or (every > 0 and step % every == 0)

    def save(self, step: int, state: Any, data: Any, config: Config, validation_loss: float | None) -> bool:
        """Starts a save, see `Checkpoints.save`; returns whether it started. Raises SaveFailed like `due`."""
        self._clock.reset()
        try:
            self.checkpoints.save(step, state, data, config, validation_loss)
        except SaveFailed as failed:
            self._note(failed, self._is_over())
            return False
        if not self.checkpoints.is_saving:  # it is there already
            self._worked()
        return True

    def is_best(self, validation_loss: float | None) -> bool:
        """Whether a checkpoint of this validation loss would be kept for it."""
        return self.checkpoints.is_best(validation_loss)

    def finish(self, save: Callable[[], Any]) -> None:
        """Blocks until the save under way is complete; `save` starts it again if it fails. Raises like `due`."""
        while self.checkpoints.is_saving or self._failing_since is not None:
            if not self.checkpoints.is_saving:
                time.sleep(max(0.0, self._next_try - time.monotonic()))
                save()
                continue
            try:
                self.checkpoints.wait()
                self._worked()
            except SaveFailed as failed:
                self._note(failed, self._is_over())

    def _worked(self) -> None:
        if self._failing_since is not None:
            warn("saving works again")
            self._failing_since, self._wait = None, _FIRST_WAIT

    def _is_over(self) -> bool:
        """Whether it was tried for long enough."""
        began = self._failing_since
        return began is not None and time.monotonic() - began >= self._config.retry_minutes * 60

    def _note(self, failed: SaveFailed, over: bool) -> None:
        """Raises `failed` unless it is to be tried again."""
        now, minutes = time.monotonic(), self._config.retry_minutes
        if not failed.by_storage or not minutes:
            raise failed
        if self._failing_since is None:
            self._failing_since = now
        if over:
            raise SaveFailed(f"{failed}; gave up after trying for {minutes:g} min", by_storage=True) from failed
        warn(f"{failed}; training goes on, next try in {self._wait:g} s, giving up after {minutes:g} min")
        self._next_try = now + self._wait
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
