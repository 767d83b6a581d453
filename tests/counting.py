"""The table at the end of `make faults`: what was injected, how often, and whether anything was
lost.

A test reports through the fixture `counts` as it goes. Counts travel to the terminal with the
reports of the tests, so they add up over the workers of a parallel run. The row of a test that
failed names the test.

    def test_kills(counts: Counts) -> None:
        counts("kills", 8)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Protocol, cast

import pytest

_KEY = "coatcheck.counts"


class Counts(Protocol):
    """Adds a number to a row of the table."""

    def __call__(self, what: str, number: int = 1) -> None: ...


@pytest.fixture
def counts(request: pytest.FixtureRequest) -> Counts:
    """Add to a row of the table of faults: `counts("kills", 8)`."""
    counted: dict[str, int] = {}
    request.node.user_properties.append((_KEY, counted))

    def add(what: str, number: int = 1) -> None:
        counted[what] = counted.get(what, 0) + number

    return add


def counted_in(item: pytest.Item) -> dict[str, int]:
    """Return the counts of a test so far, to read or to add to."""
    return next(
        (cast(dict[str, int], value) for key, value in item.user_properties if key == _KEY), {}
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(
        config, "workerinput"
    ):  # the reports of all workers come together where the terminal is
        config.pluginmanager.register(_Table(), "coatcheck-counts")


class _Table:
    """Adds up the counts of all reports and prints the table."""

    def __init__(self) -> None:
        self._totals: Counter[str] = Counter()
        self._failed: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = cast(list[tuple[str, Any]], report.user_properties)
        counted = [value for key, value in properties if key == _KEY]
        for value in counted if report.when == "call" else ():
            self._totals.update(value)
        if report.failed and counted:
            for what in {what for value in counted for what in value} or {"(not counted)"}:
                self._totals[what] += 0
                self._failed[what].append(report.nodeid.rpartition("::")[2])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._totals:
            return
        rows = [("injected", "count", "result"), ("---", "---:", "---")]
        for what, number in sorted(self._totals.items()):
            failed = self._failed.get(what)
            rows.append(
                (what, f"{number:,}", f"failed: {', '.join(failed)}" if failed else "nothing lost")
            )
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        terminalreporter.section("faults")
        for what, count, result in rows:
            terminalreporter.write_line(f"| {what:{first}} | {count:>{second}} | {result} |")
