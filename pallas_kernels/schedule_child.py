"""The process in which the TPU compiler runs for `schedule.py`: `python -P schedule_child.py FOLDER`.

FOLDER/request.json lists a topology for each program, FOLDER/<i>.export holds the program (jax.export). What the
compiler dumps into FOLDER/dump while it works on program i moves to FOLDER/<i>, as far as it is read;
FOLDER/<i>/module.txt is the compiled module, and FOLDER/answer.json says how each compilation went.
"""

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

# A kernel's own vmem_limit_bytes in the module's text.
VMEM_LIMIT = re.compile(
    r'^ *(?:ROOT )?%(\S+) = .*"scoped_memory_configs":\[\{"memory_space":"1"[^}]*"size":"(\d+)"', re.M
)
# What a kernel's call says of itself stands on several lines, and nothing here reads it.
METADATA = re.compile(r"kernel_metadata=\{[^{}]*\}")
KEPT = (
    "-post-delay-converter.txt",
    "-pre-delay_hlo-static-per-bundle-utilization.txt",
    "-original.txt",
    "-TLP-hlo.txt",
)


def main(folder: Path) -> None:
    """Compiles all that the request asks for."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    names = json.loads((folder / "request.json").read_text())
    versions = {"jax": jax.__version__, "libtpu": metadata.version("libtpu")}
    programs = []
    for i, name in enumerate(names):
        try:
            devices: Any = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        except Exception as error:
            programs.append({"no topology": str(error)})
        else:
            programs.append(compile_one(folder, i, jax.sharding.Mesh(np.array(devices[:1]), ("x",))))
    (folder / "answer.json").write_text(json.dumps({"versions": versions, "programs": programs}))


def compile_one(folder: Path, i: int, mesh: Any) -> dict[str, Any]:
    """What the compiler says of program i: its memory and bytes, or an error."""
    import jax
    from jax import export

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    exported = export.deserialize(bytearray((folder / f"{i}.export").read_bytes()))
    args, kwargs = jax.tree.unflatten(
        exported.in_tree,
        [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=everywhere) for aval in exported.in_avals],
    )
    try:
        compiled = jax.jit(exported.call).lower(*args, **kwargs).compile()
    except Exception as error:
        return {"error": str(error)}
    finally:
        keep(folder / "dump", folder / str(i))
    memory: Any = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    text, has_estimates = module_text(compiled, folder / str(i))
    (folder / str(i) / "module.txt").write_text(text)
    return {
        "hbm_bytes": needed - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "bytes_accessed": bytes_accessed(cost),
        "has_estimates": has_estimates,
        "vmem_limits": {name: int(size) for name, size in VMEM_LIMIT.findall(text)},
    }


def module_text(compiled: Any, dump: Path) -> tuple[str, bool]:
    """The compiled module, and whether the compiler's estimates are in it.

    They are in what JAX prints; where libtpu's module has instructions that this JAX can't read, the dump's text is
    left.
    """
    try:
        return METADATA.sub("kernel_metadata={}", compiled.as_text() or ""), True
    except Exception:
        (file,) = dump.glob("*-TLP-hlo.txt")
        return METADATA.sub("kernel_metadata={}", file.read_text()), False


def bytes_accessed(cost: dict[str, float]) -> float:
    """The program's total; a program that is one kernel alone has only a figure for each operand and the output."""
    parts = [value for name, value in cost.items() if name.startswith("bytes accessed")]
    return cost.get("bytes accessed", sum(parts))


def keep(dump: Path, folder: Path) -> None:
    """Moves the files that are read, and clears the rest."""
    folder.mkdir()
    for path in dump.iterdir():
        if path.name.endswith(KEPT):
            path.rename(folder / path.name)
        else:
            path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
