"""Which meshes a config is checked on, and what of the config depends on them. Without jax."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

from tpu_train import context, stages
from tpu_train.config import Config, MeshConfig, UserError, did_you_mean
from tpu_train.layout import AXES, DATA_ALONE, check_fits, mesh_shape

Sizes = dict[str, int]  # of every axis


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, and how attention crosses `context` there."""

    sizes: Sizes
    context_method: str

    @property
    def name(self) -> str:
        """ "data 2 x fsdp 4", with the context's method."""
        method = f" ({self.context_method})" if self.sizes["context"] > 1 else ""
        return name_of(self.sizes) + method

    def mesh(self, asked: MeshConfig) -> MeshConfig:
        """What a config asks of its mesh, on this one, which is one slice."""
        return dataclasses.replace(asked, **self.sizes, **DATA_ALONE, context_method=self.context_method)  # type: ignore[arg-type]


def name_of(sizes: Mapping[str, int]) -> str:
    """ "data 2 x fsdp 4"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def parse(text: str) -> list[Sizes]:
    """Meshes from "data=2,fsdp=4;tensor=2". Raises UserError with what is wrong."""
    found = []
    for mesh in filter(None, (part.strip() for part in text.split(";"))):
        sizes = dict.fromkeys(AXES, 1)
        for pair in mesh.split(","):
            axis, _, size = (word.strip() for word in pair.partition("="))
            if axis not in AXES:
                raise UserError(f"--meshes: no mesh axis {axis!r}{did_you_mean(axis, AXES) or ', of ' + str(AXES)}")
            if not size.isdecimal() or int(size) < 1:
                raise UserError(f"--meshes: {pair.strip()!r}; write data=2,fsdp=4;tensor=2 with sizes of at least 1")
            sizes[axis] = int(size)
        found.append(sizes)
    if not found:
        raise UserError("--meshes names no mesh; write data=2,fsdp=4;tensor=2")
    return found


def usual(config: Config, num_devices: int) -> list[Sizes]:
    """The config's own mesh, then every pair and triple of axes, two devices along each, where they are enough."""
    own = own_mesh(config, num_devices)
    found = [own] if 1 < math.prod(own.values()) <= num_devices else []
    axes = [axis for axis in AXES if axis != "expert" or config.model.num_experts]
    for count in (2, 3):
        if 2**count <= num_devices:
            found += [dict.fromkeys(AXES, 1) | dict.fromkeys(some, 2) for some in itertools.combinations(axes, count)]
    return [sizes for i, sizes in enumerate(found) if sizes not in found[:i]]


def own_mesh(config: Config, num_devices: int) -> Sizes:
    """The config's mesh, with a -1 as large as can be on so many devices, but 1 at least.

    Raises UserError where the config fits no such mesh.
    """
    fixed = math.prod(getattr(config.mesh, axis) for axis in AXES if getattr(config.mesh, axis) != -1)
    elastic = any(getattr(config.mesh, axis) == -1 for axis in AXES)
    counts = [fixed * left for left in range(max(1, num_devices // max(fixed, 1)), 0, -1)] if elastic else [fixed]
    for count in counts:
        sizes = dict(zip(AXES, mesh_shape(config.mesh, count), strict=True))
        try:
            check_fits(config, sizes)
        except UserError:
            if count == counts[-1]:
                raise
        else:
            break
    return sizes


def cases(config: Config, sizes: Sizes) -> list[Case]:
    """The mesh with each method that the config takes there: auto chooses by sizes, which the small copy has not.

    Raises UserError where the config does not fit the mesh.
    """
    check_fits(config, sizes)
    C, model, asked = sizes["context"], config.model, config.mesh.context_method
    if C == 1:
        return [Case(sizes, asked)]
    rows = config.data.batch_size // config.optim.accumulation_steps
    rows //= sizes["data"] * sizes["expert"] * sizes["fsdp"]
    if sizes["stage"] > 1:
        rows //= stages.schedule(config, sizes).microbatches
    heads = model.num_heads // sizes["tensor"], model.kv_heads // sizes["tensor"]
    width = 4 if config.run.precision == "float32" else 2
    layers = [
        context.Layer(C, rows, config.data.seq_len, *heads, model.head_size, width, window)
        for window in model.window_pattern
    ]
    has_ring = config.run.implementation != "reference"
    methods = dict.fromkeys(context.choose(asked, layer, has_ring=has_ring) for layer in layers)
    return [Case(sizes, method) for method in methods]
