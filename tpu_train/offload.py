"""The optimizer's moments in the host's memory, with optim.offload. (model.remat=offload_dots is a policy of JAX's.)

Between updates they are pinned host memory, from which a TPU or a GPU copies by itself. An update takes the layers one
after the other: a layer's moments come to the device, change there and go back. The loop's order holds the copies
back; a barrier between weights would not, since XLA takes barriers out before it schedules.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_train.config import UserError

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
KIND = "pinned_host"  # what a sharding calls the host's

Tree = Any


def update(
    optimizer: optax.GradientTransformation, grads: Tree, state: Tree, params: Tree, stacked: Tree, updating: jax.Array
) -> tuple[Tree, Tree]:
    """The new weights and state, the old ones where `updating` is false.

    `optimizer` must treat each element by itself, as AdamW does. `stacked` is true at the weights of the blocks, whose
    first dim is the layer.
    """
    structure: Any = jax.tree.structure(params)
    weights, gradients = jax.tree.leaves(params), jax.tree.leaves(grads)
    layers = [i for i, is_stacked in enumerate(jax.tree.leaves(stacked)) if is_stacked]
    others = [i for i in range(len(weights)) if i not in layers]
    moments = [jax.tree.leaves(part) for part in _parts(state, structure)]

    def step(which: Sequence[int], weights, gradients, moments):
        """(weights, moments, state) of some weights, or of a layer of each."""
        some = functools.partial(_some, structure, which)
        on_device = jax.tree.map(lambda x: jax.device_put(x, DEVICE), moments)
        before = _with_parts(state, structure, [some(part) for part in on_device])
        changes, after = optimizer.update(some(gradients), before, some(weights))
        moved = optax.apply_updates(some(weights), changes)
        new = (moved, after), (some(weights), before)
        moved, after = jax.tree.map(lambda new, old: jnp.where(updating, new, old), *new)
        parts = [jax.tree.leaves(part) for part in _parts(after, jax.tree.structure(moved))]
        return jax.tree.leaves(moved), jax.tree.map(lambda x: jax.device_put(x, HOST), parts), after

    def layer(i, carry):
        own = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
        mine = jax.tree.map(own, (carry[0], [gradients[k] for k in layers], carry[1]))
        return jax.tree.map(
            lambda whole, new: jax.lax.dynamic_update_index_in_dim(whole, new, i, 0), carry, step(layers, *mine)[:2]
        )

    pick = lambda which: ([weights[i] for i in which], [[part[i] for i in which] for part in moments])  # noqa: E731
    groups = weights[layers[0]].shape[0]
    of_layers = jax.lax.fori_loop(0, groups, layer, pick(layers))
    of_others = step(others, pick(others)[0], [gradients[i] for i in others], pick(others)[1])
    for which, (new_weights, new_moments) in ((layers, of_layers), (others, of_others[:2])):
        for at, i in enumerate(which):
            weights[i] = new_weights[at]
            for part, new in zip(moments, new_moments, strict=True):
                part[i] = new[at]
    rest = jax.tree.structure(_some(structure, others, of_others[0]))
    state = _with_parts(of_others[2], rest, [structure.unflatten(part) for part in moments])
    return structure.unflatten(weights), state


def check(mesh: jax.sharding.Mesh, what: str) -> None:
    """Raises UserError where this process's devices have no such memory; what only a compiler knows is not asked."""
    if mesh.devices.flat[0].device_kind == "TPU v4":  # libtpu 0.0.52: "Strided host DMA (non iova) is not supported"
        raise UserError(f"{what} needs copies from the host that a TPU v4 has not")
    here = jax.local_devices()
    for device in (device for device in mesh.devices.flat if device in here):
        if KIND not in {memory.kind for memory in device.addressable_memories()}:
            raise UserError(f"{what} needs pinned host memory, which JAX has none of for {device.device_kind}")


def to_host(state: Tree, params: Tree) -> Tree:
    """A fresh state with its moments where they wait; call it inside jit."""
    structure = jax.tree.structure(params)
    moved = [jax.tree.map(lambda x: jax.device_put(x, HOST), part) for part in _parts(state, structure)]
    return _with_parts(state, structure, moved)


def waiting(state: Tree) -> Tree:
    """The jax.ShapeDtypeStructs of `state`, its moments said to be where `to_host` puts them."""

    def place(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(KIND)) if x.ndim else x

    return jax.tree.map(place, state)


def waits(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether it is in the host's memory."""
    return x.sharding is not None and x.sharding.memory_kind == KIND


def fetched(x: jax.Array) -> jax.Array:
    """The array in the device's memory."""
    return jax.device_put(x, x.sharding.with_memory_kind("device")) if waits(x) else x


def _some(structure: Any, which: Sequence[int], leaves: Sequence[Any]) -> Tree:
    """A tree of the weights' names with these leaves at the places `which`, and None elsewhere."""
    whole = [None] * structure.num_leaves
    for i, leaf in zip(which, leaves, strict=True):
        whole[i] = leaf
    return structure.unflatten(whole)


def _parts(tree: Tree, structure: Any) -> list[Tree]:
    """The subtrees that are as the weights are: the moments."""
    alike = lambda x: jax.tree.structure(x) == structure  # noqa: E731
    return [x for x in jax.tree.leaves(tree, is_leaf=alike) if alike(x)]


def _with_parts(tree: Tree, structure: Any, parts: list[Tree]) -> Tree:
    """`tree` with `parts`, in order, in place of those subtrees."""
    alike, left = lambda x: jax.tree.structure(x) == structure, iter(parts)
    return jax.tree.map(lambda x: next(left) if alike(x) else x, tree, is_leaf=alike)
