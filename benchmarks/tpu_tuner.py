"""Tries block sizes of the kernels on a device and writes the fastest into the table that the kernels read.

From the sizes that an op chooses by itself one number at a time is halved or doubled, as long as that makes the op's
forward and backward pass faster. What blocks.py says can't be in VMEM is not tried, and what the compiler refuses is
skipped: both are counted and said. A candidate whose results are not those of the first is reported as wrong and never
taken. The winner is timed once more in turns with the first sizes, and must be MARGIN faster to be written down.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measuring
import numpy as np

from pallas_kernels import flash_attention, gated_mlp, linear_cross_entropy, tuned
from pallas_kernels.attention import blocks as attention_blocks
from pallas_kernels.cross_entropy import blocks as loss_blocks
from pallas_kernels.matmul import blocks as matmul_blocks
from pallas_kernels.runtime import CHIPS, Chip
from tpu_train.config import Config

MARGIN = 0.02
SAME = 0.02  # root mean square difference of two right results, over their size: bfloat16 sums in another order
Plain = dict[str, Any]
Timer = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class Space:
    """One op at one shape. `first` are its own sizes; `check` raises ValueError for sizes that can't be on the chip."""

    op: str
    shape: str
    args: tuple[Any, ...]
    first: Plain
    check: Callable[[Plain], None]
    run: Callable[..., Any]  # run(sizes, *args): results and gradients
    entries: Callable[[Plain], list[tuple[str, tuned.Entry]]]
    mend: Callable[[Plain], Plain] = lambda sizes: sizes  # makes what is cut out of a block fit a smaller one


@dataclass
class Outcome:
    """What was found for a space; seconds of a forward and backward pass."""

    op: str
    shape: str
    first: Plain
    best: Plain
    first_seconds: float = 0.0
    best_seconds: float = 0.0
    tried: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    kept: bool = False


def spaces(config: Config, chip: Chip, interpret: bool = False) -> list[Space]:
    """Of the ops of a training step of `config` on one device, for `chip`."""
    model, rows, T = config.model, config.data.batch_size // config.optim.accumulation_steps, config.data.seq_len
    how = "interpret" if interpret else "pallas"
    found = [_attention(rows, T, model.num_heads, model.kv_heads, model.head_size, chip, how)]
    if model.gated_mlp:
        found.append(_gated(rows * T, model.model_dim, model.mlp_dim, model.activation, chip, how))
    if loss_blocks.pays(loss_blocks.Shape(rows * T, model.model_dim, model.vocab_size, 2, 4), chip) or interpret:
        found.append(_loss(rows * T, model.model_dim, model.vocab_size, chip, how))
    return found


def _attention(B: int, T: int, N: int, K: int, H: int, chip: Chip, how: str) -> Space:
    dims = (T, T, H, H, 2)
    exact, near = attention_blocks.shape_key(*dims)

    def run(sizes: Plain, q, k, v):
        attend = functools.partial(flash_attention, implementation=how, block_sizes=attention_blocks.from_plain(sizes))
        o, vjp = jax.vjp(attend, q, k, v)
        return o, *vjp(o)

    def check(sizes: Plain) -> None:
        _refuse_longer(sizes, q=T, k=T, resident=T)
        attention_blocks.check(attention_blocks.from_plain(sizes), H, H, 2, chip)

    def mend(sizes: Plain) -> Plain:
        cuts = {name: sizes[name] | _at_most(sizes[name], queries=sizes["q"], keys=sizes["k"]) for name in _PASSES}
        return sizes | cuts | {"resident": _up(sizes["resident"], sizes["k"])}

    q, kv = (jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, K))
    return Space(
        "flash_attention",
        f"{B} x {T}, {N} and {K} heads of {H}",
        (q, kv, kv),
        dataclasses.asdict(attention_blocks.choose(*dims, chip)),
        check,
        run,
        lambda sizes: [(attention_blocks.OP, tuned.Entry(exact, near, sizes))],
        mend,
    )


def _gated(T: int, D: int, F: int, activation: str, chip: Chip, how: str) -> Space:
    problem = matmul_blocks.Problem(T, F, D, 2, 2, 2, factors=True)
    blocks_of = {kernel: matmul_blocks.choose(kernel, problem, chip) for kernel in matmul_blocks.KERNELS}

    def of(sizes: Plain) -> matmul_blocks.BlockSizes:
        return matmul_blocks.BlockSizes(**{kernel: matmul_blocks.Block(**block) for kernel, block in sizes.items()})

    def check(sizes: Plain) -> None:
        for kernel in matmul_blocks.KERNELS:
            _refuse_longer(sizes[kernel], T=T, F=F, D=D)
            matmul_blocks.check("gated_mlp", kernel, problem, getattr(of(sizes), kernel), chip)

    def run(sizes: Plain, x, w_gate, w_up):
        multiply = functools.partial(gated_mlp, activation=activation, implementation=how, block_sizes=of(sizes))
        h, vjp = jax.vjp(multiply, x, w_gate, w_up)
        return h, *vjp(h)

    def entries(sizes: Plain) -> list[tuple[str, tuned.Entry]]:
        keys = {kernel: matmul_blocks.shape_key(kernel, problem) for kernel in sizes}
        return [(matmul_blocks.OP, tuned.Entry(*keys[kernel], block)) for kernel, block in sizes.items()]

    x, w = jax.ShapeDtypeStruct((T, D), jnp.bfloat16), jax.ShapeDtypeStruct((D, F), jnp.bfloat16)
    first = {kernel: dataclasses.asdict(block) for kernel, block in blocks_of.items()}
    return Space("gated_mlp", f"{T} x {D} x {F}", (x, w, w), first, check, run, entries)


def _loss(T: int, D: int, V: int, chip: Chip, how: str) -> Space:
    shape = loss_blocks.Shape(T, D, V, 2, 4)
    exact, near = loss_blocks.shape_key(shape)

    def run(sizes: Plain, x, w, labels):
        def losses(x, w):
            more = {"implementation": how, "block_sizes": loss_blocks.from_plain(sizes)}
            return linear_cross_entropy(x, w, labels, **more)

        values, vjp = jax.vjp(losses, x, w)
        return *values, *vjp(values)

    def check(sizes: Plain) -> None:
        for name in _PASSES:
            _refuse_longer(sizes[name], tokens=T, vocab=V)
        loss_blocks.check(loss_blocks.from_plain(sizes), shape, chip)

    def mend(sizes: Plain) -> Plain:
        forward, backward = (sizes[name] for name in _PASSES)
        forward = forward | _at_most(forward, tile=forward["tokens"], rows=forward["vocab"])
        return {"forward": forward, "backward": backward | _at_most(backward, rows=backward["vocab"])}

    arrays = (((T, D), jnp.bfloat16), ((V, D), jnp.float32), ((T,), jnp.int32))
    return Space(
        "linear_cross_entropy",
        f"{T} x {D} x {V}",
        tuple(jax.ShapeDtypeStruct(*array) for array in arrays),
        dataclasses.asdict(loss_blocks.choose(shape, chip)),
        check,
        run,
        lambda sizes: [(loss_blocks.OP, tuned.Entry(exact, near, sizes))],
        mend,
    )


_PASSES = ("forward", "backward")


def _refuse_longer(sizes: Plain, **dims: int) -> None:
    """Raises ValueError for a block that is mostly padding."""
    for name, length in dims.items():
        if sizes[name] >= 2 * _up(length, matmul_blocks.LANES):
            raise ValueError(f"{name}={sizes[name]} is more than the array's {length}")


def _at_most(sizes: Plain, **limits: int) -> Plain:
    return {name: min(sizes[name], limit) for name, limit in limits.items()}


def _up(size: int, unit: int) -> int:
    return -(-size // max(unit, 1)) * max(unit, 1)


def neighbours(sizes: Plain) -> Iterator[Plain]:
    """The sizes with one number halved or doubled."""
    for name, value in sizes.items():
        if isinstance(value, dict):
            for inner in neighbours(value):
                yield sizes | {name: inner}
        else:
            yield from (sizes | {name: other} for other in (value // 2, value * 2))


def tune(space: Space, timer: Timer, most: int = 40) -> Outcome:
    """Goes from `space.first` to faster neighbours until none is, or `most` were timed."""
    args = jax.block_until_ready(measuring.random_arguments(space.args))
    found = Outcome(space.op, space.shape, space.first, space.first)

    compiled: dict[str, Callable[..., Any]] = {}

    def call(sizes: Plain) -> Callable[[], Any]:
        run = compiled.setdefault(json.dumps(sizes), measuring.alone(functools.partial(space.run, sizes)))
        return lambda: run(*args)

    wanted = jax.device_get(call(space.first)())
    found.first_seconds = found.best_seconds = timer(call(space.first))
    seen, moved = [space.first], True
    while moved:
        moved = False
        for sizes in map(space.mend, neighbours(found.best)):
            if sizes in seen or found.tried >= most:
                continue
            seen.append(sizes)
            seconds = _try(space, sizes, call, wanted, timer, found)
            if seconds is not None and seconds < found.best_seconds:
                found.best, found.best_seconds, moved = sizes, seconds, True
                break
    if found.best is not space.first:  # once more, in turns: the fastest of many is lucky too
        times = [(timer(call(space.first)), timer(call(found.best))) for _ in range(3)]
        found.first_seconds, found.best_seconds = (min(each) for each in zip(*times, strict=True))
        found.kept = found.best_seconds < found.first_seconds * (1 - MARGIN)
    return found


def _try(space: Space, sizes: Plain, call, wanted, timer: Timer, found: Outcome) -> float | None:
    """The candidate's seconds; None where it is refused or wrong, which `found` then says."""
    try:
        space.check(sizes)
    except ValueError as error:
        if "VMEM" in str(error):  # else it is no block at all, as half of 128
            found.refused.append(str(error))
        return None
    found.tried += 1
    try:
        results = jax.device_get(call(sizes)())
        off = [_difference(a, b) for a, b in zip(results, wanted, strict=True)]
        if not max(off) <= SAME:
            found.wrong.append(f"{sizes}: results differ by {max(off):.2g} of their size")
            return None
        return timer(call(sizes))
    except Exception as error:  # a compiler's refusal has many types
        line = str(error).splitlines()[0] if str(error) else ""
        found.refused.append(f"{sizes}: {type(error).__name__}: {line[:200]}")
        return None


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.sqrt(np.mean((a - b) ** 2)) / max(np.sqrt(np.mean(b**2)), 1e-30))


def write(outcome: Outcome, space: Space, chip: Chip, table: Path) -> None:
    """Puts the winner into the table."""
    for op, entry in space.entries(outcome.best):
        tuned.write(table, op, chip.name, entry)


def chip_of(device: jax.Device) -> Chip | None:
    """The generation of a device, as the kernels know it."""
    return next((chip for chip in CHIPS.values() if device.device_kind in chip.kinds), None)
