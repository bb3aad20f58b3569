"""Day one on a TPU: are the kernels right, as fast as predicted, and how fast is a training step?

    python benchmarks/tpu.py [--parts=numerics,times,step] [--json=FILE]
    python benchmarks/tpu.py --parts=tune [--config=configs/llama_1b.py] [--table=pallas_kernels/tuned.json]

numerics: every kernel's values and gradients on the chip beside a float32 reference, by the rule of twice the error of
plain bfloat16 code. times: each case of `tpu-train kernels` on the chip beside its predicted cycles, which are read by
the compiler in a process of its own, or from tests/aot/budget.json where that does not work. step: a training step of
`--config`, cut to what fits, on all devices of this machine, beside `tpu-train plan`'s prediction. tune: tries block
sizes for that step's kernels and writes those that are faster into the table that the kernels read.

A part that fails leaves the others to run. Exit code: 0; 1 if a kernel is wrong or a part failed; 2 without a TPU.
"""

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measuring
import tpu_numerics
import tpu_tuner

from pallas_kernels import budget, cases, tuned
from pallas_kernels.runtime import Chip
from pallas_kernels.schedule import CORES
from tpu_train import chips, cpu
from tpu_train import config as config_lib
from tpu_train.planning import advice

ROOT = Path(__file__).resolve().parent.parent
PREDICTION_SECONDS = 900
BUDGET = ROOT / "tests" / "aot" / "budget.json"
Result = dict[str, Any]


def numerics(flags: argparse.Namespace, chip: Chip) -> Result:
    rows = tpu_numerics.report(tpu_numerics.problems())
    return {"rows": rows, "ok": all(row["ok"] for row in rows)}


def times(flags: argparse.Namespace, chip: Chip) -> Result:
    predicted, source = predictions(chip)
    rows = timed(cases.all_cases(), predicted, seconds_of_cycle(chip, jax.devices()[0]), measuring.time_calls)
    return {"rows": rows, "source": source, "ok": all("error" not in row for row in rows)}


def timed(found: list[cases.Case], predicted: dict[str, float], cycle: float, timer) -> list[Result]:
    """One row a case: milliseconds measured and predicted, and their ratio; `predicted` in cycles."""
    rows: list[Result] = []
    for case in found:
        row: Result = {"case": case.name}
        rows.append(row)
        cycles = predicted.get(case.name)
        row["predicted_ms"] = None if cycles is None else 1e3 * cycles * cycle
        try:
            args = jax.block_until_ready(arguments(case))
            run = measuring.alone(case.fn)
            timing = timer(lambda run=run, args=args: run(*args))
        except Exception as error:  # a compiler's refusal has many types
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        row |= {"host_ms": 1e3 * timing.median, "range_ms": [1e3 * timing.low, 1e3 * timing.high]}
        row["device_ms"] = None if timing.device is None else 1e3 * timing.device
        if cycles is not None:
            row["ratio"] = 1e3 * timing.best / row["predicted_ms"]
        if case.flops is not None:
            row["tflops"] = case.flops / timing.best / 1e12
    return rows


def arguments(case: cases.Case) -> list[jax.Array]:
    """Random ones, but for those whose values the case's counts and FLOPs are of."""
    drawn = list(measuring.random_arguments(case.args))
    for place, values in case.ids.items():
        drawn[place] = jnp.asarray(values, drawn[place].dtype)
    return drawn


def seconds_of_cycle(chip: Chip, device: jax.Device) -> float:
    """From the peak FLOP/s of the table of chips and the FLOPs of a cycle: no other clock is known."""
    known = chips.of_kind(device.device_kind)
    peak = None if known is None else known.per_device("bf16_flops")
    if peak is None:
        raise config_lib.UserError(f"chips.py has no peak for {device.device_kind}, so a cycle's length is not known")
    return chip.cores * CORES[chip.name].peak_bf16_flops / peak


def predictions(chip: Chip, seconds: float = PREDICTION_SECONDS) -> tuple[dict[str, float], str]:
    """(cycles by case, where they are from)."""
    command = [sys.executable, "-m", "tpu_train.main", "kernels", f"--topology={chip.name}:1x1", "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(chips.__file__).parents[1])}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
        read = json.loads(done.stdout)
        cycles = {
            name: said["cycles"] + (said.get("xla_cycles") or 0) for name, said in read.items() if "cycles" in said
        }
        if cycles:
            return cycles, "the compiler on this machine, with XLA's estimate for what is around the kernels"
        why = f"it refused every case: {next(iter(read.values()), {}).get('error')}"
    except subprocess.TimeoutExpired:
        why = f"it took over {seconds:g} s"
    except (ValueError, OSError):
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    found = budget.load(BUDGET).get(f"{chip.name}:1x1", {})
    return found, f"tests/aot/budget.json, kernels alone, since the compiler can't be asked here ({why})"


def step(flags: argparse.Namespace, chip: Chip) -> Result:
    devices = jax.devices()
    config = cut(flags, devices)
    known = chips.of_kind(devices[0].device_kind)
    count = len(devices) // (1 if known is None else known.devices)
    peak = None if known is None else known.per_device("bf16_flops")
    row = measuring.time_step(config, devices, peak)
    row["ok"] = all(loss == loss and abs(loss) < 1e4 for loss in row["losses"])
    if known is not None:
        plan = advice.own(config, chips.parse(f"{known.name}-{count}"))
        row["predicted"] = {"best": plan.step.best, "worst": plan.step.worst, "memory_bytes": plan.memory.total}
        row["predicted"]["mfu"] = [
            plan.step.useful_flops / s / plan.step.peak for s in (plan.step.worst, plan.step.best)
        ]
    return row


def cut(flags: argparse.Namespace, devices: list[jax.Device]) -> config_lib.Config:
    """The config of the flags, as much of it as fits these devices."""
    config = config_lib.load(flags.config, flags.set)
    room = measuring.usable_bytes(devices[0])
    if room is None:
        known = chips.of_kind(devices[0].device_kind)
        room = None if known is None else advice.room(chips.parse(known.name))
    if room is None:
        raise config_lib.UserError(f"{devices[0].device_kind} does not say how much memory it has")
    return measuring.cut_to_fit(config, len(devices), room)


def tune(flags: argparse.Namespace, chip: Chip) -> Result:
    devices = jax.devices()
    config = cut(flags, devices)
    rows_each = max(1, config.data.batch_size // len(devices))
    made = config_lib.apply_override(config, f"data.batch_size={rows_each * config.optim.accumulation_steps}")
    rows = []
    for space in tpu_tuner.spaces(made, chip):
        found = tpu_tuner.tune(space, lambda call: measuring.time_calls(call, repeats=5).best)
        if found.kept:
            tpu_tuner.write(found, space, chip, flags.table)
        rows.append(vars(found))
        print(f"tuned {found.op}, {found.shape}", file=sys.stderr, flush=True)
    return {"rows": rows, "table": str(flags.table), "ok": not any(row["wrong"] for row in rows)}


PARTS: dict[str, Callable[[argparse.Namespace, Chip], Result]] = {
    "numerics": numerics,
    "times": times,
    "step": step,
    "tune": tune,
}


def run_parts(names: list[str], flags: argparse.Namespace, chip: Chip, parts=PARTS) -> dict[str, Result]:
    """What each part found; one that raises is an error of its own."""
    found: dict[str, Result] = {}
    for name in names:
        try:
            found[name] = parts[name](flags, chip)
        except Exception as error:
            traceback.print_exc()
            found[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return found


def lines(found: dict[str, Result]) -> list[list[str]]:
    """The one table: part, what, measured, predicted or allowed, and how it ended."""
    out = []
    for name, result in found.items():
        if "error" in result:
            out.append([name, "", "", "", f"FAILED: {result['error']}"])
        else:
            out += [[name, *row] for row in _ROWS[name](result)]
    return out


def _numerics_rows(result: Result):
    for row in result["rows"]:
        ratio = "" if row.get("ratio") is None else f"{row['ratio']:.2f} of plain bf16's error"
        yield f"{row['op']}: {row['shape']}", ratio, "at most 2", "ok" if row["ok"] else f"WRONG: {row['wrong']}"


def _times_rows(result: Result):
    for row in result["rows"]:
        if "error" in row:
            yield row["case"], "", "", f"FAILED: {row['error']}"
            continue
        which = "device" if row["device_ms"] is not None else "host"
        measured = f"{row[f'{which}_ms']:.3f} ms ({which}'s clock)"
        predicted = "unknown" if row["predicted_ms"] is None else f"{row['predicted_ms']:.3f} ms"
        yield row["case"], measured, predicted, f"{row['ratio']:.2f} of it" if "ratio" in row else ""
    yield "predictions", "", "", f"from {result['source']}"


def _step_rows(row: Result):
    what = (
        f"{row['parameters'] / 1e9:.2f} B parameters, {row['layers']} layers, {row['rows']} rows, remat {row['remat']}"
    )
    predicted = row.get("predicted", {})
    text = "unknown" if not predicted else f"{1e3 * predicted['best']:.1f} to {1e3 * predicted['worst']:.1f} ms"
    yield what, f"{1e3 * row['seconds']:.1f} ms", text, "ok" if row["ok"] else "WRONG: the loss is no number"
    mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
    yield "MFU", mfu, "" if not predicted else f"{predicted['mfu'][0]:.1%} to {predicted['mfu'][1]:.1%}", ""
    held = f"{predicted['memory_bytes'] / 2**30:.2f} GiB" if predicted else ""
    yield "memory of a device, by the compiler", f"{row['memory_bytes'] / 2**30:.2f} GiB", held, ""


def _tune_rows(result: Result):
    for row in result["rows"]:
        said = f"{row['tried']} tried, {len(row['refused'])} refused"
        said += f", kept in {result['table']}" if row["kept"] else ", none is faster"
        said += f"; WRONG: {'; '.join(row['wrong'])}" if row["wrong"] else ""
        shape = f"{row['op']}: {row['shape']}"
        yield shape, f"{1e3 * row['best_seconds']:.3f} ms", f"own sizes {1e3 * row['first_seconds']:.3f} ms", said
        yield from (("", "", "refused", line) for line in row["refused"][:3])


_ROWS = {"numerics": _numerics_rows, "times": _times_rows, "step": _step_rows, "tune": _tune_rows}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="numerics,times,step", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--config", default=str(ROOT / "configs" / "llama_1b.py"))
    parser.add_argument("--set", action="append", default=[], help="section.field=value, over the config's own")
    parser.add_argument("--table", type=Path, default=tuned.FILE, help="where tune writes")
    parser.add_argument("--json", type=Path, help="also write all that was found into this file")
    flags = parser.parse_args(arguments)
    names = flags.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    kind, chip = "none but the CPU", None
    if cpu.has_accelerator():  # else libtpu would look for one, and say much
        kind = jax.devices()[0].device_kind
        chip = tpu_tuner.chip_of(jax.devices()[0])
    if chip is None:
        print(f"tpu.py: needs a TPU VM of {', '.join(CORES)}; devices here: {kind}", file=sys.stderr)
        return 2
    found = run_parts(names, flags, chip)
    print(f"{len(jax.devices())} x {kind}, jax {jax.__version__}")
    print(measuring.show_table(["part", "what", "measured", "predicted or allowed", ""], lines(found)))
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=2, default=str) + "\n")
    return 0 if all(result["ok"] for result in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
