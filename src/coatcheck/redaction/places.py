"""Secrets that are known by their place: private keys, `.netrc` files, urls, options of curl."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Final

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction.judgement import is_secret
from coatcheck.redaction.names import end_of
from coatcheck.redaction.secret import Secret

_FENCE: Final = lazy_pattern(
    r"-----(?:(?P<begin>BEGIN)|END) (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
)
_PUTTY: Final = lazy_pattern(r"Private-Lines: \d{1,4}(?=\s|\\)")
_GAP: Final = r"(?:\s|\\[nrt]|[\"'+>|,])*+"
_BODY: Final = lazy_pattern(
    rf"(?:{_GAP}(?:[A-Za-z0-9+/=]{{16,}}+|[A-Z][A-Za-z-]{{3,16}}: [\w,. -]{{1,80}}+))*+"
    rf"(?:{_GAP}[A-Za-z0-9+/]{{1,15}}+(?:={{1,2}}|\Z))?"
)
_KEY_LINE_END: Final = lazy_pattern(r"\\[nr]|[\r\n]")
_LONGEST_KEY: Final = 32_768
_NOT_BASE64: Final = lazy_pattern(r"[^A-Za-z0-9+/=]")


def private_keys(text: str) -> Iterator[Secret]:
    """Private keys: whole blocks, and what is left of blocks that were cut."""
    fences = list(_FENCE.finditer(text))
    done = 0
    for at, fence in enumerate(fences):
        if fence.start() < done:
            continue
        start, limit = fence.start(), len(text)
        if at + 1 < len(fences):
            limit = fences[at + 1].start()
        if not fence["begin"]:
            start, done = _body_before(text, done, fence.start()), fence.end()
        elif _ends_at(fences, at + 1) and limit - fence.end() <= _LONGEST_KEY:
            done = fences[at + 1].end()
        else:
            done = end_of(_BODY, text, fence.end(), limit)
        yield Secret(start, done, "private key")


def _ends_at(fences: list[re.Match[str]], at: int) -> bool:
    """Whether this fence exists and is an END line."""
    return at < len(fences) and not fences[at]["begin"]


def putty_keys(text: str) -> Iterator[Secret]:
    """Private keys in the format of PuTTY."""
    done = 0
    for match in _PUTTY.finditer(text):
        if match.start() >= done:
            done = end_of(_BODY, text, match.end(), match.end() + _LONGEST_KEY)
            yield Secret(match.start(), done, "private key")


def _body_before(text: str, floor: int, end: int) -> int:
    """Where the base64 lines begin before an END line that has no BEGIN."""
    floor = max(floor, end - _LONGEST_KEY)
    edges = [
        floor,
        *(edge for match in _KEY_LINE_END.finditer(text, floor, end) for edge in match.span()),
        end,
    ]
    begin = end
    for start, stop in zip(edges[-2::-2], edges[::-2], strict=True):
        line = text[start:stop].strip(" \t\"'+>|,")
        if not line:
            continue
        if _NOT_BASE64.search(line) or (len(line) < 16 and begin < end and start > 0):
            last = line.rpartition(" ")[2]
            return (
                text.rindex(last, start, stop)
                if len(last) >= 16 and not _NOT_BASE64.search(last)
                else begin
            )
        begin = start
    return begin


_ADDRESS: Final = lazy_pattern(  # the user may be `domain\\user`
    r"://[^\s/:@\"'<>\\]{0,128}+(?:\\{1,8}[^\s/:@\"'<>\\]{1,128}+)?:([^\s/\"'<>\\]{1,256})@"
)
_USER: Final = lazy_pattern(r"(?<=[ \t])(?:-u|--user)[ =][\"']?[\w.@+-]{1,64}:([^\s\"'\\]{1,256})")
_PORT: Final = lazy_pattern(r"\d{1,5}(?:\Z|[?#])")
_BARE_TOKEN: Final = lazy_pattern(r"://([A-Za-z0-9_~.%+-]{16,256}+)(?=@[A-Za-z0-9\[])")
_NETRC_VALUE: Final = (
    r"(\\{0,4}\"[^\"\n\\]{1,256}|'[^'\n\\]{1,256}'|(?:[^\s\"\\]|\\(?![nrt\"'\\])){1,256})"
)
_NETRC: Final = (
    lazy_pattern(
        r"login(?<!\wlogin)\s{1,8}\S{1,200}\s{1,40}(?:account\s{1,8}\S{1,200}\s{1,40})?password\s{1,8}"
        + _NETRC_VALUE
    ),
    lazy_pattern(r"machine(?<!\wmachine)\s{1,8}\S{1,200}\s{1,40}password\s{1,8}" + _NETRC_VALUE),
)
_MACHINE: Final = lazy_pattern(r"(?<!\w)(?:machine\s{1,8}\S{1,200}|default)\s{1,40}\Z")
_LOGIN: Final = lazy_pattern(r"\s{1,40}login\s")
_HOST: Final = lazy_pattern(r"machine\s{1,8}(?:localhost|\S{0,200}[.:])")


def netrc_passwords(text: str) -> Iterator[Secret]:
    """Passwords in `.netrc` form: `machine example.org login bob password …`."""
    for match in chain(*(pattern.finditer(text) for pattern in _NETRC)):
        start, value = match.start(), match[1].strip("\\\"'")
        is_entry = (
            _MACHINE.search(text, max(0, start - 256), start)
            or _LOGIN.match(text, match.end())
            or _HOST.match(match[0])
        )
        if is_secret("password", value, quoted=is_entry is not None):
            at = text.index(value, match.start(1))
            yield Secret(at, at + len(value), "password")


def _is_token(value: str) -> bool:
    """Whether the user part of a url is a token, and not a name."""
    has_both = not value.isdigit() and any(map(str.isdigit, value))
    return (
        has_both
        and (len(value) >= 20 or "." not in value)
        and not ("." in value and value.islower())
    )


def url_passwords(text: str) -> Iterator[Secret]:
    """Passwords in urls: `scheme://user:password@host`."""
    return _passwords(_ADDRESS.finditer(text))


def curl_passwords(text: str) -> Iterator[Secret]:
    """Passwords in the `--user` option of curl."""
    if "curl" in text:
        yield from _passwords(_USER.finditer(text))


def _passwords(matches: Iterator[re.Match[str]]) -> Iterator[Secret]:
    for match in matches:
        if is_secret("password", match[1], quoted=True) and not _PORT.match(match[1]):
            yield Secret(*match.span(1), "password")


def url_tokens(text: str) -> Iterator[Secret]:
    """Tokens in place of a user in urls: `scheme://token@host`."""
    for match in _BARE_TOKEN.finditer(text):
        if _is_token(match[1]):
            yield Secret(*match.span(1), "token")
