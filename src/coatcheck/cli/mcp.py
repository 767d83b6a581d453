"""The commands that speak MCP: `mcp`, a server for the store, and `proxy`, which slims other servers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import click

import coatcheck
from coatcheck import Policy, errors
from coatcheck.cli.options import json_option, open_existing, store_option
from coatcheck.cli.terminal import one_line, print_json, print_table

if TYPE_CHECKING:
    from coatcheck.mcp.report import Counts
    from coatcheck.mcp.upstreams import Upstream

_DAY: Final = 86_400.0
_MIB: Final = 1 << 20
_RUNNERS: Final = r"(npx|bunx?|deno|node|uvx|uv|pipx|python)[\d.]*$"

session_option = click.option(
    "--session",
    "session_id",
    envvar="COATCHECK_SESSION",
    show_envvar=True,
    metavar="ID",
    help="The session, where pointers shall work in the next run too; each client has its own where none is named.",
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
@click.option("--http", is_flag=True, help="Serve over HTTP on 127.0.0.1, with a token, in place of stdio.")
@click.option("--port", type=click.IntRange(0, 65_535), default=8974, show_default=True, help="0 for a free one.")
@click.option("--allow-origin", metavar="ORIGIN", multiple=True, help="A web page's origin that may ask. Repeatable.")
@session_option
@ttl_option
@store_option
def mcp(
    http: bool, port: int, allow_origin: tuple[str, ...], session_id: str | None, ttl: float, url: str | None
) -> None:
    """Serve the store over MCP: the three tools, and artifacts as resources.

    On stdin and stdout, for the client that starts it. With --http, for whoever has the token: the one in
    COATCHECK_MCP_TOKEN, else one that is made and printed once."""
    try:
        from coatcheck.mcp.serve import TOKEN, serve_http, serve_stdio
        from coatcheck.mcp.server import Sessions
    except ImportError as error:
        raise errors.MissingExtra("mcp") from error
    with coatcheck.open(url) as store:
        sessions = Sessions(store, session_id or _new_session(), named=session_id is not None, ttl=ttl)
        if http:
            serve_http(sessions, port=port, token=os.environ.get(TOKEN), origins=allow_origin, say=_say)
        else:
            serve_stdio(sessions)


@click.command()
@click.argument("command", metavar="[-- COMMAND [ARGS]...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", "address", metavar="URL", help="A server that runs already, over streamable HTTP.")
@click.option(
    "--header", metavar="'NAME: VALUE'", multiple=True, help="For --url; ${VAR} is the environment's. Repeatable."
)
@click.option(
    "--config", metavar="FILE", type=click.Path(path_type=Path), help="Several servers, as clients name them."
)
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Larger results become stubs; 3000.")
@click.option("--inline", metavar="TOOL", multiple=True, help="A tool whose results are left alone. Repeatable.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=600.0,
    show_default=True,
    help="Give up on a request after so long without an answer or progress; 0 never does.",
)
@click.option(
    "--max-message",
    type=click.IntRange(min=1),
    metavar="MIB",
    default=64,
    show_default=True,
    help="The largest message that is taken.",
)
@click.option("--report", is_flag=True, help="By tool, at the end; without a server: of all runs so far.")
@session_option
@ttl_option
@store_option
@json_option
@click.pass_context
def proxy(
    context: click.Context,
    command: tuple[str, ...],
    address: str | None,
    header: tuple[str, ...],
    config: Path | None,
    max_tokens: int | None,
    inline: tuple[str, ...],
    timeout: float,
    max_message: int,
    report: bool,
    session_id: str | None,
    ttl: float,
    url: str | None,
    as_json: bool,
) -> None:
    """Stand before another MCP server: large results become stubs, and tools to read them are added.

    The server is a COMMAND that speaks MCP on stdio, one at a --url, or those of a --config file. Everything else
    passes through both ways. At the end, stderr has a line about what was saved."""
    given = [one for one in (command, address, config) if one]
    if report and not given:
        _print_reports(url, as_json)
        return
    if len(given) != 1:
        raise click.UsageError("name one: -- COMMAND, --url or --config", context)
    if header and not address:
        raise click.UsageError("--header goes with --url", context)
    from coatcheck.mcp.proxy import Settings, run
    from coatcheck.mcp.report import Counts, keep

    upstream, name = _upstream(command, address, header, config, max_message * _MIB, timeout)
    counts = Counts()
    settings = Settings(Policy(max_tokens=max_tokens), frozenset(inline), timeout, max_message * _MIB)
    session_id = session_id or _new_session()
    with coatcheck.open(url) as store:
        session = store.session(session_id, ttl=ttl)
        try:
            status = run(upstream, session, settings, counts)
        finally:
            with contextlib.suppress(errors.CoatcheckError):  # a store that fails was told of before
                keep(store, counts, server=name, session_id=session_id)
            _tell(counts, report, as_json)
    context.exit(status)


def _upstream(
    command: tuple[str, ...],
    address: str | None,
    header: tuple[str, ...],
    config: Path | None,
    max_message: int,
    timeout: float,
) -> tuple[Upstream, str]:
    """What stands behind the proxy, and a name for it."""
    from coatcheck.mcp.child import Child
    from coatcheck.mcp.config import header as parsed
    from coatcheck.mcp.config import headers_of_environment, remote, servers

    if command:
        return Child(command, max_message=max_message), _named(command)
    if address:
        headers = dict(map(parsed, (*headers_of_environment(), *header)))
        return remote(address, headers, max_message), urlsplit(address).hostname or "?"
    assert config is not None
    from coatcheck.mcp.switchboard import PATIENCE, Switchboard

    found = servers(_configuration(config), max_message=max_message)
    return Switchboard(found, patience=min(PATIENCE, timeout / 2 or PATIENCE)), ", ".join(found)


def _configuration(file: Path) -> object:
    """What a file says in which clients name their servers; they write comments and trailing commas, too."""
    from coatcheck.install import files, jsonc

    data = files.read(file)
    if data is None:
        raise errors.InvalidArgument(f"there is no file {str(file)!r}", hint="--config FILE")
    try:
        found = jsonc.parse(files.text_of(data)[1])
    except errors.InvalidArgument as error:
        raise errors.InvalidArgument(f"{str(file)!r} cannot be read: {error.message}", hint=error.hint) from error
    return found.value if found is not None else None


def _named(command: tuple[str, ...]) -> str:
    """A name for a command in a report: the program, and what it runs where that is only a runner of others. Nothing
    more of it, for arguments may hold secrets."""
    name = Path(command[0]).name
    what = next((one for one in command[1:] if not one.startswith("-")), None)
    return f"{name} {what}" if what and re.match(_RUNNERS, name) else name


def _tell(counts: Counts, by_tool: bool, as_json: bool) -> None:
    """A report on stderr: stdout was the wire."""
    if as_json and by_tool:
        click.echo(json.dumps(counts.to_record()), err=True)
        return
    _say(str(counts))
    if by_tool:
        for name, row in sorted(counts.tools.items(), key=lambda item: -item[1].tokens_saved):
            _say(f"  {name}: {row.slimmed:,} results, about {row.tokens_saved:,} tokens")


def _print_reports(url: str | None, as_json: bool) -> None:
    from coatcheck.mcp.report import kept

    with open_existing(url) as store:
        runs = kept(store)
    if as_json:
        for one in runs:
            print_json(one)
        return
    columns = ("ended_at", "slimmed_results", "tokens_saved", "tokens_read_back", "server", "session")
    rows = [[one_line(str(one.get(column, "-"))) for column in columns] for one in runs]
    print_table(["ended", "slimmed", "saved", "read back", "server", "session"], rows, yielding=("server", "session"))


def _new_session() -> str:
    return f"mcp-{secrets.token_hex(8)}"


def _say(text: str) -> None:
    sys.stderr.write(f"coatcheck: {one_line(text)}\n")
    sys.stderr.flush()
