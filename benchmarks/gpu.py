"""Day one on a GPU: is the result that of a CPU, and how fast is a training step beside plain PyTorch's?

    python benchmarks/gpu.py [--torch_python=PYTHON] [--config=configs/llama_1b.py] [--json=FILE] [--seconds=280]

check: losses and gradient norms of a small model on the card beside those on the CPU, in float32, bfloat16 and float16.
step: a training step of `--config`, cut to what fits one card, in bfloat16 with cuDNN's attention (one document a row).
torch: torch_llama.py, a plain PyTorch one of the same shape, in an interpreter that has torch. step_xla: the same as
step with packed rows, whose attention is XLA's. step_float16: with a loss scale. attention: forward and backward by
both, alone. Each is a process of its own, so that memory is free again; one that fails or is not reached in `--seconds`
is said, and leaves the others to run. Exit code: 0, 1 if a result is wrong or one failed, 2 without a GPU.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measuring
import tpu_numerics

import pallas_kernels
from tpu_train import config as config_lib
from tpu_train import cpu, devices
from tpu_train.config import Config, DataConfig, ModelConfig, OptimConfig
from tpu_train.flops import train_flops_per_token

ROOT = Path(__file__).resolve().parent.parent
# Largest difference of a loss and of a gradient norm from the CPU's in float32, relative.
TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (1e-2, 5e-2), "float16": (1e-2, 5e-2)}
SMALL = Config(
    model=ModelConfig(vocab_size=512, num_layers=2, model_dim=128, num_heads=4, num_kv_heads=2, mlp_dim=256),
    data=DataConfig(seq_len=128, batch_size=4, packing=False),
    optim=OptimConfig(warmup_steps=0, schedule="constant"),
)
# Of what the memory model allows: it knows the TPU's kernels, and XLA's and cuDNN's keep a little more.
SHARE = 0.85
Result = dict[str, Any]


def with_precision(config: Config, name: str) -> Config:
    return config_lib.apply_override(config, f"run.precision={name}")


def check(card: jax.Device, other: jax.Device, config: Config = SMALL) -> Result:
    """Three steps on the card in each precision beside the CPU's in float32."""

    def run(name: str, device: jax.Device) -> tuple[list[float], list[float]]:
        row = measuring.time_step(with_precision(config, name), [device], None, steps=1, repeats=2)
        return row["losses"], row["grad_norms"]

    wanted = run("float32", other)
    rows = {}
    for name, allowed in TOLERANCES.items():
        off = [
            max(abs(a - b) / abs(b) for a, b in zip(*pair, strict=True))
            for pair in zip(run(name, card), wanted, strict=True)
        ]
        rows[name] = {"off": off, "allowed": allowed, "ok": all(a <= b for a, b in zip(off, allowed, strict=True))}
    limit = measuring.usable_bytes(card)
    return {"rows": rows, "kind": card.device_kind, "bytes": limit, "ok": all(row["ok"] for row in rows.values())}


def step(card: jax.Device, config: Config) -> Result:
    row = measuring.time_step(config, [card], devices.peak_flops(card.device_kind), steps=4)
    row["ok"] = all(loss == loss and abs(loss) < 1e4 for loss in row["losses"])
    return row


def attention(card: jax.Device, shape: Sequence[int], timer: Callable[..., Any] = measuring.time_calls) -> Result:
    """Milliseconds of forward and backward by each path, and its error at a small size; `shape` is B, T, N, K, H."""
    B, T, N, K, H = shape
    small = tpu_numerics.attention("small", 1, min(T, 256), min(T, 256), N, K, H)
    rows: dict[str, Result] = {}
    for name in ("cudnn", "xla"):

        def attend(x, implementation, name=name):
            used = name if implementation == "pallas" else implementation
            return (pallas_kernels.flash_attention(x["q"], x["k"], x["v"], implementation=used),)

        def train(q, k, v, attend=attend):
            o, vjp = jax.vjp(lambda q, k, v: attend({"q": q, "k": k, "v": v}, "pallas")[0], q, k, v)
            return o, *vjp(o)

        first = lambda x: small.plain(x)[:1]  # noqa: E731
        (row,) = tpu_numerics.report([dataclasses.replace(small, ours=attend, plain=first, outputs=("o",))])
        rows[name] = row
        if "errors" in row:
            structs = [jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, K, K)]
            args, call = measuring.random_arguments(structs), measuring.alone(train)
            row["ms"] = 1e3 * timer(lambda call=call, args=args: call(*args)).best
    return {"rows": rows, "shape": list(shape), "ok": all(row["ok"] for row in rows.values())}


def child(name: str, config: Config) -> Result:
    """One measurement, in the process made for it."""
    card = jax.devices()[0]
    if card.platform not in ("gpu", "cuda", "rocm"):
        return {"no_gpu": card.device_kind}
    if name == "check":
        return check(card, jax.devices("cpu")[0])
    if name == "attention":
        model = config.model
        heads = (model.num_heads, model.kv_heads, model.head_size)
        return attention(card, (config.data.batch_size, config.data.seq_len, *heads))
    if name == "step_float16":
        config = with_precision(config, "float16")
    return step(card, config_lib.apply_override(config, f"data.packing={name == 'step_xla'}".lower()))


def run_child(command: list[str], seconds: float) -> Result:
    """The JSON that ends a process's output, or why there is none."""
    if seconds < 5:
        return {"error": "not reached: the time was up"}
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s, when the time was up"}
    except OSError as error:
        return {"error": f"{command[0]} can't be run: {error.strerror}"}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        said = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["it said nothing"]
        telling = next((line for line in reversed(said) if "RESOURCE_EXHAUSTED" in line), said[-1])
        return {"error": f"ended with status {done.returncode}: {telling.strip()[:300]}"}


def torch_command(config: Config, python: str) -> list[str]:
    model = config.model
    shape = {
        "layers": model.num_layers, "dim": model.model_dim, "heads": model.num_heads, "kv_heads": model.kv_heads,
        "head_dim": model.head_size, "mlp": model.mlp_dim, "vocab": model.vocab_size, "tied": model.tie_embeddings,
        "eps": model.norm_eps, "theta": model.rope_theta, "rows": config.data.batch_size,
        "length": config.data.seq_len, "steps": 4, "repeats": 3,
    }  # fmt: skip
    return [python, str(Path(__file__).with_name("torch_llama.py")), json.dumps(shape)]


def run_torch(config: Config, python: str, seconds: float, peak: float | None, run=run_child) -> Result:
    """PyTorch's step, with its MFU by the same FLOPs; an interpreter without torch is said."""
    row = run(torch_command(config, python), seconds)
    if "No module named 'torch'" in row.get("error", ""):
        return {"absent": f"{python} has no torch; give one that has with --torch_python"}
    if "seconds" in row:
        tokens = config.data.batch_size * config.data.seq_len
        row["tokens_per_second"] = tokens / row["seconds"]
        useful = row["tokens_per_second"] * train_flops_per_token(config.model, config.data.seq_len)
        row |= {"mfu": None if peak is None else useful / peak, "ok": True}
    return row


STEPS = ("step", "torch", "step_xla", "step_float16")


def measure(flags: argparse.Namespace, run=run_child, clock=time.monotonic) -> dict[str, Result]:
    """Everything, by name, within flags.seconds; with "no_gpu" of the first where there is none."""
    ends = clock() + flags.seconds
    settings = [f"--config={flags.config}", *(f"--set={each}" for each in flags.set)]
    ours = [sys.executable, __file__]
    found = {"check": run([*ours, "--child=check", *settings], ends - clock())}
    if "no_gpu" in found["check"] or "bytes" not in found["check"]:
        return found
    config = config_lib.load(flags.config, flags.set)
    room = found["check"]["bytes"]
    if room is not None:
        config = measuring.cut_to_fit(config, 1, SHARE * room)
    cut = [("model.num_layers", config.model.num_layers), ("model.remat", config.model.remat)]
    settings += [f"--set={name}={value}" for name, value in (*cut, ("data.batch_size", config.data.batch_size))]
    peak = devices.peak_flops(found["check"]["kind"])
    for name in (*STEPS, "attention"):
        if name == "torch":
            found[name] = run_torch(config, flags.torch_python, ends - clock(), peak, run)
        else:
            found[name] = run([*ours, f"--child={name}", *settings], ends - clock())
    return found


def lines(found: dict[str, Result]) -> list[list[str]]:
    """The one table: what, time, tokens/s, MFU, memory, and how it ended."""
    out = []
    for name, row in found.items():
        if "error" in row or "absent" in row:
            out.append([name, "", "", "", "", row.get("absent") or f"FAILED: {row['error']}"])
        elif name == "check":
            for precision, each in row["rows"].items():
                text = f"loss off by {each['off'][0]:.1g}, gradient norm by {each['off'][1]:.1g} from the CPU's"
                out.append([f"check {precision}", "", "", "", "", f"{'ok' if each['ok'] else 'WRONG'}: {text}"])
        elif name == "attention":
            for path, each in row["rows"].items():
                ms = f"{each['ms']:.2f} ms" if "ms" in each else ""
                out.append([f"attention {path}", ms, "", "", "", "ok" if each["ok"] else f"WRONG: {each['wrong']}"])
        else:
            out.append(_step_line(name, row, found["torch"] if name == "step" else {}))
    return out


def _step_line(name: str, row: Result, other: Result) -> list[str]:
    mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    held = "unknown" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.1f} GiB"
    if name == "torch":
        note = f"torch {row['torch']}, {'compiled' if row['compiled'] else 'eager'}"
        note += "".join(f"; {why}" for why in row["why"])
    else:
        note = f"{row['parameters'] / 1e9:.2f} B, {row['layers']} layers, {row['rows']} rows, remat {row['remat']}"
        note += "" if row["ok"] else "; WRONG: the loss is no number"
    if "seconds" in other:
        note += f"; {other['seconds'] / row['seconds']:.2f} of PyTorch's speed"
    return [name, f"{1e3 * row['seconds']:.1f} ms", f"{row['tokens_per_second']:,.0f}", mfu, held, note]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch_python", default=sys.executable)
    parser.add_argument("--config", default=str(ROOT / "configs" / "llama_1b.py"))
    parser.add_argument("--set", action="append", default=[], help="section.field=value, over the config's own")
    parser.add_argument("--seconds", type=float, default=280.0, help="what is not done by then is left out")
    parser.add_argument("--json", type=Path, help="also write all that was found into this file")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.child:
        print(json.dumps(child(flags.child, config_lib.load(flags.config, flags.set))), flush=True)
        return 0
    found = measure(flags) if cpu.has_accelerator() else {"check": {"no_gpu": "none but the CPU"}}
    if "no_gpu" in found["check"]:
        print(f"gpu.py: needs a GPU; devices here: {found['check']['no_gpu']}", file=sys.stderr)
        return 2
    print(f"{found['check'].get('kind', 'unknown card')}, jax {jax.__version__}")
    print(measuring.show_table(["what", "time", "tokens/s", "MFU", "memory", ""], lines(found)))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(row.get("ok", "absent" in row) for row in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
