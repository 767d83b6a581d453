"""Results that are made of parts: lists of blocks, and what MCP calls the result of a tool call.

Each block is judged for itself, but a list must stay small as a whole: where too much would stay inline, or too many
stubs would stand in it, all of it becomes one artifact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from coatcheck.externalize import blocks
from coatcheck.externalize.blocks import Payload
from coatcheck.externalize.models import as_block, as_result, like
from coatcheck.externalize.outcome import Outcome
from coatcheck.externalize.parcel import Parcel
from coatcheck.externalize.plain import as_text
from coatcheck.externalize.result import Result

_TOGETHER: Final = 4  # what stays inline of a list has so many times the limit of one between them
_STUBS: Final = 50  # no more of them in one list
_SMALL: Final = 500  # characters of a block that is shown as it is in a text


class Mixed(Result):
    """A result that may be one value, a block, a list of them, or such a list with something around it."""

    _plan: Iterator[bool]

    def _value(self, value: object) -> Outcome:
        if isinstance(value, str):
            return super()._value(value)
        if isinstance(value, list):
            return self._list(value) or super()._value(value)
        if (result := as_result(value)) is not None and (done := self._result(value, result)) is not None:
            return done
        if (block := as_block(value)) is not None and any(blocks.parts([block])):
            done = self._list([value])
            return super()._value(value) if done is None else replace(done, content=done.content[0])
        return super()._value(value)

    def _result(self, value: object, result: dict[str, Any]) -> Outcome | None:
        """A result as MCP has it: whether it is an error, and what else it says of itself, stays."""
        inner, structured = result["content"], result.get("structuredContent")
        listed = self._list(inner) if inner else Outcome("", inner)
        if listed is None:
            if not all((block := as_block(one)) is not None and blocks.is_block(block) for one in inner):
                return None
            listed = self.judged(inner, as_text(inner))
            if listed.content is not inner:
                listed = replace(listed, content=[{"type": "text", "text": listed.text}])
        parts, changed = [listed], {**result, "content": listed.content}
        if structured is not None:
            told = self.judged(structured, as_text(structured))
            if told.content is not structured:
                changed["structuredContent"] = json.loads(told.text) if told.is_stub else {"text": told.text}
                parts.append(told)
        text = "\n".join(one.text for one in parts) or (as_text(structured) if structured is not None else "")
        is_same = listed.content is inner and len(parts) == 1
        return Outcome.of_parts(text, value if is_same else like(value, changed), parts)

    def _list(self, value: list[Any]) -> Outcome | None:
        """The outcome of a list of blocks. None where it is none, but data with types; or too much of it."""
        shaped = [as_block(one) for one in value]
        known = [one for one in shaped if one is not None]
        if not known or len(known) < len(value):
            return None
        odd = [one for one in known if not blocks.is_block(one)]
        if len(odd) == len(known) or (odd and self._limit.exceeded(as_text(odd), self._policy.count)):
            return None
        besides = [rest for one in known if (rest := blocks.besides(one))]
        if besides and self._limit.times(_TOGETHER).exceeded(as_text(besides), self._policy.count):
            return None
        plan = self._planned(known)
        if plan is None:
            return None
        self._plan, self._sharing = iter(plan), max(1, sum(plan))
        return self._blocks(value, known)

    def _planned(self, known: list[dict[str, Any]]) -> list[bool] | None:
        """Which parts go out, one by one in order. None where the list would not be small then."""
        together = self._limit.times(_TOGETHER)
        inline: list[str] = []
        plan: list[bool] = []
        billed = 0
        for part in blocks.parts(known):
            tokens = part.billed if isinstance(part, Payload) and not self._always else None
            written = part if isinstance(part, str) else part.written
            if tokens is None:
                is_large = self._is_large(written, Parcel(written, written).roughly)
                plan.append(is_large and not self._stays_anyway(written))
            else:
                most = self._limit.tokens
                is_large = most is not None and (tokens > most or billed + tokens > most * _TOGETHER)
                is_large = is_large or self._limit.is_too_long(written)
                plan.append(is_large)
            if not is_large:
                billed += tokens or 0
                inline.append(written if tokens is None else "")
        if sum(plan) > _STUBS or (not self._always and together.exceeded("\n".join(inline), self._policy.count)):
            return None
        return plan

    def _blocks(self, value: list[Any], known: list[dict[str, Any]]) -> Outcome:
        done = [self._block(one) for one in known]
        changed = [new.content is not old for new, old in zip(done, known, strict=True)]
        content = [
            like(given, one.content) if new else given for given, one, new in zip(value, done, changed, strict=True)
        ]
        return Outcome.of_parts("\n".join(one.text for one in done), content if any(changed) else value, done)

    def _block(self, block: dict[str, Any]) -> Outcome:
        inner = blocks.nested(block)
        if inner is not None:
            if isinstance(inner, str):
                done = self._put(Parcel(inner, inner)) if next(self._plan) else Outcome(inner, inner)
            else:
                done = self._blocks(inner, inner)
            return replace(done, content=block if done.content is inner else {**block, "content": done.content})
        carried = blocks.payload(block)
        if carried is None or not next(self._plan):
            return Outcome(carried.written if carried and not carried.is_base64 else _glimpse(block), block)
        done = self._put(Parcel(carried.value, carried.written), claimed=carried.media_type)
        return replace(done, content=carried.replace(done.text))


def _glimpse(block: dict[str, Any]) -> str:
    """What stands in a text for a block that is none."""
    text = as_text(block)
    return text if len(text) <= _SMALL else f"[{str(block.get('type'))[:40]} block of {len(text):,} characters]"
