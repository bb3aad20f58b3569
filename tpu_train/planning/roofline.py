"""Seconds that one training step needs of each resource of a device, block by block.

The roofline of Williams et al. (doi:10.1145/1498765.1498785): a block that takes f FLOPs and moves b bytes of memory
takes at least max(f / peak, b / bandwidth) seconds, and is bound by memory where its intensity f / b lies below
peak / bandwidth; traffic between devices is a third resource (How to Scale Your Model, jax-ml.github.io/scaling-book,
chapters 1 and 5). Bytes: every operand of a product or of an elementwise step is read once and every result written
once, in the compute dtype unless said; fusion moves fewer, spilling more.

M tokens of a micro-batch on a device, A micro-batches, c bytes of the compute dtype, t = tensor; dims as in
config/fields.py.
"""

import dataclasses
import math

from tpu_train.chips import Fleet
from tpu_train.config import Config, ModelConfig, UserError
from tpu_train.flops import forward_flops_per_token, layer_params, train_flops_per_token
from tpu_train.layout import AXES
from tpu_train.planning import experts, memory, network
from tpu_train.planning.memory import FLOAT32
from tpu_train.planning.split import Split


@dataclasses.dataclass(frozen=True)
class Block:
    """What a part of the step asks of one device, in a whole step: FLOPs, bytes of memory, seconds of traffic.

    `fast` and `slow`: seconds on the networks within and between slices, by mesh axis.
    """

    name: str
    flops: float
    bytes: float
    fast: dict[str, float]
    slow: dict[str, float]
    compute: float  # seconds
    memory: float  # seconds; 0 where the bandwidth is unknown

    @property
    def network(self) -> float:
        return sum(self.fast.values()) + sum(self.slow.values())

    @property
    def intensity(self) -> float:
        """FLOPs for each byte of memory."""
        return self.flops / self.bytes

    @property
    def seconds(self) -> float:
        """If its three resources work at the same time."""
        return max(self.compute, self.memory, self.network)

    @property
    def bound(self) -> tuple[str, float]:
        """The resource that takes longest ("unknown" if none is known), and how many times as long as the next."""
        times = sorted(((getattr(self, name), name) for name in ("compute", "memory", "network")), reverse=True)
        (longest, name), (second, _) = times[:2]
        return name if longest else "unknown", longest / second if second else float("inf")


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step on one device. `unknown` names what the table has no number for and so counts as free."""

    blocks: tuple[Block, ...]
    useful_flops: float  # what the MFU counts, on one device
    peak: float
    unknown: tuple[str, ...]

    @property
    def work(self) -> float:
        """Seconds of the device itself: each block as long as the slower of its products and its memory."""
        return sum(max(block.compute, block.memory) for block in self.blocks)

    @property
    def network(self) -> float:
        return sum(block.network for block in self.blocks)

    @property
    def best(self) -> float:
        """Seconds if all traffic is hidden behind work, or all work behind traffic."""
        return max(self.work, self.network)

    @property
    def worst(self) -> float:
        """Seconds if nothing overlaps."""
        return self.work + self.network

    @property
    def most_mfu(self) -> float:
        return self.useful_flops / self.peak / self.best

    def by_axis(self) -> dict[str, tuple[float, float]]:
        """Seconds on the fast and the slow network, for each mesh axis."""
        return {
            axis: (sum(block.fast[axis] for block in self.blocks), sum(block.slow[axis] for block in self.blocks))
            for axis in AXES
        }


def step(config: Config, split: Split, fleet: Fleet) -> Step:
    """The step of `config`, cut as `split` says. Raises UserError where the chip's peak at this dtype is unknown."""
    peak = fleet.chip.flops(split.dtype)
    if peak is None:
        raise UserError(f"the table has no {split.dtype} peak of {fleet.chip.name}; set run.precision=bfloat16")
    bandwidth = fleet.chip.per_device("memory_bytes")
    axes = network.axes(fleet, split.sizes, split.slices)
    unknown = [] if bandwidth else ["memory bandwidth"]
    unknown += [f"network of {name}" for name, axis in axes.items() if axis.unknown]
    blocks = []
    for name, flops, moved, traffic in _work(config, split, axes):
        fast = {axis: traffic.get(axis, (0.0, 0.0))[0] for axis in axes}
        slow = {axis: traffic.get(axis, (0.0, 0.0))[1] for axis in axes}
        blocks.append(Block(name, flops, moved, fast, slow, flops / peak, moved / bandwidth if bandwidth else 0.0))
    tokens = config.data.batch_size * config.data.seq_len / split.devices
    useful = tokens * train_flops_per_token(config.model, config.data.seq_len)
    return Step(tuple(blocks), useful, peak, tuple(unknown))


Traffic = dict[str, tuple[float, float]]
SHARDS = ("expert", "fsdp", "context", "stage")  # that split a weight, the one that brings most together first


def _work(config: Config, split: Split, axes: dict[str, network.Axis]) -> list[tuple[str, float, float, Traffic]]:
    """(block, FLOPs, bytes, traffic by axis) on one device in a step."""
    model, A, c, t = config.model, split.accumulation, split.width, split.tensor
    M = split.tokens(config)
    L, D, V = model.num_layers, model.model_dim, model.vocab_size
    N, K, H, F = model.num_heads / t, model.kv_heads / t, model.head_size, model.mlp_dim / t
    forward = {name: flops * M / t for name, flops in forward_flops_per_token(model, config.data.seq_len).items()}
    each, table = layer_params(model), V * D / t
    # What is computed twice: all of a layer under full, all but its products under dots (those inside the gated kernel
    # too); never the last product of a group, which its gradient does not read.
    forwards = 1 if split.remat == "none" else 2
    first = 2 if model.gated_mlp else 1
    products = 4 if split.remat == "full" else 3
    of_mlp: float = products
    if split.remat == "full":
        of_mlp -= 1 / (first + 1) / len(model.window_pattern)
    elif split.remat in ("dots", "offload_dots") and model.gated_mlp:
        of_mlp += first / (first + 1)
    ends = (N + 2 * K) * H + 3 * D + N * H + D
    # In a pipeline a layer's weights are read for each of its turns, and ticks without work take as long as others.
    idle, reads = (1.0, 1.0) if split.stage == 1 else (split.schedule.ticks / split.schedule.busy, split.layers)
    attention_bytes = products * c * (reads * each["attention"] / t + idle * M * ends)
    # Heads: q and o forward; q, o, and the gradients of both backward. Keys and values likewise.
    kernel_bytes = idle * c * M * H * (forwards * (2 * N + 2 * K) + 4 * N + 4 * K)
    mlp = of_mlp * forward["mlp"]
    mlp_bytes = of_mlp * c * (reads * each["mlp"] / t + idle * M * (first * (D + F) + F + D))
    if model.num_experts:
        mlp = M / t * experts.flops(model, forwards, products, of_mlp)
        mlp_bytes = experts.bytes_moved(model, split, M, config.data.seq_len, forwards)
        F = 0.0  # their activation is in it
    # Norms: read and write; back: read two, write one. Residuals: read two, write one, both ways. Rotary: q and k.
    light = c * M * (2 * D * (2 * forwards + 3) + 2 * D * 3 * 2 + 2 * (N + K) * H * (forwards + 1))
    light += c * M * F * ((first + 1) * forwards + 2 * first + 1)
    light *= idle
    rows, columns = memory.head_shape(model, split, M)
    chunks = -(-rows // memory.chunk_tokens(model, split, M))
    head_bytes = (
        chunks * (3 * c + 2 * FLOAT32) * columns * D + rows * columns * (5 * FLOAT32 + 3 * c) + 3 * c * rows * D
    )
    traffic = _traffic(config, split, axes)
    state = memory.sharded_params(model, split)
    kept = memory.moments(config, split) + memory.average(config, split)
    update = 4 * FLOAT32 * state + FLOAT32 * state + 2 * kept
    counting = A * experts.counts_first(model, A)  # one more forward pass, for the loads of all micro-batches
    return [
        (
            "projections",
            (A * idle * products + counting) * forward["projections"],
            A * L * attention_bytes,
            traffic["projections"],
        ),
        # The backward kernel takes five products for the forward's two (arXiv:2307.08691, section 2.3).
        (
            "attention",
            (A * idle * (forwards + 2.5) + counting) * forward["attention"],
            A * L * kernel_bytes,
            traffic["attention"],
        ),
        (
            "experts" if model.num_experts else "mlp",
            A * idle * mlp + counting * forward["mlp"],
            A * L * mlp_bytes,
            traffic["mlp"],
        ),
        ("norms, rotary, activation", 0.0, A * L * light, {}),
        # Rows are read and written in float32, both ways; the gradient starts as zeros of the table's own slice.
        ("embedding", 0.0, A * (4 * FLOAT32 * M * D + FLOAT32 * table / split.shards), traffic["embedding"]),
        # The backward pass takes the logits again: four products where the MFU counts three.
        ("head and loss", A * 4 * forward["head"], A * head_bytes, traffic["head"]),
        ("update", 0.0, update + A * c * state, {}),
        *([("stages", 0.0, A * _stage_bytes(model, split, each), traffic["stages"])] if split.stage > 1 else []),
    ]


def _stage_bytes(model: ModelConfig, split: Split, each: dict[str, int]) -> float:
    """Bytes of memory that stages add: a stage's layers cast and exchanged once, and gradients added in every turn."""
    matrices = model.num_layers * (each["attention"] + each["mlp"]) / split.tensor
    once, turn = (FLOAT32 + 3 * split.width) / split.shards, 2 * FLOAT32 * split.layers / (split.fsdp * split.context)
    return matrices * (once + turn)


def _traffic(config: Config, split: Split, axes: dict[str, network.Axis]) -> dict[str, Traffic]:
    """Seconds by block and axis in a step.

    fsdp: weights are gathered in the compute dtype forward, and again backward unless remat is none; their gradients
        are scattered in it. Rows of the embedding are exchanged. The head is gathered and its gradient scattered in
        float32; or its slices are exchanged, the tokens gathered, and their float32 gradient all-reduced.
    context: the same, of the part of a weight that fsdp does not bring; and attention (network.attention).
    expert: the same, of all but the experts' weights; and the rows of all tokens' choices, to the experts and back. (A
        router counts in the compute dtype, and is float32.)
    data: what both leave of a gradient is all-reduced, at the same width.
    stage: outside the blocks as fsdp. In them a weight is gathered over fsdp and context in every turn, and the stages
        exchange the weights and their gradients once, send a micro-batch on in every tick, forward and backward, and
        share out the rows before and after, both ways.
    tensor: one all-reduce of [M, D] for each half of a layer, forward and backward; attention's again under full, whose
        MLP needs its output. The embedding's rows and the head's float32 dx are summed once. What XLA sums together,
        the gradients through q, k and v for one, counts once.
    """
    model, tokens = config.model, split.tokens(config)
    A, c, t, D, L = split.accumulation, split.width, split.tensor, model.model_dim, model.num_layers
    turns, at_once = split.layers, split.tokens_at_once(config)
    gathers = 1 if split.remat == "none" else 2
    each, table = layer_params(model), model.vocab_size * D / t

    def over_shards(kind: str, size: float, names: tuple[str, ...] = SHARDS) -> Traffic:
        """A gather, a reduction or an exchange over all that share a weight, one axis after the other."""
        found, part = {}, size
        whole = math.prod(axes[name].size for name in names)
        for name in names:
            found[name] = getattr(axes[name], kind)(size * axes[name].size / whole if kind == "exchange" else part)
            part /= axes[name].size
        return found

    def weights(size: float, times: float, width: int, names: tuple[str, ...] = SHARDS) -> Traffic:
        """Gathers and scatters over `names`, so many in all, and the all-reduce of what is left of a gradient."""
        shard = size * width / math.prod(axes[name].size for name in {*names, "stage"})
        return _each(A * times, over_shards("gather", size * width, names)) | {
            "data": _times(A, axes["data"].reduce(shard))
        }

    def of_experts() -> Traffic:
        """Whole experts gather over fsdp and context alone; the rest of the mixture as any weight; rows cross."""
        whole = experts.matrices(model, model.num_experts / split.expert) / t
        rest = experts.matrices(model, model.num_shared_experts) / t + experts.router_weights(model)
        rows = c * tokens * model.experts_per_token * D * split.expert
        crossing = _each(A * L * experts.exchanges(gathers), {"expert": axes["expert"].exchange(rows)})
        return _sum(
            [weights(L * whole, gathers + 1, c, SHARDS[1:3]), weights(L * rest, gathers + 1, c, SHARDS[:3]), crossing]
        )

    def of_blocks(size: float) -> Traffic:
        return weights(size, turns * (gathers + 1), c, SHARDS[:3])

    def sums(times: float, tokens: int) -> Traffic:
        return {"tensor": _times(A * times, axes["tensor"].reduce(c * tokens * D))}

    half = 3 if split.remat == "full" else 2
    own = {"data": _times(A, axes["data"].reduce(FLOAT32 * table / split.shards))}
    rows, _ = memory.head_shape(model, split, tokens)
    shared = c * tokens * split.shards * D  # of all tokens that share the weights
    head = weights(table, 2, FLOAT32)
    if rows > tokens:
        moves = [over_shards("gather", shared), over_shards("reduce", FLOAT32 * rows * D)]
        moves += 2 * [over_shards("exchange", FLOAT32 * table)]
        head = own | _each(A, _sum(moves))
    attention: Traffic = {}
    if split.context > 1:
        layers = split.attention(model, at_once, config.data.seq_len)
        times = A * L * turns / len(layers)
        attention = _each(times, _sum([{"context": network.attention(axes["context"], *layer)} for layer in layers]))
    stage = axes["stage"]
    stacks = c * L * (each["attention"] + each["mlp"]) / t / (split.fsdp * split.context)
    moves = [
        _each(2, {"stage": stage.exchange(stacks)}),
        _each(4, {"stage": stage.gather(c * split.stage * tokens * D)}),
        _each(2 * split.schedule.ticks, {"stage": stage.permute(c * at_once * D)}),
    ]
    mlp = of_experts() if model.num_experts else of_blocks(L * each["mlp"] / t)
    return {
        "projections": of_blocks(L * each["attention"] / t) | sums(L * turns * half, at_once),
        "mlp": mlp | sums(L * turns * 2, at_once),
        "attention": attention,
        "stages": _each(A, _sum(moves)),
        "embedding": own | _each(2 * A, over_shards("exchange", shared)) | sums(1, tokens),
        "head": head | {"tensor": _times(A, axes["tensor"].reduce(FLOAT32 * rows * D))},
    }


def _times(factor: float, seconds: tuple[float, float]) -> tuple[float, float]:
    return factor * seconds[0], factor * seconds[1]


def _each(factor: float, traffic: Traffic) -> Traffic:
    return {axis: _times(factor, seconds) for axis, seconds in traffic.items()}


def _sum(moves: list[Traffic]) -> Traffic:
    found: Traffic = {}
    for axis, (fast, slow) in (pair for move in moves for pair in move.items()):
        before = found.get(axis, (0.0, 0.0))
        found[axis] = before[0] + fast, before[1] + slow
    return found
