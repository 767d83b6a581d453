"""Different ways to the same answer: the three backends on one trace of calls, a fragment and a
JSONPath, and a builder that has seen the whole conversation and one that is new."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import coatcheck
from coatcheck import Policy, Ref, Session, Store, toolkit
from coatcheck.context import Budget, PromptBuilder
from coatcheck.errors import BudgetExceeded, CoatcheckError
from tests.backends import LARGE, Clock, Fleet
from tests.conftest import LONG_FAULTS

VALUES = [
    "a",
    "[1]",
    [1],
    b"[1]",
    {"rows": [{"a": 1}, {"a": 2}]},
    "one line\nanother line\n" * 40,
    "x" * LARGE,
]
SESSIONS = st.sampled_from(["one", "two", "child"])
NAMES = st.sampled_from(["n", "m"])
TARGETS = NAMES | st.integers(0, 7)
ON_A_TARGET = ["get", "ref", "forget", "pin", "unpin", "lines", "grep", "shape", "part"]
TIMES = st.sampled_from([None, 50.0])
OPERATIONS = st.one_of(
    st.tuples(st.just("put"), SESSIONS, st.integers(0, len(VALUES) - 1), NAMES | st.none(), TIMES),
    st.tuples(st.sampled_from(ON_A_TARGET), SESSIONS, TARGETS),
    st.tuples(st.sampled_from(["list", "names", "count", "end", "records", "search"]), SESSIONS),
    st.tuples(st.just("grant"), SESSIONS, TARGETS, SESSIONS),
    st.tuples(st.just("record"), SESSIONS, st.binary(max_size=5)),
    st.tuples(st.just("externalize"), SESSIONS, st.integers(0, len(VALUES) - 1)),
    st.tuples(st.just("wait"), st.sampled_from([10.0, 60.0, 4_000.0])),
    st.tuples(st.sampled_from(["collect", "verify", "stats"])),
)  # fmt: skip


class Side:
    """One of the stores. Each example has its own sessions, and leaves none behind."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._example = 0
        self._refs: list[Ref] = []

    def begin(self) -> None:
        self._example += 1
        self._refs = []

    def leave(self) -> None:
        for name in ("child", "one", "two"):
            self._session(name).end()

    def _session(self, name: str) -> Session:
        parent = f"one {self._example}" if name == "child" else None
        return self.store.session(f"{name} {self._example}", parent=parent)

    def do(self, operation: Sequence[Any]) -> Any:
        """Return the result of a call, in a form that does not name the backend, or its error."""
        name, *given = operation
        try:
            return _plain(getattr(self, f"_{name}")(*given))
        except CoatcheckError as error:
            return type(error).__name__, error.code

    def _target(self, target: str | int) -> Any:
        return (
            self._refs[target % len(self._refs)].pointer
            if isinstance(target, int) and self._refs
            else str(target)
        )

    def _put(self, session: str, value: int, name: str | None, ttl: float | None) -> Ref:
        ref = self._session(session).put(VALUES[value], name=name, ttl=ttl)
        self._refs.append(ref)
        return ref

    def _get(self, session: str, target: str | int) -> Any:
        return self._session(session).get(self._target(target))

    def _ref(self, session: str, target: str | int) -> Any:
        return self._session(session).ref(self._target(target))

    def _forget(self, session: str, target: str | int) -> Any:
        return self._session(session).forget(self._target(target))

    def _pin(self, session: str, target: str | int) -> Any:
        return self._session(session).pin(self._target(target))

    def _unpin(self, session: str, target: str | int) -> Any:
        return self._session(session).unpin(self._target(target))

    def _lines(self, session: str, target: str | int) -> Any:
        return self._session(session).read(self._target(target), lines="1:3").text

    def _grep(self, session: str, target: str | int) -> Any:
        return self._session(session).read(self._target(target), grep="another", context=1).text

    def _shape(self, session: str, target: str | int) -> Any:
        return self._session(session).read(self._target(target), query="shape").text

    def _part(self, session: str, target: str | int) -> Any:
        return self._session(session).get(f"{self._target(target)}#/rows/0")

    def _list(self, session: str) -> Any:
        return self._session(session).list()

    def _names(self, session: str) -> Any:
        return self._session(session).names()

    def _count(self, session: str) -> Any:
        return self._session(session).count()

    def _end(self, session: str) -> Any:
        return self._session(session).end()

    def _search(self, session: str) -> Any:
        return sorted(
            hit.ref.artifact_id for hit in self._session(session).search("another line rows")
        )

    def _grant(self, session: str, target: str | int, to: str) -> Any:
        return self._session(session).grant(self._target(target), to=f"{to} {self._example}")

    def _record(self, session: str, body: bytes) -> Any:
        return self._session(session).record("r", body, keep=3)

    def _records(self, session: str) -> Any:
        return [one.body for one in self._session(session).records("r")]

    def _externalize(self, session: str, value: int) -> Any:
        outcome = self._session(session).externalize(VALUES[value], policy=Policy(max_chars=200))
        return outcome.text, outcome.ref

    def _collect(self) -> Any:
        report = self.store.collect()
        return report.refs, report.artifacts, report.bytes, report.problems

    def _verify(self) -> Any:
        report = self.store.verify()
        # A copy without a row is left by some backends until the next collection.
        return (
            report.artifacts,
            report.bytes,
            [one for one in report.problems if one.kind != "orphan"],
        )

    def _stats(self) -> Any:
        return replace(self.store.stats(), quarantined_bytes=0)


def _plain(value: Any) -> Any:
    if isinstance(value, Ref):
        return replace(value, content_uri="")
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def test_memory_folder_and_fleet_answer_alike_on_one_trace_of_calls(
    tmp_path: Path, fleet: Fleet
) -> None:
    clock = Clock()
    with ExitStack() as stack:
        new_url = stack.enter_context(fleet.lending())
        urls = ["memory:", str(tmp_path / "store"), new_url()]
        sides = [
            Side(
                stack.enter_context(
                    closing(
                        coatcheck.open(url, durability="process", ttl=100, grace=50, clock=clock)
                    )
                )
            )
            for url in urls
        ]

        @settings(max_examples=150 if LONG_FAULTS else 10)
        @given(trace=st.lists(OPERATIONS, min_size=5, max_size=30))
        def check(trace: list[Sequence[Any]]) -> None:
            for side in sides:
                side.begin()
            for number, operation in enumerate(trace):
                if operation[0] == "wait":
                    clock.advance(operation[1])
                    continue
                memory, folder, fleet = (side.do(operation) for side in sides)
                assert memory == folder == fleet, f"call {number}: {operation}"
            for side in sides:
                side.leave()

        check()


KEYS = st.sampled_from(
    ["a", "b", "", "a/b", "~", "~1", "é", "0", "a'b", 'a"b', "\\", " "]
) | st.text(max_size=4)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def _paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path] + [found for key, one in inner for found in _paths(one, (*path, key))]


def _at(value: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        value = value[key]
    return value


def test_a_fragment_and_a_json_path_find_the_same_value() -> None:
    @given(document=st.dictionaries(KEYS, DOCUMENTS, min_size=1, max_size=4), data=st.data())
    def check(document: dict[str, Any], data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(_paths(document)))
        expected = _at(document, path)
        ref = session.put(document)
        fragment = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)
        query = "$" + "".join(
            f"[{key if isinstance(key, int) else json.dumps(key)}]" for key in path
        )
        assert (
            session.get(f"{ref.pointer}#{fragment}") == expected
            if fragment
            else session.get(ref) == document
        )
        shown = session.read(ref, query=query, max_chars=100_000)
        assert json.loads(shown.text) == expected

    with coatcheck.open("memory:") as store:
        session = store.session("s", ttl=None)
        check()


TEXTS = st.text(min_size=1, max_size=40) | st.builds(
    lambda line, count: f"{line}\n" * count, st.text(min_size=1, max_size=30), st.integers(50, 400)
)
TURNS = st.lists(st.tuples(TEXTS, st.lists(TEXTS, max_size=2), TEXTS), min_size=1, max_size=6)


def _conversation(turns: list[tuple[str, list[str], str]]) -> list[list[dict[str, Any]]]:
    """The history of each request of a conversation with tool calls, each longer than the one
    before."""
    history: list[dict[str, Any]] = []
    found = []
    for number, (question, results, answer) in enumerate(turns):
        history = [*history, {"role": "user", "content": question}]
        found.append(history)
        calls = [{"id": f"c{number}-{at}", "type": "function", "function": {"name": "run", "arguments": "{}"}}
                 for at in range(len(results))]  # fmt: skip
        if calls:
            history = [*history, {"role": "assistant", "content": None, "tool_calls": calls}]
            history += [{"role": "tool", "tool_call_id": call["id"], "content": text}
                        for call, text in zip(calls, results, strict=True)]  # fmt: skip
            found.append(history)
        history = [*history, {"role": "assistant", "content": answer}]
    return found


@pytest.mark.parametrize("options", [{}, {"rewrite": True}], ids=["grows", "rewrites"])
def test_a_new_builder_makes_the_same_request_as_a_running_one(options: dict[str, Any]) -> None:
    @given(turns=TURNS)
    def check(turns: list[tuple[str, list[str], str]]) -> None:
        with coatcheck.open("memory:", clock=Clock()) as store:
            session = store.session("s", ttl=None)

            def new() -> PromptBuilder:
                budget = Budget(max_prompt_tokens=6_000)
                return PromptBuilder(
                    session, provider="openai", tools=toolkit(session), budget=budget, **options
                )

            running = new()
            for history in _conversation(turns):
                requests = [_request(one, history) for one in (running, new())]
                assert requests[0] == requests[1]

    check()


def _request(builder: PromptBuilder, history: Sequence[dict[str, Any]]) -> Any:
    try:
        return json.dumps(builder.build(history).request())
    except BudgetExceeded as error:
        return error.code
