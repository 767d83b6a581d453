"""What the tools answer: a page, a list, or what was stored, and errors that a model can act on.

The arguments have their types here. What a model means by them, if they are not quite right, is
found out here too."""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from coatcheck import media, programs
from coatcheck.errors import (
    CoatcheckError,
    Expired,
    InvalidArgument,
    InvalidPointer,
    MissingExtra,
    NotFound,
    ProgramFailed,
    StoreError,
    TooLarge,
)
from coatcheck.externalize.decision import rates_of
from coatcheck.externalize.policy import Policy
from coatcheck.externalize.savings import counts_of
from coatcheck.externalize.storing import masked, put
from coatcheck.externalize.stub import LENGTH, mark
from coatcheck.ids import SCHEME, clip, is_encodable, is_pointer
from coatcheck.intake import About
from coatcheck.parts import Part
from coatcheck.previews.excerpts import line
from coatcheck.programs import program_in
from coatcheck.reading import Page, Request, source_of
from coatcheck.reading import read as read_page
from coatcheck.reading.page import AUTO
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.tokens import estimate
from coatcheck.values import encode_text

_LOG: Final = logging.getLogger("coatcheck")
RESERVED: Final = 1_000  # characters for the first line of a page
_ERROR: Final = 1_000
_PRINTED: Final = 1_000
_NAME: Final = 60
_MAX_NAME: Final = 200
_SHOWN: Final = 300
_SUMMARY: Final = 120
_ROWS: Final = 40
_HITS: Final = 10
_NEAREST: Final = 3
_NEWEST: Final = 5
_LOOKED_AT: Final = 500  # newest artifacts to look for similar names in
_WRAPPED: Final = {'"': '"', "'": "'", "`": "`", "<": ">", "“": "”", "‘": "’"}
_POINTER: Final = re.compile(r"(?:art:)?([0-9a-f]{12,64})(#(?:/.*)?)?", re.IGNORECASE | re.DOTALL)
_INSIDE: Final = re.compile(r"\bart:[0-9a-f]{12,64}(?:#/[^\s\"',;\])]*)?")
_SPECIAL: Final = re.compile(r"[^\w\s]")
_OTHER_WAYS: Final[tuple[tuple[dict[str, Any], str], ...]] = (
    ({"literal": True}, "as plain text"),
    ({"ignore_case": True}, "ignoring case"),
    ({"literal": True, "ignore_case": True}, "as plain text ignoring case"),
)
_WORDS: Final = 6
_CURSOR: Final = re.compile(r"(\d{1,9})-([0-9a-f]{12})")
MAX_WAIT: Final = 60
_WAIT: Final = 10


class Waited(Protocol):
    """The outcome of a call: what the model gets, and the tool's name."""

    @property
    def text(self) -> str: ...
    @property
    def name(self) -> str: ...


class Handles(Protocol):
    """The object that knows the started calls: a `ToolExecutor`."""

    def wait(self, handle: str, /, *, timeout: float | None) -> Waited: ...


class _Row(NamedTuple):
    """One artifact in a list."""

    artifact_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Answers:
    """What the tools of one session do. `policy` applies to what a model stores."""

    session: Session
    max_chars: int
    max_store_bytes: int
    list_tool: str
    policy: Policy
    handles: Handles | None = None

    def failed(self, text: str) -> str:
        """Return an error as an answer, on one short line."""
        flat = line(mask(text), _ERROR)
        return self._marked(flat if flat.startswith("[") else f"[error: {flat}]")

    def wait(self, arguments: dict[str, Any]) -> str:
        assert self.handles is not None
        try:
            limit = min(float(arguments.get("seconds", _WAIT)), MAX_WAIT)
        except ValueError:
            limit = -1.0
        if not limit >= 0:
            raise InvalidArgument(
                "seconds must be a number of at least 0", hint='write seconds="30"'
            )
        outcome = self.handles.wait(arguments["handle"].strip(), timeout=limit)
        within = self.policy.limited(max_chars=self.max_chars - RESERVED, enabled=True, tools={})
        text = self.session.externalize(outcome.text, tool=outcome.name, policy=within).text
        return self._marked(f"[{_quoted(outcome.name)}: {type(outcome).__name__}]", text)

    def get(self, arguments: dict[str, Any]) -> str:
        asked_tokens = estimate(json.dumps(arguments, ensure_ascii=False))
        asked = arguments.pop("pointer")
        target = self._target(asked)
        try:
            page, meant = self._read(target, arguments)
            ref = self.session.ref(target)
        except (NotFound, InvalidPointer) as error:
            return self._missing(asked, error)
        except ProgramFailed as error:
            return self._program_failed(error)
        except MissingExtra as error:  # a model cannot install it
            raise InvalidArgument(
                "that is not available here", hint="use grep, lines or a JSONPath"
            ) from error
        if ref is not None:  # how often results of a tool are read decides when they leave
            rates_of(self.session.store).read(self.session, ref, len(page.text))
            self.read_back(ref, asked_tokens + estimate(page.text))
        about = _about(ref) if ref else []
        if page.matches is not None:  # the rest is known from the stub
            about = about[: bool(ref and ref.name)]
        cut = [] if page.cut is None else [page.cut]
        parts = [line(page.pointer, 160), *cut, *about, *meant, line(page.shown, _SHOWN)]
        if page.cursor is not None:
            parts.append(f'more: cursor="{page.cursor}"')
        elif page.derived is not None:
            parts.append(f'more: pointer="{page.derived}"')
        return self._marked(f"[{'; '.join(parts)}]", page.text)

    def _program_failed(self, error: ProgramFailed) -> str:
        """Return the error of a program, and the end of what it printed before."""
        first, printed = line(mask(str(error)), _ERROR), error.printed.rstrip()
        if not printed:
            return self._marked(f"[error: {first}]")
        shown = printed[-_PRINTED:]
        of = f"the last {len(shown):,} characters of " if len(shown) < len(printed) else ""
        return self._marked(f"[error: {first}; below is {of}what it printed before]", shown)

    def picture(self, arguments: dict[str, Any]) -> Part | None:
        """Return the image that a model asked for, or None if it is not one that can be shown."""
        from coatcheck.reading.pictures import picture_of

        try:
            with self.session.content(self._target(str(arguments["pointer"]))) as content:
                found = picture_of(content)
        except Exception as error:  # noqa: BLE001 - the answer beside it says what is wrong
            _LOG.debug("no picture: %s", type(error).__name__)
            return None
        if found is None:
            return None
        part = Part(media_type=found.media_type, data=found.data)
        self.read_back(content.ref, part.tokens)
        return part

    def read_back(self, ref: Ref, tokens: int) -> None:
        """Count what a model read. This must never prevent the answer."""
        with suppress(Exception):
            counts_of(self.session.store).read_back(self.session, ref, tokens)

    def _read(self, target: str, arguments: dict[str, Any]) -> tuple[Page, list[str]]:
        """Read what the model asked for. If that has no answer but another way to write it does,
        return that page, and what it answers. The artifact is opened once for all of them."""
        source = source_of(self.session, target)

        def read(*, cursor: str | None = None, **changed: Any) -> Page:
            request = Request(max_chars=self.max_chars - RESERVED, **changed)
            return read_page(self.session, source, request, cursor)

        if "code" in arguments:
            code, cursor = program_in(arguments.pop("code")), arguments.pop("cursor", None)
            request = Request(code=code, max_chars=self.max_chars - RESERVED, **arguments)
            return programs.read(self.session, source, request, cursor), []
        if "grep" in arguments:
            arguments = {"context": AUTO, **arguments}
        with source.content:
            try:
                page = read(**arguments)
            except InvalidArgument as error:
                if error.instead:
                    return self._instead(error, read)
                if "grep" not in arguments or not (page := read(**arguments, literal=True)).matches:
                    raise
                return page, ["not a valid pattern, searched as plain text"]
            if page.instead is not None:
                meant = line(f"nothing matches; this is {page.instead}", _SHOWN)
                return read(query=page.instead), [meant]
            has_answer = page.matches != 0 or page.cursor is not None
            if has_answer or arguments.keys() & {"cursor", "ignore_case"}:
                return page, []
            return self._other_way(arguments, read) or (page, [])

    def _other_way(
        self, arguments: dict[str, Any], read: Callable[..., Page]
    ) -> tuple[Page, list[str]] | None:
        """The page of a pattern that matches nothing as it is written, read in another way."""
        for change, how in _OTHER_WAYS:
            if change != {"literal": True} or _SPECIAL.search(arguments["grep"]):
                page = read(**arguments, **change)
                if page.matches:
                    return page, [f"no match as written, {how}"]
        return None

    def _instead(self, error: InvalidArgument, read: Callable[..., Page]) -> tuple[Page, list[str]]:
        changed = error.instead
        if "query" in changed:
            return read(**changed), [line(f"read as {changed['query']}", _SHOWN)]
        pattern = changed["grep"]
        words = [re.escape(word) for word in pattern.split() if len(word) > 2][:_WORDS]
        try:
            page = read(**changed, context=AUTO)
            if not page.matches and len(words) > 1:
                pattern = "|".join(words)
                page = read(grep=pattern, ignore_case=True, context=AUTO)
        except CoatcheckError:
            raise error from None
        if not page.matches:
            raise error
        return page, [line(f"read as grep={json.dumps(pattern, ensure_ascii=False)}", _SHOWN)]

    def _target(self, asked: str) -> str:
        """Return the target that a model meant: a name as it is written, else a pointer, even in
        quotes, in upper case or without `art:`, or the only one in a text; else a name with a
        fragment, after `art:` or in another case."""
        bare = asked.strip()
        while len(bare) > 1 and _WRAPPED.get(bare[0]) == bare[-1]:
            bare = bare[1:-1].strip()
        stored_as: str = masked(bare, self.policy)
        for name in dict.fromkeys((asked, bare, stored_as)):
            if is_encodable(name) and not is_pointer(name) and self._named(name):
                return name
        match = _POINTER.fullmatch(bare)
        if match:
            return f"{SCHEME}{match[1].lower()}{match[2] or ''}"
        name, sign, fragment = bare.removeprefix(SCHEME).partition("#/")
        if is_encodable(name) and name and not is_pointer(name) and self._named(name):
            return f"{self.session.content(name).ref.pointer}#/{fragment}" if sign else name
        inside = set(_INSIDE.findall(bare))
        if len(inside) == 1:
            return str(inside.pop())
        return self._in_another_case(bare) or bare

    def _in_another_case(self, name: str) -> str | None:
        """The pointer of the only artifact with this name in another case."""
        wanted = name.casefold()
        refs = self.session.list(limit=_LOOKED_AT)
        same = {ref.pointer for ref in refs if ref.name and ref.name.casefold() == wanted}
        return same.pop() if len(same) == 1 else None

    def _named(self, name: str) -> bool:
        try:
            return self.session.ref(name) is not None
        except InvalidPointer:
            return False

    def _missing(self, asked: str, error: NotFound | InvalidPointer) -> str:
        """Say that there is no such artifact, with the nearest names. For an expired one, say what
        it was."""
        if isinstance(error, Expired) or (
            isinstance(error, InvalidPointer) and _POINTER.fullmatch(self._target(asked))
        ):
            return self.failed(str(error))
        first = f"[no artifact found for '{line(mask(asked), 80)}']"
        nearest = self._nearest(asked)
        if nearest:
            return self._marked(f"{first} nearest: {', '.join(nearest)}")
        if self.list_tool:
            return self._marked(f"{first} {self.list_tool}() lists all artifacts")
        newest = ", ".join(map(_named, self.session.list(limit=_NEWEST)))
        return self._marked(
            f"{first} " + (f"newest: {newest}" if newest else "there are no artifacts yet")
        )

    def _nearest(self, asked: str) -> list[str]:
        refs = self.session.list(limit=_LOOKED_AT)
        known: dict[str, Ref] = {}
        for ref in refs:
            known.setdefault(ref.pointer, ref)
            if ref.name:
                known.setdefault(ref.name.lower()[:_MAX_NAME], ref)
        close = difflib.get_close_matches(
            asked.strip().lower()[:_MAX_NAME], known, n=2 * _NEAREST, cutoff=0.6
        )
        found = {known[one].artifact_id: known[one] for one in close}
        return [_named(ref) for ref in found.values()][:_NEAREST]

    def list(self, arguments: dict[str, Any]) -> str:
        skip, last = _opened(arguments.get("cursor"))
        words = arguments.get("query")
        if words is None:
            rows, most, about = self._newest(skip + _ROWS + 1), _ROWS, "summary"
            nothing, again = "no artifacts yet", ""
        else:
            rows, most, about = self._found(words, skip + _HITS + 1), _HITS, "passage"
            nothing, again = "nothing matches these words", "the same query and "
        at = _index_after(rows, last, skip)
        page = self._fitting(rows[at : at + most])
        if not page:
            return self._marked(f"[{'no more artifacts' if at else nothing}]")
        end = at + len(page)
        first = f"artifacts {at + 1}-{end}: pointer, kind, bytes, name, {about}"
        if end < len(rows):
            cursor = f"{end}-{page[-1].artifact_id[:12]}"
            first += f'; more: {self.list_tool} with {again}cursor="{cursor}"'
        listed = "\n".join(row.text for row in page)
        with suppress(Exception):  # as above
            asked = estimate(json.dumps(arguments, ensure_ascii=False))
            counts_of(self.session.store).listed(asked + estimate(listed))
        return self._marked(f"[{first}]", listed)

    def _newest(self, most: int) -> Sequence[_Row]:
        refs = self.session.list(limit=2 * most + 64)[:most]
        # More are asked for, since a ref without a name takes that of an older one.
        return [_Row(ref.artifact_id, _row(ref, "", ref.summary)) for ref in refs]

    def _found(self, words: str, most: int) -> Sequence[_Row]:
        rows = []
        for hit in self.session.search(words, limit=most):
            where = f"lines {hit.lines[0]}-{hit.lines[1]}:" if hit.lines else ""
            rows.append(_Row(hit.ref.artifact_id, _row(hit.ref, where, hit.passage)))
        return rows

    def _fitting(self, rows: Sequence[_Row]) -> Sequence[_Row]:
        """The rows that fit in an answer, at least one."""
        size = RESERVED
        for number, row in enumerate(rows):
            size += len(row.text) + 1
            if size > self.max_chars and number:
                return rows[:number]
        return rows

    def store(self, arguments: dict[str, Any]) -> str:
        name, value = arguments["name"].strip(), arguments["value"]
        if not 0 < len(name) <= _MAX_NAME or name.startswith(SCHEME) or not is_encodable(name):
            raise InvalidArgument(
                f"the name {clip(name, 40)} is invalid",
                hint=f"use 1 to {_MAX_NAME} characters that do not begin with {SCHEME}",
            )
        claimed = arguments.get("content_type")
        media_type = media.media_type_of(claimed) if claimed is not None else None
        if claimed is not None and (media_type is None or not media.is_text(media_type)):
            raise InvalidArgument(
                f"{clip(claimed, 40)} is not a text content type",
                hint="e.g. text/plain, text/csv, application/json",
            )
        size = len(
            encode_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        )
        if size > self.max_store_bytes:
            raise TooLarge(
                f"the value has {size:,} bytes; at most {self.max_store_bytes:,} can be stored",
                hint="store it in parts",
            )
        if media_type == media.JSON and isinstance(value, str):
            value = _parsed(value)
        elif not isinstance(value, str) and media_type not in (None, media.JSON):
            raise InvalidArgument(
                f"the value is JSON, not {media_type}", hint="send it as a string"
            )
        elif not isinstance(value, str):
            media_type = media.JSON
        about = About(name=name, tool="store_artifact", media_type=media_type)
        ref = put(self.session, value, about, self.policy)
        glance = self.session.preview(ref, limit=200)
        return self._marked(f"[stored {'; '.join([ref.pointer, *_about(ref)])}]", mask(glance.text))

    def _marked(self, first: str, rest: str = "") -> str:
        """Mark an answer. A first line that is too long is cut, so that the answer stays within the
        limit. If the store fails before its key was read, the mark is left out."""
        room = self.max_chars - LENGTH - len(rest) - 1
        if len(first) > room:
            first = first[: room - 1] + "…"
        try:
            key = self.session.store.secret
        except StoreError:
            first = " ".join(first.splitlines())
            return f"{first}\n{rest}" if rest else first
        return mark(key, first, rest)


def _index_after(rows: Sequence[_Row], last: str | None, otherwise: int) -> int:
    """The index after the row of an artifact, given by the start of its id."""
    if last is not None:
        for index, row in enumerate(rows):
            if row.artifact_id.startswith(last):
                return index + 1
    return otherwise


def _about(ref: Ref) -> list[str]:
    name = [_quoted(ref.name)] if ref.name else []
    return [*name, ref.kind, line(ref.media_type, _NAME), f"{ref.size_bytes:,} bytes"]


def _named(ref: Ref) -> str:
    return f"{ref.pointer} {_quoted(ref.name)}" if ref.name else ref.pointer


def _row(ref: Ref, where: str, text: str) -> str:
    shown = " ".join(filter(None, [where, _quoted(text, _SUMMARY if not where else 2 * _SUMMARY)]))
    return (
        f"{ref.pointer} {ref.kind} {ref.size_bytes} {_quoted(ref.name) if ref.name else '-'} "
        f"{shown}"
    )


def _quoted(text: str, limit: int = _NAME) -> str:
    """Untrusted text on one line, as a JSON string."""
    return json.dumps(line(mask(text), limit), ensure_ascii=False)


def _opened(cursor: str | None) -> tuple[int, str | None]:
    if cursor is None:
        return 0, None
    match = _CURSOR.fullmatch(cursor.strip().strip("\"'`"))
    if match is None:
        raise InvalidArgument(
            f"invalid cursor: {clip(cursor, 40)}", hint="leave it out to start again"
        )
    return int(match[1]), match[2]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        where = (
            f"line {error.lineno}, column {error.colno}: {error.msg}"
            if isinstance(error, json.JSONDecodeError)
            else ""
        )
        raise InvalidArgument(
            f"the value is not valid JSON ({where})", hint="fix it, or store it as text/plain"
        ) from error
    except RecursionError as error:
        raise InvalidArgument(
            "the value is nested too deeply", hint="flatten it, or store it as text/plain"
        ) from error
