"""`Session`: the object that users work with. Each method is one call into the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from coatcheck.ids import parse_pointer
from coatcheck.intake import About
from coatcheck.lookup import Scope
from coatcheck.refs import Coverage, Ref
from coatcheck.search import Hit
from coatcheck.storage import Claimant, Record

if TYPE_CHECKING:
    from coatcheck.externalize import Outcome, Policy
    from coatcheck.previews import Preview
    from coatcheck.reading import Page
    from coatcheck.store import Store


class Session:
    """The scope in which pointers and names resolve: artifacts that it put or was granted, and those of its ancestors.

    Created by `store.session(…)`. A session object is cheap, has no connection, and can be shared between threads."""

    __slots__ = ("_scope", "_store")

    def __init__(self, store: Store, scope: Scope) -> None:
        self._store = store
        self._scope = scope

    @property
    def session_id(self) -> str:
        return self._scope.session_id

    @property
    def parent(self) -> str | None:
        return self._scope.info.parent

    @property
    def ttl(self) -> float | None:
        return self._scope.info.ttl

    @property
    def store(self) -> Store:
        return self._store

    @property
    def scope(self) -> Scope:
        """The session with its ancestors, as the methods of the store take it."""
        return self._scope

    def __repr__(self) -> str:
        return f"Session({self.session_id!r} of {self._store!r})"

    def put(
        self,
        value: object,
        *,
        name: str | None = None,
        tool: str | None = None,
        kind: str | None = None,
        media_type: str | None = None,
        summary: str | None = None,
        producer: str | None = None,
        call_id: str | None = None,
        parents: Iterable[Ref | str] = (),
        ttl: float | None = None,
    ) -> Ref:
        """Store a value: text, bytes, a JSON value, a model or dataclass, a `Path`, or a binary stream.

        Media type, kind and summary are detected if they are not given. `ttl` limits the life of this artifact within
        that of the session. Returns when the value is durable."""
        lineage = tuple(one.artifact_id if isinstance(one, Ref) else parse_pointer(one).prefix for one in parents)
        return self._store.put(
            self._scope, value, About(name, tool, kind, media_type, summary, producer, call_id, lineage, ttl)
        )

    def get(self, target: Ref | str) -> Any:
        """Return the exact value of a ref, pointer or name, or None if it is missing, expired or not this session's.

        A pointer with a fragment (`art:…#/rows/0`) returns that part of a JSON value. That raises `LimitExceeded` if
        the whole value has more than 64 MiB or ten million values."""
        return self._store.get(self._scope, target)

    def open(self, target: Ref | str) -> BinaryIO:
        """Open a seekable binary stream over the artifact's bytes, or over the JSON of the part that a fragment names.

        Raises `NotFound`, `Expired`, `InvalidPointer` if the fragment does not exist, and `LimitExceeded` if the
        artifact is too large for a fragment."""
        return self._store.open(self._scope, target)

    def ref(self, target: Ref | str) -> Ref | None:
        """Return the current ref, or None if there is no such artifact."""
        return self._store.ref(self._scope, target)

    def read(
        self,
        target: Ref | str,
        *,
        lines: str | None = None,
        chars: str | None = None,
        grep: str | None = None,
        context: int = 0,
        ignore_case: bool = False,
        invert: bool = False,
        literal: bool = False,
        query: str | None = None,
        diff: str | None = None,
        cursor: str | None = None,
        max_chars: int | None = None,
    ) -> Page:
        """Read one page of an artifact, at most `max_chars` characters (by default the setting `page.max_chars`,
        8,000), with a cursor for the next.

        `lines="4100:4160"` or `"-50:"` and `chars="0:2000"` are slices. `grep` is a regular expression in RE2 syntax
        (or `literal` text), with `context` lines around each match. `query` is `"shape"`, a JSONPath, or SQL on the
        table `artifact`. `diff` is another artifact to compare with. Raises `NotFound`, `Expired` and
        `InvalidArgument`, with messages that a model can act on."""
        from coatcheck.reading import (
            Request,  # here and below, so that importing coatcheck stays quick
            read,
        )

        request = Request(
            lines=lines, chars=chars, grep=grep, context=context, ignore_case=ignore_case, invert=invert,
            literal=literal, query=query, diff=diff,
            max_chars=self._store.settings["page.max_chars"] if max_chars is None else max_chars,
        )  # fmt: skip
        return read(self._store, self._scope, target, request, cursor)

    def coverage(self, target: Ref | str) -> Coverage:
        """Return which part of an artifact this session has been shown by `read`."""
        return self._store.coverage(self._scope, target)

    def preview(self, target: Ref | str, *, limit: int = 200) -> Preview:
        """Return a short preview of an artifact: its shape, columns, levels, outline or size, else head and tail."""
        from coatcheck.reading import preview_of

        return preview_of(self._store.content(self._scope, target), limit=limit)

    def externalize(
        self, value: object, *, tool: str | None = None, call_id: str | None = None, policy: Policy | None = None
    ) -> Outcome:
        """Return what a model should get for a tool's result: the value itself if the policy allows its size, else a
        stub.

        Mixed content (lists of text, image and document blocks, as dicts, SDK objects or MCP results) is decided block
        by block, images by their pixels. A `Ref` or a binary stream counts as the value behind it. If the store fails,
        the outcome is a bounded head and tail that says so, and no error is raised."""
        from coatcheck.externalize import externalize

        return externalize(self._store, self._scope, value, tool=tool, call_id=call_id, policy=policy)

    def offload(
        self, call: Callable[..., Any] | None = None, *, tool: str | None = None, policy: Policy | None = None
    ) -> Callable[..., Any]:
        """Decorate a function so that its results are externalized; small values pass unchanged. With or without
        arguments. The function keeps its name and signature; a coroutine function stays one."""
        from coatcheck.externalize.pipeline import offloaded

        if call is None:
            return lambda function: offloaded(self.externalize, function, tool, policy)
        return offloaded(self.externalize, call, tool, policy)

    def materialize(self, target: Ref | str, folder: str | Path) -> Path:
        """Write an artifact to a read-only file, for a tool that needs one: jq, a sandbox, a sub-process.

        `end()` removes the file, if it is called in the same process. Raises what `open` raises."""
        return self._store.materialize(self._scope, target, folder)

    def search(self, words: str, *, limit: int = 8) -> list[Hit]:
        """Search names, tools, summaries and content for these words. Return the best artifacts, each with its best
        passage."""
        return self._store.search(self._scope, words, limit)

    def version(self, ref: Ref) -> int:
        """Return the version number of a ref under its name, counted from 1. Expired versions count too."""
        return self._store.version(self._scope, ref)

    def claim(self, holder: str, *, idle: float = 0, instead_of: int | None = None) -> int:
        """Claim this session for a dispatcher and return a fencing token, larger than every earlier one. From then on,
        `record` with an earlier token raises `Fenced`.

        With `idle`, the claim raises `Fenced` unless other holders have not claimed or written for that many seconds;
        the same holder can claim again at any time. With `instead_of`, it raises `Fenced` unless that is still the
        newest token (0: no claim yet). An empty holder releases the claim. For the hot state, use
        `coatcheck.context.claim`."""
        return self._store.claim(self._scope, holder, idle, instead_of)

    def claimant(self) -> Claimant | None:
        """Return the current claim of this session: token, holder, and the time of its last claim or record. None if
        there is no claim."""
        return self._store.claimant(self._scope)

    def record(self, series: str, body: bytes, *, token: int | None = None, keep: int | None = None) -> int:
        """Append bytes (at most 1 MiB) to a series of this session, and return their number in the series.

        Raises `Fenced` if `token` is not that of the newest claim; nothing is written then. With `keep`, only that many
        of the newest records stay. Records end with the session. Returns when the record is durable."""
        return self._store.record(self._scope, series, body, token, keep)

    def records(
        self,
        series: str,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int | None = None,
        newest: bool = False,
    ) -> list[Record]:
        """Return the records of a series (number, time, token, body), oldest first, or with `newest` newest first.

        They can be read until the session ends, or is collected after it expired."""
        return self._store.records(self._scope, series, after=after, before=before, limit=limit, newest=newest)

    def count(self) -> int:
        """Return the number of artifacts that this session sees. It comes from the search index, so only new artifacts
        cost time."""
        return self._store.count(self._scope)

    def artifacts(self, *, after: str | None = None, limit: int = 50) -> list[Ref]:
        """Return a page of what this session sees, each artifact once, newest first. `after` is the id of the last
        artifact of the page before. A page costs the same wherever it begins. Raises `NotFound` for an unknown id."""
        return self._store.artifacts(self._scope, after=after, limit=limit)

    def list(self, *, name: str | None = None, kind: str | None = None, limit: int | None = None) -> list[Ref]:
        """List what this session sees, newest first, each artifact once under its newest name. With `name`, list every
        artifact that was put under that name."""
        return self._store.list(self._scope, name=name, kind=kind, limit=limit)

    def grant(self, target: Ref | str, to: str) -> Ref:
        """Let another session see an artifact for as long as that session lives. Return the ref in that session."""
        return self._store.grant(self._scope, target, to)

    def pin(self, target: Ref | str) -> Ref:
        """Keep an artifact regardless of its time to live."""
        return self._store.pin(self._scope, target, True)

    def unpin(self, target: Ref | str) -> Ref:
        return self._store.pin(self._scope, target, False)

    def forget(self, target: Ref | str) -> bool:
        """Drop an artifact from this session and return whether there was one. Its bytes are removed once no session
        refers to them.

        A name drops only what was put under that name: the artifact stays under its other names. A pointer or a `Ref`
        drops the artifact under all of its names."""
        return self._store.forget(self._scope, target)

    def end(self) -> int:
        """Forget everything in this session, and remove the files that `materialize` made. Return the number of
        artifacts removed: those that no other session refers to."""
        return self._store.end(self._scope)
