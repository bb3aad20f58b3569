"""What a check found: numbers beside what they may be, and how that is printed."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Measure:
    """An error and the most that it may be."""

    what: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # NaN is not


@dataclasses.dataclass(frozen=True)
class Check:
    """One check: it failed if a measure is above its tolerance, or if something went wrong before it could measure."""

    name: str
    measures: tuple[Measure, ...] = ()
    note: str = ""
    broken: bool = False
    skipped: bool = False  # the note says why

    @property
    def ok(self) -> bool:
        return not self.broken and all(measure.ok for measure in self.measures)

    def line(self) -> str:
        """ "ok      name: loss 1.2e-07 of 1e-05"."""
        status = "skipped" if self.skipped else "ok" if self.ok else "FAILED"
        numbers = [f"{m.what} {m.error:.2g} of {m.tolerance:.2g}" for m in self.measures]
        return f"{status:<8}{self.name}: {', '.join(numbers + [self.note] * bool(self.note))}"

    def as_dict(self) -> dict[str, Any]:
        status = "skipped" if self.skipped else "ok" if self.ok else "failed"
        measures = [dataclasses.asdict(m) | {"ok": m.ok} for m in self.measures]
        return {"name": self.name, "status": status, "measures": measures, "note": self.note}


def broken(name: str, error: Exception) -> Check:
    """A check that an exception ended."""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return Check(name, note=f"{type(error).__name__}: {first[:300]}", broken=True)
