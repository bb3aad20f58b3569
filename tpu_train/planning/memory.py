"""Bytes that one device holds: the train state, its gradients, what the backward pass keeps, and the largest transient.

The formulas follow what the trainer does, not what a trainer could do: train_step.py keeps weights and moments in
float32, the blocks' gradients in the compute dtype and the others' in float32; models/transformer.py scans groups of
layers under the remat policy; ops.py brings the head to the tokens or the tokens to the head. They count what JAX keeps
between the forward and the backward pass (`tests/test_plan_memory.py` holds them to it, byte for byte); what XLA shares
or adds on top is not in them. No mask of dropout is kept, so it counts for nothing. Attention and the gated MLP are
taken to be the TPU's kernels, the loss its kernel where that pays on the chip, and XLA's chunks elsewhere.
"""

import dataclasses

from tpu_train.config import Config, ModelConfig
from tpu_train.flops import layer_params, num_params
from tpu_train.planning import experts
from tpu_train.planning.split import Split

FLOAT32 = 4
LOGIT_BYTES = 256 * 2**20  # of float32 logits in a chunk, as pallas_kernels.cross_entropy.xla has it
# Widest models that the loss has its kernel for (512 tokens or more), and the cores of a device, each with its own dx:
# what pallas_kernels.cross_entropy.blocks.pays says of a head in float32.
LOSS_KERNELS = {"v4": (2688, 2), "v5e": (22272, 1), "v5p": (11008, 2), "v6e": (11008, 1), "7x": (5376, 1)}
SHORTEST = 128  # tokens that the kernel takes
# What a program can get of a device's memory. TPU: the compiler for v5e gives 15.75 of 16 GiB. GPU: JAX takes three
# quarters unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
USABLE = {"tpu": 15.75 / 16, "gpu": 0.75, "cpu": 1.0}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, when they are most. `transient` is what `peak_in` holds for a moment."""

    weights: float
    moments: float
    average: float  # the weights' moving average
    gradients: float
    activations: float
    logits: float
    transient: float
    peak_in: str

    @property
    def parts(self) -> dict[str, float]:
        names = ["weights", "moments", "gradients", "activations", "logits", "transient"]
        names[2:2] = ["average"] if self.average else []
        return {name: getattr(self, name) for name in names}

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def sharded_params(model: ModelConfig, split: Split) -> float:
    """Scalars of the model on one device: matrices are split over all axes but data, a router not over tensor, norm
    scales and experts' biases not at all."""
    whole = model.num_layers * (layer_params(model)["norms"] + experts.biases(model)) + model.model_dim
    routers = model.num_layers * experts.router_weights(model)
    return (num_params(model) - whole - routers) / (split.shards * split.tensor) + routers / split.shards + whole


def layer_matrices(model: ModelConfig) -> int:
    """Scalars of a layer's matrices, without a router, which stays in float32."""
    each = layer_params(model)
    return each["attention"] + each["mlp"] - experts.router_weights(model) - experts.biases(model)


def moments(config: Config, split: Split) -> float:
    """Bytes of the optimizer's moments on one device.

    AdamW: a first moment in `moment_dtype` and a second in float32 for each weight (arXiv:1711.05101). Muon: a first
    moment alone for the matrices inside blocks, AdamW's two for the rest. Counters and scalars are not counted.
    """
    first = {"float32": 4, "bfloat16": 2}[config.optim.moment_dtype]
    whole = sharded_params(config.model, split)
    if config.optim.optimizer == "adamw":
        return whole * (first + FLOAT32)
    blocks = layer_matrices(config.model) / split.tensor + experts.router_weights(config.model)
    return whole * (first + FLOAT32) - config.model.num_layers * blocks / split.shards * FLOAT32


def moments_on_device(config: Config, split: Split) -> float:
    """Of them what is in the device's memory while the step computes: none with optim.offload."""
    return 0.0 if config.optim.offload else moments(config, split)


def update(config: Config, split: Split) -> float:
    """Bytes that an update with optim.offload brings to the device: the moments of all but the blocks, old and new."""
    layers = config.model.num_layers * layer_matrices(config.model) / split.shards / split.tensor
    return 2 * moments(config, split) * (1 - layers / sharded_params(config.model, split))


def on_host(config: Config, split: Split) -> float:
    """Bytes that a step of one device sends to its host and brings back: of optim.offload and remat=offload_dots."""
    waiting = moments(config, split) if config.optim.offload else 0.0
    if split.remat == "offload_dots":
        dots, full = (of_layers(config, dataclasses.replace(split, remat=policy)) for policy in ("dots", "full"))
        waiting += split.accumulation * (dots - full)
    return waiting


def average(config: Config, split: Split) -> float:
    """Bytes of the weights' moving average on one device: float32, split as they are; 0 where none is kept."""
    return 0.0 if config.optim.ema_decay is None else FLOAT32 * sharded_params(config.model, split)


def state(config: Config, split: Split) -> float:
    """Bytes of weights, their average, gradients and moments on one device."""
    weights = FLOAT32 * sharded_params(config.model, split) + average(config, split)
    return weights + sum(gradients(config.model, split)) + moments_on_device(config, split)


def kept_by_layer(model: ModelConfig, split: Split, tokens: int, seq_len: int | None = None) -> float:
    """Bytes that the backward pass keeps of one layer; M = `tokens`, c = the compute dtype's bytes, t = tensor.

    full, and offload_dots on the device: the group's input, c M D for each group of layers in the window pattern.
    dots: each layer's input, and the results of matmuls that the gradient reads: q, k, v, attention's output
        projection, a plain MLP's first product (a policy sees none inside the gated kernel). Gathered weights are
        gathered again. A router's logits are float32; experts' results are not kept.
    none: the gathered weights, c P / t; three float32 [M, D] of each of two norms; the normed input once for each
        product that reads it, and once for the gated kernel; q, k, v, attention's output twice (as heads and flat) and
        its float32 lse; the MLP's hidden values (gated: up act'(gate), act(gate), product; else: up, act(up)); q/k
        norm: three float32 [M, heads, H]. Where keys and values are gathered over context, those of all tokens. With
        experts, theirs (experts.kept) in place of the MLP's.
    `seq_len`: tokens of a row, for layers along context; None is one row.
    """
    D, N, K, H, F = model.model_dim, model.num_heads, model.kv_heads, model.head_size, model.mlp_dim
    M, c, t = tokens, split.width, split.tensor
    if split.remat in ("full", "offload_dots"):
        return c * M * D / len(model.window_pattern)
    if split.remat == "dots":
        plain = (model.num_shared_experts * model.expert_size if model.num_experts else F) * (not model.gated_mlp)
        return c * M * (D + (N + 2 * K) * H / t + D + plain / t) + FLOAT32 * M * model.num_experts
    each = layer_params(model)
    total = c * each["attention"] / t
    total += 2 * 3 * FLOAT32 * M * D + 3 * c * M * D
    total += c * M * (3 * N + 2 * K) * H / t + FLOAT32 * M * N / t
    if model.num_experts:
        total += experts.kept(model, split, M, seq_len or M * split.context)
    else:
        total += c * each["mlp"] / t + c * M * (D + (3 if model.gated_mlp else 2) * F / t)
    # Statistics of the norms and their scales.
    total += 4 * FLOAT32 * M + FLOAT32 * each["norms"]
    if model.qk_norm:
        total += FLOAT32 * M * (3 * H + 2) * (N + K) / t
    if split.context > 1:
        found = split.attention(model, M, seq_len or M * split.context)
        gathered = sum(layer.kv_bytes for method, layer in found if method == "all_gather") / len(found)
        total += gathered * (split.context - 1) / split.context
    return total


def activations(config: Config, split: Split) -> float:
    """Bytes kept from the forward to the backward pass: every layer's, and three float32 [M, D] of the final norm."""
    return of_layers(config, split) + 3 * FLOAT32 * split.tokens(config) * config.model.model_dim


def of_layers(config: Config, split: Split) -> float:
    """What `activations` counts of the layers; in a pipeline those of every tick, and the stage's own weights.

    These are its layers in the compute dtype, which come together before the first tick, and the rows of all stages.
    """
    model, at_once = config.model, split.tokens_at_once(config)
    kept = model.num_layers * split.layers * kept_by_layer(model, split, at_once, config.data.seq_len)
    if split.stage == 1:
        return kept
    each = layer_params(model)
    matrices = model.num_layers * (each["attention"] + each["mlp"]) / (split.shards * split.tensor)
    return kept + split.width * (matrices + split.stage * split.tokens(config) * model.model_dim)


def spreads_head(model: ModelConfig, split: Split, tokens: int) -> bool:
    """Whether devices that share a weight bring their tokens to slices of the head, in place of the head to each."""
    slices = split.tensor * split.shards
    return split.shards > 1 and tokens * split.shards < model.vocab_size and model.vocab_size % slices == 0


def head_shape(model: ModelConfig, split: Split, tokens: int) -> tuple[int, int]:
    """(tokens, columns of the vocabulary) that a device takes the loss of."""
    if spreads_head(model, split, tokens):
        return tokens * split.shards, model.vocab_size // (split.tensor * split.shards)
    return tokens, model.vocab_size // split.tensor


def chunk_tokens(model: ModelConfig, split: Split, tokens: int) -> int:
    """Tokens whose logits live at a time, as pallas_kernels.cross_entropy.xla cuts them."""
    rows, columns = head_shape(model, split, tokens)
    return min(rows, max(8, LOGIT_BYTES // (FLOAT32 * columns)))


def loss_cores(model: ModelConfig, chip: str, implementation: str, dtype: str) -> int:
    """`Split.loss_cores` of a run on a chip."""
    widest, cores = LOSS_KERNELS.get(chip, (0, 0))
    takes = implementation in ("auto", "pallas") and dtype == "bfloat16" and model.model_dim <= widest
    return cores if takes else 0


def loss(model: ModelConfig, split: Split, tokens: int) -> tuple[float, float]:
    """(logits, transient) bytes of the loss; `training` says what they are."""
    rows, columns = head_shape(model, split, tokens)
    D, c = model.model_dim, split.width
    shared = 2 * c * rows * D if rows > tokens else 0.0
    if split.loss_cores and rows >= SHORTEST:
        return 0.0, 2 * FLOAT32 * columns * D + split.loss_cores * FLOAT32 * rows * D + shared / 2
    logits = chunk_tokens(model, split, tokens) * columns * (FLOAT32 + c)
    return logits, (FLOAT32 + c) * columns * D + shared


def gradients(model: ModelConfig, split: Split) -> tuple[float, float]:
    """Bytes of gradients on one device: the blocks' (matrices in the compute dtype, norms and routers in float32), the
    others'. In a pipeline the blocks' add up in float32 over the ticks."""
    each = layer_params(model)
    matrices = model.num_layers * layer_matrices(model) / (split.shards * split.tensor)
    rest = model.num_layers * (each["norms"] + experts.biases(model) + experts.router_weights(model) / split.shards)
    others = sharded_params(model, split) - matrices - rest
    return (split.width if split.stage == 1 else FLOAT32) * matrices + FLOAT32 * rest, FLOAT32 * others


def recomputed(model: ModelConfig, split: Split, tokens: int, seq_len: int) -> float:
    """Bytes of a layer that is computed again: what remat none keeps, but for the norms' float32 values, which XLA
    takes again where they are read."""
    if split.remat == "none":
        return 0.0
    kept = kept_by_layer(model, dataclasses.replace(split, remat="none"), tokens, seq_len)
    return kept - 2 * 3 * FLOAT32 * tokens * model.model_dim


def backward(model: ModelConfig, split: Split, tokens: int, seq_len: int) -> float:
    """Bytes that a layer's backward pass makes: gradients of the MLP's hidden values, the largest weight's, whole."""
    c, t, D, F = split.width, split.tensor, model.model_dim, model.mlp_dim
    hidden, rows, weight = (3 if model.gated_mlp else 2), float(tokens), D * F
    if model.num_experts:
        F, rows = model.expert_size, experts.room(model, split, tokens, seq_len)
        weight = model.num_experts // split.expert * D * F
    return c * (rows * hidden * F + max(weight, D * model.num_heads * model.head_size)) / t


def training(config: Config, split: Split) -> Memory:
    """What a device holds in the worst moment of a step, which is one of these.

    loss: every activation is kept; a device's part of the head is there in the compute dtype and its gradient adds up
        in float32: the head whole (over fsdp and context), or a slice of it and the tokens of all that share it, with
        their gradient. A chunk's logits pass, once in float32 and once, as their gradient, in the compute dtype. The
        kernel takes the head in float32, keeps dx in it, for each core, and makes no logits in HBM.
    blocks: all gradients but the embedding's rows are there; a group of layers is computed again (`recomputed`), and
        one of them is in its backward pass (`backward`), where a weight's gradient leaves its product whole (over fsdp
        and context) in the compute dtype.
    update: with optim.offload all gradients, and what `update` brings.
    Micro-batches add a running sum of all gradients in float32.
    """
    model, M = config.model, split.tokens(config)
    weights = FLOAT32 * sharded_params(model, split)
    group = len(model.window_pattern)
    of_blocks, of_others = gradients(model, split)
    seq_len, at_once = config.data.seq_len, split.tokens_at_once(config)
    layers = of_layers(config, split)
    logits, head = loss(model, split, M)
    at_work = group * recomputed(model, split, at_once, seq_len) + backward(model, split, at_once, seq_len)
    running = weights if split.accumulation > 1 else 0.0
    peaks = [
        # (gradients, activations, logits, transient, where)
        (running, activations(config, split), logits, head, "loss"),
        (running + of_blocks + of_others, layers, 0.0, at_work, "blocks"),
    ]
    if config.optim.offload:
        peaks.append((running + of_blocks + of_others, 0.0, 0.0, update(config, split), "update"))
    on_device = moments_on_device(config, split)
    found = [Memory(weights, on_device, average(config, split), *peak) for peak in peaks]
    return max(found, key=lambda memory: memory.total)


def cache_bytes_per_token(model: ModelConfig, width: float) -> float:
    """Keys and values of one position over all layers: 2 L K H numbers of `width` bytes.

    Layers with a window cache every position too, as models.transformer.empty_cache does.
    """
    return 2 * model.num_layers * model.kv_heads * model.head_size * width


@dataclasses.dataclass(frozen=True)
class Serving:
    """Bytes of the whole model for inference, and of the cache of one sequence; `width` bytes a number."""

    width: int
    weights: float
    cache: float


def serving(config: Config, width: int) -> Serving:
    """Weights and one sequence's cache of `seq_len` positions, at 2 bytes a number (bfloat16) or 1 (int8)."""
    cache = cache_bytes_per_token(config.model, width) * config.data.seq_len
    return Serving(width, width * num_params(config.model), cache)
