"""Programs that call tools: values inside, pointers outside, which tools may be called, approval by
replay, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

import coatcheck
from coatcheck import Session, ToolCall, ToolExecutor, programs, tokens
from coatcheck.errors import InvalidArgument
from coatcheck.executor import Programs
from coatcheck.executor.programs import SERIES
from coatcheck.programs.engine import Limits


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    yield
    programs.close()


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


def search(q: str, n: int = 2) -> list[dict[str, object]]:
    """Search."""
    return [{"q": q, "i": number} for number in range(n)]


def fail() -> None:
    """Fail."""
    raise ValueError("nothing there")


def made(session: Session, *tools: Callable[..., Any], **options: Any) -> Programs:
    named = [tool.__name__ for tool in tools]
    return Programs(ToolExecutor(session, tools), **{"tools": named, **options})


def answer(text: str) -> list[str]:
    """An answer without the mark of its first line."""
    first, _, rest = text.partition("\n")
    return [first.rpartition(" ~")[0], *rest.splitlines()]


# Calls


def test_a_tool_is_a_function_that_gives_a_value(session: Session) -> None:
    outcome = made(session, search).run("rows = search(q='x', n=3)\nrows[2]['i'], len(rows)")
    assert outcome.page is not None
    assert outcome.page.text == "(2, 3)"
    (call,) = outcome.calls
    assert (call.name, call.arguments, call.outcome) == ("search", '{"n": 3, "q": "x"}', "returned")
    assert session.get(call.pointer or "") == search("x", 3)
    assert answer(outcome.text) == [
        "[the program's output, 6 characters]", "(2, 3)", f"[calls: search {call.pointer}]",
    ]  # fmt: skip


def test_positional_arguments_have_the_names_of_the_tool(session: Session) -> None:
    assert made(session, search).run("len(search('x', 5))").page.text == "5"  # type: ignore[union-attr]


def test_a_text_that_is_json_is_a_value(session: Session) -> None:
    def found() -> str:
        return '{"a": [1, 2]}'

    outcome = made(session, found).run("found()['a']")
    assert outcome.page is not None
    assert outcome.page.text == "[1, 2]"


def test_a_table_goes_from_tool_to_tool_as_text(session: Session) -> None:
    def export() -> str:
        return "id,name\n" + "1,one\n" * 50

    def check(table: str) -> int:
        return len(table.splitlines())

    outcome = made(session, export, check).run("table = export()\ncheck(table=table), table[:7]")
    assert outcome.page is not None
    assert outcome.page.text == "(51, 'id,name')"


def test_a_large_result_stays_in_the_program_and_in_the_store(session: Session) -> None:
    def log() -> str:
        return "a line of the log\n" * 100_000

    outcome = made(session, log).run("log().count('line')")
    assert len(outcome.text) < 200
    assert session.get(outcome.calls[0].pointer or "") == log()


def test_calls_that_are_awaited_together_run_together(session: Session) -> None:
    together = threading.Barrier(4)

    def wait(n: int) -> int:
        together.wait(30)
        return n

    source = "sum(await asyncio.gather(*[wait(n=n) for n in range(4)]))"
    outcome = made(session, wait).run(source)
    assert outcome.page is not None
    assert outcome.page.text == "6"
    assert [call.arguments for call in outcome.calls] == [f'{{"n": {n}}}' for n in range(4)]


def test_async_tools_work_in_both_ways(session: Session) -> None:
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    calls = made(session, double)
    for source in (
        "double(n=4)",
        "await double(n=4)",
        "asyncio.run(double(n=4)) if 'await' else 0",
    ):
        outcome = calls.run(source)
        if outcome.page is not None:
            assert outcome.page.text == "8"


def test_the_word_await_in_a_text_changes_nothing(session: Session) -> None:
    outcome = made(session, search).run("len(search(q='await'))  # no await")
    assert outcome.page is not None
    assert outcome.page.text == "2"


def test_an_exception_keeps_its_name(session: Session) -> None:
    source = "try:\n    fail()\nexcept ValueError as error:\n    print('caught:', error)"
    outcome = made(session, fail).run(source)
    assert outcome.page is not None
    assert outcome.page.text == "caught: nothing there"


def test_after_an_error_the_answer_says_which_calls_ran(session: Session) -> None:
    outcome = made(session, search, fail).run("search(q='x')\nfail()\nsearch(q='y')")
    assert [(call.name, call.outcome) for call in outcome.calls] == [
        ("search", "returned"), ("fail", "failed"),
    ]  # fmt: skip
    assert answer(outcome.text) == [
        "[error: ValueError in line 2: nothing there]",
        f"[calls: search {outcome.calls[0].pointer}, fail failed]",
    ]


def test_a_wrong_argument_is_explained(session: Session) -> None:
    outcome = made(session, search).run("search(query='x')")
    assert outcome.error is not None
    assert outcome.error.kind == "TypeError"
    assert "there is no parameter 'query'; search takes q, n" in outcome.error.message


def test_nothing_is_called_again_by_itself(session: Session) -> None:
    count = []

    def once() -> None:
        count.append(1)
        raise OSError("busy")

    made(session, once).run("once()")
    assert count == [1]


def test_no_call_runs_on_after_its_program(session: Session) -> None:
    ended = []

    def slow(n: int) -> int:
        time.sleep(0.2)
        ended.append(n)
        return n

    outcome = made(session, slow, fail).run("await asyncio.gather(fail(), slow(n=1), slow(n=2))")
    assert outcome.error is not None
    assert sorted(ended) == [1, 2]


def test_pointers_are_arguments_and_values(session: Session) -> None:
    def size(text: str) -> int:
        return len(text)

    ref = session.put("0123456789" * 1_000)
    outcome = made(session, size).run(f"size(text='{ref.pointer}'), len(artifact('{ref.pointer}'))")
    assert outcome.page is not None
    assert outcome.page.text == "(10000, 10000)"


def test_a_program_keeps_a_value_under_a_name(session: Session) -> None:
    outcome = made(session).run("print(keep([1, 2], 'numbers'), keep('text', 'words'))")
    assert outcome.page is not None
    assert [session.get("numbers"), session.get("words")] == [[1, 2], "text"]
    pointers = [session.ref(name).pointer for name in ("numbers", "words")]  # type: ignore[union-attr]
    assert outcome.page.text.split() == pointers


@pytest.mark.parametrize(
    "source",
    [
        "keep('x' * 600_000, 'large')",
        "keep([], '')",
        "keep([], 'art:0123456789ab')",
        "__keep(1, 2)",
    ],
)
def test_what_cannot_be_kept_is_an_error_inside(session: Session, source: str) -> None:
    outcome = made(session).run(f"try:\n    {source}\nexcept Exception as error:\n    print('no')")
    assert outcome.page is not None
    assert outcome.page.text == "no"


@pytest.mark.parametrize(
    "source",
    ["__call('nothing', '[[], {}]')", "__call([], '1')", "__call()", "__call('search', 'x')"],
)
def test_a_program_that_calls_past_its_functions_gets_an_error(
    session: Session, source: str
) -> None:
    outcome = made(session, search).run(source)
    assert outcome.error is not None
    assert outcome.error.kind == "TypeError"


def test_at_most_eight_pointers_are_in_an_answer(session: Session) -> None:
    outcome = made(session, search).run("for n in range(20): search(q=str(n))\n1")
    assert answer(outcome.text)[-1].count("art:") == 8
    assert answer(outcome.text)[-1].endswith("and 12 more]")


def test_names_that_are_not_of_python_are_changed(session: Session) -> None:
    executor = ToolExecutor(session, {"web.search": search, "print": search, "2nd": search})
    calls = Programs(executor, tools=["web.search", "print", "2nd"])
    source = "len(web_search(q='a')), len(print_(q='a')), len(tool_2nd(q='a'))"
    assert calls.run(source).page.text == "(2, 2, 2)"  # type: ignore[union-attr]


# Limits


def test_calls_are_limited(session: Session) -> None:
    outcome = made(session, search, limits=Limits(calls=3)).run("for n in range(9): search(q='x')")
    assert outcome.error is not None
    assert outcome.error.detail == "a program makes at most 3 calls of tools"
    assert [call.outcome for call in outcome.calls] == ["returned"] * 3 + ["refused"]


def test_a_tool_over_its_time_is_a_timeout_inside(session: Session) -> None:
    executor = ToolExecutor(session, {"wait": lambda: time.sleep(30)}, timeout=0.2)
    source = "try:\n    wait()\nexcept TimeoutError:\n    print('too slow')"
    outcome = Programs(executor, tools=["wait"]).run(source)
    assert outcome.page is not None
    assert outcome.page.text == "too slow"


def test_a_turn_ends_at_its_deadline_and_keeps_what_there_is(session: Session) -> None:
    def slow(n: int) -> int:
        time.sleep(0.3)
        return n

    begin = time.monotonic()
    outcome = made(session, slow).run("for n in range(99): slow(n=n)", deadline=1)
    assert time.monotonic() - begin < 10
    assert outcome.error is not None
    assert any(call.outcome == "returned" for call in outcome.calls)
    assert len(outcome.calls) < 5


# Which tools


class Tool:
    """A tool of a server, with what it says of itself."""

    description = "Look."
    parameters: Mapping[str, Any] = MappingProxyType({"type": "object", "properties": {}})

    def __init__(self, name: str, read_only: bool | None) -> None:
        self.name, self.read_only = name, read_only

    def run(self, **arguments: Any) -> str:
        return "looked"


def test_a_program_calls_tools_that_only_read(session: Session) -> None:
    tools = [Tool("look", True), Tool("write", False), Tool("unknown", None)]
    calls = Programs(ToolExecutor(session, tools))
    assert calls.run("look()").page.text == "looked"  # type: ignore[union-attr]
    for name in ("write", "unknown"):
        outcome = calls.run(f"{name}()")
        assert outcome.error is not None
        assert outcome.error.message == (f"PermissionError in line 1: {name}: call it directly")


def test_settings_name_more_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATCHECK_PROGRAMS_TOOLS", "write, other")
    with coatcheck.open("memory:") as store:
        calls = Programs(ToolExecutor(store.session("s"), [Tool("write", False)]))
        assert calls.run("write()").page.text == "looked"  # type: ignore[union-attr]


def test_a_call_that_is_refused_raises_a_permission_error(session: Session) -> None:
    calls = made(session, search, approve=lambda call: call.arguments != {"q": "secret"})
    source = "try:\n    search(q='secret')\nexcept PermissionError as error:\n    print(error)"
    assert calls.run(source).page.text == "search was refused"  # type: ignore[union-attr]


# Approval by replay


class Shop:
    """Tools with a side, and an approval that a person gives later."""

    def __init__(self, session: Session) -> None:
        self.bought: list[str] = []
        self.looked = 0
        self.programs = Programs(
            ToolExecutor(session, [self.look, self.buy]),
            tools=["look", "buy"],
            approve=self.approve,
        )

    def look(self) -> list[str]:
        self.looked += 1
        return ["tea", "cake"]

    def buy(self, item: str) -> str:
        self.bought.append(item)
        return f"bought {item}"

    def approve(self, call: ToolCall) -> bool | None:
        return True if call.name == "look" else None


SOURCE = "items = look()\nprint(buy(item=items[0]), time.time() > 0)"


def test_a_call_waits_for_approval_and_what_ran_before_is_not_repeated(session: Session) -> None:
    shop = Shop(session)
    outcome = shop.programs.run(SOURCE)
    assert outcome.waiting is not None
    assert outcome.waiting.call.arguments == {"item": "tea"}
    assert answer(outcome.text)[0] == "[the program waits for approval of buy]"
    assert shop.bought == []
    resumed = shop.programs.resume(outcome.waiting.token, SOURCE, approved=True)
    assert resumed.page is not None
    assert resumed.page.text == "bought tea True"
    assert (shop.bought, shop.looked) == (["tea"], 1)


def test_another_process_resumes_a_program(session: Session) -> None:
    outcome = Shop(session).programs.run(SOURCE)
    assert outcome.waiting is not None
    later = Shop(session)
    later.programs.resume(outcome.waiting.token, SOURCE, approved=True)
    assert (later.bought, later.looked) == (["tea"], 0)


def test_a_refusal_is_an_exception_inside(session: Session) -> None:
    shop = Shop(session)
    outcome = shop.programs.run(SOURCE)
    assert outcome.waiting is not None
    resumed = shop.programs.resume(outcome.waiting.token, SOURCE, approved=False)
    assert resumed.error is not None
    assert resumed.error.message == "PermissionError in line 2: buy was refused"
    assert shop.bought == []


def test_each_call_is_approved_by_itself(session: Session) -> None:
    shop = Shop(session)
    source = "for item in look(): print(buy(item=item))"
    first = shop.programs.run(source)
    assert first.waiting is not None
    second = shop.programs.resume(first.waiting.token, source, approved=True)
    assert second.waiting is not None
    assert second.waiting.call.arguments == {"item": "cake"}
    third = shop.programs.resume(second.waiting.token, source, approved=True)
    assert third.page is not None
    assert third.page.text == "bought tea\nbought cake"
    assert (shop.bought, shop.looked) == (["tea", "cake"], 1)


def test_calls_of_a_batch_are_approved_one_after_the_other_and_run_once(session: Session) -> None:
    shop = Shop(session)
    source = "await asyncio.gather(look(), buy(item='tea'), buy(item='cake'))"
    outcome = shop.programs.run(source)
    assert (shop.looked, shop.bought, outcome.calls) == (0, [], ())
    for _ in range(2):
        assert outcome.waiting is not None
        outcome = shop.programs.resume(outcome.waiting.token, source, approved=True)
    assert outcome.page is not None
    assert outcome.page.text == "[['tea', 'cake'], 'bought tea', 'bought cake']"
    assert (shop.looked, sorted(shop.bought)) == (1, ["cake", "tea"])


def test_an_approval_is_for_the_call_that_the_person_saw(session: Session) -> None:
    shop = Shop(session)
    session.put("tea", name="wish")
    source = "buy(item=artifact('wish'))"
    outcome = shop.programs.run(source)
    assert outcome.waiting is not None
    session.put("a yacht", name="wish")
    again = shop.programs.resume(outcome.waiting.token, source, approved=True)
    assert again.waiting is not None
    assert again.waiting.call.arguments == {"item": "a yacht"}
    assert shop.bought == []


def test_an_approval_does_not_count_for_the_same_call_again(session: Session) -> None:
    shop = Shop(session)
    source = "buy(item='tea')\nbuy(item='tea')"
    outcome = shop.programs.run(source)
    assert outcome.waiting is not None
    again = shop.programs.resume(outcome.waiting.token, source, approved=True)
    assert again.waiting is not None
    assert shop.bought == ["tea"]


def test_a_program_that_takes_another_way_is_refused(session: Session) -> None:
    shop = Shop(session)
    session.put("look", name="first")
    source = "print(look() if artifact('first') == 'look' else buy(item='tea'))\nbuy(item='cake')"
    outcome = shop.programs.run(source)
    assert outcome.waiting is not None
    session.put("buy", name="first")
    again = shop.programs.resume(outcome.waiting.token, source, approved=True)
    assert again.error is not None
    assert "now calls buy where it called look before" in again.error.message
    assert shop.bought == []


def test_a_decision_counts_once(session: Session) -> None:
    shop = Shop(session)
    outcome = shop.programs.run(SOURCE)
    assert outcome.waiting is not None
    shop.programs.resume(outcome.waiting.token, SOURCE, approved=True)
    with pytest.raises(InvalidArgument, match="resumed already"):
        shop.programs.resume(outcome.waiting.token, SOURCE, approved=True)
    assert shop.bought == ["tea"]


def test_a_token_is_of_one_program_and_one_session(session: Session) -> None:
    outcome = Shop(session).programs.run(SOURCE)
    assert outcome.waiting is not None
    other = Shop(session.store.session("other"))
    for shop, token, source in (
        (Shop(session), outcome.waiting.token, SOURCE + "\n1"),
        (other, outcome.waiting.token, SOURCE),
        (Shop(session), "0" * 16 + "-" + "0" * 32, SOURCE),
        (Shop(session), "", SOURCE),
    ):
        with pytest.raises(InvalidArgument, match="not one of this program"):
            shop.programs.resume(token, source, approved=True)
        assert shop.bought == []


def test_a_record_that_was_altered_does_not_count(session: Session) -> None:
    outcome = Shop(session).programs.run(SOURCE)
    assert outcome.waiting is not None
    body = session.records(SERIES)[-1].body.replace(b'"look"', b'"fake"')
    with coatcheck.open("memory:") as store:
        again = store.session("s")
        again.record(SERIES, body)
        with pytest.raises(InvalidArgument):
            Shop(again).programs.resume(outcome.waiting.token, SOURCE, approved=True)


# The tool, and the record


def test_a_model_has_one_way_to_run_programs(session: Session) -> None:
    tools = made(session, search).tools()
    assert [tool.name for tool in tools] == [
        "get_artifact", "list_artifacts", "store_artifact", "run_program",
    ]  # fmt: skip
    assert "code" not in tools[0].parameters["properties"]


def test_the_description_has_few_tokens(session: Session) -> None:
    splintr = pytest.importorskip("splintr")
    assert splintr is not None
    described = json.dumps(made(session, search).tool.as_anthropic())
    assert tokens.exact(described) <= 160


def test_an_executor_runs_programs_like_any_tool(session: Session) -> None:
    tool = made(session, search).tool
    executor = ToolExecutor(session, [tool])
    text = executor.run(ToolCall("1", "run_program", {"code": "search(q='x')[1]"})).text
    assert answer(text)[1] == "{'q': 'x', 'i': 1}"
    wrong = executor.run(ToolCall("2", "run_program", {"source": "1"})).text
    assert answer(wrong)[0] == "[error: unknown argument 'source' (run_program takes code)]"


def test_a_record_has_the_program_and_its_calls_without_secrets(session: Session) -> None:
    secret = "ghp_" + "a1B2" * 9
    outcome = made(session, search).run(f"# token {secret}\nsearch(q='{secret}')\nprint('done')")
    body = session.records(SERIES)[-1].body.partition(b"\n")[2]
    assert secret.encode() not in body
    record = json.loads(body)
    assert record["program"].endswith("print('done')")
    assert record["output"] == "done"
    ((name, arguments, came_of_it, pointer, *_),) = record["calls"]
    assert (name, came_of_it, pointer) == ("search", "returned", outcome.calls[0].pointer)
    assert secret not in arguments


def test_output_over_a_page_becomes_an_artifact_of_what_the_calls_returned(
    session: Session,
) -> None:
    outcome = made(session, search).run(
        "rows = search(q='x')\nfor n in range(9000): print(n, rows)"
    )
    assert outcome.page is not None
    assert outcome.page.derived is not None
    assert len(outcome.text) <= 8_000
    whole = session.ref(outcome.page.derived)
    assert whole is not None
    assert [session.ref(f"art:{one}").pointer for one in whole.parents] == [  # type: ignore[union-attr]
        outcome.calls[0].pointer
    ]
