"""What makes a CPU run faster and has to be said before jax starts its threads."""

import ctypes
import os
from importlib import metadata
from pathlib import Path

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def has_accelerator() -> bool:
    """Whether this machine shows a TPU or a GPU (NVIDIA's, AMD's, or WSL's); asks the file system, not jax."""
    patterns = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd", "dxg")
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in patterns)


def keep_freed_memory() -> bool:
    """Tells glibc to keep what is freed for the next allocation; False where there is no glibc.

    XLA allocates a program's temporary buffer at each call and frees it after. By default glibc gives so large a
    buffer back to the system, which clears every page of it again at the next step (measured: a fifth of the step).
    The memory stays with the process until it ends.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1), (_M_TOP_PAD, 64 << 20))
    return all([mallopt(name, value) == 1 for name, value in settings])


def pretend_devices(count: int, compile_quickly: bool = False) -> None:
    """Has jax show `count` CPU devices, that share this machine's cores; what XLA_FLAGS says already stays as it is.

    `compile_quickly`: at LLVM's level 0, for programs that run once (measured: a tiny step compiles 3 times sooner).
    """
    # Devices that wait long for each other are slow here, not stuck.
    options: dict[str, int | str] = {
        "force_host_platform_device_count": count,
        "cpu_collective_call_warn_stuck_timeout_seconds": 120,
        "cpu_collective_call_terminate_timeout_seconds": 600,
    }
    if compile_quickly:
        options["backend_optimization_level"] = 0
        if metadata.version("jaxlib") < "0.11":  # newer ones have no such flag and stop at it
            options["cpu_use_fusion_emitters"] = "false"
    flags = os.environ.get("XLA_FLAGS", "")
    new = [f"--xla_{name}={value}" for name, value in options.items() if f"--xla_{name}=" not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *new]).strip()
