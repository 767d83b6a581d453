"""The three things that a proxy changes: large results become stubs, the tools for reading them are added, and pointers
in arguments become values. Everything else passes.

All of it works on plain JSON and blocks: the relay calls it from threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coatcheck import Policy, Session, toolkit
from coatcheck.executor import resolve_arguments
from coatcheck.mcp.report import Counts
from coatcheck.tokens import estimate

LIMIT_KEY: Final = "anthropic/maxResultSizeChars"
PREFIX: Final = "coatcheck_"
_SEEN: Final = frozenset({"image", "audio"})  # what a model looks at or listens to: a stub would blind it
_FAILED: Final = ("[error", "[no artifact found")
_MODERN: Final = "io.modelcontextprotocol/protocolVersion"


@dataclass(frozen=True, slots=True)
class Known:
    """What was learned of a tool of the other server when it was listed."""

    schema: Mapping[str, Any]
    policy: Policy
    is_reader: bool  # another Coatcheck's own tool: what it answers is bounded, and pointers are what it takes


@dataclass(slots=True)
class _Listing:
    """The tools of the other server, as far as they were listed."""

    tools: dict[str, Known] = field(default_factory=dict)
    prefix: str = ""


class Changes:
    """What is done to messages on their way, for one session."""

    def __init__(
        self, session: Session, *, policy: Policy, inline: Iterable[str] = (), max_message: int, counts: Counts
    ) -> None:
        self._session = session
        self._base = policy
        self._inline = frozenset(inline)
        self._max_message = max_message
        self._counts = counts
        self._lock = threading.Lock()
        self._ours = {tool.name: tool for tool in toolkit(session)}
        self._forms = [tool.parameters for tool in self._ours.values()]
        self._policy = policy
        self._listing = _Listing()
        self._partial = _Listing()
        self.is_listed = False

    # The tools that are added

    def is_ours(self, name: object) -> bool:
        return isinstance(name, str) and name in self._ours

    def definitions(self) -> list[dict[str, Any]]:
        return [tool.as_mcp() for tool in self._ours.values()]

    def answer(self, name: str, arguments: object, meta: object) -> dict[str, Any]:
        """What one of our tools answers, as the result of a call."""
        tool = self._ours.get(name)
        if tool is None:
            return self.refusal(f"[error: {name} has another name now; list the tools anew]", meta)
        if arguments is not None and not isinstance(arguments, dict):
            return self.refusal(f"[error: the arguments of {name} are no object]", meta)
        text = tool.run(**{str(key): value for key, value in (arguments or {}).items()})
        if tool.read_only:
            self._counts.read_back(estimate(text))
        return {"content": [{"type": "text", "text": text}], "isError": text.startswith(_FAILED), **_complete(meta)}

    def refusal(self, said: str, meta: object) -> dict[str, Any]:
        """That a call could not be made, in words for the model."""
        return {"content": [{"type": "text", "text": said}], "isError": True, **_complete(meta)}

    def only_ours(self, meta: object) -> dict[str, Any]:
        """The listing for a server that has no tools."""
        cache = {"ttlMs": 0, "cacheScope": "private"} if _is_modern(meta) else {}
        return {"tools": self.definitions(), **cache, **_complete(meta)}

    def capable(self, result: dict[str, Any]) -> dict[str, Any]:
        """What a server says of itself, with tools among its capabilities."""
        capabilities = result.get("capabilities")
        if not isinstance(capabilities, dict) or isinstance(capabilities.get("tools"), dict):
            return result
        return {**result, "capabilities": {**capabilities, "tools": {}}}

    def listed(self, result: dict[str, Any], *, first: bool) -> dict[str, Any]:
        """A page of the other server's tools: noted, and on the last page with ours."""
        tools = result.get("tools")
        if not isinstance(tools, list):
            return result
        with self._lock:
            listing = _Listing() if first else self._partial
            self._partial = listing
            shown = [self._noted(listing, tool) if isinstance(tool, dict) else tool for tool in tools]
            self._listing.tools.update(listing.tools)
            if not result.get("nextCursor"):  # some say that there is no more with an empty one
                self._name_ours(listing)
                self._listing = listing
                self.is_listed = True
                shown += self.definitions()
        return {**result, "tools": shown}

    def _noted(self, listing: _Listing, tool: dict[str, Any]) -> dict[str, Any]:
        """What a client is told of a tool. A result that may become a stub has no schema that holds for it."""
        name, schema, meta = str(tool.get("name")), tool.get("inputSchema"), tool.get("_meta")
        limit = meta.get(LIMIT_KEY) if isinstance(meta, dict) else None
        policy = self._base
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            policy = _limited(self._base, limit)
        is_reader = schema in self._forms
        listing.tools[name] = Known(schema if isinstance(schema, dict) else {}, policy, is_reader)
        if "outputSchema" not in tool or is_reader or name in self._inline:
            return tool
        return {key: value for key, value in tool.items() if key != "outputSchema"}

    def _name_ours(self, listing: _Listing) -> None:
        """Ours give way where the other server has tools of the same names."""
        number, prefix = 1, ""
        while any(tool.name in listing.tools for tool in toolkit(self._session, prefix=prefix)):
            prefix = PREFIX if number == 1 else f"{PREFIX}{number}_"
            number += 1
        if prefix != self._listing.prefix:
            self._ours = {tool.name: tool for tool in toolkit(self._session, prefix=prefix)}
        listing.prefix = prefix
        self._policy = _reading_with(self._base, next(iter(self._ours)))

    # Pointers in arguments

    def arguments(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Raises `CoatcheckError`, in words for a model, where a pointer leads nowhere."""
        known = self._listing.tools.get(tool)
        if known is not None and known.is_reader:
            return arguments
        foreign = any(one.is_reader for one in self._listing.tools.values())
        schema = known.schema if known else None
        return resolve_arguments(self._session, arguments, schema, foreign=foreign, max_bytes=self._max_message)

    # Results

    def is_small(self, tool: str | None, size: int) -> bool:
        """Whether a message of so many bytes cannot hold anything that is over the limit."""
        return size <= self._policy_for(tool).safe_chars

    def called(self, tool: str | None, call_id: str, result: dict[str, Any]) -> dict[str, Any]:
        """The result of a call, with a stub for what is too large in it. The same object where nothing is."""
        known = self._listing.tools.get(tool or "")
        content, structured = result.get("content"), result.get("structuredContent")
        if tool in self._inline or (known is not None and known.is_reader):
            return result
        change = _Change(self._session, self._policy_for(tool), tool, call_id, self._counts)
        changed: dict[str, Any] = {}
        if structured is not None:
            stub = change.structured(structured)
            if stub is not None:
                changed["structuredContent"] = _as_object(stub)
                if _repeats(content, structured):
                    changed["content"] = [{**content[0], "text": stub}] if isinstance(content, list) else content
        if isinstance(content, list) and "content" not in changed:
            blocks = change.blocks(content)
            if blocks is not content:
                changed["content"] = blocks
        return {**result, **changed} if changed else result

    def read(self, call_id: str, result: dict[str, Any]) -> dict[str, Any]:
        """What was read of a resource: each of its contents is judged for itself, and keeps its address."""
        contents = result.get("contents")
        if not isinstance(contents, list) or not all(isinstance(one, dict) for one in contents):
            return result
        change = _Change(self._session, self._policy, "resources/read", call_id, self._counts)
        shown = [change.resource(one) for one in contents]
        if all(new is old for new, old in zip(shown, contents, strict=True)):
            return result
        return {**result, "contents": shown}

    def _policy_for(self, tool: str | None) -> Policy:
        known = self._listing.tools.get(tool or "")
        if known is None or known.policy is self._base:
            return self._policy
        return _reading_with(known.policy, self._policy.read_tool)


class _Change:
    """One result on its way to the client."""

    def __init__(self, session: Session, policy: Policy, tool: str | None, call_id: str, counts: Counts) -> None:
        self._session = session
        self._policy = policy
        self._tool = tool
        self._call_id = call_id
        self._counts = counts

    def _externalized(self, value: object) -> Any:
        outcome = self._session.externalize(value, tool=self._tool, call_id=self._call_id, policy=self._policy)
        if outcome.is_stub or outcome.failure is not None:
            self._counts.slimmed(self._tool or "", outcome.tokens_saved, failed=outcome.failure is not None)
        return outcome.content

    def structured(self, value: object) -> str | None:
        """The stub of structured content; None where it stays."""
        content = self._externalized(value)
        return content if isinstance(content, str) and content is not value else None

    def blocks(self, content: list[Any]) -> list[Any]:
        """The blocks of a result. Where they are too many together, one stub stands for all but images, sound and, so
        long as those are few, links."""
        links = [one for one in content if _is_link(one)]
        few = len(json.dumps(links)) <= self._policy.safe_chars
        stays = [_is_seen(one) or (few and _is_link(one)) for one in content]
        judged = [one for one, as_it_is in zip(content, stays, strict=True) if not as_it_is]
        done = self._externalized(judged) if judged else judged
        if done is judged:
            return content
        if isinstance(done, str):
            kept = [one for one, as_it_is in zip(content, stays, strict=True) if as_it_is]
            return [{"type": "text", "text": done}, *kept]
        left = iter(done)
        return [one if as_it_is else next(left) for one, as_it_is in zip(content, stays, strict=True)]

    def resource(self, content: dict[str, Any]) -> dict[str, Any]:
        block = {"type": "resource", "resource": content}
        if _is_seen(block) or not isinstance(content.get("text", content.get("blob")), str):
            return content
        done = self._externalized([block])
        found: dict[str, Any] = done[0]["resource"] if isinstance(done, list) else content
        return found


def _is_seen(block: object) -> bool:
    if not isinstance(block, dict):
        return False
    resource = block.get("resource")
    if block.get("type") == "resource" and isinstance(resource, dict) and "blob" in resource:
        return str(resource.get("mimeType")).partition("/")[0] in _SEEN
    return block.get("type") in _SEEN


def _is_link(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "resource_link"


def _repeats(content: object, structured: object) -> bool:
    """Whether a result's content is its structured content once more, as text, for clients that know no other."""
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], dict):
        return False
    text = content[0].get("text")
    if content[0].get("type") != "text" or not isinstance(text, str):
        return False
    try:
        return bool(json.loads(text) == structured)
    except (ValueError, RecursionError):
        return False


def _as_object(stub: str) -> dict[str, Any]:
    """A stub as structured content, which is an object in most versions of the protocol."""
    try:
        found = json.loads(stub)
    except ValueError:  # the store failed: a head and a tail, in words
        return {"cut": stub}
    return found if isinstance(found, dict) else {"cut": stub}


def _limited(policy: Policy, chars: int) -> Policy:
    return _copied(policy, max_tokens=None, max_chars=chars, max_bytes=None)


def _reading_with(policy: Policy, tool: str | None) -> Policy:
    return policy if policy.read_tool == tool else _copied(policy, read_tool=tool)


def _copied(policy: Policy, **changes: Any) -> Policy:
    names = ("max_tokens", "max_chars", "max_bytes", "enabled", "preview_chars", "redact", "count", "read_tool")
    return Policy(**{name: getattr(policy, name) for name in names} | changes)


def _is_modern(meta: object) -> bool:
    return isinstance(meta, dict) and _MODERN in meta


def _complete(meta: object) -> dict[str, Any]:
    """What a result must say of itself from 2026-07-28 on."""
    return {"resultType": "complete"} if _is_modern(meta) else {}
