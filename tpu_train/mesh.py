"""Makes the device mesh; nothing else does.

Axes: `data` splits the batch and replicates the weights; `fsdp` splits the batch and the weights (ZeRO-3); `tensor`
splits heads, feed-forward and vocabulary. All are Explicit: an array's type says how it is sharded.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from tpu_train.config import Config, MeshConfig, UserError

AXES = ("data", "fsdp", "tensor")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices` (default: all) and sets it for the process. Raises UserError on sizes that do not fit."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        mesh = Mesh(_across_slices(shape, slices, devices), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    else:
        mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices)
    jax.set_mesh(mesh)
    return mesh


def _across_slices(shape: tuple[int, ...], slices: int, devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices of a mesh whose `data` axis alone goes from slice to slice, over the slower network."""
    data, fsdp, tensor = shape
    if data % slices:
        raise UserError(f"mesh.data={data} is not a multiple of the {slices} slices; only `data` goes across slices")
    return mesh_utils.create_hybrid_device_mesh((data // slices, fsdp, tensor), (slices, 1, 1), devices=devices)


def mesh_shape(config: MeshConfig, num_devices: int) -> tuple[int, ...]:
    """Sizes of `AXES`, with a -1 replaced by what is left of `num_devices`."""
    sizes = [getattr(config, axis) for axis in AXES]
    said = ", ".join(f"mesh.{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise UserError(f"{said}: sizes are at least 1, and at most one is -1 (the devices left over)")
    fixed = math.prod(size for size in sizes if size != -1)
    if num_devices % fixed or (-1 not in sizes and fixed != num_devices):
        raise UserError(f"{said} makes {fixed} devices; there are {num_devices}: the product must match")
    return tuple(num_devices // fixed if size == -1 else size for size in sizes)


def platform(mesh: Mesh) -> str:
    """ "cpu", "gpu" or "tpu": of the mesh's devices, which need not be the default backend's."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def check_fits(config: Config, mesh: Mesh) -> None:
    """Raises UserError where an array dim does not divide over the mesh axes that split it."""
    size = dict(mesh.shape)
    batch_shards = size["data"] * size["fsdp"]
    model = config.model
    micro_batch = config.data.batch_size // config.optim.accumulation_steps
    for name, dim, axes, shards in (
        ("data.batch_size / optim.accumulation_steps", micro_batch, "data x fsdp", batch_shards),
        ("model.model_dim", model.model_dim, "fsdp", size["fsdp"]),
        ("model.num_heads", model.num_heads, "tensor", size["tensor"]),
        ("model.num_kv_heads", model.kv_heads, "tensor", size["tensor"]),
        ("model.mlp_dim", model.mlp_dim, "tensor", size["tensor"]),
        ("model.vocab_size", model.vocab_size, "tensor", size["tensor"]),
    ):
        if dim % shards:
            raise UserError(f"{name}={dim} does not divide over the {shards} devices of mesh axis {axes}")
