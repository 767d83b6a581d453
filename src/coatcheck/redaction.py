"""Mask secrets of known shapes in what is shown: summaries, previews, hits, errors. Stored bytes
stay exact.

`mask` replaces each secret with a marker such as `[masked: aws key]`, which does not reveal its
length. The time is proportional to the text, whatever the text is: every repetition in a pattern is
bounded, possessive, or begins only where the one before it ended. Hashes, UUIDs, pointers and
images are left alone.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, islice
from sys import maxsize
from typing import Any, Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.media import encoding_of

MARK: Final = "[masked:"
"""The start of every marker."""

CONTEXT: Final = 4_096
"""Characters before and after a passage that are searched too, for a secret that the passage would
cut."""

_LONG: Final = 200  # characters from which a quick check comes first


class Secret(NamedTuple):
    """The place of a secret in a text, and what it is."""

    start: int
    end: int
    label: str


class QuickPattern:
    """A pattern in RE2 syntax over bytes, compiled when it is first used: linear, and many times as
    fast as `re`. Characters beyond ASCII are bytes `\\x80-\\xff` of UTF-8.

    Called with a text, it says whether that may match slower patterns: it must match everything
    that they match, and may match more. `found` needs a pattern that `captures`."""

    def __init__(self, pattern: str, *, captures: bool = False) -> None:
        self._pattern = pattern
        self._captures = captures

    def __call__(self, text: str) -> bool:
        return self._compiled.search(text.encode("utf-8", "surrogatepass")) is not None

    def found(self, data: bytes, most: int = 1_000) -> list[re.Match[bytes]]:
        """The first matches."""
        return list(islice(self._compiled.finditer(data), most))

    @cached_property
    def _compiled(self) -> Any:
        import re2  # type: ignore[import-untyped]  # it ships no types; here, so that importing coatcheck stays quick

        options = re2.Options()
        options.encoding = re2.Options.Encoding.LATIN1  # match bytes
        options.never_capture = not self._captures
        return re2.compile(self._pattern.encode(), options)


# Six or more characters up to U+00FF in a row, in each encoding.
_WIDE_RUNS: Final = (
    (lazy_pattern(rb"(?:[^\x00]\x00\x00\x00){6,}"), "utf-32-le"),
    (lazy_pattern(rb"(?:\x00\x00\x00[^\x00]){6,}"), "utf-32-be"),
    (lazy_pattern(rb"(?:[^\x00]\x00){6,}"), "utf-16-le"),
    (lazy_pattern(rb"(?:\x00[^\x00]){6,}"), "utf-16-be"),
)
_PASSWORD: Final = lazy_pattern(r"(://[^/?#@:\s]*+:)[^/?#@\s]++(?=@)")
_OPTION: Final = lazy_pattern(
    r"([?&][\w.-]*(?:secret|password|token)[\w.-]*=)(?!\[masked: )[^&\s]++", re.IGNORECASE
)
_KEYS_OF_A_NAME: Final = ("name", "Name", "key", "Key")
_ROUNDS: Final = 8
_LOWER: Final = {code: code + 32 for code in range(ord("A"), ord("Z") + 1)}


def mask(text: str, start: int = 0, end: int | None = None) -> str:
    """Replace every secret of a known shape by a marker.

    With `start` and `end`, return that part of the text; the text around it still helps to find
    secrets."""
    found = find_secrets(text)
    if not found:
        return text if not start and end is None else text[start:end]
    masked = _replace(text, found, start, len(text) if end is None else end)
    for _ in range(_ROUNDS):  # the text beside a new marker may look like a secret now
        found = find_secrets(masked)
        if not found:
            break
        masked = _replace(masked, found, 0, len(masked))
    return masked


def mask_url(url: str) -> str:
    """Mask a url for display: passwords and secret options are masked by their place, whatever they
    look like."""
    if (
        "://" not in url and "=" not in url
    ):  # a folder: no place for a secret, and masking compiles many patterns
        return url
    return mask(_OPTION.sub(rf"\1{MARK} key]", _PASSWORD.sub(rf"\1{MARK} password]", url)))


def mask_bytes(data: bytes) -> bytes:
    """Mask every secret in bytes: in UTF-8, UTF-16, UTF-32, Latin-1, or a mix of them. All other
    bytes stay the same.

    Bytes that are not UTF-8 are decoded to lone surrogates, and written as themselves again. UTF-16
    and UTF-32 are found by their byte-order mark or by their zero bytes, in the middle of other
    bytes too."""
    if (marked := encoding_of(data)).is_wide:
        data = _mask_wide(data, marked.name)
    if b"\x00" in data:
        for run, encoding in _WIDE_RUNS:
            data = run.sub(lambda match, encoding=encoding: _mask_wide(match[0], encoding), data)  # type: ignore[misc]
    text = data.decode("utf-8", "surrogateescape")
    masked = mask(text)
    return data if masked == text else masked.encode("utf-8", "surrogateescape")


def _mask_wide(data: bytes, encoding: str) -> bytes:
    """Mask bytes in a wide encoding. Bytes that do not survive a round trip through it are left
    alone."""
    whole = len(data) - len(data) % (4 if "32" in encoding else 2)
    try:
        text = data[:whole].decode(encoding, "surrogatepass")
    except UnicodeDecodeError:
        return data
    masked = mask(text)
    if masked == text or text.encode(encoding, "surrogatepass") != data[:whole]:
        return data
    return masked.encode(encoding, "surrogatepass") + data[whole:]


def mask_value(value: Any) -> Any:
    """Mask every secret in a JSON value: in strings, in keys, and whole values whose key names a
    secret.

    Containers are copied. Values that JSON does not have stay as they are."""
    top = [value]
    todo: list[tuple[Any, Any, str]] = [(top, 0, "")]
    copies: dict[
        tuple[int, str], Any
    ] = {}  # a container that occurs twice, or contains itself, is copied once
    while todo:
        holder, at, name = todo.pop()
        item = holder[at]
        if isinstance(item, str | int) and not isinstance(item, bool):
            label = _label_of(name, str(item)) if name else None
            if label is not None:
                holder[at] = f"{MARK} {label}]"
            elif isinstance(item, str):
                lead = "cookie: " if name.lower() in ("cookie", "set-cookie") else ""
                holder[at] = mask(lead + item, len(lead))
        elif (id(item), name) in copies:
            holder[at] = copies[id(item), name]
        elif isinstance(item, dict):
            holder[at] = copies[id(item), name] = copy = _with_masked_keys(item)
            # An object such as `{"name": "API_TOKEN", "value": "…"}` names its value.
            called = next(
                (item[key] for key in _KEYS_OF_A_NAME if isinstance(item.get(key), str)), ""
            )
            for shown, key in zip(copy, map(str, item), strict=True):
                todo.append((copy, shown, called if called and key.lower() == "value" else key))
        elif isinstance(item, list | tuple):
            holder[at] = copies[id(item), name] = items = list(item)
            todo.extend((items, index, name) for index in range(len(items)))
    return top[0]


def _with_masked_keys(value: dict[Any, Any]) -> dict[Any, Any]:
    """Copy an object with secrets in its keys masked. Keys that become equal get a number, so that
    none is lost."""
    copy: dict[Any, Any] = {}
    for key, each in value.items():
        shown = mask(key) if isinstance(key, str) else key
        copy[f"{shown} ({len(copy)})" if shown in copy else shown] = each
    return copy


def find_secrets(text: str) -> list[Secret]:
    """Find the secrets of a text, in order and without overlaps.

    Terminal colours do not hide them, and neither do the escapes of JSON, nor of JSON in JSON: a
    text with escapes is searched both as it is written and as its reader sees it."""
    if len(text) > _LONG and not is_suspect(text):
        return []
    found = _found(text)
    if _has_escapes(text):
        found += _found_behind_escapes(text)
    if not found:
        return found
    found.sort(key=lambda span: (span.start, -span.end))
    merged: list[Secret] = []
    for span in found:
        if merged and span.start < merged[-1].end:
            if span.end > merged[-1].end:
                merged[-1] = merged[-1]._replace(end=span.end)
        else:
            merged.append(span)
    return merged


class _Piece(NamedTuple):
    """A part of a text that is read at once: characters that mean themselves, or one escape."""

    start: int  # in the text as written
    size: int
    read_start: int  # in the text as it is read
    read: str


def _pieces(text: str) -> Iterator[_Piece]:
    """The text, cut at its escapes. Colours are left out."""
    at = read_at = 0
    for escape in _ESCAPE.finditer(text):
        if escape.start() > at:
            plain = text[at : escape.start()]
            yield _Piece(at, len(plain), read_at, plain)
            read_at += len(plain)
        meaning = _meaning(escape)
        if meaning:
            yield _Piece(escape.start(), len(escape[0]), read_at, meaning)
            read_at += len(meaning)
        at = escape.end()
    if at < len(text):
        yield _Piece(at, len(text) - at, read_at, text[at:])


def _as_read(text: str) -> str:
    """The text with each escape as the character that it means, and without colours."""
    return _ESCAPE.sub(_meaning, text)


def _meaning(escape: re.Match[str]) -> str:
    """The character that an escape means; nothing for a colour."""
    if escape["letter"]:
        return _ESCAPED_LETTERS.get(escape["letter"], escape["letter"])
    if escape["code"]:
        return chr(int(escape["code"], 16))
    return ""


def _found_behind_escapes(text: str) -> list[Secret]:
    """Find the secrets of a text as it is read; positions are those in the text as it is
    written."""
    secrets = _found(_as_read(text))
    if not secrets:
        return []
    pieces = list(_pieces(text))
    read_starts = [piece.read_start for piece in pieces]
    found: list[Secret] = []
    for span in secrets:
        first = pieces[bisect_right(read_starts, span.start) - 1]
        last = pieces[bisect_right(read_starts, span.end - 1) - 1]
        start = first.start + span.start - first.read_start
        end = last.start + span.end - last.read_start
        if span.end == last.read_start + len(last.read):
            end = last.start + last.size
        found.append(Secret(start, end, span.label))
    return found


def _found(text: str) -> list[Secret]:
    low = text.lower()
    if len(low) != len(text):  # a few letters become two in lower case
        low = text.translate(_LOWER)
    found = list(named_secrets(text, low)) if _NAME.search(low) else []
    found += chain(plain_tokens(text), netrc_passwords(text), placed_secrets(text))
    if _HINT.search(text):
        found += chain(prefixed_tokens(text), private_keys(text), url_passwords(text))
    return found


def _replace(text: str, found: list[Secret], start: int, end: int) -> str:
    parts: list[str] = []
    for span in found:
        if span.end <= start or span.start >= end:
            continue
        parts += (text[start : max(start, span.start)], f"{MARK} {span.label}]")
        start = span.end
    parts.append(text[start:end])
    return "".join(parts)


_JUDGED: Final = 64  # characters of a value that decide whether it is a secret; all of it is masked
_DIGIT: Final = lazy_pattern("[0-9]")
# Each name is found by its rarest letters, to which `re` skips ahead; then the letters before them
# are checked.
_WORDS: Final = {
    "ken": "token", "key": "key", "kie": "cookie", "word": "password", "wort": "password", "wd": "password",
    "phrase": "passphrase", "cret": "secret", "uth": "auth", "uthorization": "authorization", "bearer": "bearer",
    "psessid": "secret", "jsessionid": "secret", "g": "signature", "gnature": "signature", "ss": "password",
}  # fmt: skip
_WORD_OF_NAME: Final = (
    r"k(?:en(?<=token)|ey|ie(?<=cookie))|w(?:or[dt](?<=passwor[dt])|d(?<=passwd)|d(?<=pwd))|phrase(?<=passphrase)"
    r"|cret(?<=secret)|uth(?<=auth)(?:orization)?|bearer|psessid|jsessionid|g(?<=sig)(?<![a-z]sig)|gnature(?<=signature)"
    r"|ss(?<=pass)"
)
_KEYS: Final = (
    "api", "access", "account", "auth", "private", "encryption", "signing", "master", "session", "client", "secret",
    "subscription", "hmac", "jwt", "service", "storage",
)  # fmt: skip
_TAILS: Final = (
    "value|text|string|plain|base64|b64|data|prod|dev|test|live|old|new"  # as in `client-key-data`
)
_NAME_SUFFIX: Final = rf"(?:[ _.-]?(?:{_TAILS}|\d{{1,2}}))?"
_NAME: Final = lazy_pattern(
    rf"(?P<word>{_WORD_OF_NAME}){_NAME_SUFFIX}"
    r"(?:(?:\\{0,4}[\"'`]\]?)?[ \t]{0,8}"
    r"(?:(?P<sep>:[ \t]?[a-z][\w.\[\]?]{0,24}+(?: \| [\w.\[\]]{1,24}+){0,2}+[ \t]{0,2}=(?=[ \t]{0,4}\\{0,4}[\"'])"
    r"|=>|:=|==?|:|>)|(?P<comma>(?<=[\"'`]),(?=[ \t]{0,4}\\{0,4}[\"'])"
    r"(?:[ \t]{0,4}\\{0,4}[\"']value\\{0,4}[\"'][ \t]{0,4}:)?))[ \t]{0,8}"
    r"|(?P<blank>[ \t]{1,4}))"
    r"(?:(?:!{1,2}[a-z]{1,16}[ \t]{1,4}(?=[|>]))?(?P<block>[|>][+-]?[0-9]?[+-]?)?[ \t]{0,8}"
    r"(?P<newline>\r?\n|(?:\\{1,4}r)?\\{1,4}n)(?:[ \t]{0,40}(?:\r?\n|(?:\\{1,4}r)?\\{1,4}n))?[ \t]{0,40})?"
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
    r"(?:bearer|basic|token|negotiate|apikey|bot|(?P<several>digest|signature|aws4-hmac-sha256))[ \t]{1,4}"
)
_LINE: Final = lazy_pattern(r"[^\n\r\\]*+")
_OPAQUE: Final = lazy_pattern(r"[\w.~+/=%-]*+", re.ASCII)
_PAIR: Final = lazy_pattern(r"(?<![\w.-])([\w.-]{1,64}+)=([^;\s\"'\\,]{8,}+)")
_ATTRIBUTES: Final = frozenset(
    {"path", "domain", "expires", "max-age", "samesite", "priority", "version"}
)
_PASSWORDS: Final = frozenset({"password", "passphrase"})
_DULL_BEFORE: Final = (
    "page", "next", "continuation", "sync", "cancellation", "stop", "eos", "bos", "pad", "unk", "sep", "cls", "mask",
    "special", "input", "output", "public", "image",
)  # fmt: skip
_NO_SECRET: Final = lazy_pattern(
    r"(?:null|none|nil|undefined|true|false|yes|no|string|str|text|number|int|integer|bool|boolean|bytes|object|any|required"
    r"|optional|password|passwd|pass|secret|token|hidden|redacted|removed|masked|example|placeholder|changeme|empty|unset"
    r"|disabled|enabled|default|same-origin|include|omit|unknown|missing|invalid|expired|bearer|basic|x{3,}|your[_-].*)\Z"
    r"|\$[\w{(]\w*[})]?\Z|\$\{|\$\(|[{<\[]|%[s(]|%\w+%\Z|[*•.…x_-]{3,}\Z|art:[0-9a-f]{12}|[a-z][a-z0-9+.-]{1,15}://"
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
    r"(?:server|host|data source|database|initial catalog|user(?: ?id|name)?|uid)[ \t]?=[^;\n=]{1,128};"
)
_REST_OF_LINE: Final = lazy_pattern(r"[ \t]{0,8}(?:\r?\n|\\{1,4}[nr\"']|[\"'`]|\Z)")
_BLOCK_LINE_END: Final = lazy_pattern(r"\r?\n|\Z")
_ESCAPED_END: Final = lazy_pattern(r"(?:\\{1,4}r)?\\{1,4}n|\\{0,4}[\"'`]|\n|\Z")
_LONGEST_INDENT: Final = 128
_BLOCK_LINES: Final = 100
_LONGEST_BLOCK: Final = 16_384
_PASS_OF: Final = (
    "db", "database", "sql", "pg", "postgres", "mongo", "redis", "smtp", "mail", "imap", "ftp", "ssh", "admin", "root",
    "user", "usr", "login", "auth", "sudo", "wifi", "proxy", "http", "https", "ldap", "api", "app", "rabbitmq", "amqp",
    "mqtt", "service", "account", "keystore", "key", "cert", "jdbc", "git", "registry", "docker", "master", "vpn",
)  # fmt: skip
_PROSE: Final = lazy_pattern(
    r"(?<![\w'])(?:your?|the|must|enter|please|is|are|was|for|to|at|of|in|and|or|not?|with|has|have|be|an?|new|current|old"
    r"|confirm|forgot(?:ten)?|required|invalid|incorrect|wrong|characters?|minimum|reset|change|this|that|it|from|by|on"
    r"|should|can(?:not)?|if|when|will|we|users?|login|type|use|using|between|least|must|der|die|das|und|oder|ein|eine"
    r"|le|la|les|de|el)(?![\w'])|passw|secret|token|credential|\{|%[sd]|<"
)


def named_secrets(text: str, low: str) -> Iterator[Secret]:
    """Secrets that follow their name: `password = …`, `"api_key": "…"`, headers, cookies. What
    follows the name must look like a value, not like a type, a variable or a placeholder. `low` is
    the text in lower case."""
    at = header = 0
    while (match := _NAME.search(low, at)) is not None:
        at = match.end()
        if match["word"] == "kie":
            if at >= header and not match["blank"]:
                header = _end(_HEADER, text, at)
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
        end = _end(_OPAQUE, text, at) if sep == "=" else at
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
    value = text[at : _end(run, text, at, at + _JUDGED)]
    if not _is_secret(name, value, quoted=quote is not None, tight=tight):
        return None
    if comma and "value" not in comma and (len(value) < 8 or not _DIGIT.search(value)):
        return None
    if word == "ss" and (_NUMBER.match(value) or not (_ODD.search(value) or " " in value)):
        return None
    end = _end(run, text, at)
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
    is_secret = _is_phrase(value, value.lower(), tight=name in _PASSWORDS) if has_blanks else None
    if not (_is_secret(name, value, quoted=True) if is_secret is None else is_secret):
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
    value = text[at : _end(run, text, at, at + _JUDGED)]
    if not _is_credential(value, is_header=is_header, has_scheme=scheme is not None):
        return None
    return Secret(at, _end(run, text, at), "authorization")


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


def _end(run: re.Pattern[str], text: str, at: int, before: int = maxsize) -> int:
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


def _is_secret(name: str, value: str, *, quoted: bool, tight: bool = False) -> bool:
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


def _label_of(name: str, text: str) -> str | None:
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
    return _label(called) if _is_secret(called, text[:_JUDGED], quoted=True) else None


_FENCE: Final = lazy_pattern(
    r"-----(?:(BEGIN)|END) (?:[A-Z0-9]{1,12} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
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
                start, done = (
                    fence.start(),
                    _end(_BODY, text, fence.end(), after.start() if after else len(text)),
                )
            yield Secret(start, done, "private key")
    if "Private-Lines" in text:
        done = 0
        for match in _PUTTY.finditer(text):
            if match.start() >= done:
                done = _end(_BODY, text, match.end(), match.end() + _LONGEST_KEY)
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
    if "password" not in text or ("login" not in text and "machine" not in text):
        return
    for match in chain(*(pattern.finditer(text) for pattern in _NETRC)):
        start, value = match.start(), match[1].strip("\\\"'")
        is_entry = (
            _MACHINE.search(text, max(0, start - 256), start)
            or _LOGIN.match(text, match.end())
            or _HOST.match(match[0])
        )
        if _is_secret("password", value, quoted=is_entry is not None):
            at = text.index(value, match.start(1))
            yield Secret(at, at + len(value), "password")


_ESCAPED_QUOTE: Final = r"\\{0,4}[\"']"
_NAME_AND_VALUE: Final = (
    rf"[ \t]{{1,8}}(?:{_ESCAPED_QUOTE})?(?P<name>[\w.-]{{1,64}})(?:{_ESCAPED_QUOTE})?[ \t]{{0,8}}"
    r"(?:\r?\n|(?:\\{1,4}r)?\\{1,4}n)[ \t]{0,40}value:[ \t]{1,8}"
)
_TAG_WITH_VALUE: Final = (
    rf"(?:add|property|entry|param|setting)\s{{1,8}}(?:key|name)={_ESCAPED_QUOTE}(?P<name>[\w.:-]{{1,64}})"
    rf"{_ESCAPED_QUOTE}\s{{1,8}}value="
)


def _given(begin: str, rest: str) -> tuple[str, re.Pattern[str]]:
    """A literal, and a pattern for the value that follows it and the rest of what names it."""
    value = (
        rf"(?:{_ESCAPED_QUOTE}([^\"'\n\\]{{1,256}}){_ESCAPED_QUOTE}|([^\s\"'`\\,;|&<>]{{1,256}}))"
    )
    return begin, lazy_pattern(rf"{begin}(?<![\w-]{begin}){rest}{value}", re.ASCII)


_GIVEN: Final = (
    _given("sshpass", r"[ \t]{1,4}-p[ \t]{0,4}"),
    _given("docker", r"[ \t]{1,4}login(?=[ \t])[^\n|;&]{0,200}?[ \t]-p[ \t]{1,4}"),
    _given(
        "mysql",
        r"(?:dump|admin)?(?=[ \t])[^\n|;&]{0,200}?[ \t]-p(?=\S{0,64}\d)(?=\S{0,64}[A-Za-z])",
    ),
    _given("psk", r"[ \t]{0,4}[=:][ \t]{0,4}(?=[^\n]{0,64}[0-9!@#$%^&*+~?])"),
    _given("ENV", r"(?<![^\n]ENV)[ \t]{1,8}(?P<name>\w{1,64})[ \t]{1,8}"),
    _given("ConvertTo-SecureString", r"[ \t]{1,4}(?:-String[ \t]{1,4})?(?![-$(])"),
    _given("name:", _NAME_AND_VALUE),
    _given("<", _TAG_WITH_VALUE),
)


def placed_secrets(text: str) -> Iterator[Secret]:
    """Secrets that are known by their place: arguments of commands, the value beside a name; and
    `_OTHERS`."""
    for literal, pattern in _GIVEN:
        for match in pattern.finditer(text) if literal in text else ():
            name = match.groupdict().get("name", "password")
            if (label := _label_of(name, match[match.lastindex or 0])) is not None:
                yield Secret(*match.span(match.lastindex or 0), label)
    for label, literal, pattern in _OTHERS:
        for match in pattern.finditer(text) if literal in text else ():
            yield Secret(*match.span(), label)


def _is_token(value: str) -> bool:
    """Whether the user part of a url is a token, and not a name."""
    has_both = not value.isdigit() and any(map(str.isdigit, value))
    return (
        has_both
        and (len(value) >= 20 or "." not in value)
        and not ("." in value and value.islower())
    )


def url_passwords(text: str) -> Iterator[Secret]:
    """Passwords and tokens in urls, and in the `--user` option of curl."""
    found = [_ADDRESS.finditer(text)] if "@" in text and "://" in text else []
    if "curl" in text:
        found.append(_USER.finditer(text))
    for match in chain(*found):
        if _is_secret("password", match[1], quoted=True) and not _PORT.match(match[1]):
            yield Secret(*match.span(1), "password")
    if "@" in text and "://" in text:
        yield from (
            Secret(*one.span(1), "token") for one in _BARE_TOKEN.finditer(text) if _is_token(one[1])
        )


_WORD: Final = "0-9A-Za-z"
_BASE64: Final = "0-9A-Za-z+/"  # so that no part of an image in base64 is taken for a key
_BASE58: Final = "[1-9A-HJ-NP-Za-km-z]"
_AWS_SECRET: Final = r"(?:[\s,:;|\"']{1,6}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?"


class _Shape(NamedTuple):
    """A token: a lead of fixed length, and the rest, which begins with a rare character."""

    label: str
    lead: str
    rest: str
    before: str = _WORD  # characters that may not come before it


_SHAPES: Final = (
    _Shape("aws key", "", rf"A[BKS]IA[A-Z2-7]{{16}}(?![{_WORD}]){_AWS_SECRET}", _BASE64),
    _Shape("google key", "", r"AIza[\w-]{35}", _BASE64),
    _Shape("twilio key", "", rf"SK[0-9a-f]{{32}}(?![{_WORD}])", _BASE64),
    _Shape("github token", "gh[oprsu]", r"_[A-Za-z0-9]{20,}+"),
    _Shape("github token", "github_pat", r"_\w{20,}+"),
    _Shape("stripe key", "[rs]k", r"_(?:live|test|org)_[A-Za-z0-9]{10,}+"),
    _Shape("webhook secret", "whsec", r"_[A-Za-z0-9+/=]{16,}+"),
    _Shape("hugging face token", "hf", r"_[A-Za-z0-9]{20,}+"),
    _Shape("npm token", "npm", r"_[A-Za-z0-9]{30,}+"),
    _Shape("api key", "gsk", r"_[A-Za-z0-9]{30,}+"),
    _Shape("docker token", "dckr", r"_[op]at_[\w-]{20,}+"),
    _Shape("digitalocean token", "do[opr]", r"_v1_[0-9a-f]{32,}+"),
    _Shape("shopify token", "shp(?:at|ca|pa|ss)", r"_[0-9A-Fa-f]{32,}+"),
    _Shape("linear key", "lin", r"_(?:api|oauth)_[A-Za-z0-9]{32,}+"),
    _Shape("notion token", "ntn", r"_[A-Za-z0-9]{40,}+"),
    _Shape("figma token", "fig[dour]", r"_[\w-]{36,}+"),
    _Shape("grafana token", "glsa", r"_[A-Za-z0-9]{32}_[0-9A-Fa-f]{8}"),
    _Shape("grafana token", "glc", r"_[A-Za-z0-9+/=]{32,}+"),
    _Shape("planetscale token", "pscale", r"_(?:tkn|oauth|pw)_[\w.=-]{30,}+"),
    _Shape("supabase key", "sbp", r"_(?:v0_)?[0-9a-f]{40,}+"),
    _Shape("supabase key", "sb", r"_secret_[\w-]{20,}+"),
    _Shape("vercel token", "vc[aikpr]", r"_[A-Za-z0-9]{40,}+"),
    _Shape("vercel token", "vercel_blob_rw", r"_\w{32,}+"),
    _Shape("fly token", "fm1[ar]", r"_[A-Za-z0-9+/=]{50,}+"),
    _Shape("fly token", "fm2", r"_[A-Za-z0-9+/=]{50,}+"),
    _Shape("fly token", "fo1", r"_[\w-]{40,}+"),
    _Shape("e2b key", "e2b", rf"_[0-9a-f]{{40}}(?![{_WORD}])"),
    _Shape(
        "fireworks key", "fw", r"_(?=[A-Za-z]{0,20}\d)(?=[^A-Z]{0,20}[A-Z])[A-Za-z0-9]{22,24}(?!\w)"
    ),
    _Shape("netlify token", "nf[bcopu]", r"_[A-Za-z0-9]{36,}+"),
    _Shape("cloudflare token", "cf[au]t", r"_[A-Za-z0-9]{40,}+"),
    _Shape("cloudflare key", "cfk", r"_[A-Za-z0-9]{40,}+"),
    _Shape("sentry token", "sntry[su]", r"_[A-Za-z0-9+/=_-]{40,}+"),
    _Shape("replicate token", "r8", r"_[A-Za-z0-9]{37,}+"),
    _Shape("circleci token", "CCI(?:PAT|PRJ)", r"_[\w-]{30,}+"),
    _Shape("buildkite token", "bk[au]a", r"_[0-9a-f]{40,}+"),
    _Shape("rubygems key", "rubygems", r"_[0-9a-f]{48}"),
    _Shape("sonar token", "sq[aup]", r"_[0-9a-f]{40}"),
    _Shape("langsmith key", "lsv2", r"_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{8,}+"),
    _Shape("pinecone key", "pcsk", r"_\w{40,}+"),
    _Shape("posthog key", "phx", r"_[A-Za-z0-9]{40,}+"),
    _Shape("neon key", "napi", r"_[a-z0-9]{50,}+"),
    _Shape("prefect key", "pn[ub]", r"_[A-Za-z0-9]{36}"),
    _Shape("sourcegraph token", "sgp", r"_(?:[0-9a-f]{16}_|local_)?[0-9a-f]{40}"),
    _Shape("api key", "sk", r"_[0-9a-f]{48}(?![0-9A-Za-z])"),
    _Shape("mailgun key", "key", rf"-[0-9a-f]{{32}}(?![{_WORD}-])"),
    _Shape("brevo key", "xkeysib", r"-[0-9a-f]{64}-[A-Za-z0-9]{16}"),
    _Shape("brevo key", "xsmtpsib", r"-[0-9a-f]{64}-[A-Za-z0-9]{16}"),
    _Shape("square token", r"sq0(?:at|cs)p", r"-[\w-]{22,}+"),
    _Shape("postman key", "PMAK", r"-[0-9a-f]{24}-[0-9a-f]{34}"),
    _Shape("new relic key", "NR(?:AK|II|RA|IQ|SP)", r"-[\w-]{25,}+"),
    _Shape("pulumi token", "pul", rf"-[0-9a-f]{{40}}(?![{_WORD}])"),
    _Shape("heroku key", "HRKU", r"-[\w-]{36,}+"),
    _Shape(
        "hubspot token",
        "pat",
        r"-(?:na|eu|ap)\d-[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    ),
    _Shape("tailscale key", "tskey", r"-(?:auth|api|client|scim|webhook)-[\w-]{20,}+"),
    _Shape("tavily key", "tvly", r"-(?=[\w-]{0,40}\d)[\w-]{24,}+"),
    _Shape("contentful token", "CFPAT", r"-[\w-]{40,}+"),
    _Shape("cloudflare key", "v1\\.0", r"-[0-9a-f]{24}-[0-9a-f]{100,}+"),
    _Shape("dynatrace token", r"dt0(?:c01|s16)", r"\.[A-Z0-9]{24}\.[A-Z0-9]{64}"),
    _Shape("dropbox token", "sl", r"\.(?:u\.)?[\w-]{100,}+"),
    _Shape("gitlab token", "gl(?:pat|ptt|cbt|imt)", r"-[\w.-]{20,}+"),
    _Shape("gitlab token", "gl(?:dt|rt|ft|wt)", r"-[\w.-]{20,}+"),
    _Shape("gitlab token", "gl(?:soat|ffct)", r"-[\w.-]{20,}+"),
    _Shape("gitlab token", "glagent", r"-[\w.-]{20,}+"),
    _Shape("slack token", "xox[abceoprs]", r"-[\w-]{10,}+"),
    _Shape("slack token", "xapp", r"-\d-[\w-]{10,}+"),
    _Shape("api key", "sk", r"-(?=[\w-]{0,120}[A-Za-z0-9]{12})(?=[\w-]{0,120}\d)[\w-]{20,}+"),
    _Shape(
        "modal key",
        "a[ks]",
        r"-(?=[A-Za-z]{0,20}\d)(?=[^A-Z]{0,20}[A-Z])[A-Za-z0-9]{22}(?![\w-])",
        f"{_WORD}_-",
    ),
    _Shape("api key", "csk", r"-[A-Za-z0-9]{40,}+"),
    _Shape("api key", "xai", r"-[A-Za-z0-9]{30,}+"),
    _Shape("api key", "pplx", r"-[A-Za-z0-9]{30,}+"),
    _Shape("api key", "nvapi", r"-[\w-]{30,}+"),
    _Shape("pypi token", "pypi", r"-[\w-]{32,}+"),
    _Shape("google secret", "GOCSPX", r"-[\w-]{20,}+"),
    _Shape("age key", "AGE", r"-SECRET-KEY-1[0-9A-Z]{20,}+"),
    _Shape("google token", "ya29", r"\.[\w-]{20,}+"),
    _Shape("vault token", "hv[brs]", r"\.[\w-]{20,}+"),
    _Shape("sendgrid key", "SG", r"\.[\w-]{16,64}\.[\w-]{16,}+"),
    _Shape("slack webhook", r"hooks\.slack", r"\.com/(?:services|workflows|triggers)/[\w/-]{20,}+"),
    _Shape("discord webhook", "discord", r"\.com/api/webhooks/\d{10,24}/[\w-]{20,}+"),
    _Shape("discord webhook", "discordapp", r"\.com/api/webhooks/\d{10,24}/[\w-]{20,}+"),
)
_SHAPE_LEADS: Final = tuple(lazy_pattern(f"(?:{shape.lead})\\Z") for shape in _SHAPES)
_LONGEST_LEAD: Final = 16
_FOLLOWED_BY: Final = {
    "_": r"[\w+/=-]{10}",
    "-": r"[\w.-]{10}",
    ".": r"(?:[\w-]{16}|com/|u\.)",
    "A": "",
    "S": "",
}


def _alternatives(first: str) -> str:
    """All shapes whose rest begins with this character. It is matched once for all of them: `re`
    skips ahead to it."""
    shapes = []
    for at, shape in enumerate(_SHAPES):
        rest = shape.rest.removeprefix("\\")
        if rest[0] == first:
            lead = f"(?<={shape.lead}[{first}])" if shape.lead else ""
            shapes.append(f"{lead}(?<![{shape.before}]{shape.lead}[{first}]){rest[1:]}(?P<_{at}>)")
    return f"{re.escape(first)}(?={_FOLLOWED_BY[first]})(?:{'|'.join(shapes)})"


_TOKENS: Final = "|".join(map(_alternatives, _FOLLOWED_BY))
_TOKEN: Final = lazy_pattern(_TOKENS, re.ASCII)
# Whether there is anything but names to look for: a token, or a literal that the other shapes have.
_HINT: Final = lazy_pattern(
    rf"{_TOKENS}|J(?<=eyJ)|-(?:----(?:BEGIN|END)|Lines:|u |-user)|:(?:AA|//[^\s/@]{{1,400}}@)|Q~",
    re.ASCII,
)
_MIXED_CASE: Final = r"(?=\w{0,20}[a-z])(?=\w{0,20}[A-Z])(?=\w{0,20}[0-9])"
# Tokens without a rare first character: the label, a literal that `in` finds quickly, the pattern.
_OTHERS: Final = (
    ("jwt", "eyJ", lazy_pattern(r"eyJ(?<![\w-]eyJ)[\w-]{10,}+(?:\.[\w-]*+){1,4}", re.ASCII)),
    ("telegram token", ":AA", lazy_pattern(r"(?<![\w:])\d{8,10}:AA[\w-]{30,}+", re.ASCII)),
    (
        "telegram token",
        "/bot",
        lazy_pattern(r"(?<=telegram\.org/bot)\d{6,12}:[\w-]{30,}+", re.ASCII),
    ),
    (
        "telegram token",
        "/bot",
        lazy_pattern(r"(?<=telegram\.org/file/bot)\d{6,12}:[\w-]{30,}+", re.ASCII),
    ),
    (
        "bitcoin key",
        "5",
        lazy_pattern(rf"5(?<![{_BASE64}]5){_MIXED_CASE}{_BASE58}{{50}}(?![{_BASE64}=])"),
    ),
    (
        "bitcoin key",
        "K",
        lazy_pattern(rf"K(?<![{_BASE64}]K){_MIXED_CASE}{_BASE58}{{51}}(?![{_BASE64}=])"),
    ),
    (
        "bitcoin key",
        "L",
        lazy_pattern(rf"L(?<![{_BASE64}]L){_MIXED_CASE}{_BASE58}{{51}}(?![{_BASE64}=])"),
    ),
    ("azure secret", "Q~", lazy_pattern(r"(?<![\w~.-])[\w~.-]{3}\dQ~[\w~.-]{30,}+", re.ASCII)),
    (
        "password hash",
        "$",
        lazy_pattern(r"\$(?<=[\w.-]:\$)(?:apr1|[1567y]|2[abxy]|gy)\$[\w./$=,]{20,200}+", re.ASCII),
    ),
    (
        "password hash",
        "{SHA}",
        lazy_pattern(r"\{SHA\}(?<=[\w.-]:\{SHA\})[A-Za-z0-9+/]{27}=", re.ASCII),
    ),
)


class _Literal:
    """A token without a rare character at a fixed place: the part before a literal, the rest from
    that literal on, and a pattern that is quick to search for."""

    def __init__(self, label: str, lead: str, rest: str, quick: str) -> None:
        self.label, self.quick = label, quick
        self.literal = (
            rest.partition("[")[0].partition("(")[0].replace("\\", "")
        )  # `in` finds it faster
        self.lead, self.rest = (
            lazy_pattern(rf"(?<![\w.+/-])(?:{lead})\Z", re.ASCII),
            lazy_pattern(rf"{rest}(?![\w+/-])", re.ASCII),
        )


_PLAIN: Final = (
    _Literal("databricks token", "", r"dapi[0-9a-f]{32}(?:-[0-9])?", r"dapi[0-9a-f]{8}"),
    _Literal("notion token", "", r"secret_[A-Za-z0-9]{43}", r"secret_[A-Za-z0-9]{20}"),
    _Literal("terraform token", r"[A-Za-z0-9]{14}", r"\.atlasv1\.[\w=-]{60,}+", r"\.atlasv1\."),
    _Literal(
        "doppler token",
        "",
        r"dp\.(?:[cp]t|sa|scim|audit|st(?:\.[\w-]{2,35})?)\.[A-Za-z0-9]{40,}+",
        r"dp\.(?:[cp]t|sa|scim|audit|st)\.",
    ),
    _Literal("airtable token", "", r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}", r"pat[A-Za-z0-9]{14}\."),
    _Literal("new relic key", r"[0-9a-f]{36}", r"NRAL", r"[0-9a-f]NRAL"),
    _Literal("mailchimp key", r"[0-9a-f]{32}", r"-us[0-9]{1,2}", r"[0-9a-f]{8}-us[0-9]"),
    _Literal("square token", "", r"EAAA[\w-]{60}", r"EAAA[\w-]{20}"),
    _Literal("atlassian token", "", r"AT[AC]TT3[\w=-]{100,}+", r"AT[AC]TT3"),
    _Literal("bitbucket password", "", r"ATBB[A-Za-z0-9]{32}", r"ATBB[A-Za-z0-9]{20}"),
    _Literal("okta token", "", r"SSWS 00[\w-]{40}", r"SSWS 00"),
    _Literal("nuget key", "", r"oy2[a-z0-9]{43}", r"oy2[a-z0-9]{20}"),
    _Literal("crates token", "", r"cio(?=[A-Za-z]{0,20}\d)[A-Za-z0-9]{32}", r"cio[A-Za-z0-9]{20}"),
    _Literal("confluent secret", "", r"cflt[A-Za-z0-9+/]{60}", r"cflt[A-Za-z0-9+/]{20}"),
    _Literal(
        "ngrok token",
        r"2[A-Za-z0-9]{26}",
        r"_[A-Za-z0-9]{21}",
        r"(?:^|\W|\\[bfnrt]|\\u[0-9A-Fa-f]{4})2[A-Za-z0-9]{26}_[A-Za-z0-9]",
    ),
    _Literal("intercom token", "", r"dG9rO[A-Za-z0-9+/]{40,}+=*+", r"dG9rO[A-Za-z0-9+/]{20}"),
    _Literal("jfrog key", "", r"AKCp[A-Za-z0-9]{60,}+", r"AKCp[A-Za-z0-9]{20}"),
    _Literal("bedrock key", "", r"ABSK[A-Za-z0-9+/]{100,}+=*+", r"ABSK[A-Za-z0-9+/]{20}"),
    _Literal("gitlab token", "", r"GR1348941[\w-]{20,}+", r"GR1348941"),
    _Literal(
        "discord token", r"[MNO][\w-]{23,27}", r"\.[\w-]{6}\.[\w-]{27,}+", r"\.[\w-]{6}\.[\w-]{20}"
    ),
)
_LONGEST_PLAIN: Final = 40
_ANY_PLAIN: Final = QuickPattern("|".join(one.quick for one in _PLAIN))


def plain_tokens(text: str) -> Iterator[Secret]:
    """Tokens that are known by a literal, `_PLAIN`."""
    if len(text) > _LONG and not _ANY_PLAIN(text):
        return
    for one in _PLAIN:
        for match in one.rest.finditer(text) if one.literal in text else ():
            before = max(0, match.start() - _LONGEST_PLAIN)
            if (found := one.lead.search(text, before, match.start())) is not None:
                yield Secret(found.start(), match.end(), one.label)


def prefixed_tokens(text: str) -> Iterator[Secret]:
    """Tokens that are known by how they begin, `_SHAPES`."""
    for match in _TOKEN.finditer(text):
        at = int(str(match.lastgroup)[1:])
        lead = _SHAPE_LEADS[at].search(text[max(0, match.start() - _LONGEST_LEAD) : match.start()])
        yield Secret(
            match.start() - (len(lead.group()) if lead else 0), match.end(), _SHAPES[at].label
        )


_KELVIN: Final = "\u212a"  # the only character beyond ASCII whose lower case is ASCII
_BEHIND: Final = r"[\\\"'`\]]*"
_QUICK_ESCAPE: Final = r"\\[bfnrt]|\\u[0-9A-Fa-f]{4}"
_QUICK_TAIL: Final = rf"(?:[ _.-]?(?:{_TAILS}|[0-9\x80-\xff]{{1,8}}))?"
_QUICK_WORDS: Final = (
    rf"token|(?:{'|'.join(_KEYS)})[_. -]*key|passwor[dt]|passwd|pwd|passphrase|secret|auth(?:orization)?"
    r"|psessid|jsessionid|cookie"
)
_QUICK_SEPARATOR: Final = r"[ \t]*(?:[=:>,]|u00(?:2c|3[ade]))"  # or written as in `\u003d`
_QUICK_SPACE: Final = r"(?:\s|\\[nrt])+"
_QUICK_NAMED: Final = (
    rf"(?:{_QUICK_WORDS}){_QUICK_TAIL}{_BEHIND}{_QUICK_SEPARATOR}"
    rf"|--[^ ]*(?:{_QUICK_WORDS}){_QUICK_TAIL}[ \t]"
    rf"|bearer{_QUICK_TAIL}{_BEHIND}(?:[ \t]|{_QUICK_SEPARATOR})"
    rf"|(?:sig(?:nature)?{_QUICK_TAIL}|pass[0-9]?){_BEHIND}{_QUICK_SEPARATOR}"
    rf"|login{_QUICK_SPACE}\S+{_QUICK_SPACE}(?:account{_QUICK_SPACE}\S+{_QUICK_SPACE})?password[\s\\]"
    rf"|machine{_QUICK_SPACE}\S+{_QUICK_SPACE}password[\s\\]"
    rf"|(?:{_QUICK_WORDS}|pass){_QUICK_TAIL}{_BEHIND}(?:\s|\\r|\\n|\\+)+value[:=]"
    rf"|(?:^|\n|\\n)env[ \t]+\w*(?:{_QUICK_WORDS}|pass)"
    r"|sshpass[ \t]|docker[ \t]+login[ \t]|mysql[a-z]*[ \t][^\n]*-p|psk[ \t]*[=:]|:\$[0-9a-z]+\$|:\{sha\}"
    r"|convertto-securestring[ \t]"
)
_QUICK_OTHERS: Final = (
    r"eyJ|-----(?:BEGIN|END)|-Lines:|-u |--user|:AA|://[^\s/@]+@|Q~|telegram\.org[\\/]"
    rf"|(?:^|[^{_BASE64}]|{_QUICK_ESCAPE})[5KL]{_BASE58}{{50}}"
)
# A terminal colour, raw or as JSON and source code write it; or an escape of JSON, which has more
# backslashes in JSON that is inside JSON.
_ESCAPE: Final = lazy_pattern(
    r"(?:\x1b|(?<!\\)\\++(?:u001[bB]|x1[bB]|033|e))\[[0-9;:?]{0,32}[A-Za-z]"
    r"|(?<!\\)\\++(?:(?P<letter>[\"'`/bfnrt])|u(?P<code>[0-9A-Fa-f]{4}))"
)
_ESCAPED_LETTERS: Final = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_COLOUR_LEADS: Final = (
    "\x1b[",
    "1b[",
    "1B[",
    "033[",
    r"\e[",
)  # how the start of a colour ends, raw or written


def is_suspect(text: str) -> bool:
    """Whether a text may contain a secret. False is certain; it takes a tenth of the time of a
    search."""
    return _SUSPECT(text) or _KELVIN in text or (_has_colours(text) and _SUSPECT(_as_read(text)))


def _has_colours(text: str) -> bool:
    return any(lead in text for lead in _COLOUR_LEADS)


def _has_escapes(text: str) -> bool:
    return "\\" in text or "\x1b[" in text


def _quick_tokens() -> str:
    shapes = []
    for shape in _SHAPES:
        rest = shape.rest.removeprefix("\\")
        begins = (
            rest.partition("(")[0] if not shape.lead else re.escape(rest[0]) + _FOLLOWED_BY[rest[0]]
        )
        shapes.append(f"(?:^|[^{shape.before}]|{_QUICK_ESCAPE}){shape.lead}{begins}")
    shapes += [one.quick for one in _PLAIN]
    return "|".join(dict.fromkeys(shapes))


_SUSPECT: Final = QuickPattern(f"(?i:{_QUICK_NAMED})|{_QUICK_OTHERS}|{_quick_tokens()}")
