"""The examples as their users run them: real SDKs, real HTTP, a scripted model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from coatcheck import Session, tokens
from examples.openai_agent import read_file, tally
from examples.standins import Call, Fault, Heard, Reply, StandIn, Step
from tests.agents.conftest import Agent

ROOT = Path(__file__).resolve().parent.parent.parent
LOG = "".join(
    f"2026-03-01T10:00:00 GET /page/{i % 7} {500 if i % 21 == 4 else 200} {i}ms – ok\n"
    for i in range(9_000)
)
ODD = 'a "quoted" \\ back\\slash, ünïcödé — 漢字 🎟️ \t\n end'


def ask_tally(heard: Heard) -> Reply:
    return Reply(
        "Counting.",
        (Call("tally", {"text": heard.pointer("read_file"), "column": 2, "containing": " 500 "}),),
    )


def answer(heard: Heard) -> Reply:
    (path,) = json.loads(heard.last("tally"))
    return Reply(f"{path} fails most often.")


def script(path: Path) -> list[Step]:
    return [Reply("I read the log.", (Call("read_file", {"path": str(path)}),)), ask_tally, answer]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "access.log"
    path.write_text(LOG)
    return path


def test_the_loop_ends_with_the_right_answer_and_a_small_context(
    agent: Agent, session: Session, log: Path
) -> None:
    window = 2_000
    assert tokens.exact(LOG) > 50 * window
    with StandIn(script(log), window=window) as api:
        assert (
            agent.ask(api, session, "Which path fails?", [read_file, tally])
            == "/page/4 fails most often."
        )
    assert [request.status for request in api.requests] == [200, 200, 200]
    assert all(request.usage and request.usage.prompt <= window for request in api.requests)


def test_a_result_reaches_the_next_tool_exactly_and_not_through_the_model(
    agent: Agent, session: Session, log: Path
) -> None:
    arrived: list[str] = []

    def tally(text: str, column: int, containing: str = "") -> dict[str, int]:
        arrived.append(text)
        return {"/page/4": 1}

    with StandIn(script(log)) as api:
        agent.ask(api, session, tools=[read_file, tally])
    assert arrived == [LOG]
    assert not any(b"GET /page/5 200 3001ms" in request.raw for request in api.requests)


def test_each_request_repeats_the_one_before_byte_for_byte(
    agent: Agent, session: Session, log: Path
) -> None:
    with StandIn(script(log)) as api:
        agent.ask(api, session, tools=[read_file, tally])
    sent = [agent.sent(request) for request in api.requests]
    for (before, head), (after, same_head) in pairwise(sent):
        assert after.startswith(before[:-1] + ",")
        assert same_head == head


def test_every_turn_reads_the_previous_prompt_from_the_providers_cache(
    agent: Agent, session: Session, log: Path
) -> None:
    with StandIn(script(log)) as api:
        agent.ask(api, session, "Which path fails? " + "Take your time. " * 400, [read_file, tally])
    used = [request.usage for request in api.requests]
    for before, after in pairwise(used):
        assert before is not None
        assert after is not None
        assert before.prompt - 128 < after.cached <= before.prompt


def test_calls_of_one_turn_run_in_parallel_and_each_result_has_its_own_id(
    agent: Agent, session: Session
) -> None:
    together = threading.Barrier(3, timeout=60)

    def wait(name: str) -> str:
        together.wait()
        return name * 3

    calls = tuple(Call("wait", {"name": name}) for name in "abc")
    with StandIn(
        [Reply(calls=calls), lambda heard: Reply(" ".join(one.text for one in heard.results))]
    ) as api:
        assert agent.ask(api, session, tools=[wait]) == "aaa bbb ccc"


def test_text_and_arguments_that_stream_in_odd_pieces_arrive_completely(
    agent: Agent, session: Session
) -> None:
    arrived: list[object] = []

    def note(text: str, rows: list[dict[str, str]]) -> str:
        arrived.append((text, rows))
        return text

    with StandIn(
        [
            Reply(ODD, (Call("note", {"text": ODD, "rows": [{ODD: ODD}]}),)),
            lambda h: Reply(h.last("note")),
        ]
    ) as api:
        assert agent.ask(api, session, tools=[note]) == ODD
    assert arrived == [(ODD, [{ODD: ODD}])]


def test_a_failing_tool_and_a_slow_one_do_not_end_the_turn(agent: Agent, session: Session) -> None:
    never = threading.Event()

    def fail() -> str:
        raise RuntimeError("no such host: db-7")

    def hang() -> str:
        never.wait()
        return "late"

    for timeout in (
        0.2,
        5,
        60,
    ):  # on a busy machine, even a tool that fails at once may take longer
        with StandIn(
            [Reply(calls=(Call("fail", {}), Call("hang", {}), Call("fial", {}))), Reply("I go on.")]
        ) as api:
            assert agent.ask(api, session, tools=[fail, hang], timeout=timeout) == "I go on."
        sent = agent.sent(api.requests[1])[0]
        if "no such host: db-7" in sent:
            break
    never.set()
    for message in (
        "no such host: db-7",
        f"timed out after {timeout:g} seconds",
        "did you mean 'fail'?",
    ):
        assert message in sent
    if agent.api == "messages":
        assert [block["is_error"] for block in api.requests[1].body["messages"][-1]["content"]] == [
            True
        ] * 3


def test_requests_to_a_busy_provider_are_retried(agent: Agent, session: Session, log: Path) -> None:
    with StandIn(script(log), faults=[Fault(0, 429), Fault(2, 529), Fault(3, 503)]) as api:
        assert "/page/4" in agent.ask(api, session, tools=[read_file, tally])
    assert [request.status for request in api.requests] == [429, 200, 529, 503, 200, 200]
    assert api.requests[0].raw == api.requests[1].raw


def test_arguments_that_are_not_json_are_reported_to_the_model(session: Session) -> None:
    with StandIn(
        [
            Reply(calls=(Call("read_file", '{"path": '),)),
            lambda heard: Reply(heard.last("read_file")),
        ]
    ) as api:
        assert "not JSON" in Agent("chat").ask(api, session, tools=[read_file])


def test_a_model_reads_artifacts_and_keeps_notes_with_the_three_tools(
    agent: Agent, session: Session, log: Path
) -> None:
    def look(heard: Heard) -> Reply:
        pointer = heard.pointer("read_file")
        return Reply(
            calls=(
                Call("get_artifact", {"pointer": pointer, "grep": " 500 8593ms"}),
                Call("list_artifacts", {}),
                Call("store_artifact", {"name": "finding", "value": "page 4"}),
            )
        )

    steps: list[Step] = [
        Reply(calls=(Call("read_file", {"path": str(log)}),)),
        look,
        lambda heard: Reply(heard.last("get_artifact")),
    ]
    with StandIn(steps) as api:
        assert "8594:" in agent.ask(api, session, tools=[read_file])
    assert session.get("finding") == "page 4"


@pytest.mark.parametrize(
    ("file", "options"),
    [("openai_agent.py", []), ("openai_agent.py", ["--responses"]), ("anthropic_agent.py", [])],
)
def test_the_file_runs_as_a_user_would_run_it(file: str, options: list[str], log: Path) -> None:
    with StandIn(script(Path(log.name)), window=3_000) as api:
        keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
        urls = {"OPENAI_BASE_URL": api.openai_url, "ANTHROPIC_BASE_URL": api.anthropic_url}
        done = subprocess.run(
            [sys.executable, "-W", "error", str(ROOT / "examples" / file), *options, "Which path fails in access.log?"],
            cwd=log.parent, env=os.environ | keys | urls, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "[read_file: ArtifactReference]" in done.stdout
    assert done.stdout.endswith("/page/4 fails most often.\n")
    assert len(api.requests) == 3
