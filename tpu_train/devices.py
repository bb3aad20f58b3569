"""What the devices are, and how fast they could go."""

import numpy as np

# Dense bfloat16 FLOP/s of one JAX device, without sparsity: Google's and NVIDIA's product pages, read in 2025 and 2026.
# A v7x chip is two devices. The first entry that device_kind contains counts.
PEAK_BF16_FLOPS = (
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5e", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6", 918e12),
    ("TPU7x", 2307e12 / 2),
    ("A100", 312e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Dense bf16 FLOP/s of one device; None where unknown, CPUs included."""
    return next((flops for name, flops in PEAK_BF16_FLOPS if name in device_kind), None)


def describe(devices: np.ndarray) -> str:
    """`devices`, an array of them, in words: 8 x TPU v5 lite."""
    return f"{devices.size} x {devices.flat[0].device_kind}"
