"""The token cache: what it holds of every kind of shard, and that no kill, rival or flipped bit gets past it."""

import dataclasses
import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from tpu_train.config import DataConfig, UserError
from tpu_train.data import cache, read_tokens, train_batches
from tpu_train.data.opening import open_source

TEXTS = [f"document {i}: " + "naïve text\n" * (i % 7) for i in range(30)]


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def zst(data):
    """Two frames, as `cat a.zst b.zst` makes."""
    half = len(data) // 2
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:])


def write_parquet(path, texts, **options):
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(texts))), "text": texts}), path, **options)


def write_records(path, texts):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()


WRITERS = {
    "jsonl": lambda path, texts: path.write_bytes(lines(texts)),
    "jsonl.gz": lambda path, texts: path.write_bytes(gzip.compress(lines(texts))),
    "jsonl.zst": lambda path, texts: path.write_bytes(zst(lines(texts))),
    "parquet": lambda path, texts: write_parquet(path, texts, row_group_size=7),
    "array_record": write_records,
}


def config_for(folder, kind, **fields):
    fields = {"cache": str(folder / "cache"), "seq_len": 16, "batch_size": 2, **fields}
    return DataConfig(source=kind.split(".")[0], paths=(str(folder / f"*.{kind}"),), **fields)


def labels_of(source):
    return [source[i]["labels"].tolist() for i in range(len(source))]


WANTED = [[*text.encode(), 255] for text in TEXTS]


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_shard_gives_its_documents_in_order(tmp_path, kind, capsys):
    WRITERS[kind](tmp_path / f"a.{kind}", TEXTS[:20])
    WRITERS[kind](tmp_path / f"b.{kind}", TEXTS[20:])
    config = config_for(tmp_path, kind)
    source = open_source(config, 256)
    assert labels_of(source) == WANTED
    assert [source.size_of(i) for i in range(30)] == [len(labels) for labels in WANTED]
    assert capsys.readouterr().out.count("data: tokenized") == 2
    assert labels_of(open_source(config, 256)) == WANTED
    assert capsys.readouterr().out == ""
    batches = train_batches(config, vocab_size=256)
    assert next(batches)["weights"].all()
    batches.close()


@pytest.mark.parametrize("packed", [".txt", ".txt.gz", ".txt.zst"])
def test_text_files_are_cut_as_they_are_without_a_cache(tmp_path, packed):
    text = "".join(f"{i:09d} ü\n" for i in range(20_000))
    pack = {".txt": bytes, ".txt.gz": gzip.compress, ".txt.zst": zst}[packed]
    for name in "ab":
        (tmp_path / (name + packed)).write_bytes(pack(text.encode()))
    config = DataConfig(source="text", paths=(str(tmp_path / "*.t*"),), cache=str(tmp_path / "cache"), seq_len=16)
    cached = open_source(config, 256)
    found = labels_of(cached)
    assert bytes(itertools.chain(*found[: len(found) // 2])) == text.encode() + b"\xff"
    if packed == ".txt":
        assert found == labels_of(open_source(dataclasses.replace(config, cache=""), 256))
    else:
        with pytest.raises(UserError, match=r"can only be read from front to back; set data.cache"):
            open_source(dataclasses.replace(config, cache=""), 256)


def test_the_tokens_are_a_token_file(tmp_path):
    WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS)
    open_source(config_for(tmp_path, "jsonl"), 256)
    (path,) = (tmp_path / "cache").glob("*/*.bin")
    file = read_tokens(path)
    assert (file.vocab_size, file.eod_id, file.ids.tolist()) == (256, 255, [*itertools.chain(*WANTED)])


def test_another_key_or_tokenizer_has_a_folder_of_its_own_and_new_shards_join(tmp_path, capsys):
    WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS[:3])
    config = config_for(tmp_path, "jsonl")
    open_source(config, 256)
    WRITERS["jsonl"](tmp_path / "b.jsonl", TEXTS[3:6])
    capsys.readouterr()
    assert labels_of(open_source(config, 256)) == WANTED[:6]
    assert "tokenized b.jsonl (1 of 1)" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"has the keys text, not 'body'; set data.text_key"):
        open_source(dataclasses.replace(config, text_key="body"), 256)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS[10:14])
    assert labels_of(open_source(config, 256)) == WANTED[10:14] + WANTED[3:6]
    assert "a.jsonl was changed since it was tokenized; tokenizing it again" in capsys.readouterr().out


@pytest.mark.parametrize("part", ["bin", "documents", "blocks", "json"])
def test_a_part_that_is_cut_or_lost_is_named_and_made_again(tmp_path, part, capsys):
    WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS)
    config = config_for(tmp_path, "jsonl")
    open_source(config, 256)
    (path,) = (tmp_path / "cache").glob(f"*/*.{part}")
    whole = path.read_bytes()
    for damage in (lambda: path.write_bytes(whole[:-1]), path.unlink):
        damage()
        capsys.readouterr()
        assert labels_of(open_source(config, 256)) == WANTED
        said = capsys.readouterr().out
        assert "tokenized a.jsonl" in said
        assert str(path) in said or (part == "json" and not path.exists()) or "json" in part
        assert path.read_bytes() == whole


@pytest.mark.parametrize("part", ["bin", "documents", "blocks", "json"])
def test_no_flipped_bit_is_trained_on(tmp_path, part, capsys):
    WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS)
    config = config_for(tmp_path, "jsonl")
    open_source(config, 256)
    (path,) = (tmp_path / "cache").glob(f"*/*.{part}")
    whole = bytearray(path.read_bytes())
    random = np.random.default_rng(0)
    for _ in range(30):
        at = int(random.integers(48 if part == "bin" else 0, len(whole)))
        flipped = whole.copy()
        flipped[at] ^= 1 << int(random.integers(8))
        path.write_bytes(flipped)
        capsys.readouterr()
        try:
            found = labels_of(open_source(config, 256))
        except UserError as error:
            assert f"{path} is damaged near byte" in str(error)  # noqa: PT017
            found = labels_of(open_source(config, 256))
        assert "tokenized a.jsonl (1 of 1)" in capsys.readouterr().out
        assert found == WANTED
        assert path.read_bytes() == whole


BUILD = """
import sys
from tpu_train.config import DataConfig
from tpu_train.data.opening import open_source
open_source(DataConfig(source="jsonl", paths=(sys.argv[1],), cache=sys.argv[2]), 256)
"""


def build(tmp_path):
    command = [sys.executable, "-c", BUILD, str(tmp_path / "*.jsonl"), str(tmp_path / "cache")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_build_that_is_killed_goes_on_where_it_was_and_rivals_share_one(tmp_path, capsys):
    texts = ["some text of a document, long enough to take a moment\n" * 40] * 400
    for i in range(12):
        WRITERS["jsonl"](tmp_path / f"{i:02}.jsonl", [f"{i}", *texts])
    first = build(tmp_path)
    while "(2 of 12)" not in first.stdout.readline():
        pass
    first.send_signal(signal.SIGKILL)
    first.communicate()
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("*/*.json")}
    assert 2 <= len(done) < 12
    rivals = [build(tmp_path) for _ in range(2)]
    said = [rival.communicate(timeout=240)[0] for rival in rivals]
    assert [rival.returncode for rival in rivals] == [0, 0]
    assert sum(text.count("data: tokenized") for text in said) == 12 - len(done)
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())
    assert not list((tmp_path / "cache").glob("*/*.unfinished"))
    source = open_source(config_for(tmp_path, "jsonl"), 256)
    assert capsys.readouterr().out == ""
    assert len(source) == 12 * 401
    assert [bytes(source[401 * i]["labels"][:-1].astype(np.uint8)).decode() for i in range(12)] == [
        *map(str, range(12))
    ]


@pytest.mark.slow
def test_workers_make_the_same_tokens(tmp_path):
    for i in range(3):
        WRITERS["jsonl.gz"](tmp_path / f"{i}.jsonl.gz", TEXTS * 300)
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(lines(TEXTS * 300))[:-500])
    config = config_for(tmp_path, "jsonl.gz", workers=2, on_corrupt="skip")
    open_source(config, 256)
    files = {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*/*.[bd]*")}
    open_source(dataclasses.replace(config, workers=0, cache=str(tmp_path / "other")), 256)
    assert {path.name: path.read_bytes() for path in (tmp_path / "other").glob("*/*.[bd]*")} == files
    assert len(files) == 12


def test_a_cache_that_can_not_be_written_is_one_line(tmp_path):
    WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(UserError, match=r"can't write the token cache .*: (Not a directory|File exists)"):
        open_source(config_for(tmp_path, "jsonl"), 256)
    if Path("/dev/full").exists():
        config = config_for(tmp_path, "jsonl", cache=str(tmp_path / "full"))
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))\n"
        limit += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        command = [sys.executable, "-c", limit + BUILD, config.paths[0], config.cache]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert "can't write the token cache" in done.stderr.splitlines()[-1]
        assert "File too large" in done.stderr.splitlines()[-1]
        assert labels_of(open_source(config, 256)) == WANTED


def damaged(kind, folder):
    """A shard of many documents, damaged at the end; gives its path."""
    texts = [f"{i} " + str(np.random.default_rng(i).integers(1 << 60)) for i in range(3000)]
    path = folder / f"b.{kind}"
    WRITERS[kind](path, texts)
    data = bytearray(path.read_bytes())
    if kind == "parquet":
        data[len(data) // 2] ^= 0xFF
    elif kind == "jsonl":
        data[-20:-10] = b"\xff" * 10
    else:
        data = data[: len(data) * 3 // 4]
    path.write_bytes(data)
    return path


def write_checked_parquet(path, texts):
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(
        table, path, row_group_size=500, write_page_checksum=True, compression="none", use_dictionary=False
    )


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "array_record"])
def test_a_damaged_shard_stops_the_run_or_is_named_and_left_out(tmp_path, kind, monkeypatch, capsys):
    monkeypatch.setitem(WRITERS, "parquet", write_checked_parquet)
    WRITERS[kind](tmp_path / f"a.{kind}", TEXTS)
    bad = damaged(kind, tmp_path)
    WRITERS[kind](tmp_path / f"c.{kind}", TEXTS[:5])
    config = config_for(tmp_path, kind)
    with pytest.raises(UserError, match=r"data.on_corrupt=skip would leave it out") as refused:
        open_source(config, 256)
    assert str(bad) in str(refused.value)
    assert "\n" not in str(refused.value)
    source = open_source(dataclasses.replace(config, on_corrupt="skip"), 256)
    said = capsys.readouterr()
    assert str(bad) in said.err
    assert (f"{source.manifests[1].lost} documents could not be read" in said.out) == (kind in ("jsonl", "parquet"))
    found = labels_of(source)
    assert found[:30] == WANTED
    assert found[-5:] == WANTED[:5]
    kept = found[30:-5]
    assert all(bytes(labels).decode(errors="replace").startswith(f"{i} ") for i, labels in enumerate(kept))
    lost = source.manifests[1].lost
    if kind == "jsonl":
        assert (len(kept), lost) == (2999, 1)
    elif kind == "parquet":
        assert len(kept) + lost == 3000
        assert 0 < len(kept) < 3000
    elif kind == "array_record":  # its index is at the end
        assert len(kept) == 0
    else:
        assert 0 < len(kept) < 3000


def test_what_only_a_package_reads_is_named_with_its_extra(tmp_path, monkeypatch):
    for kind in ("jsonl.zst", "parquet"):
        WRITERS[kind](tmp_path / f"a.{kind}", TEXTS)
    for name in ("zstandard", "compression", "compression.zstd", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for kind in ("jsonl.zst", "parquet"):
        with pytest.raises(UserError, match=r"needs a package: pip install 'tpu-train\[data\]'"):
            open_source(config_for(tmp_path, kind), 256)


def test_without_locks_two_builds_at_once_make_one_cache(tmp_path, monkeypatch):
    WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS)

    def refuse(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(cache.fcntl, "flock", refuse)
    config = config_for(tmp_path, "jsonl")
    before = cache._Writer.finish

    def another_first(self):
        monkeypatch.setattr(cache._Writer, "finish", before)
        monkeypatch.setattr(cache.os, "getpid", lambda: 1)
        assert labels_of(open_source(config, 256)) == WANTED
        monkeypatch.undo()
        return before(self)

    monkeypatch.setattr(cache._Writer, "finish", another_first)
    assert labels_of(open_source(config, 256)) == WANTED
    assert not list((tmp_path / "cache").glob("*/*.unfinished"))


def test_a_large_shard_says_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cache, "SAY_EVERY", 0.0)
    WRITERS["jsonl"](tmp_path / "a.jsonl", ["text " * 40_000] * 9)
    open_source(config_for(tmp_path, "jsonl"), 256)
    said = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"data: tokenizing {tmp_path}/a.jsonl: [\d,]+ tokens so far", said[0])
    assert said[-1].startswith("data: tokenized a.jsonl (1 of 1): 9 documents, 1,800,009 tokens")


def test_a_column_that_is_not_there_is_named(tmp_path):
    WRITERS["parquet"](tmp_path / "a.parquet", TEXTS)
    with pytest.raises(UserError, match=r"has the columns id, text, not 'body'; set data.text_key"):
        open_source(config_for(tmp_path, "parquet", text_key="body"), 256)


def test_a_cache_with_other_documents_is_other_data(tmp_path):
    for name in "ab":
        WRITERS["jsonl"](tmp_path / f"{name}.jsonl", TEXTS)
    batches = train_batches(config_for(tmp_path, "jsonl"), vocab_size=256)
    position = batches.get_state()
    batches.close()
    WRITERS["jsonl"](tmp_path / "b.jsonl", [text.replace("a", "e") for text in TEXTS])
    other = train_batches(config_for(tmp_path, "jsonl"), vocab_size=256)
    with pytest.raises(UserError, match="data fingerprint"):
        other.set_state(position)
    other.close()
    os.utime(tmp_path / "a.jsonl", (time.time() + 9, time.time() + 9))
    WRITERS["jsonl"](tmp_path / "b.jsonl", TEXTS)
    again = train_batches(config_for(tmp_path, "jsonl"), vocab_size=256)
    again.set_state(position)
    again.close()
