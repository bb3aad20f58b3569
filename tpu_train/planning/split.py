"""How a run is cut over devices, as all formulas of the plan take it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from tpu_train.config import Config, ModelConfig
from tpu_train.context import Layer, choose
from tpu_train.layout import AXES
from tpu_train.stages import Schedule

Remat = Literal["none", "dots", "offload_dots", "full"]

COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class Split:
    """How a run is cut: the mesh's axes, micro-batches, remat policy and compute dtype."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    accumulation: int = 1
    remat: Remat = "none"
    dtype: str = "bfloat16"
    context: int = 1
    context_method: str = "auto"
    expert: int = 1
    stage: int = 1
    stage_rounds: int = 1
    stage_microbatches: int = 1
    loss_cores: int = 0  # that share the loss's kernel; 0: XLA's chunks
    slices: Mapping[str, int] | None = None  # that each axis is spread over; None: `data` over all there are

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def shards(self) -> int:
        """Parts that a weight is split into, but for `tensor`: its D, or its experts and their D.

        Along `stage` it is D while a weight of the blocks waits, and layers while they compute.
        """
        return self.expert * self.fsdp * self.context * self.stage

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.stage, self.stage_rounds, self.stage_microbatches)

    @property
    def turns(self) -> float:
        """How often a device takes one of its layers, ticks on zeros among them: once without stages."""
        return 1.0 if self.stage == 1 else self.schedule.ticks / self.stage_rounds

    @property
    def layers(self) -> float:
        """Layers that a device takes in a pass, a layer counted as often as it is taken, over those of the model."""
        return self.turns / self.stage

    def tokens_at_once(self, config: Config) -> int:
        """Tokens that a device takes through a layer at once."""
        tokens = self.tokens(config)
        return tokens if self.stage == 1 else tokens * self.stage // self.stage_microbatches

    @property
    def width(self) -> int:
        """Bytes of a number in the compute dtype."""
        return COMPUTE_BYTES[self.dtype]

    def tokens(self, config: Config) -> int:
        """Tokens of one micro-batch (of optim.accumulation_steps) on one device, outside the blocks."""
        parts = self.accumulation * self.data * self.expert * self.fsdp * self.stage
        rows = config.data.batch_size // parts
        return rows * config.data.seq_len // self.context

    def attention(self, model: ModelConfig, tokens: int, seq_len: int) -> list[tuple[str, Layer]]:
        """The method and the layer, for each entry of the window pattern; `tokens` on a device, rows of `seq_len`."""
        heads = model.num_heads / self.tensor, model.kv_heads / self.tensor
        found = []
        for window in model.window_pattern:
            rows = tokens * self.context // seq_len
            layer = Layer(self.context, rows, seq_len, *heads, model.head_size, self.width, window)
            method = choose(self.context_method, layer)  # as ops.py does, which knows no remat policy
            found.append((method, dataclasses.replace(layer, forwards=1 if self.remat == "none" else 2)))
        return found
