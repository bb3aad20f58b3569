"""Makes the device mesh; nothing else does.

Axes: `data` splits the batch and replicates the weights; `fsdp` splits the batch and the weights (ZeRO-3); `expert`
splits the batch and the experts, and other weights as `fsdp` does; `context` splits each row's tokens, and the weights
as `fsdp` does; `tensor` splits heads, feed-forward and vocabulary; `stage` splits the layers while they compute, and
before and after the batch and the weights as `fsdp` does. All are Explicit: an array's type says how it is sharded.
`mesh.data_slices` and its like say which axes go from slice to slice, over the slower network.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from tpu_train import layout, offload
from tpu_train.config import Config, MeshConfig
from tpu_train.layout import AXES, across_slices, mesh_shape
from tpu_train.sharding import without_stage


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over `devices` (default: all) and sets it for the process. Raises UserError on sizes that do not fit."""
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    across = across_slices(config, dict(zip(AXES, shape, strict=True)), slices)
    if slices > 1:
        mesh = Mesh(over_slices(shape, across, devices), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    else:
        mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices)
    jax.set_mesh(mesh)
    return mesh


def over_slices(shape: Sequence[int], across: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices in a mesh's shape; an axis goes through a slice before it goes on to the next one."""
    within = [size // across[axis] for axis, size in zip(AXES, shape, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(within, [across[axis] for axis in AXES], devices=devices)


def for_decoding(mesh: Mesh) -> Mesh:
    """The same devices with `context` and `stage` folded into `fsdp`, since one token can't be split.

    Weights are split over the three axes, in this order after `fsdp`, so every device keeps the part that it has.
    """
    return _folded(mesh, ("context", "stage"))


def without_stages(mesh: Mesh) -> Mesh:
    """The same devices with `stage` folded into `fsdp`; with a `context` as well weights lie elsewhere there."""
    return _folded(mesh, ("stage",))


def _folded(mesh: Mesh, axes: tuple[str, ...]) -> Mesh:
    order = [axis for axis in AXES if axis not in axes]
    place = order.index("fsdp") + 1
    order[place:place] = axes
    sizes = dict(mesh.shape)
    for axis in axes:
        sizes["fsdp"], sizes[axis] = sizes["fsdp"] * sizes[axis], 1
    devices = mesh.devices.transpose([AXES.index(axis) for axis in order])
    return Mesh(devices.reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def moved(tree: Any, mesh: Mesh) -> Any:
    """The arrays with `mesh` in place of one whose axes split them into the same parts, in place; nothing is sent."""

    def move(x):
        sharding = jax.NamedSharding(mesh, without_stage(x.sharding.spec))
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [s.data for s in x.addressable_shards])

    return jax.tree.map(move, tree)


def platform(mesh: Mesh) -> str:
    """ "cpu", "gpu" or "tpu": of the mesh's devices, which need not be the default backend's."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def check_fits(config: Config, mesh: Mesh) -> None:
    """Raises UserError where an array dim does not divide over the mesh axes that split it, or rings can't be."""
    layout.check_fits(config, dict(mesh.shape))
    for what, asked in (
        ("optim.offload", config.optim.offload),
        ("model.remat=offload_dots", config.model.remat == "offload_dots"),
    ):
        if asked:
            offload.check(mesh, what)
    if platform(mesh) == "tpu" and config.run.implementation in ("auto", "pallas"):
        layout.check_ring_kernels(config, dict(mesh.shape))
