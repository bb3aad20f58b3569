"""Batches of a small text, and a way to save them with a state."""

import pytest
from checkpoint_cases import state_of

from tpu_train import data
from tpu_train.config import Config, DataConfig


@pytest.fixture(scope="session")
def text_config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("text")
    for i in range(6):
        (folder / f"{i}.txt").write_text(f"document {i} " * 40)
    return Config(data=DataConfig(source="text", paths=(f"{folder}/*.txt",), seq_len=16, batch_size=2))


@pytest.fixture
def batches(text_config):
    batches = data.train_batches(text_config.data, vocab_size=256)
    yield batches
    batches.close()


@pytest.fixture
def save(batches, text_config):
    """save(checkpoints, step): one that holds {"w": [step, step, ...]}."""

    def write(checkpoints, step, state=None):
        checkpoints.save(step, state_of(step) if state is None else state, batches, text_config)

    return write
