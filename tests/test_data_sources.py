"""What each source takes for a document, and the whole path from files to batches."""

import json
import pickle

import grain
import numpy as np
import pytest
import tokenizers
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_train.config import DataConfig
from tpu_train.data import load_tokenizer, read_tokens, train_batches, validation_batches, write_tokens
from tpu_train.data.opening import open_source
from tpu_train.data.sources import TokenSource
from tpu_train.data.texts import TextFiles, stdlib_files

TEXTS = [f"document {i}: " + "naïve text\n" * (i % 7) for i in range(30)]


def config_for(source, *paths, **fields):
    return DataConfig(source=source, paths=tuple(map(str, paths)), **{"seq_len": 16, "batch_size": 2, **fields})


def texts_of(config, vocab_size=256):
    """The documents of a source, decoded, after checking that tokens and labels are one id apart."""
    source = open_source(config, vocab_size)
    tokenizer = load_tokenizer(config.tokenizer)
    for i in range(len(source)):
        example = source[i]
        assert example["tokens"].dtype == example["labels"].dtype == np.int32
        assert example["tokens"][0] == example["labels"][-1] == tokenizer.eod_id
        assert (example["tokens"][1:] == example["labels"][:-1]).all()
    return [tokenizer.decode(source[i]["labels"]) for i in range(len(source))]


def test_text_files_are_documents_in_order_of_their_names(tmp_path):
    for i in (2, 0, 1):
        (tmp_path / f"{i}.txt").write_bytes(TEXTS[i].encode())
    (tmp_path / "empty.txt").write_bytes(b"")
    assert texts_of(config_for("text", tmp_path / "*.txt", tmp_path / "1.txt")) == TEXTS[:3]


def test_a_single_text_file_is_split_by_position(tmp_path):
    text = "".join(f"line {i}: façade\n" for i in range(2000))
    (tmp_path / "all.txt").write_bytes(text.encode())
    config = config_for("text", tmp_path / "all.txt", validation_fraction=0.1)
    held_out = np.concatenate([b["labels"][b["weights"] == 1] for b in validation_batches(config, vocab_size=256)])
    held_out = load_tokenizer("bytes").decode(held_out)
    assert text.endswith(held_out)
    assert 0.05 < len(held_out) / len(text) < 0.25
    source = open_source(config, 256)
    labels = np.concatenate([source[i]["labels"] for i in range(len(source))])
    assert labels.tolist() == [*text.encode(), 255]
    batches = train_batches(config, vocab_size=256)
    assert next(batches)["weights"].all()
    batches.close()


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("aé汉🙂\n"), min_size=40, max_size=3000), fraction=st.floats(0.001, 0.5))
def test_pieces_of_a_file_join_to_the_file(tmp_path_factory, text, fraction):
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    path.write_bytes(text.encode())
    files = TextFiles([str(path)], 16, fraction)
    pieces = [files.read(i) for i in range(len(files))]
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text for piece in pieces)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_long_files_are_cut_at_line_ends_and_only_the_last_piece_ends_the_document(tmp_path):
    lines = "".join(f"{i:09d}\n" for i in range(20_000))
    for name in "ab":
        (tmp_path / name).write_text(lines)
    source = open_source(config_for("text", tmp_path / "a", tmp_path / "b"), 256)
    assert len(source) == 6
    for i in range(6):
        assert source[i]["tokens"][0] == 255
        assert (source[i]["labels"][-1] == 255) == (i in (2, 5))
    assert bytes(np.concatenate([source[i]["labels"] for i in range(3)]).astype(np.uint8)[:-1]) == lines.encode()


def test_jsonl_lines_are_documents_and_blank_lines_are_not(tmp_path):
    lines = [json.dumps({"id": i, "body": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines[:20]) + "\n \n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[20:]), encoding="utf-8")
    assert texts_of(config_for("jsonl", tmp_path / "*.jsonl", text_key="body")) == TEXTS


def test_an_empty_text_is_an_end_of_document_alone(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    example = open_source(config_for("jsonl", tmp_path / "a.jsonl"), 256)[0]
    assert (example["tokens"].tolist(), example["labels"].tolist()) == ([255], [255])


def test_array_records_are_documents(tmp_path):
    path = tmp_path / "a.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    config = config_for("array_record", path)
    assert texts_of(config) == TEXTS
    assert len(pickle.loads(pickle.dumps(open_source(config, 256)))) == 30
    batches = train_batches(config, vocab_size=256)
    assert next(batches)["weights"].all()
    batches.close()


def test_hugging_face_tokenizer_feeds_the_pipeline(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i:02}.txt").write_bytes(text.encode())
    config = config_for("text", tmp_path / "*.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    assert texts_of(config, vocab_size=400) == TEXTS
    batches = train_batches(config, vocab_size=400)
    assert next(batches)["tokens"].max() < 400
    batches.close()


def test_the_standard_library_is_found_without_its_tests():
    files = stdlib_files()
    assert any(file.endswith("dataclasses.py") for file in files)
    assert not any("/test/" in file or "site-packages" in file for file in files)
    batch = next(iter(validation_batches(DataConfig(), vocab_size=256)))
    assert batch["tokens"].shape == (16, 256)


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
@pytest.mark.parametrize("eod", [None, 9])
def test_token_files_round_trip_and_split_at_eod(tmp_path, dtype, eod):
    ids = np.array([9, 1, 2, 9, 3, 9, 9, 4, 5], dtype)
    write_tokens(tmp_path / "a.bin", ids, 10, eod)
    file = read_tokens(tmp_path / "a.bin")
    assert (file.vocab_size, file.eod_id, file.ids.tolist()) == (10, eod, ids.tolist())
    source = TokenSource([file], 4, 10)
    pairs = [(source[i]["tokens"].tolist(), source[i]["labels"].tolist()) for i in range(len(source))]
    if eod is None:
        assert pairs == [([9, 1, 2, 9], [1, 2, 9, 3]), ([3, 9, 9, 4], [9, 9, 4, 5])]
    else:  # the last document has no eod in the array, so none is made up
        assert pairs == [([9, 1, 2], [1, 2, 9]), ([9, 3], [3, 9]), ([9, 4], [4, 5])]


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_npy_windows_make_every_token_but_the_first_a_label_once(tmp_path, dtype):
    ids = np.arange(1003, dtype=dtype)
    np.save(tmp_path / "a.npy", ids)
    config = config_for("tokens", tmp_path / "a.npy", batch_size=4)
    source = open_source(config, 1003)
    assert np.concatenate([source[i]["labels"] for i in range(len(source))]).tolist() == list(range(1, 1003))
    assert all((source[i]["tokens"] + 1 == source[i]["labels"]).all() for i in range(len(source)))
    held_out = np.concatenate([b["labels"][b["weights"] == 1] for b in validation_batches(config, vocab_size=1003)])
    assert held_out.tolist() == list(range(1003 - len(held_out), 1003))
    batches = train_batches(config, vocab_size=1003)
    labels = {int(i) for _ in range(40) for i in next(batches)["labels"].ravel()}
    batches.close()
    assert labels == set(range(1, 1003 - len(held_out)))


def test_vocabularies_above_uint16_keep_their_ids(tmp_path):
    ids = np.array([65535, 65536, 100_000])
    write_tokens(tmp_path / "a.bin", ids, 100_001)
    assert read_tokens(tmp_path / "a.bin").ids.tolist() == ids.tolist()


def test_an_array_without_its_eod_is_cut_into_windows(tmp_path):
    write_tokens(tmp_path / "a.bin", np.arange(100), 200, 150)
    source = open_source(config_for("tokens", tmp_path / "a.bin"), 200)
    assert source.contiguous
    assert np.concatenate([source[i]["labels"] for i in range(len(source))]).tolist() == list(range(1, 100))


def test_grain_reshuffles_before_slicing_so_the_split_must_not():
    """Why `pipeline.split` has a permutation of its own."""
    sliced = grain.MapDataset.source(np.arange(10)).shuffle(seed=0)[:3].repeat(3)
    assert len({int(sliced[i]) for i in range(9)}) > 3
