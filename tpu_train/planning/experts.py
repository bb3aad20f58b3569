"""What a mixture of experts asks of a device, beside what every layer does (models/moe.py, models/dispatch.py).

M tokens of a micro-batch on a device make R = M k rows. Each of the X devices along `expert` holds E / X experts, whole
but for fsdp, context and tensor, and has room for the S rows of the worst case, or of the capacity; R of them come if
loads are even, which is what time counts. c bytes of the compute dtype, t = tensor; F is an expert's.
"""

import math

from tpu_train.config import ModelConfig
from tpu_train.planning.split import Split

FLOAT32 = 4


def router_weights(model: ModelConfig) -> int:
    """Of a layer: D E in float32, which no `tensor` axis splits; 0 without experts."""
    return model.model_dim * model.num_experts


def biases(model: ModelConfig) -> int:
    """Of a layer's experts, whole on every device."""
    return model.num_experts if model.balance == "bias" else 0


def matrices(model: ModelConfig, num_experts: float) -> float:
    """Scalars of so many experts of a layer."""
    return num_experts * (3 if model.gated_mlp else 2) * model.model_dim * model.expert_size


def gathered(model: ModelConfig, split: Split) -> float:
    """Bytes of a layer's experts once brought together over fsdp and context, and of the whole router."""
    here = matrices(model, model.num_experts / split.expert + model.num_shared_experts) / split.tensor
    return split.width * here + FLOAT32 * router_weights(model)


def room(model: ModelConfig, split: Split, tokens: int, seq_len: int) -> float:
    """S, the rows that a device has room for (moe.rows_at_home): X M min(k, E / X), or what a capacity lets come."""
    if split.expert == 1:
        return tokens * model.experts_per_token
    here, length = model.num_experts // split.expert, seq_len / split.context
    each = length * min(model.experts_per_token, here)
    if model.capacity_factor is not None:
        share = seq_len * model.experts_per_token * model.capacity_factor / model.num_experts
        each = min(each, here * math.ceil(share - 1e-9 * share))
    return split.expert * tokens / length * each


def kept(model: ModelConfig, split: Split, tokens: int, seq_len: int) -> float:
    """Bytes that the backward pass keeps of a layer's mixture under remat none, in place of an MLP's.

    The experts' weights; the tokens in float32, which the router multiplies; its scores; rows at home, D wide and F
    wide (gated: gate, up, act(gate), product; else up, act(up)); the results of the chosen experts in float32, and a
    few numbers for each choice. The shared experts as an MLP has them. Groups' sizes, E integers, are left out.
    """
    M, c, t, D = tokens, split.width, split.tensor, model.model_dim
    E, k, F = model.num_experts, model.experts_per_token, model.expert_size
    S = room(model, split, tokens, seq_len)
    hidden = (4 if model.gated_mlp else 2) * F / t
    total = gathered(model, split) + FLOAT32 * M * D + FLOAT32 * M * E + c * S * (D + hidden)
    total += FLOAT32 * M * k * D + 5 * FLOAT32 * M * k + 5 * FLOAT32 * M
    if model.num_shared_experts:
        total += c * M * (D + (3 if model.gated_mlp else 2) * model.num_shared_experts * F / t)
    return total


def flops(model: ModelConfig, forwards: int, products: int, of_shared: float) -> float:
    """Of a token in a step, all layers: 2 a weight and pass.

    Experts' products run again wherever anything does, `down` too, whose result the gates' gradient reads; the
    router's, which are seen by a remat policy, where `products` are 4; `of_shared` passes of the shared experts.
    """
    chosen = (2 + forwards) * matrices(model, model.experts_per_token)
    shared = of_shared * matrices(model, model.num_shared_experts)
    return 2.0 * model.num_layers * (chosen + shared + products * router_weights(model))


def bytes_moved(model: ModelConfig, split: Split, tokens: int, seq_len: int, forwards: int) -> float:
    """Bytes of memory of a layer's experts, their weights read once in each product, and of what brings rows to them.

    A row is read and written by each permutation, exchange and sum; an exchange first fills its S rows with zeros.
    """
    M, c, t, D = tokens, split.width, split.tensor, model.model_dim
    R, F = M * model.experts_per_token, model.expert_size / t
    passes, first = forwards + 2, 2 if model.gated_mlp else 1
    weights = matrices(model, model.num_experts / split.expert) / t
    products = passes * c * (weights + R * (first * (D + F) + F + D))
    shared = (
        passes
        * c
        * (
            matrices(model, model.num_shared_experts) / t
            + bool(model.num_shared_experts) * M * (first * (D + F * model.num_shared_experts) + D)
        )
    )
    hidden = c * R * F * ((first + 1) * forwards + 2 * first + 1)
    exchanged = 2 * (2 * R + room(model, split, tokens, seq_len)) if split.expert > 1 else 0.0
    moved = (forwards + 1) * c * D * (2 * 2 * R + exchanged) + (forwards + 1) * FLOAT32 * R * D
    return products + shared + hidden + moved


def exchanges(forwards: int) -> int:
    """Of all rows over `expert`, of a layer: to the experts and back, in each forward pass and in the backward pass."""
    return 2 * (forwards + 1)


def counts_first(model: ModelConfig, accumulation: int) -> bool:
    """Whether a forward pass over all micro-batches comes first: the auxiliary loss of each needs the loads of all."""
    return accumulation > 1 and model.num_experts > 0 and model.balance == "aux_loss"
