"""Reading by a program: what it finds, what comes back, and what the session lets it open."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Session, programs, toolkit
from coatcheck.errors import InvalidArgument, NotFound, ProgramFailed
from coatcheck.programs.reading import MAX_TEXT, NOTHING

PDF = Path(__file__).parents[1] / "reading/pdfs/groff.pdf"
ORDERS = [{"id": n, "city": "Bern" if n % 3 else "Ulm", "total": n * 10} for n in range(1, 301)]
CSV = "id,name,price\n1,apple,1.5\n2,pear,\n3,fig,2.25\n4,plum,4\n"


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    yield
    programs.close()


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


def answer(session: Session, value: object, code: str, **about: str) -> str:
    return session.read(session.put(value, **about), code=code).text  # type: ignore[arg-type]


# What a program finds


def test_json_is_data(session: Session) -> None:
    code = "Counter(order['city'] for order in data).most_common()"
    assert answer(session, ORDERS, code) == "[('Bern', 200), ('Ulm', 100)]"


def test_a_table_is_rows_of_texts(session: Session) -> None:
    code = "sum(float(row['price'] or 0) for row in data), data[0]"
    expected = "(7.75, {'id': '1', 'name': 'apple', 'price': '1.5'})"
    assert answer(session, CSV, code, media_type="text/csv") == expected


def test_a_quoted_line_feed_does_not_end_a_row(session: Session) -> None:
    table = 'id;note\n1;"two\nlines"\n2;one\n'
    assert answer(session, table, "data[0]['note'], len(data)", media_type="text/csv") == (
        "('two\\nlines', 2)"
    )


def test_json_lines_are_a_list(session: Session) -> None:
    text = "".join(json.dumps(order) + "\n" for order in ORDERS)
    assert answer(session, text, "max(data, key=lambda order: order['total'])['id']") == "300"


def test_rows_in_a_text_are_data(session: Session) -> None:
    text = "rows:\n" + repr([(n, f"name {n}") for n in range(50)])
    assert answer(session, text, "len(data), data[7]") == "(50, {'c1': 7, 'c2': 'name 7'})"


def test_lines_are_those_that_reads_count(session: Session) -> None:
    text = "a\u2028b\nc\x0cd\r\n\nlast\n"
    assert answer(session, text, "lines") == "['a\\u2028b', 'c\\x0cd', '', 'last']"


def test_text_is_decoded_by_its_mark(session: Session) -> None:
    data = "grün\n".encode("utf-16")
    assert answer(session, data, "text.strip(), len(lines)", media_type="text/plain") == (
        "('grün', 1)"
    )


def test_a_web_page_is_its_source_and_a_document_its_text(session: Session) -> None:
    page = "<html><head><title>t</title></head><body><p>one</p></body></html>"
    assert answer(session, page, "text.count('<p>')") == "1"
    pytest.importorskip("pypdf")
    printed = session.read(session.put(PDF.read_bytes()), query="text").text
    found = session.read(session.put(PDF.read_bytes()), code="text")
    assert found.text == printed
    assert "of the text of page" in found.shown


def test_binary_content_is_bytes(session: Session) -> None:
    data = b"\x89PNG\r\n\x1a\n" + bytes(100)
    assert answer(session, data, "len(data), data[1:4]") == "(108, b'PNG')"


def test_a_fragment_is_read_like_an_artifact(session: Session) -> None:
    ref = session.put({"orders": ORDERS})
    assert session.read(f"{ref.pointer}#/orders/1", code="data['total']").text == "20"


def test_a_program_that_makes_its_own_data_does_not_need_rows(session: Session) -> None:
    assert answer(session, "one two\n", "data = text.split()\nlen(data)") == "2"


def test_a_program_opens_other_artifacts_of_its_session(session: Session) -> None:
    session.put(ORDERS, name="orders")
    table = session.put(CSV, media_type="text/csv")
    code = f"len(artifact('orders')), artifact('{table.pointer}')[3]['name']"
    assert answer(session, "x", code) == "(300, 'plum')"


def test_a_program_opens_nothing_that_its_session_does_not_see(session: Session) -> None:
    other = session.store.session("other")
    theirs = other.put("secret of another session")
    with pytest.raises(ProgramFailed, match="LookupError in line 1: no artifact found"):
        answer(session, "x", f"artifact('{theirs.pointer}')")
    assert (
        answer(
            session,
            "x",
            f"try:\n    artifact('{theirs.pointer}')\nexcept LookupError:\n    print('no')",
        )
        == "no"
    )


def test_bounded_reads_work_on_any_artifact(session: Session) -> None:
    orders = session.put(ORDERS)
    log = session.put("one\ntwo\nthree\n" * 100)
    code = f"""
print(lines_of("{log.pointer}", "2:3"))
print(grep("{log.pointer}", "THREE", ignore_case=True).splitlines()[:2])
print(query("{orders.pointer}", "$[?@.id < 3].total"))
"""
    assert answer(session, "x", code) == "two\nthree\n\n['3:three', '6:three']\n[10, 20]"


def test_sql_in_a_program_gives_rows(session: Session) -> None:
    pytest.importorskip("duckdb")
    code = "query(p, 'SELECT city, sum(total) AS all FROM artifact GROUP BY city ORDER BY city')"
    expected = "[{'city': 'Bern', 'all': '300000'}, {'city': 'Ulm', 'all': '151500'}]"
    assert answer(session, ORDERS, code) == expected


def test_a_part_of_a_result_is_never_taken_for_the_whole(session: Session) -> None:
    big = session.put("x" * 99 + "\n" + ("y" * 99 + "\n") * 60_000)
    with pytest.raises(ProgramFailed, match="the result is too large"):
        session.read(big, code="lines_of(p, '1:')")
    assert session.read(big, code="len(lines_of(p, '1:100'))").text == "10000"


def test_content_over_64_mb_is_read_in_parts(session: Session) -> None:
    huge = session.put("0123456789abcde\n" * ((MAX_TEXT >> 4) + 1))
    assert session.read(huge, code="lines_of(p, '7').strip()").text == "0123456789abcde"
    with pytest.raises(ProgramFailed, match="name 'text' is not defined") as caught:
        session.read(huge, code="len(text)")
    assert "a program gets up to 67,108,864: use lines_of" in caught.value.hint


# What comes back


def test_what_is_printed_comes_with_the_last_value(session: Session) -> None:
    page = session.read(session.put("a\nb\n"), code="print('lines:')\nlen(lines)")
    assert (page.text, page.shown) == ("lines:\n2", "the program's output, 8 characters")


def test_a_program_that_prints_nothing_gets_a_note(session: Session) -> None:
    page = session.read(session.put("a"), code="for line in lines:\n    line.upper()")
    assert (page.text, page.shown) == ("", NOTHING)


def test_output_over_a_page_becomes_an_artifact(session: Session) -> None:
    orders, log = session.put(ORDERS), session.put("a\nb\n")
    code = f"artifact('{log.pointer}')\nfor order in data: print(order)"
    page = session.read(orders, code=code, max_chars=1_000)
    assert page.derived is not None
    assert page.text == "".join(f"{order}\n" for order in ORDERS)[: len(page.text)]
    whole = session.ref(page.derived)
    assert whole is not None
    assert session.get(whole) == "\n".join(map(str, ORDERS))
    assert whole.parents == (orders.artifact_id, log.artifact_id)
    assert json.loads(whole.request or "") == {"code": code}


def test_the_same_program_over_the_same_content_prints_the_same(session: Session) -> None:
    code = "import random, time\nprint(time.time(), random.random(), {'a', 'b', 'c'})\nhash('a')"
    ref = session.put("a\n")
    assert session.read(ref, code=code).text == session.read(ref, code=code).text


def test_the_clock_shows_when_the_artifact_was_stored(session: Session) -> None:
    ref = session.put("a\n")
    code = "datetime.datetime.now().isoformat()"
    assert session.read(ref, code=code).text == ref.created_at.strftime("%Y-%m-%dT%H:%M:%S")


def test_an_error_says_what_was_printed_before(session: Session) -> None:
    with pytest.raises(ProgramFailed) as caught:
        session.read(session.put("a"), code="print('one')\n\n1 / 0")
    assert caught.value.message == "ZeroDivisionError in line 3: division by zero"
    assert (caught.value.printed, caught.value.line) == ("one\n", 3)


def test_a_missing_name_says_why(session: Session) -> None:
    with pytest.raises(ProgramFailed, match="the content is text without rows: use text or lines"):
        answer(session, "plain prose\n", "len(data)")
    with pytest.raises(ProgramFailed, match="the content is not valid JSON: use text or lines"):
        answer(session, '{"a": ', "len(data)", media_type="application/json")
    with pytest.raises(ProgramFailed, match="the content is binary: data has its bytes"):
        answer(session, b"\x00\xff" * 50, "len(text)")


@pytest.mark.parametrize("other", [{"lines": "1:3"}, {"grep": "a"}, {"query": "shape"}])
def test_a_program_is_not_combined_with_another_read(session: Session, other: dict) -> None:
    with pytest.raises(InvalidArgument, match="code cannot be combined"):
        session.read(session.put("a"), code="1", **other)


@pytest.mark.parametrize(
    ("code", "message"),
    [("", "code is empty"), ("x" * 70_000, "the limit is 65,536"), ("'\ud800'", "surrogate")],
)
def test_a_program_that_cannot_run_is_an_invalid_argument(
    session: Session, code: str, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        session.read(session.put("a"), code=code)


def test_a_program_over_a_missing_artifact_is_not_run(session: Session) -> None:
    with pytest.raises(NotFound):
        session.read("art:0123456789ab", code="while True: pass")


def test_a_program_over_a_result_that_was_cut_says_so(session: Session) -> None:
    text = "line\n" * 3_000 + "\n\n[Output truncated: 50,000 characters left out]"
    ref = session.put(text)
    cut = session.read(ref, lines="1:2").cut
    assert cut is not None
    assert session.read(ref, code="len(lines)").cut == cut


# The tool of a model


def test_a_model_reads_by_a_program(session: Session) -> None:
    ref = session.put(ORDERS)
    text = toolkit(session)[0].run(pointer=ref.pointer, code="sum(o['total'] for o in data)")
    assert text.splitlines()[0].startswith(f"[{ref.pointer}; ")
    assert "the program's output, 6 characters" in text.splitlines()[0]
    assert text.splitlines()[1] == "451500"


@pytest.mark.parametrize("other", [{"cursor": "abcdefgh"}, {"grep": "a"}, {"context": 2}])
def test_a_model_that_combines_a_program_gets_an_answer(session: Session, other: dict) -> None:
    ref = session.put("a\n")
    text = toolkit(session)[0].run(pointer=ref.pointer, code="1", **other)
    assert text.startswith("[error: ")
    assert "arguments are not the cause" not in text


def test_a_fence_around_a_program_does_not_count(session: Session) -> None:
    ref = session.put("a\nb\n")
    fenced = "```python\n    len(lines)\n```"
    assert toolkit(session)[0].run(pointer=ref.pointer, code=fenced).splitlines()[1] == "2"


def test_the_error_of_a_program_is_an_answer_with_what_it_printed(session: Session) -> None:
    ref = session.put("a\nb\n")
    text = toolkit(session)[0].run(pointer=ref.pointer, code="print(lines[0])\nlines[7]")
    first, rest = text.split("\n", 1)
    assert "error: IndexError in line 2: list index out of range" in first
    assert rest.startswith("a")


def test_only_tools_that_can_run_programs_describe_them(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "code" in toolkit(session)[0].parameters["properties"]
    monkeypatch.setattr(programs, "is_available", lambda: False)
    assert "code" not in toolkit(session)[0].parameters["properties"]
