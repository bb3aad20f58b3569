"""Numbers for people."""

import math


def count_text(value: float) -> str:
    """1,234,567 as 1.23M; powers of 1,000."""
    power = max(0, min(8, int(math.log10(abs(value)) // 3))) if value else 0
    scaled = value / 1000**power
    digits = f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:.0f}"  # no 1e+03
    return digits + ("", *"kMGTPEZY")[power]


def bytes_text(value: float) -> str:
    """In powers of 1,024: 1.5 GiB."""
    for power, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= power:
            return f"{value / power:.1f} {unit}"
    return f"{value:.0f} B"


def seconds_text(value: float) -> str:
    """1.23 s, 4.5 ms, 6.7 us; above two minutes in minutes, hours or days."""
    for span, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if value >= 2 * span:
            return f"{value / span:.1f} {unit}"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us" if value else "0 s"


def plain_text(value: float) -> str:
    """1,235 or 12.35 or 0.01235: all digits before the point, four in all at least."""
    decimals = max(0, 3 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{decimals}f}"


def known(value: float | None, text) -> str:
    """`text(value)`, or "unknown"."""
    return "unknown" if value is None else text(value)
