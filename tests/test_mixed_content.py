"""Results made of parts: blocks as dicts and as objects, images, and MCP results."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

import coatcheck
from coatcheck import Policy, Session, Store, errors
from coatcheck.externalize import Outcome

LOG = "".join(
    f"2026-01-01 12:{i // 60 % 60:02}:{i % 60:02} INFO request {i} took {i} ms\n"
    for i in range(2_000)
)
ROWS = [{"id": i, "name": f"user {i}"} for i in range(2_000)]


def png(width: int, height: int, size: int = 20_000) -> bytes:
    header = (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
        + width.to_bytes(4, "big")
        + height.to_bytes(4, "big")
    )
    return header + bytes(size - len(header))


def image(data: bytes) -> dict[str, Any]:
    return {"type": "image", "data": base64.b64encode(data).decode(), "mimeType": "image/png"}


@pytest.fixture
def session(store: Store) -> Session:
    return store.session("s")


def stub_in(text: str) -> dict[str, Any]:
    stub = json.loads(text)
    assert "not shown" in stub["stub"]
    return dict(stub)


# Images


def test_an_image_that_a_model_should_see_stays_however_long_its_base64_is(
    session: Session,
) -> None:
    blocks = [
        image(png(1280, 800, 200_000)),
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + image(png(640, 480))["data"]},
        },
        {
            "type": "input_image",
            "image_url": "data:image/png;base64," + image(png(640, 480))["data"],
        },
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": "image/png",
                "data": image(png(9, 9))["data"],
            },
        },
    ]
    outcome = session.externalize(blocks)
    assert outcome.content is blocks
    assert len(outcome.text) < 1_000


@pytest.mark.parametrize("data", [png(0, 0), bytes(20_000)], ids=["odd", "unknown"])
def test_a_file_that_is_not_an_image_is_stored_as_bytes(session: Session, data: bytes) -> None:
    outcome = session.externalize([image(data)])
    assert session.get(stub_in(outcome.content[0]["text"])["artifact"]) == data


@dataclass
class BinaryContent:
    """Like the class in Pydantic AI."""

    data: bytes
    media_type: str
    kind: Literal["binary"] = "binary"


class Blob(BaseModel):
    data: bytes
    mime_type: str


class Part(BaseModel):
    """Like the class in ADK."""

    text: str | None = None
    inline_data: Blob | None = None


class ToolOutputImage(BaseModel):
    """Like the class in OpenAI Agents."""

    type: Literal["image"] = "image"
    image_url: str | None = None


PICTURE = png(200, 150, 90_000)
ENCODED = base64.b64encode(PICTURE).decode()
TYPED, UNTYPED = {"type": "text", "text": LOG}, {"text": LOG}
FOREIGN: dict[str, tuple[Any, Any]] = {
    "langchain 0": ({"type": "image", "source_type": "base64", "data": ENCODED, "mime_type": "image/png"}, TYPED),
    "langchain 1": ({"type": "image", "base64": ENCODED, "mime_type": "image/png"}, TYPED),
    "langchain file": ({"type": "file", "base64": ENCODED, "mime_type": "application/pdf"}, TYPED),
    "langchain address": ({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED}"}}, TYPED),
    "openai agents input": (
        {"type": "input_image", "image_url": f"data:image/png;base64,{ENCODED}"}, {"type": "input_text", "text": LOG},
    ),
    "openai agents": ({"type": "image", "image_url": f"data:image/png;base64,{ENCODED}"}, TYPED),
    "openai agents object": (ToolOutputImage(image_url=f"data:image/png;base64,{ENCODED}"), TYPED),
    "openai agents file": ({"type": "file", "file_data": f"data:application/pdf;base64,{ENCODED}"}, TYPED),
    "langchain media": ({"type": "media", "mime_type": "image/png", "data": ENCODED}, TYPED),
    "langchain media beside a string": ({"type": "media", "mime_type": "image/png", "data": ENCODED}, LOG),
    "langchain 0 beside a string": (
        {"type": "image", "source_type": "base64", "data": ENCODED, "mime_type": "image/png"}, LOG,
    ),
    "langchain address beside a string": (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{ENCODED}"}}, LOG,
    ),
    "anthropic beside a string": (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ENCODED}}, LOG,
    ),
    "mcp beside a string": ({"type": "image", "data": ENCODED, "mimeType": "image/png"}, LOG),
    "pydantic ai address": ({"kind": "image-url", "url": f"data:image/png;base64,{ENCODED}"}, LOG),
    "adk parts": ({"role": "tool", "parts": [{"inline_data": {"mime_type": "image/png", "data": ENCODED}}]}, UNTYPED),
    "adk response": (
        {"functionResponse": {"name": "x", "response": {}, "parts": [
            {"inlineData": {"mimeType": "image/png", "data": ENCODED}}]}}, UNTYPED,
    ),
    "bedrock result": (
        {"toolResult": {"toolUseId": "t", "content": [{"image": {"format": "png", "source": {"bytes": PICTURE}}}]}},
        UNTYPED,
    ),
    "pydantic ai": (BinaryContent(PICTURE, "image/png"), LOG),
    "pydantic ai as json": ({"kind": "binary", "data": ENCODED, "media_type": "image/png"}, LOG),
    "adk": ({"inline_data": {"mime_type": "image/png", "data": ENCODED}}, UNTYPED),
    "adk camel": ({"inlineData": {"mimeType": "image/png", "data": ENCODED}}, UNTYPED),
    "adk object": (Part(inline_data=Blob(data=PICTURE, mime_type="image/png")), Part(text=LOG)),
    "bedrock": ({"image": {"format": "png", "source": {"bytes": PICTURE}}}, UNTYPED),
    "bedrock encoded": ({"image": {"format": "png", "source": {"bytes": ENCODED}}}, UNTYPED),
    "bedrock document": ({"document": {"format": "pdf", "name": "n", "source": {"bytes": PICTURE}}}, UNTYPED),
}  # fmt: skip


@pytest.mark.parametrize(("picture", "text"), FOREIGN.values(), ids=FOREIGN)
def test_an_image_in_the_format_of_a_framework_stays_and_the_text_beside_it_is_externalized(
    session: Session, picture: Any, text: Any
) -> None:
    assert session.externalize(picture).content is picture
    assert session.externalize([picture]).content == [picture]
    outcome = session.externalize([text, picture])
    stub, same = outcome.content
    assert same is picture
    assert type(stub) is type(text)
    stub_text: Any = (
        stub if isinstance(stub, str) else stub.text if isinstance(stub, Part) else stub["text"]
    )
    assert session.get(stub_in(stub_text)["artifact"]) == LOG
    if isinstance(stub, dict):
        assert stub == {**text, "text": stub_text}
    assert len(outcome.refs) == 1
    assert len(outcome.text) < 2_000
    small = [
        text
        if isinstance(text, Part)
        else "short"
        if isinstance(text, str)
        else {**text, "text": "s"},
        picture,
    ]
    assert isinstance(text, Part) or session.externalize(small).content is small


@pytest.mark.parametrize(
    ("outer", "key"), [("toolResult", "content"), ("function_response", "parts"), (None, "parts")]
)
def test_text_beside_an_image_in_the_result_of_a_framework_is_externalized(
    session: Session, outer: str | None, key: str
) -> None:
    picture = FOREIGN["bedrock" if outer == "toolResult" else "adk"][0]
    owner = {"id": "t", key: [{"text": LOG}, picture]}
    for listed in (False, True):
        value: Any = owner if outer is None else {outer: owner}
        content = session.externalize([value] if listed else value).content
        found = content[0] if listed else content
        inner = found if outer is None else found[outer]
        assert inner["id"] == "t"
        assert inner[key][1] is picture
        assert session.get(stub_in(inner[key][0]["text"])["artifact"]) == LOG
    large = {**owner, "response": ROWS}
    assert session.get(session.externalize(large).refs[0]) is not None
    rows = {"parts": ROWS}
    assert session.get(session.externalize(rows).refs[0]) == rows


@pytest.mark.parametrize("text", [TYPED, LOG])
def test_a_large_unknown_block_stays_and_the_text_beside_it_is_externalized(
    session: Session, text: Any
) -> None:
    unknown = {"type": "hologram", "beam": "z" * 60_000}
    picture = {"type": "image", "base64": ENCODED, "mime_type": "image/png"}
    for more in ([picture],) if isinstance(text, str) else ([], [picture]):
        outcome = session.externalize([unknown, text, *more])
        assert outcome.content[0] is unknown
        assert outcome.content[2:] == more
        assert len(outcome.refs) == 1
        assert session.get(outcome.refs[0]) == LOG


def test_data_beside_an_image_of_a_framework_is_externalized_alone(session: Session) -> None:
    picture = FOREIGN["bedrock"][0]
    content = session.externalize([{"json": {"rows": ROWS}}, picture]).content
    assert list(content[0]) == ["text"]
    assert session.get(stub_in(content[0]["text"])["artifact"]) == {"json": {"rows": ROWS}}
    assert content[1] is picture
    objects = session.externalize([FOREIGN["pydantic ai"][0], ROWS]).content
    assert session.get(stub_in(objects[1])["artifact"]) == ROWS


def test_lists_of_many_images_or_parts_are_treated_as_data(session: Session) -> None:
    picture = FOREIGN["langchain 1"][0]
    assert session.externalize([picture] * 51).is_stub
    assert session.externalize([picture, *ROWS]).is_stub
    texts = [{"type": "text", "text": LOG[:4_000]}] * 40
    outcome = session.externalize([picture, *texts], policy=Policy(max_tokens=3_000))
    assert 3 <= sum(len(one.get("text", "")) == 4_000 for one in outcome.content) <= 6


@pytest.mark.parametrize(
    "record",
    [
        {"type": "file", "encoding": "base64", "content": ENCODED, "name": "a.png"},
        {"kind": "binary", "data": ROWS},
        {"image": {"format": "png", "source": {"name": "x" * 20_000}}},
        {"inline_data": {"rows": ROWS}},
        {"type": "image", "image_url": "https://example.org/" + "x" * 20_000},
    ],
)
def test_data_with_the_keys_of_an_image_is_treated_as_data(
    session: Session, record: dict[str, Any]
) -> None:
    assert session.externalize(record).is_stub
    assert session.externalize([record]).is_stub


def test_a_limit_in_tokens_counts_the_pixels_of_an_image_and_the_other_limits_do_not_apply(
    session: Session,
) -> None:
    block = [image(png(1280, 800))]
    assert session.externalize(block, policy=Policy(max_tokens=1_366)).content is block
    assert session.externalize(block, policy=Policy(max_tokens=1_365)).is_stub
    assert session.externalize(block, policy=Policy(max_chars=5_000)).content is block
    assert session.externalize(block, policy=Policy(max_bytes=5_000)).content is block


def test_all_images_together_have_four_times_the_limit(session: Session) -> None:
    outcome = session.externalize([image(png(1280, 800, 20_000 + i)) for i in range(12)])
    assert [block["type"] for block in outcome.content] == ["image"] * 8 + ["text"] * 4


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png(640, 480), "640 × 480"),
        (b"GIF89a" + (320).to_bytes(2, "little") + (200).to_bytes(2, "little"), "320 × 200"),
        (b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc0\x00\x0b\x08\x00\x10\x00\x20\x01", "32 × 16"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8X" + bytes(8) + b"\x1f\x00\x00\x0f\x00\x00", "32 × 16"),
    ],
)
def test_the_size_of_an_image_is_in_its_preview(session: Session, data: bytes, size: str) -> None:
    assert size in session.preview(session.put(data)).text


# Objects


class TextContent(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: Literal["text"] = "text"
    text: str
    meta: dict[str, Any] | None = Field(default=None, alias="_meta")


class Picture(BaseModel):
    type: Literal["image"] = "image"
    data: str
    mime_type: str = Field(alias="mimeType")


def test_blocks_that_are_objects_are_treated_like_dicts_and_stay_objects(session: Session) -> None:
    small = TextContent(text="small")
    picture, file = Picture(**image(png(64, 64, 300_000))), Picture(**image(bytes(300_000)))
    blocks = [small, TextContent(text=LOG, _meta={"a": 1}), picture, file]
    outcome = session.externalize(blocks)
    assert (outcome.content[0], outcome.content[2]) == (small, picture)
    assert [type(block) for block in outcome.content] == [
        TextContent,
        TextContent,
        Picture,
        TextContent,
    ]
    assert outcome.content[1].meta == {"a": 1}
    assert [session.get(ref) for ref in outcome.refs] == [LOG, bytes(300_000)]
    unchanged = [small, TextContent(text="too")]
    assert session.externalize(unchanged).content is unchanged


def test_rows_that_are_objects_are_treated_as_data(session: Session) -> None:
    class Row(BaseModel):
        type: str = "row"
        name: str

    outcome = session.externalize([Row(name=f"row {i}") for i in range(2_000)])
    assert outcome.ref is not None
    assert session.get(outcome.ref)[1] == {"type": "row", "name": "row 1"}


def test_objects_of_the_mcp_sdk_keep_their_types(session: Session) -> None:
    types = pytest.importorskip("mcp.types")
    picture = {"uri": "file:///b", "mimeType": "image/png", "blob": image(png(9, 9))["data"]}
    wire = {
        "content": [
            {"type": "text", "text": LOG, "annotations": {"audience": ["user"]}},
            image(bytes(300_000)),
            {"type": "resource", "resource": picture},
            {"type": "resource_link", "uri": "file:///c", "name": "c"},
        ],
        "structuredContent": {"rows": ROWS},
        "isError": True,
        "_meta": {"trace": "t1"},
    }
    given = types.CallToolResult.model_validate(wire)
    result = session.externalize(given).content
    assert type(result) is type(given)
    dumped = result.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert [block["type"] for block in dumped["content"]] == [
        "text",
        "text",
        "resource",
        "resource_link",
    ]
    assert dumped["content"][0]["annotations"] == {"audience": ["user"]}
    assert (dumped["isError"], dumped["_meta"]) == (True, {"trace": "t1"})
    assert session.get(dumped["structuredContent"]["artifact"]) == {"rows": ROWS}
    blocks = session.externalize(given.content).content
    assert [type(block).__name__ for block in blocks] == [
        "TextContent", "TextContent", "EmbeddedResource", "ResourceLink",
    ]  # fmt: skip


# Results of a call


def test_an_mcp_result_keeps_everything_but_its_content(session: Session) -> None:
    given = {"content": [{"type": "text", "text": LOG}], "isError": True, "_meta": {"a": 1}}
    outcome = session.externalize(given)
    assert given["content"] == [{"type": "text", "text": LOG}]
    assert outcome.content == {
        "content": [{"type": "text", "text": outcome.text}], "isError": True, "_meta": {"a": 1},
    }  # fmt: skip
    assert stub_in(outcome.text)["kind"] == "log"
    small = {
        "content": [{"type": "text", "text": "ok"}],
        "structuredContent": {"ok": True},
        "isError": False,
    }
    assert session.externalize(small).content is small
    assert session.externalize(small).text == "ok"


def test_structured_content_is_replaced_by_its_stub_as_an_object(session: Session) -> None:
    outcome = session.externalize({"content": [], "structuredContent": {"rows": ROWS}})
    assert outcome.content["content"] == []
    assert session.get(outcome.content["structuredContent"]["artifact"]) == {"rows": ROWS}
    assert stub_in(outcome.text) == outcome.content["structuredContent"]


def test_data_with_the_keys_of_an_mcp_result_is_treated_as_data(session: Session) -> None:
    for data in (
        {"content": ROWS},
        {"content": [{"type": "row", "text": "x" * 20}] * 2_000},
        {"content": LOG, "x": 1},
    ):
        outcome = session.externalize(data)
        assert len(outcome.refs) == 1
        assert session.get(outcome.refs[0]) == data


def test_data_whose_type_is_not_a_string_is_treated_as_data(session: Session) -> None:
    schema = {
        "type": ["object", "null"],
        "properties": {"rows": {"type": ["array", "null"], "items": {}}},
    }
    for small in (schema, [schema], {"content": [schema]}, {"type": {}, "content": [schema]}):
        assert session.externalize(small).content is small
    large = {**schema, "examples": ROWS}
    for value in (
        large,
        [large],
        {"content": [large]},
        [{"type": "tool_result", "content": [large]}],
    ):
        outcome = session.externalize(value)
        assert session.get(outcome.refs[0]) == value


def test_a_single_block_is_treated_as_a_block(session: Session) -> None:
    outcome = session.externalize({"type": "text", "text": LOG, "x": 1})
    assert outcome.content == {"type": "text", "text": outcome.text, "x": 1}
    link = {
        "type": "image_url",
        "image_url": {"url": "https://example.com/a.png"},
        "note": "n" * 1_000,
    }
    assert session.externalize(link).text == json.dumps(link, separators=(",", ":"))


# Whole results


def test_a_list_of_many_large_blocks_is_one_artifact(session: Session) -> None:
    blocks = [{"type": "text", "text": f"{i} {LOG[:20_000]}"} for i in range(60)]
    outcome = session.externalize(blocks)
    assert len(outcome.refs) == 1
    assert session.get(outcome.refs[0]) == blocks
    result = session.externalize({"content": blocks, "isError": False}).content
    assert len(result["content"]) == 1
    assert stub_in(result["content"][0]["text"])["artifact"] == outcome.refs[0].pointer


def test_the_other_fields_of_a_block_must_be_small_too(session: Session) -> None:
    blocks = [{"type": "text", "text": "small", "embedding": [0.25] * 20_000}]
    outcome = session.externalize(blocks)
    assert len(outcome.text) < 2_000
    assert session.get(outcome.refs[0]) == blocks


def test_if_the_store_fails_the_model_gets_less_of_each_block_when_there_are_many(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise errors.StoreFull("no space")

    monkeypatch.setattr(session.store._catalog, "put", refuse)
    blocks = [{"type": "text", "text": f"{i} {LOG}"} for i in range(40)]
    outcome = session.externalize(blocks)
    assert isinstance(outcome, Outcome)
    assert len(outcome.content) == 40
    assert len(outcome.text) < 30_000
    assert outcome.text.count("not kept") >= 40


# Structured content that repeats the text


@pytest.mark.parametrize(
    ("texts", "structured"),
    [
        ([json.dumps({"rows": ROWS}, indent=1)], {"rows": ROWS}),
        ([json.dumps(ROWS)], {"result": ROWS}),
        ([json.dumps(row) for row in ROWS], {"result": ROWS}),
        ([json.dumps(ROWS)], {"items": ROWS}),
        ([LOG], {"result": LOG}),
        ([LOG], {"content": LOG}),
        ([json.dumps({"content": LOG})], {"content": LOG}),
        ([LOG, "ok"], {"result": [LOG, "ok"]}),
    ],
)
def test_structured_content_that_repeats_the_text_is_one_artifact_and_saves_once(
    session: Session, texts: list[str], structured: dict[str, Any]
) -> None:
    given = {
        "content": [{"type": "text", "text": one} for one in texts],
        "structuredContent": structured,
    }
    outcome = session.externalize(given)
    assert len(outcome.refs) == len(session.list()) == 1
    [block] = outcome.content["content"]
    assert stub_in(block["text"]) == outcome.content["structuredContent"]
    assert outcome.text == block["text"]
    assert session.get(outcome.refs[0]) in (structured, *structured.values())
    assert outcome.refs[0].kind == "log" or LOG not in structured.values()
    alone = session.externalize(session.get(outcome.refs[0]))
    assert outcome.tokens_saved == alone.tokens_saved


def test_blocks_beside_a_repeated_text_stay(session: Session) -> None:
    link = {"type": "resource_link", "uri": "file:///c", "name": "c"}
    content = [
        link,
        {"type": "text", "text": json.dumps({"rows": ROWS}), "annotations": {"priority": 1}},
    ]
    outcome = session.externalize(
        {"content": content, "structuredContent": {"rows": ROWS}, "isError": False}
    )
    text, other = outcome.content["content"]
    assert (other, text["annotations"], outcome.content["isError"]) == (
        link,
        {"priority": 1},
        False,
    )
    assert len(outcome.refs) == 1


@pytest.mark.parametrize(
    "structured", [{"rows": [*ROWS, 1]}, {"rows": ROWS, "more": True}, {"result": {"rows": [1]}}]
)
def test_structured_content_that_differs_from_the_text_is_kept_too(
    session: Session, structured: Any
) -> None:
    text = json.dumps({"rows": [*ROWS, True]})
    outcome = session.externalize(
        {"content": [{"type": "text", "text": text}], "structuredContent": structured}
    )
    assert session.get(stub_in(outcome.content["content"][0]["text"])["artifact"]) == text
    kept = outcome.content["structuredContent"]
    assert (session.get(kept["artifact"]) if "artifact" in kept else kept) == structured


def test_text_and_structured_content_that_differ_count_once_since_a_model_gets_one_of_them(
    session: Session,
) -> None:
    result = {"content": [{"type": "text", "text": LOG}], "structuredContent": {"rows": ROWS}}
    outcome = session.externalize(result)
    assert len(outcome.refs) == 2
    alone = [session.externalize(one).tokens_saved for one in (LOG, {"rows": ROWS})]
    assert outcome.tokens_saved == min(alone)


def test_a_text_in_structured_content_is_stored_as_a_text(session: Session) -> None:
    result = {
        "content": [{"type": "text", "text": "2,000 lines"}],
        "structuredContent": {"content": LOG},
    }
    outcome = session.externalize(result)
    assert outcome.content["content"] == result["content"]
    assert session.get(outcome.content["structuredContent"]["artifact"]) == LOG


@pytest.mark.parametrize("name", ["content", 'a name: "quoted", ü'])
def test_structured_content_that_a_host_has_written_as_json_is_stored_as_the_text_in_it(
    session: Session, name: str
) -> None:
    """As Claude Code and Codex write it."""
    written = json.dumps({name: LOG}, ensure_ascii=False, separators=(",", ":"))
    outcome = session.externalize(written, tool="mcp__files__read_text_file")
    assert session.get(outcome.refs[0]) == LOG


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        (json.dumps({"content": LOG}, separators=(",", ":")), "Bash"),  # a file, perhaps
        (json.dumps({"content": LOG}), "mcp__files__read_text_file"),
        (json.dumps({"content": LOG}, separators=(",", ":")) + "\n", "mcp__files__read_text_file"),
        (
            json.dumps({"content": LOG, "lines": "9"}, separators=(",", ":")),
            "mcp__files__read_text_file",
        ),
        (json.dumps({"rows": ROWS}, separators=(",", ":")), "mcp__files__read_text_file"),
    ],
    ids=["another tool", "spaces", "line break", "two fields", "rows"],
)
def test_any_other_json_is_stored_exactly(session: Session, text: str, tool: str) -> None:
    assert session.get(session.externalize(text, tool=tool).refs[0]) == text


# Blocks that were written as text


@pytest.fixture
def kept() -> Iterator[Session]:
    with coatcheck.open("memory:") as store:
        yield store.session("s")


INNER = 'first line\nsecond "line" it\'s \\ ü 😀\n' * 300
BLOCK = {"type": "text", "text": INNER}
WRAPPED = {
    "a block": json.dumps(BLOCK),
    "keys in another order": json.dumps(dict(reversed(BLOCK.items()))),
    "a list": json.dumps([BLOCK]),
    "a result": json.dumps(
        {"_meta": None, "content": [{**BLOCK, "annotations": None}], "isError": False}, indent=2
    ),
    "a result that repeats its text": json.dumps(
        {"content": [BLOCK], "structuredContent": {"result": INNER}}
    ),
    "a repr of a list": repr([BLOCK]),
    "a repr of a result": repr({"content": [BLOCK], "isError": False}),
    "a repr of objects": f"[TextContent(type='text', text={INNER!r}, annotations=None)]",
    "the str of a result": f"meta=None content=[TextContent(type='text', text={INNER!r}, meta=None)] isError=False",
    "the repr of a result": f"CallToolResult(content=[TextContent(type='text', text={INNER!r})], is_error=False)",
    "a wrapper in a wrapper": str([{"type": "text", "text": json.dumps({"content": [BLOCK]})}]),
}


@pytest.mark.parametrize("form", WRAPPED)
def test_blocks_written_as_text_are_stored_as_the_text_inside(kept: Session, form: str) -> None:
    outcome = kept.externalize(WRAPPED[form])
    assert outcome.ref is not None
    assert kept.get(outcome.ref) == INNER
    assert stub_in(outcome.text)["lines"] == 600
    inside = kept.externalize([{"type": "text", "text": WRAPPED[form]}])
    assert inside.ref is not None
    assert inside.ref.artifact_id == outcome.ref.artifact_id


def test_several_blocks_written_as_text_are_stored_line_by_line(kept: Session) -> None:
    outcome = kept.externalize(
        json.dumps([{"type": "text", "text": json.dumps(row)} for row in ROWS])
    )
    assert outcome.ref is not None
    assert outcome.ref.media_type == "application/x-ndjson"
    assert kept.get(outcome.ref) == "\n".join(map(json.dumps, ROWS))


@pytest.mark.parametrize("cut", [5, 400, 401, 402, 403, 404, 405, 406, 407, 408, 409, 410])
@pytest.mark.parametrize("form", ["a result", "the str of a result"])
def test_a_wrapper_whose_end_is_cut_off_is_removed_too(kept: Session, form: str, cut: int) -> None:
    outcome = kept.externalize(WRAPPED[form][: -cut - 100], policy=Policy(max_chars=1_000))
    assert outcome.ref is not None
    text = kept.get(outcome.ref)
    assert text.startswith(INNER[:5_000])
    assert "type" not in text


UNCHANGED = {
    "an error": json.dumps({"content": [BLOCK], "isError": True}),
    "annotations": json.dumps([{**BLOCK, "annotations": {"priority": 1}}]),
    "an image beside it": json.dumps(
        [BLOCK, {"type": "image", "data": "aGk=", "mimeType": "image/png"}]
    ),
    "other structured content": json.dumps(
        {"content": [BLOCK], "structuredContent": {"rows": [1]}}
    ),
    "another key": json.dumps({"content": [BLOCK], "nextCursor": "abc"}),
    "words after it": json.dumps([BLOCK]) + " and more",
    "words after its repr": repr([BLOCK]) + " and more",
    "a block that is not of text": json.dumps({"type": "paragraph", "text": INNER}),
    "a text without a type": json.dumps({"text": INNER}),
    "content that is a text": json.dumps({"content": INNER}),
}


@pytest.mark.parametrize("form", UNCHANGED)
def test_a_wrapper_with_anything_else_in_it_is_stored_as_it_is(kept: Session, form: str) -> None:
    outcome = kept.externalize(UNCHANGED[form])
    assert outcome.ref is not None
    assert kept.get(outcome.ref) == UNCHANGED[form]


def test_a_value_that_is_put_is_never_unwrapped(kept: Session) -> None:
    assert kept.get(kept.put(WRAPPED["a list"])) == WRAPPED["a list"]
