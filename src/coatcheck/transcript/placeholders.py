"""Placeholders: one line of JSON in place of an old payload, with a pointer to it.

A placeholder is a pure function of its payload, so a prompt that is pruned again has the same
bytes. It is made before anything is stored; only the payloads of placeholders that a prompt really
contains are put.

Behind a placeholder is the exact result, even if the conversation shows a shorter form of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from coatcheck.checks import is_whole
from coatcheck.errors import AmbiguousPointer, CoatcheckError, StoreError
from coatcheck.externalize.originals import original_of
from coatcheck.externalize.policy import Policy, configured
from coatcheck.externalize.shorter import expanded, is_reference
from coatcheck.externalize.storing import Prepared, prepared, put_prepared
from coatcheck.externalize.stub import is_stub, own_tag, placeholder, pointer_in_stub
from coatcheck.ids import digest_of, parse_pointer, pointer_of
from coatcheck.intake import About
from coatcheck.messages.content import plain_text
from coatcheck.previews.excerpts import line as one_line
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.session import Session
from coatcheck.truncation import INCOMPLETE, Truncation, find_truncation, parse_truncation
from coatcheck.values import byte_size

OLD_RESULT: Final = "an older result"
_POINTER: Final = re.compile(r"(?<![0-9A-Za-z:])art:[0-9a-f]{12,64}(?![0-9a-f])")
_PAGE_HEAD: Final = re.compile(r"\[(art:[0-9a-f]{12,64})[;\]#]")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """The replacement for a payload. `payload` must be put before the pointer resolves; it is None
    if it is stored already. `artifact_id` is the full id, or the part of it that the pointer
    has."""

    what: str
    size_bytes: int
    lines: int | None
    artifact_id: str
    pointer: str | None
    payload: Prepared | None = None
    tool: str | None = None
    call_id: str | None = None
    pinned: bool = False
    cut: Truncation | None = None

    def text(self, read_tool: str | None) -> str:
        """The line of JSON that the model is shown."""
        return placeholder(
            self.what, self.pointer, self.size_bytes, self.lines, read_tool, cut=self.cut
        )


class Placeholders:
    """Makes placeholders for payloads, and puts the payloads into the session, with secrets masked
    if `redact` or the settings of the store ask for it."""

    def __init__(
        self,
        session: Session | None,
        pinned: Iterable[Ref | str] | None,
        read_tool: str | None,
        redact: Literal["store"] | None = None,
    ) -> None:
        self._session = session
        self.policy = Policy() if session is None else configured(session.store.settings, redact)
        self.read_tool = read_tool
        self._pinned = None if pinned is None else tuple(_prefix(one) for one in pinned)
        self.failures: list[str] = []

    def of(
        self, content: object, what: str, *, tool: str | None, call_id: str | None
    ) -> Placeholder | None:
        """Return the placeholder of a payload. None if the payload claims to be a stub, but its
        pointer does not resolve in this session, or if it refers to another result and the exact
        result was not stored."""
        text = plain_text(content)
        if text is not None and is_stub(text):
            return self._of_stub(text, what)
        if text is not None and is_reference(text):
            return self._of_reference(text, what)
        if text is None:
            return self._of_value(content, what, tool, call_id)
        text = expanded(text) or text
        return self._of_page(text) or self._of_value(text, what, tool, call_id)

    def _of_value(
        self, value: object, what: str, tool: str | None, call_id: str | None
    ) -> Placeholder:
        """Return the placeholder of a value that must be stored itself."""
        payload = prepared(value, self.policy)
        data = payload.encoded.data
        artifact_id = digest_of(data)
        ref = self._ref(pointer_of(artifact_id, 64)) if self._pinned is None else None
        return Placeholder(
            what,
            size_bytes=len(data),
            lines=data.count(b"\n") + 1 if isinstance(payload.value, str) else None,
            artifact_id=artifact_id,
            pointer=None if self._session is None else pointer_of(artifact_id),
            payload=payload,
            tool=tool,
            call_id=call_id,
            pinned=self._is_pinned(artifact_id, ref),
            cut=find_truncation(payload.text) if what == OLD_RESULT else None,
        )

    def _is_pinned(self, artifact_id: str, ref: Ref | None) -> bool:
        """Whether an artifact must stay: the caller named it, or, if the caller named none, it is
        pinned in the session."""
        if self._pinned is None:
            return ref is not None and ref.pinned
        return any(
            artifact_id.startswith(one) or one.startswith(artifact_id) for one in self._pinned
        )

    def put(self, made: Placeholder) -> Placeholder:
        """Store the payload of a placeholder. If the store fails, the placeholder has no
        pointer."""
        if made.payload is None or self._session is None:
            return made
        about = About(tool=made.tool, call_id=made.call_id)
        try:
            ref = self._ref(pointer_of(made.artifact_id, 64))
            ref = ref or put_prepared(self._session, made.payload, about, self.policy)
        except CoatcheckError as error:
            self.failures.append(str(error))
            return replace(made, pointer=None, payload=None)
        return replace(made, pointer=ref.pointer, payload=None)

    def lines(self, pointers: Iterable[str], most: int) -> tuple[str, ...]:
        """Describe the first of these artifacts that the session has, one line each, at most
        `most`."""
        found: list[str] = []
        for pointer in pointers:
            if len(found) == most:
                break
            ref = self._ref(pointer)
            if ref is not None:
                found.append(line_of(ref, quoted=False))
            elif self._session is None:
                found.append(pointer)
        return tuple(found)

    def _of_stub(self, text: str, what: str) -> Placeholder | None:
        pointer = pointer_in_stub(text)
        ref = self._ref(pointer) if pointer is not None else None
        if pointer is None or (self._session is not None and ref is None):
            return None
        stub = json.loads(text)
        size, lines = stub.get("size_bytes"), stub.get("lines")
        prefix = parse_pointer(pointer).prefix
        return Placeholder(
            what,
            size_bytes=size if is_whole(size) else 0,
            lines=lines if is_whole(lines) else None,
            artifact_id=prefix,
            pointer=pointer,
            pinned=self._is_pinned(prefix, ref),
            cut=parse_truncation(str(stub.get("stub"))),
        )

    def _of_reference(self, text: str, what: str) -> Placeholder | None:
        """A shorter form is not stored: its placeholder points at the exact result."""
        ref = None if self._session is None else original_of(self._session, text, self.policy)
        if ref is None:
            return None
        pinned = self._is_pinned(ref.artifact_id, ref)
        return Placeholder(what, ref.size_bytes, None, ref.artifact_id, ref.pointer, pinned=pinned)

    def _of_page(self, text: str) -> Placeholder | None:
        """A page from our own tools is not stored: its placeholder points at the artifact that was
        read."""
        match = _PAGE_HEAD.search(text[:4_000]) if self._session is not None else None
        if match is None or self._session is None or self._ref(match[1]) is None:
            return None
        if own_tag(self._session.store, text) is None:
            return None
        header = text[match.start() :].partition("\n")[0]
        cut = parse_truncation(header[header.find(INCOMPLETE) :]) if INCOMPLETE in header else None
        return Placeholder(
            "an older page of an artifact",
            byte_size(text),
            None,
            parse_pointer(match[1]).prefix,
            match[1],
            cut=cut,
        )

    def _ref(self, pointer: str) -> Ref | None:
        if self._session is None:
            return None
        try:
            return self._session.ref(pointer)
        except (AmbiguousPointer, StoreError):
            return None


def line_of(ref: Ref, limit: int = 80, *, quoted: bool = True) -> str:
    """Describe an artifact in one line: pointer, kind, size, tool, and its name or summary. Those
    are untrusted, so they are quoted as a JSON string, unless the line goes into one anyway."""
    label = one_line(mask(": ".join(filter(None, (ref.tool, ref.name or ref.summary)))), limit)
    about = json.dumps(label, ensure_ascii=False) if quoted and label else label
    return f"{ref.pointer} {ref.kind} {ref.size_bytes:,} bytes {about}".rstrip()


def pointers_in(text: str) -> list[str]:
    """Return the pointers in a text, each once, the last one first."""
    return list(dict.fromkeys(reversed(_POINTER.findall(text)))) if "art:" in text else []


def _prefix(one: Ref | str) -> str:
    if isinstance(one, Ref):
        return one.artifact_id
    return parse_pointer(one).prefix if one.startswith("art:") else one
