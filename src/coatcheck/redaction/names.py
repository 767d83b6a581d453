"""Secrets that are known by what they are called: `password = …`, `"api_key": "…"`, headers, cookies.

A name alone is not enough: what it names must look like a value, not like a type, a variable, or a place to fill in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from .span import MARK, Span

_JUDGED: Final = 64  # of a value, to decide whether it is one; what is masked is the whole
_DIGIT: Final = re.compile("[0-9]")
# Each name is found by its rarest letters, and what stands before them is checked then: `re` skips ahead to those.
_WORDS: Final = {
    "ken": "token", "key": "key", "kie": "cookie", "word": "password", "wort": "password", "wd": "password",
    "phrase": "passphrase", "cret": "secret", "uth": "auth", "uthorization": "authorization", "bearer": "bearer",
    "psessid": "secret", "jsessionid": "secret", "g": "signature", "gnature": "signature",
}  # fmt: skip
_WORD_OF_NAME: Final = (
    r"k(?:en(?<=token)|ey|ie(?<=cookie))|w(?:or[dt](?<=passwor[dt])|d(?<=passwd)|d(?<=pwd))|phrase(?<=passphrase)"
    r"|cret(?<=secret)|uth(?<=auth)(?:orization)?|bearer|psessid|jsessionid|g(?<=sig)(?<![a-z]sig)|gnature(?<=signature)"
)
KEYS: Final = (
    "api", "access", "account", "auth", "private", "encryption", "signing", "master", "session", "client", "secret",
    "subscription", "hmac", "jwt", "service", "storage",
)  # fmt: skip
_SUFFIX: Final = r"(?:[ _.-]?(?:value|text|string|plain|base64|b64|prod|dev|test|live|old|new|\d{1,2}))?"
NAME: Final = re.compile(
    rf"(?P<word>{_WORD_OF_NAME}){_SUFFIX}"
    r"(?:(?:\\{0,4}[\"'`]\]?)?[ \t]{0,8}"
    r"(?:(?P<sep>:[ \t]?[a-z][\w.\[\]?]{0,24}+(?: \| [\w.\[\]]{1,24}+){0,2}+[ \t]{0,2}=(?=[ \t]{0,4}\\{0,4}[\"'])"
    r"|=>|:=|==?|:|>)|(?P<comma>(?<=[\"'`]),(?=[ \t]{0,4}\\{0,4}[\"'])"
    r"(?:[ \t]{0,4}\\{0,4}[\"']value\\{0,4}[\"'][ \t]{0,4}:)?))[ \t]{0,8}"
    r"|(?P<blank>[ \t]{1,4}))(?P<open>\\{0,4}[\"'`])?"
)
_WHOLE_NAME: Final = re.compile(rf"(?P<word>{_WORD_OF_NAME}){_SUFFIX}\Z")
_QUOTED: Final = {quote: re.compile(rf"(?:[^{quote}\\\n]|\\.)*+") for quote in ('"', "'", "`")}
_QUOTED_TWICE: Final = {quote: re.compile(rf"(?:[^{quote}\\\n]|\\[^{quote}\n])*+") for quote in ('"', "'", "`")}
_BARE: Final = re.compile(r"[^\s\"'`,;&<>(){}\\]*+")
_BARE_LINE: Final = re.compile(r"(?:[^\s\"'`\\]|\\(?![nrt\"'\\]))*+")
_HEADER: Final = re.compile(r"[^\n\r\"'\\]*+")
_SCHEME: Final = re.compile(
    r"(?:bearer|basic|token|negotiate|apikey|bot|(?P<several>digest|signature|aws4-hmac-sha256))[ \t]{1,4}"
)
_LINE: Final = re.compile(r"[^\n\r\\]*+")
_OPAQUE: Final = re.compile(r"[\w.~+/=%-]*+", re.ASCII)
_PAIR: Final = re.compile(r"(?<![\w.-])([\w.-]{1,64}+)=([^;\s\"'\\,]{8,}+)")
_ATTRIBUTES: Final = frozenset({"path", "domain", "expires", "max-age", "samesite", "priority", "version"})
_PASSWORDS: Final = frozenset({"password", "passphrase"})
_DULL_BEFORE: Final = (
    "page", "next", "continuation", "sync", "cancellation", "stop", "eos", "bos", "pad", "unk", "sep", "cls", "mask",
    "special", "input", "output", "public", "image",
)  # fmt: skip
_NO_SECRET: Final = re.compile(
    r"(?:null|none|nil|undefined|true|false|yes|no|string|str|text|number|int|integer|bool|boolean|bytes|object|any|required"
    r"|optional|password|passwd|pass|secret|token|hidden|redacted|removed|masked|example|placeholder|changeme|empty|unset"
    r"|disabled|enabled|default|same-origin|include|omit|unknown|missing|invalid|expired|bearer|basic|x{3,}|your[_-].*)\Z"
    r"|\$[\w{(]\w*[})]?\Z|\$\{|\$\(|[{<\[]|%[s(]|%\w+%\Z|[*•.…x_-]{3,}\Z|art:[0-9a-f]{12}|[a-z][a-z0-9+.-]{1,15}://"
    r"|(?:~|\.{1,2})?/(?:[\w.-]{1,24}/){1,16}|[a-z]:\\"
)
_MEMBER: Final = re.compile(r"[a-z_]\w{0,24}(?:(?:\.|->|::)[a-z_]\w{0,24}){1,8}\Z")
_CALL: Final = re.compile(r"[a-z_][\w.:]{0,80}+[(\[].*[)\]]\Z")
_IDENTIFIER: Final = re.compile(r"[a-z_]*\Z")
_ODD: Final = re.compile(r"[0-9!@#$%^&*+~?]")
_NUMBER: Final = re.compile(r"[\d.,_-]*\Z")


def named(text: str, low: str) -> Iterator[Span]:
    at = header = 0
    while (match := NAME.search(low, at)) is not None:
        at = match.end()
        if match["word"] == "kie":
            if at >= header and not match["blank"]:
                line = _HEADER.match(text, at)
                header = line.end() if line else at
                yield from _cookies(text, at, header)
            continue
        span = _value_of(text, low, match)
        if span is not None:
            yield span
            at = max(at, span.end)


def _value_of(text: str, low: str, match: re.Match[str]) -> Span | None:
    """What is secret behind a name. Looks at a bounded part of the text, unless that is masked."""
    word, sep, comma, blank, quote = match.groups()
    start, at, name = match.start(), match.end(), _WORDS[word]
    if blank and name != "bearer" and not _is_flag(low, start):
        return None
    if sep == ">" and not _is_tag(low, start):
        return None
    if name in ("authorization", "bearer"):
        return _authorization(text, low, at, is_header=name == "authorization")
    if name == "signature":
        is_long = sep == "=" and len(_matched(_OPAQUE, text, at, at + _JUDGED)) >= 32
        return Span(at, _end(_OPAQUE, text, at), "signature") if is_long else None
    if not _is_named_secret(low, word, start):
        return None
    tight = sep == "=" and low[at - len(quote or "") - 1] == "="
    if quote:
        run = (_QUOTED_TWICE if "\\" in quote else _QUOTED)[quote[-1]]
    else:
        run = _BARE_LINE if tight and (_begins_line(low, start) or text[start:at].isupper()) else _BARE
    value = _matched(run, text, at, at + _JUDGED)
    if not is_secret(name, value, quoted=quote is not None, tight=tight):
        return None
    if comma and "value" not in comma and (len(value) < 8 or not _DIGIT.search(value)):
        return None
    end = _end(run, text, at)
    after = text[end : end + 1]
    if not quote and after and (after in "([" or (after in ",);" and _is_word(value))):
        return None
    return Span(at, end, _label(name))


def _cookies(text: str, start: int, end: int) -> Iterator[Span]:
    for pair in _PAIR.finditer(text, start, end):
        if pair[1].lower() not in _ATTRIBUTES and MARK not in pair[2]:
            yield Span(*pair.span(2), "cookie")


def _authorization(text: str, low: str, at: int, *, is_header: bool) -> Span | None:
    scheme = _SCHEME.match(low, at)
    run = _OPAQUE
    if scheme is not None:
        at = scheme.end()
        run = _LINE if scheme["several"] else _OPAQUE
    if _is_credential(_matched(run, text, at, at + _JUDGED), is_header=is_header, has_scheme=scheme is not None):
        return Span(at, _end(run, text, at), "authorization")
    return None


def _is_named_secret(low: str, word: str, start: int) -> bool:
    """Whether what stands before a word leaves it the name of a secret: `api_key` but not `cache_key`."""
    if word == "key":
        return low[max(0, start - 16) : start].rstrip("_-. ").endswith(KEYS)
    return word != "ken" or not low[max(0, start - 16) : start - 2].rstrip("_-. ").endswith(_DULL_BEFORE)


def _label(name: str) -> str:
    return "password" if name in _PASSWORDS else name if name in ("token", "key") else "secret"


def _matched(run: re.Pattern[str], text: str, at: int, end: int) -> str:
    match = run.match(text, at, end)
    return match.group() if match else ""


def _end(run: re.Pattern[str], text: str, at: int) -> int:
    match = run.match(text, at)
    return match.end() if match else at


def _is_flag(low: str, start: int) -> bool:
    """Whether the name stands in an option of a command, as in `--token abc`."""
    before = low[max(0, start - 24) : start]
    return before[before.rfind(" ") + 1 :].startswith("--")


def _is_tag(low: str, start: int) -> bool:
    """Whether the name stands in a tag, as in `<Password>abc</Password>`."""
    opening = low.rfind("<", max(0, start - 32), start)
    return opening >= 0 and low[opening + 1 : start].replace(":", "").replace("-", "").isalnum()


def _begins_line(low: str, start: int) -> bool:
    line = low[max(low.rfind("\n", max(0, start - 64), start) + 1, start - 64) : start]
    return line.removeprefix("export ").replace("_", "a").isalnum()


def _is_word(value: str) -> bool:
    return _IDENTIFIER.match(value.lower()) is not None


def _is_credential(value: str, *, is_header: bool, has_scheme: bool = False) -> bool:
    """Whether this is what follows `Authorization: Bearer`, and not the next word of a sentence."""
    low = value.lower()
    if MARK in value or _NO_SECRET.match(low) or _MEMBER.match(low) or len(value) < (8 if is_header else 16):
        return False
    return _DIGIT.search(value) is not None or len(value) >= 24 or (is_header and has_scheme and not value.islower())


def is_secret(name: str, value: str, *, quoted: bool, tight: bool = False) -> bool:
    """Whether a value that is called so is likely to be one: not a type, a variable, a label, or a place to fill in."""
    if len(value) < 4 or MARK in value:
        return False
    low = value.lower()
    odd = _ODD.search(low) is not None
    if " " in value or "\t" in value:
        return name == "passphrase" and len(value) >= 8 and not _NO_SECRET.match(low)
    if not odd and ("token" in low or "passw" in low or "secret" in low or "key" in low):
        return False
    if _NO_SECRET.match(low):
        return False
    is_password = name in _PASSWORDS
    if _NUMBER.match(low):
        return is_password and len(value) >= (4 if quoted else 6)
    if not quoted and (_MEMBER.match(low) or _CALL.match(low)):
        return False
    if is_password:
        return quoted or (odd and len(value) >= 6) or (tight and len(value) >= 6) or len(value) >= 16
    if len(value) < 8:
        return False
    is_variable = _is_word(value) and "_" in value
    return odd or (len(value) >= 20 and not is_variable) or (len(value) >= 16 and not value.islower())


def label_of(name: str, text: str) -> str | None:
    """What a text is where it stands under this name, as the value of a key does. None where that is no secret."""
    low = name[-100:].lower()
    match = _WHOLE_NAME.search(low)
    if match is None or MARK in text:
        return None
    called = _WORDS[match["word"]]
    if called in ("authorization", "bearer"):
        scheme, _, value = text.rpartition(" ")
        return "authorization" if _is_credential(value[:_JUDGED], is_header=True, has_scheme=bool(scheme)) else None
    if called in ("cookie", "signature") or not _is_named_secret(low, match["word"], match.start()):
        return None
    return _label(called) if is_secret(called, text[:_JUDGED], quoted=True) else None
