"""The `compile` command: the real train step through the real compiler of a TPU or an NVIDIA card, with none here.

The compiler runs in a process of its own, for devices that do not exist. What it answers is kept in
~/.cache/tpu_train/compile, under a hash of the config, the topology, the versions and the source of our packages.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

from pallas_kernels import schedule
from tpu_train import config as config_lib
from tpu_train.aot import cards, search, table
from tpu_train.aot.xla_flags import recommended
from tpu_train.config import Config, UserError

ROOT = Path(__file__).parents[2]  # of our packages
CACHE = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "tpu_train" / "compile"


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step to compile, for `num_slices` slices of a topology such as "v5e:4x4", or hosts such as "h100:8".

    `xla_flags` are LIBTPU_INIT_ARGS for a TPU, XLA_FLAGS for cards.
    """

    config: Config
    topology: str
    num_slices: int = 1
    xla_flags: str = ""


def show(flag: Mapping[str, Any]) -> int:
    """Compiles the step that the flags describe and prints what the compiler says; 0 if it fits, 1 if it does not."""
    if not flag["config"]:
        raise UserError("compile needs --config=FILE, such as --config=configs/llama3_8b.py")
    config = config_lib.load(flag["config"], flag["set"])
    topology, xla_flags = parse_topology(flag["topology"]), flag["xla_flags"]
    if xla_flags is None:
        xla_flags = recommended(topology)
    step = Step(config, topology, flag["num_slices"], xla_flags)
    if flag["search"]:
        return search.show(step, num_devices(step), compile_steps, as_json=flag["json"])
    (answer,) = compile_steps([step])
    report = table.Report(step.topology, step.num_slices, answer | {"xla_flags": xla_flags})
    print(json.dumps(report.as_dict(), indent=2) if flag["json"] else report.table(config))
    return 0 if report.fits else 1


def parse_topology(text: str) -> str:
    """ "tpu7x:2x2x1" for "7x:2x2x1"; raises UserError with what exists."""
    if cards.of_topology(text):
        return cards.parse(text)
    if util.find_spec("libtpu") is None:
        raise UserError("compiling for a TPU that is not here needs libtpu: pip install libtpu flatbuffers")
    try:
        _, topology = schedule.parse_topology(text)
    except schedule.ScheduleError as error:
        raise UserError(f"{error}, or an NVIDIA card: {', '.join(cards.CARDS)}, as in h100:8") from error
    if not re.fullmatch(r"\w+:\d+(x\d+){1,2}", topology):
        raise UserError(f"no topology {text!r}; write a shape such as v5e:4x4, v6e:16x16 or v5p:4x4x4")
    return topology


def num_devices(step: Step) -> int:
    """JAX devices of all slices or hosts: one per chip, but two of a 7x."""
    generation, _, shape = step.topology.partition(":")
    per_chip = 2 if generation == "tpu7x" else 1
    return step.num_slices * per_chip * math.prod(int(side) for side in shape.split("x"))


def compile_steps(steps: Sequence[Step], use_cache: bool = True) -> list[dict[str, Any]]:
    """What the compiler says of each, all that is not in the cache in one process. Raises UserError on bad input."""
    keys = [key(step) for step in steps]
    files = [CACHE / f"{name}.json" for name in keys]
    missing = [i for i, file in enumerate(files) if not (use_cache and file.exists())]
    answers: dict[int, dict[str, Any]] = {}
    for alike in _alike(steps, missing):
        answers |= zip(alike, run([steps[i] for i in alike]), strict=True)
    for i, answer in answers.items():
        refuse(steps[i], answer)
        files[i].parent.mkdir(parents=True, exist_ok=True)
        part = files[i].with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(answer))
        part.rename(files[i])
    return [answers[i] if i in answers else json.loads(file.read_text()) for i, file in enumerate(files)]


def _alike(steps: Sequence[Step], missing: Sequence[int]) -> list[list[int]]:
    """`missing`, cut into those that one process can compile: an environment has one set of flags."""
    groups: dict[tuple[bool, str], list[int]] = {}
    for i in missing:
        groups.setdefault((cards.of_topology(steps[i].topology) is None, steps[i].xla_flags), []).append(i)
    return list(groups.values())


def key(step: Step) -> str:
    """Changes with all that the answer depends on."""
    plain = config_lib.to_dict(dataclasses.replace(step.config, checkpoint=Config().checkpoint))
    del plain["run.workdir"]
    flags = [os.environ.get("LIBTPU_INIT_ARGS", ""), step.xla_flags]
    return hashlib.sha256(
        json.dumps([plain, step.topology, step.num_slices, versions(), flags, source_hash(ROOT)]).encode()
    ).hexdigest()[:32]


def versions() -> dict[str, str]:
    """Of what decides how a step is compiled."""
    names = ("jax", "jaxlib", "libtpu", "flax", "optax", *(plugin.replace("_", "-") for plugin in cards.PLUGINS))
    found = {distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()}
    return {name: found[name] for name in names if name in found}


@functools.cache
def source_hash(root: Path) -> str:
    """Of every Python file of our two packages under `root`, and of the table of tuned block sizes."""
    total = hashlib.sha256()
    files = [path for room in ("pallas_kernels", "tpu_train") for path in (root / room).rglob("*.py")]
    for path in sorted([*files, *(root / "pallas_kernels").glob("*.json")]):
        total.update(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def run(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """The compiler's answers, from one process, for steps with the same flags; each may be a refusal."""
    with tempfile.TemporaryDirectory(prefix="compile-") as name:
        folder = Path(name)
        child, environment = prepare(steps, folder, schedule.dump_flags(folder / "dump"))
        done = subprocess.run(child, env=environment, capture_output=True, text=True, check=False)
        answers = []
        for i in range(len(steps)):
            file = folder / f"{i}.json"
            if not file.exists():
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise UserError(f"the compiler's process ended with status {done.returncode}: {last}")
            answers.append(json.loads(file.read_text()))
        return answers


def assigned_bytes(step: Step) -> int:
    """HBM that the compiler assigns to a device, arguments and temporaries, in a tenth of a whole compile's time.

    XLA decides it, and writes it down, before it makes code of the program; then the compiler's process is ended. The
    figure is that of the whole compile; of what does not fit, what the refusal names. Raises UserError on bad input.
    """
    with tempfile.TemporaryDirectory(prefix="assign-") as name:
        folder = Path(name)
        command, environment = prepare([step], folder)
        dumped = (folder / "dump").glob
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            try:
                # The last that XLA writes; what follows takes minutes.
                while child.poll() is None and not list(dumped("*jit_train_step*_after_buffer_assignment.txt")):
                    time.sleep(0.2)
            finally:
                child.kill()
        if (file := folder / "0.json").exists():
            answer = json.loads(file.read_text())
            refuse(step, answer)
            if "needed_bytes" in answer:
                return answer["needed_bytes"]
        reports = [file.read_text() for file in dumped("*jit_train_step*-memory-usage-report.txt")]
        found = re.search(r"color=0\)\nTotal bytes: (\d+)", "".join(reports))
        if found is None:
            raise UserError(f"the compiler for {step.topology} wrote down no memory that it assigned")
        return int(found[1])


def prepare(steps: Sequence[Step], folder: Path, flags: str = "") -> tuple[list[str], dict[str, str]]:
    """The command and the environment of the process that compiles; `flags` are more LIBTPU_INIT_ARGS."""
    requests = [
        {
            "config": config_lib.to_dict(step.config),
            "topology": step.topology,
            "num_slices": step.num_slices,
            "root": str(ROOT),
        }
        for step in steps
    ]
    (folder / "request.json").write_text(json.dumps(requests))
    (folder / "dump").mkdir()
    on_cards, (more,) = cards.of_topology(steps[0].topology), {step.xla_flags for step in steps}
    environment = schedule.compiler_environment(flags if on_cards else f"{more} {flags}".strip())
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program found there dumps nothing
        "XLA_FLAGS": f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=train_step"
        f"{f' {more}' if on_cards else ''}",
    }
    return [sys.executable, "-P", "-m", "tpu_train.aot.child", str(folder)], environment


def refuse(step: Step, answer: Mapping[str, Any]) -> None:
    """Raises UserError for an answer that is none, so that it is not kept."""
    if "bad" in answer:
        raise UserError(answer["bad"])
    if "no topology" in answer:
        message = next(iter(answer["no topology"].splitlines()), "")
        raise UserError(f"no topology {step.topology!r}, {step.num_slices} slice(s): {message[:300]}")
    if "refused" in answer:
        raise UserError(f"the compiler for {step.topology} refuses the step: {answer['refused']}")
