"""The content of each page, over plain HTTP: everything works without scripts."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Store, transcript
from coatcheck.console.dialogue import parts_of
from coatcheck.display import visible
from tests.console.visitors import HOSTILE, PNG, SECRET, TOKEN, Parsed, Visitor, in_session, site
from tests.gateway.provider import Provider, Say, Use, turn
from tests.gateway.talking import BIG, Talk, serving

THINGS = f"things {HOSTILE}"


def artifact(store: Store, name: str, session_id: str = THINGS) -> str:
    ref = store.session(session_id).ref(name)
    assert ref is not None
    return in_session(session_id, f"/artifacts/{ref.pointer}")


# Sessions


def test_an_empty_store_says_what_to_do_first(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store") as store, site(store) as url:
        text = Visitor(url).page()
        assert "Nothing is recorded yet" in text
        assert "coatcheck run -- claude" in text
        for path in ("/live", "/savings", "/search?q=words"):
            Visitor(url).page(path)


def test_sessions_are_listed_with_their_figures(visitor: Visitor) -> None:
    text = Parsed(visitor.page()).text
    assert "support-1" in text
    assert "claude-opus-5-5" in text
    assert "1 failed" in text


def test_a_sub_agent_is_listed_under_its_parent(visitor: Visitor) -> None:
    text = visitor.page()
    rows = re.findall(r'<th scope="row" class="id d(\d)">(.*?)</th>', text, re.DOTALL)
    names = [(depth, re.sub(r"<[^>]+>", "", cell).split()) for depth, cell in rows]
    parent = next(number for number, (_, words) in enumerate(names) if words[0] == "research")
    assert names[parent + 1][0] == "1"
    assert "research/agent" in names[parent + 1][1]


def test_a_filter_finds_sessions_by_a_part_of_their_id(visitor: Visitor) -> None:
    text = visitor.page("?contains=agent")
    assert "research/agent" in text
    assert "support-1" not in text
    assert "No session matches" in visitor.page("?contains=nothing+like+this")


def test_internal_sessions_are_shown_on_request(visitor: Visitor) -> None:
    assert "coatcheck:" not in Parsed(visitor.page()).text
    assert "coatcheck:" in Parsed(visitor.page("?own=1")).text


def test_sessions_are_shown_in_pages(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        with store.batching:
            for number in range(120):
                store.session(f"s{number:03}", create=True)
        with site(store) as url:
            visitor, seen, path = Visitor(url), list[str](), ""
            while True:
                text = visitor.page(path)
                seen += re.findall(r">(s\d{3})</a>", text)
                found = re.search(r'rel="next" href="/console([^"]+)"', text)
                if found is None:
                    break
                path = found[1].replace("&amp;", "&")
            assert sorted(seen) == [f"s{number:03}" for number in range(120)]
            assert len(seen) == 120


def test_a_search_finds_contents_of_all_sessions(visitor: Visitor) -> None:
    text = all_pages(visitor, "/search?q=sub-agent+found")
    assert "note.txt" in text
    assert "research/agent" in text
    assert "nothing was found" in all_pages(visitor, "/search?q=zanzibarian")
    assert "support-1" in visitor.page("/search?q=support")


def test_a_pointer_in_the_search_field_is_opened(visitor: Visitor, store: Store) -> None:
    ref = store.session("research/agent").ref("note.txt")
    assert ref is not None
    answer = visitor.get(f"/search?q={ref.pointer}")
    assert answer.status_code == 303
    assert "what the sub-agent found" in visitor.page(
        answer.headers["location"].removeprefix("/console")
    )
    assert visitor.get("/search?q=art:0123456789ab").status_code == 404


def all_pages(visitor: Visitor, path: str) -> str:
    """All pages of a search: each covers the sessions that it has time for."""
    text = visitor.page(path)
    while found := re.search(r'rel="next" href="/console([^"]+)"', text[-2000:]):
        text += visitor.page(found[1].replace("&amp;", "&"))
    return text


# Conversations


def test_a_conversation_shows_the_stub_beside_the_original(visitor: Visitor) -> None:
    text = Parsed(visitor.page(in_session("support-1"))).text
    assert "Original, held by the client" in text
    assert "Stub, sent to the model" in text
    assert BIG[:40] in text
    assert '{"stub":' in text
    assert f"{len(BIG):,} characters held" in text


def test_a_conversation_shows_what_each_read_returned(visitor: Visitor) -> None:
    text = Parsed(visitor.page(in_session("support-1"))).text
    inside = text.partition("Inside the gateway")[2]
    assert "get_artifact" in inside
    assert '"grep":"7919"' in inside
    assert "returned" in inside
    assert "INFO worker 1 finished job 7919" in inside


def test_a_conversation_shows_sent_beside_held(visitor: Visitor) -> None:
    assert "Sent beside held" in visitor.page(in_session("support-1"))


def test_an_answer_is_not_repeated_in_the_next_call(visitor: Visitor) -> None:
    calls = re.findall(
        r'<span class="tag">call</span> <b>(\w+)</b>', visitor.page(in_session("support-1"))
    )
    assert calls == ["search"]


def test_thinking_is_folded(visitor: Visitor) -> None:
    text = visitor.page(in_session("support-1"))
    assert re.search(r'<details class="part thinking">', text)


def test_a_conversation_of_chat_completions_is_shown(visitor: Visitor) -> None:
    text = Parsed(visitor.page(in_session("chat"))).text
    assert "Hello from chat completions" in text
    assert "search" in text


def test_errors_and_broken_prefixes_are_shown(visitor: Visitor) -> None:
    text = Parsed(visitor.page(in_session("research"))).text
    assert "Error 429" in text
    assert "The prefix broke" in text


def test_one_call_and_one_part_of_it_can_be_opened(visitor: Visitor) -> None:
    assert "Call 2" in visitor.page(in_session("support-1", "/calls/2"))
    text = visitor.page(in_session("support-1", "/calls/2/held/2"))
    assert BIG[-40:] in Parsed(text).text
    visitor.page(in_session("support-1", "/calls/99"), status=404)
    visitor.page(in_session("support-1", "/calls/2/held/99"), status=404)


def test_htmx_gets_a_part_without_the_page_around_it(visitor: Visitor) -> None:
    text = visitor.page(in_session("support-1", "/calls/2/held/2"), headers={"hx-request": "true"})
    assert "<html" not in text
    assert BIG[-40:] in Parsed(text).text


def test_a_call_that_is_too_large_for_a_record_is_read_from_its_artifact(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        answers = [turn(Use("search", {"q": "x"})), turn(Say("ok"))]
        with (
            Provider(answers) as provider,
            serving(store, provider, is_one=True, session="large") as address,
        ):
            talk = Talk(address, thinking=False)
            talk.ask("hello")
            talk.ask(talk.results("a line of a large result\n" * 40_000))
        with site(store) as url:
            visitor = Visitor(url)
            assert "This call is large" in visitor.page(in_session("large"))
            assert "a line of a large result" in visitor.page(in_session("large", "/calls/2"))


def test_a_session_without_calls_shows_its_artifacts(visitor: Visitor) -> None:
    text = visitor.page(in_session("research/agent"))
    assert "No calls were recorded" in text
    assert "note.txt" in text


@pytest.mark.parametrize("way", ["import", "merge", "copy"])
def test_a_file_that_an_imported_transcript_names_is_not_opened(tmp_path: Path, way: str) -> None:
    """An archive may contain a record with the path of any file on this machine."""
    file, archive = tmp_path / "talk.jsonl", io.BytesIO()
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "a line of it. " * 9_000}
    file.write_text(json.dumps({"role": "user", "content": [result]}) + "\n")
    with (
        coatcheck.open(tmp_path / "hostile") as hostile,
        coatcheck.open(tmp_path / "store") as store,
    ):
        transcript.externalize(file, hostile.session("agent"))
        name = next(
            one.session_id for one in hostile.sessions() if one.session_id.startswith("transcript:")
        )
        if way == "copy":
            hostile.copy_to(store)
        else:
            hostile.export(archive)
            archive.seek(0)
            store.import_(archive, merge=way == "merge")
        file.write_text(
            json.dumps({"role": "user", "content": "PRIVATE words of another conversation"}) + "\n"
        )
        with site(store) as url:
            text = Visitor(url).page(in_session(name))
    assert "PRIVATE" not in text
    assert "the file that it names is not opened" in text


def test_a_transcript_is_shown_message_by_message(tmp_path: Path) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "log"}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "x"}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "a line of it. " * 9_000}
    messages = [
        {"role": "user", "content": "read the log"}, {"role": "assistant", "content": [thinking, call]},
        {"role": "user", "content": [result]}, {"role": "assistant", "content": "It is long."},
    ]  # fmt: skip
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in messages))
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        transcript.externalize(file, store.session("agent"))
        with site(store) as url:
            visitor = Visitor(url)
            text = visitor.page(in_session("agent"))
            link = re.search(r'href="/console(/sessions/transcript:[^"/]+)"', text)
            assert link is not None
            shown = Parsed(visitor.page(link[1])).text
            assert "read the log" in shown
            assert "It is long." in shown
            assert "Stub, in the conversation" in shown
            assert "Original, in the store" in shown
            assert "a line of it. a line of it." in shown
            assert "stub" in visitor.page(f"{link[1]}/messages/2/held/0")


# Context


def test_the_context_is_plotted_by_use_of_the_cache(visitor: Visitor) -> None:
    text = visitor.page(in_session("research", "/context"))
    assert text.count("<svg") == 1
    assert "cache read" in text
    assert "<title>missed, call" in text
    assert "the prefix broke at call" in text
    assert "system text" in text
    assert "429" in text


def test_a_session_without_figures_says_where_they_come_from(visitor: Visitor) -> None:
    assert "No figures were recorded" in visitor.page(in_session("research/agent", "/context"))


# Artifacts


def test_artifacts_are_listed_and_filtered(visitor: Visitor) -> None:
    everything = visitor.page(in_session(THINGS, "/artifacts"))
    assert "orders.csv" in everything
    assert "items.json" in everything
    text = visitor.page(in_session(THINGS, "/artifacts?kind=data"))
    assert "orders.csv" in text
    assert "old.txt" not in text


@pytest.mark.parametrize(
    ("name", "query", "expected"),
    [
        ("orders.csv", "", "paid,5"),
        ("orders.csv", "?grep=open", "3:open,7"),
        ("orders.csv", "?lines=2:3", "paid,5"),
        (
            "orders.csv",
            "?query=SELECT+status,+sum(cents)+AS+total+FROM+artifact+GROUP+BY+1+ORDER+BY+1",
            "13",
        ),
        ("items.json", "?query=%24.items%5B7%5D.title", "thing 7"),
        ("items.json", "?query=shape", "items"),
        ("old.txt", f"?diff={'orders.csv'}", "+second line"),
        ("orders.csv", "?grep=PAID&ignore_case=1", "2 matches"),
        ("orders.csv", "?grep=%28", "invalid"),
    ],
)
def test_an_artifact_is_read_as_a_model_would(
    visitor: Visitor, store: Store, name: str, query: str, expected: str
) -> None:
    assert expected in Parsed(visitor.page(artifact(store, name) + query)).text


def test_a_long_artifact_is_read_page_by_page(visitor: Visitor, store: Store) -> None:
    text = visitor.page(artifact(store, "items.json"))
    found = re.search(r'rel="next" href="/console([^"]+)"', text)
    assert found is not None
    assert visitor.page(found[1].replace("&amp;", "&")) != text


def test_a_line_of_ten_megabytes_is_a_small_page(visitor: Visitor, store: Store) -> None:
    assert len(visitor.page(artifact(store, "long.txt"))) < 100_000


def test_a_page_that_a_person_reads_does_not_count_as_shown(visitor: Visitor, store: Store) -> None:
    session = store.session(THINGS)
    visitor.page(artifact(store, "orders.csv"))
    assert session.coverage("orders.csv").shown == 0


def test_content_is_downloaded_unchanged_and_never_shown(visitor: Visitor, store: Store) -> None:
    answer = visitor.get(artifact(store, "evil.svg") + "/content")
    assert answer.content == b"<svg onload=alert(1)>"
    assert answer.headers["content-disposition"].startswith("attachment")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "sandbox" in answer.headers["content-security-policy"]


def test_only_pictures_that_cannot_run_are_shown(visitor: Visitor, store: Store) -> None:
    assert "/picture" in visitor.page(artifact(store, "dot.png"))
    answer = visitor.get(artifact(store, "dot.png") + "/picture")
    assert answer.content == PNG
    assert answer.headers["content-type"] == "image/png"
    assert "sandbox" in answer.headers["content-security-policy"]
    assert "/picture" not in visitor.page(artifact(store, "evil.svg"))
    assert visitor.get(artifact(store, "evil.svg") + "/picture").status_code == 404


def test_the_lineage_lists_derived_artifacts_and_sessions_that_have_access(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        session = store.session("one")
        first = session.put("the source", name="source.txt")
        session.put("what was made of it", name="made.txt", parents=[first])
        session.grant(first, to="two")
        with site(store) as url:
            visitor = Visitor(url)
            text = visitor.page(artifact(store, "source.txt", "one") + "/lineage")
            assert "made.txt" in text
            assert "/console/sessions/two/" in text
            assert "source.txt" in visitor.page(artifact(store, "made.txt", "one") + "/lineage")


def test_secrets_are_masked_until_they_are_requested(visitor: Visitor, store: Store) -> None:
    place = artifact(store, HOSTILE)
    assert SECRET not in visitor.page(place)
    assert SECRET not in visitor.page(in_session("research"))
    assert SECRET in visitor.post(f"{place}/secrets").text
    assert SECRET in visitor.post(f"{place}/secrets", grep="password").text
    part = in_session("research", "/calls/1/held/0")
    assert SECRET not in visitor.page(part)
    assert SECRET in visitor.post(f"{part}/secrets").text


def test_hostile_text_is_always_escaped(visitor: Visitor, store: Store) -> None:
    for path in (
        "", "?own=1", "/live", "/search?q=first+line", in_session(THINGS), in_session(THINGS, "/artifacts"),
        artifact(store, HOSTILE), artifact(store, HOSTILE) + "/lineage", in_session("research"),
        in_session("research", "/calls/1"), in_session("research", "/calls/1/held/0"), "/search?q=" + "%3Cscript%3E",
    ):  # fmt: skip
        text = visitor.page(path)  # checks scripts, handlers and control characters
        assert "<script>alert" not in text
    assert visible(HOSTILE) in Parsed(visitor.page(artifact(store, HOSTILE))).text


# Savings


def test_savings_are_shown_by_surface_tool_and_day(visitor: Visitor) -> None:
    text = Parsed(visitor.page("/savings?days=7")).text
    for words in ("By surface", "gateway", "By server and tool", "search", "By day", "read back"):
        assert words in text


# Messages


@pytest.mark.parametrize(
    "message",
    [
        None, 5, "text", [], {}, {"role": 5, "content": 7}, {"content": [None, 5, {"type": 5}]},
        {"role": "assistant", "tool_calls": [None, {"function": None}, {"function": {"arguments": {}}}]},
        {"type": "reasoning", "summary": [{"text": 5}]}, {"type": "function_call_output", "call_id": "x", "output": {}},
        {"role": "tool", "content": None}, {"type": "image"}, {"role": "toolResult", "toolCallId": 5},
    ],
)  # fmt: skip
def test_any_message_can_be_split_into_parts(message: object) -> None:
    for part in parts_of(message):
        assert isinstance(part.text, str)
        assert isinstance(part.name, str)


def test_a_damaged_record_does_not_hide_the_others(tmp_path: Path) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        session = store.session("s")
        for body in (
            b"nonsense",
            b"[1]",
            b'{"new":[{"role":"user","content":"sound"}],"usage":5,"status":"x"}',
            b"\xff",
        ):
            for series in ("gateway:calls", "gateway:events", "metrics"):
                session.record(series, body)
        with site(store) as url:
            visitor = Visitor(url)
            assert "sound" in visitor.page(in_session("s"))
            visitor.page(in_session("s", "/context"))
            visitor.page("/live")
            visitor.page()


def test_the_token_in_use_is_on_no_page(visitor: Visitor) -> None:
    for path in ("", "/live", "/savings"):
        assert TOKEN not in visitor.page(path)
