"""Makes the device mesh; nothing else does.

Axes: `data` splits the batch and replicates the weights; `fsdp` splits the batch and the weights (ZeRO-3); `tensor`
splits heads, feed-forward and vocabulary. All are Explicit: an array's type says how it is sharded.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from tpu_train import layout
from tpu_train.config import Config, MeshConfig, UserError
from tpu_train.layout import AXES, mesh_shape


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


def platform(mesh: Mesh) -> str:
    """ "cpu", "gpu" or "tpu": of the mesh's devices, which need not be the default backend's."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def check_fits(config: Config, mesh: Mesh) -> None:
    """Raises UserError where an array dim does not divide over the mesh axes that split it."""
    layout.check_fits(config, dict(mesh.shape))
