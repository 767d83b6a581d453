"""`Session`: the bound object that users hold. Each method is one call down into the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from coatcheck.ids import parse_pointer
from coatcheck.intake import About
from coatcheck.materialize import materialize, remove_files
from coatcheck.refs import Coverage, Ref
from coatcheck.scope import Scope
from coatcheck.search import Hit
from coatcheck.storage import Claimant, Record

if TYPE_CHECKING:
    from coatcheck.externalize import Outcome, Policy
    from coatcheck.previews import Preview
    from coatcheck.reading import Page
    from coatcheck.store import Store


class Session:
    """The scope in which pointers resolve: what it put or was granted, and what its ancestors see.

    Made by `store.session(…)`. A handle is cheap, holds no connection, and may be shared between threads."""

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
        """The session with its ancestors, as the store is asked for them."""
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
        """Store a value: text, bytes, anything JSON can hold, a model or dataclass, a `Path`, or a binary stream.

        Media type, kind and summary are found out where they are not given. `ttl` bounds this artifact's life besides
        the session's. Returns when the value is as durable as the store was opened for."""
        lineage = tuple(one.artifact_id if isinstance(one, Ref) else parse_pointer(one).prefix for one in parents)
        return self._store.put(
            self._scope, value, About(name, tool, kind, media_type, summary, producer, call_id, lineage, ttl)
        )

    def get(self, target: Ref | str) -> Any:
        """The exact value behind a ref, pointer or name, or None where it is missing, expired or not this session's.

        A pointer with a fragment (`art:…#/rows/0`) gives that part of a JSON value."""
        return self._store.get(self._scope, target)

    def open(self, target: Ref | str) -> BinaryIO:
        """A seekable binary stream over the artifact's bytes, or over the JSON of the part that a fragment names.

        Raises `NotFound`, `Expired`, and `InvalidPointer` where the fragment leads nowhere."""
        return self._store.open(self._scope, target)

    def ref(self, target: Ref | str) -> Ref | None:
        """The ref alone, as it stands now, or None."""
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
        """Look inside an artifact: one page of at most `max_chars` characters (8,000, unless the store's settings say
        otherwise), with a cursor for the next.

        `lines="4100:4160"` or `"-50:"` and `chars="0:2000"` are slices. `grep` is a regular expression in RE2's syntax
        (or `literal` text), with `context` lines around each match. `query` is `"shape"`, a JSONPath, or SQL on the
        table `artifact`. `diff` is another artifact: what changed since it. Raises `NotFound`, `Expired` and
        `InvalidArgument`, in words that a model can act on."""
        from coatcheck.reading import Request  # here and below, so that importing coatcheck stays quick
        from coatcheck.reading.reader import read

        request = Request(
            lines=lines, chars=chars, grep=grep, context=context, ignore_case=ignore_case, invert=invert,
            literal=literal, query=query, diff=diff,
            max_chars=self._store.settings["page.max_chars"] if max_chars is None else max_chars,
        )  # fmt: skip
        return read(self._store, self._scope, target, request, cursor)

    def coverage(self, target: Ref | str) -> Coverage:
        """Which part of an artifact this session has been shown by `read`."""
        return self._store.coverage(self._scope, target)

    def preview(self, target: Ref | str, *, limit: int = 200) -> Preview:
        """What is inside an artifact, at a glance: its shape, columns, levels, outline or size, else head and tail."""
        from coatcheck.reading.reader import preview_of

        return preview_of(self._store.content(self._scope, target), limit=limit)

    def externalize(
        self, value: object, *, tool: str | None = None, call_id: str | None = None, policy: Policy | None = None
    ) -> Outcome:
        """What a model gets of a tool's result: the value itself where the policy finds it small, else a stub.

        Mixed content is judged block by block, images by their pixels: lists of text, image and document blocks, dicts
        or objects of an SDK, and MCP's results. A `Ref` or a binary stream counts as the value that it stands for. A
        store that fails costs no agent its run: the outcome then is a bounded head and tail that says so."""
        from coatcheck.externalize import externalize

        return externalize(self._store, self._scope, value, tool=tool, call_id=call_id, policy=policy)

    def offload(
        self, call: Callable[..., Any] | None = None, *, tool: str | None = None, policy: Policy | None = None
    ) -> Callable[..., Any]:
        """A decorator, with or without arguments: what the function answers is externalized, small values pass as they
        are. It keeps its name and signature; a coroutine function stays one."""
        from coatcheck.externalize.offload import offloaded

        if call is None:
            return lambda function: offloaded(self.externalize, function, tool, policy)
        return offloaded(self.externalize, call, tool, policy)

    def materialize(self, target: Ref | str, folder: str | Path) -> Path:
        """A read-only file with exactly an artifact's bytes, for a tool that needs one: jq, a sandbox, a sub-process.

        `end()` removes it, where this process made it. Raises what `open` raises."""
        return materialize(self._store, self._scope, target, folder)

    def search(self, words: str, *, limit: int = 8) -> list[Hit]:
        """The artifacts that fit these words best: by name, tool, summary and content, each with the passage that
        did."""
        return self._store.search(self._scope, words, limit)

    def version(self, ref: Ref) -> int:
        """The how-many-th put under its name a ref is, counted from 1; what has expired since counts too."""
        return self._store.version(self._scope, ref)

    def claim(self, holder: str, *, idle: float = 0, instead_of: int | None = None) -> int:
        """Claim this session for a dispatcher: a fencing token, larger than every one before. From now on only `record`
        with this token passes for the claim's; whoever claimed before is fenced off.

        With `idle`, only where no other holder has claimed or written for so many seconds, else `Fenced`; the same
        holder may claim again at any time. With `instead_of`, only where that is still the newest token (0: nobody has
        claimed it). An empty holder gives the claim up. For the hot state, use `coatcheck.context.claim`."""
        return self._store.claim(self._scope, holder, idle, instead_of)

    def claimant(self) -> Claimant | None:
        """Who holds the claim of this session: token, holder, and when it last claimed or wrote; None where nobody
        does."""
        return self._store.claimant(self._scope)

    def record(self, series: str, body: bytes, *, token: int | None = None, keep: int | None = None) -> int:
        """Append bytes (1 MiB at most) to a series of this session; their number there.

        With the `token` of a claim that is not the newest: `Fenced`, and nothing is written. With `keep`, only so many
        of the newest stay. Records end with the session. Returns when the record is as durable as the store was opened
        for."""
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
        """The records of a series, oldest first or with `newest` from the newest on: number, time, token and body.

        They can be read until the session is ended, or collected after its expiry."""
        return self._store.records(self._scope, series, after=after, before=before, limit=limit, newest=newest)

    def count(self) -> int:
        """How many artifacts this session sees, from the search index: it costs what is new, not what is there."""
        return self._store.count(self._scope)

    def list(self, *, name: str | None = None, kind: str | None = None, limit: int | None = None) -> list[Ref]:
        """What this session sees, newest first. With `name`, every artifact that was put under that name."""
        return self._store.list(self._scope, name=name, kind=kind, limit=limit)

    def grant(self, target: Ref | str, to: str) -> Ref:
        """Let another session see an artifact, for as long as that session lives; the ref as it has it."""
        return self._store.grant(self._scope, target, to)

    def pin(self, target: Ref | str) -> Ref:
        """Keep an artifact whatever its time to live."""
        return self._store.pin(self._scope, target, True)

    def unpin(self, target: Ref | str) -> Ref:
        return self._store.pin(self._scope, target, False)

    def forget(self, target: Ref | str) -> bool:
        """Drop this session's hold on an artifact; its bytes go where nobody else holds it. Whether there was one."""
        return self._store.forget(self._scope, target)

    def end(self) -> int:
        """Forget all that this session holds, and remove the files that `materialize` made. How many artifacts that
        removed: those that nobody else refers to."""
        remove_files(self._store, self._scope)
        return self._store.end(self._scope)
