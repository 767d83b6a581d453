"""The session that a request belongs to: the one that the client names, else the one by which the
client is known, within the range of its token."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from coatcheck.gateway.connection import Connection, RefusedRequest
from coatcheck.gateway.conversations import Origin
from coatcheck.gateway.raw_json import digest, text_field, value_of
from coatcheck.gateway.request import Request
from coatcheck.gateway.settings import check_session, is_session_name
from coatcheck.http.credentials import Access

_UNNAMED: Final = "conversation-"
_CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key"})
_CLIENTS: Final = (
    (
        "claude-code-",
        b"x-claude-code-session-id",
        b"x-claude-code-agent-id",
        b"x-claude-code-parent-agent-id",
    ),
    ("codex-", b"session-id", b"thread-id", b"x-codex-parent-thread-id"),
    ("codex-", b"session_id", b"thread_id", b"x-codex-parent-thread-id"),
)
"""How clients name their sessions: the start of our name, and the headers with the main session,
the agent's own, and its parent."""


def origin_of(
    connection: Connection, request: Request, access: Access | None, default: str | None
) -> Origin:
    """Return where a request belongs. `default` is the session of requests that name none. Raises
    `RefusedRequest` if the client's token does not allow the session that it names."""
    named = connection.header(b"x-coatcheck-session") or connection.named_session or default
    if named:
        check_session(named)
        if access is not None and not access.covers(named):
            raise RefusedRequest(403, f"this token opens only sessions {access.limits}")
        return Origin(named)
    found = _of_client(connection) or _of_request(request, _owner(connection, access))
    start = access.sessions if access is not None else ""
    if not start:
        return found
    parent = None if found.parent is None else _safe(start + found.parent, start)
    return replace(found, name=_safe(start + found.name, start), parent=parent)


def _of_client(connection: Connection) -> Origin | None:
    """Return the session that Claude Code or Codex names in its own headers, and its parent."""
    for start, main_header, own_header, parent_header in _CLIENTS:
        main = connection.header(main_header)
        if not main:
            continue
        own, above = connection.header(own_header), connection.header(parent_header)
        if not own or own == main:
            return Origin(_safe(start + main))
        parent = f"{main}-{above}" if above and above != main else main
        return Origin(_safe(f"{start}{main}-{own}"), _safe(start + parent))
    return None


def _of_request(request: Request, owner: str) -> Origin:
    """Return the session that a request is known by, if the client names none."""
    if "conversation" in request.top:
        # The provider keeps it, and its id separates it from others.
        name = digest("conversation", owner, str(value_of(request.top["conversation"])))
        return Origin(_UNNAMED + name[:32])
    key = text_field(request.top, "prompt_cache_key")
    if key:  # often one key for all users of an application
        return Origin(_safe(f"key-{key}"), owner=owner)
    return Origin(_UNNAMED + digest(owner, request.first)[:32], owner=owner)


def _owner(connection: Connection, access: Access | None) -> str:
    """Return the digest of the credentials in a request: the gateway's token by its name, and what
    the client sends to the provider."""
    sent: list[tuple[bytes, bytes]] = []
    for name, value in connection.scope["headers"]:
        if name.lower() in _CREDENTIALS:
            sent.append((name.lower(), value))
    parts = [part.decode("latin-1") for pair in sorted(sent) for part in pair]
    return digest("owner", "" if access is None else access.name, *parts)


def _safe(name: str, start: str = "") -> str:
    """Return the session name for a name that a client did not choose as one: the name itself if it
    is valid, else its digest, after the `start` that its token requires."""
    return name if is_session_name(name) else f"{start}client-{digest(name)[:32]}"
