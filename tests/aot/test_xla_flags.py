"""launch/xla_flags.tsv: each row with its evidence, read alike by the launchers and by `compile`, and real."""

import re
import subprocess
from pathlib import Path

import pytest

from tpu_train import aot
from tpu_train.aot import table, xla_flags
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig

ROOT = Path(__file__).parents[2]
GENERATIONS = ("v4", "v5e", "v5p", "v6e", "7x")
SMALL = Config(
    model=ModelConfig(
        vocab_size=256, num_layers=1, model_dim=256, num_heads=2, num_kv_heads=1, head_dim=128, mlp_dim=512,
        tie_embeddings=False, remat="none",
    ),
    data=DataConfig(seq_len=128, batch_size=4),
    mesh=MeshConfig(data=1, fsdp=-1),
)  # fmt: skip
LARGEST = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "7x": "tpu7x:1x1x1"}


def rows():
    lines = xla_flags.FILE.read_text().splitlines()
    return [line.split("\t") for line in lines if line and not line.startswith("#")]


@pytest.fixture(autouse=True)
def no_flags_of_ours(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)


def test_each_row_has_a_flag_and_its_evidence():
    assert rows()
    for row in rows():
        generation, flag, compiled, without, with_it, source = row
        assert generation in GENERATIONS
        assert re.fullmatch(r"--xla_\w+=\w+", flag)
        assert compiled.startswith("configs/")
        assert re.search(r"\d", without)
        assert re.search(r"\d", with_it)
        assert "libtpu" in source
    assert len({(row[0], row[1]) for row in rows()}) == len(rows())


@pytest.mark.parametrize("generation", GENERATIONS)
def test_launchers_and_compile_read_the_same(generation):
    script = 'source launch/common.sh; generation=$1; read_xla_flags; printf %s "$xla_flags"'
    done = subprocess.run(
        ["bash", "-c", script, "-", generation], cwd=ROOT, capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    shape = "2x2" if generation in ("v5e", "v6e") else "2x2x1"
    topology = f"{'tpu' if generation == '7x' else ''}{generation}:{shape}"
    assert done.stdout == xla_flags.recommended(topology)
    assert done.stdout == " ".join(row[1] for row in rows() if row[0] == generation)


def test_flags_of_the_environment_take_their_place(monkeypatch):
    assert xla_flags.recommended("h100:8") == ""
    for own in ("--xla_tpu_rwb_fusion=false", ""):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", own)
        assert all(xla_flags.recommended(topology) == "" for topology in LARGEST.values())


def test_a_file_of_several_rows_is_one_line_of_flags(tmp_path):
    file = tmp_path / "flags.tsv"
    file.write_text("# of ours\nv5e\t--a=1\tx\nv6e\t--b=2\tx\nv5e\t--c=3\tx\n7x\t--d=4\tx\n")
    assert xla_flags.recommended("v5e:4x4", file) == "--a=1 --c=3"
    assert xla_flags.recommended("tpu7x:2x2x1", file) == "--d=4"
    assert xla_flags.recommended("v4:2x2x1", file) == ""
    assert xla_flags.recommended("v5e:4x4", tmp_path / "none.tsv") == ""


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("generation", sorted({row[0] for row in rows()}))
def test_the_compiler_knows_the_flags(generation):
    """libtpu ends the process at a flag that it does not know."""
    topology = LARGEST[generation]
    (answer,) = aot.run([aot.Step(SMALL, topology, xla_flags=xla_flags.recommended(topology))])
    assert table.Report(topology, 1, answer).fits


@pytest.mark.slow
@pytest.mark.aot
def test_a_flag_that_the_compiler_does_not_know_is_no_answer():
    with pytest.raises(aot.UserError, match="the compiler's process ended with status"):
        aot.run([aot.Step(SMALL, "v5e:1x1", xla_flags="--xla_tpu_no_such_flag=true")])
