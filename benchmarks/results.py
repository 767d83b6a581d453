"""The results of a run: kept as JSON, compared with those of the last full run, and shown in
README.md.

`python -m benchmarks --save` writes them to `results.json`, draws a plot of each table into
`plots/`, and puts tables and plots into README.md. Every other run names what has changed since
then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.report import Row, cells_of
from coatcheck.audit import ratio_plot

FOLDER: Final = Path(__file__).parent
CHANGE: Final = 0.2
"""The part of a figure by which it must change to be named."""

_FILE: Final = "results.json"
_PAGE: Final = "README.md"
_PLOTS: Final = "plots"
_BEGIN, _END = (
    "<!-- results: written by `python -m benchmarks --save` -->",
    "<!-- end of the results -->",
)
_LEAST: Final = {"over": 5e-6, "memory": 2.0 * 2**20, "share": 0.01, "count": 1.0}
"""Smaller figures than these count as these, so that almost nothing never changes by 20%."""
_SAME_MACHINE: Final = ("cpu", "cores", "file system")


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one case. `seconds` is how long it took, `cpu_seconds` what it and its children
    used."""

    rows: tuple[Row, ...]
    seconds: float
    cpu_seconds: float

    def to_record(self) -> dict[str, Any]:
        taken = {"seconds": round(self.seconds, 1), "cpu_seconds": round(self.cpu_seconds, 1)}
        return {**taken, "rows": [row.to_record() for row in self.rows]}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Table:
        return cls(tuple(map(Row.of, record["rows"])), record["seconds"], record["cpu_seconds"])


@dataclass(frozen=True, slots=True)
class Results:
    """A machine, and the tables that were measured on it by their names."""

    machine: dict[str, str]
    tables: dict[str, Table]

    @classmethod
    def of(cls, text: str) -> Results:
        record = json.loads(text)
        return cls(
            record["machine"], {name: Table.of(one) for name, one in record["tables"].items()}
        )

    def has_same_machine(self, other: Results) -> bool:
        return all(self.machine.get(what) == other.machine.get(what) for what in _SAME_MACHINE)

    def to_json(self) -> str:
        record = {
            "machine": self.machine,
            "tables": {name: one.to_record() for name, one in self.tables.items()},
        }
        return json.dumps(record, indent=1, ensure_ascii=False) + "\n"


def last() -> Results | None:
    """The results of the last full run; None if there was none."""
    return _results_in(FOLDER)


def changes(before: Results, now: Results) -> tuple[list[str], list[str]]:
    """Name the rows that are worse than before by more than 20%, and those that are better. A time
    or a rate without a floor is only compared if both runs were on the same kind of machine."""
    is_same = before.has_same_machine(now)
    worse: list[str] = []
    better: list[str] = []
    for name, table in now.tables.items():
        known = {row.case: row for row in before.tables[name].rows} if name in before.tables else {}
        for row in table.rows:
            old = known.get(row.case)
            if old is None or (row.floor is None) != (old.floor is None):
                continue
            if not is_same and row.floor is None and row.unit in ("time", "rate"):
                continue
            grown = (row.value - old.value) / max(abs(old.value), _LEAST.get(row.unit, 1e-9))
            change = -grown if row.at_least else grown
            if abs(change) > CHANGE:
                line = f"{name}: {row.case}: {cells_of(old)[3]} before, {cells_of(row)[3]} now"
                (worse if change > 0 else better).append(line)
    return worse, better


def compared(before: Results | None, now: Results) -> str:
    """What has changed since the last full run, as text."""
    if before is None:
        return "there are no results of a full run to compare with (--save keeps them)"
    worse, better = changes(before, now)
    lines = [
        f"compared with the last full run: {len(worse)} rows worse by over 20%, {len(better)} better"
    ]
    lines += [f"  WORSE   {one}" for one in worse] + [f"  better  {one}" for one in better]
    return "\n".join(lines)


def save(now: Results, folder: Path = FOLDER) -> None:
    """Keep the tables of this run, and those that an earlier run has measured on the same machine.
    Show all of them."""
    before = _results_in(folder) or now
    earlier = before.tables if before.has_same_machine(now) else {}
    whole = Results(now.machine, {**earlier, **now.tables})
    (folder / _FILE).write_text(whole.to_json(), "utf-8")
    drawn = _draw(whole, folder / _PLOTS)
    page = folder / _PAGE
    head, _, rest = page.read_text("utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    shown = "\n".join(_markdown(whole, drawn))
    page.write_text(f"{head}{_BEGIN}\n\n{shown}\n\n{_END}{after}", "utf-8")


def _results_in(folder: Path) -> Results | None:
    file = folder / _FILE
    return Results.of(file.read_text("utf-8")) if file.exists() else None


def _draw(results: Results, folder: Path) -> set[str]:
    """Write a plot of each table that has one, remove all others, and return the names of the
    plots."""
    folder.mkdir(exist_ok=True)
    drawn = set()
    for name, table in results.tables.items():
        plot = plot_of(name, table)
        if plot is not None:
            (folder / f"{name}.svg").write_text(plot, "utf-8")
            drawn.add(name)
    for path in folder.glob("*.svg"):
        if path.stem not in drawn:
            path.unlink()
    return drawn


def plot_of(name: str, table: Table) -> str | None:
    """A plot of our times divided by the floor's; of a table without floors, of the figures divided
    by their limits."""
    ratios = [
        (row.case, row.value, row)
        for row in table.rows
        if row.floor and row.unit not in ("memory", "over")
    ]
    one = "the floor"
    if not ratios:
        limited = [row for row in table.rows if row.limit and row.value > 0]
        ratios = [(row.case, row.limit / row.value if row.at_least else row.value / row.limit, row)
                  for row in limited if row.limit]  # fmt: skip
        one = "the limit"
    if not ratios:
        return None
    over = {case for case, _, row in ratios if row.ok is False}
    return ratio_plot(name, [(case, ratio) for case, ratio, _ in ratios], one=one, over=over)


def _markdown(results: Results, drawn: set[str]) -> Iterator[str]:
    rows = [row for table in results.tables.values() for row in table.rows if row.limit is not None]
    taken = sum(table.seconds for table in results.tables.values())
    facts = ", ".join(f"{what} {fact}" for what, fact in results.machine.items())
    within = sum(row.ok is True for row in rows)
    yield f"{within} of {len(rows)} rows within their limit, in {taken / 60:.0f} minutes ({facts})."
    for name, table in results.tables.items():
        yield f"\n### {name}\n"
        if name in drawn:
            yield f"![{name}: ours against the floor]({_PLOTS}/{name}.svg)\n"
        yield "| case | floor | ours | ratio | limit | ok |\n| --- | --- | --- | --- | --- | --- |"
        for row in table.rows:
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells_of(row)) + " |"
