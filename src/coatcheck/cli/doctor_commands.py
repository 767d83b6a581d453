"""Commands for a person at a shell: doctor finds out what is wrong and what to do, completion
completes words."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import click

import coatcheck
from coatcheck import CoatcheckError, __version__
from coatcheck.cli import default_place, json_option, shown_url, store_option, terminal

if TYPE_CHECKING:
    from coatcheck.collect import CollectReport
    from coatcheck.install.clients import ConfigFile

FAILED: Final = 1
_EXTRAS: Final = {
    "http": ("starlette", "serve and gateway"),
    "images": ("PIL", "pictures that are scaled for models"),
    "mcp": ("mcp", "the MCP server, the proxy and install"),
    "pdf": ("pypdf", "the text of PDF files"),
    "postgres": ("psycopg", "a store that many machines share"),
    "programs": ("pydantic_monty", "programs of models over artifacts"),
    "s3": ("obstore", "a store that many machines share"),
    "sheets": ("python_calamine", "the cells of workbooks"),
    "sql": ("duckdb", "SQL on tables"),
    "tokens": ("splintr", "exact token counts"),
}
_LITTLE_ROOM: Final = 1 << 30
_STALE_DAYS: Final = 30
_QUOTED: Final = (
    """("$([[ ${COMP_WORDS[COMP_CWORD]} == [\\"\\']* ]] && echo "$value" || printf %q "$value")")"""
)
_SHELLS: Final = ("bash", "zsh", "fish")
_HOW: Final = {
    "bash": 'add to ~/.bashrc:  eval "$(coatcheck completion bash)"',
    "zsh": 'add to ~/.zshrc:  eval "$(coatcheck completion zsh)"',
    "fish": "run:  coatcheck completion fish > ~/.config/fish/completions/coatcheck.fish",
}


class Finding(NamedTuple):
    """One line of a diagnosis: its state, what was checked, what was found, and the command that
    fixes it."""

    state: Literal["ok", "note", "problem"]
    about: str
    message: str
    mend: str = ""


@click.command()
@store_option
@json_option
def doctor(url: str | None, as_json: bool) -> int:
    """Check the store, extras and clients, and say what to do.

    Exits with 1 if there is a problem. Nothing is changed."""
    findings = [
        *_program(),
        *_settings(),
        *_store(url),
        *_extras(),
        *_children(),
        *_programs(),
        *_clients(),
    ]
    if as_json:
        terminal.print_json([one._asdict() for one in findings])
    else:
        for one in findings:
            mark = {"ok": "ok      ", "note": "note    ", "problem": "PROBLEM "}[one.state]
            click.echo(f"{mark}{one.about}: {terminal.one_line(one.message)}")
            if one.mend:
                click.echo(f"{'':8}  -> {terminal.one_line(one.mend)}")
    return FAILED if any(one.state == "problem" for one in findings) else 0


def _program() -> Iterator[Finding]:
    machine = f"{platform.system()} {platform.machine()}"
    version = f"coatcheck {__version__}, Python {platform.python_version()}, {machine}"
    yield Finding("ok", "program", version)


def _settings() -> Iterator[Finding]:
    from coatcheck.config import load, unknown

    try:
        settings = load()
    except CoatcheckError as error:
        yield Finding("problem", "settings", error.message, error.hint or "")
        return
    yield Finding("ok", "settings", str(settings.file or "no coatcheck.toml; the defaults apply"))
    if settings.ignored and settings.file is not None:
        what = f"not trusted, so these are ignored: {', '.join(settings.ignored)}"
        folder = shlex.quote(str(settings.file.parent))
        yield Finding("note", "settings", what, f"coatcheck trust {folder}")
    for name, nearest in unknown(os.environ).items():
        message = f"there is no setting {name}"
        yield Finding("problem", "settings", message, f"did you mean {nearest}?")


def _store(url: str | None) -> Iterator[Finding]:
    try:
        place = url or default_place()
        if not place.startswith("s3:") and not Path(place).expanduser().exists():
            yield Finding("note", "store", f"{place} does not exist yet; the first put creates it")
            return
        with coatcheck.open(url, create=False) as store:
            totals, collected = store.stats(), store.collected_at()
            figures = (
                f"{totals.sessions:,} sessions, {totals.artifacts:,} artifacts, "
                f"{totals.stored_bytes:,} bytes"
            )
            yield Finding("ok", "store", f"{shown_url(store)}: {figures}")
            last = terminal.age(collected.isoformat()) if collected else None
            yield from _upkeep(last, totals.artifacts)
            yield _expired(store.collect(dry_run=True, orphans=False))
            yield from _folder(Path(store.url))
    except CoatcheckError as error:
        yield Finding("problem", "store", error.message, error.hint or "coatcheck verify")


def _upkeep(last: str | None, artifacts: int) -> Iterator[Finding]:
    if last is None and artifacts:
        yield Finding("note", "upkeep", "the store was never collected", "coatcheck collect")
    elif last is not None:
        days = int(last.split()[0]) if last.endswith(" d") else 0
        mend = "coatcheck collect" if days > _STALE_DAYS else ""
        yield Finding("note" if mend else "ok", "upkeep", f"last collected {last} ago", mend)


def _expired(freed: CollectReport) -> Finding:
    if not freed.artifacts:
        return Finding("ok", "expired", "nothing that a collection would free")
    figures = f"{freed.artifacts:,} artifacts, {freed.bytes:,} bytes"
    return Finding("note", "expired", f"a collection would free {figures}", "coatcheck collect")


def _folder(folder: Path) -> Iterator[Finding]:
    """Look at the room on the disk of a store."""
    import shutil

    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    state: Literal["problem", "ok"] = "problem" if free < _LITTLE_ROOM else "ok"
    mend = "coatcheck collect --grace 0" if state == "problem" else ""
    yield Finding(state, "disk", f"{free / 1e9:,.1f} GB are free", mend)


def _extras() -> Iterator[Finding]:
    for extra, (module, use) in _EXTRAS.items():
        if importlib.util.find_spec(module) is not None:
            yield Finding("ok", f"extra {extra}", f"installed, for {use}")
        else:
            mend = f"pip install 'coatcheck[{extra}]'"
            yield Finding("note", f"extra {extra}", f"not installed, for {use}", mend)


def _children() -> Iterator[Finding]:
    """Say how the processes that parse hostile content are confined here."""
    from coatcheck.reading import heavy

    try:
        found = heavy.confinement()
    except CoatcheckError as error:
        yield Finding("problem", "child processes", error.message, error.hint or "")
        return
    finally:
        heavy.pool.close()
    yield _confined("child processes", files=found.files, calls=found.calls)


def _programs() -> Iterator[Finding]:
    """Say whether models can run programs over artifacts, and how those are confined here."""
    from coatcheck import programs

    if not programs.is_available():
        return
    found = programs.confinement()
    yield _confined("programs", files=found.files, calls=found.calls)


def _confined(about: str, *, files: bool, calls: bool) -> Finding:
    lacking = []
    if not files:
        lacking.append("they can read the user's files (no Landlock)")
    if not calls:
        lacking.append("they can use sockets and start processes (no seccomp filter)")
    if lacking:
        return Finding("note", about, f"their time is limited, but {' and '.join(lacking)}")
    message = "confined to their own files, without sockets and other processes"
    return Finding("ok", about, message)


def _clients() -> Iterator[Finding]:
    from coatcheck.install.clients import CLIENTS

    for name in CLIENTS:
        yield from _client(name)


def _client(name: str) -> Iterator[Finding]:
    """Look at an MCP client that has a configuration: whether it uses Coatcheck, and whether that
    can start."""
    from coatcheck.install.clients import CLIENTS, SCOPES, find_here

    title = CLIENTS[name].title
    is_configured = False
    ours: list[_Entry] = []
    for scope in SCOPES:
        try:
            place = find_here(name, scope)
            ours += _entries(place)
            is_configured = is_configured or place.file.exists()
        except CoatcheckError as error:
            if "scope" not in error.message and "project" not in error.message:
                yield Finding("problem", title, error.message, error.hint or "")
    missing = [entry.command for entry in ours if entry.is_missing]
    if missing:
        mend = f"coatcheck install {name} --write"
        yield Finding("problem", title, f"{missing[0]} does not exist", mend)
    elif ours:
        names = sorted({entry.name for entry in ours})
        yield Finding("ok", title, f"uses Coatcheck: {', '.join(names)}")
    elif is_configured:
        mend = f"coatcheck install {name} --wrap"
        yield Finding("note", title, "does not use Coatcheck", mend)


class _Entry(NamedTuple):
    """An entry of ours in the configuration of a client, and the command that starts it."""

    name: str
    command: str

    @property
    def is_missing(self) -> bool:
        return os.path.isabs(self.command) and not os.path.exists(self.command)


def _entries(place: ConfigFile) -> Iterator[_Entry]:
    """Yield our entries in a configuration, and those of the plugin for Claude Code."""
    from coatcheck.install.clients import CLIENTS, after_launcher
    from coatcheck.install.plan import Plan
    from coatcheck.install.plugin import plugin_folder

    servers = dict(Plan(place).text.servers) if place.file.exists() else {}
    if place.client is CLIENTS["claude-code"] and place.scope != "local":
        file = plugin_folder(place.scope) / ".mcp.json"
        plugin = Plan(replace(place, file=file))
        for name, entry in plugin.text.servers.items():
            servers[f"{name} of the plugin"] = entry
    for name, entry in servers.items():
        if after_launcher(entry) is not None:
            yield _Entry(name, str(entry["command"]))


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the completion script for a SHELL.

    It completes commands, options, sessions, names and pointers. On a terminal, a line says how to
    install it."""
    from click.shell_completion import get_completion_class

    from coatcheck.cli import main

    found = get_completion_class(shell)
    assert found is not None
    source = found(main, {}, "coatcheck", "_COATCHECK_COMPLETE").source()
    if shell == "bash":
        # a pointer has a colon, at which bash would split the word; a name may have spaces
        source = f"COMP_WORDBREAKS=${{COMP_WORDBREAKS//:}}\n{source.replace('($value)', _QUOTED)}"
    click.echo(source)
    if terminal.is_terminal():
        terminal.print_note(_HOW[shell])
