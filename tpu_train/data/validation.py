"""Batches for validation: the same ones every time, on any number of processes."""

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tpu_train.config import DataConfig
from tpu_train.data.opening import open_sources
from tpu_train.data.pipeline import rows_of
from tpu_train.data.records import BadDocument
from tpu_train.data.sources import Example
from tpu_train.data.split import Part, split_all
from tpu_train.data.texts import skip_or_raise

if TYPE_CHECKING:
    from tpu_train.data.packing import Batch


class ValidationBatches:
    """The same finite batches every time it is iterated; see `validation_batches`."""

    def __init__(self, config: DataConfig, parts: list[Part], rows: range):
        self._config, self._parts, self._rows = config, parts, rows

    def __iter__(self) -> Iterator["Batch"]:
        from tpu_train.data.packing import COUNTS, Filler, empty_batch

        documents = self._documents()
        counts = np.zeros(len(COUNTS) + 1, np.int64)
        filler = Filler(lambda: (next(documents, None), 0), self._config.packing, counts)
        while True:
            batch = empty_batch(self._config.batch_size, self._config.seq_len)
            if not [True for row in range(self._config.batch_size) if filler.fill(batch, row)]:
                return
            yield {name: array[self._rows.start : self._rows.stop] for name, array in batch.items()}

    def _documents(self) -> Iterator[Example]:
        """Those of several sources in turns, so that the first few batches hold some of each."""
        for _, part, i in heapq.merge(*map(_turns, self._parts), key=lambda turn: turn[0]):
            try:
                yield part[i]
            except BadDocument as error:
                skip_or_raise(error, self._config.on_corrupt == "skip")


def _turns(part: Part) -> Iterator[tuple[float, Part, int]]:
    return (((i + 0.5) / len(part), part, i) for i in range(len(part)))


def validation_batches(
    config: DataConfig, *, vocab_size: int, process_index: int = 0, process_count: int = 1
) -> ValidationBatches:
    """The validation documents once, in a fixed order, as batches like those of `train_batches`.

    Over all processes every token is a label once (without packing: the first seq_len of each document). The batches
    together are the same for any process count, so every process gets equally many; the last is filled up with rows of
    weight 0 and segment 0. To that end each process reads the whole part and keeps its rows.
    """
    rows = rows_of(config, process_index, process_count)
    parts = split_all(open_sources(config, vocab_size), config.validation_fraction)
    return ValidationBatches(config, [validation for _, validation in parts], rows)
