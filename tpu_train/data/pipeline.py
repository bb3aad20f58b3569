"""Batches for training: open the data, take this process's rows of the batch, fill them in a thread or in workers."""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_train.config import DataConfig, UserError, points_of, weight_at
from tpu_train.data.opening import open_sources, tokenizer_content
from tpu_train.data.records import BadDocument
from tpu_train.data.sources import Source
from tpu_train.data.split import Part, Stream, split_all
from tpu_train.data.texts import skip_or_raise

if TYPE_CHECKING:
    from tpu_train.data.dealing import Deal
    from tpu_train.data.packing import Reading
    from tpu_train.data.position import Batches


def train_batches(config: DataConfig, *, vocab_size: int, process_index: int = 0, process_count: int = 1) -> "Batches":
    """This process's rows of the training batches, without end, in an order that data.seed decides.

    A batch is `tokens`, `labels`, `segment_ids`, `positions` int32 and `weights` float32, each
    [batch_size // process_count, seq_len]. Segments count from 1 in each row and 0 is padding; positions start again
    at 0 with each document and each row; a weight is 1 where there is a label to train on. With packing every training
    token is a label exactly once an epoch, though a batch may hold the end of one epoch and the start of the next.
    Without, a row is one document; what lies beyond seq_len is dropped, and counted.

    Process p holds the rows [p, p + 1) * batch_size // process_count. What a row holds depends neither on the
    number of processes nor on workers (see `dealing`), so neither does the batch as a whole.

    get_state() is plain JSON, and set_state() continues with exactly the batches that followed; set_states() takes the
    positions of all processes of a run that had another number of them. Both raise UserError on a position saved with
    other data, or another seed, batch_size, seq_len or way to read it. `counts` says what went by so far.

    workers=0 reads and tokenizes in a thread of this process, which keeps up for bytes and ready tokens. workers=n does
    it in n processes, each for a part of the rows, and pays when tokenizing text takes longer than a step. They are
    spawned: a script that uses them needs `if __name__ == "__main__":`. close() ends them. One that dies is said, and
    all are started anew at the batch that it owes; WorkerDied is raised if they die before they have made one.

    Raises UserError at once on a missing or empty source, on fewer tokens than a batch, and on ids that vocab_size
    doesn't hold; for a bad document further on, when it is read.
    """
    from tpu_train.data.packing import Reading
    from tpu_train.data.position import Batches

    rows = rows_of(config, process_index, process_count)
    sources = open_sources(config, vocab_size)
    parts = [train for train, _ in split_all(sources, config.validation_fraction)]
    _check_fills_a_batch(config, parts)
    reading = Reading(
        [Stream(part, config.seed, number) for number, part in enumerate(parts)],
        seq_len=config.seq_len,
        packing=config.packing,
        skip=config.on_corrupt == "skip",
        weights=Weights(config) if config.mixture else None,
    )

    def start(places: list[list[int]], deal: "Deal") -> "_Lanes":
        return _Lanes(reading, rows, places, deal, config.workers)

    return Batches(start, rows, config.batch_size, list(sources), _layout(config, sources))


class _Lanes:
    """Elements of `RowsIterDataset` for `rows`, filled in a thread or, each a part of the rows, in worker processes."""

    def __init__(self, reading: "Reading", rows: range, places: Sequence[Sequence[int]], deal: "Deal", workers: int):
        from grain.experimental import ThreadPrefetchIterDataset

        from tpu_train.data.packing import RowsIterDataset
        from tpu_train.data.workers import Worker

        self._parts: list[Any]
        if not workers:
            rows_of_all = RowsIterDataset(reading, rows, places, deal)
            self._parts = [iter(ThreadPrefetchIterDataset(rows_of_all, prefetch_buffer_size=4))]
            return
        cuts = np.linspace(0, len(rows), min(workers, len(rows)) + 1).astype(int).tolist()
        self._parts = [
            Worker(RowsIterDataset(reading, rows[a:b], places[a:b], deal)) for a, b in itertools.pairwise(cuts)
        ]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        elements = [next(part) for part in self._parts]
        if len(elements) == 1:
            return elements[0]
        places = [element["place"] for element in elements]
        place = dict(min(places, key=lambda place: place["block"]))
        place["rows"] = np.concatenate([place["rows"] for place in places])
        place["counts"] = sum(place["counts"] for place in places)
        batches = [element["batch"] for element in elements]
        return {"batch": {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}, "place": place}

    def close(self) -> None:
        for part in self._parts:
            part.close()


def rows_of(config: DataConfig, process_index: int, process_count: int) -> range:
    """The rows of the batch that are this process's."""
    if config.batch_size % process_count:
        raise UserError(f"data.batch_size={config.batch_size} is not a multiple of the {process_count} processes")
    if not 0 <= process_index < process_count:
        raise UserError(f"process_index={process_index} is not one of the {process_count} processes")
    count = config.batch_size // process_count
    return range(process_index * count, (process_index + 1) * count)


class Weights:
    """The share of each source of the mixture when every row has got so many tokens."""

    def __init__(self, config: DataConfig):
        self._mixture, self._seq_len = config.mixture, config.seq_len

    def __call__(self, tokens: int) -> list[float]:
        weights = [weight_at(source, tokens // self._seq_len) for source in self._mixture]
        total = sum(weights)
        return [weight / total for weight in weights]


def _check_fills_a_batch(config: DataConfig, parts: list[Part]) -> None:
    """Raises UserError if the training documents hold less than one batch.

    A source of many bytes per token of a batch is taken for large enough once it is seen to hold any text at all.
    """
    needed = config.batch_size * config.seq_len
    documents = sum(map(len, parts))
    if not config.packing and documents < config.batch_size:
        raise UserError(
            f"{documents} training documents, fewer than the {config.batch_size} rows of a batch; "
            "lower data.batch_size, or set data.packing=true"
        )
    large = not config.packing or sum(part.source.size for part in parts) > 64 * needed
    tokens, longest = 0, 0
    for train, i in itertools.chain.from_iterable(itertools.product([part], range(len(part))) for part in parts):
        try:
            length = len(train[i]["labels"])
        except BadDocument as error:
            skip_or_raise(error, config.on_corrupt == "skip")
            continue
        tokens, longest = tokens + length, max(longest, length)
        has_text = longest > 1 or not train.source.tokenized  # an empty text is only its eod
        if has_text and (large or tokens >= needed):
            return
    if longest <= 1:
        raise UserError("the training documents hold no text; check data.paths and data.text_key")
    raise UserError(
        f"{tokens} training tokens, fewer than one batch of {config.batch_size} x {config.seq_len} = {needed}; "
        "lower data.batch_size or data.seq_len, or give more data"
    )


def _layout(config: DataConfig, sources: dict[str, Source]) -> dict[str, Any]:
    """What a position in the data is only good for, as name: value."""
    read = config.mixture or [config]
    keys = [
        [source.source, source.text_key, source.prompt_key]
        + ([source.messages_key, config.message_template] if source.messages_key else [])
        for source in read
    ]
    found = [[name, len(source), source.size, source.fingerprint] for name, source in sources.items()]
    content = hashlib.sha256(json.dumps([keys, found]).encode())
    if any(source.tokenized for source in sources.values()):
        content.update(tokenizer_content(config))
    return {
        "data fingerprint": content.hexdigest()[:16],
        "data.seed": config.seed,
        "data.seq_len": config.seq_len,
        "data.batch_size": config.batch_size,
        "data.packing": config.packing,
        "data.validation_fraction": config.validation_fraction,
        "data.cache": "a folder" if config.cache else "none",  # with it sizes are exact, so rows get other documents
        "data.on_corrupt": config.on_corrupt,
        "data.mixture": [[mixed.name, [list(point) for point in points_of(mixed)]] for mixed in config.mixture],
    }
