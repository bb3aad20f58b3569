"""Batches for training and validation: split the documents, take this process's share, shuffle, pack, prefetch.

The split comes first, by a fixed permutation of the document indices that no seed, epoch or process count enters;
shuffling and repeating then only ever see one side. (Shuffling before slicing would leak: Grain reshuffles every epoch,
so another slice would be held out each time.) A source that is one long document is split by position instead.
"""

import hashlib
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tpu_train.config import DataConfig, UserError
from tpu_train.data.sources import Source, open_source

if TYPE_CHECKING:
    import grain

    from tpu_train.data.packing import Batch

_SPLIT_SEED = 0


class Part:
    """The training or the validation documents of a source."""

    def __init__(self, source: Source, start: int, stop: int, contiguous: bool):
        self._source, self._start, self._stop = source, start, stop
        self._contiguous = contiguous

    def __len__(self) -> int:
        return self._stop - self._start

    def index(self, i: int) -> int:
        """The source's index of document `i` of this part."""
        if self._contiguous:
            return self._start + i
        from grain.experimental import index_shuffle

        return index_shuffle(self._start + i, max_index=len(self._source) - 1, seed=_SPLIT_SEED, rounds=4)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self._source[self.index(int(i))]


def split(source: Source, validation_fraction: float) -> tuple[Part, Part]:
    """(training, validation) parts of `source`, at least one document each."""
    count = len(source)
    if count < 2:
        raise UserError("the data is a single document too short or of a kind not to be cut; give at least 2 documents")
    train = count - min(max(1, round(count * validation_fraction)), count - 1)
    return Part(source, 0, train, source.contiguous), Part(source, train, count, source.contiguous)


def train_batches(
    config: DataConfig, *, vocab_size: int, process_index: int = 0, process_count: int = 1
) -> "grain.DatasetIterator[Batch]":
    """This process's training batches, without end, reshuffled every epoch in an order that data.seed decides.

    A batch is `tokens`, `labels`, `segment_ids`, `positions` int32 and `weights` float32, each
    [batch_size // process_count, seq_len]. Segments count from 1 in each row and 0 is padding; positions start again
    at 0 with each document and each row; a weight is 1 where there is a label. With packing every training token is a
    label exactly once per epoch, though a batch may hold the end of one epoch and the start of the next. Without,
    a row is one document; what lies beyond seq_len is dropped.

    Process p reads the training documents p, p + process_count, ...

    get_state() is plain JSON and set_state() continues with exactly the batches that followed; it raises UserError on
    a position saved with other data, or another seed, batch, seq_len, worker or process count.

    workers=0 reads and tokenizes in a thread of this process, which keeps up for bytes and ready tokens.
    workers=n does it in n processes, and pays when tokenizing text takes longer than a step; each takes every n-th
    document and their batches alternate, so the order depends on n but on nothing else. Processes are spawned: a script
    that uses them needs `if __name__ == "__main__":`. close() ends them.

    Raises UserError at once on a missing or empty source, on fewer documents than processes or tokens than a batch,
    and on ids that vocab_size doesn't hold; for a bad document further on, when it is read.
    """
    import grain
    from grain.experimental import ThreadPrefetchIterDataset

    from tpu_train.data.packing import PackIterDataset
    from tpu_train.data.resume import Resumable

    rows = _rows(config, process_index, process_count)
    source = open_source(config, vocab_size)
    train, _ = split(source, config.validation_fraction)
    if len(train) < process_count:
        raise UserError(
            f"{len(train)} training documents can't feed {process_count} processes; use fewer, or more files"
        )
    _check_fills_a_batch(config, source, train, rows, process_index, process_count)

    documents = grain.MapDataset.source(train)[process_index::process_count]
    seed = int(np.random.SeedSequence(config.seed).generate_state(1)[0])  # Grain adds the epoch to its seed
    shuffled = documents.shuffle(seed=seed).repeat()
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    packed: Any = PackIterDataset(
        shuffled.to_iter_dataset(read), rows=rows, seq_len=config.seq_len, packing=config.packing
    )
    if config.workers:
        packed = _in_workers(packed, config.workers)
    else:
        packed = ThreadPrefetchIterDataset(packed, prefetch_buffer_size=4)
    return Resumable(iter(packed), _layout(config, source, process_index, process_count))


def _in_workers(dataset: Any, workers: int) -> Any:
    import grain
    from absl import flags
    from grain.experimental import DatasetOptions, WithOptionsIterDataset

    if not flags.FLAGS.is_parsed():  # Grain reads its own flags when it starts a worker
        flags.FLAGS.mark_as_parsed()
    # Batches come through a pipe: shared memory is left behind when an iterator ends with batches still queued, and
    # containers often have little of it.
    dataset = WithOptionsIterDataset(dataset, DatasetOptions(min_shm_size=1 << 40))
    options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
    return dataset.mp_prefetch(options, worker_init_fn=_ignore_ctrl_c)


def _ignore_ctrl_c(worker_index: int, worker_count: int) -> None:
    """A terminal sends Ctrl-C to the workers too, while the run still needs their batches to stop well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class ValidationBatches:
    """The same finite batches every time it is iterated; see `validation_batches`."""

    def __init__(self, config: DataConfig, part: Part, process_index: int, process_count: int):
        self._config, self._part = config, part
        self._process_index, self._process_count = process_index, process_count

    def __iter__(self) -> Iterator["Batch"]:
        import grain

        from tpu_train.data.packing import PackIterDataset, empty_batch

        config = self._config
        documents = grain.MapDataset.source(self._part).to_iter_dataset(
            grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        )
        rows = iter(PackIterDataset(documents, rows=1, seq_len=config.seq_len, packing=config.packing))
        count = config.batch_size // self._process_count
        mine = slice(self._process_index * count, (self._process_index + 1) * count)
        padding = empty_batch(1, config.seq_len)
        while batch := list(itertools.islice(rows, config.batch_size)):
            batch += [padding] * (config.batch_size - len(batch))
            yield {name: np.concatenate([row[name] for row in batch[mine]]) for name in padding}


def validation_batches(
    config: DataConfig, *, vocab_size: int, process_index: int = 0, process_count: int = 1
) -> ValidationBatches:
    """The validation documents once, in a fixed order, as batches like those of `train_batches`.

    Over all processes every token is a label once (without packing: the first seq_len of each document). The batches
    together are the same for any process count, so every process gets equally many; the last is filled up with rows of
    weight 0 and segment 0. To that end each process reads the whole part and keeps its rows.
    """
    _rows(config, process_index, process_count)
    _, validation = split(open_source(config, vocab_size), config.validation_fraction)
    return ValidationBatches(config, validation, process_index, process_count)


def _rows(config: DataConfig, process_index: int, process_count: int) -> int:
    if config.batch_size % process_count:
        raise UserError(f"data.batch_size={config.batch_size} is not a multiple of the {process_count} processes")
    if not 0 <= process_index < process_count:
        raise UserError(f"process_index={process_index} is not one of the {process_count} processes")
    return config.batch_size // process_count


def _check_fills_a_batch(
    config: DataConfig, source: Source, train: Part, rows: int, process_index: int, process_count: int
) -> None:
    """Raises UserError if this process's documents hold less than one batch.

    A source of many bytes per token of a batch is taken for large enough once it is seen to hold any text at all.
    """
    mine = range(process_index, len(train), process_count)
    needed = rows * config.seq_len
    if not config.packing and len(mine) < rows:
        raise UserError(
            f"{len(mine)} training documents, fewer than the {rows} rows of a batch; "
            "lower data.batch_size, or set data.packing=true"
        )
    large = not config.packing or source.size > 64 * needed * process_count
    tokens, longest = 0, 0
    for i in mine:
        length = len(train[i]["labels"])
        tokens, longest = tokens + length, max(longest, length)
        has_text = longest > 1 or config.source == "tokens"  # an empty text is only its eod
        if has_text and (large or tokens >= needed):
            return
    share = f" in the share of process {process_index}" if process_count > 1 else ""
    if longest <= 1:
        raise UserError(f"the training documents{share} hold no text; check data.paths and data.text_key")
    raise UserError(
        f"{tokens} training tokens{share}, fewer than one batch of {rows} x {config.seq_len} = {needed}; "
        "lower data.batch_size or data.seq_len, or give more data"
    )


def _layout(config: DataConfig, source: Source, process_index: int, process_count: int) -> dict[str, Any]:
    """What a position in the data is only good for, as name: value."""
    content = hashlib.sha256(f"{config.source} {config.text_key} {len(source)} {source.size}".encode())
    if config.source != "tokens" and config.tokenizer != "bytes":
        content.update(Path(config.tokenizer).read_bytes())  # not its path: a run may move
    return {
        "data fingerprint": content.hexdigest()[:16],
        "data.seed": config.seed,
        "data.seq_len": config.seq_len,
        "data.batch_size": config.batch_size,
        "data.packing": config.packing,
        "data.validation_fraction": config.validation_fraction,
        "data.workers": config.workers,
        "process_count": process_count,
        "process_index": process_index,
    }
