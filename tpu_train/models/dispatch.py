"""Rows to the experts that were chosen for them, and what the experts made of them back. All inside shard_map.

A device has M tokens and so R = M k rows, a token's k choices side by side. Sorted by expert (stably, the rows of no
expert last) they are what a grouped product takes. Where `expert` splits the experts, each device sends each expert's
rows to its home, where they arrive sorted by expert too. Nothing says beforehand how many rows come, and a compiled
program has to: without a capacity a device keeps room for the S rows of the worst case, every token of the X devices
along `expert` for all of its experts that a token can choose: S = X M min(k, E / X).

On a TPU the rows that there are cross the mesh, by `jax.lax.ragged_all_to_all`. No other backend of ours has that, so
there every device gathers the rows of all, X R of them, and takes its own: the same arguments, the same result.
"""

import functools

import jax
import jax.numpy as jnp

Slices = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # ragged_all_to_all's: begin, size, begin there, received


def sort_by_expert(expert_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(order_R, place_R): which row stands at each place once sorted, and where each row went."""
    order_R = jnp.argsort(expert_R, stable=True)
    return order_R, jnp.argsort(order_R)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(x_MD: jax.Array, order_R: jax.Array, place_R: jax.Array, choices: int) -> jax.Array:
    """x_RD: each token once for each of its choices, in the experts' order. The gradient is a gather and a sum of k."""
    return _rows(x_MD, order_R // choices)


def _take_rows_backward(choices, residuals, g_RD):
    g_MKD = _rows(g_RD, residuals).reshape(-1, choices, g_RD.shape[1])
    return jnp.sum(g_MKD, axis=1, dtype=jnp.float32).astype(g_RD.dtype), None, None


take_rows.defvjp(lambda x, order, place, choices: (take_rows(x, order, place, choices), place), _take_rows_backward)


@jax.custom_vjp
def put_back(y_RD: jax.Array, order_R: jax.Array, place_R: jax.Array) -> jax.Array:
    """y_RD in the tokens' order."""
    return _rows(y_RD, place_R)


put_back.defvjp(
    lambda y, order, place: (put_back(y, order, place), order), lambda order, g: (_rows(g, order), None, None)
)


def _rows(x, index):
    return x.at[index].get(mode="promise_in_bounds")


def slices(count_E: jax.Array) -> tuple[Slices, Slices, jax.Array]:
    """From the rows of each expert on this device: what goes where along `expert`, how it comes back, and the rows that
    arrive for each of this device's experts."""
    X, me, E = jax.lax.axis_size("expert"), jax.lax.axis_index("expert"), count_E.shape[0]
    count_XE = jax.lax.all_gather(count_E, "expert")
    at_source_XE = _sum_before(count_XE, 1)
    total_E = jnp.sum(count_XE, axis=0)
    at_home_XE = _sum_before(total_E.reshape(X, E // X), 1).reshape(1, E) + _sum_before(count_XE, 0)

    def of_mine(x_XE):
        """By source, then by expert of this device."""
        return jax.lax.dynamic_slice_in_dim(x_XE, me * (E // X), E // X, axis=1).reshape(-1)

    there = (at_source_XE[me], count_XE[me], at_home_XE[me], of_mine(count_XE))
    back = (of_mine(at_home_XE), of_mine(count_XE), of_mine(at_source_XE), count_XE[me])
    return there, back, of_mine(total_E[None])


def _sum_before(x, axis: int):
    return jnp.cumsum(x, axis=axis, dtype=jnp.int32) - x


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def exchange(x_RD: jax.Array, there: Slices, back: Slices, num_rows: int, ragged: bool) -> jax.Array:
    """The `num_rows` rows that arrive here when every device along `expert` sends its slices; zeros where none does.

    `ragged`: by the operation that TPUs have. `back` are the slices of the way back, which the gradient takes.
    """
    send = _ragged if ragged else gathered
    return send(x_RD, num_rows, *there)


exchange.defvjp(
    lambda x, there, back, n, ragged: (exchange(x, there, back, n, ragged), (there, back, x.shape[0])),
    lambda n, ragged, kept, g: (exchange(g, kept[1], kept[0], kept[2], ragged), None, None),
)


def _ragged(x_RD, num_rows: int, *there):
    varying = jax.typeof(x_RD).manual_axis_type.varying
    zeros = jnp.zeros((num_rows, x_RD.shape[1]), x_RD.dtype)
    operands = [_vary_over(a, varying) for a in (zeros, *there)]
    return jax.lax.ragged_all_to_all(x_RD, *operands, axis_name="expert")


def _vary_over(x, axes):
    missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def gathered(x_RD: jax.Array, num_rows: int, begin_N, size_N, there_N, received_N) -> jax.Array:
    """What jax.lax.ragged_all_to_all makes of the same arguments and zeros, from the rows of all devices."""
    X, R = jax.lax.axis_size("expert"), x_RD.shape[0]
    begin_N, at_N = (jax.lax.all_to_all(x, "expert", 0, 0, tiled=True) for x in (begin_N, there_N))
    source_N = jnp.arange(at_N.shape[0]) // (at_N.shape[0] // X)
    row_S1 = jnp.arange(num_rows)[:, None]
    here_SN = (at_N[None] <= row_S1) & (row_S1 < (at_N + received_N)[None])
    from_S = jnp.sum(jnp.where(here_SN, (source_N * R + begin_N - at_N)[None] + row_S1, 0), axis=1)
    rows = _rows(jax.lax.all_gather(x_RD, "expert", tiled=True), from_S)
    return jnp.where(jnp.any(here_SN, axis=1)[:, None], rows, 0)
