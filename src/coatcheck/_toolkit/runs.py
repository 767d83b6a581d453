"""What the tools for models do. Each answers a first line about what follows, then that; marked, and never too long."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any, Final

from coatcheck import media
from coatcheck.errors import Expired, InvalidArgument, InvalidPointer, NotFound, TooLarge
from coatcheck.externalize.marks import LENGTH, mark
from coatcheck.externalize.stub import media_type_of
from coatcheck.ids import SCHEME, clip
from coatcheck.previews.text import line
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.scope import is_text
from coatcheck.session import Session
from coatcheck.values import encode_text

RESERVED: Final = 1_000  # characters for the first line of a page
_ERROR: Final = 1_000
_NAME: Final = 60
_MAX_NAME: Final = 200
_SHOWN: Final = 300
_SUMMARY: Final = 120
_ROWS: Final = 40
_HITS: Final = 10
_NEAREST: Final = 3
_LOOKED_AT: Final = 500  # newest artifacts among which the nearest names are looked for
_WRAPPED: Final = {'"': '"', "'": "'", "`": "`", "<": ">", "“": "”", "‘": "’"}
_POINTER: Final = re.compile(r"(?:art:)?([0-9a-f]{12,64})(#(?:/.*)?)?", re.IGNORECASE | re.DOTALL)
_CURSOR: Final = re.compile(r"(\d{1,9})-([0-9a-f]{12})")


class Runs:
    """The tools of one session. `list_tool` is what the model knows that one by."""

    def __init__(self, session: Session, max_chars: int, max_store_bytes: int, *, list_tool: str) -> None:
        self._session = session
        self._max_chars = max_chars
        self._max_store_bytes = max_store_bytes
        self._list_tool = list_tool

    def failed(self, text: str) -> str:
        """An error as an answer: on one line, and short."""
        flat = line(mask(text), _ERROR)
        return self._marked(flat if flat.startswith("[") else f"[error: {flat}]")

    # get

    def get(self, arguments: dict[str, Any]) -> str:
        asked = arguments.pop("pointer")
        target = self._target(asked)
        try:
            page = self._session.read(target, max_chars=self._max_chars - RESERVED, **arguments)
            ref = self._session.ref(target)
        except (NotFound, InvalidPointer) as error:
            return self._missing(asked, error)
        parts = [_pointer(page.pointer), *(_about(ref) if ref else ()), line(page.shown, _SHOWN)]
        if page.cursor is not None:
            parts.append(f'more: cursor="{page.cursor}"')
        elif page.derived is not None:
            parts.append(f'more: pointer="{page.derived}"')
        return self._marked(f"[{'; '.join(parts)}]", page.text)

    def _target(self, asked: str) -> str:
        """What a model meant, where there is one thing that it can have meant: a name as it stands, else a pointer with
        quotes around it, in capitals, or without its `art:`."""
        if is_text(asked) and not _POINTER.fullmatch(asked) and self._named(asked):
            return asked
        bare = asked.strip()
        while len(bare) > 1 and _WRAPPED.get(bare[0]) == bare[-1]:
            bare = bare[1:-1].strip()
        match = _POINTER.fullmatch(bare)
        return f"{SCHEME}{match[1].lower()}{match[2] or ''}" if match else bare

    def _named(self, name: str) -> bool:
        try:
            return self._session.ref(name) is not None
        except InvalidPointer:
            return False

    def _missing(self, asked: str, error: NotFound | InvalidPointer) -> str:
        """That there is no such artifact, and what is called nearly so. An expired one says what it was."""
        if isinstance(error, Expired) or (
            isinstance(error, InvalidPointer) and _POINTER.fullmatch(self._target(asked))
        ):
            return self.failed(str(error))
        first = f"[no artifact found for '{line(mask(asked), 80)}']"
        nearest = self._nearest(asked)
        if nearest:
            return self._marked(f"{first} nearest: {', '.join(nearest)}")
        return self._marked(f"{first} {self._list_tool}() shows what there is")

    def _nearest(self, asked: str) -> list[str]:
        refs = self._session.list(limit=_LOOKED_AT)
        known: dict[str, Ref] = {}
        for ref in refs:
            known.setdefault(ref.pointer, ref)
            if ref.name:
                known.setdefault(ref.name.lower()[:_MAX_NAME], ref)
        close = difflib.get_close_matches(asked.strip().lower()[:_MAX_NAME], known, n=2 * _NEAREST, cutoff=0.6)
        found = {known[one].artifact_id: known[one] for one in close}
        return [f"{ref.pointer} {_quoted(ref.name)}" if ref.name else ref.pointer for ref in found.values()][:_NEAREST]

    # list

    def list(self, arguments: dict[str, Any]) -> str:
        skip, last = _opened(arguments.get("cursor"))
        words = arguments.get("query")
        if words is not None:
            hits = self._session.search(words, limit=skip + _HITS + 1)
            rows = [(hit.ref, _row(hit.ref, 1, _where(hit.lines), hit.passage)) for hit in hits]
            columns = "pointer, kind, bytes, name, passage"
        else:
            rows = [(ref, _row(ref, names, "", ref.summary)) for ref, names in self._artifacts(skip + _ROWS + 1)]
            columns = "pointer, kind, bytes, name, summary"
        at = next((number + 1 for number, (ref, _) in enumerate(rows) if ref.artifact_id.startswith(last or "-")), skip)
        page: list[tuple[Ref, str]] = []
        size = RESERVED
        for ref, row in rows[at : at + (_ROWS if words is None else _HITS)]:
            size += len(row) + 1
            if size > self._max_chars and page:
                break
            page.append((ref, row))
        if not page:
            nothing = "nothing fits these words" if words is not None else "no artifacts yet"
            return self._marked(f"[{'no more artifacts' if at else nothing}]")
        said = f"artifacts {at + 1}-{at + len(page)}: {columns}"
        if at + len(page) < len(rows):
            again = "" if words is None else "the same query and "
            said += f'; more: {self._list_tool} with {again}cursor="{at + len(page)}-{page[-1][0].artifact_id[:12]}"'
        return self._marked(f"[{said}]", "\n".join(row for _, row in page))

    def _artifacts(self, count: int) -> Iterable[tuple[Ref, int]]:
        """The newest artifacts, each once, with how many names it has."""
        limit = 2 * count + 64
        while True:
            refs = self._session.list(limit=limit)
            found: dict[str, tuple[Ref, set[str]]] = {}
            for ref in refs:
                first, names = found.setdefault(ref.artifact_id, (ref, set()))
                if ref.name:
                    names.add(ref.name)
                    if first.name is None:
                        found[ref.artifact_id] = (ref, names)
            if len(found) >= count or len(refs) < limit:
                return [(ref, len(names)) for ref, names in found.values()][:count]
            limit *= 4

    # store

    def store(self, arguments: dict[str, Any]) -> str:
        name, value = arguments["name"].strip(), arguments["value"]
        if not 0 < len(name) <= _MAX_NAME or name.startswith(SCHEME) or not is_text(name):
            raise InvalidArgument(
                f"{clip(name, 40)} is no name", hint=f"1 to {_MAX_NAME} characters that do not begin with {SCHEME}"
            )
        claimed = arguments.get("content_type")
        media_type = media_type_of(claimed) if claimed is not None else None
        if claimed is not None and (media_type is None or not media.is_text(media_type)):
            raise InvalidArgument(
                f"{clip(claimed, 40)} is no content type of a text", hint="e.g. text/plain, text/csv, application/json"
            )
        size = len(encode_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
        if size > self._max_store_bytes:
            raise TooLarge(
                f"the value has {size:,} bytes; at most {self._max_store_bytes:,} can be stored",
                hint="store it in parts",
            )
        if media_type == media.JSON and isinstance(value, str):
            value = _parsed(value)
        elif not isinstance(value, str) and media_type not in (None, media.JSON):
            raise InvalidArgument(f"the value is JSON, not {media_type}", hint="send it as a string")
        elif not isinstance(value, str):
            media_type = media.JSON
        ref = self._session.put(value, name=name, tool="store_artifact", media_type=media_type)
        glance = self._session.preview(ref, limit=200)
        return self._marked(f"[stored {'; '.join([ref.pointer, *_about(ref)])}]", mask(glance.text))

    def _marked(self, first: str, rest: str = "") -> str:
        """An answer. The first line gives way where it is too long, so that nothing exceeds the cap."""
        room = self._max_chars - LENGTH - len(rest) - 1
        return mark(self._session.store.secret, first if len(first) <= room else first[: room - 1] + "…", rest)


def _about(ref: Ref) -> list[str]:
    name = [_quoted(ref.name)] if ref.name else []
    return [*name, ref.kind, line(ref.media_type, _NAME), f"{ref.size_bytes:,} bytes"]


def _row(ref: Ref, names: int, where: str, text: str) -> str:
    also = f" (+{names - 1} names)" if names > 1 else ""
    shown = " ".join(filter(None, [where, _quoted(text, _SUMMARY if not where else 2 * _SUMMARY)]))
    return f"{ref.pointer} {ref.kind} {ref.size_bytes} {_quoted(ref.name) if ref.name else '-'}{also} {shown}"


def _where(lines: tuple[int, int] | None) -> str:
    return "" if lines is None else f"lines {lines[0]}-{lines[1]}:"


def _quoted(text: str, limit: int = _NAME) -> str:
    """Untrusted text on one line, as a JSON string."""
    return json.dumps(line(mask(text), limit), ensure_ascii=False)


def _pointer(pointer: str) -> str:
    return line(pointer, 160)


def _opened(cursor: str | None) -> tuple[int, str | None]:
    if cursor is None:
        return 0, None
    match = _CURSOR.fullmatch(cursor.strip().strip("\"'`"))
    if match is None:
        raise InvalidArgument(f"that cursor is not one of ours: {clip(cursor, 40)}", hint="leave it out to begin again")
    return int(match[1]), match[2]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        where = (
            f"line {error.lineno}, column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
        )
        raise InvalidArgument(
            f"the value is not valid JSON ({where})", hint="mend it, or store it as text/plain"
        ) from error
    except RecursionError as error:
        raise InvalidArgument("the value is nested too deeply", hint="flatten it, or store it as text/plain") from error
