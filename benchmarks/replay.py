"""The conversations of the corpus, replayed call by call through a `PromptBuilder`: what is sent,
what is cached.

The host keeps `prompt.history`. With a budget of 50,000 tokens, long conversations need pruning, so
it is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec

import coatcheck
from benchmarks.bench import Bench, corpus
from benchmarks.conversations import Conversation, conversations
from benchmarks.provider_rules import refused
from benchmarks.report import Row
from coatcheck import tokens, toolkit
from coatcheck.context import Budget, HotState, PromptBuilder
from coatcheck.context.prompt import Prompt
from coatcheck.messages import Message
from coatcheck.messages.cost import Tally

BUDGET = 50_000
CACHED, WRITTEN = 0.1, 1.25
_STEP = 10  # calls after which the hot state changes
_SYSTEM = "You are a careful agent. Work step by step, use the tools, and say what you did."
_NO_CORPUS = "there is no corpus (COATCHECK_CORPUS names no folder, and there is no ../shared/data)"


@dataclass(slots=True)
class Replayed:
    """The result of a replay: prompts in estimated tokens, and violations."""

    turns: int = 0
    rewritten: int = 0
    most: int = 0
    most_exact: int = 0
    refused: list[str] = field(default_factory=list)
    sent: float = 0
    sent_cost: float = 0
    without: float = 0
    without_cost: float = 0


def replayed(
    found: Iterable[Conversation],
    store: coatcheck.Store,
    *,
    budget: int = BUDGET,
    recall: bool = False,
) -> Replayed:
    """Every call of every conversation. `without` is the same prompt with the conversation as it
    is: no stubs, no pruning, nothing appended, no tools of ours."""
    done = Replayed()
    exact = Tally(tokens.exact) if find_spec("splintr") is not None else None
    for number, one in enumerate(found):
        session = store.session(f"replay-{number}")
        builder = PromptBuilder(
            session, provider=one.provider, system=_SYSTEM, tools=toolkit(session), recall=recall, rewrite=True,
            budget=Budget(max_prompt_tokens=budget),
        )  # fmt: skip
        plain = Tally()
        before = start = 0
        history: list[Message] = []
        for turn, at in enumerate(one.turns):
            step = f"call {turn - turn % _STEP}"
            state = HotState(
                session_id=session.session_id,
                objective="the user's task",
                last_successful_step=step,
            )
            prompt = builder.build([*history, *one.messages[start:at]], hot_state=state)
            history, start = prompt.history, at
            done.turns += 1
            done.rewritten += prompt.rewritten_tokens > 0
            done.most = max(done.most, prompt.est_tokens)
            request = prompt.request()
            done.refused += [f"{one.file}, message {at}: {each}" for each in refused(request)]
            if exact is not None:
                done.most_exact = max(done.most_exact, _weight(exact, prompt, request))
            new = prompt.est_tokens - prompt.stable_prefix.tokens
            done.sent += prompt.est_tokens
            done.sent_cost += CACHED * prompt.stable_prefix.tokens + WRITTEN * new
            whole = sum(
                cost.tokens for message in one.messages[:at] if (cost := plain.weighed(message))
            )
            done.without += whole
            done.without_cost += CACHED * before + WRITTEN * (whole - before)
            before = whole
    return done


def _weight(tally: Tally, prompt: Prompt, request: dict[str, object]) -> int:
    """The exact tokens of a request, part by part, as JSON."""
    messages = request.get("messages") or request.get("input")
    assert isinstance(messages, list)
    parts = [*messages, {"system": prompt.system}, {"tools": list(prompt.tools)}]
    return sum(cost.tokens for part in parts if (cost := tally.weighed(part)))


def replay(bench: Bench) -> Iterator[Row]:
    """Each call of each conversation of the corpus, with a budget of 50,000 tokens."""
    folder = corpus()
    if folder is None:
        print(f"\nreplay is skipped: {_NO_CORPUS}")
        return
    found = list(conversations(folder))
    if bench.quick:
        found = [one for one in found if len(one.turns) < 40][::20]
    with coatcheck.open("memory:", ttl=None) as store:
        done = replayed(found, store)
    files = len({one.file for one in found})
    title = f"{done.turns:,} calls of {files} files"
    yield Row(f"{title}: tokens of the largest prompt", None, done.most, BUDGET, "count")
    if done.most_exact:
        yield Row(f"{title}: the same, counted exactly", None, done.most_exact, BUDGET, "count")
    yield Row(f"{title}: what a provider would refuse", None, len(done.refused), 0, "count")
    yield Row(
        f"{title}: calls that rewrite the prefix",
        None,
        done.rewritten / max(1, done.turns),
        0.02,
        "share",
    )
    small = [one for one in found if one.file.endswith(".json")]
    if small and len(small) < len(found):
        alone = done.turns - sum(len(one.turns) for one in small)
        yield Row(
            "  the same without the file of short ones",
            None,
            done.rewritten / max(1, alone),
            None,
            "share",
        )
    yield Row("tokens sent, without and with", done.without, done.sent, None, "count")
    yield Row(
        "the same, cached ones at 0.1, written ones at 1.25",
        done.without_cost,
        done.sent_cost,
        None,
        "count",
    )
