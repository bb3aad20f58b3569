"""Batches of tokens from text, JSON lines, ArrayRecord or token arrays; see `pipeline` for order, split and resume."""

from tpu_train.data.pipeline import train_batches
from tpu_train.data.token_files import read_tokens, write_tokens
from tpu_train.data.tokenizers import Tokenizer, load_tokenizer
from tpu_train.data.validation import validation_batches
from tpu_train.data.workers import WorkerDied

__all__ = [
    "Tokenizer",
    "WorkerDied",
    "load_tokenizer",
    "read_tokens",
    "train_batches",
    "validation_batches",
    "write_tokens",
]
