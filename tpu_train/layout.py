"""How a config lies on a mesh: the axes' sizes, and whether every array dim divides over the axes that split it.

Without jax, so that it can be asked before there are devices.
"""

import math
from collections.abc import Mapping

from tpu_train import context, stages
from tpu_train.config import Config, MeshConfig, UserError

AXES = ("data", "stage", "expert", "fsdp", "context", "tensor")
DATA_ALONE = {f"{axis}_slices": -1 if axis == "data" else 1 for axis in AXES}  # over slices: the default
USUAL = ("data", "fsdp", "tensor")  # the others are named where they are more than 1


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, ...]:
    """Sizes of `AXES`, with a -1 replaced by what is left of `num_devices`."""
    sizes = [getattr(config, axis) for axis in AXES]
    said = ", ".join(f"mesh.{axis}={n}" for axis, n in zip(AXES, sizes, strict=True) if axis in USUAL or n != 1)
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"{said}: sizes are at least 1, and at most one is -1 (the devices left over)")
    fixed = math.prod(size for size in sizes if size != -1)
    if num_devices % fixed or (-1 not in sizes and fixed != num_devices):
        raise UserError(f"{said} makes {fixed} devices; there are {num_devices}: the product must match")
    return tuple(num_devices // fixed if size == -1 else size for size in sizes)


def across_slices(config: MeshConfig, size: Mapping[str, int], slices: int) -> dict[str, int]:
    """How many slices each of `AXES` is spread over, a -1 replaced by what is left of `slices`.

    `size`: devices along each axis. Raises UserError where the slices can't be dealt out so.
    """
    asked = {axis: getattr(config, f"{axis}_slices") for axis in AXES}
    said = ", ".join(f"mesh.{axis}_slices={n}" for axis, n in asked.items() if n not in (1, -1))
    if list(asked.values()).count(-1) > 1 or any(n < 1 and n != -1 for n in asked.values()):
        every = ", ".join(f"mesh.{axis}_slices={n}" for axis, n in asked.items() if n != 1)
        raise UserError(f"{every}: slices are at least 1, and at most one is -1 (the slices left over)")
    fixed = math.prod(n for n in asked.values() if n != -1)
    if slices % fixed or (-1 not in asked.values() and fixed != slices):
        there = "the devices are one slice" if slices == 1 else f"there are {slices} slices"
        raise UserError(f"{said or 'mesh.data_slices=1'} makes {fixed} slices, and {there}: the product must match")
    found = {axis: slices // fixed if n == -1 else n for axis, n in asked.items()}
    for axis, n in found.items():
        if size[axis] % n:
            spread = f"the {n} slices that it is spread over; set mesh.{axis} to one, or spread another axis, as in "
            other = "fsdp" if axis == "data" else "data"
            raise UserError(f"mesh.{axis}={size[axis]} is not a multiple of {spread}mesh.{other}_slices={n}")
    if config.gradient_scatter == "ring" and found["fsdp"] > 1:
        raise UserError(
            f"mesh.gradient_scatter=ring sends within a slice, and mesh.fsdp is spread over {found['fsdp']}; set it to "
            "xla, or mesh.fsdp_slices=1"
        )
    return found


def check_fits(config: Config, size: Mapping[str, int]) -> None:
    """Raises UserError where an array dim does not divide over the axes, of the given sizes, that split it."""
    model = config.model
    batch_axes, weight_axes = ("data", "expert", "fsdp"), ("expert", "fsdp", "context", "stage")
    micro_batch = config.data.batch_size // config.optim.accumulation_steps
    mlps = {"model.mlp_dim": model.mlp_dim}
    if model.num_experts:
        mlps = {"model.num_experts": model.num_experts, "model.expert_dim": model.expert_size}
    elif size["expert"] > 1:
        raise UserError(f"mesh.expert={size['expert']} splits experts, and model.num_experts is 0; set mesh.fsdp")
    for name, dim, axes in (
        ("data.batch_size / optim.accumulation_steps", micro_batch, batch_axes),
        ("model.model_dim", model.model_dim, weight_axes),
        ("model.num_heads", model.num_heads, ("tensor",)),
        ("model.num_kv_heads", model.kv_heads, ("tensor",)),
        *((name, dim, ("expert" if name == "model.num_experts" else "tensor",)) for name, dim in mlps.items()),
        ("model.vocab_size", model.vocab_size, ("tensor",)),
    ):
        shards = math.prod(size[axis] for axis in axes)
        if dim % shards:
            split = " x ".join(axis for axis in axes if size[axis] > 1 or axis in USUAL)
            raise UserError(f"{name}={dim} does not divide over the {shards} devices of mesh axis {split}")
    context.check(config, size)
    stages.check(config, size)
    for axis in ("tensor", "context", "expert", "stage"):
        if config.mesh.gradient_scatter != "xla" and size[axis] > 1:
            raise UserError(
                f"mesh.gradient_scatter={config.mesh.gradient_scatter} is for a mesh of data and fsdp alone, and "
                f"mesh.{axis}={size[axis]}; set it to xla"
            )


def check_ring_kernels(config: Config, size: Mapping[str, int]) -> None:
    """Raises UserError where the kernels of mesh.gradient_scatter=ring can't take the arrays that a device has."""
    n, model = size["fsdp"], config.model
    if config.mesh.gradient_scatter == "xla" or n == 1:
        return
    rows = config.data.batch_size // config.optim.accumulation_steps // (size["data"] * n)
    for name, length in (
        (f"model.model_dim={model.model_dim} over mesh.fsdp={n}", model.model_dim // n),
        (f"a device's {rows} rows of data.seq_len={config.data.seq_len}", rows * config.data.seq_len),
        ("model.num_heads x head_dim", model.num_heads * model.head_size),
        ("model.num_kv_heads x head_dim", model.kv_heads * model.head_size),
        (f"model.mlp_dim={model.mlp_dim}", model.mlp_dim),
    ):
        if length % 128:
            raise UserError(
                f"{name} makes {length}, and mesh.gradient_scatter=ring wants a multiple of 128 on a TPU; set it to xla"
            )
