"""Every array of the train state beside the table of sharding.py, at the config's full size; nothing is allocated."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from tpu_train import train_step
from tpu_train.checking.meshes import Sizes, name_of
from tpu_train.checking.results import Check, Measure
from tpu_train.config import Config
from tpu_train.layout import AXES
from tpu_train.precision import Compute
from tpu_train.sharding import SPECS, dims_of_path, outside

Spec = tuple[tuple[str, ...], ...]  # the axes of each dim


@dataclasses.dataclass(frozen=True)
class Row:
    """An array of the state."""

    path: str
    shape: tuple[int, ...]
    itemsize: int
    spec: Spec
    said: Spec | None  # by the table; None: it knows no such array

    def parts(self, sizes: Mapping[str, int]) -> int:
        """How many different parts the devices of a mesh hold."""
        return math.prod(sizes[axis] for axes in self.spec for axis in axes)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


def rows(state: Any) -> list[Row]:
    """Of a state's arrays, or of what stands for them."""
    found = []
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        spec = () if x.sharding is None else x.sharding.spec
        known = any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)
        dims = dims_of_path(path)[0] if known else ""
        stacked = x.ndim - len(dims)
        said = None
        if dims in SPECS and stacked in (0, 1):
            said = _of_each_dim((*(None,) * stacked, *outside(dims)), x.ndim)
        found.append(Row(jax.tree_util.keystr(path), x.shape, x.dtype.itemsize, _of_each_dim(spec, x.ndim), said))
    return found


def _of_each_dim(spec: Iterable[Any], ndim: int) -> Spec:
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return tuple(entries + [()] * (ndim - len(entries)))


def wrong(found: list[Row], sizes: Mapping[str, int], limit: int = 0) -> list[str]:
    """A line for each array that is not sharded as the table says.

    An array that the table does not know may be whole on every device up to `limit` bytes, and is checked if that is
    above 0.
    """

    def at_work(spec: Spec) -> Spec:
        return tuple(tuple(axis for axis in axes if sizes[axis] > 1) for axes in spec)

    lines = []
    for row in found:
        if row.said is not None and at_work(row.spec) != at_work(row.said):
            lines.append(f"{short(row.path)} is sharded {in_words(row.spec)}, not {in_words(row.said)}")
        elif row.said is None and limit and row.bytes > limit and row.parts(sizes) == 1:
            lines.append(f"{short(row.path)}, {row.bytes:,} bytes, is whole on every device and not in the table")
    return lines


def in_words(spec: Spec) -> str:
    """ "-, expert+fsdp+context, tensor": the axes of each dim."""
    return "(" + ", ".join("+".join(axes) or "-" for axes in spec) + ")"


def short(path: str) -> str:
    """ "model.blocks.0.mlp.up_DF" of JAX's ".model.blocks[0].mlp.up_DF.value"."""
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).removesuffix(".value").strip(".")


def full_rows(config: Config, sizes: Sizes) -> list[Row]:
    """The state of the config as it is, on a mesh of devices that need not exist."""
    mesh = AbstractMesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    compute = Compute(jnp.dtype(jnp.float32), "xla", "cpu")
    key = jax.eval_shape(lambda: jax.random.key(0))
    # A mesh may not take the place of one of another size; no mesh may take that of any.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())), jax.sharding.use_abstract_mesh(mesh):
        return rows(jax.eval_shape(functools.partial(train_step.make_state, config, compute), key))


def check(config: Config, sizes: Sizes, limit: int) -> tuple[Check, list[str]]:
    """The check of the full config's state, and the table to print."""
    found = full_rows(config, sizes)
    lines = wrong(found, sizes, limit)
    note = "; ".join(lines[:3]) + (f" and {len(lines) - 3} more" if len(lines) > 3 else "")
    unknown = [row for row in found if row.said is None]
    note = note or f"{len(found)} arrays; not in the table are {len(unknown)}, {sum(r.bytes for r in unknown):,} bytes"
    name = f"sharding at full size on {name_of(sizes)}"
    return Check(name, (Measure("arrays sharded otherwise", len(lines), 0),), note), printed(found, sizes)


def printed(found: list[Row], sizes: Sizes) -> list[str]:
    """One line an array, and their sums."""
    cells = [("array", "shape", "sharded", "bytes a device", "bytes whole")]
    for row in found:
        shape = " x ".join(map(str, row.shape)) or "scalar"
        cells.append(
            (short(row.path), shape, in_words(row.spec), f"{row.bytes // row.parts(sizes):,}", f"{row.bytes:,}")
        )
    each = sum(row.bytes // row.parts(sizes) for row in found)
    cells.append(("all", "", "", f"{each:,}", f"{sum(row.bytes for row in found):,}"))
    widths = [max(len(line[i]) for line in cells) for i in range(5)]
    left = lambda line: [text.ljust(width) for text, width in zip(line[:3], widths[:3], strict=True)]  # noqa: E731
    right = lambda line: [text.rjust(width) for text, width in zip(line[3:], widths[3:], strict=True)]  # noqa: E731
    return ["  ".join([*left(line), *right(line)]) for line in cells]
