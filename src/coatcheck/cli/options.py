"""The options that commands share, and how a command gets at its store."""

from __future__ import annotations

import shlex
from typing import Final

import click

import coatcheck
from coatcheck import Store
from coatcheck.config import load
from coatcheck.redaction import mask_url

store_option = click.option(
    "--store",
    "url",
    metavar="FOLDER",
    help="The store's folder; else what the settings say (COATCHECK_STORE), else the user's data folder.",
)
session_option = click.option(
    "--session",
    "session_id",
    metavar="ID",
    default=lambda: load()["session.id"],
    show_default="what the settings say (COATCHECK_SESSION), else 'default'",
    help="The session to look in.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")

_TOLD: Final = {"--session": "session_id", "--store": "url"}


def open_existing(url: str | None) -> Store:
    """The store for a command that only looks or removes: a place that somebody typed must be one already."""
    typed = click.get_current_context().get_parameter_source("url") == click.core.ParameterSource.COMMANDLINE
    return coatcheck.open(url, create=not typed)


def command_line(*words: str) -> str:
    """A command that somebody can copy: it looks in the store and session that this one was told of. Whoever typed
    credentials types them again: they are masked."""
    context = click.get_current_context()
    for option, name in _TOLD.items():
        if context.get_parameter_source(name) == click.core.ParameterSource.COMMANDLINE:
            words = (*words, option, mask_url(str(context.params[name])))
    return shlex.join(("coatcheck", *words))
