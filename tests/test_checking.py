"""What `tpu-train check` compares: a fault fails the check of its kind, and that check alone."""

import dataclasses
import math
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pallas_kernels
from tpu_train import checking, ops, train_step
from tpu_train import config as config_lib
from tpu_train.checking import batches, gradients, results, steps, table
from tpu_train.checking.meshes import Case
from tpu_train.flops import num_params
from tpu_train.models import dropout, layers
from tpu_train.models.init import Init

ROOT = Path(__file__).parent.parent
ALONE = Case(checking.ALONE, "auto")
SPREAD = Case(checking.ALONE | {"data": 2, "tensor": 2}, "auto")
ONE_LAYER = ("model.num_layers=1", "run.precision=float32", "run.steps=1", "data.batch_size=4")


@pytest.fixture(scope="module")
def small(tiny):
    return tiny(*ONE_LAYER, "model.window_pattern=5", "model.attention_soft_cap=5.0", "optim.z_loss=0.01")


def run_on(config, case, begin=None):
    with ThreadPoolExecutor(1) as pool:
        return steps.run(steps.prepare(config, case, pool), begin)


@pytest.fixture(scope="module")
def alone(small):
    """The steps on one device, without a fault."""
    return run_on(small, ALONE)


@pytest.fixture
def verdicts(small, alone):
    """verdicts() -> {check: whether it is ok}, of the steps on two axes under the faults that are there."""

    def judge():
        done = run_on(small, SPREAD, alone.first)
        runs = {ALONE.name: alone, SPREAD.name: done}
        found = steps.compare(SPREAD.name, done, alone), steps.first_values(runs, ALONE), steps.sharding(runs, ALONE)
        return {check.name: check.ok for check in found}

    return judge


STEPS, FIRST, SHARDING = f"steps on {SPREAD.name}", "initial state", "sharding in the run"


def test_a_gradient_summed_over_too_few_devices_fails_the_steps(verdicts, monkeypatch):
    gather = layers.gather_inside

    def half_the_gradient(w, dims):
        w = gather(w, dims)
        return (w + jax.lax.stop_gradient(w)) / 2 if dims == "FD" and jax.lax.axis_size("data") > 1 else w

    monkeypatch.setattr(layers, "gather_inside", half_the_gradient)
    assert verdicts() == {STEPS: False, FIRST: True, SHARDING: True}


def test_first_weights_that_depend_on_the_mesh_fail(verdicts, monkeypatch):
    key_for = Init._key_for

    def of_the_mesh(self, name):
        key = key_for(self, name)
        return jax.random.fold_in(key, 1) if "down" in name and jax.sharding.get_abstract_mesh().size > 1 else key

    monkeypatch.setattr(Init, "_key_for", of_the_mesh)
    assert verdicts() == {STEPS: True, FIRST: False, SHARDING: True}


def test_masks_that_depend_on_the_mesh_fail(small, monkeypatch):
    config, kept = dataclasses.replace(small, model=dataclasses.replace(small.model, dropout=0.3)), dropout.kept

    def verdicts():
        alone = run_on(config, ALONE)
        done = run_on(config, SPREAD, alone.first)
        found = steps.masks({ALONE.name: alone, SPREAD.name: done}, ALONE)
        return found, steps.compare(SPREAD.name, done, alone).ok

    found, steps_agree = verdicts()
    assert steps_agree
    share = float(re.fullmatch(r"ok      dropout: elements kept otherwise 0 of 0, ([\d.]+)% of 1024 elements are kept, "
                               "the same on 2 meshes", found.line())[1])  # fmt: skip
    assert share == pytest.approx(70, abs=9)  # six standard deviations

    def of_the_mesh(rate, places_BT, key, *more):
        return kept(rate, places_BT, key + jax.sharding.get_abstract_mesh().size, *more)

    monkeypatch.setattr(dropout, "kept", of_the_mesh)
    found, steps_agree = verdicts()
    assert not found.ok
    assert not steps_agree
    assert re.fullmatch(rf"{SPREAD.name}: \d+ other elements", found.note)


def whole(x):
    return jax.reshard(x, jax.sharding.PartitionSpec())


def test_moments_whole_on_every_device_fail_in_the_run(verdicts, monkeypatch):
    init = train_step.init_state

    def with_whole_moments(config, compute):
        state = init(config, compute)
        return dataclasses.replace(state, opt_state=jax.tree.map(whole, state.opt_state))

    monkeypatch.setattr(train_step, "init_state", with_whole_moments)
    assert verdicts() == {STEPS: True, FIRST: True, SHARDING: False}


def test_moments_whole_on_every_device_fail_at_full_size(small, monkeypatch):
    assert table.check(small, SPREAD.sizes, 0)[0].ok
    make = train_step.make_optimizer

    def with_whole_moments(*arguments):
        optimizer = make(*arguments)
        init = lambda params: jax.tree.map(whole, optimizer.init(params))  # noqa: E731
        return optax.GradientTransformation(init, optimizer.update)

    monkeypatch.setattr(train_step, "make_optimizer", with_whole_moments)
    check, _ = table.check(small, SPREAD.sizes, 0)
    assert not check.ok
    assert "is sharded (-, -, -, -), not (-, expert+fsdp+context, tensor, -)" in check.note


def test_a_mesh_that_breaks_is_named_and_the_others_are_still_checked(small, alone, monkeypatch):
    def prepare(config, case, pool):
        if case.sizes["tensor"] > 1:
            raise ValueError("no axis 'tensor'\nand a long trace")

    monkeypatch.setattr(steps, "prepare", prepare)
    monkeypatch.setattr(steps, "run", lambda prepared, begin: alone)
    whole = Case(checking.ALONE | {"data": 2}, "auto")
    found = list(steps.on_meshes(small, [SPREAD, whole], ALONE))
    assert [(check.name, check.ok) for check in found] == [
        (STEPS, False),
        ("steps on data 2", True),
        (FIRST, True),
        (SHARDING, True),
    ]
    assert found[0].note == "ValueError: no axis 'tensor'"


@pytest.fixture
def gradient_checks(small, alone):
    """gradient_checks(name) -> the check of that name; those before it run too."""

    def find(*wanted):
        found = {}
        for check in gradients.checks(small, small, ALONE, None, alone.first):
            found[check.name] = check
            if set(wanted) <= set(found):
                return [found[name] for name in wanted]
        raise AssertionError(f"{wanted} are not among {list(found)}")

    return find


def test_segments_ignored_fail_packed_rows(gradient_checks, monkeypatch):
    attention = ops.attention
    monkeypatch.setattr(ops, "attention", lambda q, k, v, segments, **how: attention(q, k, v, None, **how))
    packed, micro = gradient_checks("packed rows", "micro-batches")
    assert not packed.ok
    assert micro.ok


def test_a_mean_over_each_micro_batch_fails_micro_batches(gradient_checks, monkeypatch):
    weighted = train_step.weighted_loss

    def mean_of_means(model, batch, *rest):
        loss, cross_entropy, loads = weighted(model, batch, *rest)
        share = batch["weights"].size / jnp.sum(batch["weights"]) / 2
        return loss * share, cross_entropy * share, loads

    monkeypatch.setattr(train_step, "weighted_loss", mean_of_means)
    (micro,) = gradient_checks("micro-batches")
    assert not micro.ok


def test_an_implementation_with_another_window_fails(gradient_checks, monkeypatch):
    attention = pallas_kernels.flash_attention

    def other_window(*operands, implementation, window, **how):
        window += implementation == "xla"
        return attention(*operands, implementation=implementation, window=window, **how)

    monkeypatch.setattr(pallas_kernels, "flash_attention", other_window)
    (xla,) = gradient_checks("xla beside the references")
    assert not xla.ok


@pytest.mark.slow
def test_a_kernel_with_another_z_loss_fails(gradient_checks, monkeypatch):
    """In the simulator; the kernels of attention and the MLP are left out, for time."""
    attention, loss = pallas_kernels.flash_attention, pallas_kernels.linear_cross_entropy

    def by_reference(*operands, implementation, **how):
        return attention(*operands, implementation="reference", **how)

    def other_loss(*operands, implementation, z_loss, **how):
        z_loss *= 2 if implementation == "pallas" else 1
        return loss(*operands, implementation=implementation, z_loss=z_loss, **how)

    monkeypatch.setattr(pallas_kernels, "flash_attention", by_reference)
    monkeypatch.setattr(ops, "takes_gated_mlp", lambda *_: False)
    monkeypatch.setattr(pallas_kernels, "linear_cross_entropy", other_loss)
    xla, pallas = gradient_checks("xla beside the references", "pallas beside the references")
    assert xla.ok
    assert not pallas.broken
    assert not pallas.ok


def test_a_program_without_a_kernel_fails_the_check_of_kernels(gradient_checks, monkeypatch):
    monkeypatch.setattr(gradients.Step, "kernels", lambda *_: set())
    monkeypatch.setattr(gradients.Step, "__call__", lambda *_: gradients.Answer(1.0, {"": np.ones(1)}))
    xla, pallas = gradient_checks("xla beside the references", "pallas beside the references")
    assert xla.ok
    assert (pallas.ok, pallas.note) == (False, "no kernel is in the program")


def test_numbers_that_are_none_fail():
    assert not results.Measure("loss", math.nan, 1e-5).ok
    assert not results.Check("steps", (results.Measure("loss", 0.0, 1e-5), results.Measure("norm", math.nan, 1))).ok
    nan, zero = np.array([0.0, np.nan]), np.zeros(2)
    assert math.isnan(steps.relative(nan, zero, 1.0))
    assert steps.relative(zero + 1e-9, zero, 0.0) == math.inf
    assert steps.relative(zero, zero, 0.0) == 0
    for order in (("a", "b", "c"), ("b", "a", "c"), ("c", "b", "a")):
        name, error = steps.farthest({key: {"a": math.nan, "b": 2.0, "c": 1.0}[key] for key in order})
        assert (name, math.isnan(error)) == ("a", True)


def test_the_same_documents_stand_packed_and_alone(small):
    together, apart = batches.packed_and_alone(small, 8, seed=3)

    def documents(batch):
        found = []
        for row in range(len(batch["tokens"])):
            for segment in set(batch["segment_ids"][row]) - {0}:
                at = batch["segment_ids"][row] == segment
                found.append(
                    tuple(tuple(batch[name][row][at]) for name in ("tokens", "labels", "positions", "weights"))
                )
        return found

    assert sorted(documents(together)) == sorted(documents(apart))
    assert len(documents(apart)) == 8
    assert (together["segment_ids"].max(axis=1) == [2] * 4 + [0] * 4).all()
    assert all(x.shape == apart[name].shape for name, x in together.items())


def test_the_table_counts_every_byte_of_a_large_config():
    config = config_lib.load(str(ROOT / "configs/llama3_8b.py"))
    sizes = checking.ALONE | {"fsdp": 8, "tensor": 2}
    rows = table.full_rows(config, sizes)
    assert sum(row.bytes for row in rows) == 3 * 4 * num_params(config.model) + 5 * 4  # weights, moments, counts
    query = next(row for row in rows if table.short(row.path) == "model.blocks.0.attention.q_DNH")
    assert (query.shape, query.parts(sizes)) == ((32, 4096, 32, 128), 16)
    *_, total = table.printed(rows, sizes)
    matrices = sum(row.bytes for row in rows if row.parts(sizes) == 16)
    assert total.split() == [
        "all",
        f"{matrices // 16 + sum(r.bytes for r in rows) - matrices:,}",
        f"{sum(r.bytes for r in rows):,}",
    ]


def test_a_large_array_that_the_table_does_not_know_fails_above_the_limit(small, monkeypatch):
    make = train_step.make_optimizer

    def with_a_history(*arguments):
        optimizer = make(*arguments)
        return optax.GradientTransformation(
            lambda params: (optimizer.init(params), jnp.zeros((1000, 300))), optimizer.update
        )

    monkeypatch.setattr(train_step, "make_optimizer", with_a_history)
    check, lines = table.check(small, SPREAD.sizes, 1_000_000)
    assert (check.ok, check.note) == (
        False,
        "opt_state.1, 1,200,000 bytes, is whole on every device and not in the table",
    )
    assert any(line.startswith("opt_state.1 ") and "1000 x 300" in line for line in lines)
    assert table.check(small, SPREAD.sizes, 2_000_000)[0].ok
