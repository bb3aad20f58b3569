"""Where documents come from. A source is a sequence of examples that can be read in any order.

A document of ids d[0..n-1] is the example `tokens` [eod, d0..d(n-1)], `labels` [d0..d(n-1), eod], both int32: every
id is a label exactly once, and no label belongs to another document. It is made here, before packing. An empty text
is [eod] -> [eod]; empty files and empty lines are left out.

python_stdlib  The .py files of the running interpreter's standard library, without tests, idlelib, site-packages.
text           Each file is a document.
jsonl          Each line is a document: an object whose `text_key` holds the text.
array_record   Each record is a document: UTF-8 text, nothing else (a record of JSON is read as text too).
tokens         .bin or .npy of token_files. If the header has an eod id, documents are split there. If not, an array
               is cut into windows of seq_len + 1 that overlap by one, so every id but the first is a label once.

A source that is one long document is `contiguous`: a single text file, or arrays without eod. Its validation part is
then its end, not a random choice of its pieces or windows.
"""

import bisect
import itertools
from typing import Protocol

import numpy as np

from tpu_train.config import DataConfig, UserError
from tpu_train.data.texts import ArrayRecords, BadDocument, JsonLines, TextFiles, Texts, expand, names, stdlib_files
from tpu_train.data.token_files import TokenFile, check_ids, read_tokens
from tpu_train.data.tokenizers import Tokenizer, load_tokenizer

# "tokens" and "labels", int32 [n], n > 0; "weights" float32 [n] where not all are 1.
Example = dict[str, np.ndarray]


class Source(Protocol):
    size: int  # bytes of text, or tokens: at least the number of tokens for the byte tokenizer
    contiguous: bool

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example: ...
    def size_of(self, index: int) -> int:
        """Labels of a document where they are known without reading it, else about its bytes, else 1; never 0."""


def open_source(config: DataConfig, vocab_size: int) -> Source:
    """The source that `config` names. Raises UserError if it can't be read, is empty, or needs more ids."""
    if config.source == "tokens":
        return TokenSource([read_tokens(path) for path in expand(config.paths)], config.seq_len, vocab_size)
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} ids, more than model.vocab_size="
            f"{vocab_size}; set model.vocab_size={tokenizer.vocab_size} or above"
        )
    texts: Texts
    if config.source == "python_stdlib":
        texts = TextFiles(stdlib_files(), config.seq_len, config.validation_fraction)
    elif config.source == "text":
        texts = TextFiles(expand(config.paths), config.seq_len, config.validation_fraction)
    elif config.source == "jsonl":
        texts = JsonLines(expand(config.paths), config.text_key)
    else:
        texts = ArrayRecords(expand(config.paths))
    if not texts.size or not len(texts):
        raise UserError(f"data.source={config.source} holds no text: {names(config.paths) or 'the library'} is empty")
    return TextSource(texts, tokenizer)


class TextSource:
    """Tokenizes texts into examples."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer):
        self._texts, self._tokenizer = texts, tokenizer
        self.size, self.contiguous = texts.size, texts.contiguous

    def __len__(self) -> int:
        return len(self._texts)

    def size_of(self, index: int) -> int:
        return self._texts.size_of(index)

    def __getitem__(self, index: int) -> Example:
        text, ends = self._texts.read(index)
        try:
            ids = self._tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise BadDocument(
                f"{self._texts.where(index)} holds a lone surrogate, which is not text: {error}"
            ) from None
        return example(ids, self._tokenizer.eod_id, ends)


def example(ids: np.ndarray, eod_id: int, ends: bool) -> Example:
    """tokens [eod, ids...] and labels [ids..., eod], int32; without the last of each if the document goes on."""
    framed = np.empty(len(ids) + 2, np.int32)
    framed[0] = framed[-1] = eod_id
    framed[1:-1] = ids
    stop = len(framed) if ends else -1
    return {"tokens": framed[: len(ids) + ends], "labels": framed[1:stop]}


class TokenSource:
    """Documents or windows of token arrays; the arrays stay memory-mapped."""

    def __init__(self, files: list[TokenFile], seq_len: int, vocab_size: int):
        eod_ids = {file.eod_id for file in files}
        if len(eod_ids) > 1:
            raise UserError(f"the token files disagree on the end-of-document id: {sorted(map(str, eod_ids))}")
        for file in files:
            if file.vocab_size is not None and file.vocab_size > vocab_size:
                raise UserError(
                    f"{file.path} was made with vocab_size={file.vocab_size}, more than model.vocab_size={vocab_size}; "
                    f"set model.vocab_size={file.vocab_size} or above"
                )
        self._files, self._vocab_size = files, vocab_size
        self._eod = next(iter(eod_ids))
        self.size = sum(len(file.ids) for file in files)
        if self._eod is not None:
            self._spans = [_documents(file.ids, self._eod) for file in files]
            if sum(map(len, self._spans)) < 2:
                self._eod = None
        self.contiguous = self._eod is None
        if self._eod is None:
            self._spans = [_windows(len(file.ids), seq_len) for file in files]
        self._ends = list(itertools.accumulate(map(len, self._spans)))
        if not len(self):
            raise UserError(f"{names([file.path for file in files])} holds {self.size} tokens; that is no label at all")

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, index: int) -> tuple[TokenFile, int, int]:
        at = bisect.bisect_right(self._ends, index)
        start, stop = self._spans[at][index - (self._ends[at - 1] if at else 0)].tolist()
        return self._files[at], start, stop

    def size_of(self, index: int) -> int:
        file, start, stop = self._locate(index)
        return stop - start + (-1 if self._eod is None else stop < len(file.ids))

    def __getitem__(self, index: int) -> Example:
        file, start, stop = self._locate(index)
        ids = np.asarray(file.ids[start:stop])
        check_ids(ids, self._vocab_size, file.path)
        if self._eod is None:
            window = ids.astype(np.int32)
            return {"tokens": window[:-1], "labels": window[1:]}
        return example(ids, self._eod, ends=stop < len(file.ids))


def _documents(ids: np.ndarray, eod_id: int) -> np.ndarray:
    """int64 [documents, 2]: start and stop of each, without the eod; one pass over the array."""
    chunk = 1 << 22
    found = [np.flatnonzero(ids[at : at + chunk] == eod_id) + at for at in range(0, len(ids), chunk)]
    edges = np.concatenate([[-1], *found, [len(ids)]]).astype(np.int64)
    spans = np.stack([edges[:-1] + 1, edges[1:]], axis=1)
    return spans[spans[:, 1] > spans[:, 0]]


def _windows(length: int, seq_len: int) -> np.ndarray:
    starts = np.arange(0, max(length - 1, 0), seq_len, dtype=np.int64)
    return np.stack([starts, np.minimum(starts + seq_len + 1, length)], axis=1)
