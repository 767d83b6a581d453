"""Decisions about the results in a request: each is made once, and pinned in the ledger before a
byte of the result is sent."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Raw

from coatcheck.adapters import can_be_read
from coatcheck.errors import CoatcheckError
from coatcheck.externalize import Policy, ResultSource, Situation
from coatcheck.gateway.api import Api
from coatcheck.gateway.conversations import Conversations, Home, pointers_of
from coatcheck.gateway.raw_json import raw_of
from coatcheck.gateway.request import FIRST, Request, ResultFacts
from coatcheck.redaction import mask

_SOURCE: Final = ResultSource("gateway")
_LOG: Final = logging.getLogger("coatcheck")
_BYTES_PER_TOKEN: Final = 4
_PRIVATE: Final = range(0xE000, 0xE800)


@dataclass(slots=True)
class Judged:
    """A result that was judged now: its tool, the tokens of the original and of its stub, and the
    pointer."""

    tool: str
    tokens: int
    stub_tokens: int = 0
    pointer: str | None = None


def least_size(policy: Policy) -> int:
    """Return the size that a result must exceed to be judged."""
    looks_at_all = policy.is_named or any(rule != "never" for rule in policy.tools.values())
    return min(FIRST, policy.safe_chars) if looks_at_all else FIRST


class Judge:
    """Decides about the results of one request. `judged` are the decisions made now, `replaced` is
    the number of bytes that are not sent because of all decisions."""

    def __init__(
        self,
        api: Api,
        request: Request,
        home: Home,
        conversations: Conversations | None,
        policy: Policy,
    ) -> None:
        self._api = api
        self._request = request
        self._home = home
        self._conversations = conversations
        self._policy = policy
        self._least = least_size(policy)
        self._tools = {call_id: name for one in request.facts for call_id, name in one.calls}
        self._pins: dict[str, Mapping[str, Raw]] = {}
        self.judged: list[Judged] = []
        self.replaced = 0

    def recall(self, asked: Collection[str], sent: Collection[str]) -> None:
        """Look up earlier decisions about results. Those about results that were `sent` may have
        been made in another session, before the client changed something."""
        records = self._home.records
        self._pins.update({key: records[key] for key in asked if key in records})
        missing = {key for key in asked if key in sent and key not in self._pins}
        if self._conversations is not None and missing:
            self._pins |= self._conversations.pins(missing, self._home)

    def with_results(self, number: int, results: Sequence[ResultFacts], *, is_new: bool) -> Raw:
        """Return a message with these results as they are sent. Only results that no answer has
        followed are judged."""
        raw = self._request.messages[number]
        contents: dict[int, Raw] = {}
        for one in results:
            pin = self._pins.get(one.key)
            if pin is None and is_new and one.size > self._least:
                pin = self._pins[one.key] = self._judge(raw, one)
            if pin is not None and "content" in pin:
                contents[one.place] = pin["content"]
                self.replaced += one.size - len(bytes(pin["content"]))
        return self._api.with_results(raw, contents) if contents else raw

    def _judge(self, raw: Raw, result: ResultFacts) -> Mapping[str, Raw]:
        """Decide about a result, and pin the decision. If the store fails, the result stays."""
        content = self._api.result_content(raw, result)
        if self._request.has_surrogates and any(ord(one) in _PRIVATE for one in str(content)):
            return {}
        tool = self._tools.get(result.call_id)
        context = sum(one.size for one in self._request.facts) // _BYTES_PER_TOKEN
        outcome = self._home.session.externalize(
            content,
            tool=tool,
            call_id=result.call_id,
            policy=self._policy,
            situation=Situation(context_tokens=len(bytes(raw)) // _BYTES_PER_TOKEN + context),
            source=_SOURCE,
        )
        if outcome.failure is not None or not can_be_read(
            self._home.session, outcome, self._policy
        ):
            return {}
        judged = Judged(tool or "", 0 if outcome.why is None else outcome.why.tokens)
        body: dict[str, Any] = {"inline": True, "pointers": []}
        if outcome.refs or outcome.has_scaled_image:
            body = {"content": raw_of(outcome.content), "pointers": pointers_of(outcome.refs)}
        if outcome.refs:
            judged.pointer = outcome.refs[0].pointer
            judged.stub_tokens = max(0, judged.tokens - outcome.tokens_saved)
        try:
            pin = self._home.ledger.write(result.key, body)
        except CoatcheckError as error:
            _LOG.warning(
                "a result stays, the decision about it cannot be stored: %s", mask(error.message)
            )
            return self._written_anyway(result.key)
        if self._conversations is not None:
            self._conversations.note_pin(result.key, self._home.session)
        self.judged.append(judged)
        return pin

    def _written_anyway(self, key: str) -> Mapping[str, Raw]:
        """Return a pin whose write failed but left it in the store."""
        try:
            return self._home.ledger.find([key]).get(key, {})
        except CoatcheckError:
            return {}
