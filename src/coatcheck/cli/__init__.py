"""The command line: `coatcheck put`, `get`, `ls` and the rest.

A command parses its arguments, calls the store and prints the result. Results go to stdout; errors (one line each) and
progress go to stderr. A command may return its exit code; that of an error is in `errors.CODES`. Untrusted text is
printed through `terminal`, which escapes characters that could control the terminal.
"""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from keyword import iskeyword
from typing import Any, Final, NoReturn

import click

from coatcheck import CoatcheckError, __version__, errors
from coatcheck.cli.terminal import print_error

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141  # the exit code that a shell shows for a process ended by SIGPIPE
_MODULES: Final = {
    "artifact_commands": ("forget", "get", "ls", "put", "read", "search", "show"),
    "audit_command": ("audit",),
    "hot_command": ("hot",),
    "mcp_commands": ("install", "mcp", "proxy"),
    "metrics_command": ("metrics",),
    "store_commands": ("collect", "config", "copy", "export", "import", "stats", "verify"),
    "transcript_commands": ("transcript",),
}
"""The commands of each module, which is imported when one of them is used."""


class Commands(click.Group):
    """A group that loads commands on demand and turns every expected failure into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(name for names in _MODULES.values() for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for module, names in _MODULES.items():
            if cmd_name in names:
                attribute = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
                command: click.Command = getattr(import_module(f"{__name__}.{module}"), attribute)
                return command
        return None

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
