"""What the tests of checkpoints save, and how they look at what is there."""

import jax
import jax.numpy as jnp


def abstract_like(tree):
    """ShapeDtypeStructs with the shardings of `tree`'s arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def state_of(step, size=4):
    return {"w": jnp.full((size,), step, jnp.float32)}


def steps_in(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())
