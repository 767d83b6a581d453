"""Settings, in one place: what code says wins over `coatcheck.toml`, that over the environment, that over the default.

`load()` reads them; `coatcheck.open` does so for a store, and `store.settings` is what it found. `coatcheck config`
shows each value and where it came from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from coatcheck.config.sources import FILE, VARIABLE, find, from_code, from_environment, from_file, nearest, unknown
from coatcheck.config.table import BY_KEY, NONE, SECTIONS, SETTINGS, Setting
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.redaction import mask, mask_url

__all__ = ["DEFAULTS", "FILE", "SETTINGS", "VARIABLE", "Origin", "Setting", "Settings", "load", "unknown"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: `code`, a `file` (`where` is its path), the `environment` (the variable), `default`."""

    source: Literal["code", "file", "environment", "default"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.where}".rstrip()


_DEFAULT: Final = Origin("default")
_CODE: Final = Origin("code")


class Settings:
    """The value of each setting by its key (`settings["policy.max_tokens"]`), and where it came from. Never changes."""

    __slots__ = ("_origins", "_values", "file")

    def __init__(self, values: Mapping[str, Any], origins: Mapping[str, Origin], file: Path | None = None) -> None:
        self._values = MappingProxyType({key: values.get(key, setting.default) for key, setting in BY_KEY.items()})
        self._origins = MappingProxyType(dict(origins))
        self.file = file

    def __getitem__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise InvalidArgument(f"there is no setting {clip(str(key))}", hint=nearest(str(key))) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __repr__(self) -> str:
        said = ", ".join(f"{key}={self.shown(key)}" for key in self._origins)
        return f"Settings({said})"

    def origin(self, key: str) -> Origin:
        """Where the value of a key came from."""
        self[key]  # raises where there is none
        return self._origins.get(key, _DEFAULT)

    def shown(self, key: str) -> str:
        """A value as people are shown it: secrets, such as a password in a url, are masked."""
        value = self[key]
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:g}"
        if value is None:
            return NONE
        return mask_url(str(value)) if BY_KEY[key].kind == "place" else mask(str(value))

    def section(self, name: str, **said: Any) -> dict[str, Any]:
        """The settings under a name, by their last part: `Budget(**settings.section("budget"))`. What is said here
        wins, unchecked: whatever takes it checks it."""
        if name not in SECTIONS:
            raise InvalidArgument(f"there is no section {clip(name)}", hint="one of " + ", ".join(SECTIONS))
        lead = f"{name}."
        found = {key[len(lead) :]: value for key, value in self._values.items() if key.rpartition(".")[0] == name}
        return found | said

    def saying(self, said: Mapping[str, Any]) -> Settings:
        """These settings with what code says, which wins: nested as in a file, or by key. Raises `InvalidArgument`."""
        values = from_code(said)
        origins = {**self._origins, **dict.fromkeys(values, _CODE)}
        return Settings({**self._values, **values}, origins, self.file)


DEFAULTS: Final = Settings({}, {})
"""What holds where nobody says anything."""


def load(
    said: Mapping[str, Any] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """The settings that hold here and now.

    `said` is what code says. `file` is the file to read; without one, the one that COATCHECK_CONFIG names, else the
    nearest `coatcheck.toml` in the working folder or above it, else none. Raises `InvalidArgument` for a key that there
    is not, or a value that cannot be right, and says where it stands."""
    environ = os.environ if environ is None else environ
    values = from_environment(environ)
    origins = {key: Origin("environment", BY_KEY[key].variable or "") for key in values}
    path = find(environ) if file is None else Path(file).expanduser().absolute()
    if path is not None:
        read = from_file(path)
        values.update(read)
        origins.update(dict.fromkeys(read, Origin("file", str(path))))
    found = Settings(values, origins, path)
    return found.saying(said) if said else found
