"""Checkpoints of moments that wait in the host's memory."""

import dataclasses

import jax
import numpy as np

from tpu_train import offload
from tpu_train.checkpoint import Checkpoints
from tpu_train.precision import resolve
from tpu_train.train_step import abstract_state, make_train_step


def test_moments_are_saved_and_restored_wherever_they_wait(
    tiny, random_batch, fresh_state, place, batches, tmp_path, mesh_of
):
    mesh_of(2, 4)
    without = tiny()
    within = dataclasses.replace(without, optim=dataclasses.replace(without.optim, offload=True))
    compute = resolve(without.run, "cpu")
    state, _ = make_train_step(within, compute)(fresh_state(within), place(random_batch(within)))
    for name, (there, here) in enumerate(((within, without), (without, within), (within, within))):
        with Checkpoints(tmp_path / str(name), keep_last=1) as checkpoints:
            checkpoints.save(1, state, batches, there)
            checkpoints.wait()
            restored = checkpoints.restore(1, abstract_state(here, compute))
        moments = [x for x in jax.tree.leaves(restored.opt_state) if x.ndim]
        assert {offload.waits(x) for x in moments} == {here.optim.offload}
        for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(np.array(x), np.array(y))
        state = restored
