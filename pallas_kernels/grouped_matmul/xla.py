"""The grouped product by XLA's own products: a loop over groups, and in it one over the tiles of their rows.

Work and memory go with the rows, not with rows times groups, as those of `jax.lax.ragged_dot` do wherever it is lowered
to one dense product (JAX 0.10 and 0.12 on CPUs), which also passes a NaN of any group's weights to every row.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.groups import bounds
from pallas_kernels.runtime import vary_like

LARGEST_TILE, SMALLEST_TILE = 512, 16


@jax.custom_vjp
def grouped_matmul_xla(x_TD, w_EDF, group_sizes_E):
    """Same contract as `grouped_matmul_reference`."""
    return _rows_times_weights(x_TD, w_EDF, group_sizes_E, 0)


def _forward(x_TD, w_EDF, group_sizes_E):
    return grouped_matmul_xla(x_TD, w_EDF, group_sizes_E), (x_TD, w_EDF, group_sizes_E)


def _backward(residuals, dy_TF):
    x_TD, w_EDF, group_sizes_E = residuals
    dx_TD = _rows_times_weights(dy_TF, w_EDF, group_sizes_E, 1)
    return dx_TD, _weight_gradients(x_TD, dy_TF, group_sizes_E), None


grouped_matmul_xla.defvjp(_forward, _backward)


def _rows_times_weights(x_TC, w_EDF, group_sizes_E, w_dim: int):
    """Rows times their group's weights, of which dim `w_dim` (0 is D, 1 is F) is contracted; rows of no group zero."""
    tile = _tile(x_TC.shape[0], w_EDF.shape[0])

    def group(y_TG, operands):
        first, end, w_DF = operands

        def step(i, y_TG):
            start, own = _own_rows(first + i * tile, end, tile, x_TC.shape[0])
            product = _product(jax.lax.dynamic_slice_in_dim(x_TC, start, tile), w_DF, 1, w_dim).astype(x_TC.dtype)
            there = jax.lax.dynamic_slice_in_dim(y_TG, start, tile)
            return jax.lax.dynamic_update_slice_in_dim(y_TG, jnp.where(own, product, there), start, 0)

        return jax.lax.fori_loop(0, -(-(end - first) // tile), step, y_TG), None

    y_TG = vary_like(jnp.zeros((x_TC.shape[0], w_EDF.shape[2 - w_dim]), x_TC.dtype), x_TC, w_EDF)
    return jax.lax.scan(group, y_TG, (*bounds(group_sizes_E, x_TC.shape[0]), w_EDF))[0]


def _weight_gradients(x_TD, dy_TF, group_sizes_E):
    """dw_EDF, each group's sum in float32 and rounded once."""
    T, tile = x_TD.shape[0], _tile(x_TD.shape[0], group_sizes_E.shape[0])

    def group(operands):
        first, end = operands

        def step(i, dw_DF):
            start, own = _own_rows(first + i * tile, end, tile, T)
            x, dy = (jnp.where(own, jax.lax.dynamic_slice_in_dim(a, start, tile), 0) for a in (x_TD, dy_TF))
            return dw_DF + _product(x, dy, 0, 0)

        zeros = vary_like(jnp.zeros((x_TD.shape[1], dy_TF.shape[1]), jnp.float32), x_TD, dy_TF)
        return jax.lax.fori_loop(0, -(-(end - first) // tile), step, zeros).astype(x_TD.dtype)

    return jax.lax.map(group, bounds(group_sizes_E, T))


def _tile(num_rows: int, num_groups: int) -> int:
    """Rows of a step: about half a group's, so that the last tile of a group wastes little."""
    even = max(1, num_rows // (2 * num_groups))
    return min(num_rows, LARGEST_TILE, max(SMALLEST_TILE, 1 << (even.bit_length() - 1)))


def _own_rows(first, end, tile: int, num_rows: int):
    """Where the tile at `first` starts, moved up where it would end past the last row, and which of its rows count."""
    start = jnp.minimum(first, num_rows - tile)
    rows = start + jnp.arange(tile, dtype=jnp.int32)
    return start, ((first <= rows) & (rows < end))[:, None]


def _product(a, b, a_dim: int, b_dim: int):
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((a_dim,), (b_dim,)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
