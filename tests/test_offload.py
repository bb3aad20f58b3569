"""Moments that wait in the host's memory: the same steps as without; what is written; what is refused."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_train import blame, chips, offload
from tpu_train.checkpoint.restore import for_writing
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, UserError
from tpu_train.mesh import check_fits
from tpu_train.planning import advice, memory, roofline
from tpu_train.planning.report import Inputs, report
from tpu_train.planning.split import Split
from tpu_train.precision import resolve
from tpu_train.train_step import abstract_state, init_state, make_train_step

VARIANTS = {
    "clipped": ((), ("optim.clip_norm=0.1",)),
    "not clipped": ((), ("optim.clip_norm=none", "model.tie_embeddings=false")),
    "two parts, averaged": ((), ("optim.accumulation_steps=2", "optim.ema_decay=0.9", "data.batch_size=16")),
    "short moments": ((), ("optim.moment_dtype=bfloat16",)),
    "float16": ((), ("run.precision=float16", "model.window_pattern=0")),
    "experts with biases": ((), ("model.num_experts=4", "model.balance=bias")),
    "over data, fsdp and tensor": ((2, 2, 2), ("optim.clip_norm=0.1",)),
    "in stages": ((1, 2, 1, 1, 1, 2), ("model.num_layers=4", "optim.clip_norm=0.1")),
}


def parts(config, state):
    """The moments, and everything else."""
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.model))
    return moments, jax.tree.leaves(dataclasses.replace(state, opt_state=None))


def with_offload(config):
    return dataclasses.replace(config, optim=dataclasses.replace(config.optim, offload=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_are_those_without(variant, tiny, random_batch, fresh_state, place, mesh_of):
    shape, overrides = VARIANTS[variant]
    mesh_of(*shape)
    done = []
    for config in (tiny(*overrides), with_offload(tiny(*overrides))):
        compute = resolve(config.run, "cpu", config.mesh)
        state, step = fresh_state(config, compute), make_train_step(config, compute)
        found = []
        for seed in range(3):
            state, metrics = step(state, place(random_batch(config, seed)))
            found.append((float(metrics["loss"]), float(metrics["grad_norm"]), int(metrics["skipped"])))
        moments, rest = parts(config, state)
        assert {offload.waits(x) for x in moments} == {config.optim.offload}
        assert not any(offload.waits(x) for x in rest)
        done.append((found, [np.asarray(x, np.float64) for x in (*moments, *rest)], state))
    (plain, wanted, old), (losses, got, new) = done
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=(1e-2 if variant == "short moments" else 1e-5) * abs(y).max())
    same = jax.tree.map(lambda x, y: x.sharding.spec == y.sharding.spec, old, new)
    assert all(jax.tree.leaves(same))


def test_a_step_that_is_skipped_changes_no_weight_or_moment(tiny, random_batch, fresh_state, place, one_device):
    config = with_offload(tiny())
    compute = resolve(config.run, "cpu")
    step = make_train_step(config, compute)
    state, _ = step(fresh_state(config), place(random_batch(config)))
    before = [np.array(x) for x in (*parts(config, state)[0], *jax.tree.leaves(state.model))]
    weights = random_batch(config) | {"weights": np.full_like(random_batch(config)["weights"], np.nan)}
    state, metrics = step(state, place(weights))
    assert (bool(metrics["updated"]), int(metrics["skipped"])) == (False, 1)
    for x, y in zip((*parts(config, state)[0], *jax.tree.leaves(state.model)), before, strict=True):
        np.testing.assert_array_equal(x, y)
    state, metrics = step(state, place(random_batch(config)))
    assert (bool(metrics["updated"]), int(metrics["skipped"])) == (True, 1)
    assert any((np.array(x) != y).any() for x, y in zip(parts(config, state)[0], before, strict=False))


def test_a_fresh_state_and_its_shapes_say_where_moments_wait(tiny, mesh_of):
    mesh_of(1, 4, 2)
    config = with_offload(tiny())
    compute = resolve(config.run, "cpu")
    state, shapes = init_state(config, compute), abstract_state(config, compute)
    for x, shape in zip(jax.tree.leaves(state), jax.tree.leaves(shapes), strict=True):
        assert x.sharding.is_equivalent_to(shape.sharding, x.ndim)
        assert offload.waits(x) == offload.waits(shape)


def test_blame_looks_into_moments_wherever_they_wait(tiny, random_batch, fresh_state, place, one_device):
    config = with_offload(tiny())
    compute = resolve(config.run, "cpu")
    state, _ = make_train_step(config, compute)(fresh_state(config), place(random_batch(config)))
    said = blame.look_into(state, place(random_batch(config)), config, compute)
    assert any(line.startswith("moments: all finite; the largest: opt_state") for line in said)


def test_what_is_written_is_a_copy_that_no_step_writes_over(one_device):
    waiting = jax.jit(lambda: jax.device_put(jnp.arange(8.0), jax.memory.Space.Host))()
    assert offload.waits(waiting)
    copy = for_writing(waiting)
    assert copy.unsafe_buffer_pointer() != waiting.unsafe_buffer_pointer()
    np.testing.assert_array_equal(np.array(copy), np.arange(8.0))


def test_devices_without_such_memory_and_muon_are_refused(tiny, one_device, monkeypatch):
    check_fits(with_offload(tiny()), one_device)
    device = SimpleNamespace(device_kind="Abacus", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh = SimpleNamespace(devices=np.array([device]))
    offload.check(mesh, "optim.offload")  # a device that only a compiler knows
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(UserError, match=r"optim.offload needs pinned host memory, which JAX has none of for Abacus"):
        offload.check(mesh, "optim.offload")
    with pytest.raises(UserError, match=r"optim.offload takes the update layer by layer .* optim.optimizer=muon can't"):
        tiny("optim.offload=true", "optim.optimizer=muon")


def test_the_plan_counts_moments_in_the_hosts_memory():
    """D 8, N 2, K 1, H 4, F 16, V 32, two layers, tied: 2 * 576 in matrices, 256 in the table, 40 in norms."""
    config = Config(
        model=ModelConfig(vocab_size=32, num_layers=2, model_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=16),
        data=DataConfig(seq_len=4, batch_size=4),
        mesh=MeshConfig(1, 2),
        optim=OptimConfig(offload=True),
    )
    split = Split(fsdp=2)
    assert memory.moments(config, split) == (1408 / 2 + 40) * 8
    assert memory.moments_on_device(config, split) == 0
    assert memory.update(config, split) == pytest.approx(2 * 8 * (256 / 2 + 40))
    without = dataclasses.replace(config, optim=OptimConfig())
    fleet = chips.parse("v5e-2")
    here, there = (advice.own(c, fleet).memory for c in (without, config))
    assert here.total - there.total == memory.moments(config, split)
    (note,) = (note for note in report(config, fleet, Inputs())["notes"] if "host" in note)
    assert note == (
        "5.8 KiB of a device go to its host's memory and back in a step: 0.397 us either way at 15 GB/s, which no time "
        "here counts"
    )


def test_the_plan_counts_products_in_the_hosts_memory():
    config = Config(model=ModelConfig(vocab_size=32, num_layers=2, model_dim=8, num_heads=2, mlp_dim=16))
    none, dots, host, full = (Split(remat=remat) for remat in ("none", "dots", "offload_dots", "full"))
    kept = {split.remat: memory.of_layers(config, split) for split in (dots, host, full)}
    assert kept["offload_dots"] == kept["full"] < kept["dots"]
    assert memory.on_host(config, host) == kept["dots"] - kept["full"]
    assert memory.on_host(config, none) == memory.on_host(config, dots) == memory.on_host(config, full) == 0
    assert memory.on_host(config, dataclasses.replace(host, accumulation=2)) == memory.on_host(config, host)
    work = [roofline.step(config, split, chips.parse("v5e-1")).work for split in (none, dots, host, full)]
    assert work[0] < work[1] == work[2] < work[3]


@pytest.mark.parametrize("shape", [(1,), (2, 2, 2)])
def test_products_in_the_hosts_memory_change_no_bit(shape, tiny, random_batch, fresh_state, place, mesh_of):
    mesh_of(*shape)
    done = []
    for remat in ("dots", "offload_dots"):
        config = tiny(f"model.remat={remat}", "optim.accumulation_steps=2", "data.batch_size=16")
        step = make_train_step(config, resolve(config.run, "cpu"))
        state, metrics = step(fresh_state(config), place(random_batch(config)))
        done.append([np.array(x) for x in jax.tree.leaves((state, metrics))])
    for x, y in zip(*done, strict=True):
        np.testing.assert_array_equal(x, y)
