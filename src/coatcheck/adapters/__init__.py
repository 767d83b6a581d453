"""What all adapters to agent frameworks share. Each adapter is a module of its own, imported by
name: `from coatcheck.adapters.langchain import Coatcheck`. Nothing here imports a framework.

An `Adapter` knows the store and finds the session of a conversation. Its `Kit` is what an adapter
calls: our tools without a session, `arguments` before a tool runs, and `result`, `parts` or
`failure` after it. Nothing in a kit raises into the host. All of it is synchronous; async hosts
call it through `in_thread`.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import coatcheck
from coatcheck import Policy, Session, Store, toolkit
from coatcheck._toolkit import Purpose, Tool
from coatcheck.config import SESSION_TTL
from coatcheck.errors import CoatcheckError, InvalidArgument, MissingExtra, StoreError
from coatcheck.executor import resolve_arguments, widened, widened_schema
from coatcheck.externalize import ContentPart, Outcome, ResultSource, configured
from coatcheck.externalize.savings import LIBRARY
from coatcheck.lanes import in_thread
from coatcheck.redaction import mask
from coatcheck.store import private_id
from coatcheck.truncation import Truncation
from coatcheck.values import as_text

__all__ = [
    "LANGGRAPH",
    "TTL",
    "Adapter",
    "ContentPart",
    "Kit",
    "Refusal",
    "are_same",
    "can_be_read",
    "current_session",
    "in_thread",
    "missing",
    "shortened",
    "widened",
    "widened_schema",
    "within",
]

TTL: Final = SESSION_TTL
"""The time to live of a conversation's session, in seconds after its last use: hosts keep threads
for weeks."""

LANGGRAPH: Final = "langgraph"
"""The host name that all adapters for LangGraph share, so that a thread has one session."""

_PREFIX: Final = "coatcheck_"
_LONGEST_ID: Final = 200
_MAX_ERROR: Final = 2_000  # characters of an error that is not stored
_LONGEST_NUMBER: Final = 30  # characters
_LOG: Final = logging.getLogger("coatcheck")
_session: ContextVar[Session | None] = ContextVar("coatcheck_session", default=None)


class within(AbstractContextManager[Session]):  # noqa: N801 - reads like contextlib.suppress
    """Make this the session of everything that runs inside: nested agents with an adapter of the
    same store use it.

    A host with callbacks instead of a wrapper can call only `__enter__`, if it runs each call in a
    context of its own."""

    def __init__(self, session: Session) -> None:
        self._inside = session

    def __enter__(self) -> Session:
        self._token = _session.set(self._inside)
        return self._inside

    def __exit__(self, *raised: object) -> None:
        _session.reset(self._token)


def current_session() -> Session | None:
    """Return the session of the `within` around this call, or None."""
    return _session.get()


def missing(package: str, tested: str) -> MissingExtra:
    """Return the error for a framework that is not installed. `tested` is the range of versions
    that the tests use."""
    error = MissingExtra(package)
    error.message = f"this adapter needs {package}, which is not installed"
    error.hint = f"pip install '{tested}' (the tested versions)"
    return error


def shortened(error: BaseException, text: str) -> BaseException:
    """Return an exception with a shorter message, as the same object, so that the host handles it
    as before."""
    error.args = (text,)
    return error


def are_same(new: Sequence[object], old: Sequence[object]) -> bool:
    """Whether two lists have the same objects."""
    return len(new) == len(old) and all(map(operator.is_, new, old))


def can_be_read(session: Session, outcome: Outcome, policy: Policy) -> bool:
    """Whether the model can read what is behind a result's stubs: with a tool of ours, or in files
    if the policy names a folder. A file that is missing is written."""
    if policy.read_tool is not None or policy.files is None:
        return True
    try:
        for ref in outcome.refs:
            session.write_file(ref, os.fspath(policy.files))
    except CoatcheckError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a tool is not called, in words for the model: a pointer in its arguments cannot be
    resolved."""

    text: str


@dataclass(frozen=True, slots=True)
class Kit:
    """Our tools beside those of a host, and what happens to the arguments and results of the host's
    own tools.

    `tools` are descriptions that are not bound to a session. `policy` writes stubs that name them
    as they are named here. `source` is where results enter, for the savings figures."""

    tools: tuple[Tool, ...]
    policy: Policy
    source: ResultSource = LIBRARY
    _by_name: Mapping[str, Tool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {tool.name: tool for tool in self.tools})

    def is_ours(self, name: object) -> bool:
        """Whether this is the name of one of our tools."""
        return isinstance(name, str) and name in self._by_name

    def answer(
        self, session: Session, name: str, arguments: Mapping[str, Any] | None
    ) -> list[ContentPart]:
        """Run one of our tools: a text, and the picture itself if the artifact is one. Mistakes are
        answers too."""
        tool = self._by_name.get(name)
        if tool is None:
            known = ", ".join(self._by_name) or "none"
            return [
                ContentPart(
                    f"[error: there is no tool {name[:80]}; the tools for artifacts are: {known}]"
                )
            ]
        given: object = arguments or {}
        if not isinstance(given, Mapping):
            return [ContentPart(f"[error: the arguments of {name} must be an object]")]
        return tool.bind(session).parts(**{str(key): value for key, value in given.items()})

    def arguments(
        self,
        session: Session,
        tool: str,
        given: Mapping[str, Any],
        schema: Mapping[str, Any] | None = None,
        *,
        foreign: bool = False,
        max_bytes: int | None = None,
    ) -> Mapping[str, Any] | Refusal:
        """Return the arguments of a host's tool with values in place of pointers, as the JSON
        schema wants them; the same object if there are none. If a pointer leads nowhere, return
        what to tell the model: the tool must not run then. `foreign` and `max_bytes` are as in
        `resolve_arguments`."""
        if self.is_ours(tool) or not self.policy.enabled:
            return given
        try:
            return resolve_arguments(session, given, schema, foreign=foreign, max_bytes=max_bytes)
        except Exception as error:  # noqa: BLE001 - a failing store must not end the host's run
            why = str(error) if isinstance(error, CoatcheckError) else type(error).__name__
            return Refusal(f"[error: {tool} was not called: {mask(why)[:_MAX_ERROR]}]")

    def is_small(self, value: object) -> bool:
        """Whether a result certainly stays as it is. Async hosts then need no thread for it."""
        if isinstance(value, str):
            return len(value) <= self.policy.safe_chars
        is_number = (
            value is None
            or isinstance(value, float)
            or (isinstance(value, int) and value.bit_length() <= 64)
        )
        return is_number and self.policy.safe_chars >= _LONGEST_NUMBER

    def result(
        self,
        session: Session,
        value: object,
        *,
        tool: str | None,
        call_id: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        server: str | None = None,
        cut: Truncation | None = None,
    ) -> Outcome:
        """Return what the model gets for a tool's result. `content` has the shape of the value, and
        is the same object if nothing changed. `arguments` are the call's, as the model sent them.
        `server` is the tool's server. `cut` is what the host says is missing from the result."""
        source = self.source if server is None else replace(self.source, server=server)
        try:
            return session.externalize(
                value,
                tool=tool,
                call_id=call_id,
                policy=self.policy,
                arguments=arguments,
                source=source,
                cut=cut,
            )
        except Exception as error:  # noqa: BLE001 - an odd value is the host's to handle
            _LOG.warning("a result of %s was passed on as it is: %s", tool, type(error).__name__)
            return Outcome("", value, failure=mask(str(error)))

    def parts(
        self,
        session: Session,
        parts: Sequence[ContentPart],
        *,
        tool: str | None,
        call_id: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> list[ContentPart]:
        """Do the same for content that the adapter has taken apart. A part that changed is a text
        with a stub, or an image that was scaled to what providers accept; the others are the same
        objects. Parts with `kept` always stay."""
        judged = [one for one in parts if one.kept is None]
        blocks = [_block(one) for one in judged]
        done: Any = blocks
        if blocks:
            done = self.result(
                session, blocks, tool=tool, call_id=call_id, arguments=arguments
            ).content
        if done is blocks:
            return list(parts)
        given = {id(block): part for block, part in zip(blocks, judged, strict=True)}
        listed = done if isinstance(done, list) else [done]
        shown = [given.get(id(one)) or _changed_part(one) for one in listed]
        if len(shown) != len(judged):  # one stub replaces several of them
            return [*shown, *(one for one in parts if one.kept is not None)]
        changed = {id(old): new for old, new in zip(judged, shown, strict=True)}
        return [changed.get(id(one), one) for one in parts]

    def failure(
        self,
        session: Session,
        error: BaseException | str,
        *,
        tool: str | None,
        call_id: str | None = None,
    ) -> str:
        """Return the text of a tool's error, bounded: the same text if it is small, else a stub."""
        text = error if isinstance(error, str) else str(error)
        shown = self.result(session, text, tool=tool, call_id=call_id)
        return shown.text or text[:_MAX_ERROR]


class Adapter:
    """The store, the policy and the sessions of one host.

    `store` is a `Store`, or what `coatcheck.open` takes; a `Session` serves every conversation
    instead. `host` is the prefix of session ids, so that two hosts do not share a conversation by
    accident. `only` names those of our tools that are offered, e.g. `("get",)`; with `()` there are
    none. The default policy comes from the store's settings."""

    def __init__(
        self,
        store: Store | Session | str | Path,
        *,
        host: str,
        policy: Policy | None = None,
        ttl: float | None = TTL,
        only: Iterable[Purpose] | None = None,
    ) -> None:
        self._fixed = store if isinstance(store, Session) else None
        opened: object = coatcheck.open(store) if isinstance(store, str | Path) else store
        found = opened.store if isinstance(opened, Session) else opened
        if not isinstance(found, Store):
            hint = "pass what coatcheck.open returns, a session of it, or a folder"
            raise InvalidArgument(f"store must be a Store, got a {type(store).__name__}", hint=hint)
        self.store = found
        self.host = host
        self.ttl = ttl
        self.policy = policy or configured(self.store.settings)
        self.source = ResultSource(host)
        self._only = None if only is None else tuple(only)
        self._kits: dict[str, Kit] = {}

    def session(self, host_id: str | None) -> Session:
        """Return the session of a conversation: the one of the `within` around this call if it
        belongs to this store, else the one for the host's id. Without an id it is a new private
        one: ask once for each run, and keep it. A store that fails does not raise here."""
        shared = self.shared_session()
        if shared is not None:
            return shared
        session_id = private_id() if host_id is None else self.session_id(host_id)
        try:
            return self.store.session(session_id, ttl=self.ttl)
        except StoreError:  # the run continues: what cannot be stored becomes a head and tail
            return self.store.unchecked_session(session_id, ttl=self.ttl)

    def shared_session(self) -> Session | None:
        """Return the session that a conversation has whatever its id: the given one, or the one of
        the `within` around this call if it belongs to this store. None if conversations have
        sessions of their own."""
        if self._fixed is not None:
            return self._fixed
        around = current_session()
        return around if around is not None and around.store is self.store else None

    def session_id(self, host_id: str) -> str:
        """Return the id of the session for a host's id. A very long or odd one is hashed."""
        is_plain = 0 < len(host_id) <= _LONGEST_ID and host_id.isprintable()
        plain = (
            host_id
            if is_plain
            else hashlib.sha256(host_id.encode("utf-8", "surrogatepass")).hexdigest()
        )
        return f"{self.host}:{plain}"

    def forget(self, host_id: str) -> None:
        """End the session of a conversation that the host has deleted."""
        if self._fixed is None:
            self.store.session(self.session_id(host_id)).end()

    def kit(self, taken: Iterable[str] = ()) -> Kit:
        """Return our tools beside the host's tools with these names. If names clash, ours get a
        prefix."""
        names, prefix, number = set(taken), "", 1
        while names & {prefix + name for name in _OUR_NAMES}:
            prefix = _PREFIX if number == 1 else f"{_PREFIX}{number}_"
            number += 1
        if prefix not in self._kits:
            self._kits[prefix] = self._kit(prefix)
        return self._kits[prefix]

    def _kit(self, prefix: str) -> Kit:
        policy = replace(self.policy, resolves=True)
        if not policy.enabled or self._only == ():
            return Kit(
                (), replace(policy, read_tool=None) if self._only == () else policy, self.source
            )
        tools = tuple(toolkit(prefix=prefix, redact=policy.redact, only=self._only))
        reader = next((tool.name for tool in tools if tool.purpose == "get"), None)
        return Kit(tools, replace(policy, read_tool=reader), self.source)


_OUR_NAMES: Final = tuple(tool.name for tool in toolkit())


def _block(part: ContentPart) -> dict[str, Any]:
    """Return a part as a block that the pipeline knows: an image, a text, or a file as a
    resource."""
    if not part.media_type or part.media_type.startswith("image/"):
        return part.as_mcp()
    return {
        "type": "resource",
        "resource": {"uri": "part:", "mimeType": part.media_type, "blob": part.base64},
    }


def _changed_part(block: object) -> ContentPart:
    """Return the part for a block that was replaced: a scaled image, or a text with a stub."""
    if not isinstance(block, Mapping):
        return ContentPart(as_text(block))
    if block.get("type") == "image":
        return ContentPart(media_type=block["mimeType"], data=base64.b64decode(block["data"]))
    return ContentPart(str(block.get("resource", block).get("text", "")))
