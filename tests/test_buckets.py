"""A run whose folder is in a bucket, against a real server of the Cloud Storage API on loopback."""

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

import pytest

from tpu_train import paths
from tpu_train.config import Config, UserError, apply_override, check

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
CONFIG = """
from tpu_train.config import *


def config():
    return Config(
        model=ModelConfig(num_layers=1, model_dim=16, num_heads=2, mlp_dim=32),
        data=DataConfig(seq_len=16, batch_size=4),
        optim=OptimConfig(warmup_steps=2),
        checkpoint=CheckpointConfig(every_steps=10, keep_last=2),
        run=RunConfig(steps=40, log_every=1, eval_every=20, eval_batches=1, sample_tokens=0),
    )
"""


class Bucket:
    """gs://bucket-of-runs of a server on this machine, looked into by plain HTTP."""

    def __init__(self, log):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        start = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}"]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*start, "--in-memory", "--default-bucket=bucket-of-runs"], stdout=output, stderr=output
            )
        limit = time.monotonic() + 60
        while True:
            try:
                self.names()
                return
            except urllib.error.URLError:
                assert time.monotonic() < limit, log.read_text()
                assert self.process.poll() is None, log.read_text()
                time.sleep(0.1)

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


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    bucket = Bucket(tmp_path_factory.mktemp("server") / "log")
    yield bucket
    bucket.process.kill()
    bucket.process.wait()


@pytest.fixture(scope="module")
def command(bucket, tmp_path_factory):
    """command(name, arguments...): starts tpu-train, with its output in a pipe."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "config.py").write_text(CONFIG)
    environment = os.environ | {
        "STORAGE_EMULATOR_HOST": bucket.url,
        "TENSORSTORE_GCS_HTTP_URL": bucket.url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # it asks Google what kind of bucket it is
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": re.sub(r"(device_count)=\d+", r"\1=1", os.environ.get("XLA_FLAGS", "")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }

    def start(name, *arguments):
        config = [f"--config={folder / 'config.py'}"] if name == "train" else []
        return subprocess.Popen(
            [sys.executable, "-m", "tpu_train.main", name, *config, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    return start


def finish(child):
    out = child.communicate(timeout=240)[0]
    assert child.returncode == 0, out
    return out


def test_a_killed_run_in_a_bucket_goes_on_to_the_bits_of_one_in_a_folder(bucket, command, tmp_path):
    finish(command("train", f"--workdir={tmp_path / 'run'}"))
    where = "gs://bucket-of-runs/a/run"
    child = command("train", f"--workdir={where}", "--set=run.steps=40")
    for line in child.stdout:
        if line.startswith("step 15/40"):
            break
    limit = time.monotonic() + 60
    while "a/run/checkpoints/10/manifest.json" not in bucket.names():
        assert time.monotonic() < limit
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    # What a save that was killed leaves: a folder without a manifest.
    bucket.write("a/run/checkpoints/30/state/d/half", b"half")
    out = finish(command("train", f"--workdir={where}"))
    assert re.search(rf"^continuing from step (10|20) in {where}$", out, re.MULTILINE), out
    assert finish(command("diff", str(tmp_path / "run"), where)).count("differ") == 0
    names = bucket.names()
    assert {name.split("/")[3] for name in names if name.startswith("a/run/checkpoints/")} == {"30", "40"}
    assert "a/run/checkpoints/30/state/d/half" not in names
    assert bucket.read("a/run/loss.png").startswith(b"\x89PNG")
    assert bucket.read("a/run/metrics.jsonl").count(b"\n") == 40
    assert bucket.read("a/run/goodput.jsonl").count(b"\n") >= 40

    damaged = next(name for name in names if re.match(r"a/run/checkpoints/40/state/.*/d/", name))
    content = bytearray(bucket.read(damaged))
    content[len(content) // 2] ^= 1
    bucket.write(damaged, bytes(content))
    out = finish(command("eval", f"--workdir={where}"))
    assert f"{where}/checkpoints/40 is damaged and skipped: " in out
    assert "another checksum than was saved" in out


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
