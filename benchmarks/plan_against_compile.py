"""The plan's memory of a device beside what the TPU compiler says of the same step, with no TPU.

    python benchmarks/plan_against_compile.py [--only=v6e,tensor] [--full] [--json=FILE]

A narrow model of many layers, since it is the kernels' blocks that a compile's time goes with; `--full` adds llama3_8b
as it is. Each row: what the plan says, what the compiler assigns (arguments and temporaries), and the one over the
other. Exit code 1 if a plan is more than 10 % off.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tpu_train import aot, chips  # noqa: E402
from tpu_train import config as config_lib  # noqa: E402
from tpu_train.planning import advice  # noqa: E402

LIMIT = 0.1  # of what the compiler assigns


@dataclasses.dataclass(frozen=True)
class Pair:
    """A shipped config with overrides, on a topology."""

    name: str
    topology: str
    overrides: tuple[str, ...]
    config: str = "llama_1b"
    num_slices: int = 1


SMALL = (
    *("model.num_layers=24", "model.model_dim=512", "model.mlp_dim=2048", "model.num_heads=4", "model.num_kv_heads=2"),
    *("model.head_dim=128", "model.vocab_size=16384", "model.tie_embeddings=false", "data.seq_len=512"),
    *("data.batch_size=32", "mesh.data=1", "mesh.fsdp=-1"),
)
PAIRS = (
    Pair("remat full", "v5e:2x2", SMALL),
    Pair("remat dots", "v5e:2x2", (*SMALL, "model.remat=dots")),
    Pair("remat none", "v5p:2x2x1", (*SMALL, "model.remat=none")),
    Pair("v6e", "v6e:2x2", SMALL),
    Pair("7x", "tpu7x:2x2x1", (*SMALL, "model.model_dim=1024", "data.batch_size=64")),
    Pair("tensor", "v5e:2x2", (*SMALL, "mesh.fsdp=2", "mesh.tensor=2", "data.batch_size=16")),
    Pair("context", "v5e:2x2", (*SMALL, "mesh.fsdp=1", "mesh.context=-1", "data.seq_len=4096", "data.batch_size=4")),
    Pair("two slices", "v5e:2x2", (*SMALL, "mesh.data=2", "data.batch_size=64"), num_slices=2),
    Pair("micro-batches", "v6e:2x2", (*SMALL, "optim.accumulation_steps=2", "model.remat=dots")),
    Pair(
        "experts", "v5e:2x2",
        (*SMALL, "mesh.expert=4", "mesh.fsdp=1", "model.num_experts=8", "model.expert_dim=512", "data.batch_size=16"),
    ),
    Pair("v4", "v4:2x2x1", (*SMALL, "model.remat=none", "data.batch_size=16")),
)  # fmt: skip
WHOLE = (Pair("llama3_8b", "v5e:4x4", (), "llama3_8b"),)


def row(pair: Pair) -> dict[str, float | str]:
    """Both sides of one pair, in bytes."""
    config = config_lib.load(str(ROOT / "configs" / f"{pair.config}.py"), pair.overrides)
    step = aot.Step(config, pair.topology, pair.num_slices)
    plan = advice.own(config, chips.parse(pair.topology.removeprefix("tpu"), pair.num_slices)).memory
    return {
        "name": pair.name,
        "topology": pair.topology,
        "plan": plan.total,
        "peak_in": plan.peak_in,
        "assigned": aot.assigned_bytes(step),
        **{f"plan {name}": size for name, size in plan.parts.items()},
    }


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of pairs, separated by commas")
    parser.add_argument("--full", action="store_true", help="llama3_8b too, as it is")
    parser.add_argument("--json", default="")
    flags = parser.parse_args()
    only = [name for name in flags.only.split(",") if name]
    known = {pair.name: pair for pair in (*PAIRS, *WHOLE)}
    if unknown := [name for name in only if name not in known]:
        parser.error(f"no pair {unknown[0]!r}; there are {', '.join(known)}")
    picked = [known[name] for name in only] or [*PAIRS, *(WHOLE if flags.full else ())]
    rows = []
    print("| pair | topology | plan, GB | assigned, GB | plan / assigned |")
    print("|---|---|---|---|---|", flush=True)
    for pair in picked:
        rows.append(found := row(pair))
        plan, assigned = float(found["plan"]), float(found["assigned"])
        row_text = f"{plan / 1e9:.2f} | {assigned / 1e9:.2f} | {plan / assigned:.2f}"
        print(f"| {pair.name} | {pair.topology} | {row_text} |", flush=True)
    if flags.json:
        Path(flags.json).write_text(json.dumps(rows, indent=2))
    off = [found["name"] for found in rows if abs(float(found["plan"]) / float(found["assigned"]) - 1) > LIMIT]
    if off:
        print(f"more than {LIMIT:.0%} off: {', '.join(map(str, off))}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
