"""The schedule of a pipeline: which stage computes which layers of which rows when, and how long it is idle.

Without jax, so that the plan and the model ask the same formulas.

The groups of layers are cut into R x S pieces, R rounds of S stages, and piece p is the stage p % S's. The rows that
the devices along `stage` share are cut into A micro-batches, which go through all stages R times, S of them at a time:
a stage takes its piece of the round for each of the S, then its next piece, and what leaves the last stage arrives at
the first when that is free for it. So every stage is busy but for S - 1 of the A R + S - 1 ticks (the interleaved
schedule of arXiv:2104.04473, section 2.2; with one round that of arXiv:1811.06965).
"""

import dataclasses
from collections.abc import Mapping

from tpu_train.config import Config, UserError

MOST_A_STAGE = 4  # micro-batches for each stage where the config does not say: the bubble is a fifth at most


@dataclasses.dataclass(frozen=True)
class Schedule:
    """`stages` S, `rounds` R and `microbatches` A of a step, or of one of its accumulated parts."""

    stages: int
    rounds: int
    microbatches: int

    @property
    def busy(self) -> int:
        """Ticks in which a stage computes; a tick is one piece of layers with one micro-batch."""
        return self.microbatches * self.rounds

    @property
    def ticks(self) -> int:
        return self.busy + self.stages - 1

    @property
    def bubble(self) -> float:
        """The share of a stage's time in the blocks, forward and backward, that it is idle."""
        return (self.stages - 1) / self.ticks

    def __str__(self) -> str:
        return (
            f"{self.stages} stages, {self.microbatches} micro-batches, {self.rounds} "
            f"round{'s' if self.rounds > 1 else ''}: idle {self.bubble:.1%} of the time in the blocks"
        )


def microbatches(asked: int | None, stages: int, rows: int) -> int:
    """What is asked for, or the most up to MOST_A_STAGE a stage that `rows`, a multiple of `stages`, divide into."""
    if asked is not None:
        return asked
    return next(stages * each for each in range(MOST_A_STAGE, 0, -1) if rows % (stages * each) == 0)


def schedule(config: Config, size: Mapping[str, int]) -> Schedule:
    """Of a config that `check` lets pass, on a mesh of these axis sizes."""
    count = microbatches(config.mesh.stage_microbatches, size["stage"], _rows(config, size))
    return Schedule(size["stage"], config.mesh.stage_rounds, count)


def _rows(config: Config, size: Mapping[str, int]) -> int:
    """Rows of a batch that the devices along `stage` share."""
    rows = config.data.batch_size // config.optim.accumulation_steps
    return rows // (size["data"] * size["expert"] * size["fsdp"])


def check(config: Config, size: Mapping[str, int]) -> None:
    """Raises UserError where layers or rows can't be split over stages, on a mesh of these axis sizes."""
    S, rounds, asked = size["stage"], config.mesh.stage_rounds, config.mesh.stage_microbatches
    if S == 1:
        return
    pattern = len(config.model.window_pattern)
    if config.model.num_layers % (S * rounds * pattern):
        groups = f", in groups of {pattern}," if pattern > 1 else ""
        raise UserError(
            f"model.num_layers={config.model.num_layers}{groups} does not divide into the {S * rounds} pieces of "
            f"mesh.stage={S} x mesh.stage_rounds={rounds}; take a multiple of {S * rounds * pattern}"
        )
    rows = _rows(config, size)
    if asked is not None and asked % S:
        raise UserError(f"mesh.stage_microbatches={asked} is not a multiple of mesh.stage={S}; a stage would wait")
    if rows % (asked or S):
        parts = f"{S} stages" if asked is None else f"{asked} parts of mesh.stage_microbatches"
        raise UserError(
            f"the {rows} rows that each group of stages has of data.batch_size / optim.accumulation_steps do not "
            f"divide into {parts}; take a multiple of {asked or S}"
        )
