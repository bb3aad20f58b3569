"""Which keys a query may see, by position, and which key blocks a query block therefore needs: closed forms."""

import dataclasses
from typing import TypeGuard

import numpy as np


@dataclasses.dataclass(frozen=True)
class Mask:
    """Visibility by distance: query t sees key s if `t - s <= left` and `s - t <= right`; None is no bound."""

    left: int | None
    right: int | None

    @classmethod
    def of(cls, causal: bool, window: int | tuple[int | None, int | None] | None) -> "Mask":
        """The mask of `flash_attention`'s two arguments.

        Raises:
          ValueError: a window that is none.
        """
        if window is None:
            left = right = None
        elif _is_count(window, least=1):
            left = right = int(window) - 1
        elif isinstance(window, tuple) and len(window) == 2 and all(x is None or _is_count(x, 0) for x in window):
            left, right = (None if x is None else int(x) for x in window)
        else:
            raise ValueError(
                f"flash_attention: window={window!r}; it must be None, an int of at least 1, or a tuple (left, right) "
                "whose members are None or ints of at least 0"
            )
        return cls(left, 0 if causal else right)

    def visible(self, t, s):
        """Boolean array, broadcast over the positions `t` and `s`."""
        seen = (t >= s) | (t < s)
        if self.left is not None:
            seen = seen & (t - s <= self.left)
        if self.right is not None:
            seen = seen & (s - t <= self.right)
        return seen

    def key_range(self, first, last, num_keys):
        """[low, high): the keys that any query with a position in [first, last] may see."""
        low = 0 * first if self.left is None else _clip(first - self.left, num_keys)
        high = 0 * last + num_keys if self.right is None else _clip(last + self.right + 1, num_keys)
        return low, high

    def query_range(self, first, last, offset, num_queries):
        """[low, high): the rows of queries (row 0 at position `offset`) that may see any key in [first, last]."""
        low = 0 * first if self.right is None else _clip(first - self.right - offset, num_queries)
        high = 0 * last + num_queries if self.left is None else _clip(last + self.left + 1 - offset, num_queries)
        return low, high


def _is_count(x: object, least: int) -> TypeGuard[int]:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool) and bool(x >= least)


def _clip(x, most):
    """Into [0, most]; Python and traced integers alike."""
    if isinstance(x, int):
        return min(max(x, 0), most)
    return x.clip(0, most)
