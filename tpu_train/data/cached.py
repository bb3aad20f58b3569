"""The source that a token cache is. Its sizes are exact, so an epoch is over before the next begins."""

import bisect
import contextlib
import hashlib
import itertools
from pathlib import Path

import numpy as np

from tpu_train.config import UserError
from tpu_train.data.cache import BLOCK, Cache, Manifest, block_sums
from tpu_train.data.sources import Example, example
from tpu_train.data.token_files import HEADER_BYTES, check_ids, id_dtype


class CachedSource:
    """Documents of a token cache, memory-mapped; each block of it is checked against its CRC when it is first read."""

    def __init__(self, cache: Cache, shards: list[str], workers: int, contiguous: bool):
        self._eod, self._vocab_size = cache.tokenizer.eod_id, cache.tokenizer.vocab_size
        self.manifests = cache.prepare(shards, workers)
        self._shards = [
            _Shard(cache.stem(shard), manifest, self._vocab_size)
            for shard, manifest in zip(shards, self.manifests, strict=True)
        ]
        self._ends = list(itertools.accumulate(manifest.documents for manifest in self.manifests))
        self.size = sum(manifest.tokens for manifest in self.manifests)
        self.contiguous, self.tokenized = contiguous, True
        self.fingerprint = hashlib.sha256(" ".join(m.content for m in self.manifests).encode()).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, index: int) -> tuple["_Shard", np.ndarray]:
        at = bisect.bisect_right(self._ends, index)
        i = index - (self._ends[at - 1] if at else 0)
        return self._shards[at], self._shards[at].documents.read(i, i + 1)[0]

    def size_of(self, index: int) -> int:
        _, (_, count, flags) = self._locate(index)
        return max(1, int(count + (flags & 1)))

    def __getitem__(self, index: int) -> Example:
        shard, (start, count, flags) = self._locate(index)
        ids = shard.ids.read(int(start), int(start + count))
        check_ids(ids, self._vocab_size, shard.ids.path)
        return example(ids, self._eod, bool(flags & 1), shard.trained_on(int(start), int(count), int(flags)))


class _Shard:
    def __init__(self, stem: Path, manifest: Manifest, vocab_size: int):
        name = f"{stem}."
        sums = np.fromfile(name + "blocks", "<u4")
        dtype = id_dtype(vocab_size)
        cut = -(-manifest.tokens * dtype.itemsize // BLOCK)
        self.ids = _Checked(name + "bin", HEADER_BYTES, (manifest.tokens,), dtype, sums[:cut])
        after = cut + -(-manifest.documents * 24 // BLOCK)
        self.documents = _Checked(name + "documents", 0, (manifest.documents, 3), np.dtype("<i8"), sums[cut:after])
        self._trained: _Checked | None = None
        if "trained" in manifest.bytes:
            self._trained = _Checked(name + "trained", 0, (manifest.tokens,), np.dtype(np.uint8), sums[after:])

    def trained_on(self, start: int, count: int, flags: int) -> np.ndarray | None:
        """Which ids of a document are, and what ends it; None: all."""
        if not flags >> 1:
            return None
        if self._trained is not None:
            return self._trained.read(start, start + count + (flags & 1))
        return np.arange(count + 1) >= flags >> 1


class _Checked:
    """A memory-mapped array, of which no block is believed before its CRC was compared."""

    def __init__(self, path: str, offset: int, shape: tuple[int, ...], dtype: np.dtype, sums: np.ndarray):
        self.path, self._offset, self._shape, self._dtype, self._sums = path, offset, shape, dtype, sums
        self._row = dtype.itemsize * int(np.prod(shape[1:]))
        self._open()

    def _open(self) -> None:
        self._bytes = np.memmap(self.path, np.uint8, "r", self._offset) if self._shape[0] else np.zeros(0, np.uint8)
        self._checked = np.zeros(len(self._sums), bool)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop) of the first dim. Raises UserError where the file is damaged."""
        first, last = start * self._row // BLOCK, -(-stop * self._row // BLOCK)
        if not self._checked[first:last].all():
            self._check(first, last)
        return self._bytes[start * self._row : stop * self._row].view(self._dtype).reshape(-1, *self._shape[1:])

    def _check(self, first: int, last: int) -> None:
        sums = block_sums(self._bytes[first * BLOCK : last * BLOCK].data)
        for block in first + np.flatnonzero(sums != self._sums[first:last]):
            with contextlib.suppress(OSError):  # so the next start tokenizes the shard again
                Path(self.path).with_suffix(".json").unlink()
            raise UserError(
                f"{self.path} is damaged near byte {self._offset + int(block) * BLOCK}; start again, and that shard "
                "is tokenized again"
            )
        self._checked[first:last] = True

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_bytes", "_checked")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._open()
