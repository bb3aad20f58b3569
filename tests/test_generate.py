"""Sampling against the whole forward pass, a token at a time, and the edges of its settings."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_train import generate
from tpu_train.config import UserError
from tpu_train.generate import sample_text
from tpu_train.precision import resolve
from tpu_train.sharding import SPECS

NEW = 14


class Numbers:
    """A tokenizer whose texts are the ids themselves: "3 1 4 "."""

    def __init__(self, vocab_size: int, eod_id: int = 0):
        self.vocab_size, self.eod_id = vocab_size, eod_id

    def encode(self, text):
        return np.array([int(word) for word in text.split()], np.int32)

    def decode(self, ids):
        assert self.eod_id not in list(ids)
        return "".join(f"{i} " for i in ids)


OVERRIDES = ("model.qk_norm=true", "model.attention_soft_cap=4", "model.logit_soft_cap=9", "model.num_layers=4")


def sample(config, model, prompt="5 9 2 ", *, vocab=64, eod=0, **options):
    options = {"num_tokens": NEW, "temperature": 0.0} | options
    return sample_text(model, Numbers(vocab, eod), prompt, resolve(config.run, "cpu"), **options)


def greedy_by_full_forward(config, model, prompt, eod, vocab):
    """The likeliest continuation, the whole sequence run again for every token."""
    compute = resolve(config.run, "cpu")
    length = 1 + len(prompt) + NEW

    @jax.jit
    def logits_of(tokens_BT):
        positions_BT = jnp.arange(length, dtype=jnp.int32)[None]
        x_BTD, _ = model(*(jax.reshard(x, SPECS["BT"]) for x in (tokens_BT, positions_BT)), None, compute)
        return jnp.einsum("BTD,VD->BTV", x_BTD, model.output_VD, precision="highest")

    ids = [eod, *prompt]
    margins = []
    while len(ids) < length:
        padded = np.array([ids + [0] * (length - len(ids))], np.int32)
        at_end = np.asarray(logits_of(padded))[0, len(ids) - 1, :vocab]
        ids.append(int(at_end.argmax()))
        margins.append(np.diff(np.sort(at_end)[-2:])[0])
    assert min(margins) > 1e-3  # no tie that rounding could decide
    return ids[1:]


def ids_of(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_greedy_text_is_the_argmax_of_the_full_forward_at_each_step(tiny, random_model):
    config = tiny(*OVERRIDES)
    model = random_model(config)
    wanted = greedy_by_full_forward(config, model, [5, 9, 2], eod=0, vocab=64)
    assert len(set(wanted)) > 5  # more than one token over and over
    assert 0 not in wanted[3:]
    (text,) = sample(config, model)
    assert ids_of(text) == wanted


def test_temperature_zero_ignores_the_seed_and_top_k_of_one_the_temperature(tiny, random_model):
    config = tiny(*OVERRIDES)
    model = random_model(config)
    (greedy,) = sample(config, model)
    assert sample(config, model, seed=7, num_samples=1) == [greedy]
    assert sample(config, model, top_k=1, temperature=3.0, seed=7) == [greedy]
    hot = [sample(config, model, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    assert hot[0] != [greedy]


@pytest.fixture(scope="module")
def cheap(tiny, random_model, mesh_of):
    mesh_of()
    config = tiny("model.num_layers=1", "model.window_pattern=0")
    return config, random_model(config)


def test_ids_past_the_tokenizers_vocabulary_are_never_sampled(cheap):
    config, model = cheap
    texts = sample(config, model, "1 ", vocab=10, eod=0, temperature=50.0, num_samples=64)
    assert len(texts) == 64
    drawn = {i for text in texts for i in ids_of(text)}
    assert drawn == set(range(1, 10))
    assert len({len(ids_of(text)) for text in texts}) > 3  # some end early


def test_text_ends_where_the_model_ends_the_document(cheap, monkeypatch):
    config, model = cheap
    rows = np.array([[1, 2, 7, 3], [7, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 7], [9, 9, 9, 9]], np.int32)
    monkeypatch.setattr(generate, "_sample", lambda *args, **options: rows)
    texts = sample(config, model, "5 ", eod=7, num_samples=4, num_tokens=4)
    assert texts == ["5 1 2 ", "5 ", "5 1 2 3 4 ", "5 1 2 3 "]


def test_an_empty_prompt_starts_a_document(cheap):
    config, model = cheap
    (text,) = sample(config, model, "", temperature=1.0)
    assert len(ids_of(text)) <= NEW


@pytest.mark.parametrize(
    "options", [{"temperature": -0.1}, {"num_tokens": 0}, {"num_samples": 0}, {"top_k": 0}, {"num_tokens": -5}]
)
def test_settings_out_of_range_are_refused(cheap, options):
    config, model = cheap
    ((name, value),) = options.items()
    with pytest.raises(UserError, match=rf"{name}={re.escape(str(value))} must be|{name}={value}"):
        sample(config, model, **options)


def test_choice_follows_the_softmax_of_capped_logits_over_temperature_and_top_k():
    logits = np.array([2.0, 1.0, 0.5, -1.0, 9.0], np.float32)  # the last lies past the vocabulary
    rows = 20_000
    choose = jax.jit(generate._choose, static_argnums=(3, 4, 5))
    for temperature, top_k, cap in ((1.0, None, None), (0.5, None, None), (2.0, 3, None), (1.0, 2, 1.0)):
        args = jnp.tile(logits, (rows, 1)), jax.random.key(0), jnp.float32(temperature)
        drawn = np.bincount(np.asarray(choose(*args, 4, top_k, cap)), minlength=5) / rows
        scores = logits[:4].astype(np.float64)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        scores[np.argsort(-scores)[top_k or 4 :]] = -np.inf
        wanted = np.exp(scores / temperature) / np.exp(scores / temperature).sum()
        np.testing.assert_allclose(drawn, [*wanted, 0.0], atol=0.015)


def test_greedy_text_is_the_same_on_eight_devices(tiny, random_model, mesh_of):
    config = tiny(*OVERRIDES)
    (wanted,) = sample(config, random_model(config))
    mesh_of(tensor=2, context=2, stage=2)  # context and stage are folded into fsdp
    texts = sample(config, random_model(config), num_samples=3)
    assert texts == [wanted] * 3
