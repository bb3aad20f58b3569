"""Attention over rows whose tokens are split along `context`: the methods, what each sends, which one auto takes.

Without jax, so that the plan and the op ask the same formulas.

A row is cut into 2 C chunks, and device i of the C along `context` holds chunks i and 2 C - 1 - i: all of them see
equally many keys under a causal mask then. The host lays a batch out so (`reorder`), labels and positions with the
tokens; no layer but attention can tell.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from tpu_train.config import Config, UserError

METHODS = ("all_gather", "ring", "all_to_all")
FLOAT32 = 4
# Keys and values of a layer, all tokens of a row: past it auto takes the ring, which holds a C-th of them at a time.
GATHERED_BYTES = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's attention: `rows` on a device, of `tokens` in all; heads on a device; `width` bytes a number.

    `window` 0 is none. `forwards`: how often the forward pass runs, twice where the backward pass recomputes it.
    """

    devices: int
    rows: int
    tokens: int
    num_heads: float
    num_kv_heads: float
    head_dim: int
    width: int
    window: int = 0
    forwards: int = 1

    @property
    def kv_bytes(self) -> float:
        """Keys and values of all tokens."""
        return 2 * self.rows * self.tokens * self.num_kv_heads * self.head_dim * self.width

    @property
    def qkvo_bytes(self) -> float:
        """Queries, keys, values and outputs of all tokens."""
        return 2 * self.rows * self.tokens * (self.num_heads + self.num_kv_heads) * self.head_dim * self.width

    @property
    def links(self) -> tuple[int, int]:
        """Links that a block crosses on its way round the ring, each hop the shorter way, and then on its way home.

        A window needs the devices of neighbouring chunks alone (pallas_kernels.attention.ring.shifts).
        """
        stops = self._stops()
        *there, home = (min(b - a, self.devices - (b - a)) for a, b in itertools.pairwise((*stops, self.devices)))
        return sum(there), home

    def _stops(self) -> list[int]:
        C, chunk = self.devices, self.tokens // (2 * self.devices)
        back = -(-(self.window - 1) // chunk) if self.window else 2 * C
        pairs = ((q, k) for q in range(2 * C) for k in range(max(0, q - back), q + 1))
        return sorted({(min(q, 2 * C - 1 - q) - min(k, 2 * C - 1 - k)) % C for q, k in pairs})


def sent(method: str, layer: Layer) -> float:
    """Bytes that a device sends for one layer, forward and backward, over links between neighbours.

    all_gather: keys and values, each time the forward pass runs, and their gradients scattered: (C - 1) / C of all.
    ring: a C-th of keys and values over the ring's links, forward and once more backward; beside them the sums of
        their gradients in float32, which then go home in the compute dtype (arXiv:2310.01889).
    all_to_all: a C-th of queries, keys, values and outputs changes from a part of the tokens to a part of the heads,
        and their gradients back (arXiv:2309.14509).
    """
    C = layer.devices
    if method == "all_gather":
        return (layer.forwards + 1) * layer.kv_bytes * (C - 1) / C
    if method == "all_to_all":
        return (layer.forwards + 1) * layer.qkvo_bytes / C * (C - 1) / C
    links, home = layer.links
    return layer.kv_bytes / C * ((layer.forwards + 1 + FLOAT32 / layer.width) * links + home)


def can_exchange(layer: Layer) -> bool:
    """Whether every device can get whole heads, of queries and of keys."""
    return layer.num_heads % layer.devices == 0 and layer.num_kv_heads % layer.devices == 0


def choose(asked: str, layer: Layer, has_ring: bool = True) -> str:
    """The method asked for; for auto what sends least of what can run without gathering too much.

    `has_ring`: whether the implementation has one.
    """
    if asked != "auto":
        return asked
    able = {
        "all_gather": not has_ring or layer.kv_bytes <= GATHERED_BYTES,
        "ring": has_ring,
        "all_to_all": can_exchange(layer),
    }
    return min((method for method in METHODS if able[method]), key=lambda method: sent(method, layer))


def check(config: Config, size: Mapping[str, int]) -> None:
    """Raises UserError where the config can't be split along `context`, on a mesh of these axis sizes."""
    C, t, model = size["context"], size["tensor"], config.model
    if C == 1:
        return
    if config.data.seq_len % (2 * C):
        raise UserError(
            f"data.seq_len={config.data.seq_len} does not divide into the {2 * C} chunks of mesh.context={C}, two a "
            f"device; take a multiple of {2 * C}"
        )
    if config.mesh.context_method == "ring" and config.run.implementation == "reference":
        raise UserError("run.implementation=reference has no ring; set mesh.context_method=all_gather")
    heads = {"model.num_heads": model.num_heads, "model.num_kv_heads": model.kv_heads}
    for name, count in heads.items():
        if config.mesh.context_method == "all_to_all" and count // t % C:
            raise UserError(
                f"mesh.context_method=all_to_all splits heads, and {name}={count} does not divide over mesh.tensor={t} "
                f"x mesh.context={C}; set mesh.context_method=ring or all_gather"
            )


def reorder(x: Any, devices: int) -> Any:
    """A numpy array of [..., T] tokens with its last dim laid out for `devices` along context."""
    if devices == 1:
        return x
    chunks = x.reshape(*x.shape[:-1], 2 * devices, -1)
    order = [chunk for i in range(devices) for chunk in (i, 2 * devices - 1 - i)]
    return chunks[..., order, :].reshape(x.shape)
