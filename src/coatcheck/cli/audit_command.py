"""The command audit: what recorded sessions cost, and what they would have cost with Coatcheck."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from coatcheck.cli import terminal
from coatcheck.cli.options import json_option, usage_error
from coatcheck.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coatcheck.audit import Audited

_SHOWN: Final = 3  # of the best and of the worst sessions
_PAYS: Final = 0.99
_MANY_READS: Final = 1.5
_COLUMNS: Final = {
    "name": "sessions", "calls": "calls", "inline": "inline", "ratio": "Coatcheck", "worse": "worse", "stubs": "stubs",
    "reads": "reads", "kept_out": "kept out", "path": "file",
}  # fmt: skip


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=click.Path(path_type=Path, exists=True))
@click.option("--model", "model_name", metavar="NAME", help="Use the prices of this model. Default: the usual prices.")
@click.option("--plot", "plot_file", metavar="FILE.svg", help="Write a plot with one bar for each session.")
@json_option
def audit(paths: tuple[Path, ...], model_name: str | None, plot_file: str | None, as_json: bool) -> None:
    """Show what recorded sessions would have cost with Coatcheck.

    A PATH is a file, or a folder with transcripts. Default: the sessions of Claude Code, Codex and pi of this user. The
    sessions are replayed, and what later answers used of a stored result is read back and charged. Nothing is changed
    or stored."""
    from coatcheck.audit import audit as audited
    from coatcheck.audit import ratio_plot, total, usual_folders
    from coatcheck.models import UNKNOWN, model

    chosen = list(paths) or usual_folders()
    if not chosen:
        raise usage_error("there are no sessions of Claude Code, Codex or pi; name a file or a folder")
    known = model(model_name)
    if model_name is not None and known is UNKNOWN:
        terminal.print_note(f"the prices of {model_name} are not known; the usual ones are used")
    with terminal.progress("replaying", quiet=as_json) as bar:
        found = list(audited(chosen, prices=known.prices, progress=bar))
    skipped = [one for one in found if one.skipped]
    sessions = sorted((one for one in found if not one.skipped), key=lambda one: one.ratio)
    whole = total(sessions)
    if as_json:
        record = {"sessions": len(sessions), "worse": sum(one.is_worse for one in sessions), **whole.to_record()}
        terminal.print_json({"total": record, "files": [one.to_record() for one in [*sessions, *skipped]]})
    for one in [] if as_json else skipped:
        terminal.print_note(f"skipped {one.path}: {one.skipped}")
    if not sessions:
        raise InvalidArgument("there is no recorded session in these files", hint="name a transcript of an agent")
    if plot_file is not None:
        with terminal.writing(plot_file) as out:
            out.write(ratio_plot("Cost with Coatcheck", [(one.name, one.ratio) for one in sessions]).encode())
    if not as_json:
        few = sessions if len(sessions) <= 2 * _SHOWN else [*sessions[:_SHOWN], *sessions[-_SHOWN:]]
        rows = [_row(whole, sessions)] * (len(sessions) > 1) + [_row(one, [one]) for one in few]
        terminal.print_records(rows, _COLUMNS, as_json=False, shrink=("sessions", "file"))
        terminal.print_note(verdict(whole, sessions))


def _row(one: Audited, sessions: Sequence[Audited]) -> dict[str, Any]:
    return {
        "name": one.name if len(sessions) == 1 else f"all {len(sessions)}", "calls": one.inline.calls, "inline": 1,
        "ratio": f"{one.ratio:.3f}", "worse": sum(each.is_worse for each in sessions), "stubs": one.ours.stubs,
        "reads": one.ours.reads, "kept_out": one.ours.kept_out, "path": one.path or None,
    }  # fmt: skip


def verdict(whole: Audited, sessions: Sequence[Audited]) -> str:
    """Return one line that says whether it pays, and why not."""
    ours, calls = whole.ours, whole.inline.calls / len(sessions)
    if whole.ratio < _PAYS:
        return f"it pays: {1 - whole.ratio:.0%} less, with {ours.extra_calls:,} calls more to read back"
    if not ours.kept_out:
        return f"it does not pay here: in sessions of {calls:.0f} calls, no result is large enough to leave the context"
    if ours.reads > _MANY_READS * max(1, ours.stubs):
        return (
            f"it does not pay here: a stub is read {ours.reads / max(1, ours.stubs):.1f} times, a call more each time"
        )
    return f"it does not pay here: sessions of {calls:.0f} calls are too short to earn the stubs and tools back"
