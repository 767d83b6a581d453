"""A row of the report, and the table that people read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from benchmarks.timing import Times

Unit = Literal["time", "over", "rate", "memory", "share", "count"]
_HEADS = ("case", "floor", "ours", "ratio", "limit", "ok")


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison. Times and rates are judged by the ratio, memory and some times by the
    difference, and whatever has no floor by itself.

    `limit` is None where the row only informs; `at_least` turns it round. `note` is a remark on
    this row."""

    case: str
    floor: float | None
    ours: float
    limit: float | None
    unit: Unit = "time"
    at_least: bool = False
    times: tuple[Times, Times] | None = None
    note: str = ""

    @property
    def value(self) -> float:
        if self.floor is None:
            return self.ours
        return self.ours - self.floor if self.unit in ("memory", "over") else self.ours / self.floor

    @property
    def ok(self) -> bool | None:
        if self.limit is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_record(self) -> dict[str, Any]:
        return dict(_rounded({**asdict(self), "value": self.value, "ok": self.ok}))

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Row:
        """The row of a record."""
        times = record["times"] and tuple(Times(**one) for one in record["times"])
        given = {one.name: record[one.name] for one in fields(cls)}
        return cls(**given | {"times": times})


def _rounded(value: Any) -> Any:
    """A record with five digits of each figure: more would only be noise."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_rounded, value))
    return float(f"{value:.5g}") if isinstance(value, float) else value


def timed_row(case: str, times: tuple[Times, Times], limit: float | None) -> Row:
    """A row of two medians."""
    floor, ours = times
    return Row(case, floor.p50, ours.p50, limit, times=times)


def table(rows: Iterable[Row]) -> str:
    """The rows as aligned columns, with one for remarks where there are any."""
    rows = list(rows)
    lines = [_HEADS, *(cells_of(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    layout = " | ".join([f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])])
    notes = ["remark" if any(row.note for row in rows) else "", *(row.note for row in rows)]
    table = (
        layout.format(*line) + (f" | {note}" if note else "")
        for line, note in zip(lines, notes, strict=True)
    )
    return "\n".join(table)


def cells_of(row: Row) -> tuple[str, ...]:
    """The cells of a row: case, floor, ours, ratio, limit, and whether it is within the limit."""
    limit = "" if row.limit is None else ("≥ " if row.at_least else "≤ ") + _judged(row, row.limit)
    ok = {True: "yes", False: "NO", None: ""}[row.ok]
    floor = "" if row.floor is None else _shown(row.unit, row.floor)
    return row.case, floor, _shown(row.unit, row.ours), _judged(row, row.value), limit, ok


def _judged(row: Row, value: float) -> str:
    if row.floor is None:
        return _shown(row.unit, value)
    if row.unit in ("memory", "over"):
        return ("+" if value >= 0 else "") + _shown(row.unit, value)
    return f"{value:.2f}×"


def _shown(unit: Unit, value: float) -> str:
    if unit in ("time", "over"):
        return f"{value * 1e6:.0f} µs" if abs(value) < 0.001 else f"{value * 1e3:.2f} ms"
    shown = {"rate": f"{value:.0f}/s", "memory": f"{value / 2**20:.1f} MB", "share": f"{value:.1%}"}
    return shown.get(unit, f"{value:.0f}")
