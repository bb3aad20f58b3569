"""One step's loss and gradients, computed in ways that must agree: rows packed or not, cut or whole, by any kernels.

All in float32, each array's error against its largest gradient. The tolerances: these are sums of the same terms in
another order, of up to 10^4 terms, some 1e-6 of their size; where softmax or norms take differences it grows ten times.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from tpu_train import train_step
from tpu_train.aot import flops
from tpu_train.checking import batches, steps, table
from tpu_train.checking.meshes import Case
from tpu_train.checking.results import Check, Measure, broken
from tpu_train.config import Config
from tpu_train.precision import Compute

LOSS, GRADIENTS = 1e-5, 1e-4
LONG_ROW = 640  # past 512 tokens XLA's attention goes block by block


@dataclasses.dataclass
class Answer:
    """The mean loss of a batch, and its gradients by their paths."""

    loss: float
    gradients: steps.Arrays


Programs = Callable[[float, Compute], Any]  # jitted, one for each z-loss and way to compute


def _programs() -> Programs:
    @functools.cache
    def program(z_loss, compute):
        return jax.jit(lambda state, batch: train_step.loss_and_grads(state, batch, z_loss, compute))

    return program


class Step:
    """Loss and gradients at one set of weights, `begin`, of a config on a mesh."""

    def __init__(
        self, config: Config, case: Case, begin: steps.Arrays, programs: Programs, implementation: str | None = None
    ) -> None:
        self.config, self.mesh, self.compute = steps.on_mesh(config, case)
        if implementation is not None:
            self.compute = dataclasses.replace(self.compute, implementation=implementation)
        with jax.set_mesh(self.mesh):
            self.state = steps.placed(begin, train_step.abstract_state(self.config, self.compute))
        self.use(self.compute, programs)

    def use(self, compute: Compute, programs: Programs) -> None:
        """Computes as `compute` says from now on."""
        self.compute, self.run = compute, programs(self.config.optim.z_loss, compute)

    def __call__(self, batch: batches.Batch, micro: int = 1) -> Answer:
        """Of a batch of [B, T], cut into `micro` parts."""
        with jax.set_mesh(self.mesh):
            loss, gradients, _ = self.run(self.state, self._placed(batch, micro))
            return Answer(float(loss), steps.named(gradients))

    def kernels(self, batch: batches.Batch) -> set[str]:
        """The names of the Pallas kernels in the program."""
        with jax.set_mesh(self.mesh):
            traced = self.run.trace(self.state, self._placed(batch, 1))
        return set(flops.count(traced.jaxpr, self.mesh.size, self.config.model)["kernels"])

    def _placed(self, batch: batches.Batch, micro: int) -> dict[str, jax.Array]:
        cut = {name: x.reshape(micro, -1, x.shape[-1]) for name, x in batch.items()}
        return steps.place(cut, self.config, self.mesh)


def compare(name: str, got: Answer, wanted: Answer, note: str = "") -> Check:
    """Two answers that must agree."""
    loss = abs(got.loss - wanted.loss) / abs(wanted.loss)
    off, worst = 0.0, ""
    for key, g in wanted.gradients.items():
        error = steps.relative(got.gradients[key], g, float(np.max(np.abs(g))))
        if not error <= off:
            off, worst = error, key
    if not off <= GRADIENTS:
        note = f"farthest off is the gradient of {table.short(worst)}"
    return Check(name, (Measure("loss", loss, LOSS), Measure("gradients", off, GRADIENTS)), note)


def checks(config: Config, full: Config, alone: Case, spread: Case | None, begin: steps.Arrays) -> Iterator[Check]:
    """Packed rows, micro-batches and kernels. `begin`: a state of `config`; `spread`: a mesh for Pallas's kernels."""
    programs = _programs()
    whole = dataclasses.replace(config, optim=dataclasses.replace(config.optim, accumulation_steps=1))
    packing = dataclasses.replace(whole, data=dataclasses.replace(whole.data, packing=True))
    yield _tried("packed rows", _packed, packing, alone, begin, programs)
    yield _tried("micro-batches", _cut, whole, alone, begin, programs)
    row = LONG_ROW if full.data.seq_len > 512 and config.data.seq_len < 512 else config.data.seq_len
    long = dataclasses.replace(whole, data=dataclasses.replace(whole.data, seq_len=row))
    reference = steps.attempt(lambda: Step(long, alone, begin, programs, "reference")(_rows(long)))
    for implementation, case in (("xla", alone), ("pallas", spread or alone)):
        name = f"{implementation} beside the references"
        if isinstance(reference, Exception):
            yield broken(name, reference)
        else:
            yield _tried(name, _kernels, long, case, begin, programs, implementation, reference)


def _tried(name: str, function: Any, *arguments: Any) -> Check:
    done = steps.attempt(function, name, *arguments)
    return broken(name, done) if isinstance(done, Exception) else done


def _rows(config: Config) -> batches.Batch:
    return batches.packed(config, config.data.batch_size, seed=7)


def _packed(name: str, config: Config, alone: Case, begin: steps.Arrays, programs: Programs) -> Check:
    if config.model.capacity_factor is not None:
        why = "model.capacity_factor counts the tokens of a row, so rows of other documents drop other tokens"
        return Check(name, note=why, skipped=True)
    together, apart = batches.packed_and_alone(config, config.data.batch_size, seed=5)
    step = Step(config, alone, begin, programs)
    return compare(name, step(together), step(apart), "documents packed two a row, beside each in a row of its own")


def _cut(name: str, config: Config, alone: Case, begin: steps.Arrays, programs: Programs) -> Check:
    step, batch = Step(config, alone, begin, programs), _rows(config)
    return compare(name, step(batch, micro=2), step(batch), "two micro-batches of unequally many tokens, beside one")


def _kernels(
    name: str,
    config: Config,
    case: Case,
    begin: steps.Arrays,
    programs: Programs,
    implementation: str,
    wanted: Answer,
) -> Check:
    step = Step(config, case, begin, programs, implementation)
    note = f"rows of {config.data.seq_len} tokens on {case.name}"
    if implementation != "pallas":
        return compare(name, step(_rows(config)), wanted, note)
    simulated = step.compute.platform != "tpu"
    # Kernels choose by the platform what they send, and are never worth their while in a simulator.
    step.use(dataclasses.replace(step.compute, platform="tpu", kernels_always=True), programs)
    with _simulator() if simulated else contextlib.nullcontext():
        kernels = step.kernels(_rows(config))
        answer = step(_rows(config))
    if not kernels:
        return Check(name, note="no kernel ran", broken=True)
    note += f"{', simulated' if simulated else ''}: {', '.join(sorted(kernels))}"
    return compare(name, answer, wanted, note)


@contextlib.contextmanager
def _simulator() -> Iterator[None]:
    """Pallas kernels run in JAX's simulator of a TPU, on memory full of NaN."""
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
            yield
            jax.effects_barrier()
    finally:
        pltpu.reset_tpu_interpret_mode_state()
