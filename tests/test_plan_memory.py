"""The plan's memory against the trainer itself: what JAX keeps for the backward pass, optimizer state, the cache."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.cross_entropy import blocks
from pallas_kernels.cross_entropy import xla as cross_entropy
from pallas_kernels.runtime import CHIPS
from tpu_train.config import Config, DataConfig, ModelConfig, OptimConfig
from tpu_train.flops import layer_params
from tpu_train.loss import weighted_loss
from tpu_train.models import moe
from tpu_train.models.transformer import Transformer, empty_cache
from tpu_train.optim import make_optimizer
from tpu_train.planning import experts, memory
from tpu_train.planning.split import Split
from tpu_train.precision import Compute
from tpu_train.sharding import P, outside
from tpu_train.train_step import abstract_state

ON_TPU = Compute(jnp.dtype("bfloat16"), "pallas", "tpu")
# Rows of 128 are the shortest that the attention kernel takes; 5 layers or groups, since no other dim is 5.
SHAPES = {
    "gated, grouped": ModelConfig(64, 5, 32, 4, 2, 8, 48),
    "plain, q/k norm": ModelConfig(64, 5, 32, 4, 4, 8, 48, gated_mlp=False, qk_norm=True, activation="gelu"),
    "two layers a group": ModelConfig(64, 10, 32, 4, 2, 16, 48, window_pattern=(64, 0)),
}
ROWS, LENGTH = 2, 128


def abstract_model(model):
    """The model's shapes on the mesh in use."""
    mesh = jax.sharding.get_mesh()
    shapes = jax.eval_shape(functools.partial(Transformer, model), jax.eval_shape(lambda: jax.random.key(0)))

    def place(x):
        spec = P() if x.sharding is None else x.sharding.spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(place, shapes)


def kept_by_jax(model, length=LENGTH, compute=ON_TPU, rows=ROWS):
    """Bytes on a device of what the backward pass reads of the scanned layers, or ticks: arrays with a leading 5."""
    mesh = jax.sharding.get_mesh()
    sharding = jax.NamedSharding(mesh, outside("BT", mesh))
    ints = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)
    floats = jax.ShapeDtypeStruct((rows, length), jnp.float32, sharding=sharding)
    batch = dict.fromkeys(("tokens", "labels", "positions", "segment_ids"), ints) | {"weights": floats}

    def backward(model, batch):
        return jax.vjp(lambda model: weighted_loss(model, batch, 0.0, compute)[0], model)[1]

    kept = jax.tree.leaves(jax.eval_shape(backward, abstract_model(model), batch))
    kept = [x for x in kept if x.sharding is not None and x.ndim + jnp.issubdtype(x.dtype, jnp.floating) > 1]
    shapes = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in kept]
    return sum(math.prod(shape) * width for shape, width in shapes if shape[0] == 5)


@pytest.mark.parametrize("model", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_activations_are_what_jax_keeps(model, remat):
    model = dataclasses.replace(model, remat=remat)
    planned = model.num_layers * memory.kept_by_layer(model, Split(remat=remat), ROWS * LENGTH)
    if remat != "none":  # jax.checkpoint reads the weights again, as arguments
        planned += model.num_layers * 4 * sum(layer_params(model).values())
    assert kept_by_jax(model) == planned


@pytest.mark.parametrize(
    ("method", "remat"), [("ring", "none"), ("all_gather", "none"), ("all_to_all", "none"), ("all_gather", "dots")]
)
def test_activations_along_context_are_what_jax_keeps(mesh_of, method, remat):
    mesh_of(context=2)
    model, length = dataclasses.replace(SHAPES["gated, grouped"], remat=remat), 512  # chunks of 128
    split = Split(remat=remat, context=2, context_method=method)
    planned = model.num_layers * memory.kept_by_layer(model, split, ROWS * length // 2, length)
    if remat != "none":
        each = layer_params(model)
        planned += model.num_layers * 4 * (each["norms"] + (each["attention"] + each["mlp"]) / 2)
    assert kept_by_jax(model, length, dataclasses.replace(ON_TPU, context_method=method)) == planned


@pytest.mark.parametrize(("name", "remat"), [("two layers a group", "full"), ("gated, grouped", "dots")])
def test_activations_of_ticks_are_what_jax_keeps_and_no_weight_of_them(mesh_of, name, remat):
    """Four micro-batches of a row through two stages, in 5 ticks."""
    mesh_of(stage=2)
    model = SHAPES[name]
    model = dataclasses.replace(model, remat=remat, num_layers=4 * len(model.window_pattern))
    config = Config(model, DataConfig(seq_len=LENGTH, batch_size=4))
    split = Split(remat=remat, stage=2, stage_microbatches=4)
    assert (split.layers, split.tokens(config), split.tokens_at_once(config)) == (5 / 2, 2 * LENGTH, LENGTH)
    kept = model.num_layers * 5 / 2 * memory.kept_by_layer(model, split, LENGTH)
    assert kept_by_jax(model, rows=4) == kept
    # In a tick, 1 of the 2 x 2 pieces, with 2 bytes a weight and, of all 4 rows, a hidden state.
    each = layer_params(model)
    own = 2 * model.num_layers * (each["attention"] + each["mlp"]) / 2 + 2 * 4 * LENGTH * model.model_dim
    assert memory.of_layers(config, split) == kept + own


MIXTURE = ModelConfig(64, 5, 32, 4, 2, 8, 48, num_experts=4, expert_dim=24)


@pytest.mark.parametrize(
    ("expert", "change", "remat"),
    [
        (1, {}, "none"),
        (2, {"num_shared_experts": 1, "capacity_factor": 1.5}, "none"),
        (2, {"gated_mlp": False, "experts_per_token": 3}, "none"),
        (2, {"num_shared_experts": 2, "gated_mlp": False}, "dots"),
    ],
    ids=["one device", "shared, a capacity", "plain, more choices than experts here", "dots"],
)
def test_activations_of_experts_are_what_jax_keeps(mesh_of, expert, change, remat):
    mesh_of(expert=expert)
    model = dataclasses.replace(MIXTURE, remat=remat, **change)
    split = Split(remat=remat, expert=expert)
    planned = 5 * memory.kept_by_layer(model, split, ROWS * LENGTH // expert, LENGTH)
    if remat != "none":
        planned += 4 * (memory.sharded_params(model, split) - 64 * 32 / expert - 32)
    # Sizes of groups and slices: E integers, or those of the experts here, a few times.
    assert 0 <= kept_by_jax(model) - planned <= 5 * 4 * (8 * 4 + 3 * 4)


@pytest.mark.parametrize(("devices", "parts"), [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("change", [{}, {"capacity_factor": 1.25}, {"num_experts": 8, "experts_per_token": 3}])
def test_room_for_rows_is_the_trainers(devices, parts, change):
    model = dataclasses.replace(MIXTURE, **change)
    split = Split(expert=devices, context=parts)
    planned = experts.room(model, split, 3 * LENGTH, parts * LENGTH)
    if devices == 1:
        assert planned == 3 * LENGTH * model.experts_per_token
    else:
        assert planned == moe.rows_at_home(model, devices, 3, LENGTH, parts)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_moments_are_what_optax_keeps(optimizer, moment_dtype):
    config = Config(model=SHAPES["plain, q/k norm"], optim=OptimConfig(optimizer=optimizer, moment_dtype=moment_dtype))
    state = jax.eval_shape(make_optimizer(config.optim, 10).init, abstract_model(config.model))
    arrays = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state) if x.ndim > 1)
    # The final norm is the one array of one dim; it has two moments.
    final = config.model.model_dim * (4 + (2 if moment_dtype == "bfloat16" else 4))
    assert memory.moments(config, Split()) == arrays + final


@pytest.mark.parametrize("split", [Split(), Split(1, 4, 2)], ids=["one device", "eight"])
def test_a_moving_average_adds_what_the_state_holds(mesh_of, split):
    mesh_of(split.data, split.fsdp, split.tensor)
    config = Config(model=SHAPES["gated, grouped"], optim=OptimConfig(ema_decay=0.99))
    without = dataclasses.replace(config, optim=OptimConfig())
    kept = jax.tree.leaves(abstract_state(config, ON_TPU).average)
    here = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in kept)
    assert abstract_state(without, ON_TPU).average is None
    assert memory.average(config, split) == here > memory.average(without, split) == 0
    assert memory.training(config, split).total - memory.training(without, split).total == here
    assert memory.training(config, split).parts["average"] == here
    assert "average" not in memory.training(without, split).parts


def test_sharded_parameters_are_those_of_a_device_of_the_real_mesh(mesh_of):
    mesh_of(1, 4, 2)
    assert memory.sharded_params(SHAPES["gated, grouped"], Split(1, 4, 2)) == _here(SHAPES["gated, grouped"])
    mesh_of(fsdp=2, tensor=2, expert=2)
    for balance in ("aux_loss", "bias"):
        model = dataclasses.replace(MIXTURE, num_shared_experts=1, balance=balance)
        assert memory.sharded_params(model, Split(fsdp=2, tensor=2, expert=2)) == _here(model)


def _here(model):
    return sum(x.sharding.shard_shape(x.shape)[0] * _rest(x) for x in jax.tree.leaves(abstract_model(model)))


def _rest(x):
    shape = x.sharding.shard_shape(x.shape)
    return int(jnp.prod(jnp.array(shape[1:]))) if len(shape) > 1 else 1


def test_cache_is_that_of_the_decoder():
    model = SHAPES["two layers a group"]
    cache = jax.eval_shape(functools.partial(empty_cache, model, 3, 7, jnp.bfloat16))
    planned = memory.serving(Config(model=model, data=DataConfig(seq_len=7)), 2).cache
    assert 3 * planned == sum(x.size * 2 for x in jax.tree.leaves(cache))


def test_a_chunk_of_logits_is_what_the_op_cuts():
    assert memory.LOGIT_BYTES == cross_entropy.LOGIT_BYTES
    model = ModelConfig(vocab_size=2**17)
    assert memory.chunk_tokens(model, Split(), 10_000) == 2**28 // (4 * 2**17)
    assert memory.chunk_tokens(model, Split(tensor=4), 10_000) == 2048
    assert memory.chunk_tokens(model, Split(), 100) == 100


@pytest.mark.parametrize("chip", memory.LOSS_KERNELS)
def test_the_loss_has_its_kernel_where_the_op_takes_it(chip):
    widest, cores = memory.LOSS_KERNELS[chip]
    generation = CHIPS["tpu7x" if chip == "7x" else chip]
    assert generation.cores == cores
    for tokens in (512, 32_768):
        shapes = [blocks.Shape(tokens, width, 128_256, 2, 4) for width in (widest, widest + 128)]
        assert blocks.pays(shapes[0], generation)
        assert not blocks.pays(shapes[1], generation)
    model = ModelConfig(model_dim=2048)
    assert memory.loss_cores(model, chip, "auto", "bfloat16") == cores
    assert (
        memory.loss_cores(model, chip, "xla", "bfloat16") == memory.loss_cores(model, "h100", "auto", "bfloat16") == 0
    )
    split = Split(loss_cores=cores)
    logits, transient = memory.loss(ModelConfig(vocab_size=1024, model_dim=64), split, 256)
    assert (logits, transient) == (0, 2 * 4 * 1024 * 64 + cores * 4 * 256 * 64)


def config_of(rows=64, layers=4, **model):
    sizes = {"vocab_size": 512, "num_layers": layers, "model_dim": 64, "num_heads": 8, "mlp_dim": 128}
    return Config(model=ModelConfig(**sizes | model), data=DataConfig(seq_len=128, batch_size=rows))


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.sampled_from(["none", "dots", "full"]))
def test_memory_never_grows_with_more_devices(fsdp, tensor, remat):
    config = config_of()
    here = memory.training(config, Split(1, fsdp, tensor, remat=remat)).total
    bigger = Split(2, fsdp, tensor), Split(1, 2 * fsdp, tensor), Split(1, fsdp, 2 * tensor)
    for more in (*bigger, Split(1, fsdp, tensor, context=2)):
        assert memory.training(config, dataclasses.replace(more, remat=remat)).total <= here


@given(st.integers(1, 40), st.booleans(), st.booleans(), st.sampled_from([1, 2, 8]))
def test_recomputing_more_keeps_less(layers, gated, qk_norm, tensor):
    config = config_of(layers=layers, gated_mlp=gated, qk_norm=qk_norm)
    none, dots, full = (memory.activations(config, Split(1, 1, tensor, remat=r)) for r in ("none", "dots", "full"))
    assert none > dots > full


def test_micro_batches_divide_activations_and_add_a_set_of_gradients():
    config = config_of(rows=64)
    whole, half = memory.training(config, Split(remat="dots")), memory.training(config, Split(1, 1, 1, 2, "dots"))
    assert half.activations == whole.activations / 2
    assert half.gradients == whole.gradients + half.weights
    assert (half.weights, half.moments) == (whole.weights, whole.moments)
