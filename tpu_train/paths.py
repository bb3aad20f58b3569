"""Where a run's files are: a folder, or gs://BUCKET/... through etils.epath and gcsfs (pip install 'tpu-train[gcs]').

A bucket holds objects: it knows no folders without one, no append, no rename of many at once. So a file that grows is
written anew, whole, and not for each line: see `Appending`. What else differs is asked with `is_remote`.
"""

import contextlib
import importlib.util
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpu_train.config import UserError

_UPLOAD_EVERY = 10.0  # seconds


def at(where: str | Path) -> Any:
    """The folder `where`, as a Path or, of a bucket, what acts like one. Raises UserError for any other kind."""
    if not isinstance(where, str) or "://" not in where:
        return Path(where) if isinstance(where, str) else where
    if not where.startswith("gs://"):
        raise UserError(f"{where} is neither a folder of this machine nor gs://BUCKET/FOLDER")
    if importlib.util.find_spec("gcsfs") is None:
        raise UserError(f"{where} needs a package: pip install 'tpu-train[gcs]'")
    import fsspec
    from etils import epath

    # Lists that gcsfs remembers lack what TensorStore and other processes write: a manifest would leave it out.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return epath.Path(where.rstrip("/"))


def is_remote(path: Any) -> bool:
    """Whether it is in a bucket."""
    return "://" in os.fspath(path)


def absolute(path: Any) -> Any:
    """Of a folder of this machine, its path from the root."""
    return path if is_remote(path) else path.absolute()


def remove_folder(folder: Any) -> None:
    """With all in it; what can't be removed stays."""
    if not is_remote(folder):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(Exception):  # gcsfs and aiohttp have kinds of errors of their own
        folder.rmtree(missing_ok=True)


def size_of(file: Any) -> int:
    """In bytes. Raises OSError if it is not there."""
    found = file.stat()
    return found.length if is_remote(file) else found.st_size


def files_in(folder: Any) -> Iterator[Any]:
    """All files below a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from files_in(path)
        else:
            yield path


def write_whole(path: Any, content: bytes) -> None:
    """Writes a file so that it is there whole or not at all, and outlives a loss of power."""
    if is_remote(path):  # an object appears when all of it has been sent
        path.write_bytes(content)
        return
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def open_to_append(path: Any) -> Any:
    """A binary file to append to; what it takes is on its way to the disk, or to the bucket within 10 s."""
    return Appending(path) if is_remote(path) else path.open("ab", buffering=0)


class Appending:
    """An object of a bucket that grows: all of it is sent every 10 s, by `flush` and by `close`.

    A kill loses the lines since then; `flush` beside a checkpoint keeps those that no later start would write again.
    """

    def __init__(self, path: Any):
        self.name, self._path = str(path), path
        self._content = path.read_bytes() if path.exists() else b""
        self._sent, self._sent_at = len(self._content), time.monotonic()

    def write(self, data: bytes) -> int:
        """Takes all of it; or raises OSError where it was to be sent and can't be, and takes nothing."""
        before = len(self._content)
        self._content += data
        if time.monotonic() - self._sent_at >= _UPLOAD_EVERY:
            try:
                self.flush()
            except OSError:
                self._content = self._content[:before]
                raise
        return len(data)

    def flush(self) -> None:
        self._sent_at = time.monotonic()
        if self._sent == len(self._content):
            return
        try:
            self._path.write_bytes(self._content)
        except Exception as error:
            raise _as_os_error(error) from error
        self._sent = len(self._content)

    def close(self) -> None:
        self.flush()


def _as_os_error(error: Exception) -> OSError:
    """gcsfs and aiohttp have kinds of errors of their own."""
    return error if isinstance(error, OSError) else OSError(5, f"the bucket refused: {error}")
