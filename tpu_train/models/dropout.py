"""Residual dropout (arXiv:1207.0580): of the embedding's rows, and of what attention and the MLP add to the stream.

Whether an element is kept is a hash of the run's seed, the step, the layer, the site in it, the token's place in the
step's whole batch (its row times the rows' length, plus its position) and the feature. So it depends on no mesh, number
of processes, micro-batch, stage or order of layers, and a device computes it for its own elements, with no exchange.
The backward pass takes the same hash again and keeps no mask.

Threefry makes two words of a token (`_threefry`); an integer mixer takes them on to its features, a tenth of the work
that Threefry would be for each.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

MASK = 2**32 - 1
EMBEDDING = MASK  # the site; the layers' are 0, 1, 2, ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Of one pass over some tokens: `rate` is the share that becomes zero."""

    rate: float = dataclasses.field(metadata={"static": True})
    key: jax.Array  # of `key_of`
    places_BT: jax.Array  # int32; of `places`
    layer: jax.Array | int = 0  # in which blocks are, by number in the whole model

    def layers_on(self, layers: jax.Array | int) -> "Dropout":
        """The same, `layers` further up."""
        return dataclasses.replace(self, layer=self.layer + layers)

    def of_embedding(self, x_BTD: jax.Array) -> jax.Array:
        """The embedding's rows."""
        return _drop(self.rate, x_BTD, self.places_BT, self.key, jnp.uint32(EMBEDDING))

    def of_part(self, x_BTD: jax.Array, part: int) -> jax.Array:
        """What attention (`part` 0) or the MLP (1) of a block adds."""
        site = jnp.asarray(self.layer).astype(jnp.uint32) * 2 + part
        return _drop(self.rate, x_BTD, self.places_BT, self.key, site)


def key_of(seed: int, step: jax.Array) -> jax.Array:
    """uint32 [2], of the run's seed and the steps done before."""
    low, high = (jnp.uint32(seed >> shift & MASK) for shift in (0, 32))
    mark = jnp.uint32(int.from_bytes(b"drop", "big"))
    return jnp.stack(_threefry(high, low, step.astype(jnp.uint32), mark))


def places(rows: int, length: int, first: int = 0) -> np.ndarray:
    """int32 [rows, T]: each token's place in the step's batch, of which these rows are those from `first` on."""
    return (first + np.arange(rows, dtype=np.int32)[:, None]) * length + np.arange(length, dtype=np.int32)[None]


def kept(rate: float, places_BT: jax.Array, key: jax.Array, site: jax.Array, features: int) -> jax.Array:
    """bool [B, T, features]: what is kept, each with a chance of 1 - `rate`."""
    first_BT, second_BT = _threefry(key[0], key[1], places_BT.astype(jnp.uint32), site)
    feature_D = jax.lax.iota(jnp.uint32, features)
    # The mixer `lowbias32` (nullprogram.com/blog/2018/07/31), on steps of 2^32 / golden ratio from the first word on.
    h = first_BT[:, :, None] + (feature_D * jnp.uint32(0x9E3779B9))[None, None]
    h = (h ^ h >> 16) * jnp.uint32(0x7FEB352D)
    h = (h ^ h >> 15 ^ second_BT[:, :, None]) * jnp.uint32(0x846CA68B)
    return h ^ h >> 16 >= jnp.uint32(_threshold(rate))


def _threshold(rate: float) -> int:
    return min(round(rate * 2**32), MASK)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@jax.named_scope("dropout")
def _drop(rate: float, x_BTD: jax.Array, places_BT: jax.Array, key: jax.Array, site: jax.Array) -> jax.Array:
    """x where it is kept, over the chance of that, and else 0; in x's dtype, the factor in float32."""
    scaled = (x_BTD.astype(jnp.float32) * (2**32 / (2**32 - _threshold(rate)))).astype(x_BTD.dtype)
    return jnp.where(kept(rate, places_BT, key, site, x_BTD.shape[2]), scaled, 0)


_drop.defvjp(
    lambda rate, x, *counters: (_drop(rate, x, *counters), counters),
    lambda rate, counters, g: (_drop(rate, g, *counters), None, None, None),
)


def _threefry(k0: jax.Array, k1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, doi:10.1145/2063384.2063405), of uint32 that broadcast.

    JAX's own is a loop on a CPU and wants its operands of one shape and sharding.
    """
    keys = k0, k1, k0 ^ k1 ^ jnp.uint32(0x1BD11BDA)
    x0, x1 = x0 + k0, x1 + k1
    for turn in range(5):
        for by in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            x0 = x0 + x1
            x1 = x0 ^ (x1 << by | x1 >> 32 - by)
        x0, x1 = x0 + keys[(turn + 1) % 3], x1 + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x0, x1
