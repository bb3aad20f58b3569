"""Sources: sequences of examples that can be read in any order. opening.py says which there are.

A document of ids d[0..n-1] is the example `tokens` [eod, d0..d(n-1)], `labels` [d0..d(n-1), eod], both int32: every
id is a label exactly once, and no label belongs to another document. It is made here, before packing. An empty text
is [eod] -> [eod]; empty files and empty lines are left out. Labels that are not to be trained on, of prompts and of
others than assistants (see `records`), have weight 0.

A source that is one long document is `contiguous`: a single text file, or arrays without eod. Its validation part is
then its end, not a random choice of its pieces or windows.
"""

import bisect
import itertools
from typing import Protocol

import numpy as np

from tpu_train.config import UserError
from tpu_train.data.records import BadDocument, Text, Where
from tpu_train.data.texts import Texts, names
from tpu_train.data.token_files import TokenFile, check_ids
from tpu_train.data.tokenizers import Tokenizer

# "tokens" and "labels", int32 [n], n > 0; "weights" float32 [n] where not all are 1.
Example = dict[str, np.ndarray]


class Source(Protocol):
    tokenized: bool  # from text, by the tokenizer
    fingerprint: str  # of the contents, or nothing where that takes reading it all
    size: int  # bytes of text, or tokens: at least the number of tokens for the byte tokenizer
    contiguous: bool

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example: ...
    def size_of(self, index: int) -> int:
        """Labels of a document where they are known without reading it, else about its bytes, else 1; never 0."""


class TextSource:
    """Tokenizes texts into examples."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer):
        self.tokenized, self.fingerprint = True, ""
        self._texts, self._tokenizer = texts, tokenizer
        self.size, self.contiguous = texts.size, texts.contiguous

    def __len__(self) -> int:
        return len(self._texts)

    def size_of(self, index: int) -> int:
        return self._texts.size_of(index)

    def __getitem__(self, index: int) -> Example:
        text = self._texts.read(index)
        ids, trained = tokenize(text, self._tokenizer, lambda: self._texts.where(index))
        return example(ids, self._tokenizer.eod_id, text.ends, trained)


def tokenize(text: Text, tokenizer: Tokenizer, where: Where) -> tuple[np.ndarray, np.ndarray | None]:
    """(ids, which are trained on: bool [n + 1], the last of what ends them; None: all). Raises BadDocument if no text.

    What ends a document is trained on where its last part is.
    """
    try:
        ids = [tokenizer.encode(part) for part, _ in text.parts]
    except UnicodeEncodeError as error:
        raise BadDocument(
            f"{where if isinstance(where, str) else where()} holds a lone surrogate, which is not text: {error}"
        ) from None
    trained = [trained for _, trained in text.parts]
    if all(trained):
        return np.concatenate(ids), None
    return np.concatenate(ids), np.append(np.repeat(trained, [len(part) for part in ids]), trained[-1])


def example(ids: np.ndarray, eod_id: int, ends: bool, trained: np.ndarray | None = None) -> Example:
    """tokens [eod, ids...] and labels [ids..., eod], int32; without the last of each if the document goes on.

    Labels that are not `trained` on, see `tokenize`, have weight 0.
    """
    framed = np.empty(len(ids) + 2, np.int32)
    framed[0] = framed[-1] = eod_id
    framed[1:-1] = ids
    stop = len(framed) if ends else -1
    made = {"tokens": framed[: len(ids) + ends], "labels": framed[1:stop]}
    if trained is not None:
        made["weights"] = trained[: len(made["labels"])].astype(np.float32)
    return made


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
        self.tokenized, self.fingerprint = False, ""
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
