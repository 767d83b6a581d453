"""`coatcheck read` and `search`, and coverage and previews in `ls` and `show`: in pipes, on
terminals, for scripts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import coatcheck
from coatcheck import errors
from coatcheck.cli.terminal import diff_lines, grep_lines, json_tokens, words_in
from coatcheck.reading.patterns import Pattern
from tests.test_cli import HOSTILE, STEERING, answer, call, on_terminal, run

LOG = "".join(f"{n:05} {'ERROR' if n % 100 == 0 else 'info'} step {n}\n" for n in range(1, 2001))


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "store"
    for name in ("COATCHECK_SESSION", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COATCHECK_STORE", str(folder))
    return folder


def put(content: str | bytes, name: str = "n", *options: str) -> str:
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    return answer("put", "-", "--name", name, *options, stdin=data).strip()


def record(*args: str) -> dict:
    found: dict = json.loads(answer(*args, "--json"))
    return found


# Reading in a pipe


def test_a_slice_is_exact_in_a_pipe_and_stderr_names_the_part() -> None:
    put("one\r\n\ttwo\x1b[31m\nthré")
    whole = run("read", "n")
    assert (whole.returncode, whole.stdout) == (0, "one\r\n\ttwo\x1b[31m\nthré".encode())
    assert whole.stderr == b"lines 1-3 of 3\n"
    assert run("read", "n", "--lines", "2").stdout == b"\ttwo\x1b[31m\n"
    assert run("read", "n", "--chars", "-4:").stdout == "thré".encode()


def test_the_tail_is_read_with_a_negative_number() -> None:
    put(LOG)
    assert answer("read", "n", "--lines", "-2:") == "".join(LOG.splitlines(keepends=True)[-2:])


def test_following_the_cursors_reads_the_whole_content() -> None:
    put(LOG)
    text, options = "", ["--max-chars", "6000"]
    for _ in range(100):
        page = run("read", "n", *options)
        text += page.stdout.decode()
        note = page.stderr.decode()
        assert note.count("\n") == 1
        if "--cursor" not in note:
            break
        options = ["--max-chars", "6000", *shlex.split(note.partition("add ")[2])]
    assert text == LOG
    assert record("ls")["coverage"] == {"shown_bytes": len(LOG), "size_bytes": len(LOG)}


def test_a_cursor_may_be_added_to_the_command_that_it_continues() -> None:
    put(LOG)
    arguments = (
        "read",
        "n",
        "--grep",
        "(error|failure){1}" + "x{0}" * 60,
        "-i",
        "--max-chars",
        "200",
    )
    first = record(*arguments)
    following = record(*arguments, "--cursor", first["cursor"])
    assert first["text"].startswith("100:00100 ERROR")
    assert following["matches"] == first["matches"] == 20
    assert int(following["text"].partition(":")[0]) == 100 * (first["text"].count("\n") + 2)


def test_grep_prints_numbered_lines_with_context_as_grep_does() -> None:
    put("alpha\nBeta\ngamma\ndelta\na.c\nabc\n")
    assert answer("read", "n", "--grep", "beta", "-i", "-C", "1") == "1-alpha\n2:Beta\n3-gamma\n"
    assert answer("read", "n", "--grep", "a$", "-v") == "5:a.c\n6:abc\n"
    assert answer("read", "n", "--grep", "a.c", "-F") == "5:a.c\n"
    assert answer("read", "n", "--grep", "a", "--lines", "4:5") == "4:delta\n5:a.c\n"
    assert call("read", "n", "--grep", "gamma").stderr == "match 1 of 1 in 6 lines\n"


def test_grep_counts_and_begins_at_the_end() -> None:
    put("".join(f"n={n % 2}\n" for n in range(500)))
    assert answer("read", "n", "--grep", "n=0|n=2", "-c") == "250 n=0\n0 n=2\n"
    assert answer("read", "n", "--grep", r"n=(\d)", "--count") == "250 0\n250 1\n"
    last = call("read", "n", "--grep", "n=1", "--last", "--max-chars", "200")
    assert last.stdout.endswith("498:n=1\n500:n=1\n")
    assert "-250 of 250 in 500 lines" in last.stderr


def test_a_grep_without_a_match_exits_with_1_and_prints_nothing() -> None:
    put(LOG)
    result = run("read", "n", "--grep", "nowhere")
    assert (result.returncode, result.stdout, result.stderr) == (
        1,
        b"",
        b"no match in 2,000 lines\n",
    )
    as_json = run("read", "n", "--grep", "nowhere", "--json")
    assert (as_json.returncode, json.loads(as_json.stdout)["matches"]) == (1, 0)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("read", "n", "--grep", "(?=x)"), "invalid_argument"),
        (("read", "n", "--lines", "x"), "invalid_argument"),
        (("read", "n", "--lines", "9999"), "invalid_argument"),
        (("read", "n", "--chars", "0:9", "--grep", "x"), "invalid_argument"),
        (("read", "n", "--context", "2"), "invalid_argument"),
        (("read", "n", "--max-chars", "3"), "invalid_argument"),
        (("read", "n", "--cursor", "forged_cursor"), "invalid_argument"),
        (("read", "n", "--query", "DROP TABLE artifact"), "invalid_argument"),
        (("read", "n", "--diff", "nothing"), "not_found"),
        (("read", "nothing"), "not_found"),
        (("search", " "), "invalid_argument"),
    ],
)
def test_a_failed_read_prints_one_line_and_exits_with_the_code_of_its_error(
    args: tuple[str, ...], code: str
) -> None:
    put(LOG)
    result = run(*args)
    assert (result.returncode, result.stdout) == (errors.CODES[code].exit, b"")
    assert result.stderr.startswith(b"coatcheck: ")
    assert result.stderr.count(b"\n") == 1


def test_queries_answer_in_json_csv_and_outlines() -> None:
    put('{"rows": [{"id": 1}, {"id": 2}]}', "doc")
    put("id,name\n1,one\n2,two\n", "table.csv", "--media-type", "text/csv")
    assert answer("read", "doc", "--query", "$.rows[*].id") == "1\n2\n"
    assert "rows: array of 2 objects" in answer("read", "doc", "--query", "shape")
    assert (
        answer("read", "table.csv", "--query", "SELECT name FROM artifact WHERE id = 2")
        == "name\ntwo\n"
    )


def test_a_fragment_is_read_like_an_artifact() -> None:
    pointer = put('{"rows": [{"id": 1}, {"id": 2}]}')
    assert answer("read", pointer + "#/rows/1") == '{"id":2}'


def test_a_diff_shows_what_changed_since_the_older_artifact() -> None:
    older = put("same\nold\n", "older")
    newer = put("same\nnew\n", "newer")
    assert (
        answer("read", "newer", "--diff", "older")
        == f"--- {older}\n+++ {newer}\n@@ -1,2 +1,2 @@\n same\n-old\n+new\n"
    )


def test_a_result_that_is_too_large_is_stored_as_its_own_artifact() -> None:
    put(json.dumps({"rows": [{"id": n} for n in range(5000)]}))
    page = record("read", "n", "--query", "$.rows[*]", "--max-chars", "1000")
    assert len(page["text"]) <= 1000
    assert answer("get", page["derived"]) == "\n".join(json.dumps({"id": n}) for n in range(5000))
    result = run("read", "n", "--query", "$.rows[*]", "--max-chars", "1000")
    assert result.stdout.decode().rstrip("\n") == page["text"].rstrip("\n")
    assert result.stderr.decode().endswith(f"to read on: coatcheck read {page['derived']}\n")
    assert record("show", page["derived"])["parents"] == [record("show", "n")["artifact_id"]]


def test_as_json_a_page_is_one_object_in_ascii_and_stderr_is_silent() -> None:
    pointer = put("é \x1b[31m\nmore\n")
    result = run("read", "n", "--grep", "é", "--json")
    assert result.stdout.isascii()
    assert (result.stdout.count(b"\n"), result.stderr) == (1, b"")
    assert json.loads(result.stdout) == {
        "text": "1:é \x1b[31m",
        "shown": "match 1 of 1 in 2 lines",
        "pointer": pointer,
        "cursor": None,
        "derived": None,
        "matches": 1,
        "matches_exact": True,
    }


def test_a_page_is_utf_8_in_a_pipe_with_any_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    put("é ☃\n")
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert run("read", "n").stdout == "é ☃\n".encode()


def test_content_that_is_not_text_is_described() -> None:
    put(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\1\0\0\0\0\2\x08\6\0\0\0", "image")
    assert "256 x 2 pixels" in answer("read", "image")


# Search


def test_search_prints_the_best_hit_first_with_a_command_to_read_on() -> None:
    put("nothing of interest\n", "other")
    pointer = put(
        "".join(f"line {n}\n" for n in range(500)) + "the turbine overheated\nat noon\n",
        "plant\tlog",
    )
    (row,) = answer("search", "turbine", "overheated").splitlines()
    columns = row.split("\t")
    assert columns[:2] == [pointer, "plant\\tlog"]
    first, last = map(int, columns[2].split("-"))
    assert first <= 501 <= last
    assert "the turbine overheated" in columns[3]
    assert columns[4] == f"coatcheck read {pointer} --lines {first}:"
    assert "the turbine overheated" in answer(*shlex.split(columns[4])[1:])


def test_search_as_json_gives_one_line_for_each_hit() -> None:
    for number in range(3):
        put(f"the turbine number {number}\n", f"name {number}")
    hits = [
        json.loads(line)
        for line in answer("search", "turbine", "--limit", "2", "--json").splitlines()
    ]
    assert len(hits) == 2
    assert set(hits[0]) == {"pointer", "name", "lines", "passage", "score", "read_on"}
    assert hits[0]["lines"] == [1, 1]


def test_the_command_to_read_on_uses_the_given_session_and_store(tmp_path: Path) -> None:
    where = ("--session", "it's mine", "--store", str(tmp_path / "a b"))
    put("the turbine\n", "n", *where)
    (hit,) = answer("search", "turbine", "--json", *where).splitlines()
    assert answer(*shlex.split(json.loads(hit)["read_on"])[1:]) == "the turbine\n"


def test_a_search_that_finds_nothing_prints_nothing_and_says_so() -> None:
    result = run("search", "turbine")
    assert (result.returncode, result.stdout) == (0, b"")
    assert result.stderr.count(b"\n") == 1


# Coverage and previews


def test_ls_prints_how_much_of_an_artifact_was_read() -> None:
    put("0123456789\n" * 1000)
    assert answer("ls").split("\t")[3] == "0%"
    answer("read", "n", "--chars", "0:11")
    assert answer("ls").split("\t")[3] == "<1%"
    answer("read", "n", "--lines", "1:500")
    assert answer("ls").split("\t")[3] == "50%"
    assert (
        record("ls")["coverage"]
        == record("show", "n")["coverage"]
        == {"shown_bytes": 5500, "size_bytes": 11000}
    )
    assert call("ls", "--session", "another").exit_code == errors.CODES["not_found"].exit


def test_show_prints_a_preview_and_which_part_it_shows() -> None:
    put(
        "id,name\n" + "".join(f"{n},name {n}\n" for n in range(1000)),
        "table.csv",
        "--media-type",
        "text/csv",
    )
    fields = dict(line.split("\t") for line in answer("show", "table.csv").splitlines())
    preview = record("show", "table.csv")["preview"]
    assert set(preview) == {"text", "shown"}
    assert preview["text"].replace("\n", "\\n") == fields["preview"]
    assert (fields["preview_shown"], fields["seen"]) == (preview["shown"], "0%")


def test_show_prints_the_metadata_of_damaged_content(store: Path) -> None:
    put(bytes(range(256)) * 2000)
    (file,) = store.glob("blobs/*/*.raw")
    file.write_bytes(b"x" * 512_000)
    result = run("show", "n", "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["preview"] is None
    assert result.stderr.startswith(b"coatcheck: ")


@pytest.mark.parametrize(
    "args", [("read", "n"), ("read", "n", "--grep", "x"), ("search", "x"), ("show", "n")]
)
def test_in_a_pipe_no_drawing_library_is_imported(args: tuple[str, ...]) -> None:
    put("x y z")
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "coatcheck", *args],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "rich" not in result.stderr


# Terminals


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--grep", "before"),
        ("--grep", ".*"),
        ("--grep", "nowhere", "-v", "-C", "1"),
        ("--diff", "older"),
        ("--json",),
    ],
    ids=" ".join,
)
def test_hostile_content_never_reaches_a_terminal(options: tuple[str, ...]) -> None:
    put("".join(f"before {hostile} after\n" for hostile in HOSTILE))
    put("before\n", "older")
    code, seen, _ = on_terminal("read", "n", *options)
    assert code == 0
    assert not STEERING & set(_without_styles(seen.decode()))


@pytest.mark.parametrize("query", ["$", "$.*", "shape", "SELECT * FROM artifact"])
def test_hostile_results_of_queries_never_reach_a_terminal(query: str) -> None:
    put(json.dumps([{"key \u202e": hostile} for hostile in HOSTILE], ensure_ascii=False))
    code, seen, _ = on_terminal("read", "n", "--query", query)
    assert code == 0
    assert not STEERING & set(_without_styles(seen.decode()))


def test_hostile_names_and_passages_never_reach_a_terminal() -> None:
    everything = "".join(HOSTILE).replace("\0", "")
    put(f"turbine {everything}\n", everything, "--session", everything, "--summary", everything)
    for args in (("search", "turbine", everything), ("show", everything), ("read", everything)):
        for stream in ("stdout", "stderr"):
            code, seen, _ = on_terminal(*args, "--session", everything, stream=stream)
            assert code == 0
            assert not STEERING & set(_without_styles(seen.decode())), (args, stream)


def test_a_terminal_gets_matches_in_colour_and_no_color_is_respected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put('{"key": "a needle"}\n')
    plain = '1:{"key": "a needle"}\n'
    _, seen, note = on_terminal("read", "n", "--grep", "needle")
    assert b"\x1b[1;31mneedle\x1b[0m" in seen
    assert _without_styles(seen.decode()) == plain
    assert note == b"match 1 of 1 in 1 line\n"
    assert b"\x1b[1;31mneedle\x1b[0m" in on_terminal("search", "needle")[1]
    assert b'\x1b[34m"key"\x1b[0m' in on_terminal("read", "n")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert on_terminal("read", "n", "--grep", "needle")[1].decode() == plain
    assert (
        b"\x1b"
        not in on_terminal("search", "needle")[1] + on_terminal("read", "n", stream="stderr")[1]
    )


def test_lines_are_not_wrapped_and_tabs_are_kept_on_a_terminal() -> None:
    put("\t" + "word " * 80 + "\nlast")
    assert on_terminal("read", "n")[1].decode() == "\t" + "word " * 80 + "\nlast\n"
    assert (
        _without_styles(on_terminal("read", "n", "--grep", "word")[1].decode())
        == "1:\t" + "word " * 80 + "\n"
    )


def test_raw_writes_the_exact_text_to_a_terminal() -> None:
    put("\x1b[31mred")
    assert on_terminal("read", "n", "--raw")[1] == b"\x1b[31mred"


def test_a_preview_on_a_terminal_is_printed_below_the_metadata() -> None:
    put("first\nsecond \x1b[2J\n")
    assert on_terminal("show", "n")[1].decode().endswith("\n\nfirst\nsecond \\x1b[2J\n")


@given(st.text(), st.sampled_from(["a", "x*", "^", "$", r"\w+", ".", "é"]), st.booleans())
def test_the_pieces_of_a_highlighted_text_are_the_text(
    text: str, pattern: str, numbered: bool
) -> None:
    page = "\n".join(f"{n}:{line}" for n, line in enumerate(text.split("\n"))) if numbered else text
    source = page.encode("utf-8", "backslashreplace").decode()
    for pieces in (
        grep_lines(source, Pattern(pattern)),
        grep_lines(source, None),
        json_tokens(source),
        diff_lines(source),
    ):
        assert "".join(piece for piece, _ in pieces) == source
    assert "".join(piece for piece, _ in words_in(source, text[:20])) == source


@pytest.mark.parametrize(
    "text", ['"\\' * 100_000, "-" * 200_000, "1e" * 100_000, '"a' * 100_000, "\\" * 200_000]
)
def test_hostile_json_is_highlighted_in_one_go(text: str) -> None:
    assert "".join(piece for piece, _ in json_tokens(text)) == text


def _without_styles(seen: str) -> str:
    """Terminal output without our own styles: no other escape may appear in it."""
    for style in ("0", "1", "2", "31", "32", "34", "35", "36", "1;31"):
        seen = seen.replace(f"\x1b[{style}m", "")
    return seen


def test_escape_sequences_of_content_are_shown_as_text() -> None:
    assert coatcheck.is_pointer(put("\x1b[31mred"))
    assert b"\\x1b[31mred" in on_terminal("read", "n")[1]
