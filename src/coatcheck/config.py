"""Settings, in order of precedence: code, the environment, `coatcheck.toml`, the default.

`load()` reads them; `coatcheck.open` does so for a store, and `store.settings` is the result.
`coatcheck config` shows each value and its origin. The error for a mistake names its place and the
key that was probably meant.

A file that was found by searching comes with a project, perhaps a cloned one. One that another user
could have written is skipped. Its settings that decide where data goes, mask fewer secrets or
change what a model reads (`needs_trust`) count only after the user has trusted it with `coatcheck
trust`. A file that COATCHECK_CONFIG or code names is trusted.

One table defines all settings: key, type, default, environment variable, meaning. The names under a
section are the parameters of what the section configures: `Policy(**settings.section("policy"))`. A
default here is the default there.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeGuard

from coatcheck.checks import is_seconds, is_whole
from coatcheck.deferred import lazy_pattern, logger
from coatcheck.errors import InvalidArgument
from coatcheck.ids import clip
from coatcheck.regular import read_regular
from coatcheck.trust import is_trusted

FILE: Final = "coatcheck.toml"
VARIABLE: Final = "COATCHECK_CONFIG"
NONE: Final = "none"
SESSION_TTL: Final = 30 * 86_400.0
"""Seconds after its last use until a session expires: a person who returns to a conversation finds
its pointers."""
"""How a file or a variable writes None: TOML has no null."""

_SWITCHES: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)
_LONGEST: Final = 4_096
_LIMITS: Final = ("max_tokens", "max_chars", "max_bytes")
_LARGEST_FILE: Final = 1 << 20
_CAMEL: Final = "memory.artifacts."  # the section whose keys are accepted in camelCase too
_ABSOLUTE: Final = lazy_pattern(r"/|~|[A-Za-z][A-Za-z0-9+.-]+:")
_HEADER: Final = lazy_pattern(r"\s*\[+([^\[\]]+)\]")
_ASSIGNED: Final = lazy_pattern(r"\s*([^=#\[\]]+?)\s*=")


class Setting(NamedTuple):
    """One setting. It may be None if that is its default, or if it is `optional`. A value of kind
    `place` is a path or url; in a file, paths are relative to the file. `rules` are what `Policy`
    takes for single tools."""

    key: str
    kind: Literal["switch", "whole", "number", "text", "place", "rules"]
    default: Any
    about: str
    least: int = 1
    optional: bool = False
    choices: tuple[str, ...] = ()
    named: str = ""
    needs_trust: bool = False
    """Whether a file that was found by searching must be trusted for this setting to count."""
    safe: tuple[str, ...] = ()
    """The values that count without trust all the same."""

    @property
    def variable(self) -> str | None:
        """The environment variable; None for a setting that does not fit on one line."""
        return (
            None
            if self.kind == "rules"
            else self.named or "COATCHECK_" + self.key.upper().replace(".", "_")
        )

    @property
    def takes(self) -> str:
        """The valid values, in words."""
        words = (
            "one of " + ", ".join(map(repr, self.choices)) if self.choices else _KINDS[self.kind][0]
        )
        return words.format(self.least) + (f", or {NONE!r}" if self.takes_none else "")

    @property
    def takes_none(self) -> bool:
        return self.optional or self.default is None

    def is_guarded(self, value: object) -> bool:
        """Whether this value counts only in a trusted file, if the file was found by searching."""
        return self.needs_trust and value not in self.safe

    def parsed(self, text: str) -> Any:
        """Return the value of a variable's text. Raises ValueError if it is invalid."""
        value: object = text.strip()
        if self.kind == "switch":
            value = _SWITCHES.get(text.strip().lower())
        elif self.kind in ("whole", "number") and value != NONE:
            value = int(text) if self.kind == "whole" else float(text)
        return self.written(value)

    def written(self, value: object) -> Any:
        """Return a value from a file, where "none" means None. Raises ValueError if it is
        invalid."""
        return None if self.takes_none and value == NONE else self.checked(value)

    def checked(self, value: object) -> Any:
        """Return the value if it is valid. Raises ValueError if it is not."""
        fits = _KINDS[self.kind][1](self, value) and (not self.choices or value in self.choices)
        if not fits and not (self.takes_none and value is None):
            raise ValueError
        return value


def _is_bounded(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST


def _is_rule(rule: object) -> bool:
    if not isinstance(rule, Mapping):
        return rule in ("always", "never")
    return (
        bool(rule)
        and set(rule) <= set(_LIMITS)
        and all(is_whole(most, 1) for most in rule.values())
    )


_KINDS: Final[Mapping[str, tuple[str, Callable[[Setting, object], bool]]]] = {
    "switch": ("true or false", lambda _, value: isinstance(value, bool)),
    "whole": ("an integer of at least {}", lambda one, value: is_whole(value, one.least)),
    "number": ("a number of at least {}", lambda one,
               value: is_seconds(value) and one.least <= value < math.inf),
    "text": ("a text", lambda _, value: _is_bounded(value) and value.isprintable()),
    "place": ("a path or url", lambda _, value: _is_bounded(value) and "\0" not in value),
    "rules": (f'for each tool "always", "never" or a table of {", ".join(_LIMITS)}',
              lambda _, value: isinstance(value, Mapping) and all(map(_is_rule, value.values()))),
}  # fmt: skip
"""The valid values of each kind, in words and as a check."""

SETTINGS: Final[tuple[Setting, ...]] = (
    Setting("store.url", "place", None, "the store; by default the user's data folder",
            named="COATCHECK_STORE", needs_trust=True),
    Setting("store.durability", "text", "power",
            "what an acknowledged put survives: a power cut, or a crash",
            choices=("power", "process"), needs_trust=True),
    Setting("store.tenant", "text", None, "the tenant whose store to open",
            named="COATCHECK_TENANT", needs_trust=True),
    Setting("store.grace", "number", 7_200.0,
            "seconds that expired artifacts are kept before collect removes them", least=0,
            needs_trust=True),
    Setting("store.max_artifact_bytes", "whole", None, "maximum size of one artifact",
            needs_trust=True),
    Setting("store.quota_bytes", "whole", None, "maximum size of the whole store",
            needs_trust=True),
    Setting("session.id", "text", "default", "the session that commands use",
            named="COATCHECK_SESSION"),
    Setting("session.ttl", "number", SESSION_TTL,
            "seconds until a new session expires after its last use", least=0, optional=True),
    Setting("policy.enabled", "switch", True, "whether large tool results are replaced by stubs"),
    Setting("policy.max_tokens", "whole", None,
            "limit for a tool result in tokens; without any limit, cost decides"),
    Setting("policy.max_chars", "whole", None, "limit for a tool result in characters"),
    Setting("policy.max_bytes", "whole", None, "limit for a tool result in bytes"),
    Setting("policy.preview_chars", "whole", 1_200,
            "maximum characters of the preview in a stub", least=0),
    Setting("policy.redact", "text", None, "mask secrets in results, transcripts and prompts "
                                           "before they are stored",
            choices=("store",), needs_trust=True, safe=("store",)),
    Setting("policy.read_tool", "text", "get_artifact",
            "name of the agent's tool for reading artifacts", optional=True, needs_trust=True),
    Setting("policy.model", "text", None, "model whose prices decide when a result leaves, "
                                          "if no limit is set"),
    Setting("policy.expected_calls", "whole", None,
            "model calls that usually follow a result; by default estimated"),
    Setting("policy.files", "place", None, "folder in which results are files too, for agents "
                                           "that read files",
            needs_trust=True),
    Setting("policy.tools", "rules", {}, "limits for single tools"),
    Setting("page.max_chars", "whole", 8_000, "maximum characters of one page", least=1_500),
    Setting("tools.max_store_bytes", "whole", 524_288,
            "maximum bytes that a model can store in one call"),
    Setting("programs.tools", "text", None,
            "tools that a model's program may call, besides those that only read",
            needs_trust=True),
    Setting("serve.tokens", "place", None, "file with the digests of the tokens of 'coatcheck "
                                           "serve'",
            needs_trust=True),
    Setting("budget.max_hot_state_tokens", "whole", 1_000, "maximum tokens of a hot state"),
    Setting("budget.max_artifact_index_entries", "whole", 20,
            "maximum artifacts that a hot state lists", least=0),
    Setting("budget.max_prompt_tokens", "whole", 8_000,
            "maximum tokens of a prompt; `PromptBuilder` uses the model's window if this is not "
            "set"),
    Setting("budget.max_rag_chunks", "whole", 10, "maximum retrieved chunks in a prompt", least=0),
    Setting("budget.max_inline_artifact_chars", "whole", 2_000,
            "maximum characters of one artifact in a prompt"),
    Setting("bootstrap.enabled", "switch", True, "whether large bootstrap files become references",
            named="COATCHECK_BOOTSTRAP_REFS"),
    Setting("bootstrap.threshold_chars", "whole", 8_000,
            "characters from which a bootstrap file becomes a reference"),
    Setting("bootstrap.shown_chars", "whole", 4_000,
            "characters of its head and tail that the prompt keeps", least=0),
    Setting("memory.artifacts.enabled", "switch", False, "whether prompts recall artifacts"),
    Setting("memory.artifacts.max_items", "whole", 8, "maximum artifacts to recall"),
    Setting("memory.artifacts.max_chars", "whole", 2_000,
            "maximum characters of everything recalled", least=300),
    Setting("memory.artifacts.narrative_max_chars", "whole", 240,
            "maximum characters of one summary", least=0),
    Setting("metrics.enabled", "switch", True, "whether to record metrics of model calls"),
    Setting("metrics.file", "place", None, "file to append a line of JSON to for each model call",
            needs_trust=True),
    Setting("metrics.logger", "text", None, "logger that gets the same line"),
    Setting("metrics.opentelemetry", "switch", True,
            "whether to send metrics to OpenTelemetry, if the host has it"),
    Setting("metrics.keep", "whole", 10_000, "maximum model calls to keep for a session"),
    Setting("metrics.release", "text", None,
            "release to record metrics under; by default coatcheck's own"),
    Setting("metrics.baseline", "place", None, "file with the metrics of the previous release",
            needs_trust=True),
    Setting("metrics.warn_hot_state_tokens", "whole", 800, "warn if a hot state has more tokens"),
    Setting("metrics.warn_index_entries", "whole", 15, "warn if an index has more artifacts"),
    Setting("metrics.warn_prompt_tokens", "whole", 6_000, "warn if a prompt has more tokens"),
    Setting("metrics.warn_rise_percent", "whole", 50,
            "warn if a metric is this many percent above its baseline"),
    Setting("metrics.price_cached", "number", 0.1,
            "price of a cached token, relative to an uncached one", least=0),
    Setting("metrics.price_cache_write", "number", 1.25,
            "price of a token written to the cache, relatively", least=0),
)  # fmt: skip

BY_KEY: Final[Mapping[str, Setting]] = {setting.key: setting for setting in SETTINGS}
SECTIONS: Final = tuple(dict.fromkeys(setting.key.rpartition(".")[0] for setting in SETTINGS))


class Origin(NamedTuple):
    """The origin of a value: `code`, a `file` (`where` is its path), the `environment` (the
    variable) or `default`."""

    source: Literal["code", "file", "environment", "default"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.where}".rstrip()


class Settings:
    """The value of each setting by its key (`settings["policy.max_tokens"]`), and its origin.
    Immutable. `ignored` are the keys that were left out because the file is not trusted."""

    __slots__ = ("_origins", "_values", "file", "ignored")

    def __init__(
        self,
        values: Mapping[str, Any],
        origins: Mapping[str, Origin],
        file: Path | None = None,
        ignored: tuple[str, ...] = (),
    ) -> None:
        self._values = MappingProxyType(
            {key: values.get(key, setting.default) for key, setting in BY_KEY.items()}
        )
        self._origins = MappingProxyType(dict(origins))
        self.file = file
        self.ignored = ignored

    def __getitem__(self, key: str) -> Any:
        try:
            return self._values[key]
        except KeyError:
            raise InvalidArgument(
                f"unknown setting {clip(str(key))}", hint=_nearest(str(key))
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __repr__(self) -> str:
        changed = ", ".join(f"{key}={self.shown(key)}" for key in self._origins)
        return f"Settings({changed})"

    def origin(self, key: str) -> Origin:
        """The origin of the value of a key."""
        self[key]  # raises if the key is unknown
        return self._origins.get(key, Origin("default"))

    def shown(self, key: str) -> str:
        """A value for display: secrets, such as a password in a url, are masked."""
        from coatcheck.redaction import mask, mask_url

        value = self[key]
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:.15g}"
        if value is None:
            return NONE
        return mask_url(str(value)) if BY_KEY[key].kind == "place" else mask(str(value))

    def section(self, name: str, **values: Any) -> dict[str, Any]:
        """The settings of a section by the last part of their keys:
        `Budget(**settings.section("budget"))`. `values` take precedence and are not checked:
        whatever takes the section checks them."""
        if name not in SECTIONS:
            raise InvalidArgument(
                f"unknown section {clip(name)}", hint="one of " + ", ".join(SECTIONS)
            )
        split = ((*key.rpartition("."), value) for key, value in self._values.items())
        return {last: value for section, _, last, value in split if section == name} | values

    def override(self, values: Mapping[str, Any]) -> Settings:
        """Return these settings with values from code, which take precedence: nested as in a file,
        or by key. Raises `InvalidArgument`."""
        checked = {
            setting.key: value
            for setting, value in _flattened(values, Setting.checked, lambda key: "")
        }
        origins = {**self._origins, **dict.fromkeys(checked, Origin("code"))}
        ignored = tuple(key for key in self.ignored if key not in checked)
        return Settings({**self._values, **checked}, origins, self.file, ignored)


DEFAULTS: Final = Settings({}, {})


def load(
    values: Mapping[str, Any] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Load the effective settings.

    `values` come from code and take precedence. `file` is the file to read; by default the one that
    COATCHECK_CONFIG names, else the nearest `coatcheck.toml` in the working folder or above it,
    else none. Raises `InvalidArgument` for an unknown key or an invalid value, with its place."""
    environ = os.environ if environ is None else environ
    from_environment = _from_environment(environ)
    path = found_file(environ) if file is None else Path(file).expanduser().absolute()
    from_file: dict[str, Any] = {}
    ignored: tuple[str, ...] = ()
    if path is not None:
        is_named = file is not None or bool(environ.get(VARIABLE))
        content = _content(path, is_named=is_named)
        from_file = _from_file(path, content)
        if not is_named:
            ignored = _untrusted(path, content, from_file, environ)
            if "policy.files" not in ignored:
                _check_inside(path, from_file.get("policy.files"))
    found = {key: value for key, value in from_file.items() if key not in ignored}
    origins = dict.fromkeys(found, Origin("file", str(path)))
    found |= from_environment
    origins |= {key: Origin("environment", BY_KEY[key].variable or "") for key in from_environment}
    ignored = tuple(key for key in ignored if key not in from_environment)
    if ignored and path is not None:
        _report_ignored(path, ignored)
    settings = Settings(found, origins, path, ignored)
    return settings.override(values) if values else settings


def needing_trust(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the content of a settings file, and its settings that count only if the user trusts
    it. Raises `InvalidArgument` for a mistake in it."""
    content = _content(path, is_named=False)
    found = _from_file(path, content)
    return content, {key: value for key, value in found.items() if BY_KEY[key].is_guarded(value)}


def _untrusted(
    path: Path,
    content: bytes,
    found: Mapping[str, Any],
    environ: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the settings in a file that do not count, because the user has not trusted it."""
    guarded = tuple(key for key, value in found.items() if BY_KEY[key].is_guarded(value))
    if guarded and is_trusted(path, content, environ):
        return ()
    return guarded


def _check_inside(path: Path, folder: str | None) -> None:
    """Raise `InvalidArgument` if a project's settings file names a folder outside the project."""
    if folder is None:
        return
    project = Path(os.path.realpath(path.parent))
    if project not in Path(os.path.realpath(os.path.expanduser(folder))).parents:
        raise InvalidArgument(
            f"{path}: policy.files is {clip(folder)}, which is not inside the project",
            hint="name a folder of the project, or set COATCHECK_POLICY_FILES",
        )


def _report_ignored(path: Path, keys: tuple[str, ...]) -> None:
    """Report which settings are ignored: one line, once for each file."""
    if path in _reported_files:
        return
    _reported_files.add(path)
    verb, object_ = ("is", "it") if len(keys) == 1 else ("are", "them")
    logger().warning(
        "%s is not trusted, so %s %s ignored; to use %s: coatcheck trust %s",
        path,
        ", ".join(keys),
        verb,
        object_,
        path.parent,
    )


_reported_files: Final[set[Path]] = set()
"""The files whose ignored settings this process has reported."""


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that look like misspelled settings, each with the one that was probably meant."""
    import difflib

    known = [setting.variable for setting in SETTINGS if setting.variable] + [VARIABLE]
    odd = sorted(name for name in environ if name.startswith("COATCHECK_") and name not in known)
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.8) for name in odd}
    return {name: found[0] for name, found in close.items() if found}


def found_file(environ: Mapping[str, str]) -> Path | None:
    """The file to read: the one that COATCHECK_CONFIG names, else the nearest in the working folder
    or above it."""
    named = environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    try:
        folder = Path.cwd()
    except OSError:  # the working folder was removed
        return None
    for above in (folder, *folder.parents):
        path = above / FILE
        try:
            info = path.stat()
        except OSError:
            continue
        if not stat.S_ISREG(info.st_mode):
            continue
        if others_can_write(info):
            logger().warning(
                "%s is ignored: other users can write it. Set %s to use it anyway", path, VARIABLE
            )
            continue
        return path
    return None


def others_can_write(info: os.stat_result) -> bool:
    """Whether a file belongs to another user than us and root, or everybody can write it."""
    return info.st_uid not in (os.geteuid(), 0) or bool(info.st_mode & stat.S_IWOTH)


def _content(path: Path, *, is_named: bool) -> bytes:
    """Read a settings file. One that the user has named may be anything, such as /dev/null."""
    try:
        if not is_named:
            return read_regular(path, max_bytes=_LARGEST_FILE, follow=True)
        with path.open("rb") as source:
            data = source.read(_LARGEST_FILE + 1)
    except OSError as error:
        otherwise = f"unset {VARIABLE}" if is_named else f"name another file with {VARIABLE}"
        message = f"cannot read {path}: {error.strerror}"
        raise InvalidArgument(message, hint=f"fix it, or {otherwise}") from error
    if len(data) > _LARGEST_FILE:
        raise InvalidArgument(
            f"{path} has more than {_LARGEST_FILE:,} bytes", hint="name a settings file"
        )
    return data


def _from_file(path: Path, content: bytes) -> dict[str, Any]:
    """The values in a file, by key. Relative paths are made absolute: they are relative to the
    file. Urls and paths in the user's home stay as they are."""
    import tomllib  # here, so that importing coatcheck stays quick

    try:
        text = content.decode()
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{path} is not valid TOML: {clip(str(error), 200)}", hint="fix that line"
        ) from error
    return {
        setting.key: str(path.parent / value)
        if setting.kind == "place" and value is not None and not _ABSOLUTE.match(value)
        else value
        for setting, value in _flattened(
            values, Setting.written, lambda key: f"{path}{_line(text, key)}: "
        )
    }


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The values in the environment, by key. An empty variable counts as not set."""
    values = {}
    for setting in SETTINGS:
        text = environ.get(setting.variable or "")
        if not text:
            continue
        try:
            values[setting.key] = setting.parsed(text)
        except ValueError:
            raise InvalidArgument(
                f"{setting.variable} is {clip(text)}", hint=f"it takes {setting.takes}"
            ) from None
    return values


def _nearest(key: str) -> str:
    """A hint for an unknown key: the one that was probably meant."""
    import difflib

    if key in SECTIONS:
        return (
            "it is a section, with settings such as "
            f"{next(one for one in BY_KEY if one.startswith(key))}"
        )
    last = key.rpartition(".")[2]
    same = [one for one in BY_KEY if one.rpartition(".")[2] == last]
    close = difflib.get_close_matches(
        key, same or [*BY_KEY, *SECTIONS], n=1, cutoff=0.0 if same else 0.5
    )
    return f"the nearest is {close[0]}" if close else "'coatcheck config' lists them all"


def _flattened(
    values: Mapping[str, Any],
    check: Callable[[Setting, object], Any],
    where: Callable[[str], str],
    above: str = "",
) -> Iterator[tuple[Setting, Any]]:
    """Each setting in a tree of sections, checked. `where` returns the place of a key."""
    for name, value in values.items():
        key = f"{above}{name}"
        if key.startswith(_CAMEL) and key not in BY_KEY:
            key = re.sub("[A-Z]", lambda found: "_" + found[0].lower(), key)
        setting = BY_KEY.get(key)
        if setting is not None:
            yield setting, _checked(setting, value, check, where(key))
        elif isinstance(value, Mapping) and _is_section(key):
            yield from _flattened(value, check, where, f"{key}.")
        else:
            raise InvalidArgument(f"{where(key)}unknown setting {clip(key)}", hint=_nearest(key))


def _checked(
    setting: Setting, value: object, check: Callable[[Setting, object], Any], where: str
) -> Any:
    try:
        return check(setting, value)
    except ValueError:
        if isinstance(value, str):
            given = clip(value, 60)
        else:
            given = clip(repr(value), 60).strip("'\"")
        raise InvalidArgument(
            f"{where}{setting.key} is {given}", hint=f"it takes {setting.takes}"
        ) from None


def _is_section(key: str) -> bool:
    return any(one == key or one.startswith(f"{key}.") for one in SECTIONS)


def _line(text: str, key: str) -> str:
    """The line of a key in a TOML text, as `:12`; empty if it is not found."""
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
