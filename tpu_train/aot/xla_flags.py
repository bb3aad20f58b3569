"""The flags that launch/xla_flags.tsv recommends for a TPU's compiler, so that `compile` uses what the launchers set.

LIBTPU_INIT_ARGS of the user's environment, even none, take their place, there and here.
"""

import os
from pathlib import Path

from tpu_train.aot import cards

FILE = Path(__file__).parents[2] / "launch" / "xla_flags.tsv"  # of a checkout; an installed package has none


def recommended(topology: str, file: Path = FILE) -> str:
    """LIBTPU_INIT_ARGS for "tpu7x:2x2x1"; empty for cards, and where the environment has its own."""
    if cards.of_topology(topology) or "LIBTPU_INIT_ARGS" in os.environ or not file.exists():
        return ""
    generation = topology.partition(":")[0].removeprefix("tpu")
    rows = [line.split("\t") for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return " ".join(row[1] for row in rows if row[0] == generation)
