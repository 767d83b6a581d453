"""Commands for MCP: mcp serves the store, proxy runs in front of other servers, install configures
a client."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import click

import coatcheck
from coatcheck import __version__, errors
from coatcheck.cli import (
    FOLDER,
    expand_folder,
    open_existing,
    store_option,
    store_options,
    usage_error,
)
from coatcheck.cli.terminal import diff_lines, print_error, print_note, print_text
from coatcheck.config import SESSION_TTL
from coatcheck.install.clients import CLIENTS, READING_FILES, SCOPES, Scope, find_here

if TYPE_CHECKING:
    from coatcheck import Store
    from coatcheck._toolkit import Purpose
    from coatcheck.adapters.claude_code import Hooks
    from coatcheck.install.clients import ConfigFile
    from coatcheck.install.plan import Plan
    from coatcheck.install.plugin import PluginPlan
    from coatcheck.mcp.proxy_rewrites import Counts
    from coatcheck.mcp.wire import Upstream

_MIB: Final = 1 << 20
_ENTRY_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_RUNNERS: Final = re.compile(r"(npx|bunx?|deno|node|uvx|uv|pipx|python)[\d.]*$")
_POSITIVE: Final = click.IntRange(min=1)
_SECONDS: Final = click.FloatRange(min=0, min_open=True)
_DURATION: Final = click.FloatRange(min=0)
_TTL: Final = (
    "How long artifacts are kept after the session's last use. "
    "It never shortens a session's time to live."
)
_TIMEOUT: Final = "Abandon a request after this time without an answer or progress; 0 for no limit."
_SCOPE: Final = (
    "Configuration of the user, of this folder, or of the user for this folder (Claude Code only)."
)
_FILES: Final = (
    "With --claude-code: results are also files in .coatcheck of the working folder, for models "
    "that read files. No tools are offered."
)
_SESSION: Final = (
    "Session, shared by every process that uses this id and kept for the next run; {folder} is "
    "replaced by the working folder. Default: a new session per client."
)
session_option = click.option(
    "--session",
    "session_id",
    envvar="COATCHECK_SESSION",
    show_envvar=True,
    metavar="ID",
    callback=expand_folder,
    help=_SESSION,
)
ttl_option = click.option(
    "--ttl", type=_SECONDS, metavar="SECONDS", default=SESSION_TTL, show_default=True, help=_TTL
)


@click.command()
@click.option(
    "--http", is_flag=True, help="Serve over HTTP on 127.0.0.1, with a token, instead of stdio."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8974,
    show_default=True,
    help="0 for any free port.",
)
@click.option(
    "--allow-origin",
    metavar="ORIGIN",
    multiple=True,
    help="Origin of an allowed web page. Repeatable.",
)
@click.option(
    "--only",
    type=click.Choice(["get", "list", "store"]),
    multiple=True,
    help="Tool to offer. Repeatable.",
)
@click.option("--claude-code", is_flag=True, help="Answer the hooks of the Claude Code plugin too.")
@click.option("--files", is_flag=True, help=_FILES)
@session_option
@ttl_option
@store_option
def mcp(
    http: bool,
    port: int,
    allow_origin: tuple[str, ...],
    only: tuple[Purpose, ...],
    claude_code: bool,
    files: bool,
    session_id: str | None,
    ttl: float,
    url: str | None,
) -> None:
    """Serve the store over MCP.

    Offers the three tools, and artifacts as resources. Uses stdin and stdout, for the client that
    starts it. With --http, clients need the token from COATCHECK_MCP_TOKEN, or a new one that is
    printed once."""
    from coatcheck.lanes import ending

    if files and (not claude_code or only):
        raise usage_error("--files is for --claude-code, without --only")
    with errors.needs_extra("mcp"):
        from coatcheck.mcp.server import TOKEN, Sessions, serve_http, serve_stdio
    from coatcheck.collect import collecting_daily

    with ending(), coatcheck.open(url) as store, collecting_daily(store):
        name = session_id or f"mcp-{secrets.token_hex(8)}"
        hooks = None
        if claude_code:
            hooks = _hooks(store, session_id, ttl, only=() if files else only or None)
        sessions = Sessions(
            store, name, named=session_id is not None, ttl=ttl, only=only, hooks=hooks
        )
        if http:
            serve_http(
                sessions,
                port=port,
                token=os.environ.get(TOKEN),
                origins=allow_origin,
                say=print_error,
            )
        else:
            serve_stdio(sessions)


@click.command()
@click.argument("command", metavar="[-- COMMAND [ARGS]...]", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", "address", metavar="URL", help="A running server, over streamable HTTP.")
@click.option(
    "--header",
    metavar="'NAME: VALUE'",
    multiple=True,
    help="For --url; ${VAR} is expanded. Repeatable.",
)
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Several servers (mcpServers).",
)
@click.option(
    "--max-tokens",
    metavar="N",
    type=_POSITIVE,
    help="Larger results become stubs. Default: [policy], 3000.",
)
@click.option(
    "--inline",
    metavar="TOOL",
    multiple=True,
    help="A tool whose results are never changed. Repeatable.",
)
@click.option(
    "--no-tools",
    is_flag=True,
    help="Add no tools; 'coatcheck mcp' with the same --session offers them.",
)
@click.option(
    "--files",
    metavar="FOLDER",
    help="Results are files in this folder too, for an agent that reads files. Adds no tools.",
)
@click.option(
    "--timeout", type=_DURATION, metavar="SECONDS", default=600.0, show_default=True, help=_TIMEOUT
)
@click.option(
    "--max-message",
    metavar="MIB",
    type=_POSITIVE,
    default=64,
    show_default=True,
    help="Largest message.",
)
@click.option(
    "--report",
    is_flag=True,
    help="Print savings by tool at the end; without a server, those of the whole store.",
)
@session_option
@ttl_option
@store_options
def proxy(
    command: tuple[str, ...],
    address: str | None,
    header: tuple[str, ...],
    config: Path | None,
    max_tokens: int | None,
    inline: tuple[str, ...],
    no_tools: bool,
    files: str | None,
    timeout: float,
    max_message: int,
    report: bool,
    session_id: str | None,
    ttl: float,
    url: str | None,
    as_json: bool,
) -> int:
    """Run in front of another MCP server.

    Large results become stubs, and tools to read them are added. The server is a COMMAND that
    speaks MCP on stdio, one at a --url, or those of a --config file. Everything else passes through
    in both directions. At the end, a line on stderr says what was saved."""
    given = sum(map(bool, (command, address, config)))
    if report and not given:
        from coatcheck.cli.metrics_commands import print_savings

        with open_existing(url) as store:
            print_savings(store, as_json=as_json)
        return 0
    if given != 1:
        raise usage_error("specify exactly one of -- COMMAND, --url and --config")
    if header and not address:
        raise usage_error("--header needs --url")
    if no_tools and files is not None:
        raise usage_error("--no-tools and --files cannot be used together")
    if no_tools and session_id is None:
        raise usage_error("--no-tools needs --session: another server must offer the tools for it")
    from coatcheck.collect import collecting_daily
    from coatcheck.externalize import configured
    from coatcheck.lanes import leave
    from coatcheck.mcp.proxy import run
    from coatcheck.mcp.proxy_rewrites import Counts, ProxySettings

    upstream, name = _upstream(
        command, address, header, config or Path(), max_message * _MIB, timeout
    )
    counts = Counts()
    session_id = session_id or f"mcp-{secrets.token_hex(8)}"
    with coatcheck.open(url) as store, collecting_daily(store):
        policy = configured(store.settings)
        if max_tokens is not None:
            policy = policy.limited(max_tokens=max_tokens)
        if files is not None:
            policy = replace(policy, files=os.path.abspath(files))
        settings = ProxySettings(
            policy,
            frozenset(inline),
            timeout=timeout,
            max_message=max_message * _MIB,
            no_tools=no_tools,
            only_files=files is not None,
            server=name,
        )
        try:
            status = run(upstream, store.lasting_session(session_id, ttl=ttl), settings, counts)
        finally:
            _print_counts(counts, report, as_json)
    leave(status)
    return status


@click.command()
@click.argument("client", type=click.Choice(list(CLIENTS)), metavar="CLIENT")
@click.argument("server", nargs=-1)
@click.option("--wrap", is_flag=True, help="Put the client's servers behind the proxy.")
@click.option(
    "--plugin",
    is_flag=True,
    help="Install the plugin for Claude Code: it covers Bash, Read and all tools.",
)
@click.option(
    "--files",
    is_flag=True,
    help="With --wrap: results are files in .coatcheck of the working folder; no tools of ours.",
)
@click.option(
    "--tools",
    is_flag=True,
    help="With --plugin: give the model our tools, instead of files that it reads with its own.",
)
@click.option("--write", is_flag=True, help="Apply the change. Without it, only show the change.")
@click.option(
    "--undo",
    is_flag=True,
    help="Undo everything that was written; with --write, else only show it.",
)
@click.option("--scope", type=click.Choice(SCOPES), default="user", show_default=True, help=_SCOPE)
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File to use instead of the default.",
)
@click.option(
    "--name", default="coatcheck", show_default=True, metavar="TEXT", help="Name of our own entry."
)
@click.option(
    "--session",
    "session_id",
    metavar="ID",
    help="Session of all entries. Default: one per client and folder.",
)
@click.option("--store", "url", metavar="FOLDER", help="Store to use instead of the user's.")
def install(
    client: str,
    server: tuple[str, ...],
    wrap: bool,
    plugin: bool,
    files: bool,
    tools: bool,
    write: bool,
    undo: bool,
    scope: Scope,
    file: Path | None,
    name: str,
    session_id: str | None,
    url: str | None,
) -> None:
    """Add Coatcheck to an MCP client.

    CLIENT is claude-code, claude-desktop, cursor, vscode, codex, gemini, windsurf, zed, opencode or
    cline. Shows the change to its configuration, without secrets. --write applies it and keeps the
    original beside the file; --undo --write reverts it. With --wrap, the given SERVERs, or all, are
    put behind the proxy. They share a session, and an entry of our own has the tools to read it.
    With --plugin, a plugin for Claude Code is written instead; --file is its folder then."""
    if plugin and (client != "claude-code" or wrap or name != "coatcheck"):
        raise usage_error("--plugin is for claude-code, without --wrap and --name")
    if tools and not plugin:
        raise usage_error("--tools needs --plugin")
    _check_wrap_options(client, server, wrap=wrap, undo=undo, files=files)
    if not _ENTRY_NAME.fullmatch(name):
        raise usage_error("--name may have letters, digits, - and _, at most 64")
    place = find_here(client, scope, None if plugin else file)
    folder = _plugin_folder(scope, file) if plugin else None
    if undo:
        _undo_install(place, folder, write=write)
        return
    plan = _plan_install(
        place,
        folder,
        client=client,
        servers=server,
        wrap=wrap,
        name=name,
        session_id=session_id,
        url=url,
        tools=tools,
        files=files,
    )
    if write and not plan.is_empty:
        plan.write()
    _print_plan(plan)
    if wrap and file is None:
        _print_other_scopes(client, scope)
    if plan.is_empty:
        print_note("nothing to change")
    elif not write:
        print_note("nothing was written (use --write)")
    else:
        print_note(f"written; restart {place.client.title} to use it; --undo --write reverts it")
        if scope == "project":
            print_note("the entry contains a path of this machine: check before you commit it")


def _plugin_folder(scope: Scope, file: Path | None) -> Path:
    from coatcheck.install.plugin import plugin_folder

    return plugin_folder(scope, file)


def _check_wrap_options(
    client: str, servers: tuple[str, ...], *, wrap: bool, undo: bool, files: bool
) -> None:
    if files and (not wrap or client not in READING_FILES):
        raise usage_error(f"--files needs --wrap, and one of {', '.join(sorted(READING_FILES))}")
    if servers and not wrap:
        raise usage_error("SERVER needs --wrap")
    if undo and wrap:
        raise usage_error("--undo cannot be used with --wrap: it undoes everything")


def _undo_install(place: ConfigFile, folder: Path | None, *, write: bool) -> None:
    """Undo what install wrote into a configuration, or the plugin in `folder`."""
    from coatcheck.install.plan import plan_undo
    from coatcheck.install.plugin import plan_unplug

    plan = plan_undo(place) if folder is None else plan_unplug(folder)
    if write:
        plan.write()
    _print_plan(plan)
    if not write:
        print_note("nothing was written (use --undo --write)")
    else:
        print_note("done" if plan.notes else f"{place.client.title} is restored")


def _plan_install(
    place: ConfigFile,
    folder: Path | None,
    *,
    client: str,
    servers: tuple[str, ...],
    wrap: bool,
    name: str,
    session_id: str | None,
    url: str | None,
    tools: bool,
    files: bool,
) -> Plan | PluginPlan:
    """Plan the plugin in `folder`, wrapped servers, or an entry of our own."""
    from coatcheck.install.clients import launcher
    from coatcheck.install.plan import Plan, plan_entry, plan_wrap
    from coatcheck.install.plugin import plan_plugin

    if importlib.util.find_spec("mcp") is None:
        raise errors.MissingExtra("mcp")
    start = launcher(sys.argv[0], sys.executable, sys.prefix, __version__, os.environ)
    store = ["--store", os.path.abspath(url)] if url else []
    if folder is not None:
        session = ["--session", session_id] if session_id else []
        return plan_plugin(folder, start, [*session, *store], Plan(place), tools=tools)
    options = ["--session", session_id or f"{client}-{FOLDER}", *store]
    if wrap:
        is_chosen = bool(session_id or url)
        return plan_wrap(place, servers, start, options, own=name, is_chosen=is_chosen, files=files)
    return plan_entry(place, name, {"command": start[0], "args": [*start[1:], "mcp", *options]})


def _print_other_scopes(client: str, scope: Scope) -> None:
    """Print the servers of the client in other scopes, which stay as they are."""
    from coatcheck.install.clients import after_launcher
    from coatcheck.install.plan import Plan

    for other in SCOPES:
        if other == scope:
            continue
        try:
            place = find_here(client, other)
            servers = Plan(place).text.servers if place.file.exists() else {}
        except errors.CoatcheckError:  # it has no such scope, or the file cannot be read
            continue
        plain = [name for name, entry in servers.items() if after_launcher(entry) is None]
        if plain:
            names = ", ".join(plain)
            print_note(f"{names} in {str(place.file)!r} can be wrapped too: --scope {other}")


def _hooks(
    store: Store, session_id: str | None, ttl: float, *, only: tuple[Purpose, ...] | None
) -> Hooks:
    """The hooks of Claude Code: a session for each of its own, or a named one for all. With no
    tools, results are files in the working folder."""
    from coatcheck.adapters import Adapter
    from coatcheck.adapters.claude_code import HOST, PLUGIN_SERVER, Hooks, files_folder
    from coatcheck.externalize import configured

    place = store if session_id is None else store.lasting_session(session_id, ttl=ttl)
    policy = configured(store.settings)
    if only == () and policy.files is None:
        policy = replace(policy, files=files_folder(Path.cwd()))
    adapter = Adapter(place, host=HOST, policy=policy, ttl=ttl, only=only)
    return Hooks(adapter, server=PLUGIN_SERVER, first=os.environ.get("CLAUDE_CODE_SESSION_ID"))


def _upstream(
    command: tuple[str, ...],
    address: str | None,
    header: tuple[str, ...],
    config: Path,
    size: int,
    timeout: float,
) -> tuple[Upstream, str]:
    """The server behind the proxy, and a name for it. No message may be larger than `size`."""
    from coatcheck.mcp.upstreams import (
        ProcessServer,
        configured_servers,
        remote_headers,
        remote_server,
    )

    if command:
        return ProcessServer(command, max_message=size), _command_name(command)
    if address:
        host = urlsplit(address).hostname or "?"
        return remote_server(address, remote_headers(header), size), host
    from coatcheck.mcp.merged_server import PATIENCE, MergedServer

    found = configured_servers(_read_config(config), max_message=size)
    return MergedServer(found, patience=min(PATIENCE, timeout / 2 or PATIENCE)), ", ".join(found)


def _read_config(file: Path) -> object:
    """Parse a file in the format of MCP clients, which may have comments and trailing commas."""
    from coatcheck.install import config_text, plan

    data = plan.read_file(file)
    if data is None:
        raise errors.InvalidArgument(f"file not found: {str(file)!r}", hint="--config FILE")
    try:
        root = config_text.JsonText(plan.decode(data).removeprefix("\ufeff")).root
    except errors.InvalidArgument as error:
        raise errors.InvalidArgument(
            f"cannot read {str(file)!r}: {error.message}", hint=error.hint
        ) from error
    return root.value if root is not None else None


def _command_name(command: tuple[str, ...]) -> str:
    """A name for a command in reports: the program, and its first argument if the program only runs
    others. Other arguments are left out because they may contain secrets."""
    name = Path(command[0]).name
    what = next((one for one in command[1:] if not one.startswith("-")), None)
    return f"{name} {what}" if what and _RUNNERS.match(name) else name


def _print_counts(counts: Counts, by_tool: bool, as_json: bool) -> None:
    """Print a report on stderr, if there is something to report: stdout carries the protocol."""
    if as_json and by_tool:
        click.echo(json.dumps(counts.to_record()), err=True)
        return
    if by_tool or any(counts.to_record().values()):
        print_error(str(counts))
    if by_tool:
        for name, row in sorted(counts.tools.items(), key=lambda item: -item[1]["tokens_saved"]):
            print_error(
                f"  {name}: {row['slimmed']:,} results, about {row['tokens_saved']:,} tokens"
            )


def _print_plan(plan: Plan | PluginPlan) -> None:
    text = plan.diff()
    print_text(text, diff_lines(text))
    for one in plan.notes:
        print_note(one)
