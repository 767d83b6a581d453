"""Whether a value is a secret: not a type, a variable, a label, a placeholder or a sentence."""

from __future__ import annotations

import re
from typing import Final

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction.secret import MARK

JUDGED: Final = 64
"""Characters of a value that decide whether it is a secret. All of it is masked."""

PASSWORDS: Final = frozenset({"password", "passphrase"})
DIGIT: Final = lazy_pattern("[0-9]")
NUMBER: Final = lazy_pattern(r"[\d.,_-]*\Z")
ODD: Final = lazy_pattern(r"[0-9!@#$%^&*+~?]")
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
_PLAIN_WORD: Final = lazy_pattern("[a-z]{3,12}")
_STRONG: Final = lazy_pattern(
    r"(?=[^A-Z]*[A-Z])(?=[^a-z]*[a-z])(?=\D*\d\D*\d)[\w!@#$%^&*+~?-]{10,64}", re.ASCII
)  # a word
_PROSE: Final = lazy_pattern(
    r"(?<![\w'])(?:your?|the|must|enter|please|is|are|was|for|to|at|of|in|and|or|not?|with|has"
    r"|have|be|an?|new|current|old"
    r"|confirm|forgot(?:ten)?|required|invalid|incorrect|wrong|characters?|minimum|reset|change"
    r"|this|that|it|from|by|on"
    r"|should|can(?:not)?|if|when|will|we|users?|login|type|use|using|between|least|must|der|die"
    r"|das|und|oder|ein|eine"
    r"|le|la|les|de|el)(?![\w'])|passw|secret|token|credential|\{|%[sd]|<"
)


def is_secret(name: str, value: str, *, quoted: bool, tight: bool = False) -> bool:
    """Whether the value after such a name is likely to be a secret. `quoted`: it is in quotes;
    `tight`: it follows `=` without a space."""
    if len(value) < 4 or MARK in value:
        return False
    low = value.lower()
    if " " in value or "\t" in value:
        if name == "passphrase":
            return len(value) >= 8 and not _NO_SECRET.match(low)
        return name == "password" and quoted and is_phrase(value, low, tight=tight)
    is_odd = ODD.search(low) is not None
    if _NO_SECRET.match(low) or (not is_odd and _names_a_secret(low)):
        return False
    if name in PASSWORDS:
        return _is_password(value, low, is_odd=is_odd, quoted=quoted, tight=tight)
    return _is_key(value, low, is_odd=is_odd, quoted=quoted)


def _is_password(value: str, low: str, *, is_odd: bool, quoted: bool, tight: bool) -> bool:
    if NUMBER.match(low):
        return len(value) >= (4 if quoted else 6)
    if quoted:
        return True
    if _is_code(low):
        return False
    return len(value) >= 16 or (len(value) >= 6 and (is_odd or tight))


def _is_key(value: str, low: str, *, is_odd: bool, quoted: bool) -> bool:
    if len(value) < 8 or NUMBER.match(low):
        return False
    if not quoted and _is_code(low):
        return False
    if is_odd:
        return True
    is_variable = is_word(value) and "_" in value
    return (len(value) >= 20 and not is_variable) or (len(value) >= 16 and not value.islower())


def _names_a_secret(low: str) -> bool:
    return any(word in low for word in ("token", "passw", "secret", "key"))


def _is_code(low: str) -> bool:
    """Whether a value is an expression: `config.token`, `get_token()`."""
    return _MEMBER.match(low) is not None or _CALL.match(low) is not None


def is_word(value: str) -> bool:
    return _IDENTIFIER.match(value.lower()) is not None


def is_phrase(value: str, low: str, *, tight: bool) -> bool:
    """Whether words in quotes are a password, and not a sentence about one."""
    words = value.split()
    if not 8 <= len(value) < JUDGED or _NO_SECRET.match(low) or not 2 <= len(words) <= 8:
        return False
    if any(map(_STRONG.fullmatch, words)):
        return True
    if _PROSE.search(low) or value.endswith((".", ":", "…")):
        return False
    return (
        tight
        or DIGIT.search(value) is not None
        or (len(words) >= 4 and all(map(_PLAIN_WORD.fullmatch, words)))
    )


def is_credential(value: str, *, is_header: bool, has_scheme: bool = False) -> bool:
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
        DIGIT.search(value) is not None
        or len(value) >= 24
        or (is_header and has_scheme and not value.islower())
    )
