"""Tests that every adapter must pass: one scripted conversation after another, through a real agent
of the framework.

An adapter provides a `Driver`, which runs an agent with a scripted model and plain functions as
tools, with or without Coatcheck. This module imports no framework.

    class MyDriver(Driver):
        lacks = {"hand_off": "the framework has a single agent"}

        def run(self, scenario):
            agent = Agent(model_of(scenario.model), tools=[tool_of(one) for one in scenario.tools])
            if scenario.store is not None:
                agent.add(Coatcheck(scenario.store, policy=scenario.policy))
            return Run(scenario.model, final=agent.run(scenario.prompt),
            persisted=agent.history_json())

    class TestMyAdapter(AdapterSuite):
        def driver(self):
            return MyDriver()

The driver's model calls `scenario.model.respond(messages, tools, results)` for each request, and
does what the returned `ScriptedTurn` says. Sync, async and streaming runs are three drivers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, cast, get_args

import pytest
from pydantic import BaseModel

import coatcheck
from coatcheck import Limit, Policy, Session, Store, ToolCall, is_pointer, toolkit
from coatcheck.models import ANY_PROVIDER
from coatcheck.parts import Part
from coatcheck.testing.suite import Suite
from coatcheck.tokens import estimate

Ability = Literal[
    "approval",  # the host must approve a call before it runs
    "cancellation",  # a tool can be cancelled by the host
    "deletion",  # the host can delete a conversation, and the adapter learns of it
    "file",  # a tool can return a file
    "final_answer",  # a tool's result can end the run
    "hand_off",  # an agent can hand the conversation over to another
    "offloader",  # the framework has an offloader of its own
    "parallel",  # a model can call several tools in one turn
    "persistence",  # the framework saves what happened
    "picture",  # a tool can return a picture
    "private",  # a conversation may have no id
    "retry",  # a tool can ask the model to try again
    "sub_agent",  # a tool can be another agent
]

Ask = tuple[str, Mapping[str, Any]]
"""A call that the model makes: the tool's name, and the arguments."""


@dataclass(frozen=True, kw_only=True)
class SeenResult:
    """What the model got for one call: all of its text, and the bytes of pictures and files that
    were sent."""

    id: str
    name: str
    text: str
    is_error: bool = False
    media: tuple[bytes, ...] = ()


Step = str | list[Ask] | Callable[[Sequence[SeenResult]], str | list[Ask]]
"""One turn of the model: a final text, calls, or a function of the results so far that returns one
of the two."""


@dataclass(frozen=True)
class ScriptedTurn:
    """What the model answers: calls, or a final text."""

    calls: tuple[ToolCall, ...] = ()
    text: str = ""


class ScriptedModel:
    """A model that follows a script, and records what it was sent. After the last step it answers
    "Done."."""

    def __init__(self, *script: Step, ids: str = "call") -> None:
        self.requests: list[dict[str, Any]] = []
        self.results: list[SeenResult] = []
        self._script = list(script)
        self._ids = ids
        self._calls = 0

    def respond(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]],
        results: Sequence[SeenResult] = (),
    ) -> ScriptedTurn:
        """Answer a request.

        `messages` is the request in JSON, as the framework would send it to a provider: the
        instructions, if any, the user's messages, calls and results, without times and other values
        that differ between runs. `tools` has a name, a description and parameters for each tool, in
        the order of the request. `results` are the results in the messages, in their order."""
        described = [
            {key: tool[key] for key in ("name", "description", "parameters")} for tool in tools
        ]
        self.requests.append(
            json.loads(json.dumps({"messages": list(messages), "tools": described}))
        )
        self.results = list(results)
        step: Any = self._script.pop(0) if self._script else "Done."
        answer = step(self.results) if callable(step) else step
        if isinstance(answer, str):
            return ScriptedTurn(text=answer)
        return ScriptedTurn(
            calls=tuple(ToolCall(self._next_id(), name, arguments) for name, arguments in answer)
        )

    def _next_id(self) -> str:
        self._calls += 1
        return f"{self._ids}_{self._calls}"


@dataclass(frozen=True, kw_only=True)
class Colleague:
    """Another agent: a tool of the first one, or one that takes over the conversation."""

    name: str
    model: ScriptedModel
    tools: Sequence[Callable[..., Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One run. Without a `store`, it is a run without Coatcheck.

    `conversation` is the host's id, or None if the host has none. `agents` are tools of the agent,
    which run the other agent with Coatcheck too and return its final text. `hand_off` is an agent
    that takes over. `approvals` names tools that the host approves: it is asked, the event
    "approval: <tool>" is noted, and it agrees. The result of a tool in `final` is the run's final
    text. With `offloader`, the framework's own offloader is turned on. `shared` are further tools
    of the agent: objects that `Driver.shared_tool` has made, which other runs have too. A `Session`
    in place of the store serves every conversation."""

    model: ScriptedModel
    tools: Sequence[Callable[..., Any]] = ()
    shared: Sequence[Any] = ()
    store: Store | Session | None = None
    policy: Policy | None = None
    conversation: str | None = "conversation"
    prompt: str = "Begin."
    agents: Sequence[Colleague] = ()
    hand_off: Colleague | None = None
    approvals: frozenset[str] = frozenset()
    final: frozenset[str] = frozenset()
    offloader: bool = False


@dataclass(frozen=True)
class Run:
    """The outcome of a scenario: the final text, the exception that ended the run, what the
    framework saved of the conversation, and what the host was notified of, as "approval: <tool>"
    and "hand_off: <agent>"."""

    model: ScriptedModel
    final: str = ""
    error: BaseException | None = None
    persisted: bytes = b""
    events: tuple[str, ...] = ()

    @property
    def requests(self) -> list[dict[str, Any]]:
        return self.model.requests

    @property
    def results(self) -> list[SeenResult]:
        """The results in the last request."""
        return self.model.results


class Driver(ABC):
    """Runs scenarios with one framework, in one way: sync, async or streaming."""

    lacks: ClassVar[Mapping[Ability, str]] = {}
    """What the framework cannot do, with the reason. The suite skips and reports what depends on
    it."""

    @abstractmethod
    def run(self, scenario: Scenario) -> Run:
        """Run a scenario. An exception that ends the run is returned, not raised."""

    def shared_tool(self, function: Callable[..., Any]) -> Any:
        """Return what a module defines once for the agents of all users: the framework's own object
        for a tool, or the function itself if the framework takes functions."""
        return function

    def content(self, parts: Sequence[Part]) -> Any:
        """Return what a tool of this framework returns for a text, a picture or a file, or several
        of them."""
        raise NotImplementedError(
            "define content, or declare that the framework lacks picture and file"
        )

    def retry(self, text: str) -> Exception:
        """Return what a tool raises to make the model try again."""
        raise NotImplementedError("define retry, or declare that the framework lacks it")

    def delegate(self, agent: str, text: str) -> Ask:
        """Return the call with which the model gives a task to one of `Scenario.agents`."""
        return agent, {"task": text}

    def transfer(self, agent: str) -> Ask:
        """Return the call with which the model hands over to `Scenario.hand_off`."""
        raise NotImplementedError("define transfer, or declare that the framework lacks hand_off")

    def delete(self, store: Store, conversation: str) -> None:
        """Delete a conversation, as the host does."""
        raise NotImplementedError("define delete, or declare that the framework lacks deletion")


# What the tools return


def _log_text() -> str:
    pick = random.Random(7)
    words = (
        "queue",
        "cache",
        "index",
        "login",
        "billing",
        "search",
        "upload",
        "worker",
        "session",
        "report",
    )
    lines = [
        f"2026-11-17T{n // 3600:02}:{n // 60 % 60:02}:{n % 60:02}Z INFO {pick.choice(words)} {pick.choice(words)} "
        f"request {pick.randrange(10**9):09} took {pick.randrange(9000)} ms"
        for n in range(3_520)
    ]
    lines[1_700] = "2026-11-17T00:28:20Z ERROR payment refused by the bank: code 4711"
    return "\n".join(lines)


LOG: Final = _log_text()
"""A log of about 248 KB."""

ROWS: Final[list[dict[str, Any]]] = [
    {"id": n, "name": f"customer {n}", "city": f"city {n % 97}", "total": n * 7 % 1_000}
    for n in range(3_000)
]
_ERROR: Final = "the payload was refused:\n" + "\n".join(
    f"field {n}: value {n * 17} is invalid" for n in range(1_800)
)
_MOST: Final = 12_000  # characters of a bounded text
_WAIT: Final = (
    0.2  # seconds for the calls of a turn to meet, in frameworks that run them side by side
)
_LAST_REQUEST: Final = 3_000  # tokens
_RUN_OF_PAYLOAD: Final = 1_024


class CustomerRow(BaseModel):
    """One row of a table."""

    id: int
    name: str
    city: str
    total: int


class NestedOrder(BaseModel):
    """An object with other objects inside."""

    title: str
    rows: list[CustomerRow]
    notes: list[str]


def fetch_log() -> str:
    """Fetch the log of the last run."""
    return LOG


def fetch_rows() -> list[dict[str, Any]]:
    """Fetch the rows of the table."""
    return ROWS


def fetch_mail(user: str) -> str:
    """Fetch the mail of a user."""
    return _mail_of(user)


def _mail_of(user: str) -> str:
    return "\n".join(f"message {number} to {user}" for number in range(5_000))


def greet(name: str) -> str:
    """Greet a person."""
    return f"Hello, {name}! \u00fc \u2028 \\ \" '"


def fail_at_length(name: str) -> str:
    """Fail with a long text."""
    raise ValueError(_ERROR)


def fail_briefly(name: str) -> str:
    """Fail with a short text."""
    raise ValueError(f"there is nobody called {name}")


class _Received:
    """Tools that note their arguments."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def tools(self) -> list[Callable[..., Any]]:
        def count_lines(text: str) -> str:
            """Count the lines of a text."""
            self.values.append(text)
            return f"{text.count(chr(10)) + 1} lines"

        def count_rows(rows: list[CustomerRow]) -> str:
            """Count the rows of a table."""
            self.values.append(_plain(rows))
            return f"{len(rows)} rows"

        def place_order(order: NestedOrder, labels: list[str]) -> str:
            """Place an order."""
            self.values.append((_plain(order), labels))
            return "placed"

        return [count_lines, count_rows, place_order]


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _picture(width: int = 200, height: int = 150, *, noisy: int = 150) -> bytes:
    """A PNG with random pixels in its first `noisy` rows, and a plain background below."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        )

    noise = random.Random(3)
    rows = b"".join(b"\0" + noise.randbytes(width * 3) for _ in range(noisy))
    rows += (b"\0" + b"\xf0" * width * 3) * (height - noisy)
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes((8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows, 1))
        + chunk(b"IEND", b"")
    )


# What the tests look at


def pointer_in(text: str) -> str:
    """Return the pointer of the stub in a text."""
    found = re.search(r'"artifact":\s*"(art:[0-9a-f]{12,64})"', text.replace('\\"', '"'))
    assert found, f"no stub in {text[:300]!r}"
    return found[1]


def _last_pointer(results: Sequence[SeenResult]) -> str:
    return pointer_in(results[-1].text)


def _call(tool: str, argument: str, suffix: str = "", which: int = -1, **others: Any) -> Step:
    """A call with the pointer of an earlier result as one of its arguments."""

    def step(results: Sequence[SeenResult]) -> list[Ask]:
        return [(tool, {argument: pointer_in(results[which].text) + suffix, **others})]

    return step


def _tour(received: _Received) -> tuple[list[Step], list[Callable[..., Any]]]:
    """The conversation that every adapter was first tried with: seven turns, two large results, one
    dead pointer."""
    script: list[Step] = [
        [("fetch_log", {})],
        _call("get_artifact", "pointer", grep="ERROR"),
        _call("count_lines", "text", which=0),
        [("fetch_rows", {})],
        _call("count_rows", "rows", which=3),
        [("count_lines", {"text": "art:000000000000"})],
    ]
    return script, [fetch_log, fetch_rows, *received.tools()]


def _mail_script(user: str) -> list[Step]:
    """A user's agent fetches the mail, reads it back and lists what there is."""
    read = _call("get_artifact", "pointer", lines="1:1")
    return [[("fetch_mail", {"user": user})], read, [("list_artifacts", {})]]


def _check_mail(run: Run, user: str) -> None:
    """The user has read their own mail, and the list has nothing else."""
    assert f"message 0 to {user}" in run.results[1].text
    listed = run.results[2].text
    assert listed.count("art:") == 1
    assert f"to {user}" in listed


def _meet(barrier: threading.Barrier) -> None:
    """Wait for the other calls, unless this framework runs one call after the other."""
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(_WAIT)


@functools.cache
def _descriptions() -> dict[str, dict[str, Any]]:
    with coatcheck.open("memory:") as store:
        tools = toolkit(store.session("descriptions"))
        return {
            tool.description: {"name": tool.name, "parameters": dict(tool.parameters)}
            for tool in tools
        }


def _ours(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Our tools in a request, by their descriptions."""
    return [tool for tool in request["tools"] if tool["description"] in _descriptions()]


def _theirs(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [tool for tool in request["tools"] if tool["description"] not in _descriptions()]


def _kept_whole(text: str, payload: str) -> bool:
    """Whether a text has a run of 1 KB of a payload, as it is or escaped once or twice."""
    step = _RUN_OF_PAYLOAD // 2
    escaped = payload.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    forms = (payload, escaped, escaped.replace("\\", "\\\\"))
    return any(
        form[at : at + step] in text for form in forms for at in range(0, len(form) - step, step)
    )


def _check_prefixes(requests: Sequence[Mapping[str, Any]]) -> None:
    for before, after in itertools.pairwise(requests):
        earlier, later = (
            [json.dumps(one) for one in request["messages"]] for request in (before, after)
        )
        assert later[: len(earlier)] == earlier
        assert json.dumps(before["tools"]) == json.dumps(after["tools"])


def _stub(text: str) -> dict[str, Any]:
    assert "\n" not in text, "a stub is one line"
    stub = json.loads(text)
    assert isinstance(stub, dict)
    assert next(iter(stub)) == "stub"
    return stub


@dataclass
class _Stage:
    """The drivers and stores of one test."""

    suite: AdapterSuite
    folder: Path
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.driver = self.suite.driver()

    def store(self, **options: Any) -> Store:
        """The test's store, opened again with each call, as in another process."""
        return self._open.enter_context(coatcheck.open(self.folder, **options))

    def play(
        self,
        *script: Step,
        tools: Sequence[Callable[..., Any]] = (),
        store: Store | Session | None = None,
        may_fail: bool = False,
        ids: str = "call",
        **scenario: Any,
    ) -> Run:
        """Run a script with a new driver, as a process that has just started does. An error that
        ends the run is raised unless it `may_fail`."""
        model = ScriptedModel(*script, ids=ids)
        run = self.suite.driver().run(
            Scenario(model=model, tools=tuple(tools), store=store, **scenario)
        )
        if run.error is not None and not may_fail:
            raise run.error
        return run

    def needs(self, *abilities: Ability) -> None:
        """Skip the test if the framework cannot do something, and report the reason that the driver
        declares."""
        for ability in abilities:
            if reason := self.driver.lacks.get(ability):
                pytest.skip(f"{type(self.driver).__name__} lacks {ability}: {reason}")

    def close(self) -> None:
        self._open.close()


class AdapterSuite(Suite, suite=True):
    """Subclass it and define `driver`. What a framework cannot do is declared in `Driver.lacks`."""

    def driver(self) -> Driver:
        raise NotImplementedError("define driver to create a driver for your framework")

    @pytest.fixture
    def stage(self, tmp_path: Path) -> Iterator[_Stage]:
        stage = _Stage(self, tmp_path / "store")
        yield stage
        stage.close()

    def test_what_a_framework_lacks_is_declared_with_a_reason(self, stage: _Stage) -> None:
        assert set(stage.driver.lacks) <= set(get_args(Ability))
        assert all(len(reason) > 10 for reason in stage.driver.lacks.values())

    # 1

    def test_small_results_are_the_same_bytes_and_only_the_list_of_tools_differs(
        self, stage: _Stage
    ) -> None:
        def facts(name: str) -> dict[str, Any]:
            """Return facts about a person."""
            return {"name": name, "age": 41, "scores": [1.5, None, True], "note": "ü"}

        def nothing(name: str) -> None:
            """Do nothing."""

        script: list[Step] = [
            [("greet", {"name": "Ada"})],
            [("facts", {"name": "Ada"})],
            [("nothing", {"name": "x"})],
        ]
        tools = [greet, facts, nothing]
        without = stage.play(*script, tools=tools)
        run = stage.play(*script, tools=tools, store=stage.store())
        assert run.results == without.results
        assert [one["messages"] for one in run.requests] == [
            one["messages"] for one in without.requests
        ]
        assert [_theirs(one) for one in run.requests] == [one["tools"] for one in without.requests]
        assert len(run.results) == 3
        assert (run.final, run.error) == (without.final, None)

    # 2

    def test_a_large_result_is_a_stub_at_once_and_reads_back_exactly(self, stage: _Stage) -> None:
        store = stage.store()
        run = stage.play(
            [("fetch_log", {})], [("greet", {"name": "Ada"})], tools=[fetch_log, greet], store=store
        )
        stub = _stub(run.results[0].text)
        assert stub["size_bytes"] == len(LOG.encode())
        found = store.find(stub["artifact"])
        assert found is not None
        assert found[0].get(stub["artifact"]) == LOG
        assert not any(_kept_whole(json.dumps(request), LOG) for request in run.requests)
        assert (run.final, run.error) == ("Done.", None)

    def test_a_conversation_with_large_results_stays_small(self, stage: _Stage) -> None:
        received = _Received()
        script, tools = _tour(received)
        run = stage.play(*script, tools=tools, store=stage.store())
        texts = [one.text for one in run.results]
        assert "code 4711" in texts[1]
        assert "3520 lines" in texts[2]
        assert "3000 rows" in texts[4]
        assert "art:000000000000" in texts[5]
        assert received.values == [LOG, ROWS]
        assert estimate(json.dumps(run.requests[-1], ensure_ascii=False)) < _LAST_REQUEST
        assert (run.final, run.error) == ("Done.", None)

    # 3

    def test_rows_are_stored_as_rows(self, stage: _Stage) -> None:
        store, received = stage.store(), _Received()
        script: list[Step] = [
            [("fetch_rows", {})],
            _call("count_rows", "rows"),
            _call("count_lines", "text", "#/7/name", which=0),
        ]
        run = stage.play(*script, tools=[fetch_rows, *received.tools()], store=store)
        pointer = pointer_in(run.results[0].text)
        found = store.find(pointer)
        assert found is not None
        value = found[0].get(pointer)  # in some frameworks, what tools return is a text
        assert (json.loads(value) if isinstance(value, str) else value) == ROWS
        assert found[0].get(pointer + "#/7/name") == "customer 7"
        assert received.values == [ROWS, "customer 7"]

    # 4

    def test_our_tools_are_described_as_in_the_toolkit_from_the_first_request_on(
        self, stage: _Stage
    ) -> None:
        run = stage.play([("greet", {"name": "Ada"})], tools=[greet], store=stage.store())
        assert len(run.requests) == 2
        for request in run.requests:
            ours = {tool["name"]: tool for tool in _ours(request)}
            wanted = {
                about["name"]: (text, about["parameters"])
                for text, about in _descriptions().items()
            }
            assert {
                name: (tool["description"], tool["parameters"]) for name, tool in ours.items()
            } == wanted
            assert [tool["name"] for tool in _theirs(request)] == ["greet"]

    def test_a_clash_of_names_gives_ours_a_prefix_and_stubs_use_it(self, stage: _Stage) -> None:
        def get_artifact(pointer: str) -> str:
            """Return an artifact of the museum."""
            return f"an amphora, inventory number {pointer}"

        names: dict[str, str] = {}

        def read(results: Sequence[SeenResult]) -> list[Ask]:
            names.update({tool["description"]: tool["name"] for tool in _ours(model.requests[-1])})
            return [
                (
                    names[next(iter(_descriptions()))],
                    {"pointer": _last_pointer(results), "lines": "1:2"},
                )
            ]

        model = ScriptedModel([("fetch_log", {})], read, [("get_artifact", {"pointer": "17"})])
        scenario = Scenario(model=model, tools=(fetch_log, get_artifact), store=stage.store())
        run = stage.suite.driver().run(scenario)
        assert run.error is None
        reader = names[next(iter(_descriptions()))]
        assert reader != "get_artifact"
        assert reader.endswith("get_artifact")
        assert len(set(names.values())) == 3
        assert reader in _stub(run.results[0].text)["hint"]
        assert LOG[:40] in run.results[1].text
        assert run.results[2].text.endswith("an amphora, inventory number 17")

    # 5

    def test_what_our_tools_answer_is_not_externalized_again(self, stage: _Stage) -> None:
        store = stage.store()
        script: list[Step] = [[("fetch_log", {})], _call("get_artifact", "pointer", lines="1:80")]
        run = stage.play(*script, tools=[fetch_log], store=store, policy=Policy(max_chars=600))
        assert len(run.results[1].text) > 3_000
        assert LOG[:1_000] in run.results[1].text

    def test_answers_and_stubs_of_another_part_of_coatcheck_stay_as_they_are(
        self, stage: _Stage
    ) -> None:
        store = stage.store()
        elsewhere = store.session("elsewhere")
        stub = elsewhere.externalize(LOG, tool="fetch_log")
        page = toolkit(elsewhere)[0].run(pointer=stub.refs[0].pointer, lines="1:80")

        def proxied_page(name: str) -> str:
            """Return a page that the proxy has bounded."""
            return page

        def proxied_stub(name: str) -> str:
            """Return a stub that the proxy has made."""
            return stub.text

        script: list[Step] = [[("proxied_page", {"name": "a"})], [("proxied_stub", {"name": "a"})]]
        options: dict[str, Any] = {
            "tools": [proxied_page, proxied_stub],
            "policy": Policy(max_chars=300),
        }
        run = stage.play(*script, store=store, **options)
        without = stage.play(*script, tools=options["tools"])
        assert [one.text for one in run.results] == [one.text for one in without.results]

    def test_the_offloader_of_the_framework_leaves_our_stubs_and_pages(self, stage: _Stage) -> None:
        stage.needs("offloader")
        script: list[Step] = [[("fetch_log", {})], _call("get_artifact", "pointer", lines="1:80")]
        run = stage.play(*script, tools=[fetch_log], store=stage.store(), offloader=True)
        assert _stub(run.results[0].text)["size_bytes"] == len(LOG.encode())
        assert LOG[:1_000] in run.results[1].text

    # 6

    def test_pointers_are_resolved_in_strings_lists_and_objects(self, stage: _Stage) -> None:
        received = _Received()

        def order(results: Sequence[SeenResult]) -> list[Ask]:
            rows, log = pointer_in(results[0].text), pointer_in(results[1].text)
            asked = {"title": rows + "#/3/city", "rows": rows, "notes": [log, "a note"]}
            return [("place_order", {"order": asked, "labels": [rows + "#/5/name", "urgent"]})]

        script: list[Step] = [[("fetch_rows", {})], [("fetch_log", {})], order]
        run = stage.play(
            *script, tools=[fetch_rows, fetch_log, *received.tools()], store=stage.store()
        )
        expected = {"title": "city 3", "rows": ROWS, "notes": [LOG, "a note"]}
        assert received.values == [(expected, ["customer 5", "urgent"])]
        assert run.results[-1].text.endswith("placed")

    def test_a_text_that_mentions_a_pointer_is_a_text(self, stage: _Stage) -> None:
        received, sent = _Received(), []

        def mention(results: Sequence[SeenResult]) -> list[Ask]:
            sent.append(f"please read {_last_pointer(results)} first")
            return [("count_lines", {"text": sent[0]})]

        stage.play(
            [("fetch_log", {})], mention, tools=[fetch_log, *received.tools()], store=stage.store()
        )
        assert received.values == sent

    # 7

    def test_pointers_that_lead_nowhere_are_answered_in_words(self, stage: _Stage) -> None:
        received = _Received()
        dead = [f"art:{number:012x}" for number in range(1, 5)]
        script: list[Step] = [[("count_lines", {"text": pointer})] for pointer in dead]
        script.append([("count_lines", {"text": "one\ntwo"})])
        run = stage.play(*script, tools=received.tools(), store=stage.store())
        assert [pointer in one.text for pointer, one in zip(dead, run.results, strict=False)] == [
            True
        ] * 4
        assert all(len(one.text) < 2_000 for one in run.results)
        assert received.values == ["one\ntwo"]
        assert "2 lines" in run.results[-1].text
        assert (len(run.results), run.final, run.error) == (5, "Done.", None)

    # 8

    def test_arguments_stay_pointers_and_no_payload_is_persisted(self, stage: _Stage) -> None:
        received = _Received()
        script, tools = _tour(received)
        run = stage.play(*script, tools=tools, store=stage.store())
        assert received.values == [LOG, ROWS]
        sent = json.dumps(run.requests[-1])
        rows = json.dumps(ROWS)
        for pointer in (pointer_in(run.results[0].text), pointer_in(run.results[3].text)):
            assert sent.count(pointer) > 2  # in the stub, its hint and the call
        assert not any(_kept_whole(sent, payload) for payload in (LOG, rows, rows.replace(" ", "")))
        stage.needs("persistence")
        saved = run.persisted.decode("utf-8", "replace")
        assert pointer_in(run.results[0].text) in saved
        assert not any(
            _kept_whole(saved, payload) for payload in (LOG, rows, rows.replace(" ", ""), str(ROWS))
        )

    # 9

    def test_each_request_begins_with_the_one_before(self, stage: _Stage) -> None:
        script, tools = _tour(_Received())
        run = stage.play(*script, tools=tools, store=stage.store())
        assert len(run.requests) == 7
        _check_prefixes(run.requests)

    def test_two_processes_on_one_store_send_the_same_bytes(self, stage: _Stage) -> None:
        script, tools = _tour(_Received())
        run = stage.play(*script, tools=tools, store=stage.store())
        test = type(stage.suite)
        source = f"from {__name__} import print_tour; import sys; print_tour(*sys.argv[1:])"
        command = [
            sys.executable,
            "-c",
            source,
            inspect.getfile(test),
            test.__qualname__,
            str(stage.folder),
        ]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONHASHSEED": "17",
        }
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert child.returncode == 0, child.stderr[-3_000:]
        assert child.stdout.splitlines()[-1] == json.dumps(run.requests)

    # 10

    def test_a_tool_that_fails_briefly_fails_as_it_did(self, stage: _Stage) -> None:
        script: list[Step] = [[("fail_briefly", {"name": "Ada"})]]
        without = stage.play(*script, tools=[fail_briefly], may_fail=True)
        run = stage.play(*script, tools=[fail_briefly], store=stage.store(), may_fail=True)
        assert run.results == without.results
        assert (type(run.error), str(run.error)) == (type(without.error), str(without.error))
        assert run.final == without.final

    def test_a_tool_that_fails_at_length_fails_with_a_bounded_text(self, stage: _Stage) -> None:
        script: list[Step] = [[("fail_at_length", {"name": "Ada"})]]
        without = stage.play(*script, tools=[fail_at_length], may_fail=True)
        run = stage.play(*script, tools=[fail_at_length], store=stage.store(), may_fail=True)
        assert type(run.error) is type(without.error)
        assert run.final == without.final
        assert len(run.results) == len(without.results)
        for now, before in zip(run.results, without.results, strict=True):
            assert (now.id, now.name, now.is_error) == (before.id, before.name, before.is_error)
            assert len(now.text) < _MOST
            assert ("payload was refused" in now.text) is ("payload was refused" in before.text)

    # 11

    def test_an_approval_is_asked_for_and_the_call_runs_after_it(self, stage: _Stage) -> None:
        stage.needs("approval")
        script: list[Step] = [[("fetch_log", {})], _call("count_lines", "text")]
        received = _Received()
        options: dict[str, Any] = {
            "tools": [fetch_log, *received.tools()],
            "approvals": frozenset({"count_lines"}),
        }
        run = stage.play(*script, store=stage.store(), **options)
        assert run.events == ("approval: count_lines",)
        assert received.values == [LOG]
        assert "3520 lines" in run.results[-1].text
        assert (run.final, run.error) == ("Done.", None)

    def test_a_tool_that_asks_for_a_retry_is_tried_again(self, stage: _Stage) -> None:
        stage.needs("retry")

        def played(store: Store | None) -> Run:
            tries: list[str] = []

            def guess(name: str) -> str:
                """Guess the name."""
                tries.append(name)
                if len(tries) == 1:
                    raise stage.driver.retry("it begins with B")
                return f"right, {name}"

            return stage.play(
                [("guess", {"name": "Ada"})],
                [("guess", {"name": "Bob"})],
                tools=[guess],
                store=store,
            )

        run, without = played(stage.store()), played(None)
        assert run.results == without.results
        assert "right, Bob" in run.results[-1].text
        assert (run.final, run.error) == ("Done.", None)

    def test_a_hand_off_passes_and_the_other_agent_opens_the_pointer(self, stage: _Stage) -> None:
        stage.needs("hand_off")
        pointers: list[str] = []

        def transfer(results: Sequence[SeenResult]) -> list[Ask]:
            pointers.append(_last_pointer(results))
            return [stage.driver.transfer("specialist")]

        other = ScriptedModel(
            lambda _: [("get_artifact", {"pointer": pointers[0], "grep": "ERROR"})],
            "Handed over.",
            ids="other",
        )
        run = stage.play(
            [("fetch_log", {})],
            transfer,
            tools=[fetch_log],
            store=stage.store(),
            hand_off=Colleague(name="specialist", model=other, tools=(greet,)),
        )
        assert "hand_off: specialist" in run.events
        assert "code 4711" in other.results[-1].text
        assert (run.final, run.error) == ("Handed over.", None)

    def test_a_cancelled_tool_cancels_the_run_as_it_did(self, stage: _Stage) -> None:
        stage.needs("cancellation")

        def cancelled(name: str) -> str:
            """Be cancelled."""
            raise asyncio.CancelledError

        script: list[Step] = [[("cancelled", {"name": "Ada"})]]
        without = stage.play(*script, tools=[cancelled], may_fail=True)
        run = stage.play(*script, tools=[cancelled], store=stage.store(), may_fail=True)
        assert type(run.error) is type(without.error)
        assert (run.results, run.final) == (without.results, without.final)

    def test_a_result_that_ends_the_run_is_whole(self, stage: _Stage) -> None:
        stage.needs("final_answer")
        run = stage.play(
            [("fetch_log", {})],
            tools=[fetch_log],
            store=stage.store(),
            final=frozenset({"fetch_log"}),
        )
        assert run.final == LOG
        assert run.error is None

    # 12

    def test_a_picture_beside_a_long_text_is_sent(self, stage: _Stage) -> None:
        stage.needs("picture")
        picture = _picture()

        def look(name: str) -> Any:
            """Take a picture of the screen."""
            return stage.driver.content([Part(LOG), Part("", "image/png", picture)])

        store = stage.store()
        run = stage.play([("look", {"name": "screen"})], tools=[look], store=store)
        assert run.results[0].media == (picture,)
        pointer = pointer_in(run.results[0].text)
        found = store.find(pointer)
        assert found is not None
        assert found[0].get(pointer) == LOG
        assert len(run.results[0].text) < _MOST
        assert run.error is None

    def test_a_picture_alone_is_the_same_as_without_coatcheck(self, stage: _Stage) -> None:
        stage.needs("picture")
        picture = _picture()

        def look(name: str) -> Any:
            """Take a picture of the screen."""
            return stage.driver.content([Part("", "image/png", picture)])

        without = stage.play([("look", {"name": "screen"})], tools=[look])
        run = stage.play([("look", {"name": "screen"})], tools=[look], store=stage.store())
        assert run.results == without.results
        assert run.results[0].media == (picture,)

    def test_a_screenshot_with_a_large_file_is_the_same_as_without_coatcheck(
        self, stage: _Stage
    ) -> None:
        stage.needs("picture")
        screenshot = _picture(1_280, 800, noisy=73)
        assert len(screenshot) > 270_000

        def look(name: str) -> Any:
            """Take a picture of the screen."""
            return stage.driver.content([Part("", "image/png", screenshot)])

        without = stage.play([("look", {"name": "screen"})], tools=[look])
        run = stage.play([("look", {"name": "screen"})], tools=[look], store=stage.store())
        assert run.results == without.results
        assert run.results[0].media == (screenshot,)

    def test_a_picture_over_the_limit_of_providers_is_still_a_picture(self, stage: _Stage) -> None:
        stage.needs("picture")
        picture = _picture(2_000, 1_600, noisy=1_000)
        assert len(picture) > 6_000_000

        def look(name: str) -> Any:
            """Take a picture of the screen."""
            return stage.driver.content([Part("", "image/png", picture)])

        run = stage.play([("look", {"name": "screen"})], tools=[look], store=stage.store())
        (seen,) = run.results[0].media
        if importlib.util.find_spec("PIL") is None:
            assert seen == picture
        else:
            assert seen.startswith(b"\xff\xd8\xff")  # a JPEG
            assert len(seen) <= ANY_PROVIDER.max_bytes
        assert run.error is None

    def test_a_large_file_is_a_stub(self, stage: _Stage) -> None:
        stage.needs("file")
        data = b"%PDF-1.7\n" + random.Random(5).randbytes(5_000_000)

        def download(name: str) -> Any:
            """Download a file."""
            return stage.driver.content([Part("", "application/pdf", data)])

        store = stage.store()
        run = stage.play([("download", {"name": "report"})], tools=[download], store=store)
        pointer = pointer_in(run.results[0].text)
        found = store.find(pointer)
        assert found is not None
        assert found[0].get(pointer) == data
        assert run.results[0].media == ()
        assert len(json.dumps(run.requests[-1])) < _MOST

    # 13

    def test_calls_at_once_keep_their_order_and_ids(self, stage: _Stage) -> None:
        stage.needs("parallel")
        together = threading.Barrier(8)

        def part(number: int) -> str:
            """Return a part of the log."""
            _meet(together)
            return f"part {number}\n{LOG}"

        store = stage.store()
        run = stage.play(
            [("part", {"number": number}) for number in range(8)], tools=[part], store=store
        )
        assert [(one.id, one.name) for one in run.results] == [
            (f"call_{number}", "part") for number in range(1, 9)
        ]
        for number, one in enumerate(run.results):
            found = store.find(pointer_in(one.text))
            assert found is not None
            assert found[0].get(pointer_in(one.text)) == f"part {number}\n{LOG}"

    def test_calls_at_once_in_a_conversation_without_an_id_share_one_session(
        self, stage: _Stage
    ) -> None:
        stage.needs("parallel", "private")

        def part(number: int) -> str:
            """Return a part of the log."""
            return f"part {number}\n{LOG}"

        def read_all(results: Sequence[SeenResult]) -> list[Ask]:
            return [
                ("get_artifact", {"pointer": pointer_in(one.text), "lines": "1:1"})
                for one in results
            ]

        calls: list[Ask] = [("part", {"number": number}) for number in range(8)]
        for _ in range(4):  # which call is the first varies
            run = stage.play(calls, read_all, tools=[part], store=stage.store(), conversation=None)
            pages = [one.text for one in run.results[8:]]
            opened = [
                number for number in range(8) if any(f"part {number}" in page for page in pages)
            ]
            assert opened == [*range(8)]

    # 14

    def test_a_pointer_opens_in_a_sub_agent(self, stage: _Stage) -> None:
        stage.needs("sub_agent")
        pointers: list[str] = []

        def delegate(results: Sequence[SeenResult]) -> list[Ask]:
            pointers.append(_last_pointer(results))
            return [stage.driver.delegate("reader", f"Find the error in {pointers[0]}")]

        child = ScriptedModel(
            lambda _: [("get_artifact", {"pointer": pointers[0], "grep": "ERROR"})],
            lambda results: f"It was: {results[-1].text[-200:]}",
            ids="child",
        )
        agents = (Colleague(name="reader", model=child, tools=(greet,)),)
        run = stage.play(
            [("fetch_log", {})], delegate, tools=[fetch_log], store=stage.store(), agents=agents
        )
        assert "code 4711" in child.results[-1].text
        assert "code 4711" in run.results[-1].text

    @pytest.mark.parametrize("conversation", ["conversation", None])
    def test_a_pointer_of_a_sub_agent_opens_in_its_parent(
        self, stage: _Stage, conversation: str | None
    ) -> None:
        stage.needs("sub_agent", *(("private",) if conversation is None else ()))
        child = ScriptedModel(
            [("fetch_log", {})],
            lambda results: f"The log is {_last_pointer(results)} .",
            ids="child",
        )

        def read(results: Sequence[SeenResult]) -> list[Ask]:
            pointer = next(
                word for word in re.split(r"[\s\"\\]+", results[-1].text) if is_pointer(word)
            )
            return [("get_artifact", {"pointer": pointer, "grep": "ERROR"})]

        run = stage.play(
            [stage.driver.delegate("fetcher", "Fetch the log")],
            read,
            tools=[greet],
            store=stage.store(),
            conversation=conversation,
            agents=(Colleague(name="fetcher", model=child, tools=(fetch_log,)),),
        )
        assert "code 4711" in run.results[-1].text

    @pytest.mark.parametrize("conversations", [("one", "another"), (None, None)])
    def test_conversations_share_nothing(
        self, stage: _Stage, conversations: tuple[str | None, str | None]
    ) -> None:
        if None in conversations:
            stage.needs("private")
        store = stage.store()
        first = stage.play(
            [("fetch_log", {})], tools=[fetch_log], store=store, conversation=conversations[0]
        )
        pointer = pointer_in(first.results[0].text)
        read: Ask = ("get_artifact", {"pointer": pointer, "grep": "ERROR"})
        second = stage.play([read], tools=[fetch_log], store=store, conversation=conversations[1])
        assert "4711" not in second.results[-1].text
        assert pointer in second.results[-1].text

    @pytest.mark.parametrize("apart", ["conversations", "sessions", "stores"])
    def test_users_whose_agents_share_a_tool_share_nothing_else(
        self, stage: _Stage, apart: str
    ) -> None:
        tool = stage.driver.shared_tool(fetch_mail)
        store = stage.store()
        with coatcheck.open("memory:") as other:
            for user in ("ada", "bob", "ada"):
                options: dict[str, Any] = {"store": store}
                if apart == "conversations":
                    options["conversation"] = f"of {user}"
                elif apart == "sessions":
                    options["store"] = store.session(f"of {user}")
                elif user == "bob":
                    options["store"] = other
                run = stage.play(*_mail_script(user), shared=[tool], **options)
                _check_mail(run, user)

    def test_users_at_the_same_time_share_nothing_but_the_tool(self, stage: _Stage) -> None:
        store, together = stage.store(), threading.Barrier(2)

        def fetch_mail(user: str) -> str:
            """Fetch the mail of a user."""
            _meet(together)
            return _mail_of(user)

        tool = stage.driver.shared_tool(fetch_mail)

        def played(user: str) -> Run:
            return stage.play(
                *_mail_script(user), shared=[tool], store=store, conversation=f"of {user}"
            )

        with ThreadPoolExecutor(2) as threads:
            for user, run in zip(("ada", "bob"), threads.map(played, ("ada", "bob")), strict=True):
                _check_mail(run, user)

    def test_an_agent_without_coatcheck_that_shares_a_tool_is_as_before(
        self, stage: _Stage
    ) -> None:
        tool = stage.driver.shared_tool(fetch_mail)
        script: list[Step] = [[("fetch_mail", {"user": "ada"})]]
        before = stage.play(*script, shared=[tool])
        run = stage.play(*script, shared=[tool], store=stage.store())
        after = stage.play(*script, shared=[tool])
        assert pointer_in(run.results[0].text)
        assert json.dumps(after.requests) == json.dumps(before.requests)

    # 15

    def test_a_pointer_opens_after_a_restart(self, stage: _Stage) -> None:
        with coatcheck.open(stage.folder) as store:
            first = stage.play([("fetch_log", {})], tools=[fetch_log], store=store)
        read: Ask = (
            "get_artifact",
            {"pointer": pointer_in(first.results[0].text), "grep": "ERROR"},
        )
        second = stage.play([read], tools=[fetch_log], store=stage.store(), ids="again")
        assert "code 4711" in second.results[-1].text

    def test_a_pointer_does_not_open_after_the_host_deletes_the_conversation(
        self, stage: _Stage
    ) -> None:
        stage.needs("deletion")
        store = stage.store()
        first = stage.play([("fetch_log", {})], tools=[fetch_log], store=store)
        stage.driver.delete(store, "conversation")
        read: Ask = (
            "get_artifact",
            {"pointer": pointer_in(first.results[0].text), "grep": "ERROR"},
        )
        second = stage.play([read], tools=[fetch_log], store=store, ids="again")
        assert "4711" not in second.results[-1].text

    # 16

    @pytest.mark.parametrize("trouble", ["full", "closed"])
    def test_a_store_that_fails_leaves_head_and_tail_and_the_run_ends_well(
        self, stage: _Stage, trouble: str
    ) -> None:
        store = stage.store(**({"quota_bytes": 1_000} if trouble == "full" else {}))

        def fetch_all() -> str:
            """Fetch the log of the last run."""
            if trouble == "closed":
                store.close()
            return LOG

        run = stage.play(
            [("fetch_all", {})], [("greet", {"name": "Ada"})], tools=[fetch_all, greet], store=store
        )
        assert len(run.results[0].text) < _MOST * 2
        assert LOG[:200].splitlines()[0] in run.results[0].text
        assert LOG.splitlines()[-1] in run.results[0].text
        assert "Hello, Ada!" in run.results[1].text
        assert (run.final, run.error) == ("Done.", None)

    def test_a_store_that_fails_before_its_key_was_read_does_not_end_the_run(
        self, stage: _Stage
    ) -> None:
        store = stage.store()
        store.close()
        script: list[Step] = [
            [("fetch_log", {})],
            [("get_artifact", {"pointer": "art:000000000000"})],
            [("list_artifacts", {})],
            [("greet", {"name": "Ada"})],
        ]
        run = stage.play(*script, tools=[fetch_log, greet], store=store)
        assert LOG.splitlines()[-1] in run.results[0].text
        assert "get_artifact failed" in run.results[1].text
        assert "list_artifacts failed" in run.results[2].text
        assert "Hello, Ada!" in run.results[3].text
        assert (run.final, run.error) == ("Done.", None)

    # 17

    def test_the_policy_decides_by_tool(self, stage: _Stage) -> None:
        def report(name: str) -> str:
            """Write a report."""
            return f"about {name}\n" + LOG[:1_500]

        def short(name: str) -> str:
            """Write a short text."""
            return f"about {name}\n" + LOG[:300]

        def whole(name: str) -> str:
            """Write a long text."""
            return LOG[:40_000]

        policy = Policy(
            tools={"whole": "never", "short": "always", "report": Limit(max_chars=1_000)}
        )
        script: list[Step] = [
            [(tool, {"name": "Ada"})] for tool in ("whole", "short", "report", "greet")
        ]
        tools = [whole, short, report, greet]
        without = stage.play(*script, tools=tools)
        run = stage.play(*script, tools=tools, store=stage.store(), policy=policy)
        assert [one.text == other.text for one, other in zip(run.results, without.results, strict=True)] == [
            True, False, False, True,
        ]  # fmt: skip
        assert pointer_in(run.results[1].text)
        assert pointer_in(run.results[2].text)

    def test_a_disabled_policy_is_byte_for_byte_the_run_without_coatcheck(
        self, stage: _Stage
    ) -> None:
        script: list[Step] = [
            [("fetch_log", {})],
            [("greet", {"name": "Ada"})],
            [("fetch_rows", {})],
        ]
        tools: list[Callable[..., Any]] = [fetch_log, greet, fetch_rows]
        without = stage.play(*script, tools=tools)
        run = stage.play(*script, tools=tools, store=stage.store(), policy=Policy(enabled=False))
        assert json.dumps(run.requests) == json.dumps(without.requests)
        assert (run.final, run.error) == (without.final, None)


def print_tour(file: str, name: str, folder: str) -> None:
    """Print the requests of the tour: what `test_two_processes_on_one_store_send_the_same_bytes`
    runs in a child."""
    spec = importlib.util.spec_from_file_location("suite_under_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["suite_under_test"] = module
    spec.loader.exec_module(module)
    suite = cast(AdapterSuite, functools.reduce(getattr, name.split("."), module)())  # type: ignore[operator]
    script, tools = _tour(_Received())
    with coatcheck.open(folder) as store:
        run = suite.driver().run(
            Scenario(model=ScriptedModel(*script), tools=tuple(tools), store=store)
        )
    sys.stdout.write("\n" + json.dumps(run.requests) + "\n")
