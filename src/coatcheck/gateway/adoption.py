"""Whether a conversation is changed: it is adopted with its first request, or never.

A conversation that began elsewhere passes unchanged. An adopted one stays adopted: if its ledger
cannot be read, the request is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from coatcheck._toolkit import toolkit
from coatcheck.errors import CoatcheckError, StoreError
from coatcheck.externalize import Policy
from coatcheck.gateway.api import Api
from coatcheck.gateway.connection import RefusedRequest
from coatcheck.gateway.conversations import Origin, Sessions
from coatcheck.gateway.ledger import Adoption, Ledger, adoption_of
from coatcheck.gateway.own_tools import free_prefix, names_by_purpose, own_tools
from coatcheck.gateway.raw_json import digest, value_of
from coatcheck.gateway.request import Request
from coatcheck.gateway.settings import Mode
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.session import Session

_PINNED: Final = ("max_tokens", "max_chars", "max_bytes", "preview_chars", "redact", "files")
_LOG: Final = logging.getLogger("coatcheck")


@dataclass(frozen=True, slots=True)
class AdoptedConversation:
    """A conversation that is changed. `index` is the ledger with the adoption, under `key`; it also
    says where the conversation is kept if `origin` does not. `chain` is the key of the answer that
    the request names, `link` its record."""

    key: str
    adoption: Adoption
    origin: Origin
    index: Ledger
    chain: str | None
    link: Mapping[str, Raw]

    @property
    def is_loop(self) -> bool:
        return self.adoption.mode == "loop"


def conversation_of(
    api: Api,
    request: Request,
    origin: Origin,
    sessions: Sessions,
    *,
    mode: Mode,
    policy: Policy,
) -> AdoptedConversation | None:
    """Return the conversation of a request, None if it is not changed. A new one is adopted now, if
    the mode allows it. Raises `RefusedRequest`."""
    chain = api.chain(request)
    continues = request.has_answers or chain is not None
    if not request.facts or (not continues and not request.tools):
        return None
    session = sessions.index(origin) if origin.owner else sessions.opened(origin)
    index = Ledger(session)
    try:
        found = _find(index, digest("adopted", api.name, origin.owner, request.first), chain)
    except StoreError as error:
        if continues:
            raise ledger_failure(error) from error
        _LOG.warning(
            "a conversation is not changed, its ledger cannot be read: %s", mask(error.message)
        )
        return None
    adoption, refusal = found.adoption, api.refusal(request)
    if adoption is not None and refusal is not None:
        raise RefusedRequest(400, refusal)
    # A conversation that the provider keeps may be empty before this request.
    is_kept_by_provider = chain is not None and "conversation" in request.top
    may_be_new = not continues or is_kept_by_provider
    if adoption is None and refusal is None and may_be_new:
        is_named = not origin.owner
        adoption = _adopt(
            api, request, session, found.key, mode=mode, policy=policy, is_named=is_named
        )
    if adoption is None:
        return None
    return AdoptedConversation(found.key, adoption, origin, index, chain, found.link)


@dataclass(frozen=True, slots=True)
class _Found:
    """What a ledger has about a conversation: the key of its adoption, the adoption, and the record
    of the answer that the request names."""

    key: str
    adoption: Adoption | None
    link: Mapping[str, Raw]


def _find(ledger: Ledger, first: str, chain: str | None) -> _Found:
    """Look up a conversation by its first message, or by the answer that the request names. Raises
    `StoreError`."""
    key, link = first, dict[str, Raw]()
    if chain is not None:
        link = ledger.find([chain]).get(chain, {})
        if not link:
            return _Found(key, None, link)
        key = value_of(link["adopted"])
    record = ledger.find([key]).get(key)
    return _Found(key, None if record is None else adoption_of(record), link)


def ledger_failure(error: StoreError) -> RefusedRequest:
    return RefusedRequest(503, f"the gateway cannot read its ledger: {mask(error.message)}")


def _adopt(
    api: Api,
    request: Request,
    session: Session,
    key: str,
    *,
    mode: Mode,
    policy: Policy,
    is_named: bool,
) -> Adoption | None:
    """Adopt a new conversation, if the mode allows it. One with a message that is nested too deeply
    stays as it is. In `loop` mode, the client's own tools can read only in a session that
    `is_named`. In `stub` mode, a client needs no tools of ours if results are files."""
    if mode == "observe" or any(one.is_deep for one in request.facts):
        return None
    pinned = {name: getattr(policy, name) for name in _PINNED}
    theirs = dict(own_tools(request.tools))
    if "get" in theirs and (is_named or mode == "stub"):
        adoption = Adoption("stub", [], theirs, pinned)
    elif mode == "stub" and policy.files is not None:
        adoption = Adoption("stub", [], {}, pinned)
    elif mode == "loop":
        tools = toolkit(session, prefix=free_prefix(request.tools))
        adoption = Adoption("loop", api.described(tools), names_by_purpose(tools), pinned)
    else:
        return None
    try:
        return Ledger(session).adopt(key, adoption)
    except CoatcheckError as error:
        _LOG.warning(
            "a conversation is not changed, its ledger cannot be written: %s", mask(error.message)
        )
        return None
