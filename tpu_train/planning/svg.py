"""Charts of the plan as SVG text: stacked bars, a roofline, a scaling curve. Labels are escaped here."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tpu_train.planning.units import bytes_text, count_text, seconds_text

COLOURS = ("#2f6fde", "#e8702a", "#2a9d5c", "#a44bc8", "#c9a227", "#d6336c", "#3a8f9e")
INK, FAINT, GRID = "#1f2328", "#656d76", "#dfe3e8"
WIDTH = 860


@dataclasses.dataclass(frozen=True)
class Plot:
    """A frame with logarithmic axes; `x` and `y` are (least, most)."""

    x: tuple[float, float]
    y: tuple[float, float]
    height: int = 360
    left: int = 90
    right: int = 20
    top: int = 20
    bottom: int = 50

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies, in pixels."""
        across = math.log(x / self.x[0]) / math.log(self.x[1] / self.x[0])
        up = math.log(y / self.y[0]) / math.log(self.y[1] / self.y[0])
        inner_width, inner_height = WIDTH - self.left - self.right, self.height - self.top - self.bottom
        return self.left + across * inner_width, self.height - self.bottom - up * inner_height

    def frame(
        self, x_ticks: Mapping[float, str], y_ticks: Mapping[float, str], x_label: str, y_label: str
    ) -> list[str]:
        parts = []
        for value, label in x_ticks.items():
            x, bottom = self.at(value, self.y[0])
            parts.append(line([(x, self.top), (x, bottom)], GRID))
            parts.append(text(x, bottom + 18, label, FAINT, "middle"))
        for value, label in y_ticks.items():
            left, y = self.at(self.x[0], value)
            parts.append(line([(left, y), (WIDTH - self.right, y)], GRID))
            parts.append(text(left - 8, y + 4, label, FAINT, "end"))
        middle = (self.left + WIDTH - self.right) / 2
        parts.append(text(middle, self.height - 10, x_label, INK, "middle"))
        parts.append(text(self.left, self.top - 6, y_label, INK, "start"))
        return parts


def memory_bars(bars: Sequence[tuple[str, Mapping[str, float]]], room: float | None) -> str:
    """A stacked bar for each (label, bytes by part), and a line at `room`."""
    most = max([sum(parts.values()) for _, parts in bars] + [room or 0]) * 1.05
    left, row, top = 90, 44, 34
    scale = (WIDTH - left - 150) / most
    names = list(bars[0][1])
    drawn, height = [], top + row * len(bars) + 30
    for i, name in enumerate(names):
        drawn.append(rect(left + i * 118, 4, 12, 12, COLOURS[i]))
        drawn.append(text(left + i * 118 + 17, 15, name, INK, "start"))
    for number, (label, parts) in enumerate(bars):
        x, y = float(left), top + row * number
        drawn.append(text(left - 8, y + 20, label, INK, "end"))
        for i, name in enumerate(names):
            width = parts[name] * scale
            drawn.append(rect(x, y, width, 30, COLOURS[i], f"{name}: {bytes_text(parts[name])}"))
            x += width
        drawn.append(text(x + 8, y + 20, bytes_text(sum(parts.values())), INK, "start"))
    if room is not None:
        x, bottom = left + room * scale, top + row * len(bars)
        drawn.append(line([(x, top - 6), (x, bottom)], "#c0392b", 2, dashed=True))
        drawn.append(text(x, bottom + 16, f"a program gets {bytes_text(room)}", "#c0392b", "middle"))
    return picture(drawn, height, "Memory of a device by remat policy")


def roofline(peak: float, bandwidth: float, points: Sequence[tuple[str, float, float]]) -> str:
    """The roof of a device, and each (name, FLOPs a byte, FLOP/s) under it."""
    ridge = peak / bandwidth
    intensities = [intensity for _, intensity, _ in points] or [ridge]
    speeds = [speed for _, _, speed in points] or [peak]
    x = _decades(min([ridge / 8, *intensities]), max([ridge * 8, *intensities]))
    y = _decades(min([peak / 90, *speeds]), peak * 1.05)
    plot = Plot(x, y)
    drawn = plot.frame(
        {value: f"{value:g}" for value in _powers(x)},
        {value: count_text(value) for value in _powers(y)},
        "FLOPs for each byte of memory",
        "FLOP/s",
    )
    low = max(x[0], y[0] / bandwidth)
    roof = [plot.at(low, low * bandwidth), plot.at(ridge, peak), plot.at(x[1], peak)]
    drawn.append(line(roof, INK, 2))
    drawn.append(text(*_above(plot.at(x[1], peak)), f"{count_text(peak)} FLOP/s", INK, "end"))
    for i, (name, intensity, speed) in enumerate(points):
        where = plot.at(intensity, speed)
        drawn.append(
            dot(*where, COLOURS[i % len(COLOURS)], f"{name}: {intensity:.0f} FLOPs a byte, {count_text(speed)} FLOP/s")
        )
    drawn += _legend(plot, [name for name, _, _ in points], plot.left + 14)
    return picture(drawn, plot.height, "Roofline of a device")


def scaling(points: Sequence[tuple[int, float, float]], here: int, dominated_from: int | None) -> str:
    """Seconds of work and of traffic over the number of chips; marks `here` and where traffic takes over."""
    chips = [count for count, _, _ in points]
    times = [seconds for _, *both in points for seconds in both if seconds > 0]
    x = (min(chips) * 0.8, max(chips) * 1.25)
    plot = Plot(x, _decades(min(times), max(times)))
    drawn = plot.frame(
        {count: str(count) for count in chips},
        {value: seconds_text(value) for value in _powers(plot.y)},
        "chips",
        "seconds of a step",
    )
    marks = [(here, "these chips", FAINT)] if x[0] <= here <= x[1] else []
    if dominated_from is not None:
        marks.append((dominated_from, "traffic dominates", "#c0392b"))
    for row, (count, label, colour) in enumerate(marks):
        across, _ = plot.at(count, plot.y[1])
        drawn.append(line([(across, plot.top), (across, plot.height - plot.bottom)], colour, 1.5, dashed=True))
        drawn.append(text(across - 5, plot.height - plot.bottom - 8 - 16 * row, label, colour, "end"))
    for i, which in enumerate((1, 2)):
        track = [plot.at(point[0], point[which]) for point in points if point[which] > 0]
        drawn.append(line(track, COLOURS[i], 2.5))
        drawn += [dot(*where, COLOURS[i]) for where in track]
    drawn += _legend(plot, ["work", "traffic"], WIDTH - plot.right - 90)  # both fall, so this corner is free
    return picture(drawn, plot.height, "A step's work and traffic over the number of chips")


def picture(parts: Iterable[str], height: float, title: str) -> str:
    """The parts in a picture of WIDTH by `height`."""
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img"><title>{escape(title)}</title>\n{body}\n</svg>'


def text(x: float, y: float, content: str, colour: str, anchor: str) -> str:
    """A label; `anchor`: which end of it lies at (x, y)."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, colour: str, hint: str = "") -> str:
    """A filled box; `hint` shows under the pointer."""
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}">{inside}</rect>'


def dot(x: float, y: float, colour: str, hint: str = "") -> str:
    """A point of a chart; `hint` shows under the pointer."""
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}">{inside}</circle>'


def line(points: Sequence[tuple[float, float]], colour: str, width: float = 1, dashed: bool = False) -> str:
    """A line through the points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _legend(plot: Plot, names: Sequence[str], left: float) -> list[str]:
    parts, y = [], plot.top + 16
    for i, name in enumerate(names):
        parts.append(rect(left, y + 18 * i - 10, 12, 12, COLOURS[i % len(COLOURS)]))
        parts.append(text(left + 18, y + 18 * i, name, INK, "start"))
    return parts


def _above(where: tuple[float, float]) -> tuple[float, float]:
    return where[0], where[1] - 8


def _decades(least: float, most: float) -> tuple[float, float]:
    """The powers of ten around the two, which are apart by one at least."""
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _powers(bounds: tuple[float, float]) -> list[float]:
    first, last = (round(math.log10(bound)) for bound in bounds)
    return [10.0**power for power in range(first, last + 1)]
