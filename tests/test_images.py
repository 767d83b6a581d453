"""Images on their way to a model: they stay images, whatever the size of their files."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

import coatcheck
from coatcheck import Limit, Policy, Session, ToolCall, ToolExecutor
from coatcheck.adapters import Adapter, ContentPart
from coatcheck.adapters.claude_code import HOST, PLUGIN_SERVER, Hooks
from coatcheck.context import PromptBuilder
from coatcheck.executor import Result
from coatcheck.models import ANY_PROVIDER, IMAGE_LIMITS
from coatcheck.reading import pictures
from coatcheck.reading.sandbox import Pool
from tests.screenshots import dimensions, huge_screenshot, image_in, in_shape, screenshot

LOG = "".join(
    f"2026-01-01 12:{i // 60 % 60:02}:{i % 60:02} INFO request {i} took {i} ms\n"
    for i in range(2_000)
)
SHAPES = ["mcp", "anthropic", "chat", "responses", "resource"]
LIMITS = {"anthropic": "anthropic", "chat": "openai", "responses": "openai"}
shapes = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(scope="module", autouse=True)
def children() -> Iterator[None]:
    yield
    pictures.pool.close()


@pytest.fixture
def session() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


@pytest.fixture
def without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "pool", Pool("x", package="no_such_package"))


@shapes
@pytest.mark.parametrize(
    "policy",
    [
        Policy(),
        Policy(max_tokens=3_000),
        Policy(max_chars=12_000),
        Policy(max_bytes=12_000),
        Policy(tools={"look": Limit(max_chars=100)}),
    ],
    ids=["cost", "tokens", "chars", "bytes", "tool"],
)
def test_a_screenshot_stays_an_image_whatever_its_bytes(
    session: Session, shape: str, policy: Policy
) -> None:
    data = screenshot()
    assert 270_000 < len(data) < 300_000
    content = [in_shape(shape, data)]
    outcome = session.externalize(content, tool="look", policy=policy)
    assert outcome.content is content
    assert not outcome.refs


@shapes
def test_a_screenshot_inside_a_tool_result_stays_an_image(session: Session, shape: str) -> None:
    inner = [{"type": "text", "text": LOG}, in_shape(shape, screenshot())]
    content = [{"type": "tool_result", "tool_use_id": "t", "content": inner}]
    (shown,) = session.externalize(content).content
    assert shown["content"][1] is inner[1]
    assert '"stub"' in shown["content"][0]["text"]


def test_an_explicit_limit_in_tokens_and_the_rule_always_still_apply(session: Session) -> None:
    content = [in_shape("mcp", screenshot())]  # 1,366 tokens
    for policy in (Policy(max_tokens=1_000), Policy(tools={"look": "always"})):
        outcome = session.externalize(content, tool="look", policy=policy)
        assert session.get(outcome.refs[0]) == image_in(content[0])
        assert outcome.tokens_saved < 1_366


@shapes
def test_an_image_over_the_limit_of_its_provider_is_scaled(session: Session, shape: str) -> None:
    data = huge_screenshot()
    limit = IMAGE_LIMITS[LIMITS[shape]] if shape in LIMITS else ANY_PROVIDER
    block = in_shape(shape, data)
    outcome = session.externalize([block])
    (shown,) = outcome.content
    if len(data) <= limit.max_bytes:  # OpenAI accepts it
        assert shown is block
        assert not outcome.has_scaled_image
        return
    smaller = image_in(shown)
    assert len(smaller) <= limit.max_bytes
    assert dimensions(smaller) == dimensions(data)
    assert shown == in_shape(shape, smaller, "image/jpeg")
    assert outcome.has_scaled_image
    assert not outcome.refs


def test_an_image_with_more_pixels_than_a_provider_accepts_is_scaled(session: Session) -> None:
    (shown,) = session.externalize([in_shape("anthropic", screenshot(8_100, 100, noisy=1))]).content
    assert dimensions(image_in(shown)) == (1_568, 19)
    openai = in_shape("chat", screenshot(8_100, 100, noisy=1))
    assert session.externalize([openai]).content == [openai]


@pytest.mark.usefixtures("without_pillow")
@shapes
def test_without_the_extra_an_image_over_the_limit_is_passed_on(
    session: Session, shape: str
) -> None:
    content = [in_shape(shape, huge_screenshot())]
    assert session.externalize(content).content is content


def test_a_damaged_image_over_the_limit_is_passed_on(session: Session) -> None:
    content = [in_shape("anthropic", screenshot()[:200_000] + bytes(4_000_000))]
    assert session.externalize(content).content is content


def test_a_photo_with_long_metadata_before_its_dimensions_stays_an_image(session: Session) -> None:
    out = io.BytesIO()
    profile = random.Random(1).randbytes(200_000)
    Image.new("RGB", (640, 480)).save(out, "JPEG", icc_profile=profile)
    content = [in_shape("mcp", out.getvalue(), "image/jpeg")]
    assert session.externalize(content).content is content


def test_images_beside_texts_that_leave_together_stay_images(session: Session) -> None:
    texts = [{"type": "text", "text": f"{number}\n{LOG[:4_000]}"} for number in range(40)]
    picture = in_shape("mcp", screenshot())
    outcome = session.externalize([picture, *texts], policy=Policy(max_tokens=3_000))
    stub, shown = outcome.content
    assert shown is picture
    assert '"stub"' in stub["text"]
    assert session.get(outcome.refs[0]) == texts
    parts = [
        ContentPart(media_type="image/png", data=screenshot()),
        *(ContentPart(one["text"]) for one in texts),
    ]
    kit = Adapter(session, host="x", policy=Policy(max_tokens=3_000)).kit()
    assert kit.parts(session, parts, tool="look")[1] is parts[0]


def test_an_image_beside_blocks_with_much_else_in_them_stays_an_image(session: Session) -> None:
    odd = {
        "type": "text",
        "text": "short",
        "x-rows": [{"id": number, "name": "row"} for number in range(9_000)],
    }
    picture = in_shape("mcp", screenshot())
    stub, shown = session.externalize([odd, picture]).content
    assert shown is picture
    assert '"stub"' in stub["text"]


def test_a_result_of_the_executor_keeps_its_screenshot(session: Session) -> None:
    content = [in_shape("anthropic", screenshot())]

    def look() -> Any:
        return content

    outcome = ToolExecutor(session, [look]).run(ToolCall("1", "look"))
    assert isinstance(outcome, Result)
    assert outcome.content is content


@pytest.mark.parametrize("provider", ["anthropic", "openai-responses"])
def test_a_prompt_keeps_its_screenshots(session: Session, provider: str) -> None:
    shape = "anthropic" if provider == "anthropic" else "responses"
    builder = PromptBuilder(session, provider=provider, policy=Policy())
    picture, huge = in_shape(shape, screenshot()), in_shape(shape, huge_screenshot())
    messages = results_of(provider, [picture, huge])
    shown = contents_of(provider, builder.build(messages).messages)
    assert shown[0] == picture
    assert (len(image_in(shown[1])) <= ANY_PROVIDER.max_bytes) == (provider == "anthropic")
    assert dimensions(image_in(shown[1])) == dimensions(huge_screenshot())
    again = contents_of(
        provider, builder.build([*messages, {"role": "user", "content": "And now?"}]).messages
    )
    assert again == shown


def results_of(provider: str, content: list[Any]) -> list[dict[str, Any]]:
    """A call of a tool and its result, in the format of a provider."""
    first = {"role": "user", "content": "What do you see?"}
    if provider == "anthropic":
        use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
        return [
            first,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    return [first, call, {"type": "function_call_output", "call_id": "c1", "output": content}]


def contents_of(provider: str, messages: Any) -> list[dict[str, Any]]:
    if provider == "anthropic":
        return list(messages[2]["content"][0]["content"])
    return list(messages[2]["output"])


def test_the_hook_of_claude_code_leaves_a_screenshot_alone(session: Session) -> None:
    hooks = Hooks(Adapter(session.store, host=HOST), server=PLUGIN_SERVER)
    event = {
        "hook_event_name": "PostToolUse", "session_id": "c1", "tool_name": "mcp__browser__screenshot",
        "tool_use_id": "t1", "tool_response": [in_shape("mcp", screenshot())],
    }  # fmt: skip
    assert hooks.answer(event) == {}
    (changed,) = hooks.answer(
        {**event, "tool_response": [in_shape("mcp", huge_screenshot())]}
    ).values()
    (shown,) = changed["updatedToolOutput"]
    assert len(image_in(shown)) <= ANY_PROVIDER.max_bytes
