"""Who may import whom, and how long a file may be. Imports are read from the source, lazy ones inside functions too."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("tpu_train", "pallas_kernels", "configs")

# Room: what it may import of ours. A room that is not named may import any but main, and no kernel.
MAY_IMPORT = {
    "configs": ("tpu_train.config",),
    "pallas_kernels": ("pallas_kernels",),
    "tpu_train.config": ("tpu_train.config",),
    "tpu_train.models": (
        "tpu_train.models",
        "tpu_train.ops",
        "tpu_train.sharding",
        "tpu_train.config",
        "tpu_train.precision",
        "tpu_train.stages",
    ),
}
# The rooms below the loop, which may not look up to it.
LOWER = ("models", "ops", "optim", "data", "checkpoint", "metrics", "chart", "loss", "mesh", "sharding", "precision")
UPPER = ("main", "train", "generate", "evaluate", "plan", "aot", "hf", "kernels", "planning")
NO_JAX = ("tpu_train.config", "tpu_train.data", "tpu_train.plan")


@cache
def modules() -> dict[str, Path]:
    """Dotted name: file."""
    found = {}
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


@cache
def imports(module: str) -> frozenset[tuple[str, bool]]:
    """(imported module, whether only inside a function) for each import of the module."""
    path = modules()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return frozenset(imports_of(ast.parse(path.read_text(), str(path)), package, set(modules())))


def imports_of(tree: ast.AST, package: str, known: set[str], lazy: bool = False) -> set[tuple[str, bool]]:
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {(name.name, lazy) for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            # `from tpu_train import config` imports a module, `from tpu_train.config import Config` does not.
            names = {f"{source}.{name.name}" for name in node.names}
            found |= {(name if name in known else source, lazy) for name in names}
        else:
            found |= imports_of(node, package, known, lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return found


def ours(module: str) -> set[str]:
    return {name for name, _ in imports(module) if name.split(".")[0] in OURS}


def test_imports_are_found_in_every_form():
    source = """
import a.b
from tpu_train import config, mesh
from tpu_train.data import packing as p, load
from . import loss
from .data.texts import read
def lazily():
    if True:
        from .. import c
"""
    known = {"tpu_train.config", "tpu_train.mesh", "tpu_train.data.packing", "tpu_train.models.loss"}
    found = imports_of(ast.parse(source), "tpu_train.models", known)
    now = {"a.b", "tpu_train.config", "tpu_train.mesh", "tpu_train.data.packing", "tpu_train.data"}
    relative = {"tpu_train.models.loss", "tpu_train.models.data.texts"}
    assert found == {(name, False) for name in now | relative} | {("tpu_train", True)}


def test_the_rooms_are_where_this_test_looks():
    assert {"tpu_train", "tpu_train.config", "tpu_train.models", "pallas_kernels"} <= set(modules())


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_room_imports_only_what_it_may(room):
    for module in filter(lambda name: is_in(name, room), modules()):
        bad = {name for name in ours(module) if not any(is_in(name, allowed) for allowed in MAY_IMPORT[room])}
        assert not bad, f"{module} imports {bad}; {room} may import {MAY_IMPORT[room] or 'nothing of ours'}"


def test_only_ops_imports_the_kernels_and_main_lazily():
    for module in modules():
        kernels = {(name, lazy) for name, lazy in imports(module) if is_in(name, "pallas_kernels")}
        # The commands `kernels` and `compile` read what the compiler makes of them.
        looking = ("tpu_train.ops", "tpu_train.kernels", "tpu_train.aot")
        if is_in(module, "pallas_kernels") or any(is_in(module, room) for room in looking):
            continue
        if module == "tpu_train.main":  # `compile` looks at them; `train --help` should not wait for it
            kernels = {(name, lazy) for name, lazy in kernels if not lazy}
        assert not kernels, f"{module} imports {kernels}; go through tpu_train.ops"


def test_nobody_imports_main():
    assert not [module for module in modules() if "tpu_train.main" in ours(module)]


def test_lower_rooms_do_not_import_upper_ones():
    for module in modules():
        if any(is_in(module, f"tpu_train.{room}") for room in LOWER):
            bad = {name for name in ours(module) if any(is_in(name, f"tpu_train.{room}") for room in UPPER)}
            assert not bad, f"{module} imports {bad}"


def test_imports_make_no_circle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for name in sorted(ours(module) & set(modules()) - {module}):
            visit(name, (*path, module))
        done.add(module)

    for module in modules():
        visit(module, ())


@pytest.mark.parametrize("room", NO_JAX)
def test_room_needs_no_jax(room):
    waiting = [module for module in modules() if is_in(module, room)]
    seen = set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        bad = {name for name, _ in imports(module) if name.split(".")[0] in ("jax", "flax", "optax", "orbax")}
        assert not bad, f"{module} imports {bad}, and {room} imports it"
        waiting += ours(module) & set(modules()) - seen


def test_config_loads_without_jax():
    code = "import sys, tpu_train.config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_file_is_too_long_to_read():
    """The aim is 300 lines; 400 is where a file has two ideas in it."""
    rooms = [ROOT / name for name in (*OURS, "tests", "benchmarks", "launch", ".ci")]
    files = [path for room in rooms for path in room.rglob("*") if path.suffix in (".py", ".sh") or path.name == "run"]
    assert ROOT / "tpu_train" / "main.py" in files
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files if path.is_file()}
    assert not {name: length for name, length in lengths.items() if length > 400}
