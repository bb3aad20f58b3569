"""Numbers for people."""


def count_text(value: float) -> str:
    """1,234,567 as 1.23M; powers of 1,000."""
    for power, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= power:
            return f"{value / power:.3g}{letter}" if value < 999.5 * power else f"{value / power:.0f}{letter}"
    return f"{value:.3g}"


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


def known(value: float | None, text) -> str:
    """`text(value)`, or "unknown"."""
    return "unknown" if value is None else text(value)
