"""Properties for every split of a stream, every script, and many streams at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
from hypothesis import example, given, settings
from hypothesis import strategies as st

import coatcheck
from coatcheck import Store
from coatcheck.gateway.answer import Merger
from coatcheck.gateway.chat_api import ChatApi
from coatcheck.gateway.messages_api import MessagesApi
from coatcheck.gateway.raw_json import Unreadable
from coatcheck.gateway.request import Request
from coatcheck.gateway.responses_api import ResponsesApi
from coatcheck.gateway.sse import EventSplitter
from tests.gateway.provider import (
    _EVENTS,
    Provider,
    Say,
    Seen,
    Think,
    Turn,
    Use,
    turn,
    written_events,
)
from tests.gateway.talking import BIG, KEYS, Chat, Talk, assert_only_grows, serving

STREAMS = 200
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
CUTS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
BLOCKS = st.lists(
    st.one_of(
        TEXTS.map(Say),
        TEXTS.map(Think),
        st.sampled_from(
            [
                Use("list_artifacts"),
                Use("search", {"q": "é 🎉"}),
                Use("get_artifact", {"pointer": "x"}),
            ]
        ),
    ),
    min_size=1,
    max_size=5,
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Cut bytes into pieces of these sizes, repeated as needed."""
    found, at, number = [], 0, 0
    while at < len(data):
        size = cuts[number % len(cuts)]
        found.append(data[at : at + size])
        at, number = at + size, number + 1
    return found


@given(st.lists(TEXTS, max_size=6), CUTS, st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_any_split_of_the_bytes_gives_the_same_events(
    texts: list[str], cuts: list[int], ends: bytes
) -> None:
    clean = ["".join(one.splitlines()) for one in texts]
    data = (
        b"".join(written_events([("kind", {"text": text}) for text in clean], ends))
        + b"data: [DONE]"
        + ends * 2
        + b": end"
    )
    whole, cut = EventSplitter(), EventSplitter()
    expected = list(whole.feed(data))
    found = [one for piece in pieces(data, cuts) for one in cut.feed(piece)]
    assert found == expected
    assert [json.loads(one.data)["text"] for one in found[:-1]] == clean
    assert b"".join(one.raw for one in found) + cut.rest() == data


MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXTS}),
    min_size=1,
    max_size=6,
)
BODY_ENDS = st.sampled_from([
    b"", b" ", b', "stream": true', b',"model":"later"', b', "messages": []', b',"messages":[{"role":"user"}]',
    b',"a":1,"a":[2]', b', "x"', b"]", b"}", b',"x":"\\ud800"',
])  # fmt: skip


def body_with(messages: list[Any], separators: tuple[str, str], end: bytes) -> bytes:
    """A body that is long enough for the parser to remember its beginning."""
    padding = {"role": "user", "content": "long " * 8_000}
    top = {"model": "m", "tools": [], "messages": [padding, *messages]}
    return json.dumps(top, separators=separators).encode()[:-1] + end + b"}"


@given(
    MESSAGES,
    st.lists(
        st.tuples(st.integers(0, 6), MESSAGES, st.integers(-1, 60), BODY_ENDS),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]),
)
def test_a_body_that_begins_like_an_earlier_one_is_parsed_like_any_other(
    messages: list[Any], turns: list[tuple[int, list[Any], int, bytes]], separators: tuple[str, str]
) -> None:
    """Conversations that grow, are cut, branch, repeat fields, or break off somewhere near the
    end."""
    api, held = MessagesApi(), messages
    api.read(body_with(held, separators, b""))
    for kept, more, cut, end in turns:
        held = [*held[:kept], *more]
        body = body_with(held, separators, end)
        body = body if cut < 0 else body[: len(body) - cut] + b"}"
        assert seen_by(api, body) == seen_by(MessagesApi(), body)


def seen_by(api: MessagesApi, body: bytes) -> Any:
    """Everything that is read from a body."""
    try:
        request = api.read(body)
    except Unreadable:
        return None
    top = {name: bytes(value) for name, value in request.top.items() if name != "messages"}
    messages = [bytes(one) for one in request.messages]
    written = api.written(request, request.messages, request.tools)
    return (
        list(request.top),
        top,
        messages,
        request.facts,
        request.model,
        request.is_streamed,
        written,
    )


def steps_of(api: str, blocks: list[Any]) -> bytes:
    """The bytes of one answer from a provider."""
    provider = Provider()
    made = {
        "anthropic": provider._message,
        "chat": provider._completion,
        "responses": provider._response,
    }[api]
    body: dict[str, Any] = {"model": "m", "input": "x", "stream_options": {"include_usage": True}}
    answer = made(body, turn(*blocks))
    answer["usage"] = {"input_tokens": 1, "output_tokens": 1}
    return b"".join(written_events(list(_EVENTS[api](body, answer, {}, turn(*blocks)))))


@given(st.sampled_from(["anthropic", "chat", "responses"]), BLOCKS, BLOCKS, CUTS)
def test_any_split_of_an_answer_gives_the_same_merged_answer(
    api: str, one: list[Any], two: list[Any], cuts: list[int]
) -> None:
    wires: dict[str, Any] = {"anthropic": MessagesApi, "chat": ChatApi, "responses": ResponsesApi}
    wire = wires[api]()

    def merged(size: list[int] | None) -> tuple[bytes, Any]:
        merger: Merger = wire.merger(
            ["list_artifacts", "get_artifact"], Request({}, [], [], [], "m", True)
        )
        out = b""
        steps = []
        for number, data in enumerate((steps_of(api, one), steps_of(api, two))):
            if number:
                out += merger.next_step()
            for piece in [data] if size is None else pieces(data, size):
                out += merger.feed(piece)
            assert merger.is_complete
            steps.append(merger.end_step())
        return out + merger.finish(), [[bytes(raw) for raw in step.messages] for step in steps]

    whole = merged(None)
    assert merged(cuts) == whole
    assert b"_artifact" not in whole[0]


TURN = st.lists(
    st.sampled_from(
        [
            Say("Some text."),
            Think("hm"),
            Use("list"),
            Use("search", {"q": "x"}),
            Use("store", {"name": "n", "value": "v"}),
        ]
    ),
    min_size=1,
    max_size=4,
).map(lambda blocks: [one for at, one in enumerate(blocks) if one not in blocks[:at]])


@settings(max_examples=3)
@example(
    turns=[[Say("Some text.")], [Think("hm"), Use("list")], [Use("list")]]
    + [[Say("Some text.")]] * 2,
    is_streamed=False,
    cut=60,
)  # a step without a value of its own
@given(st.lists(TURN, min_size=5, max_size=8), st.booleans(), st.integers(60, 400))
def test_prompts_only_grow_with_any_script_and_any_replica(
    turns: list[list[Any]], is_streamed: bool, cut: int
) -> None:
    def model(seen: Seen) -> Turn:
        """Think before speaking, as the API does, and finally end."""
        number = sum(one["role"] == "assistant" for one in seen.messages)
        blocks = turns[number] if number < len(turns) else [Say("End.")]
        ordered = sorted(blocks, key=lambda one: (isinstance(one, Use), not isinstance(one, Think)))
        return turn(
            *(
                ordered
                if any(not isinstance(one, Think) for one in ordered)
                else [*ordered, Say("Yes.")]
            ),
            cut=cut,
        )

    with (
        coatcheck.open("memory:") as store,
        Provider(model) as provider,
        serving(store, provider, mode="loop") as url,
    ):
        talk = Talk(url, is_streamed=is_streamed)
        content: Any = "go"
        for _ in range(3):
            answer = talk.ask(content)
            calls = [block for block in answer.content if block.type == "tool_use"]
            content = talk.results(*[BIG] * len(calls)) if calls else "and?"
            assert all(block.name == "search" for block in calls)
        assert_only_grows(provider)


def test_two_hundred_concurrent_streams_are_not_mixed_up(store: Store) -> None:
    def model(seen: Seen) -> Turn:
        name = seen.messages[0]["content"]
        if len(seen.messages) == 1:
            return turn(Say(f"<{name}>"), Use("store", {"name": name, "value": name * 50}), cut=151)
        return turn(Say(f"</{name}>"), cut=173)

    async def ask(client: httpx2.AsyncClient, url: str, name: str) -> str:
        body = {
            "model": "m",
            "stream": True,
            "messages": [{"role": "user", "content": name}],
            "tools": Chat("").tools,
        }
        text = ""
        async with client.stream(
            "POST", f"{url}/v1/chat/completions", json=body, headers=KEYS
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    choices = chunk["choices"]
                    text += (choices[0]["delta"].get("content") or "") if choices else ""
        return text

    async def run(url: str) -> list[str]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
            return await asyncio.gather(
                *(ask(client, url, f"conversation {i}") for i in range(STREAMS))
            )

    with (
        Provider(model) as provider,
        serving(store, provider, is_one=True, mode="loop", session="all") as url,
    ):
        found = asyncio.run(run(url))
        assert found == [f"<conversation {i}>\n\n</conversation {i}>" for i in range(STREAMS)]
        assert provider.problems == []
        assert len(provider.answered) == 2 * STREAMS
    session = store.session("all")
    assert all(
        session.get(f"conversation {i}") == f"conversation {i}" * 50 for i in range(0, STREAMS, 20)
    )
