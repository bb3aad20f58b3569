"""NVIDIA cards as XLA's compiler has to know them where there is none, in words of GpuTargetConfigProto.

Memory and its speed are those of chips.py, what the card is sold with; drivers report some 6 % more.
"""

import dataclasses
import re
from importlib import util

from tpu_train import chips
from tpu_train.config import UserError
from tpu_train.planning.memory import USABLE

_SOURCE = "openxla/xla, xla/backends/gpu/target_config/specs: what the driver says of each, read 2026-12"
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclasses.dataclass(frozen=True)
class Card:
    """One card. `shared`: bytes that the blocks of a multiprocessor have together; one of them gets a KiB less."""

    name: str
    capability: str
    multiprocessors: int
    float32_units: int  # of a multiprocessor
    shared: int
    l2: int
    clock_ghz: float
    source: str = _SOURCE

    @property
    def float32_flops(self) -> float:
        """Of the multiprocessors, a multiplication and an addition a clock: products of float32, with no TF32."""
        return 2 * self.multiprocessors * self.float32_units * self.clock_ghz * 1e9

    @property
    def chip(self) -> chips.Chip:
        return chips.CHIPS[self.name]

    @property
    def usable_bytes(self) -> float:
        """Of its memory, what JAX takes for itself unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""
        return (self.chip.memory or 0.0) * USABLE["gpu"]

    def target(self) -> str:
        """A GpuTargetConfigProto's text."""
        major, minor = self.capability.rstrip("a").split(".")
        own = "ACCELERATED_FEATURES" if self.capability.endswith("a") else "NONE"
        title = f"NVIDIA {self.name.upper()}"
        device = {
            "name": f'"{title}"',
            "cuda_compute_capability": f"{{ major: {major} minor: {minor} feature_extension: {own} }}",
            "core_count": self.multiprocessors,
            "fpus_per_core": self.float32_units,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": int(self.chip.memory or 0),
            "memory_bandwidth": int(self.chip.memory_bytes or 0),
            "l2_cache_size": self.l2,
            "shared_memory_per_core": self.shared,
            "shared_memory_per_block_optin": self.shared - 1024,
            **LIMITS,
        }
        lines = [f"  {name}{'' if str(value).startswith('{') else ':'} {value}" for name, value in device.items()]
        named = f'platform_name: "CUDA"\ndnn_version_info {{ major: 9 minor: 10 }}\ndevice_description_str: "{title}"'
        return "\n".join(["gpu_device_info {", *lines, "}", named])


# The same for every generation from A100 on (CUDA's programming guide, table of technical specifications), and the
# versions that programs are made for.
LIMITS = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "shared_memory_per_block": 48 * 2**10,
    "driver_version": '"13.0.0"',
    "runtime_version": '"13.0.0"',
    "compile_time_toolkit_version": '"13.0.0"',
    "dnn_version": '"9.10.0"',
}
CARDS = {
    card.name: card
    for card in (
        Card("a100", "8.0", 108, 64, 164 * 2**10, 40 * 2**20, 1.41),
        Card("h100", "9.0a", 132, 128, 228 * 2**10, 50 * 2**20, 1.98),
        Card("h200", "9.0a", 132, 128, 228 * 2**10, 50 * 2**20, 1.98),
        Card("b200", "10.0a", 148, 128, 228 * 2**10, 132_644_864, 1.965),
    )
}


def of_topology(topology: str) -> Card | None:
    """The card of "h100:8"; None where it names none of NVIDIA's."""
    return CARDS.get(topology.lower().partition(":")[0])


def parse(text: str) -> str:
    """ "h100:8" for it and for "H100:8"; raises UserError on another form, and where JAX's CUDA plugin is missing."""
    topology = text.lower()
    name, _, count = topology.partition(":")
    most = chips.CHIPS[name].torus[0]
    if not re.fullmatch(r"[1-9]\d*", count) or int(count) > most:
        raise UserError(
            f"no topology {text!r}; write the cards of a host, 1 to {most}, such as {name}:{most}, and the hosts as "
            "--num_slices"
        )
    if not any(util.find_spec(plugin) for plugin in PLUGINS):
        raise UserError(f"{text}: compiling for NVIDIA cards needs JAX's CUDA plugin: pip install 'jax[cuda13]'")
    return topology


def xla_name(topology: str, hosts: int) -> str:
    """XLA's name for it: joined partitions x hosts x cards of a host."""
    return f"1x{hosts}x{topology.partition(':')[2]}"
