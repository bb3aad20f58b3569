"""What makes a checkpoint good: every file it was saved with, of the size and checksum that it had then.

manifest.json is written once all other files are, before the folder is renamed to its step, so a folder of that name
without one is torn or from before manifests. CRC-32 finds what disks, copies and edits do to files; it is no defence
against somebody who writes a new manifest too.
"""

import json
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tpu_train import paths
from tpu_train.config import UserError

PARTS = ("state", "data", "config")
FILE_NAME = "manifest.json"
FORMAT = 2  # in Orbax's metadata too; 1 had no manifest
_CHUNK = 1 << 22  # bytes


class Damaged(Exception):
    """A checkpoint is not what was saved; says which file and how."""


def write(folder: Path, validation_loss: float | None) -> None:
    """Writes FOLDER/manifest.json over all files that are there, to disk and not only to its cache."""
    files = {name: [size, checksum] for name, size, checksum in map(_measure(folder), sorted(_names(folder)))}
    content = {"format": FORMAT, "validation_loss": validation_loss, "files": files}
    paths.write_whole(folder / FILE_NAME, json.dumps(content | {"checksum": _checksum(content)}).encode())


def read(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint whose files have the right names and sizes; None if it is older than manifests.

    Raises Damaged where that is not so, UserError if a newer version of this program wrote it.
    """
    missing = [part for part in PARTS if not (folder / part).is_dir()]
    if missing:
        raise Damaged(f"it lacks {', '.join(missing)}")
    if not (folder / FILE_NAME).exists():
        if _has_a_format(folder):
            raise Damaged(f"{FILE_NAME} is missing")
        return None
    try:
        manifest = json.loads((folder / FILE_NAME).read_bytes())
        if manifest.pop("checksum") != _checksum(manifest):
            raise Damaged(f"{FILE_NAME} has another checksum than was saved")
        version, files = manifest["format"], manifest["files"]
        sizes = {name: size for name, (size, _) in files.items()}
    except OSError as error:
        raise Damaged(f"{FILE_NAME} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{FILE_NAME} is no manifest") from None
    if version != FORMAT:
        raise UserError(f"{folder} is of format {version}, this version reads formats up to {FORMAT}; take a newer one")
    for name, size in sizes.items():
        try:
            there = paths.size_of(folder / name)
        except (OSError, ValueError):
            raise Damaged(f"{name} is missing") from None
        if there != size:
            raise Damaged(f"{name} has {there} bytes, {size} were saved")
    return manifest


def check(folder: Path, process_index: int = 0, process_count: int = 1) -> bool:
    """Reads this process's share of the files; returns whether there is a manifest to hold them to.

    Raises Damaged for the first that is not as saved. Every n-th file, by size, is one process's.
    """
    manifest = read(folder)
    if manifest is None:
        return False
    by_size = sorted(manifest["files"], key=lambda name: (-manifest["files"][name][0], name))
    mine = by_size[process_index::process_count]
    with ThreadPoolExecutor(8) as pool:
        for name, _, checksum in pool.map(_measure(folder), mine):
            if checksum != manifest["files"][name][1]:
                raise Damaged(f"{name} has another checksum than was saved")
    return True


def _measure(folder: Path) -> Any:
    """name -> (name, size, checksum) of a file in `folder`."""

    def measure(name: str) -> tuple[str, int, int]:
        size = checksum = 0
        try:
            with (folder / name).open("rb") as file:
                while chunk := file.read(_CHUNK):
                    size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
        except OSError as error:
            raise Damaged(f"{name} can't be read: {error.strerror}") from error
        return name, size, checksum

    return measure


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _has_a_format(folder: Path) -> bool:
    """Whether it was saved with a manifest."""
    try:
        return bool(json.loads((folder / "_CHECKPOINT_METADATA").read_bytes()).get("custom_metadata"))
    except (OSError, ValueError, AttributeError, RecursionError):
        raise Damaged("_CHECKPOINT_METADATA can't be read") from None


def _names(folder: Path) -> Iterator[str]:
    for path in paths.files_in(folder):
        if path.name != FILE_NAME:
            yield path.relative_to(folder).as_posix()
