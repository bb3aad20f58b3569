"""The train step with the Pallas kernels, simulated, beside the same steps with the references."""

import jax.numpy as jnp
import numpy as np
import pytest

from tpu_train.mesh import check_fits
from tpu_train.precision import Compute
from tpu_train.train_step import make_train_step

STEPS = 6


@pytest.mark.slow
def test_kernels_and_references_end_at_the_same_loss(tiny, random_batch, fresh_state, place, mesh_of, simulated_tpu):
    config = tiny(
        *("data.seq_len=128", "data.batch_size=2", "model.num_heads=4", "model.num_kv_heads=2"),
        *("model.window_pattern=40,0", "model.attention_soft_cap=5.0", "optim.eps=1e-8"),
    )

    def losses(shape, implementation):
        check_fits(config, mesh_of(*shape))
        compute = Compute(jnp.dtype(jnp.float32), implementation, "tpu")
        step, state = make_train_step(config, compute), fresh_state(config, compute)
        measured = []
        for _ in range(STEPS):
            state, metrics = step(state, place(random_batch(config)))
            measured.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        return np.array(measured)

    wanted = losses((1, 1, 1), "reference")
    with simulated_tpu():
        got = losses((2, 1, 2), "pallas")
    assert wanted[-1, 0] < wanted[0, 0] - 0.1
    np.testing.assert_allclose(got, wanted, rtol=1e-4)
