"""A product of rows with the weights of their group: one function, several implementations with the same results."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import grouped_matmul_reference
from pallas_kernels.grouped_matmul.vjp import grouped_matmul_pallas
from pallas_kernels.grouped_matmul.xla import grouped_matmul_xla
from pallas_kernels.matmul.blocks import BlockSizes
from pallas_kernels.runtime import vary_alike

KERNELS = ("pallas", "interpret")
IMPLEMENTATIONS = ("reference", "xla", *KERNELS)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def grouped_matmul(
    x_TD: jax.Array,
    w_EDF: jax.Array,
    group_sizes: jax.Array,
    *,
    block_sizes: BlockSizes | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """Each row of x times the weights of its group; the groups' rows lie one after another.

    Args:
      x_TD: float32, bfloat16 or float16; its first group_sizes[0] rows are group 0's, the next group 1's, ...
      w_EDF: of x's dtype, [D, F] of each group.
      group_sizes: int32 [E]. They may be zero, and may sum to less than T. Values are not checked, since they are known
        only when the product runs: a negative size counts as zero, and a group ends where x does.
      block_sizes: of "pallas" and "interpret"; None chooses them for the TPU generation of the mesh in use.
      implementation: "reference", "xla", "pallas" (on a TPU) or "interpret" (the same kernels anywhere, slowly).

    Returns:
      y_TF in x's dtype; products accumulate in float32. Rows of no group are zero, and so is their gradient, whatever x
      and the cotangent hold there. Gradients have their operands' dtype; a group's weight gradient is summed over its
      rows in float32 and rounded once, and is zero for an empty group. What the rows and weights of one group hold
      reaches no other group.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or an option that `implementation` can't honour.
    """
    _check(x_TD, w_EDF, group_sizes)
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"grouped_matmul has no implementation {implementation!r}; it has {known}")
    operands = vary_alike(x_TD, w_EDF, group_sizes)
    if implementation in KERNELS:
        return grouped_matmul_pallas(*operands, sizes=block_sizes, interpret=implementation == "interpret")
    if block_sizes is not None:
        raise ValueError(f"grouped_matmul: {implementation} takes no block_sizes; {' and '.join(KERNELS)} do")
    run = grouped_matmul_reference if implementation == "reference" else grouped_matmul_xla
    return run(*operands)


def _check(x, w, group_sizes):
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or 0 in (*x.shape, *w.shape):
        raise ValueError(f"grouped_matmul takes x_TD and w_EDF, none of them empty; got shapes {x.shape} and {w.shape}")
    if x.dtype != w.dtype or x.dtype not in DTYPES:
        raise ValueError(f"grouped_matmul wants one dtype, float32, bfloat16 or float16; got {x.dtype} and {w.dtype}")
    if group_sizes.shape != w.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(
            f"grouped_matmul: group_sizes {group_sizes.dtype}{group_sizes.shape} should be int32 {w.shape[:1]}"
        )
