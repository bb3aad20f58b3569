"""One step's loss and gradients, computed in ways that must agree: rows packed or not, cut or whole, by any kernels.

Each array's error is taken against its largest gradient. The tolerances: in float32 these are sums of the same terms in
another order, of up to 10^4 terms, some 1e-6 of their size; where softmax or norms take differences it grows ten times.
Half precision rounds every operand by up to eps / 2, and terms that cancel leave their errors: of an array's norm, 20
eps are allowed (6.4 was seen, of `tiny` in bfloat16, whose eps is 2^-7).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
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
HALF_LOSS, HALF_GRADIENTS = 0.25, 20  # times eps
LOSS_SCALE = 2.0**10  # of float16
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
    """Two answers that must agree: by the loss, and by each gradient's largest error over its largest value."""

    def error(a, b):
        return steps.relative(a, b, float(np.max(np.abs(b))))

    return _compare(name, got, wanted, note, error, (LOSS, GRADIENTS))


def _compare(
    name: str, got: Answer, wanted: Answer, note: str, error_of: Callable, allowed: tuple[float, float]
) -> Check:
    errors = {key: error_of(got.gradients[key], g) for key, g in wanted.gradients.items()}
    worst, off = steps.farthest(errors)
    if not off <= allowed[1]:
        note = f"farthest off is the gradient of {table.short(worst)}"
    loss = abs(got.loss - wanted.loss) / abs(wanted.loss)
    return Check(name, (Measure("loss", loss, allowed[0]), Measure("gradients", off, allowed[1])), note)


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
    half = {"auto": "bfloat16"}.get(full.run.precision, full.run.precision)
    if half != "float32" and not isinstance(reference, Exception):
        yield _tried(f"{half} beside float32", _half, long, spread or alone, begin, programs, half, reference)


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
        if not (kernels := step.kernels(_rows(config))):
            return Check(name, note="no kernel is in the program", broken=True)
        answer = step(_rows(config))
    note += f"{', simulated' if simulated else ''}: {', '.join(sorted(kernels))}"
    return compare(name, answer, wanted, note)


def _half(
    name: str, config: Config, case: Case, begin: steps.Arrays, programs: Programs, dtype: str, wanted: Answer
) -> Check:
    if config.model.num_experts:
        return Check(name, note="rounding changes which experts a token chooses", skipped=True)
    step = Step(config, case, begin, programs)
    step.use(dataclasses.replace(step.compute, dtype=jnp.dtype(dtype)), programs)
    if step.compute.scales_loss:
        scale = jax.device_put(np.float32(LOSS_SCALE), step.state.loss_scale.sharding)
        step.state = dataclasses.replace(step.state, loss_scale=scale)
    note = f"rows of {config.data.seq_len} tokens on {case.name}"

    def error(a, b):  # of the whole array: single numbers of it may be all rounding
        return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))

    eps = float(jnp.finfo(dtype).eps)
    return _compare(name, step(_rows(config)), wanted, note, error, (HALF_LOSS * eps, HALF_GRADIENTS * eps))


@contextlib.contextmanager
def _simulator() -> Iterator[None]:
    """Pallas kernels run in JAX's simulator of a TPU, on memory full of NaN."""
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
            yield
            jax.effects_barrier()
    finally:
        pltpu.reset_tpu_interpret_mode_state()
