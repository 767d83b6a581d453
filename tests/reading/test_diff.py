"""Unified diffs: correct, the same each time, and bounded for any texts."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coatcheck.reading import diff as module
from coatcheck.reading.diff import diff
from coatcheck.reading.page import QueryResult
from tests.reading.framed import make_content

pytestmark = pytest.mark.usefixtures("each_source")

LINES = st.lists(st.sampled_from(["a", "b", "c", "", " x", "-y"]), max_size=30)
TEXTS = st.tuples(LINES, st.booleans()).map(lambda made: "\n".join(made[0]) + "\n" * made[1])


def compare(old: str, new: str, *, context: int = 3, limit: int = 4_000_000) -> QueryResult:
    return diff(
        make_content(old.encode(), "text/plain"),
        make_content(new.encode(), "text/plain"),
        context=context,
        limit=limit,
    )


def applied(old: str, patch: str) -> str:
    """Apply a unified diff to a text, by its line numbers only."""
    source = old.split("\n")
    lines = [line + "\n" for line in source[:-1]] + ([source[-1]] if source[-1] else [])
    out: list[str] = []
    at = 0
    body = patch.split("\n")[2:]
    for index, line in enumerate(body):
        ended = "" if index + 1 < len(body) and body[index + 1].startswith("\\") else "\n"
        if line.startswith("@@"):
            start, _, size = line.split()[1][1:].partition(",")
            begin = int(start) - (size != "0")
            out.extend(lines[at:begin])
            at = begin
        elif line.startswith("+"):
            out.append(line[1:] + ended)
        elif line.startswith((" ", "-")):
            assert lines[at] == line[1:] + ended
            out.extend(lines[at : at + 1] if line.startswith(" ") else [])
            at += 1
    return "".join(out + lines[at:])


def test_a_diff_names_both_artifacts_and_shows_context() -> None:
    answer = compare("1\n2\n3\n4\n5\n6\n7\n8\n9\n", "1\n2\n3\n4\nfive\n6\n7\n8\n9\n")
    first, second, *rest = answer.text.split("\n")
    assert first.startswith("--- art:")
    assert second.startswith("+++ art:")
    assert rest == ["@@ -2,7 +2,7 @@", " 2", " 3", " 4", "-5", "+five", " 6", " 7", " 8"]
    assert answer.shown == "1 line removed, 1 line added, 1 place"


def test_a_missing_line_feed_at_the_end_is_a_change() -> None:
    assert compare("a\n", "a").text.split("\n")[2:] == [
        "@@ -1 +1 @@",
        "-a",
        "+a",
        "\\ No newline at end of file",
    ]


@given(TEXTS, TEXTS, st.integers(0, 4))
def test_applying_a_diff_to_the_old_text_gives_the_new_one(
    old: str, new: str, context: int
) -> None:
    answer = compare(old, new, context=context)
    assert (applied(old, answer.text) if answer.text else old) == new
    assert compare(old, new, context=context) == answer


@given(TEXTS, TEXTS)
def test_a_coarse_diff_is_still_correct(old: str, new: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WORK", 0)
        answer = compare(old, new)
    assert (applied(old, answer.text) if answer.text else old) == new


@pytest.mark.skipif(shutil.which("patch") is None, reason="no patch(1)")
def test_patch_applies_the_diff(tmp_path: Path) -> None:
    old = "\n".join(f"line {n}" for n in range(200)) + "\n"
    new = (
        old.replace("line 7\n", "")
        .replace("line 100\n", "line 100\nmore\n")
        .replace("line 199\n", "the end")
    )
    (tmp_path / "file").write_text(old)
    subprocess.run(
        ["patch", "-s", "file"],
        input=compare(old, new).text + "\n",
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert (tmp_path / "file").read_text() == new


def test_the_same_artifact_has_no_changes() -> None:
    answer = compare("a\n", "a\n")
    assert (answer.text, answer.shown) == ("", "no changes")


def test_the_same_text_in_another_encoding_has_no_changes_and_says_so() -> None:
    old = make_content("ä\n".encode(), "text/plain")
    new = make_content("\ufeffä\n".encode("utf-16-le"), "text/plain")
    assert "only their encoding differs" in diff(old, new).note


def test_the_work_for_texts_without_distinctive_lines_is_bounded() -> None:
    old = "".join("ab"[n * n % 7 % 2] + "\n" for n in range(200_000))
    new = "".join("ab"[n * n % 11 % 2] + "\n" for n in range(200_000))
    answer = compare(old, new)
    assert "fully replaced" in answer.note
    assert applied(old, answer.text) == new


def test_a_diff_over_the_limit_is_cut_and_says_so() -> None:
    answer = compare(
        "a\n" * 10 + "".join(f"{n}\n" for n in range(5000)),
        "b\n" * 10 + "".join(f"{n}x\n" for n in range(5000)),
        limit=500,
    )
    assert len(answer.text) <= 500
    assert "left out or cut" in answer.note


def test_texts_too_large_for_a_diff_get_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    answer = compare("same then a difference", "same then no difference")
    assert "equal up to byte 10" in answer.text
    assert "the limit for a line by line diff" in answer.note


def test_binary_content_gets_a_summary() -> None:
    answer = diff(make_content(b"\0\1\2", "image/png"), make_content(b"\0\1\3\4", "image/png"))
    assert "equal up to byte 2" in answer.text
