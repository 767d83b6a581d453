"""What a proxy changes and what it does not, checked on the wire, with a server that returns odd
results."""

from __future__ import annotations

import base64
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Limit, Policy
from coatcheck.mcp.proxy_rewrites import LIMIT_KEY, Counts, ProxySettings, Rewriter
from coatcheck.models import ANY_PROVIDER
from tests.mcp.odd_server import PIXEL, TOOLS, rows, words
from tests.mcp.speaking import ODD, Speaker, environment, proxy, scripted_server, stub_in, text_of
from tests.screenshots import dimensions, huge_screenshot, image_in, screenshot

OURS = ["get_artifact", "list_artifacts", "store_artifact"]
Speak = Callable[..., Speaker]


def all_tools(speaker: Speaker) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    params: dict[str, Any] = {}
    while True:
        page = speaker.ask("tools/list", params)["result"]
        found += page["tools"]
        if "nextCursor" not in page:
            return found
        params = {"cursor": page["nextCursor"]}


def test_the_handshake_passes_with_its_unknown_fields(speak: Speak) -> None:
    speaker = speak(begin=False)
    result = speaker.begin()["result"]
    assert result["instructions"] == "be careful"
    assert result["fromTheFuture"] is True
    assert result["serverInfo"] == {"name": "odd", "version": "1"}
    assert result["capabilities"] == {
        "tools": {},
        "resources": {},
        "experimental": {"odd": {"kept": 1}},
    }


def test_the_three_tools_are_listed_last_and_once(odd: Speaker) -> None:
    first = odd.ask("tools/list")["result"]
    assert "nextCursor" in first
    assert not {tool["name"] for tool in first["tools"]} & set(OURS)
    names = [tool["name"] for tool in all_tools(odd)]
    assert names == [tool["name"] for tool in TOOLS] + OURS


def test_definitions_pass_except_for_schemas_of_results_that_may_become_stubs(odd: Speaker) -> None:
    listed = {tool["name"]: tool for tool in all_tools(odd)}
    for tool in TOOLS:
        hidden = {"outputSchema"} if tool["name"] == "table" else set()
        assert listed[tool["name"]] == {
            key: value for key, value in tool.items() if key not in hidden
        }


def test_a_small_result_passes_byte_for_byte(odd: Speaker) -> None:
    odd.write(b'{"jsonrpc":"2.0","id":"odd id","method":"odd/verbatim"}')
    odd.answer("odd id")
    assert odd.lines[-1] == (
        b'{"id":"odd id",  "result" : {"number":1.50,"twice":1e2,"half":"\\ud800"} ,"jsonrpc":"2.0","odd":[]}'
    )


def test_errors_of_the_server_pass_unchanged(odd: Speaker) -> None:
    error = odd.ask("no/such/method")["error"]
    assert error == {
        "code": -32601,
        "message": "Method not found",
        "data": {"method": "no/such/method", "kept": 1.0},
    }


def test_a_line_that_is_not_json_is_passed_to_the_server(odd: Speaker) -> None:
    odd.write(b"{nonsense")
    assert odd.until(lambda one: "error" in one)["error"]["code"] == -32700


def test_a_large_text_becomes_a_stub_that_reads_back_exactly(speak: Speak, place: Path) -> None:
    speaker = speak("--session", "one")
    stub = stub_in(text_of(speaker.call("text", size=100_000)))
    assert stub["size_bytes"] == 100_000
    page = text_of(speaker.call("get_artifact", pointer=stub["artifact"], lines="2:3"))
    assert page.splitlines()[1:] == words(100_000).splitlines()[1:3]
    speaker.leave()
    with coatcheck.open(place) as store:
        assert store.session("one").get(stub["artifact"]) == words(100_000)


def test_a_screenshot_passes_unchanged_and_one_over_the_limit_of_providers_is_scaled(
    odd: Speaker, tmp_path: Path
) -> None:
    path = tmp_path / "screen.png"
    path.write_bytes(screenshot())
    (same,) = odd.call("picture", path=str(path))["content"]
    assert image_in(same) == screenshot()
    path.write_bytes(huge_screenshot())
    (smaller,) = odd.call("picture", path=str(path))["content"]
    assert len(image_in(smaller)) <= ANY_PROVIDER.max_bytes
    assert dimensions(image_in(smaller)) == dimensions(huge_screenshot())
    assert smaller["mimeType"] == "image/jpeg"


def test_each_block_is_checked_separately_and_keeps_its_type(odd: Speaker) -> None:
    result = odd.call("blocks", size=50_000)
    small, image, text, audio, resource, link, future, stored = result["content"]
    assert small == {"type": "text", "text": "a small one", "annotations": {"audience": ["user"]}}
    assert (image["type"], image["mimeType"], image["_meta"]) == (
        "image",
        "image/png",
        {"kept": True},
    )
    assert image["data"].startswith(PIXEL)
    assert audio == {
        "type": "audio",
        "data": base64.b64encode(b"\0" * 50_000).decode(),
        "mimeType": "audio/wav",
    }
    assert text["type"] == "text"
    assert stub_in(text["text"])["size_bytes"] == 50_000
    assert (resource["type"], resource["resource"]["uri"]) == ("resource", "odd://big")
    assert stub_in(resource["resource"]["text"])["artifact"] == stub_in(text["text"])["artifact"]
    assert link == {"type": "resource_link", "uri": "odd://link", "name": "a link"}
    assert future == {"type": "from-the-future", "payload": {"kept": 1.0}}
    assert stored["uri"].startswith(f"art://{stub_in(text['text'])['artifact'][4:]}")
    assert (result["_meta"], result["fromTheFuture"]) == ({"kept": True}, {"kept": 1})


def test_a_tool_error_keeps_its_flag_and_other_fields(odd: Speaker) -> None:
    result = odd.call("error", size=100_000)
    assert stub_in(text_of(result))
    assert (result["isError"], result["_meta"]) == (True, {"kept": [1.0]})


def test_large_structured_content_becomes_the_same_stub_as_its_text(odd: Speaker) -> None:
    result = odd.call("table", size=2_000)
    assert result["structuredContent"] == stub_in(text_of(result))
    pointer = result["structuredContent"]["artifact"]
    page = text_of(odd.call("get_artifact", pointer=pointer, query="$.rows[1999].name"))
    assert page.splitlines()[1:] == ['"row number 1999"']


def test_small_structured_content_stays_valid(odd: Speaker) -> None:
    assert odd.call("table", size=2)["structuredContent"] == rows(2)


def test_an_inline_tool_keeps_its_schema_and_content(odd: Speaker) -> None:
    assert odd.call("small_table", size=2_000)["structuredContent"] == rows(2_000)


def test_a_tools_own_limit_in_characters_is_honoured(odd: Speaker) -> None:
    all_tools(odd)
    assert text_of(odd.call("roomy", size=150_000)) == words(150_000)
    assert stub_in(text_of(odd.call("roomy", size=250_000)))
    assert stub_in(text_of(odd.call("text", size=150_000)))


def test_the_limit_can_be_set(speak: Speak) -> None:
    assert stub_in(text_of(speak("--max-tokens", "100").call("text", size=2_000)))


def test_large_resource_contents_become_stubs_under_their_uri(odd: Speaker) -> None:
    text, blob, image = odd.ask("resources/read", {"uri": "odd://read/60000"})["result"]["contents"]
    assert (text["uri"], text["_meta"]) == ("odd://read/60000", {"kept": 1})
    assert stub_in(text["text"])["size_bytes"] == 60_000
    assert (blob["uri"], "blob" in blob) == ("odd://read/60000", False)
    assert stub_in(blob["text"])["size_bytes"] == 60_000
    assert image == {"uri": "odd://read/60000", "mimeType": "image/png", "blob": PIXEL}


def test_small_resource_contents_pass_unchanged(odd: Speaker) -> None:
    contents = odd.ask("resources/read", {"uri": "odd://read/60"})["result"]["contents"]
    assert contents[0]["text"] == words(60)
    assert base64.b64decode(contents[1]["blob"]) == b"\7" * 60


def test_pointers_in_arguments_become_values_of_the_type_in_the_schema(odd: Speaker) -> None:
    all_tools(odd)
    table = stub_in(text_of(odd.call("table", size=2_000)))["artifact"]
    stored = text_of(odd.call("store_artifact", name="note", value="a note"))
    match = re.search(r"art:[0-9a-f]+", stored)
    assert match is not None
    note = match[0]
    seen = json.loads(
        text_of(odd.call("typed", text=f"{table}#/rows/0", rows=f"{table}#/rows", data=note))
    )
    assert seen["arguments"]["text"] == '{"id":0,"name":"row number 0"}'
    assert seen["arguments"]["rows"] == rows(2_000)["rows"]
    assert base64.b64decode(seen["arguments"]["data"]) == b"a note"


def test_an_unknown_pointer_is_an_error_that_a_model_can_read(odd: Speaker) -> None:
    result = odd.call("echo", value="art:000000000000")
    assert result["isError"] is True
    assert "art:000000000000" in text_of(result)


def test_a_text_that_only_mentions_a_pointer_passes_byte_for_byte(odd: Speaker) -> None:
    seen = json.loads(text_of(odd.call("echo", value="see art:000000000000 for more", number=1.5)))
    assert seen["arguments"] == {"value": "see art:000000000000 for more", "number": 1.5}


def test_our_tools_are_answered_while_the_server_hangs(odd: Speaker) -> None:
    odd.start("tools/call", {"name": "hang", "arguments": {}})
    assert odd.call("list_artifacts")["isError"] is False


def test_invalid_calls_of_our_tools_are_reported_in_the_result(odd: Speaker) -> None:
    assert odd.call("get_artifact", pointer="nothing")["isError"] is True
    assert odd.call("get_artifact", nonsense=1)["isError"] is True
    assert (
        odd.ask("tools/call", {"name": "get_artifact", "arguments": [1]})["result"]["isError"]
        is True
    )


def test_a_named_session_gives_pointers_that_work_in_the_next_run(speak: Speak) -> None:
    first = speak("--session", "kept")
    pointer = stub_in(text_of(first.call("text", size=100_000)))["artifact"]
    first.leave()
    assert "lines 1-" in text_of(
        speak("--session", "kept").call("get_artifact", pointer=pointer, lines="1:2")
    )
    assert speak().call("get_artifact", pointer=pointer)["isError"] is True


def test_a_page_is_not_slimmed_again_by_a_second_proxy(speak: Speak, place: Path) -> None:
    inner = proxy(
        "--session",
        "inner",
        "--store",
        str(place.with_name("inner")),
        "--max-tokens",
        "3000",
        server=ODD,
    )
    speaker = speak("--max-tokens", "400", server=inner)
    names = [tool["name"] for tool in all_tools(speaker)]
    assert names[-6:] == [*OURS, *(f"coatcheck_{name}" for name in OURS)]
    stub = stub_in(text_of(speaker.call("text", size=100_000)))
    page = text_of(speaker.call("get_artifact", pointer=stub["artifact"]))
    assert len(page) > 6_000
    assert page.startswith(f"[{stub['artifact']}")
    outer = stub_in(text_of(speaker.call("text", size=6_000)))
    assert outer["hint"].startswith("coatcheck_get_artifact(")
    assert "lines 1-2 " in text_of(
        speaker.call("coatcheck_get_artifact", pointer=outer["artifact"], lines="1:2")
    )


def test_proxies_of_one_store_know_each_others_pages(speak: Speak) -> None:
    speaker = speak(
        "--max-tokens",
        "400",
        "--session",
        "shared",
        server=proxy("--session", "shared", server=ODD),
    )
    all_tools(speaker)
    stub = stub_in(text_of(speaker.call("text", size=100_000)))
    for tool in ("get_artifact", "coatcheck_get_artifact"):
        assert len(text_of(speaker.call(tool, pointer=stub["artifact"]))) > 6_000


def test_a_final_line_and_a_report_show_the_savings(speak: Speak, place: Path) -> None:
    speaker = speak("--report", "--session", "told")
    pointer = stub_in(text_of(speaker.call("text", size=100_000)))["artifact"]
    speaker.call("get_artifact", pointer=pointer, lines="1:5")
    assert speaker.leave() == 0
    assert re.search(
        r"1 results slimmed, about [\d,]+ tokens saved, [1-9]\d* read back",
        speaker.complained("slimmed"),
    )
    assert speaker.complained("  text: 1 results")
    command = proxy("--report", "--json")
    output = subprocess.run(
        command, env=environment(place), capture_output=True, text=True, check=True
    ).stdout
    found = json.loads(output)
    (row,) = found["rows"]
    assert (row["surface"], row["tool"], row["results"], row["reads"]) == ("proxy", "text", 1, 1)
    assert row["server"].startswith("python")
    assert found["total"]["tokens_kept_out"] == row["tokens_kept_out"] > 10_000
    command.remove("--json")
    lines = subprocess.run(
        command, env=environment(place), capture_output=True, text=True, check=True
    ).stdout
    assert re.match(
        r"1 result kept out, about [\d,]+ tokens; [\d,]+ read back in 1 read; [\d,]+ net\n", lines
    )


@pytest.fixture
def bare_server(tmp_path: Path) -> list[str]:
    """A server without tools and resources."""
    file = tmp_path / "bare_server.py"
    file.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    one = json.loads(line)\n"
        "    if 'id' not in one:\n"
        "        continue\n"
        "    answer = {'error': {'code': -32601, 'message': 'Method not found'}}\n"
        "    if one['method'] == 'initialize':\n"
        "        info = {'name': 'x', 'version': '1'}\n"
        "        result = {'protocolVersion': '2025-06-18', 'capabilities': {}, 'serverInfo': info}\n"
        "        answer = {'result': result}\n"
        "    print(json.dumps({'jsonrpc': '2.0', 'id': one['id'], **answer}), flush=True)\n"
    )
    return [ODD[0], str(file)]


def test_a_server_without_tools_gets_three(speak: Speak, bare_server: list[str]) -> None:
    speaker = speak(server=bare_server, begin=False)
    assert speaker.begin()["result"]["capabilities"] == {"tools": {}, "resources": {}}
    assert [tool["name"] for tool in all_tools(speaker)] == OURS
    assert speaker.ask("resources/list")["result"] == {"resources": []}
    assert speaker.ask("resources/templates/list")["result"] == {"resourceTemplates": []}
    missing = speaker.ask("resources/read", {"uri": f"art://{'0' * 64}"})
    assert "no artifact found" in missing["error"]["message"]


def test_an_empty_list_of_resources_has_the_fields_of_the_newest_version(
    speak: Speak, bare_server: list[str]
) -> None:
    speaker = speak(server=bare_server)
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
    fields = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}
    resources = speaker.ask("resources/list", {"_meta": meta})["result"]
    assert resources == {"resources": [], **fields}
    templates = speaker.ask("resources/templates/list", {"_meta": meta})["result"]
    assert templates == {"resourceTemplates": [], **fields}


def test_a_client_that_gets_no_links_hears_from_the_server_that_it_has_no_resources(
    speak: Speak, bare_server: list[str]
) -> None:
    speaker = speak(server=bare_server, begin=False)
    capabilities = speaker.begin(client="claude-code")["result"]["capabilities"]
    assert capabilities == {"tools": {}}
    assert speaker.ask("resources/list")["error"]["code"] == -32601


def test_with_files_the_stub_names_a_file_and_no_tools_are_added(
    speak: Speak, tmp_path: Path
) -> None:
    speaker = speak("--files", str(tmp_path / ".coatcheck"))
    assert not set(OURS) & {tool["name"] for tool in all_tools(speaker)}
    stub = stub_in(text_of(speaker.call("text", size=100_000)))
    assert Path(stub["file"]).read_text() == words(100_000)
    assert Path(stub["file"]).parent == tmp_path / ".coatcheck"
    assert "get_artifact" not in stub["hint"]


def test_a_result_stays_if_its_file_cannot_be_written(speak: Speak, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert text_of(speak("--files", str(tmp_path)).call("text", size=100_000)) == words(100_000)


def test_a_result_links_to_what_was_stored_and_the_link_can_be_read(odd: Speaker) -> None:
    text, link = odd.call("text", size=100_000)["content"]
    stub = stub_in(text["text"])
    assert link["type"] == "resource_link"
    assert (link["size"], link["mimeType"]) == (100_000, stub["media_type"])
    assert link["annotations"] == {"audience": ["user"]}
    part, note = odd.ask("resources/read", {"uri": link["uri"]})["result"]["contents"]
    assert words(100_000).startswith(part["text"])
    following = odd.ask("resources/read", {"uri": note["uri"]})["result"]["contents"][0]
    assert words(100_000)[len(part["text"]) :].startswith(following["text"])


@pytest.mark.parametrize("client", ["claude-code", "codex-mcp-client"])
def test_a_client_that_gives_links_to_the_model_gets_none(speak: Speak, client: str) -> None:
    speaker = speak(begin=False)
    speaker.begin(client=client)
    (only,) = speaker.call("text", size=100_000)["content"]
    assert stub_in(only["text"])


@pytest.mark.parametrize("wrapped", [True, False])
def test_structured_content_that_repeats_the_text_is_one_artifact_and_counted_once(
    speak: Speak, place: Path, wrapped: bool
) -> None:
    text = words(100_000) if wrapped else json.dumps(rows(4_000))
    structured = {"result": text} if wrapped else rows(4_000)
    answer = {"content": [{"type": "text", "text": text}], "structuredContent": structured}
    speaker = speak("--report", "--json", "--session", "kept", server=scripted_server("it"))
    pending = speaker.start("tools/call", {"name": "it_hold", "arguments": {}})
    speaker.call("it_say", lines=[json.dumps({"jsonrpc": "2.0", "id": pending, "result": answer})])
    result = speaker.answer(pending)["result"]
    assert stub_in(text_of(result)) == result["structuredContent"]
    speaker.leave()
    counts = json.loads(speaker.complained("slimmed_results"))
    assert counts["slimmed_results"] == 1
    assert counts["tokens_saved"] <= result["structuredContent"]["tokens"]
    with coatcheck.open(place) as store:
        [ref] = store.session("kept").list()
        assert store.session("kept").get(ref) == (text if wrapped else structured)


def test_a_proxy_without_tools_adds_none_and_its_stubs_name_the_shared_one(speak: Speak) -> None:
    speaker = speak("--no-tools", "--session", "shared")
    assert not {tool["name"] for tool in all_tools(speaker)} & set(OURS)
    stub = stub_in(text_of(speaker.call("text", size=100_000)))
    assert stub["hint"].startswith("get_artifact(")
    assert (
        json.loads(text_of(speaker.call("list_artifacts")))["name"] == "list_artifacts"
    )  # answered by the server
    names = ("get_artifact", "it_say", "it_hold")
    taken = {
        "tools/list": {
            "tools": [{"name": name, "inputSchema": {"type": "object"}} for name in names]
        }
    }
    other = speak("--no-tools", "--session", "shared", server=scripted_server("it", **taken))
    other.ask("tools/list")
    pending = other.start("tools/call", {"name": "it_hold", "arguments": {}})
    answer = {"content": [{"type": "text", "text": words(100_000)}]}
    other.call("it_say", lines=[json.dumps({"jsonrpc": "2.0", "id": pending, "result": answer})])
    assert stub_in(text_of(other.answer(pending)["result"]))["hint"].startswith(
        "get_artifact of the server coatcheck("
    )


def test_a_proxy_without_tools_needs_a_session_to_share(tmp_path: Path) -> None:
    done = subprocess.run(
        proxy("--no-tools", server=ODD), env=environment(tmp_path), capture_output=True, check=False
    )
    assert done.returncode == 2


def test_a_model_cannot_tell_a_foreign_pointer_from_an_unknown_one(speak: Speak) -> None:
    pointer = stub_in(text_of(speak("--session", "one").call("text", size=100_000)))["artifact"]
    other = speak("--session", "two")
    for tool, argument in (("get_artifact", "pointer"), ("echo", "value")):
        foreign, unknown = (
            text_of(other.call(tool, **{argument: one})) for one in (pointer, "art:0123456789ab")
        )
        assert foreign.split(" ~")[0].replace(pointer, "") == unknown.split(" ~")[0].replace(
            "art:0123456789ab", ""
        )


def test_the_proxy_follows_the_policy_in_the_settings(place: Path, tmp_path: Path) -> None:
    (tmp_path / "coatcheck.toml").write_text(
        '[policy]\nmax_chars = 5000\n[policy.tools]\ntext = "never"\necho = "always"\nblocks = { max_chars = 100 }\n'
    )
    with Speaker(proxy(server=ODD), environment(place), cwd=tmp_path) as speaker:
        speaker.begin()
        all_tools(speaker)
        assert text_of(speaker.call("text", size=100_000)) == words(100_000)
        assert stub_in(text_of(speaker.call("echo", word="small")))["size_bytes"] < 200
        assert stub_in(text_of(speaker.call("error", size=6_000)))["size_bytes"] == 6_000
        assert text_of(speaker.call("error", size=4_000)) == words(4_000)
        assert "stub" in json.dumps(speaker.call("blocks", size=200))


def test_an_option_overrides_the_limits_in_the_settings(place: Path, tmp_path: Path) -> None:
    (tmp_path / "coatcheck.toml").write_text(
        '[policy]\nmax_chars = 500\n[policy.tools]\ntext = "never"\n'
    )
    with Speaker(
        proxy("--max-tokens", "9000", server=ODD), environment(place), cwd=tmp_path
    ) as speaker:
        speaker.begin()
        assert text_of(speaker.call("error", size=20_000)) == words(20_000)
        assert text_of(speaker.call("text", size=100_000)) == words(100_000)
        assert stub_in(text_of(speaker.call("error", size=100_000)))["size_bytes"] == 100_000


def test_a_policy_that_is_off_lets_everything_pass(place: Path, tmp_path: Path) -> None:
    (tmp_path / "coatcheck.toml").write_text("[policy]\nenabled = false\n")
    with Speaker(proxy(server=ODD), environment(place), cwd=tmp_path) as speaker:
        speaker.begin()
        listed = {tool["name"]: tool for tool in all_tools(speaker)}
        assert all("outputSchema" in listed[name] for name in ("table", "small_table"))
        assert text_of(speaker.call("text", size=100_000)) == words(100_000)
        assert speaker.call("table", size=5_000)["structuredContent"] == rows(5_000)


def test_never_applies_whatever_limit_a_server_declares() -> None:
    session = coatcheck.open("memory:").session("s")
    policy = Policy(
        max_chars=500, tools={"quiet": "never", "limited": Limit(max_chars=5_000)}, redact="store"
    )
    rewriter = Rewriter(session, ProxySettings(policy), Counts())
    named = {
        "name": "get_artifact",
        "inputSchema": {"type": "object"},
    }  # so that ours get another name
    sized = [
        {"name": name, "inputSchema": {}, "_meta": {LIMIT_KEY: 1_000}, "outputSchema": {}}
        for name in ("quiet", "limited", "other")
    ]
    listed = rewriter.listed({"tools": [named, *sized]}, first=True)["tools"]
    assert [tool["name"] for tool in listed if "outputSchema" in tool] == ["quiet"]
    large = {"content": [{"type": "text", "text": words(4_000)}]}
    assert rewriter.call_result("quiet", "1", large) is large
    assert rewriter.call_result("limited", "2", large) is large
    assert "coatcheck_get_artifact" in str(rewriter.call_result("other", "3", large))
    assert "coatcheck_get_artifact" in str(rewriter.call_result("never listed", "4", large))
