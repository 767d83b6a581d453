"""The child process for heavy reads: a JSONPath, an outline, a diff, a grep or a part of a JSON document.

The parent serves the contents piece by piece. Nothing is kept between calls but the process, and not even that if a
call took much memory.
"""

from __future__ import annotations

import base64
import gc
import mmap
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from coatcheck.content import Content
from coatcheck.errors import CoatcheckError
from coatcheck.ids import digest_of
from coatcheck.media import JSON, TEXT
from coatcheck.reading import diff, grep, json_content, jsonpath
from coatcheck.reading.page import Request
from coatcheck.reading.sandbox import Message, allow, read_piece, serve
from coatcheck.reading.text import DecodedText
from coatcheck.refs import Ref

_MARGIN: Final = 384 << 20  # address space of the interpreter, the libraries and the threads
_LARGE: Final = 256 << 20  # a process that has grown beyond this is replaced
_STATM: Final = "/proc/self/statm"
_statm: Final = (
    os.open(_STATM, os.O_RDONLY) if os.path.exists(_STATM) else None
)  # opened before the process is confined


def main(folder: str) -> None:
    _warm()
    gc.disable()  # it takes most of the time of parsing; a process that grows is replaced
    serve(folder, answer, lambda: None)


def answer(message: Message) -> Message:
    allow(message["memory"] + _MARGIN, message["seconds"], 1)
    contents = [_content(metadata, partial(read_piece, at)) for at, metadata in enumerate(message["contents"])]
    try:
        reply = _ANSWERS[message["kind"]](*contents, **message["arguments"])
    except CoatcheckError as error:
        reply = {"error": error.code, "message": error.message, "hint": error.hint}
    return reply | {"leaves": True} if _resident() > _LARGE else reply


def _grep(content: Content, request: dict[str, Any], position: list[int] | None) -> Message:
    at = None if position is None else tuple(position)
    return grep.search(DecodedText(content), Request(**request), at)._asdict()


_ANSWERS: Final[dict[str, Callable[..., Message]]] = {
    "find": lambda content, path: asdict(jsonpath.find(content, path)),
    "shape": lambda content, max_chars: asdict(json_content.shape(content, max_chars=max_chars)),
    "diff": lambda old, new: asdict(diff.diff(old, new)),
    "grep": _grep,
    "part": lambda content, fragment: {"raw": json_content.part_of(content, fragment)},
}


def _content(metadata: Message, read: Callable[[int, int], bytes]) -> Content:
    size, media_type, kind = metadata["size"], metadata["media_type"], metadata["kind"]
    ref = Ref(metadata["id"], "", size, media_type, kind, pointer_length=metadata["pointer_length"])
    return Content(ref, base64.b64decode(metadata["frames"]), read)


def _resident() -> int:
    """Resident memory of this process in bytes; 0 if unknown."""
    if _statm is None:
        return 0
    return int(os.pread(_statm, 100, 0).split()[1]) * mmap.PAGESIZE


def _warm() -> None:
    """Answer each kind once, so that everything is imported before files are out of reach."""
    document = b'{"a": [1, "b"]}\n'
    common = {"kind": "data", "pointer_length": 12, "frames": ""}

    def content(data: bytes, media_type: str) -> Content:
        about = {"id": digest_of(data), "size": len(data), "media_type": media_type}
        return _content(common | about, lambda offset, length: data[offset : offset + length])

    jsonpath.find(content(document, JSON), "$..a[?search(@, 'b')]")
    json_content.shape(content(document, JSON))
    json_content.part_of(content(document, JSON), "/a/1")
    diff.diff(content(b"a\nb\n", TEXT), content(b"a\nc\n", TEXT))
    for encoding in ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        for text in ("\ufeffone\ntwo\n", "\ufeffé\n"):
            _grep(content(text.encode(encoding), TEXT), {"grep": "two|."}, None)
    for escaped in (b'{"a": "\\u00fc \\ud83d\\ude00 \\ud83d \\n"}\n', '{"a": "é \\u00fc"}\n'.encode()):
        for pattern in ("ü", "a"):
            _grep(content(escaped, JSON), {"grep": pattern}, None)
    _grep(content(b"\xff\xfe\x00\xd8\n\x00", TEXT), {"grep": "."}, None)
    _grep(content(b"\xff\n", TEXT), {"grep": "."}, None)
