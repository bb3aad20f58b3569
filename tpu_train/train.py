"""A training run, from a config to its last checkpoint: set up or continue, loop, and leave a chart and a sample.

The loop keeps the device busy: step i + 1 is dispatched before the metrics of step i are fetched, and every transfer
between host and device is explicit.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tpu_train import (
    checkpoint,
    data,
    devices,
    generate,
    goodput,
    paths,
    precision,
    processes,
    profiling,
    stages,
    watchdog,
)
from tpu_train import config as config_lib
from tpu_train import mesh as mesh_lib
from tpu_train.config import Config, UserError
from tpu_train.evaluate import evaluate, make_eval_step
from tpu_train.flops import active_params
from tpu_train.models.transformer import num_params
from tpu_train.report import Reporter, RunFailed, say, write_charts
from tpu_train.stopping import Stop, stop_signals
from tpu_train.train_step import (
    TrainState,
    abstract_state,
    batch_on_mesh,
    best_model,
    init_state,
    trace_step,
    with_features,
)


def train(config: Config, start_time: float, *, profile_steps: range | None = None, dump_hlo: bool = False) -> int:
    """Runs `config` to its last step, or continues where its workdir stopped; returns the process's exit code.

    `start_time` is `time.monotonic()` at the start of the command. Ctrl-C and SIGTERM save and give 128 + the signal.
    `profile_steps` are traced and `dump_hlo` writes the step's program down: see profiling.py.
    """
    workdir = paths.at(config.run.workdir)
    if paths.is_remote(workdir) and (dump_hlo or profile_steps is not None):
        raise UserError(f"--dump_hlo and --profile_steps write into a folder of this machine, and {workdir} is none")
    watch = watchdog.Watchdog(config.run.hang_seconds, processes.name())
    clock = goodput.Clock(start_time, watch, shared=jax.process_count() > 1)
    mesh = mesh_lib.make_mesh(config.mesh)
    mesh_lib.check_fits(config, mesh)
    compute = precision.resolve(config.run, mesh_lib.platform(mesh), config.mesh)
    tokenizer = data.load_tokenizer(config.data.tokenizer)
    place = processes.batch_share(mesh)
    batches = data.train_batches(config.data, vocab_size=config.model.vocab_size, **place)
    # The first step waits for this longest: XLA works on it while the state and the checkpoints get ready.
    compiling = ThreadPoolExecutor(1).submit(compile_step, config, compute, mesh, workdir if dump_hlo else None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(clock))
        stack.enter_context(contextlib.closing(batches))
        keep = config.checkpoint
        checkpoints = stack.enter_context(
            checkpoint.Checkpoints(workdir, keep.keep_last, keep.keep_every, keep.keep_best)
        )
        stop = stack.enter_context(stop_signals(keep.stop_seconds, checkpoints.kept))
        if jax.process_count() > 1:
            stop.agreement = processes.Agreement(mesh)
        clock.enter("restore")
        state = _restore_or_init(config, compute, checkpoints, batches)
        _announce(config, mesh, compute, state)
        reporter = Reporter(config, mesh, int(state.step), start_time, clock)
        stack.enter_context(contextlib.closing(reporter))
        checkpoints.before_save = reporter.flush
        profiler = stack.enter_context(contextlib.closing(profiling.Profiler(profile_steps, workdir)))
        profiler.continue_from(int(state.step))
        clock.enter("compile")
        run = Run(
            *(config, mesh, compiling.result(), make_eval_step(compute), batches),
            data.validation_batches(config.data, vocab_size=config.model.vocab_size, **place),
            (checkpoint.SharedSaver if jax.process_count() > 1 else checkpoint.Saver)(checkpoints, config.checkpoint),
            reporter,
            stop,
            clock,
            profiler,
        )
        state = run.loop(state)
        run.reporter.say_time()
        if stop.agreed is not None:
            say(f"{stop.agreed.name}: saved step {int(state.step)} in {workdir}; the same command continues from there")
            return 128 + stop.agreed
    say(batches.describe())
    if jax.process_index() == 0:
        say(write_charts(workdir))
    if config.run.sample_tokens:
        _say_sample(config, state, tokenizer, compute)
    return 0


def compile_step(
    config: Config, compute: precision.Compute, mesh: jax.sharding.Mesh, hlo_to: Path | None = None
) -> Callable:
    """The train step, compiled for the shapes and shardings that `config` makes; `hlo_to`: written there as text."""
    lowered = trace_step(config, compute, mesh).lower()
    compiled = lowered.compile()
    if hlo_to is not None:
        profiling.write_hlo(lowered, compiled, hlo_to)
    return compiled


@dataclasses.dataclass
class Run:
    """What the loop uses."""

    config: Config
    mesh: jax.sharding.Mesh
    train_step: Callable
    eval_step: Callable
    batches: Any  # of data.train_batches
    validation: Any
    saver: checkpoint.Saver
    reporter: Reporter
    stop: Stop
    clock: goodput.Clock
    profiler: profiling.Profiler = dataclasses.field(default_factory=profiling.Profiler)

    def loop(self, state: TrainState) -> TrainState:
        """Steps until the last one or a stop signal; either way the state returned is saved."""
        run = self.config.run
        for step in range(int(state.step) + 1, run.steps + 1):
            self.clock.enter("data", step)
            batch = self._next_batch()  # outside: over several processes its transfer counts as an implicit one
            self.profiler.begin(step, self.reporter, self.clock)
            self.clock.enter("step")
            with jax.transfer_guard("disallow"), self.profiler.step(step):
                state, values = self.train_step(state, batch)
            self.reporter.dispatched(step, values, self.batches.of_sources if self.config.data.mixture else None)
            self.profiler.end(step, self.reporter, self.clock)
            asked = self.stop.ask(self.saver.asks())
            stopping = self.stop.agreed is not None
            evaluating = (step % run.eval_every == 0 or step == run.steps) and not stopping
            saving = self.saver.due(step, asked) or step == run.steps or stopping
            if evaluating or saving:
                self.reporter.fetch()
                # Weights from before a row of skipped steps may be its cause, and keep_last would drop better ones.
                saving &= not self.reporter.skipped_in_row or step == run.steps or stopping
                loss = None
                if evaluating:
                    self.clock.enter("eval")
                    with self.reporter.pause():
                        loss = self.reporter.validation_loss = self._evaluate(state)
                    self.clock.enter("other")
                self.reporter.log()  # before the save, since a start from there would not write this line
                if saving or (not self.reporter.skipped_in_row and self.saver.is_best(loss)):
                    with self.reporter.pause():
                        self._save(step, state, loss)
                    self.clock.enter("other")
            if stopping:
                break
        self.clock.enter("save")
        self.saver.finish(lambda: self._save(step, state, None))
        self.clock.enter("other")
        return state

    def _next_batch(self) -> dict[str, jax.Array]:
        return batch_on_mesh(next(self.batches), self.config, self.mesh)

    def _evaluate(self, state: TrainState) -> float:
        batches = map(self.clock.alive, self.validation)
        return evaluate(self.eval_step, best_model(state), batches, self.mesh, self.config.run.eval_batches)

    def _save(self, step: int, state: TrainState, validation_loss: float | None) -> None:
        self.clock.enter("save")  # here, so that each try of a save has the watchdog's whole limit
        # The step's loss and gradients were finite, but its update may not be, and keep_last would drop a good one.
        if not jax.device_get(_is_finite(state)):
            raise RunFailed(self.reporter.failure(f"the update of step {step} made weights or moments NaN or infinite"))
        if self.saver.save(step, state, self.batches, self.config, validation_loss):
            self.reporter.saved(step)


@jax.jit
def _is_finite(state: TrainState) -> jax.Array:
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats]))


def _restore_or_init(config: Config, compute: precision.Compute, checkpoints: checkpoint.Checkpoints, batches: Any):
    step = checkpoints.latest()
    if step is None:
        return first_state(config, compute)
    saved = checkpoints.saved_config(step)
    checkpoint.refuse_other_run(saved, config, checkpoints.directory.parent)
    if step > config.run.steps:
        raise UserError(
            f"{checkpoints.directory.parent} is at step {step}, past run.steps={config.run.steps}; raise run.steps or "
            "choose another --workdir"
        )
    if step == config.run.steps:
        say(f"the run in {config.run.workdir} is complete at step {step}; a higher run.steps would continue it")
    else:
        say(f"continuing from step {step} in {config.run.workdir}")
    there = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, ema_decay=saved.optim.ema_decay),
        run=dataclasses.replace(config.run, spike_factor=saved.run.spike_factor),
    )
    return with_features(checkpoints.restore(step, abstract_state(there, compute), batches), config)


def first_state(config: Config, compute: precision.Compute) -> TrainState:
    """The state before the first step: fresh, or with the weights that run.init_from names."""
    if not config.run.init_from:
        return init_state(config, compute)
    abstract = abstract_state(config, compute).model
    model, line = checkpoint.initial_model(config.run.init_from, abstract, config.run.init_from_ema)
    say(line)
    return with_features(dataclasses.replace(init_state(config, compute), model=model, average=None), config)


def _announce(config: Config, mesh: jax.sharding.Mesh, compute: precision.Compute, state: TrainState) -> None:
    for name, value, _ in config_lib.differences(config, Config()):
        say(f"  {name} = {value}")
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    say(f"devices: {devices.describe(mesh.devices)}, mesh: {axes}")
    if mesh.shape["stage"] > 1:
        say(f"pipeline: {stages.schedule(config, dict(mesh.shape))}")
    reason = ", since a CPU only emulates bfloat16" if compute.platform == "cpu" and compute.dtype == "float32" else ""
    say(f"weights float32, compute {compute.dtype}{reason}")
    tokens = config.data.batch_size * config.data.seq_len
    active = f" ({active_params(config.model):,} for a token)" if config.model.num_experts else ""
    say(f"parameters: {num_params(state.model):,}{active}, tokens per step: {tokens:,}")
    if state.average is not None:
        say(f"validation and samples: of the weights' moving average (optim.ema_decay={config.optim.ema_decay})")


def _say_sample(config: Config, state: TrainState, tokenizer: data.Tokenizer, compute: precision.Compute) -> None:
    text = generate.sample_text(
        *(best_model(state), tokenizer, config.run.sample_prompt, compute),
        num_tokens=config.run.sample_tokens,
        temperature=0.8,
        seed=config.run.seed,
    )[0]
    say(f"sample after {config.run.sample_prompt!r}:\n{text}")
