"""The plan's memory of a device beside what the TPU compiler says of the same step, with no TPU.

    python benchmarks/plan_against_compile.py [--only=v6e,tensor] [--full] [--json=FILE]

Shapes of real models with few layers, so that a compile takes a minute or so; `--full` adds llama3_8b as it is. Each
row: what the plan says, what the compiler assigns (arguments and temporaries) and what of it is alive at its fullest
moment, in GB, and the plan over each. Exit code 1 if a plan is more than 10 % off what the compiler assigns. Answers
are kept as `tpu-train compile` keeps them.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from tpu_train import aot, chips
from tpu_train import config as config_lib
from tpu_train.aot import table
from tpu_train.planning import advice

LIMIT = 0.1  # of what the compiler assigns


@dataclasses.dataclass(frozen=True)
class Pair:
    """A shipped config with overrides, on a topology."""

    name: str
    topology: str
    overrides: tuple[str, ...]
    config: str = "llama_1b"
    num_slices: int = 1


FEW = (
    *("model.num_layers=4", "model.model_dim=1024", "model.mlp_dim=4096", "model.num_heads=8", "model.num_kv_heads=4"),
    *("model.head_dim=128", "model.vocab_size=32768", "mesh.data=1", "mesh.fsdp=-1", "data.batch_size=16"),
)
PAIRS = (
    Pair("fsdp, remat full", "v5e:4x4", FEW),
    Pair("fsdp, remat dots", "v5e:4x4", (*FEW, "model.remat=dots")),
    Pair("fsdp, remat none", "v5p:2x2x1", (*FEW, "model.remat=none")),
    Pair("v6e", "v6e:2x2", FEW),
    Pair("7x", "tpu7x:2x2x1", FEW),
    Pair("v4", "v4:2x2x1", FEW),
    Pair("tensor", "v5e:2x2", (*FEW, "mesh.fsdp=1", "mesh.tensor=-1", "data.batch_size=4")),
    Pair("fsdp and tensor", "v6e:2x4", (*FEW, "mesh.tensor=2", "data.batch_size=8")),
    Pair("context", "v5e:2x2", (*FEW, "mesh.fsdp=1", "mesh.context=-1", "data.seq_len=16384", "data.batch_size=1")),
    Pair("two slices", "v5e:2x2", (*FEW, "mesh.data=2", "mesh.fsdp=4"), num_slices=2),
    Pair("micro-batches", "v5e:2x2", (*FEW, "optim.accumulation_steps=4", "data.batch_size=32")),
    Pair(
        "experts", "v5e:2x2",
        (*FEW, "mesh.expert=4", "mesh.fsdp=1", "model.num_experts=8", "model.expert_dim=1024", "data.batch_size=8"),
    ),
)  # fmt: skip
WHOLE = (Pair("llama3_8b", "v5e:4x4", (), "llama3_8b"),)


def row(pair: Pair) -> dict[str, float | str]:
    """Both sides of one pair, in bytes."""
    config = config_lib.load(f"configs/{pair.config}.py", pair.overrides)
    step = aot.Step(config, pair.topology, pair.num_slices)
    plan = advice.own(config, chips.parse(pair.topology.removeprefix("tpu"), pair.num_slices)).memory
    (answer,) = aot.compile_steps([step])
    report = table.Report(pair.topology, pair.num_slices, answer)
    return {
        "name": pair.name,
        "topology": pair.topology,
        "plan": plan.total,
        "peak_in": plan.peak_in,
        "assigned": report.hbm_bytes,
        "alive": answer["peak_bytes"],
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
    print("| pair | topology | plan, GB | assigned | alive | plan / assigned | plan / alive |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for pair in picked:
        rows.append(found := row(pair))
        plan, assigned, alive = (float(found[name]) for name in ("plan", "assigned", "alive"))
        print(
            f"| {pair.name} | {pair.topology} | {plan / 1e9:.2f} | {assigned / 1e9:.2f} | {alive / 1e9:.2f} | "
            f"{plan / assigned:.2f} | {plan / alive:.2f} |",
            flush=True,
        )
    if flags.json:
        Path(flags.json).write_text(json.dumps(rows, indent=2))
    off = [found["name"] for found in rows if abs(float(found["plan"]) / float(found["assigned"]) - 1) > LIMIT]
    if off:
        print(f"more than {LIMIT:.0%} off: {', '.join(map(str, off))}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
