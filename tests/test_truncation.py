"""Results that a host or a server cut before they came here: recognised by their markers, and never
called whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coatcheck import Policy, Session, Store, ToolCall, ToolExecutor, toolkit, transcript
from coatcheck.transcript.prune import prune
from coatcheck.truncation import MARKERS, Marker, Truncation, find_truncation, parse_truncation

CLAIMS = re.compile(r"\b(whole|all|every|complete|entire)\b")
LINES = [
    f"2026-01-01 12:{n // 60 % 60:02}:{n % 60:02} INFO request {n} took {n * 7 % 900} ms"
    for n in range(6_000)
]
LOG = "\n".join(LINES)


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("s")


def lines_of(first: int, last: int) -> str:
    return "\n".join(LINES[first:last])


def codex(text: str, budget: int = 10_000) -> str:
    """Cut the middle out of a text, as codex-rs does (`utils/string/src/truncate.rs`,
    `core/src/tools/context.rs`)."""
    data = text.encode()
    left = data[: budget // 2].decode(errors="ignore")
    right = data[-(budget - budget // 2) :].decode(errors="ignore")
    cut = f"{left}…{len(text) - len(left) - len(right)} chars truncated…{right}"
    tokens, lines = len(data) // 4, text.count("\n") + 1
    return (
        "Chunk ID: 0c81de\nWall time: 0.0512 seconds\nProcess exited with code 0\n"
        f"Original token count: {tokens}\nOutput:\n"
        f"Warning: truncated output (original token count: {tokens})\nTotal output lines: {lines}\n\n{cut}"
    )


def claude_error(text: str) -> str:
    """Cut the middle out of an error, as Claude Code 2.1.326 does."""
    return (
        f"{text[:5_000]}\n\n... [{len(text) - 10_000} characters truncated] ...\n\n{text[-5_000:]}"
    )


def gemini(text: str, budget: int = 40_000) -> str:
    """Cut a text like `formatTruncatedToolOutput` of Gemini CLI (`utils/fileUtils.ts`)."""
    head = text[: budget // 5]
    tail = text[-(budget - budget // 5) :]
    return (
        f"Output too large. Showing first {len(head):,} and last {len(tail):,} characters. "
        f"For full output see: /tmp/tool-outputs/shell_1.txt\n{head}"
        f"\n\n... [{len(text) - budget:,} characters omitted] ...\n\n{tail}"
    )


def openhands(text: str, limit: int = 50_000) -> str:
    """Cut a text like `maybe_truncate` of OpenHands (`sdk/utils/truncate.py`)."""
    reason = "Due to the max output limit, only part of the full response has been shown to you."
    notice = f"<response clipped><NOTE>{reason}</NOTE>"
    half = (limit - len(notice)) // 2
    return f"{text[:half]}{notice}{text[-half:]}"


def cline(text: str, limit: int = 48_000) -> str:
    """Cut a text like `truncateCommandOutput` of Cline (`tools/executors/output-limits.ts`)."""
    return (
        f"{text[: limit // 2]}\n[... output truncated: {len(text)} chars total. "
        f"Refine the command (grep, head, tail) to view the elided middle ...]\n{text[-limit // 2 :]}"
    )


@dataclass(frozen=True)
class Cut:
    """A result as a program cuts it, and what its marker says."""

    text: str
    by: str
    missing: str


MIDDLE = f"{len(LOG) - 10_000:,} characters"  # what is missing if 10,000 characters are left
PARTIAL = (
    "[Truncated: PARTIAL view — /a/b.py: showing lines 1-900 of 6000 total (90000 tokens, cap 25000). Call Read with "
    "offset=901 limit=900 for the next page, or Grep to find a specific section.]\n"
)
MCP_NOTICE = (
    "\n\n[OUTPUT TRUNCATED - exceeded 25000 token limit]\n\nThe tool output was truncated. If this MCP server provides "
    "pagination or filtering tools, use them to retrieve specific portions of the data. If pagination is not "
    "available, inform the user that you are working with truncated output and results may be incomplete."
)
PERSISTED = (
    "<persisted-output>\nOutput too large (340.7KB). Full output saved to: /home/a/.claude/tool-results/b.txt\n\n"
    f"Preview (first 2KB):\n{LOG[:2_000]}\n...\n</persisted-output>"
)
REMINDER = (
    "\n\n<system-reminder>\n<total_tokens>14952996 tokens left</total_tokens>\n</system-reminder>"
)
GLOB = "(Showing 100 of 150 matching files; 50 more are not listed. Narrow the pattern or path to see the rest.)"
SAVED = "The tool call succeeded but the output was truncated. Full output saved to: /a/tool_1"
GEMINI_FILE = (
    "\nIMPORTANT: The file content has been truncated.\nStatus: Showing lines 1-2000 of 6000 total lines.\n"
    "Action: To read more of the file, you can use the 'start_line' and 'end_line' parameters in a subsequent "
    "'read_file' call.\n\n--- FILE CONTENT (truncated) ---\n"
)
CLINE_FILE = (
    "\n\n---\n\n[FILE TRUNCATED: This content is 1.5 MB but only the first 400.0 KB is shown (1.1 MB truncated). Use "
    "search_files to find specific patterns, or execute_command with grep/head/tail for targeted reading.]"
)
FETCH = "\n\n<error>Content truncated. Call the fetch tool with a start_index of 5000 to get more content.</error>"
TREE = {
    "sha": "1f",
    "truncated": True,
    "tree": [{"path": line, "mode": "100644"} for line in LINES[:300]],
}
HITS = {
    "total_count": 9,
    "incomplete_results": True,
    "items": [{"name": line} for line in LINES[:300]],
}
TOKENS = f"{LOG[:5_000]}…81234 tokens truncated…{LOG[-5_000:]}"

CUT = {
    "Codex": Cut(codex(LOG), "Codex", MIDDLE),
    "Codex in JSON": Cut(json.dumps({"output": codex(LOG)}), "Codex", MIDDLE),
    "Codex, tokens": Cut(
        f"Exit code: 0\nWall time: 0.1 seconds\nOutput:\n{TOKENS}", "Codex", "81,234 tokens"
    ),
    "Codex, not English": Cut(
        codex("日志第一行很长\n" * 4_000 + "ascii\n" * 4_000), "Codex", "49,182 characters"
    ),
    "Claude Code, an error": Cut(claude_error(LOG), "Claude Code", f"at least {MIDDLE}"),
    "Claude Code, Bash": Cut(
        f"{LOG[:30_000]}\n\n... [5388 lines truncated] ...", "Claude Code", "5,388 lines"
    ),
    "Claude Code, a file": Cut(PERSISTED, "Claude Code", "what follows the first 2KB of 340.7KB"),
    "Claude Code, MCP": Cut(LOG[:90_000] + MCP_NOTICE, "Claude Code", "a part"),
    "Claude Code, Read": Cut(PARTIAL + lines_of(0, 900), "Claude Code", "5,100 lines"),
    "Claude Code, Glob": Cut(f"{lines_of(0, 100)}\n{GLOB}{REMINDER}", "Claude Code", "50 files"),
    "Claude Code, Grep": Cut(
        f"{lines_of(0, 250)}\n\n[Showing results with pagination = limit: 250]{REMINDER}",
        "Claude Code",
        "what follows the first 250 results",
    ),
    "Gemini CLI": Cut(gemini(LOG), "Gemini CLI", f"{len(LOG) - 40_000:,} characters"),
    "Gemini CLI, a file": Cut(GEMINI_FILE + lines_of(0, 2_000), "Gemini CLI", "4,000 lines"),
    "opencode": Cut(
        f"{lines_of(0, 2_000)}\n\n...4000 lines truncated...\n\n{SAVED}", "opencode", "4,000 lines"
    ),
    "opencode, the end": Cut(
        f"...240000 bytes truncated...\n\n{SAVED}\n\n{lines_of(5_000, 6_000)}",
        "opencode",
        "240,000 bytes",
    ),
    "opencode, a file": Cut(
        f"<content>\n{lines_of(0, 2_000)}\n\n(Showing lines 1-2000 of 6000. Use offset=2001 to continue.)\n</content>",
        "opencode",
        "4,000 lines",
    ),
    "opencode, a long line": Cut(
        f"{'x' * 2_000}... (line truncated to 2000 chars)\n{lines_of(0, 99)}",
        "opencode",
        "the ends of long lines",
    ),
    "OpenHands": Cut(openhands(LOG), "OpenHands", "a part"),
    "pi": Cut(
        f"{lines_of(4_000, 6_000)}\n\n[Showing lines 4001-6000 of 6000. Full output: /tmp/pi-1.log]",
        "pi",
        "4,000 lines",
    ),
    "numbers with commas": Cut(
        f"{lines_of(0, 2_000)}\n\n[Showing lines 1-2,000 of 6,000. Use offset=2,001 to continue.]",
        "pi",
        "4,000 lines",
    ),
    "pi, a file": Cut(
        f"{lines_of(0, 100)}\n\n[5900 more lines in file. Use offset=101 to continue.]",
        "pi",
        "5,900 lines",
    ),
    "pi, grep": Cut(
        f"{lines_of(0, 100)}\n\n[100 matches limit reached. Use limit=200 for more, or refine pattern]",
        "pi",
        "what follows the first 100 matches",
    ),
    "OpenClaw": Cut(
        f"{lines_of(0, 200)}\n[... 299000 more characters truncated; rerun with narrower args if needed]",
        "OpenClaw",
        "299,000 characters",
    ),
    "Cline": Cut(cline(LOG), "Cline", f"a part of {len(LOG):,} characters"),
    "Cline, a file": Cut(lines_of(0, 300) + CLINE_FILE, "Cline", "1.1 MB"),
    "Zed": Cut(
        f"Command output too long. The first 16382 bytes:\n\n```\n{LOG[:16_000]}\n```",
        "Zed",
        "what follows the first 16,382 bytes",
    ),
    "fetch": Cut(
        f"Contents of http://a/:\n{LOG[:5_000]}{FETCH}",
        "the fetch server",
        "what follows character 5,000",
    ),
    "GitHub, a tree": Cut(json.dumps(TREE), "its source", 'a part ("truncated": true)'),
    "GitHub, a search": Cut(json.dumps(HITS), "its source", 'a part ("incomplete_results": true)'),
    "SecRL": Cut(
        f"Retrieved 108 entries. Displaying first 15 entries.\n{[tuple(LINES[n : n + 9]) for n in range(15)]}",
        "its source",
        "93 entries",
    ),
    "an unknown program": Cut(
        f"{lines_of(0, 300)}\n... (5700 more lines truncated)", "its source", "5,700 lines"
    ),
    "an unknown server": Cut(
        f"{lines_of(0, 300)}\n[Response truncated at the limit]", "its source", "a part"
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_the_marker_of_each_program_says_who_cut_the_result_and_what_is_missing(name: str) -> None:
    cut = CUT[name]
    assert find_truncation(cut.text) == Truncation(cut.by, cut.missing)


SOURCE = "".join(f"def part_{n}():\n    return {n}\n\n\n" for n in range(300))
QUOTES = 'MARKER = "... [15012 characters truncated] ..."\nALSO = "…270219 chars truncated…"\n'
NUMBERED = [f"{n:6}→{line}" for n, line in enumerate(LINES[:1_000], 1)]
QUOTED = {
    "a source file": f"{SOURCE}{QUOTES}{SOURCE[:2_000]}",
    "numbered lines": "\n".join([*NUMBERED[:990], f"   991→{FETCH.strip()}", *NUMBERED[991:]]),
    "a template at the end": 'f"[{remaining} more lines in file. Use offset={next} to continue.]"\n'
    * 3,
    "an early line": f"{LINES[0]}\n... [12 characters truncated] ...\n{LOG}",
    "a late line": f"{LOG}\n…12 chars truncated…\n{lines_of(0, 900)}",
    "a quotation": f"{LOG}\n(emphasis added; citations omitted)\n",
    "Java's frames": f"{LOG}\n\t... 23 more\n",
    "an older Grep that adds this to everything": f"{LOG}\n\n[Showing results with pagination = limit: 50, offset: 0]",
    "a field that is false": json.dumps({"sha": "1f", "truncated": False, "tree": []}),
    "a field of a part": json.dumps({"files": [{"name": "a", "truncated": True}], "sha": "1f"}),
    "a log": LOG,
}


@pytest.mark.parametrize("name", QUOTED)
def test_a_text_that_only_quotes_a_marker_was_not_cut(name: str) -> None:
    assert find_truncation(QUOTED[name]) is None


def recorded(folder: Path) -> Iterator[str]:
    """Every tool result in recorded sessions."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            message = json.loads(line).get("message") or {}
            content = message.get("content")
            for block in content if isinstance(content, list) else ():
                if message.get("role") == "toolResult" and block.get("type") == "text":
                    yield block["text"]
                elif block.get("type") == "tool_result" and isinstance(block.get("content"), str):
                    yield block["content"]


def test_of_real_results_exactly_those_that_were_cut_are_recognised(corpus: Path) -> None:
    found = {
        str(find_truncation(text)) for text in recorded(corpus / "transcripts" / "claude-code")
    }
    assert found - {"None"} == {"incomplete: Claude Code left out at least 319 characters"}
    texts = list(recorded(corpus / "transcripts" / "pi"))
    cut = [text for text in texts if find_truncation(text) is not None]
    says_so = re.compile(r"\n\n\[(?:\d+ more lines|Showing lines)[^\n]*\]\Z")
    assert cut == [text for text in texts if says_so.search(text)]
    assert len(cut) > 50


def test_every_statement_about_a_cut_can_be_read_back() -> None:
    for cut in CUT.values():
        found = find_truncation(cut.text)
        assert found is not None
        assert parse_truncation(f"{found}; and more") == found
    assert parse_truncation("incomplete: Nobody left out 3 lines") is None


def test_every_marker_that_may_be_anywhere_has_one_of_four_words() -> None:
    """They are looked for first, which is quicker."""
    for marker in MARKERS:
        if marker.place not in ("start", "end"):
            assert re.search("truncated|omitted|clipped|elided", marker.pattern.pattern)


@pytest.mark.parametrize("marker", MARKERS, ids=lambda one: f"{one.by}-{one.place}")
def test_a_text_of_nothing_but_markers_is_judged_in_linear_time(marker: Marker) -> None:
    """With patterns that backtrack, this would not end."""
    for between in ("", " ", "\n", "\\n", "9"):
        found = find_truncation(between.join([marker.text] * 20_000)[:200_000])
        assert found is None or found.by in {one.by for one in MARKERS}


# What a model gets


def claims(stub: dict[str, Any]) -> list[str]:
    """Words that claim completeness in a stub, outside of the text that it quotes."""
    return CLAIMS.findall(
        json.dumps({key: value for key, value in stub.items() if key != "preview"})
    )


@pytest.mark.parametrize("name", CUT)
def test_the_stub_of_a_cut_result_says_so_first_and_claims_nothing_complete(
    session: Session, name: str
) -> None:
    cut = CUT[name]
    outcome = session.externalize(cut.text, tool="shell", policy=Policy(max_chars=500))
    stub = json.loads(outcome.text)
    assert outcome.text.startswith('{"stub":"incomplete: ')
    assert stub["stub"].startswith(
        f"incomplete: {cut.by} left out {cut.missing}; the part that arrived is stored"
    )
    assert stub["preview"].startswith("the part that arrived: ")
    assert claims(stub) == []
    again = session.externalize(outcome.ref, tool="shell", policy=Policy(max_chars=500))
    assert again.text == outcome.text


KINDS = {
    "rows": [{"id": n, "name": f"user {n}"} for n in range(900)],
    "an object": {"total": 3, "rows": [{"id": n} for n in range(900)]},
    "JSON lines": "".join(f'{{"id": {n}, "state": "open"}}\n' for n in range(900)),
    "one record": json.dumps({"text": "words " * 400}) + "\n",
    "a table": "id,name,age\n" + "1,Someone,44\n" * 900,
    "a document": "".join(f"## Part {n}\n\n{'words ' * 40}\n\n" for n in range(40)),
    "code": "".join(f"def function_{n}(value):\n    return {n}\n\n" for n in range(200)),
    "paths": "\n".join(f"src/app/file_{n}.py" for n in range(300)),
    "Python's rows": repr([{"id": n, "name": "x"} for n in range(300)]),
    "prose": "Some words of a text without any form. " * 100,
}


@pytest.mark.parametrize("name", KINDS)
def test_whatever_the_content_nothing_of_a_cut_result_is_called_complete(
    session: Session, name: str
) -> None:
    cut = Truncation("Claude Code", "8,750 lines")
    shown = session.externalize(
        KINDS[name], tool="search", policy=Policy(max_chars=500), cut=cut
    ).text
    stub = json.loads(shown)
    assert stub["stub"].startswith(f"{cut}; ")
    assert stub["preview"].startswith("the part that arrived: ")
    assert claims(stub) == []


@pytest.mark.parametrize(
    "value", [LOG, [{"type": "text", "text": LOG}], json.dumps({"rows": LINES})]
)
def test_the_stub_of_a_result_that_was_not_cut_still_says_that_it_is_whole(
    session: Session, value: Any
) -> None:
    stub = json.loads(session.externalize(value, tool="shell", policy=Policy(max_chars=500)).text)
    assert stub["stub"].startswith("the result is stored whole")


def test_a_cut_log_is_counted_as_the_part_that_arrived(session: Session) -> None:
    lines = list(LINES)
    for number in (10, 3_000, 3_001, 3_002, 5_990):
        lines[number] = lines[number].replace("INFO", "ERROR")
    stub = json.loads(
        session.externalize(
            codex("\n".join(lines)), tool="shell", policy=Policy(max_chars=500)
        ).text
    )
    assert stub["preview"].startswith("the part that arrived: 213 lines · ERROR 2 ")
    assert stub["shown"] == "levels and times, 8 of 8 words, counted in what arrived"


def test_the_executor_and_our_tools_say_it_too(session: Session) -> None:
    def run_tests() -> str:
        return codex(LOG)

    executor = ToolExecutor(session, [run_tests], policy=Policy(max_chars=500))
    result = executor.run(ToolCall(id="c1", name="run_tests", arguments={}))
    stub = json.loads(result.to_model_content())
    assert stub["stub"].startswith("incomplete: Codex left out ")
    page = toolkit(session)[0].run(pointer=stub["artifact"], grep="request 3000 ")
    assert page.startswith(f"[{stub['artifact']}; incomplete: Codex left out {MIDDLE}; ")
    assert "incomplete: Codex left out " in session.preview(stub["artifact"]).shown


@pytest.mark.parametrize("lines", [300, 40_000])
def test_the_partial_output_of_a_tool_that_failed_is_not_called_whole(
    session: Session, lines: int
) -> None:
    def run_tests() -> Iterator[str]:
        for number in range(lines):
            yield f"{LINES[number % len(LINES)]}\n"
        raise RuntimeError("the machine is gone")

    executor = ToolExecutor(session, [run_tests], policy=Policy(max_chars=500))
    result = executor.run(ToolCall(id="c1", name="run_tests", arguments={}))
    stub = json.loads(result.text[result.text.index('{"stub"') :])
    assert stub["stub"].startswith(
        "incomplete: the tool left out the rest, because it did not finish; "
    )
    assert stub["lines"] == lines
    assert claims(stub) == []


def test_a_block_that_only_says_that_the_others_were_cut_is_believed(session: Session) -> None:
    """What the hook of Claude Code 2.1.326 gets of an MCP result of 25,000 tokens beside an
    image."""
    blocks = [
        {"type": "text", "text": LOG[:100_000]},
        {"type": "text", "text": "[Image left out: it did not fit in the tool output limit]"},
        {"type": "text", "text": MCP_NOTICE},
    ]
    shown = session.externalize(
        blocks, tool="mcp__rows__rows", policy=Policy(max_chars=5_000)
    ).content
    stub = json.loads(shown[0]["text"])
    assert stub["stub"].startswith("incomplete: Claude Code left out a part; ")
    assert claims(stub) == []
    assert shown[1:] == blocks[1:]


def test_blocks_written_as_text_whose_end_is_missing_are_not_called_whole(session: Session) -> None:
    wrapped = json.dumps([{"type": "text", "text": LOG}])[:40_000]
    outcome = session.externalize(wrapped, tool="search", policy=Policy(max_chars=5_000))
    stub = json.loads(outcome.text)
    assert stub["stub"].startswith("incomplete: its source left out its end; ")
    stored = session.get(stub["artifact"])
    assert isinstance(stored, str)
    assert LOG.startswith(stored)


def test_a_result_that_a_policy_shortens_is_not_called_whole_if_it_was_cut(
    session: Session,
) -> None:
    policy = Policy(max_chars=500, preview_chars=100, tools={"shell": lambda text: text[:5_000]})
    stub = json.loads(session.externalize(codex(LOG), tool="shell", policy=policy).text)
    assert stub["stub"].endswith("; the part that arrived is stored, and was shortened for you")


def test_if_storing_fails_the_size_is_that_of_the_part_that_arrived(store: Store) -> None:
    session = store.session("s")
    store.close()
    shown = session.externalize(codex(LOG), tool="shell", policy=Policy(max_chars=2_000)).text
    assert shown.startswith("[This result is incomplete: Codex left out ")
    assert "; the part that arrived has 10," in shown


def messages_with(result: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
    return [
        {"role": "user", "content": "Run the tests."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
        *(
            {"role": role, "content": "words " * 50}
            for _ in range(12)
            for role in ("assistant", "user")
        ),
    ]


def test_the_placeholder_of_a_cut_result_says_so(session: Session) -> None:
    text = codex(LOG)
    stub = session.externalize(text, tool="shell", policy=Policy(max_chars=500)).text
    for result, budget in ((text, 3_000), (stub, 2_150)):
        pruned = prune(
            messages_with(result), max_tokens=budget, session=session, fold=False, least_saved=10
        )
        assert json.loads(pruned.messages[2]["content"])["pruned"] == (
            f"an older result, incomplete: Codex left out {MIDDLE}, the part that arrived is stored"
        )


def test_a_transcript_says_it_too(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "session.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in messages_with(codex(LOG))))
    transcript.externalize(path, session, policy=Policy(max_chars=500))
    line = json.loads(path.read_text().splitlines()[2])
    assert json.loads(line["content"])["stub"].startswith("incomplete: Codex left out ")
