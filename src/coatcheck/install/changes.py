"""What to change in a client's configuration: planned and shown first, then written; and how to take it back."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coatcheck.errors import CoatcheckError, InvalidArgument, NotFound
from coatcheck.install import files
from coatcheck.install.clients import Place
from coatcheck.install.documents import Document, Json, Toml, document
from coatcheck.install.record import Part, Record, back_up, backup_of, forget
from coatcheck.install.wrapping import Prefixed, Rewritten, after_launcher, unwrapped, wrapped


@dataclass(slots=True)
class Plan:
    """A configuration before and after, as bytes (None: no file), and as it may be shown. `notes` are for a person."""

    place: Place
    before: bytes | None
    after: bytes | None
    shown: tuple[str, str]
    record: Record
    is_undo: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.before == self.after

    def diff(self) -> str:
        """What changes, as a unified diff without secrets."""
        old, new = (text.splitlines() for text in self.shown)
        name = str(self.place.file)
        lines = difflib.unified_diff(
            old, new, name if self.before is not None else os.devnull, name if self.after is not None else os.devnull,
            lineterm="",
        )  # fmt: skip
        return "".join(f"{line}\n" for line in lines)

    def write(self) -> None:
        """Do it. Raises `InvalidArgument` where the file is not what it was when the plan was made."""
        file = self.place.file
        files.check_unchanged(file, self.before)
        files.check_writable(file)
        if self.is_undo:
            self._undo(file)
            return
        assert self.after is not None
        self.record.made += files.make_folders(file.parent)
        is_first = self.record.written is None
        if self.before is not None and is_first:
            back_up(file, self.before)
        self.record.written = files.digest(self.after)
        mode = 0o600 if self.place.scope != "project" else 0o666 & ~_umask()
        with files.replacing(file, self.after, mode=mode):
            self.record.write(file)  # before the file: a record of what did not come about does no harm
            try:
                files.check_unchanged(file, self.before)
            except InvalidArgument:
                if is_first:
                    forget(file)
                raise

    def _undo(self, file: Path) -> None:
        """What other scopes have written into the file stays, and their record."""
        if self.after is None:
            file.unlink()
        elif self.after != self.before:
            with files.replacing(file, self.after, mode=0o600):
                files.check_unchanged(file, self.before)
        if self.record.parts and self.after is not None:
            self.record.written = files.digest(self.after)
            self.record.write(file)
            return
        forget(file)
        for folder in reversed(self.record.made):
            try:
                os.rmdir(folder)
            except OSError:
                break  # something else is in it now


def plan_entry(place: Place, name: str, entry: Mapping[str, Any]) -> Plan:
    """A plan to have this entry under this name. An older one of ours is replaced, another's never."""
    open_ = _Opened(place)
    found = open_.document.servers.get(name)
    new = {**place.client.entry, **entry}
    if found == new:
        return open_.plan(open_.document, [f"{name!r} is there already"])
    edited = open_.document
    if found is not None:
        if after_launcher(found) is None:
            raise InvalidArgument(
                f"there is another server {name!r} in {str(place.file)!r}", hint="choose another name with --name"
            )
        edited = open_.attempt(lambda: edited.removing(name), _paste(place, name, new))
    edited = open_.attempt(lambda: edited.adding(name, new), _paste(place, name, new))
    if name not in open_.part.added:
        open_.part.added.append(name)
    return open_.plan(edited, [])


def plan_wrap(place: Place, names: Sequence[str], start: Sequence[str], options: Sequence[str]) -> Plan:
    """A plan to put servers behind the proxy: those that are named, else all. What is left alone is noted."""
    open_ = _Opened(place)
    edited: Json | Toml = open_.document
    if missing := [name for name in names if name not in edited.servers]:
        there = ", ".join(edited.servers) or "none"
        raise NotFound(f"there is no server {missing[0]!r} in {str(place.file)!r}", hint=f"there is: {there}")
    notes: list[str] = []
    for name in names or list(edited.servers):
        entry = edited.servers[name]
        decided = wrapped(place.client, entry, start, options, named=bool(names))
        if isinstance(decided, str):
            notes.append(f"{name!r} is left alone: {decided}")
            continue
        try:
            before = edited
            if isinstance(decided, Prefixed):
                edited = edited.prefixing(name, decided.command, decided.words)
            else:
                assert isinstance(edited, Json)
                edited = edited.rewriting(name, decided.entry)
        except InvalidArgument as error:
            notes.append(f"{name!r} is left alone: {error}")
            continue
        open_.part.wrapped[name] = _before(before, name, decided)
    if not names and not edited.servers:
        notes.append("there are no servers to wrap")
    return open_.plan(edited, notes)


def plan_undo(place: Place) -> Plan:
    """A plan to take back what was done in this scope. Raises `NotFound` where nothing was."""
    file = place.file
    record = Record.read(file)
    part = record.part(place.section) if record is not None else None
    if record is None or part is None:
        raise NotFound(f"nothing of Coatcheck's is recorded for {str(file)!r}", hint="is it another --scope or --file?")
    record.end(place.section)
    current = files.read(file)
    if current is None:
        raise NotFound(f"{str(file)!r} is gone", hint=f"what it was before is {str(backup_of(file))!r}")
    now = files.digest(current)
    if now == record.original:
        record.parts.clear()
        return Plan(place, current, current, ("", ""), record, True, ["it is what it was before"])
    original = files.read(backup_of(file)) if record.original is not None else None
    if not record.parts and record.exact and now == record.written and files.digest(original) == record.original:
        return Plan(place, current, original, (_shown(place, current), _shown(place, original)), record, True)
    notes = []
    if not record.exact or now != record.written:
        notes.append(f"{str(file)!r} was edited since: only what Coatcheck wrote is taken out")
        record.exact = False
    mark, text = _text(place, current)
    parsed = _parsed(place, text)
    try:
        edited = _without_ours(parsed, part, notes)
    except InvalidArgument as error:
        raise _about(place, error) from error
    after = (mark + edited.text).encode()
    return Plan(place, current, after, (parsed.masked(), edited.masked()), record, True, notes)


def _without_ours(edited: Json | Toml, part: Part, notes: list[str]) -> Json | Toml:
    for name in part.added:
        entry = edited.servers.get(name)
        if entry is None:
            continue
        if after_launcher(entry) is None:
            notes.append(f"{name!r} is left alone: it is no longer Coatcheck")
            continue
        edited = edited.removing(name)
    for name, before in part.wrapped.items():
        entry = edited.servers.get(name)
        if entry is None:
            continue
        if (words := after_launcher(entry)) is None:
            notes.append(f"{name!r} is left alone: it is no longer behind the proxy")
        elif "entry" in before:
            assert isinstance(edited, Json)
            whole = unwrapped(entry, before["entry"])
            edited = edited.rewriting(name, whole, written=before["text"] if whole == before["entry"] else None)
        elif "--" in words:
            command, *arguments = words[words.index("--") + 1 :] or [before["command"]]
            edited = edited.restoring(name, command, arguments if arguments or before["args"] is not None else None)
    if isinstance(edited, Json) and not part.section_was_there:
        edited = edited.without_section()
    return edited


def _before(edited: Json | Toml, name: str, decided: Prefixed | Rewritten) -> dict[str, Any]:
    """What must be known of an entry to have it back."""
    if isinstance(decided, Rewritten):
        assert isinstance(edited, Json)
        return {"entry": copy.deepcopy(edited.servers[name]), "text": edited.written(name)}
    entry = edited.servers[name]
    return {"command": entry["command"], "args": entry.get("args")}


class _Opened:
    """A configuration that is being planned for, with the record as it will be."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.data = files.read(place.file)
        self._mark, text = _text(place, self.data)
        self.document = _parsed(place, text)
        self.record = Record.read(place.file) or Record(files.digest(self.data))
        self.part = self.record.begin(place.section, was_there=self._has_section())
        if self.record.written is not None and files.digest(self.data) not in (
            self.record.written,
            self.record.original,
        ):
            self.record.exact = False

    def plan(self, edited: Document, notes: list[str]) -> Plan:
        shown = (self.document.masked(), edited.masked())
        if edited is self.document:
            return Plan(self.place, self.data, self.data, shown, self.record, notes=notes)
        return Plan(self.place, self.data, (self._mark + edited.text).encode(), shown, self.record, notes=notes)

    def attempt(self, edit: Any, paste: str) -> Json | Toml:
        """Edit, or say what a person can put there."""
        try:
            edited: Json | Toml = edit()
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{str(self.place.file)!r}: {error.message}", hint=f"put among {self.place.section[-1]}: {paste}"
            ) from error
        return edited

    def _has_section(self) -> bool:
        at: Any = self.document.value
        for key in self.place.section:
            if not isinstance(at, dict) or key not in at:
                return False
            at = at[key]
        return True


def _text(place: Place, data: bytes | None) -> tuple[str, str]:
    try:
        return files.text_of(data or b"")
    except InvalidArgument as error:
        raise _about(place, error) from error


def _parsed(place: Place, text: str) -> Json | Toml:
    try:
        return document(text, place.client.format, place.section)
    except InvalidArgument as error:
        raise _about(place, error) from error


def _about(place: Place, error: CoatcheckError) -> InvalidArgument:
    hint = error.hint or "nothing was changed; set it right first"
    return InvalidArgument(f"{str(place.file)!r} cannot be edited: {error.message}", hint=hint)


def _shown(place: Place, data: bytes | None) -> str:
    return _parsed(place, _text(place, data)[1]).masked()


def _paste(place: Place, name: str, entry: Mapping[str, Any]) -> str:
    """The entry on one line, as it stands among the servers."""
    return document("", place.client.format, place.section).line(name, entry)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
