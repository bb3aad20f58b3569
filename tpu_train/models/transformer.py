"""The decoder-only transformer and how its weights are made on a mesh.

Features: pre-norm RMSNorm, rotary positions, grouped-query attention, optional q/k norm, soft caps, sliding windows
in a pattern over layers, gated or plain MLP or a mixture of experts, tied or separate head, stacked and scanned blocks
with a remat policy, residual dropout.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from tpu_train import ops
from tpu_train.config import ModelConfig, UserError
from tpu_train.models import pipeline
from tpu_train.models.dropout import Dropout
from tpu_train.models.init import Init
from tpu_train.models.layers import MLP, Attention, Context, RMSNorm, rotary_angles
from tpu_train.models.moe import MoE
from tpu_train.precision import KEPT_FLOAT32, Compute
from tpu_train.sharding import SPECS, dims_of_path

REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims,
    "offload_dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), the MLP or a mixture of experts."""

    def __init__(self, config: ModelConfig, window: int, init: Init):
        self.attention_norm = RMSNorm(config.model_dim, config.norm_eps, init)
        self.attention = Attention(config, window, init.of("attention"))
        self.mlp_norm = RMSNorm(config.model_dim, config.norm_eps, init)
        self.mlp = MoE(config, init.of("mlp")) if config.num_experts else MLP(config, init.of("mlp"))

    def __call__(self, x_BTD, context, cache=None):
        """(output_BTD, cache, the experts' load or None)."""
        o_BTD, cache = self.attention(self.attention_norm(x_BTD), context, cache)
        if context.dropout is not None:
            o_BTD = context.dropout.of_part(o_BTD, 0)
        x_BTD = x_BTD + o_BTD
        load = None
        if isinstance(self.mlp, MLP):
            y_BTD = self.mlp(self.mlp_norm(x_BTD), context.compute)
        else:
            y_BTD, load = self.mlp(self.mlp_norm(x_BTD), context.real_BT, context.compute)
        if context.dropout is not None:
            y_BTD = context.dropout.of_part(y_BTD, 1)
        return x_BTD + y_BTD, cache, load


class Transformer(nnx.Module):
    """Tokens to hidden states. `blocks[i]` holds every layer of pattern entry i, stacked along a leading L."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        V, D = config.vocab_size, config.model_dim
        init = Init(key)
        self.embed_VD = init.weight("embed_VD", (V, D), 0.02)
        self.head_VD = None if config.tie_embeddings else init.weight("head_VD", (V, D), 0.02)
        groups = config.num_layers // len(config.window_pattern)
        self.blocks = nnx.List(
            [Block(config, window, init.of(f"blocks.{i}", groups)) for i, window in enumerate(config.window_pattern)]
        )
        self.final_norm = RMSNorm(D, config.norm_eps, init)
        self.config = config

    @property
    def output_VD(self) -> jax.Array:
        """The head's weight as stored: the embedding where they are tied."""
        return (self.embed_VD if self.head_VD is None else self.head_VD)[...]

    def __call__(self, *arguments, **options):
        """Hidden states x_BTD after the final norm, and the cache: what `with_loads` gives, without the loads."""
        return self.with_loads(*arguments, **options)[:2]

    def with_loads(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segment_ids_BT: jax.Array | None,
        compute: Compute,
        cache=None,
        cache_position: jax.Array | None = None,
        masters=None,
        real_BT: jax.Array | None = None,
        dropout: Dropout | None = None,
    ):
        """(x_BTD after the final norm, the cache, the experts' loads: a list over the pattern, stacked over groups).

        `cache` (see `empty_cache`) holds the keys and values of positions before `cache_position`. With `masters`, the
        float32 blocks, those of `self` only stand in for them: see `stand_in`. `real_BT` is false at padding, which
        goes to no expert. With `dropout` the pass is one of training.
        """
        x_BTD = ops.embed(self.embed_VD[...], tokens_BT, compute.dtype)
        if dropout is not None:
            x_BTD = dropout.of_embedding(x_BTD)
        policy = REMAT_POLICIES[self.config.remat]
        if pipeline.num_stages() > 1:
            if cache is not None:
                raise UserError("mesh.stage splits training alone; decode on a mesh with mesh.stage=1")
            blocks = self.blocks if masters is None else jax.tree.map(master_value, self.blocks, masters)
            of_tokens = positions_BT, segment_ids_BT, real_BT, None if dropout is None else dropout.places_BT
            key = None if dropout is None else dropout.key
            x_BTD, loads = pipeline.through_stages(
                *(one_group, x_BTD, of_tokens, blocks, self.config, compute, key),
                remat=(lambda f: f) if policy is None else functools.partial(jax.checkpoint, policy=policy),
            )
            return self.final_norm(x_BTD), None, loads
        angles = rotary_angles(positions_BT, self.config.head_size, self.config.rope_theta, compute)
        context = Context(*angles, segment_ids_BT, compute, cache_position, real_BT, dropout)

        def group(x_BTD, layers):
            blocks, masters, caches, first = layers
            if masters is not None:
                blocks = jax.tree.map(master_value, blocks, masters)
            x_BTD, new, loads = one_group(x_BTD, blocks, context.layers_on(first), caches)
            return x_BTD, (new, loads)

        body = group if policy is None or cache is not None else jax.checkpoint(group, policy=policy)
        firsts = None if dropout is None else jnp.arange(0, self.config.num_layers, len(self.blocks))
        layers = (self.blocks, masters, cache, firsts)
        x_BTD, (cache, loads) = jax.lax.scan(body, x_BTD, layers, unroll=self.config.scan_unroll)
        return self.final_norm(x_BTD), cache, loads


def one_group(x_BTD: jax.Array, blocks, context: Context, caches=None):
    """(x_BTD, caches, loads) after one group of layers, an entry for each of the pattern's."""
    new, loads = [], []
    for i, block in enumerate(blocks):
        with jax.named_scope(f"block{i}"):
            x_BTD, layer_cache, load = block(x_BTD, context.layers_on(i), None if caches is None else caches[i])
        new.append(layer_cache)
        loads.append(load)
    return x_BTD, None if caches is None else new, loads


def stand_in(model: Transformer, dtype: jnp.dtype) -> Transformer:
    """`model` with zeros of `dtype` for the matrices of its blocks: what to differentiate with respect to.

    A matrix's gradient has `dtype` where it leaves its product. With respect to the float32 matrix it would be kept in
    float32, all layers of it, until the update: twice the memory for the same values.
    """

    def leaf(path, x):
        dims, in_block = dims_of_path(path)
        return jnp.zeros_like(x, dtype=dtype) if in_block and len(dims) > 1 and dims not in KEPT_FLOAT32 else x

    return jax.tree_util.tree_map_with_path(leaf, model)


@jax.custom_vjp
def master_value(stand_in: jax.Array, master: jax.Array) -> jax.Array:
    """`master` in the stand-in's dtype; the gradient goes to the stand-in alone."""
    # The cast alone, XLA would move ahead of the loop over layers (past an optimization barrier too) and so keep a
    # second copy of all of them. Rounding first, which changes no value, keeps it in the loop.
    info = jnp.finfo(stand_in.dtype)
    return jax.lax.reduce_precision(master, info.nexp, info.nmant).astype(stand_in.dtype)


master_value.defvjp(lambda stand_in, master: (master_value(stand_in, master), None), lambda _, g: (g, None))


def empty_cache(config: ModelConfig, batch: int, length: int, dtype: jnp.dtype):
    """Keys and values for `length` positions of every layer: a list over the pattern of (k_LBSKH, v_LBSKH)."""
    groups = config.num_layers // len(config.window_pattern)
    shape = (groups, batch, length, config.kv_heads, config.head_size)
    spec = jax.sharding.PartitionSpec(None, *SPECS["BSKH"])
    return [tuple(jnp.zeros(shape, dtype, out_sharding=spec) for _ in ("k", "v")) for _ in config.window_pattern]


def num_params(model: Transformer) -> int:
    """Scalars in the model; a tied embedding counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(model))
