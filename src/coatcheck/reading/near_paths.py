"""The JSONPath that a query without results probably means, computed from the content.

Such a query may be a path with mistakes, or be written as for jq (`.items[0]`), as code
(`items[0].name`) or as a JSON Pointer (`/items/0`). It is followed step by step. Where a step leads
nowhere, the content decides what else it could be: a key that differs in case or spelling, one with
dots in it, the items of an array, an array inside the object, or the key that has the value which a
filter asks for. Only a path that has results is proposed.

A filter may take long, so this runs in a child process, whose CPU time is limited (`heavy`).
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from jsonpath_rfc9535 import JSONPathError
from jsonpath_rfc9535.segments import JSONPathRecursiveDescentSegment, JSONPathSegment
from jsonpath_rfc9535.selectors import IndexSelector, NameSelector

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument
from coatcheck.reading.jsonpath import INVALID, compiled, documents

_SAMPLED: Final = 200  # documents of JSONL
_MOST: Final = 1_000  # values that are looked at after each step
_REPAIRS: Final = 4
_CLOSE: Final = 0.7
_LISTED: Final = 12
_LONGEST: Final = 500
_LONGEST_KEY: Final = 80  # of a key that is compared by its spelling
_PLAIN: Final = re.compile(r"[^\W\d]\w*", re.ASCII)
_PIPE: Final = re.compile(r"\s*\|\s*(?=\.|select\()")
_SELECT: Final = re.compile(
    r"(?:\[\s*\])?select\(\s*\.([\w.]+)\s*(==|!=|<=?|>=?)\s*(\"[^\"']*\"|-?[\w.]+)\s*\)"
)
_STEP: Final = re.compile(
    r"""\.?(?P<name>[^.\[\]|\s"'*$]+)|\.?\[\s*(?P<index>-?\d{1,9})\s*\]|\.?(?P<every>\[\s*\*?\s*\]|\*)"""
    r"""|\.?\[\s*(?P<quoted>"[^"]*"|'[^']*')\s*\]|\.(?P<key>"[^"]*")|(?P<filter>\[\?[^\]]*\])"""
)
_BELOW: Final = re.compile(r"\.\.\['([^'\\]*)'\]")
_USED: Final = re.compile(r"@\.([^\W\d]\w*)|@\['((?:[^'\\]|\\.)*)'\]")
_COMPARED: Final = re.compile(
    r"@(?:\.([^\W\d]\w*)|\['([^'\\]*)'\])\s*==\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")"
)
_NUMBER: Final = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")


@dataclass(frozen=True, slots=True)
class PathStep:
    """A step of a path: a key, an index, or else any segment as it is written."""

    key: str | None = None
    index: int | None = None
    written: str = "[*]"

    def __str__(self) -> str:
        if self.index is not None:
            return f"[{self.index}]"
        if self.key is None:
            return self.written
        if _PLAIN.fullmatch(self.key):
            return f".{self.key}"
        escaped = json.dumps(self.key, ensure_ascii=False)[1:-1]
        escaped = escaped.replace('\\"', '"').replace("'", "\\'")
        return f"['{escaped}']"


EVERY: Final = PathStep()


def nearest(content: Content, query: str) -> tuple[str, str]:
    """The path with results that a query without any probably means, or "" and what there is where
    it fails.

    The query may be a path with mistakes, or one as for jq, in code, or a JSON Pointer."""
    is_path = True
    try:
        steps = [_step(segment) for segment in compiled(query).segments]
    except InvalidArgument:
        found = lenient(query)
        if found is None:
            return "", ""
        steps, is_path = found
    sampled = islice(documents(content), _SAMPLED)
    values = [document for _, document in sampled if document is not INVALID]
    if not is_path and steps[0].key not in _keys(values):
        return "", ""  # words
    try:
        return fitted(steps, values)
    except (JSONPathError, RecursionError, ValueError):
        return "", ""


def _step(segment: JSONPathSegment) -> PathStep:
    if len(segment.selectors) == 1 and not isinstance(segment, JSONPathRecursiveDescentSegment):
        selector = segment.selectors[0]
        if isinstance(selector, NameSelector):
            return PathStep(key=selector.name)
        if isinstance(selector, IndexSelector):
            return PathStep(index=selector.index)
    return PathStep(written=str(segment))


def lenient(query: str) -> tuple[list[PathStep], bool] | None:
    """The steps of a query that is not a JSONPath, and whether it can only be a path. None if it is
    something else."""
    text = query.strip().strip("`")
    if len(text) > _LONGEST:
        return None
    if text.startswith(("/", "#/")):
        return _steps_of_pointer(text.lstrip("#")), True
    is_path = text.startswith(("$", ".", "["))
    text = _SELECT.sub(_as_filter, _PIPE.sub("", text.removeprefix("$")))
    steps: list[PathStep] = []
    at = 0
    while at < len(text):
        match = _STEP.match(text, at)
        if match is None:
            return None
        steps.append(_written_step(match, may_be_index=bool(steps) or is_path))
        at = match.end()
    return (steps, is_path) if steps else None


def _steps_of_pointer(pointer: str) -> list[PathStep]:
    tokens = [token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:]]
    return [_key_or_index(token) for token in tokens if token]


def _as_filter(match: re.Match[str]) -> str:
    literal = match[3].replace('"', "'")
    return f"[?@.{match[1]} {match[2]} {literal}]"


def _written_step(match: re.Match[str], *, may_be_index: bool) -> PathStep:
    """The step that a match of `_STEP` describes."""
    text = match[str(match.lastgroup)]
    match match.lastgroup:
        case "name":
            return _key_or_index(text) if may_be_index else PathStep(key=text)
        case "index":
            return PathStep(index=int(text))
        case "filter":
            return PathStep(written=text)
        case "every":
            return EVERY
        case _:  # in quotes
            return PathStep(key=text[1:-1])


def _key_or_index(token: str) -> PathStep:
    return PathStep(index=int(token)) if re.fullmatch(r"\d{1,9}", token) else PathStep(key=token)


def fitted(steps: list[PathStep], values: list[Any]) -> tuple[str, str]:
    """The path with results that is nearest to these steps, or "" and what there is where they
    fail. Raises `ValueError` if a step cannot be written in a path."""
    path = "$"
    repairs = 0
    while steps:
        after = _after(values, steps[0])
        if after:
            values = after
            path += str(steps[0])
            steps = steps[1:]
            continue
        repairs += 1
        repaired = _repaired(steps, values) if repairs <= _REPAIRS else None
        if repaired is None:
            return "", _what(values, path)
        steps = repaired
    return path, ""


def _after(values: list[Any], step: PathStep) -> list[Any]:
    """The values to which a step leads."""
    if step.key is not None:
        return [value[step.key] for value in _objects(values) if step.key in value]
    if step.index is not None:
        at = step.index
        return [value[at] for value in _arrays(values) if -len(value) <= at < len(value)]
    if step == EVERY:
        return _children(values)
    try:
        query = compiled("$" + step.written)
    except InvalidArgument as error:
        raise ValueError(step.written) from error
    nodes = chain.from_iterable(query.finditer(value) for value in values)
    return [node.value for node in islice(nodes, _MOST)]


def _repaired(steps: list[PathStep], values: list[Any]) -> list[PathStep] | None:
    """Other steps to continue with; the first of them leads somewhere."""
    step, *rest = steps
    if step.key is not None:
        return _other_steps(step.key, rest, values)
    below = _BELOW.fullmatch(step.written)
    if below is not None:
        keys = _keys(_all_below(values))
        known = next(iter(_similar(below[1], keys)), None)
        if known is None:
            return None
        return [PathStep(written=".." + str(PathStep(key=known)).lstrip(".")), *rest]
    if step.index is None and step != EVERY:
        written = _other_filter(step.written, values)
        if written is not None:
            return [PathStep(written=written), *rest]
    inner = _longest_array(_objects(values))
    return None if inner is None else [PathStep(key=inner), *steps]


def _other_steps(key: str, rest: list[PathStep], values: list[Any]) -> list[PathStep] | None:
    """Other steps in place of a key that no object has: the likeliest mistake first."""
    objects = _objects(values)
    items = list(chain.from_iterable(array[:_MOST] for array in _arrays(values)))
    keys = _keys(objects)
    steps = _dotted_key(key, rest, keys)
    if steps is not None:
        return steps
    same = _same(key, keys)
    if same:
        return [PathStep(key=same[0]), *rest]
    keys_of_arrays = [known for known in keys if _has_array(objects, known)]
    if rest and rest[0].key is None and len(keys_of_arrays) == 1:
        return [PathStep(key=keys_of_arrays[0]), *rest]  # the only array has another name
    if _objects(items):
        return [EVERY, PathStep(key=key), *rest]
    outer = _outer_steps(key, objects, keys)
    if outer is not None:
        return [*outer, PathStep(key=key), *rest]
    if "'" not in key and "\\" not in key:
        anywhere = PathStep(written=f"..['{key}']")
        if _after([*objects, *items], anywhere):
            return [anywhere, *rest]
    close = _close(key, keys)
    return [PathStep(key=close[0]), *rest] if close else None


def _dotted_key(key: str, rest: list[PathStep], keys: list[str]) -> list[PathStep] | None:
    """Steps with a key that has dots in it, which were read as several keys."""
    joined = key
    for number, step in enumerate(rest, 1):
        if step.key is None:
            return None
        joined += f".{step.key}"
        if joined in keys:
            return [PathStep(key=joined), *rest[number:]]
    return None


def _outer_steps(key: str, objects: list[dict[str, Any]], keys: list[str]) -> list[PathStep] | None:
    """The steps from these objects to others, one level deeper, that have a key."""
    for outer in keys:
        inner = [value[outer] for value in objects if outer in value]
        if key in _keys(inner):
            return [PathStep(key=outer)]
        if key in _keys(_children(_arrays(inner))):
            return [PathStep(key=outer), EVERY]
    return None


def _other_filter(written: str, values: list[Any]) -> str | None:
    """A filter with another key, or one that looks for a part of the text, if it has results."""
    items = _children(values)
    keys = _keys(items)
    for match in _USED.finditer(written):
        used = match[1] or match[2]
        if used in keys:
            continue
        candidates = [*_same(used, keys), *_keys_of_text(_compared_text(written, used), items)]
        for known in [*candidates, *_close(used, keys)]:
            changed = written.replace(match[0], f"@{PathStep(key=known)}")
            if _has_results(changed, values):
                return changed
            looser = _looser_filter(changed, values)
            if looser is not None:
                return looser
    return _looser_filter(written, values)


def _compared_text(written: str, key: str) -> str | None:
    """The text with which a filter compares the value of a key."""
    for match in _COMPARED.finditer(written):
        if key in (match[1], match[2]):
            return match[3] or match[4]
    return None


def _keys_of_text(text: str | None, items: list[Any]) -> list[str]:
    """The keys that have a text as their value in these items, ignoring case."""
    if text is None:
        return []
    found: dict[str, None] = {}
    for item in _objects(items):
        for key, value in item.items():
            if isinstance(value, str) and value.casefold() == text.casefold():
                found[key] = None
    return list(found)


def _looser_filter(written: str, values: list[Any]) -> str | None:
    """A filter that compares with a number instead of text, or searches for the text ignoring
    case."""
    for match in _COMPARED.finditer(written):
        key, text = match[1] or match[2], match[3] or match[4]
        if not text:
            continue
        pattern = re.sub(r"([^\w\s])", r"\\\\\1", text)
        others = [f"search(@{PathStep(key=key)}, '(?i){pattern}')"]
        if _NUMBER.fullmatch(text):
            others.insert(0, f"@{PathStep(key=key)} == {text}")
        for other in others:
            changed = written.replace(match[0], other)
            if _has_results(changed, values):
                return changed
    return None


def _has_results(written: str, values: list[Any]) -> bool:
    try:
        return bool(_after(values, PathStep(written=written)))
    except ValueError:
        return False


def _objects(values: Iterable[Any]) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)]


def _arrays(values: Iterable[Any]) -> list[list[Any]]:
    return [value for value in values if isinstance(value, list)]


def _children(values: Iterable[Any]) -> list[Any]:
    """The values one level below."""

    def children() -> Iterator[Any]:
        for value in values:
            if isinstance(value, dict):
                yield from value.values()
            elif isinstance(value, list):
                yield from value

    return list(islice(children(), _MOST))


def _all_below(values: list[Any]) -> list[Any]:
    found = level = values
    while (level := _children(level)) and len(found) < _MOST:
        found = found + level
    return found


def _keys(values: Iterable[Any]) -> list[str]:
    """The keys of all objects among these values, each once."""
    return list(dict.fromkeys(chain.from_iterable(_objects(values))))


def _has_array(objects: list[dict[str, Any]], key: str) -> bool:
    return any(isinstance(value.get(key), list) for value in objects)


def _longest_array(objects: list[dict[str, Any]]) -> str | None:
    """The key of the longest array in objects."""
    sizes: dict[str, int] = {}
    for value in objects:
        for key, one in value.items():
            if isinstance(one, list) and one:
                sizes[key] = len(one)
    return max(sizes, key=lambda key: sizes[key]) if sizes else None


def _similar(key: str, keys: list[str]) -> list[str]:
    return _same(key, keys) or _close(key, keys)


def _same(key: str, keys: list[str]) -> list[str]:
    """The keys that differ from `key` only in case and punctuation."""
    return [known for known in keys if _normal(known) == _normal(key)]


def _close(key: str, keys: list[str]) -> list[str]:
    """The known key that is spelled most like `key`, if any is close."""
    short = [known for known in keys if len(known) <= _LONGEST_KEY]
    return difflib.get_close_matches(key[:_LONGEST_KEY], short, 1, _CLOSE)


def _normal(key: str) -> str:
    return re.sub(r"[\W_]", "", key).casefold()


def _what(values: list[Any], path: str) -> str:
    """What is at the end of a path, for a hint."""
    keys = _keys(values[:_MOST])
    if keys:
        listed = [key if len(key) <= 40 else key[:39] + "…" for key in keys[:_LISTED]]
        more = ", …" if len(keys) > _LISTED else ""
        return f"{path} has {', '.join(listed)}{more}"
    arrays = _arrays(values)
    items = _children(arrays)
    if _objects(items):
        return _what(items, f"{path}[*]")
    if arrays:
        return f"{path} is an array of {len(arrays[0]):,} values"
    return f"{path} is a value without keys"
