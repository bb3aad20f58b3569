"""The split into training and validation documents, and the endless order in which the former are read.

The split comes first, by a fixed permutation of the document indices that no seed, epoch or process count enters;
shuffling and repeating then only ever see one side. (Shuffling before slicing would leak: Grain reshuffles every epoch,
so another slice would be held out each time.) A source that is one long document is split by position instead.
"""

import functools
from collections.abc import Callable

import numpy as np

from tpu_train.config import UserError
from tpu_train.data.sources import Example, Source

_SPLIT_SEED = 0
_TABLE = 1 << 16  # permutations of fewer documents are kept as tables: for them an index_shuffle takes up to a few ms


class Part:
    """The training or the validation documents of a source."""

    def __init__(self, source: Source, start: int, stop: int):
        self.source, self._start, self._stop = source, start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def index(self, i: int) -> int:
        """The source's index of document `i` of this part."""
        if self.source.contiguous:
            return self._start + i
        return _split_index(self._start + i, len(self.source))

    def size(self, i: int) -> int:
        """What `Source.size_of` says of document `i` of this part."""
        return self.source.size_of(self.index(int(i)))

    def __getitem__(self, i: int) -> Example:
        return self.source[self.index(int(i))]


def split(source: Source, validation_fraction: float) -> tuple[Part, Part]:
    """(training, validation) parts of `source`, at least one document each."""
    count = len(source)
    if count < 2:
        raise UserError("the data is a single document too short or of a kind not to be cut; give at least 2 documents")
    train = count - min(max(1, round(count * validation_fraction)), count - 1)
    return Part(source, 0, train), Part(source, train, count)


def split_all(sources: dict[str, Source], validation_fraction: float) -> list[tuple[Part, Part]]:
    """(training, validation) parts of each source; an error says of which."""
    parts = []
    for name, source in sources.items():
        try:
            parts.append(split(source, validation_fraction))
        except UserError as error:
            raise UserError(f"{name}: {error}" if len(sources) > 1 else str(error)) from None
    return parts


class Stream:
    """The training documents of one source, epoch after epoch without end, each epoch in an order of its own."""

    def __init__(self, part: Part, seed: int, number: int = 0):
        """`number` tells the sources of a mixture apart, so that equal ones have different orders."""
        self.part = part
        self._seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])

    def document(self, n: int) -> int:
        """The part's index of the n-th document of the stream."""
        count = len(self.part)
        epoch, i = divmod(n, count)
        seed = (self._seed + epoch) % (1 << 32)
        if count < _TABLE:
            return int(_order_table(count, seed)[i])
        return _index_shuffle(i, count, seed)

    def size(self, n: int) -> int:
        """What the n-th document counts when rows are filled evenly."""
        return self.part.size(self.document(n))

    def __getitem__(self, n: int) -> Example:
        return self.part[self.document(n)]


def _index_shuffle(i: int, count: int, seed: int) -> int:
    """Element `i` of a permutation of `count`, at no cost of memory."""
    return _grain_shuffle()(i, count - 1, seed, 4)


@functools.cache
def _grain_shuffle() -> Callable[[int, int, int, int], int]:
    from grain.experimental import index_shuffle  # Grain takes a second to import, which --help need not wait for

    return index_shuffle


def _split_index(i: int, count: int) -> int:
    return int(_split_table(count)[i]) if count < _TABLE else _index_shuffle(i, count, _SPLIT_SEED)


@functools.lru_cache(8)
def _split_table(count: int) -> np.ndarray:
    return np.array([_index_shuffle(i, count, _SPLIT_SEED) for i in range(count)], np.int32)


@functools.lru_cache(64)
def _order_table(count: int, seed: int) -> np.ndarray:
    # RandomState's streams are frozen; those of a Generator may change with NumPy, and with them what a position means.
    return np.random.RandomState(seed).permutation(count).astype(np.int32)
