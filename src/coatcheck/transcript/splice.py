"""Convert a JSON text to its slim form and back, exactly. Bytes are cut out and put back: nothing is reformatted.

A payload is replaced by its stub: a string by a string, a container by an object. All refs are under one key at the end
of the outermost object around them, each with its path inside that object. If a text already has a key of that name, a
second one is added that marks the first as not ours: so only what was added is ever removed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from coatcheck.errors import CoatcheckError, Damaged
from coatcheck.ids import is_encodable, pointer_of
from coatcheck.messages import Format
from coatcheck.messages.paths import REFS_KEY, Path, at
from coatcheck.refs import Ref
from coatcheck.storage import TRANSCRIPT
from coatcheck.transcript.scan import (
    STYLES,
    Opened,
    TextSpan,
    binary,
    last_member,
    last_value,
    parse,
    spans,
    styled,
    tokens_of,
    utf8,
)

if TYPE_CHECKING:
    from coatcheck.transcript.keep import Keeper

Fetch = Callable[[str, str], bytes]
"""Returns the bytes of an artifact, given a session id and its id. Raises `NotFound`, `Damaged` and similar errors."""

MARK: Final = REFS_KEY.encode()
"""Occurs in every slim line."""

PREFIX: Final = TRANSCRIPT
_ADDED: Final = ""
_EXTENDED: Final = "+"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_SESSION: Final = re.compile(r"transcript:[0-9a-f]{32}")
_SUMMARY: Final = 80
_KEY: Final = f',"{REFS_KEY}":'
_LEAST_GAIN: Final = 512  # characters; a shorter payload would be replaced by more than itself
_MAX_DEPTH: Final = 64
_HEAD: Final = 64  # characters of a token that are searched for first
_TRIES: Final = 16
_NOWHERE: Final = "90631724905817263"  # prefix of numbers that are assumed to occur in no text


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """One payload that was moved out of a line: its artifact, its path in the line, and how it was written there.

    `encoding` says how to restore the text from the artifact: a style of JSON strings, "json" for a value that is
    stored as it was written, or "base64" after a `prefix`. If no style gives the same bytes, `raw` is the id of an
    artifact that contains them. If the line also has a `details.artifactRef`, `details` is what was there before: the
    JSON of the replaced value, "" if there was nothing, "+" if it was an object that got one more member."""

    id: str
    size: int
    media_type: str
    summary: str
    path: Path
    session: str
    encoding: str
    raw: str | None = None
    prefix: str = ""
    details: str | None = None

    @property
    def pointer(self) -> str:
        return pointer_of(self.id)

    def to_record(self) -> dict[str, Any]:
        """The JSON object that a line contains."""
        record = {name: getattr(self, name) for name in self.__slots__} | {"path": list(self.path)}
        return {name: one for name, one in record.items() if one is not None and (one or name != "prefix")}

    @classmethod
    def of(
        cls, ref: Ref, path: Path, session: str, encoding: str, raw: str | None = None, prefix: str = ""
    ) -> ArtifactRef:
        summary = ref.summary if len(ref.summary) <= _SUMMARY else ref.summary[: _SUMMARY - 1] + "…"
        return cls(ref.artifact_id, ref.size_bytes, ref.media_type, summary, path, session, encoding, raw, prefix)


@dataclass(frozen=True, slots=True)
class LineRefs:
    """The value of our key: refs, or none if it only marks an earlier key of the same name as not ours."""

    refs: tuple[ArtifactRef, ...]
    sessions: frozenset[str]


def parse_refs(value: object) -> LineRefs | None:
    """Parse the value of our key. None if Coatcheck did not write it."""
    if not isinstance(value, list) or not value:
        return None
    first = value[0]
    if len(value) == 1 and isinstance(first, dict) and first.keys() == {"session"}:
        session = first["session"]
        return LineRefs((), frozenset({session})) if _is(_SESSION, session) else None
    refs = tuple(ref for one in value if (ref := _parse_ref(one)) is not None)
    return LineRefs(refs, frozenset(ref.session for ref in refs)) if len(refs) == len(value) else None


def dump_refs(refs: Sequence[ArtifactRef], session: str) -> str:
    """Return the value of our key as JSON. Without refs it only names the session."""
    records = [one.to_record() for one in refs] or [{"session": session}]
    token = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
    return token if is_encodable(token) else json.dumps(records, separators=(",", ":"))


def is_session_id(text: str) -> bool:
    """Whether this is the id of a session that owns the payloads of a transcript."""
    return _is(_SESSION, text)


def _parse_ref(value: Any) -> ArtifactRef | None:
    try:
        ref = ArtifactRef(**value | {"path": tuple(value["path"])})
    except (TypeError, KeyError):
        return None
    steps, raw = value["path"], ref.raw
    is_valid = isinstance(steps, list) and all(type(step) in (str, int) for step in steps) and type(ref.size) is int
    texts = (ref.media_type, ref.summary, ref.encoding, ref.prefix, value.get("details", ""))
    is_valid = is_valid and all(isinstance(one, str) for one in texts)
    is_valid = is_valid and _is(_DIGEST, ref.id) and _is(_SESSION, ref.session) and (raw is None or _is(_DIGEST, raw))
    return ref if is_valid else None


def _is(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


Missing = Callable[[ArtifactRef, CoatcheckError], None]
"""Called with each ref that could not be fetched, and the reason."""


class LinePayload(NamedTuple):
    """A large value in a line: `text` counts against a limit, `value` is stored (the text, the bytes behind base64, or
    a container's JSON as it was written), `path` is its path in the parsed `line`."""

    value: str | bytes
    text: str
    path: Path
    line: Any
    is_json: bool = False

    @property
    def prefix(self) -> str:
        """The beginning of a `data:` URL up to its data, '' for any other text."""
        return self.text[: self.text.index(",") + 1] if self.text.startswith("data:") else ""


@dataclass(frozen=True, slots=True)
class Slimmed:
    """A text without its payloads, and its new refs, each with its path from the top."""

    text: bytes
    refs: tuple[ArtifactRef, ...] = ()


def slim(
    text: bytes, fmt: Format, keeper: Keeper, *, opened: Opened | None = None, marked: bool | None = None
) -> Slimmed:
    """Move the payloads of a line or a whole document to the store. `whole` restores exactly these bytes, except for
    secrets that the keeper masks.

    Text that is not JSON or not UTF-8, is nested too deep, or is already slim is returned unchanged. Storage errors are
    raised. The caller may pass the text `opened`, and whether our key occurs in it (`marked`) if it has found that the
    text may have to be changed."""
    if marked is None:
        marked = MARK in text
        if keeper.passes(text) and not marked:
            return Slimmed(text)
    opened = opened or Opened.of(text)
    if opened is None:
        return Slimmed(text)
    value = opened.value
    keeper.learn(fmt, value)
    present = dict(_refs_in(opened)) if marked else {}
    ours = {path for path, one in present.items() if keeper.is_ours(one.sessions)} if present else set()
    payloads = _payloads(fmt, value, keeper)
    if ours or isinstance(value, list):
        payloads = [one for one in payloads if _holder(value, one.path) not in (None, *ours)]
    cuts = _cuts(opened, payloads) if payloads else []
    foreign = present.keys() - ours
    if not cuts and not foreign:
        return Slimmed(text)
    return _slimmed(opened, cuts, foreign, fmt, keeper)


def whole(text: bytes, fetch: Fetch, *, missing: Missing | None = None) -> bytes:
    """Restore the text that `slim` was given. A payload that cannot be fetched raises; with `missing`, that is called
    and the payload is replaced by a placeholder. A text without refs is returned unchanged."""
    opened = _marked(text)
    if opened is None:
        return text
    source, start = opened.source, opened.start
    present = dict(_refs_in(opened))
    places = [(*holder, *ref.path) for holder, one in present.items() for ref in one.refs]
    where = spans(source, start, [*present, *places])
    edits: list[tuple[int, int, str]] = []
    for holder, one in present.items():
        last = last_value(source, where[holder][0], REFS_KEY)
        edits += [(*last[1], "")] if last else []
        for ref in one.refs:
            span = where.get((*holder, *ref.path))
            if span is not None and ref.details is not None:
                edits.append(_without_reference(source, start, (*holder, *ref.path), ref))
            if span is not None:
                edits.append((*span, _restored(ref, source[span[0]], fetch, missing)))
            elif missing is None:
                raise _edited_since(ref)
            else:
                missing(ref, _edited_since(ref))
    return _edited(source, edits).encode()


def refs_of(text: bytes) -> tuple[ArtifactRef, ...]:
    """Return the refs of a text in order, each with its path from the top. Empty if the text is not slim."""
    opened = _marked(text)
    if opened is None:
        return ()
    return tuple(replace(ref, path=(*holder, *ref.path)) for holder, one in _refs_in(opened) for ref in one.refs)


def sessions_in(text: bytes) -> list[str]:
    """Return the sessions that a slim text names, in order, including those of keys without refs."""
    opened = _marked(text)
    return [] if opened is None else [session for _, one in _refs_in(opened) for session in sorted(one.sessions)]


def bare(text: bytes) -> bytes:
    """Return a slim text without our key, with stubs in place of payloads. Any other text is unchanged."""
    opened = _marked(text)
    if opened is None:
        return text
    source, start = opened.source, opened.start
    holders = [holder for holder, _ in _refs_in(opened)]
    ours = (last_value(source, begin, REFS_KEY) for begin, _ in spans(source, start, holders).values())
    return _edited(source, [(*last[1], "") for last in ours if last]).encode()


def with_refs(text: bytes, refs: Sequence[ArtifactRef], session_id: str) -> bytes:
    """Add refs to a line, which is a non-empty object, for stubs that it already contains. `whole` then restores those
    payloads like any other."""
    opened = Opened.of(text)
    if opened is None or not isinstance(opened.value, dict) or not opened.value:
        return text
    source, start = opened.source, opened.start
    earlier = dict(_refs_in(opened)).get(()) if MARK in text else None
    if earlier is not None and (last := last_value(source, start, REFS_KEY)) is not None:
        source = _edited(source, [(*last[1], "")])
    behind = last_member(source, spans(source, start, [()])[()][1])
    before = earlier.refs if earlier is not None else ()
    return _edited(source, [(behind, behind, _KEY + dump_refs([*before, *refs], session_id))]).encode()


def _marked(text: bytes) -> Opened | None:
    """Open a text that may be slim."""
    return Opened.of(text) if MARK in text else None


def _payloads(fmt: Format, value: Any, keeper: Keeper) -> list[LinePayload]:
    """Strings over the policy, and containers that may be: those are decided by their raw text."""
    payloads = []
    for path in fmt.places(value, keeper.least, keeper.bulk):
        found = at(value, path)
        if not isinstance(found, str):
            payloads.append(LinePayload("", "", path, value, is_json=True))
            continue
        carried = binary(found)
        payload = LinePayload(found if carried is None else carried[1], found, path, value)
        if keeper.leaves(fmt, payload):
            payloads.append(payload)
    return payloads


_Where = tuple[TextSpan, str | None]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A payload with its span in the text, and the style of its token if known."""

    payload: LinePayload
    span: TextSpan
    style: str | None


def _cuts(opened: Opened, payloads: Sequence[LinePayload]) -> list[_Cut]:
    """Payloads with their spans, in order."""
    if opened.elements is None or not isinstance(opened.value, list):
        found = _located(opened.source, opened.value, opened.start, [one.path for one in payloads])
        return _in_order(payloads, found, 0)
    cuts: list[_Cut] = []
    for index, group in groupby(payloads, lambda one: one.path[0]):
        some = list(group)
        element = opened.value[int(index)]
        begin, end = opened.elements[int(index)]
        found = _located(opened.source[begin:end], element, 0, [one.path[1:] for one in some])
        cuts += _in_order(some, found, begin)
    return cuts


def _in_order(payloads: Iterable[LinePayload], found: Iterable[_Where | None], base: int) -> list[_Cut]:
    cuts = [
        _Cut(one, (base + where[0][0], base + where[0][1]), where[1])
        for one, where in zip(payloads, found, strict=True)
        if where is not None
    ]
    return sorted(cuts, key=lambda cut: cut.span)


def _located(source: str, value: Any, start: int, paths: Sequence[Path]) -> Sequence[_Where | None]:
    """Return the spans of the values at these paths. Each is first searched for as most writers would write it; parsing
    the text with unique numbers in those spans proves the guess. If that fails, the whole text is scanned."""
    found = _guessed(source, value, start, paths)
    if found is not None:
        return found
    exact = spans(source, start, paths)
    return [(exact[path], None) if path in exact else None for path in paths]


def _guessed(source: str, value: Any, start: int, paths: Sequence[Path]) -> list[_Where] | None:
    found: list[_Where] = []
    cursor = start
    for path in paths:
        guesses = ((style, token, _find(source, token, cursor)) for style, token in tokens_of(at(value, path)))
        guess = next((one for one in guesses if one[2] >= 0), None)
        if guess is None:
            return None
        style, token, begin = guess
        cursor = begin + len(token)
        found.append(((begin, cursor), style))
    if _NOWHERE in source:
        return None
    left = parse(_edited(source, [(*span, f"{_NOWHERE}{number}") for number, (span, _) in enumerate(found)]))
    proved = left and all(at(left[0], path) == int(f"{_NOWHERE}{number}") for number, path in enumerate(paths))
    return found if proved else None


def _find(text: str, token: str, start: int) -> int:
    """Return the position of a token from `start` on, or -1. Searches for its first characters: `str.find` reads a long
    token twice before it begins."""
    head = token[:_HEAD]
    for _ in range(_TRIES):
        start = text.find(head, start)
        if start < 0 or text.startswith(token, start):
            return start
        start += 1
    return text.find(token, start)


def _slimmed(opened: Opened, cuts: Iterable[_Cut], foreign: Iterable[Path], fmt: Format, keeper: Keeper) -> Slimmed:
    edits: list[tuple[int, int, str]] = []
    refs: dict[Path, list[ArtifactRef]] = {path: [] for path in foreign}
    referenced: set[Path] = set()  # messages that have a `details.artifactRef`
    source, value = opened.source, opened.value
    if refs and not keeper.dry_run:
        keeper.own_session()  # the line will name it, even if nothing is put into it
    for cut in cuts:
        payload, token = cut.payload, source[slice(*cut.span)]
        if payload.is_json:
            payload = payload._replace(value=token, text=token)
        holder = _holder(value, payload.path)
        if holder is None or len(token) < _LEAST_GAIN or (payload.is_json and not keeper.leaves(fmt, payload)):
            continue
        stored = keeper.redacted(payload)
        ref, stub = keeper.put(fmt, stored)
        about = ArtifactRef.of(ref, payload.path[len(holder) :], keeper.session_id, "json")
        if (added := _reference(opened, payload.path, ref, fmt, keeper, edits, referenced)) is not None:
            about = replace(about, details=added)
        if not payload.is_json:
            about = _encoded(about, payload, token, cut.style, keeper, is_exact=stored is payload)
        refs.setdefault(holder, []).append(about)
        edits.append((*cut.span, stub if payload.is_json else utf8(stub)))
    if not refs:
        return Slimmed(opened.text)
    for path, (_, end) in _spans(opened, list(refs)).items():
        behind = last_member(source, end)
        edits.append((behind, behind, _KEY + dump_refs(refs[path], keeper.session_id)))
    found = tuple(replace(one, path=(*holder, *one.path)) for holder, some in refs.items() for one in some)
    return Slimmed(_edited(source, edits).encode(), found)


def _reference(
    opened: Opened,
    path: Path,
    ref: Ref,
    fmt: Format,
    keeper: Keeper,
    edits: list[tuple[int, int, str]],
    referenced: set[Path],
) -> str | None:
    """Add an edit that writes `details.artifactRef` into the message of a tool result, if the policy wants one and the
    message has none yet. Return what `ArtifactRef.details` says about it."""
    make = None if keeper.dry_run else keeper.policy.reference
    inside = fmt.details_path(opened.value, path) if make is not None and isinstance(opened.value, dict) else None
    if make is None or inside is None:
        return None
    message, details = inside[:-1], at(opened.value, inside)
    where = spans(opened.source, opened.start, [message, inside])
    found = where.get(inside)
    token = "" if found is None else opened.source[slice(*found)]
    if "artifactRef" in token or message in referenced:
        return None
    referenced.add(message)
    member = f'"artifactRef":{json.dumps(make(ref), ensure_ascii=True, separators=(",", ":"))}'
    if found is None:
        behind = last_member(opened.source, where[message][1])
        edits.append((behind, behind, f',"details":{{{member}}}'))
        return _ADDED
    if isinstance(details, dict) and details:
        behind = last_member(opened.source, found[1])
        edits.append((behind, behind, f",{member}"))
        return _EXTENDED
    edits.append((*found, f"{{{member}}}"))
    return token


def _without_reference(source: str, start: int, path: Path, ref: ArtifactRef) -> tuple[int, int, str]:
    """Return the edit that takes `details.artifactRef` out of a message again."""
    message = path[: path.index("content")] if "content" in path else path
    where = spans(source, start, [message, (*message, "details")])
    found = where.get((*message, "details"))
    if found is None:
        raise _edited_since(ref)
    if ref.details not in (_ADDED, _EXTENDED):
        return (*found, str(ref.details))
    is_added = ref.details == _ADDED
    last = last_value(source, where[message][0] if is_added else found[0], "details" if is_added else "artifactRef")
    if last is None:
        raise _edited_since(ref)
    return (*last[1], "")


def _encoded(
    about: ArtifactRef, payload: LinePayload, token: str, style: str | None, keeper: Keeper, *, is_exact: bool
) -> ArtifactRef:
    """Return the ref with the encoding that reproduces the token exactly; if there is none, the token itself is stored.
    If secrets were masked, the nearest style is used."""
    if isinstance(payload.value, bytes):
        if token == f'"{payload.text}"':
            return replace(about, encoding="base64", prefix=payload.prefix)
    elif (style := style or styled(payload.text, token)) is not None:
        return replace(about, encoding=style)
    if not is_exact:
        is_binary = isinstance(payload.value, bytes)
        return replace(about, encoding="base64" if is_binary else "utf8", prefix=payload.prefix if is_binary else "")
    return replace(about, encoding="raw", raw=keeper.put_raw(token).artifact_id)


def _restored(ref: ArtifactRef, kind: str, fetch: Fetch, missing: Missing | None) -> str:
    try:
        return _token(ref, fetch)
    except CoatcheckError as error:
        if missing is None:
            raise
        missing(ref, error)
        note = utf8(f"[{ref.pointer} is missing here: {ref.media_type}, {ref.size} bytes; {error.message}]")
        return note if kind == '"' else f'{{"missing":{note}}}'


def _token(ref: ArtifactRef, fetch: Fetch) -> str:
    try:
        if ref.raw is not None:
            return fetch(ref.session, ref.raw).decode()
        data = fetch(ref.session, ref.id)
        if ref.encoding == "json":
            return data.decode()
        if ref.encoding == "base64":
            return f'"{ref.prefix}{base64.b64encode(data).decode()}"'
        return STYLES[ref.encoding](data.decode("utf-8", "surrogatepass"))
    except (KeyError, UnicodeDecodeError):
        raise _edited_since(ref) from None


def _edited_since(ref: ArtifactRef) -> Damaged:
    return Damaged(f"the ref to {ref.pointer} does not match its line", hint="the line was edited after it was written")


def _refs_in(opened: Opened) -> Iterator[tuple[Path, LineRefs]]:
    """Yield the outermost objects with our key whose value has our form, even if a host wrote it."""
    holders = [path for path, one in _outermost(opened.value, ()) if REFS_KEY in one]
    for path, (begin, _) in sorted(_spans(opened, holders).items(), key=lambda item: item[1]):
        last = last_value(opened.source, begin, REFS_KEY)
        found = parse_refs(last[0]) if last else None
        if found is not None:
            yield path, found


def _spans(opened: Opened, holders: Sequence[Path]) -> dict[Path, TextSpan]:
    """The spans of these outermost objects. Parsing has already found them, unless they are in nested lists."""
    if isinstance(opened.value, dict):
        return dict.fromkeys(holders, (opened.start, opened.end))
    if opened.elements is not None:
        return {path: opened.elements[int(path[0])] for path in holders}
    return spans(opened.source, opened.start, holders)


def _outermost(value: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if isinstance(value, dict):
        yield path, value
    elif isinstance(value, list) and len(path) < _MAX_DEPTH:
        for index, one in enumerate(value):
            if isinstance(one, dict | list):
                yield from _outermost(one, (*path, index))


def _holder(value: Any, path: Path) -> Path | None:
    """The outermost object on a path, which gets the ref. None if there is none."""
    for depth in range(min(len(path), _MAX_DEPTH)):
        if isinstance(value, dict):
            return path[:depth]
        value = value[path[depth]]
    return None


def _edited(source: str, edits: Iterable[tuple[int, int, str]]) -> str:
    """Replace spans of a text, which do not overlap, by other texts."""
    pieces: list[str] = []
    done = 0
    for begin, end, new in sorted(edits):
        pieces += (source[done:begin], new)
        done = end
    return "".join((*pieces, source[done:]))
