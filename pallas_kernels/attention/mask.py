"""Which keys a query may see, by position, and which key blocks a query block therefore needs: closed forms."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mask:
    """Causal and sliding-window visibility. Query t sees key s if `s <= t` (causal) and `t - s < window`."""

    causal: bool
    window: int | None

    def visible(self, t, s):
        """Boolean array, broadcast over the positions `t` and `s`."""
        seen = (t >= s) if self.causal else (t >= s) | (t < s)
        if self.window is not None:
            seen = seen & (t - s < self.window)
            if not self.causal:
                seen = seen & (s - t < self.window)
        return seen

    def key_range(self, first, last, num_keys):
        """[low, high): the keys that any query with a position in [first, last] may see."""
        low, high = 0 * first, 0 * last + num_keys
        if self.causal:
            high = _clip(last + 1, num_keys)
        if self.window is not None:
            low = _clip(first - self.window + 1, num_keys)
            if not self.causal:
                high = _clip(last + self.window, num_keys)
        return low, high

    def query_range(self, first, last, offset, num_queries):
        """[low, high): the rows of queries (row 0 at position `offset`) that may see any key in [first, last]."""
        low, high = 0 * first, 0 * last + num_queries
        if self.causal:
            low = _clip(first - offset, num_queries)
        if self.window is not None:
            high = _clip(last + self.window - offset, num_queries)
            if not self.causal:
                low = _clip(first - self.window + 1 - offset, num_queries)
        return low, high


def _clip(x, most):
    """Into [0, most]; Python and traced integers alike."""
    if isinstance(x, int):
        return min(max(x, 0), most)
    return x.clip(0, most)
