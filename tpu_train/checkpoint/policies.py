"""Which checkpoints are kept, and when one is saved."""

import math
import time
from collections.abc import Collection, Mapping
from types import SimpleNamespace

from orbax.checkpoint import v1 as ocp


class Kept:
    """Which checkpoints are kept: the `last` newest, those at a multiple of `every` steps and the `best` on validation.

    0 turns a rule off. A checkpoint without a validation loss is never among the best.
    """

    def __init__(self, last: int | None, every: int, best: int):
        policies = ocp.training.preservation_policies
        self._best = best
        self._newest = policies.LatestN(last)
        self._every = policies.EveryNSteps(every) if every else None
        self._lowest = policies.BestN(get_metric_fn=lambda loss: loss, reverse=True, n=best)

    def of(self, steps: Collection[int], losses: Mapping[int, float]) -> set[int]:
        """Those of `steps` that are kept; `losses` has the validation loss of each that has one."""
        all_of_them = [SimpleNamespace(step=step, metrics=losses.get(step)) for step in sorted(steps)]
        validated = [c for c in all_of_them if c.metrics is not None]
        kept = set()
        for policy, those in ((self._newest, all_of_them), (self._every, all_of_them), (self._lowest, validated)):
            if policy is not None:
                keep = policy.should_preserve(those, context=None)
                kept |= {c.step for c, yes in zip(those, keep, strict=True) if yes}
        return kept

    def is_best(self, loss: float | None, losses: Mapping[int, float]) -> bool:
        """Whether a checkpoint of this validation loss would be kept for it."""
        if loss is None or not math.isfinite(loss) or not self._best:
            return False
        best = sorted(losses.values())[: self._best]
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
