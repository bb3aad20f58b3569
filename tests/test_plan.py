"""The `plan` command: its text, JSON and page, what it refuses, and that it needs no jax."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tpu_train import chips, main
from tpu_train import config as config_lib
from tpu_train.flops import active_params, num_params, train_flops_per_token
from tpu_train.planning import advice, page, report, text

ROOT = Path(__file__).parent.parent
LLAMA = ROOT / "configs" / "llama_1b.py"


@pytest.fixture
def plan(capsys):
    """plan(flags...) -> (exit code, stdout, stderr)."""

    def call(*flags):
        capsys.readouterr()
        code = main.main(["tpu-train", "plan", *flags])
        return code, *capsys.readouterr()

    return call


def test_the_text_says_all_that_was_asked(plan):
    code, out, err = plan(f"--config={LLAMA}", "--chips=v5p-16", "--set=data.batch_size=64", "--watts=400")
    assert (code, err) == (0, "")
    config = config_lib.load(str(LLAMA), ["data.batch_size=64"])
    assert f"parameters: {num_params(config.model):,} (embedding 263M, attention 168M, mlp 805M, norms 67.6k)" in out
    for title in (
        *("memory of a device", "FLOPs of a token", "roofline of a device", "traffic of a step by mesh axis"),
        *("more chips at this batch", "cost of", "inference needs", "suggestion"),
    ):
        assert f"\n\n{title}" in out
    assert re.search(r"traffic dominates (nowhere|from \d+ chips)", out)
    assert "at 400 W: given by you" in out
    assert "USD at 4.2 USD: Google Cloud's list price of 2025-02" in out
    assert "Google names this slice v5p-32, counting cores" in out
    assert max(map(len, out.splitlines())) < 240


def test_json_holds_the_same_numbers(plan):
    code, out, _ = plan(f"--config={LLAMA}", "--chips=v5e-16", "--set=data.batch_size=64", "--json", "--tokens=1e9")

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads(out, parse_constant=refuse)
    assert code == 0
    config = config_lib.load(str(LLAMA), ["data.batch_size=64"])
    fleet = chips.parse("v5e-16")
    best = advice.best(config, fleet)
    assert read["memory"]["total"] == best.memory.total
    assert read["step"]["best"] == best.step.best
    assert read["flops"]["per_token"] == train_flops_per_token(config.model, config.data.seq_len)
    assert read["cost"]["flops"] == 1e9 * read["flops"]["per_token"]
    assert read["chips"]["table"]["watts"]["value"] is None
    assert sum(read["model"]["by_block"].values()) == read["model"]["parameters"]
    assert {bar["remat"]: sum(bar["parts"].values()) for bar in read["memory_by_remat"]}.keys() == {*advice.REMAT}


def test_the_mesh_of_the_config_is_planned_where_it_has_one(plan):
    flags = [f"--config={LLAMA}", "--chips=v5e-16", "--set=data.batch_size=64", "--json"]
    read = json.loads(plan(*flags, "--set=mesh.fsdp=4", "--set=mesh.tensor=4")[1])
    assert [read["way"][axis] for axis in ("data", "fsdp", "tensor")] == [1, 4, 4]
    assert (read["way"]["remat"], read["way"]["whose"]) == ("full", "the config's")
    assert read["suggestion"]["set"] == json.loads(plan(*flags)[1])["suggestion"]["set"]


def test_what_the_plan_leaves_out_of_a_quantised_run_is_said():
    for value, wanted in (("none", 0), ("int8", 1)):
        config = config_lib.load(str(ROOT / "configs" / "tiny.py"), [f"run.quantized={value}"])
        notes = report.report(config, chips.parse("v5e-4"), report.Inputs())["notes"]
        assert sum(f"without run.quantized={value}" in note for note in notes) == wanted


def test_the_plan_of_a_mixture_names_its_active_parameters_and_what_crosses_expert(plan):
    flags = [f"--config={ROOT / 'configs' / 'moe_tiny.py'}", "--chips=v5e-4"]
    code, out, _ = plan(*flags, "--set=mesh.data=1", "--set=mesh.expert=4")
    assert code == 0
    model = config_lib.load(str(ROOT / "configs" / "moe_tiny.py")).model
    assert f"parameters: {num_params(model):,} (" in out
    assert f"), {active_params(model):,} of them active" in out
    assert "2 L ((k + shared) x 3 D F + D E), F of an expert" in out
    assert "\n  expert  fast    4 at " in out
    assert "memory has room for the rows of the worst case" in out
    read = json.loads(plan(*flags, "--json")[1])  # any mesh of these may be suggested
    assert read["way"]["expert"] * read["way"]["data"] * read["way"]["fsdp"] * read["way"]["tensor"] == 4


def test_a_plan_that_does_not_fit_says_so_and_how_many_chips_would_do(plan):
    big = [
        "--set=model.num_layers=80",
        "--set=model.model_dim=8192",
        "--set=model.mlp_dim=28672",
        "--set=data.batch_size=512",
    ]
    _, out, _ = plan(f"--config={LLAMA}", "--chips=v5e-8", *big)
    assert "DOES NOT FIT" in out
    assert re.search(r"no way fits: this one needs least, .* of 15.8 GiB; \d+ chips are enough", out)


def test_what_the_table_does_not_know_is_shown_as_unknown(plan):
    _, out, _ = plan(f"--config={ROOT / 'configs' / 'tiny.py'}", "--chips=cpu")
    assert "memory bandwidth: unknown, and counted as free" in out
    assert "of unknown: memory of this chip is unknown" in out
    assert "energy of the chips: unknown; give --watts" in out
    assert "money: unknown; give --price" in out
    _, out, _ = plan(f"--config={LLAMA}", "--chips=mi300x-8")
    assert re.search(r"network of (data|fsdp|tensor): unknown, and counted as free", out)
    assert "where traffic dominates is unknown" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "plan needs --config, such as --config=configs/llama_1b.py; chips are v4, v5e, v5p"),
        (["--config=L"], "plan needs --chips, such as --chips=v5p-256; chips are v4, v5e, v5p"),
        (["--config=L", "--chips=v5x-8"], "no chip 'v5x'; did you mean"),
        (["--config=nowhere.py", "--chips=v5e-8"], "no config file 'nowhere.py'"),
        (["--config=L", "--chips=v5e-8", "--set=mesh.fsdp=3"], "mesh.fsdp=3, mesh.tensor=1 makes 3 devices; there"),
        (["--config=L", "--chips=v5e-8", "--set=mesh.fsdp=3"], "; what divides: --set mesh.data=1 --set mesh.fsdp="),
        (["--config=L", "--chips=v5e-16", "--set=mesh.tensor=16"], "model.num_kv_heads=8 does not divide over the 1"),
        (["--config=L", "--chips=v5e-256"], "no mesh spreads data.batch_size=8 over the 256 devices of 256 x v5e "
         "(16x16); the smallest batch that spreads is --set data.batch_size=32"),
        (["--config=L", "--chips=v5e-8", "--set=mesh.expert=8"], "mesh.expert=8 splits experts, and model.num_experts"),
        (["--config=L", "--chips=v5e-8", "--mfu=40"], "--mfu=40 must be above 0 and at most 1"),
        (["--config=L", "--chips=v5e-8", "--tokens=0"], "--tokens=0 must be above 0"),
        (["--config=L", "--chips=v5e-8", "--price=-1"], "--price=-1 must be 0 or more"),
        (["--config=L", "--chips=v5e-8", "--watts=much"], "flag --watts=much"),
        (["--config=L", "--chips=v5e-8", "--slices=-1"], "flag --slices=-1"),
        (["--config=L", "--chips=h100-8", "--set=run.precision=float32"], "no float32 peak of h100"),
        (["--config=L", "--chips=v5e-8", "--set=run.precision=float16"], "run.precision=float16 has no TPU hardware"),
        (["--config=L", "--chips=h100-8", "--set=run.implementation=pallas"], "pallas runs on TPUs, and h100 is none"),
        (["--config=L", "--chips=v5e-8", "--html=nowhere/plan.html"], "can't write --html=nowhere/plan.html: No such"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_what_there_is(plan, flags, message):
    code, out, err = plan(*(f"--config={LLAMA}" if flag == "--config=L" else flag for flag in flags))
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def odd_config(tmp_path_factory):
    """A config file whose name is markup."""
    path = tmp_path_factory.mktemp("odd") / "<b>&\"'.py"
    path.write_text(LLAMA.read_text())
    return path


@pytest.mark.parametrize("chip", ["v5e-16", "h100-16", "cpu"])
def test_the_page_is_well_formed_and_loads_nothing(plan, odd_config, tmp_path, chip):
    written = tmp_path / "plan.html"
    more = ["--set=model.num_layers=2", "--set=data.batch_size=16"]
    assert plan(f"--config={odd_config}", f"--chips={chip}", f"--html={written}", *more)[0] == 0
    source = written.read_text()
    root = ElementTree.fromstring(source.removeprefix("<!DOCTYPE html>"))
    assert not re.search(r"://|\b(src|href|srcset)\s*=|@import|url\(|<script|<link|<iframe", source)
    assert "<b>" not in source
    assert "<b>&" in "".join(root.find("head/title").itertext())
    titles = [element.findtext("title") for element in root.iter("svg")]
    wanted = ["Memory of a device by remat policy", "Roofline of a device", "A step's work and traffic"]
    assert len(titles) == (2 if chip == "cpu" else 3)
    assert all(any(title.startswith(want) for want in wanted) for title in titles)
    # Everything is drawn within the picture.
    for picture in root.iter("svg"):
        width, height = map(float, picture.get("viewBox").split()[2:])
        for element in picture.iter("text"):
            assert 0 <= float(element.get("x")) <= width
            assert 0 <= float(element.get("y")) <= height
        for element in picture.iter("polyline"):
            corners = [tuple(map(float, point.split(","))) for point in element.get("points").split()]
            assert all(0 <= x <= width and 0 <= y <= height for x, y in corners)


def test_the_page_shows_the_numbers_of_the_plan():
    config, fleet = config_lib.load(str(LLAMA), ["data.batch_size=64"]), chips.parse("v5e-16")
    plan = {"config": "llama", **report.report(config, fleet, report.Inputs())}
    root = ElementTree.fromstring(page.render(plan).removeprefix("<!DOCTYPE html>"))
    shown = "".join(root.itertext())
    assert text.render(plan) in shown
    for bar in plan["memory_by_remat"]:
        assert bar["remat"] in shown
    assert text.dominated(plan["scaling"]) in shown
    assert all(reason in shown for reason in plan["suggestion"]["why"])


def test_the_command_needs_neither_jax_nor_pillow():
    code = (
        "import sys; from tpu_train import main; code = main.main(sys.argv); "
        "sys.exit(code or int('jax' in sys.modules or 'PIL' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", f"--config={LLAMA}", "--chips=v5e-16", "--set=data.batch_size=64"],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")
