"""Which rows are whose."""

import jax
import jax.numpy as jnp


def bounds(group_sizes_E: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """(first_E, end_E): group e has the rows from first up to end, within the rows that there are."""
    sizes_E = jnp.clip(group_sizes_E, 0, num_rows)
    end_E = jnp.minimum(jnp.cumsum(sizes_E, dtype=jnp.int32), num_rows)
    return jnp.concatenate([jnp.zeros_like(end_E[:1]), end_E[:-1]]), end_E
