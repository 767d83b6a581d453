"""The commands that speak MCP: `mcp`, a server for the store, and `proxy`, which slims other servers."""

from __future__ import annotations

import os
import secrets

import click

import coatcheck
from coatcheck import Policy
from coatcheck.cli.options import store_option

_DAY = 86_400.0

session_option = click.option(
    "--session",
    "session_id",
    envvar="COATCHECK_SESSION",
    show_envvar=True,
    metavar="ID",
    help="The session, for pointers that work in the next run too. Without it, each run has its own.",
)
ttl_option = click.option(
    "--ttl",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    default=_DAY,
    show_default=True,
    help="How long artifacts are kept after the session's last use.",
)


@click.command()
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--inline", metavar="TOOL", multiple=True, help="A tool whose results stay as they are. May be repeated.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Results over this become stubs; 3000.")
@click.option("--timeout", type=click.FloatRange(min=0), metavar="SECONDS", default=600.0, show_default=True)
@session_option
@ttl_option
@store_option
def proxy(
    command: tuple[str, ...],
    inline: tuple[str, ...],
    max_tokens: int | None,
    timeout: float,
    session_id: str | None,
    ttl: float,
    url: str | None,
) -> int:
    """Stand before another MCP server, and slim what it answers."""
    from coatcheck.mcp import report
    from coatcheck.mcp.child import Child
    from coatcheck.mcp.proxy import Settings, run, say

    upstream = Child(command)
    counts = report.Counts()
    session_id = session_id or f"mcp-{secrets.token_hex(8)}"
    with coatcheck.open(url) as store:
        session = store.session(session_id, ttl=ttl)
        try:
            return run(upstream, session, Settings(Policy(max_tokens=max_tokens), frozenset(inline), timeout), counts)
        finally:
            report.keep(store, counts, server=os.path.basename(command[0]), session_id=session_id)
            say(str(counts))
