"""Cross entropy from hidden states: the head's product and the loss in one op, logits never whole in memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.blocks import BlockSizes
from pallas_kernels.cross_entropy.reference import statistics_reference
from pallas_kernels.cross_entropy.statistics import NOWHERE, Options
from pallas_kernels.cross_entropy.tpu import statistics_pallas
from pallas_kernels.cross_entropy.xla import statistics_xla
from pallas_kernels.runtime import vary_alike

KERNELS = ("pallas", "interpret")
IMPLEMENTATIONS = ("reference", "xla", *KERNELS)


def linear_cross_entropy(
    x_TD: jax.Array,
    w_VD: jax.Array,
    labels_T: jax.Array,
    *,
    weights_T: jax.Array | None = None,
    ignore_id: int | None = None,
    z_loss: float = 0.0,
    logit_soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    vocab_axis: str | tuple[str, ...] | None = None,
    return_argmax: bool = False,
    block_sizes: BlockSizes | None = None,
    implementation: str = "xla",
) -> tuple[jax.Array, ...]:
    """Per token: weight * (-sum_v q_v log softmax(x w^T)_v + z_loss * lse^2), q being 1 at the label, 0 elsewhere.

    The z-loss is PaLM's (arXiv:2204.02311, section 5), label smoothing arXiv:1512.00567's: q = (1 - e) one-hot + e / V.

    Args:
      x_TD: hidden states, any float dtype; the products are of this dtype with float32 accumulation.
      w_VD: the head, cast to x's dtype for the products; its gradient is accumulated in float32 whatever x's dtype.
      labels_T: int ids in [0, V). Another id that is not `ignore_id` makes the token's loss NaN, unless its weight is
        0, and passes no gradient.
      weights_T: float, of each token's loss; None is 1.
      ignore_id: a token with this label has loss 0, whatever its weight, and passes none of its loss's gradient.
      z_loss: weight of lse^2.
      logit_soft_cap: cap * tanh(logit / cap).
      label_smoothing: e, in [0, 1].
      vocab_axis: inside shard_map, the mesh axis or axes over which w's rows are split; labels stay global ids.
      return_argmax: also return the id of each token's highest logit before the cap, as for the accuracy.
      block_sizes: of "pallas" and "interpret"; None chooses them for the TPU generation of the mesh in use.
      implementation: "reference", "xla" (chunked over T), "pallas" (on a TPU; logits never leave VMEM) or "interpret"
        (the same kernels anywhere, slowly).

    Returns:
      loss_T and lse_T, float32; both differentiable with respect to x, w and the weights. The lse is neither weighted
      nor masked. With `return_argmax` also argmax_T, int32, the lowest id where several are highest.

    Raises:
      ValueError: shapes, dtypes or numbers that do not fit, or an implementation that does not exist or can't honour
        an option.
    """
    _check(x_TD, w_VD, labels_T, weights_T, ignore_id)
    if logit_soft_cap is not None and not logit_soft_cap > 0:
        raise ValueError(
            f"linear_cross_entropy: logit_soft_cap={logit_soft_cap}; it must be above 0, or None for no cap"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"linear_cross_entropy: label_smoothing={label_smoothing}; it must be from 0 to 1")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"linear_cross_entropy has no implementation {implementation!r}; it has {', '.join(IMPLEMENTATIONS)}"
        )
    if block_sizes is not None and implementation not in KERNELS:
        raise ValueError(f"linear_cross_entropy: {implementation} takes no block_sizes; {' and '.join(KERNELS)} do")
    run: Any = statistics_reference if implementation == "reference" else statistics_xla
    if implementation in KERNELS:
        run = functools.partial(statistics_pallas, sizes=block_sizes, interpret=implementation == "interpret")
    options = Options(
        soft_cap=None if logit_soft_cap is None else float(logit_soft_cap),
        vocab_axis=vocab_axis,
        with_total=label_smoothing > 0,
        with_argmax=return_argmax,
    )
    rows, first_row, shards = len(w_VD), jnp.int32(0), 1
    if vocab_axis is None:
        x_TD, w_VD, labels_T, weights_T = vary_alike(x_TD, w_VD, labels_T, weights_T)
    elif implementation != "reference":
        first_row, shards = jax.lax.axis_index(vocab_axis).astype(jnp.int32) * rows, jax.lax.axis_size(vocab_axis)
    if labels_T.dtype.itemsize < 4:
        labels_T = labels_T.astype(jnp.int32)
    # Compared before they become int32: an id past it must not wrap round to a row.
    exists_T = (labels_T >= 0) & (labels_T < rows * shards)
    local_T = jnp.where(exists_T, labels_T, 0).astype(jnp.int32) - first_row
    local_T = jnp.where(exists_T & (local_T >= 0) & (local_T < rows), local_T, NOWHERE)
    found = run(options, x_TD, w_VD, local_T)

    loss_T = found.lse - found.at_label
    if label_smoothing:
        mean_T = found.total / (rows * shards)
        loss_T = found.lse - (1 - label_smoothing) * found.at_label - label_smoothing * mean_T
    loss_T = loss_T + float(z_loss) * found.lse**2
    loss_T = _weighed(loss_T, exists_T, labels_T, weights_T, ignore_id)
    return (loss_T, found.lse, found.argmax) if return_argmax else (loss_T, found.lse)


def _weighed(loss_T, exists_T, labels_T, weights_T, ignore_id):
    """The loss times its weight, NaN where the label is no class, 0 where it is ignored."""
    unknown_T = jnp.logical_not(exists_T)
    if ignore_id is not None:
        unknown_T &= labels_T != ignore_id
    if weights_T is not None:
        unknown_T &= weights_T != 0
    loss_T = jnp.where(unknown_T, jnp.nan, loss_T)
    if weights_T is not None:
        loss_T = loss_T * weights_T.astype(jnp.float32)
    if ignore_id is not None:
        loss_T = jnp.where(labels_T == ignore_id, 0.0, loss_T)
    return loss_T


def _check(x, w, labels, weights, ignore_id):
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1] or labels.shape != x.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy takes x_TD, w_VD, labels_T; got shapes {x.shape}, {w.shape}, {labels.shape}"
        )
    if not x.size or not w.size:
        raise ValueError(f"linear_cross_entropy: x {list(x.shape)} and w {list(w.shape)} must not be empty")
    if not jnp.issubdtype(x.dtype, jnp.floating) or not jnp.issubdtype(w.dtype, jnp.floating):
        raise ValueError(f"linear_cross_entropy: x is {x.dtype} and w is {w.dtype}; they must be floats")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"linear_cross_entropy: labels are {labels.dtype}; they must be integers")
    if weights is not None and (weights.shape != labels.shape or not jnp.issubdtype(weights.dtype, jnp.floating)):
        raise ValueError(
            f"linear_cross_entropy: weights {weights.dtype}{list(weights.shape)} must be floats of shape "
            f"{list(labels.shape)}"
        )
    if ignore_id is not None and not jnp.iinfo(labels.dtype).min <= ignore_id <= jnp.iinfo(labels.dtype).max:
        raise ValueError(f"linear_cross_entropy: ignore_id={ignore_id} is no {labels.dtype}, as the labels are")
