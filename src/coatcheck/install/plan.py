"""Changes to a client's configuration: planned and shown first, then written, and undone.

Before the first change the original is copied beside the file, and each change is recorded there.
Both files are readable by their owner only (0600), because configurations contain secrets.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

from coatcheck.atomic import replace_file
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.install.clients import ConfigFile, after_launcher, shared_options, unwrap, wrap
from coatcheck.install.config_text import ConfigText, JsonConfig, config_text

_KEPT: Final = (
    "servers that are already wrapped keep their session; to change it, "
    "run --undo and wrap them all again"
)
_MAX_SIZE: Final = 64 << 20


class Plan:
    """A configuration before and after, as bytes (None: no file), and the record of all changes to
    it. `notes` are for the user."""

    def __init__(self, config: ConfigFile, *, is_undo: bool = False) -> None:
        self.config = config
        self.is_undo = is_undo
        self.before = self.after = read_file(config.file)
        self.text = _parse(config, self.before)
        self.notes: list[str] = []
        now = _digest(self.before)
        self.record = UndoRecord.read(config.file) or UndoRecord(now)
        self.changes = self.record.parts.setdefault(
            _key(config), ScopeChanges(self.text.has_section)
        )
        if self.record.written is not None and now not in (
            self.record.written,
            self.record.original,
        ):
            self.record.exact = False

    @property
    def is_empty(self) -> bool:
        return self.before == self.after

    def diff(self) -> str:
        """Return the change as a unified diff without secrets."""
        both = (self.before, self.after)
        old, new = (_parse(self.config, data).masked().splitlines() for data in both)
        was, will = (os.devnull if data is None else str(self.config.file) for data in both)
        return "".join(
            f"{line}\n" for line in difflib.unified_diff(old, new, was, will, lineterm="")
        )

    def edit(self, text: ConfigText) -> None:
        self.text, self.after = text, text.data

    def add(self, name: str, entry: Mapping[str, Any]) -> bool:
        """Add an entry of our own, and return whether it was missing. An older one of the same name
        is replaced, any other is an error."""
        file, found, new = (
            str(self.config.file),
            self.text.servers.get(name),
            self.config.client.shaped(entry),
        )
        if found == new:
            return False
        if found is not None and after_launcher(found) is None:
            raise InvalidArgument(
                f"{file!r} already has another server {name!r}", hint="choose another --name"
            )
        try:
            self.edit(
                (self.text.with_server(name, None) if found else self.text).with_server(name, new)
            )
        except InvalidArgument as error:
            hint = f"add to {self.config.section[-1]} by hand: {self.text.line(name, new)}"
            raise InvalidArgument(f"{file!r}: {error.message}", hint=hint) from error
        if name not in self.changes.added:
            self.changes.added.append(name)
        return True

    def write(self) -> None:
        """Apply the plan. Raises `InvalidArgument` if the file has changed since the plan was
        made."""
        file, is_first = self.config.file, self.record.written is None
        self._check_unchanged()
        _check_writable(file)
        if self.is_undo:
            self._undo(file)
            return
        assert self.after is not None
        missing = [folder for folder in (file.parent, *file.parent.parents) if not folder.exists()]
        file.parent.mkdir(parents=True, exist_ok=True)
        self.record.made += map(str, reversed(missing))
        if self.before is not None and is_first:
            _back_up(file, self.before)
        self.record.written = _digest(self.after)

        def record() -> None:
            self.record.write(
                file
            )  # before the file: a record of a change that did not happen is harmless
            self._check_unchanged()

        try:
            mode = 0o600 if self.config.scope != "project" else 0o666 & ~_umask()
            replace_file(file, self.after, mode=mode, check=record)
        except InvalidArgument:
            if is_first:
                _forget(file)
            raise

    def _undo(self, file: Path) -> None:
        """Undo this scope. Changes by other scopes to the same file stay, and so does their
        record."""
        if self.after is None:
            file.unlink()
        elif not self.is_empty:
            replace_file(file, self.after, check=self._check_unchanged)
        if self.record.parts and self.after is not None:
            self.record.written = _digest(self.after)
            self.record.write(file)
            return
        _forget(file)
        for folder in reversed(self.record.made):
            try:
                os.rmdir(folder)
            except OSError:
                break  # it is not empty any more

    def _check_unchanged(self) -> None:
        if read_file(self.config.file) != self.before:
            name = repr(str(self.config.file))
            raise InvalidArgument(
                f"{name} was changed by another program", hint="nothing was written; try again"
            )


def plan_entry(config: ConfigFile, name: str, entry: Mapping[str, Any]) -> Plan:
    """Plan to add this entry."""
    plan = Plan(config)
    before = shared_options(plan.text.servers.get(name))
    if not plan.add(name, entry):
        plan.notes.append(f"{name!r} is already configured")
    elif before not in (None, shared_options(plan.text.servers[name])):
        plan.notes.append(_KEPT)
    return plan


def plan_wrap(
    config: ConfigFile,
    names: Sequence[str],
    start: Sequence[str],
    options: Sequence[str],
    *,
    own: str,
    is_chosen: bool,
    files: bool = False,
) -> Plan:
    """Plan to put the named servers, or all, behind the proxy. Notes list the servers that stay as
    they are.

    All servers share one session. The tools for reading are in one more server with the name `own`,
    unless the agent reads `files`.
    If that is already there and the user did not choose `options`, its session and store are
    used."""
    plan = Plan(config)
    servers = plan.text.servers
    before = shared_options(servers.get(own))
    if before is not None and not is_chosen:
        options = before
    for name in _names_to_wrap(config, servers, names, own=own):
        entry = servers[name]
        try:
            is_named = bool(names)
            wrapped = wrap(config.client, entry, start, options, named=is_named, files=files)
            _replace_entry(plan, name, entry, wrapped)
        except InvalidArgument as error:
            plan.notes.append(f"{name!r} is left unchanged: {error}")
    if not plan.is_empty and not files:
        plan.add(own, {"command": start[0], "args": [*start[1:], "mcp", *options]})
        if before not in (None, list(options)):
            plan.notes.append(_KEPT)
    if not names and not servers:
        plan.notes.append("there are no servers to wrap")
    return plan


def _names_to_wrap(
    config: ConfigFile, servers: Mapping[str, Any], names: Sequence[str], *, own: str
) -> Sequence[str]:
    """Return the named servers, or all but our own if none is named. Raises `NotFound`."""
    missing = [name for name in names if name not in servers]
    if missing:
        found = ", ".join(servers) or "none"
        raise NotFound(
            f"there is no server {missing[0]!r} in {str(config.file)!r}",
            hint=f"its servers: {found}",
        )
    others = [name for name in servers if name != own or after_launcher(servers[name]) is None]
    return names or others


def _replace_entry(
    plan: Plan, name: str, entry: Mapping[str, Any], wrapped: Mapping[str, Any]
) -> None:
    """Replace the entry of a server, and record the old one. Raises `InvalidArgument` if the file
    cannot be edited there."""
    text = plan.text
    plan.edit(text.with_server(name, wrapped))
    if "command" not in entry and isinstance(text, JsonConfig):
        plan.changes.wrapped[name] = {"entry": entry, "text": text.entry_text(name)}
    else:
        plan.changes.wrapped[name] = {"command": entry.get("command"), "args": entry.get("args")}
    if "cwd" in entry:
        plan.notes.append(
            f"{name!r} has its own working folder: it shares pointers only with --session NAME"
        )


def plan_undo(config: ConfigFile) -> Plan:
    """Plan to undo all changes in this scope. Raises `NotFound` if there are none."""
    file, backup, record = (
        str(config.file),
        _beside(config.file, "backup"),
        UndoRecord.read(config.file),
    )
    if record is None or _key(config) not in record.parts:
        raise NotFound(
            f"no changes by Coatcheck are recorded for {file!r}",
            hint="try another --scope or --file",
        )
    plan = Plan(config, is_undo=True)
    record = plan.record
    del record.parts[_key(config)]
    if plan.before is None:
        raise NotFound(f"{file!r} no longer exists", hint=f"the original is {str(backup)!r}")
    original = read_file(backup) if record.original is not None else None
    if _digest(plan.before) == record.original:
        record.parts.clear()
        plan.notes.append("the file is already in its original state")
    elif record.exact and not record.parts and _digest(original) == record.original:
        plan.after = original
    else:
        if not record.exact:
            plan.notes.append(
                f"{file!r} was edited since; only the changes by Coatcheck are undone"
            )
        with _naming(config):
            plan.edit(_without_ours(plan.text, plan.changes, plan.notes))
    return plan


def _without_ours(text: ConfigText, changes: ScopeChanges, notes: list[str]) -> ConfigText:
    for name in [*changes.added, *changes.wrapped]:
        entry, before = text.servers.get(name), changes.wrapped.get(name)
        if entry is None:
            continue
        if after_launcher(entry) is None:
            what = (
                "no longer starts Coatcheck"
                if before is None
                else "no longer runs through the proxy"
            )
            notes.append(f"{name!r} is left unchanged: it {what}")
        elif before is None:
            text = text.with_server(name, None)
        else:
            restored = unwrap(entry, before)
            text = text.with_server(
                name, restored, written=before["text"] if restored == before.get("entry") else None
            )
    return (
        text.without_section()
        if isinstance(text, JsonConfig) and not changes.section_was_there
        else text
    )


def _parse(config: ConfigFile, data: bytes | None) -> ConfigText:
    with _naming(config):
        return config_text(decode(data or b""), config.client.format, config.section)


@contextmanager
def _naming(config: ConfigFile) -> Iterator[None]:
    """Put the name of the file into errors."""
    try:
        yield
    except InvalidArgument as error:
        hint = error.hint or "nothing was changed; correct it first"
        raise InvalidArgument(
            f"cannot edit {str(config.file)!r}: {error.message}", hint=hint
        ) from error


# The record of changes


@dataclass(slots=True)
class ScopeChanges:
    """The changes to the servers of one scope. A file may contain several scopes."""

    section_was_there: bool = True
    added: list[str] = field(default_factory=list)
    wrapped: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class UndoRecord:
    """All changes to a file. `original` and `written` are digests; `original` is None if there was
    no file. `exact` is False if somebody else edited the file between our changes. `parts` has the
    path of the servers as key."""

    original: str | None
    written: str | None = None
    exact: bool = True
    made: list[str] = field(default_factory=list)
    parts: dict[str, ScopeChanges] = field(default_factory=dict)
    version: Literal[2] = 2

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Read the record of a configuration, or return None. Raises `InvalidArgument` if it is
        damaged."""
        place = _beside(file, "undo")
        if (data := read_file(place)) is None:
            return None
        from pydantic import TypeAdapter, ValidationError

        try:
            return TypeAdapter(cls).validate_json(data)
        except ValidationError as error:
            hint = f"the original is {str(_beside(file, 'backup'))!r}"
            raise InvalidArgument(
                f"{str(place)!r} is damaged or has another version", hint=hint
            ) from error

    def write(self, file: Path) -> None:
        replace_file(_beside(file, "undo"), json.dumps(asdict(self), indent=1).encode())


def _key(config: ConfigFile) -> str:
    return json.dumps(config.section)


def _beside(file: Path, what: str) -> Path:
    return file.with_name(f"{file.name}.coatcheck-{what}")


def _back_up(file: Path, data: bytes) -> None:
    """Keep the original. Raises `InvalidArgument` if there is another backup: it may be the only
    one."""
    place = _beside(file, "backup")
    if place.is_symlink() or read_file(place) not in (None, data):
        raise InvalidArgument(
            f"{str(place)!r} already exists", hint="nothing was changed; move it away first"
        )
    replace_file(place, data)


def _forget(file: Path) -> None:
    for what in ("undo", "backup"):
        _beside(file, what).unlink(missing_ok=True)


# The file itself


def read_file(file: Path) -> bytes | None:
    """Read a configuration file; None if it does not exist. Raises `InvalidArgument`."""
    try:
        with open(file, "rb") as source:
            if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
                raise InvalidArgument(f"{str(file)!r} is not a file")
            data = source.read(_MAX_SIZE + 1)
    except FileNotFoundError:
        if file.is_symlink():
            raise InvalidArgument(
                f"{str(file)!r} is a broken link", hint="correct the link"
            ) from None
        return None
    except OSError as error:
        raise InvalidArgument(
            f"cannot read {str(file)!r}: {error.strerror}", hint="nothing was changed"
        ) from error
    if len(data) > _MAX_SIZE:
        raise InvalidArgument(f"{str(file)!r} is too large for a configuration")
    return data


def decode(data: bytes) -> str:
    """Decode a configuration. Raises `InvalidArgument` if it is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument("it is not UTF-8", hint="save it as UTF-8 first") from error


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def _check_writable(file: Path) -> None:
    """Raise `InvalidArgument` if the file is read-only: replacing it would bypass that."""
    target = Path(os.path.realpath(file))
    if not target.exists():
        return
    if not target.stat().st_mode & 0o222 or not os.access(target, os.W_OK):
        raise InvalidArgument(
            f"{str(file)!r} is read-only", hint="nothing was changed; make it writable first"
        )
    if not os.access(target.parent, os.W_OK):
        raise InvalidArgument(
            f"the folder of {str(target)!r} is read-only", hint="nothing was changed"
        )


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
