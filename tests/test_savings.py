"""Savings of a store: every way in counts once, pages that a model reads are subtracted, and
nothing counts twice."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import coatcheck
from coatcheck import Policy, Session, Store, ToolCall, ToolExecutor, toolkit
from coatcheck.adapters import Adapter
from coatcheck.adapters.claude_code import HOST, PLUGIN_SERVER, Hooks
from coatcheck.cli import main
from coatcheck.context import Budget, PromptBuilder, SavingsRow, savings
from coatcheck.errors import InvalidArgument
from coatcheck.externalize import ResultSource
from coatcheck.externalize.savings import SESSION, counts_of
from coatcheck.mcp.proxy_rewrites import Counts, ProxySettings, Rewriter
from coatcheck.tokens import estimate
from tests.gateway.provider import Provider, Say, Use, turn
from tests.gateway.talking import Talk, serving

POLICY = Policy(max_chars=2_000)


def log(name: str) -> str:
    return "".join(
        f"{n:04} INFO {name}: request {n * 7919} took {n % 97} ms\n" for n in range(1_500)
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with coatcheck.open(tmp_path / "store", durability="process") as opened:
        yield opened


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("work")


def read(session: Session, pointer: str) -> int:
    """Read five lines as a model does, and return the tokens of the page and of the call."""
    page = session.read(pointer, lines="1:5").text
    toolkit(session)[0].run(pointer=pointer, lines="1:5")
    return estimate(page) + estimate(json.dumps({"pointer": pointer, "lines": "1:5"}))


def saved_by(stub: str, name: str) -> int:
    """Return the tokens that a stub kept out: those that it names, about as many as the result has,
    minus its own."""
    tokens: int = json.loads(stub)["tokens"]
    assert tokens == pytest.approx(estimate(log(name)), rel=0.05)
    return tokens - estimate(stub)


def counted(row: SavingsRow) -> tuple[int, int, int, int]:
    return row.results, row.tokens_kept_out, row.reads, row.tokens_read_back


def by_library(session: Session) -> str:
    return session.externalize(log("library"), tool="run_tests", policy=POLICY).text


def by_executor(session: Session) -> str:
    def fetch() -> str:
        return log("executor")

    outcome = ToolExecutor(session, [fetch], policy=POLICY).run(
        ToolCall(id="c1", name="fetch", arguments={})
    )
    return str(outcome.to_model_content())


def by_adapter(session: Session) -> str:
    kit = Adapter(session, host="langchain", policy=POLICY).kit()
    return kit.result(session, log("adapter"), tool="crawl", call_id="c2").text


def by_plugin(session: Session) -> str:
    event = {
        "hook_event_name": "PostToolUse", "tool_name": "mcp__github__list_issues", "session_id": "one",
        "tool_use_id": "toolu_1", "tool_response": [{"type": "text", "text": log("plugin")}],
    }  # fmt: skip
    hooks = Hooks(Adapter(session, host=HOST, policy=POLICY), server=PLUGIN_SERVER)
    blocks = hooks.answer(event)["hookSpecificOutput"]["updatedToolOutput"]
    return str(blocks[0]["text"])


def by_proxy(session: Session) -> str:
    rewriter = Rewriter(session, ProxySettings(POLICY, server="npx files"), Counts())
    result = rewriter.call_result(
        "read_log", "7", {"content": [{"type": "text", "text": log("proxy")}]}
    )
    return str(result["content"][0]["text"])


WAYS: dict[str, tuple[Callable[[Session], str], tuple[str, str, str]]] = {
    "library": (by_library, ("library", "", "run_tests")),
    "executor": (by_executor, ("library", "", "fetch")),
    "adapter": (by_adapter, ("langchain", "", "crawl")),
    "plugin": (by_plugin, ("claude-code", "github", "list_issues")),
    "proxy": (by_proxy, ("proxy", "npx files", "read_log")),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_result_counts_once_and_a_page_of_it_is_subtracted(session: Session, way: str) -> None:
    put, names = WAYS[way]
    stub = put(session)
    asked = read(session, json.loads(stub)["artifact"])
    (row,) = savings(session.store).rows
    assert (row.surface, row.server, row.tool) == names
    assert counted(row) == (1, saved_by(stub, way), 1, asked)
    assert row.tokens_net == row.tokens_kept_out - row.tokens_read_back > 10_000
    assert row.day == datetime.now(UTC).date()


def test_a_gateway_counts_the_result_and_the_page_that_it_answers_itself(store: Store) -> None:
    def asking(seen: Any) -> Any:
        stub = json.loads(seen.messages[-1]["content"][0]["content"])
        return turn(Use("get", {"pointer": stub["artifact"], "lines": "1:5"}))

    script: list[Any] = [
        turn(Use("search", {"q": "x"})),
        asking,
        turn(Say("Done.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop", policy=POLICY) as url:
        talk = Talk(url, is_streamed=False, thinking=False)
        talk.ask("find it")
        talk.ask(talk.results(log("gateway")))
        talk.ask("thanks")
        stub = provider.answered[1].messages[-1]["content"][0]["content"]
    (row,) = savings(store).rows
    assert (row.surface, row.server, row.tool) == ("gateway", "", "search")
    assert counted(row)[:3] == (1, saved_by(stub, "gateway"), 1)
    assert 50 < row.tokens_read_back < 500


def test_all_ways_into_one_store_add_up(store: Store) -> None:
    kept = asked = 0
    for name, (put, _) in WAYS.items():
        session = store.session(name)
        stub = put(session)
        kept += saved_by(stub, name)
        asked += read(session, json.loads(stub)["artifact"])
    found = savings(store)
    assert counted(found.total) == (len(WAYS), kept, len(WAYS), asked)
    by_surface = {row.surface: row.results for row in found.by("surface")}
    assert by_surface == {"library": 2, "langchain": 1, "claude-code": 1, "proxy": 1}


def test_a_stub_and_a_page_that_pass_other_surfaces_count_once(session: Session) -> None:
    stub = by_proxy(session)
    pointer = json.loads(stub)["artifact"]
    page = toolkit(session)[0].run(pointer=pointer)
    kit = Adapter(session, host="langchain", policy=POLICY).kit()
    for text in (stub, page):
        assert kit.result(session, text, tool="read_log", call_id="c9").text == text
        assert session.externalize(text, tool="read_log", policy=POLICY).text == text
    (row,) = savings(session.store).rows
    assert counted(row)[:3] == (1, saved_by(stub, "proxy"), 1)


def test_a_result_that_a_host_passes_again_with_the_same_call_counts_once(session: Session) -> None:
    for _ in range(3):
        session.externalize(log("a"), tool="t", call_id="c1", policy=POLICY)
    session.externalize(log("a"), tool="t", call_id="c2", policy=POLICY)
    assert savings(session.store).total.results == 2


def test_a_result_within_the_limit_and_a_stored_value_count_nothing(session: Session) -> None:
    session.externalize("short", tool="t", policy=POLICY)
    ref = session.put(log("a"))
    toolkit(session)[0].run(pointer=ref.pointer)
    assert savings(session.store).rows == ()


def test_chunks_that_a_prompt_stores_to_stay_within_its_budget_are_not_counted(
    session: Session,
) -> None:
    builder = PromptBuilder(
        session, provider="openai", budget=Budget(max_inline_artifact_chars=1_000), recall=False
    )
    builder.build([{"role": "user", "content": "hello"}], chunks=[log("chunk")])
    assert session.list()
    assert savings(session.store).total.results == 0


def test_a_page_of_a_query_result_counts_for_the_tool_of_the_artifact(session: Session) -> None:
    rows = [{"id": n, "text": f"row {n} " * 20} for n in range(2_000)]
    ref = session.externalize(rows, tool="rows", policy=POLICY).ref
    assert ref is not None
    page = session.read(ref, query="$[*].text")
    assert page.derived is not None
    toolkit(session)[0].run(pointer=page.derived)
    (row,) = savings(session.store).rows
    assert (row.tool, row.reads) == ("rows", 1)


def test_an_artifact_that_a_tool_stored_itself_counts_when_its_stub_is_shown(
    session: Session,
) -> None:
    ref = session.put(log("a"), tool="dump")
    stub = session.externalize(ref, tool="dump", policy=POLICY).text
    read(session, json.loads(stub)["artifact"])
    (row,) = savings(session.store).rows
    assert (row.tool, row.results, row.reads) == ("dump", 1, 1)


def test_a_list_of_artifacts_counts_as_read_back(session: Session) -> None:
    session.externalize(log("a"), tool="t", policy=POLICY)
    toolkit(session)[1].run()
    rows = {row.surface: row for row in savings(session.store).rows}
    assert (rows["tools"].tool, rows["tools"].reads) == ("list_artifacts", 1)
    assert rows["tools"].tokens_net < 0


def test_a_result_that_could_not_be_stored_is_counted_as_a_failure(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store") as store:
        session = store.session("work")
        session.externalize(log("a"), tool="t", policy=POLICY)
    with coatcheck.open(tmp_path / "store", max_artifact_bytes=100) as store:
        done = store.session("work").externalize(log("b"), tool="t", policy=POLICY)
        assert done.failure is not None
        assert counted(savings(store).total)[0] == 1
        assert savings(store).total.failures == 1


def test_counts_of_closed_stores_and_other_processes_add_up(tmp_path: Path) -> None:
    for number in range(3):
        with coatcheck.open(tmp_path / "store", durability="process") as store:
            store.session("work").externalize(log(str(number)), tool="t", policy=POLICY)
    with coatcheck.open(tmp_path / "store") as store:
        session = store.session("work")
        read(session, session.list()[0].pointer)
        total = savings(store).total
        assert (total.results, total.reads) == (3, 1)


def test_a_read_in_another_process_counts_for_the_server_of_the_result(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        stub = by_proxy(store.session("work"))
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        read(store.session("work"), json.loads(stub)["artifact"])
    with coatcheck.open(tmp_path / "store") as store:
        (row,) = savings(store).rows
        assert (row.server, row.results, row.reads) == ("npx files", 1, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_write_the_counts_of_its_parent(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        store.session("work").externalize(log("a"), tool="t", policy=POLICY)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                counts_of(store).flush(store)
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
    with coatcheck.open(tmp_path / "store") as store:
        assert savings(store).total.results == 1


def test_sums_keep_the_number_of_records_small_and_lose_nothing(store: Store) -> None:
    session, counts = store.session("work"), counts_of(store)
    for number in range(300):
        counts.kept_out(session, ResultSource("library"), f"tool {number % 3}", (), 10 * number)
        counts.flush(store)
    assert counted(savings(store).total)[:2] == (300, sum(10 * number for number in range(300)))
    assert len(savings(store).rows) == 3
    month = f"{datetime.now(UTC):%Y-%m}"
    assert len(store.session(SESSION).records(month)) <= 256


def test_days_are_those_of_the_store_and_can_be_selected(tmp_path: Path) -> None:
    now = datetime(2026, 1, 31, 23, tzinfo=UTC).timestamp()
    clock = [now]
    with coatcheck.open("memory:", clock=lambda: clock[0]) as store:
        session = store.session("work", ttl=None)
        for number in range(3):
            session.externalize(log(str(number)), tool="t", policy=POLICY)
            clock[0] += 86_400
        counts_of(store).flush(store)
        days = [date(2026, 1, 31), date(2026, 2, 1), date(2026, 2, 2)]
        assert [row.day for row in savings(store).by("day")] == days
        assert [row.day for row in savings(store, since=days[1]).rows] == days[:0:-1]
        assert [row.day for row in savings(store, until=days[0]).rows] == days[:1]
        assert savings(store, since=days[1], until=days[1]).total.results == 1


def test_a_damaged_record_is_skipped(store: Store) -> None:
    month = f"{datetime.now(UTC):%Y-%m}"
    by_library(store.session("work"))
    counts_of(store).flush(store)
    for body in (
        b"{",
        b"[]",
        b'{"rows":[[1]]}',
        b'{"upto":99,"rows":7}',
        b'{"rows":[["x","a","b","c",1,1,1,1,-1]]}',
    ):
        store.session(SESSION).record(month, body)
    assert savings(store).total.results == 1


def test_counts_of_many_tools_are_combined(store: Store) -> None:
    session, counts = store.session("work"), counts_of(store)
    for number in range(600):
        counts.kept_out(session, ResultSource("library"), f"tool {number}", (), 5)
    total = savings(store)
    assert len(total.rows) == 501
    assert counted(total.total)[:2] == (600, 3_000)


def test_tenants_are_counted_separately(store: Store) -> None:
    by_library(store.tenant("a").session("work"))
    assert savings(store).rows == savings(store.tenant("b")).rows == ()
    assert savings(store.tenant("a")).total.results == 1


def test_a_secret_in_the_name_of_a_server_is_masked(session: Session) -> None:
    secret = "ghp_" + "a1B2" * 9
    outcome = session.externalize(
        log("a"), tool="t", policy=POLICY, source=ResultSource("proxy", f"run {secret}")
    )
    assert outcome.ref is not None
    assert secret not in json.dumps(outcome.ref.metadata)
    assert secret not in savings(session.store).rows[0].server


def test_invalid_arguments_are_refused(store: Store) -> None:
    with pytest.raises(InvalidArgument):
        savings(store, since="2026-01-01")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        savings(store).by("colour")


def test_the_report_and_the_page_show_the_same_figures(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        for name, (put, _) in WAYS.items():
            read(store.session(name), json.loads(put(store.session(name)))["artifact"])
        expected = str(savings(store))
        rows = savings(store).by("surface", "server", "tool")
    page, place = tmp_path / "page.html", ["--store", str(tmp_path / "store")]
    report = CliRunner().invoke(main, ["proxy", "--report", *place])
    assert report.stdout.splitlines()[0] == expected
    assert len(report.stdout.splitlines()) == 2 + len(WAYS)
    found = json.loads(CliRunner().invoke(main, ["proxy", "--report", "--json", *place]).stdout)
    assert found["total"]["tokens_net"] == sum(row.tokens_net for row in rows)
    assert CliRunner().invoke(main, ["metrics", "--html", str(page), *place]).exit_code == 0
    html = page.read_text()
    assert expected in html
    for row in rows:
        assert f"<td>{row.tokens_net:,}</td>" in html
