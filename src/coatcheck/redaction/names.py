"""Secrets that are known by their name, and whether a value after such a name is a secret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from sys import maxsize
from typing import Final

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction.secret import MARK, Secret

_LOWER: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}
_JUDGED: Final = 64  # characters of a value that decide whether it is a secret; all of it is masked
_DIGIT: Final = lazy_pattern("[0-9]")
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
_PASSWORDS: Final = frozenset({"password", "passphrase"})
_DULL_BEFORE: Final = (
    "page", "next", "continuation", "sync", "cancellation", "stop", "eos", "bos", "pad", "unk",
    "sep", "cls", "mask", "special", "input", "output", "public", "image",
)  # fmt: skip
_NO_SECRET: Final = lazy_pattern(
    r"(?:null|none|nil|undefined|true|false|yes|no|string|str|text|number|int|integer|bool|boolean"
    r"|bytes|object|any|required"
    r"|optional|password|passwd|pass|secret|token|hidden|redacted|removed|masked|example"
    r"|placeholder|changeme|empty|unset"
    r"|disabled|enabled|default|same-origin|include|omit|unknown|missing|invalid|expired|bearer"
    r"|basic|x{3,}|your[_-].*)\Z"
    r"|\$[\w{(]\w*[})]?\Z|\$\{|\$\(|[{<\[]|%[s(]|%\w+%\Z|[*•.…x_-]{3,}\Z|art:[0-9a-f]{12}"
    r"|[a-z][a-z0-9+.-]{1,15}://"
    r"|(?:~|\.{1,2})?/(?:[\w.-]{1,24}/){1,16}|[a-z]:\\"
)
_MEMBER: Final = lazy_pattern(r"[a-z_]\w{0,24}(?:(?:\.|->|::)[a-z_]\w{0,24}){1,8}\Z")
_CALL: Final = lazy_pattern(r"[a-z_][\w.:]{0,80}+(?:[(\[].*[)\]]\Z|\[\d{0,6}\])")
_IDENTIFIER: Final = lazy_pattern(r"[a-z_]*\Z")
_ODD: Final = lazy_pattern(r"[0-9!@#$%^&*+~?]")
_NUMBER: Final = lazy_pattern(r"[\d.,_-]*\Z")
_LETTER: Final = lazy_pattern("[A-Za-z]")
_PLAIN_WORD: Final = lazy_pattern("[a-z]{3,12}")
_STRONG: Final = lazy_pattern(
    r"(?=[^A-Z]*[A-Z])(?=[^a-z]*[a-z])(?=\D*\d\D*\d)[\w!@#$%^&*+~?-]{10,64}", re.ASCII
)  # a word
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
_PROSE: Final = lazy_pattern(
    r"(?<![\w'])(?:your?|the|must|enter|please|is|are|was|for|to|at|of|in|and|or|not?|with|has"
    r"|have|be|an?|new|current|old"
    r"|confirm|forgot(?:ten)?|required|invalid|incorrect|wrong|characters?|minimum|reset|change"
    r"|this|that|it|from|by|on"
    r"|should|can(?:not)?|if|when|will|we|users?|login|type|use|using|between|least|must|der|die"
    r"|das|und|oder|ein|eine"
    r"|le|la|les|de|el)(?![\w'])|passw|secret|token|credential|\{|%[sd]|<"
)


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
    at = header = 0
    while (match := _NAME.search(low, at)) is not None:
        at = match.end()
        if match["word"] == "kie":
            if at >= header and not match["blank"]:
                header = end_of(_HEADER, text, at)
                for pair in _PAIR.finditer(text, at, header):
                    if pair[1].lower() not in _ATTRIBUTES and MARK not in pair[2]:
                        yield Secret(*pair.span(2), "cookie")
            continue
        span = _value_of(text, low, match)
        if span is not None:
            yield span
            at = max(at, span.end)


def _value_of(text: str, low: str, match: re.Match[str]) -> Secret | None:
    """The secret after a name, if there is one. Looks at a bounded part of the text."""
    word, sep, comma, blank, quote = match.group("word", "sep", "comma", "blank", "open")
    start, at, name = match.start(), match.end(), _WORDS[word]
    if match["newline"] and sep not in (":", "="):
        return None
    if blank and name != "bearer" and not _is_flag(low, start):
        return None
    if sep == ">" and not _is_tag(low, start):
        return None
    if name in ("authorization", "bearer"):
        return _authorization(text, low, at, is_header=name == "authorization")
    if name == "signature":
        end = end_of(_OPAQUE, text, at) if sep == "=" else at
        return Secret(at, end, "signature") if end - at >= 32 else None
    if not _is_named_secret(low, word, start) or (
        word == "ss" and not _is_pass(text, low, start, sep)
    ):
        return None
    if match["block"]:
        return _block(text, match, name)
    tight = sep == "=" and low[at - len(quote or "") - 1] == "="
    if quote:
        run = (_QUOTED_TWICE if "\\" in quote else _QUOTED)[quote[-1]]
    else:
        run = (
            _BARE_LINE
            if tight and (_begins_line(low, start) or text[start:at].isupper())
            else _BARE
        )
    value = text[at : end_of(run, text, at, at + _JUDGED)]
    if not is_secret(name, value, quoted=quote is not None, tight=tight):
        return None
    if comma and "value" not in comma and (len(value) < 8 or not _DIGIT.search(value)):
        return None
    if word == "ss" and (_NUMBER.match(value) or not (_ODD.search(value) or " " in value)):
        return None
    end = end_of(run, text, at)
    if match["newline"] and not quote and not _is_alone(text, value, end):
        return None
    after = text[end : end + 1]
    if not quote and after and after in "([":
        return None
    is_option = after == ";" and _is_connection_string(low, start)
    if not quote and after and after in ",);" and _is_word(value) and not is_option:
        return None
    return Secret(at, end, _label(name))


def _block(text: str, match: re.Match[str], name: str) -> Secret | None:
    """The lines of a YAML block after a name: those that are indented deeper than its key. In a
    JSON string, its lines end with an escape."""
    line_end = _ESCAPED_END if match["newline"].startswith("\\") else _BLOCK_LINE_END
    before = text[max(0, match.start() - _LONGEST_INDENT) : match.start()]
    key = re.split(r"[\n\"'`]|\\{1,4}n", before)[-1]
    at = match.end("newline")
    least = len(key) - len(key.lstrip(" \t-")) + 1
    values: list[str] = []
    start = end = at
    for ending in line_end.finditer(text, at, at + _LONGEST_BLOCK):
        line = text[at : ending.start()]
        bare = line.strip()
        if bare:
            depth = len(line) - len(line.lstrip(" \t"))
            if depth < least:
                break
            if not values:
                least, start = depth, at + depth
            end = at + depth + len(bare)
            values.append(bare)
        if ending[0][:1] in "\"'`" or len(values) > _BLOCK_LINES:
            break
        at = ending.end()
    has_blanks = len(values) > 1 and any(" " in one for one in values)
    value = " ".join(values) if has_blanks else "".join(values)[:_JUDGED]
    if has_blanks:
        judged = _is_phrase(value, value.lower(), tight=name in _PASSWORDS)
    else:
        judged = is_secret(name, value, quoted=True)
    if not judged:
        return None
    return Secret(start, end, _label(name))


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
    return _ODD.search(value) is not None and _LETTER.search(value) is not None


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
    value = text[at : end_of(run, text, at, at + _JUDGED)]
    if not _is_credential(value, is_header=is_header, has_scheme=scheme is not None):
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
    return "password" if name in _PASSWORDS else name if name in ("token", "key") else "secret"


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


def _is_word(value: str) -> bool:
    return _IDENTIFIER.match(value.lower()) is not None


def _is_credential(value: str, *, is_header: bool, has_scheme: bool = False) -> bool:
    """Whether this is a credential after `Authorization: Bearer`, and not the next word of a
    sentence."""
    low = value.lower()
    if (
        MARK in value
        or _NO_SECRET.match(low)
        or _MEMBER.match(low)
        or len(value) < (8 if is_header else 16)
    ):
        return False
    return (
        _DIGIT.search(value) is not None
        or len(value) >= 24
        or (is_header and has_scheme and not value.islower())
    )


def is_secret(name: str, value: str, *, quoted: bool, tight: bool = False) -> bool:
    """Whether the value after such a name is likely to be a secret: not a type, a variable, a label
    or a placeholder."""
    if len(value) < 4 or MARK in value:
        return False
    low = value.lower()
    odd = _ODD.search(low) is not None
    if " " in value or "\t" in value:
        if name == "passphrase":
            return len(value) >= 8 and not _NO_SECRET.match(low)
        return name == "password" and quoted and _is_phrase(value, low, tight=tight)
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
        return (
            quoted or (odd and len(value) >= 6) or (tight and len(value) >= 6) or len(value) >= 16
        )
    if len(value) < 8:
        return False
    is_variable = _is_word(value) and "_" in value
    return (
        odd or (len(value) >= 20 and not is_variable) or (len(value) >= 16 and not value.islower())
    )


def _is_phrase(value: str, low: str, *, tight: bool) -> bool:
    """Whether words in quotes are a password, and not a sentence about one."""
    words = value.split()
    if not 8 <= len(value) < _JUDGED or _NO_SECRET.match(low) or not 2 <= len(words) <= 8:
        return False
    if any(map(_STRONG.fullmatch, words)):
        return True
    if _PROSE.search(low) or value.endswith((".", ":", "…")):
        return False
    return (
        tight
        or _DIGIT.search(value) is not None
        or (len(words) >= 4 and all(map(_PLAIN_WORD.fullmatch, words)))
    )


def label_of(name: str, text: str) -> str | None:
    """The label of a text that is the value of a key of this name. None if it is not a secret."""
    low = name[-100:].lower()
    match = _WHOLE_NAME.search(low)
    if match is None or MARK in text:
        return None
    called = _WORDS[match["word"]]
    if called in ("authorization", "bearer"):
        scheme, _, value = text.rpartition(" ")
        return (
            "authorization"
            if _is_credential(value[:_JUDGED], is_header=True, has_scheme=bool(scheme))
            else None
        )
    if called in ("cookie", "signature") or not _is_named_secret(low, match["word"], match.start()):
        return None
    if match["word"] == "ss":
        at = len(name) - len(low) + match.start()
        if (
            not _is_pass(name, name.lower(), at, "=")
            or _NUMBER.match(text)
            or not _ODD.search(text[:_JUDGED])
        ):
            return None
    return _label(called) if is_secret(called, text[:_JUDGED], quoted=True) else None
