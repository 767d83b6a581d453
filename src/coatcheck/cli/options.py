"""Options that several commands share, and how a command opens its store."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import click

import coatcheck
from coatcheck.errors import NotFound

if TYPE_CHECKING:
    from coatcheck import Session, Store

FOLDER: Final = "{folder}"
"""Placeholder in a session id for the working folder."""
_COPIED: Final = {"--session": "session_id", "--store": "url"}


def setting(key: str) -> Any:
    """Return the effective setting for this folder."""
    from coatcheck.config import load

    return load()[key]


def expand_folder(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Replace `{folder}` in a session id with the name of the working folder and a digest of its path."""
    if not isinstance(value, str) or FOLDER not in value:
        return value
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
    except NotFound as error:
        found = store.holders(target)
        if not found:
            raise
        options = " or ".join(f"--session {shlex.quote(one)}" for one in found)
        raise type(error)(f"{error.message}; another session has it", hint=options) from error


def command_line(*words: str) -> str:
    """A command to copy that uses the same store and session as this one. Credentials in a URL are masked."""
    from coatcheck.redaction import mask_url

    context = click.get_current_context()
    for option, name in _COPIED.items():
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            words = (*words, option, mask_url(str(context.params[name])))
    return shlex.join(("coatcheck", *words))
