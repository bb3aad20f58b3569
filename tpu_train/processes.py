"""Several processes as one run: joining, which rows of the batch are whose, and stopping at the same step.

TPU_TRAIN_PROCESSES says how many make up the run; unset or 1, nothing here happens. `--processes` (local_processes.py)
and the launchers for TPU VMs, GKE and SLURM set it. Where JAX can't find the others by itself, TPU_TRAIN_COORDINATOR
(host:port of process 0) and TPU_TRAIN_PROCESS_ID say where and which.
"""

import json
import os
import re
import sys
import threading
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_train import roll_call
from tpu_train.config import UserError

JOIN_SECONDS = 300  # TPU_TRAIN_JOIN_SECONDS: hosts of one job may start minutes apart


def join() -> None:
    """Joins the run that TPU_TRAIN_PROCESSES names; before anything that asks jax for devices.

    Raises UserError if not all are there within TPU_TRAIN_JOIN_SECONDS, with who is missing as far as it is known, or
    if another number joined.
    """
    count = number("TPU_TRAIN_PROCESSES", 1)
    if count == 1:
        return
    seconds = number("TPU_TRAIN_JOIN_SECONDS", JOIN_SECONDS)
    # Its own handler of SIGTERM would swallow the signal until ours stands.
    jax.config.update("jax_enable_preemption_service", False)
    address = os.environ.get("TPU_TRAIN_COORDINATOR")
    where: dict[str, Any] = {}
    if address is not None:
        index = _index(address, count)
        roll_call.hold(address, index, count, seconds)
        where = {"coordinator_address": address, "num_processes": count, "process_id": index}
        where["cluster_detection_method"] = "deactivate"
        if address.startswith("127."):
            where["coordinator_bind_address"] = address  # JAX's default is every interface
    _hide_stdout_from_libraries()
    # Past its limit jax.distributed aborts with a stack trace, so the limit is ours.
    alarm = threading.Timer(seconds, _too_late, (count, seconds))
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(initialization_timeout=seconds + 60, **where)
    except ValueError as error:
        raise UserError(
            f"TPU_TRAIN_PROCESSES={count}, but JAX finds no cluster here ({error}); on one machine use --processes, "
            "elsewhere set TPU_TRAIN_COORDINATOR=HOST:PORT and TPU_TRAIN_PROCESS_ID"
        ) from None
    finally:
        alarm.cancel()
    if jax.process_count() != count:
        raise UserError(
            f"TPU_TRAIN_PROCESSES={count}, but {jax.process_count()} joined; each host must start its share of them"
        )


def leave() -> None:
    """At the end of a run, with all others: what still waits for one of them, as Orbax may, ends with an error."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()


def _hide_stdout_from_libraries() -> None:
    """Gloo, which connects CPU devices, prints its connections to file 1; what Python prints goes on as before."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)


def _too_late(count: int, seconds: int) -> None:
    print(
        f"tpu-train: fewer than the {count} processes of TPU_TRAIN_PROCESSES joined within {seconds} s; see that each "
        "host started its share, or raise TPU_TRAIN_JOIN_SECONDS",
        file=sys.stderr,
        flush=True,
    )
    os._exit(2)


def number(name: str, default: int) -> int:
    """The environment's `name`, a whole number from 1 on. Raises UserError on anything else."""
    text = os.environ.get(name) or str(default)
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text):
        raise UserError(f"{name}={text} must be a whole number, 1 or more")
    return int(text)


def name() -> str:
    """How this process calls itself in an error."""
    count = jax.process_count()
    return "this process" if count == 1 else f"process {jax.process_index()} of {count}"


def _index(address: str, count: int) -> int:
    if not re.fullmatch(r"[^:]+:\d{1,5}", address):
        raise UserError(f"TPU_TRAIN_COORDINATOR={address} must be HOST:PORT")
    text = os.environ.get("TPU_TRAIN_PROCESS_ID", "")
    if not re.fullmatch(r"\d{1,9}", text) or int(text) >= count:
        raise UserError(f"TPU_TRAIN_PROCESS_ID={text} must be one of 0 to {count - 1} beside TPU_TRAIN_COORDINATOR")
    return int(text)


def batch_share(mesh: Mesh) -> dict[str, int]:
    """Which part of each batch this process loads: {"process_index", "process_count"} for the data pipeline.

    Processes whose devices hold the same rows (`context` or `tensor` goes across them) load the same part. Raises
    UserError where two processes' devices hold overlapping rows that are not the same.
    """
    shards = mesh.devices.reshape(-1, mesh.shape["context"] * mesh.shape["tensor"])
    held: dict[int, set[int]] = {device.process_index: set() for device in mesh.devices.flat}
    for row, devices in enumerate(shards):
        for device in devices:
            held[device.process_index].add(row)
    parts = sorted({tuple(sorted(rows)) for rows in held.values()})
    if len({len(part) for part in parts}) > 1 or sum(map(len, parts)) != len(shards):
        raise UserError(
            f"mesh.context={mesh.shape['context']} x mesh.tensor={mesh.shape['tensor']} splits rows of the batch "
            f"unevenly over {len(held)} processes; take sizes that divide the devices of a process, or that they divide"
        )
    mine = tuple(sorted(held[jax.process_index()]))
    return {"process_index": parts.index(mine), "process_count": len(parts)}


def from_all(value: Any) -> list[Any]:
    """What each process gives, by process; JSON types. All must call it at the same point."""
    if jax.process_count() == 1:
        return [value]
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.array(mine.size, np.int32))
    rows = multihost_utils.process_allgather(np.resize(mine, lengths.max()))
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


class Agreement:
    """Tells every process what any of them asks for, one call later, at the same call everywhere.

    It costs one all-reduced scalar a call: dispatched after a step and read after the next, so that nothing waits.
    """

    def __init__(self, mesh: Mesh):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._maximum = jax.jit(lambda asked: asked.max())
        self._size = mesh.size
        self._pending: jax.Array | None = None

    def ask(self, value: int) -> int:
        """The largest value of the call before over all processes, 0 at the first. All must call it equally often."""
        previous, mine = self._pending, np.full(1, value, np.int32)
        asked = jax.make_array_from_callback((self._size,), self._sharding, lambda _: mine)
        self._pending = self._maximum(asked)
        return 0 if previous is None else int(jax.device_get(previous))
