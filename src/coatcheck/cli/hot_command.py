"""The command hot: the hot state of a session, its history, and the changes between two states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from coatcheck import errors
from coatcheck.cli import terminal
from coatcheck.cli.options import open_existing, store_options, usage_error
from coatcheck.ids import clip
from coatcheck.redaction import mask
from coatcheck.refs import iso_time

if TYPE_CHECKING:
    from coatcheck import Session
    from coatcheck.context import Snapshot
    from coatcheck.storage import Record

_SERIES: Final = "hot"
_WIDTH: Final = 22
_COLUMNS: Final = {
    "number": "number", "written_at": "time", "holder": "holder", "risk_level": "risk", "artifacts": "artifacts",
    "changed": "changed",
}  # fmt: skip


@click.command()
@click.argument("session_id", metavar="SESSION", envvar="COATCHECK_SESSION")
@click.argument("numbers", metavar="[N [M]]", nargs=-1, type=click.IntRange(min=1))
@click.option("--history", is_flag=True, help="List the states, newest first.")
@click.option("--diff", is_flag=True, help="Changes from state N to M. Default: the last two.")
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Maximum number of states.")
@store_options
def hot(
    session_id: str, numbers: tuple[int, ...], history: bool, diff: bool, limit: int, url: str | None, as_json: bool
) -> None:
    """Show the hot state of a SESSION.

    Shows the newest state, or number N of its history."""
    if history + diff > 1 or len(numbers) > (2 if diff else 0 if history else 1):
        raise usage_error("specify one state, --history, or --diff with at most two numbers")
    with open_existing(url) as store:
        session = store.session(session_id)
        if history:
            rows = list(_history(session, limit))
            terminal.print_records(rows, _COLUMNS, as_json=as_json, shrink=("holder", "changed"))
        elif diff:
            _print_diff(session, numbers, as_json)
        else:
            _print_state(session, numbers, as_json)


def _print_state(session: Session, numbers: tuple[int, ...], as_json: bool) -> None:
    from coatcheck.context import Budget, Snapshot
    from coatcheck.context.hot_state import entry_line

    snapshot = Snapshot.of(_record(session, *numbers))
    try:
        rendered = snapshot.state.fitted(Budget(**session.store.settings.section("budget")))
        tokens, steps = rendered.tokens, list(rendered.steps)
    except errors.BudgetExceeded as error:
        tokens, steps = None, [error.message]
    if as_json:
        terminal.print_json(snapshot.to_record() | {"tokens": tokens, "steps": steps})
        return
    lines = [
        (name, terminal.one_line(entry_line(item) if isinstance(item, dict) else str(item)))
        for name, value in snapshot.state.shown().items()
        for item in (value if isinstance(value, list) else [value])
    ]
    if terminal.is_terminal():
        terminal.print_pieces(_state_pieces(snapshot, lines))
    else:
        terminal.print_table((), lines)
    text = "; ".join(steps)
    terminal.print_note(f"in a prompt: {tokens} tokens{' after ' + text if text else ''}" if tokens else text)


def _state_pieces(snapshot: Snapshot, lines: list[tuple[str, str]]) -> Iterator[terminal.Piece]:
    holder = terminal.one_line(mask(snapshot.holder))
    yield f"state {snapshot.number}", terminal.BOLD
    yield f", written {snapshot.written_at:%Y-%m-%d %H:%M:%S}Z by {holder}\n", terminal.FAINT
    last = ""
    for name, text in lines:
        yield ("" if name == last else name).ljust(_WIDTH), terminal.FAINT
        yield text + "\n", terminal.PLAIN
        last = name


def _print_diff(session: Session, numbers: tuple[int, ...], as_json: bool) -> None:
    from coatcheck.context import Snapshot, changes_between

    newer = _record(session, *numbers[1:])
    older = _record(session, numbers[0]) if numbers else _record(session, before=newer.seq)
    changes = changes_between(Snapshot.of(older).state, Snapshot.of(newer).state)
    if as_json:
        terminal.print_json({"from": older.seq, "to": newer.seq, "changes": [one.to_record() for one in changes]})
        return
    pieces = [
        (f"{sign} {change.field}: {terminal.one_line(text)}\n", style)
        for change in changes
        for sign, style, texts in (("-", terminal.REMOVED, change.removed), ("+", terminal.ADDED, change.added))
        for text in texts
    ]
    terminal.print_text("".join(text for text, _ in pieces), pieces)
    count = f"{len(changes)} fields changed" if changes else "no difference"
    terminal.print_note(f"from state {older.seq} to {newer.seq}: {count}")


def _history(session: Session, limit: int) -> Iterator[dict[str, Any]]:
    """One row per state, with the fields it changed. An unreadable state gets a row that says so."""
    from coatcheck.context import changes_between

    records = session.records(_SERIES, newest=True, limit=limit + 1)
    if not records:
        raise _no_state(session)
    snapshots = [_readable(record) for record in records]
    for record, snapshot, previous in zip(records[:limit], snapshots, [*snapshots[1:], None], strict=False):
        row: dict[str, Any] = {"number": record.seq, "written_at": iso_time(record.at)}
        if snapshot is None:
            yield row | {"holder": None, "risk_level": None, "artifacts": None, "changed": ["cannot be read"]}
            continue
        state = snapshot.state
        yield row | {
            "holder": mask(snapshot.holder),
            "risk_level": state.risk_level,
            "artifacts": len(state.artifact_index),
            "changed": [one.field for one in changes_between(previous.state, state)] if previous else [],
        }


def _readable(record: Record) -> Snapshot | None:
    from coatcheck.context import Snapshot

    try:
        return Snapshot.of(record)
    except errors.Damaged:
        return None


def _record(session: Session, number: int | None = None, *, before: int | None = None) -> Record:
    """The record with this number, the last one before another, or the newest."""
    wanted = {"before": before} if number is None else {"after": number - 1, "before": number + 1}
    if found := session.records(_SERIES, newest=True, limit=1, **wanted):
        return found[0]
    if before is not None:
        raise errors.NotFound(f"hot state {before} is the first", hint="there is no earlier state to compare it with")
    kept = [*session.records(_SERIES, limit=1), *session.records(_SERIES, newest=True, limit=1)]
    if not kept:
        raise _no_state(session)
    raise errors.NotFound(f"there is no hot state {number}", hint=f"the history has {kept[0].seq} to {kept[-1].seq}")


def _no_state(session: Session) -> errors.NotFound:
    return errors.NotFound(
        f"session {clip(session.session_id)} has no hot state", hint="'coatcheck ls --sessions' lists sessions"
    )
