"""Sums over the answers that passed through a gateway, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from coatcheck.externalize import Situation
from coatcheck.externalize.decision import expected_costs
from coatcheck.gateway.outgoing import Outgoing
from coatcheck.gateway.request import FIRST, Request, ResultFacts
from coatcheck.messages.cost import Usage
from coatcheck.models import Prices
from coatcheck.tokens import roughly

_PER_TOKEN: Final = 4


def _counted(text: str) -> Any:
    """A figure that Prometheus gets, with this text."""
    return field(default=0, metadata={"help": text})


@dataclass(slots=True)
class Figures:
    """Sums over all answers. Costs are multiples of the price of an input token."""

    calls: int = _counted("Answers that were recorded.")
    errors: int = _counted("Answers of providers with an error.")
    steps: int = _counted("Calls of the model.")
    input_tokens: int = _counted("Input tokens, as providers report them.")
    cached_tokens: int = _counted("Input tokens from the cache.")
    output_tokens: int = _counted("Output tokens.")
    stubs: int = _counted("Results that became stubs.")
    tokens_saved: int = _counted("Tokens of results that were not sent.")
    reads: int = _counted("Further steps, in which the model read what was stored.")
    tokens_could_save: int = _counted("Tokens of results that would have become stubs.")
    broken_prefixes: int = _counted("Requests that did not begin like the one before.")
    tokens_rewritten: int = _counted("Tokens that were sent again because of that.")
    cost: float = 0.0
    saved: float = 0.0
    """What stubs saved, minus what the further steps cost."""

    def add(self, other: Figures) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def __str__(self) -> str:
        shown = f"{self.calls:,} answers, {self.input_tokens:,} input tokens"
        if self.input_tokens:
            shown += f" ({self.cached_tokens / self.input_tokens:.0%} from the cache)"
        if self.stubs or self.reads:
            total = self.cost + self.saved
            part = f", {self.saved / total:.0%} of the cost" if total > 0 else ""
            shown += (
                f"; saved {self.tokens_saved:,} input tokens with {self.stubs:,} "
                f"stubs{part}, {self.reads:,} reads"
            )
        elif self.tokens_could_save:
            shown += f"; stubs could keep out {self.tokens_could_save:,} tokens"
        if self.broken_prefixes:
            shown += (
                f"; {self.broken_prefixes:,} broken prefixes, {self.tokens_rewritten:,} "
                "tokens sent again"
            )
        return shown


def figures_of(usages: Sequence[Usage], outgoing: Outgoing, prices: Prices) -> Figures:
    """Return the figures of one answer, given the usage of each of its steps."""
    costs = [_cost(one, prices) for one in usages]
    stubs = [one for one in outgoing.judged if one.pointer is not None]
    new = sum(one.tokens - one.stub_tokens for one in stubs)
    tokens_saved = max(new, outgoing.replaced // _PER_TOKEN)
    return Figures(
        calls=1,
        steps=len(usages),
        reads=len(usages) - 1,
        input_tokens=sum(one.input_tokens or 0 for one in usages),
        cached_tokens=sum(one.cached_tokens or 0 for one in usages),
        output_tokens=sum(one.output_tokens or 0 for one in usages),
        stubs=len(stubs),
        tokens_saved=tokens_saved,
        cost=sum(costs),
        saved=new * prices.write + (tokens_saved - new) * prices.read - sum(costs[1:]),
    )


def _cost(usage: Usage, prices: Prices) -> float:
    read, wrote = usage.cached_tokens or 0, usage.cache_write_tokens or 0
    fresh = max(0, (usage.input_tokens or 0) - read - wrote)
    output = (usage.output_tokens or 0) * prices.output
    return fresh + read * prices.read + wrote * prices.write + output


@dataclass(frozen=True, slots=True)
class Candidate:
    """A new result for which a stub would pay off: its tool, its tokens, and the expected
    saving."""

    tool: str
    tokens: int
    saving: float

    def as_json(self) -> dict[str, Any]:
        return {"tool": self.tool, "tokens": self.tokens, "saving": self.saving}


def candidates(outgoing: Outgoing, prices: Prices) -> list[Candidate]:
    """Return the new results of a request for which a stub would pay off."""
    session, request = outgoing.session, outgoing.request
    assert session is not None
    tools = {call_id: name for one in request.facts for call_id, name in one.calls}
    context = sum(one.size for one in request.facts) // _PER_TOKEN
    situation = Situation(context_tokens=context, prices=prices)
    found = []
    for number, result in _new_results(request):
        tool = tools.get(result.call_id, "")
        content = outgoing.api.result_content(request.messages[number], result)
        tokens = round(roughly(str(content).encode("utf-8", "surrogatepass")))
        expected, limit = expected_costs(session, tool, situation, prices, None)
        if expected is not None and tokens > limit:
            saving = expected.decided(tokens, limit).expected_saving
            found.append(Candidate(tool[:200], tokens, round(saving, 1)))
    return found


def _new_results(request: Request) -> Iterator[tuple[int, ResultFacts]]:
    """Yield the larger results that no answer has followed, each with the number of its message."""
    answers = [number for number, one in enumerate(request.facts) if one.side == "answer"]
    for number, results in request.replaceable().items():
        if answers and number < answers[-1]:
            continue
        for result in results:
            if result.size > FIRST:
                yield number, result
