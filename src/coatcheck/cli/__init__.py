"""The command line: `coatcheck put`, `get`, `ls` and the rest.

A command parses its arguments, calls the store and prints the result. Results go to stdout; errors
(one line each) and progress go to stderr. A command may return its exit code; those of errors are
in `errors.CODES`. Untrusted text is printed through `terminal`, which escapes characters that could
control the terminal. This module has the group of all commands, the options that several share, and
the functions that open a store.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

import coatcheck
from coatcheck import CoatcheckError, __version__, errors
from coatcheck.cli.terminal import print_error

if TYPE_CHECKING:
    from coatcheck import Session, Store
    from coatcheck.storage import SessionInfo

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141  # the exit code that a shell shows for a process ended by SIGPIPE
FOLDER: Final = "{folder}"
"""Placeholder in a session id for the working folder."""
_COMPLETED: Final = 50
_OWN: Final = "coatcheck:"
_NEAR: Final = 1_000
_COPIED: Final = {"--session": "session_id", "--store": "url"}
_GROUPS: Final[dict[str, tuple[str, dict[str, tuple[str, str]]]]] = {
    "Artifacts": (
        "coatcheck read build.log --grep ERROR -C 2",
        {
            "put": (
                "artifact_commands",
                "Store a FILE, or stdin if it is '-', and print its pointer.",
            ),
            "get": ("artifact_commands", "Write the content of an artifact."),
            "read": ("artifact_commands", "Print one page of an artifact."),
            "program": ("artifact_commands", "Run a Python program over artifacts, in a sandbox."),
            "search": ("artifact_commands", "Find the artifacts of a session that match WORDS."),
            "ls": ("artifact_commands", "List the artifacts that a session sees, newest first."),
            "show": ("artifact_commands", "Show the record and a preview of an artifact."),
            "forget": ("artifact_commands", "Drop artifacts from a session."),
        },
    ),
    "Agents and their sessions": (
        "coatcheck audit ~/.claude/projects",
        {
            "audit": (
                "transcript_commands",
                "Show what recorded sessions would have cost with Coatcheck.",
            ),
            "transcript": ("transcript_commands", "Move payloads of transcripts into the store."),
            "metrics": ("metrics_commands", "Show the size of prompts, and what stubs saved."),
            "hot": ("hot_commands", "Show the hot state of a SESSION."),
        },
    ),
    "MCP": (
        "coatcheck install cursor --wrap",
        {
            "install": ("mcp_commands", "Add Coatcheck to an MCP client."),
            "mcp": ("mcp_commands", "Serve the store over MCP."),
            "proxy": ("mcp_commands", "Run in front of another MCP server."),
        },
    ),
    "HTTP": (
        "coatcheck run -- claude",
        {
            "console": ("http_commands", "Look at the store in a browser."),
            "serve": ("http_commands", "Serve the store over HTTP."),
            "gateway": ("gateway_commands", "Serve a gateway between agents and model providers."),
            "run": ("gateway_commands", "Run a command behind a gateway of its own."),
        },
    ),
    "The store": (
        "coatcheck doctor",
        {
            "doctor": (
                "doctor_commands",
                "Check the store, extras and clients, and say what to do.",
            ),
            "stats": ("store_commands", "Count sessions, refs, artifacts, tombstones and bytes."),
            "collect": ("store_commands", "Remove expired artifacts and compress cold content."),
            "verify": ("store_commands", "Read everything and report problems."),
            "export": ("store_commands", "Export sessions, refs and content as JSON lines."),
            "import": ("store_commands", "Import the output of export."),
            "copy": ("store_commands", "Copy a store FROM one place TO another."),
            "config": ("store_commands", "Show the effective settings for this folder."),
            "trust": ("store_commands", "Trust the settings file of a project."),
            "completion": ("doctor_commands", "Print the completion script for a SHELL."),
        },
    ),
}
"""The commands by group, each group with an example: the module of each command, which is imported
when the command is used, and its line in the list of commands."""
_COMMANDS: Final = {name: entry for _, group in _GROUPS.values() for name, entry in group.items()}


class Commands(click.Group):
    """A group that loads commands on demand and turns every expected failure into one line and an
    exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        attribute = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command: click.Command = getattr(
            import_module(f"{__name__}.{_COMMANDS[cmd_name][0]}"), attribute
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        widest = max(map(len, _COMMANDS))
        for heading, (example, commands) in _GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(widest), summary) for name, (_, summary) in commands.items()]
                )
                formatter.write_text(f"$ {example}")

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        # without freeze, the interpreter searches all objects for cycles before it ends
        atexit.register(gc.freeze)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        code = errors.CODES["error"].exit
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False}) or 0
        except CoatcheckError as error:
            print_error(str(error))
            code = errors.CODES[error.code].exit
        except OSError as error:
            reason = error.strerror or str(error)
            print_error(reason if error.filename is None else f"{reason}: {error.filename}")
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            hint = f" (try '{context.command_path} --help')" if context else ""
            print_error(error.format_message().rstrip(".") + hint)
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            code = super().invoke(ctx)
            # flush: a broken pipe must fail here, not when the interpreter exits
            click.echo(nl=False)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)
        except KeyboardInterrupt:
            if sys.stderr.isatty():
                raise  # click ends the line with ^C
            ctx.exit(INTERRUPTED)
        return code


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="coatcheck")
def main() -> None:
    """Keep large tool results in a content-addressed store, and read every byte back."""


def setting(key: str) -> Any:
    """Return the effective setting for this folder."""
    from coatcheck.config import load

    return load()[key]


def expand_folder(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Replace `{folder}` in a session id with the name of the working folder and a digest of its
    path."""
    if not isinstance(value, str) or FOLDER not in value:
        return value
    import hashlib

    here = os.path.realpath(os.getcwd())
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(here))[:40] or "root"
    return value.replace(FOLDER, f"{label}-{hashlib.sha256(os.fsencode(here)).hexdigest()[:12]}")


def complete_session(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[Any]:
    """Complete the id of a session."""

    def ids(store: Store) -> Iterator[tuple[str, str]]:
        for info in sessions_of(store):
            yield info.session_id, ""

    return _completed(context, ids, incomplete)


def complete_target(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[Any]:
    """Complete the name or the pointer of an artifact of the session."""

    def targets(store: Store) -> Iterator[tuple[str, str]]:
        chosen = context.params.get("session_id") or setting("session.id")
        session = store.session(expand_folder(context, parameter, chosen))
        for ref in session.list(limit=_COMPLETED):
            about = f"{ref.kind}, {ref.size_bytes:,} bytes"
            if ref.name and ref.name.startswith(incomplete):
                yield ref.name, about
            else:
                yield ref.pointer, f"{ref.name or ref.tool or ref.summary} ({about})"

    return _completed(context, targets, incomplete)


def _completed(
    context: click.Context,
    found: Callable[[Store], Iterable[tuple[str, str]]],
    incomplete: str,
) -> list[Any]:
    """Return the words that begin like the one on the command line, from pairs of a word and its
    description. Errors are not shown during completion."""
    from click.shell_completion import CompletionItem

    from coatcheck.cli.terminal import one_line

    try:
        with coatcheck.open(context.params.get("url"), create=False) as store:
            items: list[Any] = []
            for word, about in found(store):
                if word.startswith(incomplete) and word.isprintable():
                    items.append(CompletionItem(word, help=one_line(about)[:80]))
                if len(items) == _COMPLETED:
                    break
            return items
    except (CoatcheckError, OSError):
        return []


_STORE_HELP: Final = (
    "Folder of the store. Default: the settings (COATCHECK_STORE), else the user's data folder."
)
store_option = click.option("--store", "url", metavar="FOLDER", help=_STORE_HELP)
session_option = click.option(
    "--session",
    "session_id",
    metavar="ID",
    default=lambda: setting("session.id"),
    callback=expand_folder,
    show_default="the settings (COATCHECK_SESSION), else 'default'",
    shell_complete=complete_session,
    help="Session to use; {folder} is replaced by the working folder.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


any_session_option = click.option(
    "--any-session",
    is_flag=True,
    help="Look in every session of the store, for a pointer from elsewhere.",
)


def target_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("target", shell_complete=complete_target)(command)


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return store_option(json_option(command))


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return session_option(store_options(command))


def usage_error(message: str) -> click.UsageError:
    return click.UsageError(message, click.get_current_context())


def open_existing(url: str | None) -> Store:
    """Open the store for a command that only reads or removes. A store named on the command line
    must exist."""
    typed = (
        click.get_current_context().get_parameter_source("url")
        == click.core.ParameterSource.COMMANDLINE
    )
    return coatcheck.open(url, create=not typed)


@contextmanager
def open_session(
    url: str | None, session_id: str, target: str, any_session: bool = False
) -> Iterator[Session]:
    """Open the session of a command that reads `target`; with `any_session`, the first that has
    it."""
    with open_existing(url) as store, naming_holders(store, target):
        found = store.find(target.partition("#")[0]) if any_session else None
        yield found[0] if found else known_session(store, session_id)


def known_session(store: Store, session_id: str) -> Session:
    """Return a session for a command that reads. Raises `NotFound` if the store has no session with
    this id, unless it is the default id."""
    from coatcheck.config import DEFAULTS

    if store.has_session(session_id) or session_id == DEFAULTS["session.id"]:
        return store.session(session_id)
    import difflib
    from itertools import islice

    known = [info.session_id for info in islice(sessions_of(store), _NEAR)]
    near = difflib.get_close_matches(session_id, known, n=3, cutoff=0.5) or known[:3]
    hint = (
        f"there are {', '.join(near)}; coatcheck ls --sessions lists all"
        if near
        else "it has no sessions yet"
    )
    raise errors.NotFound(f"there is no session {session_id!r} in {shown_url(store)}", hint=hint)


def sessions_of(store: Store) -> Iterator[SessionInfo]:
    """Return the sessions of a store, without those that contain only figures of the store
    itself."""
    return (
        one for one in store.sessions() if one.used_bytes or not one.session_id.startswith(_OWN)
    )


def check_main_store(store: Store) -> None:
    """Raise a usage error if the store is that of a tenant: tokens of tenants need the main one."""
    if store.settings["store.tenant"] is not None:
        raise usage_error(
            "tokens of tenants need the main store: unset store.tenant (COATCHECK_TENANT)"
        )


def default_place() -> str:
    """Where the store is if no option names another, with credentials masked."""
    from coatcheck._open import place_in
    from coatcheck.config import load
    from coatcheck.redaction import mask_url

    return mask_url(place_in(load()))


def shown_url(store: Store) -> str:
    """The address of a store, with credentials masked."""
    from coatcheck.redaction import mask_url

    return mask_url(store.url)


@contextmanager
def naming_holders(store: Store, target: str) -> Iterator[None]:
    """Add to a `NotFound` error the command that opens the target in another session that has it.
    The command line belongs to the owner of the store; models never get this information."""
    try:
        yield
    except errors.NotFound as error:
        import shlex

        found = store.holders(target.partition("#")[0])
        if not found:
            raise
        context = click.get_current_context()
        command = (
            f"coatcheck {context.info_name} {shlex.quote(target)} --session {shlex.quote(found[0])}"
        )
        others = f", or --session {', '.join(map(shlex.quote, found[1:]))}" if found[1:] else ""
        raise type(error)(
            f"{error.message}; another session has it", hint=command + others
        ) from error


def command_line(*words: str) -> str:
    """A command to copy that uses the same store and session as this one. Credentials in a URL are
    masked."""
    import shlex

    from coatcheck.redaction import mask_url

    context = click.get_current_context()
    for option, name in _COPIED.items():
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            words = (*words, option, mask_url(str(context.params[name])))
    return shlex.join(("coatcheck", *words))
