"""What stubs kept out of prompts, less what models read back: by surface, server, tool and day, for
a whole store.

A result counts once, when it becomes a stub: its tokens less those of the stub. A stub that passes
another surface stays as it is, so nothing counts twice. A page counts as read back, with the call
that asked for it, for the tool whose result it is part of, whichever process answers it. A list of
artifacts counts for the surface `tools`. Descriptions of tools, and the context that a further call
sends again, are not included: they depend on the conversation, and `coatcheck metrics` measures
them.

Counts are collected in memory and written with the last uses of sessions: within 30 seconds, and on
close. Each write appends what is new, and now and then a sum of everything so far, so that
processes do not wait for each other and a reader needs few records.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from coatcheck.errors import CoatcheckError, InvalidArgument, StoreError
from coatcheck.externalize.decision import REMEMBERED, bound
from coatcheck.ids import pointer_of
from coatcheck.redaction import mask
from coatcheck.refs import RECORD_LIMIT
from coatcheck.storage.forks import RLock, watch
from coatcheck.tokens import estimate

if TYPE_CHECKING:
    from coatcheck.core_session import CoreSession
    from coatcheck.refs import Ref
    from coatcheck.storage import Record
    from coatcheck.store import Store

SESSION: Final = "coatcheck:savings"
"""The session with the counts of a store: one series for each month."""

SURFACE, SERVER = "surface", "server"
"""Keys in the metadata of an artifact that became a stub."""

_MCP: Final = "mcp__"
_OTHERS: Final = "others"
_LONGEST: Final = 100  # characters of a name
_NOTED: Final = 128  # counts that wait to be added up
_TRACKED: Final = 500  # rows that are collected before they are written
_ROWS: Final = 2_000  # rows of a month
_MONTHS: Final = 36
_SUMMED_EVERY: Final = 64
_KEPT: Final = 4 * _SUMMED_EVERY
_LARGEST: Final = 1 << 53
_WHOLE: Final = 64  # characters of an id


@dataclass(frozen=True, slots=True)
class ResultSource:
    """Where a result enters: a surface of Coatcheck, and the server that the tool belongs to, if it
    has one."""

    surface: str = "library"
    server: str = ""

    def metadata(self) -> dict[str, str]:
        """Return what is stored with an artifact, so that reading it back is counted in the right
        place."""
        named = {SERVER: mask(self.server)[:_LONGEST]} if self.server else {}
        return {SURFACE: self.surface[:_LONGEST], **named} if self.surface else {}


LIBRARY: Final = ResultSource()
_TOOLS: Final = ResultSource("tools")
UNCOUNTED: Final = ResultSource("")
"""For a value that is stored, but is not what a model gets in place of a result."""


@dataclass(frozen=True, slots=True)
class SavingsRow:
    """The counts of one tool on one day (UTC). In a sum, `day` is None and names that differ are
    empty."""

    surface: str = ""
    server: str = ""
    tool: str = ""
    day: date | None = None
    results: int = 0
    """Results that became stubs."""
    tokens_kept_out: int = 0
    """Tokens of these results, less those of their stubs."""
    reads: int = 0
    """Pages that models read of them."""
    tokens_read_back: int = 0
    """Tokens of these pages and of the calls that asked for them."""
    failures: int = 0
    """Results that could not be stored, and were cut."""

    @property
    def tokens_net(self) -> int:
        return self.tokens_kept_out - self.tokens_read_back

    def to_record(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        named = {"surface": self.surface, "server": self.server, "tool": self.tool}
        day = {} if self.day is None else {"day": self.day.isoformat()}
        return {
            **named,
            **day,
            **{name: getattr(self, name) for name in _COUNTED},
            "tokens_net": self.tokens_net,
        }


_COUNTED: Final = tuple(one.name for one in fields(SavingsRow))[4:]
_Key = tuple[str, str, str, str]  # day, surface, server, tool


@dataclass(frozen=True, slots=True)
class Savings:
    """What a store has counted, a row for each day and tool: newest days first, then largest
    savings first."""

    rows: tuple[SavingsRow, ...] = ()

    @property
    def total(self) -> SavingsRow:
        return _sum(self.rows)

    def __str__(self) -> str:
        one = self.total
        text = (
            f"{_many(one.results, 'result')} kept out, about {one.tokens_kept_out:,} tokens; "
            f"{one.tokens_read_back:,} read back in {_many(one.reads, 'read')}; "
            f"{one.tokens_net:,} net"
        )
        return text + (
            f"; {_many(one.failures, 'result')} could not be stored" if one.failures else ""
        )

    def by(self, *names: str) -> list[SavingsRow]:
        """Return the sums for each combination of "surface", "server", "tool" and "day", largest
        savings first; days alone in their order."""
        unknown = set(names) - {"surface", "server", "tool", "day"}
        if unknown or not names:
            raise InvalidArgument(
                f"rows cannot be grouped by {sorted(unknown)}", hint='by("server", "tool")'
            )
        groups: dict[tuple[Any, ...], list[SavingsRow]] = {}
        for row in self.rows:
            groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
        found = [
            replace(_sum(rows), **dict(zip(names, key, strict=True)))
            for key, rows in groups.items()
        ]
        if names == ("day",):
            return sorted(found, key=lambda row: row.day or date.min)
        return sorted(found, key=_order)


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _sum(rows: Iterable[SavingsRow]) -> SavingsRow:
    known = list(rows)
    return SavingsRow(**{name: sum(getattr(row, name) for row in known) for name in _COUNTED})


def _order(row: SavingsRow) -> tuple[Any, ...]:
    day = row.day.toordinal() if row.day else 0
    return -day, -row.tokens_net, row.surface, row.server, row.tool


def savings(store: Store, *, since: date | None = None, until: date | None = None) -> Savings:
    """Return what stubs kept out of prompts, less what models read back, for every surface that
    uses this store: the library, the proxy, the gateway, the HTTP API, plugins and adapters.
    `since` and `until` are days, inclusive, in UTC. Counts of the last 36 months are kept; other
    processes write theirs within 30 seconds."""
    first, last = _day_given(since, "since", date.min), _day_given(until, "until", date.max)
    session, counts = store.session(SESSION), dict(counts_of(store).pending())
    months = [one for one in _months(store.clock()) if one >= first.isoformat()[:7]]
    for month in session.first_records(months):
        _add(counts, _stored(session, month)[0])
    rows: list[SavingsRow] = []
    for (written, surface, server, tool), numbers in counts.items():
        try:
            day = date.fromisoformat(written)
        except ValueError:  # a damaged record
            continue
        if first <= day <= last:
            named = dict(zip(_COUNTED, numbers, strict=True))
            rows.append(SavingsRow(surface, server, tool, day, **named))
    return Savings(tuple(sorted(rows, key=_order)))


def _day_given(given: date | None, name: str, default: date) -> date:
    """Return the day of a date or datetime. Raises `InvalidArgument` for anything else."""
    if given is None:
        return default
    if not isinstance(given, date):
        raise InvalidArgument(
            f"{name} must be a date, got a {type(given).__name__}",
            hint="datetime.date(2026, 1, 31)",
        )
    return date(given.year, given.month, given.day)


class SavingsCounts:
    """The counts of one process for one store. Thread-safe; a forked process begins with none."""

    rank = 0

    def __init__(self, store: Store) -> None:
        self._noted: deque[tuple[_Key, Sequence[int], Sequence[str]]] = deque()
        self._counts: dict[_Key, list[int]] = {}
        self._seen: dict[tuple[str, str, str], None] = {}
        self._sources: dict[
            str, ResultSource
        ] = {}  # by artifact, also for those without one in their metadata
        self._clock = store.clock
        self._lock = threading.RLock()
        watch(self)
        store.writers.append(partial(self.flush, store))

    def kept_out(
        self,
        session: CoreSession,
        source: ResultSource,
        tool: str | None,
        refs: Sequence[Ref],
        tokens: int,
        *,
        stubs: Sequence[str] = (),
        failed: bool = False,
    ) -> None:
        """Count a result of this many tokens that became stubs with these refs and texts, or could
        not be stored. The same result of the same call counts once, even if a host passes it
        again."""
        if not source.surface:
            return
        if refs and refs[0].call_id:
            call = (session.session_id, refs[0].call_id, refs[0].artifact_id)
            if call in self._seen:
                return
            self._seen[call] = None
        self._sources |= {ref.artifact_id: source for ref in refs}
        if max(len(self._seen), len(self._sources)) > REMEMBERED:
            bound(self._seen)
            bound(self._sources)
        tool = refs[0].tool if refs else tool and mask(tool)
        self._count(source, tool, (int(not failed), tokens, 0, 0, int(failed)), stubs)

    def read_back(self, session: CoreSession, ref: Ref, tokens: int) -> None:
        """Count a page of an artifact, if that or the artifact it was made from became a stub."""
        for _ in range(3):
            source = _source_of(ref) or self._sources.get(ref.artifact_id)
            if source is not None:
                self._count(source, ref.tool, (0, 0, 1, tokens, 0))
                return
            parent = None
            with suppress(CoatcheckError):
                parent = session.ref(pointer_of(ref.parents[0], _WHOLE)) if ref.parents else None
            if parent is None:
                return
            ref = parent

    def listed(self, tokens: int) -> None:
        """Count a list of artifacts that a model asked for."""
        self._count(_TOOLS, "list_artifacts", (0, 0, 1, tokens, 0))

    def pending(self) -> Iterator[tuple[_Key, list[int]]]:
        """Yield what is not written yet."""
        with self._lock:
            self._add_noted()
        return iter({key: list(numbers) for key, numbers in dict(self._counts).items()}.items())

    def flush(self, store: Store) -> None:
        """Write the counts. What cannot be written is lost: it must not count twice."""
        with self._lock:
            taken = self._taken()
        months: dict[str, dict[_Key, list[int]]] = {}
        for key, numbers in taken.items():
            months.setdefault(key[0][:7], {})[key] = numbers
        with suppress(StoreError):
            for month, rows in months.items():
                session = store.session(SESSION, ttl=None)
                if session.record(month, _body(rows), keep=_KEPT) % _SUMMED_EVERY == 0:
                    counts, upto = _stored(session, month)
                    session.record(month, _body(counts, upto), keep=_KEPT)

    def locks(self) -> list[RLock]:
        return [self._lock]

    def before_fork(self) -> None:
        pass

    def after_fork(self) -> None:
        self._noted.clear()  # the parent process writes them
        self._counts = {}

    def _taken(self) -> dict[_Key, list[int]]:
        self._add_noted()
        taken, self._counts = self._counts, {}
        return taken

    def _count(
        self,
        source: ResultSource,
        tool: str | None,
        numbers: Sequence[int],
        stubs: Sequence[str] = (),
    ) -> None:
        """Note counts. They are added up later, many at once: a result should not wait for it."""
        server, name = source.server, tool or ""
        if not server and name.startswith(_MCP):
            server, _, name = name.removeprefix(_MCP).partition("__")
        server = mask(server)[:_LONGEST] if server else ""
        key: _Key = (
            _day(int(self._clock()) // 86_400),
            source.surface[:_LONGEST],
            server,
            name[:_LONGEST],
        )
        self._noted.append((key, numbers, stubs))
        if len(self._noted) > _NOTED:
            with self._lock:
                self._add_noted()

    def _add_noted(self) -> None:
        for _ in range(len(self._noted)):
            key, (results, tokens, *others), stubs = self._noted.popleft()
            found = (
                key
                if key in self._counts or len(self._counts) < _TRACKED
                else (*key[:2], "", _OTHERS)
            )
            _add(
                self._counts,
                {found: [results, max(0, tokens - sum(map(estimate, stubs))), *others]},
            )


def _day(number: int) -> str:
    """Return a day, given how many days after 1970 it is."""
    return datetime.fromtimestamp(number * 86_400, UTC).date().isoformat()


_COUNTS: Final[WeakKeyDictionary[Store, SavingsCounts]] = WeakKeyDictionary()


def counts_of(store: Store) -> SavingsCounts:
    """Return the counts of a store, one object per process."""
    return _COUNTS.get(store) or _COUNTS.setdefault(store, SavingsCounts(store))


def _source_of(ref: Ref) -> ResultSource | None:
    """Return where an artifact entered as a result, if its metadata says so."""
    metadata = ref.metadata
    surface, server = metadata.get(SURFACE), metadata.get(SERVER, "")
    return (
        ResultSource(surface, server)
        if isinstance(surface, str) and isinstance(server, str)
        else None
    )


def _add(total: dict[_Key, list[int]], more: Mapping[_Key, Sequence[int]]) -> None:
    for key, numbers in more.items():
        known = total.get(key)
        total[key] = (
            list(numbers) if known is None else [a + b for a, b in zip(known, numbers, strict=True)]
        )


def _months(now: float) -> list[str]:
    today = datetime.fromtimestamp(now, UTC)
    newest = today.year * 12 + today.month - 1
    return [f"{one // 12:04}-{one % 12 + 1:02}" for one in range(newest - _MONTHS + 1, newest + 2)]


def _body(counts: Mapping[_Key, Sequence[int]], upto: int | None = None) -> bytes:
    """Return counts as a record. If there are too many rows, those that saved least are merged."""
    rows = sorted(counts.items(), key=lambda one: -one[1][1])
    most = _ROWS
    while True:
        kept: dict[_Key, list[int]] = {}
        _add(kept, dict(rows[:most]))
        for key, numbers in rows[most:]:
            _add(kept, {(*key[:2], "", _OTHERS): numbers})
        written = {"rows": [[*key, *numbers] for key, numbers in kept.items()]}
        body = json.dumps(
            written if upto is None else {"upto": upto, **written}, separators=(",", ":")
        ).encode()
        if len(body) <= RECORD_LIMIT or most == 0:
            return body
        most //= 2


def _stored(session: CoreSession, month: str) -> tuple[dict[_Key, list[int]], int]:
    """Return the counts of a month, and the number of the newest record in them: those of the
    newest sum, and what was written since. Damaged records are skipped."""
    counts: dict[_Key, list[int]] = {}
    last = upto = 0
    before: int | None = None
    while page := session.records(month, newest=True, before=before, limit=_SUMMED_EVERY):
        last = last or page[0].seq
        for record in page:
            if record.seq <= upto:
                return counts, last
            found, until = _parsed(record)
            if until is None or not upto:
                _add(counts, found)
            upto = upto or until or 0
        before = page[-1].seq
    return counts, last


def _parsed(record: Record) -> tuple[dict[_Key, list[int]], int | None]:
    """Return the rows of a record, and for a sum the number of the newest record in it."""
    rows: dict[_Key, list[int]] = {}
    try:
        body = json.loads(record.body)
        upto = body.get("upto")
        for day, surface, server, tool, *numbers in body["rows"]:
            if len(numbers) == len(_COUNTED) and all(
                type(one) is int and 0 <= one < _LARGEST for one in numbers
            ):
                _add(rows, {(str(day), str(surface), str(server), str(tool)): numbers})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, None
    return rows, upto if isinstance(upto, int) and 0 < upto < record.seq else None
