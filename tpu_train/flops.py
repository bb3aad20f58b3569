"""Closed formulas of a model: its parameters and the FLOPs of training it. No jax: they are read before anything runs.

Dims as in the legend of config/fields.py; one layer's counts, then the model's.
"""

from tpu_train.config import ModelConfig


def layer_params(config: ModelConfig) -> dict[str, int]:
    """Scalars of one layer by block: "attention" D H (N + 2 K) + N H D, "mlp" 3 D F (gated) or 2 D F, "norms".

    With experts "mlp" is that of each of E experts and of the shared ones, the router's D E, and E biases if any.
    """
    D, N, K, H = config.model_dim, config.num_heads, config.kv_heads, config.head_size
    E, biases = config.num_experts, config.num_experts if config.balance == "bias" else 0
    return {
        "attention": D * H * (N + 2 * K) + N * H * D,
        "mlp": _mlps(config, E + config.num_shared_experts) + D * E + biases if E else _mlps(config, 1),
        "norms": 2 * D + (2 * H if config.qk_norm else 0),
    }


def _mlps(config: ModelConfig, count: int) -> int:
    """Weights of `count` experts, or MLPs."""
    width = config.expert_size if config.num_experts else config.mlp_dim
    return count * (3 if config.gated_mlp else 2) * config.model_dim * width


def mlp_weights_per_token(config: ModelConfig) -> int:
    """Of one layer's MLP, the weights that a token is multiplied with: its experts', the shared ones', the router's."""
    if not config.num_experts:
        return _mlps(config, 1)
    return _mlps(config, config.experts_per_token + config.num_shared_experts) + config.model_dim * config.num_experts


def params(config: ModelConfig) -> dict[str, int]:
    """Scalars of the whole model by block: the layers', "embedding" V D, "head" V D (0 if tied), and the final norm."""
    V, D = config.vocab_size, config.model_dim
    layers = {name: config.num_layers * count for name, count in layer_params(config).items()}
    layers["norms"] += D
    return {"embedding": V * D, "head": 0 if config.tie_embeddings else V * D, **layers}


def num_params(config: ModelConfig) -> int:
    """Scalars in the model; a tied embedding counts once."""
    return sum(params(config).values())


def active_params(config: ModelConfig) -> int:
    """Scalars of the model that take part for one token: without the experts that it does not choose."""
    return num_params(config) - config.num_layers * (layer_params(config)["mlp"] - mlp_weights_per_token(config))


def keys_seen(seq_len: int, window: int) -> float:
    """Keys that a query sees, on average over a row: min(t + 1, window) at position t; `window` 0 is none."""
    width = min(window or seq_len, seq_len)
    return (width * (width + 1) / 2 + (seq_len - width) * width) / seq_len


def forward_flops_per_token(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """Matmul FLOPs of one forward pass per token, by block.

    A product of [M, I] with [I, O] takes 2 M I O. So "projections" (q, k, v, output) and "mlp" take 2 per weight (with
    experts, of those that a token goes through: with a capacity, as if none were dropped),
    "head" 2 D V, and "attention" 4 N H for each key that a query sees: 2 for the scores, 2 for the weighted values.
    """
    each = layer_params(config)
    layers = config.num_layers // len(config.window_pattern)
    seen = sum(layers * keys_seen(seq_len, window) for window in config.window_pattern)
    return {
        "projections": 2.0 * config.num_layers * each["attention"],
        "attention": 4.0 * config.num_heads * config.head_size * seen,
        "mlp": 2.0 * config.num_layers * mlp_weights_per_token(config),
        "head": 2.0 * config.model_dim * config.vocab_size,
    }


def train_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """Matmul FLOPs of one forward and backward pass per token; recomputation under remat is not counted.

    The backward pass takes two products for each of the forward's (one for each operand's gradient), so three times
    the forward. PaLM's formula (arXiv:2204.02311, appendix B) counts all T keys for every query and so gives a higher
    MFU; 6 FLOPs per parameter and token (arXiv:2001.08361, section 2.1) leaves attention out.
    """
    return 3.0 * sum(forward_flops_per_token(config, seq_len).values())
