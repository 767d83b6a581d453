"""The three changes that a proxy makes: large results become stubs, tools for reading them are added, and pointers in
arguments become values.

The methods take and return plain JSON and may block: the relay calls them in threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from coatcheck import Policy, Session, toolkit
from coatcheck._toolkit import Tool
from coatcheck.errors import UpstreamFailed
from coatcheck.executor import resolve_arguments
from coatcheck.mcp.savings import Counts
from coatcheck.tokens import estimate
from coatcheck.values import as_text

LIMIT_KEY: Final = "anthropic/maxResultSizeChars"
PREFIX: Final = "coatcheck_"
_MEDIA: Final = frozenset({"image", "audio"})  # a model could not see or hear a stub
_FAILED: Final = ("[error", "[no artifact found")
_PAGE: Final = 64_000  # characters of a page as JSON, escapes included
_MAX_ERROR: Final = 2_000
_ELSEWHERE: Final = "get_artifact of the server coatcheck"  # if the upstream server has a tool of that name
_MODERN: Final = "io.modelcontextprotocol/protocolVersion"


@dataclass(frozen=True, slots=True)
class UpstreamTool:
    """A listed tool of the upstream server."""

    schema: Mapping[str, Any]
    policy: Policy
    is_reader: bool  # a reading tool of another Coatcheck: results are bounded, arguments are pointers


@dataclass(slots=True)
class _Listing:
    """The tools of the upstream server listed so far."""

    tools: dict[str, UpstreamTool] = field(default_factory=dict)
    prefix: str = ""


class Rewriter:
    """The changes to messages, for one session."""

    def __init__(
        self,
        session: Session,
        *,
        policy: Policy,
        inline: Iterable[str] = (),
        max_message: int,
        counts: Counts,
        has_tools: bool = True,
    ) -> None:
        self.has_tools = has_tools
        self._session = session
        self._base = policy
        self._inline = frozenset(inline)
        self._max_message = max_message
        self._counts = counts
        self._lock = threading.Lock()
        self._ours = self._toolkit("")
        self._forms = [tool.parameters for tool in self._ours.values()]
        self._policy = _reading_with(policy, next(iter(self._ours)))
        self._listing = _Listing()
        self._partial = _Listing()
        self.is_listed = False

    # Added tools

    def _toolkit(self, prefix: str) -> dict[str, Tool]:
        return {tool.name: tool for tool in toolkit(self._session, prefix=prefix, redact=self._base.redact)}

    def is_ours(self, name: object) -> bool:
        return self.has_tools and isinstance(name, str) and name in self._ours

    def definitions(self) -> list[dict[str, Any]]:
        return [tool.as_mcp() for tool in self._ours.values()] if self.has_tools else []

    def answer(self, name: str, arguments: object, meta: object) -> dict[str, Any]:
        """Run one of our tools and return its result."""
        tool = self._ours.get(name)
        if tool is None:
            return self.error_result(f"[error: {name} was renamed; list the tools again]", meta)
        if arguments is not None and not isinstance(arguments, dict):
            return self.error_result(f"[error: the arguments of {name} must be an object]", meta)
        text = tool.run(**{str(key): value for key, value in (arguments or {}).items()})
        if tool.read_only:
            self._counts.read_back(estimate(text))
        return {"content": [{"type": "text", "text": text}], "isError": text.startswith(_FAILED), **_complete(meta)}

    def error_result(self, text: str, meta: object) -> dict[str, Any]:
        """Return the result of a call that was not made, with an error for the model."""
        return {"content": [{"type": "text", "text": text[:_MAX_ERROR]}], "isError": True, **_complete(meta)}

    def only_ours(self, meta: object) -> dict[str, Any]:
        """Return the list of tools for a server that has none."""
        cache = {"ttlMs": 0, "cacheScope": "private"} if _is_modern(meta) else {}
        return {"tools": self.definitions(), **cache, **_complete(meta)}

    def with_tools_capability(self, result: dict[str, Any]) -> dict[str, Any]:
        """Add tools to the capabilities of a server."""
        capabilities = result.get("capabilities")
        if not self.has_tools or not isinstance(capabilities, dict) or isinstance(capabilities.get("tools"), dict):
            return result
        return {**result, "capabilities": {**capabilities, "tools": {}}}

    def listed(self, result: dict[str, Any], *, first: bool) -> dict[str, Any]:
        """Note a page of the upstream server's tools, and add ours to the last page."""
        tools = result.get("tools")
        if not isinstance(tools, list):
            return result
        with self._lock:
            listing = _Listing() if first else self._partial
            self._partial = listing
            shown = [self._note(listing, tool) if isinstance(tool, dict) else tool for tool in tools]
            self._listing.tools.update(listing.tools)
            if not result.get("nextCursor"):  # some servers end with an empty one
                self._name_ours(listing)
                self._listing = listing
                self.is_listed = True
                shown += self.definitions()
        return {**result, "tools": shown}

    def _note(self, listing: _Listing, tool: dict[str, Any]) -> dict[str, Any]:
        """Note a tool. Drop its output schema if its results may become stubs, which would not match."""
        name, schema, meta = str(tool.get("name")), tool.get("inputSchema"), tool.get("_meta")
        limit = meta.get(LIMIT_KEY) if isinstance(meta, dict) else None
        policy = self._base
        if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
            policy = _limited(self._base, limit)
        is_reader = schema in self._forms
        listing.tools[name] = UpstreamTool(schema if isinstance(schema, dict) else {}, policy, is_reader)
        stays = name in self._inline or not policy.enabled or policy.tools.get(name) == "never"
        if "outputSchema" not in tool or is_reader or stays:
            return tool
        return {key: value for key, value in tool.items() if key != "outputSchema"}

    def _name_ours(self, listing: _Listing) -> None:
        """Give our tools a prefix if the upstream server has tools with the same names."""
        if not self.has_tools:
            reader = next(iter(self._ours))
            self._policy = _reading_with(self._base, _ELSEWHERE if reader in listing.tools else reader)
            return
        number, prefix = 1, ""
        while any(name in listing.tools for name in self._toolkit(prefix)):
            prefix = PREFIX if number == 1 else f"{PREFIX}{number}_"
            number += 1
        if prefix != self._listing.prefix:
            self._ours = self._toolkit(prefix)
        listing.prefix = prefix
        self._policy = _reading_with(self._base, next(iter(self._ours)))

    # Pointers in arguments

    def resolve(self, tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Resolve pointers in arguments. Raises `CoatcheckError`, with a text for the model, if one is not found."""
        known = self._listing.tools.get(tool)
        if known is not None and known.is_reader:
            return arguments
        foreign = any(one.is_reader for one in self._listing.tools.values())
        schema = known.schema if known else None
        return resolve_arguments(self._session, arguments, schema, foreign=foreign, max_bytes=self._max_message)

    # Results

    def is_small(self, tool: str | None, size: int) -> bool:
        """Whether a message of `size` bytes cannot contain anything over the limit."""
        policy = self._policy_for(tool)
        return size <= policy.safe_chars and (tool is None or tool not in policy.tools)

    def call_result(self, tool: str | None, call_id: str, result: dict[str, Any]) -> dict[str, Any]:
        """Replace large parts of a result by stubs. Returns the same object if there are none."""
        known = self._listing.tools.get(tool or "")
        if tool in self._inline or (known is not None and known.is_reader and _is_page(result)):
            return result
        return _Offload(self._session, self._policy_for(tool), tool, call_id, self._counts).result(result)

    def error(self, tool: str | None, call_id: str, error: dict[str, Any]) -> dict[str, Any]:
        """Replace a large message or large data of a JSON-RPC error by stubs. Returns the same object if there are
        none."""
        offload = _Offload(self._session, self._policy_for(tool), tool, call_id, self._counts)
        changed: dict[str, Any] = {}
        if (stub := offload.value(error.get("message"))) is not None:
            changed["message"] = _as_text(stub)
        if (stub := offload.value(error.get("data"))) is not None:
            changed["data"] = _as_object(stub)
        return {**error, **changed} if changed else error

    def resource(self, call_id: str, result: dict[str, Any]) -> dict[str, Any]:
        """Replace large contents of a resource by stubs. Each keeps its URI."""
        contents = result.get("contents")
        if not isinstance(contents, list) or not all(isinstance(one, dict) for one in contents):
            raise UpstreamFailed("the server's response has no contents", hint="")
        offload = _Offload(self._session, self._policy, "resources/read", call_id, self._counts)
        shown = [offload.resource(one) for one in contents]
        if all(new is old for new, old in zip(shown, contents, strict=True)):
            return result
        return {**result, "contents": shown}

    def _policy_for(self, tool: str | None) -> Policy:
        known = self._listing.tools.get(tool or "")
        if known is None or known.policy is self._base:
            return self._policy
        return _reading_with(known.policy, self._policy.read_tool)


class _Offload:
    """Offloads the parts of one result."""

    def __init__(self, session: Session, policy: Policy, tool: str | None, call_id: str, counts: Counts) -> None:
        self._session = session
        self._policy = policy
        self._tool = tool
        self._call_id = call_id
        self._counts = counts

    def _externalize(self, value: object) -> Any:
        outcome = self._session.externalize(value, tool=self._tool, call_id=self._call_id, policy=self._policy)
        if outcome.is_stub or outcome.failure is not None:
            self._counts.slimmed(self._tool or "", outcome.tokens_saved, failed=outcome.failure is not None)
        return outcome.content

    def value(self, value: object) -> str | dict[str, Any] | None:
        """Return the stub of a value, or the object with stubs in it; None if it stays unchanged."""
        content = self._externalize(value)
        return content if content is not value and isinstance(content, str | dict) else None

    def result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Offload the content and the structured content of a result, except images, audio and a small number of
        links."""
        given = result.get("content")
        content = given if isinstance(given, list) else [{"type": "text", "text": as_text(given)}] if given else []
        links = [one for one in content if _is_link(one)]
        few_links = len(json.dumps(links)) <= self._policy.safe_chars
        stays = [_is_media(one) or (few_links and _is_link(one)) for one in content]
        checked = [one for one, unchanged in zip(content, stays, strict=True) if not unchanged]
        parts = {"content": checked}
        if result.get("structuredContent") is not None:
            parts["structuredContent"] = result["structuredContent"]
        done = self._externalize(parts)
        if done is parts:
            return result if content is given or not given else {**result, "content": content}
        if isinstance(done, str):  # not a list of blocks: one stub for all of it
            stub = {"structuredContent": _as_object(done)} if "structuredContent" in parts else {}
            done = {"content": [{"type": "text", "text": done}], **stub}
        new = iter(done["content"])
        if len(done["content"]) == len(checked):
            done["content"] = [one if unchanged else next(new) for one, unchanged in zip(content, stays, strict=True)]
        else:
            done["content"] = [*new, *(one for one, unchanged in zip(content, stays, strict=True) if unchanged)]
        return {**result, **done} if given is not None else {**result, "structuredContent": done["structuredContent"]}

    def resource(self, content: dict[str, Any]) -> dict[str, Any]:
        block = {"type": "resource", "resource": content}
        if _is_media(block) or not isinstance(content.get("text", content.get("blob")), str):
            return content
        done = self._externalize([block])
        found: dict[str, Any] = done[0]["resource"] if isinstance(done, list) else content
        return found


def _is_media(block: object) -> bool:
    if not isinstance(block, dict):
        return False
    resource = block.get("resource")
    if block.get("type") == "resource" and isinstance(resource, dict) and "blob" in resource:
        return str(resource.get("mimeType")).partition("/")[0] in _MEDIA
    return block.get("type") in _MEDIA


def _is_link(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "resource_link"


def _is_page(result: dict[str, Any]) -> bool:
    """Whether a result is as small as a page of a reading tool. Any server may use the schema of our tools."""
    return len(as_text(result)) <= _PAGE


def _as_text(stub: str | dict[str, Any]) -> str:
    return stub if isinstance(stub, str) else as_text(stub)


def _as_object(stub: str | dict[str, Any]) -> dict[str, Any]:
    """Return a stub as structured content, which must be an object in most versions of the protocol."""
    if isinstance(stub, dict):
        return stub
    try:
        found = json.loads(stub)
    except ValueError:  # the store failed: a head and tail as text
        return {"cut": stub}
    return found if isinstance(found, dict) else {"cut": stub}


def _limited(policy: Policy, chars: int) -> Policy:
    return replace(policy, max_tokens=None, max_chars=chars, max_bytes=None)


def _reading_with(policy: Policy, tool: str | None) -> Policy:
    return policy if policy.read_tool == tool else replace(policy, read_tool=tool)


def _is_modern(meta: object) -> bool:
    return isinstance(meta, dict) and _MODERN in meta


def _complete(meta: object) -> dict[str, Any]:
    """The fields that every result must have since 2026-07-28."""
    return {"resultType": "complete"} if _is_modern(meta) else {}
