"""`tpu-train check`: what it makes of a config, which meshes it takes, and that a fault fails the check of its kind."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels
from tpu_train import checking, layout, main, ops, train_step
from tpu_train import config as config_lib
from tpu_train.checking import batches, gradients, meshes, results, shrink, steps, table
from tpu_train.checking.meshes import Case
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, UserError
from tpu_train.flops import num_params
from tpu_train.models import layers
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


def test_a_sound_mesh_passes(verdicts):
    assert verdicts() == {STEPS: True, FIRST: True, SHARDING: True}


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


def test_a_mesh_that_breaks_is_named_and_the_others_are_still_checked(small, monkeypatch):
    prepare = steps.prepare

    def refuse_tensor(config, case, pool):
        if case.sizes["tensor"] > 1:
            raise ValueError("no axis 'tensor'\nand a long trace")
        return prepare(config, case, pool)

    monkeypatch.setattr(steps, "prepare", refuse_tensor)
    broken, *rest = steps.on_meshes(small, [SPREAD], ALONE)
    assert (broken.name, broken.ok, broken.note) == (STEPS, False, "ValueError: no axis 'tensor'")
    assert [(check.name, check.ok) for check in rest] == [(FIRST, True), (SHARDING, True)]


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


@pytest.mark.slow
def test_a_kernel_with_another_window_fails_by_its_implementation(gradient_checks, monkeypatch):
    """The kernels of attention and the MLP are left out, for time: the loss's run in the simulator."""
    attention = pallas_kernels.flash_attention

    def other_window(*operands, implementation, window, **how):
        window += implementation == "xla"
        return attention(*operands, implementation="reference", window=window, **how)

    monkeypatch.setattr(pallas_kernels, "flash_attention", other_window)
    monkeypatch.setattr(ops, "takes_gated_mlp", lambda *_: False)
    xla, pallas = gradient_checks("xla beside the references", "pallas beside the references")
    assert not xla.ok
    assert pallas.ok
    assert pallas.note.endswith("simulated: linear_cross_entropy_backward, linear_cross_entropy_forward")

    loss = pallas_kernels.linear_cross_entropy
    monkeypatch.setattr(
        pallas_kernels,
        "linear_cross_entropy",
        lambda *operands, implementation, z_loss, **how: loss(
            *operands, implementation=implementation, z_loss=z_loss * (1 + (implementation == "pallas")), **how
        ),
    )
    (pallas,) = gradient_checks("pallas beside the references")
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


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda path: path.stem)
def test_every_config_has_a_small_copy_that_fits_its_meshes(path):
    config = config_lib.load(str(path))
    sizes = meshes.usual(config, 8)
    fitting = [case.sizes for size in sizes for case in meshes.cases(config, size)]
    assert len(fitting) >= 10
    small = shrink.shrunk(config, fitting, 3)
    for size in fitting:
        layout.check_fits(small, size)
    assert num_params(small.model) < 100_000
    kept = ("activation", "gated_mlp", "tie_embeddings", "qk_norm", "remat", "logit_soft_cap", "num_experts")
    assert all(getattr(small.model, name) == getattr(config.model, name) for name in kept)


@given(
    st.sampled_from([(8, 8), (8, 2), (6, 3), (8, 1)]),
    st.sampled_from([(0,), (512, 0), (100, 100, 0), (4096,)]),
    st.sampled_from([(0, 2), (64, 8), (6, 1)]),
    st.integers(1, 4),
    st.sampled_from([256, 50_304]),
)
def test_a_small_copy_keeps_what_picks_code(heads, windows, experts, micro, words):
    some = {"num_experts": experts[0], "experts_per_token": experts[1]} if experts[0] else {}
    model = ModelConfig(
        *(words, 2 * 3 * len(windows), 48, *heads),
        window_pattern=windows,
        normalize_gates=experts[1] > 1,
        **some,
    )
    config = Config(model, DataConfig(seq_len=1024, batch_size=8 * micro), OptimConfig(accumulation_steps=micro))
    fitting = []
    for size in meshes.usual(config, 8):
        try:
            fitting += [case.sizes for case in meshes.cases(config, size)]
        except UserError:
            assert heads[1] in (1, 3)  # not to be split in two
            assert size["tensor"] == 2
    small = shrink.shrunk(config, fitting, 3)
    for size in fitting:
        layout.check_fits(small, size)
    assert (small.model.kv_heads < small.model.num_heads) == (heads[1] < heads[0])
    assert (small.model.kv_heads == 1) == (heads[1] == 1)
    assert (small.optim.accumulation_steps > 1) == (micro > 1)
    assert (small.model.experts_per_token > 1) == (model.experts_per_token > 1)
    assert bool(small.model.num_experts) == bool(experts[0])
    for window, was in zip(small.model.window_pattern, windows, strict=True):
        assert (window == 0) == (was == 0)
        assert (0 < window < small.data.seq_len) == (0 < was < 1024)
    tokens = small.data.batch_size // small.optim.accumulation_steps * small.data.seq_len
    assert (tokens < small.model.vocab_size) == (words > 8 * 1024)


def test_the_method_across_context_is_that_of_the_full_size():
    config = config_lib.load(str(ROOT / "configs/llama3_8b.py"), ["model.num_kv_heads=4"])
    sizes = checking.ALONE | {"context": 8}
    assert [case.context_method for case in meshes.cases(config, sizes)] == ["all_gather"]
    long = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=2**18))
    assert [case.context_method for case in meshes.cases(long, sizes)] == ["ring"]
    assert meshes.cases(long, sizes)[0].name == "context 8 (ring)"


def test_own_mesh_takes_as_many_devices_as_fit():
    config = Config(data=DataConfig(batch_size=6))
    assert meshes.own_mesh(config, 8)["data"] == 6
    fixed = dataclasses.replace(config, mesh=MeshConfig(data=1, fsdp=2, tensor=4))
    assert math.prod(meshes.own_mesh(fixed, 2).values()) == 8  # devices that need not be there
    with pytest.raises(UserError, match="does not divide over the 5 devices"):
        meshes.own_mesh(dataclasses.replace(config, mesh=MeshConfig(fsdp=5)), 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "check needs --config=FILE"),
        (("--meshes=dta=2",), "no mesh axis 'dta'; did you mean 'data'?"),
        (("--meshes=data=0",), "'data=0'; write data=2,fsdp=4;tensor=2"),
        (("--meshes=;",), "names no mesh"),
        (("--meshes=data=16",), "data 16 needs 16 devices; there are 8"),
        (("--meshes=tensor=4",), "model.num_kv_heads=2 does not divide over the 4 devices"),
        (("--devices=9",), "--devices=9, and there are 8"),
        (("--steps=0",), "steps"),
    ],
)
def test_bad_input_is_one_line(arguments, said, capsys, monkeypatch):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # given back after the test
        monkeypatch.setenv(name, os.environ[name])
    config = (f"--config={ROOT / 'configs/tiny.py'}",) if arguments else ()
    assert main.main(["tpu-train", "check", *config, *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error


@pytest.mark.slow
def test_the_command_checks_a_config_of_a_user(tmp_path):
    """Its own process and devices; a config with much in it that picks code."""
    (tmp_path / "mine.py").write_text(
        "from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig\n"
        "def config():\n"
        "    return Config(\n"
        "        ModelConfig(512, 4, 96, 6, 2, gated_mlp=False, window_pattern=(64, 0), logit_soft_cap=30.0),\n"
        "        DataConfig(source='text', paths=('nowhere/*.txt',)),\n"
        "        OptimConfig('muon', z_loss=1e-4, ema_decay=0.9),\n"
        "        MeshConfig(data=1, fsdp=-1))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-m", "tpu_train.main", "check", "--config=mine.py", "--json", "--devices=4", "--steps=2",
         "--meshes=data=2,fsdp=2;context=2,tensor=2"],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert {check["name"]: check["status"] for check in answer["checks"]} == dict.fromkeys(
        [
            "sharding at full size on fsdp 4",
            "steps on data 2 x fsdp 2",
            "steps on context 2 x tensor 2 (all_gather)",
            "initial state",
            "sharding in the run",
            "packed rows",
            "micro-batches",
            "xla beside the references",
            "pallas beside the references",
            "bfloat16 beside float32",
        ],
        "ok",
    )
    assert answer["devices"] == 4
    assert "model.num_layers" not in answer["changed"]
    assert answer["changed"]["data.seq_len"] == {"from": 256, "to": 32}
    measured = [m for check in answer["checks"] for m in check["measures"]]
    assert all(m["error"] <= m["tolerance"] for m in measured)
    assert any(m["error"] > 0 for m in measured)
