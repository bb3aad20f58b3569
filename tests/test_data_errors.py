"""Every bad input is one UserError that says what is wrong and what would be right."""

import re
import struct

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from tpu_train.config import DataConfig, UserError
from tpu_train.data import read_tokens, train_batches, validation_batches, write_tokens


def config_for(source, *paths, **fields):
    return DataConfig(source=source, paths=tuple(map(str, paths)), **{"seq_len": 8, "batch_size": 2, **fields})


def read(config, vocab_size=256, steps=0, **kwargs):
    batches = train_batches(config, vocab_size=vocab_size, **kwargs)
    try:
        for _ in range(steps):
            next(batches)
    finally:
        batches.close()


def fails(message, config, **kwargs):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        read(config, **kwargs)
    assert "\n" not in str(caught.value)


def write_texts(tmp_path, *texts):
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    return config_for("text", tmp_path / "*.txt")


def write_lines(tmp_path, *lines):
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines))
    return config_for("jsonl", tmp_path / "a.jsonl")


def test_paths_that_match_nothing(tmp_path):
    fails(f"no file matches '{tmp_path}/*.txt'", config_for("text", tmp_path / "*.txt"))
    fails("it is a directory, write", config_for("text", tmp_path))


def test_empty_files_only(tmp_path):
    fails("data.source=text holds no text", write_texts(tmp_path, "", ""))
    (tmp_path / "a.jsonl").write_text("\n \n")
    fails("data.source=jsonl holds no text", config_for("jsonl", tmp_path / "a.jsonl"))


def test_empty_texts_only_do_not_spin(tmp_path):
    config = write_lines(tmp_path, *['{"text": ""}'] * 5000)
    fails("the training documents hold no text; check data.paths and data.text_key", config)


def test_less_text_than_a_batch(tmp_path):
    fails(
        "training tokens, fewer than one batch of 2 x 8 = 16; lower data.batch_size", write_texts(tmp_path, "ab", "c")
    )


def test_a_single_short_document(tmp_path):
    fails("give at least 2 documents", write_texts(tmp_path, "abc"))
    config = write_lines(tmp_path, '{"text": "one line"}')
    fails("give at least 2 documents", config)
    with pytest.raises(UserError, match="at least 2 documents"):
        validation_batches(config, vocab_size=256)


def test_fewer_documents_than_rows(tmp_path):
    config = write_texts(tmp_path, *["some text that is long enough for a batch"] * 3)
    fails(
        "2 training documents, fewer than the 4 rows of a batch",
        DataConfig(**{**vars(config), "batch_size": 4, "packing": False}),
    )


def test_processes_that_do_not_divide_the_batch(tmp_path):
    config = write_texts(tmp_path, "a", "b")
    fails("data.batch_size=2 is not a multiple of the 3 processes", config, process_count=3)
    fails("process_index=2 is not one of the 2 processes", config, process_index=2, process_count=2)
    with pytest.raises(UserError, match="not a multiple of the 3 processes"):
        validation_batches(config, vocab_size=256, process_count=3)


@pytest.mark.parametrize("workers", [0, 1])
def test_invalid_utf8_names_the_file_even_when_read_later(tmp_path, workers):
    config = write_texts(tmp_path, *["x" * 2000] * 9)
    (tmp_path / "4.txt").write_bytes(b"abc\xff\xfe" * 400)
    config = DataConfig(**{**vars(config), "workers": workers})
    message = f"{tmp_path}/4.txt is not valid UTF-8 at byte 3; convert it to UTF-8"
    fails(message, config, steps=2000)


def test_bad_lines_of_json_name_file_and_line(tmp_path):
    good = '{"text": "good"}'
    where = f"{tmp_path}/a.jsonl:3"
    for bad, message in (
        ('{"text": ', "is not JSON"),
        ('{"body": "x"}', "has the keys body, not 'text'; set data.text_key"),
        ("[1]", "has a list, not 'text'"),
        ('{"text": 3}', "has no string under 'text'"),
        (b'{"text": "\xff"}', "is not valid UTF-8"),
        ('{"text": "\\ud800"}', "holds a lone surrogate"),
    ):
        fails(f"{where} {message}", write_lines(tmp_path, good, "", bad, *[good] * 10), steps=200)


def test_a_file_that_is_no_array_record(tmp_path):
    (tmp_path / "a").write_bytes(b"not records" * 50)
    fails("as ArrayRecord", config_for("array_record", tmp_path / "a"))


def test_a_record_that_is_not_text(tmp_path):
    writer = ArrayRecordWriter(str(tmp_path / "a"), "group_size:1")
    for _ in range(4):
        writer.write(b"\xff\xfe" * 50)
    writer.close()
    fails("is not valid UTF-8; records must be text", config_for("array_record", tmp_path / "a"))


def test_a_vocabulary_smaller_than_the_tokenizers(tmp_path):
    config = write_texts(tmp_path, "some text", "more text")
    fails("the tokenizer 'bytes' has 256 ids, more than model.vocab_size=255; set model", config, vocab_size=255)


def test_a_vocabulary_smaller_than_the_token_files(tmp_path):
    write_tokens(tmp_path / "a.bin", np.arange(50), 300)
    fails("was made with vocab_size=300, more than model.vocab_size=256", config_for("tokens", tmp_path / "a.bin"))


@pytest.mark.parametrize(("bad", "dtype"), [(-100, "int32"), (256, "uint16"), (2**32 + 1, "int64"), (2**63, "uint64")])
def test_ids_outside_the_vocabulary_name_id_and_file(tmp_path, bad, dtype):
    ids = np.ones(5000, dtype)
    ids[1234] = bad
    np.save(tmp_path / "a.npy", ids)
    message = f"id {bad} in {tmp_path}/a.npy is outside [0, vocab_size=256)"
    fails(message, config_for("tokens", tmp_path / "a.npy"), steps=400)
    with pytest.raises(UserError, match=f"id {bad} in"):
        write_tokens(tmp_path / "b.bin", ids, 256)
    assert not list(tmp_path.glob("b.bin*"))


def test_token_arrays_of_another_kind(tmp_path):
    for array in (np.ones(9), np.ones((3, 3), np.int32), np.array([True])):
        np.save(tmp_path / "a.npy", array)
        fails("must be a 1-D integer array", config_for("tokens", tmp_path / "a.npy"))
    (tmp_path / "b.npy").write_bytes(b"nonsense")
    fails("is not a .npy array", config_for("tokens", tmp_path / "b.npy"))
    (tmp_path / "c.txt").write_bytes(b"nonsense")
    fails("must be a .npy or a .bin", config_for("tokens", tmp_path / "c.txt"))
    np.save(tmp_path / "d.npy", np.ones(1, np.int32))
    fails("that is no label at all", config_for("tokens", tmp_path / "d.npy"))


def test_token_files_that_are_not_whole(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(np.arange(100, dtype=np.uint16).tobytes())
    fails("is not a token file (no TPUTOKEN header)", config_for("tokens", path))
    write_tokens(path, np.arange(100), 200)
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    fails("has 246 bytes, its header says 248; write it again", config_for("tokens", path))
    path.write_bytes(whole[:8] + struct.pack("<I", 7) + whole[12:])
    with pytest.raises(UserError, match="is a token file of version 7"):
        read_tokens(path)


def test_token_files_that_disagree_on_eod(tmp_path):
    write_tokens(tmp_path / "a.bin", np.arange(100), 200, 7)
    write_tokens(tmp_path / "b.bin", np.arange(100), 200)
    fails("disagree on the end-of-document id", config_for("tokens", tmp_path / "*.bin"))


def test_write_tokens_rejects_what_it_can_not_hold(tmp_path):
    for array, kwargs, message in (
        (np.ones((2, 2), int), {"vocab_size": 5}, "must be 1-D integers"),
        (np.ones(2), {"vocab_size": 5}, "must be 1-D integers"),
        (np.ones(2, int), {"vocab_size": 2**40}, "vocab_size="),
        (np.ones(2, int), {"vocab_size": 5, "eod_id": 5}, "eod_id=5"),
    ):
        with pytest.raises(UserError, match=message):
            write_tokens(tmp_path / "a.bin", array, **kwargs)
    with pytest.raises(UserError, match=r"must end in \.bin"):
        write_tokens(tmp_path / "a.tokens", np.ones(2, int), 5)
