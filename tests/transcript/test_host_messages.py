"""Messages of pi, OpenClaw and Claude Code, bare or in the lines of their files: pruned,
safeguarded and sent on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import coatcheck
from coatcheck import Policy, Session, transcript
from coatcheck.context import Budget, PromptBuilder
from coatcheck.errors import InvalidArgument
from coatcheck.messages import FORMATS
from coatcheck.messages.content import text_of
from coatcheck.messages.pairing import unpaired
from coatcheck.messages.paths import at
from coatcheck.transcript import check_summary, detect, prune, safeguard
from examples.standins import anthropic, openai_chat, openai_responses

LOG = "2026-01-02 03:04:05 INFO request took 7 ms\n" * 1_200
PROVIDERS = ("anthropic", "openai", "openai-responses")
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mP4DwABAQEAHLCMmQAAAABJRU5ErkJggg=="
)


def pi(*results: str, error: str = "") -> list[dict[str, Any]]:
    """A conversation of pi, as its agent has it in memory."""
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Find the slow requests.", "timestamp": 1}
    ]
    for number, result in enumerate(results):
        call = {
            "type": "toolCall",
            "id": f"toolu_{number}",
            "name": "read",
            "arguments": {"page": number},
        }
        thought = {
            "type": "thinking",
            "thinking": "Let me look.",
            "thinkingSignature": "Eq" + "Ab3/" * 20,
        }
        messages.append({"role": "assistant", "content": [thought, {"type": "text", "text": "Reading."}, call],
                         "api": "anthropic-messages", "provider": "anthropic", "model": "claude", "usage": {"input": 1},
                         "stopReason": "toolUse", "timestamp": 2})  # fmt: skip
        messages.append({"role": "toolResult", "toolCallId": f"toolu_{number}", "toolName": "read", "timestamp": 3,
                         "content": [{"type": "text", "text": result}], "isError": result == error})  # fmt: skip
    return messages


def pi_lines(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as the lines of a session file."""
    head = {"type": "session", "id": "s", "timestamp": "t", "cwd": "/"}
    return [head, *({"type": "message", "timestamp": "t", "message": one} for one in messages)]


def claude_lines(*results: str) -> list[dict[str, Any]]:
    """Lines of Claude Code with only the fields that every line has."""
    lines: list[dict[str, Any]] = [
        {"type": "user", "message": {"role": "user", "content": "Find the slow requests."}}
    ]
    for number, result in enumerate(results):
        call = {
            "type": "tool_use",
            "id": f"toolu_{number}",
            "name": "Read",
            "input": {"page": number},
        }
        lines.append(
            {
                "type": "assistant",
                "message": {"role": "assistant", "id": f"m{number}", "content": [call]},
            }
        )
        block = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": result}
        lines.append(
            {
                "type": "user",
                "message": {"role": "user", "content": [block]},
                "toolUseResult": {"x": 1},
            }
        )
    return lines


def shapes(*results: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    yield "pi", pi(*results)
    yield "pi", pi_lines(pi(*results))
    yield "claude-code", claude_lines(*results)
    yield "anthropic", [one["message"] for one in claude_lines(*results)]


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("agent", ttl=None)


def inner(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of lines, whether they are bare or wrapped."""
    found = [one if "role" in one else one.get("message") for one in lines]
    return [one for one in found if isinstance(one, dict)]


def accepted(provider: str, request: dict[str, Any]) -> None:
    """Check a request with the provider's stand-in, which raises the error that the API would
    return."""
    if provider == "anthropic":
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        anthropic.check(headers, {"model": "m", "max_tokens": 100, **request})
    else:
        check = openai_chat.check if provider == "openai" else openai_responses.check
        check({"authorization": "Bearer k"}, {"model": "m", **request})


def test_messages_of_hosts_are_recognised_bare_and_in_lines() -> None:
    for name, lines in shapes("a", "b"):
        known = detect(lines)
        assert known is not None
        assert known.name == name
        document = detect([lines])
        assert document is not None
        assert document.name == name


def test_pruning_keeps_pairs_errors_and_the_shape_of_lines(session: Session) -> None:
    results = [f"page {number}\n{LOG[:4_000]}" for number in range(30)]
    results[2] = "ENOENT: no such file"
    for name, lines in (("pi", pi(*results, error=results[2])), ("pi", pi_lines(pi(*results, error=results[2]))),
                        ("claude-code", claude_lines(*results))):  # fmt: skip
        done = prune(lines, max_tokens=40_000, session=session)
        assert done.tokens_after <= 40_000 < done.tokens_before
        assert unpaired(inner(done.messages), FORMATS[name]) == []
        assert len(done.messages) == len(lines)
        assert [set(one) for one in done.messages] == [set(one) for one in lines]
        if name == "pi":
            assert results[2] in json.dumps(done.messages)
        replaced = {one.message: one for one in done.replaced}
        assert replaced
        for number, one in replaced.items():
            assert one.pointer is not None
            assert session.get(one.pointer) in results
            assert done.messages[number] is not lines[number]
        assert (
            done.messages[: done.unchanged_prefix.messages]
            == lines[: done.unchanged_prefix.messages]
        )


def test_a_file_of_any_host_is_externalized_bare_and_in_lines(
    session: Session, tmp_path: Path
) -> None:
    for number, (name, lines) in enumerate(shapes(LOG, "short", f"again {LOG}")):
        session = session.store.session(f"agent {number}")
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        (report,) = transcript.externalize(path, session).files
        assert (report.format, report.artifacts) == (name, 2)
        assert {ref.tool for ref in session.list()} <= {"read", "Read"}
        with transcript.Transcript(path, session) as log:
            assert log.append(json.dumps(lines[-1])).refs
            assert [one.get("message", one) for one in log.messages(mode="whole")] == [
                *inner(lines),
                inner(lines)[-1],
            ]


@pytest.fixture
def real_messages(corpus: Path) -> list[dict[str, Any]]:
    """The messages of two sessions of pi without their envelopes, as its agent has them in
    memory."""
    found = [
        json.loads(line).get("message")
        for path in sorted((corpus / "transcripts" / "pi").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [one for one in found if one is not None]


def result_stubs(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the stubs in the content of results, parsed."""
    texts = [at(one, ("content", 0, "text")) for one in lines if one.get("role") == "toolResult"]
    return [
        json.loads(text) for text in texts if isinstance(text, str) and text.startswith('{"stub":')
    ]


def test_the_stubs_of_bare_messages_of_pi_have_previews_and_open_in_the_session(
    real_messages: list[dict[str, Any]], session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "bare.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in real_messages))
    policy = Policy(max_chars=8_000)
    (report,) = transcript.externalize(path, session, policy=policy).files
    assert report.format == "pi"
    externalized = result_stubs([json.loads(line) for line in path.read_text().splitlines()])
    with transcript.Transcript(tmp_path / "appended.jsonl", session, policy=policy) as log:
        log.extend(real_messages)
        appended = result_stubs(list(log.messages()))
        assert list(log.messages(mode="whole")) == real_messages
    large = [one["content"][0]["text"] for one in real_messages if one["role"] == "toolResult"]
    large = [text for text in large if len(text) > 8_000]
    assert len(large) > 10
    for stubs in (externalized, appended):
        assert all("preview" in stub and "hint" in stub for stub in stubs)
        assert [session.get(stub["artifact"]) for stub in stubs] == large


def test_a_prompt_of_real_bare_messages_of_pi_has_stubs_that_open(
    real_messages: list[dict[str, Any]], session: Session
) -> None:
    last = next(
        at
        for at, one in enumerate(real_messages)
        if one["role"] == "toolResult" and len(str(one)) > 20_000
    )
    result = real_messages[last]["content"][0]["text"]
    for provider in PROVIDERS:
        builder = PromptBuilder(
            session, provider=provider, budget=Budget(max_prompt_tokens=1_000_000)
        )
        prompt = builder.build(real_messages[: last + 1])
        accepted(provider, prompt.request())
        (ref,) = prompt.refs
        assert '\\"preview\\":' in json.dumps(prompt.messages)
        assert ref.pointer in json.dumps(prompt.messages)
        assert session.get(ref.pointer) == result


def test_pruning_folds_whole_turns_of_lines_into_one_line(session: Session) -> None:
    results = [f"page {number}" for number in range(400)]
    for name, lines in shapes(*results):
        done = prune(lines, max_tokens=6_000, session=session)
        assert len(done.messages) < len(lines)
        assert unpaired(inner(done.messages), FORMATS[name]) == []
        folded = [one.message for one in done.replaced if one.what == "turns"]
        assert folded
        assert all(0 <= number < len(lines) for number in folded)
        kept = [one for number, one in enumerate(lines) if number not in folded]
        assert [one for one in done.messages if one in lines] == [
            one for one in kept if one in done.messages
        ]
        again = prune(lines, max_tokens=6_000, session=session)
        assert again.messages == done.messages


def test_a_large_result_of_any_host_is_stored_before_its_message_is_dropped(
    session: Session,
) -> None:
    for number, (_, lines) in enumerate(shapes(LOG * 2, "small")):
        index = safeguard(lines, session)
        assert len(index.refs) == 1, number
        assert session.get(index.refs[0]) == LOG * 2
        assert index.refs[0].pointer in index.text
        assert check_summary(index.text, session, index=index).ok
        session.forget(index.refs[0])


def test_the_output_of_a_command_that_a_user_ran_is_stored_too(session: Session) -> None:
    ran = {
        "role": "bashExecution",
        "command": "cat log",
        "output": LOG * 2,
        "exitCode": 0,
        "timestamp": 1,
    }
    for lines in ([*pi("a"), ran], pi_lines([*pi("a"), ran])):
        index = safeguard(lines, session)
        assert [session.get(one) for one in index.refs] == [LOG * 2]


def test_a_prompt_of_pi_messages_has_the_shape_of_the_provider(session: Session) -> None:
    for provider in PROVIDERS:
        for messages in (pi("one", "two"), pi_lines(pi("one", "two"))):
            prompt = PromptBuilder(
                session, provider=provider, budget=Budget(max_prompt_tokens=50_000)
            ).build(messages)
            accepted(provider, prompt.request())
            sent = json.dumps(prompt.request())
            assert "toolResult" not in sent
            assert "toolCall" not in sent
            assert "timestamp" not in sent
            for text in ("Find the slow requests.", "Reading.", "one", "two"):
                assert text in sent
            assert ("Let me look." in sent) == (provider == "anthropic")
            known = {"anthropic": "anthropic", "openai": "openai-chat"}.get(provider, provider)
            assert unpaired(prompt.messages, FORMATS[known]) == []


def test_a_large_result_of_pi_becomes_a_stub_in_the_prompt(session: Session) -> None:
    for provider in PROVIDERS:
        prompt = PromptBuilder(
            session, provider=provider, budget=Budget(max_prompt_tokens=50_000)
        ).build(pi(LOG * 2))
        accepted(provider, prompt.request())
        assert [session.get(ref) for ref in prompt.refs] == [LOG * 2]
        assert LOG[:200] * 2 not in json.dumps(prompt.request())


def test_images_and_errors_of_pi_reach_every_provider(session: Session) -> None:
    messages = pi("first", "second", error="first")
    messages[2]["content"].append({"type": "image", "data": PIXEL, "mimeType": "image/png"})
    for provider in PROVIDERS:
        request = PromptBuilder(session, provider=provider, budget=Budget(max_prompt_tokens=50_000)).build(
            messages
        ).request()  # fmt: skip
        accepted(provider, request)
        assert PIXEL in json.dumps(request)
        assert ('"is_error": true' in json.dumps(request)) == (provider == "anthropic")


def test_ids_that_a_provider_refuses_are_replaced_by_valid_ones(session: Session) -> None:
    messages = json.loads(json.dumps(pi("one")).replace("toolu_0", "call_" + "a" * 60 + "|fc_1/2"))
    for provider in PROVIDERS:
        prompt = PromptBuilder(
            session, provider=provider, budget=Budget(max_prompt_tokens=50_000)
        ).build(messages)
        accepted(provider, prompt.request())
        assert "No result" not in json.dumps(prompt.request())


def test_a_prompt_of_pi_messages_only_grows(session: Session) -> None:
    messages = pi(*(f"result {number}" for number in range(6)))
    kept = ("role", "content", "toolCallId")
    shown: list[dict[str, Any]] = [
        {key: value for key, value in one.items() if key in kept} for one in messages
    ]
    for provider in PROVIDERS:
        for host in (messages, shown):
            builder = PromptBuilder(
                session, provider=provider, budget=Budget(max_prompt_tokens=50_000)
            )
            before: list[Any] = []
            for end in range(1, len(host) + 1, 2):
                sent = builder.build(host[:end]).messages
                assert sent[: len(before)] == before
                before = sent


@pytest.mark.parametrize("provider", PROVIDERS)
def test_messages_that_a_host_adds_to_the_history_are_converted_and_the_rest_stays(
    provider: str, session: Session
) -> None:
    texts = [f"result {number}" for number in range(6)]
    hosts = [
        pi(*texts),
        pi_lines(pi(*texts)),
        *([claude_lines(*texts)] if provider == "anthropic" else []),
    ]
    for host in hosts:
        history: list[dict[str, Any]] = []
        for start in range(0, len(host), 2):
            given = [*history, *host[start : start + 2]]
            prompt = PromptBuilder(session, provider=provider).build(
                given, hot_state={"step": start}
            )
            accepted(provider, prompt.request())
            assert prompt.history[: len(history)] == history or len(prompt.history) == len(history)
            history = prompt.history
        assert all(json.dumps(history).count(text) == 1 for text in texts)


def test_lines_of_claude_code_are_sent_only_to_anthropic(session: Session) -> None:
    prompt = PromptBuilder(
        session, provider="anthropic", budget=Budget(max_prompt_tokens=50_000)
    ).build(claude_lines("one", "two"))
    accepted("anthropic", prompt.request())
    assert unpaired(prompt.messages, FORMATS["anthropic"]) == []
    for provider in ("openai", "openai-responses"):
        with pytest.raises(InvalidArgument) as caught:
            PromptBuilder(session, provider=provider).build(claude_lines("one"))
        assert caught.value.code == "invalid_argument"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_prompt_is_the_same_for_messages_of_pi_bare_and_in_lines(
    provider: str, session: Session
) -> None:
    bare, lines = (
        PromptBuilder(session, provider=provider, recall=False).build(messages).request()
        for messages in (pi("one", "two"), pi_lines(pi("one", "two")))
    )
    assert bare == lines


def test_a_prompt_is_the_same_for_messages_of_claude_code_bare_and_in_lines(
    session: Session,
) -> None:
    lines = claude_lines("one", "two")
    for line in lines:
        if line["type"] == "assistant":
            line["message"] |= {
                "type": "message",
                "model": "claude",
                "stop_reason": "tool_use",
                "usage": {"x": 1},
            }
    prompts = [
        PromptBuilder(session, provider="anthropic", recall=False).build(messages).request()
        for messages in (inner(lines), lines)
    ]
    accepted("anthropic", prompts[0])
    assert prompts[0] == prompts[1]
    assert all(set(one) == {"role", "content"} for one in prompts[0]["messages"])


def test_messages_that_a_provider_accepts_are_sent_unchanged(session: Session) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q", "name": "u"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "timestamp": 1,
            "stopReason": "x",
            "api": "y",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    prompt = PromptBuilder(session, provider="openai").build(messages)
    assert all(one is other for one, other in zip(prompt.messages, messages, strict=True))


def test_a_document_of_pi_messages_is_externalized_like_its_lines(
    session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "session.json"
    for messages in (pi(LOG * 2), pi_lines(pi(LOG * 2)), claude_lines(LOG * 2)):
        path.write_text(json.dumps(messages))
        transcript.externalize(path, session)
        (line,) = [one for one in inner(json.loads(path.read_text())) if "art:" in json.dumps(one)]
        (ref,) = [one for one in session.list() if session.get(one) == LOG * 2]
        assert ref.pointer in json.dumps(line)
        assert ref.tool in ("read", "Read")
        transcript.undo(path, session.store)
        session.forget(ref)
        assert json.loads(path.read_text()) == messages


def real(corpus: Path, host: str) -> Iterator[list[dict[str, Any]]]:
    for path in sorted((corpus / "transcripts" / host).glob("*.jsonl")):
        lines = []
        for line in path.read_text().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                continue
        yield lines


@pytest.mark.parametrize("host", ["pi", "claude-code"])
def test_real_lines_stay_paired_and_lose_nothing(corpus: Path, host: str, session: Session) -> None:
    known = FORMATS[host]
    for lines in real(corpus, host):
        bare = [one for one in (known.message(line) for line in lines) if one is not None]
        open_before = set(unpaired(bare, known))
        for messages in (lines, bare):
            done = prune(messages, max_tokens=40_000, session=session)
            assert done.tokens_after <= 40_000
            left = inner([one for one in done.messages if known.message(one) is not None])
            orphans = [one for one in unpaired(left, known) if "has no call" in one]
            assert len(orphans) <= len([one for one in open_before if "has no call" in one])
            for one in done.replaced:
                if one.what == "result":
                    assert one.pointer is not None
                    assert session.ref(one.pointer) is not None
            index = safeguard(messages, session, max_items=10_000, max_chars=10_000_000)
            stored = {
                session.get(ref)
                for ref in index.refs
                if ref.size_bytes < 10_000_000 and ref.codec == "text"
            }
            for message in bare:
                for result in known.results(message):
                    text = text_of(at(message, result.content_path))
                    if (
                        len(text) > 40_000
                        and isinstance(message.get("content"), list)
                        and "data:" not in text[:50]
                    ):
                        assert any(text == one or text in str(one) for one in stored), text[:100]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_real_conversations_of_pi_are_accepted_by_every_provider(
    corpus: Path, provider: str, session: Session
) -> None:
    known = {"anthropic": "anthropic", "openai": "openai-chat"}.get(provider, provider)
    for lines in real(corpus, "pi"):
        bare = [one for one in (FORMATS["pi"].message(line) for line in lines) if one is not None]
        for messages in (lines, bare):
            budget = Budget(max_prompt_tokens=150_000)
            builder = PromptBuilder(session, provider=provider, budget=budget, rewrite=True)
            prompt = builder.build(messages)
            accepted(provider, prompt.request())
            assert unpaired(prompt.messages, FORMATS[known]) == []
