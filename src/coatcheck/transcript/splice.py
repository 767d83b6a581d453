"""One JSON text and its slim form, exact both ways. Bytes are cut out and put back: nothing is written anew.

A payload's place holds the stub: as a string where a string was, as an object where a container was. The refs stand
together under one key at the end of the outermost object around them, each with its path inside that object. What
only looks like our key gets one that says so behind it: what is taken off is always what was put on.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final, NamedTuple, Protocol

from coatcheck.errors import CoatcheckError, Damaged
from coatcheck.refs import Ref
from coatcheck.transcript.formats import Format, Path
from coatcheck.transcript.formats.values import REFS_KEY, at
from coatcheck.transcript.refs import ArtifactRef, Holding, parsed, written
from coatcheck.transcript.scan import Opened, Span, last_member, last_value, parse, spans
from coatcheck.transcript.strings import STYLES, binary, styled, tokens_of, utf8

Fetch = Callable[[str, str], bytes]
"""The bytes of an artifact, from a session's id and its own. Raises `NotFound`, `Damaged` and their kin."""

Missing = Callable[[ArtifactRef, CoatcheckError], None]
"""Is told what could not be had, and why."""

_MARK: Final = REFS_KEY.encode()
_KEY: Final = f',"{REFS_KEY}":'
_LEAST_GAIN: Final = 512  # what is shorter than its stub and its ref would be stays where it is
_DEEPEST: Final = 64
_HEAD: Final = 64  # characters by which a token is looked for
_TRIES: Final = 16
_NOWHERE: Final = "90631724905817263"  # the beginning of numbers that stand in no text but where we put them


class Payload(NamedTuple):
    """Something large in a line: `text` is what counts against a limit, `value` what is stored (the text, the bytes
    behind base64, or a container's JSON as it was written), `path` where it stands in the parsed `line`."""

    value: str | bytes
    text: str
    path: Path
    line: Any
    is_json: bool = False


class Keeps(Protocol):
    """Who takes payloads in, and judges what is one. `Keeper` puts them into a store."""

    @property
    def session_id(self) -> str:
        """The session through which the transcript holds what it refers to."""
        ...

    @property
    def least(self) -> int:
        """What has fewer characters than this stays, whatever it is."""
        ...

    def passes(self, text: bytes) -> bool:
        """Whether nothing in a text can be over the policy, told without a look inside."""
        ...

    @property
    def bulk(self) -> int:
        """A container of so many characters in small parts may be over the policy."""
        ...

    def learn(self, known: Format, line: Any) -> None:
        """See a parsed line, before its payloads are asked about."""
        ...

    def leaves(self, known: Format, payload: Payload) -> bool:
        """Whether a payload is over the policy."""
        ...

    def put(self, known: Format, payload: Payload) -> tuple[Ref, str]:
        """Store it; its ref, and the stub that takes its place."""
        ...

    def put_raw(self, token: str) -> Ref:
        """Store how something was written, where that cannot be told in short."""
        ...

    def hold(self) -> None:
        """See to it that the store knows the session, though nothing may be put into it."""
        ...

    def is_ours(self, sessions: Iterable[str]) -> bool:
        """Whether these are sessions of transcripts that this store knows."""
        ...


@dataclass(frozen=True, slots=True)
class Slimmed:
    """A text without its payloads, and the refs that it got, each with its path from the top."""

    text: bytes
    refs: tuple[ArtifactRef, ...] = ()


def slim(
    text: bytes, known: Format, keeper: Keeps, *, opened: Opened | None = None, marked: bool | None = None
) -> Slimmed:
    """A text with its payloads stored: a line, or a whole document. `whole` gives back exactly these bytes.

    What is no JSON, nested too deep, or not UTF-8 stays as it is, and so does what is slim already. Raises what storing
    raises. A caller may know the text `opened`, and whether our key stands anywhere in it."""
    if marked is None:
        marked = _MARK in text
    if keeper.passes(text) and not marked:
        return Slimmed(text)
    opened = opened or Opened.of(text)
    if opened is None:
        return Slimmed(text)
    value = opened.value
    keeper.learn(known, value)
    held = dict(_holdings(opened)) if marked else {}
    ours = {path for path, holding in held.items() if keeper.is_ours(holding.sessions)} if held else set()
    payloads = _payloads(known, value, keeper)
    if ours or isinstance(value, list):
        payloads = [one for one in payloads if _holder(value, one.path) not in (None, *ours)]
    cuts = _cuts(opened, payloads) if payloads else []
    foreign = held.keys() - ours
    if not cuts and not foreign:
        return Slimmed(text)
    return _slimmed(opened, cuts, foreign, known, keeper)


def whole(text: bytes, fetch: Fetch, *, missing: Missing | None = None) -> bytes:
    """The text that `slim` was given. What cannot be fetched raises; with `missing`, that is told, and a placeholder
    stands in its place. A text without refs is its own whole."""
    opened = _marked(text)
    if opened is None:
        return text
    source, start = opened.source, opened.start
    held = dict(_holdings(opened))
    places = [(*holder, *ref.path) for holder, holding in held.items() for ref in holding.refs]
    where = spans(source, start, [*held, *places])
    edits: list[tuple[int, int, str]] = []
    for holder, holding in held.items():
        last = last_value(source, where[holder][0], REFS_KEY)
        edits += [(*last[1], "")] if last else []
        for ref in holding.refs:
            span = where.get((*holder, *ref.path))
            if span is not None:
                edits.append((*span, _restored(ref, source[span[0]], fetch, missing)))
            elif missing is None:
                raise _edited_since(ref)
            else:
                missing(ref, _edited_since(ref))
    return _edited(source, edits).encode()


def refs_of(text: bytes) -> tuple[ArtifactRef, ...]:
    """The refs of a slim text, in order, each with its path from the top; none where it is not slim."""
    opened = _marked(text)
    if opened is None:
        return ()
    held = _holdings(opened)
    return tuple(replace(ref, path=(*holder, *ref.path)) for holder, holding in held for ref in holding.refs)


def sessions_in(text: bytes) -> list[str]:
    """The sessions that a slim text names, in order: those of its refs, and those that only say what is not ours."""
    opened = _marked(text)
    return [] if opened is None else [one for _, held in _holdings(opened) for one in sorted(held.sessions)]


def bare(text: bytes) -> bytes:
    """A slim text without our key, stubs where payloads were. Any other text is as it was."""
    opened = _marked(text)
    if opened is None:
        return text
    source, start = opened.source, opened.start
    holders = [holder for holder, _ in _holdings(opened)]
    ours = (last_value(source, begin, REFS_KEY) for begin, _ in spans(source, start, holders).values())
    return _edited(source, [(*last[1], "") for last in ours if last]).encode()


def holding(text: bytes, refs: Sequence[ArtifactRef], session_id: str) -> bytes:
    """A line, which is an object with members, with refs to payloads whose stubs it was given with. `whole` puts them
    in like any other."""
    opened = Opened.of(text)
    if opened is None or not isinstance(opened.value, dict) or not opened.value:
        return text
    source, start = opened.source, opened.start
    earlier = dict(_holdings(opened)).get(()) if _MARK in text else None
    if earlier is not None and (last := last_value(source, start, REFS_KEY)) is not None:
        source = _edited(source, [(*last[1], "")])
    behind = last_member(source, spans(source, start, [()])[()][1])
    known = earlier.refs if earlier is not None else ()
    return _edited(source, [(behind, behind, _KEY + written([*known, *refs], session_id))]).encode()


def _marked(text: bytes) -> Opened | None:
    """A text that may be slim, opened."""
    return Opened.of(text) if _MARK in text else None


def _payloads(known: Format, value: Any, keeper: Keeps) -> list[Payload]:
    """Strings that are over the policy, and containers that may be: only their raw text decides."""
    payloads = []
    for path in known.places(value, keeper.least, keeper.bulk):
        found = at(value, path)
        if not isinstance(found, str):
            payloads.append(Payload("", "", path, value, is_json=True))
            continue
        carried = binary(found)
        payload = Payload(found if carried is None else carried[1], found, path, value)
        if keeper.leaves(known, payload):
            payloads.append(payload)
    return payloads


_Where = tuple[Span, str | None]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A payload with its span in the text, and the style of that where it is known."""

    payload: Payload
    span: Span
    style: str | None


def _cuts(opened: Opened, payloads: Sequence[Payload]) -> list[_Cut]:
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


def _in_order(payloads: Iterable[Payload], found: Iterable[_Where | None], base: int) -> list[_Cut]:
    cuts = [
        _Cut(one, (base + where[0][0], base + where[0][1]), where[1])
        for one, where in zip(payloads, found, strict=True)
        if where is not None
    ]
    return sorted(cuts, key=lambda cut: cut.span)


def _located(source: str, value: Any, start: int, paths: Sequence[Path]) -> Sequence[_Where | None]:
    """Where in a text the values at these paths stand. They are found by writing each as most writers would, which is
    proved by numbers in their places: where the parser finds those is where they stood. Else a scan of everything
    tells."""
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
    """Where a token stands from a place on, -1 where it does not. By its first characters: a search for all of it
    reads it twice before it begins."""
    head = token[:_HEAD]
    for _ in range(_TRIES):
        start = text.find(head, start)
        if start < 0 or text.startswith(token, start):
            return start
        start += 1
    return text.find(token, start)


def _slimmed(opened: Opened, cuts: Iterable[_Cut], foreign: Iterable[Path], known: Format, keeper: Keeps) -> Slimmed:
    edits: list[tuple[int, int, str]] = []
    refs: dict[Path, list[ArtifactRef]] = {path: [] for path in foreign}
    source, value = opened.source, opened.value
    if refs:
        keeper.hold()
    for cut in cuts:
        payload, token = cut.payload, source[slice(*cut.span)]
        if payload.is_json:
            payload = payload._replace(value=token, text=token)
        holder = _holder(value, payload.path)
        if holder is None or len(token) < _LEAST_GAIN or (payload.is_json and not keeper.leaves(known, payload)):
            continue
        ref, stub = keeper.put(known, payload)
        about = ArtifactRef.of(ref, payload.path[len(holder) :], keeper.session_id, "json")
        if not payload.is_json:
            about = _encoded(about, payload, token, cut.style, keeper)
        refs.setdefault(holder, []).append(about)
        edits.append((*cut.span, stub if payload.is_json else utf8(stub)))
    if not refs:
        return Slimmed(opened.text)
    for path, (_, end) in _spans(opened, list(refs)).items():
        behind = last_member(source, end)
        edits.append((behind, behind, _KEY + written(refs[path], keeper.session_id)))
    found = tuple(replace(one, path=(*holder, *one.path)) for holder, some in refs.items() for one in some)
    return Slimmed(_edited(source, edits).encode(), found)


def _encoded(about: ArtifactRef, payload: Payload, token: str, style: str | None, keeper: Keeps) -> ArtifactRef:
    """The ref with how its place is made again from what is stored. What is made is the very token, or that is kept."""
    if isinstance(payload.value, bytes):
        if token == f'"{payload.text}"':
            prefix = payload.text[: payload.text.index(",") + 1] if payload.text.startswith("data:") else ""
            return replace(about, encoding="base64", prefix=prefix)
    elif (style := style or styled(payload.text, token)) is not None:
        return replace(about, encoding=style)
    return replace(about, encoding="raw", raw=keeper.put_raw(token).artifact_id)


def _restored(ref: ArtifactRef, kind: str, fetch: Fetch, missing: Missing | None) -> str:
    try:
        return _token(ref, fetch)
    except CoatcheckError as error:
        if missing is None:
            raise
        missing(ref, error)
        said = utf8(f"[{ref.pointer} is missing here: {ref.media_type}, {ref.size} bytes; {error.message}]")
        return said if kind == '"' else f'{{"missing":{said}}}'


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
    return Damaged(f"the ref to {ref.pointer} does not fit its line", hint="the line was edited since it was written")


def _holdings(opened: Opened) -> Iterator[tuple[Path, Holding]]:
    """The outermost objects that have our key with what we write there, whoever wrote it."""
    holders = [path for path, one in _outermost(opened.value, ()) if REFS_KEY in one]
    for path, (begin, _) in sorted(_spans(opened, holders).items(), key=lambda item: item[1]):
        last = last_value(opened.source, begin, REFS_KEY)
        holding = parsed(last[0]) if last else None
        if holding is not None:
            yield path, holding


def _spans(opened: Opened, holders: Sequence[Path]) -> dict[Path, Span]:
    """Where these objects stand, each an outermost one: parsing has shown it but for what is nested in lists."""
    if isinstance(opened.value, dict):
        return dict.fromkeys(holders, (opened.start, opened.end))
    if opened.elements is not None:
        return {path: opened.elements[int(path[0])] for path in holders}
    return spans(opened.source, opened.start, holders)


def _outermost(value: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    if isinstance(value, dict):
        yield path, value
    elif isinstance(value, list) and len(path) < _DEEPEST:
        for index, one in enumerate(value):
            if isinstance(one, dict | list):
                yield from _outermost(one, (*path, index))


def _holder(value: Any, path: Path) -> Path | None:
    """The outermost object on the way to a place: the one that gets the ref. None where there is none."""
    for depth in range(min(len(path), _DEEPEST)):
        if isinstance(value, dict):
            return path[:depth]
        value = value[path[depth]]
    return None


def _edited(source: str, edits: Iterable[tuple[int, int, str]]) -> str:
    """A text with other texts in place of spans that do not overlap."""
    pieces: list[str] = []
    done = 0
    for begin, end, new in sorted(edits):
        pieces += (source[done:begin], new)
        done = end
    return "".join((*pieces, source[done:]))
