"""Large results leave the messages when they are first sent, and stay away: the stub is the same in every later prompt.

What became of a result is remembered by its content, so that a conversation is judged once, not once a turn.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from coatcheck.externalize import Outcome, Policy
from coatcheck.refs import Ref
from coatcheck.transcript.formats import Format, Message, at, replaced

if TYPE_CHECKING:
    from coatcheck.session import Session

_REMEMBERED: Final = 16_384


class Slimmer:
    """Externalizes the results of one session's messages."""

    def __init__(self, session: Session, policy: Policy | None) -> None:
        self._session = session
        self._policy = policy
        self._known: OrderedDict[bytes, tuple[Any, tuple[Ref, ...]] | None] = OrderedDict()

    def slim(self, messages: Sequence[Message], known: Format) -> tuple[list[Message], list[Ref]]:
        """The messages with stubs in place of what the policy finds too large, and the refs of those."""
        if self._policy is None:
            return list(messages), []
        tools: dict[str, str] = {}
        refs: list[Ref] = []
        slim: list[Message] = []
        for message in messages:
            tools.update((call.id, call.name) for call in known.calls(message))
            new = message
            for result in known.results(message):
                content = at(message, result.content_path)
                found = self._stub(content, result.name or tools.get(result.call_id), result.call_id)
                if found is not None:
                    new = dict(replaced(new, result.content_path, found[0]))
                    refs += found[1]
            slim.append(new)
        return slim, refs

    def _stub(self, content: Any, tool: str | None, call_id: str) -> tuple[Any, tuple[Ref, ...]] | None:
        """What stands in place of content, and what it points at; None where it stays."""
        policy = self._policy
        assert policy is not None
        if not isinstance(content, str | list) or (isinstance(content, str) and len(content) <= policy.safe_chars):
            return None
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
        if len(text) <= policy.safe_chars:
            return None
        name = tool if policy.tools else None
        key = hashlib.blake2b(f"{name}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key not in self._known:
            outcome: Outcome = self._session.externalize(content, tool=tool, call_id=call_id or None, policy=policy)
            found = (outcome.content, outcome.refs) if outcome.content is not content else None
            if outcome.failure is not None:
                return found  # the next prompt tries again
            self._known[key] = found
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return self._known[key]
