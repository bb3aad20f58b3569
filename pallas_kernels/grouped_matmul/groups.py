"""Which rows are whose, and which tiles of rows the kernels visit for which group.

Sums and look-ups are sums under a mask, which XLA fuses: a dozen small programs in a row took longer than a kernel may.
"""

import dataclasses

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """Tiles of rows in order, each for one of the groups that have rows in it; all int32, the first `count` of V count.

    group_V and tile_V; first_V and end_V, from which to which of the tile's rows the group has, below 0 and past the
    tile where it has others too; edges_2: the first tile that holds rows of nobody, the last that holds a group's.
    """

    group_V: jax.Array
    tile_V: jax.Array
    first_V: jax.Array
    end_V: jax.Array
    edges_2: jax.Array
    count: jax.Array


def visits(group_sizes_E: jax.Array, num_rows: int, tile: int, every: str) -> Visits:
    """With `every` "tile" tiles that are nobody's are visited too, at the end, for the last group that has rows; with
    "group" groups without rows are, at some tile.
    """
    num_tiles, num_groups = -(-num_rows // tile), group_sizes_E.shape[0]
    first_E, end_E = bounds(group_sizes_E, num_rows)
    first_tile_E = jnp.minimum(divide(first_E, tile), num_tiles - 1)
    tiles_E = divide(end_E + (tile - 1), tile) - first_tile_E
    tiles_E = jnp.where(first_E < end_E, tiles_E, int(every == "group"))
    begin_E, total = _sum_before(tiles_E), jnp.sum(tiles_E, dtype=jnp.int32)
    stop_E = begin_E + tiles_E
    at_V1 = jnp.arange(most_visits(num_rows, num_groups, tile), dtype=jnp.int32)[:, None]
    own_VE = (begin_E[None] <= at_V1) & ((at_V1 < stop_E[None]) | (stop_E == total)[None]) & (tiles_E > 0)[None]

    def of_own(x_E):
        return jnp.sum(jnp.where(own_VE, x_E[None], 0), axis=1, dtype=jnp.int32)

    # Past the last group's tiles its count goes on, to the tiles of nobody.
    tile_V = of_own(first_tile_E - begin_E) + at_V1[:, 0]
    rows = jnp.max(end_E)
    used = divide(rows + (tile - 1), tile)
    return Visits(
        of_own(jnp.arange(num_groups, dtype=jnp.int32)),
        tile_V,
        of_own(first_E) - tile_V * tile,
        of_own(end_E) - tile_V * tile,
        jnp.stack([divide(rows, tile), jnp.maximum(used - 1, 0)]),
        total if every == "group" else total + num_tiles - used,
    )


def _sum_before(x_E):
    """The sum of all that stand before each."""
    e = jnp.arange(x_E.shape[0])
    return jnp.sum(jnp.where(e[:, None] > e[None], x_E[None], 0), axis=1, dtype=jnp.int32)
