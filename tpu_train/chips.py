"""The table of accelerators: what the plan and the MFU count with, where each number comes from, and when it was read.

A number that no source gives is None and shown as unknown; nothing is guessed. Peaks are dense, without sparsity.
Memory is per chip, in GiB where Google's pages say GiB. Network numbers are one way: what a chip can send.
"""

import dataclasses
import difflib
import math
import re

from tpu_train.config import UserError

GIB, GB = 2**30, 1e9

_BOOK = "How to Scale Your Model (jax-ml.github.io/scaling-book), tables of chapter 2, 2025-02"
_PRICES = "Google Cloud's list price of 2025-02, as given in How to Scale Your Model, chapter 8"
_V4 = "docs.cloud.google.com/tpu/docs/v4, read 2026-11"
_V5E = "docs.cloud.google.com/tpu/docs/v5e, read 2026-11"
_V5P = "docs.cloud.google.com/tpu/docs/v5p, read 2026-11"
_V6E = "docs.cloud.google.com/tpu/docs/v6e, read 2026-11"
_7X = "docs.cloud.google.com/tpu/docs/tpu7x, read 2026-11"
_A100 = "NVIDIA's A100 data sheet r4, as quoted at glennklockwood.com/garden/processors/A100, read 2026-11"
_H100 = "NVIDIA's H100 data sheet, as quoted at glennklockwood.com/garden/processors/h100, read 2026-11"
_B200 = "NVIDIA's Blackwell data sheet, as quoted at glennklockwood.com/garden/processors/B200, read 2026-11"
_MLPERF_H200 = "NVIDIA's system description of H200-SXM-141GBx8 in MLPerf Inference v4.1, 2024-08"
_LIKE_H200 = f"taken to be as the H200's: {_MLPERF_H200}"
_MLPERF_B200 = "Nebius' system description of B200 x 8 in MLPerf Inference v6.0, 2026"
_MLPERF_AMD = "AMD's system description of 8xMI300X in MLPerf Inference v4.1, 2024-08"
_MI300X = "AMD's figures as quoted in github.com/alpharomercoma/MI300X-vs-H200, METHODOLOGY.md, read 2026-11"
_CALCULON = "github.com/calculon-ai/calculon, systems/a100_80g.json, read 2026-11"
_OURS = "measured on one core of a shared Xeon with AVX-512: WORKSPACE.md, Measure"


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator. `kinds`: how jax names its devices, by substrings; the first chip of CHIPS that matches counts.

    `torus` is the largest block that the fast network joins, as a torus of these sides; (8,): all to all by switches.
    `link_bytes` is what one link of the torus carries one way (of a switched chip: all it sends); `slow_bytes` a chip's
    share of the network between blocks. Bytes are per second, `watts` per chip, `usd_hour` per chip and hour.
    """

    name: str
    platform: str
    kinds: tuple[str, ...]
    bf16_flops: float | None
    int8_ops: float | None
    memory: float | None
    memory_bytes: float | None  # per second
    torus: tuple[int, ...]
    link_bytes: float | None
    slow_bytes: float | None
    watts: float | None
    usd_hour: float | None
    sources: dict[str, str]
    devices: int = 1  # of jax, in one chip

    @property
    def switched(self) -> bool:
        return len(self.torus) == 1

    def per_device(self, name: str) -> float | None:
        """A field's share of one JAX device; None where unknown."""
        value = getattr(self, name)
        return None if value is None else value / self.devices

    def flops(self, dtype: str) -> float | None:
        """Peak FLOP/s of one device with operands of `dtype`; None where unknown.

        float32 on a TPU takes six bfloat16 products ("highest" precision, which is what this trainer asks for); the CPU
        row is a float32 measurement.
        """
        peak = self.per_device("bf16_flops")
        if peak is None or dtype in ("bfloat16", "float16") or self.platform == "cpu":
            return peak
        return peak / 6 if self.platform == "tpu" else None


def _sources(main: str, **others: str) -> dict[str, str]:
    """Where each number of a chip comes from: `main`, or what is given for it."""
    return {field.name: others.get(field.name, main) for field in dataclasses.fields(Chip)[3:-2]}


# name, platform, kinds, bf16_flops, int8_ops, memory, memory_bytes
# torus, link_bytes, slow_bytes, watts, usd_hour
# sources
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            *("v4", "tpu", ("TPU v4",), 275e12, 275e12, 32 * GIB, 1200 * GB),
            *((16, 16, 16), 45 * GB, 6.25 * GB, 170.0, None),
            _sources(_V4, link_bytes=_BOOK, slow_bytes=f"{_BOOK}: 25 GB/s a host of four chips", watts=f"{_V4}: mean"),
        ),
        Chip(
            *("v5e", "tpu", ("TPU v5 lite", "TPU v5e"), 197e12, 393e12, 16 * GIB, 819 * GB),
            *((16, 16), 50 * GB, 3.125 * GB, None, 1.2),
            _sources(_V5E, usd_hour=_PRICES),
        ),
        Chip(
            *("v5p", "tpu", ("TPU v5",), 459e12, 918e12, 95 * GIB, 2765 * GB),
            *((16, 20, 28), 100 * GB, 6.25 * GB, None, 4.2),
            _sources(_V5P, int8_ops=_BOOK, torus=_BOOK, usd_hour=_PRICES),
        ),
        Chip(
            *("v6e", "tpu", ("TPU v6",), 918e12, 1836e12, 32 * GIB, 1638 * GB),
            *((16, 16), 100 * GB, 12.5 * GB, None, None),
            _sources(_V6E, slow_bytes=_7X),
        ),
        Chip(
            *("7x", "tpu", ("TPU7x",), 2307e12, None, 192 * GIB, 7380 * GB),
            *((16, 24, 24), 100 * GB, 12.5 * GB, None, None),
            _sources(_7X, torus=f"{_7X}: 9,216 chips; the sides are one way to make that many"),
            devices=2,
        ),
        Chip(
            *("a100", "gpu", ("A100",), 312e12, 624e12, 80 * GB, 2039 * GB),
            *((8,), 300 * GB, 25 * GB, 400.0, None),
            _sources(_A100, torus=_CALCULON, slow_bytes=_CALCULON),
        ),
        Chip(
            *("h100", "gpu", ("H100",), 989e12, 1979e12, 80 * GB, 3350 * GB),
            *((8,), 450 * GB, 50 * GB, 700.0, 10.8),
            _sources(_H100, torus=_LIKE_H200, slow_bytes=_LIKE_H200, usd_hour=_PRICES),
        ),
        Chip(
            *("h200", "gpu", ("H200",), 989e12, 1979e12, 141 * GB, 4800 * GB),
            *((8,), 450 * GB, 50 * GB, 700.0, None),
            _sources(_MLPERF_H200, bf16_flops=_H100, int8_ops=_H100, memory_bytes=_MI300X),
        ),
        Chip(
            *("b200", "gpu", ("B200",), 2250e12, 4500e12, 180 * GB, 7672 * GB),
            *((8,), 900 * GB, 50 * GB, 1000.0, None),
            _sources(
                _MLPERF_B200,
                bf16_flops=_B200,
                int8_ops=_B200,
                memory_bytes="what the driver says: github.com/pytorch/ao/pull/4002, 2026-03",
            ),
        ),
        Chip(
            *("mi300x", "gpu", ("MI300X",), 1307.4e12, 2614.9e12, 192 * GB, 5300 * GB),
            *((8,), None, None, 750.0, None),
            _sources(_MI300X, memory=_MLPERF_AMD, torus=_MLPERF_AMD, watts=_MLPERF_AMD),
        ),
        Chip(
            *("cpu", "cpu", ("cpu",), 117e9, None, None, None),
            *((1,), None, None, None, None),
            _sources(_OURS),
        ),
    )
}
ALIASES = {"tpu7x": "7x", "v7x": "7x", "v5litepod": "v5e"}


def of_kind(device_kind: str) -> Chip | None:
    """The chip that jax calls `device_kind`; None where the table has none."""
    return next((chip for chip in CHIPS.values() if any(kind in device_kind for kind in chip.kinds)), None)


@dataclasses.dataclass(frozen=True)
class Fleet:
    """`slices` blocks of `shape` chips, each joined by the fast network, and joined to each other by the slow one."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def chips(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        return self.chips * self.chip.devices

    def __str__(self) -> str:
        sides = "x".join(map(str, self.shape))
        block = (
            f"{self.chips} x {self.chip.name}" if self.chip.switched else f"{self.chips} x {self.chip.name} ({sides})"
        )
        return block if self.slices == 1 else f"{block}, {self.slices} slices"


def parse(text: str, slices: int = 0) -> Fleet:
    """`v5p-256` (chips), `v5e:4x8` (sides of the torus), `h100-16`, cut into `slices`; 0: as few as hold the chips.

    Raises UserError on an unknown chip or a count that can't be laid out.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?:-(\d+)|:(\d+(?:x\d+)*))?", text.lower())
    name = ALIASES.get(match[1], match[1]) if match else text
    if match is None or name not in CHIPS:
        close = difflib.get_close_matches(name, CHIPS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(CHIPS)}"
        raise UserError(f"--chips={text}: no chip {name!r}; {hint} Write v5p-256 or v5e:4x8")
    chip = CHIPS[name]
    if match[3]:
        shape = tuple(int(side) for side in match[3].split("x"))
        if 0 in shape or len(shape) > len(chip.torus):
            raise UserError(f"--chips={text}: {name} joins its chips along {len(chip.torus)} sides of at least 1 each")
        return Fleet(chip, shape + (1,) * (len(chip.torus) - len(shape)), max(slices, 1))
    count = int(match[2] or 1)
    most = math.prod(chip.torus)
    slices = slices or max(1, -(-count // most))
    if count < 1 or count % slices or count // slices > most:
        raise UserError(
            f"--chips={text}: {count} chips do not make {slices} equal slices of at most {most}, "
            f"which is what the fast network of {name} joins; give another count or --slices"
        )
    return Fleet(chip, shape_of(count // slices, chip), slices)


def shape_of(count: int, chip: Chip) -> tuple[int, ...]:
    """The sides nearest to a cube (or square) that make `count` chips, none longer than the largest block's.

    Google's slices have sides of 1, 2 or a multiple of 4. Raises UserError where no such sides make the count.
    """
    if chip.switched:
        return (count,)
    limits = sorted(chip.torus)
    found = [
        sides
        for sides in _sides(count, len(limits))
        if all(side <= limit and (side < 3 or side % 4 == 0) for side, limit in zip(sides, limits, strict=True))
    ]
    if not found:
        raise UserError(
            f"no slice of {chip.name} has {count} chips: sides are 1, 2 or a multiple of 4, within "
            f"{'x'.join(map(str, chip.torus))}; give another count"
        )
    return min(found, key=lambda sides: sides[-1] / sides[0])


def _sides(count: int, dims: int, least: int = 1) -> list[tuple[int, ...]]:
    """Ways to write `count` as a product of `dims` numbers in rising order."""
    if dims == 1:
        return [(count,)] if count >= least else []
    firsts = [side for side in range(least, round(count ** (1 / dims)) + 1) if count % side == 0]
    return [(side, *rest) for side in firsts for rest in _sides(count // side, dims - 1, side)]
