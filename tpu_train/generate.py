"""Sampling text from a model: one pass over the prompt, then a token at a time with cached keys and values."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from tpu_train import mesh as mesh_lib
from tpu_train.config import UserError
from tpu_train.data import Tokenizer
from tpu_train.models.transformer import Transformer, empty_cache
from tpu_train.precision import Compute
from tpu_train.sharding import BATCH, SPECS, P, gather


def sample_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    compute: Compute,
    *,
    num_tokens: int,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> list[str]:
    """`num_samples` continuations of `prompt`, the prompt included, each cut where the model ends the document.

    `temperature` 0 takes the likeliest token; `top_k` samples from the k likeliest only.
    Raises UserError on settings out of range.
    """
    if temperature < 0 or num_tokens < 1 or num_samples < 1 or (top_k is not None and top_k < 1):
        raise UserError(
            f"temperature={temperature} must be 0 or more; num_tokens={num_tokens}, num_samples={num_samples} and "
            f"top_k={top_k} must be at least 1"
        )
    # A document starts with the end of the one before, as in training.
    prompt_T = np.concatenate([[tokenizer.eod_id], tokenizer.encode(prompt)]).astype(np.int32)
    mesh = jax.sharding.get_mesh()
    if mesh.shape["context"] * mesh.shape["stage"] > 1:
        mesh = mesh_lib.for_decoding(mesh)
        model = mesh_lib.moved(model, mesh)
    shards = math.prod(mesh.shape[axis] for axis in BATCH)
    rows = -(-num_samples // shards) * shards
    with jax.set_mesh(mesh):
        tokens_BT = _sample(
            model,
            jnp.asarray(prompt_T),
            jax.random.key(seed),
            jnp.float32(temperature),
            rows=rows,
            num_tokens=num_tokens,
            vocab=tokenizer.vocab_size,
            top_k=top_k,
            compute=compute,
        )
    texts = []
    for row in np.asarray(jax.device_get(tokens_BT))[:num_samples]:
        ended = np.flatnonzero(row == tokenizer.eod_id)
        texts.append(prompt + tokenizer.decode(row[: ended[0]] if len(ended) else row))
    return texts


@functools.partial(jax.jit, static_argnames=("rows", "num_tokens", "vocab", "top_k", "compute"))
def _sample(model, prompt_T, key, temperature, *, rows, num_tokens, vocab, top_k, compute):
    """New tokens [rows, num_tokens], replicated."""
    length = prompt_T.shape[0]
    cache = empty_cache(model.config, rows, length + num_tokens, compute.dtype)
    prompt_BT = jnp.broadcast_to(prompt_T[None], (rows, length))

    def advance(tokens_BT, position, cache, key):
        """The token after `tokens_BT`, whose first stands at `position`."""
        positions_BT = jnp.broadcast_to((position + jnp.arange(tokens_BT.shape[1]))[None], tokens_BT.shape)
        x_BTD, cache = model(
            *(jax.reshard(x, SPECS["BT"]) for x in (tokens_BT, positions_BT)), None, compute, cache, position
        )
        head_VD = gather(model.output_VD, "VD", compute.dtype)
        logits_BV = jnp.einsum(
            "BD,VD->BV", x_BTD[:, -1], head_VD, preferred_element_type=jnp.float32, out_sharding=SPECS["BV"]
        )
        logits_BV = jax.reshard(logits_BV, P(None, None))
        return _choose(logits_BV, key, temperature, vocab, top_k, model.config.logit_soft_cap), cache

    def step(carry, i):
        token_B, cache, key = carry
        key, now = jax.random.split(key)
        next_B, cache = advance(token_B[:, None], length + i, cache, now)
        return (next_B, cache, key), token_B

    key, now = jax.random.split(key)
    token_B, cache = advance(prompt_BT, jnp.int32(0), cache, now)
    (last_B, _, _), tokens_TB = jax.lax.scan(step, (token_B, cache, key), jnp.arange(num_tokens - 1))
    return jnp.concatenate([tokens_TB, last_B[None]]).T


def _choose(logits_BV, key, temperature, vocab, top_k, soft_cap):
    if soft_cap is not None:
        logits_BV = soft_cap * jnp.tanh(logits_BV / soft_cap)
    # The model's vocabulary may be padded past the tokenizer's.
    known = jnp.arange(logits_BV.shape[-1]) < vocab
    logits_BV = jnp.where(known[None], logits_BV, -jnp.inf)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= least, logits_BV, -jnp.inf)
    greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    warm = jnp.where(temperature > 0, temperature, 1.0)
    sampled_B = jax.random.categorical(key, logits_BV / warm).astype(jnp.int32)
    return jnp.where(temperature > 0, sampled_B, greedy_B)
