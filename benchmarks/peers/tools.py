"""Questions to a stored result, and the call with which each system's own tools can ask them.

An `Intent` is what a careful reader would look for, in no system's words. A `Reader` offloads a result as its system
does by default, and turns an intent into a call of the system's nearest tool, or says that it has none. Needs nothing
of Coatcheck's: it runs where only the peers are installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What to look for: one of `grep`, `sql`, `path`, `lines` and `text`.

    `grep` is a regular expression; with `near`, this many lines before and after its first match. `path` is a JSONPath;
    `sql` is about the table `artifact`, or the array at `at`. `lines` is a range such as "-15:". `text` asks for the
    readable text of a document: "all", or one page of it ("last" for the last one)."""

    grep: str = ""
    near: tuple[int, int] = (0, 0)
    sql: str = ""
    at: str = ""
    path: str = ""
    lines: str = ""
    text: str = ""


class Call(NamedTuple):
    """A call of a tool, as a model would write it."""

    tool: str
    arguments: dict[str, Any]


class Reader(Protocol):
    """One system: what a model sees of a large result, and the tools to see more of it."""

    @property
    def schemas(self) -> str:
        """The descriptions of the tools for reading, as JSON."""

    def offload(self, content: str | bytes) -> str:
        """Hand in a tool's result, and return what the model gets in its place."""

    def hint(self, shown: str) -> Call | None:
        """Return the call that the text for the model proposes, if it is complete."""

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        """Return the call for an intent, given what the model has seen so far; None if there is no such tool."""

    def more(self, call: Call, page: str) -> Call | None:
        """Return the call that continues after a page, if the page offers one."""

    def run(self, call: Call) -> str:
        """Make a call, and return what the model gets."""
