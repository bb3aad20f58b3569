"""Dropout in two real processes, each with part of its own rows in every micro-batch, beside one process."""

import numpy as np
import pytest
from test_processes import Child
from test_train import TINY

from tpu_train import config, data, metrics
from tpu_train.precision import resolve
from tpu_train.train_step import batch_on_mesh, init_state, make_train_step

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
STEPS = 3


def test_two_processes_drop_what_one_drops(tmp_path, one_device):
    made = config.Config()
    more = ("model.dropout=0.3", "optim.accumulation_steps=2", f"run.steps={STEPS}", "run.sample_tokens=0")
    for override in (*TINY, *more):
        made = config.apply_override(made, override)
    file = tmp_path / "config.py"
    file.write_text(f"from tpu_train.config import *\n\n\ndef config():\n    return {made!r}\n")
    child = Child(file, tmp_path / "run", tmp_path / "compiled", "--processes=2")
    assert child.finish() == 0, child.err

    compute = resolve(made.run, "cpu")
    step = make_train_step(made, compute)

    def losses(spoil=lambda batch: batch):
        batches = data.train_batches(made.data, vocab_size=made.model.vocab_size)
        state, found = init_state(made, compute), []
        for _ in range(STEPS):
            state, values = step(state, spoil(batch_on_mesh(next(batches), made, one_device)))
            found.append((float(values["loss"]), float(values["grad_norm"])))
        batches.close()
        return np.array(found)

    got = [(line["loss"], line["grad_norm"]) for line in metrics.read(tmp_path / "run")]
    np.testing.assert_allclose(got, losses(), rtol=1e-4)
    # With another row's masks gradients are percents off.
    other = losses(lambda batch: batch | {"places": batch["places"][::-1]})
    assert np.abs(other / got - 1).max() > 1e-2
