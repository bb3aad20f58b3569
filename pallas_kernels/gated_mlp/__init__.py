"""The gated half of an MLP: one function, several implementations with the same results and the same errors."""

import jax
import jax.numpy as jnp

from pallas_kernels.gated_mlp.reference import ACTIVATIONS, gated_mlp_reference
from pallas_kernels.gated_mlp.vjp import gated_mlp_pallas
from pallas_kernels.gated_mlp.xla import gated_mlp_xla
from pallas_kernels.matmul.blocks import BlockSizes
from pallas_kernels.runtime import vary_alike, vary_over

KERNELS = ("pallas", "interpret")
IMPLEMENTATIONS = ("reference", "xla", *KERNELS)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def gated_mlp(
    x_TD: jax.Array,
    w_gate_DF: jax.Array,
    w_up_DF: jax.Array,
    *,
    activation: str = "silu",
    recompute: bool = False,
    sharded_over: str | None = None,
    block_sizes: BlockSizes | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """act(x w_gate) * (x w_up), the gated linear unit of arXiv:2002.05202 before its last product.

    Args:
      x_TD: float32, bfloat16 or float16.
      w_gate_DF, w_up_DF: of x's dtype.
      activation: "silu", "gelu" (exact), "gelu_tanh", "relu" or "relu_squared".
      recompute: of "pallas" and "interpret": keep nothing but the operands for the backward pass, which then takes the
        two products again; else it keeps two arrays of h's size.
      sharded_over: of "pallas" and "interpret", inside jax.shard_map: the mesh axis that splits the weights along
        D. They are gathered here, and their gradients are matmul_reduce_scatter's.
      block_sizes: of "pallas" and "interpret"; None chooses them for the TPU generation of the mesh in use.
      implementation: "reference", "xla", "pallas" (on a TPU) or "interpret" (the same kernels anywhere, slowly).

    Returns:
      h_TF in x's dtype; products accumulate in float32. The kernels round h alone, xla both products too. Gradients
      have their operands' dtype; a weight's is summed over all of T in float32 and rounded once.

    Raises:
      ValueError: shapes or dtypes that do not fit together, or an option that `implementation` can't honour.
    """
    size = jax.sharding.get_abstract_mesh().shape
    if sharded_over not in (None, *size):
        raise ValueError(f"gated_mlp: sharded_over={sharded_over!r} is no mesh axis; there are {', '.join(size)}")
    parts = 1 if sharded_over is None else size[sharded_over]
    _check(x_TD, w_gate_DF, w_up_DF, activation, parts)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"gated_mlp has no implementation {implementation!r}; it has {', '.join(IMPLEMENTATIONS)}")
    if sharded_over is not None:
        w_gate_DF, w_up_DF = (vary_over(w, sharded_over) for w in (w_gate_DF, w_up_DF))
    operands = vary_alike(x_TD, w_gate_DF, w_up_DF)
    if implementation in KERNELS:
        interpret = implementation == "interpret"
        return gated_mlp_pallas(
            *operands,
            activation=activation,
            recompute=recompute,
            sharded_over=sharded_over,
            sizes=block_sizes,
            interpret=interpret,
        )
    refused = {"block_sizes": block_sizes, "recompute": recompute or None, "sharded_over": sharded_over}
    for name, given in refused.items():
        if given is not None:
            raise ValueError(f"gated_mlp: {implementation} takes no {name}; {' and '.join(KERNELS)} do")
    run = gated_mlp_reference if implementation == "reference" else gated_mlp_xla
    return run(*operands, activation=activation)


def _check(x, w_gate, w_up, activation, parts):
    if x.ndim != 2 or w_gate.ndim != 2 or w_gate.shape != w_up.shape or x.shape[1] != parts * w_gate.shape[0]:
        raise ValueError(
            f"gated_mlp takes x_TD, w_gate_DF, w_up_DF; got shapes {x.shape}, {w_gate.shape}, {w_up.shape}"
        )
    if 0 in (*x.shape, *w_gate.shape):
        raise ValueError(f"gated_mlp: an operand is empty: {x.shape}, {w_gate.shape}")
    if not x.dtype == w_gate.dtype == w_up.dtype or x.dtype not in DTYPES:
        raise ValueError(
            f"gated_mlp wants one dtype, float32, bfloat16 or float16; got {x.dtype}, {w_gate.dtype}, {w_up.dtype}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"gated_mlp has no activation {activation!r}; it has {', '.join(ACTIVATIONS)}")
