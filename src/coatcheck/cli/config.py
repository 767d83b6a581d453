"""The command that shows the settings: each value, and where it came from."""

from __future__ import annotations

import os

import click

from coatcheck.cli.options import json_option
from coatcheck.cli.terminal import complain, is_terminal, note, one_line, print_json, print_table
from coatcheck.config import FILE, SETTINGS, VARIABLE, Settings, load, unknown

_WIDE = 40


@click.command()
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@json_option
def config(keys: tuple[str, ...], as_json: bool) -> None:
    """Show the settings that hold here, and where each value came from: a file, the environment, or the default.

    With KEYs, or the beginnings of some ('policy'), only those. Passwords are masked."""
    settings = load()
    chosen = [setting for setting in SETTINGS if not keys or any(_is_under(setting.key, key) for key in keys)]
    for key in keys:
        if not any(_is_under(setting.key, key) for setting in chosen):
            settings[key]  # raises, and names the nearest
    records = [
        {
            "key": setting.key,
            "value": _told(settings, setting.key),
            "source": settings.origin(setting.key).source,
            "where": settings.origin(setting.key).where or None,
            "default": setting.default,
            "variable": setting.variable,
            "about": setting.about,
        }
        for setting in chosen
    ]
    if as_json:
        for record in records:
            print_json(record)
        return
    rows = ((one.key, _value(settings, one.key), _source(settings, one.key), one.about) for one in chosen)
    print_table(("key", "value", "from", "meaning"), rows, yielding=("meaning",))
    if is_terminal():
        note(f"file: {settings.file or f'none; {FILE} here or above, or {VARIABLE}'}")
    for name, meant in unknown(os.environ).items():
        complain(f"{name} is no setting; the nearest is {meant}")


def _is_under(key: str, asked: str) -> bool:
    return key == asked or key.startswith(f"{asked}.")


def _value(settings: Settings, key: str) -> str:
    text = one_line(settings.shown(key))
    return text if len(text) <= _WIDE or not is_terminal() else f"{text[:_WIDE]}…"


def _source(settings: Settings, key: str) -> str:
    """Where a value came from. A person reads which file that is below the table."""
    origin = settings.origin(key)
    if origin.source == "file" and settings.file is not None and is_terminal():
        return one_line(settings.file.name)
    return one_line(str(origin))


def _told(settings: Settings, key: str) -> object:
    """A value for scripts: as it is, but for secrets."""
    return settings.shown(key) if isinstance(settings[key], str) else settings[key]
