"""The adapter for the Claude Agent SDK: `ClaudeAgentOptions(**slim(store))`.

The hooks of Claude Code as functions of this process, and our three tools in a server of this
process. Results of built-in tools, of MCP servers and of sub-agents are covered. The session is
Claude Code's own, so `resume` finds what was stored, and queries that run side by side share
nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from coatcheck import Policy, Session, Store
from coatcheck._toolkit import Purpose
from coatcheck.adapters import TTL, Adapter, in_thread, missing
from coatcheck.adapters.claude_code import HOST, Hooks
from coatcheck.errors import InvalidArgument
from coatcheck.ids import SCHEME

TESTED: Final = "claude-agent-sdk>=0.2.182,<0.3"

try:
    from claude_agent_sdk import ClaudeAgentOptions, HookMatcher

    from coatcheck.mcp.server import Sessions, make_server
except ImportError as error:
    raise missing("claude-agent-sdk", f"{TESTED}' 'coatcheck[mcp]") from error

__all__ = ["TESTED", "forget", "slim"]

_NAME: Final = "coatcheck"
_LIMIT: Final = "MAX_MCP_OUTPUT_TOKENS"
_RAISED: Final = "10000000"
_EVENTS: Final = ("PreToolUse", "PostToolUse", "PostToolUseFailure")


def slim(
    store: Store | Session | str | Path,
    options: ClaudeAgentOptions | None = None,
    *,
    policy: Policy | None = None,
    ttl: float | None = TTL,
    only: Iterable[Purpose] | None = None,
) -> dict[str, Any]:
    """Return the arguments for `ClaudeAgentOptions`: our hooks and our server, added to those of
    `options`.

    Claude Code cuts results of MCP tools at 25,000 tokens, and drops pictures beside them, before a
    hook sees them. So its limit is raised, unless the environment sets one. A `Session` serves all
    conversations, including forks. With a disabled policy, nothing is added."""
    given = options or ClaudeAgentOptions()
    arguments = (
        {}
        if options is None
        else {one.name: getattr(options, one.name) for one in fields(options) if one.init}
    )
    purposes = None if only is None else tuple(only)
    adapter = Adapter(store, host=HOST, policy=policy, ttl=ttl, only=purposes)
    if not adapter.policy.enabled:
        return arguments
    servers = given.mcp_servers
    if not isinstance(servers, dict):
        raise InvalidArgument(
            "mcp_servers is a file or a text",
            hint="pass its servers as a dict, to add ours to them",
        )
    name = _free_name(servers)
    restricted = {agent: about.tools for agent, about in (given.agents or {}).items()}
    hooks = Hooks(adapter, server=name, restricted=restricted)

    async def answer(event: Any, call_id: str | None, context: Any) -> dict[str, Any]:
        return await in_thread(hooks.answer, event, await _schema(servers, event))

    if _LIMIT not in os.environ:
        arguments["env"] = {_LIMIT: _RAISED, **given.env}
    arguments["hooks"] = dict(given.hooks or {})
    for event in _EVENTS:
        arguments["hooks"][event] = [
            *arguments["hooks"].get(event, ()),
            HookMatcher(hooks=[answer]),
        ]
    if hooks.kit.tools:
        sessions = Sessions(adapter.store, name, named=True, ttl=ttl, only=purposes, hooks=hooks)
        server = {
            "type": "sdk",
            "name": name,
            "instance": make_server(sessions),
            "alwaysLoad": True,
        }
        arguments["mcp_servers"] = {**servers, name: server}
    return arguments


async def _schema(servers: Mapping[str, Any], event: Mapping[str, Any]) -> Any:
    """Return the schema of the tool of an in-process server that is about to get a pointer, else
    None."""
    tool = event.get("tool_name", "")
    if event.get("hook_event_name") != "PreToolUse" or SCHEME not in repr(event.get("tool_input")):
        return None
    for name, config in servers.items():
        prefix = f"mcp__{re.sub(r'[^A-Za-z0-9_-]', '_', name)}__"
        if tool.startswith(prefix) and config.get("type") == "sdk":
            try:
                listed = (
                    await config["instance"].get_request_handler("tools/list").handler(None, None)
                )
            except Exception:  # noqa: BLE001 - a server that wants more than its own lists nothing here
                return None
            return next(
                (one.input_schema for one in listed.tools if prefix + one.name == tool), None
            )
    return None


def forget(store: Store | str | Path, session_id: str) -> None:
    """End the session of a conversation that was deleted."""
    Adapter(store, host=HOST).forget(session_id)


def _free_name(servers: Mapping[str, object]) -> str:
    """Return a name for our server that none of the user's servers has."""
    number = 1
    while (name := _NAME if number == 1 else f"{_NAME}_{number}") in servers:
        number += 1
    return name
