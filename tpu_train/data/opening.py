"""From the names in a config to a source.

python_stdlib  The .py files of the running interpreter's standard library, without tests, idlelib, site-packages.
text           Each file is a document.
jsonl          Each line is a document: an object whose `text_key` holds the text, after that under `prompt_key`; or
               whose `messages_key` holds a conversation.
parquet        Each row is a document, in the columns `text_key` and `prompt_key`.
array_record   Each record is a document: UTF-8 text, nothing else (a record of JSON is read as text too).
tokens         .bin or .npy of token_files. If the header has an eod id, documents are split there. If not, an array
               is cut into windows of seq_len + 1 that overlap by one, so every id but the first is a label once.

With data.cache the tokens of all but the last are made once and kept (see `cache`). Without, documents are read and
tokenized when their turn comes, in an order that is random, so compressed files and Parquet need the cache.
"""

import dataclasses
from pathlib import Path

from tpu_train.config import DataConfig, MixtureSource, UserError
from tpu_train.data.cache import Cache
from tpu_train.data.cached import CachedSource
from tpu_train.data.records import Fields
from tpu_train.data.shards import COMPRESSED, Kind, piece_size
from tpu_train.data.sources import Source, TextSource, TokenSource
from tpu_train.data.texts import ArrayRecords, JsonLines, TextFiles, Texts, expand, names, stdlib_files
from tpu_train.data.token_files import read_tokens
from tpu_train.data.tokenizers import Tokenizer, load_tokenizer


def open_sources(config: DataConfig, vocab_size: int) -> dict[str, Source]:
    """The sources of data.mixture by name, or the only one under its kind. Raises UserError as `open_source` does."""
    if not config.mixture:
        return {config.source: open_source(config, vocab_size)}
    return {mixed.name: open_source(_alone(config, mixed), vocab_size) for mixed in config.mixture}


def _alone(config: DataConfig, mixed: MixtureSource) -> DataConfig:
    return dataclasses.replace(
        config,
        mixture=(),
        source=mixed.source,
        paths=mixed.paths,
        text_key=mixed.text_key,
        prompt_key=mixed.prompt_key,
        messages_key=mixed.messages_key,
    )


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
    paths = stdlib_files() if config.source == "python_stdlib" else expand(config.paths)
    if config.cache:
        return _cached(config, paths, tokenizer)
    unordered = next((path for path in paths if path.endswith(COMPRESSED) or config.source == "parquet"), None)
    if unordered is not None:
        raise UserError(f"{unordered} can only be read from front to back; set data.cache to a folder for its tokens")
    texts: Texts
    if config.source == "jsonl":
        texts = JsonLines(
            paths, Fields(config.text_key, config.prompt_key, config.messages_key, config.message_template)
        )
    elif config.source == "array_record":
        texts = ArrayRecords(paths)
    else:
        texts = TextFiles(paths, config.seq_len, config.validation_fraction)
    if not texts.size or not len(texts):
        raise UserError(f"data.source={config.source} holds no text: {names(config.paths) or 'the library'} is empty")
    return TextSource(texts, tokenizer)


def _cached(config: DataConfig, paths: list[str], tokenizer: Tokenizer) -> Source:
    whole_files = config.source in ("text", "python_stdlib")
    kind = Kind(
        config.source,
        config.text_key if config.source in ("jsonl", "parquet") else "",
        config.prompt_key,
        piece_size(config.seq_len) if whole_files else 0,
        config.messages_key,
        config.message_template if config.messages_key else "",
    )
    cache = Cache(config.cache, kind, tokenizer, tokenizer_content(config), config.on_corrupt == "skip")
    source = CachedSource(cache, paths, config.workers, contiguous=whole_files and len(paths) == 1)
    if not len(source):
        raise UserError(f"data.source={config.source} holds no text: {names(config.paths) or 'the library'} is empty")
    return source


def tokenizer_content(config: DataConfig) -> bytes:
    """What tells tokenizers apart: not the file's path, for a run may move."""
    return b"bytes" if config.tokenizer == "bytes" else Path(config.tokenizer).read_bytes()
