"""The texts of files: whole files, lines of JSON, records. Each can be read in any order.

A file longer than 64 KiB (or 16 bytes per token of seq_len, if that is more) is cut into pieces of about that size, at
a line's end where there is one within 4 KiB. A piece counts as a document, but only the last of a file ends it. A
single file is cut finely enough for validation_fraction. Nothing is ever replaced: invalid UTF-8 is an error.
"""

import bisect
import glob
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpu_train.config import UserError
from tpu_train.data.records import BadDocument, Fields, Text, parse_line

PIECE_BYTES = 1 << 16
SEARCH_BYTES = 1 << 12  # how far a cut moves to reach a line's end
_SKIPPED_DIRS = {"test", "tests", "idlelib", "lib2to3", "ensurepip", "site-packages", "dist-packages", "turtledemo"}


_NAMED = 20  # documents left out that a process names
_said: set[str] = set()


def skip_or_raise(error: BadDocument, skip: bool) -> None:
    """Raises `error`; or, for data.on_corrupt=skip, says what is left out: once each, and not of more than a few."""
    if not skip:
        raise error
    if str(error) not in _said and len(_said) <= _NAMED:
        _said.add(str(error))
        more = "; more are counted, but not named" if len(_said) > _NAMED else ""
        print(f"data: {error}; left out{more}", file=sys.stderr, flush=True)


class Texts(Protocol):
    """What `TextSource` reads."""

    size: int
    contiguous: bool

    def __len__(self) -> int: ...
    def read(self, index: int) -> Text:
        """Document `index`. Raises BadDocument where it is none."""

    def size_of(self, index: int) -> int:
        """About how many bytes document `index` has, 1 or more; 1 for all where it isn't known without reading."""

    def where(self, index: int) -> str:
        """What to call document `index` in a message."""


def stdlib_files() -> list[str]:
    """The standard library's own .py files that are valid UTF-8, by relative path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _SKIPPED_DIRS]
        files += [Path(directory, name).relative_to(root) for name in names if name.endswith(".py")]
    return [str(root / file) for file in sorted(files) if _is_utf8((root / file).read_bytes())]


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


class TextFiles:
    def __init__(self, paths: list[str], seq_len: int, validation_fraction: float):
        sizes = {path: os.path.getsize(path) for path in paths}
        self._sizes = {path: size for path, size in sizes.items() if size}
        self._paths = list(self._sizes)
        self.size = sum(self._sizes.values())
        self.contiguous = len(self._paths) == 1
        self._piece = max(PIECE_BYTES, 16 * seq_len)
        if self.contiguous:
            self._piece = max(16, min(self._piece, int(self.size * validation_fraction)))
        # The last piece of a file takes the rest too, so none is tiny.
        pieces = [max(1, size // self._piece) for size in self._sizes.values()]
        self._ends = list(itertools.accumulate(pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _locate(self, index: int) -> tuple[str, int, bool]:
        """(path, which piece of it, whether it is the file's last)."""
        at = bisect.bisect_right(self._ends, index)
        first = self._ends[at - 1] if at else 0
        return self._paths[at], index - first, index + 1 == self._ends[at]

    def size_of(self, index: int) -> int:
        path, piece, last = self._locate(index)
        return self._sizes[path] - piece * self._piece if last else self._piece

    def where(self, index: int) -> str:
        return self._locate(index)[0]

    def read(self, index: int) -> Text:
        path, piece, last = self._locate(index)
        with open(path, "rb") as file:
            start = self._cut(file, piece)
            stop = self._sizes[path] if last else self._cut(file, piece + 1)
            file.seek(start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise UserError(f"{path} became shorter while it was read; start again")
        try:
            return Text(data.decode("utf-8"), last)
        except UnicodeDecodeError as error:
            raise BadDocument(f"{path} is not valid UTF-8 at byte {start + error.start}; convert it to UTF-8") from None

    def _cut(self, file: Any, piece: int) -> int:
        """The byte that piece number `piece` starts at: after a line's end, or else between two characters."""
        if piece == 0:
            return 0
        at = piece * self._piece
        file.seek(at)
        ahead = file.read(min(SEARCH_BYTES, self._piece // 2))
        newline = ahead.find(b"\n")
        if newline >= 0:
            return at + newline + 1
        return at + next((i for i, byte in enumerate(ahead[:4]) if byte & 0xC0 != 0x80), 0)


class JsonLines:
    """Random access through the byte offset of every line that isn't blank: 8 bytes of memory a line."""

    contiguous = False

    def __init__(self, paths: list[str], fields: Fields):
        self._fields, self._paths = fields, paths
        self._offsets = [_line_offsets(path) for path in paths]
        self._ends = list(itertools.accumulate(len(offsets) for offsets in self._offsets))
        self.size = sum(os.path.getsize(path) for path in paths)

    def __len__(self) -> int:
        return self._ends[-1]

    def _locate(self, index: int) -> tuple[str, int]:
        at = bisect.bisect_right(self._ends, index)
        return self._paths[at], int(self._offsets[at][index - (self._ends[at - 1] if at else 0)])

    def size_of(self, index: int) -> int:
        at = bisect.bisect_right(self._ends, index)
        i = index - (self._ends[at - 1] if at else 0)
        offsets = self._offsets[at]
        return int((offsets[i + 1] if i + 1 < len(offsets) else os.path.getsize(self._paths[at])) - offsets[i])

    def where(self, index: int) -> str:
        path, offset = self._locate(index)
        with open(path, "rb") as file:
            line = 1 + sum(1 for _ in itertools.takewhile(lambda _: file.tell() <= offset, iter(file.readline, b"")))
        return f"{path}:{line}"

    def read(self, index: int) -> Text:
        path, offset = self._locate(index)
        with open(path, "rb") as file:
            file.seek(offset)
            line = file.readline()
        return parse_line(line, self._fields, lambda: self.where(index))


def _line_offsets(path: str) -> np.ndarray:
    offsets, at = [], 0
    with open(path, "rb") as file:
        for line in file:
            if not line.isspace():
                offsets.append(at)
            at += len(line)
    return np.asarray(offsets, np.int64)


class ArrayRecords:
    contiguous = False

    def __init__(self, paths: list[str]):
        try:
            from grain.sources import ArrayRecordDataSource

            self._records: Any = ArrayRecordDataSource(paths)
            self._length = len(self._records)
        except ImportError:
            raise UserError("data.source=array_record needs a package: pip install array_record") from None
        except Exception as error:  # the reader raises several kinds, RuntimeError among them
            reason = str(error).splitlines()[0]
            raise UserError(f"{names(paths)} can't be read as ArrayRecord: {reason}") from None
        self._name = names(paths)
        self.size = sum(os.path.getsize(path) for path in paths)

    def __len__(self) -> int:
        return self._length

    def size_of(self, index: int) -> int:
        return 1

    def where(self, index: int) -> str:
        return f"record {index} of {self._name}"

    def read(self, index: int) -> Text:
        try:
            return Text(self._records[index].decode("utf-8"))
        except UnicodeDecodeError:
            raise BadDocument(f"{self.where(index)} is not valid UTF-8; records must be text") from None


def expand(patterns: Iterable[str]) -> list[str]:
    """The files that the paths and globs match, sorted, each once. Raises UserError for one that matches none."""
    found: set[str] = set()
    for pattern in patterns:
        files = [path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path)]
        if not files:
            hint = f"; it is a directory, write {pattern.rstrip('/')}/*" if os.path.isdir(pattern) else ""
            raise UserError(f"data.paths: no file matches {pattern!r}{hint}")
        found.update(files)
    return sorted(found)


def names(paths: Iterable[str]) -> str:
    """The first few paths, for a message."""
    paths = list(paths)
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
