"""The command line: `coatcheck put`, `get`, `ls` and the rest.

A command parses its arguments, calls the store and prints the result. Results go to stdout; errors (one line each) and
progress go to stderr. A command may return its exit code; that of an error is in `errors.CODES`. Untrusted text is
printed through `terminal`, which escapes characters that could control the terminal. Here are the group of all
commands, the options that several share, and how a command opens its store.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
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

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141  # the exit code that a shell shows for a process ended by SIGPIPE
FOLDER: Final = "{folder}"
"""Placeholder in a session id for the working folder."""
_COPIED: Final = {"--session": "session_id", "--store": "url"}
_COMMANDS: Final = {
    "audit": ("transcript_commands", "Show what recorded sessions would have cost with Coatcheck."),
    "collect": ("store_commands", "Remove expired artifacts and compress cold content."),
    "config": ("store_commands", "Show the effective settings for this folder."),
    "copy": ("store_commands", "Copy a store FROM one place TO another."),
    "export": ("store_commands", "Export sessions, refs and content as JSON lines."),
    "forget": ("artifact_commands", "Drop artifacts from a session."),
    "get": ("artifact_commands", "Write the content of an artifact."),
    "hot": ("context_commands", "Show the hot state of a SESSION."),
    "import": ("store_commands", "Import the output of export."),
    "install": ("mcp_commands", "Add Coatcheck to an MCP client."),
    "ls": ("artifact_commands", "List the artifacts that a session sees, newest first."),
    "mcp": ("mcp_commands", "Serve the store over MCP."),
    "metrics": ("context_commands", "Show the size of prompts, and what stubs saved."),
    "proxy": ("mcp_commands", "Run in front of another MCP server."),
    "put": ("artifact_commands", "Store a FILE, or stdin if it is '-', and print its pointer."),
    "read": ("artifact_commands", "Print one page of an artifact."),
    "search": ("artifact_commands", "Find the artifacts of a session that match WORDS."),
    "show": ("artifact_commands", "Show the record and a preview of an artifact."),
    "stats": ("store_commands", "Count sessions, refs, artifacts, tombstones and bytes."),
    "transcript": ("transcript_commands", "Move payloads of transcripts into the store."),
    "verify": ("store_commands", "Read everything and report problems."),
}
"""The module of each command, which is imported when the command is used, and its line in the list of commands."""


class Commands(click.Group):
    """A group that loads commands on demand and turns every expected failure into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        attribute = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command: click.Command = getattr(import_module(f"{__name__}.{_COMMANDS[cmd_name][0]}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])

    def main(self, *args: Any, **extra: Any) -> NoReturn:
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
            click.echo(nl=False)  # flush: a broken pipe must fail here, not when the interpreter exits
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)
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
    """Replace `{folder}` in a session id with the name of the working folder and a digest of its path."""
    if not isinstance(value, str) or FOLDER not in value:
        return value
    import hashlib

    here = os.path.realpath(os.getcwd())
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(here))[:40] or "root"
    return value.replace(FOLDER, f"{label}-{hashlib.sha256(os.fsencode(here)).hexdigest()[:12]}")


_STORE_HELP: Final = "Folder of the store. Default: the settings (COATCHECK_STORE), else the user's data folder."
store_option = click.option("--store", "url", metavar="FOLDER", help=_STORE_HELP)
session_option = click.option(
    "--session", "session_id", metavar="ID", default=lambda: setting("session.id"), callback=expand_folder,
    show_default="the settings (COATCHECK_SESSION), else 'default'",
    help="Session to use; {folder} is replaced by the working folder.",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def store_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return store_option(json_option(command))


def session_options(command: Callable[..., Any]) -> Callable[..., Any]:
    return session_option(store_options(command))


def usage_error(message: str) -> click.UsageError:
    return click.UsageError(message, click.get_current_context())


def open_existing(url: str | None) -> Store:
    """Open the store for a command that only reads or removes. A store named on the command line must exist."""
    typed = click.get_current_context().get_parameter_source("url") == click.core.ParameterSource.COMMANDLINE
    return coatcheck.open(url, create=not typed)


@contextmanager
def open_session(url: str | None, session_id: str, target: str) -> Iterator[Session]:
    """Open the session of a command that reads `target`."""
    with open_existing(url) as store, naming_holders(store, target):
        yield store.session(session_id)


@contextmanager
def naming_holders(store: Store, target: str) -> Iterator[None]:
    """Add to a `NotFound` error the other sessions that hold the target. The command line belongs to the owner of the
    store; models never get this information."""
    try:
        yield
    except errors.NotFound as error:
        import shlex

        found = store.holders(target)
        if not found:
            raise
        options = " or ".join(f"--session {shlex.quote(one)}" for one in found)
        raise type(error)(f"{error.message}; another session has it", hint=options) from error


def command_line(*words: str) -> str:
    """A command to copy that uses the same store and session as this one. Credentials in a URL are masked."""
    import shlex

    from coatcheck.redaction import mask_url

    context = click.get_current_context()
    for option, name in _COPIED.items():
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            words = (*words, option, mask_url(str(context.params[name])))
    return shlex.join(("coatcheck", *words))
