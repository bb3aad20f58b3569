"""Before a run of several processes: who is there, who is missing, which rows of the batch are whose."""

import os
import re
import socket
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from tpu_train import local_processes, processes, roll_call
from tpu_train.config import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def outcomes(address, members, seconds):
    """What each (index, count) of `members` gets from the roll call: None or the error."""

    def member(place):
        try:
            return roll_call.hold(address, *place, seconds)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(member, members))


def test_all_are_let_through_once_they_are_there(address):
    assert outcomes(address, [(2, 4), (1, 4), (0, 4), (3, 4)], 120) == [None] * 4


def test_the_missing_are_named_to_all_who_came(address):
    got = outcomes(address, [(0, 5), (3, 5), (1, 5)], 3)
    assert got == ["3 of 5 processes joined within 3 s; missing: 2, 4"] * 3


def test_a_missing_process_0_is_named(address):
    (got,) = outcomes(address, [(1, 2)], 0.5)
    assert got.startswith(f"process 0 of 2 was not found at {address} within 0.5 s: ")


def test_processes_that_contradict_each_other_are_refused(address):
    assert outcomes(address, [(0, 2), (1, 3)], 120) == ["process 1 was started as one of 3, process 0 as one of 2"] * 2
    assert outcomes(address, [(0, 3), (1, 3), (1, 3)], 120) == ["two processes were started as process 1 of 3"] * 3


def test_a_stranger_on_the_port_is_passed_over(address):
    host, port = address.split(":")

    def stranger():
        while True:
            try:
                with socket.create_connection((host, int(port))) as connection:
                    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                    return
            except ConnectionRefusedError:
                pass

    thread = threading.Thread(target=stranger)
    thread.start()
    assert outcomes(address, [(0, 2)], 2) == ["1 of 2 processes joined within 2 s; missing: 1"]
    thread.join()


def tpu_train(tmp_path, **variables):
    """(exit code, stderr) of a training run as one process of several."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA")}
    environment |= {"PYTHONPATH": str(ROOT), "TPU_TRAIN_JOIN_SECONDS": "2", **variables}
    flags = [f"--config={ROOT / 'configs/tiny.py'}", f"--workdir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "tpu_train.main", "train", *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert not (tmp_path / "run").exists()
    return done.returncode, done.stderr


def test_a_run_without_one_of_its_processes_says_which(tmp_path, address):
    variables = {"TPU_TRAIN_PROCESSES": "2", "TPU_TRAIN_COORDINATOR": address, "TPU_TRAIN_PROCESS_ID": "0"}
    message = "tpu-train: 1 of 2 processes joined within 2 s; missing: 1\n"
    assert tpu_train(tmp_path, **variables) == (2, message)


@pytest.mark.parametrize("there", ["1", "3"])
def test_a_cluster_of_another_number_of_processes_is_refused(tmp_path, there):
    """JAX's own discovery finds a SLURM job of one process, which joins, and one of three, of which two never come."""
    cluster = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NTASKS": there}
    cluster |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "TPU_TRAIN_PROCESSES": "2"}
    code, error = tpu_train(tmp_path, **cluster)
    wanted = (
        "TPU_TRAIN_PROCESSES=2, but 1 joined" if there == "1" else "fewer than the 2 processes .* joined within 2 s"
    )
    assert code == 2
    assert re.match(f"tpu-train: {wanted}", error)
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TPU_TRAIN_PROCESSES": "two"}, "TPU_TRAIN_PROCESSES=two must be a whole number, 1 or more"),
        ({"TPU_TRAIN_PROCESSES": "0"}, "TPU_TRAIN_PROCESSES=0 must be a whole number, 1 or more"),
        ({"TPU_TRAIN_JOIN_SECONDS": "-1"}, "TPU_TRAIN_JOIN_SECONDS=-1 must be a whole number, 1 or more"),
        ({"TPU_TRAIN_COORDINATOR": "here"}, "TPU_TRAIN_COORDINATOR=here must be HOST:PORT"),
        (
            {"TPU_TRAIN_COORDINATOR": "here:1", "TPU_TRAIN_PROCESS_ID": "2"},
            "TPU_TRAIN_PROCESS_ID=2 must be one of 0 to 1",
        ),
        ({"TPU_TRAIN_COORDINATOR": "here:1"}, "TPU_TRAIN_PROCESS_ID= must be one of 0 to 1"),
    ],
)
def test_bad_variables_are_one_line(monkeypatch, variables, message):
    for name, value in ({"TPU_TRAIN_PROCESSES": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        processes.join()


def test_one_process_joins_nothing(monkeypatch):
    for value in ("", "1"):
        monkeypatch.setenv("TPU_TRAIN_PROCESSES", value)
        processes.join()
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    ("count", "there", "wanted"),
    [
        (1, None, False),
        (1, "4", False),
        (4, "4", False),
        (4, None, True),
        (4, "1", True),
        (4, "2", None),
        (0, None, None),
    ],
)
def test_who_starts_the_processes(monkeypatch, count, there, wanted):
    monkeypatch.delenv("TPU_TRAIN_PROCESSES", raising=False)
    if there is not None:
        monkeypatch.setenv("TPU_TRAIN_PROCESSES", there)
    if wanted is None:
        with pytest.raises(UserError, match=f"--processes={count} "):
            local_processes.wanted(count)
    else:
        assert local_processes.wanted(count) == wanted


@pytest.mark.parametrize(
    ("owners", "tensor", "shares"),
    [
        ([0, 0, 1, 1], 1, [(0, 2), (1, 2)]),
        ([0, 0, 1, 1], 2, [(0, 2), (1, 2)]),
        ([0, 1, 0, 1], 2, [(0, 1), (0, 1)]),  # tensor goes across: both hold every row
        ([0, 1, 0, 1], 1, [(0, 2), (1, 2)]),
        ([0, 0, 1, 2, 3, 3, 1, 2], 2, [None] * 4),
        ([0, 1, 2, 3, 0, 1, 2, 3], 4, [(0, 1)] * 4),
        ([0, 0, 1, 1, 2, 2, 3, 3], 4, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_processes_load_the_rows_that_their_devices_hold(monkeypatch, owners, tensor, shares, axis):
    devices = np.array([types.SimpleNamespace(process_index=owner) for owner in owners], object)
    shape = {"context": 1, "tensor": 1} | {axis: tensor}
    mesh = types.SimpleNamespace(devices=devices.reshape(-1, 1, *shape.values()), shape=shape)
    for index, share in enumerate(shares):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        if share is None:
            with pytest.raises(UserError, match="splits rows of the batch unevenly over 4 processes"):
                processes.batch_share(mesh)
        else:
            assert processes.batch_share(mesh) == {"process_index": share[0], "process_count": share[1]}
