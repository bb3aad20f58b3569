"""Charts of a run: a PNG with Pillow alone, and one of braille dots for the terminal.

A series is a name and (steps, values). Steps without a finite value leave a gap, so a run that broke shows it. A line
of more points than the chart has columns keeps the first, last, lowest and highest of each column: no spike is lost.
The same series always give the same picture.
"""

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Point = tuple[float, float]
Range = tuple[float, float]
Series = Mapping[str, tuple[Sequence[float], Sequence[float | None]]]

WIDTH, HEIGHT = 960, 540
SCALE = 2  # drawn this much larger and shrunk at the end, because Pillow draws lines with hard edges
COLOURS = ("#2f6fde", "#e8702a", "#2a9d5c", "#a44bc8", "#c9a227", "#d6336c")
INK, FAINT_INK, GRID, FRAME = "#1f2328", "#656d76", "#e9ebee", "#aab1b9"
MARKS = "ox+*#@"  # in the terminal the first series is a line, the others are these


def write_png(path: Path, series: Series, title: str, x_label: str = "step", y_label: str = "loss") -> bool:
    """Writes a 960 x 540 line chart; the legend gives each series' last value.

    Returns False, and writes nothing, where no series has a finite value.
    """
    runs = {name: _runs(*points) for name, points in series.items()}
    if not any(runs.values()):
        return False
    canvas = _Canvas()
    x_range, y_range = _ranges(runs)
    x_ticks, y_ticks = _ticks(x_range, 8, whole=True), _ticks(y_range, 6)
    y_range = (y_ticks[0], y_ticks[-1])
    x_texts, y_texts = _tick_texts(x_ticks), _tick_texts(y_ticks)
    left = 36 + round(max(canvas.text_width(text, 14) for text in y_texts))
    top, right, bottom = 104, WIDTH - 32, HEIGHT - 62

    def place(point: Point) -> Point:
        x = left + (point[0] - x_range[0]) / (x_range[1] - x_range[0]) * (right - left)
        return x, bottom - (point[1] - y_range[0]) / (y_range[1] - y_range[0]) * (bottom - top)

    canvas.text((24, 42), title, 22, INK)
    canvas.text((24, 76), y_label, 14, FAINT_INK)
    canvas.text((right, HEIGHT - 24), x_label, 14, FAINT_INK, anchor="rs")
    for value, text in zip(y_ticks, y_texts, strict=True):
        y = place((x_range[0], value))[1]
        canvas.line([(left, y), (right, y)], 1, GRID)
        canvas.text((left - 10, y), text, 14, FAINT_INK, anchor="rm")
    for value, text in zip(x_ticks, x_texts, strict=True):
        if x_range[0] <= value <= x_range[1]:
            x = place((value, y_range[0]))[0]
            canvas.line([(x, bottom), (x, bottom + 5)], 1, FRAME)
            canvas.text((x, bottom + 10), text, 14, FAINT_INK, anchor="mt")
    canvas.line([(left, bottom), (right, bottom)], 1, FRAME)
    _draw_legend(canvas, runs, right)
    for colour, name in zip(itertools.cycle(COLOURS), runs, strict=False):
        _draw_series(canvas, [[place(point) for point in run] for run in runs[name]], colour)
    canvas.save(path)
    return True


def terminal_chart(series: Series, width: int = 72, height: int = 16) -> str:
    """A chart of `width` x `height` characters and a legend; empty where no series has a finite value."""
    runs = {name: _runs(*points) for name, points in series.items()}
    if not any(runs.values()):
        return ""
    x_range, y_range = _ranges(runs)
    rows = max(height - 3, 3)
    y_texts = _tick_texts([y_range[1], (y_range[0] + y_range[1]) / 2, y_range[0]])
    margin = max(map(len, y_texts))
    columns = max(width - margin - 2, 10)

    def place(point: Point) -> Point:  # in braille dots, 2 x 4 to a character
        x = (point[0] - x_range[0]) / (x_range[1] - x_range[0]) * (columns * 2 - 1)
        return x, (y_range[1] - point[1]) / (y_range[1] - y_range[0]) * (rows * 4 - 1)

    cells = [[" "] * columns for _ in range(rows)]
    legend = []
    for index, (name, its_runs) in enumerate(runs.items()):
        mark = MARKS[(index - 1) % len(MARKS)] if index else "⠒"
        legend.append(f"{mark} {_legend_text(name, its_runs)}")
        placed = [_decimate([place(point) for point in run]) for run in its_runs]
        if index == 0:
            _draw_braille(cells, placed)
        else:
            for x, y in itertools.chain.from_iterable(placed):
                cells[round(y) // 4][round(x) // 2] = mark
    labels = {0: y_texts[0], rows // 2: y_texts[1], rows - 1: y_texts[2]}
    lines = [f"{labels.get(row, ''):>{margin}} ┤{''.join(cells[row])}".rstrip() for row in range(rows)]
    first, last = (_tick_texts([bound])[0] for bound in x_range)
    lines.append(" " * (margin + 1) + "└" + "─" * columns)
    lines.append(" " * (margin + 2) + first + last.rjust(max(columns - len(first), len(last) + 1)))
    return "\n".join([*lines, " " * (margin + 2) + "   ".join(legend)])


class _Canvas:
    """Draws in chart units and keeps the enlargement to itself."""

    def __init__(self) -> None:
        self._image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), "white")
        self._draw = ImageDraw.Draw(self._image)

    def text(self, at: Point, text: str, size: int, colour: str, anchor: str = "ls") -> None:
        at = (at[0] * SCALE, at[1] * SCALE)
        self._draw.text(at, text, fill=colour, font=ImageFont.load_default(size * SCALE), anchor=anchor)

    def text_width(self, text: str, size: int) -> float:
        return self._draw.textlength(text, font=ImageFont.load_default(size * SCALE)) / SCALE

    def line(self, points: Sequence[Point], width: float, colour: str) -> None:
        scaled = [(x * SCALE, y * SCALE) for x, y in points]
        self._draw.line(scaled, fill=colour, width=round(width * SCALE), joint="curve")

    def dot(self, at: Point, radius: float, colour: str) -> None:
        self._draw.circle((at[0] * SCALE, at[1] * SCALE), radius * SCALE, fill=colour)

    def save(self, path: Path) -> None:
        self._image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS).save(
            content := io.BytesIO(), format="PNG", optimize=True
        )
        path.write_bytes(content.getvalue())


def _draw_series(canvas: _Canvas, runs: list[list[Point]], colour: str) -> None:
    few = sum(map(len, runs)) <= 40
    for run in runs:
        canvas.line(_decimate(run), 2, colour)
        if few or len(run) == 1:
            for point in run:
                canvas.dot(point, 3.5, colour)


def _draw_legend(canvas: _Canvas, runs: Mapping[str, list[list[Point]]], right: float) -> None:
    """Right-aligned above the plot, where no line can pass."""
    texts = [_legend_text(name, its_runs) for name, its_runs in runs.items()]
    x = right - sum(canvas.text_width(text, 14) + 30 for text in texts) - 22 * (len(texts) - 1)
    for colour, text in zip(itertools.cycle(COLOURS), texts, strict=False):
        canvas.line([(x, 71), (x + 22, 71)], 3, colour)
        canvas.text((x + 30, 76), text, 14, INK)
        x += canvas.text_width(text, 14) + 52


def _legend_text(name: str, runs: list[list[Point]]) -> str:
    return f"{name} {runs[-1][-1][1]:.4g}" if runs else f"{name} (no values)"


def _draw_braille(cells: list[list[str]], runs: list[list[Point]]) -> None:
    dots = (
        (0x01, 0x08),
        (0x02, 0x10),
        (0x04, 0x20),
        (0x40, 0x80),
    )  # Unicode's numbering of a cell's 4 rows and 2 columns
    for run in runs:
        for (x0, y0), (x1, y1) in itertools.pairwise([run[0], *run]):
            count = max(math.ceil(max(abs(x1 - x0), abs(y1 - y0))), 1)
            for i in range(count + 1):
                x, y = round(x0 + (x1 - x0) * i / count), round(y0 + (y1 - y0) * i / count)
                cell = cells[y // 4][x // 2]
                bits = ord(cell) if cell != " " else 0x2800
                cells[y // 4][x // 2] = chr(bits | dots[y % 4][x % 2])


def _runs(steps: Sequence[float], values: Sequence[float | None]) -> list[list[Point]]:
    """The points, split where a value is not finite."""
    points = [(float(x), math.nan if y is None else float(y)) for x, y in zip(steps, values, strict=True)]
    groups = itertools.groupby(points, key=lambda point: math.isfinite(point[0]) and math.isfinite(point[1]))
    return [list(group) for finite, group in groups if finite]


def _decimate(run: list[Point]) -> list[Point]:
    """At most four points of each column of width 1."""
    kept: list[Point] = []
    for _, group in itertools.groupby(run, key=lambda point: math.floor(point[0])):
        column = list(group)
        heights = [point[1] for point in column]
        extremes = {0, heights.index(min(heights)), heights.index(max(heights)), len(column) - 1}
        kept += [column[i] for i in sorted(extremes)]
    return kept


def _ranges(runs: Mapping[str, list[list[Point]]]) -> tuple[Range, Range]:
    """(lowest, highest) of the steps and of the values, apart even if all are one."""
    points = list(itertools.chain.from_iterable(itertools.chain.from_iterable(runs.values())))
    xs, ys = [x for x, _ in points], [y for _, y in points]
    # A margin in proportion keeps a large constant's range wide enough to be told apart in floating point.
    y_margin = 0.0 if max(ys) > min(ys) else abs(ys[0]) * 0.05 or 1.0
    x_margin = 0.0 if max(xs) > min(xs) else max(1.0, abs(xs[0]) * 1e-6)
    return (min(xs) - x_margin, max(xs) + x_margin), (min(ys) - y_margin, max(ys) + y_margin)


def _ticks(bounds: Range, count: int, whole: bool = False) -> list[float]:
    """About `count` round numbers that enclose the bounds; `whole`: whole numbers."""
    low, high = bounds
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999]
    step = next((s for s in steps if s == int(s)), 1.0) if whole else steps[0]
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _tick_texts(ticks: Sequence[float]) -> list[str]:
    """All with as many decimals as the distance between them needs."""
    largest = max(abs(tick) for tick in ticks)
    apart = min((abs(b - a) for a, b in itertools.pairwise(ticks)), default=largest) or 1.0
    if largest >= 1e7 or apart < 1e-6:
        return [f"{tick:.3g}" for tick in ticks]
    decimals = next(d for d in range(9) if abs(round(apart, d) - apart) < apart * 1e-3 or d == 8)
    return [f"{tick:,.{decimals}f}" for tick in ticks]
