"""Makes the device mesh; nothing else does.

Axes: `data` splits the batch and replicates the weights; `fsdp` splits the batch and the weights (ZeRO-3); `tensor`
splits heads, feed-forward and vocabulary. All are Explicit: an array's type says how it is sharded.
"""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from tpu_train import layout
from tpu_train.config import Config, MeshConfig
from tpu_train.layout import AXES, mesh_shape


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices` (default: all) and sets it for the process. Raises UserError on sizes that do not fit."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices)
    jax.set_mesh(mesh)
    return mesh


def platform(mesh: Mesh) -> str:
    """ "cpu", "gpu" or "tpu": of the mesh's devices, which need not be the default backend's."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def check_fits(config: Config, mesh: Mesh) -> None:
    """Raises UserError where an array dim does not divide over the mesh axes that split it."""
    layout.check_fits(config, dict(mesh.shape))
