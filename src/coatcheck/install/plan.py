"""Changes to a client's configuration: planned and shown first, then written, and undone.

Before the first change the original is copied beside the file, and each change is recorded there. Both files are
readable by their owner only (0600), because configurations contain secrets.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.install.clients import ConfigFile, Prefixed, Rewritten, after_launcher, shared_options, unwrap, wrap
from coatcheck.install.config_text import JsonConfig, TomlConfig, config_text

_KEPT: Final = "servers that are already wrapped keep their session; to change it, --undo and wrap all of them again"
_VERSION: Final = 2
_MAX_SIZE: Final = 64 << 20
_BOM: Final = "\ufeff"

Config = JsonConfig | TomlConfig


@dataclass(slots=True)
class Plan:
    """A configuration before and after, as bytes (None: no file), and as text without secrets. `notes` are for the
    user."""

    config: ConfigFile
    before: bytes | None
    after: bytes | None
    shown: tuple[str, str]
    record: UndoRecord
    is_undo: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.before == self.after

    def diff(self) -> str:
        """Return the change as a unified diff without secrets."""
        old, new = (text.splitlines() for text in self.shown)
        name = str(self.config.file)
        lines = difflib.unified_diff(
            old, new, name if self.before is not None else os.devnull, name if self.after is not None else os.devnull,
            lineterm="",
        )  # fmt: skip
        return "".join(f"{line}\n" for line in lines)

    def write(self) -> None:
        """Apply the plan. Raises `InvalidArgument` if the file has changed since the plan was made."""
        file = self.config.file
        check_unchanged(file, self.before)
        _check_writable(file)
        if self.is_undo:
            self._undo(file)
            return
        assert self.after is not None
        self.record.made += _make_folders(file.parent)
        is_first = self.record.written is None
        if self.before is not None and is_first:
            _back_up(file, self.before)
        self.record.written = _digest(self.after)
        mode = 0o600 if self.config.scope != "project" else 0o666 & ~_umask()
        with replacing(file, self.after, mode=mode):
            self.record.write(file)  # before the file: a record of a change that did not happen is harmless
            try:
                check_unchanged(file, self.before)
            except InvalidArgument:
                if is_first:
                    _forget(file)
                raise

    def _undo(self, file: Path) -> None:
        """Undo this scope. Changes by other scopes to the same file stay, and so does their record."""
        if self.after is None:
            file.unlink()
        elif self.after != self.before:
            with replacing(file, self.after, mode=0o600):
                check_unchanged(file, self.before)
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


def plan_entry(config: ConfigFile, name: str, entry: Mapping[str, Any]) -> Plan:
    """Plan to add this entry. An older Coatcheck entry of the same name is replaced, any other is an error."""
    draft = _Draft(config)
    before = shared_options(draft.original.servers.get(name))
    edited = draft.with_entry(draft.original, name, entry)
    if edited is draft.original:
        return draft.plan(edited, [f"{name!r} is already there"])
    return draft.plan(edited, [_KEPT] if before not in (None, shared_options(edited.servers[name])) else [])


def plan_wrap(
    config: ConfigFile, names: Sequence[str], start: Sequence[str], options: Sequence[str], *, own: str, is_chosen: bool
) -> Plan:
    """Plan to put the named servers, or all, behind the proxy. Notes list the servers that stay as they are.

    All servers share one session. The tools for reading are in one more server with the name `own`. If that is already
    there and the user did not choose `options`, its session and store are used."""
    draft = _Draft(config)
    edited = draft.original
    before = shared_options(edited.servers.get(own))
    if before is not None and not is_chosen:
        options = before
    if missing := [name for name in names if name not in edited.servers]:
        found = ", ".join(edited.servers) or "none"
        raise NotFound(f"there is no server {missing[0]!r} in {str(config.file)!r}", hint=f"servers there: {found}")
    notes: list[str] = []
    for name in names or [one for one in edited.servers if one != own or after_launcher(edited.servers[one]) is None]:
        entry = edited.servers[name]
        change = wrap(config.client, entry, start, options, named=bool(names))
        try:
            if isinstance(change, str):
                raise InvalidArgument(change, hint="")
            undo = _undo_data(edited, name, change)
            if isinstance(change, Prefixed):
                edited = edited.prefix(name, change.command, change.words)
            else:
                assert isinstance(edited, JsonConfig)
                edited = edited.rewrite(name, change.entry)
        except InvalidArgument as error:
            notes.append(f"{name!r} is left unchanged: {error}")
            continue
        draft.part.wrapped[name] = undo
        if "cwd" in entry:
            notes.append(f"{name!r} has its own working folder: it shares pointers only with --session NAME")
    if edited is not draft.original:
        edited = draft.with_entry(edited, own, {"command": start[0], "args": [*start[1:], "mcp", *options]})
        if before not in (None, list(options)):
            notes.append(_KEPT)
    if not names and not edited.servers:
        notes.append("there are no servers to wrap")
    return draft.plan(edited, notes)


def plan_undo(config: ConfigFile) -> Plan:
    """Plan to undo all changes in this scope. Raises `NotFound` if there are none."""
    file = config.file
    record = UndoRecord.read(file)
    part = record.parts.pop(_key(config), None) if record is not None else None
    if record is None or part is None:
        raise NotFound(f"no changes by Coatcheck are recorded for {str(file)!r}", hint="try another --scope or --file")
    current = read_file(file)
    if current is None:
        raise NotFound(f"{str(file)!r} no longer exists", hint=f"the original is {str(_backup_of(file))!r}")
    now = _digest(current)
    if now == record.original:
        record.parts.clear()
        return Plan(config, current, current, ("", ""), record, True, ["the file already is the original"])
    original = read_file(_backup_of(file)) if record.original is not None else None
    if not record.parts and record.exact and now == record.written and _digest(original) == record.original:
        shown = _parse(config, current)[1].masked(), _parse(config, original)[1].masked()
        return Plan(config, current, original, shown, record, True)
    notes = []
    if not record.exact or now != record.written:
        notes.append(f"{str(file)!r} was edited since: only the changes by Coatcheck are undone")
        record.exact = False
    bom, parsed = _parse(config, current)
    with _naming(config):
        edited = _without_ours(parsed, part, notes)
    return Plan(config, current, (bom + edited.text).encode(), (parsed.masked(), edited.masked()), record, True, notes)


def _without_ours(edited: Config, part: ScopeChanges, notes: list[str]) -> Config:
    for name in part.added:
        entry = edited.servers.get(name)
        if entry is not None and after_launcher(entry) is None:
            notes.append(f"{name!r} is left unchanged: it is no longer Coatcheck")
        elif entry is not None:
            edited = edited.remove(name)
    for name, before in part.wrapped.items():
        entry = edited.servers.get(name)
        if entry is None:
            continue
        if (words := after_launcher(entry)) is None:
            notes.append(f"{name!r} is left unchanged: it no longer runs through the proxy")
        elif "entry" in before:
            assert isinstance(edited, JsonConfig)
            restored = unwrap(entry, before["entry"])
            edited = edited.rewrite(name, restored, written=before["text"] if restored == before["entry"] else None)
        elif "--" in words:
            command, *arguments = words[words.index("--") + 1 :] or [before["command"]]
            edited = edited.restore(name, command, arguments if arguments or before["args"] is not None else None)
    if isinstance(edited, JsonConfig) and not part.section_was_there:
        edited = edited.without_section()
    return edited


def _undo_data(edited: Config, name: str, change: Prefixed | Rewritten) -> dict[str, Any]:
    """Return what is needed to restore an entry."""
    entry = edited.servers[name]
    if isinstance(change, Rewritten):
        assert isinstance(edited, JsonConfig)
        return {"entry": copy.deepcopy(entry), "text": edited.entry_text(name)}
    return {"command": entry["command"], "args": entry.get("args")}


class _Draft:
    """A configuration that a plan is made for, and its record after the change."""

    def __init__(self, config: ConfigFile) -> None:
        self.config = config
        self.data = read_file(config.file)
        self._bom, self.original = _parse(config, self.data)
        now = _digest(self.data)
        self.record = UndoRecord.read(config.file) or UndoRecord(now)
        self.part = self.record.parts.setdefault(_key(config), ScopeChanges(self._has_section()))
        if self.record.written is not None and now not in (self.record.written, self.record.original):
            self.record.exact = False

    def plan(self, edited: Config, notes: list[str]) -> Plan:
        after = self.data if edited is self.original else (self._bom + edited.text).encode()
        shown = self.original.masked(), edited.masked()
        return Plan(self.config, self.data, after, shown, self.record, notes=notes)

    def with_entry(self, edited: Config, name: str, entry: Mapping[str, Any]) -> Config:
        client, file = self.config.client, str(self.config.file)
        found = edited.servers.get(name)
        new = {**client.entry, **entry}
        if found == new:
            return edited
        if found is not None and after_launcher(found) is None:
            raise InvalidArgument(f"there is another server {name!r} in {file!r}", hint="choose another --name")
        try:
            edited = (edited.remove(name) if found is not None else edited).add(name, new)
        except InvalidArgument as error:
            line = config_text("", client.format, self.config.section).line(name, new)
            hint = f"add to {self.config.section[-1]} by hand: {line}"
            raise InvalidArgument(f"{file!r}: {error.message}", hint=hint) from error
        if name not in self.part.added:
            self.part.added.append(name)
        return edited

    def _has_section(self) -> bool:
        value: Any = self.original.value
        for key in self.config.section:
            if not isinstance(value, dict) or key not in value:
                return False
            value = value[key]
        return True


def _parse(config: ConfigFile, data: bytes | None) -> tuple[str, Config]:
    """Return the byte order mark of a configuration (or an empty string), and the parsed text."""
    with _naming(config):
        bom, text = decode(data or b"")
        return bom, config_text(text, config.client.format, config.section)


@contextmanager
def _naming(config: ConfigFile) -> Iterator[None]:
    """Put the name of the file into errors."""
    try:
        yield
    except InvalidArgument as error:
        hint = error.hint or "nothing was changed; correct it first"
        raise InvalidArgument(f"cannot edit {str(config.file)!r}: {error.message}", hint=hint) from error


# The record of changes


@dataclass(slots=True)
class ScopeChanges:
    """The changes to the servers of one scope. A file may contain several scopes."""

    section_was_there: bool = True
    added: list[str] = field(default_factory=list)
    wrapped: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(slots=True)
class UndoRecord:
    """All changes to a file. `original` and `written` are digests; `original` is None if there was no file. `exact` is
    False if somebody else edited the file between our changes. `parts` has the path of the servers as key."""

    original: str | None
    written: str | None = None
    exact: bool = True
    made: list[str] = field(default_factory=list)
    parts: dict[str, ScopeChanges] = field(default_factory=dict)
    version: int = _VERSION

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Read the record of a configuration, or return None. Raises `InvalidArgument` if it is damaged."""
        place = _record_of(file)
        data = read_file(place)
        if data is None:
            return None
        try:
            found = json.loads(data)
            if found["version"] != _VERSION:
                raise ValueError(found["version"])
            return cls(**{**found, "parts": {key: ScopeChanges(**part) for key, part in found["parts"].items()}})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InvalidArgument(
                f"{str(place)!r} is damaged or has another version", hint=f"the original is {str(_backup_of(file))!r}"
            ) from error

    def write(self, file: Path) -> None:
        with replacing(_record_of(file), json.dumps(asdict(self), indent=1).encode(), mode=0o600):
            pass


def _key(config: ConfigFile) -> str:
    return json.dumps(config.section)


def _backup_of(file: Path) -> Path:
    return file.with_name(file.name + ".coatcheck-backup")


def _record_of(file: Path) -> Path:
    return file.with_name(file.name + ".coatcheck-undo")


def _back_up(file: Path, data: bytes) -> None:
    """Keep the original. Raises `InvalidArgument` if there is another backup: it may be the only one."""
    place = _backup_of(file)
    try:
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        if not place.is_symlink() and read_file(place) == data:
            return
        raise InvalidArgument(f"{str(place)!r} already exists", hint="move it away; nothing was changed") from error
    with os.fdopen(handle, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _forget(file: Path) -> None:
    for place in (_record_of(file), _backup_of(file)):
        place.unlink(missing_ok=True)


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
            raise InvalidArgument(f"{str(file)!r} is a broken link", hint="correct the link") from None
        return None
    except OSError as error:
        raise InvalidArgument(f"cannot read {str(file)!r}: {error.strerror}", hint="nothing was changed") from error
    if len(data) > _MAX_SIZE:
        raise InvalidArgument(f"{str(file)!r} is too large for a configuration")
    return data


def decode(data: bytes) -> tuple[str, str]:
    """Return the byte order mark (or an empty string), and the text after it. Raises `InvalidArgument`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument("it is not UTF-8", hint="save it as UTF-8 first") from error
    return (_BOM, text[1:]) if text.startswith(_BOM) else ("", text)


def _digest(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def _make_folders(folder: Path) -> list[str]:
    """Create a folder and its missing parents. Return those that were created, the innermost last."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()][::-1]
    for one in missing:
        one.mkdir()
    return [str(one) for one in missing]


def _check_writable(file: Path) -> None:
    """Raise `InvalidArgument` if the file is read-only: replacing it would bypass that."""
    target = Path(os.path.realpath(file))
    try:
        status = target.stat()
    except FileNotFoundError:
        return
    if not status.st_mode & 0o222 or not os.access(target, os.W_OK):
        raise InvalidArgument(f"{str(file)!r} is read-only", hint="nothing was changed; make it writable first")
    if not os.access(target.parent, os.W_OK):
        raise InvalidArgument(f"the folder of {str(target)!r} is read-only", hint="nothing was changed")


def check_unchanged(file: Path, before: bytes | None) -> None:
    """Raise `InvalidArgument` if the file is no longer `before`."""
    if read_file(file) != before:
        raise InvalidArgument(f"{str(file)!r} was changed by another program", hint="nothing was written; try again")


@contextmanager
def replacing(file: Path, data: bytes, *, mode: int) -> Iterator[None]:
    """Replace a file atomically after the body has run, unless the body raises. Links are followed. An existing file
    keeps its mode and owner; a new one gets `mode`."""
    target = os.path.realpath(file)
    folder = os.path.dirname(target)
    try:
        status: os.stat_result | None = os.stat(target)
    except FileNotFoundError:
        status = None
    scratch = os.path.join(folder, f".{os.path.basename(target)}.{secrets.token_hex(6)}")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            if status is not None and (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(out.fileno(), status.st_uid, status.st_gid)
            os.fchmod(out.fileno(), stat.S_IMODE(status.st_mode) if status is not None else mode)
            out.flush()
            os.fsync(out.fileno())
        yield
        os.replace(scratch, target)
    except BaseException:
        os.unlink(scratch)
        raise
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
