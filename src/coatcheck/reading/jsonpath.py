"""JSONPath (RFC 9535) on JSON and JSONL, safe against hostile paths and documents.

In JSONL each line is a document: `$` is the line, and only one line is in memory at a time. The
result is JSON, one value per line if there are several. `match` and `search` run on RE2, which does
not backtrack. A deadline is checked at every step of the evaluation, including filters.

A query without results, or one that is not a path at all, may mean another path: it may be written
as for jq (`.items[0]`), as code (`items[0].name`) or as a JSON Pointer (`/items/0`). It is followed
step by step. Where a step leads nowhere, the content decides what else it could be: a key that
differs in case or spelling, one with dots in it, the items of an array, an array inside the object,
or the key that has the value which a filter asks for. Only a path that has results is proposed.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final, NamedTuple

import re2  # type: ignore[import-untyped]  # ships without types
from iregexp_check import check as is_iregexp
from jsonpath_rfc9535 import JSONPathEnvironment, JSONPathError, JSONPathNode, JSONPathQuery
from jsonpath_rfc9535.exceptions import JSONPathRecursionError, JSONPathTypeError
from jsonpath_rfc9535.filter_expressions import FilterContext, FilterExpression, StringLiteral
from jsonpath_rfc9535.function_extensions import ExpressionType, FilterFunction
from jsonpath_rfc9535.parse import Parser
from jsonpath_rfc9535.segments import (
    JSONPathChildSegment,
    JSONPathRecursiveDescentSegment,
    JSONPathSegment,
)
from jsonpath_rfc9535.selectors import FilterSelector, IndexSelector, NameSelector
from jsonpath_rfc9535.tokens import Token, TokenStream

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.ids import clip
from coatcheck.media import JSON, JSONL, TEXT, is_jsonl
from coatcheck.previews.excerpts import count
from coatcheck.reading.json_content import NOTHING, lines, load, parse
from coatcheck.reading.page import MAX_RESULT, BoundedLines, QueryResult
from coatcheck.reading.patterns import MAX_PATTERN, MAX_PROGRAM
from coatcheck.values import MAX_DEPTH

SECONDS: Final = 10.0
MAX_PATH: Final = 4_000
_EXAMPLE: Final = "a path is like $.items[0].name, $..id or $.items[?@.price < 10]"
_LISTED_LINES: Final = 20
_SAMPLED: Final = 200  # documents of JSONL
_INVALID: Final = object()
_DOT: Final = re.compile(r"(\\.|\[(?:\\.|[^\]])*\])|\.", re.DOTALL)

_MOST: Final = 1_000  # values that are looked at after each step
_REPAIRS: Final = 4
_CLOSE: Final = 0.7
_LISTED: Final = 12
_LONGEST: Final = 500
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


class _OutOfTime(Exception):
    pass


def find(
    content: Content, path: str, *, limit: int = MAX_RESULT, seconds: float = SECONDS
) -> QueryResult:
    """Find the values that a path selects. The text ends at `limit` characters, but all results are
    counted."""
    query = _compile(path, seconds)
    results = BoundedLines(limit)
    matches = skipped = first_skipped = 0
    where: dict[int, None] = {}
    counted = True
    try:
        for number, document in _documents(content, query.env):
            if document is _INVALID:
                skipped, first_skipped = skipped + 1, first_skipped or number
                continue
            for node in query.finditer(document):
                matches += 1
                if (
                    not results.full
                    and results.add(json.dumps(node.value, ensure_ascii=False))
                    and len(where) <= _LISTED_LINES
                ):
                    where[number] = None
    except _OutOfTime:
        if not results.full:
            raise LimitExceeded(
                f"the path took more than {seconds:g} s ({count(matches, 'result')} so far)",
                hint="name the keys instead of '..', or narrow the filter",
            ) from None
        counted = False
    except JSONPathRecursionError as error:
        raise LimitExceeded(
            f"the document is nested deeper than {MAX_DEPTH} levels", hint="avoid '..'"
        ) from error
    except RecursionError as error:
        raise LimitExceeded(
            "the path or its result is nested too deeply", hint="use a shorter path"
        ) from error
    notes = []
    if not matches:
        notes.append(NOTHING)
    if results.cut:
        notes.append(
            f"the first result is cut: it has {results.cut:,} characters; select less of it"
        )
    elif results.full:
        notes.append("the results after that are left out; narrow the path")
    if where and is_jsonl(content.ref.media_type):
        listed = ", ".join(map(str, list(where)[:_LISTED_LINES]))
        notes.append(
            f"from line{'s' if len(where) > 1 else ''} "
            f"{listed}{', …' if len(where) > _LISTED_LINES else ''}"
        )
    if skipped:
        notes.append(
            f"{count(skipped, 'line')} skipped as invalid JSON, the first is line {first_skipped}"
        )
    total = count(matches, "result")
    return QueryResult(
        text=results.text,
        media_type=TEXT if results.cut else JSON if matches == 1 else JSONL,
        shown=total
        if not results.full
        else f"{len(results):,} of {'' if counted else 'at least '}{total}",
        note="; ".join(notes),
    )


def nearest(content: Content, query: str, *, seconds: float = SECONDS) -> tuple[str, str]:
    """The path with results that a query without any probably means, or "" and what there is where
    it fails.

    The query may be a path with mistakes, or one as for jq, in code, or a JSON Pointer."""
    try:
        compiled = _compile(query, seconds)
        steps, is_path = [_step(segment) for segment in compiled.segments], True
    except InvalidArgument:
        found = lenient(query)
        if found is None:
            return "", ""
        steps, is_path = found
    environment = _Environment(seconds)

    def select(path: str, value: Any) -> Iterator[Any]:
        try:
            return (node.value for node in environment.compile(path).finditer(value))
        except JSONPathError as error:
            raise ValueError(path) from error

    values = [document for _, document in islice(_documents(content, environment), _SAMPLED)]
    values = [value for value in values if value is not _INVALID]
    if not is_path and not any(
        isinstance(value, dict) and steps[0].key in value for value in values
    ):
        return "", ""  # words
    try:
        return fitted(steps, values, select)
    except (_OutOfTime, JSONPathError, RecursionError, ValueError):
        return "", ""


def _step(segment: JSONPathSegment) -> PathStep:
    selector = segment.selectors[0] if len(segment.selectors) == 1 else None
    if isinstance(segment, JSONPathRecursiveDescentSegment):
        return PathStep(written=str(segment))
    if isinstance(selector, NameSelector):
        return PathStep(key=selector.name)
    return (
        PathStep(place=selector.index)
        if isinstance(selector, IndexSelector)
        else PathStep(written=str(segment))
    )


def _documents(content: Content, clock: JSONPathEnvironment) -> Iterator[tuple[int, Any]]:
    """Yield each document with the number of its line, which is 1 unless the content is JSONL."""
    assert isinstance(clock, _Environment)
    if not is_jsonl(content.ref.media_type):
        yield 1, load(content)
        return
    for number, line in lines(content):
        clock.check()
        try:
            yield number, _INVALID if line is None else parse(line, f"line {number}")
        except (InvalidArgument, LimitExceeded):
            yield number, _INVALID


def _compile(path: str, seconds: float) -> JSONPathQuery:
    if len(path) > MAX_PATH:
        raise InvalidArgument(
            f"the path has {len(path):,} characters, the limit is {MAX_PATH:,}", hint=_EXAMPLE
        )
    try:
        return _Environment(seconds).compile(path)
    except JSONPathError as error:
        reason = str(error.args[0]) if error.args else "syntax error"
        at = error.token.index if error.token is not None else 0
        near = f" near {clip(path[at : at + 20])}" if at < len(path) else " at its end"
        raise InvalidArgument(
            f"not a JSONPath: {clip(path)}: {reason}, at character {at + 1}{near}", hint=_EXAMPLE
        ) from error
    except RecursionError as error:
        raise InvalidArgument("not a JSONPath: nested too deeply", hint=_EXAMPLE) from error
    except (
        ValueError,
        ArithmeticError,
        LookupError,
    ) as error:  # numbers out of range, incomplete escapes
        raise InvalidArgument(
            f"not a JSONPath: {clip(path)}: {clip(str(error))}", hint=_EXAMPLE
        ) from error


@functools.lru_cache(maxsize=64)
def _regex(pattern: str) -> Any:
    """Compile a pattern; None if RE2 rejects it. In I-Regexp, a dot matches no line end; RE2 syntax
    is accepted too."""
    options = re2.Options()
    options.log_errors = False
    if len(pattern) > MAX_PATTERN:
        return None
    try:
        source = (
            _DOT.sub(lambda match: match[1] or r"[^\n\r]", pattern)
            if is_iregexp(pattern)
            else pattern
        )
        compiled = re2.compile(source, options)
    except re2.error:
        return None
    return compiled if compiled.programsize <= MAX_PROGRAM else None


class _Regular(FilterFunction):
    """`match` (the whole string) or `search` (anywhere in it)."""

    arg_types = [ExpressionType.VALUE, ExpressionType.VALUE]  # noqa: RUF012 - the library's own declaration
    return_type = ExpressionType.LOGICAL

    def __init__(self, method: str, check: Callable[[], None]) -> None:
        self._method = method
        self._check = check

    def __call__(self, string: object, pattern: object) -> bool:
        if not isinstance(string, str) or not isinstance(pattern, str):
            return False
        self._check()  # one call may take long
        regex = _regex(pattern)
        try:
            return regex is not None and getattr(regex, self._method)(string) is not None
        except UnicodeEncodeError:  # a lone surrogate
            return False


class _Environment(JSONPathEnvironment):
    """RFC 9535 with a deadline. Each query has an environment of its own."""

    max_recursion_depth = MAX_DEPTH

    def __init__(self, seconds: float) -> None:
        self.parser_class = _Parser
        self._deadline = time.monotonic() + seconds
        self._ticks = 0
        super().__init__()

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks & 0xFF == 0:
            self.check()

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            raise _OutOfTime

    def setup_function_extensions(self) -> None:
        super().setup_function_extensions()
        self.function_extensions["match"] = _Regular("fullmatch", self.check)
        self.function_extensions["search"] = _Regular("search", self.check)

    def validate_function_extension_signature(self, token: Token, args: list[Any]) -> list[Any]:
        checked = super().validate_function_extension_signature(token, args)
        literal = args[1] if token.value in ("match", "search") else None
        if isinstance(literal, StringLiteral) and _regex(literal.value) is None:
            raise JSONPathTypeError(
                f"{token.value}() cannot use the pattern {clip(literal.value)}: "
                f"patterns are RE2's, {MAX_PATTERN:,} characters and {MAX_PROGRAM:,} instructions "
                "at most, without look-around and "
                "back-references",
                token=token,
            )
        return checked


class _Child(JSONPathChildSegment):
    def resolve(self, nodes: Iterable[JSONPathNode]) -> Iterable[JSONPathNode]:
        return _ticking(self.env, super().resolve(nodes))


class _Descent(JSONPathRecursiveDescentSegment):
    def resolve(self, nodes: Iterable[JSONPathNode]) -> Iterable[JSONPathNode]:
        return _ticking(self.env, super().resolve(nodes))

    def _visit(self, node: JSONPathNode, depth: int = 1) -> Iterable[JSONPathNode]:
        """Depth first like the library's own method, but without recursion."""
        assert isinstance(self.env, _Environment)
        stack = [iter([node])]  # one iterator per level: memory grows with depth, not width
        while stack:
            at = next(stack[-1], None)
            if at is None:
                stack.pop()
                continue
            self.env.tick()
            if depth + len(stack) - 1 > self.env.max_recursion_depth:
                raise JSONPathRecursionError("nested too deeply", token=self.token)
            yield at
            stack.append(_below(at))


class _Filter(FilterExpression):
    def evaluate(self, context: FilterContext) -> bool:
        assert isinstance(context.env, _Environment)
        context.env.tick()
        return super().evaluate(context)


class _Parser(Parser):
    """Builds queries from the classes above."""

    def parse_query(
        self, stream: TokenStream, *, in_filter: bool = False
    ) -> Iterable[JSONPathSegment]:
        for segment in super().parse_query(stream, in_filter=in_filter):
            made = _Descent if isinstance(segment, JSONPathRecursiveDescentSegment) else _Child
            yield made(env=segment.env, token=segment.token, selectors=segment.selectors)

    def parse_filter_selector(self, stream: TokenStream) -> FilterSelector:
        selector = super().parse_filter_selector(stream)
        inner = selector.expression
        selector.expression = _Filter(token=inner.token, expression=inner.expression)
        return selector


def _below(node: JSONPathNode) -> Iterator[JSONPathNode]:
    """The arrays and objects one level below a node."""
    value = node.value
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return (node.new_child(item, key, node) for key, item in items if isinstance(item, dict | list))


def _ticking(env: JSONPathEnvironment, nodes: Iterable[JSONPathNode]) -> Iterator[JSONPathNode]:
    assert isinstance(env, _Environment)
    for node in nodes:
        env.tick()
        yield node


class PathStep(NamedTuple):
    """A step of a path: a key, an index, or else any segment as it is written."""

    key: str | None = None
    place: int | None = None
    written: str = "[*]"

    def __str__(self) -> str:
        if self.key is not None:
            plain = _PLAIN.fullmatch(self.key)
            escaped = (
                json.dumps(self.key, ensure_ascii=False)[1:-1]
                .replace('\\"', '"')
                .replace("'", "\\'")
            )
            return f".{self.key}" if plain else f"['{escaped}']"
        return f"[{self.place}]" if self.place is not None else self.written


Select = Callable[[str, Any], Iterator[Any]]
"""Yields what a path selects in a value; raises `ValueError` if it is not a path."""

EVERY: Final = PathStep()


def lenient(query: str) -> tuple[list[PathStep], bool] | None:
    """The steps of a query that is not a JSONPath, and whether it can only be a path. None if it is
    something else."""
    text = query.strip().strip("`")
    if len(text) > _LONGEST:
        return None
    if text.startswith(("/", "#/")):
        tokens = text.lstrip("#").split("/")[1:]
        return [
            _token(token.replace("~1", "/").replace("~0", "~")) for token in tokens if token
        ], True
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
    """The path with results that is nearest to these steps, or "" and what there is where they
    fail."""
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
        return [
            value[step.key] for value in values if isinstance(value, dict) and step.key in value
        ]
    if step.place is not None:
        inside = (
            value
            for value in values
            if isinstance(value, list) and -len(value) <= step.place < len(value)
        )
        return [value[step.place] for value in inside]
    if step == EVERY:
        return _children(values)
    return list(
        islice((found for value in values for found in select("$" + step.written, value)), _MOST)
    )


def _children(values: Iterable[Any]) -> list[Any]:
    inner = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for value in values
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
    """Other steps to continue with; the first of them leads somewhere."""
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
            step.written,
            _children(values),
            lambda written: _after(values, PathStep(written=written), select),
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
    arrays = [
        known for known in keys if any(isinstance(value.get(known), list) for value in objects)
    ]
    if rest and rest[0].key is None and len(arrays) == 1:  # the only array has another name
        return [PathStep(key=arrays[0]), *rest]
    if any(isinstance(item, dict) for item in items):
        return [EVERY, PathStep(key=key), *rest]
    for known in keys:  # one level deeper
        inner = [value[known] for value in objects if known in value]
        if any(isinstance(one, dict) and key in one for one in inner):
            return [PathStep(key=known), PathStep(key=key), *rest]
        if any(
            isinstance(one, dict) and key in one
            for one in _children(x for x in inner if isinstance(x, list))
        ):
            return [PathStep(key=known), EVERY, PathStep(key=key), *rest]
    anywhere = PathStep(written=f"..['{key}']") if "'" not in key and "\\" not in key else None
    if anywhere is not None and _after([*objects, *items], anywhere, select):
        return [anywhere, *rest]
    return next(([PathStep(key=known), *rest] for known in _close(key, keys)), None)


def _arrays(objects: list[Any]) -> str | None:
    """The key of the longest array in objects."""
    sizes = {
        key: len(one)
        for value in objects
        for key, one in value.items()
        if isinstance(one, list) and one
    }
    return max(sizes, key=lambda key: sizes[key]) if sizes else None


def _other_filter(written: str, items: list[Any], run: Callable[[str], list[Any]]) -> str | None:
    """A filter with other keys, or one that looks for a part of the text, if it has results."""
    keys = _keys(items)
    for match in _USED.finditer(written):
        used = match[1] or match[2]
        if used in keys:
            continue
        value = next(
            (one[3] or one[4] for one in _COMPARED.finditer(written) if used in (one[1], one[2])),
            None,
        )
        texts = [
            (k, one)
            for item in items
            if isinstance(item, dict)
            for k, one in item.items()
            if isinstance(one, str)
        ]
        having = dict.fromkeys(
            k for k, one in texts if value is not None and one.casefold() == value.casefold()
        )
        for known in (*_same(used, keys), *having, *_close(used, keys)):
            changed = written.replace(match[0], f"@{PathStep(key=known)}")
            if _has(run, changed):
                return changed
            if (further := _by_value(changed, run)) is not None:
                return further
    return _by_value(written, run)


def _by_value(written: str, run: Callable[[str], list[Any]]) -> str | None:
    """A filter that compares with a number instead of text, or searches for the text ignoring
    case."""
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
    """The keys that differ from `key` only in case and punctuation."""
    return [known for known in keys if _normal(known) == _normal(key)]


def _close(key: str, keys: list[str]) -> list[str]:
    """The known key that is spelled most like `key`, if any is close."""
    return difflib.get_close_matches(
        key[:80], [known for known in keys if len(known) <= 80], 1, _CLOSE
    )


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
    return (
        f"{path} is an array of {len(arrays[0]):,} values"
        if arrays
        else f"{path} is a value without keys"
    )
