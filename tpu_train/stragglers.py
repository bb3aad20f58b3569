"""Which process of a run holds up the others.

The processes' devices wait for each other in every step, so a step takes all of them equally long. What tells a slow
process from the rest is that it does not wait: the time between its waits for the device, in which it reads data and
runs Python, is its own. A device that is slow itself does not show: every process then waits alike.
"""

import statistics

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

FACTOR = 2.0  # times the median of the processes' own time
SHARE = 0.1  # of a step's time, that a process loses against the median


class Stragglers:
    """Gathers a few numbers of every process at each logged step, and reads them at the next, so that nothing waits."""

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names, None))
        self._gather = jax.jit(lambda x: jax.reshard(x, PartitionSpec(None, None)))
        owners = [device.process_index for device in mesh.devices.flat]
        self._rows = [owners.index(process) for process in range(jax.process_count())]
        self._size = mesh.size
        self._pending: tuple[int, jax.Array] | None = None

    def report(self, step: int, own: float, data: float, step_seconds: float) -> str | None:
        """What to say of the step reported before this one, or None. All processes must call it at the same steps.

        `own` are this process's own seconds a step, `data` those of them in which it waited for its batch.
        """
        previous = self.last()
        mine = np.array([[own, data, step_seconds]], np.float32)
        numbers = jax.make_array_from_callback((self._size, 3), self._sharding, lambda _: mine)
        self._pending = step, self._gather(numbers)
        return previous

    def last(self) -> str | None:
        """What to say of the last report; it waits for the numbers."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        return slow_process(pending[0], np.asarray(jax.device_get(pending[1]))[self._rows])


def slow_process(step: int, numbers: np.ndarray) -> str | None:
    """The line about the slowest process, if it is slow; `numbers` are [processes, (own, data, step)] seconds."""
    own = [float(x) for x in numbers[:, 0]]
    slowest, median = int(np.argmax(own)), statistics.median_low(own)
    if own[slowest] < FACTOR * median or own[slowest] - median < SHARE * float(np.max(numbers[:, 2])):
        return None
    return (
        f"step {step}: process {slowest} of {len(own)} holds up the others: {own[slowest] * 1e3:.0f} ms of its own a "
        f"step ({numbers[slowest, 1] * 1e3:.0f} ms waiting for data), the median is {median * 1e3:.0f} ms"
    )
