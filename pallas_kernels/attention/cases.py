"""Attention's cases for the schedule reader: a training step's two kernels on whole causal ops."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention import flash_attention
from pallas_kernels.attention.blocks import choose
from pallas_kernels.cases import Case
from pallas_kernels.runtime import CHIPS
from pallas_kernels.schedule import Counts, Region, ScheduleError


def cases() -> list[Case]:
    """bf16, causal, no packing. One case: the compiler takes a minute over it, writing its dumps."""
    return [causal(2048, 128, rotary=True)]


def causal(seq_len: int, head_dim: int, num_heads: int = 32, num_kv_heads: int = 8, rotary: bool = False) -> Case:
    """Forward with lse, then backward, of one sequence of `seq_len` tokens."""
    q, kv = (jax.ShapeDtypeStruct((1, seq_len, heads, head_dim), jnp.bfloat16) for heads in (num_heads, num_kv_heads))

    angles = (jax.ShapeDtypeStruct((1, seq_len, head_dim // 2), jnp.float32),) * 2 * rotary

    def train(q_BTNH, k_BSKH, v_BSKH, *angles):
        attend = functools.partial(flash_attention, rotary=angles or None, implementation="pallas")
        o_BTNH, vjp = jax.vjp(attend, q_BTNH, k_BSKH, v_BSKH)
        return o_BTNH, vjp(o_BTNH)

    def counts(generation: str) -> dict[str, Counts]:
        sizes = choose(seq_len, seq_len, head_dim, head_dim, 2, CHIPS[generation])
        if sizes.q != sizes.k or sizes.resident < seq_len:
            raise ScheduleError(f"flash_attention: keys of {seq_len} x {head_dim} do not stay in VMEM on {generation}")
        rows = seq_len // sizes.q
        pairs = rows * (rows + 1) // 2
        whole, diagonal, visits = (num_heads * n for n in (pairs - rows, rows, pairs))
        common = {"grid": diagonal, "loop1": diagonal, "loop1/when1": whole, "loop1/when2": diagonal}
        once_a_key_block = num_kv_heads * rows
        return {
            "jvp_flash_attention_forward_": functools.partial(_runs, common | {"when1/loop1": once_a_key_block}),
            "transpose_jvp_flash_attention_backward__": functools.partial(
                _runs,
                common | {"when1/loop1": once_a_key_block, "when2/loop1": visits, "when3/loop1": once_a_key_block},
            ),
        }

    seen = num_heads * seq_len * (seq_len + 1) // 2
    return Case(
        f"flash_attention/causal-{num_heads}-{num_kv_heads}-{seq_len}x{head_dim}",
        train,
        (q, kv, kv, *angles),
        counts,
        flops=7 * 2 * seen * head_dim,  # two products forward, five backward
    )


def _runs(counts: dict[str, int], region: Region) -> int | None:
    """The count by the end of a region's name: what stands before it differs between generations.

    A region of two steps that multiplies is a body of visits.py: of whole pairs first, of those on the diagonal next.
    """
    end = "/".join(region.name.split("/")[-2:])
    return counts.get(end) if region.matmuls or not end.startswith("loop1/") else None
