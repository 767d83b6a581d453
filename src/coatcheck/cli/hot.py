"""The command that looks at a session's hot state: as it is, as it was, and what changed in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from coatcheck import Session, errors
from coatcheck.cli.options import json_option, open_existing, store_option
from coatcheck.cli.terminal import cell, is_terminal, iso_time, note, one_line, print_json, print_pieces, print_table
from coatcheck.ids import clip
from coatcheck.redaction import mask

if TYPE_CHECKING:  # no other command should wait for what comes with these
    from coatcheck.cli.highlight import Piece
    from coatcheck.context import Change, Snapshot
    from coatcheck.storage import Record

_SERIES: Final = "hot"
_WIDTH: Final = 22
_HEAD: Final = "bold"
_FAINT: Final = "dim"
_ADDED: Final = "green"
_REMOVED: Final = "red"
_COLUMNS: Final = ("number", "time", "holder", "risk", "artifacts", "changed")


@click.command()
@click.argument("session_id", metavar="SESSION", envvar="COATCHECK_SESSION")
@click.argument("numbers", metavar="[N [M]]", nargs=-1, type=click.IntRange(min=1))
@click.option("--history", "is_history", is_flag=True, help="List the states that were written, the newest first.")
@click.option("--diff", "is_diff", is_flag=True, help="What changed from state N to M; the last two where not given.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="With --history: so many."
)
@store_option
@json_option
@click.pass_context
def hot(
    context: click.Context,
    session_id: str,
    numbers: tuple[int, ...],
    is_history: bool,
    is_diff: bool,
    limit: int,
    url: str | None,
    as_json: bool,
) -> None:
    """Show the hot state of a SESSION: the newest one, or number N of its history."""
    if is_history + is_diff > 1 or len(numbers) > (2 if is_diff else 0 if is_history else 1):
        raise click.UsageError("one state, --history, or --diff with two numbers at most", context)
    with open_existing(url) as store:
        session = store.session(session_id)
        if is_history:
            _print_history(session, limit, as_json)
        elif is_diff:
            _print_diff(session, numbers, as_json)
        else:
            _print_state(session, numbers, as_json)


def _print_state(session: Session, numbers: tuple[int, ...], as_json: bool) -> None:
    snapshot = _snapshot(_record(session, *numbers))
    fit = _fit(session, snapshot)
    if as_json:
        print_json(snapshot.to_record() | fit)
        return
    lines = [(name, text) for name, value in snapshot.state.shown().items() for text in _lines(value)]
    if is_terminal():
        print_pieces(_state_pieces(snapshot, lines))
    else:
        print_table((), ((name, one_line(text)) for name, text in lines), yielding=())
    taken = "; ".join(fit["steps"])
    note(f"in a prompt: {fit['tokens']} tokens{' after ' + taken if taken else ''}" if fit["tokens"] else taken)


def _print_history(session: Session, limit: int, as_json: bool) -> None:
    rows = list(_history(session, limit))
    if not rows:
        raise _nothing(session)
    if as_json:
        for row in rows:
            print_json(row)
        return
    cells = (
        [cell(name, row[name]) for name in ("number", "written_at", "holder", "risk_level", "artifacts", "changed")]
        for row in rows
    )  # fmt: skip
    print_table(_COLUMNS, cells, yielding=("holder", "changed"))


def _print_diff(session: Session, numbers: tuple[int, ...], as_json: bool) -> None:
    from coatcheck.context import changes_between

    newer = _record(session, *numbers[1:])
    older = _record(session, numbers[0]) if numbers else _before(session, newer)
    found = changes_between(_snapshot(older).state, _snapshot(newer).state)
    if as_json:
        print_json({"from": older.seq, "to": newer.seq, "changes": [one.to_record() for one in found]})
        return
    if is_terminal():
        print_pieces(_diff_pieces(found))
    else:
        for text, _ in _diff_lines(found):
            click.echo(text)
    note(f"from state {older.seq} to {newer.seq}: " + (f"{len(found)} fields changed" if found else "no difference"))


def _history(session: Session, limit: int) -> Iterator[dict[str, Any]]:
    """A row for each state, with the fields that it changed. One that makes no sense says so, and stops no other."""
    from coatcheck.context import changes_between

    records = session.records(_SERIES, newest=True, limit=limit + 1)
    snapshots = [_snapshot_or_none(record) for record in records]
    for at, record in enumerate(records[:limit]):
        now, before = snapshots[at], snapshots[at + 1] if at + 1 < len(records) else None
        row = {"number": record.seq, "written_at": iso_time(record.at)}
        if now is None:
            yield row | {"holder": None, "risk_level": None, "artifacts": None, "changed": ["cannot be read"]}
            continue
        changed = [one.field for one in changes_between(before.state, now.state)] if before else []
        index = now.state.artifact_index
        yield row | {
            "holder": mask(now.holder), "risk_level": now.state.risk_level, "artifacts": len(index), "changed": changed,
        }  # fmt: skip


def _record(session: Session, number: int | None = None) -> Record:
    """A record of the history: the newest, or the one with this number."""
    wanted = {} if number is None else {"after": number - 1, "before": number + 1}
    found = session.records(_SERIES, newest=True, limit=1, **wanted)
    if found:
        return found[0]
    kept = [*session.records(_SERIES, limit=1), *session.records(_SERIES, newest=True, limit=1)]
    if not kept:
        raise _nothing(session)
    raise errors.NotFound(f"there is no hot state {number}", hint=f"the history has {kept[0].seq} to {kept[-1].seq}")


def _before(session: Session, record: Record) -> Record:
    found = session.records(_SERIES, newest=True, limit=1, before=record.seq)
    if not found:
        raise errors.NotFound(
            f"hot state {record.seq} is the first that there is", hint="there is none to compare it with"
        )
    return found[0]


def _nothing(session: Session) -> errors.NotFound:
    return errors.NotFound(
        f"the session {clip(session.session_id)} has no hot state", hint="'coatcheck ls --sessions' lists sessions"
    )


def _snapshot(record: Record) -> Snapshot:
    from coatcheck.context import Snapshot

    return Snapshot.of(record)


def _snapshot_or_none(record: Record) -> Snapshot | None:
    try:
        return _snapshot(record)
    except errors.Damaged:
        return None


def _fit(session: Session, snapshot: Snapshot) -> dict[str, Any]:
    """What the state costs in a prompt, and what is left out there."""
    from coatcheck.context import Budget

    try:
        rendered = snapshot.state.fitted(Budget(**session.store.settings.section("budget")))
    except errors.BudgetExceeded as error:
        return {"tokens": None, "steps": [error.message]}
    return {"tokens": rendered.tokens, "steps": list(rendered.steps)}


def _lines(value: Any) -> list[str]:
    from coatcheck.context.changes import told

    if isinstance(value, list):
        return [told(item) if isinstance(item, dict) else item for item in value]
    return [str(value)]


def _state_pieces(snapshot: Snapshot, lines: list[tuple[str, str]]) -> Iterator[Piece]:
    written = f"{snapshot.written_at:%Y-%m-%d %H:%M:%S}Z by {one_line(mask(snapshot.holder))}"
    yield f"state {snapshot.number}", _HEAD
    yield f", written {written}\n", _FAINT
    last = ""
    for name, text in lines:
        yield ("" if name == last else name).ljust(_WIDTH), _FAINT
        yield one_line(text) + "\n", ""
        last = name


def _diff_lines(found: tuple[Change, ...]) -> Iterator[Piece]:
    for change in found:
        for sign, style, texts in (("-", _REMOVED, change.removed), ("+", _ADDED, change.added)):
            for text in texts:
                yield f"{sign} {change.field}: {one_line(text)}", style


def _diff_pieces(found: tuple[Change, ...]) -> Iterator[Piece]:
    return ((text + "\n", style) for text, style in _diff_lines(found))
