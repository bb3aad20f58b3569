"""How a config lies on a mesh: the axes' sizes, and whether every array dim divides over the axes that split it.

Without jax, so that it can be asked before there are devices.
"""

import math
from collections.abc import Mapping

from tpu_train import context
from tpu_train.config import Config, MeshConfig, UserError

AXES = ("data", "fsdp", "context", "tensor")


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, ...]:
    """Sizes of `AXES`, with a -1 replaced by what is left of `num_devices`."""
    sizes = [getattr(config, axis) for axis in AXES]
    said = ", ".join(f"mesh.{axis}={n}" for axis, n in zip(AXES, sizes, strict=True) if axis != "context" or n != 1)
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"{said}: sizes are at least 1, and at most one is -1 (the devices left over)")
    fixed = math.prod(size for size in sizes if size != -1)
    if num_devices % fixed or (-1 not in sizes and fixed != num_devices):
        raise UserError(f"{said} makes {fixed} devices; there are {num_devices}: the product must match")
    return tuple(num_devices // fixed if size == -1 else size for size in sizes)


def check_fits(config: Config, size: Mapping[str, int]) -> None:
    """Raises UserError where an array dim does not divide over the axes, of the given sizes, that split it."""
    batch_shards, weight_shards = size["data"] * size["fsdp"], size["fsdp"] * size["context"]
    model = config.model
    micro_batch = config.data.batch_size // config.optim.accumulation_steps
    for name, dim, axes, shards in (
        ("data.batch_size / optim.accumulation_steps", micro_batch, "data x fsdp", batch_shards),
        ("model.model_dim", model.model_dim, "fsdp" if size["context"] == 1 else "fsdp x context", weight_shards),
        ("model.num_heads", model.num_heads, "tensor", size["tensor"]),
        ("model.num_kv_heads", model.kv_heads, "tensor", size["tensor"]),
        ("model.mlp_dim", model.mlp_dim, "tensor", size["tensor"]),
        ("model.vocab_size", model.vocab_size, "tensor", size["tensor"]),
    ):
        if dim % shards:
            raise UserError(f"{name}={dim} does not divide over the {shards} devices of mesh axis {axes}")
    context.check(config, size)
