"""The command line: `coatcheck put`, `get`, `ls` and the rest. It parses, calls the store, and prints.

Results go to stdout; errors, as one line each, and progress go to stderr. The exit code of an error is the one
in `errors.CODES`. What people see passes through `terminal`, which makes hostile text harmless.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, Final, NoReturn

import click

from coatcheck import CoatcheckError, __version__, errors
from coatcheck.cli.archive import export, import_
from coatcheck.cli.artifacts import forget, get, ls, put, show
from coatcheck.cli.config import config
from coatcheck.cli.copying import copy
from coatcheck.cli.hot import hot
from coatcheck.cli.install import install
from coatcheck.cli.looking import read, search
from coatcheck.cli.mcp import mcp, proxy
from coatcheck.cli.metrics import metrics
from coatcheck.cli.terminal import complain
from coatcheck.cli.transcript import transcript
from coatcheck.cli.upkeep import collect, stats, verify

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141  # what a shell says of a process that SIGPIPE ended


class Commands(click.Group):
    """A group that turns every expected failure into one line and an exit code."""

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        code = errors.CODES["error"].exit
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False}) or 0
        except CoatcheckError as error:
            complain(str(error))
            code = errors.CODES[error.code].exit
        except OSError as error:
            reason = error.strerror or str(error)
            complain(reason if error.filename is None else f"{reason}: {error.filename}")
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.ClickException as error:
            where = getattr(error, "ctx", None)
            hint = f" (try '{where.command_path} --help')" if where else ""
            complain(error.format_message().rstrip(".") + hint)
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            answer = super().invoke(ctx)
            click.echo(nl=False)  # flushes: a pipe that broke must break here, not when the interpreter ends
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)
        return answer


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="coatcheck")
def main() -> None:
    """Keep large tool results in a content-addressed store, and get every byte back."""


for command in (
    put, get, read, search, ls, show, forget, collect, verify, stats, export, import_, copy, transcript, hot, metrics,
    config, mcp, proxy, install,
):  # fmt: skip
    main.add_command(command)
