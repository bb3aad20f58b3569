"""Dense products in int8: weights held so for inference, and training with operands quantised as they come."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import sample

from tpu_train import config as config_lib
from tpu_train.config import UserError
from tpu_train.mesh import check_fits
from tpu_train.models.held import hold_in_int8
from tpu_train.precision import Compute, resolve
from tpu_train.sharding import SPECS, dims_of_path
from tpu_train.train_step import make_train_step

MATRICES = 4 * (16 * 8 * 4 * 2 + 16 * 4 * 4 * 2 + 3 * 16 * 32) * 2  # bytes of the tiny model's, in float32
SCALES = 4 * (8 * 4 + 2 * 4 * 4 + 16 + 2 * 32 + 16) * 2


def hidden(model, config, tokens_BT):
    compute = resolve(config.run, "cpu")

    @jax.jit
    def run(model, tokens_BT):
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
        return model(*(jax.reshard(x, SPECS["BT"]) for x in (tokens_BT, positions_BT)), None, compute)[0]

    return np.asarray(run(model, tokens_BT))


def rounded(model):
    """The model with its blocks' matrices rounded by numpy as int8 would round them."""

    def leaf(path, w):
        dims, in_block = dims_of_path(path)
        axes = {"DNH": (1,), "DKH": (1,), "NHD": (1, 2), "DF": (1,), "FD": (1,)}.get(dims)
        if not in_block or axes is None:
            return w
        exact = np.asarray(w, np.float64)
        scale = np.abs(exact).max(axis=axes, keepdims=True) / 127
        return jax.device_put((np.rint(exact / scale) * scale).astype(np.float32), w.sharding)

    return jax.tree_util.tree_map_with_path(leaf, model)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_a_model_held_in_int8_computes_with_the_rounded_weights(tiny, random_model, mesh_of, shape):
    config = tiny()
    mesh_of(*shape)
    model = random_model(config)
    tokens_BT = np.random.default_rng(1).integers(0, 64, (4, 16), dtype=np.int32)
    wanted = hidden(rounded(model), config, tokens_BT)
    held, before, now = hold_in_int8(model)
    assert (before, now) == (MATRICES, MATRICES // 4 + SCALES)
    got = hidden(held, config, tokens_BT)
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
    assert np.abs(got - hidden(model, config, tokens_BT)).max() > 5e-3  # that is what int8 costs


def test_text_is_sampled_with_weights_held_in_int8(tiny, random_model):
    config = tiny()
    model = random_model(config)
    held, _, _ = hold_in_int8(model)
    assert sample(config, held) == sample(config, rounded(model))


def test_experts_are_not_held_in_int8(tiny, random_model):
    config = tiny("model.num_experts=4")
    with pytest.raises(UserError, match="--weights=int8 holds the weights of dense layers, and this model has experts"):
        hold_in_int8(random_model(config))


SMALL = ("optim.eps=1e-8", "model.num_layers=1", "model.window_pattern=0")


def losses(config, random_batch, fresh_state, place, mesh, steps=30):
    check_fits(config, mesh)
    compute = resolve(config.run, "cpu")
    step, state = make_train_step(config, compute), fresh_state(config, compute)
    batch, measured = place(random_batch(config)), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        measured.append(float(metrics["loss"]))
    return np.array(measured)


def test_training_in_int8_ends_near_where_float32_ends(tiny, random_batch, fresh_state, place, mesh_of):
    """One batch, learned by heart in 30 steps: the end is off by at most 3 % of what float32 has come down."""
    run = {
        kind: losses(tiny(f"run.quantized={kind}", *SMALL), random_batch, fresh_state, place, mesh_of())
        for kind in ("none", "int8_forward", "int8")
    }
    down = run["none"][0] - run["none"][-1]
    assert down > 1.0
    for kind in ("int8_forward", "int8"):
        assert np.abs(run[kind] - run["none"]).max() > 0
        assert abs(run[kind][-1] - run["none"][-1]) < 0.03 * down, (kind, run[kind][-1], run["none"][-1])


def test_meshes_train_alike_in_int8(tiny, random_batch, fresh_state, place, mesh_of):
    """A device's scales are of its own tokens, and along `tensor` of its own part: other roundings, no other loss."""
    config = tiny("run.quantized=int8", *SMALL)
    alone = losses(config, random_batch, fresh_state, place, mesh_of(), steps=8)
    spread = losses(config, random_batch, fresh_state, place, mesh_of(2, 2, 2), steps=8)
    np.testing.assert_allclose(spread, alone, rtol=0.01)


def test_what_int8_can_not_be_is_refused(tiny):
    with pytest.raises(UserError, match=r"run\.quantized=int8 is for dense layers, and model\.num_experts is 4; set"):
        config_lib.check(tiny("run.quantized=int8", "model.num_experts=4"))
    assert Compute(jnp.dtype("float32"), "xla", "cpu").quantized == "none"
    with pytest.raises(UserError, match=r"mesh\.gradient_scatter=ring is for run\.quantized=none, not int8; set it to"):
        config_lib.check(tiny("run.quantized=int8", "mesh.gradient_scatter=ring"))
    assert resolve(tiny("run.quantized=int8_forward").run, "cpu").quantized == "int8_forward"
