"""Folding: whole turns leave a prompt, and one bounded note says what they were and where they are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.tokens import TokenCounter
from coatcheck.transcript import shapes
from coatcheck.transcript.formats import Format, Message
from coatcheck.transcript.placeholders import STORED, Placeholders
from coatcheck.transcript.weight import weigh

_POINTER: Final = re.compile(r"(?<![0-9A-Za-z:])art:[0-9a-f]{12,64}(?![0-9a-f])")
_MOST: Final = 16
_LONGEST: Final = "art:" + "a7f3c9e1b5d2" + "8e4b6" * 4  # a pointer that costs more than others
_SHARE: Final = 16  # the part of a budget that a note may take


@dataclass(frozen=True, slots=True)
class Fold:
    """The messages that are left out, by number, and how many tokens the note in their place may take."""

    numbers: tuple[int, ...]
    room: int


def room_for_note(known: Format, like: Message, max_tokens: int, *, read_tool: str | None, count: TokenCounter) -> int:
    """How many tokens a note may take. 0 where the format has no conversation that could hold one."""
    bare = shapes.note(known, like, note_text(99_999, _LONGEST, (), 99_999, read_tool))
    return 0 if bare is None else max(weigh(bare, count), max_tokens // _SHARE)


def note_of(
    fold: Fold,
    messages: Sequence[Message],
    known: Format,
    *,
    placeholders: Placeholders,
    count: TokenCounter,
    store: bool = True,
) -> tuple[Message, str | None]:
    """The note of a fold, and the pointer of what it left out. That is stored, a message a line."""
    lines = "\n".join(shapes.dumped(messages[number]) for number in fold.numbers)
    whole = placeholders.of(lines, "earlier messages", tool=None, call_id=None)
    if whole is not None and store:
        whole = placeholders.put(whole)
    pointer = whole.pointer if whole is not None else None
    found = pointers_in(lines)
    listed = placeholders.lines(found, _MOST)
    while True:
        said = note_text(len(fold.numbers), pointer, listed, len(found) - len(listed), placeholders.read_tool)
        note = shapes.note(known, messages[fold.numbers[0]], said)
        assert note is not None, "a format without a conversation is not folded"
        if not listed or weigh(note, count) <= fold.room:
            return note, pointer
        listed = listed[: len(listed) // 2]


def note_text(number: int, pointer: str | None, listed: Sequence[str], others: int, read_tool: str | None) -> str:
    kept = STORED if pointer else "not stored"
    said: dict[str, Any] = {"note": f"{number} earlier messages are left out of this prompt, {kept}"}
    if pointer:
        said["artifact"] = pointer
    if listed:
        said["artifacts"] = list(listed)
    if others:
        said["others"] = others
    if pointer and read_tool:
        said["hint"] = f"{read_tool} reads them, a message a line; grep finds a word"
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))


def pointers_in(text: str) -> list[str]:
    """The pointers that a text names, each once, the last named first."""
    return list(dict.fromkeys(reversed(_POINTER.findall(text)))) if "art:" in text else []
