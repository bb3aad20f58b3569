"""Measured block sizes: taken where they are near and can be, and nothing changes without them."""

import dataclasses

import pytest

from pallas_kernels import tuned
from pallas_kernels.attention import blocks as attention_blocks
from pallas_kernels.cross_entropy import blocks as loss_blocks
from pallas_kernels.grouped_matmul import blocks as grouped_blocks
from pallas_kernels.matmul import blocks as matmul_blocks
from pallas_kernels.runtime import CHIPS

V5E, V5P = CHIPS["v5e"], CHIPS["v5p"]


# What choose says where nothing was measured: the table that ships.
def sizes_of_all(chip):
    problem = matmul_blocks.Problem(1000, 1500, 640, 2, 2, 2, factors=True)
    return {
        "attention": attention_blocks.choose(1000, 1000, 64, 64, 2, chip),
        "matmul": matmul_blocks.choose("dx", problem, chip),
        "grouped": grouped_blocks.choose("dx", grouped_blocks.Problem(1000, 1500, 640, 8, 2), chip),
        "loss": loss_blocks.choose(loss_blocks.Shape(1000, 640, 5000, 2, 4), chip),
    }


@pytest.fixture
def table(tmp_path, monkeypatch):
    """An empty table for this test."""
    monkeypatch.setattr(tuned, "FILE", tmp_path / "tuned.json")
    tuned.table.cache_clear()
    yield tmp_path / "tuned.json"
    tuned.table.cache_clear()


@pytest.mark.skipif(tuned.table() != {}, reason="sizes were measured: choose follows them")
def test_an_empty_table_changes_nothing():
    assert tuned.FILE.read_text() == "{}\n"
    for chip in CHIPS.values():
        assert sizes_of_all(chip)["attention"] == attention_blocks._by_model(1000, 1000, 64, 64, 2, chip)
        assert sizes_of_all(chip)["loss"] == loss_blocks._by_model(loss_blocks.Shape(1000, 640, 5000, 2, 4), chip)


def test_measured_sizes_are_taken_for_the_shape_and_near_ones_of_that_chip_alone(table):
    before, other = sizes_of_all(V5E), sizes_of_all(V5P)
    cut = attention_blocks.Cut(128, 128, 1)
    sizes = attention_blocks.BlockSizes(256, 512, 1024, cut, cut)
    exact, near = attention_blocks.shape_key(1000, 1000, 64, 64, 2)
    tuned.write(table, attention_blocks.OP, "v5e", tuned.Entry(exact, near, dataclasses.asdict(sizes)))
    assert attention_blocks.choose(1000, 1000, 64, 64, 2, V5E) == sizes
    assert attention_blocks.choose(1900, 1900, 64, 64, 2, V5E) == dataclasses.replace(sizes, resident=2048)
    assert attention_blocks.choose(1000, 1000, 64, 64, 2, None) == before["attention"]
    for far in ((2100, 2100, 64, 64, 2), (1000, 1000, 128, 128, 2), (1000, 1000, 64, 64, 4)):
        assert attention_blocks.choose(*far, V5E) == attention_blocks._by_model(*far, V5E)
    problem = matmul_blocks.Problem(1000, 1500, 640, 2, 2, 2, factors=True)
    tuned.write(
        table,
        matmul_blocks.OP,
        "v5e",
        tuned.Entry(*matmul_blocks.shape_key("dx", problem), {"T": 256, "F": 128, "D": 640}),
    )
    assert matmul_blocks.choose("dx", problem, V5E) == matmul_blocks.Block(256, 128, 640)
    assert matmul_blocks.choose("dx", dataclasses.replace(problem, T=600), V5E) == matmul_blocks.Block(256, 128, 640)
    assert matmul_blocks.choose("dw", problem, V5E) != matmul_blocks.Block(256, 128, 640)
    wide = grouped_blocks.Problem(1000, 1500, 640, 8, 2)
    tuned.write(
        table,
        grouped_blocks.OP,
        "v5e",
        tuned.Entry(*matmul_blocks.shape_key("dx", wide), {"T": 128, "F": 128, "D": 128}),
    )
    assert grouped_blocks.choose("dx", wide, V5E) == matmul_blocks.Block(128, 128, 128)
    shape = loss_blocks.Shape(1000, 640, 5000, 2, 4)
    small = loss_blocks.BlockSizes(loss_blocks.Forward(128, 256, 128, 128), loss_blocks.Backward(128, 256, 128, 128))
    tuned.write(table, loss_blocks.OP, "v5e", tuned.Entry(*loss_blocks.shape_key(shape), dataclasses.asdict(small)))
    assert loss_blocks.choose(shape, V5E) == small
    assert loss_blocks.choose(dataclasses.replace(shape, T=700), V5E) == small
    assert sizes_of_all(V5P) == other
    assert tuned.read(table) == tuned.table()


def test_the_nearest_entry_counts_and_a_new_one_replaces_the_old(table):
    for T, q in ((1024, 256), (2048, 512), (1024, 128)):
        cut = attention_blocks.Cut(128, 128, 1)
        sizes = attention_blocks.BlockSizes(q, 128, 128, cut, cut)
        tuned.write(
            table,
            attention_blocks.OP,
            "v6e",
            tuned.Entry(*attention_blocks.shape_key(T, T, 64, 64, 2), dataclasses.asdict(sizes)),
        )
    assert attention_blocks.choose(1024, 1024, 64, 64, 2, CHIPS["v6e"]).q == 128
    assert attention_blocks.choose(1900, 1900, 64, 64, 2, CHIPS["v6e"]).q == 512
    assert len(tuned.table()[attention_blocks.OP, "v6e"]) == 2


def test_sizes_that_can_not_be_at_another_length_give_way_to_the_model(table):
    cut = attention_blocks.Cut(1024, 128, 1)
    sizes = attention_blocks.BlockSizes(1024, 1024, 16384, cut, cut)
    entry = tuned.Entry(*attention_blocks.shape_key(16384, 16384, 256, 256, 4), dataclasses.asdict(sizes))
    tuned.write(table, attention_blocks.OP, "v4", entry)
    shape = (16384, 16384, 256, 256, 4)
    assert attention_blocks.choose(*shape, CHIPS["v4"]) == attention_blocks._by_model(*shape, CHIPS["v4"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no table of tuned block sizes"),
        ('{"a": {"v5e": [{"exact": {}}]}}', "is no table of tuned block sizes"),
        ('{"a": {"v99": []}}', "no TPU generation 'v99'; there are v4, v5e"),
        ('{"a": {"v5e": [{"exact": {}, "near": {"T": 0}, "sizes": {}}]}}', "dims must be whole numbers above 0"),
    ],
)
def test_a_damaged_table_is_refused_in_one_line(table, text, why):
    table.write_text(text)
    with pytest.raises(ValueError, match=why) as refused:
        attention_blocks.choose(100, 100, 64, 64, 2, V5E)
    assert str(table) in str(refused.value)
    assert "\n" not in str(refused.value)
