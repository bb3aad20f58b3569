"""Documents into rows: every document goes through one lane, and a lane is a row of each batch.

A lane cuts its documents into rows of seq_len without losing a token; what doesn't fit goes on in the same row of the
next batch. The rows of a batch so come from different documents, with nothing to buffer or shuffle, and the position
is exact in the middle of a document: one document index and one offset a lane.

Grain's own ConcatThenSplitIterDataset is not used: a position of it that went through JSON (as in a checkpoint) comes
back with lists for tuples, is taken for a cut document, and a whole document is lost (Grain 0.2.18).
"""

from typing import Any

import grain
import numpy as np

Example = dict[str, np.ndarray]  # "tokens" and "labels", int32 [n], n > 0
Batch = dict[str, np.ndarray]


def empty_batch(rows: int, seq_len: int) -> Batch:
    """A batch of padding only: weight 0, segment 0."""
    batch = {name: np.zeros((rows, seq_len), np.int32) for name in ("tokens", "labels", "segment_ids", "positions")}
    return {**batch, "weights": np.zeros((rows, seq_len), np.float32)}


class PackIterDataset(grain.IterDataset[Batch]):
    """Batches of `rows` rows from a dataset of examples; ends with the batch that holds the last token.

    packing=False: one document a row, cut at seq_len.
    """

    def __init__(self, parent: grain.IterDataset[Example], *, rows: int, seq_len: int, packing: bool):
        super().__init__(parent)
        self._rows, self._seq_len, self._packing = rows, seq_len, packing

    def __iter__(self) -> grain.DatasetIterator[Batch]:
        return _PackIterator(iter(self._parent), self._rows, self._seq_len, self._packing)


class _PackIterator(grain.DatasetIterator[Batch]):
    def __init__(self, parent: grain.DatasetIterator[Example], rows: int, seq_len: int, packing: bool):
        super().__init__(parent)
        self._documents = parent
        self._rows, self._seq_len, self._packing = rows, seq_len, packing
        self._open: list[Example | None] = [None] * rows
        self._document: list[dict[str, Any]] = [parent.get_state()] * rows  # the parent's state just before `_open`
        self._offset = [0] * rows  # tokens of `_open` already in earlier rows
        self._arange = np.arange(seq_len, dtype=np.int32)

    def __next__(self) -> Batch:
        batch = empty_batch(self._rows, self._seq_len)
        filled = [self._fill(lane, batch) for lane in range(self._rows)]
        if not any(filled):
            raise StopIteration
        return batch

    def _fill(self, lane: int, batch: Batch) -> int:
        """Fills row `lane` and returns how many tokens it holds."""
        start = segment = 0
        while start < self._seq_len:
            example = self._open[lane] or self._take(lane)
            if example is None:
                break
            offset = self._offset[lane]
            length = min(self._seq_len - start, len(example["tokens"]) - offset)
            segment += 1
            row = (lane, slice(start, start + length))
            batch["tokens"][row] = example["tokens"][offset : offset + length]
            batch["labels"][row] = example["labels"][offset : offset + length]
            batch["segment_ids"][row] = segment
            batch["positions"][row] = self._arange[:length]
            batch["weights"][row] = 1
            start += length
            self._offset[lane] = offset + length
            if not self._packing or self._offset[lane] == len(example["tokens"]):
                self._open[lane] = None
            if not self._packing:
                break
        return start

    def _take(self, lane: int) -> Example | None:
        self._document[lane] = self._documents.get_state()
        self._offset[lane] = 0
        self._open[lane] = next(self._documents, None)
        return self._open[lane]

    def get_state(self) -> dict[str, Any]:
        # A lane between two documents has offset -1. Shapes and types are the same at every step.
        offsets = [-1 if example is None else offset for example, offset in zip(self._open, self._offset, strict=True)]
        lanes = [{"document": d, "offset": o} for d, o in zip(self._document, offsets, strict=True)]
        return {"documents": self._documents.get_state(), "lanes": lanes}

    def set_state(self, state: dict[str, Any]) -> None:
        for lane, saved in enumerate(state["lanes"]):
            self._document[lane] = saved["document"]
            self._offset[lane] = max(saved["offset"], 0)
            self._open[lane] = None
            if saved["offset"] >= 0:
                if self._documents.get_state() != saved["document"]:
                    self._documents.set_state(saved["document"])
                self._open[lane] = next(self._documents)
        self._documents.set_state(state["documents"])

    def __str__(self) -> str:
        return f"PackIterator(rows={self._rows}, seq_len={self._seq_len}, packing={self._packing})"
