"""What is kept between steps and the step itself: gradients over micro-batches, one optimizer update.

A step whose loss or gradient is NaN or infinite, or whose gradient is a spike (spikes.py), changes no weight, moment or
average; it is counted, and the schedule, which counts updates, waits. That is a select and no conditional: the update
reads the old values anyway, so the select joins its loop and costs no memory and no traffic, while a conditional would
keep XLA from fusing across it and from overlapping the update with the gradients' collectives.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tpu_train import context, offload, processes, spikes
from tpu_train.config import Config
from tpu_train.loss import hidden_states, weighted_loss
from tpu_train.models import balance, dropout
from tpu_train.models.transformer import Transformer, stand_in
from tpu_train.optim import make_optimizer, make_schedule, moving_average, update_from_host
from tpu_train.precision import Compute
from tpu_train.sharding import outside

GROWTH_INTERVAL = 2000  # finite steps before the float16 loss scale doubles, as in arXiv:1710.03740
MAX_LOSS_SCALE = 2.0**24


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything that a resumed run needs on device; `step` counts steps done, skipped ones too."""

    step: jax.Array
    model: Transformer
    opt_state: Any
    loss_scale: jax.Array  # float32; 1 unless computing in float16
    good_steps: jax.Array  # finite steps since the loss scale last changed
    average: Transformer | None = None  # of the weights; None unless optim.ema_decay is set
    norms: jax.Array | None = None  # what spikes.py remembers; None unless run.spike_factor is set


def init_state(config: Config, compute: Compute) -> TrainState:
    """A fresh state over the current mesh; moments are sharded as the weights are."""
    return jax.jit(functools.partial(make_state, config, compute))(jax.random.key(config.run.seed))


def abstract_state(config: Config, compute: Compute) -> TrainState:
    """The shapes, dtypes and shardings that `init_state` gives, with nothing computed."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    abstract = jax.eval_shape(functools.partial(make_state, config, compute), key)
    mesh = jax.sharding.get_mesh()

    def on_mesh(x):
        spec = jax.sharding.PartitionSpec() if x.sharding is None else x.sharding.spec
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

    state = jax.tree.map(on_mesh, abstract)
    if config.optim.offload:
        state.opt_state = offload.waiting(state.opt_state)
    return state


def make_state(config: Config, compute: Compute, key: jax.Array) -> TrainState:
    """What `init_state` compiles."""
    model = Transformer(config.model, key)
    opt_state = make_optimizer(config.optim, config.run.steps).init(model)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        model=model,
        opt_state=offload.to_host(opt_state, model) if config.optim.offload else opt_state,
        loss_scale=jnp.asarray(2.0**15 if compute.scales_loss else 1.0, jnp.float32),
        good_steps=jnp.zeros((), jnp.int32),
        # Copies: the step is given both to write into.
        average=None if config.optim.ema_decay is None else jax.tree.map(jnp.copy, model),
        norms=None if config.run.spike_factor is None else spikes.no_norms(),
    )


def best_model(state: TrainState) -> Transformer:
    """The weights to evaluate and sample with: their moving average where it is kept."""
    return state.model if state.average is None else state.average


def with_features(state: TrainState, config: Config) -> TrainState:
    """`state` with the fields that `config` asks for, begun here, and without those that it does not."""
    average, norms = state.average, state.norms
    if config.optim.ema_decay is None:
        average = None
    elif average is None:
        average = jax.jit(lambda model: jax.tree.map(jnp.copy, model))(state.model)
    if config.run.spike_factor is None:
        norms = None
    elif norms is None:
        norms = jax.jit(spikes.no_norms)()
    return dataclasses.replace(state, average=average, norms=norms)


def make_train_step(config: Config, compute: Compute):
    """The jitted step: (state, batch of [A, B, T]) -> (state, metrics). The old state's buffers are reused."""
    optimizer = make_optimizer(config.optim, config.run.steps)
    schedule = make_schedule(config.optim, config.run.steps, config.optim.peak_lr)
    ema_decay, spike_factor = config.optim.ema_decay, config.run.spike_factor

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: dict[str, jax.Array]):
        loss, grads, loads = loss_and_grads(state, batch, config.optim.z_loss, compute)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updating, done = finite, _updates_done(state.opt_state)
        metrics = {
            "loss": loss,
            "learning_rate": schedule(done),
            "grad_norm": grad_norm,
            "tokens": jnp.sum(batch["weights"]),
        }
        if config.model.num_experts:
            metrics |= balance.measures(loads, config.model.experts_per_token)
        norms = state.norms
        if norms is not None and spike_factor is not None:
            metrics["typical_norm"] = spikes.typical_norm(norms)
            updating &= grad_norm <= spike_factor * metrics["typical_norm"]
            norms = _where(updating, spikes.remember(norms, grad_norm, done), norms)
        with jax.named_scope("optimizer"):
            if config.optim.offload:
                update = update_from_host(config.optim, config.run.steps)
                model, opt_state = update(grads, state.opt_state, state.model, updating)
            else:
                updates, opt_state = optimizer.update(grads, state.opt_state, state.model)
                model = optax.apply_updates(state.model, updates)
                model, opt_state = _where(updating, (model, opt_state), (state.model, state.opt_state))
            model = _move_biases(model, loads, updating)
            average = None
            if state.average is not None and ema_decay is not None:
                average = moving_average(state.average, model, ema_decay, done + 1)
                average = _where(updating, average, state.average)
        scale, good_steps = state.loss_scale, state.good_steps
        if compute.scales_loss:
            metrics["loss_scale"] = scale
            scale, good_steps = _next_loss_scale(scale, good_steps, finite)
        step = state.step + 1
        metrics |= {"updated": updating, "skipped": step - _updates_done(opt_state)}
        return TrainState(step, model, opt_state, scale, good_steps, average, norms), metrics

    return train_step


def trace_step(config: Config, compute: Compute, mesh: jax.sharding.Mesh) -> jax.stages.Traced:
    """The train step traced for the shapes and shardings that `config` makes on `mesh`; nothing runs."""
    micro = config.optim.accumulation_steps
    shape = (micro, config.data.batch_size // micro, config.data.seq_len)
    sharding = jax.NamedSharding(mesh, outside("ABT", mesh))
    dtypes = dict.fromkeys(batch_names(config), jnp.int32) | {"weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}
    with jax.set_mesh(mesh):  # a thread has its own
        return make_train_step(config, compute).trace(abstract_state(config, compute), batch)


def batch_names(config: Config) -> list[str]:
    """The arrays of a batch."""
    # One document a row needs no segments: what its padding sees has weight 0, and cuDNN takes no segments.
    # Experts need to tell padding from a prompt, whose weight is 0 as well.
    segments = ["segment_ids"] if config.data.packing or config.model.num_experts else []
    places = ["places"] if config.model.dropout else []
    return ["tokens", "labels", "positions", "weights", *segments, *places]


def batch_on_mesh(batch: dict[str, Any], config: Config, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """[A, B, T] arrays over the mesh, from this process's [b, T]."""
    if config.model.dropout:
        share = processes.batch_share(mesh)["process_index"]
        mine, length = batch["tokens"].shape
        batch = batch | {"places": dropout.places(mine, length, first=share * mine)}
    sharding = jax.NamedSharding(mesh, outside("ABT", mesh))
    micro, rows = config.optim.accumulation_steps, config.data.batch_size
    return {
        name: jax.make_array_from_process_local_data(
            sharding,
            context.reorder(batch[name].reshape(micro, -1, batch[name].shape[-1]), mesh.shape["context"]),
            (micro, rows // micro, batch[name].shape[-1]),
        )
        for name in batch_names(config)
    }


def _updates_done(opt_state: Any) -> jax.Array:
    """Updates that the optimizer has counted: fewer than the steps done where some were skipped."""
    return optax.tree_utils.tree_get_all_with_path(opt_state, "count")[0][1]


def loss_and_grads(state, batch, z_loss, compute):
    """Cross entropy and gradients (unscaled, float32), averaged over the tokens of all micro-batches together.

    Beside them the experts' loads, summed over micro-batches. `state` is that before the step: its counter picks the
    masks of dropout.
    """
    total_weight = jnp.maximum(jnp.sum(batch["weights"]), 1.0)
    scale, config = state.loss_scale, state.model.config
    balances = config.num_experts > 0 and config.balance == "aux_loss"

    key = dropout.key_of(compute.seed, state.step) if config.dropout else None
    model, masters = state.model, None
    if compute.dtype != jnp.float32:
        model, masters = stand_in(state.model, compute.dtype), jax.lax.stop_gradient(state.model.blocks)

    def micro_loss(model, micro_batch, of_step):
        loss, cross_entropy, loads = weighted_loss(model, micro_batch, z_loss, compute, masters, key)
        loss *= scale / total_weight
        if balances:
            part = balance.balance_loss(loads, loads if of_step is None else of_step, config.experts_per_token)
            loss += scale * config.aux_loss_coefficient * part
        return loss, (cross_entropy / total_weight, loads)

    grad_fn = jax.grad(micro_loss, has_aux=True)
    if batch["tokens"].shape[0] == 1:
        grads, (loss, loads) = grad_fn(model, jax.tree.map(lambda x: x[0], batch), None)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    else:
        of_step = _loads_of_step(model, batch, compute, masters, key) if balances else None

        def accumulate(carry, micro_batch):
            grads, (loss, loads) = grad_fn(model, micro_batch, of_step)
            return jax.tree.map(jnp.add, carry, (grads, loss)), loads

        zeros = jax.tree.map(jnp.zeros_like, (state.model, total_weight))
        (grads, loss), loads = jax.lax.scan(accumulate, zeros, batch)
        loads = jax.tree.map(lambda x: jnp.sum(x, axis=0), loads)
    return loss, jax.tree.map(lambda g: g / scale, grads) if compute.scales_loss else grads, loads


def _loads_of_step(model, batch, compute, masters, key):
    """The experts' loads of all micro-batches, which the balance loss of each needs: one more forward pass.

    Its gradient is that of a product of two sums over the step's tokens. Taking each micro-batch's own loads in its
    place would be another loss, which depends on how the batch is cut.
    """

    def count(_, micro_batch):
        return None, hidden_states(model, micro_batch, compute, masters, key)[1]

    loads = jax.lax.scan(count, None, batch)[1]
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), loads)


def _move_biases(model: Any, loads: Any, updating: jax.Array) -> Any:
    """`model` after the step that met `loads`: where biases balance the experts, they follow; in place."""
    if model.config.num_experts and model.config.balance == "bias":
        for block, load in zip(model.blocks, loads, strict=True):
            bias = block.mlp.bias_E
            moved = balance.moved_bias(bias[...], load, model.config.bias_update_rate)
            bias[...] = jnp.where(updating, moved, bias[...])
    return model


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _next_loss_scale(scale: jax.Array, good_steps: jax.Array, finite: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(scale, finite steps since it changed). Overflow halves it; a run of finite steps doubles it, up to a limit."""
    grow = finite & (good_steps + 1 >= GROWTH_INTERVAL)
    raised = jnp.minimum(jnp.where(grow, scale * 2, scale), MAX_LOSS_SCALE)
    return jnp.where(finite, raised, jnp.maximum(scale / 2, 1.0)), jnp.where(finite & ~grow, good_steps + 1, 0)
