"""The JSONPath that a query was meant to be, if the query has no results or is not a path at all.

The query may also be written as for jq (`.items[0]`), as code (`items[0].name`) or as a JSON Pointer (`/items/0`). It
is followed step by step. Where a step leads nowhere, the content decides what else it could be: a key that differs in
case or spelling, one with dots in it, the items of an array, an array inside the object, or the key that has the value
which a filter asks for. Only a path that has results is proposed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

_MOST: Final = 1_000  # values that are looked at after each step
_REPAIRS: Final = 4
_CLOSE: Final = 0.7
_LISTED: Final = 12
_LONGEST: Final = 500
_PLAIN: Final = re.compile(r"[^\W\d]\w*", re.ASCII)
_PIPE: Final = re.compile(r"\s*\|\s*(?=\.|select\()")
_SELECT: Final = re.compile(r"(?:\[\s*\])?select\(\s*\.([\w.]+)\s*(==|!=|<=?|>=?)\s*(\"[^\"']*\"|-?[\w.]+)\s*\)")
_STEP: Final = re.compile(
    r"""\.?(?P<name>[^.\[\]|\s"'*$]+)|\.?\[\s*(?P<index>-?\d{1,9})\s*\]|\.?(?P<every>\[\s*\*?\s*\]|\*)"""
    r"""|\.?\[\s*(?P<quoted>"[^"]*"|'[^']*')\s*\]|\.(?P<key>"[^"]*")|(?P<filter>\[\?[^\]]*\])"""
)
_BELOW: Final = re.compile(r"\.\.\['([^'\\]*)'\]")
_USED: Final = re.compile(r"@\.([^\W\d]\w*)|@\['((?:[^'\\]|\\.)*)'\]")
_COMPARED: Final = re.compile(r"@(?:\.([^\W\d]\w*)|\['([^'\\]*)'\])\s*==\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")")


class PathStep(NamedTuple):
    """A step of a path: a key, an index, or else any segment as it is written."""

    key: str | None = None
    place: int | None = None
    written: str = "[*]"

    def __str__(self) -> str:
        if self.key is not None:
            plain = _PLAIN.fullmatch(self.key)
            escaped = json.dumps(self.key, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'")
            return f".{self.key}" if plain else f"['{escaped}']"
        return f"[{self.place}]" if self.place is not None else self.written


Select = Callable[[str, Any], Iterator[Any]]
"""Yields what a path selects in a value; raises `ValueError` if it is not a path."""

EVERY: Final = PathStep()


def lenient(query: str) -> tuple[list[PathStep], bool] | None:
    """The steps of a query that is not a JSONPath, and whether it can only be a path. None if it is something else."""
    text = query.strip().strip("`")
    if len(text) > _LONGEST:
        return None
    if text.startswith(("/", "#/")):
        tokens = text.lstrip("#").split("/")[1:]
        return [_token(token.replace("~1", "/").replace("~0", "~")) for token in tokens if token], True
    is_path = text.startswith(("$", ".", "["))
    text = _SELECT.sub(_as_filter, _PIPE.sub("", text.removeprefix("$")))
    steps: list[PathStep] = []
    at = 0
    while at < len(text) and (match := _STEP.match(text, at)) is not None and match.end() > at:
        at = match.end()
        if match["name"] is not None:
            steps.append(_token(match["name"]) if steps or is_path else PathStep(key=match["name"]))
        elif match["index"] is not None:
            steps.append(PathStep(place=int(match["index"])))
        elif match["filter"] is not None:
            steps.append(PathStep(written=match["filter"]))
        else:
            named = match["quoted"] or match["key"]
            steps.append(EVERY if named is None else PathStep(key=named[1:-1]))
    return (steps, is_path) if steps and at == len(text) else None


def fitted(steps: list[PathStep], values: list[Any], select: Select) -> tuple[str, str]:
    """The path with results that is nearest to these steps, or "" and what there is where they end."""
    done: list[PathStep] = []
    repairs = 0
    while steps:
        after = _after(values, steps[0], select)
        if after:
            values, done, steps = after, [*done, steps[0]], steps[1:]
            continue
        repairs += 1
        found = _instead(values, steps, select) if repairs <= _REPAIRS else None
        if found is None:
            return "", _what(values, "$" + "".join(map(str, done)))
        steps = found
    return "$" + "".join(map(str, done)), ""


def _token(token: str) -> PathStep:
    return PathStep(place=int(token)) if re.fullmatch(r"\d{1,9}", token) else PathStep(key=token)


def _as_filter(match: re.Match[str]) -> str:
    literal = match[3].replace('"', "'")
    return f"[?@.{match[1]} {match[2]} {literal}]"


def _after(values: list[Any], step: PathStep, select: Select) -> list[Any]:
    if step.key is not None:
        return [value[step.key] for value in values if isinstance(value, dict) and step.key in value]
    if step.place is not None:
        inside = (value for value in values if isinstance(value, list) and -len(value) <= step.place < len(value))
        return [value[step.place] for value in inside]
    if step == EVERY:
        return _children(values)
    return list(islice((found for value in values for found in select("$" + step.written, value)), _MOST))


def _children(values: Iterable[Any]) -> list[Any]:
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else () for value in values
    )
    return list(islice((item for items in inner for item in items), _MOST))


def _all_below(values: list[Any]) -> list[Any]:
    found = level = values
    while (level := _children(level)) and len(found) < _MOST:
        found = found + level
    return found


def _keys(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(key for value in values if isinstance(value, dict) for key in value))


def _instead(values: list[Any], steps: list[PathStep], select: Select) -> list[PathStep] | None:
    """Other steps to go on with; the first of them leads somewhere."""
    step, *rest = steps
    if (below := _BELOW.fullmatch(step.written)) is not None:
        keys = _keys(_all_below(values))
        for known in _same(below[1], keys) or _close(below[1], keys):
            return [PathStep(written=f"..{str(PathStep(key=known)).lstrip('.')}"), *rest]
        return None
    objects = [value for value in values if isinstance(value, dict)]
    items = [item for value in values if isinstance(value, list) for item in value[:_MOST]]
    if step.key is not None:
        return _instead_of_key(step.key, rest, objects, items, select)
    if step.place is None and step != EVERY:
        repaired = _other_filter(
            step.written, _children(values), lambda written: _after(values, PathStep(written=written), select)
        )
        if repaired is not None:
            return [PathStep(written=repaired), *rest]
    inner = _arrays(objects)
    return [PathStep(key=inner), *steps] if inner is not None else None


def _instead_of_key(
    key: str, rest: list[PathStep], objects: list[Any], items: list[Any], select: Select
) -> list[PathStep] | None:
    keys = _keys(objects)
    joined = key
    for number, step in enumerate(rest, 1):  # a key with dots in it
        if step.key is None:
            break
        joined += f".{step.key}"
        if joined in keys:
            return [PathStep(key=joined), *rest[number:]]
    for known in _same(key, keys):
        return [PathStep(key=known), *rest]
    arrays = [known for known in keys if any(isinstance(value.get(known), list) for value in objects)]
    if rest and rest[0].key is None and len(arrays) == 1:  # the only array has another name
        return [PathStep(key=arrays[0]), *rest]
    if any(isinstance(item, dict) for item in items):
        return [EVERY, PathStep(key=key), *rest]
    for known in keys:  # one level deeper
        inner = [value[known] for value in objects if known in value]
        if any(isinstance(one, dict) and key in one for one in inner):
            return [PathStep(key=known), PathStep(key=key), *rest]
        if any(isinstance(one, dict) and key in one for one in _children(x for x in inner if isinstance(x, list))):
            return [PathStep(key=known), EVERY, PathStep(key=key), *rest]
    anywhere = PathStep(written=f"..['{key}']") if "'" not in key and "\\" not in key else None
    if anywhere is not None and _after([*objects, *items], anywhere, select):
        return [anywhere, *rest]
    return next(([PathStep(key=known), *rest] for known in _close(key, keys)), None)


def _arrays(objects: list[Any]) -> str | None:
    """The key of the longest array in objects."""
    sizes = {key: len(one) for value in objects for key, one in value.items() if isinstance(one, list) and one}
    return max(sizes, key=lambda key: sizes[key]) if sizes else None


def _other_filter(written: str, items: list[Any], run: Callable[[str], list[Any]]) -> str | None:
    """A filter with other keys, or one that looks for a part of the text, if it has results."""
    keys = _keys(items)
    for match in _USED.finditer(written):
        used = match[1] or match[2]
        if used in keys:
            continue
        value = next((one[3] or one[4] for one in _COMPARED.finditer(written) if used in (one[1], one[2])), None)
        texts = [
            (k, one) for item in items if isinstance(item, dict) for k, one in item.items() if isinstance(one, str)
        ]
        having = dict.fromkeys(k for k, one in texts if value is not None and one.casefold() == value.casefold())
        for known in (*_same(used, keys), *having, *_close(used, keys)):
            changed = written.replace(match[0], f"@{PathStep(key=known)}")
            if _has(run, changed):
                return changed
            if (further := _by_value(changed, run)) is not None:
                return further
    return _by_value(written, run)


def _by_value(written: str, run: Callable[[str], list[Any]]) -> str | None:
    """A filter that compares with a number instead of text, or searches for the text ignoring case."""
    for match in _COMPARED.finditer(written):
        key, value = match[1] or match[2], match[3] or match[4] or ""
        number = re.fullmatch(r"-?\d{1,15}(?:\.\d{1,15})?", value)
        pattern = re.sub(r"([^\w\s])", r"\\\\\1", value)
        for other in (
            f"@{PathStep(key=key)} == {value}" if number else "",
            f"search(@{PathStep(key=key)}, '(?i){pattern}')",
        ):
            changed = written.replace(match[0], other)
            if other and value and _has(run, changed):
                return changed
    return None


def _has(run: Callable[[str], list[Any]], written: str) -> bool:
    try:
        return bool(run(written))
    except ValueError:
        return False


def _same(key: str, keys: list[str]) -> list[str]:
    """The keys that differ from one only in case and punctuation."""
    return [known for known in keys if _normal(known) == _normal(key)]


def _close(key: str, keys: list[str]) -> list[str]:
    """The key that is spelled most like another, if one is."""
    return difflib.get_close_matches(key[:80], [known for known in keys if len(known) <= 80], 1, _CLOSE)


def _normal(key: str) -> str:
    return re.sub(r"[\W_]", "", key).casefold()


def _what(values: list[Any], path: str) -> str:
    """What is at the end of a path, for a hint."""
    if keys := _keys(values[:_MOST]):
        listed = ", ".join(key if len(key) <= 40 else key[:39] + "…" for key in keys[:_LISTED])
        return f"{path} has {listed}{', …' if len(keys) > _LISTED else ''}"
    arrays = [value for value in values if isinstance(value, list)]
    if any(isinstance(item, dict) for item in _children(arrays)):
        return _what(_children(arrays), f"{path}[*]")
    return f"{path} is an array of {len(arrays[0]):,} values" if arrays else f"{path} is a value without keys"
