"""Content blocks: text, images, documents and resources, as OpenAI, Anthropic and MCP shape them.

A block's payload is replaced in place where the provider accepts text there (text, documents,
resources); order, ids and unknown fields stay. An image, audio or file block without its data would
be refused, so a text block with the stub replaces it. Blocks that refer to a URL or a file id pass
unchanged, and so do pictures and files in the shapes of other frameworks (`is_foreign_media`): only
the framework knows what it accepts in their place.

An image counts as the tokens that providers bill for its pixels, however large its file is. A file
whose dimensions are unknown counts as the base64 text that it is in the message. An image over its
provider's limit is scaled (`images`).

Blocks and results may be objects of an SDK. They are read as their JSON and rebuilt in their own
class. No SDK is imported: a pydantic model is recognised by its methods.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from coatcheck.externalize.stub import media_type_of
from coatcheck.media import CHECKED
from coatcheck.models import ANY_PROVIDER, IMAGE_LIMITS, ImageLimit
from coatcheck.previews.binaries import pixels
from coatcheck.tokens import estimate
from coatcheck.values import read_repr, unquoted

Block = Mapping[str, Any]

# Tuples: a value with `type` may be other data, such as a JSON schema whose type is a list, and a
# list has no hash.
_TEXTS: Final = ("text", "input_text", "output_text")
_NESTED: Final = ("tool_result", "search_result")
_PAYLOAD_FIELDS: Final = frozenset(
    {
        "type",
        "text",
        "data",
        "source",
        "resource",
        "image_url",
        "file_data",
        "file",
        "input_audio",
        "content",
    }
)
_KEPT_FIELDS: Final = ("cache_control", "annotations", "_meta")
_AUDIO: Final = {"wav": "audio/wav", "mp3": "audio/mpeg"}
_IMAGES: Final = ("image", "image_url", "input_image")
_FOREIGN: Final = ("image", "audio", "video", "file")
_DATA_URLS: Final = {"image": "image_url", "file": "file_data"}  # where OpenAI Agents has them
_URL_KINDS: Final = ("image-url", "audio-url", "video-url", "document-url")
_CONTAINERS: Final = {
    "function_response": "parts", "functionResponse": "parts", "toolResult": "content", "tool_result": "content",
}  # fmt: skip
_MEDIA_KEYS: Final = frozenset({"inline_data", "inlineData", "image", "document", "video"})
_PIXELS_PER_TOKEN: Final = 750
_MAX_IMAGE_TOKENS: Final = 1_600  # providers scale larger images down
_HEADER: Final = 64 * 1_024  # characters of base64 that contain the dimensions of most images
_MAX_WRAPPERS: Final = 4  # inside one another
_MAX_TOKENS: Final = 20_000  # in a repr of blocks
WRAPPER: Final = 400
"""Characters in which `begins_wrapped` recognizes a wrapper."""

_QUOTED_TEXT: Final = r"""type["']\s*+:\s*+["']text["']"""
# How a wrapper begins: the first key of a block or a result, the fields that a model's `str`
# prints, or a class.
_FIRST: Final = rf"""(?:{_QUOTED_TEXT}|(?:text|annotations)["']\s*+:|_?meta["']\s*+:\s*+(?:null|None)
    |content["']\s*+:\s*+\[\s*+(?:\{{\s*+["'](?:{_QUOTED_TEXT}|(?:text|annotations)["'])|TextContent\()
    |is_?[eE]rror["']\s*+:\s*+[fF]alse|result_?[tT]ype["']\s*+:)"""
_WRAPPED: Final = re.compile(
    rf"""\s*+(?:(?:\[\s*+)?\{{\s*+(?:(?P<json>")|'){_FIRST}|(?P<fields>meta=None|content=\[|type='text'|text=['"])
    |(?:\[\s*+)?(?:TextContent|TextBlock|CallToolResult)\()""",
    re.VERBOSE,
)
begins_wrapped: Final = _WRAPPED.match
"""A quick check whether a text begins like content blocks that were written as text."""

_TEXT_TYPE: Final = re.compile(r"""type["']?\s*+[:=]\s*+["']text["']""")
# A wrapper up to the quote that begins the text of its first block, which must be its last if the
# end is missing.
_CUT: Final = re.compile(
    r"""\s*+(?:(?P<json>(?:\{\s*+(?:"(?:_meta|isError)"\s*+:\s*+(?:null|false)\s*+,\s*+)*+"content"\s*+:\s*+)?
    \[?\s*+\{\s*+"type"\s*+:\s*+"text"\s*+,\s*+"text"\s*+:\s*+)"
    |(?:CallToolResult\()?(?:meta=None,?\s*+)?(?:content=)?\[?TextContent\(type='text',\ text=['"])""",
    re.VERBOSE,
)
_CUT_ESCAPE: Final = re.compile(
    r"(?<!\\)(?:\\\\)*((?:\\u[dD][89abAB]..)?\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?|\\u[dD][89abAB]..)\Z"
)
_RESULT_FIELDS: Final = frozenset(
    {"content", "structuredContent", "isError", "_meta", "resultType"}
)


@dataclass(frozen=True, slots=True)
class ContentPart:
    """One part of an answer to a model: a text, or an image or another file. The `as_…` methods
    return it in the form of each provider. OpenAI's chat accepts images only in messages of the
    user. `kept` is a framework's own object for something else, which passes unchanged, and
    `original` the one that the part was read from."""

    text: str = ""
    media_type: str = ""
    data: bytes = b""
    kept: object = None
    original: object = field(default=None, repr=False, compare=False)

    @property
    def tokens(self) -> int:
        """The tokens of a text by our estimate, or those that providers bill for an image."""
        if not self.media_type:
            return estimate(self.text)
        width, height = pixels(self.data) or (_MAX_IMAGE_TOKENS, _PIXELS_PER_TOKEN)
        return min(math.ceil(width * height / _PIXELS_PER_TOKEN), _MAX_IMAGE_TOKENS)

    def as_openai(self) -> dict[str, Any]:
        """For chat completions."""
        return self._or_text({"type": "image_url", "image_url": {"url": self.url}})

    def as_openai_responses(self) -> dict[str, Any]:
        """For the Responses API."""
        return self._or_text({"type": "input_image", "image_url": self.url}, "input_text")

    def as_anthropic(self) -> dict[str, Any]:
        source = {"type": "base64", "media_type": self.media_type, "data": self.base64}
        return self._or_text({"type": "image", "source": source})

    def as_mcp(self) -> dict[str, Any]:
        return self._or_text({"type": "image", "data": self.base64, "mimeType": self.media_type})

    def _or_text(self, image: dict[str, Any], kind: str = "text") -> dict[str, Any]:
        return image if self.media_type else {"type": kind, "text": self.text}

    @property
    def base64(self) -> str:
        """The data as base64 text."""
        return base64.b64encode(self.data).decode()

    @property
    def url(self) -> str:
        """The data as a `data:` URL."""
        return f"data:{self.media_type};base64,{self.base64}"


@dataclass(frozen=True, slots=True)
class BlockPayload:
    """The data of a block as written in the message, and a function that rebuilds the block with
    other text."""

    written: str
    is_base64: bool
    media_type: str | None
    replace: Callable[[str], dict[str, Any]]
    is_image: bool = False
    limit: ImageLimit = ANY_PROVIDER
    """The largest image that the provider accepts."""

    @property
    def value(self) -> str | bytes:
        """The text, or the decoded bytes. Invalid base64 is returned as written."""
        if not self.is_base64:
            return self.written
        try:
            return base64.b64decode("".join(self.written.split()), validate=True)
        except ValueError:
            return self.written

    @property
    def billed(self) -> int | None:
        """The tokens that providers bill for an image; None for anything else."""
        size = self._pixels()
        if size is None or not all(size):
            return None
        return min(math.ceil(size[0] * size[1] / _PIXELS_PER_TOKEN), _MAX_IMAGE_TOKENS)

    @property
    def is_over_limit(self) -> bool:
        """Whether this is an image that the provider would refuse."""
        size = self._pixels()
        if size is None:
            return False
        has_long_edge = self.limit.max_edge is not None and max(size) > self.limit.max_edge
        return has_long_edge or len(self.written) * 3 // 4 > self.limit.max_bytes

    def _pixels(self) -> tuple[int, int] | None:
        """Width and height of an image; None if it has none, or is something else."""
        if not self.is_image:
            return None
        # A JPEG may have long metadata before its dimensions.
        for written in (self.written[:_HEADER], self.written):
            head = "".join(written.split())
            try:
                size = pixels(base64.b64decode(head[: len(head) // 4 * 4], validate=True))
            except ValueError:
                return None
            if size is not None:
                return size
        return None


def is_block(value: object) -> bool:
    """Whether this is a content block of a known shape, not just data with a `type`."""
    return isinstance(value, dict) and (
        nested(value) is not None or payload(value) is not None or refers(value)
    )


def payload(block: Block) -> BlockPayload | None:
    """Return the data of a block, or None if it has none, refers to a URL, or has an unknown
    shape."""
    kind = block.get("type")
    if kind in _TEXTS:
        text = block.get("text")
        return (
            BlockPayload(text, False, None, lambda new: {**block, "text": new})
            if isinstance(text, str)
            else None
        )
    if kind in ("image", "audio"):
        return _encoded(block, block.get("data"), block.get("mimeType")) or _source(block)
    if kind == "document":
        return _source(block)
    if kind == "resource":
        return _resource(block)
    if kind == "image_url":
        return _data_url(block, _image_url(block))
    if kind in ("input_image", "input_file"):
        return _data_url(
            block, block.get("image_url" if kind == "input_image" else "file_data"), "input_text"
        )
    if kind == "file":
        return _data_url(block, _inner(block, "file").get("file_data"))
    if kind == "input_audio":
        inner = _inner(block, "input_audio")
        return _encoded(block, inner.get("data"), _AUDIO.get(str(inner.get("format"))))
    return None


def with_image(block: Block, image: ContentPart) -> dict[str, Any]:
    """Return an image block with another image. Its shape and its other fields stay."""
    kind = block.get("type")
    if kind == "input_image":
        return {**block, "image_url": image.url}
    if kind == "image_url":
        inner = block["image_url"]
        new = {**inner, "url": image.url} if isinstance(inner, dict) else image.url
        return {**block, "image_url": new}
    if kind == "resource":
        found = {"mimeType": image.media_type, "blob": image.base64}
        return {**block, "resource": {**block["resource"], **found}}
    if isinstance(block.get("source"), dict):
        found = {"media_type": image.media_type, "data": image.base64}
        return {**block, "source": {**block["source"], **found}}
    return {**block, "data": image.base64, "mimeType": image.media_type}


def as_block(value: object) -> dict[str, Any] | None:
    """Return a dict or model that has a `type` as a dict, else None."""
    if isinstance(value, dict):
        return value if isinstance(value.get("type"), str) else None
    return _as_json(value) if isinstance(getattr(value, "type", None), str) else None


def as_part(value: object) -> object:
    """Return a model as a dict, and any other value unchanged."""
    return value if isinstance(value, str | dict) else _as_json(value) or value


def as_result(value: object) -> dict[str, Any] | None:
    """Return an MCP tool result (content, structured content, error flag) as a dict, else None."""
    if isinstance(value, dict):
        found: dict[str, Any] | None = value
    else:
        found = _as_json(value) if isinstance(getattr(value, "content", None), list) else None
    if (
        found is None
        or not isinstance(found.get("content"), list)
        or not found.keys() <= _RESULT_FIELDS
    ):
        return None
    return found


def as_text_result(text: str, result: Block) -> dict[str, Any]:
    """Return an MCP result with one text block in place of the content, and of the structured
    content if it has one."""
    changed = {**result, "content": [{"type": "text", "text": text}]}
    return (
        changed
        if result.get("structuredContent") is None
        else {**changed, "structuredContent": as_object(text)}
    )


def as_object(text: str) -> dict[str, Any]:
    """Return what replaces structured content, which must be an object: the fields of a stub, or
    another text."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"text": text}


def rebuilt(original: object, changed: dict[str, Any]) -> object:
    """Return `changed` as an object of the original's class, or of its module's `TextContent`, or
    as a dict."""
    if isinstance(original, dict):
        return changed
    text = getattr(sys.modules.get(type(original).__module__), "TextContent", None)
    for kind in (type(original), text):
        try:
            return kind.model_validate(changed)  # type: ignore[union-attr]
        except Exception:  # noqa: BLE001 - a third party's model, or no model at all
            continue
    return changed


def _as_json(value: object) -> dict[str, Any] | None:
    dump = getattr(value, "model_dump", None)
    if dump is None or isinstance(value, type):
        return None
    try:
        found = dump(mode="json", by_alias=True, exclude_none=True)
    except Exception:  # noqa: BLE001 - a third party's model
        return None
    return found if isinstance(found, dict) else None


def is_foreign_media(value: object) -> bool:
    """Whether this is a picture or file as LangChain, OpenAI Agents, Pydantic AI, ADK or Bedrock
    shape it."""
    if not isinstance(value, dict):
        return _is_foreign_object(value)
    kind = value.get("type")
    if kind in _FOREIGN:  # LangChain sends base64, OpenAI Agents a data URL
        return _is_data(value.get("base64")) or _is_data_url(value.get(_DATA_URLS.get(kind, "")))
    if kind == "media":  # LangChain, Vercel
        return _is_data(value.get("data")) and isinstance(
            value.get("mime_type", value.get("mediaType")), str
        )
    if value.get("kind") in _URL_KINDS:
        return _is_data_url(value.get("url"))
    if value.get("kind") == "binary":
        return _is_data(value.get("data")) and isinstance(value.get("media_type"), str)
    media = [one for key, one in value.items() if key in _MEDIA_KEYS and isinstance(one, dict)]
    if len(media) != 1 or kind is not None:
        return False
    (inner,) = media
    source = inner.get("source")
    if isinstance(source, dict):  # Bedrock
        return isinstance(inner.get("format"), str) and _is_data(source.get("bytes"))
    return _is_data(inner.get("data")) and isinstance(
        inner.get("mime_type", inner.get("mimeType")), str
    )


def container(
    value: object,
) -> tuple[list[Any], dict[str, Any], Callable[[list[Any]], dict[str, Any]]] | None:
    """Return the parts inside a message or a result of ADK or Bedrock, its other fields, and a
    function that rebuilds it with other parts. None if it is something else, or has no media of
    another framework."""
    if not isinstance(value, dict):
        return None
    outer, key = next(
        ((one, _CONTAINERS[one]) for one in _CONTAINERS if one in value), (None, "parts")
    )
    owner = value if outer is None else value[outer]
    parts = owner.get(key) if isinstance(owner, dict) else None
    if not isinstance(parts, list) or not any(map(is_foreign_media, parts)):
        return None
    rest = {name: one for name, one in owner.items() if name != key}
    others = {name: one for name, one in value.items() if name != outer} if outer else {}

    def rebuild(changed: list[Any]) -> dict[str, Any]:
        new = {**owner, key: changed}
        return new if outer is None else {**value, outer: new}

    return parts, {**others, **rest}, rebuild


def is_medium(value: object) -> bool:
    """Whether a block has or refers to data that is not text."""
    found = payload(value) if isinstance(value, dict) else None
    return isinstance(value, dict) and (refers(value) if found is None else found.is_base64)


def _is_foreign_object(value: object) -> bool:
    """Whether this is Pydantic AI's BinaryContent, or ADK's Part with inline data."""
    try:
        inline = getattr(value, "inline_data", None)
        is_binary = getattr(value, "kind", None) == "binary"
        owner, type_field = (value, "media_type") if is_binary else (inline, "mime_type")
        return isinstance(getattr(owner, "data", None), bytes) and isinstance(
            getattr(owner, type_field, None), str
        )
    except Exception:  # noqa: BLE001 - the properties of a host's class may raise anything
        return False


def _is_data_url(value: object) -> bool:
    return isinstance(value, str) and value.startswith("data:")


def _is_data(value: object) -> bool:
    return isinstance(value, str | bytes | bytearray) and bool(value)


def text_part(value: object) -> str | None:
    """Return the text of a string or a text block, else None."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or value.get("type", "text") not in _TEXTS:
        return None
    text = value.get("text")
    return text if isinstance(text, str) else None


def nested(block: Block) -> list[Any] | str | None:
    """Return the content of a block that contains other blocks or a tool's text, else None."""
    content = block.get("content")
    if block.get("type") not in _NESTED:
        return None
    if isinstance(content, str):
        return content if "tool_use_id" in block else None
    return (
        content if isinstance(content, list) and content and all(map(is_block, content)) else None
    )


def extra_fields(block: Block) -> dict[str, Any]:
    """Return the fields of a block besides its payload. They are never replaced."""
    return {key: value for key, value in block.items() if key not in _PAYLOAD_FIELDS}


def parts(value: Iterable[Any]) -> Iterator[str | BlockPayload]:
    """Yield the payloads of blocks in order, nested ones included."""
    for block in value:
        inner = nested(block)
        if isinstance(inner, str):
            yield inner
        elif inner is not None:
            yield from parts(inner)
        elif (found := payload(block)) is not None:
            yield found


def refers(block: Block) -> bool:
    """Whether a block refers to a URL or a file id, given that it has no data."""
    kind = block.get("type")
    if kind in ("image", "document"):
        return _inner(block, "source").get("type") in ("url", "file")
    if kind == "image_url":
        return isinstance(_image_url(block), str)
    if kind in ("input_image", "input_file"):
        return any(isinstance(block.get(key), str) for key in ("image_url", "file_id", "file_url"))
    if kind == "file":
        return isinstance(_inner(block, "file").get("file_id"), str)
    return kind == "resource_link" and isinstance(block.get("uri"), str)


def repeated(content: Iterable[Any], structured: object) -> object | None:
    """Return the value that a result's text and its structured content share, or None if they
    differ.

    Servers send structured content as text too, for older clients. It must be an object, so a value
    that is not one is wrapped, as `{"result": …}` or `{"content": …}`, and some write a list as one
    text per item. A wrapped value is returned without its wrapping."""
    texts = [one.get("text") for one in content if is_text_block(one)]
    if not texts or not all(isinstance(one, str) for one in texts):
        return None
    text = only_string(structured)
    if text is not None:
        is_same = len(texts) == 1 and (texts[0] == text or _is_same(texts[0], structured))
        return text if is_same else None
    wrapped = None
    if isinstance(structured, dict) and len(structured) == 1:
        (wrapped,) = structured.values()
    for value in (structured, wrapped):
        if len(texts) == 1 and _is_same(texts[0], value):
            return value
        if (
            isinstance(value, list)
            and len(texts) == len(value)
            and all(map(_is_same, texts, value))
        ):
            return value
    return None


def only_string(value: object) -> str | None:
    """Return the text in an object that has one string and nothing else, as servers wrap a text in
    structured content; None for anything else."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    (text,) = value.values()
    return text if isinstance(text, str) else None


def structured_text(text: str) -> str | None:
    """Return the text inside structured content that a client has written as JSON, or None if it is
    anything else.

    Claude Code and Codex show a model the structured content instead of the text. Both write it
    without spaces, so a text that differs from that is something else."""
    if not text.startswith('{"') or not text.endswith('"}') or len(text) > CHECKED:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    found = only_string(value)
    name = next(iter(value)) if found is not None else ""
    return found if text.startswith(f'{json.dumps(name, ensure_ascii=False)}:"', 1) else None


@dataclass(frozen=True, slots=True)
class Unwrapped:
    """The text inside content blocks that were written as text. If `is_cut`, their end is missing,
    and with it the end of the text."""

    text: str
    is_cut: bool = False


def unwrapped(text: str) -> Unwrapped | None:
    """Return the text inside content blocks that were written as text, or None if it is anything
    else.

    That is JSON, Python's `repr` or pydantic's `str` of a text block, of a list of them, or of an
    MCP result that has only them. Nothing else may be in it: a block with annotations, an image or
    an error stays as it is. Wrappers in wrappers are removed, and so is one whose end is cut off in
    the text of its only block."""
    found = None
    for _ in range(_MAX_WRAPPERS):
        inner = _unwrapped_once(text if found is None else found.text)
        if inner is None:
            break
        found = inner if found is None else Unwrapped(inner.text, inner.is_cut or found.is_cut)
    return found


def _unwrapped_once(text: str) -> Unwrapped | None:
    kind = _WRAPPED.match(text[:WRAPPER])
    ends = (text[:WRAPPER], text[-WRAPPER:])
    if kind is None or len(text) > CHECKED or not any(map(_TEXT_TYPE.search, ends)):
        return None
    try:
        inner = _text_in(text, kind)
        is_cut = False
    except (ValueError, RecursionError):
        cut = _CUT.match(text[:WRAPPER])
        inner = None if cut is None else _cut_text(text[cut.end() - 1 :], is_json=bool(cut["json"]))
        is_cut = True
    return None if inner is None else Unwrapped(inner, is_cut)


def _text_in(text: str, kind: re.Match[str]) -> str | None:
    """Return the text in a complete wrapper. Raises ValueError or RecursionError if it cannot be
    parsed."""
    if kind["json"]:
        return _only_text(json.loads(text))
    source = f"({text.strip()})" if kind["fields"] else text.strip()
    value, end = read_repr(source, most=_MAX_TOKENS)
    return _only_text(value) if end == len(source) else None


def _only_text(value: object) -> str | None:
    """Return the text in a block, a list of blocks or a result, if it is all there is in it."""
    if isinstance(value, dict) and isinstance(content := value.get("content"), list):
        structured = value.get("structuredContent", value.get("structured_content"))
        differs = structured is not None and repeated(content, structured) is None
        if differs or _has_more(value, ("content", "structuredContent", "structured_content")):
            return None
        value = content
    known: list[Any] = value if isinstance(value, list) else [value]
    texts = [
        text_part(one)
        for one in known
        if is_text_block(one) and not _has_more(one, ("type", "text"))
    ]
    return (
        "\n".join(filter(None, texts))
        if texts and len(texts) == len(known) and None not in texts
        else None
    )


def _has_more(value: Block, besides: tuple[str, ...]) -> bool:
    """Whether a block or result has a field with information besides these."""
    return any(
        one for key, one in value.items() if key not in besides and one != "complete"
    )  # a result's type


def _cut_text(rest: str, *, is_json: bool) -> str | None:
    """Return the text of a string whose end is missing, or None if the string ends before the
    content does. An escape that is cut stays as it is."""
    quote = rest[0]
    ends = re.compile(rf"{quote}(?:[^{quote}\\]|\\.)*+\\?", re.DOTALL).match(rest)
    if ends is None or ends.end() < len(rest):
        return None
    escape = _CUT_ESCAPE.search(rest)
    written, left = (rest[: escape.start(1)], escape[1]) if escape else (rest, "")
    try:
        return (
            str(json.loads(f"{written}{quote}", strict=False))
            if is_json
            else unquoted(written + quote)
        ) + left
    except ValueError:
        return None


def is_text_block(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


def _is_same(text: Any, value: object) -> bool:
    """Whether a text equals this value, or is JSON that parses to it."""
    if isinstance(value, str) and text == value:
        return True
    try:
        return json.dumps(json.loads(text), sort_keys=True) == json.dumps(value, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return False


def _inner(block: Block, key: str) -> dict[str, Any]:
    inner = block.get(key)
    return inner if isinstance(inner, dict) else {}


def _image_url(block: Block) -> object:
    return _inner(block, "image_url").get("url", block.get("image_url"))


def _source(block: Block) -> BlockPayload | None:
    """Return the payload of Anthropic's images and documents. A document may become text, an image
    may not."""
    source = _inner(block, "source")
    kind, data = source.get("type"), source.get("data")
    if block.get("type") != "document":
        return _encoded(block, data, source.get("media_type")) if kind == "base64" else None
    if kind == "text" and isinstance(data, str):
        return BlockPayload(
            data, False, None, lambda new: {**block, "source": {**source, "data": new}}
        )
    if kind != "base64":
        return None
    as_text = {"type": "text", "media_type": "text/plain"}
    return _encoded(
        block,
        data,
        source.get("media_type"),
        rewrite=lambda new: {**block, "source": {**as_text, "data": new}},
    )


def _resource(block: Block) -> BlockPayload | None:
    """Return the payload of an embedded MCP resource. The resource keeps its URI; its text is
    replaced."""
    inner = _inner(block, "resource")
    if not isinstance(inner.get("uri"), str):
        return None
    rest = {key: value for key, value in inner.items() if key not in ("text", "blob", "mimeType")}

    def rewrite(new: str) -> dict[str, Any]:
        return {**block, "resource": {**rest, "mimeType": "application/json", "text": new}}

    text, claimed = inner.get("text"), media_type_of(inner.get("mimeType"))
    if isinstance(text, str):
        return BlockPayload(text, False, claimed, rewrite)
    return _encoded(block, inner.get("blob"), claimed, rewrite=rewrite)


def _data_url(block: Block, url: object, becomes: str = "text") -> BlockPayload | None:
    """Return the payload of a `data:` URL, as OpenAI accepts images and files; plain base64 is
    accepted too."""
    if not isinstance(url, str):
        return None
    if not url.startswith("data:"):
        return _encoded(block, url, None, becomes) if "://" not in url[:32] else None
    head, comma, data = url.partition(",")
    return (
        _encoded(block, data, head[5:-7], becomes) if comma and head.endswith(";base64") else None
    )


def _encoded(
    block: Block,
    data: object,
    claimed: object,
    becomes: str = "text",
    rewrite: Callable[[str], dict[str, Any]] | None = None,
) -> BlockPayload | None:
    """Return the payload of base64 data. Without `rewrite`, a block of the type `becomes` replaces
    the block."""
    if not isinstance(data, str) or not data:
        return None
    kept = {key: block[key] for key in _KEPT_FIELDS if key in block}
    rewrite = rewrite or (lambda new: {"type": becomes, "text": new, **kept})
    kind, media_type = block.get("type"), media_type_of(claimed)
    is_image = kind in _IMAGES or (kind == "resource" and (media_type or "").startswith("image/"))
    return BlockPayload(data, True, media_type, rewrite, is_image, _limit(block))


def _limit(block: Block) -> ImageLimit:
    """Return the limit of the provider whose shape an image block has. MCP's shape may reach any
    provider."""
    if block.get("type") in ("image_url", "input_image"):
        return IMAGE_LIMITS["openai"]
    return IMAGE_LIMITS["anthropic"] if isinstance(block.get("source"), dict) else ANY_PROVIDER
