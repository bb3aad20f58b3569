"""What a run is: frozen dataclasses, one a section, and their dims.

`None` in a field means "derived from the others" and is filled in by the field's property.

Dims, one letter each, used in array names (`x_BTD`) everywhere:
    B batch           data.batch_size         T query tokens    data.seq_len
    D model           model.model_dim         S key tokens
    L layers          model.num_layers        N query heads     model.num_heads
    K key/value heads model.num_kv_heads      G = N // K
    H head dim        model.head_dim          F feed-forward    model.mlp_dim
    V vocabulary      model.vocab_size        A micro-batches   optim.accumulation_steps
    E experts         model.num_experts       F of an expert    model.expert_dim
"""

import dataclasses
from typing import Literal


class UserError(Exception):
    """Bad input: one line that says what is wrong and what would be right. `main` prints it and exits with 2."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = 256
    num_layers: int = 4
    model_dim: int = 128
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: model_dim // num_heads
    mlp_dim: int = 512
    gated_mlp: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"] = "silu"
    tie_embeddings: bool = True
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    attention_soft_cap: float | None = None  # None: no cap
    logit_soft_cap: float | None = None
    # One entry per layer of a repeating group, in tokens; 0 sees all earlier tokens. Must divide num_layers.
    window_pattern: tuple[int, ...] = (0,)
    # Groups of layers per turn of the scan over them. All at once is quicker on a CPU; 1 compiles soonest on a TPU.
    scan_unroll: int = 1
    # What the backward pass keeps of a block: everything, matmul outputs (offload_dots: in the host's memory), or only
    # the block's input.
    remat: Literal["none", "dots", "offload_dots", "full"] = "none"
    # The share of the embedding, and of what attention and the MLP add, that training sets to zero; 0: none.
    dropout: float = 0.0
    # A mixture of experts in place of every layer's MLP; 0: none. See models/moe.py.
    num_experts: int = 0
    experts_per_token: int = 2
    expert_dim: int | None = None  # of each expert; None: mlp_dim
    num_shared_experts: int = 0  # that every token goes through, side by side as one MLP
    router: Literal["softmax", "sigmoid"] = "softmax"  # from logits to scores
    normalize_gates: bool = True  # the chosen experts' scores, divided by their sum
    # How the experts' loads are kept even: by a term of the loss, or by a bias on the choice alone.
    balance: Literal["none", "aux_loss", "bias"] = "aux_loss"
    aux_loss_coefficient: float = 0.01
    bias_update_rate: float = 1e-3
    # None: no token is dropped. Else an expert takes at most seq_len * experts_per_token / num_experts times this of a
    # row's tokens, and nothing from the rest.
    capacity_factor: float | None = None

    @property
    def expert_size(self) -> int:
        return self.expert_dim if self.expert_dim is not None else self.mlp_dim

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_dim if self.head_dim is not None else self.model_dim // self.num_heads


SourceName = Literal["python_stdlib", "text", "jsonl", "parquet", "array_record", "tokens"]


@dataclasses.dataclass(frozen=True)
class MixtureSource:
    """One source of data.mixture; its fields are those of `DataConfig`."""

    name: str
    source: SourceName
    paths: tuple[str, ...] = ()
    # Its share of the tokens, against the others' weights. Points of (step, weight) are joined by straight lines.
    weight: float | tuple[tuple[int, float], ...] = 1.0
    text_key: str = "text"
    prompt_key: str = ""
    messages_key: str = ""


def points_of(source: MixtureSource) -> tuple[tuple[int, float], ...]:
    """The (step, weight) points of a source's weight."""
    return source.weight if isinstance(source.weight, tuple) else ((0, source.weight),)


def weight_at(source: MixtureSource, step: float) -> float:
    """A source's weight at a step: between two points on the line that joins them, outside as at the nearest."""
    points = points_of(source)
    after = next((i for i, (at, _) in enumerate(points) if at >= step), len(points))
    if after in (0, len(points)):
        return points[min(after, len(points) - 1)][1]
    (a, low), (b, high) = points[after - 1], points[after]
    return low + (high - low) * (step - a) / (b - a)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: SourceName = "python_stdlib"
    paths: tuple[str, ...] = ()  # files or globs; none for python_stdlib
    text_key: str = "text"  # the field of a JSONL line, or column of a Parquet file, that holds the text
    prompt_key: str = ""  # the field that stands before the text and is not trained on; empty: none
    # The field of a JSONL line that holds a conversation, [{"role": ..., "content": ...}, ...], in place of a text.
    # Each message is the template filled in, \n being a line break, and only what assistants say is trained on; see
    # data/records.py.
    messages_key: str = ""
    message_template: str = r"<|{role}|>\n{content}\n"
    tokenizer: str = "bytes"  # "bytes" or the path of a Hugging Face tokenizer.json
    seq_len: int = 256
    batch_size: int = 16  # sequences per optimizer step, over all processes and micro-batches
    packing: bool = True  # False: one document a row, cut at seq_len and padded
    validation_fraction: float = 0.05  # of the documents; never trained on
    seed: int = 0  # order of the documents
    workers: int = 0  # processes that read and tokenize; 0: a thread of this one
    # A folder for tokens, made at first use and read from then on; empty: none. Compressed files and Parquet need it.
    cache: str = ""
    mixture: tuple[MixtureSource, ...] = ()  # sources by weight, in place of source, paths and keys
    on_corrupt: Literal["stop", "skip"] = "stop"  # what can't be read ends the run, or is named, counted, left out


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    optimizer: Literal["adamw", "muon"] = "adamw"
    peak_lr: float = 1e-3
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 10
    decay_fraction: float = 0.2  # wsd: the share of the steps spent going down
    final_lr_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # matrices only
    clip_norm: float | None = 1.0  # None: no clipping
    muon_lr: float = 0.02  # peak, for the matrices inside the blocks; the rest takes peak_lr with AdamW
    z_loss: float = 0.0
    accumulation_steps: int = 1
    # The first moment only. The second stays float32: in bfloat16 its small updates would be lost.
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    offload: bool = False  # the moments wait in the host's memory between updates, not in the device's
    # Also keep an exponential moving average of the weights, in float32; 0.999 is usual. Validation then uses it.
    ema_decay: float | None = None  # None: none kept


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; at most one may be -1 and takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1  # splits the tokens of a row
    expert: int = 1  # splits the experts, and the batch
    stage: int = 1  # splits the layers, through which the batch goes in parts: see stages.py
    stage_rounds: int = 1  # how often a part goes round all stages; more of them leave less idle and send more
    # Parts of the rows that a stage has: a multiple of `stage`. None: as many as divide them, up to 4 a stage.
    stage_microbatches: int | None = None
    # How attention sees past a device's own tokens; auto takes, layer by layer, what sends least: see context.py.
    context_method: Literal["auto", "all_gather", "ring", "all_to_all"] = "auto"
    # How many slices, which a slower network joins, each axis is spread over; -1: what the others leave of the slices.
    data_slices: int = -1
    fsdp_slices: int = 1
    tensor_slices: int = 1
    context_slices: int = 1
    expert_slices: int = 1
    stage_slices: int = 1
    # Gradients of the blocks' weights over `fsdp`: summed and split by XLA after their products, or sent round the ring
    # of its devices by the kernel that takes the products. For dense layers on a mesh of data and fsdp alone.
    gradient_scatter: Literal["xla", "ring"] = "xla"


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = 100  # 0: by time only; the last step is always saved
    every_minutes: float = 0.0  # on process 0's clock, from the start or the last save; 0: by steps only
    keep_last: int = 3
    keep_every: int = 0  # those at a multiple of so many steps are kept for good; 0: none
    keep_best: int = 0  # so many with the lowest validation loss, saved when they are found
    retry_minutes: float = 10.0  # how long to train on and try again when storage refuses a save; 0: stop at once
    stop_seconds: float = 120.0  # how long the last save may take after SIGTERM or Ctrl-C


@dataclasses.dataclass(frozen=True)
class RunConfig:
    workdir: str = ""  # empty: runs/<name of the config file>
    init_from: str = ""  # another run's workdir, or WORKDIR@STEP: its weights are this run's first, nothing else of it
    init_from_ema: bool = False  # the moving average that it kept of them (optim.ema_decay), in their place
    steps: int = 100
    seed: int = 0  # initial weights, dropout and sampling
    # auto: bfloat16 compute on TPU and GPU, float32 on CPU. Weights and moments are float32 in all of them.
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    implementation: Literal["auto", "reference", "xla", "pallas"] = "auto"
    # The dense products of the blocks in int8, their operands quantised as they come: forward and backward, or forward
    # alone. Weights, activations and gradients between them keep their dtypes. Not for experts.
    quantized: Literal["none", "int8", "int8_forward"] = "none"
    # The same numbers from the same command on the same devices. On a GPU kernels that add in any order, or that are
    # chosen by measuring, give way to others; on CPUs and TPUs there are none, and this changes nothing.
    deterministic: bool = False
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 8
    # A step whose loss or gradient is NaN or infinite, or a spike, changes nothing. A run lives with so many in a row;
    # one more stops it. Float16 steps that only lower the loss scale don't count.
    max_skipped: int = 3
    # A spike: a gradient norm of more than so many times the median of the last 64 updates'. 5 to 10 is usual.
    spike_factor: float | None = None  # None: nothing is a spike
    # A step, a validation batch or a save that takes longer ends the process with its threads' stacks and exit code 75;
    # until the first step four times that.
    hang_seconds: float | None = 1800.0  # None: never
    sample_tokens: int = 200
    sample_prompt: str = "def "


@dataclasses.dataclass(frozen=True)
class Config:
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
