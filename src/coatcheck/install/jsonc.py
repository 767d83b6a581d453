"""Parse and edit JSON with comments and trailing commas as text. Everything outside an edit stays as written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.errors import InvalidArgument

_TRIVIA: Final = re.compile(r"(?:[ \t\r\n]+|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_REST_OF_LINE: Final = re.compile(r"(?:[ \t]|/\*[^\r\n]*?\*/)*(?://[^\r\n]*)?")
_STRING: Final = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+"')
_BARE: Final = re.compile(r"-?[0-9][0-9.eE+-]*|true|false|null")
_DEEPEST: Final = 100

Splice = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its position in the text. `members` belong to an object, `items` to an array."""

    start: int
    end: int
    value: Any
    members: tuple[Member, ...] = ()
    items: tuple[Node, ...] = ()

    def member(self, key: str) -> Member | None:
        return next((member for member in self.members if member.key == key), None)


@dataclass(frozen=True, slots=True)
class Member:
    start: int
    key: str
    node: Node


def parse(text: str) -> Node | None:
    """Parse a document; None if it contains no value. Raises `InvalidArgument`."""
    start = _skip(text, 0)
    if start == len(text):
        return None
    node = _value(text, start, 0)
    if (end := _skip(text, node.end)) != len(text):
        raise _wrong(text, end, "unexpected text after the end")
    return node


def splice(text: str, splices: Sequence[Splice]) -> str:
    """Replace parts of the text. Insertions at the same position keep their order."""
    for start, end, new in sorted(splices, key=lambda splice: splice[0], reverse=True):
        text = text[:start] + new + text[end:]
    return text


def insert(text: str, holder: Node, key: str, value: Any) -> str:
    """Append a member to an object."""
    eol = "\r\n" if "\r\n" in text else "\n"
    if not holder.members:
        return _insert_into_empty(text, holder, key, value, eol)
    first, last = holder.members[0], holder.members[-1].node.end
    after = _skip(text, last)
    trailing = text[after] == ","
    indent = _indent_before(text, first.start)
    if indent is None:
        return splice(text, [(last, last, f", {_dumps(key)}: {_dumps(value)}")])
    base = after + 1 if trailing else last
    rest = _REST_OF_LINE.match(text, base)
    assert rest is not None
    at = rest.end() if text[rest.end() : rest.end() + 1] in ("\r", "\n") else base
    new = f"{eol}{indent}{_dumps(key)}: {_rendered(value, indent, _unit(text), eol)}"
    if trailing:
        return splice(text, [(at, at, new + ",")])
    return splice(text, [(at, at, new), (last, last, ",")] if at > last else [(at, at, "," + new)])


def remove(text: str, holder: Node, key: str) -> str:
    """Remove a member of an object, with its comma and its line."""
    index = next(index for index, member in enumerate(holder.members) if member.key == key)
    member = holder.members[index]
    start = len(text[: member.start].rstrip(" \t"))
    start -= text.endswith("\n", 0, start)
    start -= text.endswith("\r", 0, start) and text.startswith("\r\n", start - 1)
    start = max(start, holder.start + 1)
    comma: list[Splice]
    after = _skip(text, member.node.end)
    if index and text[start - 1] == ",":  # as `insert` writes it
        start, comma = start - 1, []
    elif text[after] == ",":
        comma = [(after, after + 1, "")]
    elif index:
        before = _skip(text, holder.members[index - 1].node.end)
        comma = [(before, before + 1, "")]
    else:
        comma = []
    removed = splice(text, [(start, member.node.end, ""), *comma])
    end = holder.end - (len(text) - len(removed))
    if len(holder.members) == 1 and not removed[holder.start + 1 : end - 1].strip():
        return removed[: holder.start + 1] + removed[end - 1 :]
    return removed


def replace(text: str, node: Node, value: Any) -> str:
    """Replace a value; the new one spans several lines if the old one did."""
    eol = "\r\n" if "\r\n" in text else "\n"
    if "\n" not in text[node.start : node.end]:
        return splice(text, [(node.start, node.end, _dumps(value))])
    rendered = _rendered(value, _indentation(text, node.start), _unit(text), eol)
    return splice(text, [(node.start, node.end, rendered)])


def prepend(text: str, array: Node, values: Sequence[Any]) -> str:
    """Insert values at the beginning of an array, each on its own line if the first item is. Comments stay."""
    at = array.start + 1
    line = re.compile(r"[ \t]*(\r?\n[ \t]*)").match(text, at)
    if not array.items:
        new = ", ".join(map(_dumps, values))
    elif line:
        new = "".join(f"{line[1]}{_dumps(value)}," for value in values)
    else:
        new = "".join(f"{_dumps(value)}, " for value in values)
    return splice(text, [(at, at, new)])


def leaves(node: Node) -> Iterator[Node]:
    """Yield the scalar values of a node and below it."""
    todo = [node]
    while todo:
        one = todo.pop()
        if not isinstance(one.value, dict | list):
            yield one
        todo += [member.node for member in one.members]
        todo += one.items


def _insert_into_empty(text: str, holder: Node, key: str, value: Any, eol: str) -> str:
    inside = text[holder.start + 1 : holder.end - 1]
    if "\n" not in text.strip() and len(text.strip()) > holder.end - holder.start:  # a one-line document stays one
        return splice(text, [(holder.end - 1, holder.end - 1, f"{_dumps(key)}: {_dumps(value)}")])
    outer = _indentation(text, holder.start)
    unit = _unit(text)
    indent = outer + unit
    new = f"{eol}{indent}{_dumps(key)}: {_rendered(value, indent, unit, eol)}{eol}{outer}"
    start = holder.start + 1 + len(inside.rstrip())  # comments stay, whitespace after them goes
    return splice(text, [(start, holder.end - 1, new)])


def _rendered(value: Any, indent: str, unit: str, eol: str) -> str:
    return json.dumps(value, indent=unit, ensure_ascii=False).replace("\n", eol + indent)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _unit(text: str) -> str:
    """One indentation step of the document."""
    match = re.search(r"^([ \t]+)\"", text, re.MULTILINE)
    return match[1] if match and len(match[1]) <= 8 else "  "


def _indentation(text: str, at: int) -> str:
    line = text[text.rfind("\n", 0, at) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _indent_before(text: str, at: int) -> str | None:
    """The indentation of the line at `at`, or None if other text precedes it."""
    before = text[text.rfind("\n", 0, at) + 1 : at]
    return before if "\n" in text[:at] and not before.strip(" \t") else None


def _skip(text: str, at: int) -> int:
    match = _TRIVIA.match(text, at)
    assert match is not None
    return match.end()


def _value(text: str, at: int, depth: int) -> Node:
    if depth > _DEEPEST:
        raise _wrong(text, at, "nested too deeply")
    char = text[at : at + 1]
    if char == "{":
        return _object(text, at, depth)
    if char == "[":
        return _array(text, at, depth)
    match = _STRING.match(text, at) if char == '"' else _BARE.match(text, at)
    if match is None:
        raise _wrong(text, at, "expected a value")
    try:
        return Node(at, match.end(), json.loads(match[0]))
    except ValueError as error:
        raise _wrong(text, at, "malformed value") from error


def _object(text: str, start: int, depth: int) -> Node:
    members: list[Member] = []
    at = _skip(text, start + 1)
    while text[at : at + 1] != "}":
        key = _value(text, at, depth + 1) if text[at : at + 1] == '"' else None
        colon = _skip(text, key.end) if key else at
        if key is None or text[colon : colon + 1] != ":":
            raise _wrong(text, colon, "expected a key and a colon")
        node = _value(text, _skip(text, colon + 1), depth + 1)
        members.append(Member(at, key.value, node))
        at = _after_comma(text, node.end, "}")
    value = {member.key: member.node.value for member in members}
    return Node(start, at + 1, value, members=tuple(members))


def _array(text: str, start: int, depth: int) -> Node:
    items: list[Node] = []
    at = _skip(text, start + 1)
    while text[at : at + 1] != "]":
        items.append(_value(text, at, depth + 1))
        at = _after_comma(text, items[-1].end, "]")
    return Node(start, at + 1, [item.value for item in items], items=tuple(items))


def _after_comma(text: str, at: int, closing: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] == ",":
        return _skip(text, at + 1)
    if text[at : at + 1] != closing:
        raise _wrong(text, at, f"expected a comma or {closing!r}")
    return at


def _wrong(text: str, at: int, what: str) -> InvalidArgument:
    line = text.count("\n", 0, at) + 1
    return InvalidArgument(f"invalid JSON in line {line}: {what}")
