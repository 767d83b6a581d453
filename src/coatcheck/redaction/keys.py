"""Private keys, as whole blocks and as what is left of those that were cut, and passwords in addresses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Final

from .names import is_secret
from .span import Span

_FENCE: Final = re.compile(r"-----(?:(BEGIN)|END) (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----")
_PUTTY: Final = re.compile(r"Private-Lines: \d{1,4}(?=\s|\\)")
_GAP: Final = r"(?:\s|\\[nrt]|[\"'+>|,])*+"
_BODY: Final = re.compile(
    rf"(?:{_GAP}(?:[A-Za-z0-9+/=]{{16,}}+|[A-Z][A-Za-z-]{{3,16}}: [\w,. -]{{1,80}}+))*+"
    rf"(?:{_GAP}[A-Za-z0-9+/]{{1,15}}+(?:={{1,2}}|\Z))?"
)
_LINE_END: Final = re.compile(r"\\[nr]|[\r\n]")
_LONGEST_KEY: Final = 32_768


def private_keys(text: str) -> Iterator[Span]:
    if "PRIVATE KEY" in text:
        fences = list(_FENCE.finditer(text))
        done = 0
        for at, fence in enumerate(fences):
            if fence.start() < done:
                continue
            after = fences[at + 1] if at + 1 < len(fences) else None
            if not fence[1]:
                start, done = _body_before(text, done, fence.start()), fence.end()
            elif after is not None and not after[1] and after.start() - fence.end() <= _LONGEST_KEY:
                start, done = fence.start(), after.end()
            else:
                body = _BODY.match(text, fence.end(), after.start() if after else len(text))
                start, done = fence.start(), body.end() if body else fence.end()
            yield Span(start, done, "private key")
    if "Private-Lines" in text:
        done = 0
        for match in _PUTTY.finditer(text):
            if match.start() >= done:
                body = _BODY.match(text, match.end(), match.end() + _LONGEST_KEY)
                done = body.end() if body else match.end()
                yield Span(match.start(), done, "private key")


def _body_before(text: str, floor: int, end: int) -> int:
    """Where the lines in base64 begin that stand before an end without a beginning."""
    floor = max(floor, end - _LONGEST_KEY)
    line_ends = [match.span() for match in _LINE_END.finditer(text, floor, end)]
    starts = [floor, *(after for _, after in line_ends)]
    stops = [*(before for before, _ in line_ends), end]
    begin = end
    for start, stop in zip(reversed(starts), reversed(stops), strict=True):
        line = text[start:stop].strip(" \t\"'+>|,")
        if not line:
            continue
        if not _is_base64(line) or (len(line) < 16 and begin < end and start > 0):
            last = line.rpartition(" ")[2]
            return text.rindex(last, start, stop) if _is_base64(last) and len(last) >= 16 else begin
        begin = start
    return begin


def _is_base64(line: str) -> bool:
    return _NOT_BASE64.search(line) is None


_NOT_BASE64: Final = re.compile(r"[^A-Za-z0-9+/=]")


_ADDRESS: Final = re.compile(r"://[^\s/:@\"'<>\\]{0,128}:([^\s/\"'<>\\]{1,256})@")
_USER: Final = re.compile(r"(?<=[ \t])(?:-u|--user)[ =][\"']?[\w.@+-]{1,64}:([^\s\"'\\]{1,256})")
_PORT: Final = re.compile(r"\d{1,5}(?:\Z|[?#])")


def addresses(text: str) -> Iterator[Span]:
    found = [_ADDRESS.finditer(text)] if "@" in text and "://" in text else []
    if "curl" in text:
        found.append(_USER.finditer(text))
    for match in chain(*found):
        if is_secret("password", match[1], quoted=True) and not _PORT.match(match[1]):
            yield Span(*match.span(1), "password")
