"""Linear cross entropy's cases for the schedule reader: a training step's two kernels."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels.cases import Case
from pallas_kernels.cross_entropy import blocks, linear_cross_entropy
from pallas_kernels.cross_entropy.kernel import CAST_ROWS
from pallas_kernels.runtime import CHIPS
from pallas_kernels.schedule import Counts, Region


def cases() -> list[Case]:
    """Hidden states in bf16 and a head in float32, as in training. One case, half as wide as a large model's."""
    return [train(4096, 2048, 128256)]


def train(T: int, D: int, V: int) -> Case:
    """Forward, then backward, of T tokens; `flops` are of three products, one forward and two backward."""
    arrays = ((T, D), jnp.bfloat16), ((V, D), jnp.float32), ((T,), jnp.int32)

    def step(x_TD, w_VD, labels_T):
        losses = functools.partial(linear_cross_entropy, labels_T=labels_T, implementation="pallas")
        (loss_T, lse_T), vjp = jax.vjp(losses, x_TD, w_VD)
        return loss_T, vjp((loss_T, lse_T))

    def counts(generation: str) -> dict[str, Counts]:
        values = dataclasses.asdict(blocks.Shape(T, D, V, 2, 4))
        return {
            "jvp_linear_cross_entropy_forward_": runs("forward", values, generation),
            "transpose_jvp_linear_cross_entropy_backward__": runs("backward", values, generation),
        }

    args = tuple(jax.ShapeDtypeStruct(*array) for array in arrays)
    return Case(f"linear_cross_entropy/train-{T}x{D}x{V}", step, args, counts, flops=3 * 2 * T * D * V)


def runs(kernel: str, values: Mapping[str, int], generation: str, filled: float = 1.0) -> Counts:
    """By region, of one core: of a call that says of itself that it has these values (runtime.facts)."""
    shape, chip = blocks.Shape(**values), CHIPS[generation]
    sizes = blocks.choose(shape, chip)
    if kernel == "forward":
        return functools.partial(_forward, sizes.forward, shape.T, shape.V, chip.cores)
    return functools.partial(_backward, sizes.backward, shape.T, shape.D, shape.V, chip.cores)


def _forward(cut: blocks.Forward, T: int, V: int, cores: int, region: Region) -> float | None:
    """How often a region runs on one core: the loop makes a block's logits; some begin or end a block of tokens."""
    token_blocks = -(-T // cut.tokens) / cores
    steps = token_blocks * -(-V // cut.vocab)
    name = _inside_grid(region, token_blocks * cores * -(-V // cut.vocab))
    if name == "top":
        return None
    if name.endswith("/loop1"):
        return steps * cut.vocab // cut.rows
    # What clears the statistics loads nothing; what ends them takes a logarithm.
    once = name.count("when") > 1 and (region.slots["eup"] > 0 or not region.slots["load"])
    return token_blocks if once else steps


def _backward(cut: blocks.Backward, T: int, D: int, V: int, cores: int, region: Region) -> float | None:
    """The same: loop1 makes logits, their gradients and dw, and in a block's first step fetches the head; loop2 dx."""
    vocab_blocks, token_blocks = -(-V // (cut.vocab * cores)), -(-T // cut.tokens)
    steps, groups = vocab_blocks * token_blocks, cut.vocab // (cut.rows * cut.ahead)
    name = _inside_grid(region, steps * cores)
    if name == "top":
        return None
    if region.matmuls:
        return steps * (groups if name.endswith("/loop1") else -(-D // cut.columns))
    if "/loop1/when" in name:  # casts the head, in loops of its own
        return vocab_blocks * groups * (cut.rows // CAST_ROWS if "/loop" in name.split("/loop1/when", 1)[1] else 1)
    if name.endswith("/loop1"):  # waits for the last copies of dw
        return cut.vocab // cut.rows
    return steps


def _inside_grid(region: Region, steps: float) -> str:
    """A region's name without the grid's, which is loop1 where XLA put every block in VMEM, and no loop of one step."""
    name = region.name
    if steps <= 1:
        return "" if name == "top" else f"/{name}"
    return next((name.removeprefix(grid) for grid in ("grid", "loop1") if name.startswith(grid)), "top")
