"""Which rows are whose, and which tiles of rows the kernels visit for which group.

Sums and look-ups are sums under a mask, which XLA fuses: a dozen small programs in a row took longer than a kernel may.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.runtime import divide


def bounds(group_sizes_E: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
    """(first_E, end_E): group e has the rows from first up to end, within the rows that there are."""
    sizes_E = jnp.clip(group_sizes_E, 0, num_rows)
    first_E = jnp.minimum(_sum_before(sizes_E), num_rows)
    return first_E, jnp.minimum(first_E + sizes_E, num_rows)


def most_visits(num_rows: int, num_groups: int, tile: int) -> int:
    """A tile is visited once, and once more for each group that begins within it."""
    return -(-num_rows // tile) + num_groups - 1


def visits(first_E: jax.Array, end_E: jax.Array, num_rows: int, tile: int, every: str):
    """(group_V, tile_V, count): the visits in order of rows, the first `count` of V; all int32.

    Every tile that a group has rows in is visited for it. With `every` "tile" those that are nobody's are visited too,
    at the end, for the last group that has rows; with "group" groups without rows are, at some tile.
    """
    num_tiles = -(-num_rows // tile)
    first_tile_E = jnp.minimum(divide(first_E, tile), num_tiles - 1)
    tiles_E = divide(end_E + (tile - 1), tile) - first_tile_E
    tiles_E = jnp.where(first_E < end_E, tiles_E, int(every == "group"))
    begin_E, total = _sum_before(tiles_E), jnp.sum(tiles_E, dtype=jnp.int32)
    stop_E = begin_E + tiles_E
    at_V1 = jnp.arange(most_visits(num_rows, first_E.shape[0], tile), dtype=jnp.int32)[:, None]
    own_VE = (begin_E[None] <= at_V1) & ((at_V1 < stop_E[None]) | (stop_E == total)[None]) & (tiles_E > 0)[None]

    def of_own(x_E):
        return jnp.sum(jnp.where(own_VE, x_E[None], 0), axis=1, dtype=jnp.int32)

    # Past the last group's tiles its count goes on, to the tiles of nobody.
    tile_V = of_own(first_tile_E - begin_E) + at_V1[:, 0]
    count = total if every == "group" else total + num_tiles - divide(jnp.max(end_E) + (tile - 1), tile)
    return of_own(jnp.arange(first_E.shape[0], dtype=jnp.int32)), tile_V, count


def _sum_before(x_E):
    """The sum of all that stand before each."""
    e = jnp.arange(x_E.shape[0])
    return jnp.sum(jnp.where(e[:, None] > e[None], x_E[None], 0), axis=1, dtype=jnp.int32)
