"""Cross entropy from hidden states: the head's product and the loss in one op, logits never whole in memory."""

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.reference import cross_entropy_reference
from pallas_kernels.cross_entropy.xla import cross_entropy_xla

IMPLEMENTATIONS = ("reference", "xla")


def linear_cross_entropy(
    x_TD: jax.Array,
    w_VD: jax.Array,
    labels_T: jax.Array,
    *,
    z_loss: float = 0.0,
    logit_soft_cap: float | None = None,
    vocab_axis: str | tuple[str, ...] | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Per-token -log softmax(x w^T)[label] + z_loss * lse^2 (the z-loss of PaLM, arXiv:2204.02311, section 5).

    Args:
      x_TD: hidden states, any float dtype; the products are of this dtype with float32 accumulation.
      w_VD: the head, cast to x's dtype for the products; its gradient is accumulated in float32 whatever x's dtype.
      labels_T: int ids in [0, V).
      z_loss: weight of lse^2.
      logit_soft_cap: cap * tanh(logit / cap).
      vocab_axis: inside shard_map, the mesh axis or axes over which w's rows are split; labels stay global ids.
      implementation: "reference" or "xla" (chunked over T).

    Returns:
      loss_T and lse_T, float32; both differentiable with respect to x and w.

    Raises:
      ValueError: shapes that do not fit, or an implementation that does not exist or can't honour an option.
    """
    if x_TD.ndim != 2 or w_VD.ndim != 2 or x_TD.shape[1] != w_VD.shape[1] or labels_T.shape != x_TD.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy takes x_TD, w_VD, labels_T; got shapes {x_TD.shape}, {w_VD.shape}, {labels_T.shape}"
        )
    if not jnp.issubdtype(labels_T.dtype, jnp.integer):
        raise ValueError(f"linear_cross_entropy: labels are {labels_T.dtype}; they must be integers")
    if logit_soft_cap is not None and logit_soft_cap <= 0:
        raise ValueError(
            f"linear_cross_entropy: logit_soft_cap={logit_soft_cap}; it must be above 0, or None for no cap"
        )
    options = {"z_loss": z_loss, "soft_cap": logit_soft_cap, "vocab_axis": vocab_axis}
    if implementation == "reference":
        return cross_entropy_reference(x_TD, w_VD, labels_T, **options)
    if implementation == "xla":
        return cross_entropy_xla(x_TD, w_VD, labels_T, **options)
    raise ValueError(
        f"linear_cross_entropy has no implementation {implementation!r}; it has {', '.join(IMPLEMENTATIONS)}"
    )
