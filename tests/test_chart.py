"""The two charts, mostly on the inputs that break charts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tpu_train.chart import COLOURS, _tick_texts, _ticks, terminal_chart, write_png

STEPS = np.arange(1, 401)
LOSS = 1.9 + 3.7 * np.exp(-STEPS / 60)
ONE_POINT = {"train": ([7], [2.5])}
CONSTANT = {"train": ([1, 2, 3], [0.0, 0.0, 0.0])}
GAP = {"train": ([1, 2, 3, 4], [3.0, math.nan, None, 2.0]), "validation": ([2], [math.inf])}
TWO = {"train": (STEPS, LOSS), "validation": (STEPS[49::50], LOSS[49::50] + 0.1)}
EMPTY = [{}, {"train": ([], [])}, {"train": ([1, 2], [math.nan, None])}]


def pixels_of(path, colour):
    rgb = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
    with Image.open(path) as image:
        assert image.size == (960, 540)
        return np.argwhere(np.abs(np.asarray(image).astype(int) - rgb).sum(-1) < 120)  # a thin line is part background


@pytest.mark.parametrize("series", [ONE_POINT, CONSTANT, GAP, TWO], ids=["one_point", "constant", "gap", "two"])
def test_png_shows_the_first_series_in_its_colour(tmp_path, series):
    path = tmp_path / "loss.png"
    assert write_png(path, series, "a run")
    inside = pixels_of(path, COLOURS[0])
    assert (inside[:, 0] > 104).any()  # below the legend


def test_png_shows_every_series(tmp_path):
    write_png(tmp_path / "loss.png", TWO, "a run", "step", "loss")
    rows, columns = pixels_of(tmp_path / "loss.png", COLOURS[1]).T
    assert columns.max() > 900
    assert rows.max() > 300


def test_png_keeps_a_spike_among_many_points(tmp_path):
    steps, values = np.arange(50_000), np.ones(50_000)
    values[31_234] = 9.0
    write_png(tmp_path / "loss.png", {"train": (steps, values)}, "a run")
    rows, columns = pixels_of(tmp_path / "loss.png", COLOURS[0]).T
    high = columns[(rows > 110) & (rows < 250)]
    assert len(high)
    assert abs(high.mean() - (960 - 32) * 0.63) < 20


def test_png_breaks_the_line_where_values_are_missing(tmp_path):
    values = np.where((STEPS > 100) & (STEPS < 300), np.nan, 2.0)
    write_png(tmp_path / "loss.png", {"train": (STEPS, values)}, "a run")
    rows, columns = pixels_of(tmp_path / "loss.png", COLOURS[0]).T
    plot = columns[rows > 104]
    assert not ((plot > 300) & (plot < 650)).any()
    assert (plot < 250).any()
    assert (plot > 750).any()


@pytest.mark.parametrize("series", EMPTY)
def test_nothing_to_draw_draws_nothing(tmp_path, series):
    assert not write_png(tmp_path / "loss.png", series, "a run")
    assert not (tmp_path / "loss.png").exists()
    assert terminal_chart(series) == ""


def test_same_series_same_bytes(tmp_path):
    for name in ("a.png", "b.png"):
        write_png(tmp_path / name, TWO, "a run")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert terminal_chart(TWO) == terminal_chart(TWO)


def test_terminal_chart_of_a_falling_line():
    assert terminal_chart({"train": ([0, 10], [4.0, 2.0])}, width=25, height=7).splitlines() == [
        "4 ┤⠉⠒⠢⠤⣀⡀",
        "  ┤     ⠈⠑⠒⠤⢄⣀",
        "3 ┤           ⠉⠑⠒⠤⢄⡀",
        "2 ┤                ⠈⠉⠒⠢⠤⣀",
        "  └──────────────────────",
        "   0                   10",
        "   ⠒ train 2",
    ]


@pytest.mark.parametrize("series", [ONE_POINT, CONSTANT, GAP, TWO], ids=["one_point", "constant", "gap", "two"])
def test_terminal_chart_keeps_to_its_size_and_names_every_series(series):
    lines = terminal_chart(series, width=60, height=12).splitlines()
    assert len(lines) == 12
    assert max(map(len, lines[:-1])) <= 60
    assert all(name in lines[-1] for name in series)
    assert any(0x2800 < ord(character) <= 0x28FF for line in lines[:-1] for character in line)


FLOATS = st.floats(-1e30, 1e30) | st.sampled_from([math.nan, math.inf, None, 0.0, 1e-30])


@settings(deadline=None, max_examples=60)
@given(
    points=st.lists(st.tuples(st.integers(0, 10**9), FLOATS), max_size=30),
    width=st.integers(1, 90),
    height=st.integers(1, 30),
)
def test_no_input_breaks_the_terminal_chart(points, width, height):
    steps, values = [x for x, _ in points], [y for _, y in points]
    drawn = terminal_chart({"train": (steps, values), "validation": (steps, values[::-1])}, width, height)
    assert bool(drawn) == any(value is not None and math.isfinite(value) for value in values)


@settings(deadline=None, max_examples=15)
@given(points=st.lists(st.tuples(st.integers(0, 10**9), FLOATS), max_size=10))
def test_no_input_breaks_the_png(tmp_path_factory, points):
    path = tmp_path_factory.mktemp("chart") / "loss.png"
    steps, values = [x for x, _ in points], [y for _, y in points]
    assert write_png(path, {"train": (steps, values)}, "a run") == path.exists()


@pytest.mark.parametrize(
    ("bounds", "count", "whole", "texts"),
    [
        ((1.73, 5.55), 6, False, ["1", "2", "3", "4", "5", "6"]),
        ((0, 1), 5, False, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((1, 3), 8, True, ["1", "2", "3"]),
        ((0, 20), 8, True, ["0", "5", "10", "15", "20"]),
        ((0, 20_000), 8, True, [f"{i:,}" for i in range(0, 20_001, 2500)]),
        ((0.0001, 0.0003), 4, False, ["0.00010", "0.00015", "0.00020", "0.00025", "0.00030"]),
    ],
)
def test_ticks_are_round_numbers(bounds, count, whole, texts):
    assert _tick_texts(_ticks(bounds, count, whole)) == texts
