"""The three changes that a proxy makes: large results become stubs, tools for reading them are
added, and pointers in arguments become values. Also counts what that saves.

The methods take and return plain JSON and may block: the relay calls them in threads. What becomes
a stub is decided by `session.externalize` and the policy.
"""

from __future__ import annotations

import json
import operator
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from coatcheck import Limit, Policy, Session
from coatcheck.adapters import Adapter, Kit, can_be_read
from coatcheck.checks import is_whole
from coatcheck.errors import UpstreamFailed
from coatcheck.executor import resolve_arguments
from coatcheck.externalize import Outcome
from coatcheck.externalize.images import fitted
from coatcheck.mcp.resources import contents, link_to
from coatcheck.mcp.wire import FAILED, MAX_MESSAGE
from coatcheck.parts import read as read_part
from coatcheck.parts import write as write_part
from coatcheck.parts.mcp import as_object, as_text_result
from coatcheck.tokens import estimate
from coatcheck.values import as_text

LIMIT_KEY: Final = "anthropic/maxResultSizeChars"
_MEDIA: Final = ("image", "audio")  # a model could not see or hear a stub
_PAGE: Final = 64_000  # characters of a page as JSON, escapes included
_FEW_LINKS: Final = 600  # characters of links that stay, if the policy has no limit
_MAX_ERROR: Final = 2_000
_ELSEWHERE: Final = (
    "get_artifact of the server coatcheck"  # if the upstream server has a tool of that name
)
_MAX_LINKS: Final = 8
_SHOW_LINKS: Final = frozenset({"claude-code", "codex-mcp-client"})
"""Clients that give links to the model as text, where the stub names the artifact already."""
_MODERN: Final = "io.modelcontextprotocol/protocolVersion"
_TOOLS: Final = 200  # tools that are counted separately


class Counts:
    """Slimmed results, tokens saved and tokens read back, by tool and in all. Thread-safe."""

    def __init__(self) -> None:
        self.tools: dict[str, Counter[str]] = {}
        self._read_back = 0
        self._lock = threading.Lock()

    def slimmed(self, tool: str, saved: int, *, failed: bool) -> None:
        with self._lock:
            name = tool if tool in self.tools or len(self.tools) < _TOOLS else "others"
            row = self.tools.setdefault(name, Counter(slimmed=0, tokens_saved=0, failed=0))
            row.update(failed=1) if failed else row.update(slimmed=1, tokens_saved=saved)

    def read_back(self, tokens: int) -> None:
        with self._lock:
            self._read_back += tokens

    def __str__(self) -> str:
        record = self.to_record()
        text = (
            "{slimmed_results:,} results slimmed, about {tokens_saved:,} tokens saved, "
            "{tokens_read_back:,} read back"
        )
        return (text + ("; {failures:,} could not be stored" if record["failures"] else "")).format(
            **record
        )

    def to_record(self) -> dict[str, Any]:
        with self._lock:
            rows = self.tools.values()
            return {
                "slimmed_results": sum(row["slimmed"] for row in rows),
                "tokens_saved": sum(row["tokens_saved"] for row in rows),
                "tokens_read_back": self._read_back,
                "failures": sum(row["failed"] for row in rows),
                "tools": {name: dict(row) for name, row in self.tools.items()},
            }


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """`inline` names tools whose results stay unchanged. `timeout` 0 means no timeout. With
    `no_tools`, another server with the same session offers the tools for reading. With
    `only_files`, nobody does: the agent reads the files that the policy names. `server` is the name
    of the upstream server in figures."""

    policy: Policy
    inline: frozenset[str] = frozenset()
    timeout: float = 600.0
    max_message: int = MAX_MESSAGE
    no_tools: bool = False
    only_files: bool = False
    server: str = ""


@dataclass(frozen=True, slots=True)
class UpstreamTool:
    """A listed tool of the upstream server, and its own limit in characters."""

    schema: Mapping[str, Any]
    limit: Limit | None
    is_reader: (
        bool  # a reading tool of another Coatcheck: results are bounded, arguments are pointers
    )


class Rewriter:
    """The changes to messages, for one session. `plain_name` returns the name that a listed tool
    has at its server: a rule of the policy for it applies, unless there is one for the listed name.
    `server_of` returns that server's name, or "" if it is the only one."""

    def __init__(
        self,
        session: Session,
        settings: ProxySettings,
        counts: Counts,
        plain_name: Callable[[str], str] = str,
        server_of: Callable[[str], str] = lambda tool: "",
    ) -> None:
        self._plain_name = plain_name
        self._server_of, self._server = server_of, settings.server
        never: dict[str, Literal["never"]] = dict.fromkeys(settings.inline, "never")
        self._base = replace(settings.policy, tools={**settings.policy.tools, **never})
        self.session = session
        self._max_message = settings.max_message
        self._counts = counts
        self._lock = threading.Lock()
        self._tools: dict[str, UpstreamTool] = {}  # of the upstream server,
        self._listing: dict[
            str, UpstreamTool
        ] = {}  # and those of the pages so far while they are listed again
        self._adapter = Adapter(session, host="proxy", policy=replace(self._base, enabled=True))
        self.has_tools = not settings.no_tools and not settings.only_files
        self._has_reader = not settings.only_files
        self.has_links = True
        """Whether results link to artifacts beside their stubs. Some clients would give the model
        these links as text."""
        self.is_listed = False
        self._kit = self._current_kit()
        self._forms = [tool.parameters for tool in self._kit.tools]

    # Added tools

    def is_ours(self, name: object) -> bool:
        return self.has_tools and self._kit.is_ours(name)

    def answer(self, name: str, arguments: Any, meta: dict[str, Any]) -> dict[str, Any]:
        """Run one of our tools and return its result."""
        kit = self._kit
        parts = kit.answer(self.session, name, arguments)
        if any(tool.name == name and tool.read_only for tool in kit.tools):
            asked = estimate(json.dumps(arguments, ensure_ascii=False))
            self._counts.read_back(asked + sum(part.tokens for part in parts))
        result = text_result(parts[0].text, meta)
        result["content"] += [picture.as_mcp() for picture in parts[1:]]
        return result

    def only_ours(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Return the list of tools for a server that has none."""
        return {"tools": self._definitions(), **_cache(meta), **_complete(meta)}

    def no_resources(self, key: str, meta: dict[str, Any]) -> dict[str, Any]:
        """Return an empty list of resources or templates for a server that has none."""
        return {key: [], **_cache(meta), **_complete(meta)}

    def _definitions(self) -> list[dict[str, Any]]:
        return [tool.as_mcp() for tool in self._kit.tools] if self.has_tools else []

    def note_client(self, name: object) -> None:
        self.has_links = name not in _SHOW_LINKS

    def with_capabilities(self, result: dict[str, Any]) -> dict[str, Any]:
        """Add what we offer to the capabilities of a server: tools, and resources to read."""
        capabilities = result.get("capabilities")
        if not isinstance(capabilities, dict):
            return result
        offered = {"tools": self.has_tools, "resources": self.has_links}
        missing = [
            name
            for name, is_offered in offered.items()
            if is_offered and not isinstance(capabilities.get(name), dict)
        ]
        if not missing:
            return result
        return {**result, "capabilities": {**capabilities, **{name: {} for name in missing}}}

    def read_resource(self, uri: str, meta: dict[str, Any]) -> dict[str, Any]:
        """Read an artifact that a result links to. Raises `CoatcheckError`."""
        return {"contents": contents(self.session, uri), **_cache(meta), **_complete(meta)}

    def listed(self, result: dict[str, Any], *, first: bool) -> dict[str, Any]:
        """Note a page of the upstream server's tools, and add ours to the last page."""
        tools = result.get("tools")
        if not isinstance(tools, list):
            return result
        with self._lock:
            self._listing = {} if first else self._listing
            shown = [self._note(tool) if isinstance(tool, dict) else tool for tool in tools]
            is_last = not result.get("nextCursor")  # some servers end with an empty one
            self._tools = self._listing if is_last else {**self._tools, **self._listing}
            self._kit = self._current_kit()
            if is_last:
                self.is_listed = True
                shown += self._definitions()
        return {**result, "tools": shown}

    def _note(self, tool: dict[str, Any]) -> dict[str, Any]:
        """Note a tool. Drop its output schema if its results may become stubs, which would not
        match."""
        name, schema, meta = str(tool.get("name")), tool.get("inputSchema"), tool.get("_meta")
        chars = meta.get(LIMIT_KEY) if isinstance(meta, dict) else None
        limit = Limit(max_chars=chars) if is_whole(chars, 1) else None
        is_reader = schema in self._forms
        self._listing[name] = UpstreamTool(
            schema if isinstance(schema, dict) else {}, limit, is_reader
        )
        if is_reader or not self._base.enabled or self._rule(name) == "never":
            return tool
        return {key: value for key, value in tool.items() if key != "outputSchema"}

    def _rule(self, name: str) -> Any:
        return self._base.tools.get(name, self._base.tools.get(self._plain_name(name)))

    def _current_kit(self) -> Kit:
        """Return our tools beside those of the upstream server, and the policy with the limits of
        the latter."""
        kit = self._adapter.kit(self._tools if self.has_tools else ())
        limits = {
            name: rule
            for name, tool in self._tools.items()
            if (rule := self._rule(name) or tool.limit)
        }
        is_taken = not self.has_tools and kit.policy.read_tool in self._tools
        reader = _ELSEWHERE if is_taken else kit.policy.read_tool
        reader = reader if self._has_reader else None
        return replace(
            kit, policy=replace(self._base, read_tool=reader, tools={**limits, **self._base.tools})
        )

    # Pointers in arguments

    def resolve(self, tool: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """Resolve pointers in arguments, even if results stay as they are: pointers may come from
        another server. Raises `CoatcheckError`, with a text for the model, if one is not found."""
        known = self._tools.get(tool)
        if known is not None and known.is_reader:
            return arguments
        foreign = any(one.is_reader for one in self._tools.values())
        schema = known.schema if known else None
        return resolve_arguments(
            self.session, arguments, schema, foreign=foreign, max_bytes=self._max_message
        )

    # Results

    def is_small(self, tool: str | None, size: int) -> bool:
        """Whether a message of `size` bytes cannot contain anything over the limit."""
        return size <= self._kit.policy.safe_chars and (
            tool is None or tool not in self._kit.policy.tools
        )

    def call_result(self, tool: str | None, call_id: str, result: dict[str, Any]) -> dict[str, Any]:
        """Replace large parts of a result by stubs, except images, audio and a small number of
        links. An image that providers would refuse is scaled. Returns the same object if nothing
        changes."""
        known = self._tools.get(tool or "")
        if known is not None and known.is_reader and len(as_text(result)) <= _PAGE:
            return result  # a page; but any server may use the schema of our tools
        given = result.get("content")
        content = _with_fitted_images(_as_blocks(given))
        kept = self._kept_blocks(content)
        checked = [block for index, block in enumerate(content) if index not in kept]
        parts = {"content": checked}
        if result.get("structuredContent") is not None:
            parts["structuredContent"] = result["structuredContent"]
        outcome = self._externalize(parts, tool, call_id)
        done: Any = outcome.content
        if done is parts:
            return result if content is given or not given else {**result, "content": content}
        if isinstance(done, str):  # not a list of blocks: one stub for all of it
            done = as_text_result(done, parts)
        if given is None:
            return {**result, "structuredContent": done["structuredContent"]}
        blocks = list(done["content"])
        is_block_by_block = len(blocks) == len(checked)
        for index, block in kept.items():  # in ascending order, so each gets its place back
            blocks.insert(index if is_block_by_block else len(blocks), block)
        return {**result, **done, "content": blocks + self._links(outcome)}

    def _links(self, outcome: Outcome) -> list[dict[str, Any]]:
        """Return links to what was stored, each once, if they are few."""
        refs = {ref.artifact_id: ref for ref in outcome.refs} if self.has_links else {}
        return [link_to(ref) for ref in refs.values()] if len(refs) <= _MAX_LINKS else []

    def _kept_blocks(self, content: list[Any]) -> dict[int, Any]:
        """Return the blocks that stay as they are, by position: media, and links if there are
        few."""
        policy = self._kit.policy
        room = policy.safe_chars if policy.is_named else _FEW_LINKS
        links = [block for block in content if _is_link(block)]
        has_few_links = len(json.dumps(links)) <= room
        return {
            index: block
            for index, block in enumerate(content)
            if _is_media(block) or (has_few_links and _is_link(block))
        }

    def error(self, tool: str | None, call_id: str, error: dict[str, Any]) -> dict[str, Any]:
        """Replace a large message or large data of a JSON-RPC error by stubs. Returns the same
        object if there are none."""
        changed: dict[str, Any] = {}
        for key in ("message", "data"):
            done: Any = self._externalize(error.get(key), tool, call_id).content
            if done is not error.get(key) and isinstance(done, str | dict):
                text = done if isinstance(done, str) else as_text(done)
                changed[key] = as_object(text) if key == "data" else text
        return {**error, **changed} if changed else error

    def resource(self, call_id: str, result: dict[str, Any]) -> dict[str, Any]:
        """Replace large contents of a resource by stubs. Each keeps its URI."""
        contents = result.get("contents")
        if not isinstance(contents, list) or not all(isinstance(one, dict) for one in contents):
            raise UpstreamFailed("the server's response has no contents", hint="")
        shown = [self._resource_content(one, call_id) for one in contents]
        is_same = all(new is old for new, old in zip(shown, contents, strict=True))
        return result if is_same else {**result, "contents": shown}

    def _resource_content(self, content: dict[str, Any], call_id: str) -> Any:
        block = {"type": "resource", "resource": content}
        if _is_media(block) or not isinstance(content.get("text", content.get("blob")), str):
            return content
        done: Any = self._externalize([block], "resources/read", call_id).content
        return done[0]["resource"] if isinstance(done, list) else content

    def _externalize(self, value: object, tool: str | None, call_id: str) -> Outcome:
        server = self._server_of(tool or "") or self._server
        outcome = self._kit.result(self.session, value, tool=tool, call_id=call_id, server=server)
        if not can_be_read(self.session, outcome, self._kit.policy):
            return Outcome(as_text(value), value)
        if outcome.is_stub or outcome.failure is not None:
            self._counts.slimmed(
                tool or "", outcome.tokens_saved, failed=outcome.failure is not None
            )
        return outcome


def text_result(text: str, meta: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a call that we answer."""
    is_error = text.startswith(FAILED)
    shown = text[:_MAX_ERROR] if is_error else text
    return {"content": [{"type": "text", "text": shown}], "isError": is_error, **_complete(meta)}


def _as_blocks(content: object) -> list[Any]:
    """Return the content of a result as a list, even if the server sent something else."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": as_text(content)}] if content else []


def _with_fitted_images(content: list[Any]) -> list[Any]:
    """Return blocks with images that providers accept; the same object if nothing changes."""
    shown = [_with_fitted_image(one) for one in content]
    return content if all(map(operator.is_, shown, content)) else shown


def _with_fitted_image(block: object) -> object:
    part = read_part(block)
    shown = fitted(part)
    return block if shown is part else write_part(shown)


def _is_media(block: object) -> bool:
    if not isinstance(block, dict):
        return False
    resource = block.get("resource")
    if block.get("type") == "resource" and isinstance(resource, dict) and "blob" in resource:
        return str(resource.get("mimeType")).partition("/")[0] in _MEDIA
    return block.get("type") in _MEDIA


def _is_link(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "resource_link"


def _cache(meta: dict[str, Any]) -> dict[str, Any]:
    """The fields that a list and a resource must have since 2026-07-28."""
    return {"ttlMs": 0, "cacheScope": "private"} if _MODERN in meta else {}


def _complete(meta: dict[str, Any]) -> dict[str, Any]:
    """The fields that every result must have since 2026-07-28."""
    return {"resultType": "complete"} if _MODERN in meta else {}
