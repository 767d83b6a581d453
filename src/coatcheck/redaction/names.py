"""Secrets that are known by their name: what is between a name and its value, and where the value
ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from sys import maxsize
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction.judgement import (
    DIGIT,
    JUDGED,
    NUMBER,
    ODD,
    PASSWORDS,
    is_credential,
    is_phrase,
    is_secret,
    is_word,
)
from coatcheck.redaction.secret import MARK, Secret

_LOWER: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
# Each name is found by its rarest letters, to which `re` skips ahead; then the letters before them
# are checked.
_WORDS: Final = {
    "ken": "token", "key": "key", "kie": "cookie", "word": "password", "wort": "password",
    "wd": "password", "phrase": "passphrase", "cret": "secret", "uth": "auth",
    "uthorization": "authorization", "bearer": "bearer", "psessid": "secret",
    "jsessionid": "secret", "g": "signature", "gnature": "signature", "ss": "password",
}  # fmt: skip
_WORD_OF_NAME: Final = (
    r"k(?:en(?<=token)|ey|ie(?<=cookie))|w(?:or[dt](?<=passwor[dt])|d(?<=passwd)|d(?<=pwd))"
    r"|phrase(?<=passphrase)"
    r"|cret(?<=secret)|uth(?<=auth)(?:orization)?|bearer|psessid|jsessionid|g(?<=sig)(?<![a-z]sig)"
    r"|gnature(?<=signature)"
    r"|ss(?<=pass)"
)
_KEYS: Final = (
    "api", "access", "account", "auth", "private", "encryption", "signing", "master", "session",
    "client", "secret", "subscription", "hmac", "jwt", "service", "storage",
)  # fmt: skip
_TAILS: Final = (
    "value|text|string|plain|base64|b64|data|prod|dev|test|live|old|new"  # as in `client-key-data`
)
_NAME_SUFFIX: Final = rf"(?:[ _.-]?(?:{_TAILS}|\d{{1,2}}))?"
_NAME: Final = lazy_pattern(
    rf"(?P<word>{_WORD_OF_NAME}){_NAME_SUFFIX}"
    r"(?:(?:\\{0,4}[\"'`]\]?)?[ \t]{0,8}"
    r"(?:(?P<sep>:[ \t]?[a-z][\w.\[\]?]{0,24}+(?: \| [\w.\[\]]{1,24}+){0,2}+[ \t]{0,2}="
    r"(?=[ \t]{0,4}\\{0,4}[\"'])"
    r"|=>|:=|==?|:|>)|(?P<comma>(?<=[\"'`]),(?=[ \t]{0,4}\\{0,4}[\"'])"
    r"(?:[ \t]{0,4}\\{0,4}[\"']value\\{0,4}[\"'][ \t]{0,4}:)?))[ \t]{0,8}"
    r"|(?P<blank>[ \t]{1,4}))"
    r"(?:(?:!{1,2}[a-z]{1,16}[ \t]{1,4}(?=[|>]))?(?P<block>[|>][+-]?[0-9]?[+-]?)?[ \t]{0,8}"
    r"(?P<newline>\r?\n|(?:\\{1,4}r)?\\{1,4}n)(?:[ \t]{0,40}(?:\r?\n"
    r"|(?:\\{1,4}r)?\\{1,4}n))?[ \t]{0,40})?"
    r"(?P<open>\\{0,4}[\"'`])?"
)
_WHOLE_NAME: Final = lazy_pattern(rf"(?P<word>{_WORD_OF_NAME}){_NAME_SUFFIX}\Z")
_QUOTED: Final = {quote: lazy_pattern(rf"(?:[^{quote}\\\n]|\\.)*+") for quote in ('"', "'", "`")}
_QUOTED_TWICE: Final = {
    quote: lazy_pattern(rf"(?:[^{quote}\\\n]|\\[^{quote}\n])*+") for quote in ('"', "'", "`")
}
_BARE: Final = lazy_pattern(r"[^\s\"'`,;&<>(){}\\]*+")
_BARE_LINE: Final = lazy_pattern(r"(?:[^\s\"'`\\]|\\(?![nrt\"'\\]))*+")
_HEADER: Final = lazy_pattern(r"[^\n\r\"'\\]*+")
_SCHEME: Final = lazy_pattern(
    r"(?:bearer|basic|token|negotiate|apikey|bot|(?P<several>digest|signature"
    r"|aws4-hmac-sha256))[ \t]{1,4}"
)
_LINE: Final = lazy_pattern(r"[^\n\r\\]*+")
_OPAQUE: Final = lazy_pattern(r"[\w.~+/=%-]*+", re.ASCII)
_PAIR: Final = lazy_pattern(r"(?<![\w.-])([\w.-]{1,64}+)=([^;\s\"'\\,]{8,}+)")
_ATTRIBUTES: Final = frozenset(
    {"path", "domain", "expires", "max-age", "samesite", "priority", "version"}
)
_DULL_BEFORE: Final = (
    "page", "next", "continuation", "sync", "cancellation", "stop", "eos", "bos", "pad", "unk",
    "sep", "cls", "mask", "special", "input", "output", "public", "image",
)  # fmt: skip
_LETTER: Final = lazy_pattern("[A-Za-z]")
_CONNECTION: Final = lazy_pattern(
    r"(?:server|host|data source|database|initial catalog|user(?: ?id|name)?"
    r"|uid)[ \t]?=[^;\n=]{1,128};"
)
_REST_OF_LINE: Final = lazy_pattern(r"[ \t]{0,8}(?:\r?\n|\\{1,4}[nr\"']|[\"'`]|\Z)")
_BLOCK_LINE_END: Final = lazy_pattern(r"\r?\n|\Z")
_ESCAPED_END: Final = lazy_pattern(r"(?:\\{1,4}r)?\\{1,4}n|\\{0,4}[\"'`]|\n|\Z")
_LONGEST_INDENT: Final = 128
_BLOCK_LINES: Final = 100
_LONGEST_BLOCK: Final = 16_384
_PASS_OF: Final = (
    "db", "database", "sql", "pg", "postgres", "mongo", "redis", "smtp", "mail", "imap", "ftp",
    "ssh", "admin", "root", "user", "usr", "login", "auth", "sudo", "wifi", "proxy", "http",
    "https", "ldap", "api", "app", "rabbitmq", "amqp", "mqtt", "service", "account", "keystore",
    "key", "cert", "jdbc", "git", "registry", "docker", "master", "vpn",
)  # fmt: skip

_TAIL: Final = rf"(?:[ _.-]?(?:{_TAILS}|[0-9\x80-\xff]{{1,8}}))?"
_CLOSING: Final = r"[\\\"'`\]]*"
SECRET_WORDS: Final = (
    rf"token|(?:{'|'.join(_KEYS)})[_. -]*key|passwor[dt]|passwd|pwd|passphrase|secret"
    r"|auth(?:orization)?|psessid|jsessionid|cookie"
)
"""Names of secrets, for prefilters: an RE2 expression that ignores case."""

NAMED_KEYWORD: Final = (
    rf"(?i:(?:{SECRET_WORDS}){_TAIL}{_CLOSING}[ \t]*[=:>,]"
    rf"|--[^ ]*(?:{SECRET_WORDS}){_TAIL}[ \t]"
    rf"|bearer{_TAIL}{_CLOSING}[ \t=:>,]"
    rf"|(?:sig(?:nature)?{_TAIL}|pass[0-9]?){_CLOSING}[ \t]*[=:>,])"
)
"""Prefilter of `named_secrets`: a name, and a separator after it."""

NAME_THEN_VALUE: Final = (
    rf"(?i:(?:{SECRET_WORDS}|pass){_TAIL}{_CLOSING}(?:\s|\\r|\\n|\\+)+value[:=])"
)
"""Prefilter of values that have their name beside them."""


def named_secrets(text: str) -> Iterator[Secret]:
    """Secrets that follow their name: `password = …`, `"api_key": "…"`, headers, cookies. What
    follows the name must look like a value, not like a type, a variable or a placeholder."""
    low = text.lower()
    if len(low) != len(text):  # a few letters become two in lower case
        low = text.translate(_LOWER)
    at = cookies_end = 0
    while (match := _NAME.search(low, at)) is not None:
        at = match.end()
        if match["word"] == "kie":
            if at >= cookies_end and not match["blank"]:
                cookies_end = end_of(_HEADER, text, at)
                yield from _cookies(text, at, cookies_end)
            continue
        secret = _value_of(text, low, match)
        if secret is not None:
            yield secret
            at = max(at, secret.end)


def _cookies(text: str, start: int, end: int) -> Iterator[Secret]:
    """The values in a header of cookies."""
    for pair in _PAIR.finditer(text, start, end):
        if pair[1].lower() not in _ATTRIBUTES and MARK not in pair[2]:
            yield Secret(*pair.span(2), "cookie")


def _value_of(text: str, low: str, match: re.Match[str]) -> Secret | None:
    """The secret after a name, if there is one. Looks at a bounded part of the text."""
    start, at, name = match.start(), match.end(), _WORDS[match["word"]]
    if not _leads_to_value(low, match, name):
        return None
    if name in ("authorization", "bearer"):
        return _authorization(text, low, at, is_header=name == "authorization")
    if name == "signature":
        end = end_of(_OPAQUE, text, at) if match["sep"] == "=" else at
        return Secret(at, end, "signature") if end - at >= 32 else None
    if not _is_named_secret(low, match["word"], start):
        return None
    if match["word"] == "ss" and not _is_pass(text, low, start, match["sep"]):
        return None
    if match["block"]:
        return _block(text, match, name)
    if match["open"]:
        return _quoted_value(text, low, match, name)
    return _bare_value(text, low, match, name)


def _leads_to_value(low: str, match: re.Match[str], name: str) -> bool:
    """Whether what separates a name from the rest can come before its value."""
    if match["newline"] and match["sep"] not in (":", "="):
        return False
    if match["blank"]:
        return name == "bearer" or _is_flag(low, match.start())
    return match["sep"] != ">" or _is_tag(low, match.start())


def _quoted_value(text: str, low: str, match: re.Match[str], name: str) -> Secret | None:
    at, quote = match.end(), match["open"]
    run = (_QUOTED_TWICE if "\\" in quote else _QUOTED)[quote[-1]]
    value = text[at : end_of(run, text, at, at + JUDGED)]
    is_tight = match["sep"] == "=" and low[at - len(quote) - 1] == "="
    if not is_secret(name, value, quoted=True, tight=is_tight) or _is_doubtful(match, value):
        return None
    return Secret(at, end_of(run, text, at), _label(name))


def _bare_value(text: str, low: str, match: re.Match[str], name: str) -> Secret | None:
    start, at = match.span()
    is_tight = match["sep"] == "=" and low[at - 1] == "="
    is_variable = _begins_line(low, start) or text[start:at].isupper()
    run = _BARE_LINE if is_tight and is_variable else _BARE
    value = text[at : end_of(run, text, at, at + JUDGED)]
    if not is_secret(name, value, quoted=False, tight=is_tight) or _is_doubtful(match, value):
        return None
    end = end_of(run, text, at)
    if match["newline"] and not _is_alone(text, value, end):
        return None
    after = text[end : end + 1] or " "
    if after in "([":  # a call
        return None
    if after in ",);" and is_word(value):  # an argument
        is_option = after == ";" and _is_connection_string(low, start)
        if not is_option:
            return None
    return Secret(at, end, _label(name))


def _is_doubtful(match: re.Match[str], value: str) -> bool:
    """Whether a name that often means something else needs a value that is more like a secret."""
    comma = match["comma"]
    if comma and "value" not in comma and (len(value) < 8 or not DIGIT.search(value)):
        return True
    if match["word"] != "ss":
        return False
    return NUMBER.match(value) is not None or not (ODD.search(value) or " " in value)


class _Line(NamedTuple):
    """A line of a block, without the blanks around it."""

    start: int
    text: str


def _block(text: str, match: re.Match[str], name: str) -> Secret | None:
    """The lines of a YAML block after a name."""
    lines = _block_lines(text, match)
    if not lines:
        return None
    if len(lines) > 1 and any(" " in line.text for line in lines):
        value = " ".join(line.text for line in lines)
        judged = is_phrase(value, value.lower(), tight=name in PASSWORDS)
    else:
        value = "".join(line.text for line in lines)[:JUDGED]
        judged = is_secret(name, value, quoted=True)
    if not judged:
        return None
    last = lines[-1]
    return Secret(lines[0].start, last.start + len(last.text), _label(name))


def _block_lines(text: str, match: re.Match[str]) -> list[_Line]:
    """The lines that are indented deeper than the key of a block. In a JSON string, they end with
    an escape."""
    line_end = _ESCAPED_END if match["newline"].startswith("\\") else _BLOCK_LINE_END
    before = text[max(0, match.start() - _LONGEST_INDENT) : match.start()]
    key = re.split(r"[\n\"'`]|\\{1,4}n", before)[-1]
    least = len(key) - len(key.lstrip(" \t-")) + 1
    lines: list[_Line] = []
    at = match.end("newline")
    for ending in line_end.finditer(text, at, at + _LONGEST_BLOCK):
        line = text[at : ending.start()]
        if line.strip():
            depth = len(line) - len(line.lstrip(" \t"))
            if depth < least:
                break
            if not lines:
                least = depth
            lines.append(_Line(at + depth, line.strip()))
        if ending[0][:1] in "\"'`" or len(lines) > _BLOCK_LINES:
            break
        at = ending.end()
    return lines


def _is_alone(text: str, value: str, end: int) -> bool:
    """Whether a value on the line after its name is alone on that line, and is not a name or a list
    item itself."""
    if (
        _REST_OF_LINE.match(text, end) is None
        or value[0] in "-#*|>/"
        or ":" in value
        or "=" in value.rstrip("=")
    ):
        return False
    return ODD.search(value) is not None and _LETTER.search(value) is not None


def _is_pass(text: str, low: str, start: int, sep: str | None) -> bool:
    """Whether `pass` means a password here: `DB_PASS=` and `"pass":` do, `second_pass` and `bypass`
    do not."""
    begin = start - 2
    before = low[max(0, begin - 24) : begin]
    stem = before.rstrip("_-.")
    if before.endswith(_PASS_OF) and sep in ("=", ":"):
        return True
    if text[begin : start + 2] == "PASS" and sep == "=":
        return not before[-1:].isalpha()
    if not before[-1:].isalnum() and stem == before:
        return before[-1:] in ('"', "'") or sep == "="
    is_part = stem != before or (text[begin].isupper() and not text[begin - 1].isupper())
    return is_part and stem.endswith(_PASS_OF)


def _authorization(text: str, low: str, at: int, *, is_header: bool) -> Secret | None:
    scheme = _SCHEME.match(low, at)
    run = _LINE if scheme and scheme["several"] else _OPAQUE
    at = scheme.end() if scheme else at
    value = text[at : end_of(run, text, at, at + JUDGED)]
    if not is_credential(value, is_header=is_header, has_scheme=scheme is not None):
        return None
    return Secret(at, end_of(run, text, at), "authorization")


def _is_named_secret(low: str, word: str, start: int) -> bool:
    """Whether a word, with the text before it, names a secret: `api_key` does, `cache_key` does
    not."""
    if word == "key":
        return low[max(0, start - 16) : start].rstrip("_-. ").endswith(_KEYS)
    return word != "ken" or not low[max(0, start - 16) : start - 2].rstrip("_-. ").endswith(
        _DULL_BEFORE
    )


def _label(name: str) -> str:
    return "password" if name in PASSWORDS else name if name in ("token", "key") else "secret"


def end_of(run: re.Pattern[str], text: str, at: int, before: int = maxsize) -> int:
    """Where a match that begins at `at` ends, `at` if there is none. Looks at the text up to
    `before`."""
    match = run.match(text, at, before)
    return match.end() if match else at


def _is_flag(low: str, start: int) -> bool:
    """Whether the name is part of a command-line option, as in `--token abc`."""
    before = low[max(0, start - 24) : start]
    return before[before.rfind(" ") + 1 :].startswith("--")


def _is_tag(low: str, start: int) -> bool:
    """Whether the name is part of a tag, as in `<Password>abc</Password>`."""
    opening = low.rfind("<", max(0, start - 32), start)
    return opening >= 0 and low[opening + 1 : start].replace(":", "").replace("-", "").isalnum()


def _begins_line(low: str, start: int) -> bool:
    line = low[max(low.rfind("\n", max(0, start - 64), start) + 1, start - 64) : start]
    return line.removeprefix("export ").replace("_", "a").isalnum()


def _is_connection_string(low: str, start: int) -> bool:
    """Whether the name follows other options of a connection string, as in `Server=db;User
    Id=sa;Password=…;`."""
    return _CONNECTION.search(low, max(0, start - 256), start) is not None


def label_of(name: str, text: str) -> str | None:
    """The label of a text that is the value of a key of this name. None if it is not a secret."""
    low = name[-100:].lower()
    match = _WHOLE_NAME.search(low)
    if match is None or MARK in text:
        return None
    value, called = text[:JUDGED], _WORDS[match["word"]]
    if called in ("authorization", "bearer"):
        scheme, _, rest = text.rpartition(" ")
        is_one = is_credential(rest[:JUDGED], is_header=True, has_scheme=bool(scheme))
        return "authorization" if is_one else None
    if called in ("cookie", "signature") or not _is_named_secret(low, match["word"], match.start()):
        return None
    if match["word"] == "ss":
        at = len(name) - len(low) + match.start()
        if not _is_pass(name, name.lower(), at, "=") or NUMBER.match(text) or not ODD.search(value):
            return None
    return _label(called) if is_secret(called, value, quoted=True) else None
