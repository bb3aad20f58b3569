"""Text to ids and back: UTF-8 bytes, or a Hugging Face `tokenizer.json` through the optional `tokenizers` package.

Neither adds an id of its own: `eod_id`, which separates documents, is put in by the sources alone. Text that spells
the end-of-document string out ("<|endoftext|>") is encoded as ordinary text and never becomes `eod_id`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpu_train.config import UserError

# In order of preference; the first that the vocabulary holds ends a document.
_EOD_NAMES = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_text>",
    "[EOS]",
    "[SEP]",
)


class Tokenizer(Protocol):
    vocab_size: int
    eod_id: int

    def encode(self, text: str) -> np.ndarray:
        """int32 [n] ids of `text`, none of them `eod_id`. Text that is not valid Unicode raises UnicodeEncodeError."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Leaves out `eod_id` and ids outside [0, vocab_size); never raises."""


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`: "bytes", or the path of a Hugging Face tokenizer.json."""
    if name == "bytes":
        return ByteTokenizer()
    if not Path(name).is_file():
        raise UserError(f"no tokenizer file {name!r}; give 'bytes' or the path of a Hugging Face tokenizer.json")
    return HuggingFaceTokenizer(str(Path(name).resolve()))


class ByteTokenizer:
    """An id is a UTF-8 byte. 0xFF, which UTF-8 never uses, ends a document."""

    vocab_size = 256
    eod_id = 0xFF

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < self.eod_id).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """The tokenizer in a tokenizer.json, without its template of special tokens."""

    def __init__(self, path: str):
        try:
            import tokenizers
        except ImportError:
            raise UserError(f"the tokenizer {path} needs a package: pip install 'tpu-train[hf]'") from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises a bare Exception
            raise UserError(f"{path} is not a Hugging Face tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True  # special tokens spelled out in a text are text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._path = path
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        name = next((name for name in _EOD_NAMES if name in vocabulary), None)
        if name is None:
            raise UserError(f"{path} has no end-of-document token; it needs one of {', '.join(_EOD_NAMES)}")
        self.eod_id = vocabulary[name]
        self._eod_name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFaceTokenizer, (self._path,)  # pickling the package's object would lose encode_special_tokens

    def encode(self, text: str) -> np.ndarray:
        text.encode("utf-8")  # the package reports a lone surrogate as a TypeError
        ids = self._ids(text)
        if self.eod_id in ids:
            # The string is a plain entry of the vocabulary, not a special token: encode it in two halves.
            first, rest = self._eod_name[0], self._eod_name[1:]
            pieces = text.split(self._eod_name)
            heads = [piece + first for piece in pieces[:-1]] + [pieces[-1]]
            texts = [heads[0]] + [rest + head for head in heads[1:]]
            ids = np.concatenate([self._ids(part) for part in texts])
        if self.eod_id in ids:
            raise UserError(
                f"{self._path} gives {self._eod_name} for ordinary text (as its unknown token?); use another"
            )
        return ids

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size and i != self.eod_id]
        return self._tokenizer.decode(known, skip_special_tokens=True)
