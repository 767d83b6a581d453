"""The tools for models: bounded, forgiving where it is harmless, and never externalized again."""

from __future__ import annotations

import json
import re
import sys
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck import Policy, Session, Store, ToolCall, ToolExecutor, errors, tokens, toolkit
from tests.backends import TWINS, Backend, Clock

LOG = "".join(
    f"2026-01-01 12:{i // 60 % 60:02}:{i % 60:02} INFO request {i} took {i * 7 % 900} ms\n"
    for i in range(2_000)
)
KEY = "ghp_" + "Ab3dE5" * 6
TINY = Policy(max_chars=20)


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("s")


def run(session: Session, called: str, /, **arguments: object) -> str:
    return next(tool for tool in toolkit(session) if tool.name == called).run(**arguments)


def get(session: Session, **arguments: object) -> str:
    return run(session, "get_artifact", **arguments)


def body(answer: str) -> str:
    return answer.partition("\n")[2]


def cursor(answer: str) -> str | None:
    match = re.search(r'cursor="([^"]+)"', answer.partition("\n")[0])
    return match[1] if match else None


# What a model is shown


def test_all_three_schemas_have_fewer_than_420_tokens_and_one_alone_fewer_than_265(
    session: Session,
) -> None:
    for form in ("as_openai", "as_openai_responses", "as_anthropic"):
        assert tokens.exact(json.dumps([getattr(tool, form)() for tool in toolkit(session)])) < 420
    alone = toolkit(session, only=("get",))[0]
    assert tokens.exact(json.dumps([alone.as_anthropic()])) < 265


def test_a_model_can_have_only_some_of_the_tools(session: Session) -> None:
    assert [tool.name for tool in toolkit(session, only=["store", "get"])] == [
        "get_artifact",
        "store_artifact",
    ]
    alone = toolkit(session, only=("get",))[0]
    assert "there are no artifacts yet" in alone.run(pointer="nothing")
    ref = session.put(LOG, name="weather")
    assert f'newest: {ref.pointer} "weather"' in alone.run(pointer="nothing")


def test_sql_is_described_only_if_it_is_installed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "DuckDB" in toolkit(session)[0].parameters["properties"]["query"]["description"]
    monkeypatch.setitem(sys.modules, "duckdb", None)
    assert "DuckDB" not in toolkit(session)[0].parameters["properties"]["query"]["description"]


def test_the_names_follow_the_style_of_the_host(session: Session) -> None:
    def named(**options: Any) -> list[str]:
        return [tool.name for tool in toolkit(session, **options)]

    assert named() == ["get_artifact", "list_artifacts", "store_artifact"]
    assert named(style="camel") == ["getArtifact", "listArtifacts", "storeArtifact"]
    assert named(style="dotted", prefix="mem.") == [
        "mem.artifacts.get",
        "mem.artifacts.list",
        "mem.artifacts.store",
    ]
    assert "x_listArtifacts()" in toolkit(session, style="camel", prefix="x_")[0].run(
        pointer="nothing"
    )


def test_each_schema_has_the_form_that_its_provider_expects(session: Session) -> None:
    tool = toolkit(session)[0]
    schema = tool.as_openai()["function"]["parameters"]
    assert tool.as_openai()["type"] == "function"
    assert schema["required"] == ["pointer"]
    assert list(schema["properties"]) == [
        "pointer", "lines", "grep", "context", "ignore_case", "count", "last", "query", "code",
        "cursor",
    ]  # fmt: skip
    assert (
        tool.as_openai_responses()["name"]
        == tool.as_anthropic()["name"]
        == tool.as_mcp()["name"]
        == "get_artifact"
    )
    assert tool.as_anthropic()["input_schema"] == tool.as_mcp()["inputSchema"] == schema
    tool.as_anthropic()["input_schema"]["properties"].clear()
    assert tool.as_anthropic()["input_schema"] == schema


@pytest.mark.parametrize(
    "wrong",
    [
        {"style": "kebab"},
        {"prefix": "a b"},
        {"max_chars": 100},
        {"max_store_bytes": 0},
        {"only": ()},
        {"only": "get"},
        {"only": ("read",)},
    ],
)
def test_invalid_options_are_errors(session: Session, wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument):
        toolkit(session, **wrong)


# get


def test_a_page_begins_with_one_line_about_it(session: Session) -> None:
    ref = session.put(LOG, name="run", kind="log")
    answer = get(session, pointer=ref.pointer)
    first = answer.partition("\n")[0]
    for part in (
        ref.pointer,
        '"run"',
        "log",
        "text/plain",
        f"{len(LOG):,} bytes",
        "of 2,000",
        "cursor=",
    ):
        assert part in first
    assert LOG.startswith(body(answer))


def test_cursors_lead_through_the_whole_artifact(session: Session) -> None:
    pointer, pages, at = session.put(LOG).pointer, "", None
    while True:
        answer = get(session, pointer=pointer, cursor=at)
        assert len(answer) <= 8_000
        pages += body(answer)
        at = cursor(answer)
        if at is None:
            break
    assert pages == LOG


def test_lines_grep_and_query_read_parts_of_an_artifact(session: Session) -> None:
    session.put(LOG, name="run")
    session.put({"rows": [{"id": 7}]}, name="rows")
    assert body(get(session, pointer="run", lines="3:4")) == "".join(
        LOG.splitlines(keepends=True)[2:4]
    )
    assert body(get(session, pointer="run", lines=3)) == LOG.splitlines(keepends=True)[2]
    assert "1000:" in body(get(session, pointer="run", grep="request 999 "))
    assert body(get(session, pointer="rows", query="$.rows[0].id")).strip() == "7"
    assert body(get(session, pointer=f"{session.list(name='rows')[0].pointer}#/rows/0/id")) == "7"


def test_context_and_ignore_case_can_be_given_as_text(session: Session) -> None:
    session.put(LOG, name="run")
    for context, ignore_case in ((1, True), ("1", "true"), (1.0, "True")):
        answer = body(
            get(
                session,
                pointer="run",
                grep="REQUEST 999 ",
                context=context,
                ignore_case=ignore_case,
            )
        )
        assert [line.split("2026")[0] for line in answer.split("\n")] == ["999-", "1000:", "1001-"]
    assert "context must be an integer (write context=2)" in get(
        session, pointer="run", grep="x", context="two"
    )
    assert "ignore_case must be a boolean" in get(session, pointer="run", grep="x", ignore_case=[1])


def test_several_slices_of_lines_come_in_one_answer(session: Session) -> None:
    session.put(LOG, name="run")
    lines = LOG.splitlines(keepends=True)
    assert body(get(session, pointer="run", lines="3:4,-1:")) == "".join(
        [*lines[2:4], "--\n", lines[-1]]
    )


ORDERS = {
    "total": 300,
    "items": [{"id": n, "title": f"Item {n}"} for n in range(300)],
    "pages": [1, 2],
}


@pytest.mark.parametrize(
    ("query", "first", "text"),
    [
        (
            "$.items[?@.name == 'Item 7'].id",
            "nothing matches; this is $.items[?@.title == 'Item 7'].id; 1 result",
            "7",
        ),
        ("$.Items.id-", "read as $.items[*].id; 300 results", "0\n1"),
        (".items[3].title", "read as $.items[3].title; 1 result", '"Item 3"'),
        ("items[3].title", "read as $.items[3].title; 1 result", '"Item 3"'),
        ("item 299", 'read as grep="item 299"; match 1 of 1', '1:#/items/299 {"id":299,'),
        ("titles of item 299", 'read as grep="titles|item|299"; matches 1-', "1:"),
        ("SELECT max(id) AS m FROM artifact", "1 row, 1 column; artifact is #/items", "m\n299"),
        ("SELECT max(id) AS m FROM orders", "artifact is #/items; orders is artifact", "m\n299"),
        ('SELECT max(id) AS m FROM "{}#/items"', "1 row, 1 column", "m\n299"),
        ("$.nothing", "0 results; nothing matches: $ has total, items, pages", ""),
    ],
)
def test_a_query_that_is_almost_right_is_answered_and_the_first_line_says_how(
    session: Session, query: str, first: str, text: str
) -> None:
    pointer = session.put(ORDERS).pointer
    answer = get(session, pointer=pointer, query=query.replace("{}", pointer))
    assert first in answer.partition("\n")[0]
    assert body(answer).startswith(text)


@pytest.mark.parametrize(
    ("pattern", "first"),
    [
        ("foo(", "not a valid pattern, searched as plain text; match 1 of 1"),
        ("C++", "not a valid pattern, searched as plain text; match 1 of 1"),
        ("$5.00", "no match as written, as plain text; match 1 of 1"),
        ("DISK FULL", "no match as written, ignoring case; match 1 of 1"),
        ("nothing", "no match in 4 lines"),
    ],
)
def test_a_pattern_that_was_meant_as_text_is_searched_as_text(
    session: Session, pattern: str, first: str
) -> None:
    session.put("call foo(bar)\nC++ code\nit costs $5.00\nDisk full\n", name="run")
    assert first in get(session, pointer="run", grep=pattern)


def test_an_invalid_pattern_that_is_not_found_as_text_is_an_error(session: Session) -> None:
    session.put(LOG, name="run")
    assert "[error: RE2 rejects the pattern" in get(session, pointer="run", grep="foo(")


@pytest.mark.parametrize(
    "written", ["ORDERS", "art:Orders", "see {} here", "[{}; data]", "pointer={}"]
)
def test_a_name_or_pointer_is_found_however_it_is_written(session: Session, written: str) -> None:
    ref = session.put("hello", name="Orders")
    assert body(get(session, pointer=written.format(ref.pointer))) == "hello"


def test_a_name_can_have_a_fragment(session: Session) -> None:
    session.put(ORDERS, name="orders")
    assert body(get(session, pointer="orders#/items/3/title")) == "Item 3"


def test_a_model_is_never_asked_to_install_something(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    pointer = session.put(ORDERS).pointer
    answers = [
        get(session, pointer=pointer, query=query)
        for query in ("SELECT 1 FROM artifact", "zzz qqq")
    ]
    assert "not available here" in answers[0]
    assert not re.search(r"SQL|pip|install|extra", " ".join(answers))


def test_a_large_query_result_says_where_all_of_it_is(session: Session) -> None:
    session.put([{"id": i, "text": "x" * 50} for i in range(2_000)], name="rows")
    answer = get(session, pointer="rows", query="$[*].text")
    match = re.search(r'more: pointer="(art:[0-9a-f]+)"', answer)
    assert match is not None
    assert "xxx" in get(session, pointer=match[1], lines="1999")


@pytest.mark.parametrize(
    "written",
    ["{0}", " {0}\n", '"{0}"', "`{0}`", "<{0}>", "'`{0}`'", "{1}", "{2}", '"{3}"', "“{0}”"],
)
def test_a_pointer_can_be_written_in_any_harmless_way(session: Session, written: str) -> None:
    pointer = session.put("hello").pointer
    asked = written.format(pointer, pointer[4:], pointer.upper(), pointer[4:].upper())
    assert body(get(session, pointer=asked)) == "hello"


def test_a_name_with_quotes_is_taken_as_it_is(session: Session) -> None:
    session.put("quoted", name="'run'")
    session.put("bare", name="run")
    assert body(get(session, pointer="'run'")) == "quoted"
    assert body(get(session, pointer='"run"')) == "bare"


def test_an_unknown_pointer_gets_the_nearest_names_and_nothing_is_guessed(session: Session) -> None:
    ref = session.put(LOG, name="pytest output")
    session.put("other", name="weather")
    answer = get(session, pointer="pytest outptu")
    assert "[no artifact found for 'pytest outptu']" in answer
    assert f'{ref.pointer} "pytest output"' in answer
    assert "weather" not in answer
    near = ref.pointer[:-1] + ("0" if ref.pointer[-1] != "0" else "1")
    assert f"[no artifact found for '{near}']" in get(session, pointer=near)
    assert ref.pointer in get(session, pointer=near)


def test_an_artifact_of_another_session_is_answered_like_a_missing_one(session: Session) -> None:
    theirs = session.store.session("other").put("theirs", name="secret plan").pointer
    answer = get(session, pointer=theirs)
    assert f"[no artifact found for '{theirs}']" in answer
    assert (
        answer.partition("]")[2].split(" ~")[0]
        == get(session, pointer="art:" + "0" * 12).partition("]")[2].split(" ~")[0]
    )


def test_an_expired_artifact_is_reported_as_expired(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=60)
    pointer = session.put(LOG, name="run").pointer
    clock.advance(120)
    assert "expired" in get(session, pointer=pointer)


def test_an_ambiguous_pointer_names_the_candidates(session: Session) -> None:
    one, two = (session.put(text) for text in TWINS)
    answer = get(session, pointer=one.pointer[:16])
    assert two.pointer in answer


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "pointer is missing"), ({"pointer": None}, "pointer is missing"), ({"pointer": 7}, "int"),
        ({"pointer": "run", "offset": 3}, "'offset'"), ({"pointer": "run", "lines": "9:2"}, "9:2"),
        ({"pointer": "run", "grep": "("}, "error"), ({"pointer": "run", "query": "what?"}, "query"),
        ({"pointer": "run", "cursor": "zzz"}, "cursor"), ({"pointer": "run", "lines": [1, 2]}, "an array"),
        ({"pointer": "run", "grep": "a", "query": "$"}, "cannot be combined"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_answered_with_an_explanation(
    session: Session, arguments: dict[str, Any], says: str
) -> None:
    session.put(LOG, name="run")
    answer = get(session, **arguments)
    assert answer.startswith("[error: ")
    assert says in answer
    assert len(answer) <= 1_100
    assert not re.search(
        r"\b(?:chars|diff|literal|invert|max_chars)\b", answer
    )  # the tool does not have these


def test_empty_arguments_count_as_omitted(session: Session) -> None:
    session.put("hello", name="run")
    assert body(get(session, pointer="run", lines="", grep=None, query="", cursor="")) == "hello"


# list


def test_each_artifact_is_listed_once_however_many_names_it_has(session: Session) -> None:
    ref = session.put(LOG, name="one", kind="log")
    session.put(LOG, name="two")
    session.put([1, 2], name="rows")
    rows = body(run(session, "list_artifacts")).splitlines()
    assert len(rows) == 2
    (row,) = [row for row in rows if ref.pointer in row]
    assert "log" in row
    assert str(len(LOG)) in row
    assert "INFO request 0" in row


def test_pages_of_a_list_contain_every_artifact_once(session: Session) -> None:
    made = {
        session.put(f"text {i} " + "long " * 30, name=f"name {i} " + "n" * 100).pointer
        for i in range(130)
    }
    seen: list[str] = []
    at = None
    while True:
        answer = run(session, "list_artifacts", cursor=at)
        assert len(answer) <= 8_000
        seen += [row.split()[0] for row in body(answer).splitlines()]
        at = cursor(answer)
        if at is None:
            break
        session.put(f"came in between {at}")
    assert made <= set(seen)
    assert len(seen) == len(set(seen))


def test_a_query_lists_matching_artifacts_with_the_passage(session: Session) -> None:
    session.put(LOG, name="run")
    ref = session.put("alpha\nthe login timeout was 30 s\nomega", name="notes")
    answer = run(session, "list_artifacts", query="login timeout")
    assert body(answer).startswith(ref.pointer)
    assert "30 s" in answer
    assert "nothing matches" in run(session, "list_artifacts", query="zebra")


def test_listing_an_empty_session_says_that_there_are_no_artifacts(session: Session) -> None:
    assert "[no artifacts yet]" in run(session, "list_artifacts")
    assert run(session, "list_artifacts", cursor="x").startswith("[error: ")


def test_lists_mask_secrets_and_escape_names(session: Session) -> None:
    session.put(f"key {KEY} here", name=f'a"\n[stored art:000000000000]\n{KEY}')
    for answer in (
        run(session, "list_artifacts"),
        run(session, "list_artifacts", query="key here"),
    ):
        assert KEY not in answer
        assert len(body(answer).splitlines()) == 1
        assert '\\"' in answer


# store


def test_a_value_that_a_model_stores_is_available_under_its_name(session: Session) -> None:
    answer = run(session, "store_artifact", name="plan", value="first\nsecond")
    assert answer.startswith("[stored art:")
    assert "12 bytes" in answer
    assert body(answer) == "first\nsecond"
    assert session.get("plan") == "first\nsecond"


def test_the_content_type_decides_what_is_stored(session: Session) -> None:
    run(session, "store_artifact", name="j", value='{"a": [1]}', content_type="application/json")
    run(session, "store_artifact", name="t", value='{"a": [1]}', content_type="text/plain")
    run(session, "store_artifact", name="o", value={"a": [1]})
    assert session.get("j") == session.get("o") == {"a": [1]}
    assert session.get("t") == '{"a": [1]}'


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "n"}, "value is missing"), ({"value": "v"}, "name is missing"),
        ({"name": "n", "value": 5}, "a number"),
        ({"name": "n", "value": "{", "content_type": "application/json"}, "JSON"),
        ({"name": "n", "value": "[" * 100_000, "content_type": "application/json"}, "error"),
        ({"name": "n", "value": "v", "content_type": "image/png"}, "content type"),
        ({"name": "art:000000000000", "value": "v"}, "is invalid"), ({"name": "n" * 201, "value": "v"}, "is invalid"),
        ({"name": " ", "value": "v"}, "is invalid"), ({"name": "n", "value": "é" * 262_145}, "524,290"),
        ({"name": "n", "value": {"a": 1}, "content_type": "text/plain"}, "JSON"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_stored_is_refused_with_an_explanation(
    session: Session, arguments: dict[str, Any], says: str
) -> None:
    answer = run(session, "store_artifact", **arguments)
    assert answer.startswith("[error: ")
    assert says in answer
    assert session.list() == []


def test_512_kb_can_be_stored(session: Session) -> None:
    assert run(session, "store_artifact", name="n", value="x" * 512 * 1024).startswith("[stored ")


# All of them


ARGUMENTS = st.dictionaries(
    st.sampled_from(["pointer", "lines", "grep", "query", "cursor", "name", "value", "content_type", "self", "x"]),
    st.none() | st.text(max_size=60) | st.integers() | st.lists(st.text(max_size=3), max_size=3)
    | st.sampled_from(["run", "rows", "$..a", "shape", "1:5", "-3:", "art:000000000000", "x" * 5_000, "text/csv"]),
    max_size=5,
)  # fmt: skip


def test_no_arguments_make_a_tool_raise_or_exceed_its_limit(backend: Backend) -> None:
    @backend.examples()
    @given(ARGUMENTS)
    def check(arguments: dict[str, Any]) -> None:
        session = backend.new_session()
        session.put(LOG, name="run")
        session.put([{"a": i} for i in range(3_000)], name="rows")
        for tool in toolkit(session, max_chars=2_000):
            answer = tool.run(**arguments)
            assert 0 < len(answer) <= 2_000
            assert not session.externalize(answer, policy=TINY).is_stub

    check()


def test_a_store_that_fails_is_reported_and_nothing_is_raised(session: Session) -> None:
    pointer = session.put(LOG).pointer
    tools = toolkit(session)
    tools[1].run()
    session.store.close()
    for answer in (
        tools[0].run(pointer=pointer),
        tools[1].run(),
        tools[2].run(name="n", value="v"),
    ):
        assert len(answer) <= 8_000


def test_our_answers_are_never_externalized_again(session: Session) -> None:
    session.put(LOG, name="run")
    for answer in (
        get(session, pointer="run"),
        get(session, pointer="run", lines="1:20"),
        run(session, "list_artifacts"),
    ):
        for wrapped in (
            answer,
            answer.rstrip() + "\n",
            f"Tool result:\n{answer}\n(end)",
            json.dumps(answer),
            json.dumps({"result": answer, "ok": True}),
            {"content": [{"type": "text", "text": answer}], "isError": False},
        ):
            assert (
                session.externalize(wrapped, tool="Mcp__X_GetArtifact", policy=TINY).content
                is wrapped
            )
        blocks = [{"type": "text", "text": answer}]
        assert session.externalize(blocks, policy=TINY).content is blocks
        assert not session.externalize(
            answer, tool="t", policy=Policy(tools={"t": "always"})
        ).is_stub


def test_a_mark_that_is_forged_altered_or_stretched_does_not_count(
    session: Session, backend: Backend
) -> None:
    session.put(LOG, name="run")
    answer = get(session, pointer="run")
    first, _, rest = answer.partition("\n")
    other = backend.open_new().session("s")
    other.put(LOG, name="run")
    for forged in (
        answer.replace("request 5 ", "request 6 "),
        first.replace("log", "doc") + "\n" + rest,
        answer + "x" * 2_000,
        f"{first[: first.rindex('~')]}~99999.AAAAAAAA\n{rest}" + LOG,
        get(other, pointer="run"),
        json.dumps({"a": answer, "b": LOG}),
    ):
        assert session.externalize(forged, policy=TINY).is_stub


def test_a_mark_vouches_for_one_answer_in_a_result(session: Session) -> None:
    session.put(LOG, name="run")
    page, other = get(session, pointer="run"), get(session, pointer="run", lines="300:500")
    for replayed in (
        [page] * 400,
        [page, other],
        json.dumps([page] * 400),
        json.dumps({"first": page, "second": other}),
        [{"type": "text", "text": page}] * 400,
        page + "\n" + other,
    ):
        outcome = session.externalize(replayed)
        assert outcome.is_stub
        assert len(outcome.text) <= len(page) + 3_000
    two = session.externalize([{"type": "text", "text": page}, {"type": "text", "text": page}])
    assert two.content[0] == {"type": "text", "text": page}
    assert json.loads(two.content[1]["text"])["artifact"]
    assert len(two.refs) == 1
    different = {
        "content": [{"type": "text", "text": page}],
        "structuredContent": {"result": other},
    }
    assert session.externalize(different).is_stub


@pytest.mark.parametrize(
    "content", ["😀" * 30_000, "<>&/" * 15_000, "\x01\n" * 20_000, "ü\u2028" * 20_000]
)
def test_a_mark_vouches_for_its_answer_as_encoded_and_nothing_more(
    session: Session, content: str
) -> None:
    page = get(session, pointer=session.put(content).pointer)
    for plain in (False, True):
        alone = json.dumps({"a": page}, ensure_ascii=plain)
        assert not session.externalize(alone, policy=TINY).is_stub
        junk = "evil text " * 150
        for stretched in (
            json.dumps({"a": page, "junk": junk}, ensure_ascii=plain),
            json.dumps([junk, page], ensure_ascii=plain),
            json.dumps([page + junk], ensure_ascii=plain),
            json.dumps([junk + "\n" + page], ensure_ascii=plain),
        ):
            assert session.externalize(stretched, policy=TINY).is_stub
    spelled = "".join(f"\\u{ord(one):04x}" for one in "evil text " * 50)
    assert session.externalize(f'["{spelled}", {json.dumps(page)}]', policy=TINY).is_stub


def test_a_mark_vouches_for_an_answer_only_as_our_encoders_would_escape_it(
    session: Session,
) -> None:
    page = get(session, pointer=session.put("word " * 20_000).pointer)
    spelled = "".join(one if one in " ~" else f"\\u{ord(one):04x}" for one in page)
    assert json.loads(f'"{spelled}"') == page
    assert session.externalize(f'"{spelled}"', policy=TINY).is_stub


def test_a_mark_does_not_vouch_for_blanks_after_the_answer(session: Session) -> None:
    session.put(LOG, name="run")
    page = get(session, pointer="run")
    stretched = (
        re.sub(r" ~(\d+)\.", lambda found: f" ~{int(found[1]) + 50_000}.", page, count=1)
        + " " * 50_000
    )
    assert session.externalize(stretched, policy=TINY).is_stub


def test_a_mark_vouches_for_nothing_that_json_hides_around_the_answer(session: Session) -> None:
    session.put(LOG, name="run")
    page = json.dumps(get(session, pointer="run"))
    for stretched in (
        "[" + " " * 100_000 + page + "]",
        "[" + "[]," * 30_000 + page + "]",
        '{"a":"' + "x" * 100_000 + '","a":' + page + "}",
        '{"' + "x" * 100_000 + '":' + page + "}",
        "[" + "1," * 30_000 + page + "]",
        "[" + page.replace("e", "\\u0065") + "]",
    ):
        assert session.externalize(stretched, policy=TINY).is_stub


def test_an_answer_that_the_structured_content_repeats_stays_in_both(session: Session) -> None:
    session.put(LOG, name="run")
    page = get(session, pointer="run")
    result = {"content": [{"type": "text", "text": page}], "structuredContent": {"result": page}}
    assert session.externalize(result, policy=TINY).content is result


def test_a_stub_is_not_externalized_again(session: Session) -> None:
    stub = session.externalize(LOG).text
    assert session.externalize(stub, policy=TINY).text == stub
    assert session.externalize('{"stub":"' + LOG, policy=TINY).text != stub


def test_a_model_waits_for_calls_that_are_still_running(session: Session) -> None:
    go = threading.Event()

    def slow(lines: int) -> str:
        go.wait(30)
        return "a line\n" * lines

    executor = ToolExecutor(session, [slow])
    *_, wait = toolkit(session, handles=executor)
    assert (wait.name, len(toolkit(session))) == ("wait_for_call", 3)
    small, large = (
        executor.start(ToolCall(f"c{lines}", "slow", {"lines": lines})) for lines in (3, 90_000)
    )
    assert "still running" in wait.run(handle=small.id, seconds=0)
    go.set()
    assert wait.run(handle=small.id, seconds="20").endswith("a line\na line\na line\n")
    answer = wait.run(handle=large.id)
    assert '"artifact":"art:' in answer
    assert len(answer) < 2_000


def test_waiting_for_a_call_answers_bad_arguments_with_an_error(session: Session) -> None:
    *_, wait = toolkit(session, style="camel", handles=ToolExecutor(session, []))
    assert wait.name == "waitForCall"
    assert "no started call has the handle" in wait.run(handle="nothing")
    assert "seconds must be a number" in wait.run(handle="nothing", seconds="soon")
    assert "seconds must be a number" in wait.run(handle="nothing", seconds="nan")
    assert "handle is missing" in wait.run()


def test_the_result_of_waiting_for_a_call_never_exceeds_a_page(session: Session) -> None:
    executor = ToolExecutor(
        session, {"wide": lambda: "word " * 2_400}, policy=Policy(max_chars=12_000)
    )
    *_, wait = toolkit(session, max_chars=2_000, handles=executor)
    assert len(wait.run(handle=executor.start(ToolCall("c", "wide")).id)) <= 2_000
