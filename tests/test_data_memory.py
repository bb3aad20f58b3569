"""Memory of the pipeline over many batches stays where it was, as benchmarks/data_throughput.py measures it."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from tpu_train.config import DataConfig
from tpu_train.data import pipeline, write_tokens

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import data_throughput  # noqa: E402

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
BOUND = 8e6  # bytes; the batches drawn meanwhile hold a hundred times as much


@pytest.fixture
def config(tmp_path):
    """Documents without end: an epoch is over every few batches."""
    ids = np.random.default_rng(0).integers(0, 1000, 200_000)
    write_tokens(tmp_path / "a.bin", ids, 1000, 0)
    return DataConfig(source="tokens", paths=(str(tmp_path / "a.bin"),), seq_len=512, batch_size=16)


def grown(config):
    memory = data_throughput.soak(config, 2, lambda line: None, lines=4)
    return memory[-1] - memory[1]


def test_memory_stays_flat(config):
    assert grown(config) < BOUND


def test_a_leak_would_be_seen(config, monkeypatch):
    kept = []
    before = pipeline._Lanes.__next__

    def keep(self):
        element = before(self)
        kept.append({name: array.copy() for name, array in element["batch"].items()})
        return element

    monkeypatch.setattr(pipeline._Lanes, "__next__", keep)
    assert grown(dataclasses.replace(config, batch_size=8)) > BOUND
