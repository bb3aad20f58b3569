"""A training run, from a config to its last checkpoint: set up or continue, loop, and leave a chart and a sample.

The loop keeps the device busy: step i + 1 is dispatched before the metrics of step i are fetched, and every transfer
between host and device is explicit.
"""

import contextlib
import dataclasses
import os
import signal as signals
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tpu_train import checkpoint, context, data, devices, generate, precision, processes
from tpu_train import config as config_lib
from tpu_train import mesh as mesh_lib
from tpu_train.config import Config, UserError
from tpu_train.evaluate import evaluate, make_eval_step
from tpu_train.flops import active_params
from tpu_train.models.transformer import num_params
from tpu_train.report import Reporter, RunFailed, say, write_charts
from tpu_train.sharding import SPECS
from tpu_train.train_step import TrainState, abstract_state, batch_names, init_state, trace_step


def train(config: Config, start_time: float) -> int:
    """Runs `config` to its last step, or continues where its workdir stopped; returns the process's exit code.

    `start_time` is `time.monotonic()` at the start of the command. Ctrl-C and SIGTERM save and give 128 + the signal.
    """
    workdir = Path(config.run.workdir)
    mesh = mesh_lib.make_mesh(config.mesh)
    mesh_lib.check_fits(config, mesh)
    compute = precision.resolve(config.run, mesh_lib.platform(mesh), config.mesh.context_method)
    tokenizer = data.load_tokenizer(config.data.tokenizer)
    place = processes.batch_share(mesh)
    batches = data.train_batches(config.data, vocab_size=config.model.vocab_size, **place)
    # The first step waits for this longest: XLA works on it while the state and the checkpoints get ready.
    compiling = ThreadPoolExecutor(1).submit(compile_step, config, compute, mesh)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(batches))
        checkpoints = stack.enter_context(checkpoint.Checkpoints(workdir, config.checkpoint.keep_last))
        stop = stack.enter_context(stop_signals())
        if jax.process_count() > 1:
            stop.agreement = processes.Agreement(mesh)
        state = _restore_or_init(config, compute, checkpoints, batches)
        _announce(config, mesh, compute, state)
        run = Run(
            *(config, mesh, compiling.result(), make_eval_step(compute), batches),
            data.validation_batches(config.data, vocab_size=config.model.vocab_size, **place),
            checkpoints,
            stack.enter_context(contextlib.closing(Reporter(config, mesh, int(state.step), start_time))),
            stop,
        )
        state = run.loop(state)
        if stop.agreed is not None:
            say(f"{stop.agreed.name}: saved step {int(state.step)} in {workdir}; the same command continues from there")
            return 128 + stop.agreed
    if jax.process_index() == 0:
        say(write_charts(workdir))
    if config.run.sample_tokens:
        _say_sample(config, state, tokenizer, compute)
    return 0


def compile_step(config: Config, compute: precision.Compute, mesh: jax.sharding.Mesh) -> Callable:
    """The train step, compiled for the shapes and shardings that `config` makes."""
    return trace_step(config, compute, mesh).lower().compile()


@dataclasses.dataclass
class Stop:
    """The signal that asked this process to stop, and the one that all processes of the run stop for, if any."""

    signal: signals.Signals | None = None
    agreement: processes.Agreement | None = None  # None: this process is the whole run
    _agreed: int = 0

    @property
    def agreed(self) -> signals.Signals | None:
        if self.agreement is None:
            return self.signal
        return signals.Signals(self._agreed) if self._agreed else None

    def ask(self) -> bool:
        """Whether to stop now; once a step, in every process at the same one."""
        if self.agreement is not None:
            self._agreed = self.agreement.ask(self.signal or 0)
        return self.agreed is not None


@dataclasses.dataclass
class Run:
    """What the loop uses."""

    config: Config
    mesh: jax.sharding.Mesh
    train_step: Callable
    eval_step: Callable
    batches: Iterator[dict[str, Any]]
    validation: Any
    checkpoints: checkpoint.Checkpoints
    reporter: Reporter
    stop: Stop

    def loop(self, state: TrainState) -> TrainState:
        """Steps until the last one or a stop signal; either way the state returned is saved."""
        run = self.config.run
        for step in range(int(state.step) + 1, run.steps + 1):
            batch = self._next_batch()  # outside: over several processes its transfer counts as an implicit one
            with jax.transfer_guard("disallow"):
                state, values = self.train_step(state, batch)
            self.reporter.dispatched(step, values)
            stopping = self.stop.ask()
            evaluating = (step % run.eval_every == 0 or step == run.steps) and not stopping
            saving = step % self.config.checkpoint.every_steps == 0 or step == run.steps or stopping
            if evaluating or saving:
                self.reporter.fetch()
                with self.reporter.pause():
                    if evaluating:
                        self.reporter.validation_loss = self._evaluate(state)
                    if saving:
                        self._save(step, state)
                self.reporter.log()
            if stopping:
                break
        self.checkpoints.wait()
        return state

    def _next_batch(self) -> dict[str, jax.Array]:
        """[A, B, T] arrays over the mesh, from this process's [b, T]."""
        sharding = jax.NamedSharding(self.mesh, SPECS["ABT"])
        micro, rows = self.config.optim.accumulation_steps, self.config.data.batch_size
        batch = next(self.batches)
        return {
            name: jax.make_array_from_process_local_data(
                sharding,
                context.reorder(batch[name].reshape(micro, -1, batch[name].shape[-1]), self.mesh.shape["context"]),
                (micro, rows // micro, batch[name].shape[-1]),
            )
            for name in batch_names(self.config)
        }

    def _evaluate(self, state: TrainState) -> float:
        return evaluate(self.eval_step, state.model, self.validation, self.mesh, self.config.run.eval_batches)

    def _save(self, step: int, state: TrainState) -> None:
        # The step's loss and gradients were finite, but its update may not be, and keep_last would drop a good one.
        if not jax.device_get(_is_finite(state)):
            raise RunFailed(self.reporter.failure(f"the update of step {step} made weights or moments NaN or infinite"))
        self.checkpoints.save(step, state, self.batches, self.config)
        self.reporter.last_good = step


@jax.jit
def _is_finite(state: TrainState) -> jax.Array:
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Notes the first Ctrl-C or SIGTERM in the `Stop` it gives; one more of either acts as it would without us."""
    stop = Stop()

    def note(number: int, _frame: Any) -> None:
        stop.signal = signals.Signals(number)
        restore()
        if jax.process_index() == 0:
            # Not print: the signal may have come in the middle of one, which may be waiting for its reader.
            line = f"{stop.signal.name}: finishing this step and saving; once more to stop at once\n"
            with contextlib.suppress(OSError):
                os.write(2, line.encode())

    def restore() -> None:
        for number, handler in before.items():
            signals.signal(number, handler)

    before = {number: signals.signal(number, note) for number in (signals.SIGINT, signals.SIGTERM)}
    try:
        yield stop
    finally:
        restore()


def _restore_or_init(config: Config, compute: precision.Compute, checkpoints: checkpoint.Checkpoints, batches: Any):
    step = checkpoints.latest()
    if step is None:
        return init_state(config, compute)
    checkpoint.refuse_other_run(checkpoints.saved_config(step), config, checkpoints.directory.parent)
    if step > config.run.steps:
        raise UserError(
            f"{checkpoints.directory.parent} is at step {step}, past run.steps={config.run.steps}; raise run.steps or "
            "choose another --workdir"
        )
    if step == config.run.steps:
        say(f"the run in {config.run.workdir} is complete at step {step}; a higher run.steps would continue it")
    else:
        say(f"continuing from step {step} in {config.run.workdir}")
    return checkpoints.restore(step, abstract_state(config, compute), batches)


def _announce(config: Config, mesh: jax.sharding.Mesh, compute: precision.Compute, state: TrainState) -> None:
    for name, value, _ in config_lib.differences(config, Config()):
        say(f"  {name} = {value}")
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    say(f"devices: {devices.describe(mesh.devices)}, mesh: {axes}")
    reason = ", since a CPU only emulates bfloat16" if compute.platform == "cpu" and compute.dtype == "float32" else ""
    say(f"weights float32, compute {compute.dtype}{reason}")
    tokens = config.data.batch_size * config.data.seq_len
    active = f" ({active_params(config.model):,} for a token)" if config.model.num_experts else ""
    say(f"parameters: {num_params(state.model):,}{active}, tokens per step: {tokens:,}")


def _say_sample(config: Config, state: TrainState, tokenizer: data.Tokenizer, compute: precision.Compute) -> None:
    text = generate.sample_text(
        *(state.model, tokenizer, config.run.sample_prompt, compute),
        num_tokens=config.run.sample_tokens,
        temperature=0.8,
        seed=config.run.seed,
    )[0]
    say(f"sample after {config.run.sample_prompt!r}:\n{text}")
