"""Attention's cases for the schedule reader: a training step's two kernels on whole causal ops."""

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import flash_attention
from pallas_kernels.attention.blocks import choose
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.visits import Visits
from pallas_kernels.cases import Case
from pallas_kernels.runtime import CHIPS
from pallas_kernels.schedule import Counts, Region, ScheduleError

_ONLY_BODY = "body"  # no region's name


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
        if sizes.resident < seq_len:
            raise ScheduleError(f"flash_attention: keys of {seq_len} x {head_dim} do not stay in VMEM on {generation}")
        values: dict[str, Any] = {
            "rows": 1,
            "heads": num_heads,
            "kv_heads": num_kv_heads,
            "queries": seq_len,
            "keys": seq_len,
        }
        values |= {name: getattr(sizes, name) for name in ("q", "k", "resident")}
        values |= {"left": None, "right": 0, "offset": 0, "segmented": False}
        return {
            "jvp_flash_attention_forward_": functools.partial(_runs, _counts("forward", values)),
            "transpose_jvp_flash_attention_backward__": functools.partial(_runs, _counts("backward", values)),
        }

    seen = num_heads * seq_len * (seq_len + 1) // 2
    return Case(
        f"flash_attention/causal-{num_heads}-{num_kv_heads}-{seq_len}x{head_dim}",
        train,
        (q, kv, kv, *angles),
        counts,
        flops=7 * 2 * seen * head_dim,  # two products forward, five backward
    )


def runs(kernel: str, values: Mapping[str, Any], generation: str, filled: float = 1.0) -> Counts:
    """By region, of one core: of a call that says of itself that it has these values (runtime.facts).

    Each row is taken to be one document: of several, pairs of blocks that share none are left out, and a whole pair
    that holds more than one is masked. Raises ScheduleError where the queries' offset is known only when it runs.
    """
    if values["offset"] is None:
        raise ScheduleError("which pairs of blocks meet is known only when it runs")
    counts = _counts(kernel, values)
    return functools.partial(_runs, {name: count / CHIPS[generation].cores for name, count in counts.items()})


def _counts(kernel: str, values: Mapping[str, Any]) -> dict[str, float]:
    """By the end of a region's name, of one core that does it all."""
    mask = Mask(values["left"], values["right"])
    lengths = values["queries"], values["keys"]
    visits = Visits(mask, *lengths, values["q"], values["k"], values["offset"], values["segmented"])
    parts = -(-values["keys"] // values["resident"])
    heads = values["rows"] * values["heads"]
    bodies: dict[str, float] = {name: heads * count for name, count in _pairs(visits, values["offset"]).items()}
    steps = heads * -(-values["queries"] // values["q"])
    if kernel == "backward":  # each part of the keys in a call of its own
        bodies = {name: count / parts for name, count in bodies.items()}
    met = sum(bodies.values())
    counts = {"grid": float(steps), "loop1": float(steps), "when2/loop1": met, _ONLY_BODY: met} | bodies
    part = values["resident"] // values["k"]
    once = values["rows"] * values["kv_heads"] * part
    if kernel == "forward":  # parts of the keys are set anew for each block of queries
        return counts | {"when1/loop1": once if parts == 1 else steps * parts * part}
    return counts | {"when1/loop1": once, "when3/loop1": once}


def _pairs(visits: Visits, offset: int) -> dict[str, int]:
    """How often each body of visits.run runs for a head of one row: loop1/when1 on whole pairs, ... in its order."""
    deltas = visits.deltas or ()
    order = ["whole", *(["several segments"] if visits.segmented else []), *deltas, "others"]
    met = Counter[Any]()
    for i in range(-(-visits.num_queries // visits.block_q)):
        first = offset + i * visits.block_q
        last = min(first + visits.block_q - 1, offset + visits.num_queries - 1)
        low, high = visits.mask.key_range(first, last, visits.num_keys)
        for j in range(low // visits.block_k, -(-high // visits.block_k)):
            delta = first - j * visits.block_k
            exists = not visits.tail or (j + 1) * visits.block_k <= visits.num_keys
            met["whole" if exists and visits.whole(delta) else delta if exists and delta in deltas else "others"] += 1
    return {f"loop1/when{at}": met[body] for at, body in enumerate(order, 1)}


def _runs(counts: Mapping[str, float], region: Region) -> float | None:
    """The count by the end of a region's name: what stands before it differs between generations.

    A region of two steps that multiplies is a body of visits.py. Where the mask cuts nothing the only one is the loop.
    """
    end = "/".join(region.name.split("/")[-2:])
    if not region.matmuls:
        return None if end.startswith("loop1/") else counts.get(end)
    return counts.get(end) if end.startswith("loop1/") else counts.get(_ONLY_BODY if end.endswith("/loop1") else end)
