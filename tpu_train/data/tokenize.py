"""Shards into ids, chunk by chunk, in this process or in workers."""

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np

from tpu_train.data.records import BadDocument
from tpu_train.data.shards import BadShard, Kind, Raw, parse, read_shard
from tpu_train.data.sources import tokenize
from tpu_train.data.tokenizers import Tokenizer

_CHUNK_BYTES = 1 << 19
_CHUNK_DOCUMENTS = 2048


class Tokenized(NamedTuple):
    """The documents of a chunk."""

    ids: np.ndarray  # int32, of all documents together, without end-of-document ids
    lengths: np.ndarray  # int64 [n]
    flags: np.ndarray  # int64 [n]: twice the ids not trained on, plus 1 where the document ends
    trained: np.ndarray  # uint8: 1 for each id that is, with end-of-document ids; of conversations, else empty
    bad: list[str]  # why documents were left out


class Tokenizing:
    """Tokenizes shards, one after the other, with `workers` processes that live as long as this; 0: in this one."""

    def __init__(self, kind: Kind, tokenizer: Tokenizer, workers: int):
        self._kind, self._tokenizer, self._workers = kind, tokenizer, workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Tokenizing":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def shard(self, path: str) -> Iterator[Tokenized]:
        """The documents of a shard, in order. Raises BadShard, after what comes before the damage."""
        if not self._workers:
            for chunk in _chunks(path, self._kind):
                yield tokenize_chunk(chunk, self._kind, self._tokenizer)
            return
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, spawn, _start, (self._kind, self._tokenizer))
        waiting: deque[Future[Tokenized]] = deque()
        damage = None
        try:
            for chunk in _chunks(path, self._kind):
                waiting.append(self._pool.submit(_tokenize_here, chunk))
                if len(waiting) > 2 * self._workers:
                    yield waiting.popleft().result()
        except BadShard as error:
            damage = error
        while waiting:
            yield waiting.popleft().result()
        if damage is not None:
            raise damage


def _chunks(path: str, kind: Kind) -> Iterator[list[Raw]]:
    chunk: list[Raw] = []
    size = 0
    damage = None
    try:
        for raw in read_shard(path, kind):
            chunk.append(raw)
            size += (
                len(raw.content) if isinstance(raw.content, bytes) else sum(map(len, map(str, raw.content.values())))
            )
            if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_DOCUMENTS:
                yield chunk
                chunk, size = [], 0
    except BadShard as error:
        damage = error
    if chunk:
        yield chunk
    if damage is not None:
        raise damage


_HERE: list[tuple[Kind, Tokenizer]] = []  # in a worker


def _start(kind: Kind, tokenizer: Tokenizer) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits for it stops, and ends it
    _HERE.append((kind, tokenizer))


def _tokenize_here(chunk: list[Raw]) -> Tokenized:
    return tokenize_chunk(chunk, *_HERE[0])


def tokenize_chunk(chunk: list[Raw], kind: Kind, tokenizer: Tokenizer) -> Tokenized:
    """The ids of documents; those that can't be read are left out and named."""
    found, flags, masks, bad = [], [], [], []
    for raw in chunk:
        try:
            ids, trained = tokenize(parse(raw, kind), tokenizer, raw.where)
        except BadDocument as error:
            bad.append(str(error))
            continue
        found.append(ids)
        trained = np.ones(len(ids) + 1, bool) if trained is None else trained
        flags.append(2 * int(len(ids) - trained[:-1].sum()) + raw.ends)
        if kind.messages_key:
            masks.append(trained[: len(ids) + raw.ends].astype(np.uint8))
    ids = np.concatenate(found) if found else np.zeros(0, np.int32)
    trained = np.concatenate(masks) if masks else np.zeros(0, np.uint8)
    return Tokenized(ids, np.array([len(ids) for ids in found], np.int64), np.array(flags, np.int64), trained, bad)
