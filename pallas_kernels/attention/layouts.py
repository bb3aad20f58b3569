"""How the attention kernels are called: a call's sizes, its operands as the kernels lay them out, and their blocks."""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.kernel import Spec


@dataclasses.dataclass(frozen=True)
class Call:
    """One call's static side: the kernels' spec, dims as they are, and how to run."""

    spec: Spec
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    HV: int
    vmem_limit: int
    interpret: bool

    @property
    def q_blocks(self) -> int:
        return -(-self.T // self.spec.sizes.q)

    @property
    def parts(self) -> int:
        return -(-self.S // self.spec.sizes.resident)

    @property
    def facts(self) -> dict[str, int | bool | None]:
        """What its pairs of blocks follow from (cases.runs)."""
        visits, sizes = self.spec.visits, self.spec.sizes
        heads = {"rows": self.B, "heads": self.N, "kv_heads": self.K}
        lengths = {"queries": self.T, "keys": self.S, "q": sizes.q, "k": sizes.k, "resident": sizes.resident}
        seen = {"left": visits.mask.left, "right": visits.mask.right, "offset": visits.offset}
        return {**heads, **lengths, **seen, "segmented": visits.segmented}

    @property
    def padded_queries(self) -> int:
        return self.q_blocks * self.spec.sizes.q

    @property
    def padded_keys(self) -> int:
        return self.parts * self.spec.sizes.resident


def queries(call: Call, x_BTNH):
    """[B, N, H, T], T in whole blocks."""
    return pad(x_BTNH.transpose(0, 2, 3, 1), 3, call.padded_queries, 0)


def keys(call: Call, x_BSKH):
    """[B, K, H, S], S in whole parts."""
    return pad(x_BSKH.transpose(0, 2, 3, 1), 3, call.padded_keys, 0)


def tokens_first(x_BNHT, length: int):
    """The first `length` tokens, as [B, T, N, H]."""
    return x_BNHT[..., :length].transpose(0, 3, 1, 2)


def rows(call: Call, x_BNT):
    """[B, N, 1, T], T in whole blocks; those past the end saw nothing."""
    return pad(x_BNT, 2, call.padded_queries, -jnp.inf)[:, :, None, :]


def pad(x, axis: int, size: int, fill):
    """`x` with one axis filled up to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=fill)


def segments(call: Call, q_ids_BT, kv_ids_BS):
    """Ids with padding that matches nothing, [B, 1, rows], and [B, 3, blocks]: least, greatest and only id of each."""
    sizes = call.spec.sizes
    out = []
    for ids, size, block, none in (
        (q_ids_BT, call.padded_queries, sizes.q, -1),
        (kv_ids_BS, call.padded_keys, sizes.k, -2),
    ):
        ids = pad(ids.astype(jnp.int32), 1, size, none)
        ids = jnp.where(ids > 0, ids, none)
        cut = ids.reshape(ids.shape[0], -1, block)
        greatest = jnp.max(cut, axis=2)
        least = jnp.min(jnp.where(cut > 0, cut, jnp.iinfo(jnp.int32).max), axis=2)
        only = jnp.where((jnp.min(cut, axis=2) == greatest) & (greatest > 0), greatest, none)
        out.append((ids[:, None, :], jnp.stack([least, greatest, only], axis=1)))
    (q_ids, q_blocks), (k_ids, k_blocks) = out
    return [q_ids, k_ids, q_blocks, k_blocks]


def angles(call: Call, cos_BTR, sin_BTR):
    """cos and sin [B, R, rows] of the queries and of the keys, in whole blocks."""
    angles = [x.swapaxes(1, 2) for x in (cos_BTR, sin_BTR)]
    return [pad(x, 2, size, 0) for size in (call.padded_queries, call.padded_keys) for x in angles]


def row_specs(call: Call, segments, angles, query_block, key_part):
    """Block specs and operands of `segments` and `angles`; the functions give (b, block) of the grid's indices."""

    def q_map(*at):
        b, i = query_block(*at)
        return b, 0, i

    def k_map(*at):
        b, part = key_part(*at)
        return b, 0, part

    def all_blocks_map(*at):
        return at[0], 0, 0

    sizes = call.spec.sizes
    specs = []
    if segments is not None:
        specs += [
            pl.BlockSpec((None, 1, sizes.q), q_map),
            pl.BlockSpec((None, 1, sizes.resident), k_map),
            pl.BlockSpec((None, 3, call.q_blocks), all_blocks_map, memory_space=pltpu.SMEM),
            pl.BlockSpec((None, 3, call.padded_keys // sizes.k), all_blocks_map, memory_space=pltpu.SMEM),
        ]
    if angles is not None:
        specs += [pl.BlockSpec((None, call.H // 2, sizes.q), q_map)] * 2
        specs += [pl.BlockSpec((None, call.H // 2, sizes.resident), k_map)] * 2
    return specs, [*(segments or []), *(angles or [])]
