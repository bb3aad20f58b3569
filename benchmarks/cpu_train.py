"""Training speed on a CPU: ours beside a plain PyTorch GPT of the same shape, in turns, in one run.

    pip install '.[bench]' && python benchmarks/cpu_train.py [--shapes=small,large] [--rounds=7] [--pin]
        [--torch_python=PYTHON]   another interpreter that has torch and numpy
        [--nanogpt=FOLDER]        time the model of a nanoGPT clone instead of torch_gpt.py
        [--compile]               torch.compile it

Each side is a process of its own that trains a few steps when told, while the other waits; the figure to quote is the
median of the rounds' ratios. Both get float32, the same number of threads and the same malloc settings. Ours does a
whole step of the product: Grain's batches, transfers, clipping, AdamW, metrics. --pin gives each one core, and so
takes the scheduler and other load out of it.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "small": {"layers": 4, "dim": 128, "heads": 4, "length": 64, "batch": 12, "steps": 40},
    "large": {"layers": 6, "dim": 384, "heads": 6, "length": 256, "batch": 16, "steps": 3},
}
# What tpu_train/cpu.py asks of glibc, for both sides.
MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "-1",
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def ours(shape: dict[str, int]):
    sys.path.insert(0, str(ROOT))
    import jax

    from tpu_train import data, precision
    from tpu_train import mesh as mesh_lib
    from tpu_train.config import Config, DataConfig, ModelConfig, OptimConfig
    from tpu_train.sharding import SPECS
    from tpu_train.train_step import init_state, make_train_step

    config = Config(
        model=ModelConfig(
            num_layers=shape["layers"],
            model_dim=shape["dim"],
            num_heads=shape["heads"],
            mlp_dim=4 * shape["dim"],
            gated_mlp=False,
            activation="gelu",
            scan_unroll=shape["layers"],
        ),
        data=DataConfig(seq_len=shape["length"], batch_size=shape["batch"]),
        optim=OptimConfig(warmup_steps=0, schedule="constant"),
    )
    mesh = mesh_lib.make_mesh(config.mesh)
    compute = precision.resolve(config.run, mesh_lib.platform(mesh))
    batches = data.train_batches(config.data, vocab_size=config.model.vocab_size)
    train_step, state = make_train_step(config, compute), init_state(config, compute)
    sharding = jax.NamedSharding(mesh, SPECS["ABT"])

    def step() -> float:
        nonlocal state
        batch = {name: jax.device_put(x[None], sharding) for name, x in next(batches).items()}
        state, metrics = train_step(state, batch)
        return float(metrics["loss"])

    return step


def theirs(shape: dict[str, int], nanogpt: str, compiled: bool):
    import numpy as np
    import torch_gpt

    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8)
    size = [shape[name] for name in ("layers", "dim", "heads", "length")]
    model = torch_gpt.nanogpt(nanogpt, *size) if nanogpt else torch_gpt.GPT(*size)
    return torch_gpt.make_step(model, text, shape["batch"], shape["length"], compiled)


def serve(side: str, shape: dict[str, int], args: argparse.Namespace) -> None:
    """Trains n steps for each line "n" on stdin and answers with the seconds they took."""
    step = ours(shape) if side == "ours" else theirs(shape, args.nanogpt, args.compile)
    for _ in range(3):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - began, flush=True)


def start(side: str, name: str, args: argparse.Namespace) -> subprocess.Popen:
    python = sys.executable if side == "ours" else args.torch_python
    command = [python, __file__, f"--serve={side}", f"--shapes={name}", f"--nanogpt={args.nanogpt}"]
    environment = os.environ | MALLOC
    if args.pin:
        command = ["taskset", "-c", "0", *command]
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if args.compile:
        command.append("--compile")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"cpu_train.py: {' '.join(command)} did not start; its error stands above")
    return process


def ask(process: subprocess.Popen, steps: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def compare(name: str, args: argparse.Namespace) -> str:
    shape = SHAPES[name]
    tokens = shape["steps"] * shape["batch"] * shape["length"]
    sides = {side: start(side, name, args) for side in ("ours", "torch")}
    speeds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side, process in sides.items():
            speeds[side].append(tokens / ask(process, shape["steps"]))
    for process in sides.values():
        process.kill()
    ratios = [mine / other for mine, other in zip(speeds["ours"], speeds["torch"], strict=True)]
    mine, other = (statistics.median(speeds[side]) for side in ("ours", "torch"))
    return (
        f"| {name}: {shape['layers']} x {shape['dim']}, T={shape['length']}, B={shape['batch']} | {mine:,.0f} "
        f"| {other:,.0f} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="small,large")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--torch_python", default=sys.executable)
    parser.add_argument("--nanogpt", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, SHAPES[args.shapes], args)
        return
    print("| shape | ours, tokens/s | PyTorch, tokens/s | ours / PyTorch, median (range) |\n|---|---|---|---|")
    for name in args.shapes.split(","):
        print(compare(name, args), flush=True)


if __name__ == "__main__":
    main()
