"""Where settings are said: code, a file `coatcheck.toml`, the environment. Each is read and checked here.

A mistake is refused with the place where it stands and the key that was probably meant. A file is trusted like code, so
one that was found by looking around, and that somebody else could have put there, is passed by.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from coatcheck.config.table import BY_KEY, SECTIONS, SETTINGS, Setting
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip

FILE: Final = "coatcheck.toml"
VARIABLE: Final = "COATCHECK_CONFIG"

_LOG: Final = logging.getLogger("coatcheck")
_LARGEST: Final = 1 << 20
_ANYWHERE: Final = re.compile(r"/|~|[A-Za-z][A-Za-z0-9+.-]+:")
_HEADER: Final = re.compile(r"\s*\[+([^\[\]]+)\]")
_ASSIGNED: Final = re.compile(r"\s*([^=#\[\]]+?)\s*=")


def find(environ: Mapping[str, str]) -> Path | None:
    """The file to read: the one that COATCHECK_CONFIG names, else the nearest in the working folder or above it."""
    named = environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    try:
        folder = Path.cwd()
    except OSError:  # it was removed under our feet
        return None
    for above in (folder, *folder.parents):
        path = above / FILE
        try:
            about = path.stat()
        except OSError:
            continue
        if about.st_uid in (os.geteuid(), 0) and not about.st_mode & stat.S_IWOTH:
            return path
        _LOG.warning("%s is passed by: others may write it. %s takes it all the same", path, VARIABLE)
    return None


def from_file(path: Path) -> dict[str, Any]:
    """What a file says, by key. Places are made absolute: they are relative to the file."""
    import tomllib  # here, so that importing coatcheck stays quick

    try:
        with path.open("rb") as source:
            data = source.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise InvalidArgument(f"{path} has more than {_LARGEST:,} bytes", hint="that is no file of settings")
        text = data.decode()
        said = tomllib.loads(text)
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be read: {error.strerror}", hint=f"mend it, or unset {VARIABLE}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no TOML: {clip(str(error), 200)}", hint="mend it at that place") from error
    return {
        setting.key: _placed(value, path.parent) if setting.kind == "place" else value
        for setting, value in _flattened(said, Setting.written, lambda key: f"{path}{_line(text, key)}: ")
    }


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says, by key. A variable that is set to nothing says nothing."""
    said = {}
    for setting in SETTINGS:
        text = environ.get(setting.variable or "")
        if not text:
            continue
        try:
            said[setting.key] = setting.parsed(text)
        except ValueError:
            raise InvalidArgument(f"{setting.variable} is {clip(text)}", hint=f"it takes {setting.takes}") from None
    return said


def from_code(said: Mapping[str, Any]) -> dict[str, Any]:
    """What code says, by key: nested as in a file, or with dots."""
    return {setting.key: value for setting, value in _flattened(said, Setting.checked, lambda key: "")}


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that nearly are settings, each with the one that was probably meant."""
    import difflib

    known = [setting.variable for setting in SETTINGS if setting.variable] + [VARIABLE]
    odd = sorted(name for name in environ if name.startswith("COATCHECK_") and name not in known)
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in odd}
    return {name: found[0] for name, found in close.items() if found}


def nearest(key: str) -> str:
    """A hint for a key that is none: the one that was probably meant."""
    import difflib

    if key in SECTIONS:
        return f"it is a section, with settings such as {next(one for one in BY_KEY if one.startswith(key))}"
    last = key.rpartition(".")[2]
    same = [one for one in BY_KEY if one.rpartition(".")[2] == last]
    close = difflib.get_close_matches(key, same or [*BY_KEY, *SECTIONS], n=1, cutoff=0.0 if same else 0.5)
    return f"the nearest is {close[0]}" if close else "'coatcheck config' lists them all"


def _flattened(
    said: Mapping[str, Any], check: Callable[[Setting, object], Any], where: Callable[[str], str], above: str = ""
) -> Iterator[tuple[Setting, Any]]:
    """Each setting in a tree of sections, checked. `where` tells where a key stands."""
    for name, value in said.items():
        key = f"{above}{name}"
        setting = BY_KEY.get(key)
        if setting is not None:
            try:
                yield setting, check(setting, value)
            except ValueError:
                told = clip(str(value), 60) if isinstance(value, str) else clip(repr(value), 60).strip("'\"")
                raise InvalidArgument(f"{where(key)}{key} is {told}", hint=f"it takes {setting.takes}") from None
        elif isinstance(value, Mapping) and any(one == key or one.startswith(f"{key}.") for one in SECTIONS):
            yield from _flattened(value, check, where, f"{key}.")
        else:
            raise InvalidArgument(f"{where(key)}there is no setting {clip(key)}", hint=nearest(key))


def _placed(value: str | None, folder: Path) -> str | None:
    """A path as its file means it. Urls, absolute paths and those in the user's home mean the same everywhere."""
    return value if value is None or _ANYWHERE.match(value) else str(folder / value)


def _line(text: str, key: str) -> str:
    """Where a key stands in a text of TOML, as `:12`; nothing where that is not plain to see."""
    table: list[str] = []
    wanted = key.split(".")
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header is not None:
            table = _names(header[1])
            if table == wanted:
                return f":{number}"
        elif (match := _ASSIGNED.match(line)) is not None and [*table, *_names(match[1])] == wanted:
            return f":{number}"
    return ""


def _names(dotted: str) -> list[str]:
    return [part.strip(" \t\"'") for part in dotted.split(".")]
