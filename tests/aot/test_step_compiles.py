"""A small model's train step on the real TPU compiler: every generation, two slices, what does not fit, bad input."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tpu_train import aot, context, layout, main, stages
from tpu_train.aot import search, table
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, UserError, apply_override

pytestmark = pytest.mark.aot

ROOT = Path(__file__).parents[2]
SMALL = Config(
    model=ModelConfig(
        vocab_size=512, num_layers=3, model_dim=256, num_heads=2, num_kv_heads=1, head_dim=128, mlp_dim=512,
        tie_embeddings=False, remat="full",
    ),
    data=DataConfig(seq_len=128, batch_size=8),
    mesh=MeshConfig(data=1, fsdp=-1),
)  # fmt: skip
PLAIN = "run.implementation=xla"


def step(topology, *overrides, num_slices=1):
    config = SMALL
    for override in overrides:
        config = apply_override(config, override)
    return aot.Step(config, topology, num_slices)


LONG = ("data.seq_len=1024", "model.num_layers=12")  # what is kept of the blocks is most of the memory
STEPS = {
    "v5e": step("v5e:2x2"),
    "v4": step("v4:1x1x1", PLAIN),
    "v5p": step("v5p:2x2x1", PLAIN, "mesh.fsdp=2", "mesh.tensor=-1", "model.num_kv_heads=2"),
    "v6e": step("v6e:2x2", PLAIN),
    "7x": step("tpu7x:2x2x1", PLAIN),
    "context": step(
        *("v5e:2x2", "mesh.fsdp=1", "mesh.context=-1", "mesh.context_method=ring", "data.seq_len=1024"),
        *("data.batch_size=1", "data.packing=false", "model.remat=none", "model.num_layers=2"),
    ),
    "experts": step(
        *("v5e:2x2", "mesh.expert=2", "model.num_layers=1", "model.num_experts=4", "model.expert_dim=128"),
        *("model.remat=none", "data.batch_size=16"),
    ),
    "stages": step(
        *("v5e:2x2", PLAIN, "mesh.fsdp=2", "mesh.stage=2", "mesh.stage_rounds=2", "mesh.stage_microbatches=4"),
        "model.num_layers=4",
    ),
    "rings": step("v5e:2x2", "model.model_dim=512", "mesh.gradient_scatter=ring"),
    "offload": step("v5e:2x2", "optim.offload=true"),
    "dots": step("v5e:2x2", *LONG, "model.remat=dots"),
    "offload_dots": step("v5e:2x2", *LONG, "model.remat=offload_dots"),
    "two slices": step("v5e:2x2", PLAIN, "mesh.data=2", num_slices=2),
    "tensor over slices": step(
        *(
            "v5e:2x2",
            PLAIN,
            "mesh.fsdp=2",
            "mesh.tensor=2",
            "mesh.data=2",
            "mesh.data_slices=1",
            "mesh.tensor_slices=2",
        ),
        "model.num_kv_heads=2",
        num_slices=2,
    ),
    "stages over slices": step(
        *("v5e:2x2", PLAIN, "mesh.fsdp=4", "mesh.stage=2", "mesh.stage_slices=2", "model.num_layers=4"), num_slices=2
    ),
    "fsdp over slices": step("v5e:2x2", PLAIN, "mesh.fsdp_slices=2", num_slices=2),
    "too large": step("v5e:1x1", PLAIN, "data.batch_size=40000", "model.remat=none"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "CACHE", tmp_path_factory.mktemp("cache") / "tpu_train" / "compile")
        yield aot.CACHE


@pytest.fixture(scope="module")
def answers(cache):
    """All steps, in one process of the compiler."""
    return dict(zip(STEPS, aot.compile_steps(list(STEPS.values())), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["v4", "v5e", "v5p", "v6e", "7x", "two slices", "context", "experts", "stages", "rings"]
)
def test_step_compiles_and_its_memory_adds_up(answers, name):
    answer = answers[name]
    report = table.Report(STEPS[name].topology, STEPS[name].num_slices, answer)
    assert report.fits
    assert answer["num_devices"] == aot.num_devices(STEPS[name])
    assert answer["compute"] == "bfloat16"
    # Weights are float32, moments are two of them and a count; the batch and a few scalars are arguments too.
    assert answer["optimizer_bytes"] == pytest.approx(2 * answer["parameter_bytes"], rel=1e-3)
    state = answer["parameter_bytes"] + answer["optimizer_bytes"]
    assert state < answer["argument_bytes"] < 1.1 * state + 2**20
    assert answer["aliased_bytes"] > 0.9 * state  # donated, so that the new state takes the old one's place
    if answer["cycles"] is None:
        assert name == "7x"  # whose program jaxlib 0.10.2 can't read back
    else:
        assert answer["cycles"] > 1e5
    assert answer["unknown_loops"] == 0
    assert answer["bytes_accessed"] > 2 * answer["argument_bytes"]


@pytest.mark.slow
def test_auto_means_bf16_and_pallas_on_a_tpu(answers):
    assert answers["v5e"]["implementation"] == "pallas"
    # Forward, once more for the backward pass under remat, and backward: of each of three layers.
    wanted = {"flash_attention_forward": 6, "flash_attention_backward": 3}
    wanted |= {"gated_mlp_forward": 6, "gated_mlp_dx": 3, "gated_mlp_dw": 3}
    wanted |= {"linear_cross_entropy_forward": 1, "linear_cross_entropy_backward": 1}
    assert answers["v5e"]["kernels"] == wanted
    assert answers["v5e"]["kernel_calls"] == 23
    assert answers["v6e"]["kernel_calls"] == 0


@pytest.mark.slow
def test_flops_are_those_of_the_formula_and_what_remat_repeats(answers):
    """Per token and weight: 2 forward, 2 again, 4 backward, in the head too; `down` alone is not run again, since no
    gradient needs its result."""
    answer, L, D, N, K, H, F, V = answers["v5e"], 3, 256, 2, 1, 128, 512, 512
    weights = L * (D * H * (N + 2 * K) + N * H * D + D * F)
    per_token = 8 * weights - 2 * L * F * D
    assert answer["xla_flops"] == per_token * answer["tokens"] / answer["num_devices"]
    scores = 2 * 128 * 129 / 2  # heads, and what a causal mask lets through
    rows = 8 / answer["num_devices"]
    attention = (2 + 2 + 5) * 2 * 128 * scores * rows * L
    # Gate, up and the head, as often as other products.
    rest = 8 * (2 * L * D * F + V * D) * answer["tokens"] / answer["num_devices"]
    assert answer["kernel_flops"] == attention + rest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e", "context", "experts", "rings"])
def test_kernels_count_by_their_schedules_as_often_as_their_flops_say(answers, name):
    """What the regions' runs give the matrix units is what the call's FLOPs need, so the runs are right. All of a block
    that a causal mask cuts through is multiplied, and so few rows do not go round the four units evenly."""
    answer, report = answers[name], table.Report("v5e:2x2", 1, answers[name])
    assert {call["name"]: call["why"] for call in answer["schedules"] if call["why"]} == {}
    rows = {kernel.name: kernel for kernel in report.kernels}
    assert {kernel.removesuffix("_whole") for kernel in answer["kernels"]} == set(rows)
    for kernel in rows:
        calls = [call for call in answer["schedules"] if call["name"] == kernel]
        mxu, bound = sum(call["runs"] * call["mxu_cycles"] for call in calls), rows[kernel].bound
        if kernel.startswith("flash_attention"):
            assert bound < mxu < 3 * bound
        elif kernel.startswith("grouped_matmul"):  # room for the worst case, in bodies of 128 rows
            assert bound <= mxu < 4 * bound
        else:
            assert mxu == pytest.approx(bound, rel=1e-9)
        assert rows[kernel].cycles >= mxu
    assert report.kernel_cycles == sum(kernel.cycles for kernel in rows.values()) > report.kernel_bound


@pytest.mark.slow
def test_traffic_between_slices_is_told_from_traffic_within(answers):
    by_axes = {tuple(c["axes"]) for c in answers["two slices"]["collectives"]}
    assert ("fsdp",) in by_axes
    assert () in by_axes or ("data",) in by_axes
    assert {tuple(c["axes"]) for c in answers["v5e"]["collectives"]} == {("fsdp",)}
    for name, within in (("tensor", {"data", "fsdp"}), ("stages", {"fsdp"}), ("fsdp", {"fsdp"})):
        answer = answers[f"{name} over slices"]
        assert {axis for c in answer["collectives"] for axis in c["axes"]} == within
        assert sum(c["wire_bytes"] for c in answer["collectives"] if c["kind"] == "send") > 0
        assert answer["slices"] == dict.fromkeys(layout.AXES, 1) | {name.removesuffix("s"): 2}
    assert {"tensor", "fsdp"} <= {axis for c in answers["v5p"]["collectives"] for axis in c["axes"]}


@pytest.mark.slow
def test_moments_in_the_hosts_memory_take_none_of_the_devices(answers):
    with_them, without = answers["v5e"], answers["offload"]
    moments = with_them["optimizer_bytes"] - without["optimizer_bytes"]
    assert (with_them["host_bytes"], without["host_bytes"]) == (0, moments)
    assert without["optimizer_bytes"] < 100  # counters
    assert moments == pytest.approx(2 * with_them["parameter_bytes"])
    assert with_them["argument_bytes"] - without["argument_bytes"] == pytest.approx(moments, rel=0.02)
    needed = [table.Report("v5e:2x2", 1, answer).hbm_bytes for answer in (with_them, without)]
    assert needed[0] - needed[1] > 0.5 * moments
    assert "in the host's memory" in table.Report("v5e:2x2", 1, without).table(STEPS["offload"].config)


@pytest.mark.slow
def test_products_in_the_hosts_memory_take_none_of_the_devices(answers):
    here, there = answers["dots"], answers["offload_dots"]
    assert here["host_temporary_bytes"] == 0
    assert here["temporary_bytes"] - there["temporary_bytes"] > 0.5 * there["host_temporary_bytes"] > 0


@pytest.mark.slow
def test_experts_rows_are_exchanged_raggedly_and_their_products_counted_as_if_loads_were_even(answers):
    answer, tokens, D, F, k = answers["experts"], 512, 256, 128, 2
    ragged = [c for c in answer["collectives"] if c["kind"] == "ragged-all-to-all"]
    assert [(c["axes"], c["bytes"]) for c in ragged] == [(["expert"], tokens * k * D * 2)] * 4  # both ways, and back
    wanted = {"grouped_matmul_forward": 3, "grouped_matmul_dx": 3, "grouped_matmul_dw": 3}
    assert {name: n for name, n in answer["kernels"].items() if "grouped" in name} == wanted
    attention = (2 + 5) * 2 * 128 * (2 * 128 * 129 / 2) * 4
    # Three products of each of a token's experts, and the head with its logits twice: forward, dx and dw of each.
    assert answer["kernel_flops"] == attention + tokens * (6 * 3 * D * F * k + 8 * 512 * D)


@pytest.mark.slow
def test_keys_go_round_the_ring_beside_the_kernels_as_often_as_the_formula_says(answers):
    permutes = [c for c in answers["context"]["collectives"] if c["kind"] == "collective-permute"]
    layer = context.Layer(4, 1, 1024, 2, 1, 128, 2)
    assert sum(c["runs"] * c["wire_bytes"] for c in permutes) == 2 * context.sent("ring", layer)
    assert all(c["axes"] == ["context"] for c in permutes)
    assert all(c["overlaps"] for c in permutes)
    # All but the way home, of dk and dv, have a kernel to travel beside.
    assert sum(c["kernels_meanwhile"] == 0 for c in permutes) <= 2


@pytest.mark.slow
def test_gradients_go_round_the_ring_in_the_kernels_that_make_them(answers):
    collectives, L, D, N, K, H, F = answers["rings"]["collectives"], 3, 512, 2, 1, 128, 512
    rings = [c for c in collectives if c["kind"] == "reduce-scatter-ring"]
    sizes = [D * N * H, D * K * H, D * K * H, N * H * D, D * F, D * F, F * D]
    assert sorted(c["bytes"] for c in rings) == sorted(2 * size for size in sizes)
    assert all((c["runs"], c["axes"], c["wire_bytes"]) == (L, ["fsdp"], c["bytes"] * 3 / 4) for c in rings)
    assert all(c["overlaps"] and c["cycles_meanwhile"] > 0 for c in rings)
    assert answers["rings"]["kernels"]["collective_matmul_reduce_scatter"] == L * len(sizes)
    # What is left to XLA in the loop over layers: norms' scales, the vocabulary's tables stand outside.
    summed = [c for c in collectives if c["kind"] in ("reduce-scatter", "all-reduce") and c["runs"] == L]
    assert sum(c["bytes"] for c in summed) < 4 * D * 4


@pytest.mark.slow
def test_micro_batches_go_from_stage_to_stage_and_weights_once(answers):
    collectives = answers["stages"]["collectives"]
    of_stage = [c for c in collectives if c["axes"] == ["stage"]]

    def sent(kind):
        return sum(c["runs"] * c["bytes"] for c in of_stage if c["kind"] == kind)

    plan = stages.schedule(STEPS["stages"].config, answers["stages"]["mesh"])
    assert (plan.ticks, plan.bubble) == (9, 1 / 9)
    rows, D = 8 // 2, 256  # of the devices along stage
    # Forward and backward, one micro-batch of bfloat16 each tick.
    assert sent("collective-permute") == 2 * plan.ticks * rows // 4 * 128 * D * 2
    # A device's part of the weights changes once from all layers to those of its stage, and their gradients back.
    matrices = 4 * (2 * D * 2 * 128 + 2 * D * 128 + 3 * D * 512)
    assert sent("all-to-all") == 2 * matrices * 2 / 4
    # Rows in and out, norms and tokens are all that ever comes together over stage: no weight of a block.
    gathered = max(c["bytes"] for c in of_stage if c["kind"] not in ("collective-permute", "all-to-all"))
    assert gathered <= rows * 128 * D * 2
    assert not any(c["kind"] == "all-gather" and "stage" in c["axes"] and c["runs"] > 1 for c in collectives)


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_an_answer_with_its_buffers(answers, capsys):
    report = table.Report("v5e:1x1", 1, answers["too large"])
    assert not report.fits
    assert report.hbm_bytes > report.capacity_bytes == 15.75 * 2**30
    largest = answers["too large"]["buffers"][:10]
    assert all(buffer["bytes"] > 1e9 for buffer in largest)
    # Not all have a line: what XLA sets aside for a loop has only that of what reads it there, if that has one.
    assert any(buffer["source"].startswith(("tpu_train/", "pallas_kernels/")) for buffer in largest)
    text = report.table(STEPS["too large"].config)
    assert "DOES NOT FIT" in text
    assert "--set model.remat=full" in text
    assert "--set optim.accumulation_steps=2" in text


@pytest.mark.slow
def test_the_command_answers_from_the_cache_as_table_and_json(answers, cache, tmp_path, capsys):
    file = tmp_path / "small.py"
    file.write_text(f"from tpu_train.config import *\ndef config():\n    return {SMALL!r}\n")
    flags = ["tpu-train", "compile", f"--config={file}", "--topology=v5e:2x2", "--xla_flags="]
    assert main.main(flags) == 0
    text = capsys.readouterr().out
    assert "4 x TPU v5 lite (v5e:2x2), mesh: fsdp 4" in text
    assert "fits" in text
    assert "predicted:" in text
    assert "for the Pallas kernels, by their schedules" in text
    assert main.main([*flags, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["fits"] is True
    assert plain["collectives"] == answers["v5e"]["collectives"]
    assert len(list(cache.iterdir())) == len(STEPS)  # the compiler did not run again


def test_the_cache_knows_config_topology_and_source(tmp_path, monkeypatch):
    base = aot.key(STEPS["v5e"])
    assert base == aot.key(step("v5e:2x2"))
    assert base == aot.key(step("v5e:2x2", "checkpoint.every_steps=7"))
    others = [
        step("v5e:2x2", "optim.b1=0.8"), step("v6e:2x2"), step("v5e:2x2", num_slices=2), step("v5e:2x2", PLAIN),
    ]  # fmt: skip
    keys = {aot.key(other) for other in others}
    assert len({base, *keys}) == 5
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=20000")
    assert aot.key(STEPS["v5e"]) != base
    for name in ("tpu_train", "pallas_kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("x = 1\n")
    first = aot.source_hash(tmp_path)
    (tmp_path / "pallas_kernels" / "a.py").write_text("x = 2\n")
    aot.source_hash.cache_clear()
    assert aot.source_hash(tmp_path) != first
    aot.source_hash.cache_clear()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "compile needs --config=FILE"),
        (["--config=configs/llama3_8b.py", "--topology=v9:2x2"], "no TPU generation 'v9'; there are v4, v5e, v5p, v6e"),
        (
            ["--config=configs/llama3_8b.py", "--topology=v5e:4by4"],
            "no topology 'v5e:4by4'; write a shape such as v5e:4x4",
        ),
        (["--config=configs/llama3_8b.py", "--topology=h100:1x1"], "no topology 'h100:1x1'; write the cards of a host"),
        (["--config=configs/llama3_8b.py", "--set", "mesh.fsdb=2"], "unknown config field 'mesh.fsdb'; did you mean"),
    ],
)
def test_bad_input_is_one_line_at_once(flags, message, capsys):
    assert main.main(["tpu-train", "compile", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


WRONG = {
    "a device's 1 rows of data.seq_len=64 makes 64, and mesh.gradient_scatter=ring wants a multiple of 128": step(
        *("v5e:2x2", "model.model_dim=512", "mesh.gradient_scatter=ring", "data.seq_len=64", "data.batch_size=4")
    ),
    "no topology 'v5e:3x5', 1 slice(s): ": step("v5e:3x5"),
    "mesh.data=1, mesh.fsdp=3, mesh.tensor=1 makes 3 devices; there are 4": step("v5e:2x2", "mesh.fsdp=3"),
    "optim.offload needs copies from the host that a TPU v4 has not": step("v4:2x2x1", "optim.offload=true"),
    "does not divide over the 4 devices of mesh axis data x fsdp": step("v5e:2x2", "data.batch_size=6"),
    "mesh.data=1 is not a multiple of the 2 slices that it is spread over; set": step("v5e:2x2", num_slices=2),
}


@pytest.mark.slow
def test_what_only_the_compiler_or_the_mesh_can_refuse_is_one_line_too():
    for (message, wrong), answer in zip(WRONG.items(), aot.run(list(WRONG.values())), strict=True):
        with pytest.raises(UserError, match=re.escape(message)) as refused:
            aot.refuse(wrong, answer)
        assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_search_climbs_the_ladder_with_the_real_compiler(cache):
    """1.5 million tokens on one chip: what is kept of blocks is too much at first."""
    base = step("v5e:1x1", PLAIN, "data.batch_size=12000")
    found = list(search.search(base, 1, aot.compile_steps))
    tried = [(config.model.remat, config.optim.accumulation_steps) for config, _ in found]
    assert 2 <= len(tried) < len(search.LADDER)
    assert tried == list(search.LADDER[: len(tried)])
    assert [report.fits for _, report in found] == [False] * (len(found) - 1) + [True]
    needed = [report.hbm_bytes for _, report in found]
    assert needed == sorted(needed, reverse=True)
    assert 0 < found[-1][1].mfu < 1
    assert len(list(cache.iterdir())) >= len(found)  # each is kept, and a second search compiles nothing


@pytest.mark.slow
def test_the_command_runs_as_a_process(answers, cache, tmp_path):
    file = tmp_path / "small.py"
    file.write_text(f"from tpu_train.config import *\ndef config():\n    return {SMALL!r}\n")
    flags = [f"--config={file}", "--topology=v5e:2x2", "--xla_flags="]
    done = subprocess.run(
        [sys.executable, "-m", "tpu_train.main", "compile", *flags, "--json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env=os.environ | {"XDG_CACHE_HOME": str(cache.parents[1]), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["mesh"] == dict.fromkeys(layout.AXES, 1) | {"fsdp": 4}
