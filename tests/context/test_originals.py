"""Behind every placeholder is the exact result, and nothing refers to what a rewritten conversation
no longer shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Policy, Session, toolkit
from coatcheck.context import PromptBuilder
from coatcheck.transcript import prune

WINDOW = 60_000
LINES = [f"    return compute_value({n})  # step {n}" for n in range(1, 36)]
FILE = "\n".join(f"{number:>6}→{line}" for number, line in enumerate(LINES, 1))
EDITED = FILE.replace("compute_value(20)", "other_value(20)")


@dataclass
class Replayed:
    """A conversation that was sent call by call, as the host keeps it, and the results as their
    tools returned them."""

    history: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    rewrites: int = 0

    def shown_results(self) -> Iterator[tuple[str, str]]:
        """The id of each call, and the text of its result as the model sees it."""
        for message in self.history:
            for block in blocks(message):
                text = text_of(block)
                if text is not None:
                    yield block["tool_use_id"], text


def blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else []


def text_of(block: dict[str, Any]) -> str | None:
    """The text of a result; None for other blocks, and for results with several parts."""
    if block.get("type") != "tool_result":
        return None
    content = block["content"]
    if isinstance(content, list) and len(content) == 1:
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """The messages of a session of Claude Code, without thinking."""
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry.get("type") not in ("user", "assistant"):
            continue
        message = {"role": entry["message"]["role"], "content": entry["message"]["content"]}
        if isinstance(message["content"], list):
            message["content"] = [
                one for one in message["content"] if one.get("type") != "thinking"
            ]
        if message["content"]:
            yield message


def replayed(session: Session, messages: Iterator[dict[str, Any]]) -> Replayed:
    builder = PromptBuilder(
        session, provider="anthropic", tools=toolkit(session), rewrite=True, window=WINDOW
    )
    done = Replayed()
    for message in messages:
        for block in blocks(message):
            text = text_of(block)
            if text is not None:
                done.results[block["tool_use_id"]] = text
        done.history.append(message)
        if message["role"] == "user":
            prompt = builder.build(done.history)
            done.history = list(prompt.history)
            done.rewrites += prompt.pruned is not None
    return done


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


@pytest.mark.parametrize("name", ["15b634ab", "21a2e002", "375d5d79"])
def test_the_exact_results_of_a_real_session_are_behind_its_placeholders(
    corpus: Path, session: Session, name: str
) -> None:
    done = replayed(session, recorded(corpus / "sessions" / "claude-code" / f"{name}.jsonl"))
    assert done.rewrites
    replaced = 0
    inline: set[str] = set()
    for call_id, text in done.shown_results():
        if text.startswith(('{"pruned"', '{"stub"')):
            replaced += 1
            assert session.get(json.loads(text)["artifact"]) == done.results[call_id]
        elif text.startswith(("[Nothing new: ", "[Changed: ")) and "shown above" in text:
            referred = re.search(r"\(call ([^)]*)\)", text)
            assert referred is not None
            assert referred[1] in inline
        else:
            inline.add(call_id)
    assert replaced


def exchange(
    number: int, name: str, arguments: dict[str, Any], result: str
) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": f"c{number}", "name": name, "input": arguments}
    answer = {"type": "tool_result", "tool_use_id": f"c{number}", "content": result}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [answer]}]


def conversation(session: Session, *results: str) -> list[dict[str, Any]]:
    """Read the same file once for each result, and send each to the model."""
    builder = PromptBuilder(session, provider="anthropic", rewrite=True, window=WINDOW)
    history: list[dict[str, Any]] = [{"role": "user", "content": "look at a.py"}]
    for number, result in enumerate(results):
        history = list(
            builder.build(
                [*history, *exchange(number, "Read", {"file_path": "a.py"}, result)]
            ).history
        )
    return history


def result_of(messages: list[dict[str, Any]], call_id: str) -> str:
    for message in messages:
        for block in blocks(message):
            text = text_of(block)
            if text is not None and block["tool_use_id"] == call_id:
                return text
    raise KeyError(call_id)


def test_a_result_that_was_shown_as_a_diff_is_pruned_to_the_whole_result(session: Session) -> None:
    history = conversation(session, FILE, EDITED)
    assert result_of(history, "c1").startswith("[Changed: ")
    pruned = prune(
        history, max_tokens=300, session=session, keep_turns=0, fold=False, low_water=0.1
    ).messages
    placeholder = json.loads(result_of(pruned, "c1"))
    assert placeholder["pruned"] == "an older result, stored whole"
    assert session.get(placeholder["artifact"]) == EDITED


def test_a_listing_that_was_shown_sparse_is_pruned_to_the_listing(session: Session) -> None:
    history = conversation(session, FILE)
    assert result_of(history, "c0").startswith("[Lines 1-35, numbered every 10 lines.]")
    pruned = prune(
        history, max_tokens=300, session=session, keep_turns=0, fold=False, low_water=0.1
    ).messages
    assert session.get(json.loads(result_of(pruned, "c0"))["artifact"]) == FILE


@pytest.mark.parametrize(("second", "lead"), [(FILE, "[Nothing new: "), (EDITED, "[Changed: ")])
def test_a_reference_to_a_pruned_result_says_where_that_is_stored(
    session: Session, second: str, lead: str
) -> None:
    history = conversation(session, FILE, second)
    assert "shown above" in result_of(history, "c1")
    pruned = prune(
        history, max_tokens=450, session=session, keep_turns=1, fold=False, low_water=0.1
    ).messages
    pointer = json.loads(result_of(pruned, "c0"))["artifact"]
    repaired = result_of(pruned, "c1")
    assert repaired.startswith(lead)
    assert "shown above" not in repaired
    assert f"stored in {pointer}" in repaired
    assert session.get(pointer) == FILE


def test_a_reference_without_its_result_in_the_store_is_not_called_whole(session: Session) -> None:
    with coatcheck.open("memory:") as other:
        history = conversation(other.session("s"), FILE, EDITED)
    pruned = prune(
        history, max_tokens=450, session=session, keep_turns=0, fold=False, low_water=0.1
    ).messages
    assert result_of(pruned, "c1").startswith("[Changed: ")


@pytest.mark.parametrize("encoded", [False, True], ids=["an object", "a string of JSON"])
def test_long_arguments_become_lines_and_short_ones_stay_in_view(
    session: Session, encoded: bool
) -> None:
    arguments = {
        "file_path": "src/a.py",
        "content": FILE,
        "edits": [{"old": line} for line in LINES],
    }
    messages: list[dict[str, Any]] = [{"role": "user", "content": "write"}]
    if encoded:
        function = {"name": "Write", "arguments": json.dumps(arguments)}
        messages.append(
            {
                "role": "assistant",
                "tool_calls": [{"id": "c0", "type": "function", "function": function}],
            }
        )
        messages.append({"role": "tool", "tool_call_id": "c0", "content": "ok"})
    else:
        messages += exchange(0, "Write", arguments, "ok")
    pruned = prune(messages, max_tokens=800, session=session, keep_turns=0, fold=False).messages
    if encoded:
        left = json.loads(pruned[1]["tool_calls"][0]["function"]["arguments"])
    else:
        left = pruned[1]["content"][0]["input"]
    assert left["file_path"] == "src/a.py"
    content, edits = (json.loads(left[name])["artifact"] for name in ("content", "edits"))
    assert session.get(content) == FILE
    assert session.read(content, lines="2:3").text == "".join(FILE.splitlines(keepends=True)[1:3])
    assert json.loads(session.get(edits)) == arguments["edits"]
    assert LINES[0] in session.read(edits, lines="1:5").text


def test_originals_are_stored_only_where_the_conversation_may_be_rewritten(
    session: Session,
) -> None:
    builder = PromptBuilder(session, provider="anthropic", policy=Policy())
    history: list[dict[str, Any]] = [{"role": "user", "content": "look at a.py"}]
    for number in range(2):
        history = list(
            builder.build(
                [*history, *exchange(number, "Read", {"file_path": "a.py"}, FILE)]
            ).history
        )
    assert result_of(history, "c1").startswith("[Nothing new: ")
    assert session.list() == []
