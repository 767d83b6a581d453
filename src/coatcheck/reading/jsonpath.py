"""JSONPath (RFC 9535) on JSON and JSONL, safe against hostile paths and documents.

In JSONL each line is a document: `$` is the line, and only one line is in memory at a time. The
result is JSON, one value per line if there are several. `match` and `search` run on RE2, which does
not backtrack. A path that may take longer than the document is large (`is_linear`) runs in a child
process, whose CPU time is limited (`heavy`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

import re2  # type: ignore[import-untyped]  # ships without types
from iregexp_check import check as is_iregexp
from jsonpath_rfc9535 import JSONPathEnvironment, JSONPathError, JSONPathQuery
from jsonpath_rfc9535.exceptions import JSONPathRecursionError, JSONPathTypeError
from jsonpath_rfc9535.filter_expressions import StringLiteral
from jsonpath_rfc9535.function_extensions import ExpressionType, FilterFunction
from jsonpath_rfc9535.segments import JSONPathRecursiveDescentSegment
from jsonpath_rfc9535.selectors import FilterSelector
from jsonpath_rfc9535.tokens import Token

from coatcheck.content import Content
from coatcheck.errors import InvalidArgument, LimitExceeded
from coatcheck.ids import clip
from coatcheck.media import JSON, JSONL, TEXT, is_jsonl
from coatcheck.previews.excerpts import count
from coatcheck.reading.json_content import NOTHING, lines, load, parse
from coatcheck.reading.page import MAX_RESULT, BoundedLines, QueryResult
from coatcheck.reading.patterns import MAX_PATTERN, MAX_PROGRAM
from coatcheck.values import MAX_DEPTH

SECONDS: Final = 5.0  # until results that are left out are no longer counted
MAX_PATH: Final = 4_000
_EXAMPLE: Final = "a path is like $.items[0].name, $..id or $.items[?@.price < 10]"
_LISTED_LINES: Final = 20
_DOT: Final = re.compile(r"(\\.|\[(?:\\.|[^\]])*\])|\.", re.DOTALL)

INVALID: Final = object()
"""In place of a document that is not valid JSON."""


def find(
    content: Content, path: str, *, limit: int = MAX_RESULT, seconds: float = SECONDS
) -> QueryResult:
    """Find the values that a path selects. The text ends at `limit` characters. All results are
    counted, unless that takes longer than `seconds`."""
    query = compiled(path)
    found = _Found(BoundedLines(limit))
    deadline = monotonic() + seconds
    try:
        for number, document in documents(content):
            if document is INVALID:
                found.skip(number)
                continue
            for node in query.finditer(document):
                found.add(node.value, number)
                if found.results.full and monotonic() > deadline:
                    found.is_counted = False
                    return found.answer(content)
    except JSONPathRecursionError as error:
        raise LimitExceeded(
            f"the document is nested deeper than {MAX_DEPTH} levels", hint="avoid '..'"
        ) from error
    except RecursionError as error:
        raise LimitExceeded(
            "the path or its result is nested too deeply", hint="use a shorter path"
        ) from error
    return found.answer(content)


def is_linear(path: str) -> bool:
    """Whether a path takes a time that grows only with the size of the document: it has no filter,
    and selects no value twice."""
    descents = 0
    for segment in compiled(path).segments:
        if len(segment.selectors) != 1 or isinstance(segment.selectors[0], FilterSelector):
            return False
        if isinstance(segment, JSONPathRecursiveDescentSegment):
            descents += 1
    return descents <= 1


def compiled(path: str) -> JSONPathQuery:
    """Compile a path. Raises `InvalidArgument` that says where it is wrong."""
    if len(path) > MAX_PATH:
        raise InvalidArgument(
            f"the path has {len(path):,} characters, the limit is {MAX_PATH:,}", hint=_EXAMPLE
        )
    try:
        return _ENVIRONMENT.compile(path)
    except JSONPathError as error:
        reason = str(error.args[0]) if error.args else "syntax error"
        at = error.token.index if error.token is not None else 0
        near = f" near {clip(path[at : at + 20])}" if at < len(path) else " at its end"
        raise InvalidArgument(
            f"not a JSONPath: {clip(path)}: {reason}, at character {at + 1}{near}", hint=_EXAMPLE
        ) from error
    except RecursionError as error:
        raise InvalidArgument("not a JSONPath: nested too deeply", hint=_EXAMPLE) from error
    except (ValueError, ArithmeticError, LookupError) as error:
        # numbers out of range, incomplete escapes
        raise InvalidArgument(
            f"not a JSONPath: {clip(path)}: {clip(str(error))}", hint=_EXAMPLE
        ) from error


def documents(content: Content) -> Iterator[tuple[int, Any]]:
    """Yield each document, or `INVALID`, with the number of its line, which is 1 unless the content
    is JSONL."""
    if not is_jsonl(content.ref.media_type):
        yield 1, load(content)
        return
    for number, line in lines(content):
        if line is None:
            yield number, INVALID
            continue
        try:
            document = parse(line, f"line {number}")
        except (InvalidArgument, LimitExceeded):
            document = INVALID
        yield number, document


@dataclass
class _Found:
    """The results of a path, and where they are."""

    results: BoundedLines
    matches: int = 0
    is_counted: bool = True
    lines: dict[int, None] = field(default_factory=dict)  # those with results that are shown
    skipped: int = 0
    first_skipped: int = 0

    def add(self, value: Any, line: int) -> None:
        self.matches += 1
        if self.results.full:
            return
        is_whole = self.results.add(json.dumps(value, ensure_ascii=False))
        if is_whole and len(self.lines) <= _LISTED_LINES:
            self.lines[line] = None

    def skip(self, line: int) -> None:
        self.skipped += 1
        self.first_skipped = self.first_skipped or line

    def answer(self, content: Content) -> QueryResult:
        results = self.results
        media_type = JSON if self.matches == 1 else JSONL
        shown = count(self.matches, "result")
        if results.full:
            least = "" if self.is_counted else "at least "
            shown = f"{len(results):,} of {least}{shown}"
        return QueryResult(
            text=results.text,
            media_type=TEXT if results.cut else media_type,
            shown=shown,
            note="; ".join(self._notes(content)),
        )

    def _notes(self, content: Content) -> Iterator[str]:
        if not self.matches:
            yield NOTHING
        if self.results.cut:
            size = f"{self.results.cut:,} characters"
            yield f"the first result is cut: it has {size}; select less of it"
        elif self.results.full:
            yield "the results after that are left out; narrow the path"
        if self.lines and is_jsonl(content.ref.media_type):
            listed = ", ".join(str(line) for line in list(self.lines)[:_LISTED_LINES])
            more = ", …" if len(self.lines) > _LISTED_LINES else ""
            yield f"from line{'s' if len(self.lines) > 1 else ''} {listed}{more}"
        if self.skipped:
            lines = count(self.skipped, "line")
            yield f"{lines} skipped as invalid JSON, the first is line {self.first_skipped}"


# A filter asks for its pattern at each value. RE2's own cache takes 6 µs, as much as the rest of a
# filter; this one takes 0.1.
@functools.lru_cache(maxsize=64)
def _regex(pattern: str) -> Any:
    """Compile a pattern; None if RE2 rejects it. In I-Regexp, a dot matches no line end; RE2 syntax
    is accepted too."""
    if len(pattern) > MAX_PATTERN:
        return None
    if is_iregexp(pattern):
        pattern = _DOT.sub(lambda match: match[1] or r"[^\n\r]", pattern)
    options = re2.Options()
    options.log_errors = False
    try:
        regex = re2.compile(pattern, options)
    except re2.error:
        return None
    return regex if regex.programsize <= MAX_PROGRAM else None


class _Regular(FilterFunction):
    """`match` (the whole string) or `search` (anywhere in it)."""

    arg_types = [ExpressionType.VALUE, ExpressionType.VALUE]  # noqa: RUF012 - the library's own declaration
    return_type = ExpressionType.LOGICAL

    def __init__(self, method: str) -> None:
        self._method = method

    def __call__(self, string: object, pattern: object) -> bool:
        if not isinstance(string, str) or not isinstance(pattern, str):
            return False
        regex = _regex(pattern)
        if regex is None:
            return False
        try:
            return getattr(regex, self._method)(string) is not None
        except UnicodeEncodeError:  # a lone surrogate
            return False


class _Environment(JSONPathEnvironment):
    """RFC 9535 with regular expressions by RE2."""

    max_recursion_depth = MAX_DEPTH

    def setup_function_extensions(self) -> None:
        super().setup_function_extensions()
        self.function_extensions["match"] = _Regular("fullmatch")
        self.function_extensions["search"] = _Regular("search")

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


_ENVIRONMENT: Final = _Environment()
