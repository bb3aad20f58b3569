"""Initial weights, in one place.

    into a sub-layer (q, k, v, gate, up,   std fan^-1/2, `fan` being the size of the dims contracted with the input
        router)
    out of a sub-layer (out, down)         std fan^-1/2 (2 L)^-1/2, so that the residual stream does not grow with L
    embedding, head                        std 0.02
    norm scales                            one
    bias of an expert                      zero

Normal, cut at two standard deviations. A weight's values depend on the run's seed and on the weight's own name and
shape: not on the mesh, nor on what other weights there are.
"""

import dataclasses
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_train.sharding import P, dims_of, outside


@dataclasses.dataclass(frozen=True)
class Init:
    """Makes the parameters of the module called `name`; with `layers`, of that many, stacked along a leading dim."""

    key: jax.Array
    name: str = ""
    layers: int | None = None

    def of(self, name: str, layers: int | None = None) -> "Init":
        """The Init for the submodule `name`."""
        return Init(self.key, f"{self.name}.{name}", self.layers if layers is None else layers)

    def weight(self, name: str, shape: tuple[int, ...], std: float) -> nnx.Param:
        """A float32 matrix sharded as the dims at the end of its name say: "q_DNH"."""
        draw = jax.nn.initializers.truncated_normal(std)
        shape, dtype, spec = self._stacked(dims_of(name), shape)
        if jax.sharding.get_abstract_mesh().size == 1:
            # The same values, since the generator counts elements; XLA compiles one dim six times sooner than four.
            flat = draw(self._key_for(name), (math.prod(shape),), dtype)
            return nnx.Param(flat.reshape(shape, out_sharding=spec))
        return nnx.Param(draw(self._key_for(name), shape, dtype, out_sharding=spec))

    def scale(self, dim: int) -> nnx.Param:
        """Ones, for a norm."""
        shape, dtype, spec = self._stacked("D", (dim,))
        return nnx.Param(jnp.ones(shape, dtype, out_sharding=spec))

    def zeros(self, dim: int) -> nnx.Param:
        """Zeros for each of `dim` experts."""
        shape, dtype, spec = self._stacked("E", (dim,))
        return nnx.Param(jnp.zeros(shape, dtype, out_sharding=spec))

    def _stacked(self, dims: str, shape: tuple[int, ...]):
        if self.layers is None:
            return shape, jnp.float32, outside(dims)
        return (self.layers, *shape), jnp.float32, P(None, *outside(dims))

    def _key_for(self, name: str) -> jax.Array:
        """A key of its own, made without the random generator: splitting keys would be most of what XLA compiles."""
        mark = np.frombuffer(hashlib.sha256(f"{self.name}.{name}".encode()).digest()[:8], np.uint32)
        return jax.random.wrap_key_data(jax.random.key_data(self.key) ^ mark)
