"""Real conversations, replayed call by call: a few hundred calls from all files. `make bench`
replays every call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.conversations import Conversation, conversations
from benchmarks.replay import BUDGET, replayed
from tests.backends import Backend
from tests.conftest import LONG_FAULTS

LONG = ("56de1726", "7505c804", "9f26971d", "d88bceb6", "189d8afc")
WHOLE = LONG if LONG_FAULTS else LONG[:1] + LONG[2:]
"""Files that are replayed to their end. Of the others, only the first calls are replayed."""


def sampled(corpus: Path) -> Iterator[Conversation]:
    for number, one in enumerate(conversations(corpus)):
        if one.file.startswith(WHOLE):
            yield one
        elif one.file.endswith(".jsonl") or number % (20 if LONG_FAULTS else 40) == 0:
            turns, most = one.turns, 40 if LONG_FAULTS else 20
            yield (
                replace(one, messages=one.messages[: turns[most] + 1]) if len(turns) > most else one
            )


@pytest.mark.faults
@pytest.mark.parametrize(
    "backend", ["memory", "fleet"] if LONG_FAULTS else ["memory"], indirect=True
)
def test_every_prompt_is_within_the_budget_and_accepted_and_few_rewrite_the_prefix(
    corpus: Path, backend: Backend
) -> None:
    found = list(sampled(corpus))
    assert len({one.file for one in found}) == 17
    done = replayed(found, backend.open(ttl=None), recall=False)
    assert done.turns == sum(len(one.turns) for one in found) > (500 if LONG_FAULTS else 300)
    assert 40_000 < done.most <= BUDGET
    assert done.most_exact <= BUDGET
    assert done.refused == []
    assert 0 < done.rewritten <= 0.02 * done.turns
    assert done.sent < done.without
    assert done.sent_cost < done.without_cost
