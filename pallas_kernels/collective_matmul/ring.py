"""How blocks go round a ring of n devices, both ways at once, and what a kernel needs to send them.

Device i has block i for its home. A block's way ends there from both sides: to the right (towards higher indices) it
goes `right(n)` hops, to the left `left(n)`, together n - 1. Each of a device's n turns takes a block: one of the way
right, one of the way left, and so on, and the home block last. So what is sent in one turn is wanted two turns on.

Each way has two slots at either end. A device may send into a neighbour's slot once the neighbour has said that it has
taken what was there (`free`); the first two need no word. Devices first meet at a barrier, since before its kernel runs
a device's VMEM belongs to something else. All semaphores are at zero when a kernel ends.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

RIGHT, LEFT = 0, 1
SLOTS = 2


def right(n: int) -> int:
    """Hops of the way right: n / 2 of n devices."""
    return n // 2


def left(n: int) -> int:
    """Hops of the way left."""
    return (n - 1) // 2


def steps(n: int) -> list[int]:
    """How far up the ring the block's home is that a device adds to, for each of its n turns.

    In hop h of the way right that is right(n) - h.
    """
    return [*(right(n) - turn // 2 if turn % 2 == 0 else turn // 2 - left(n) for turn in range(n - 1)), 0]


def plan(n: int, axis: str) -> jax.Array:
    """int32, read as scalars: a device's block for each of n turns, and where on the mesh its neighbours are.

    The neighbour right, then the one left, is named by its index along each of the mesh's axes, which must all be
    manual.
    """
    size = jax.sharding.get_abstract_mesh().shape
    me = {name: jax.lax.axis_index(name) for name in size}
    order = (me[axis] + jnp.array(steps(n), jnp.int32)) % n
    beside = [jnp.stack([*(me | {axis: (me[axis] + step) % n}).values()]) for step in (1, -1)]
    return jnp.concatenate([order, *beside]).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The refs of a kernel that sends: slots [2 ways, SLOTS, ...] of what leaves and what comes, and semaphores."""

    n: int
    plan_ref: Any
    leaving_ref: Any
    coming_ref: Any
    sent_sem: Any  # DMA [2, SLOTS]: a slot of what leaves has left
    come_sem: Any  # DMA [2, SLOTS]
    free_sem: Any  # regular [2]: slots that the neighbour on this way has taken

    def hops(self, way):
        """Of a way, which may be traced."""
        if isinstance(way, int):
            return left(self.n) if way == LEFT else right(self.n)
        return jnp.where(way == LEFT, left(self.n), right(self.n)).astype(jnp.int32)

    def meet(self) -> None:
        """Waits until both neighbours' kernels run."""
        barrier = pltpu.get_barrier_semaphore()
        for way in (RIGHT, LEFT):
            pl.semaphore_signal(barrier, 1, device_id=self._device(way))
        pl.semaphore_wait(barrier, 2)

    def slot(self, number):
        """Of the number-th block on its way."""
        return jax.lax.rem(number, jnp.int32(SLOTS))

    def before_sending(self, way, number) -> None:
        """Waits until the number-th block may be put into its slot and, at the neighbour, arrive in the same one."""

        @pl.when(number >= SLOTS)
        def _():
            self._copy(way, number).wait_send()
            pl.semaphore_wait(self.free_sem.at[way], 1)

    def send(self, way, number) -> None:
        """What is in the leaving slot of this number."""
        self._copy(way, number).start()

    def receive(self, way, number) -> None:
        """Waits for the number-th block."""
        self._copy(way, number).wait_recv()

    def taken(self, way, number, total) -> None:
        """Says that the number-th of `total` blocks has been read, to whoever has a block to send into its slot."""

        @pl.when(number + SLOTS < total)
        def _():
            back = LEFT if isinstance(way, int) and way == RIGHT else RIGHT if isinstance(way, int) else 1 - way
            pl.semaphore_signal(self.free_sem.at[way], 1, device_id=self._device(back))

    def finish(self, way: int, total: int) -> None:
        """Waits until the last blocks have left."""
        for number in range(max(0, total - SLOTS), total):
            self._copy(way, jnp.int32(number)).wait_send()

    def _device(self, way):
        axes = (self.plan_ref.shape[0] - self.n) // 2
        return tuple(self.plan_ref[self.n + axes * way + i] for i in range(axes))

    def _copy(self, way, number):
        slot = self.slot(number)
        return pltpu.make_async_remote_copy(
            self.leaving_ref.at[way, slot],
            self.coming_ref.at[way, slot],
            self.sent_sem.at[way, slot],
            self.come_sem.at[way, slot],
            device_id=self._device(way),
        )
