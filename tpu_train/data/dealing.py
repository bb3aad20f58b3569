"""Which row of the batch reads which document: dealt to all rows at once, whoever fills them.

Documents are dealt in one order, epoch after epoch. The next one goes to the row with the least dealt to it so far,
the row that runs out of text first; a row reads what was dealt to it, to the last token, before it goes on. So what a
row holds depends on the data, the seed, batch_size and seq_len alone: any process and any worker can fill any rows, and
all of them together read every document once an epoch.

Where the sizes are exact (token files, a token cache, or no packing) the documents begun before any step are the first
so many of the order: every document is begun once before one is begun again. Where they are bytes of text, rows drift
apart as far as bytes per token differ between documents, and beyond that too where sizes are unknown (ArrayRecord):
each document is still read once an epoch, but one row may begin the next epoch before another ends this one.

Documents are dealt in blocks. Every block can be dealt again from a `Deal` before it, so a position needs no more than
one `Deal`, and for each row the place of its next document, by block, and the document it is in.
"""

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tpu_train.data.split import Stream

_PER_ROW = 8  # documents a row gets in a block, on average
_DEALS = 32  # that are kept at most
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
    """Deals `streams` to all rows, block after block from `deal` on, and holds what the rows of `places` get.

    `places` gives the first document, as (block, which of the row's in it), that a row still has to read. `fixed_size`
    None counts sizes as the streams give them; a number counts each document as so many tokens, for rows of one
    document each. `weights(tokens)` is the share of each stream when every row has got so many tokens; None is for a
    single one.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        deal: Deal,
        places: Mapping[int, tuple[int, int]],
        fixed_size: int | None = None,
        weights: Callable[[int], Sequence[float]] | None = None,
    ):
        self._streams, self._fixed_size, self._weights = streams, fixed_size, weights
        self._deals = [deal]  # some of those from the oldest needed to the newest
        self._from = dict(places)
        self._cards: dict[int, deque[tuple[tuple[int, int], Card]]] = {row: deque() for row in places}

    def take(self, row: int) -> Card:
        """The next document of row `row`."""
        while not self._cards[row]:
            self._deal()
        return self._cards[row].popleft()[1]

    def place(self, row: int) -> tuple[int, int]:
        """Where the next document of row `row` is."""
        if self._cards[row]:
            return self._cards[row][0][0]
        return max(self._from[row], (self._deals[-1].block, 0))

    def deal(self) -> Deal:
        """A deal from which all that the rows have not taken can be dealt again; forgets those before it."""
        oldest = min(self.place(row)[0] for row in self._cards)
        while len(self._deals) > 1 and self._deals[1].block <= oldest:
            del self._deals[0]
        return self._deals[0]

    def _deal(self) -> None:
        deal = self._deals[-1]
        heap = [(load, row) for row, load in enumerate(deal.loads)]
        heapq.heapify(heap)
        taken, owed, given = list(deal.taken), list(deal.owed), [0] * len(heap)
        for _ in range(_PER_ROW * len(heap)):
            load, row = heap[0]
            which = self._choose(load, owed)
            n = taken[which]
            size = self._fixed_size or self._streams[which].size(n)
            taken[which] += 1
            self._pay(load, which, size, owed)
            place = (deal.block, given[row])
            given[row] += 1
            if row in self._cards and place >= self._from[row]:
                self._cards[row].append((place, (which, n)))
            heapq.heapreplace(heap, (load + size, row))
        loads = [0] * len(heap)
        for load, row in heap:
            loads[row] = load
        self._deals.append(Deal(deal.block + 1, tuple(loads), tuple(taken), tuple(owed)))
        if len(self._deals) > _DEALS:  # a row is far behind: dealing again from further back is slower, and rare
            del self._deals[1:-1:2]

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
