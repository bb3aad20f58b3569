"""`tpu-train blame`: an infinite weight in a checkpoint and a rate that overflows, named by their tensors."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_train
from test_train import CPU, run

from tpu_train import blame, data, examine, main, metrics, train
from tpu_train.checkpoint import Checkpoints
from tpu_train.config import UserError
from tpu_train.precision import resolve
from tpu_train.train_step import abstract_state, loss_and_grads

cache, compiled_once, traced_once = test_train.cache, test_train.compiled_once, test_train.traced_once
devices, texts, config_of = test_train.devices, test_train.texts, test_train.config_of


def spoil(model, name, layer, value):
    """`model` with `value` in one place of a stacked weight's layer."""

    def leaf(path, x):
        if name not in jax.tree_util.keystr(path):
            return x
        values = np.array(x)
        values[(layer, *(0,) * (x.ndim - 1))] = value
        return jax.device_put(values, x.sharding)

    return jax.tree_util.tree_map_with_path(leaf, model)


def test_an_infinite_weight_of_a_checkpoint_is_named(config_of, capsys):
    made = config_of("run.steps=4")
    assert run(made) == 0
    workdir = made.run.workdir
    with Checkpoints(workdir, keep_last=3) as checkpoints:
        batches = data.train_batches(made.data, vocab_size=256)
        state = checkpoints.restore(4, abstract_state(made, CPU), batches)
        state = dataclasses.replace(state, step=state.step + 1, model=spoil(state.model, "up_DF", 1, jnp.inf))
        checkpoints.save(5, state, batches, made)
        checkpoints.wait()
        batches.close()
    with pytest.raises(train.RunFailed, match=f"kept: checkpoint of step 5 in {workdir}; tpu-train blame --workdir="):
        run(config_of("run.steps=20"))
    capsys.readouterr()
    assert main.main(["tpu-train", "blame", f"--workdir={workdir}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["step 6, from the checkpoint of step 5", "loss nan, gradient norm nan"]
    named = "model.blocks.0.mlp.up_DF of layer 1"
    assert lines[2].startswith("weights: 1 of ")
    assert f"the first: {named}: 1 of 2048 values infinite, the others at most " in lines[2]
    assert lines[3].startswith("moments: all finite")
    assert re.match(r"activations: \d of \d+ not finite; the first: blocks.0.mlp of layer 1: ", lines[4])
    assert lines[-1] == f"first bad tensor, of the weights: {named}"


def test_a_rate_that_overflows_is_found_from_the_start_where_no_checkpoint_came_before(config_of, capsys, tmp_path):
    huge = ("optim.peak_lr=1e30", "optim.warmup_steps=0", "optim.schedule=constant", "checkpoint.every_steps=50")
    made = config_of(*huge)
    with pytest.raises(train.RunFailed, match="kept: no checkpoint"):
        run(made)
    file = tmp_path / "config.py"
    file.write_text(f"from tpu_train.config import *\n\n\ndef config():\n    return {made!r}\n")
    capsys.readouterr()
    assert main.main(["tpu-train", "blame", f"--workdir={made.run.workdir}"]) == 2
    assert "has no checkpoint before that step; with --config=FILE" in capsys.readouterr().err
    assert main.main(["tpu-train", "blame", f"--config={file}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Squares of 1e30 overflow in a norm, whose result is then 0: the forward pass stays finite.
    assert lines[0] == "step 2, from the start over 1 step(s)"
    assert re.fullmatch(r"loss \d\.\d+, gradient norm nan", lines[1])
    assert lines[2].startswith("weights: all finite; the largest: model.")
    assert re.search(r"finite, at most \d\S*e\+(29|30)$", lines[2])
    assert lines[4].startswith("activations: all finite")
    assert "the first: model.blocks.0.mlp.down_FD of layer 1: 2048 of 2048 values NaN" in lines[5]
    assert lines[-1] == "first bad tensor, of the gradients: model.blocks.0.mlp.down_FD of layer 1"


def test_the_walk_over_the_layers_is_the_models_own_pass(tiny, random_batch, random_model, place, mesh_of):
    config = tiny("model.qk_norm=true", "model.window_pattern=5,0", "model.num_layers=4")
    mesh_of(2, 2, 2)
    compute, model = resolve(config.run, "cpu"), random_model(config)
    batch = place({name: x[0] for name, x in random_batch(config).items()})
    tensors = list(examine.activations(model, batch, compute))
    wanted, _ = jax.jit(lambda m, b: m(b["tokens"], b["positions"], b["segment_ids"], compute))(model, batch)
    assert tensors[-1].name == "final_norm"
    assert tensors[-1].largest == pytest.approx(float(np.abs(wanted).max()), rel=1e-5)
    inside = ["attention_norm", "attention.q_norm", "attention.k_norm", "attention", "mlp_norm", "mlp"]
    blocks = [f"blocks.{i % 2}{'.' + part if part else ''} of layer {i}" for i in range(4) for part in [*inside, ""]]
    assert [tensor.name for tensor in tensors] == ["embed", *blocks, "final_norm"]
    assert not any(tensor.bad for tensor in tensors)

    worse = spoil(model, "down_FD", 1, jnp.nan)  # of both pattern entries: layers 2 and 3
    first = next(tensor for tensor in examine.activations(worse, batch, compute) if tensor.bad)
    assert (first.name, first.has_nan) == ("blocks.0.mlp of layer 2", True)


def test_gradients_are_named_from_the_loss_on(tiny, random_batch, fresh_state, place):
    config = tiny()
    compute = resolve(config.run, "cpu")
    state, batch = fresh_state(config), place(random_batch(config))
    _, grads, _ = jax.jit(lambda s, b: loss_and_grads(s, b, 0.0, compute))(state, batch)
    ordered = examine.in_backward_order(examine.arrays(grads, "model", 2), 2)
    names = [tensor.name for tensor in ordered]
    assert names[0] == "model.final_norm.scale_D"
    assert names[1] == "model.blocks.1.mlp.down_FD of layer 1"
    assert names[-2:] == ["model.blocks.0.attention_norm.scale_D of layer 0", "model.embed_VD"]
    assert len(set(names)) == len(names) == 2 + 2 * 9
    lines = blame.look_into(state, batch, config, compute)
    assert lines[-1] == "no bad tensor: this step is finite here"
    assert sum("of the square" in line for line in lines) == 5


def test_the_step_to_look_into_is_the_first_of_the_last_row(tmp_path):
    with metrics.MetricsWriter(tmp_path, 0) as writer:
        for step, loss, norm, scale in (
            (3, None, None, None),
            (7, 2.0, None, 32768.0),  # float16 that lowered its scale
            (8, 2.0, None, 1.0),
            (9, None, None, None),
            (10, None, None, None),
            (12, 2.0, 1.0, None),
        ):
            writer.write(step, {"loss": loss, "grad_norm": norm} | ({} if scale is None else {"loss_scale": scale}))
    assert blame.first_bad_step(tmp_path) == 8
    with pytest.raises(UserError, match="has no step whose loss or gradient was not finite; name one with --step"):
        blame.first_bad_step(tmp_path / "none")
