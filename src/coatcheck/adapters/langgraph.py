"""LangGraph: `checkpointer=slim(saver, store)` keeps long texts out of the checkpoints.

LangGraph writes the whole state after every step, so a text of 250 KB in the first message is
written again with each step that follows. `slim` puts each long text into the store once and writes
its digest in its place. Loading puts the same bytes back. The texts belong to a session of the
thread that does not expire. Deleting the thread ends it, and the session that the agent's tools
used for the same thread.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeVar, cast

from coatcheck import CoatcheckError, Session, Store
from coatcheck.adapters import LANGGRAPH, Adapter, in_thread, missing

try:
    from langgraph.checkpoint.base import BaseCheckpointSaver, SerializerProtocol
except ImportError as error:
    raise missing("langgraph", "langgraph>=1.2,<2") from error

MIN_BYTES: Final = 4_096
_MARK: Final = "coatcheck:"
_NUMBERS: Final = {
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
}
_COUNTS: Final = {
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xDC: 2,
    0xDD: 4,
    0xDE: 2,
    0xDF: 4,
}  # of lists and maps, and null and bool
_SMALL: Final = {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_SKIPPED: Final = {**_NUMBERS, **_COUNTS, **_SMALL}
_TEXTS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bytes too
_OBJECTS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
"""The first bytes of msgpack values, with the number of bytes after them: the value, or the length
of what follows."""

_OPTIONAL: Final = ("copy_thread", "acopy_thread", "prune", "aprune")
_log = logging.getLogger(__name__)
Saver = TypeVar("Saver", bound="BaseCheckpointSaver[Any]")


def slim(saver: Saver, store: Store, *, min_bytes: int = MIN_BYTES) -> Saver:
    """Return a checkpointer that works like `saver`, on the same data, with texts of `min_bytes`
    and more in `store`.

    Checkpoints that `saver` wrote before can be read. Only a slimmed checkpointer can read what the
    new one writes."""
    kind, default = type(saver), BaseCheckpointSaver
    absent = {
        name: vars(default)[name]
        for name in _OPTIONAL
        if getattr(kind, name) is getattr(default, name)
    }
    slimmed = copy.copy(saver)
    slimmed.__class__ = type(f"Slim{kind.__name__}", (_Slim, kind), absent)
    adapter = Adapter(store, host=f"{LANGGRAPH}-checkpoints", ttl=None)
    slimmed.serde = Serializer(saver.serde, adapter, min_bytes=min_bytes)
    return slimmed


@dataclass
class _Write:
    """A write that is under way: the session of its thread, opened for the first long text, and
    what it has stored."""

    open: Callable[[], Session]
    digests: set[str] = field(default_factory=set)

    @cached_property
    def session(self) -> Session:
        return self.open()

    def put(self, text: bytes) -> str:
        """Store a text, unless this write has done so, and return its digest."""
        digest = hashlib.sha256(text).hexdigest()
        if digest not in self.digests:
            self.session.put(text)
            self.digests.add(digest)
        return digest


_write: ContextVar[_Write | None] = ContextVar("coatcheck_langgraph_write", default=None)


@dataclass(frozen=True)
class Serializer:
    """A serializer around a serializer: long texts go to the session of the thread that is being
    written.

    Outside of a write by a slimmed checkpointer nothing is stored. If the store fails, the text
    stays in the checkpoint."""

    inner: SerializerProtocol
    adapter: Adapter
    min_bytes: int = field(default=MIN_BYTES, kw_only=True)

    def dumps_typed(self, obj: Any) -> tuple[str, bytes]:
        kind, data = self.inner.dumps_typed(obj)
        write = _write.get()
        if write is None or len(data) < self.min_bytes:
            return kind, data
        parts: list[int | str] = []
        inline: list[bytes] = []
        done = 0
        try:
            for start, end in self._long_texts(kind, data):
                inline.append(data[done:start])
                parts += [start - done, write.put(data[start:end])]
                done = end
        except (CoatcheckError, OSError):
            _log.warning("The store failed: a long text stays in the checkpoint.", exc_info=True)
            return kind, data
        if not parts:
            return kind, data
        head = json.dumps(
            {"session": write.session.session_id, "parts": [*parts, len(data) - done]}
        )
        return _MARK + kind, b"".join([head.encode(), b"\n", *inline, data[done:]])

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        kind, body = data
        if not kind.startswith(_MARK):
            return self.inner.loads_typed(data)
        line, _, rest = body.partition(b"\n")
        head = json.loads(line)
        session = self.adapter.store.session(head["session"])
        found: list[bytes] = []
        for part in head["parts"]:
            if isinstance(part, int):
                found.append(rest[:part])
                rest = rest[part:]
            else:
                found.append(self._text(session, f"art:{part}"))
        return self.inner.loads_typed((kind.removeprefix(_MARK), b"".join(found)))

    def _text(self, session: Session, pointer: str) -> bytes:
        if session.ref(pointer) is None and (copied := self.adapter.store.find(pointer)):
            session = copied[
                0
            ]  # this thread is a copy, and the thread that it was copied from is deleted
        with session.open(pointer) as stream:
            return stream.read()

    def _long_texts(self, kind: str, data: bytes) -> list[tuple[int, int]]:
        """Where the long texts of a serialized value start and end."""
        if kind in ("bytes", "bytearray"):
            return [(0, len(data))]
        return (_long_in(data, 0, len(data), self.min_bytes) or []) if kind == "msgpack" else []


def _long_in(data: bytes, at: int, stop: int, least: int) -> list[tuple[int, int]] | None:
    """Where the long texts of a part of msgpack data start and end; None if the part is something
    else."""
    found: list[tuple[int, int]] = []
    while at < stop:
        head, at = data[at], at + 1
        if 0xA0 <= head <= 0xBF:
            at += head & 0x1F  # a short text
        elif head in _SKIPPED:
            at += _SKIPPED[head]
        elif head in _TEXTS:
            at, start = _after(data, at, _TEXTS[head])
            if at - start >= least:
                found.append((start, at))
        elif head in _OBJECTS:
            at, start = _after(data, at, _OBJECTS[head])
            at += 1  # the object's type
            if at - start > least:
                found += _long_in(data, start + 1, at, least) or []
        elif 0xC0 <= head <= 0xDF:
            return None
    return found if at == stop else None


def _after(data: bytes, at: int, width: int) -> tuple[int, int]:
    """Where a value that follows its length ends and starts."""
    start = at + width
    return start + int.from_bytes(data[at:start], "big"), start


class _Slim(BaseCheckpointSaver[Any]):
    """What a slimmed checkpointer does around the methods of the original.

    Before an asynchronous write the texts are stored in a thread: the serializer then has nothing
    to wait for."""

    def put(self, config: Any, *args: Any, **kwargs: Any) -> Any:
        with _writing(_write.get() or self._begin(config)):
            return super().put(config, *args, **kwargs)

    async def aput(self, config: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
        with _writing(
            await in_thread(self._begin, config, [*checkpoint["channel_values"].values()])
        ):
            return await super().aput(config, checkpoint, *args, **kwargs)

    def put_writes(self, config: Any, *args: Any, **kwargs: Any) -> None:
        with _writing(_write.get() or self._begin(config)):
            super().put_writes(config, *args, **kwargs)

    async def aput_writes(self, config: Any, writes: Any, *args: Any, **kwargs: Any) -> None:
        with _writing(await in_thread(self._begin, config, [value for _, value in writes])):
            await super().aput_writes(config, writes, *args, **kwargs)

    def delete_thread(self, thread_id: str) -> None:
        super().delete_thread(thread_id)
        self._forget(thread_id)

    async def adelete_thread(self, thread_id: str) -> None:
        await super().adelete_thread(thread_id)
        await in_thread(self._forget, thread_id)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        super().copy_thread(source_thread_id, target_thread_id)
        self._share(source_thread_id, target_thread_id)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await super().acopy_thread(source_thread_id, target_thread_id)
        await in_thread(self._share, source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        super().prune(thread_ids, strategy=strategy)
        self._forget(*thread_ids if strategy == "delete" else ())

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        await super().aprune(thread_ids, strategy=strategy)
        await in_thread(self._forget, *thread_ids if strategy == "delete" else ())

    def with_allowlist(self, extra_allowlist: Collection[tuple[str, ...]]) -> _Slim:
        clone, serde = copy.copy(self), cast(Serializer, self.serde)
        allowed = BaseCheckpointSaver(serde=serde.inner).with_allowlist(extra_allowlist)
        clone.serde = replace(serde, inner=allowed.serde)
        return clone

    def _begin(self, config: Any, values: Sequence[Any] = ()) -> _Write:
        """Begin a write of a thread. Store the long texts of these values."""
        serde, thread = cast(Serializer, self.serde), str(config["configurable"]["thread_id"])
        write = _Write(lambda: _session(serde.adapter, thread))
        with _writing(write):
            for value in values:
                serde.dumps_typed(value)
        return write

    def _forget(self, *threads: str) -> None:
        adapter = cast(Serializer, self.serde).adapter
        for thread in threads:
            adapter.forget(thread)
            Adapter(adapter.store, host=LANGGRAPH).forget(thread)

    def _share(self, source: str, target: str) -> None:
        """Give a thread's texts to its copy, so that they stay when the first thread is deleted."""
        adapter = cast(Serializer, self.serde).adapter
        session, other = _session(adapter, source), _session(adapter, target)
        for ref in session.list():
            session.grant(ref, to=other.session_id)


def _session(adapter: Adapter, thread: str) -> Session:
    """The session of a thread's checkpoints, even if a tool that has another session is running."""
    return Context().run(adapter.session, thread)


@contextmanager
def _writing(write: _Write) -> Iterator[None]:
    token = _write.set(write)
    try:
        yield
    finally:
        _write.reset(token)
