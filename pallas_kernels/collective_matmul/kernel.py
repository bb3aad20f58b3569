"""The kernel of matmul_reduce_scatter: one wave round the ring for each block of F.

A wave keeps its block of the cotangent in VMEM and takes the n blocks of D one by one, in the order of ring.plan: the
product, in float32, then what came from the neighbour is added, rounded and sent on. The home block comes last, and
takes both ways' sums in.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.collective_matmul.ring import LEFT, RIGHT, Ring, left, right
from pallas_kernels.matmul.kernel import each_tile, product


@dataclasses.dataclass(frozen=True)
class Spec:
    """What the kernel is built for: devices of the ring, steps of its grid, and rows that an unrolled body takes."""

    n: int
    waves: int
    parts: int  # of the tokens
    rows: int  # D / n
    tile: int
    factor: bool


def reduce_scatter_kernel(spec: Spec, plan_ref, x_ref, *refs):
    """grid = (F // f, n, T // t)."""
    wave, turn, part = (pl.program_id(i) for i in range(3))
    dy_refs, (dw_ref, acc_ref, *rest) = refs[: 1 + spec.factor], refs[1 + spec.factor :]
    ring, dz_refs = Ring(spec.n, plan_ref, *rest[:5]), rest[5:]

    @pl.when((wave == 0) & (turn == 0) & (part == 0))
    def _():
        ring.meet()

    dz_ref = dz_refs[0] if spec.factor else dy_refs[0]
    if spec.factor:

        def form():
            dz_ref[...] = dy_refs[0][...] * dy_refs[1][...]

        form() if spec.parts > 1 else pl.when(turn == 0)(form)

    def tile(rows):
        total = product(x_ref[:, rows], dz_ref[...], 0, 0)
        acc_ref[rows, :] = total if spec.parts == 1 else total + jnp.where(part == 0, 0.0, acc_ref[rows, :])

    each_tile(spec.rows, spec.tile, tile)

    @pl.when((part == spec.parts - 1) & (turn < spec.n - 1))
    def _():
        _pass_on(spec, ring, acc_ref, wave, turn)

    @pl.when((part == spec.parts - 1) & (turn == spec.n - 1))
    def _():
        _bring_home(spec, ring, acc_ref, dw_ref, wave)


def _pass_on(spec: Spec, ring: Ring, acc_ref, wave, turn) -> None:
    """Adds what came on this way, if this is not where the way begins, and sends the sum to the neighbour."""
    way = jax.lax.rem(turn, jnp.int32(2))
    hop, hops = jax.lax.div(turn, jnp.int32(2)), ring.hops(way)
    number = wave * hops + hop

    @pl.when(hop > 0)
    def _():
        ring.receive(way, number - 1)
        coming = ring.coming_ref[way, ring.slot(number - 1)]
        acc_ref[...] += coming.astype(jnp.float32)
        ring.taken(way, number - 1, spec.waves * hops)

    ring.before_sending(way, number)
    ring.leaving_ref[way, ring.slot(number)] = acc_ref[...].astype(ring.leaving_ref.dtype)
    ring.send(way, number)


def _bring_home(spec: Spec, ring: Ring, acc_ref, dw_ref, wave) -> None:
    """The wave's result: the home block's product with the sums of both ways."""
    for way, hops in ((RIGHT, right(spec.n)), (LEFT, left(spec.n))):
        if hops:
            number = wave * hops + hops - 1
            ring.receive(way, number)
            acc_ref[...] += ring.coming_ref[way, ring.slot(number)].astype(jnp.float32)
            ring.taken(way, number, spec.waves * hops)
    dw_ref[...] = acc_ref[...].astype(dw_ref.dtype)

    @pl.when(wave == spec.waves - 1)
    def _():
        ring.finish(RIGHT, spec.waves * right(spec.n))
        ring.finish(LEFT, spec.waves * left(spec.n))
