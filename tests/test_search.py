"""Search: it covers what a session may see and returns the best hits first, each with its
passage."""

import json
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Store
from coatcheck.errors import InvalidArgument
from coatcheck.storage.passages import NAME
from tests.backends import Backend, Clock


def test_a_hit_has_the_passage_its_lines_and_the_call_that_reads_on(store: Store) -> None:
    session = store.session("s")
    log = (
        "\n".join(f"step {i} went well" for i in range(500))
        + "\nlogin timeout after 30 s\nstep 500 went well\n"
    )
    ref = session.put(log, name="run")
    session.put("something else entirely")
    hit = session.search("login timeout")[0]
    assert hit.ref == ref
    assert "login timeout after 30 s" in hit.passage
    assert hit.lines is not None
    assert hit.lines[0] <= 501 <= hit.lines[1]
    assert log.splitlines()[hit.lines[0] - 1] == hit.passage.splitlines()[0]
    assert ref.pointer in hit.read_on


def test_words_inside_identifiers_and_inflections_are_found(store: Store) -> None:
    session = store.session("s")
    ref = session.put("def parseHttpHeaders(raw_bytes):\n    return decoded\n")
    session.put("unrelated")
    for words in ("http header", "parse headers", "raw bytes", "decoding"):
        assert session.search(words)[0].ref == ref, words


def test_names_tools_and_summaries_are_searched_even_if_the_content_is_not_text(
    store: Store,
) -> None:
    session = store.session("s")
    by_name = session.put(b"\x00\x01\x02", name="quarterly revenue")
    by_tool = session.put(b"\x00\x01\x03", tool="weather_forecast")
    by_summary = session.put(b"\x00\x01\x04", summary="photo of the harbour")
    assert [hit.ref for hit in session.search("revenue")] == [by_name]
    assert [hit.ref for hit in session.search("forecast")] == [by_tool]
    hit = session.search("harbour photos")[0]
    assert (hit.ref, hit.lines) == (by_summary, None)


def test_artifacts_of_another_session_are_neither_found_nor_hinted_at(store: Store) -> None:
    store.session("theirs").put("the secret password is swordfish", name="swordfish")
    mine = store.session("mine")
    mine.put("nothing of interest")
    store.session("theirs").search("swordfish")
    assert mine.search("swordfish") == []


def test_a_child_finds_what_its_parent_has(store: Store) -> None:
    ref = store.session("parent").put("the needle in the haystack")
    assert [hit.ref for hit in store.session("child", parent="parent").search("needle")] == [ref]


def test_each_artifact_is_found_once_however_many_passages_and_names_match(store: Store) -> None:
    session = store.session("s")
    text = "needle\n" * 5000
    session.put(text, name="one")
    session.put(text, name="two")
    assert len(session.search("needle")) == 1


def test_a_forgotten_artifact_is_not_found_and_its_words_are_removed_from_the_index(
    lasting: Backend,
) -> None:
    store = lasting.open()
    session = store.session("s")
    ref = session.put("canarysecretword and more", name="canaryname")
    assert session.search("canarysecretword")
    assert lasting.places_of(b"canary")
    session.forget(ref)
    assert session.search("canarysecretword") == []
    store.collect(grace=0)
    assert lasting.places_of(b"canary") == []


def test_a_damaged_index_is_rebuilt(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with coatcheck.open(folder) as store:
        store.session("s").put("find me again")
        assert store.session("s").search("again")
    (folder / NAME).write_bytes(b"this is not a database at all" * 100)
    with coatcheck.open(folder) as store:
        assert store.session("s").search("again")


@pytest.mark.on_fleet
@pytest.mark.parametrize(("words", "limit"), [("", 8), ("  \n", 8), ("fine", 0)])
def test_a_search_without_words_or_with_a_limit_of_0_is_a_clear_error(
    store: Store, words: str, limit: int
) -> None:
    with pytest.raises(InvalidArgument):
        store.session("s").search(words, limit=limit)


@pytest.mark.on_fleet
@pytest.mark.parametrize(
    "words",
    ['"', "a OR", "NEAR(", "col:x", "*", "-", "^x", "'; DROP TABLE passage; --", "🦆", "\x00"],
)
def test_query_syntax_in_a_search_is_treated_as_text(store: Store, words: str) -> None:
    session = store.session("s")
    session.put("plain text")
    assert isinstance(session.search(words), list)


def test_the_right_chunk_is_among_the_first_eight_for_most_questions(
    corpus: Path, store: Store
) -> None:
    documents = json.loads((corpus / "retrieval" / "codebase_chunks.json").read_text())
    questions = [
        json.loads(line)
        for line in (corpus / "retrieval" / "queries.jsonl").read_text().splitlines()
    ]
    session = store.session("s")
    chunks: dict[str, set[tuple[str, int]]] = {}
    for document in documents:
        for chunk in document["chunks"]:
            ref = session.put(chunk["content"], name=document["doc_id"])
            chunks.setdefault(ref.artifact_id, set()).add(
                (document["original_uuid"], chunk["original_index"])
            )
    found = sum(
        any(
            chunks[hit.ref.artifact_id]
            & {(uuid, index) for uuid, index in question["golden_chunks"]}
            for hit in session.search(question["query"], limit=8)
        )
        for question in questions
    )
    assert found >= 0.85 * len(questions)


def test_a_search_finds_artifacts_put_since_the_last_search_under_each_of_their_names(
    store: Store,
) -> None:
    session = store.session("s")
    first = session.put("the pump failed", name="monday")
    assert [hit.ref for hit in session.search("pump")] == [first]
    second = session.put("the pump was repaired", name="tuesday")
    again = session.put("the pump failed", name="incident")
    assert {hit.ref.artifact_id for hit in session.search("pump")} == {
        first.artifact_id,
        second.artifact_id,
    }
    for name in ("monday", "incident"):
        assert [hit.ref.artifact_id for hit in session.search(name)] == [again.artifact_id]


def test_a_session_that_was_ended_and_started_again_finds_only_new_artifacts(store: Store) -> None:
    store.session("s").put("the old pump", name="old")
    assert store.session("s").search("pump")
    store.session("s").end()
    new = store.session("s").put("the new pump")
    assert [hit.ref for hit in store.session("s").search("pump")] == [new]
    assert store.session("s").search("old") == []


def test_a_forgotten_name_is_not_found_when_the_content_is_put_again(store: Store) -> None:
    session = store.session("s")
    session.forget(session.put(b"\x00\x01", name="harbour"))
    session.put(b"\x00\x01", name="harbour")
    assert session.search("harbour")
    session.forget("harbour")
    session.put(b"\x00\x01", name="lighthouse")
    assert session.search("harbour") == []
    assert len(session.search("lighthouse")) == 1


def test_a_search_for_a_word_in_every_artifact_finds_the_newest_ones(store: Store) -> None:
    session = store.session("s")
    refs = [
        session.put(f"result number {n}")
        for n in range(300 if store.url.startswith("s3:") else 1_200)
    ]
    found = [hit.ref for hit in session.search("result", limit=5)]
    assert len(found) == 5
    if not store.url.startswith("s3:"):  # a fleet ranks all of them
        assert found == refs[-1:-6:-1]
        new = session.put("one more result")
        assert session.search("result", limit=1)[0].ref == new
    assert [hit.ref for hit in session.search("result number 7", limit=1)] == [refs[7]]


def test_expired_artifacts_do_not_displace_live_ones(store: Store, clock: Clock) -> None:
    session = store.session("s", ttl=None)
    for n in range(60):
        session.put(f"needle {n}", ttl=10)
    live = session.put(
        "among other words there is a needle somewhere in this longer text, further down"
    )
    assert len(session.search("needle", limit=2)) == 2
    assert session.count() == 61
    clock.now += 20
    assert [hit.ref for hit in session.search("needle", limit=2)] == [live]
    assert session.count() == 1


def test_a_search_reads_only_new_artifacts_and_its_hits(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = store.session("s")
    for n in range(100):
        session.put(f"result number {n}")
    session.search("number")
    rows = 0
    find = type(store._catalog).find

    def counting(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal rows
        found = find(self, *args, **named)
        rows += len(found)
        return found

    monkeypatch.setattr(type(store._catalog), "find", counting)
    session.put("one more result")
    assert len(session.search("result", limit=4)) == 4
    assert session.count() == 101
    assert rows < 80


@pytest.mark.on_fleet
def test_the_first_search_of_a_session_reads_its_artifacts_in_one_query_and_a_hit_takes_one_more(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = store.session("s")
    for n in range(100):
        session.put(f"result number {n}")
    asked: list[int] = []
    find_many = type(store._catalog).find_many

    def counting(self: Any, sessions: Any, prefixes: Any, **named: Any) -> Any:
        asked.append(len(prefixes))
        return find_many(self, sessions, prefixes, **named)

    monkeypatch.setattr(type(store._catalog), "find_many", counting)
    assert len(session.search("result", limit=4)) == 4
    assert asked == [100, 4]


def test_count_counts_each_artifact_that_a_session_sees_once(store: Store) -> None:
    parent = store.session("p")
    shared = parent.put("shared")
    child = store.session("c", parent="p")
    child.put("shared", name="again")
    child.put("own", name="own")
    assert (parent.count(), child.count()) == (1, 2)
    child.forget("own")
    parent.forget(shared)
    assert (parent.count(), child.count()) == (0, 1)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_text_in_any_encoding_is_found_by_its_words(encoding: str) -> None:
    session = coatcheck.open("memory:").session("s")
    ref = session.put("\ufeffthe first line\nthe login timed out\n".encode(encoding))
    session.put("something else")
    (hit,) = session.search("login")
    assert hit.ref.artifact_id == ref.artifact_id
    assert "the login timed out" in hit.passage
