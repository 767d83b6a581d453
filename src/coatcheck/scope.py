"""Who is asking: a session with its ancestors, and what of the catalog it may see.

Every read goes through `Lookup.resolve`. A digest is no capability: an id that no session in the lineage holds
answers exactly like one that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from coatcheck.errors import AmbiguousPointer, Expired, InvalidArgument, InvalidPointer, NotFound
from coatcheck.ids import MIN_PREFIX, SCHEME, clip, is_prefix, parse_pointer, pointer_of, shared_prefix
from coatcheck.refs import Ref
from coatcheck.storage import BlobStore, Catalog, Entry, SessionInfo
from coatcheck.uses import Uses

NAME_LIMIT = 65_536


@dataclass(frozen=True, slots=True)
class Scope:
    """A session and its ancestors, nearest first: where names and pointers are looked up."""

    info: SessionInfo
    ancestors: tuple[str, ...] = ()

    @property
    def session_id(self) -> str:
        return self.info.session_id

    @property
    def lineage(self) -> tuple[str, ...]:
        return (self.info.session_id, *self.ancestors)


class Lookup:
    """Pointers, ids and names to entries, for a scope."""

    def __init__(self, blobs: BlobStore, catalog: Catalog, uses: Uses, clock: Callable[[], float]) -> None:
        self._blobs = blobs
        self._catalog = catalog
        self._uses = uses
        self._clock = clock

    def resolve(
        self, scope: Scope, target: Ref | str, *, content: bool = False, brief: bool = False
    ) -> tuple[Entry, str]:
        """The live entry behind a ref, pointer, id or name, and the fragment that was asked for.

        Raises `NotFound`, `Expired`, `AmbiguousPointer`, `InvalidPointer`."""
        if isinstance(target, Ref):
            entry = self._by_prefix(scope, target.artifact_id, content, brief)
            if entry.ref.codec != target.codec:
                entry = replace(entry, ref=replace(entry.ref, codec=target.codec))
            return entry, ""
        if not isinstance(target, str):
            raise InvalidArgument(f"cannot look up a {type(target).__name__}", hint="pass a pointer, a name or a Ref")
        if target.startswith(SCHEME):
            try:
                parsed = parse_pointer(target)
            except InvalidPointer:
                named = self._by_name(scope, target, content) if is_text(target) else None
                if named is None:
                    raise
                return named, ""
            return self._by_prefix(scope, parsed.prefix, content, brief), parsed.fragment
        named = self._by_name(scope, target, content) if is_text(target) else None
        if named is not None:
            return named, ""
        if is_prefix(target):
            return self._by_prefix(scope, target, content, brief), ""
        raise NotFound(f"no artifact found for {clip(target)}")

    def list(self, scope: Scope, *, name: str | None, kind: str | None, limit: int | None) -> list[Ref]:
        """Live refs that the scope sees, own ones first, newest first, each artifact once under each of its names."""
        if name is not None and not is_text(name):
            return []
        seen: set[tuple[str, str | None]] = set()
        found: list[Entry] = []
        size = 256 if limit is None or kind else min(256, max(16, limit))
        for session_id in scope.lineage:
            before: int | None = None
            while limit is None or len(found) < limit:
                page = self._catalog.find(session_id, name=name, before=before, limit=None if name else size)
                for entry in page:
                    key = (entry.ref.artifact_id, entry.ref.name)
                    if (name or key not in seen) and kind in (None, entry.ref.kind) and self.is_live(entry):
                        seen.add(key)
                        found.append(entry)
                if name or len(page) < size:
                    break
                before = page[-1].seq
        whole = limit is None and name is None and kind is None
        told = found[:limit]
        ids = {entry.ref.artifact_id for entry in told}
        near: dict[str, list[str]] = {}
        for one in ids if whole else self._catalog.near(scope.lineage, ids):
            near.setdefault(one[:MIN_PREFIX], []).append(one)
        return [self.told(entry, near.get(entry.ref.artifact_id[:MIN_PREFIX], ())) for entry in told]

    def near(self, scope: Scope, entry: Entry) -> Iterable[str]:
        """The ids that the scope sees which begin like this one: what its pointer must be told apart from."""
        return self._catalog.near(scope.lineage, [entry.ref.artifact_id])

    def is_live(self, entry: Entry) -> bool:
        expires = self.expires(entry)
        return not entry.gone and (expires is None or self._clock() < expires)

    def expires(self, entry: Entry) -> float | None:
        """When this entry expires, as things stand now: its own time or its session's, whichever is first."""
        if entry.ref.pinned:
            return None
        session = entry.session.expires(max(entry.ref.created, self._uses.last(entry.session.session_id)))
        if session is None or entry.ref.expires is None:
            return entry.ref.expires if session is None else session
        return min(session, entry.ref.expires)

    def told(self, entry: Entry, near: Iterable[str] = ()) -> Ref:
        """The ref of an entry as users see it: with its expiry, its address, and a pointer long enough to be unique
        among the ids near it."""
        artifact_id, length = entry.ref.artifact_id, MIN_PREFIX
        for other in near:
            if other != artifact_id:
                length = max(length, shared_prefix(artifact_id, other) + 1)
        keeper = self._catalog if entry.blob.coding == "inline" else self._blobs
        return entry.ref.as_told(self.expires(entry), keeper.uri(entry.blob), length)

    def _by_prefix(self, scope: Scope, prefix: str, content: bool, brief: bool) -> Entry:
        dead: Entry | None = None
        live: dict[str, Entry] = {}
        for session_id in scope.lineage:
            for entry in self._catalog.find(session_id, prefix=prefix, content=content, brief=brief):
                if self.is_live(entry):
                    live.setdefault(entry.ref.artifact_id, entry)
                else:
                    dead = dead or entry
            if prefix in live:  # a whole id fits one artifact, the nearest ref to it counts
                break
        if len(live) == 1:
            return next(iter(live.values()))
        if live:
            raise AmbiguousPointer(
                f"{pointer_of(prefix, 64)} fits {len(live)} artifacts",
                [self.told(one, live).pointer for one in live.values()],
            )
        raise (
            _gone(dead, pointer_of(prefix, 64))
            if dead
            else NotFound(f"no artifact found for {pointer_of(prefix, 64)!r}")
        )

    def _by_name(self, scope: Scope, name: str, content: bool) -> Entry | None:
        dead: Entry | None = None
        for session_id in scope.lineage:
            for entry in self._catalog.find(session_id, name=name, content=content, limit=1):
                if self.is_live(entry):
                    return entry
                dead = dead or entry
        if dead:
            raise _gone(dead, name)
        return None


def check_name(name: object, what: str = "name") -> None:
    """Names, ids and labels are data: any characters that UTF-8 can hold, but not nothing and not a book."""
    if not isinstance(name, str):
        raise InvalidArgument(f"the {what} is a {type(name).__name__}, not a string")
    if not 0 < len(name) <= NAME_LIMIT:
        raise InvalidArgument(f"the {what} has {len(name)} characters; it takes 1 to {NAME_LIMIT}")
    if not is_text(name):
        raise InvalidArgument(f"the {what} {clip(name)} holds a lone surrogate, which no text can")


def is_text(name: str) -> bool:
    """Whether UTF-8 can hold it. What it cannot hold names nothing."""
    try:
        return name.isascii() or bool(name.encode())
    except UnicodeEncodeError:
        return False


def is_seconds(ttl: object) -> bool:
    return isinstance(ttl, int | float) and ttl >= 0


def _gone(entry: Entry, asked: str) -> NotFound:
    ref = entry.ref
    created = datetime.fromtimestamp(ref.created, UTC).isoformat(timespec="seconds")
    label = clip(ref.name) if ref.name else ref.media_type
    what = f"{asked!r} was {ref.kind} {label} of {ref.size_bytes} bytes, put {created}"
    if entry.gone == "damaged":
        return NotFound(
            f"{what}; its bytes were damaged and set aside", hint="put the same content again to bring it back"
        )
    return Expired(f"{what}; it has expired")
