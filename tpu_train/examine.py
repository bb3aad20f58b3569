"""What of a step is not finite: weights and moments, activations in the order of the forward pass, gradients in the
order of the backward pass. Each is named by its path in the model and its layer.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tpu_train import offload, ops
from tpu_train.loss import real_tokens
from tpu_train.models.dropout import Dropout
from tpu_train.models.layers import Context, rotary_angles
from tpu_train.models.transformer import Transformer
from tpu_train.precision import Compute

# The backward pass through a block: names that start so, in this order.
BACKWARD = ("mlp.down", "mlp.", "mlp_norm", "attention.out", "attention.", "attention_norm", "")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a step: how many of its values are not finite, and the largest of the others."""

    name: str
    size: int
    bad: int
    largest: float
    has_nan: bool

    def __str__(self) -> str:
        if not self.bad:
            return f"{self.name}: finite, at most {self.largest:.3g}"
        kind = "NaN" if self.has_nan else "infinite"
        return f"{self.name}: {self.bad} of {self.size} values {kind}, the others at most {self.largest:.3g}"


@jax.jit
def _numbers(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many values are not finite, the largest of the rest, whether one is NaN."""
    finite = jnp.isfinite(x)
    largest = jnp.max(jnp.where(finite, jnp.abs(x), 0).astype(jnp.float32), initial=0.0)
    return jnp.sum(~finite, dtype=jnp.int32), largest, jnp.any(jnp.isnan(x))


_numbers_of_layers = jax.jit(jax.vmap(_numbers))


def _tensor(name: str, size: int, numbers: Any) -> Tensor:
    bad, largest, has_nan = numbers
    return Tensor(name, size, int(bad), float(largest), bool(has_nan))


def arrays(tree: Any, prefix: str, layers: int) -> list[Tensor]:
    """The floating arrays of `tree` by name, those stacked over the blocks' `layers` groups apart by layer."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = []
    for path, x in flat:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            continue
        x = offload.fetched(x)
        parts = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path]
        name = ".".join([prefix, *(part for part in parts if part != "value")])
        if "blocks" not in parts:
            found.append(_tensor(name, x.size, jax.device_get(_numbers(x))))
            continue
        pattern = int(parts[parts.index("blocks") + 1])
        for group, numbers in enumerate(zip(*jax.device_get(_numbers_of_layers(x)), strict=True)):
            layer = group * (layers // x.shape[0]) + pattern
            found.append(_tensor(f"{name} of layer {layer}", x.size // x.shape[0], numbers))
    return found


def in_backward_order(gradients: list[Tensor], layers: int) -> list[Tensor]:
    """From the loss to the embedding: head and final norm, then the blocks from the last."""

    def place(tensor: Tensor) -> tuple[int, int]:
        if ".blocks." not in tensor.name:
            return (layers, 0) if "embed" in tensor.name else (-1, 0)
        name, _, layer = tensor.name.partition(" of layer ")
        inside = name.partition(".blocks.")[2].partition(".")[2]
        return layers - 1 - int(layer), next(i for i, start in enumerate(BACKWARD) if inside.startswith(start))

    return sorted(gradients, key=place)


def activations(
    model: Transformer, batch: dict[str, jax.Array], compute: Compute, key: jax.Array | None = None
) -> Iterator[Tensor]:
    """What each module gives for one micro-batch of [B, T], layer after layer, as the model's own pass computes it.

    `key` is that of the step's dropout, None where there is none.
    """
    tokens_BT, positions_BT = batch["tokens"], batch["positions"]
    config = model.config
    dropout = None if key is None else Dropout(config.dropout, key, batch["places"])

    @jax.jit
    def enter(model, tokens_BT, positions_BT, dropout):
        angles = rotary_angles(positions_BT, config.head_size, config.rope_theta, compute)
        x_BTD = ops.embed(model.embed_VD[...], tokens_BT, compute.dtype)
        return x_BTD if dropout is None else dropout.of_embedding(x_BTD), angles

    x_BTD, angles = enter(model, tokens_BT, positions_BT, dropout)
    yield _tensor("embed", x_BTD.size, jax.device_get(_numbers(x_BTD)))
    patterns = [_pass_of(compute) for _ in model.blocks]
    for layer in range(config.num_layers):
        group, pattern = divmod(layer, len(config.window_pattern))
        run, names = patterns[pattern]
        here = None if dropout is None else dropout.layers_on(layer)
        of_tokens = *angles, batch.get("segment_ids"), real_tokens(batch)
        x_BTD, numbers = run(model.blocks[pattern], group, x_BTD, *of_tokens, here)
        for (name, size), values in zip(names, jax.device_get(numbers), strict=True):
            yield _tensor(f"blocks.{pattern}{name} of layer {layer}", size, values)
    last_BTD = jax.jit(lambda model, x: model.final_norm(x))(model, x_BTD)
    yield _tensor("final_norm", last_BTD.size, jax.device_get(_numbers(last_BTD)))


def _pass_of(compute: Compute):
    """(one block's pass, (name, size) of what it gives, known once it was traced)."""
    names: list[tuple[str, int]] = []

    @jax.jit
    def run(blocks, group, x_BTD, cos_BTH, sin_BTH, segment_ids_BT, real_BT, dropout):
        block = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, group, 0, keepdims=False), blocks)
        with _recorded(block) as seen:
            context = Context(cos_BTH, sin_BTH, segment_ids_BT, compute, real_BT=real_BT, dropout=dropout)
            x_BTD, _, _ = block(x_BTD, context)
        seen.append(("", x_BTD))
        names[:] = [(name, x.size) for name, x in seen]
        return x_BTD, [_numbers(x) for _, x in seen]

    return run, names


@contextlib.contextmanager
def _recorded(block: nnx.Module) -> Iterator[list[tuple[str, jax.Array]]]:
    """Collects (path, output) of every module inside `block` as it is called."""
    paths = {id(module): "".join(f".{part}" for part in path) for path, module in nnx.iter_modules(block) if path}
    classes = {type(module) for _, module in nnx.iter_modules(block) if module is not block and callable(module)}
    seen: list[tuple[str, jax.Array]] = []
    before = {cls: cls.__call__ for cls in classes}

    def watch(call):
        def watched(self, *args, **more):
            out = call(self, *args, **more)
            x = out[0] if isinstance(out, tuple) else out
            if id(self) in paths:
                seen.append((paths[id(self)], x))
            return out

        return watched

    try:
        for cls, call in before.items():
            setattr(cls, "__call__", watch(call))  # noqa: B010  (a type checker takes no plain assignment)
        yield seen
    finally:
        for cls, call in before.items():
            setattr(cls, "__call__", call)  # noqa: B010


def largest_gradients(grads: Any, count: int) -> list[str]:
    """The parameters with the largest share of the squared gradient norm, as lines."""
    flat = jax.tree_util.tree_flatten_with_path(grads)[0]
    squares = jax.device_get(jax.jit(lambda gs: [jnp.sum(jnp.square(g)) for g in gs])([g for _, g in flat]))
    total = max(float(np.sum(squares)), 1e-30)
    named = [
        (float(s), jax.tree_util.keystr(path, simple=True, separator="."))
        for (path, _), s in zip(flat, squares, strict=True)
    ]
    return [
        f"{name.removesuffix('.value')}: norm {s**0.5:.3g}, {s / total:.0%} of the square"
        for s, name in sorted(named, reverse=True)[:count]
    ]
