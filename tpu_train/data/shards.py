"""Shards read front to back, for the token cache: what they hold, document by document, compressed or not.

A shard is one file of data.paths. Text and JSONL may be compressed (.gz, .zst); Parquet and ArrayRecord do it inside.
A shard that is damaged gives what comes before the damage, and then raises `BadShard`.
"""

import gzip
import itertools
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from tpu_train.config import UserError
from tpu_train.data.records import BadDocument, Fields, Text, check_text, parse_line
from tpu_train.data.texts import PIECE_BYTES, SEARCH_BYTES

_CHUNK = 1 << 20
COMPRESSED = (".gz", ".zst")


class BadShard(UserError):
    """A shard can't be read on; data.on_corrupt=skip leaves out the rest of it."""

    def __init__(self, message: str, lost: int | None = None):
        super().__init__(message)
        self.lost = lost  # how many documents are left out, where the shard says


class Kind(NamedTuple):
    """How to read the documents of a shard."""

    source: str  # of DataConfig
    text_key: str
    prompt_key: str
    piece: int  # of text files, in bytes
    messages_key: str = ""
    template: str = ""  # of messages

    @property
    def fields(self) -> Fields:
        return Fields(self.text_key, self.prompt_key, self.messages_key, self.template)


class Raw(NamedTuple):
    """A document, or a piece of one, as it stands in the shard."""

    where: str  # for messages: the path and its place there
    content: Any  # bytes, or the values of a Parquet row
    ends: bool


def read_shard(path: str, kind: Kind) -> Iterator[Raw]:
    """The documents of the shard at `path`, in order. Raises BadShard where it is damaged."""
    if kind.source == "parquet":
        return _parquet(path, kind)
    if kind.source == "array_record":
        return _array_records(path)
    if kind.source == "jsonl":
        return _lines(path)
    return _pieces(path, kind.piece)


def parse(raw: Raw, kind: Kind) -> Text:
    """The text of `raw`. Raises BadDocument if it holds none."""
    if kind.source == "parquet":
        return check_text(raw.content, kind.fields, raw.where)
    if kind.source == "jsonl":
        return parse_line(raw.content, kind.fields, raw.where)
    try:
        return Text(raw.content.decode("utf-8"), raw.ends)
    except UnicodeDecodeError as error:
        raise BadDocument(f"{raw.where} is not valid UTF-8 at byte {error.start} of it; convert it to UTF-8") from None


def _lines(path: str) -> Iterator[Raw]:
    rest, number = b"", 0
    for chunk in itertools.chain(_chunks(path), [None]):
        lines = rest.split(b"\n") if chunk is None else (rest + chunk).split(b"\n")
        rest = b"" if chunk is None else lines.pop()
        for line in lines:
            number += 1
            if line and not line.isspace():
                yield Raw(f"{path}:{number}", line, True)


def _pieces(path: str, size: int) -> Iterator[Raw]:
    """Pieces of about `size` bytes, cut after a line's end where there is one near, else between two characters."""
    rest, at, due = b"", 0, size  # where `rest` begins, and where the next cut is due
    for chunk in _chunks(path):
        rest += chunk
        while at + len(rest) >= due + size:  # so the last piece, which takes the rest, is none too small
            ahead = rest[due - at : due - at + min(SEARCH_BYTES, size // 2)]
            newline = ahead.find(b"\n") + 1
            cut = due - at + (newline or next((i for i, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0))
            yield Raw(path, rest[:cut], False)
            rest, at, due = rest[cut:], at + cut, due + size
    if rest:
        yield Raw(path, rest, True)


def _chunks(path: str) -> Iterator[bytes]:
    try:
        if path.endswith(".zst"):
            yield from _zstd(path)
            return
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            while chunk := file.read1(_CHUNK):  # read would keep back what comes before damage
                yield chunk
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise BadShard(f"{path} is damaged: {_first_line(error)}") from None


def _zstd(path: str) -> Iterator[bytes]:
    """zstandard's own reader takes the end of half a file for the end of the data."""
    make, failed = _zstd_library(path)
    with open(path, "rb") as file:
        frame = None
        while data := file.read(_CHUNK):
            while data:
                frame = frame or make()
                try:
                    yield frame.decompress(data)
                except failed as error:
                    raise ValueError(str(error)) from None
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("it ends in the middle of a Zstandard frame")


def _zstd_library(path: str) -> tuple[Any, type[Exception]]:
    """(makes a decompressor of one frame, what it raises): the standard library's from Python 3.14 on."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]

        return zstd.ZstdDecompressor, zstd.ZstdError
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path} needs a package: pip install 'tpu-train[data]'") from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


def _parquet(path: str, kind: Kind) -> Iterator[Raw]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} needs a package: pip install 'tpu-train[data]'") from None
    columns = [key for key in (kind.prompt_key, kind.text_key) if key]
    number, count = 0, None
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            count = file.metadata.num_rows
            missing = [key for key in columns if key not in file.schema_arrow.names]
            if missing:
                raise UserError(
                    f"{path} has the columns {', '.join(file.schema_arrow.names)}, not {missing[0]!r}; "
                    "set data.text_key (and data.prompt_key)"
                )
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield Raw(f"{path}, row {number}", row, True)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        lost = None if count is None else count - number
        raise BadShard(f"{path} is damaged: {_first_line(error)}", lost) from None


def _array_records(path: str) -> Iterator[Raw]:
    try:
        from grain.sources import ArrayRecordDataSource
    except ImportError:
        raise UserError("data.source=array_record needs a package: pip install array_record") from None
    number, count = 0, None
    try:
        records = ArrayRecordDataSource([path])
        count = len(records)
        for number in range(count):
            yield Raw(f"record {number} of {path}", records[number], True)
    except Exception as error:  # the reader raises several kinds, RuntimeError among them
        lost = None if count is None else count - number
        raise BadShard(f"{path} is damaged: {_first_line(error)}", lost) from None


def piece_size(seq_len: int) -> int:
    """Bytes that a piece of a text file has at least."""
    return max(PIECE_BYTES, 16 * seq_len)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
