"""First weights from another run: the same bits on any mesh, and every array that does not fit is named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_train import precision
from tpu_train.checkpoint import Checkpoints, initial_model, refuse_other_run
from tpu_train.checkpoint.restore import to_flat
from tpu_train.config import Config, UserError, apply_override, check
from tpu_train.train_step import abstract_state

CPU = precision.Compute(jnp.dtype("float32"), "xla", "cpu")


@pytest.fixture
def saved(tmp_path, batches, fresh_state):
    """saved(config, change): saves step 3 of a fresh state after change(model); returns its workdir and that model."""

    def write(config, change=lambda model: model):
        state = fresh_state(config, CPU)
        state = dataclasses.replace(state, model=change(state.model))
        with Checkpoints(tmp_path / "first", keep_last=1) as checkpoints:
            checkpoints.save(3, state, batches, config)
        return tmp_path / "first", state.model

    return write


def arrays(model):
    return {name: np.asarray(x) for name, x in to_flat(model).items()}


@pytest.mark.parametrize(("then", "now"), [((1, 1, 1), (1, 2, 4)), ((1, 8, 1), (2, 1, 4)), ((2, 1, 4), (1, 1, 1))])
def test_the_weights_are_the_same_bits_on_another_mesh(tiny, saved, mesh_of, then, now):
    config = tiny()
    mesh_of(*then)
    workdir, model = saved(config)
    wanted = arrays(model)
    mesh = mesh_of(*now)
    abstract = abstract_state(config, CPU).model
    for source in (f"{workdir}", f"{workdir}@3"):
        got, line = initial_model(source, abstract)
        assert line == f"initial weights: step 3 of {workdir}; optimizer and data start anew"
        for name, x in to_flat(got).items():
            np.testing.assert_array_equal(x, wanted[name], err_msg=name)
            assert x.sharding.mesh == mesh
            assert x.sharding.is_equivalent_to(to_flat(abstract)[name].sharding, x.ndim)


def test_another_dtype_is_cast_and_said(tiny, saved):
    config = tiny()
    workdir, model = saved(config, lambda model: jax.tree.map(lambda x: x.astype(jnp.bfloat16), model))
    got, line = initial_model(str(workdir), abstract_state(config, CPU).model)
    count = len(jax.tree.leaves(model))
    assert f"step 3 of {workdir}, {count} arrays cast from bfloat16 to float32; optimizer" in line
    for name, x in to_flat(got).items():
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, arrays(model)[name].astype(np.float32), err_msg=name)


def test_the_moving_average_is_taken_where_it_is_asked_for(tiny, tmp_path, batches, fresh_state):
    config = tiny("optim.ema_decay=0.9")
    state = fresh_state(config, CPU)
    state = dataclasses.replace(state, average=jax.tree.map(lambda x: x + 1, state.model))
    with Checkpoints(tmp_path / "first", keep_last=1) as checkpoints:
        checkpoints.save(3, state, batches, config)
    abstract = abstract_state(config, CPU).model
    for ema, wanted in ((True, state.average), (False, state.model)):
        got, line = initial_model(f"{tmp_path}/first", abstract, ema)
        assert ("the moving average at step 3" in line) == ema
        assert arrays(got).keys() == arrays(wanted).keys()
        for name, x in arrays(wanted).items():
            np.testing.assert_array_equal(to_flat(got)[name], x, err_msg=name)


def test_a_source_without_a_moving_average_is_refused(tiny, saved):
    workdir, _ = saved(tiny())
    with pytest.raises(UserError, match=r"first/checkpoints/3 has no moving average \(optim\.ema_decay was none\)"):
        initial_model(str(workdir), abstract_state(tiny(), CPU).model, ema=True)
    with pytest.raises(UserError, match=r"run\.init_from_ema is set, but run\.init_from names no run; set run\.init"):
        check(apply_override(Config(), "run.init_from_ema=true"))


def test_every_array_that_does_not_fit_is_named(tiny, saved):
    workdir, _ = saved(tiny("model.tie_embeddings=false", "model.gated_mlp=true"))
    other = tiny("model.qk_norm=true", "model.gated_mlp=false", "model.mlp_dim=48")
    with pytest.raises(UserError) as refused:
        initial_model(str(workdir), abstract_state(other, CPU).model)
    line = str(refused.value)
    assert line.startswith(f"{workdir}/checkpoints/3 is of another model; missing: ")
    assert "\n" not in line
    wanted = to_flat(abstract_state(other, CPU).model)
    there = to_flat(abstract_state(tiny("model.tie_embeddings=false"), CPU).model)
    missing, extra, shapes = line.partition("missing: ")[2].split("; ")
    assert wanted.keys() - there.keys()
    assert all(f"{name}{list(wanted[name].shape)}" in missing for name in wanted.keys() - there.keys())
    assert extra.startswith("not in this model: ")
    assert all(name in extra for name in there.keys() - wanted.keys())
    assert shapes.startswith("of another shape: ")
    different = [n for n in there.keys() & wanted.keys() if there[n].shape != wanted[n].shape]
    assert different
    for name in different:
        assert f"{name}{list(there[name].shape)} for {list(wanted[name].shape)}" in shapes
    same = [n for n in there.keys() & wanted.keys() if there[n].shape == wanted[n].shape]
    assert not [name for name in same if f"{name}[" in line]


def test_a_run_without_checkpoints_or_of_another_step_is_refused(tiny, saved, tmp_path):
    abstract = abstract_state(tiny(), CPU).model
    with pytest.raises(UserError, match=r"^run.init_from=.*none: .*none has no checkpoints; give the workdir"):
        initial_model(str(tmp_path / "none"), abstract)
    workdir, _ = saved(tiny())
    with pytest.raises(UserError, match="has no checkpoint of step 4; it has 3"):
        initial_model(f"{workdir}@4", abstract)


def test_a_damaged_one_is_refused(tiny, saved):
    workdir, _ = saved(tiny())
    array = max((workdir / "checkpoints" / "3" / "state" / "d").iterdir())
    array.write_bytes(array.read_bytes()[::-1])
    with pytest.raises(UserError, match=rf"3 is damaged: state/d/{array.name} has another checksum"):
        initial_model(f"{workdir}@3", abstract_state(tiny(), CPU).model)


def test_another_source_is_refused_on_resume(tmp_path):
    then = apply_override(Config(), "run.init_from=a@3")
    refuse_other_run(then, then, tmp_path)
    for now in (Config(), apply_override(Config(), "run.init_from=b")):
        with pytest.raises(UserError, match=r"was trained with run.init_from=a@3, this run has"):
            refuse_other_run(then, now, tmp_path)
