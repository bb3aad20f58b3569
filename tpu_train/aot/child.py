"""The process that compiles a train step, by libtpu or by XLA for cards: `python -P -m tpu_train.aot.child FOLDER`.

FOLDER/request.json lists steps, {"config", "topology", "num_slices", "root"}; FOLDER/<i>.json says what became of each,
as soon as it is known. XLA dumps into FOLDER/dump (XLA_FLAGS), also what does not fit, and libtpu the schedules.
"""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from pallas_kernels import hlo_cost
from tpu_train import config as config_lib
from tpu_train import layout, offload, precision
from tpu_train import mesh as mesh_lib
from tpu_train.aot import cards, cards_time, collectives, flops, kernels, memory, traffic
from tpu_train.flops import train_flops_per_token
from tpu_train.models import moe
from tpu_train.models.transformer import num_params
from tpu_train.sharding import dims_of_path
from tpu_train.train_step import TrainState, abstract_state, trace_step

OUT_OF_MEMORY = re.compile(r"memory required for (.*?) \(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)")


def main(folder: Path) -> None:
    """Answers every request."""
    for i, request in enumerate(json.loads((folder / "request.json").read_text())):
        try:
            answer = answer_one(request, folder / "dump")
        except config_lib.UserError as error:
            answer = {"bad": str(error)}
        shutil.rmtree(folder / "dump", ignore_errors=True)
        (folder / "dump").mkdir()
        (folder / f"{i}.part").write_text(json.dumps(answer))
        (folder / f"{i}.part").rename(folder / f"{i}.json")


def answer_one(request: dict[str, Any], dump: Path) -> dict[str, Any]:
    """What the compiler makes of one step. Raises UserError on what does not fit together."""
    config = config_lib.from_dict(request["config"])
    card = cards.of_topology(request["topology"])
    try:
        devices = devices_of(request, card)
    except Exception as error:
        return {"no topology": str(error)}
    mesh = mesh_lib.make_mesh(config.mesh, devices)
    mesh_lib.check_fits(config, mesh)
    if card:
        check_cards(config, mesh, request["num_slices"])
    compute = precision.resolve(config.run, mesh_lib.platform(mesh), config.mesh)
    state = abstract_state(config, compute)
    traced = trace_step(config, compute, mesh)
    filled = rows_filled(config, dict(mesh.shape))
    known = facts(config, compute, mesh, state, request["num_slices"])
    known |= flops.count(traced.jaxpr, mesh.size, config.model, filled)
    try:
        compiled: Any = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        known |= refusal(str(error))
        if "refused" in known:
            return known
        text = None
    else:
        known |= sizes(compiled.memory_analysis())
        text = text_of(compiled)
    if card:
        return known | too_large(known, card) | reading_of_cards(dump, known, dict(mesh.shape), request["root"], card)
    # The compiler gives a slice's devices numbers of their own.
    within = {axis: size // known["slices"][axis] for axis, size in mesh.shape.items()}
    return known | reading(dump, text, within, request, filled)


def devices_of(request: dict[str, Any], card: cards.Card | None) -> list[Any]:
    """Devices of the topology, which exist for the compiler alone; raises what JAX does."""
    if card:
        name = cards.xla_name(request["topology"], request["num_slices"])
        options = {"topology": name, "target_config": card.target()}
        return list(topologies.get_topology_desc(platform="cuda", topology_name=name, **options).devices)
    options = {"num_slices": request["num_slices"]} if request["num_slices"] > 1 else {}
    if request["topology"].startswith("v4:"):
        options["chip_config_name"] = "megacore"  # one device per chip, as a v4 has it by default; libtpu's is two
    return list(topologies.get_topology_desc(platform="tpu", topology_name=request["topology"], **options).devices)


def check_cards(config: config_lib.Config, mesh: jax.sharding.Mesh, hosts: int) -> None:
    """Raises UserError for what cards can't be compiled or counted for."""
    if config.model.num_experts:
        raise config_lib.UserError("compile can't count experts' products on NVIDIA cards: XLA loops over their rows")
    if config.optim.offload or config.model.remat == "offload_dots":
        raise config_lib.UserError("compile can't offload on NVIDIA cards: XLA knows no host's memory beside them here")
    if mesh.shape["data"] % hosts:
        raise config_lib.UserError(
            f"mesh.data={mesh.shape['data']} is not a multiple of the {hosts} hosts; only `data` goes across them"
        )


def rows_filled(config: config_lib.Config, size: dict[str, int]) -> float:
    """Of the rows that a device has room for in its experts' products, the share that comes if loads are even."""
    if not config.model.num_experts or size["expert"] == 1:
        return 1.0
    rows = config.data.batch_size // config.optim.accumulation_steps // (size["data"] * size["expert"] * size["fsdp"])
    length = config.data.seq_len // size["context"]
    room = moe.rows_at_home(config.model, size["expert"], rows, length, size["context"])
    return rows * length * config.model.experts_per_token / room


def facts(
    config: config_lib.Config, compute: precision.Compute, mesh: jax.sharding.Mesh, state: TrainState, slices: int
) -> dict[str, Any]:
    """What is known without the compiler: devices, mesh, dtypes, bytes by shape."""
    micro = config.optim.accumulation_steps
    gradients = sum(
        shard_bytes(x, None if micro > 1 or is_float32(path) else compute.dtype.itemsize)
        for path, x in jax.tree_util.tree_leaves_with_path(state.model.blocks)
    )
    rest = [x for x in jax.tree.leaves(state.model) if not any(x is y for y in jax.tree.leaves(state.model.blocks))]
    device = mesh.devices.flat[0]
    return {
        "device_kind": device.device_kind,
        "num_devices": mesh.size,
        "mesh": {axis: size for axis, size in mesh.shape.items()},
        "slices": layout.across_slices(config.mesh, dict(mesh.shape), slices),
        "compute": str(compute.dtype),
        "implementation": compute.implementation,
        "parameters": num_params(state.model),
        "tokens": config.data.batch_size * config.data.seq_len,
        "model_flops_per_token": train_flops_per_token(config.model, config.data.seq_len),
        "parameter_bytes": sum(shard_bytes(x) for x in jax.tree.leaves(state.model)),
        "optimizer_bytes": sum(shard_bytes(x) for x in jax.tree.leaves(state.opt_state) if not offload.waits(x)),
        "host_bytes": sum(shard_bytes(x) for x in jax.tree.leaves(state.opt_state) if offload.waits(x)),
        "gradient_bytes": gradients + sum(shard_bytes(x) for x in rest),
    }


def shard_bytes(x: jax.ShapeDtypeStruct, itemsize: int | None = None) -> int:
    """Bytes of one device's part, without the padding of a layout."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return int(np.prod(shape)) * (itemsize or x.dtype.itemsize)


def is_float32(path: tuple[Any, ...]) -> bool:
    """Whether the gradient of a block's parameter is float32: a norm's scale, a router."""
    dims, _ = dims_of_path(path)
    return len(dims) == 1 or dims in precision.KEPT_FLOAT32


def refusal(message: str) -> dict[str, Any]:
    """An answer for a step that does not fit into memory, or that the compiler refuses for another reason."""
    found = OUT_OF_MEMORY.search(message)
    if found is None:
        return {"refused": next((line for line in message.splitlines() if line.strip()), "no message")[:400]}
    unit = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return {
        "out of memory": found[1],
        "needed_bytes": round(float(found[2]) * unit[found[3]]),
        "available_bytes": round(float(found[4]) * unit[found[5]]),
    }


def sizes(memory_analysis: Any) -> dict[str, Any]:
    """Bytes of HBM that a program which fits needs."""
    return {
        "argument_bytes": memory_analysis.argument_size_in_bytes,
        "output_bytes": memory_analysis.output_size_in_bytes,
        "aliased_bytes": memory_analysis.alias_size_in_bytes,
        "temporary_bytes": memory_analysis.temp_size_in_bytes,
        "host_temporary_bytes": memory_analysis.host_temp_size_in_bytes,
    }


def too_large(known: dict[str, Any], card: cards.Card) -> dict[str, Any]:
    """XLA compiles for cards what their memory does not hold; this says so, in the words of a TPU's refusal."""
    needed = known["argument_bytes"] + known["output_bytes"] - known["aliased_bytes"] + known["temporary_bytes"]
    what = {"out of memory": "device memory", "needed_bytes": needed} if needed > card.usable_bytes else {}
    return {"available_bytes": int(card.usable_bytes)} | what


def text_of(compiled: Any) -> str | None:
    """The module's text; None where jaxlib can't read back what libtpu compiled, as of steps for 7x (libtpu 0.0.52)."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError:
        return None


def reading(
    dump: Path, text: str | None, mesh: dict[str, int], request: dict[str, Any], filled: float
) -> dict[str, Any]:
    """What the compiled module says of buffers, work and traffic, on one device.

    `mesh`: the sizes within a slice. `text` is the module's; None takes the dump's, in which no instruction has its
    cycles yet. `filled`: of the experts' rows.
    """
    root, generation = request["root"], request["topology"].partition(":")[0]
    (module_file,) = dump.glob("*jit_train_step*.after_optimizations.txt")
    read = hlo_cost.parse(module_file.read_text() if text is None else text)
    live = module_file.with_name(module_file.name.replace(".txt", "-live-range.txt")).read_text()
    buffers = memory.at_peak(live, read, root)
    walked = list(read.walk())
    calls = kernels.find(read, dump, generation, filled)
    cycles = {call.instruction: call.cycles for call in calls if call.cycles is not None}
    whole = dataclasses.replace(read, kernel_cycles=cycles)
    return {
        "peak_bytes": sum(buffer.bytes for buffer in buffers),
        "buffers": [vars(buffer) for buffer in buffers if not buffer.argument][:40],
        "cycles": read.total_cycles if text is not None else None,
        "unknown_loops": sum(i.op == "while" and read.trips(i) is None for _, _, _, i in walked),
        "kernel_calls": sum(runs for runs, _, _, i in walked if hlo_cost.KERNEL in i.rest),
        "schedules": [vars(call) for call in calls],
        "bytes_accessed": traffic.hbm_bytes(read),
        "collectives": [vars(c) | {"wire_bytes": c.wire_bytes} for c in collectives.find(whole, mesh, root)],
    }


def reading_of_cards(
    dump: Path, known: dict[str, Any], mesh: dict[str, int], root: str, card: cards.Card
) -> dict[str, Any]:
    """The same of a module compiled for cards. Its "cycles_meanwhile" are nanoseconds, by the roofline."""
    (module_file,) = dump.glob("*jit_train_step*_gpu_after_optimizations.txt")
    read = hlo_cost.parse(module_file.read_text())
    live = module_file.with_name(module_file.name.replace(".txt", "-live-range.txt")).read_text()
    buffers = memory.at_peak(live, read, root)
    times = cards_time.nanoseconds(read, card, known["flops_by_kernel"])
    whole = dataclasses.replace(read, kernel_cycles=times)
    return {
        "peak_bytes": sum(buffer.bytes for buffer in buffers),
        "buffers": [vars(buffer) for buffer in buffers if not buffer.argument][:40],
        "cycles": None,
        "roofline_seconds": whole.total_cycles / 1e9,
        "unknown_loops": sum(i.op == "while" and read.trips(i) is None for _, _, _, i in read.walk()),
        "kernel_calls": sum(
            runs for runs, _, _, i in read.walk() if any(target in i.rest for target in cards_time.CUDNN.values())
        ),
        "schedules": [],
        "bytes_accessed": traffic.hbm_bytes(read),
        "collectives": [vars(c) | {"wire_bytes": c.wire_bytes} for c in collectives.find(whole, mesh, root)],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
