"""A trace of some steps for xprof or TensorBoard, and the step's program as text. Both only where they are asked for.

WORKDIR/profile/plugins/profile/<time>/ holds the trace, with an event "train" for each step, which has its number, and
the names of the model's parts on its operations (jax.named_scope). WORKDIR/profile/memory_step<N>.prof is what device
memory held after the last of the steps, for pprof. The steps before the first are waited for, and so are all of them at
the end, so the trace holds those steps and nothing of others. One process writes it, of its own devices. A trace that
can't be written is said and ends no run.
"""

import contextlib
from pathlib import Path

import jax

from tpu_train.config import UserError
from tpu_train.goodput import Clock
from tpu_train.report import Reporter, say

FAILURES = (OSError, RuntimeError, ValueError)  # of a full disk, or of another trace of this process


class Profiler:
    """Traces `steps` (None: none). Between `begin` and `end` of a step stands its dispatch, inside `step`."""

    def __init__(self, steps: range | None = None, workdir: Path = Path()):
        self._steps = steps if jax.process_index() == 0 else None
        self._folder = workdir / "profile"
        self._traced: list[int] | None = None  # while a trace is under way

    def continue_from(self, done: int) -> None:
        """Says what of the steps is left, where the run has done some of them already."""
        if self._steps is None or done < self._steps[0]:
            return
        asked = f"--profile_steps={self._steps[0]}:{self._steps[-1]}"
        left = [step for step in self._steps if step > done]
        if left:
            say(f"profile: the run goes on after step {done}; of {asked}, steps {left[0]} to {left[-1]} are traced")
        else:
            say(f"profile: the run has done step {done}, so nothing is traced of {asked}")
        self._steps = range(left[0], left[-1] + 1) if left else None

    def begin(self, step: int, reporter: Reporter, clock: Clock) -> None:
        """Starts the trace if `step` is its first."""
        if self._steps is None or step != self._steps[0]:
            return
        reporter.fetch()
        reporter.log()
        clock.enter("profile")
        with reporter.pause():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)  # here and not at the end, when it would be too late
                jax.profiler.start_trace(self._folder)
                self._traced = []
            except FAILURES as error:
                say(f"profile: no trace could be started ({error})")

    def step(self, step: int) -> contextlib.AbstractContextManager:
        """Around the dispatch of `step`: the trace knows it by its number."""
        if self._traced is None:
            return contextlib.nullcontext()
        self._traced.append(step)
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self, step: int, reporter: Reporter, clock: Clock) -> None:
        """Writes the trace if `step` was its last."""
        if self._traced is None or self._steps is None or step != self._steps[-1]:
            return
        reporter.fetch()
        reporter.log()
        clock.enter("profile")
        with reporter.pause():
            self.close()

    def close(self) -> None:
        """Writes the trace under way, if there is one, however far it came."""
        traced, self._traced = self._traced, None
        if traced is None:
            return
        try:
            jax.profiler.stop_trace()
            if traced:
                jax.profiler.save_device_memory_profile(str(self._folder / f"memory_step{traced[-1]}.prof"))
                say(f"profile: steps {traced[0]} to {traced[-1]} in {self._folder}")
        except FAILURES as error:
            say(f"profile: the trace could not be written to {self._folder} ({error})")


def write_hlo(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, workdir: Path) -> None:
    """WORKDIR/hlo/train_step.lowered.txt, with the names of scopes and source lines, and train_step.compiled.txt."""
    if jax.process_index() != 0:
        return
    folder = workdir / "hlo"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train_step.lowered.txt").write_text(lowered.as_text(debug_info=True))
        (folder / "train_step.compiled.txt").write_text(compiled.as_text() or "")
    except OSError as error:
        raise UserError(f"--dump_hlo: can't write to {folder}: {error.strerror}") from error
