"""What the devices are, and how fast they could go."""

import numpy as np

from tpu_train import chips


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device; None where unknown, CPUs included."""
    chip = chips.of_kind(device_kind)
    return None if chip is None or chip.platform == "cpu" else chip.per_device("bf16_flops")


def describe(devices: np.ndarray) -> str:
    """`devices`, an array of them, in words: 8 x TPU v5 lite."""
    return f"{devices.size} x {devices.flat[0].device_kind}"
