"""Text that a host has written around a result: content blocks as text, and structured content as
JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.media import CHECKED
from coatcheck.parts import text_of
from coatcheck.parts.mcp import is_text_block, only_string, repeated
from coatcheck.values import read_repr, unquoted

_MAX_WRAPPERS: Final = 4  # inside one another
_MAX_TOKENS: Final = 20_000  # in a repr of blocks
WRAPPER: Final = 400
"""Characters in which `begins_wrapped` recognizes a wrapper."""

_QUOTED_TEXT: Final = r"""type["']\s*+:\s*+["']text["']"""
# How a wrapper begins: the first key of a block or a result, the fields that a model's `str`
# prints, or a class.
_FIRST: Final = rf"""(?:{_QUOTED_TEXT}|(?:text|annotations)["']\s*+:
    |_?meta["']\s*+:\s*+(?:null|None)
    |content["']\s*+:\s*+\[\s*+(?:\{{\s*+["'](?:{_QUOTED_TEXT}|(?:text|annotations)["'])
        |TextContent\()
    |is_?[eE]rror["']\s*+:\s*+[fF]alse|result_?[tT]ype["']\s*+:)"""
_WRAPPED: Final = re.compile(
    rf"""\s*+(?:(?:\[\s*+)?\{{\s*+(?:(?P<json>")|'){_FIRST}
    |(?P<fields>meta=None|content=\[|type='text'|text=['"])
    |(?:\[\s*+)?(?:TextContent|TextBlock|CallToolResult)\()""",
    re.VERBOSE,
)
begins_wrapped: Final = _WRAPPED.match
"""A quick check whether a text begins like content blocks that were written as text."""

_TEXT_TYPE: Final = re.compile(r"""type["']?\s*+[:=]\s*+["']text["']""")
# A wrapper up to the quote that begins the text of its first block, which must be its last if the
# end is missing.
_CUT: Final = re.compile(
    r"""\s*+(?:(?P<json>(?:\{\s*+(?:"(?:_meta|isError)"\s*+:\s*+(?:null|false)\s*+,\s*+)*+
    "content"\s*+:\s*+)?
    \[?\s*+\{\s*+"type"\s*+:\s*+"text"\s*+,\s*+"text"\s*+:\s*+)"
    |(?:CallToolResult\()?(?:meta=None,?\s*+)?(?:content=)?\[?
    TextContent\(type='text',\ text=['"])""",
    re.VERBOSE,
)
_CUT_ESCAPE: Final = re.compile(
    r"(?<!\\)(?:\\\\)*((?:\\u[dD][89abAB]..)?\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}"
    r"|U[0-9a-fA-F]{0,7})?|\\u[dD][89abAB]..)\Z"
)


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
    content = value.get("content") if isinstance(value, dict) else None
    if isinstance(value, dict) and isinstance(content, list):
        structured = value.get("structuredContent", value.get("structured_content"))
        differs = structured is not None and repeated(content, structured) is None
        if differs or _has_more(value, ("content", "structuredContent", "structured_content")):
            return None
        value = content
    known: list[Any] = value if isinstance(value, list) else [value]
    texts = [
        text_of(one) for one in known if is_text_block(one) and not _has_more(one, ("type", "text"))
    ]
    return (
        "\n".join(filter(None, texts))
        if texts and len(texts) == len(known) and None not in texts
        else None
    )


def _has_more(value: dict[str, Any], besides: tuple[str, ...]) -> bool:
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
