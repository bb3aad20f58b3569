"""Which key blocks a block of queries meets, and which part of each it may see: closed forms, inside the kernels.

A pair of blocks is known by `delta`, the position of its first query minus that of its first key. Blocks that the mask
leaves whole run without mask arithmetic. Where the offset of the queries is known when the kernel is traced, the few
deltas at which the mask cuts a block are known too, and each gets a body of its own that leaves out the tasks (tiles of
queries x chunks of keys) that see nothing. Anything else runs a body that masks every task.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention.mask import Mask
from pallas_kernels.runtime import divide

MOST_BODIES = 3  # with more deltas than this, code would grow past what it saves


@dataclasses.dataclass(frozen=True)
class View:
    """What one body has to mask in a block of scores, [keys, queries]."""

    mask: Mask
    delta: int | jax.Array | None  # None: the mask sees the whole block
    num_keys: jax.Array | None  # keys of the block that exist; None: all
    segmented: bool

    def sees(self, query: int, queries: int, key: int, keys: int) -> bool:
        """Whether the task (`queries` from `query` on, `keys` from `key` on) may see anything, as far as is known."""
        if not isinstance(self.delta, int):
            return True
        low, high = self._distances(query, queries, key, keys)
        left, right = self.mask.left, self.mask.right
        return (left is None or low <= left) and (right is None or high >= -right)

    def apply(self, s_KQ, query: int, key: int, q_segments_1Q, k_segments_KQ):
        """`s_KQ` of a task, with -inf where the query does not see the key."""
        keys, queries = s_KQ.shape
        seen = []
        if self.delta is not None:
            known = isinstance(self.delta, int)
            low, high = self._distances(query, queries, key, keys) if known else (0, 0)
            gap = jax.lax.broadcasted_iota(jnp.int32, s_KQ.shape, 1) - jax.lax.broadcasted_iota(
                jnp.int32, s_KQ.shape, 0
            )
            first = self.delta + query - key  # of the task's first query and key; `gap` adds to it
            if self.mask.right is not None and not (known and low >= -self.mask.right):
                seen.append(gap >= -self.mask.right - first)
            if self.mask.left is not None and not (known and high <= self.mask.left):
                seen.append(gap <= self.mask.left - first)
        if self.num_keys is not None:
            seen.append(jax.lax.broadcasted_iota(jnp.int32, s_KQ.shape, 0) < self.num_keys - key)
        if self.segmented:
            seen.append(q_segments_1Q == k_segments_KQ)
        for condition in seen:
            s_KQ = jnp.where(condition, s_KQ, -jnp.inf)
        return s_KQ

    def _distances(self, query, queries, key, keys) -> tuple[int, int]:
        """Least and greatest t - s of a task whose delta is known."""
        assert isinstance(self.delta, int)
        first = self.delta + query - key
        return first - (keys - 1), first + queries - 1


@dataclasses.dataclass(frozen=True)
class Visits:
    """Pairs of blocks of `block_q` queries and `block_k` keys, `num_queries` x `num_keys` in all."""

    mask: Mask
    num_queries: int
    num_keys: int
    block_q: int
    block_k: int
    offset: int | None  # of the queries; None: known when the kernel runs
    segmented: bool

    @property
    def tail(self) -> bool:
        """Whether a real query may see past the last key, into the padding of its block."""
        if self.num_keys % self.block_k == 0 or self.segmented:  # padding has a segment of its own
            return False
        if self.offset is None or self.mask.right is None:
            return True
        return self.offset + self.num_queries - 1 + self.mask.right >= self.num_keys

    @functools.cached_property
    def deltas(self) -> tuple[int, ...] | None:
        """The deltas at which the mask cuts a block; None where they are unknown or many."""
        step = math.gcd(self.block_q, self.block_k)
        cut: set[int] = set()
        for low, high in self._edges():
            if self.offset is None:
                return None
            low = max(low, self.offset - self.num_keys)
            high = min(high, self.offset + self.num_queries)
            for delta in range(low + (self.offset - low) % step, high + 1, step):
                if not self.whole(delta) and self._meets(delta):
                    cut.add(delta)
                if len(cut) > MOST_BODIES:
                    return None
        return tuple(sorted(cut))

    def _edges(self):
        """For each edge of the mask the range of deltas at which it may run through a block."""
        if self.mask.right is not None:
            yield -self.mask.right - self.block_q, self.block_k - self.mask.right
        if self.mask.left is not None:
            yield self.mask.left - self.block_q, self.mask.left + self.block_k

    def whole(self, delta):
        """Whether every query of a pair sees every key."""
        result = True
        if self.mask.right is not None:
            result = result & (delta - (self.block_k - 1) >= -self.mask.right)
        if self.mask.left is not None:
            result = result & (delta + self.block_q - 1 <= self.mask.left)
        return result

    def _meets(self, delta: int) -> bool:
        left, right = self.mask.left, self.mask.right
        return (right is None or delta + self.block_q - 1 >= -right) and (
            left is None or delta - (self.block_k - 1) <= left
        )

    def key_blocks(self, i, offset):
        """[low, high): the key blocks that block i of the queries meets."""
        first = offset + i * self.block_q
        last = jnp.minimum(first + self.block_q - 1, offset + self.num_queries - 1)
        low, high = self.mask.key_range(first, last, self.num_keys)
        return divide(low, self.block_k), divide(high + self.block_k - 1, self.block_k)

    def run(self, i, offset, low, high, segments, body: Callable[[jax.Array, View], None]) -> None:
        """Calls `body(j, view)` for each key block j in [low, high); `segments(j)` is (they meet, all are one)."""
        deltas = self.deltas or ()

        def visit(j, carry):
            delta = offset + i * self.block_q - j * self.block_k
            exists = (j + 1) * self.block_k <= self.num_keys if self.tail else True
            whole = self.whole(delta) & exists
            meet, one = segments(j) if self.segmented else (True, True)

            def when(condition, view):
                @pl.when(condition)
                def _():
                    body(j, view)

            when(whole & one, View(self.mask, None, None, False))
            if self.segmented:
                when(whole & meet & jnp.logical_not(one), View(self.mask, None, None, True))
            for d in deltas:
                when((delta == d) & exists & meet, View(self.mask, d, None, self.segmented))
            if self.tail or self.deltas is None:
                others = jnp.logical_not(whole)
                for d in deltas:
                    others = others & jnp.logical_not((delta == d) & exists)
                left_over = self.num_keys - j * self.block_k if self.tail else None
                when(others & meet, View(self.mask, delta, left_over, self.segmented))
            return carry

        jax.lax.fori_loop(low, high, visit, jnp.int32(0))
