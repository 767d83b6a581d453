"""The hot command: shows the hot state of a session, its history, and what changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from coatcheck import errors
from coatcheck.cli import open_existing, store_options, terminal, usage_error
from coatcheck.ids import clip
from coatcheck.redaction import mask
from coatcheck.refs import iso_time

if TYPE_CHECKING:
    from coatcheck import Session
    from coatcheck.context import Snapshot
    from coatcheck.storage import Record

_SERIES: Final = "hot"
_NAME_WIDTH: Final = 22
_STATES: Final = {
    "number": "number",
    "written_at": "time",
    "holder": "holder",
    "risk_level": "risk",
    "artifacts": "artifacts",
    "changed": "changed",
}


@click.command()
@click.argument("session_id", metavar="SESSION", envvar="COATCHECK_SESSION")
@click.argument("numbers", metavar="[N [M]]", nargs=-1, type=click.IntRange(min=1))
@click.option("--history", is_flag=True, help="List the states, newest first.")
@click.option("--diff", is_flag=True, help="Changes from state N to M. Default: the last two.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Maximum number of states.",
)
@store_options
def hot(
    session_id: str,
    numbers: tuple[int, ...],
    history: bool,
    diff: bool,
    limit: int,
    url: str | None,
    as_json: bool,
) -> None:
    """Show the hot state of a SESSION.

    Shows the newest state, or number N of its history."""
    if diff:
        most = 2
    elif history:
        most = 0
    else:
        most = 1
    if (history and diff) or len(numbers) > most:
        raise usage_error("specify one state, --history, or --diff with at most two numbers")
    with open_existing(url) as store:
        session = store.session(session_id)
        if history:
            rows = list(_history(session, limit))
            terminal.print_records(rows, _STATES, as_json=as_json, shrink=("holder", "changed"))
        elif diff:
            _print_diff(session, numbers, as_json)
        else:
            _print_state(session, numbers, as_json)


def _print_state(session: Session, numbers: tuple[int, ...], as_json: bool) -> None:
    from coatcheck.context import Budget
    from coatcheck.context.hot_state import entry_line

    snapshot = _find_snapshot(session, *numbers)
    try:
        rendered = snapshot.state.fitted(Budget(**session.store.settings.section("budget")))
        tokens, steps = rendered.tokens, list(rendered.steps)
    except errors.BudgetExceeded as error:
        tokens, steps = None, [error.message]
    if as_json:
        terminal.print_json(snapshot.to_record() | {"tokens": tokens, "steps": steps})
        return
    lines: list[tuple[str, str]] = []
    for name, value in snapshot.state.shown().items():
        for item in value if isinstance(value, list) else [value]:
            text = entry_line(item) if isinstance(item, dict) else str(item)
            lines.append((name, terminal.one_line(text)))
    if terminal.is_terminal():
        terminal.print_pieces(_state_pieces(snapshot, lines))
    else:
        terminal.print_table((), lines)
    note = "; ".join(steps)
    if tokens:
        note = f"in a prompt: {tokens} tokens" + (f" after {note}" if note else "")
    terminal.print_note(note)


def _state_pieces(snapshot: Snapshot, lines: list[tuple[str, str]]) -> Iterator[terminal.Piece]:
    holder = terminal.one_line(mask(snapshot.holder))
    yield f"state {snapshot.number}", terminal.BOLD
    yield f", written {snapshot.written_at:%Y-%m-%d %H:%M:%S}Z by {holder}\n", terminal.FAINT
    last = ""
    for name, text in lines:
        yield ("" if name == last else name).ljust(_NAME_WIDTH), terminal.FAINT
        yield text + "\n", terminal.PLAIN
        last = name


def _print_diff(session: Session, numbers: tuple[int, ...], as_json: bool) -> None:
    from coatcheck.context import changes_between

    newer = _find_snapshot(session, *numbers[1:])
    if numbers:
        older = _find_snapshot(session, numbers[0])
    else:
        older = _find_snapshot(session, before=newer.number)
    changes = changes_between(older.state, newer.state)
    if as_json:
        records = [change.to_record() for change in changes]
        terminal.print_json({"from": older.number, "to": newer.number, "changes": records})
        return
    pieces: list[terminal.Piece] = []
    for change in changes:
        for text in change.removed:
            line = f"- {change.field}: {terminal.one_line(text)}\n"
            pieces.append((line, terminal.REMOVED))
        for text in change.added:
            line = f"+ {change.field}: {terminal.one_line(text)}\n"
            pieces.append((line, terminal.ADDED))
    terminal.print_text("".join(text for text, _ in pieces), pieces)
    count = f"{len(changes)} fields changed" if changes else "no difference"
    terminal.print_note(f"from state {older.number} to {newer.number}: {count}")


def _history(session: Session, limit: int) -> Iterator[dict[str, Any]]:
    """One row per state, with the fields it changed. An unreadable state gets a row that says
    so."""
    from coatcheck.context import changes_between

    records = session.records(_SERIES, newest=True, limit=limit + 1)
    if not records:
        raise _no_state(session)
    snapshots = [_readable(record) for record in records]
    snapshots.append(None)  # what came before the first state
    for at, record in enumerate(records[:limit]):
        row: dict[str, Any] = {"number": record.seq, "written_at": iso_time(record.at)}
        snapshot, previous = snapshots[at], snapshots[at + 1]
        if snapshot is None:
            row |= {"holder": None, "risk_level": None, "artifacts": None}
            yield row | {"changed": ["cannot be read"]}
            continue
        changes = changes_between(previous.state, snapshot.state) if previous else []
        yield row | {
            "holder": mask(snapshot.holder),
            "risk_level": snapshot.state.risk_level,
            "artifacts": len(snapshot.state.artifact_index),
            "changed": [change.field for change in changes],
        }


def _readable(record: Record) -> Snapshot | None:
    from coatcheck.context import Snapshot

    try:
        return Snapshot.of(record)
    except errors.Damaged:
        return None


def _find_snapshot(
    session: Session, number: int | None = None, *, before: int | None = None
) -> Snapshot:
    """The state with this number, the last one before another, or the newest."""
    from coatcheck.context import history

    found = next(history(session, before=before if number is None else number + 1, limit=1), None)
    if found is not None and number in (None, found.number):
        return found
    if before is not None:
        raise errors.NotFound(
            f"hot state {before} is the first", hint="there is no earlier state to compare it with"
        )
    kept = [*session.records(_SERIES, limit=1), *session.records(_SERIES, newest=True, limit=1)]
    if not kept:
        raise _no_state(session)
    raise errors.NotFound(
        f"there is no hot state {number}", hint=f"the history has {kept[0].seq} to {kept[-1].seq}"
    )


def _no_state(session: Session) -> errors.NotFound:
    return errors.NotFound(
        f"session {clip(session.session_id)} has no hot state",
        hint="'coatcheck ls --sessions' lists sessions",
    )
