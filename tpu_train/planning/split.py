"""How a run is cut over devices, as all formulas of the plan take it."""

import dataclasses
import math
from typing import Literal

from tpu_train.config import Config, ModelConfig
from tpu_train.context import Layer, choose
from tpu_train.layout import AXES

Remat = Literal["none", "dots", "full"]

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
    loss_cores: int = 0  # that share the loss's kernel; 0: XLA's chunks

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def shards(self) -> int:
        """Parts that a weight is split into, but for `tensor`: its D, or its experts and their D."""
        return self.expert * self.fsdp * self.context

    @property
    def width(self) -> int:
        """Bytes of a number in the compute dtype."""
        return COMPUTE_BYTES[self.dtype]

    def tokens(self, config: Config) -> int:
        """Tokens of one micro-batch on one device."""
        rows = config.data.batch_size // (self.accumulation * self.data * self.expert * self.fsdp)
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
