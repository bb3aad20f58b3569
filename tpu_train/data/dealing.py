"""Which row of the batch reads which document: dealt to all rows at once, whoever fills them.

Documents are dealt in one order, epoch after epoch. The next one goes to the row with the least dealt to it so far,
the row that runs out of text first; a row reads what was dealt to it, to the last token, before it goes on. So what a
row holds depends on the data, the seed, batch_size and seq_len alone: any process and any worker can fill any rows, and
all of them together read every document once an epoch.

Where the sizes are exact (token files, a token cache, or no packing) the documents begun before any step are the first
so many of the order: every document is begun once before one is begun again. Where they are bytes of text, rows drift
apart as far as bytes per token differ between documents, and beyond that too where sizes are unknown (ArrayRecord):
each document is still read once an epoch, but one row may begin the next epoch before another ends this one.

Documents are dealt in blocks. A block can be dealt again from the `Deal` before it, so a position needs no more than
one `Deal`, and for each row a block, which of its documents there, and how many tokens of that are used.
"""

import dataclasses
import heapq
from collections.abc import Callable, Sequence

from tpu_train.data.split import Stream

_PER_ROW = 8  # documents a row gets in a block, on average
Card = tuple[int, int]  # which stream, which document of it


@dataclasses.dataclass(frozen=True)
class Deal:
    """What was dealt before block `block`."""

    block: int
    loads: tuple[int, ...]  # to each row: tokens, or what the source's sizes count
    taken: tuple[int, ...]  # documents from each stream
    owed: tuple[float, ...]  # tokens that each stream is behind (ahead, if negative) of its weight

    @classmethod
    def first(cls, rows: int, streams: int) -> "Deal":
        """Nothing is dealt yet."""
        return cls(0, (0,) * rows, (0,) * streams, (0.0,) * streams)


class Dealer:
    """Deals `streams` to rows, block after block from `deal` on.

    fixed_size None counts sizes as the streams give them; a number counts each document as so many tokens, for rows
    of one document each. `weights(tokens)` is the share of each stream when every row has got so many tokens; None is
    for a single one.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        deal: Deal,
        fixed_size: int | None,
        weights: Callable[[int], Sequence[float]] | None = None,
    ):
        self._streams, self._fixed_size, self._weights = streams, fixed_size, weights
        self._before = {deal.block: deal}
        self._cards: dict[int, list[list[Card]]] = {}
        self.newest = deal.block  # blocks below it are dealt

    def cards(self, block: int, row: int) -> list[Card]:
        """What row `row` gets in block `block`, in order."""
        while self.newest <= block:
            self._deal()
        return self._cards[block][row]

    def before(self, block: int) -> Deal:
        """What was dealt before `block`; forgets all that came earlier."""
        for old in [b for b in self._before if b < block]:
            del self._before[old]
            self._cards.pop(old, None)
        return self._before[block]

    def _deal(self) -> None:
        deal = self._before[self.newest]
        heap = [(load, row) for row, load in enumerate(deal.loads)]
        heapq.heapify(heap)
        taken, owed = list(deal.taken), list(deal.owed)
        cards: list[list[Card]] = [[] for _ in heap]
        for _ in range(_PER_ROW * len(heap)):
            load, row = heap[0]
            which = self._choose(load, owed)
            n = taken[which]
            size = self._fixed_size or self._streams[which].size(n)
            taken[which] += 1
            self._pay(load, which, size, owed)
            cards[row].append((which, n))
            heapq.heapreplace(heap, (load + size, row))
        loads = [0] * len(heap)
        for load, row in heap:
            loads[row] = load
        self._cards[self.newest] = cards
        self.newest += 1
        self._before[self.newest] = Deal(self.newest, tuple(loads), tuple(taken), tuple(owed))

    def _choose(self, load: int, owed: list[float]) -> int:
        """The stream that is furthest behind its weight, of those that have one now."""
        if self._weights is None:
            return 0
        weights = self._weights(load)
        return max((i for i, w in enumerate(weights) if w > 0), key=lambda i: owed[i] + weights[i])

    def _pay(self, load: int, which: int, size: int, owed: list[float]) -> None:
        if self._weights is not None:
            for i, weight in enumerate(self._weights(load)):
                owed[i] += weight * size
            owed[which] -= size
