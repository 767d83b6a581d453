"""Convert a JSON text to its slim form and back, exactly. Bytes are cut out and put back: nothing
is reformatted.

A payload is replaced by its stub: a string by a string, a container by an object. All refs are
under one key at the end of the outermost object around them, each with its path inside that object.
If a text already has a key of that name, a second one is added that marks the first as not ours: so
only what was added is ever removed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from coatcheck.errors import CoatcheckError, Damaged
from coatcheck.ids import pointer_of
from coatcheck.messages import Format
from coatcheck.messages.formats import PayloadPlace
from coatcheck.messages.paths import REFS_KEY, Path, at
from coatcheck.refs import Ref
from coatcheck.storage import TRANSCRIPT
from coatcheck.transcript.scan import (
    STYLES,
    Opened,
    TextSpan,
    edited,
    last_value,
    locate,
    spans,
    styled,
    utf8,
)

if TYPE_CHECKING:
    from coatcheck.transcript.keep import Keeper

Fetch = Callable[[str, str], bytes]
"""Returns the bytes of an artifact, given a session id and its id. Raises `NotFound`, `Damaged` and
similar errors."""

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


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """One payload that was moved out of a line: its artifact, its path in the line, and how it was
    written there.

    `encoding` says how to restore the text from the artifact: a style of JSON strings, "json" for a
    value that is stored as it was written, or "base64" after a `prefix`. If no style gives the same
    bytes, `raw` is the id of an artifact that contains them. If the line also has a
    `details.artifactRef`, `details` is what was there before: the JSON of the replaced value, "" if
    there was nothing, "+" if it was an object that got one more member."""

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
        return {
            name: one
            for name, one in record.items()
            if one is not None and (one or name != "prefix")
        }

    @classmethod
    def of(
        cls,
        ref: Ref,
        path: Path,
        session: str,
        encoding: str,
        raw: str | None = None,
        prefix: str = "",
    ) -> ArtifactRef:
        summary = ref.summary if len(ref.summary) <= _SUMMARY else ref.summary[: _SUMMARY - 1] + "…"
        return cls(
            ref.artifact_id,
            ref.size_bytes,
            ref.media_type,
            summary,
            path,
            session,
            encoding,
            raw,
            prefix,
        )


@dataclass(frozen=True, slots=True)
class LineRefs:
    """The value of our key: refs, or none if it only marks an earlier key of the same name as not
    ours."""

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
    refs: list[ArtifactRef] = []
    for one in value:
        ref = _parse_ref(one)
        if ref is None:
            return None
        refs.append(ref)
    return LineRefs(tuple(refs), frozenset(ref.session for ref in refs))


def dump_refs(refs: Sequence[ArtifactRef], session: str) -> str:
    """Return the value of our key as JSON. Without refs it only names the session."""
    records = [one.to_record() for one in refs] or [{"session": session}]
    token = json.dumps(records, ensure_ascii=False, separators=(",", ":"))
    try:
        token.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(records, separators=(",", ":"))
    return token


def is_session_id(text: str) -> bool:
    """Whether this is the id of a session that owns the payloads of a transcript."""
    return _is(_SESSION, text)


def _parse_ref(value: Any) -> ArtifactRef | None:
    try:
        ref = ArtifactRef(**value | {"path": tuple(value["path"])})
    except (TypeError, KeyError):
        return None
    steps, raw = value["path"], ref.raw
    is_valid = (
        isinstance(steps, list)
        and all(type(step) in (str, int) for step in steps)
        and type(ref.size) is int
    )
    texts = (ref.media_type, ref.summary, ref.encoding, ref.prefix, value.get("details", ""))
    is_valid = is_valid and all(isinstance(one, str) for one in texts)
    is_valid = (
        is_valid
        and _is(_DIGEST, ref.id)
        and _is(_SESSION, ref.session)
        and (raw is None or _is(_DIGEST, raw))
    )
    return ref if is_valid else None


def _is(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


_Edit = tuple[int, int, str]
"""The span of a text, and what replaces it."""

Missing = Callable[[ArtifactRef, CoatcheckError], None]
"""Called with each ref that could not be fetched, and the reason."""


class LinePayload(NamedTuple):
    """A large value in a line: `text` counts against a limit, `value` is stored (the text, the
    bytes behind base64, or a container's JSON as it was written). `number` is its line's index
    among lines that are made slim together."""

    value: str | bytes
    text: str
    place: PayloadPlace
    number: int
    is_json: bool = False

    @property
    def prefix(self) -> str:
        """The beginning of a `data:` URL up to its data, '' for any other text."""
        return self.text[: self.text.index(",") + 1] if self.text.startswith("data:") else ""


class Slimmed(NamedTuple):
    """A text without its payloads, its new refs, each with its path from the top, and whether
    `whole` restores exactly the text that was given: not if secrets were masked."""

    text: bytes
    refs: tuple[ArtifactRef, ...] = ()
    is_exact: bool = True


class _Cut(NamedTuple):
    """A payload with its span in the text of its line, its token, the token's style if known, and
    the path of the object that gets its ref."""

    payload: LinePayload
    span: TextSpan
    token: str
    style: str | None
    holder: Path


def slim(text: bytes, fmt: Format, keeper: Keeper) -> Slimmed:
    """Move the payloads of a line or a whole document to the store, see `slim_all`."""
    return slim_all([text], fmt, keeper, marks=[MARK in text])[0]


def slim_all(
    texts: Sequence[bytes],
    fmt: Format,
    keeper: Keeper,
    *,
    marks: Sequence[bool],
    document: Opened | None = None,
) -> list[Slimmed]:
    """Move the payloads of lines, or of a whole document, to the store. `whole` restores exactly
    these bytes, except for secrets that the keeper masks.

    Text that is not JSON or not UTF-8, is nested too deep, or is already slim is returned
    unchanged. Storage errors are raised. `marks` says which of them contain `MARK`. The caller may
    pass a `document` that it has opened. Each step is done for all lines, in their order, before
    the next one begins."""
    opened = _opened(texts, marks, keeper, document)
    done = list(map(Slimmed, texts))
    if not opened:
        return done
    candidates = keeper.candidates(fmt, list(opened), [line.value for line in opened.values()])
    foreign: dict[int, set[Path]] = {}
    cuts: list[_Cut] = []
    for number, line in opened.items():
        present = dict(_refs_in(line)) if marks[number] and not line.is_deep else {}
        ours = {path for path, refs in present.items() if keeper.is_ours(refs.sessions)}
        if present.keys() - ours:
            foreign[number] = present.keys() - ours
        cuts += _cuts(line, candidates[number], ours)
    cuts = _leaving(cuts, fmt, keeper)
    if cuts or foreign:
        for number, slimmed in _slimmed(opened, cuts, foreign, fmt, keeper).items():
            done[number] = slimmed
    return done


def _opened(
    texts: Sequence[bytes], marks: Sequence[bool], keeper: Keeper, document: Opened | None
) -> dict[int, Opened]:
    """Open the texts that may change, by their numbers."""
    if document is not None and [document.text] != texts:
        document = None
    opened: dict[int, Opened] = {}
    passed = keeper.passes(texts)
    for number, text in enumerate(texts):
        if passed[number] and not marks[number]:
            continue
        line = document or Opened.of(text)
        if line:
            opened[number] = line
    return opened


def whole(text: bytes, fetch: Fetch, *, missing: Missing | None = None) -> bytes:
    """Restore the text that `slim` was given. A payload that cannot be fetched raises; with
    `missing`, that function is called and the payload is replaced by a placeholder. A text without
    refs is returned unchanged."""
    opened = _marked(text)
    if opened is None:
        return text
    source = opened.source
    present = dict(_refs_in(opened))
    places = [(*holder, *ref.path) for holder, one in present.items() for ref in one.refs]
    where = spans(source, opened.start, [*present, *places])
    edits: list[_Edit] = []
    for holder, one in present.items():
        ours = last_value(source, where[holder][0], REFS_KEY)
        if ours is not None:
            edits.append((*ours[1], ""))
        for ref in one.refs:
            path = (*holder, *ref.path)
            try:
                edits += _unreferenced(opened, path, ref, is_there=path in where)
            except Damaged as error:
                if missing is None:
                    raise
                missing(ref, error)
            if path in where:
                span = where[path]
                edits.append((*span, _restored(ref, source[span[0]], fetch, missing)))
    return edited(source, edits).encode()


def _unreferenced(opened: Opened, path: Path, ref: ArtifactRef, *, is_there: bool) -> list[_Edit]:
    """Return the edits that take back what was added to a message besides the ref."""
    if not is_there:
        raise _edited_since(ref)
    if ref.details is None:
        return []
    return [_without_reference(opened.source, opened.start, path, ref)]


def refs_of(text: bytes) -> tuple[ArtifactRef, ...]:
    """Return the refs of a text in order, each with its path from the top. Empty if the text is not
    slim."""
    opened = _marked(text)
    if opened is None:
        return ()
    return tuple(
        replace(ref, path=(*holder, *ref.path))
        for holder, one in _refs_in(opened)
        for ref in one.refs
    )


def sessions_in(text: bytes) -> list[str]:
    """Return the sessions that a slim text names, in order, including those of keys without
    refs."""
    opened = _marked(text)
    if opened is None:
        return []
    return [session for _, one in _refs_in(opened) for session in sorted(one.sessions)]


def bare(text: bytes) -> bytes:
    """Return a slim text without our key, with stubs in place of payloads. Any other text is
    unchanged."""
    opened = _marked(text)
    if opened is None:
        return text
    source, start = opened.source, opened.start
    holders = [holder for holder, _ in _refs_in(opened)]
    edits: list[_Edit] = []
    for begin, _ in spans(source, start, holders).values():
        ours = last_value(source, begin, REFS_KEY)
        if ours is not None:
            edits.append((*ours[1], ""))
    return edited(source, edits).encode()


def with_refs(text: bytes, refs: Sequence[ArtifactRef], session_id: str) -> bytes:
    """Add refs to a line, which is a non-empty object, for stubs that it already contains. `whole`
    then restores those payloads like any other."""
    opened = Opened.of(text)
    if opened is None or not isinstance(opened.value, dict) or not opened.value or opened.is_deep:
        return text
    source, start = opened.source, opened.start
    earlier = dict(_refs_in(opened)).get(()) if MARK in text else None
    last = last_value(source, start, REFS_KEY) if earlier is not None else None
    if last is not None:
        source = edited(source, [(*last[1], "")])
    behind = _last_member(source, spans(source, start, [()])[()][1])
    before = earlier.refs if earlier is not None else ()
    return edited(
        source, [(behind, behind, _KEY + dump_refs([*before, *refs], session_id))]
    ).encode()


def _marked(text: bytes) -> Opened | None:
    """Open a text that may be slim."""
    opened = Opened.of(text) if MARK in text else None
    return None if opened is None or opened.is_deep else opened


def _cuts(line: Opened, candidates: Sequence[LinePayload], ours: Container[Path]) -> list[_Cut]:
    """Return the payloads of a line with their spans, in text order. Objects at the paths in `ours`
    are slim already and left alone."""
    free: list[tuple[LinePayload, Path]] = []
    for payload in candidates:
        holder = _holder(line.value, payload.place.path)
        if holder is not None and holder not in ours:
            free.append((payload, holder))
    if not free:
        return []
    located = locate(line, [payload.place[:2] for payload, _ in free])
    cuts: list[_Cut] = []
    for (payload, holder), found in zip(free, located, strict=True):
        if found is None:
            continue
        span, style = found
        token = line.source[slice(*span)]
        if len(token) < _LEAST_GAIN:
            continue
        if payload.is_json:
            payload = payload._replace(value=token, text=token)
        cuts.append(_Cut(payload, span, token, style, holder))
    return sorted(cuts, key=lambda cut: cut.span)


def _leaving(cuts: Sequence[_Cut], fmt: Format, keeper: Keeper) -> list[_Cut]:
    """Return the cuts that are over the policy. For strings, the keeper has decided that before."""
    containers = [cut.payload for cut in cuts if cut.payload.is_json]
    decided = iter(keeper.leaving(fmt, containers))
    return [cut for cut in cuts if not cut.payload.is_json or next(decided)]


@dataclass(slots=True)
class _Draft:
    """A line that becomes slim: the new refs by the path of the object that gets them, and the
    edits. `referenced` are the paths of messages that got a `details.artifactRef`."""

    line: Opened
    refs: dict[Path, list[ArtifactRef]]
    edits: list[_Edit] = field(default_factory=list)
    referenced: set[Path] = field(default_factory=set)
    is_exact: bool = True

    def finished(self, session_id: str) -> Slimmed:
        """Add our keys and apply the edits."""
        for path, (_, end) in _spans(self.line, list(self.refs)).items():
            behind = _last_member(self.line.source, end)
            self.edits.append((behind, behind, _KEY + dump_refs(self.refs[path], session_id)))
        from_top: list[ArtifactRef] = []
        for holder, refs in self.refs.items():
            from_top += [replace(ref, path=(*holder, *ref.path)) for ref in refs]
        text = edited(self.line.source, self.edits).encode()
        return Slimmed(text, tuple(from_top), self.is_exact)


def _slimmed(
    opened: dict[int, Opened],
    cuts: Sequence[_Cut],
    foreign: dict[int, set[Path]],
    fmt: Format,
    keeper: Keeper,
) -> dict[int, Slimmed]:
    """Store the payloads of lines, and return each line that changes, by its number."""
    if foreign and not keeper.dry_run:
        keeper.own_session()  # the lines will name it, even if nothing is put into it
    stored = [keeper.redacted(one.payload) for one in cuts]
    kept = keeper.put(fmt, stored)
    session_id = keeper.session_id
    drafts: dict[int, _Draft] = {}
    for number, line in opened.items():
        drafts[number] = _Draft(line, {path: [] for path in foreign.get(number, ())})
    for cut, payload, (ref, stub) in zip(cuts, stored, kept, strict=True):
        draft = drafts[payload.number]
        is_exact = payload is cut.payload
        about = ArtifactRef.of(ref, payload.place.path[len(cut.holder) :], session_id, "json")
        if not keeper.dry_run:
            about = replace(about, details=_reference(draft, cut, ref, fmt, keeper))
        if not payload.is_json:
            about = _encoded(about, cut, keeper, is_exact=is_exact)
        draft.is_exact = draft.is_exact and is_exact
        draft.refs.setdefault(cut.holder, []).append(about)
        draft.edits.append((*cut.span, stub if payload.is_json else utf8(stub)))
    return {number: one.finished(session_id) for number, one in drafts.items() if one.refs}


def _last_member(text: str, end: int) -> int:
    """Return where the last member of an object ends, given where the object ends."""
    at = end - 1
    while text[at - 1] in " \t\n\r":
        at -= 1
    return at


def _reference(draft: _Draft, cut: _Cut, ref: Ref, fmt: Format, keeper: Keeper) -> str | None:
    """Let the policy make the object for a payload, and add an edit that writes it as
    `details.artifactRef` into the message of a tool result, if the message has none yet. Return
    what `ArtifactRef.details` says about it, None if nothing is written."""
    make = keeper.policy.reference
    value, source = draft.line.value, draft.line.source
    if make is None:
        return None
    made = make(ref, _part_of(fmt, value, cut.payload.place.path))
    inside = fmt.details_path(value, cut.payload.place.path) if isinstance(value, dict) else None
    if inside is None:
        return None
    message, details = inside[:-1], at(value, inside)
    where = spans(source, draft.line.start, [message, inside])
    found = where.get(inside)
    token = "" if found is None else source[slice(*found)]
    if "artifactRef" in token or message in draft.referenced:
        return None
    draft.referenced.add(message)
    member = f'"artifactRef":{json.dumps(made, ensure_ascii=True, separators=(",", ":"))}'
    if found is None:
        behind = _last_member(source, where[message][1])
        draft.edits.append((behind, behind, f',"details":{{{member}}}'))
        return _ADDED
    if isinstance(details, dict) and details:
        behind = _last_member(source, found[1])
        draft.edits.append((behind, behind, f",{member}"))
        return _EXTENDED
    draft.edits.append((*found, f"{{{member}}}"))
    return token


def _part_of(fmt: Format, value: Any, path: Path) -> str:
    """Return what a payload belongs to: "tool-result", "tool-call", or "message" for anything
    else."""
    base, message = fmt.message_around(value, path) or ((), {})
    inside = path[len(base) :]
    if any(inside[: len(call.path)] == call.path for call in fmt.calls(message)):
        return "tool-call"
    results = (*fmt.results(message), *fmt.outputs(message))
    is_result = any(inside[: len(one.path)] == one.path for one in results)
    return "tool-result" if is_result else "message"


def _without_reference(
    source: str, start: int, path: Path, ref: ArtifactRef
) -> tuple[int, int, str]:
    """Return the edit that takes `details.artifactRef` out of a message again."""
    message = path[: path.index("content")] if "content" in path else path
    where = spans(source, start, [message, (*message, "details")])
    found = where.get((*message, "details"))
    if found is None:
        raise _edited_since(ref)
    if ref.details not in (_ADDED, _EXTENDED):
        return (*found, str(ref.details))
    is_added = ref.details == _ADDED
    last = last_value(
        source,
        where[message][0] if is_added else found[0],
        "details" if is_added else "artifactRef",
    )
    if last is None:
        raise _edited_since(ref)
    return (*last[1], "")


def _encoded(about: ArtifactRef, cut: _Cut, keeper: Keeper, *, is_exact: bool) -> ArtifactRef:
    """Return the ref with the encoding that reproduces the token exactly; if there is none, the
    token itself is stored. If secrets were masked, the nearest style is used."""
    payload, is_binary = cut.payload, isinstance(cut.payload.value, bytes)
    if is_binary and (cut.token == f'"{payload.text}"' or not is_exact):
        return replace(about, encoding="base64", prefix=payload.prefix)
    style = None if is_binary else cut.style or styled(payload.text, cut.token)
    if style is not None or not is_exact:
        return replace(about, encoding=style or "utf8")
    return replace(about, encoding="raw", raw=keeper.put_raw(cut.token).artifact_id)


def _restored(ref: ArtifactRef, kind: str, fetch: Fetch, missing: Missing | None) -> str:
    try:
        return _token(ref, fetch)
    except CoatcheckError as error:
        if missing is None:
            raise
        missing(ref, error)
        note = utf8(
            f"[{ref.pointer} is missing here: {ref.media_type}, {ref.size} bytes; {error.message}]"
        )
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
    return Damaged(
        f"the ref to {ref.pointer} does not match its line",
        hint="the line was edited after it was written",
    )


def _refs_in(opened: Opened) -> Iterator[tuple[Path, LineRefs]]:
    """Yield the outermost objects with our key whose value has our form, even if a host wrote
    it."""
    holders = [path for path, one in _outermost(opened.value, ()) if REFS_KEY in one]
    for path, (begin, _) in sorted(_spans(opened, holders).items(), key=lambda item: item[1]):
        last = last_value(opened.source, begin, REFS_KEY)
        found = parse_refs(last[0]) if last else None
        if found is not None:
            yield path, found


def _spans(opened: Opened, holders: Sequence[Path]) -> dict[Path, TextSpan]:
    """The spans of these outermost objects. Parsing has already found them, unless they are in
    nested lists."""
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
