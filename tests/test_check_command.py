"""`tpu-train check`: its small copy of a config, the meshes that it takes, bad input, and the command as a process."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_train import checking, layout, main
from tpu_train import config as config_lib
from tpu_train.checking import meshes, shrink
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, UserError
from tpu_train.flops import num_params

ROOT = Path(__file__).parent.parent


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
        "        ModelConfig(512, 4, 96, 6, 2, gated_mlp=False, window_pattern=(64,), logit_soft_cap=9.0,\n"
        "            remat='full'),\n"
        "        DataConfig(source='text', paths=('nowhere/*.txt',)),\n"
        "        OptimConfig(z_loss=1e-4, ema_decay=0.9, moment_dtype='bfloat16'),\n"
        "        MeshConfig(data=1, fsdp=-1))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-m", "tpu_train.main", "check", "--config=mine.py", "--json", "--devices=4", "--steps=2",
         "--meshes=data=2,stage=2;context=2,tensor=2"],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert {check["name"]: check["status"] for check in answer["checks"]} == dict.fromkeys(
        [
            "sharding at full size on fsdp 4",
            "steps on data 2 x stage 2",
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
    assert answer["changed"]["model.num_layers"] == {"from": 4, "to": 2}
    assert answer["changed"]["data.seq_len"] == {"from": 256, "to": 32}
    measured = [m for check in answer["checks"] for m in check["measures"]]
    assert all(m["error"] <= m["tolerance"] for m in measured)
    assert any(m["error"] > 0 for m in measured)
