"""Many people talk through one gateway at once, with the same words and the same answers. None sees
another's data.

The people of an application share a provider key, or have one each. Their agents begin alike, get
answers that are equal down to the ids of calls, send requests again, go back in their history, and
continue from there. Every result and every note of a model contains the number of its owner, so a
number in the wrong request or session is a leak."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Store
from tests.counting import Counts
from tests.gateway.provider import Provider, Say, Seen, Turn, Use, turn
from tests.gateway.talking import APIS, Agent, Api, Person, serving

pytestmark = pytest.mark.faults

OWNER = re.compile(r"OWNER-(\d+)-")
STUB = re.compile(r"""\{\\"stub\\".*?(art:[0-9a-f]{12,64})""")
KEYS = ("sk-app", "sk-app", "sk-app", "sk-one", "sk-two")
QUESTIONS = ("Read it", "List it", "Note it", "Any news?", "Both")


def model(seen: Seen) -> Turn:
    """A model that gives everybody the same answers, and reads, lists and notes what its own
    context has."""
    last, context = json.dumps(seen.messages[-1]), json.dumps([*seen.earlier, *seen.messages])
    pointers, owners = STUB.findall(context), OWNER.findall(context)
    owner = owners[-1] if owners else "nobody"
    read = Use("get", {"pointer": pointers[-1] if pointers else "notes", "lines": "1:5"})
    note = Use("store", {"name": "notes", "value": f"OWNER-{owner}-notes"})
    if "Hello" in last or "More" in last:
        return turn(Use("search", {"q": "report"}))
    if "Read it" in last:
        return turn(read)
    if "List it" in last:
        return turn(Use("list"), Use("get", {"pointer": "notes"}))
    if "Note it" in last:
        return turn(note, Use("list"))
    if "Both" in last:
        return turn(Say("Both."), read, Use("search", {"q": "again"}), note)
    return turn(Say("Fine."))


def result_of(number: int, round_: int) -> str:
    return "\n".join(f"OWNER-{number}-{round_} line {line}" for line in range(1_500))


def talk(person: Person, number: int, rng: random.Random) -> None:
    """One person's conversation, with detours."""
    say_and_answer(person, number, rng, "Hello")
    for _ in range(rng.randint(2, 4)):
        before = state_of(person)
        say_and_answer(person, number, rng, rng.choice((*QUESTIONS, "More")))
        if rng.random() < 0.3:  # the request is sent again, or the person goes back
            set_state(person, before)
            say_and_answer(person, number, rng, rng.choice(QUESTIONS))


def say_and_answer(person: Person, number: int, rng: random.Random, text: str) -> None:
    person.say(text)
    while has_calls(person):
        person.give(result_of(number, rng.randint(0, 2)))


def has_calls(person: Person) -> bool:
    agent = person.agent
    if isinstance(agent, Agent):
        return any(one.type == "function_call" for one in agent.last.output)
    last = agent.held[-1]
    return bool(last.get("tool_calls")) or "'tool_use'" in str(last.get("content"))


def state_of(person: Person) -> Any:
    return copy.deepcopy(person.agent.held), getattr(person.agent, "last", None)


def set_state(person: Person, state: Any) -> None:
    person.agent.held, person.agent.last = copy.deepcopy(state[0]), state[1]


def owners_in(text: str) -> set[str]:
    return set(OWNER.findall(text))


def mixed_sessions(store: Store) -> Iterator[str]:
    """The sessions that have artifacts of several people, or of one person and an equal one."""
    for info in store.sessions():
        session = store.session(info.session_id)
        contents = str([session.get(ref) for ref in session.list()])
        if len(owners_in(contents)) > 1:
            yield info.session_id


@pytest.mark.parametrize("repeats_ids", [True, False], ids=["repeated ids", "unique ids"])
@pytest.mark.parametrize("is_one", [True, False], ids=["one gateway", "replicas"])
def test_two_hundred_mixed_conversations_share_nothing(
    tmp_path: Path, long_faults: bool, is_one: bool, repeats_ids: bool, counts: Counts
) -> None:
    people = 200 if long_faults else 20

    def run(number: int) -> None:
        rng = random.Random(number)
        api: Api = rng.choice(APIS)
        person = Person(api, url, key=rng.choice(KEYS), is_streamed=rng.random() < 0.5)
        talk(person, number, rng)

    with (
        coatcheck.open(tmp_path / "store", durability="process") as store,
        Provider(model, is_lenient=True, repeats_ids=repeats_ids) as provider,
        serving(store, provider, mode="loop", is_one=is_one) as url,
    ):
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(run, range(people)))
        wrong = [
            seen
            for seen in provider.seen
            if len(owners_in(json.dumps([seen.earlier, seen.body]))) > 1
        ]
        assert wrong == []
        assert provider.problems == []
        reads = [
            seen for seen in provider.seen if b"OWNER" in seen.raw and b"lines 1-5" in seen.raw
        ]
        assert len(reads) >= people // 2
        assert list(mixed_sessions(store)) == []
        counts("requests of mixed conversations", len(provider.seen))
