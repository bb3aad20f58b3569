"""Train steps on XLA's compiler for NVIDIA cards, with no card; what needs the CUDA plugin skips without it."""

import dataclasses
import re
from importlib import util
from pathlib import Path

import pytest

from pallas_kernels import hlo_cost
from tpu_train import aot, chips, main
from tpu_train import config as config_lib
from tpu_train.aot import cards, cards_time, collectives, table, traffic
from tpu_train.config import Config, DataConfig, MeshConfig, ModelConfig, UserError

ROOT = Path(__file__).parents[2]
needs_plugin = pytest.mark.skipif(
    not any(util.find_spec(plugin) for plugin in cards.PLUGINS),
    reason="compiling for NVIDIA cards needs JAX's CUDA plugin: pip install 'jax[cuda13]'",
)
SMALL = Config(
    model=ModelConfig(
        vocab_size=512, num_layers=3, model_dim=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=512,
        tie_embeddings=False, remat="full",
    ),
    data=DataConfig(seq_len=128, batch_size=8, packing=False),
    mesh=MeshConfig(data=1, fsdp=-1),
)  # fmt: skip


def set_in(config, *overrides):
    for override in overrides:
        config = config_lib.apply_override(config, override)
    return config


LLAMA_1B = set_in(config_lib.load(str(ROOT / "configs" / "llama_1b.py"), []), "mesh.data=1", "mesh.fsdp=-1")
STEPS = {
    "a100": aot.Step(SMALL, "a100:4"),
    "h100": aot.Step(SMALL, "h100:4"),
    "h200": aot.Step(SMALL, "h200:4"),
    "b200": aot.Step(SMALL, "b200:4"),
    "packed": aot.Step(set_in(SMALL, "data.packing=true"), "h100:1"),
    "two hosts": aot.Step(set_in(SMALL, "mesh.data=2"), "h100:2", 2),
    "too large": aot.Step(set_in(SMALL, "data.batch_size=40000", "model.remat=none"), "a100:1"),
    "experts": aot.Step(set_in(SMALL, "model.num_experts=4"), "h100:1"),
    "offload": aot.Step(set_in(SMALL, "optim.offload=true"), "h100:1"),
    "data on one host": aot.Step(SMALL, "h100:2", 2),
}


@pytest.fixture(scope="module")
def answers():
    """All steps, in one process of the compiler."""
    return dict(zip(STEPS, aot.run(list(STEPS.values())), strict=True))


@pytest.mark.slow
@needs_plugin
@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "packed", "two hosts"])
def test_step_compiles_for_each_card_and_its_memory_adds_up(answers, name):
    answer, step = answers[name], STEPS[name]
    report = table.Report(step.topology, step.num_slices, answer)
    assert report.fits
    assert answer["device_kind"] == f"NVIDIA {step.topology.partition(':')[0].upper()}"
    assert answer["num_devices"] == aot.num_devices(step)
    assert (answer["compute"], answer["implementation"]) == ("bfloat16", "xla")
    assert report.capacity_bytes == 0.75 * chips.CHIPS[step.topology.partition(":")[0]].memory
    state = answer["parameter_bytes"] + answer["optimizer_bytes"]
    assert state < answer["argument_bytes"] < 1.1 * state + 2**20
    assert answer["aliased_bytes"] > 0.9 * state
    assert 0 < answer["peak_bytes"] <= report.hbm_bytes
    assert any(buffer["source"].startswith(("tpu_train/", "pallas_kernels/")) for buffer in answer["buffers"])
    assert answer["unknown_loops"] == 0
    assert 0 < report.mfu < 1
    text = report.table(step.config)
    assert "predicted: at least" in text
    assert "MFU at most" in text


@pytest.mark.slow
@needs_plugin
def test_cudnn_attention_is_in_the_program_and_counted(answers):
    """Forward, once more under remat, and backward: of each of three layers. Packed rows have segments, which it does
    not take."""
    assert answers["h100"]["kernels"] == {"cudnn_attention_forward": 6, "cudnn_attention_backward": 3}
    assert answers["h100"]["kernel_calls"] == 9
    scores = 4 * 128 * 129 / 2 * 8 / 4  # of four heads and two rows a device that a causal mask lets through
    assert answers["h100"]["kernel_flops"] == (6 * 2 + 3 * 5) * 2 * 64 * scores
    assert answers["packed"]["kernel_calls"] == 0
    assert answers["packed"]["kernels"] == {}


@pytest.mark.slow
@needs_plugin
def test_traffic_has_its_axis(answers):
    assert {tuple(c["axes"]) for c in answers["h100"]["collectives"]} == {("fsdp",)}
    assert {axis for c in answers["two hosts"]["collectives"] for axis in c["axes"]} == {"data", "fsdp"}
    gathered = [c for c in answers["h100"]["collectives"] if c["kind"] == "all-gather"]
    # Each weight of a block comes together at least for the forward and for the backward pass, in bfloat16.
    blocks = 3 * (256 * 64 * (4 + 2 * 2) + 4 * 64 * 256 + 3 * 256 * 512)
    assert sum(c["runs"] * c["bytes"] for c in gathered) >= 2 * 2 * blocks


@pytest.mark.slow
@needs_plugin
def test_what_does_not_fit_is_told_with_its_largest_buffers(answers):
    report = table.Report("a100:1", 1, answers["too large"])
    assert not report.fits
    assert report.hbm_bytes > report.capacity_bytes == 60e9
    assert answers["too large"]["buffers"][0]["bytes"] > 1e9
    text = report.table(STEPS["too large"].config)
    assert "DOES NOT FIT" in text
    assert "--set model.remat=full" in text
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in text


@pytest.mark.slow
@needs_plugin
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("experts", "compile can't count experts' products on NVIDIA cards"),
        ("offload", "compile can't offload on NVIDIA cards"),
        ("data on one host", "mesh.data=1 is not a multiple of the 2 hosts; only `data` goes across them"),
    ],
)
def test_what_can_not_be_told_is_refused(answers, name, message):
    with pytest.raises(UserError, match=re.escape(message)):
        aot.refuse(STEPS[name], answers[name])


@pytest.mark.slow
@needs_plugin
def test_llama_1b_compiles_for_h200(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aot, "CACHE", tmp_path)
    flags = ["--config=configs/llama_1b.py", "--topology=h200:8", "--set", "mesh.data=1", "--set", "mesh.fsdp=-1"]
    monkeypatch.chdir(ROOT)
    assert main.main(["tpu-train", "compile", *flags, "--set", "data.packing=false"]) == 0
    text = capsys.readouterr().out
    assert "8 x NVIDIA H200 (h200:8), mesh: fsdp 8" in text
    assert "cudnn_attention_forward x 32, cudnn_attention_backward x 16" in text
    assert ": fits" in text


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            "h100",
            "no topology 'h100'; write the cards of a host, 1 to 8, such as h100:8, and the hosts as --num_slices",
        ),
        ("h100:1x8", "no topology 'h100:1x8'; write the cards of a host, 1 to 8"),
        ("b200:16", "no topology 'b200:16'; write the cards of a host, 1 to 8"),
        ("v9:2x2", "or an NVIDIA card: a100, h100, h200, b200, as in h100:8"),
        ("mi300x:8", "no TPU generation 'mi300x'"),
    ],
)
def test_a_topology_that_is_none_is_one_line(topology, message, capsys):
    assert main.main(["tpu-train", "compile", "--config=configs/llama_1b.py", f"--topology={topology}"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_plugin_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(cards, "PLUGINS", ("jax_cuda99_plugin",))
    assert main.main(["tpu-train", "compile", "--config=configs/llama_1b.py", "--topology=h100:8"]) == 2
    err = capsys.readouterr().err
    assert err == ("tpu-train: h100:8: compiling for NVIDIA cards needs JAX's CUDA plugin: pip install 'jax[cuda13]'\n")


def test_each_card_is_told_in_the_words_of_the_compiler():
    assert set(cards.CARDS) == {name for name, chip in chips.CHIPS.items() if chip.platform == "gpu"} - {"mi300x"}
    text = cards.CARDS["h100"].target()
    assert "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }" in text
    assert "device_memory_size: 80000000000\n" in text
    assert "shared_memory_per_core: 233472\n" in text
    assert "shared_memory_per_block_optin: 232448\n" in text
    assert "major: 8 minor: 0 feature_extension: NONE" in cards.CARDS["a100"].target()
    # What the data sheets say of float32 without tensor cores: 19.5 and 67 TFLOP/s.
    assert cards.CARDS["a100"].float32_flops == pytest.approx(19.5e12, rel=0.01)
    assert cards.CARDS["h100"].float32_flops == pytest.approx(67e12, rel=0.01)
    assert cards.xla_name("h100:8", 2) == "1x2x8"
    assert aot.num_devices(aot.Step(SMALL, "h100:8", 2)) == 16


# A loop of three turns with a product of bfloat16 and one of float32, a gather of two weights beside the first.
TEXT = """\
HloModule jit_train_step

%gemm (a: bf16[64,128], b: bf16[128,256]) -> bf16[64,256] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,256]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,256]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%scatter (x.1: f32[64,64]) -> f32[32,64] {
  %x.1 = f32[64,64]{1,0} parameter(0)
  ROOT %rs = f32[32,64]{1,0} reduce-scatter(%x.1), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}

%body (state: (bf16[64,128], bf16[128,256], f32[64,64], bf16[32,8], bf16[16,8])) -> (bf16[64,128]) {
  %state = (bf16[64,128]{1,0}, bf16[128,256]{1,0}, f32[64,64]{1,0}, bf16[32,8]{1,0}, bf16[16,8]{1,0}) parameter(0)
  %x = bf16[64,128]{1,0} get-tuple-element(%state), index=0
  %w = bf16[128,256]{1,0} get-tuple-element(%state), index=1
  %f = f32[64,64]{1,0} get-tuple-element(%state), index=2
  %u = bf16[32,8]{1,0} get-tuple-element(%state), index=3
  %v = bf16[16,8]{1,0} get-tuple-element(%state), index=4
  %all-gather-start = ((bf16[32,8]{1,0}, bf16[16,8]{1,0}), (bf16[64,8]{1,0}, /*index=1*/bf16[32,8]{1,0})) \
all-gather-start(%u, %v), replica_groups={{0,1}}, dimensions={0}
  %half = bf16[64,256]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
  %all-gather-done = (bf16[64,8]{1,0}, bf16[32,8]{1,0}) all-gather-done(%all-gather-start)
  %full = f32[64,64]{1,0} custom-call(%f, %f), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["0"]}}}
  %scatter-start = ((f32[64,64]{1,0}), f32[32,64]{1,0}) async-start(%full), calls=%scatter
  %scatter-done = f32[32,64]{1,0} async-done(%scatter-start)
  %seen = (bf16[64,128]{3,1,2,0}, f32[8]{0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %next = (bf16[64,128]{1,0}) tuple(%x)
}

%condition (state.1: (bf16[64,128])) -> pred[] {
  %state.1 = (bf16[64,128]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (p0: bf16[64,128]) -> (bf16[64,128]) {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %carry = (bf16[64,128]{1,0}) tuple(%p0)
  ROOT %loop = (bf16[64,128]{1,0}) while(%carry), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}
}
"""


def test_an_operation_takes_its_products_or_its_bytes_whichever_are_longer():
    read, card = hlo_cost.parse(TEXT), cards.CARDS["h100"]
    (loop,) = (i for i in read.computations["main"] if i.op == "while")
    assert read.trips(loop) == 3
    times = cards_time.nanoseconds(read, card, {"cudnn_attention_forward": 3e9, "cudnn_attention_backward": None})
    assert times["half"] == pytest.approx((64 * 128 + 128 * 256 + 64 * 256) * 2 / 3350)  # GB/s are bytes a nanosecond
    assert times["full"] == pytest.approx(max(2 * 64**3 / card.float32_flops * 1e9, 3 * 64 * 64 * 4 / 3350))
    assert times["seen"] == pytest.approx(1e9 / 989e12 * 1e9)  # a third of the step's, in each of three turns
    assert set(times) == {"half", "full", "seen"}  # what collectives take is counted by the network
    slow = dataclasses.replace(card, clock_ghz=card.clock_ghz / 1e3)
    assert cards_time.nanoseconds(read, slow, {})["full"] == pytest.approx(2 * 64**3 / slow.float32_flops * 1e9)
    whole = dataclasses.replace(read, kernel_cycles=times)
    assert whole.total_cycles == pytest.approx(3 * sum(times.values()))
    gather, scatter = collectives.find(whole, {"fsdp": 2})
    assert (gather.kind, gather.bytes, gather.runs) == ("all-gather", (64 + 32) * 8 * 2, 3)
    assert (gather.overlaps, gather.cycles_meanwhile) == (True, times["half"])
    assert (scatter.kind, scatter.bytes, scatter.overlaps) == ("reduce-scatter", 64 * 64 * 4, False)
    assert traffic.hbm_bytes(read) > 3 * (64 * 128 + 128 * 256 + 64 * 256) * 2
