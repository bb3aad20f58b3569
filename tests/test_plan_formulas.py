"""The plan's formulas of network, roofline, cost and advice: cases worked by hand, limits and monotonicity."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_train import chips, context, layout
from tpu_train.config import Config, DataConfig, ModelConfig, OptimConfig, UserError
from tpu_train.flops import num_params, train_flops_per_token
from tpu_train.planning import advice, cost, memory, network, roofline, units, why
from tpu_train.planning.split import Split

# D 8, N 2, K 1, H 4, F 16, V 32, two layers; rows of 4 tokens.
TINY = Config(
    model=ModelConfig(vocab_size=32, num_layers=2, model_dim=8, num_heads=2, num_kv_heads=1, mlp_dim=16),
    data=DataConfig(seq_len=4, batch_size=4),
)
LLAMA_8B = ModelConfig(128_256, 32, 4096, 32, 8, None, 14_336, tie_embeddings=False)


def large(rows=1024, seq_len=4096, model=LLAMA_8B, **optim):
    return Config(model=model, data=DataConfig(seq_len=seq_len, batch_size=rows), optim=OptimConfig(**optim))


def test_memory_of_a_case_worked_by_hand():
    # A layer: attention 8*4*(2+2) + 2*4*8 = 192, MLP 3*8*16 = 384, norms 16. Matrices 2*576 + 256 = 1408, norms 40.
    split = Split(fsdp=2, remat="full")  # 2 rows, so M = 8 tokens on a device
    assert memory.sharded_params(TINY.model, split) == 1408 / 2 + 40
    assert memory.moments(TINY, split) == 744 * 8
    # An input of 8 x 8 bfloat16, 128; q, k, v 8*16*2 = 256, out 128; the gated kernel keeps nothing.
    assert memory.kept_by_layer(TINY.model, split, 8) == 128
    assert memory.kept_by_layer(TINY.model, Split(fsdp=2, remat="dots"), 8) == 128 + 256 + 128
    # And three float32 of 8 x 8 for the final norm.
    assert memory.activations(TINY, split) == 2 * 128 + 3 * 256
    assert memory.cache_bytes_per_token(TINY.model, 2) == 2 * 2 * 1 * 4 * 2
    # The worst moment is in the blocks. Gradients: of the blocks' matrices 2 bytes of half of 2 * 576, of their norms 4
    # of 32; of the embedding 4 of half of 256, of the last norm 4 of 8. Computed again, of one layer: weights
    # 2*576, the norms' results 4*2*64, heads 2*8*32, lse 64, MLP 3*2*8*16, statistics 16*8 + 4*16. Backward: the MLP's
    # hidden gradients, as large as what it keeps, and that of a weight of 8*16.
    parts = memory.training(TINY, split).parts
    assert parts["transient"] == (1152 + 512 + 512 + 64 + 768 + 192) + 768 + 2 * 8 * 16
    assert (parts["gradients"], parts["activations"], parts["logits"]) == (1152 + 128 + 512 + 32, 2 * 128, 0)
    # With a wide vocabulary it is in the loss. Few tokens: two devices bring their 8 each to half of the head, 6 bytes
    # a weight, with their bfloat16 hidden states and the gradient of these. Many: the head comes to the tokens.
    wide = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, vocab_size=2**13))
    few, many = wide, dataclasses.replace(wide, data=DataConfig(seq_len=4, batch_size=4096))
    assert memory.training(few, split).peak_in == "loss"
    assert memory.training(few, split).transient == 6 * 2**12 * 8 + 2 * 2 * 16 * 8
    assert memory.training(few, split).logits == 16 * 2**12 * 6
    assert memory.training(many, split).transient == 6 * 2**13 * 8
    assert memory.training(many, split).logits == 2**13 * 2**13 * 6


def test_a_step_worked_by_hand():
    step = roofline.step(TINY, Split(fsdp=2), chips.parse("v5e-2"))
    blocks = {block.name: block for block in step.blocks}
    # 8 tokens. Forward FLOPs of a token: 2*2*192, 4*2*4 * 2.5 keys * 2 layers, 2*2*384, 2*8*32.
    assert {name: block.flops / 8 for name, block in blocks.items() if block.flops} == {
        "projections": 3 * 768,
        "attention": 3.5 * 160,
        "mlp": 3 * 1536,
        "head and loss": 4 * 512,
    }
    # Three passes over 192 weights and in- and outputs of 8+8, 8+4, 8+4, 8+8 columns; bfloat16, two layers.
    assert blocks["projections"].bytes == 2 * 3 * 2 * (192 + 8 * 56)
    assert blocks["mlp"].bytes == 2 * 3 * 2 * (384 + 8 * (24 + 24 + 24))
    # q, o, do, dq and twice more of 8 columns in all: forward q, o, k, v; backward q, o, do, dq, k, v, dk, dv.
    assert blocks["attention"].bytes == 2 * 2 * 8 * (2 * 8 + 2 * 4 + 4 * 8 + 4 * 4)
    # Half of each matrix crosses one link of 50 GB/s: gathered once and scattered once.
    assert blocks["mlp"].fast == {"fsdp": pytest.approx(2 * 2 * 384 * 2 / 2 / 50e9)} | dict.fromkeys(
        ("data", "stage", "expert", "context", "tensor"), 0
    )
    # 16 tokens are fewer than 32 columns: halves of the float32 head are exchanged, there and back, 16 bfloat16 hidden
    # states gathered, their float32 gradients all-reduced. The embedding's rows are exchanged, there and back.
    sent = 2 * 256 * 4 / 2 / 4 + 16 * 8 * 2 / 2 + 2 * 16 * 8 * 4 / 2
    assert blocks["head and loss"].network == pytest.approx(sent / 50e9)
    assert blocks["embedding"].network == pytest.approx(2 * 16 * 8 * 2 / 2 / 4 / 50e9)
    assert blocks["attention"].network == 0
    assert blocks["mlp"].compute == blocks["mlp"].flops / 197e12
    assert blocks["mlp"].memory == blocks["mlp"].bytes / 819e9
    assert blocks["update"].bytes == 744 * (4 * 5 + 2 * 8 + 2)
    # Recomputed, all products but down take a fourth pass: q, k, v, output; gate and up, 2 of 3.
    full = {
        block.name: block for block in roofline.step(TINY, Split(fsdp=2, remat="full"), chips.parse("v5e-2")).blocks
    }
    assert full["projections"].flops == 8 * 4 * 768
    assert full["mlp"].flops == pytest.approx(8 * (3 + 2 / 3) * 1536)
    assert full["attention"].flops == 8 * 4.5 * 160
    assert full["head and loss"].flops == blocks["head and loss"].flops
    assert step.useful_flops == 8 * train_flops_per_token(TINY.model, 4)


@pytest.mark.parametrize(
    ("text", "sizes", "gigabytes"),
    [
        # Sides 4, 8, 8, all rings of two links of 100 GB/s; fsdp has two sides.
        ("v5p-256", {"data": 1, "fsdp": 64, "tensor": 4}, {"fsdp": 400, "tensor": 200}),
        ("v5p-256", {"data": 8, "fsdp": 8, "tensor": 4}, {"data": 200, "fsdp": 200, "tensor": 200}),
        # A side of 4 is no ring on v5e, one of 16 is.
        ("v5e-16", {"data": 1, "fsdp": 4, "tensor": 4}, {"fsdp": 50, "tensor": 50}),
        ("v5e-256", {"data": 1, "fsdp": 16, "tensor": 16}, {"fsdp": 100, "tensor": 100}),
        # Half a side is no ring, whatever the side was; 32 takes a side and the rest of the other.
        ("v5e-256", {"data": 1, "fsdp": 32, "tensor": 8}, {"fsdp": 150, "tensor": 50}),
        # Two devices share a chip's links.
        ("7x:2x2x1", {"data": 1, "fsdp": 4, "tensor": 2}, {"fsdp": 100, "tensor": 50}),
        ("h100-8", {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 450, "fsdp": 450, "tensor": 450}),
    ],
)
def test_axes_get_their_sides_of_the_torus(text, sizes, gigabytes):
    axes = network.axes(chips.parse(text), sizes)
    assert {name: axes[name].fast_bytes / 1e9 for name in gigabytes} == gigabytes


# 2 rows of 64 tokens over 4 devices, 8 query and 4 key heads of 16, bfloat16: keys and values of a row's 64 tokens are
# 2 * 2 * 64 * 4 * 16 * 2 = 32768 bytes, queries and outputs twice that.
ROW = context.Layer(4, 2, 64, 8, 4, 16, 2)


@pytest.mark.parametrize(
    ("method", "change", "wanted"),
    [
        # Gathered forward, scattered backward; recomputed, gathered twice.
        ("all_gather", {}, 2 * 32768 * 3 / 4),
        ("all_gather", {"forwards": 2}, 3 * 32768 * 3 / 4),
        # A fourth of all four, of which a device keeps a fourth.
        ("all_to_all", {}, 2 * 3 * 32768 / 4 * 3 / 4),
        # Over three links, twice; float32 gradients over three, and home over a fourth in bfloat16.
        ("ring", {}, 32768 / 4 * (2 * 3 + 2 * 3 + 1)),
        ("ring", {"forwards": 2}, 32768 / 4 * (3 * 3 + 2 * 3 + 1)),
        # Chunks of 8, so stops 0, 1 and 3: one link, then two; and one home.
        ("ring", {"window": 9}, 32768 / 4 * (2 * 3 + 2 * 3 + 1)),
        ("ring", {"devices": 2}, 32768 / 2 * (2 * 1 + 2 * 1 + 1)),
        ("ring", {"devices": 16, "tokens": 256, "window": 3}, 4 * 32768 / 16 * (2 * 3 + 2 * 3 + 1)),
    ],
)
def test_what_attention_sends_along_context(method, change, wanted):
    assert context.sent(method, dataclasses.replace(ROW, **change)) == wanted


def test_auto_takes_what_sends_least_and_gathers_not_too_much():
    choose = lambda asked="auto", has_ring=True, **change: context.choose(  # noqa: E731
        asked, dataclasses.replace(ROW, **change), has_ring
    )
    assert choose() == "all_to_all"
    assert choose(num_kv_heads=2) == "all_gather"  # heads no longer divide
    assert choose(num_heads=64, num_kv_heads=4) == "all_gather"
    assert choose(devices=16, tokens=256, num_kv_heads=2, window=3) == "ring"  # neighbours alone
    long = {"tokens": 2**20, "num_kv_heads": 2}
    assert dataclasses.replace(ROW, **long).kv_bytes == 2**28
    assert choose(**long) == "all_gather"
    assert choose(**long | {"rows": 3}) == "ring"
    assert choose(**long | {"rows": 3}, has_ring=False) == "all_gather"
    assert choose("ring") == "ring"


def test_a_ring_goes_one_way_and_a_gather_both():
    axis = network.axes(chips.parse("v5e-256"), {"data": 1, "fsdp": 16, "context": 16, "tensor": 1})["context"]
    assert (axis.fast_bytes, axis.link_bytes) == (100e9, 50e9)
    layer = dataclasses.replace(ROW, devices=16, tokens=4096)
    assert network.attention(axis, "ring", layer) == (pytest.approx(context.sent("ring", layer) / 50e9), 0)
    assert network.attention(axis, "all_gather", layer)[0] == pytest.approx(context.sent("all_gather", layer) / 100e9)
    exchanged = network.attention(axis, "all_to_all", layer)[0]
    assert exchanged == pytest.approx(2 * layer.qkvo_bytes * 15 / 16 / 100e9 / 4)


def test_weights_cross_both_axes_that_share_them():
    """Two stages: over context a part of the matrix, over fsdp all of it; in sum, all but the device's own part."""
    fleet = chips.parse("v5e-4")
    config = dataclasses.replace(TINY, data=DataConfig(seq_len=16, batch_size=4))
    blocks = {block.name: block for block in roofline.step(config, Split(fsdp=2, context=2), fleet).blocks}
    assert blocks["mlp"].fast["fsdp"] == pytest.approx(2 * 2 * 384 * 2 / 2 / 50e9)
    assert blocks["mlp"].fast["context"] == pytest.approx(2 * 2 * 384 * 2 / 2 / 2 / 50e9)
    # 2 rows of 16 tokens, one key head of 4: keys and values of 512 bytes, gathered and scattered in each layer.
    assert blocks["attention"].fast["context"] == pytest.approx(2 * 2 * 512 / 2 / 50e9)
    assert blocks["attention"].fast["fsdp"] == 0


def test_long_rows_are_spread_along_context():
    """More devices than rows and heads: only a part of a row each is left."""
    config, fleet = large(1, 2**18), chips.parse("v5p-128")
    best = advice.best(config, fleet)
    assert best.fits
    assert best.split.context >= 16
    assert f"mesh.context={best.split.context}" in why.settings(best, config)
    assert any(reason.startswith("context=") for reason in why.reasons(config, fleet, best))
    assert advice.least_batch(large(3, 2**18), fleet) == 1


@given(st.integers(1, 500), st.floats(1, 1e12), st.floats(1e6, 1e12))
def test_gathering_tends_to_the_array_over_the_bandwidth(size, volume, speed):
    seconds, slow = network.Axis("fsdp", size, 1, speed, None).gather(volume)
    more, _ = network.Axis("fsdp", size + 1, 1, speed, None).gather(volume)
    assert slow == 0
    assert seconds <= more <= volume / speed
    assert seconds == 0 if size == 1 else seconds >= volume / speed / 2


@settings(deadline=None)
@given(
    st.sampled_from(["v4", "v5e", "v5p", "v6e", "7x", "h100", "b200"]),
    st.sampled_from([(1, 8, 1), (2, 4, 1), (1, 2, 4), (8, 1, 1), (1, 1, 8)]),
    st.sampled_from(["none", "dots", "full"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([64, 256]),
)
def test_a_step_lies_between_its_bounds(chip, mesh, remat, micro, rows):
    fleet = chips.Fleet(chips.CHIPS[chip], (8,) if chip in ("h100", "b200") else (2, 4 // chips.CHIPS[chip].devices))
    split = Split(*mesh, micro, remat)
    step = roofline.step(large(rows, 1024), split, fleet)
    assert step.best <= step.worst <= 2 * step.best
    assert 0 < step.most_mfu <= 1
    assert step.useful_flops <= sum(block.flops for block in step.blocks)
    assert sum(map(sum, step.by_axis().values())) == pytest.approx(step.network)
    assert [*step.by_axis()] == [*split.sizes]
    for axis, (fast, slow) in step.by_axis().items():
        assert (fast > 0) == (split.sizes[axis] > 1)
        assert slow == 0
    for block in step.blocks:
        name, times = block.bound
        assert getattr(block, name) == block.seconds
        assert times >= 1
    if split.tensor == 1:  # only weights travel, as often whatever the batch
        bigger = roofline.step(large(2 * rows, 1024), split, fleet)
        assert bigger.network / bigger.work <= step.network / step.work * 1.0001


def test_data_parallel_meets_the_book_s_rule():
    """Traffic equals work where a device has peak / bandwidth tokens: B / X = C / W (scaling book, chapter 5).

    Of the gradients and the backward products alone: an all-reduce of 2 bytes a weight against 4 FLOPs a weight and
    token.
    """
    fleet = chips.parse("v5e-256")
    axis = network.axes(fleet, {"data": 256, "fsdp": 1, "tensor": 1})["data"]
    tokens = fleet.chip.bf16_flops / axis.fast_bytes
    weights = 1e9
    assert axis.reduce(2 * weights)[0] == pytest.approx(4 * weights * tokens / fleet.chip.bf16_flops, rel=1 / 200)


def test_one_device_sends_nothing_and_is_never_dominated():
    choice = advice.best(TINY, chips.parse("v5e-1"))
    assert choice.step.network == 0
    assert choice.split.devices == 1
    assert advice.dominated_from([advice.Point(1, 1.0, 0.0, 0.5)]) is None
    assert advice.dominated_from([advice.Point(1, 1.0, 0.0, 0.5), advice.Point(2, 0.5, 0.6, 0.4)]) == 2


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["v5p-16", "v5e-16", "v6e-8", "h100-16", "7x-4"]), st.sampled_from([16, 64, 96]))
def test_the_best_way_fits_divides_and_is_the_fastest_that_does(text, rows):
    config = large(rows, 2048, ModelConfig(32_000, 24, 2048, 16, 4, None, 5632))
    fleet = chips.parse(text)
    best = advice.best(config, fleet)
    assert best.fits
    assert best.split.devices == fleet.devices
    for split in advice.splits(config, fleet):
        other = advice.weigh(config, fleet, split)
        assert not other.fits or other.seconds >= best.seconds


def test_where_nothing_fits_the_least_is_given_and_a_number_of_chips_that_does():
    config, fleet = large(16, 4096), chips.parse("v5e-4")
    best = advice.best(config, fleet)
    assert not best.fits
    enough = advice.enough_chips(config, fleet)
    assert enough > 4
    assert advice.best(config, chips.parse(f"v5e-{enough}")).fits
    assert not advice.best(config, chips.parse(f"v5e-{enough // 2}")).fits


def test_a_batch_too_small_is_told_the_smallest_that_spreads():
    config, fleet = large(3, 1024), chips.parse("v5e-64")
    assert advice.best(config, fleet) is None
    least = advice.least_batch(config, fleet)
    assert least == 8  # 8 key heads at most along tensor
    assert advice.best(large(least, 1024), fleet) is not None


def test_the_suggested_batch_hides_traffic():
    config, fleet = large(64, 512, ModelConfig(32_000, 8, 1024, 8, 8, None, 4096)), chips.parse("v5e-64")
    assert advice.best(config, fleet).step.network > advice.best(config, fleet).step.work
    rows, choice = advice.enough_batch(config, fleet)
    assert choice.step.network <= choice.step.work
    smaller = advice.best(large(rows // 2, 512, config.model), fleet)
    assert smaller.step.network > smaller.step.work


def test_scaling_ends_where_the_batch_has_no_more_rows():
    points = advice.curve(large(32, 2048), chips.parse("v5p-8"))
    assert points[-1].chips == 32 * 8  # 32 rows times 8 key heads
    assert [point.chips for point in points] == sorted({point.chips for point in points})
    assert all(a.work > b.work for a, b in itertools.pairwise(points))


def test_cost_of_a_case_worked_by_hand():
    # 256 chips of 459 TFLOP/s at 40 %: 4.7e16 FLOP/s.
    fleet = chips.parse("v5p-256")
    fast = roofline.Step((roofline.Block("all", 1.0, 1.0, {}, {}, 1 / 459e12, 0.0),), 1.0, 459e12, ())
    spent = cost.cost(fast, fleet, 1e10, 1e12, 0.4, 500.0, 4.2)
    assert spent.hours == pytest.approx(1e22 / (256 * 459e12 * 0.4) / 3600)
    assert spent.chip_hours == pytest.approx(256 * spent.hours)
    assert spent.kwh == pytest.approx(spent.chip_hours * 0.5)
    assert spent.usd == pytest.approx(spent.chip_hours * 4.2)
    assert cost.cost(fast, fleet, 1e10, 1e12, 0.4, None, None).kwh is None


def test_cost_counts_on_no_more_than_the_roofline_allows():
    slow = roofline.Step((roofline.Block("all", 1.0, 1.0, {}, {}, 1.0, 4.0),), 1.0, 1.0, ())
    assert slow.most_mfu == 0.25
    assert cost.cost(slow, chips.parse("v5e-1"), 1.0, 1.0, 0.9, None, None).mfu == 0.25


@pytest.mark.parametrize(
    ("name", "change"),
    [("mfu", {"mfu": 0.0}), ("mfu", {"mfu": 1.5}), ("tokens", {"tokens": 0.0}), ("tokens", {"tokens": math.inf}),
     ("watts", {"watts": -1.0}), ("price", {"usd": math.nan})],
)  # fmt: skip
def test_cost_refuses_numbers_out_of_range(name, change):
    step = roofline.Step((), 1.0, 1.0, ())
    given_ = {"tokens": 1.0, "mfu": 0.4, "watts": None, "usd": None} | change
    with pytest.raises(UserError, match=f"--{name}="):
        cost.cost(step, chips.parse("v5e-1"), 1.0, **given_)


def test_twenty_tokens_a_parameter_is_its_own_optimum():
    size = num_params(LLAMA_8B)
    hint = cost.optimal(LLAMA_8B, 20 * size)
    assert hint.tokens == 20 * size
    assert hint.params == pytest.approx(size)
    # Chinchilla has 70 billion for 1.4 trillion tokens, from the compute of Gopher's 280 billion on 300 billion.
    assert cost.optimal(LLAMA_8B, 280e9 * 300e9 / size).params == pytest.approx(65e9, rel=0.01)


@pytest.mark.parametrize("chip", ["v5e-16", "h100-8", "mi300x-8", "cpu-1"])
def test_a_suggestion_is_one_that_the_trainer_takes(chip):
    config = large(64, 256, ModelConfig(512, 4, 64, 8, 4, None, 128))
    choice = advice.best(config, chips.parse(chip))
    layout.check_fits(advice._cut(config, choice.split.accumulation), choice.split.sizes)


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (units.count_text(0), "0"),
        (units.count_text(0.133), "0.133"),
        (units.count_text(999.7), "1000"),
        (units.count_text(1000), "1k"),
        (units.count_text(8_030_261_248), "8.03G"),
        (units.count_text(7.7e23), "770Z"),
        (units.bytes_text(15.75 * 2**30), "15.8 GiB"),
        (units.bytes_text(0), "0 B"),
        (units.seconds_text(0), "0 s"),
        (units.seconds_text(3e-7), "0.3 us"),
        (units.seconds_text(0.0456), "45.6 ms"),
        (units.seconds_text(119), "119 s"),
        (units.seconds_text(7200), "2.0 h"),
        (units.plain_text(0.0366), "0.03660"),
        (units.plain_text(5_854_912.69), "5,854,913"),
        (units.known(None, str), "unknown"),
    ],
)
def test_numbers_are_shown_for_people(shown, wanted):
    assert shown == wanted
