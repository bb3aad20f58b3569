"""Several steps on a mesh beside the same steps on one device: loss, gradient norm, weights, first values, masks of
dropout, sharding.

All in float32. The tolerances: devices add up the same numbers in another order, so a sum of n terms is off by about
n^1/2 2^-24; for the thousands of terms behind a loss or a norm that is 1e-6 to 4e-6, and LOSS and NORM allow 1e-5.
Weights are measured against the farthest that any weight of their array went, since their own size says nothing of a
step. There an error of a gradient counts by learning rate / eps (shrink.py sets both) where Adam's gradient is small,
and Muon's iterations raise small singular values some hundred times: 1e-4, and MOVED allows 1e-3. A first moment kept
in bfloat16 may be rounded the other way, by 2^-8, and that is added.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_train import context, precision, train_step
from tpu_train import mesh as mesh_lib
from tpu_train.checking import batches, table
from tpu_train.checking.meshes import Case
from tpu_train.checking.results import Check, Measure, broken
from tpu_train.config import Config
from tpu_train.models.dropout import Dropout, key_of
from tpu_train.sharding import outside

LOSS = NORM = 1e-5
MOVED = 1e-3
ROUNDED = 2.0**-8  # of a moment in bfloat16

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass
class Prepared:
    """A mesh with its step compiling."""

    config: Config
    mesh: jax.sharding.Mesh
    compute: precision.Compute
    step: Future


@dataclasses.dataclass
class Run:
    """What came of the steps on a mesh."""

    first: Arrays  # the state that the mesh begins with by itself
    metrics: np.ndarray  # loss and gradient norm of each step
    weights: Arrays  # after the last step, and their average where it is kept
    wrong: list[str]  # arrays that are not sharded as the table says
    masks: np.ndarray  # what the last MLP's dropout keeps in the first step, in the data's order of tokens; or empty


def on_mesh(config: Config, case: Case) -> tuple[Config, jax.sharding.Mesh, precision.Compute]:
    """The config with the mesh in it, that mesh, set, and how it computes."""
    config = dataclasses.replace(config, mesh=case.mesh(config.mesh))
    count = int(np.prod(list(case.sizes.values())))
    mesh = mesh_lib.make_mesh(config.mesh, jax.devices()[:count])
    mesh_lib.check_fits(config, mesh)
    return config, mesh, precision.resolve(config.run, mesh_lib.platform(mesh), config.mesh)


def prepare(config: Config, case: Case, pool: ThreadPoolExecutor) -> Prepared:
    """Traces the step and has it compiled."""
    config, mesh, compute = on_mesh(config, case)
    lowered = train_step.trace_step(config, compute, mesh).lower()
    return Prepared(config, mesh, compute, pool.submit(lowered.compile))


def run(prepared: Prepared, begin: Arrays | None) -> Run:
    """The steps on a mesh from the state `begin` (None: its own)."""
    config, mesh, compute = prepared.config, prepared.mesh, prepared.compute
    with jax.set_mesh(mesh):
        state = train_step.init_state(config, compute)
        wrong = [f"at first {line}" for line in table.wrong(table.rows(state), dict(mesh.shape))]
        first = named(state)
        if begin is not None:
            state = placed(begin, train_step.abstract_state(config, compute))
        step, metrics, masks = prepared.step.result(), [], np.zeros(0, bool)
        for batch in batches.step_batches(config, config.run.steps):
            placed_batch = place(batch, config, mesh)
            if config.model.dropout and not masks.size:
                masks = _masks(config, compute, state.step, placed_batch["places"][0])
            state, measured = step(state, placed_batch)
            metrics.append([float(measured[name]) for name in ("loss", "grad_norm")])
        wrong += [f"after a step {line}" for line in table.wrong(table.rows(state), dict(mesh.shape))]
        weights = {key: x for key, x in named(state).items() if key.startswith((".model", ".average"))}
        return Run(first, np.array(metrics), weights, wrong, masks)


def _masks(config: Config, compute: precision.Compute, step: jax.Array, places_BT: jax.Array) -> np.ndarray:
    """`Run.masks`, bool [tokens, D]."""

    @jax.jit
    def kept(step, places_BT):
        drops = Dropout(config.model.dropout, key_of(compute.seed, step), places_BT)
        x_BTD = jnp.ones((*places_BT.shape, config.model.model_dim), out_sharding=outside("BTD"))
        return drops.layers_on(config.model.num_layers - 1).of_part(x_BTD, 1) != 0

    found = np.asarray(kept(step, places_BT)).reshape(-1, config.model.model_dim)
    return found[np.argsort(np.asarray(places_BT).reshape(-1))]


def first_state(config: Config, case: Case) -> Arrays:
    """What a mesh begins with."""
    config, mesh, compute = on_mesh(config, case)
    with jax.set_mesh(mesh):
        return named(train_step.init_state(config, compute))


def place(batch: batches.Batch, config: Config, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """A batch of [A, B, T] as train.py puts it on the mesh."""
    C, sharding = mesh.shape["context"], jax.NamedSharding(mesh, outside("ABT", mesh))
    return {name: jax.device_put(context.reorder(batch[name], C), sharding) for name in train_step.batch_names(config)}


def named(tree: Any) -> Arrays:
    """The arrays of a tree by their paths."""
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def placed(arrays: Arrays, like: Any) -> Any:
    """The inverse of `named`, with the structure and shardings of `like`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(arrays[jax.tree_util.keystr(path)], x.sharding), like
    )


def compare(name: str, got: Run, wanted: Run, moment_dtype: str = "float32") -> Check:
    """The steps of one mesh beside those of one device."""
    allowed = MOVED + (ROUNDED if moment_dtype == "bfloat16" else 0.0)
    off = np.abs(got.metrics - wanted.metrics) / np.abs(wanted.metrics)
    loss, norm = (float(column) for column in np.max(off, axis=0))  # NaN where there is one
    errors = {
        key: relative(got.weights[key], w, float(np.max(np.abs(w - wanted.first[key]))))
        for key, w in wanted.weights.items()
    }
    worst, moved = farthest(errors)
    note = "" if moved <= allowed else f"the weight farthest off is {table.short(worst)}"
    measures = Measure("loss", loss, LOSS), Measure("gradient norm", norm, NORM), Measure("weights", moved, allowed)
    return Check(f"steps on {name}", measures, note)


def relative(got: np.ndarray, wanted: np.ndarray, scale: float) -> float:
    """The largest difference over `scale`; where that is 0, 0 or infinite. NaN where a difference is."""
    largest = float(np.max(np.abs(got.astype(np.float64) - wanted)))
    return largest / scale if scale else (largest and float("inf"))


def farthest(errors: Mapping[str, float]) -> tuple[str, float]:
    """The name of the largest error, and the error; NaN is larger than any."""
    worst = max(errors, key=lambda key: float("inf") if np.isnan(errors[key]) else errors[key])
    return worst, errors[worst]


def on_meshes(config: Config, cases: Iterable[Case], alone: Case) -> Iterator[Check]:
    """A check of the steps for each mesh, then those of first values and of sharding over all of them."""
    runs: dict[str, Run] = {}
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        waiting = [(case, attempt(prepare, config, case, pool)) for case in (alone, *cases)]
        for case, prepared in waiting:
            done = prepared
            if not isinstance(prepared, Exception):
                done = attempt(run, prepared, runs[alone.name].first if runs else None)
            if isinstance(done, Exception):
                yield broken(f"steps on {case.name}", done)
                if case is alone:
                    return
                continue
            runs[case.name] = done
            if case is not alone:
                yield compare(case.name, done, runs[alone.name], config.optim.moment_dtype)
    yield first_values(runs, alone)
    if config.model.dropout:
        yield masks(runs, alone)
    yield sharding(runs, alone)


def attempt(function: Callable, *arguments: Any) -> Any:
    """What the function returns, or the exception that it raises: one check that breaks must not end the others."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def first_values(runs: dict[str, Run], alone: Case) -> Check:
    """The state that each mesh begins with, bit by bit beside that of one device."""
    wanted, found = runs[alone.name].first, {}
    for name, done in runs.items():
        other = [key for key, x in wanted.items() if x.tobytes() != done.first[key].tobytes()]
        if other:
            found[name] = other
    where = "; ".join(f"{table.short(keys[0])} and {len(keys) - 1} more on {name}" for name, keys in found.items())
    worst = max((len(keys) for keys in found.values()), default=0)
    note = where or f"{len(wanted)} arrays have the same bits on {len(runs)} meshes"
    return Check("initial state", (Measure("arrays with other bits", worst, 0),), note)


def masks(runs: dict[str, Run], alone: Case) -> Check:
    """What dropout keeps on each mesh, bit by bit beside that of one device."""
    wanted = runs[alone.name].masks
    found = {name: int(np.count_nonzero(done.masks != wanted)) for name, done in runs.items()}
    where = "; ".join(f"{name}: {count} other elements" for name, count in found.items() if count)
    share = f"{np.mean(wanted):.1%} of {np.size(wanted)} elements are kept, the same on {len(runs)} meshes"
    return Check("dropout", (Measure("elements kept otherwise", max(found.values()), 0),), where or share)


def sharding(runs: dict[str, Run], alone: Case) -> Check:
    """The state's arrays as they lie on each mesh, at first and after a step, beside the table."""
    wrong = {name: done.wrong for name, done in runs.items() if done.wrong}
    note = "; ".join(f"{name}: {lines[0]} ({len(lines)} in all)" for name, lines in wrong.items())
    worst = max((len(lines) for lines in wrong.values()), default=0)
    note = note or f"{len(runs[alone.name].first)} arrays on {len(runs)} meshes are sharded as the table says"
    return Check("sharding in the run", (Measure("arrays sharded otherwise", worst, 0),), note)
