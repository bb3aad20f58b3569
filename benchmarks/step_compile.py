"""The ahead-of-time compile of a Llama-3.1-8B train step for 16 TPU v5e, beside MaxText's; needs libtpu, not a TPU.

    python benchmarks/step_compile.py
    python benchmarks/step_compile.py --maxtext_python=PYTHON

Predicted for v5e 4x4, weights split over all 16 chips, one sequence of 2,048 tokens a chip, full remat: HBM of a
device, XLA's own estimate of cycles for all that is not a Pallas kernel (loops times their turns), and the seconds that
the compile takes, from the command to the answer. MaxText is compiled with its own train_compile, in the Python that
is given, in the same turn; without one its recorded figures stand in the table, of version 0.2.5 (libtpu 0.0.52).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pallas_kernels import hlo_cost  # noqa: E402
from pallas_kernels.schedule import compiler_environment  # noqa: E402
from tpu_train import aot  # noqa: E402
from tpu_train import config as config_lib  # noqa: E402

TOPOLOGY = "v5e:4x4"
RECORDED = ("MaxText 0.2.5 (recorded)", 6.03, 4.02, 2.73, 120.0)
# The same model, batch, split and remat; no checkpoint, data or metrics.
MAXTEXT = (
    *("model_name=llama3.1-8b", "compile_topology=v5e-16", "compile_topology_num_slices=1", "per_device_batch_size=1"),
    *("max_target_length=2048", "ici_fsdp_parallelism=16", "remat_policy=full", "dataset_type=synthetic"),
    *("run_name=aot", "base_output_directory=/tmp/maxtext", "enable_checkpointing=false"),
)
# MaxText's own command, with what it compiles written down: the text that a dump has no estimates in.
WRAPPER = """
import sys
from pathlib import Path
import jax
compile_ = jax.stages.Lowered.compile
def noted(self, *args, **kwargs):
    compiled = compile_(self, *args, **kwargs)
    sizes = compiled.memory_analysis()
    text = compiled.as_text()
    if text and "jit_train_step" in text.partition("\\n")[0]:
        Path(sys.argv[1]).write_text(f"{sizes.argument_size_in_bytes} {sizes.temp_size_in_bytes}\\n{text}")
    return compiled
jax.stages.Lowered.compile = noted
import maxtext
from maxtext.trainers.pre_train import train_compile
base = Path(maxtext.__path__[0]) / "configs" / "base.yml"
train_compile.main(["train_compile", str(base), *sys.argv[2:]])
"""


def ours() -> tuple[str, float, float, float, float]:
    config = config_lib.load(str(ROOT / "configs" / "llama3_8b.py"))
    start = time.monotonic()
    (answer,) = aot.compile_steps([aot.Step(config, TOPOLOGY)], use_cache=False)
    seconds = time.monotonic() - start
    temporaries = answer["temporary_bytes"] / 1e9
    return "ours", answer["argument_bytes"] / 1e9, temporaries, answer["cycles"] / 1e9, seconds


def maxtext(python: str) -> tuple[str, float, float, float, float]:
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "step.txt"
        start = time.monotonic()
        command = [python, "-c", WRAPPER, str(noted), *MAXTEXT]
        done = subprocess.run(command, env=compiler_environment(), capture_output=True, text=True, check=False)
        seconds = time.monotonic() - start
        if not noted.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise SystemExit(f"MaxText's compile ended with status {done.returncode}: {last}")
        sizes, _, text = noted.read_text().partition("\n")
    arguments, temporaries = (int(size) / 1e9 for size in sizes.split())
    return "MaxText", arguments, temporaries, hlo_cost.parse(text).total_cycles / 1e9, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maxtext_python", help="a Python that has MaxText and libtpu")
    flags = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows = [ours(), maxtext(flags.maxtext_python) if flags.maxtext_python else RECORDED]
    print("| | arguments, GB | temporaries, GB | both | G cycles | compile, s |\n|" + "---|" * 6)
    for name, arguments, temporaries, cycles, seconds in rows:
        both = arguments + temporaries
        print(f"| {name} | {arguments:.2f} | {temporaries:.2f} | {both:.2f} | {cycles:.2f} | {seconds:.0f} |")
    (_, *a), (_, *b) = rows
    print(
        f"ours / MaxText: HBM {(a[0] + a[1]) / (b[0] + b[1]):.2f}, cycles {a[2] / b[2]:.2f}, seconds {a[3] / b[3]:.2f}"
    )


if __name__ == "__main__":
    main()
