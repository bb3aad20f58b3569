"""Seconds from the command to the end of the first training step of configs/tiny.py, cold and warm.

    python benchmarks/first_step.py [--runs=3]

Cold: an empty compilation cache. Warm: the cache of the cold run. Also what importing costs by itself.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def first_step(cache: str) -> float:
    with tempfile.TemporaryDirectory() as workdir:
        command = [sys.executable, "-m", "tpu_train.main", "train", "--config=configs/tiny.py", f"--workdir={workdir}"]
        environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"first step done ([\d.]+) s", line):
                process.kill()
                process.wait()
                return float(found[1])
    raise SystemExit("first_step.py: the run ended before its first step; its error stands above")


def imports() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import tpu_train.train, grain"], check=True, cwd=ROOT)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    print("| | seconds, median (range) |\n|---|---|")
    seconds: dict[str, list[float]] = {"imports alone": [], "cold": [], "warm": []}
    for _ in range(runs):
        seconds["imports alone"].append(imports())
        with tempfile.TemporaryDirectory() as cache:
            seconds["cold"].append(first_step(cache))
            seconds["warm"].append(first_step(cache))
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f}) |")


if __name__ == "__main__":
    main()
