"""Conversations whose client names no session: each has a session of its own, and nothing of
another one reaches it."""

from __future__ import annotations

import json
import re
from typing import Any

import anthropic
import pytest

from coatcheck import Store
from coatcheck.gateway.ledger import Ledger
from tests.gateway.provider import Provider, Say, Seen, Turn, Use, turn
from tests.gateway.talking import (
    APIS,
    BIG,
    Agent,
    Api,
    Chat,
    Person,
    Talk,
    assert_only_grows,
    post,
    serving,
)

STUB = re.compile(r"""\{\\"stub\\".*?(art:[0-9a-f]{12,64})""")
EVERY_API = pytest.mark.parametrize("api", APIS)


def data_of(name: str) -> str:
    """A large result that belongs to one person."""
    return "\n".join(
        f"{name}-SECRET row {number} of the payroll of {name}" for number in range(2_000)
    )


def last_text(seen: Seen) -> str:
    return json.dumps(seen.messages[-1])


def newest_pointer(seen: Seen) -> str:
    """The pointer of the newest stub that the model sees."""
    pointers: list[str] = STUB.findall(json.dumps([*seen.earlier, *seen.messages]))
    return pointers[-1]


def reporting(seen: Seen) -> Turn:
    """A model that gives everybody the same answers. It reads what is stored if the last message
    says so."""
    last = last_text(seen)
    if "Hello" in last:
        return turn(Use("search", {"q": "report"}))
    if "stub" in last:
        return turn(Say("The report is stored."))
    if "Read it" in last:
        return turn(Use("get", {"pointer": newest_pointer(seen), "lines": "1:40"}))
    if "What is there" in last:
        return turn(Use("list"), Use("store", {"name": "notes", "value": "These are my notes."}))
    return turn(Say("No anomalies found."))


def sessions_in(store: Store) -> list[str]:
    """The sessions of conversations."""
    return [
        one.session_id for one in store.sessions() if not one.session_id.startswith("coatcheck:")
    ]


@EVERY_API
@pytest.mark.parametrize("repeats_ids", [False, True], ids=["unique ids", "repeated ids"])
@pytest.mark.parametrize(
    "keys", [("sk-one", "sk-one"), ("sk-one", "sk-two")], ids=["same key", "other key"]
)
def test_equal_beginnings_and_answers_do_not_mix_two_conversations(
    store: Store, api: Api, repeats_ids: bool, keys: tuple[str, str]
) -> None:
    """Alice's model reads her data inside an answer; Bob's answers are the same, without a read."""
    with (
        Provider(reporting, is_lenient=True, repeats_ids=repeats_ids) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        alice, bob = Person(api, url, key=keys[0]), Person(api, url, key=keys[1])
        for person, name, question in ((alice, "ALICE", "Read it"), (bob, "BOB", "Any anomaly?")):
            person.say("Hello")
            person.give(data_of(name))
            person.say(question)
        before = len(provider.seen)
        bob.say("What is there?")
        bob.say("Thanks")
        for seen in provider.seen[before:]:
            assert b"ALICE" not in seen.raw
        assert provider.problems == []
        bob.say("Read it")
        assert b"BOB-SECRET row 3 " in provider.seen[-1].raw
    for name in sessions_in(store):
        session = store.session(name)
        contents = str([session.get(ref) for ref in session.list()])
        assert not ("ALICE" in contents and "BOB" in contents)


@EVERY_API
def test_a_message_that_differs_after_equal_turns_is_another_conversation(
    store: Store, api: Api
) -> None:
    """Both have the same messages up to here, down to the data. Then Alice gets more, and Bob asks
    what there is."""
    with (
        Provider(reporting, is_lenient=True, repeats_ids=True) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        people = Person(api, url), Person(api, url)
        for person in people:
            person.say("Hello")
            person.give(BIG)
            person.say("Read it")
        alice, bob = people
        alice.say("Hello again")
        alice.give(data_of("ALICE"))
        before = len(provider.seen)
        bob.say("What is there?")
        bob.say("Read it")
        assert all(b"ALICE" not in seen.raw for seen in provider.seen[before:])
        assert b"finished job 7919" in provider.seen[-1].raw
        assert provider.problems == []


@EVERY_API
def test_one_conversation_stays_in_one_session(store: Store, api: Api, is_streamed: bool) -> None:
    with Provider(reporting) as provider, serving(store, provider, mode="loop") as url:
        person = Person(api, url, is_streamed=is_streamed)
        person.say("Hello")
        person.give(BIG)
        person.say("Read it")
        person.say("What is there?")
        person.say("Read it")
        assert provider.problems == []
        if api != "responses stored":
            assert_only_grows(provider)
    (name,) = sessions_in(store)
    assert store.session(name).get("notes") == "These are my notes."


@pytest.mark.parametrize("client", [Talk, Chat])
def test_a_request_that_is_sent_again_continues_with_all_that_was_stored(
    store: Store, client: type[Talk] | type[Chat]
) -> None:
    """A conversation that was stored a moment ago is sent twice from the same point, as after a
    timeout."""
    with Provider(reporting) as provider, serving(store, provider, mode="loop") as url:
        agent: Any = client(url)
        agent.ask("Hello")
        results = agent.results(BIG)
        agent.ask(results) if client is Talk else agent.ask(*results)
        agent.ask("What is there?")
        for _ in range(3):
            held = list(agent.held)
            agent.ask("Read it")
            assert b"finished job 7919" in provider.seen[-1].raw
            agent.held = held
        agent.ask("Read it")
        agent.ask("Thanks")
        assert provider.problems == []
    assert len(sessions_in(store)) == 4


def test_a_changed_system_text_is_another_conversation_with_the_same_stubs(store: Store) -> None:
    """Notes that a model made under one system text are not sent under another."""
    with Provider(reporting) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, thinking=False, system="You work for Alice, whose number is 4711.")
        talk.ask("Hello")
        talk.ask(talk.results(BIG))
        talk.ask("What is there?")
        talk.more["system"] = "You work for Bob."
        talk.ask("Thanks")
        last = provider.seen[-1]
        assert b"notes" not in last.raw
        assert b'{\\"stub\\"' in last.raw
        talk.ask("Read it")
        assert b"finished job 7919" in provider.seen[-1].raw


def test_a_history_that_the_client_changed_keeps_its_stubs_and_can_be_read(store: Store) -> None:
    with Provider(reporting) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, thinking=False)
        talk.ask("Hello")
        talk.ask(talk.results(BIG))
        talk.ask("What is there?")
        talk.held[3]["content"] = [{"type": "text", "text": "The client wrote this."}]
        talk.ask("Read it")
        sent = provider.seen[-1]
        assert b"finished job 7919" in sent.raw
        assert sent.raw.count(b'{\\"stub\\"') == 1
        assert len(sent.raw) < 20_000
        assert provider.problems == []


def test_a_prompt_cache_key_does_not_join_conversations(store: Store) -> None:
    """Applications send one key for all of their users."""
    with Provider(reporting) as provider, serving(store, provider, mode="loop") as url:
        alice, bob = (Chat(url, prompt_cache_key="app") for _ in range(2))
        alice.ask("Hello")
        alice.ask(*alice.results(data_of("ALICE")))
        bob.ask("Hello")
        bob.ask(*bob.results(data_of("BOB")))
        bob.ask("What is there?")
        assert b"ALICE" not in provider.seen[-1].raw


def test_credentials_may_change_in_a_session_that_the_client_names(store: Store) -> None:
    """A login's token is renewed every few hours."""
    with Provider(reporting) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(f"{url}/s/mine", thinking=False, key="sk-before")
        talk.ask("Hello")
        talk.ask(talk.results(BIG))
        talk.key = "sk-after"
        talk.ask("Read it")
        talk.ask("Thanks")
        assert_only_grows(provider)


def test_a_count_of_tokens_continues_no_session_and_leaves_nothing_in_it(store: Store) -> None:
    with Provider(reporting) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, thinking=False)
        talk.ask("Hello")
        talk.held.append({"role": "user", "content": talk.results(BIG)})
        with anthropic.Anthropic(api_key="sk-test", base_url=url, max_retries=0) as client:
            request: Any = {"model": "claude-opus-5-5", "messages": talk.held, "tools": talk.tools}
            assert client.messages.count_tokens(**request).input_tokens < 2_000
        talk.send()
        talk.ask("Read it")
        assert b"finished job 7919" in provider.seen[-1].raw
        assert provider.problems == []
    homes = [
        name for name in sessions_in(store) if list(store.session(name).records("gateway:calls"))
    ]
    assert len(homes) == 1


def test_a_response_of_somebody_else_cannot_be_continued_in_their_session(store: Store) -> None:
    """Both clients name the same response, as with a prepared beginning that all users of an
    application share."""
    with Provider(reporting) as provider, serving(store, provider, mode="loop") as url:
        alice = Agent(url, is_streamed=False, is_stored=True)
        alice.ask("Hello")
        bob = Agent(url, is_streamed=False, is_stored=True)
        bob.last = alice.last
        alice.ask(*alice.results(data_of("ALICE")))
        bob.ask(*bob.results(data_of("BOB")))
        bob.ask("What is there?")
        assert b"ALICE" not in provider.seen[-1].raw
        bob.ask("Read it")
        assert b"BOB-SECRET row 3 " in provider.seen[-1].raw


def test_hidden_calls_of_an_equal_conversation_under_another_key_are_not_sent(store: Store) -> None:
    with Provider(reporting) as provider, serving(store, provider, mode="loop") as url:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "What is there?"}],
            "tools": Chat(url).tools,
        }
        answer = post(url, "/v1/chat/completions", body, authorization="Bearer sk-one").json()
        held = [
            *body["messages"],
            answer["choices"][0]["message"],
            {"role": "user", "content": "Thanks"},
        ]
        post(url, "/v1/chat/completions", {**body, "messages": held}, authorization="Bearer sk-one")
        assert len(provider.seen[-1].messages) == 6
        post(url, "/v1/chat/completions", {**body, "messages": held}, authorization="Bearer sk-two")
        assert provider.seen[-1].messages == held


def test_only_the_first_claim_of_a_point_succeeds(store: Store) -> None:
    one, other = Ledger(store.session("s")), Ledger(store.session("s"))
    assert [one.claim("a"), other.claim("a"), one.claim("a"), other.claim("b")] == [
        True,
        False,
        False,
        True,
    ]
