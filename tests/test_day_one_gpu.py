"""benchmarks/gpu.py before a card is there: CPU devices in its place, stand-ins for its processes, tiny sizes."""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path

import jax
import pytest
import test_day_one  # it puts benchmarks/ on the path

from tpu_train import config as config_lib

import gpu  # isort: skip

measuring = test_day_one.measuring
ROOT = Path(__file__).parent.parent
GOOD = {"seconds": 0.5, "tokens_per_second": 100.0, "mfu": 0.4, "memory_bytes": 2**30, "ok": True}
GOOD |= {"parameters": 10**9, "layers": 16, "rows": 8, "remat": "none"}
TORCH = {"seconds": 0.4, "memory_bytes": 2**31, "torch": "2.9", "compiled": False, "why": ["torch.compile failed: X"]}
CHECK = {"rows": {"float32": {"off": [1e-6, 1e-5], "ok": True}}, "kind": "NVIDIA H100", "bytes": 80e9, "ok": True}


def flags(**more):
    options = {"config": str(ROOT / "configs" / "llama_1b.py"), "set": [], "seconds": 280.0, "torch_python": "python-t"}
    return argparse.Namespace(**options | more)


def processes(**answers):
    """A stand-in for run_child that answers by the child's name and notes (name, command, seconds)."""
    asked = []

    def run(command, seconds):
        name = next((a.removeprefix("--child=") for a in command if a.startswith("--child=")), "torch")
        asked.append((name, command, seconds))
        return answers.get(name, GOOD)

    return run, asked


def test_without_a_card_it_says_so_in_one_line_and_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(gpu.cpu, "has_accelerator", lambda: False)
    assert gpu.main([]) == 2
    monkeypatch.setattr(gpu.cpu, "has_accelerator", lambda: True)  # a TPU
    monkeypatch.setattr(gpu, "run_child", lambda command, seconds: {"no_gpu": "TPU v4"})
    monkeypatch.setattr(gpu, "measure", lambda flags: {"check": {"no_gpu": "TPU v4"}})
    assert gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [f"gpu.py: needs a GPU; devices here: {kind}" for kind in ("none but the CPU", "TPU v4")]
    assert gpu.child("step", config_lib.Config()) == {"no_gpu": "cpu"}


def test_every_measurement_takes_the_same_cut_of_the_config_and_what_time_is_left():
    run, asked = processes(check=CHECK | {"bytes": 16e9}, torch=TORCH)
    ticks = iter(range(0, 1000, 40))
    found = gpu.measure(flags(set=["run.steps=200"]), run, lambda: next(ticks))
    assert [name for name, *_ in asked] == ["check", "step", "torch", "step_xla", "step_float16", "attention"]
    assert [seconds for *_, seconds in asked] == [240, 200, 160, 120, 80, 40]
    cuts = [
        [a for a in command if a.startswith("--set")] for name, command, _ in asked if name not in ("check", "torch")
    ]
    assert all(cut == cuts[0] for cut in cuts)
    assert "--set=run.steps=200" in cuts[0]
    config = config_lib.load(flags().config, [a.removeprefix("--set=") for a in cuts[0]])
    assert config.model.num_layers < 16
    assert measuring.cut_to_fit(config, 1, gpu.SHARE * 16e9).model == config.model
    shape = json.loads(asked[2][1][2])
    assert (shape["layers"], shape["rows"]) == (config.model.num_layers, config.data.batch_size)
    used = set(re.findall(r'\bs\["(\w+)"\]', (ROOT / "benchmarks" / "torch_llama.py").read_text()))
    assert used == set(shape)
    assert found["torch"]["mfu"] > 0
    shown = {row[0]: row for row in gpu.lines(found | {"attention": {"rows": {}, "ok": True}})}
    assert "0.80 of PyTorch's speed" in shown["step"][-1]
    assert shown["torch"][-1] == "torch 2.9, eager; torch.compile failed: X"
    assert shown["check float32"][-1].startswith("ok: loss off by 1e-06")


def test_what_fails_is_said_and_ends_with_1_but_a_missing_torch_does_not(monkeypatch, capsys):
    monkeypatch.setattr(gpu.cpu, "has_accelerator", lambda: True)
    no_torch = {"error": "ended with status 1: ModuleNotFoundError: No module named 'torch'"}
    attention = {"rows": {"xla": {"ok": True, "ms": 1.5}}, "ok": True}
    answers = {"check": CHECK, "torch": no_torch, "attention": attention}
    for more, code in (({}, 0), ({"step_xla": {"error": "ended with status 1: RESOURCE_EXHAUSTED"}}, 1)):
        run, _ = processes(**answers | more)
        monkeypatch.setattr(gpu, "measure", lambda flags, measure=gpu.measure, run=run: measure(flags, run))
        assert gpu.main(["--torch_python=python-t"]) == code
        monkeypatch.undo()
        monkeypatch.setattr(gpu.cpu, "has_accelerator", lambda: True)
        out = capsys.readouterr().out
        assert "| torch |  |  |  |  | python-t has no torch; give one that has with --torch_python |" in out
        assert "| attention xla | 1.50 ms |" in out
        assert ("| step_xla |  |  |  |  | FAILED: ended with status 1: RESOURCE_EXHAUSTED |" in out) == bool(code)


def test_a_process_answers_with_json_or_its_last_words_or_runs_out_of_time():
    def python(code, seconds=60.0):
        return gpu.run_child([sys.executable, "-S", "-c", code], seconds)

    assert python("print('noise'); print('{\"a\": 1}')") == {"a": 1}
    code = "import sys; sys.exit('RESOURCE_EXHAUSTED: Out of memory\\nmore')"
    assert python(code) == {"error": "ended with status 1: RESOURCE_EXHAUSTED: Out of memory"}
    assert python("import time; time.sleep(60)", 5.1)["error"] == "not done after 5 s, when the time was up"
    assert python("", 2.0) == {"error": "not reached: the time was up"}
    assert gpu.run_child(["/no/python"], 9.0) == {"error": "/no/python can't be run: No such file or directory"}


@pytest.mark.slow
def test_a_card_is_held_to_the_cpu_and_a_wrong_one_is_seen(monkeypatch):
    model = dataclasses.replace(gpu.SMALL.model, num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, mlp_dim=32)
    small = dataclasses.replace(gpu.SMALL, model=model, data=dataclasses.replace(gpu.SMALL.data, seq_len=16))
    monkeypatch.delitem(gpu.TOLERANCES, "float16")  # a compile less
    found = gpu.check(jax.devices()[0], jax.devices()[1], small)
    assert found["ok"]
    assert {name for name, row in found["rows"].items() if row["ok"]} == {"float32", "bfloat16"}
    assert found["rows"]["float32"]["off"] == [0.0, 0.0]
    assert all(off > 0 for off in found["rows"]["bfloat16"]["off"])
    time_step = lambda config, devices, *_, **__: {  # noqa: E731
        "losses": [2.0 + 0.1 * (devices[0].id == 0 and config.run.precision == "bfloat16")],
        "grad_norms": [1.0],
    }
    monkeypatch.setattr(measuring, "time_step", time_step)
    wrong = gpu.check(jax.devices()[0], jax.devices()[1], small)
    assert not wrong["ok"]
    assert [name for name, row in wrong["rows"].items() if not row["ok"]] == ["bfloat16"]
    assert any("WRONG: loss off by 0.05" in row[-1] for row in gpu.lines({"check": wrong}))


def test_attention_paths_are_timed_and_one_that_can_not_run_is_said():
    timing = measuring.Timing(2e-3, 1e-3, 3e-3)
    found = gpu.attention(jax.devices()[0], (1, 40, 4, 2, 16), lambda call: call() and timing)
    assert (found["ok"], found["rows"]["xla"]["ok"], found["rows"]["xla"]["ms"]) == (False, True, 2.0)
    assert not found["rows"]["cudnn"]["ok"]
    assert "ms" not in found["rows"]["cudnn"]
