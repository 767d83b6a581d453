"""JSONPath (RFC 9535) on JSON and JSONL, safe against hostile paths and documents.

In JSONL each line is a document: `$` is the line, and only one line is in memory at a time. The result is JSON, one
value per line if there are several. `match` and `search` run on RE2, which does not backtrack. A deadline is checked at
every step of the evaluation, including filters.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Final

import re2  # type: ignore[import-untyped]  # ships without types
from iregexp_check import check as is_iregexp
from jsonpath_rfc9535 import JSONPathEnvironment, JSONPathError, JSONPathNode, JSONPathQuery
from jsonpath_rfc9535.exceptions import JSONPathRecursionError, JSONPathTypeError
from jsonpath_rfc9535.filter_expressions import FilterContext, FilterExpression, StringLiteral
from jsonpath_rfc9535.function_extensions import ExpressionType, FilterFunction
from jsonpath_rfc9535.parse import Parser
from jsonpath_rfc9535.segments import JSONPathChildSegment, JSONPathRecursiveDescentSegment, JSONPathSegment
from jsonpath_rfc9535.selectors import FilterSelector, IndexSelector, NameSelector
from jsonpath_rfc9535.tokens import Token, TokenStream

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.ids import clip
from coatcheck.media import JSON, JSONL, TEXT, is_jsonl
from coatcheck.previews.excerpts import count
from coatcheck.reading.grep import MAX_PATTERN, MAX_PROGRAM
from coatcheck.reading.json_content import NOTHING, lines, load, parse
from coatcheck.reading.near_paths import PathStep, fitted, lenient
from coatcheck.reading.page import MAX_RESULT, BoundedLines, QueryResult
from coatcheck.values import MAX_DEPTH

SECONDS: Final = 10.0
MAX_PATH: Final = 4_000
_EXAMPLE: Final = "a path is like $.items[0].name, $..id or $.items[?@.price < 10]"
_LISTED_LINES: Final = 20
_SAMPLED: Final = 200  # documents of JSONL
_INVALID: Final = object()
_DOT: Final = re.compile(r"(\\.|\[(?:\\.|[^\]])*\])|\.", re.DOTALL)


class _OutOfTime(Exception):
    pass


def find(content: Content, path: str, *, limit: int = MAX_RESULT, seconds: float = SECONDS) -> QueryResult:
    """Find the values that a path selects. The text ends at `limit` characters, but all results are counted."""
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
        raise LimitExceeded(f"the document is nested deeper than {MAX_DEPTH} levels", hint="avoid '..'") from error
    except RecursionError as error:
        raise LimitExceeded("the path or its result is nested too deeply", hint="use a shorter path") from error
    notes = []
    if not matches:
        notes.append(NOTHING)
    if results.cut:
        notes.append(f"the first result is cut: it has {results.cut:,} characters; select less of it")
    elif results.full:
        notes.append("the results after that are left out; narrow the path")
    if where and is_jsonl(content.ref.media_type):
        listed = ", ".join(map(str, list(where)[:_LISTED_LINES]))
        notes.append(f"from line{'s' if len(where) > 1 else ''} {listed}{', …' if len(where) > _LISTED_LINES else ''}")
    if skipped:
        notes.append(f"{count(skipped, 'line')} skipped as invalid JSON, the first is line {first_skipped}")
    total = count(matches, "result")
    return QueryResult(
        text=results.text,
        media_type=TEXT if results.cut else JSON if matches == 1 else JSONL,
        shown=total if not results.full else f"{len(results):,} of {'' if counted else 'at least '}{total}",
        note="; ".join(notes),
    )


def nearest(content: Content, query: str, *, seconds: float = SECONDS) -> tuple[str, str]:
    """The path with results that a query without any was meant to be, or "" and what there is where it ends.

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
    if not is_path and not any(isinstance(value, dict) and steps[0].key in value for value in values):
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
    return PathStep(place=selector.index) if isinstance(selector, IndexSelector) else PathStep(written=str(segment))


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
        raise InvalidArgument(f"the path has {len(path):,} characters, the limit is {MAX_PATH:,}", hint=_EXAMPLE)
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
    except (ValueError, ArithmeticError, LookupError) as error:  # numbers out of range, incomplete escapes
        raise InvalidArgument(f"not a JSONPath: {clip(path)}: {clip(str(error))}", hint=_EXAMPLE) from error


@functools.lru_cache(maxsize=64)
def _regex(pattern: str) -> Any:
    """Compile a pattern; None if RE2 rejects it. The dot of I-Regexp matches no line end; RE2 syntax passes too."""
    options = re2.Options()
    options.log_errors = False
    if len(pattern) > MAX_PATTERN:
        return None
    try:
        source = _DOT.sub(lambda match: match[1] or r"[^\n\r]", pattern) if is_iregexp(pattern) else pattern
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
                f"{token.value}() cannot use the pattern {clip(literal.value)}: patterns are RE2's, "
                f"{MAX_PATTERN:,} characters and {MAX_PROGRAM:,} instructions at most, without look-around and "
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

    def parse_query(self, stream: TokenStream, *, in_filter: bool = False) -> Iterable[JSONPathSegment]:
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
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return (node.new_child(item, key, node) for key, item in items if isinstance(item, dict | list))


def _ticking(env: JSONPathEnvironment, nodes: Iterable[JSONPathNode]) -> Iterator[JSONPathNode]:
    assert isinstance(env, _Environment)
    for node in nodes:
        env.tick()
        yield node
