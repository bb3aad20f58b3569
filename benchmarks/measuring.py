"""What tpu.py and gpu.py share: arguments, times of calls on a device, a step of a config that fits, tables."""

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_train import mesh as mesh_lib
from tpu_train import precision, train
from tpu_train.config import Config, UserError
from tpu_train.flops import num_params, train_flops_per_token
from tpu_train.planning import memory
from tpu_train.planning.split import Split
from tpu_train.sharding import outside
from tpu_train.train_step import batch_names, init_state

IN_FLIGHT_BYTES = 2**30  # of results that calls may leave behind while others wait


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of a call: median and range of the repeats by the host's clock; `device` the profiler's, if it has it."""

    median: float
    low: float
    high: float
    device: float | None = None

    @property
    def best(self) -> float:
        """The device's own time where it is known: no dispatch in it."""
        return self.median if self.device is None else self.device


def alone(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` jitted for one device, inside shard_map, which is where kernels run in training; whatever mesh is in use."""
    mesh = jax.make_mesh((1,), ("one",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Explicit,))
    whole = jax.sharding.PartitionSpec()
    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=whole, out_specs=whole))

    def call(*arguments):
        with jax.set_mesh(mesh):
            return run(*arguments)

    return call


def time_calls(
    call: Callable[[], Any],
    *,
    repeats: int = 7,
    lasting: float = 0.05,
    profiled: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Times of `call`, which returns arrays of the device; warm first, and a repeat lasts about `lasting` seconds."""
    result = jax.block_until_ready(call())
    room = max(1, IN_FLIGHT_BYTES // max(1, sum(x.nbytes for x in jax.tree.leaves(result))))
    del result

    def seconds(calls: int) -> float:
        began = clock()
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        return (clock() - began) / calls

    calls = max(1, min(room, math.ceil(lasting / max(seconds(1), 1e-9)), 1000))
    seconds(calls)
    found = [seconds(calls) for _ in range(repeats)]
    device = device_seconds(call, min(calls, 20)) if profiled else None
    return Timing(statistics.median(found), min(found), max(found), device)


def device_seconds(call: Callable[[], Any], calls: int) -> float | None:
    """Seconds that the device's own profile gives a call; None where it has no line of whole programs, as on a CPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                last = call()
            jax.block_until_ready(last)
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))  # held while its planes are read
        return module_seconds(list(profile.planes), calls)


def module_seconds(planes: Sequence[Any], calls: int) -> float | None:
    """The time of the devices' lines "XLA Modules", each of whose events is one program's run, over `calls`."""
    lines = [line for plane in planes if plane.name.startswith("/device:") for line in plane.lines]
    events = [event.duration_ns for line in lines if line.name == "XLA Modules" for event in line.events]
    return sum(events) / 1e9 / calls if len(events) >= calls else None


def random_arguments(structs: Any, seed: int = 0) -> Any:
    """Arrays for a tree of ShapeDtypeStructs: normal numbers, and ids below 128."""
    rng = np.random.default_rng(seed)

    def draw(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype)
        return jnp.asarray(rng.integers(0, 128, x.shape), x.dtype)

    return jax.tree.map(draw, structs)


def cut_to_fit(config: Config, devices: int, room: float, dtype: str = "bfloat16") -> Config:
    """`config` with as many layers, then rows, as the plan's memory model puts into `room` bytes of each device.

    Weights are split over all `devices`. The least remat that fits with all layers is taken, else full remat with fewer
    layers. Raises UserError if not even one group of layers with one row a device fits.
    """
    group = len(config.model.window_pattern)

    def fits(layers: int, remat: Any, rows: int) -> Config | None:
        model = dataclasses.replace(config.model, num_layers=layers, remat=remat)
        data = dataclasses.replace(config.data, batch_size=rows)
        made = dataclasses.replace(
            config, model=model, data=data, mesh=dataclasses.replace(config.mesh, data=1, fsdp=-1)
        )
        split = Split(fsdp=devices, accumulation=made.optim.accumulation_steps, remat=remat, dtype=dtype)
        return made if memory.training(made, split).total <= room else None

    rows = max(devices, config.data.batch_size // devices * devices)
    tries = [(config.model.num_layers, remat, rows) for remat in ("none", "dots", "full")]
    tries += [(layers, "full", rows) for layers in range(config.model.num_layers - group, 0, -group)]
    tries += [(group, "full", n * devices) for n in range(rows // devices - 1, 0, -1)]
    found = next(filter(None, (fits(*each) for each in tries)), None)
    if found is None:
        raise UserError(f"not even {group} layer(s) of this config with a row a device fit {room / 2**30:.1f} GiB")
    return found


def usable_bytes(device: jax.Device) -> float | None:
    """What programs can have of the device's memory; None where it does not say."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else 0.95 * limit


def random_batch(config: Config, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """[A, B, T] of random tokens, one document a row."""
    micro = config.optim.accumulation_steps
    shape = (micro, config.data.batch_size // micro, config.data.seq_len)
    rng = np.random.default_rng(0)
    arrays = {
        "tokens": rng.integers(0, config.model.vocab_size, shape, dtype=np.int32),
        "labels": rng.integers(0, config.model.vocab_size, shape, dtype=np.int32),
        "positions": np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape),
        "weights": np.ones(shape, np.float32),
        "segment_ids": np.ones(shape, np.int32),
        "places": np.arange(np.prod(shape), dtype=np.int32).reshape(shape),
    }
    sharding = jax.NamedSharding(mesh, outside("ABT", mesh))
    return {name: jax.device_put(arrays[name], sharding) for name in batch_names(config)}


def time_step(
    config: Config,
    devices: Sequence[jax.Device],
    peak: float | None,
    *,
    steps: int = 5,
    repeats: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """The training step of `config` on `devices`: seconds, MFU against `peak` FLOP/s of a device, memory, losses."""
    mesh = mesh_lib.make_mesh(config.mesh, devices)
    mesh_lib.check_fits(config, mesh)
    compute = precision.resolve(config.run, mesh_lib.platform(mesh))
    step = train.compile_step(config, compute, mesh)
    state, batch = init_state(config, compute), random_batch(config, mesh)
    measured, losses, norms = [], [], []
    for _repeat in range(repeats + 1):  # the first warms up
        began = clock()
        for _ in range(steps):
            state, values = step(state, batch)
        jax.block_until_ready((state, values))
        measured.append((clock() - began) / steps)
        losses.append(float(values["loss"]))
        norms.append(float(values["grad_norm"]))
    tokens = config.data.batch_size * config.data.seq_len
    seconds = statistics.median(measured[1:])
    useful = tokens * train_flops_per_token(config.model, config.data.seq_len) / len(devices)
    said = step.memory_analysis()
    held = said.argument_size_in_bytes + said.output_size_in_bytes - said.alias_size_in_bytes + said.temp_size_in_bytes
    return {
        "seconds": seconds,
        "range": [min(measured[1:]), max(measured[1:])],
        "tokens_per_second": tokens / seconds,
        "mfu": None if peak is None else useful / seconds / peak,
        "memory_bytes": held,
        "losses": losses,
        "grad_norms": norms,
        "parameters": num_params(config.model),
        "layers": config.model.num_layers,
        "rows": config.data.batch_size,
        "remat": config.model.remat,
    }


def show_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [" | ".join(map(str, row)) for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(f"| {line} |" for line in lines)
