"""The token cache: every shard is tokenized once, into a folder, and read as memory-mapped tokens from then on.

FOLDER/<recipe>/ holds, for each shard, `.bin` (a token file), `.documents` (int64 [n, 3]: first id, number of ids
without the end-of-document id, twice the number that is not trained on plus whether the document ends), of
conversations `.trained` (a byte for each id, 1 where it is trained on; elsewhere what is not comes first), `.blocks`
(uint32 CRCs of these, by 64 KiB) and, written last, `.json`: what the shard was, counts and sizes. A recipe is all that
decides what the tokens are, apart from the shards: the tokenizer, the keys, how text is cut. So a build that was killed
goes on with the first shard that has no `.json`, and new shards join those that are there.

Processes that share a folder build in turns, under a lock. Where a file system has none they would all do the same
work, and no harm: files appear by a rename, whole, and are the same whoever wrote them.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tpu_train.config import UserError
from tpu_train.data.shards import BadShard, Kind
from tpu_train.data.token_files import header, id_dtype
from tpu_train.data.tokenize import Tokenized, Tokenizing
from tpu_train.data.tokenizers import Tokenizer

VERSION = 1
BLOCK = 1 << 16  # bytes
_SAID = 10  # documents of a shard that are named
SAY_EVERY = 30.0  # seconds, in the middle of a shard


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a shard's `.json` holds."""

    version: int
    shard: str  # its name
    size: int  # bytes of the shard, and when it was changed: it is tokenized again where they differ
    changed: int
    documents: int
    tokens: int
    untrained: int  # ids not trained on
    longest: int  # ids of a document
    lost: int  # documents that could not be read
    damage: str  # why the rest of the shard is missing, or nothing
    bytes: dict[str, int]  # of the parts
    content: str  # a checksum of `.blocks`, and so of all


class Cache:
    """The folder of one recipe."""

    def __init__(self, folder: str, kind: Kind, tokenizer: Tokenizer, tokenizer_content: bytes, skip: bool):
        of_messages = (kind.messages_key, kind.template) if kind.messages_key else ()
        recipe = json.dumps([VERSION, *kind[:4], *of_messages, tokenizer.vocab_size, tokenizer.eod_id, skip])
        digest = hashlib.sha256(recipe.encode() + tokenizer_content).hexdigest()[:16]
        self.folder = Path(folder).expanduser().absolute() / digest
        self.kind, self.tokenizer, self._skip = kind, tokenizer, skip
        self._parts = ("bin", "documents", *(("trained",) if of_messages else ()), "blocks")

    def stem(self, shard: str) -> Path:
        """The path of a shard's files, without what tells them apart."""
        path = os.path.abspath(shard)
        name = re.sub(r"[^\w.-]", "_", os.path.basename(path))[:80]
        return self.folder / f"{name}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"

    def prepare(self, shards: list[str], workers: int) -> list[Manifest]:
        """Tokenizes the shards that are not there, or not whole; the manifests of all, in order."""
        found = [self._find(shard) for shard in shards]
        if None in found:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with _lock(self.folder / "lock") as alone:
                    for left in self.folder.glob("*.unfinished") if alone else ():
                        left.unlink()
                    self._build(shards, workers)
            except OSError as error:
                raise UserError(f"can't write the token cache {self.folder}: {error.strerror or error}") from None
            found = [self._find(shard) for shard in shards]
        missing = next((shard for shard, manifest in zip(shards, found, strict=True) if manifest is None), None)
        if missing is not None:
            raise UserError(f"{missing} changed while it was tokenized; start again")
        return [manifest for manifest in found if manifest is not None]

    def _find(self, shard: str, say: bool = False) -> Manifest | None:
        """The manifest of a shard that is there, whole as far as sizes tell, and as the shard is now."""
        stem = self.stem(shard)
        if not stem.with_name(stem.name + ".json").exists():
            return None
        try:
            manifest = read_manifest(stem)
            reason = None if _same(manifest, shard) else f"{shard} was changed since it was tokenized"
        except UserError as error:
            reason = str(error)
        if reason is None:
            return manifest
        if say:
            print(f"data: {reason}; tokenizing it again", flush=True)
        return None

    def _build(self, shards: list[str], workers: int) -> None:
        waiting = [shard for shard in shards if self._find(shard, say=True) is None]
        began, tokens = time.monotonic(), 0
        with Tokenizing(self.kind, self.tokenizer, workers) as tokenizing:
            for number, shard in enumerate(waiting, 1):
                manifest = self._build_one(shard, tokenizing)
                tokens += manifest.tokens
                lost = f", {manifest.lost} documents could not be read" if manifest.lost else ""
                speed = tokens / max(time.monotonic() - began, 1e-9)
                print(
                    f"data: tokenized {manifest.shard} ({number} of {len(waiting)}): {manifest.documents:,} documents, "
                    f"{manifest.tokens:,} tokens{lost}; {speed / 1e6:.2f}M tok/s",
                    flush=True,
                )

    def _build_one(self, shard: str, tokenizing: Tokenizing) -> Manifest:
        stem = self.stem(shard)
        status = os.stat(shard)
        with contextlib.ExitStack() as stack:
            parts = {name: stack.enter_context(_unfinished(stem, name).open("wb")) for name in self._parts}
            writer = _Writer(parts, self.tokenizer)
            lost, damage = 0, ""
            said = time.monotonic()
            try:
                for chunk in tokenizing.shard(shard):
                    for line in chunk.bad[: max(0, _SAID - lost)]:  # the summary counts the others
                        self._refuse_or_say(line)
                    lost += len(chunk.bad)
                    writer.add(chunk)
                    if time.monotonic() - said > SAY_EVERY:
                        said = time.monotonic()
                        print(f"data: tokenizing {shard}: {writer.tokens:,} tokens so far", flush=True)
            except BadShard as error:
                self._refuse_or_say(str(error))
                damage, lost = str(error), lost + (error.lost or 0)
            sizes, content = writer.finish()
        manifest = Manifest(
            version=VERSION,
            shard=os.path.basename(shard),
            size=status.st_size,
            changed=status.st_mtime_ns,
            documents=writer.documents,
            tokens=writer.tokens,
            untrained=writer.untrained,
            longest=writer.longest,
            lost=lost,
            damage=damage,
            bytes=sizes,
            content=content,
        )
        for name in self._parts:
            _unfinished(stem, name).replace(_path(stem, name))
        write_manifest(stem, manifest)
        return manifest

    def _refuse_or_say(self, line: str) -> None:
        if not self._skip:
            raise UserError(f"{line}; data.on_corrupt=skip would leave it out")
        print(f"data: {line}; left out", file=sys.stderr, flush=True)


class _Writer:
    """Writes the parts of one shard."""

    def __init__(self, parts: Mapping[str, IO[bytes]], tokenizer: Tokenizer):
        self._parts, self._tokenizer = parts, tokenizer
        self._dtype = id_dtype(tokenizer.vocab_size)
        self._sums = {name: BlockSums() for name in parts if name != "blocks"}
        self._parts["bin"].write(header(tokenizer.vocab_size, tokenizer.eod_id, 0))
        self.documents = self.tokens = self.untrained = self.longest = 0

    def add(self, chunk: Tokenized) -> None:
        count = len(chunk.lengths)
        if not count:
            return
        ends = chunk.flags & 1
        starts = self.tokens + np.concatenate([[0], np.cumsum(chunk.lengths + ends)])
        # An eod after each document that ends.
        ids = np.insert(chunk.ids, np.cumsum(chunk.lengths)[ends == 1], self._tokenizer.eod_id).astype(self._dtype)
        self._write("bin", ids.tobytes())
        documents = np.stack([starts[:-1], chunk.lengths, chunk.flags], axis=1).astype("<i8")
        self._write("documents", documents.tobytes())
        if "trained" in self._parts:
            self._write("trained", chunk.trained.tobytes())
        self.documents += count
        self.tokens += len(ids)
        self.untrained += int((chunk.flags >> 1).sum())
        self.longest = max(self.longest, int(chunk.lengths.max()))

    def _write(self, part: str, data: bytes) -> None:
        self._parts[part].write(data)
        self._sums[part].add(data)

    def finish(self) -> tuple[dict[str, int], str]:
        """(bytes of the parts, the checksum of all)."""
        blocks = np.concatenate([sums.finish() for sums in self._sums.values()]).tobytes()
        self._parts["blocks"].write(blocks)
        self._parts["bin"].seek(0)
        self._parts["bin"].write(header(self._tokenizer.vocab_size, self._tokenizer.eod_id, self.tokens))
        for file in self._parts.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self._parts.items()}
        return sizes, hashlib.sha256(blocks).hexdigest()


class BlockSums:
    """CRCs of the blocks of what is written piece by piece."""

    def __init__(self) -> None:
        self._rest = b""
        self._sums: list[np.ndarray] = []

    def add(self, data: bytes) -> None:
        data = self._rest + data
        stop = len(data) - len(data) % BLOCK
        self._sums.append(block_sums(data[:stop]))
        self._rest = data[stop:]

    def finish(self) -> np.ndarray:
        return np.concatenate([*self._sums, block_sums(self._rest)])


def block_sums(data: bytes | memoryview) -> np.ndarray:
    """uint32: the CRC of each block of `data`, of which the last may be short."""
    return np.array([zlib.crc32(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)], "<u4")


def write_manifest(stem: Path, manifest: Manifest) -> None:
    """Writes a shard's `.json`, by a rename; with it the shard counts as tokenized."""
    values = dataclasses.asdict(manifest)
    unfinished = _unfinished(stem, "json")
    unfinished.write_text(json.dumps({**values, "sum": _sum(values)}, indent=1))
    unfinished.replace(_path(stem, "json"))


def read_manifest(stem: Path) -> Manifest:
    """A shard's manifest, checked, as are the sizes of its files and `.blocks`. Raises UserError if one is damaged."""
    try:
        values: dict[str, Any] = json.loads(_path(stem, "json").read_text())
        if values.pop("sum") != _sum(values):
            raise ValueError
        manifest = Manifest(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{_path(stem, 'json')} is damaged") from None
    for name, size in manifest.bytes.items():
        path = _path(stem, name)
        if not path.exists():
            raise UserError(f"{path} is missing")
        if path.stat().st_size != size:
            raise UserError(f"{path} has {path.stat().st_size} bytes of {size}")
    if hashlib.sha256(_path(stem, "blocks").read_bytes()).hexdigest() != manifest.content:
        raise UserError(f"{_path(stem, 'blocks')} is damaged")
    return manifest


def _path(stem: Path, part: str) -> Path:
    return stem.with_name(f"{stem.name}.{part}")


def _sum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _same(manifest: Manifest, shard: str) -> bool:
    status = os.stat(shard)
    return (manifest.size, manifest.changed) == (status.st_size, status.st_mtime_ns)


def _unfinished(stem: Path, part: str) -> Path:
    """Where this process writes a part; another that does the same work, where there are no locks, writes elsewhere."""
    return _path(stem, f"{part}.{socket.gethostname()}-{os.getpid()}.unfinished")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Held by one process at a time, and let go of when that ends, however it does; False where there are no locks."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            print(f"data: waiting for another process to tokenize into {path.parent}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone
