"""Documents into rows: a row of the batch cuts its documents at seq_len without losing a token.

What doesn't fit goes on in the same row of the next batch, so the rows of a batch come from different documents, with
nothing to buffer, and a position is exact in the middle of a document.

Grain's own ConcatThenSplitIterDataset is not used: a position of it that went through JSON (as in a checkpoint) comes
back with lists for tuples, is taken for a cut document, and a whole document is lost (Grain 0.2.18).
"""

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from tpu_train.config import UserError
from tpu_train.data.dealing import Deal, Dealer
from tpu_train.data.records import BadDocument
from tpu_train.data.sources import Example
from tpu_train.data.split import Stream
from tpu_train.data.texts import skip_or_raise

Batch = dict[str, np.ndarray]
# Where a row is: its next document (block, which of the row's in it), and the one it is in (stream, document of that,
# tokens used of it, or 0).
Place = tuple[int, int, int, int, int]
COUNTS = ("documents", "split", "tokens", "untrained", "dropped", "lost")  # then the tokens of each stream
_DOCUMENTS, _SPLIT, _TOKENS, _UNTRAINED, _DROPPED, _LOST = range(len(COUNTS))


def empty_batch(rows: int, seq_len: int) -> Batch:
    """A batch of padding only: weight 0, segment 0."""
    batch = {name: np.zeros((rows, seq_len), np.int32) for name in ("tokens", "labels", "segment_ids", "positions")}
    return {**batch, "weights": np.zeros((rows, seq_len), np.float32)}


class Filler:
    """Fills one row of each batch from documents that `take` gives: (example or None at the end, its stream)."""

    def __init__(self, take: Callable[[], tuple[Example | None, int]], packing: bool, counts: np.ndarray):
        self._take, self._packing, self._counts = take, packing, counts
        self._open: Example | None = None
        self._stream = 0
        self.offset = 0  # tokens of the open document already in earlier rows

    def open_at(self, example: Example, stream: int, offset: int) -> None:
        """Goes on with a document of which `offset` tokens were used before."""
        self._open, self._stream, self.offset = example, stream, offset

    def fill(self, batch: Batch, lane: int) -> bool:
        """Fills row `lane` of `batch`; whether it holds anything."""
        start = segment = 0
        seq_len = batch["tokens"].shape[1]
        while start < seq_len:
            if self._open is None and not self._begin(seq_len):
                break
            example = self._open
            assert example is not None
            length = min(seq_len - start, len(example["tokens"]) - self.offset)
            segment += 1
            row, part = (lane, slice(start, start + length)), slice(self.offset, self.offset + length)
            batch["tokens"][row] = example["tokens"][part]
            batch["labels"][row] = example["labels"][part]
            batch["segment_ids"][row] = segment
            batch["positions"][row] = np.arange(length, dtype=np.int32)
            batch["weights"][row] = example["weights"][part] if "weights" in example else 1
            self._count(length, length - int(np.count_nonzero(batch["weights"][row])))
            start += length
            self.offset += length
            if not self._packing or self.offset == len(example["tokens"]):
                self._counts[_DROPPED] += len(example["tokens"]) - self.offset
                self._open, self.offset = None, 0
            if not self._packing:
                break
        return start > 0

    def _begin(self, seq_len: int) -> bool:
        self._open, self._stream = self._take()
        if self._open is None:
            return False
        self._counts[_DOCUMENTS] += 1
        self._counts[_SPLIT] += len(self._open["tokens"]) > seq_len
        return True

    def _count(self, tokens: int, untrained: int) -> None:
        self._counts[_TOKENS] += tokens
        self._counts[_UNTRAINED] += untrained
        self._counts[len(COUNTS) + self._stream] += tokens


class RowsIterDataset(grain.IterDataset[dict[str, Any]]):
    """{"batch": these rows of each batch, "place": where they are after it, as arrays}, without end."""

    def __init__(self, reading: "Reading", rows: Sequence[int], places: Sequence[Sequence[int]], deal: Deal):
        """`places` are `Place`s, one for each of `rows`."""
        super().__init__()
        self._arguments = reading, rows, places, deal

    def __iter__(self) -> grain.DatasetIterator[dict[str, Any]]:
        return _RowsIterator(*self._arguments)

    def __str__(self) -> str:
        return f"RowsIterDataset(rows={list(self._arguments[1])})"


class Reading:
    """What every worker needs to fill any rows."""

    def __init__(self, streams: Sequence[Stream], *, seq_len: int, packing: bool, skip: bool, weights: Any = None):
        self.streams, self.seq_len, self.packing = streams, seq_len, packing
        self.skip = skip  # a bad document is named, counted and left out, and not an error
        self.weights = weights  # of `Dealer`


class _RowsIterator(grain.DatasetIterator[dict[str, Any]]):
    def __init__(self, reading: Reading, rows: Sequence[int], places: Sequence[Sequence[int]], deal: Deal):
        super().__init__()
        self._reading = reading
        self._dealer = Dealer(
            reading.streams,
            deal,
            {row: (place[0], place[1]) for row, place in zip(rows, places, strict=True)},
            None if reading.packing else reading.seq_len,
            reading.weights,
        )
        self._counts = np.zeros(len(COUNTS) + len(reading.streams), np.int64)
        self._rows = [
            _Row(row, place, self._dealer, reading, self._counts) for row, place in zip(rows, places, strict=True)
        ]

    def __next__(self) -> dict[str, Any]:
        batch = empty_batch(len(self._rows), self._reading.seq_len)
        for lane, row in enumerate(self._rows):
            row.filler.fill(batch, lane)
        deal = self._dealer.deal()
        place = {
            "rows": np.array([row.place() for row in self._rows], np.int64),
            "block": np.int64(deal.block),
            "loads": np.array(deal.loads, np.int64),
            "taken": np.array(deal.taken, np.int64),
            "owed": np.array(deal.owed, np.float64),
            "counts": self._counts.copy(),  # since this iterator began
        }
        return {"batch": batch, "place": place}

    def get_state(self) -> dict[str, Any]:
        return {}  # what it would be goes out with each batch

    def set_state(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("rows begin at the place they are made for")

    def __str__(self) -> str:
        return f"RowsIterator(rows={len(self._rows)}, seq_len={self._reading.seq_len})"


class _Row:
    """One row: its place among what is dealt to it, and the document it is in."""

    def __init__(self, row: int, place: Sequence[int], dealer: Dealer, reading: Reading, counts: np.ndarray):
        self._row, self._dealer, self._reading, self._counts = row, dealer, reading, counts
        self.filler = Filler(self._take, reading.packing, counts)
        self._card = (place[2], place[3])
        if place[4]:
            self.filler.open_at(reading.streams[place[2]][place[3]], place[2], place[4])

    def place(self) -> Place:
        card = self._card if self.filler.offset else (0, 0)
        return (*self._dealer.place(self._row), *card, self.filler.offset)

    def _take(self) -> tuple[Example, int]:
        streams = self._reading.streams
        for _ in range(1 + sum(len(stream.part) for stream in streams)):
            self._card = which, n = self._dealer.take(self._row)
            try:
                return streams[which][n], which
            except BadDocument as error:
                skip_or_raise(error, self._reading.skip)
                self._counts[_LOST] += 1
        raise UserError("no document of the data can be read; the lines above say why")
