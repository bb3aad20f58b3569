"""What a mesh axis gets of the network, and how long collectives over it take.

A torus or a switch joins the chips of a slice; a slower network joins slices, which `data` spans if nothing else is
said, since it sends least: each gradient once a step. Costs are those of rings that send both ways (Sharding chapter of
How to Scale Your Model, jax-ml.github.io/scaling-book): gathering an array of V bytes over n devices takes
V (n - 1) / n over the bytes a second that a device sends into the axis, whatever n; latency is left out.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

from tpu_train import context
from tpu_train.chips import Fleet
from tpu_train.config import MeshConfig
from tpu_train.layout import AXES, across_slices


@dataclasses.dataclass(frozen=True)
class Axis:
    """A mesh axis of `fast` devices in a slice times `slow` slices, and what a device sends into each, in bytes/s.

    `link_bytes`: of that, what goes to a neighbour one way.
    """

    name: str
    fast: int
    slow: int
    fast_bytes: float | None
    slow_bytes: float | None
    switched: bool = False
    link_bytes: float | None = None

    @property
    def size(self) -> int:
        return self.fast * self.slow

    def gather(self, size: float) -> tuple[float, float]:
        """Seconds on the fast and on the slow network to all-gather (or reduce-scatter) an array of `size` bytes.

        Over slices in two stages: within the slice, then each device its part between slices. A network of unknown
        speed counts as free; `unknown` says so.
        """
        fast = size * (self.fast - 1) / self.fast / self.fast_bytes if self.fast_bytes else 0.0
        part = size / self.fast
        return fast, part * (self.slow - 1) / self.slow / self.slow_bytes if self.slow_bytes else 0.0

    def reduce(self, size: float) -> tuple[float, float]:
        """An all-reduce: a reduce-scatter and an all-gather."""
        fast, slow = self.gather(size)
        return 2 * fast, 2 * slow

    def exchange(self, size: float) -> tuple[float, float]:
        """An all-to-all of an array of `size` bytes over all devices: a quarter of a gather on a ring, see the book."""
        fast, slow = self.gather(size)
        return fast / (self.fast if self.switched else 4), slow / 4

    def permute(self, size: float) -> tuple[float, float]:
        """Each device `size` bytes to its neighbour, all the same way; the ones at a slice's end send to the next.

        Fast and slow hops go on at once, so the longer of them counts.
        """
        fast = size / self.link_bytes if self.link_bytes and self.fast > 1 else 0.0
        slow = size / self.slow_bytes if self.slow_bytes and self.slow > 1 else 0.0
        return (fast, 0.0) if fast > slow else (0.0, slow)

    @property
    def unknown(self) -> bool:
        """Whether the axis crosses a network that the table has no speed of."""
        return (self.fast > 1 and not self.fast_bytes) or (self.slow > 1 and not self.slow_bytes)


def attention(axis: Axis, method: str, layer: context.Layer) -> tuple[float, float]:
    """Seconds on both networks of a layer's attention over rows split along `axis`, forward and backward.

    What is sent stands in `context.sent`. A gather and a scatter go both ways round; an exchange counts as in
    `Axis.exchange`; a block of the ring goes one way, a link at a time.
    """
    if method == "ring":
        return axis.permute(context.sent(method, layer))
    fast, slow = axis.gather(layer.kv_bytes) if method == "all_gather" else axis.exchange(layer.qkvo_bytes)
    return (layer.forwards + 1) * fast, (layer.forwards + 1) * slow


def axes(fleet: Fleet, sizes: Mapping[str, int], slices: Mapping[str, int] | None = None) -> dict[str, Axis]:
    """The network that each axis of a mesh of these sizes gets; an axis that is not named has one device.

    `slices`: how many each axis is spread over, as layout.across_slices has it; None: `data` over all.
    Raises UserError if `data` can't be.
    """
    slow = slices or across_slices(MeshConfig(), dict.fromkeys(AXES, 1) | dict(sizes), fleet.slices)
    speeds = _fast_bytes(fleet, {name: sizes.get(name, 1) // slow[name] for name in reversed(AXES)})
    return {
        name: Axis(
            *(name, sizes.get(name, 1) // slow[name], slow[name], speeds[name]),
            *(fleet.chip.per_device("slow_bytes"), fleet.chip.switched, fleet.chip.per_device("link_bytes")),
        )
        for name in AXES
    }


def _fast_bytes(fleet: Fleet, sizes: Mapping[str, int]) -> dict[str, float | None]:
    """Bytes/s that a device sends into each axis within its slice; the innermost axis chooses its sides first.

    An axis that takes a whole side of the torus has a ring where Google closes one: on v5e and v6e along a side of 16,
    elsewhere along a multiple of 4. A ring sends both ways at once, a line one way. Sides add up. Two devices of a chip
    share its links, and the step between them counts as one of the links, which is slower than it is.
    """
    link = fleet.chip.per_device("link_bytes")
    if link is None or fleet.chip.switched:
        return dict.fromkeys(sizes, link)
    closed = 16 if len(fleet.chip.torus) == 2 else 4
    sides = [(side, side % closed == 0) for side in fleet.shape if side > 1]
    if fleet.chip.devices > 1:
        sides.append((fleet.chip.devices, False))
    speeds: dict[str, float | None] = {}
    for name, size in sizes.items():
        taken, sides = _take(sides, size)
        speeds[name] = link * sum(2 if ring else 1 for _, ring in taken) if taken else link
    return speeds


def _take(sides: list[tuple[int, bool]], size: int) -> tuple[list[tuple[int, bool]], list[tuple[int, bool]]]:
    """Sides (length, whether a ring) whose product is `size`, and what is left; a side cut in parts has no ring."""
    for count in range(len(sides), 0, -1):
        for picked in itertools.combinations(range(len(sides)), count):
            if math.prod(sides[i][0] for i in picked) == size:
                return [sides[i] for i in picked], [side for i, side in enumerate(sides) if i not in picked]
    taken, left = [], []
    for length, ring in sorted(sides, reverse=True):
        part = math.gcd(length, size)
        size //= part
        if part > 1:
            taken.append((part, ring and part == length))
        if part < length:
            left.append((length // part, ring and part == 1))
    return taken, left
