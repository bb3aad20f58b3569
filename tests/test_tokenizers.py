import pickle
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tpu_train.config import UserError
from tpu_train.data import load_tokenizer

TEXTS = ["the quick brown fox", "jumps over the lazy dog", "def f(x): return x"] * 5


def save_bpe(path, eod="<|endoftext|>", special=True):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    if eod:
        tokenizer.add_tokens([tokenizers.AddedToken(eod, special=special)])
        if special:
            tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"$A {eod}", special_tokens=[(eod, tokenizer.token_to_id(eod))]
            )
    tokenizer.save(str(path))
    return str(path)


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text


def test_bytes_decode_never_raises_and_skips_eod_and_unknown_ids():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (256, 255)
    assert tokenizer.decode([104, 255, 105, 256, 70000, -1]) == "hi"
    assert tokenizer.decode(np.array([0xE2, 104])) == "\ufffdh"


def test_hugging_face_round_trip_without_special_tokens(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path / "tokenizer.json"))
    for text in ("the fox", "naïve — 汉字 🙂\n", ""):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert tokenizer.eod_id not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eod_id == tokenizer.vocab_size - 1


def test_hugging_face_decode_skips_eod_and_unknown_ids(tmp_path):
    tokenizer = load_tokenizer(save_bpe(tmp_path / "tokenizer.json"))
    ids = [*tokenizer.encode("fox"), tokenizer.eod_id, tokenizer.vocab_size, 10**6, -1]
    assert tokenizer.decode(ids) == "fox"


@pytest.mark.parametrize("special", [True, False])
def test_text_that_spells_the_eod_token_is_text(tmp_path, special):
    tokenizer = load_tokenizer(save_bpe(tmp_path / "tokenizer.json", special=special))
    for text in ("a<|endoftext|>b", "<|endoftext|><|endoftext|>", "x <|endoftext|>"):
        assert tokenizer.eod_id not in tokenizer.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert (pickle.loads(pickle.dumps(tokenizer)).encode(text) == tokenizer.encode(text)).all()


def test_a_tokenizer_whose_unknown_token_is_eod_is_an_error(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "the": 1}, unk_token="</s>"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="gives </s> for ordinary text"):
        load_tokenizer(str(tmp_path / "tokenizer.json")).encode("dog")


@pytest.mark.parametrize("eod", ["</s>", "<eos>", "[SEP]"])
def test_other_names_of_the_eod_token_are_found(tmp_path, eod):
    tokenizer = load_tokenizer(save_bpe(tmp_path / "tokenizer.json", eod))
    assert tokenizer.eod_id == tokenizer.vocab_size - 1


def test_a_tokenizer_without_an_eod_token_is_an_error(tmp_path):
    with pytest.raises(UserError, match="has no end-of-document token; it needs one of"):
        load_tokenizer(save_bpe(tmp_path / "tokenizer.json", eod=None))


def test_a_missing_or_broken_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no tokenizer file 'gpt2'; give 'bytes' or the path"):
        load_tokenizer("gpt2")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a Hugging Face tokenizer"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_missing_package_is_an_error_that_says_what_to_install(tmp_path, monkeypatch):
    path = save_bpe(tmp_path / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'tpu-train\[hf\]'"):
        load_tokenizer(path)
