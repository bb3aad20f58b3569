"""Token arrays on disk, memory-mapped: `.bin` with a header, and plain 1-D integer `.npy`.

A `.bin` is 48 little-endian bytes (`_HEADER`), then the ids as uint16 (vocab_size up to 65536) or uint32. The header
says how many ids follow, so half a file is noticed, and which vocabulary they belong to, so a model that is too
small is noticed. A `.npy` says neither, and has no end-of-document id.
"""

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from tpu_train.config import UserError

_MAGIC = b"TPUTOKEN"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQqQ8x")  # magic, version, bytes per id, vocab size, eod id or -1, count
HEADER_BYTES = _HEADER.size
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_CHUNK = 1 << 22  # ids per pass over an array


@dataclasses.dataclass(frozen=True)
class TokenFile:
    path: str
    ids: np.ndarray  # memory-mapped, 1-D, any integer dtype
    vocab_size: int | None  # None: the file doesn't say
    eod_id: int | None

    def __reduce__(self) -> tuple[Any, ...]:
        return read_tokens, (self.path,)  # to a worker go no tokens, but where they are


def write_tokens(path: str | os.PathLike[str], array: np.ndarray, vocab_size: int, eod_id: int | None = None) -> None:
    """Writes the 1-D integer `array` as a `.bin`; ids outside [0, vocab_size) raise UserError, nothing is written."""
    path = Path(path)
    array = np.asarray(array)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"tokens for {path} are {array.dtype} of shape {array.shape}; they must be 1-D integers")
    if path.suffix != ".bin":
        raise UserError(f"token file {str(path)!r} must end in .bin")
    if not 0 < vocab_size <= 1 << 31:
        raise UserError(f"vocab_size={vocab_size} for {path}; ids are held as int32, so it must lie in [1, 2**31]")
    if eod_id is not None and not 0 <= eod_id < vocab_size:
        raise UserError(f"eod_id={eod_id} for {path} is outside [0, {vocab_size})")
    for start in range(0, len(array), _CHUNK):
        check_ids(array[start : start + _CHUNK], vocab_size, f"the tokens for {path}")
    dtype = id_dtype(vocab_size)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(header(vocab_size, eod_id, len(array)))
        for start in range(0, len(array), _CHUNK):
            file.write(array[start : start + _CHUNK].astype(dtype).tobytes())
    unfinished.replace(path)


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """How ids are written."""
    return _DTYPES[2 if vocab_size <= 1 << 16 else 4]


def header(vocab_size: int, eod_id: int | None, count: int) -> bytes:
    """The first bytes of a `.bin` of `count` ids."""
    eod = -1 if eod_id is None else eod_id
    return _HEADER.pack(_MAGIC, _VERSION, id_dtype(vocab_size).itemsize, vocab_size, eod, count)


def read_tokens(path: str | os.PathLike[str]) -> TokenFile:
    """Opens a `.bin` written by `write_tokens` or a 1-D integer `.npy`; reads only the header."""
    path = Path(path)
    if path.suffix == ".npy":
        return _read_npy(path)
    if path.suffix != ".bin":
        raise UserError(f"token file {str(path)!r} must be a .npy or a .bin of write_tokens")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or not head.startswith(_MAGIC):
        raise UserError(
            f"{path} is not a token file (no {_MAGIC.decode()} header); write it with write_tokens, or as .npy"
        )
    _, version, itemsize, vocab_size, eod, count = _HEADER.unpack(head)
    if version != _VERSION or itemsize not in _DTYPES:
        raise UserError(f"{path} is a token file of version {version}; this program reads version {_VERSION}")
    if size != HEADER_BYTES + count * itemsize:
        raise UserError(f"{path} has {size} bytes, its header says {HEADER_BYTES + count * itemsize}; write it again")
    ids: np.ndarray = np.zeros(0, _DTYPES[itemsize])
    if count:
        ids = np.memmap(path, _DTYPES[itemsize], "r", offset=HEADER_BYTES, shape=(count,))
    return TokenFile(str(path), ids, vocab_size, None if eod < 0 else eod)


def _read_npy(path: Path) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{path} is not a .npy array: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(f"{path} holds {array.dtype} of shape {array.shape}; tokens must be a 1-D integer array")
    return TokenFile(str(path), array, None, None)


def check_ids(ids: np.ndarray, vocab_size: int, where: str) -> None:
    """Raises UserError if an id lies outside [0, vocab_size). Looks at the ids before any cast, so none can wrap."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise UserError(
            f"id {int(ids[at])} in {where} is outside [0, vocab_size={vocab_size}); "
            "set model.vocab_size to that of the tokenizer that made it"
        )
