"""`install`: Coatcheck's entry in the configuration of an MCP client, and the servers there behind the proxy."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from coatcheck import __version__, errors
from coatcheck.cli.highlight import diff_lines
from coatcheck.cli.terminal import note, print_text
from coatcheck.install.clients import CLIENTS, SCOPES, Scope, place_of

if TYPE_CHECKING:
    from coatcheck.install.changes import Plan

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@click.command()
@click.argument("client", type=click.Choice(list(CLIENTS)))
@click.argument("server", nargs=-1)
@click.option("--wrap", is_flag=True, help="Put the servers that are configured there behind the proxy.")
@click.option("--write", is_flag=True, help="Do it; without, what would change is shown.")
@click.option("--undo", is_flag=True, help="Take back all that was written.")
@click.option(
    "--scope",
    type=click.Choice(SCOPES),
    default="user",
    show_default=True,
    help="Whose configuration: the user's, this folder's, or the user's for this folder (Claude Code).",
)
@click.option("--file", type=click.Path(path_type=Path), metavar="FILE", help="Another file than the client's usual.")
@click.option("--name", default="coatcheck", show_default=True, metavar="TEXT", help="The name of our own entry.")
@click.option("--session", "session_id", metavar="ID", help="A session that all of them share, and that stays.")
@click.option("--store", "url", metavar="FOLDER", help="Another store than the user's.")
@click.pass_context
def install(
    context: click.Context,
    client: str,
    server: tuple[str, ...],
    wrap: bool,
    write: bool,
    undo: bool,
    scope: Scope,
    file: Path | None,
    name: str,
    session_id: str | None,
    url: str | None,
) -> None:
    """Add Coatcheck to an MCP client, or put its servers behind the proxy.

    Shows what would change in the client's configuration, without its secrets. --write writes it and keeps the
    original beside it; --undo takes it back. With --wrap, SERVERs are put behind the proxy, or all that are there."""
    from coatcheck.install.changes import plan_entry, plan_undo, plan_wrap
    from coatcheck.install.wrapping import launcher

    if server and not wrap:
        raise click.UsageError("SERVER goes with --wrap", context)
    if undo and (wrap or server):
        raise click.UsageError("--undo takes back everything: it goes without --wrap", context)
    if not _NAME.fullmatch(name):
        raise click.UsageError("--name: letters, digits, - and _, at most 64", context)
    place = place_of(
        client, scope, home=Path.home(), project=Path.cwd(), platform=sys.platform, environ=os.environ, file=file
    )
    if undo:
        plan = plan_undo(place)
        plan.write()
        _show(plan)
        note(f"{place.client.title} is as it was" if not plan.notes else "done")
        return
    start = launcher(sys.argv[0], sys.executable, sys.prefix, __version__, os.environ)
    options = [*(["--session", session_id] if session_id else []), *(["--store", os.path.abspath(url)] if url else [])]
    if wrap:
        plan = plan_wrap(place, server, start, options)
    else:
        if importlib.util.find_spec("mcp") is None:
            raise errors.MissingExtra("mcp")
        plan = plan_entry(place, name, {"command": start[0], "args": [*start[1:], "mcp", *options]})
    if write and not plan.is_empty:
        plan.write()
    _show(plan)
    if plan.is_empty:
        note("nothing to change")
    elif write:
        note(f"written; restart {place.client.title} to use it, and --undo takes it back")
        if scope == "project":
            note("the path in it is one of this machine: think before you commit it")
    else:
        note("nothing was written: --write writes it")


def _show(plan: Plan) -> None:
    text = plan.diff()
    print_text(text, diff_lines(text))
    for one in plan.notes:
        note(one)
