"""Which checkpoints are kept, and when one is saved."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from orbax.checkpoint import v1 as ocp


class Kept:
    """Orbax's preservation policy: of the good checkpoints the newest, those of every n-th step and the best.

    `losses` has the validation loss of each that has one, `damaged` the steps that are not to be touched; both may
    change. A checkpoint without a validation loss is never among the best.
    """

    def __init__(self, last: int | None, every: int, best: int, losses: Mapping[int, float], damaged: Collection[int]):
        policies = ocp.training.preservation_policies
        self._losses, self._damaged, self._best = losses, damaged, best
        self._newest = policies.LatestN(last)
        self._every = policies.EveryNSteps(every) if every else None
        self._lowest = policies.BestN(get_metric_fn=lambda loss: loss, reverse=True, n=best)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = sorted({c.step for c in checkpoints} - set(self._damaged))
        good = [SimpleNamespace(step=step, metrics=self._losses.get(step)) for step in steps]
        validated = [c for c in good if c.metrics is not None]
        kept = set(self._damaged)
        for policy, those in ((self._newest, good), (self._every, good), (self._lowest, validated)):
            if policy is not None:
                keep = policy.should_preserve(those, context=context)
                kept |= {c.step for c, yes in zip(those, keep, strict=True) if yes}
        return [c.step in kept for c in checkpoints]

    def is_best(self, loss: float | None) -> bool:
        """Whether a checkpoint of this validation loss would be kept for it."""
        if loss is None or not math.isfinite(loss) or not self._best:
            return False
        best = sorted(self._losses.values())[: self._best]
        return len(best) < self._best or loss <= best[-1]


class Clock:
    """Says when `minutes` have passed since it was last reset; 0 never. Changes of the wall clock don't matter."""

    def __init__(self, minutes: float):
        self._seconds = minutes * 60
        self.reset()

    def reset(self) -> None:
        self._from = time.monotonic()

    def is_up(self) -> bool:
        return bool(self._seconds) and time.monotonic() - self._from >= self._seconds
