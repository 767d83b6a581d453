"""The parts of a message that pruning may replace, besides results: long arguments of calls,
pictures and documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from coatcheck.messages import Format, Message
from coatcheck.messages.content import arguments_of, attachments, dumped
from coatcheck.messages.paths import Path, at, replaced
from coatcheck.parts import Part
from coatcheck.parts import write as write_part

Write = Callable[..., Message]
"""Called with a message and a `text`. Returns a copy of the message with that text in one place."""

_SMALL_ARGUMENTS: Final = 600  # characters of arguments that are left alone
_SMALL_ARGUMENT: Final = 300  # characters of one argument that stays in view


@dataclass(frozen=True, slots=True)
class Payload:
    """A part of a message that may be replaced: its content, what a placeholder calls it, and
    how to write a text in its place."""

    content: Any
    what: str
    write: Write
    tool: str | None = None
    call_id: str = ""


def arguments_in(message: Message, fmt: Format) -> Iterator[Payload]:
    """Yield the long arguments of calls with many of them."""
    for call in fmt.calls(message):
        found = arguments_of(message, call)
        if found is None or len(dumped(found[1])) <= _SMALL_ARGUMENTS:
            continue
        for content, write in _long_arguments(*found):
            yield Payload(content, "an older argument", write, call.name, call.id)


def attachments_in(message: Message) -> Iterator[Payload]:
    for path, part in attachments(message):
        write = partial(_with_text, path=path, convert=partial(_with_stub, part))
        yield Payload(part.value, "an older attachment", write)


def _long_arguments(path: Path, value: Any) -> Iterator[tuple[str, Write]]:
    """Yield the long arguments of a call as texts with lines, and how to replace each. Short ones,
    such as the path of a file, stay in view."""
    arguments = _decoded(value) if isinstance(value, str) else value
    if not isinstance(arguments, dict):
        yield _readable(value), partial(_with_text, path=path, convert=str)
        return
    for name, argument in arguments.items():
        if len(dumped(argument)) <= _SMALL_ARGUMENT:
            continue
        if isinstance(value, str):
            yield _readable(argument), partial(_with_encoded_argument, path=path, name=name)
        else:
            yield _readable(argument), partial(_with_text, path=(*path, name), convert=str)


def _decoded(text: str) -> Any:
    """Return the value of a JSON text, or None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _readable(value: object) -> str:
    """Return a value as text with lines."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)


def _with_encoded_argument(message: Message, text: str, path: Path, name: str) -> Message:
    """Write a text in place of one argument in arguments that are a string of JSON."""
    arguments = json.loads(at(message, path)) | {name: text}
    return dict(replaced(message, path, json.dumps(arguments, ensure_ascii=False)))


def _with_text(message: Message, text: str, path: Path, convert: Callable[[str], Any]) -> Message:
    """Write a text, converted to what belongs there, into one place of a message."""
    return dict(replaced(message, path, convert(text)))


def _with_stub(part: Part, text: str) -> Any:
    return write_part(part.with_text(text))
