"""Results that a host or a server cut before they came here, recognised by the marker that it left.

`MARKERS` is the only table of such markers: the wording is from the sources of each program, or
from what it really sent. To add one: who writes it, where in the text it is, and its text, with
`{missing}` and the like for what it says. A marker counts only in its real place: at the beginning,
at the end, or between two equal halves. So a source file that quotes one is not taken for a result
that was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, NamedTuple

from coatcheck.deferred import lazy_pattern

Place = Literal["start", "end", "middle", "inline", "fifth", "line"]

INCOMPLETE: Final = "incomplete: "
"""The start of every statement about a result that was cut."""

LONGEST: Final = 256 << 10
"""Bytes of a text up to which a marker is also looked for in the middle. Hosts that cut the middle
keep far less."""

SOURCE: Final = "its source"
"""Who cut a result, if the marker does not say which program."""

EDGE: Final = 4_096
"""Bytes of both ends of a text in which a marker is looked for."""

_START: Final = 1_200  # characters
# Characters from a marker at the end on: hosts add reminders and closing tags after it.
_END: Final = 1_500
_LAST: Final = 400  # the same for a marker of an unknown program
_SLACK: Final = 600  # characters by which two halves may differ: hosts add a header or a reminder
_SLACK_LINES: Final = 8
_SHARE: Final = 50  # they may also differ by one part in this many
_NOTICE: Final = 1_000  # maximum length of a block that has only a notice
# One of these is in every marker that may be anywhere.
_WORDS: Final = ("truncated", "omitted", "clipped", "elided")
_CANDIDATES: Final = 100  # matches of one pattern that are tried
_LONG_LINE: Final = 400  # minimum length of a line that was cut
_STATEMENT: Final = lazy_pattern(
    rf"{INCOMPLETE}([\w ]{{1,40}}?) left out "
    r'([\w ,.():"]{1,80})(?:;|\Z)'
)
_UNITS: Final = {"chars": "characters", "char": "characters", "line": "lines", "byte": "bytes"}


@dataclass(frozen=True, slots=True)
class Truncation:
    """Who cut a result, and what is missing, as far as its marker says."""

    by: str
    missing: str

    def __str__(self) -> str:
        return f"{INCOMPLETE}{self.by} left out {self.missing}"


PARTIAL: Final = Truncation("the tool", "the rest, because it did not finish")
"""What is missing from the output of a tool that failed, or ran out of time, while it yielded."""


class Marker(NamedTuple):
    """A text that a program leaves where it cut something.

    `place` is where: the "start"; the "end"; the "middle", a line with as much before it as after
    it; "inline", the same within a line; a "fifth", with four times as much after it as before it;
    or the end of any long "line". `text` is a part of it without variables. `unit` is what its
    numbers count, unless a group of the pattern says so. If `is_least`, its number is only a
    minimum, or an estimate."""

    by: str
    place: Place
    text: str
    pattern: re.Pattern[str]
    unit: str = "characters"
    is_least: bool = False


def find_truncation(text: str) -> Truncation | None:
    """Return what was cut out of a text, or None if no marker is in its place."""
    return _found(text[:EDGE], text[-EDGE:], text if len(text) <= LONGEST else "")


def truncation_of(
    head: bytes,
    tail: bytes,
    size: int,
    read: Callable[[], bytes] | None,
) -> Truncation | None:
    """Return what was cut out of content, given both its ends and a function that reads it."""
    if len(head) + len(tail) == size:
        return find_truncation((head + tail).decode("utf-8", "replace"))
    if size <= LONGEST and read is not None:
        return find_truncation(read().decode("utf-8", "replace"))
    start = head[:EDGE].decode("utf-8", "replace")
    end = tail[-EDGE:].decode("utf-8", "replace")
    return _found(start, end, "")


def find_notice(text: str) -> Truncation | None:
    """Return what a block says about the blocks beside it, or None unless it begins with a marker
    and has little else."""
    text = text.strip()
    if len(text) > _NOTICE:
        return None
    for marker, found in _matches(text, text, ""):
        if text.startswith(marker):
            return found
    return None


def parse_truncation(text: str) -> Truncation | None:
    """Return what a text of ours says was cut, or None if it does not begin with that."""
    match = _STATEMENT.match(text)
    if match is None or match[1] not in {SOURCE, PARTIAL.by, *(row.by for row in MARKERS)}:
        return None
    return Truncation(match[1], match[2])


def _found(start: str, end: str, whole: str) -> Truncation | None:
    return next((found for _, found in _matches(start, end, whole)), None)


def _matches(start: str, end: str, whole: str) -> Iterator[tuple[str, Truncation]]:
    """Yield the text of each marker that is in its place, and what it says."""
    yield from _flags(start, end)
    if start.lstrip()[:1] in ("[", "{", '"') or "\n" not in start:
        start, end, whole = _unescaped(start), _unescaped(end), _unescaped(whole)
    if not any(word in whole for word in _WORDS):
        whole = ""
    for row in MARKERS:
        if row.place == "start":
            searched = start[:_START]
        elif row.place == "end":
            searched = end[-_END:]
        else:
            searched = whole
        if row.text not in searched:
            continue
        for match in islice(row.pattern.finditer(searched), _CANDIDATES):
            if _is_in_place(row, match, searched):
                yield match[0], Truncation(row.by, _missing(row, match))
                break


def _unescaped(text: str) -> str:
    """Return JSON, or the repr of an object, with the lines of its strings as lines."""
    return text.replace("\\n", "\n").replace('"', "\n").replace("\\u2026", "…")


def _is_in_place(row: Marker, match: re.Match[str], text: str) -> bool:
    if row.place == "start":
        return True  # the pattern says what may precede it
    if row.place == "end":
        return row.by != SOURCE or len(text[match.end() :].rstrip()) <= _LAST
    if row.place == "line":
        return match.start() - (text.rfind("\n", 0, match.start()) + 1) >= _LONG_LINE
    parts = 5 if row.place == "fifth" else 2
    before, after = match.start(), len(text) - match.end()
    if _divides(before, after, parts, _SLACK):
        return True
    if _divides(text.count("\n", 0, before), text.count("\n", match.end()), parts, _SLACK_LINES):
        return True
    if text.isascii():
        return False
    before_bytes = len(text[:before].encode("utf-8", "replace"))
    after_bytes = len(text[match.end() :].encode("utf-8", "replace"))
    return _divides(before_bytes, after_bytes, parts, _SLACK)


def _divides(before: int, after: int, parts: int, slack: int) -> bool:
    """Whether a marker has one of some equal parts before it, and the others after it."""
    total = before + after
    return abs(before - total / parts) <= slack / 2 + total / _SHARE


def _missing(row: Marker, match: re.Match[str]) -> str:
    """Return what is missing, in words, from the named groups of a marker's pattern."""
    if row.place == "line":
        return "the ends of long lines"
    found = {name: value for name, value in match.groupdict().items() if value}
    unit = found.get("unit", row.unit)
    unit = _UNITS.get(unit, unit)
    if "missing" in found:
        least = "at least " if row.is_least else ""
        return f"{least}{_number(found['missing']):,} {unit}"
    if "missing_size" in found:
        return found["missing_size"]
    if "last" in found:
        kept = _number(found["last"]) - _number(found["first"]) + 1
        return f"{max(0, _number(found['total']) - kept):,} lines"
    if "total" in found and "kept" in found:
        return f"{max(0, _number(found['total']) - _number(found['kept'])):,} {unit}"
    if "total" in found:
        about = "about " if row.is_least else ""
        return f"a part of {about}{_number(found['total']):,} {unit}"
    if "kept_size" in found and "total_size" in found:
        return f"what follows the first {found['kept_size']} of {found['total_size']}"
    if "kept_size" in found:
        return f"what follows the first {found['kept_size']}"
    if "total_size" in found:
        return f"a part of {found['total_size']}"
    if "kept" in found:
        return f"what follows the first {_number(found['kept']):,} {unit}"
    if "next" in found:
        return f"what follows character {_number(found['next']):,}"
    return "a part"


def _number(digits: str) -> int:
    """Return a number, however its thousands are separated."""
    return int(re.sub(r"[^0-9]", "", digits) or 0)


# A JSON answer that says itself that it is not complete: GitHub's trees and searches, S3's lists.
_FLAG: Final = r'"(?P<flag>(?:is_?)?truncated|incomplete_results)"\s{0,4}:\s{0,4}true'
_KEY: Final = r'"[^"\\]{1,60}"'
_VALUE: Final = r'(?:"(?:[^"\\]|\\.){0,300}"|-?[\d.eE+-]{1,30}|true|false|null)'
_FIRST_FLAG: Final = lazy_pattern(
    rf"\s{{0,20}}\{{\s{{0,20}}(?:{_KEY}\s{{0,4}}:\s{{0,4}}{_VALUE}\s{{0,4}},\s{{0,20}}){{0,20}}{_FLAG}",
    re.IGNORECASE,
)
_LAST_FLAG: Final = lazy_pattern(rf"[,{{]\s{{0,20}}{_FLAG}\s{{0,20}}\}}\s{{0,20}}\Z", re.IGNORECASE)


def _flags(start: str, end: str) -> Iterator[tuple[str, Truncation]]:
    if not start.lstrip().startswith("{"):
        return
    match = _FIRST_FLAG.match(start) or _LAST_FLAG.search(end)
    if match is not None:
        yield match[0], Truncation(SOURCE, f'a part ("{match["flag"]}": true)')


_NUMBER: Final = r"\d[\d,.'’\u00a0\u202f]{0,15}"
_SIZE: Final = r"[\d.]{1,12} ?(?:[KMG]i?B|bytes)"
_UNIT: Final = (
    r"(?:characters?|chars?|lines?|bytes?|tokens?|rows|results|entries|items|matches|files)"
)
_NUMBERS: Final = ("missing", "kept", "total", "first", "last", "next")
_SIZES: Final = ("missing_size", "kept_size", "total_size")
_VARIABLES: Final = {
    **{name: rf"(?P<{name}>{_NUMBER})" for name in _NUMBERS},
    **{name: rf"(?P<{name}>{_SIZE})" for name in _SIZES},
    "unit": rf"(?P<unit>{_UNIT})",
    "n": _NUMBER,
    "size": _SIZE,
    "any": r"[^\n]{0,300}?",
    "opens": r"(?:\[|\(|<|…|\.\.\.|---|⚠)[^\n\w]{0,20}",
    "closes": r"(?:\]|\)|…|\.\.\.)",
    "words": r"""[^\n=;{}"'`]{0,100}?""",  # words of prose, not of code
}
"""What may be at the place of a variable in the text of a marker. `opens` and `closes` are how such
lines begin and end."""

_VARIABLE: Final = re.compile(r"\{(\w+)\}")
_BEFORE: Final[dict[Place, str]] = {
    "start": r"\A(?:[\[{][^\\]{0,200}?\n)?\s{0,8}",  # in JSON, it is in the first string
    "inline": "",
    "line": "",
    "end": r"^[ \t]{0,8}",
    "middle": r"^[ \t]{0,8}",
    "fifth": r"^[ \t]{0,8}",
}


def _marker(
    by: str,
    place: Place,
    text: str,
    unit: str = "characters",
    *,
    header: str = "",
    is_least: bool = False,
) -> Marker:
    """Return the marker with a text, in which `{total}` and the like are variables. Unless it ends
    with `{any}` or is inline, the line ends with it. `header` is a pattern for what may precede it
    at the start."""
    ends_line = place != "inline" and not text.endswith("{any}")
    pieces = _VARIABLE.split(text.removesuffix("{any}"))  # texts and names of variables in turn
    pattern = _BEFORE[place] + header
    for index, piece in enumerate(pieces):
        pattern += _VARIABLES[piece] if index % 2 else re.escape(piece)
    if ends_line:
        pattern += r"[ \t\r\\]{0,8}$"
    longest = max(pieces[::2], key=len)
    return Marker(by, place, longest, lazy_pattern(pattern, re.MULTILINE), unit, is_least)


_CODEX_HEADER: Final = (
    r"(?:(?:Chunk ID:|Wall time:|Exit code:|Process exited with|Process running with"
    r"|Original token count:|Total output lines:|Output:|command timed out after)"
    r"[^\n]{0,100}\n){0,8}"
)
_OPENCLAW_HEADER: Final = (
    r"\W{0,4}OpenClaw truncated an oversized tool result(?:[^\n]{0,200}\n){1,8}"
)
_REMINDER: Final = r"(?:<system-reminder>\s{0,4})?"

MARKERS: Final = (
    # Claude Code cuts the output of a failed command at 30,000 characters before, without a marker.
    _marker("Claude Code", "middle", "... [{missing} characters truncated] ...", is_least=True),
    _marker("Claude Code", "end", "... [{missing} {unit} truncated] ..."),
    _marker("Claude Code", "start",
            "<persisted-output>\nOutput too large ({total_size}). Full output saved to: {any}"
                                    "\n\nPreview (first {kept_size}):"),
    _marker("Claude Code", "start", "<persisted-output>\n{any}"),
    _marker("Claude Code", "start", "<truncated-output>\nOutput too large ({total_size}). {any}"),
    _marker("Claude Code", "start", "[OUTPUT TRUNCATED - exceeded {n} token limit]"),
    _marker("Claude Code", "end", "[OUTPUT TRUNCATED - exceeded {n} token limit]"),
    _marker("Claude Code", "start",
            "[Truncated: PARTIAL view — {any}: showing lines {first}-{last} of {total} {any}",
            header=_REMINDER),
    _marker("Claude Code", "start", "[Truncated: PARTIAL view — {any}", header=_REMINDER),
    _marker("Claude Code", "end",
            "(Showing {kept} of {total} matching {unit}; {n} more are not listed. {any}"),
    _marker("Claude Code", "end",
            "(Showing the first {kept} {unit}; there are more than {n} matches. {any}"),
    # Older versions add "limit: 40, offset: 0" to everything that they find, cut or not.
    _marker("Claude Code", "end", "[Showing results with pagination = limit: {kept}]", "results"),
    _marker("Claude Code", "end", "Output truncated ({total_size} total){any}"),

    _marker("Codex", "inline", "…{missing} {unit} truncated…"),
    _marker("Codex", "middle", "... {missing} {unit} omitted ..."),
    _marker("Codex", "middle", "[... omitted {missing} of {n} {unit} ...]"),
    _marker("Codex", "start", "... {missing} {unit} omitted ...", header=_CODEX_HEADER),
    _marker("Codex", "start", "Warning: truncated output (original token count: {total})", "tokens",
            header=_CODEX_HEADER, is_least=True),

    _marker("Gemini CLI", "fifth", "... [{missing} characters omitted] ..."),
    _marker("Gemini CLI", "start",
            "Output too large. Showing first {n} and last {n} characters. {any}"),
    _marker("Gemini CLI", "start",
            "IMPORTANT: The file content has been truncated.\n"
            "Status: Showing lines {first}-{last} of {total} total lines.{any}"),
    _marker("Gemini CLI", "start", "[Message Normalized: Tool output exceeded size limit]"),
    _marker("Gemini CLI", "start", "[Message Normalized: Exceeded size limit]"),
    _marker("Gemini CLI", "start", "Tool output was too large and has been truncated.{any}"),
    _marker("Gemini CLI", "start",
            "Found {any}(results limited to {kept} {unit} for performance){any}"),
    _marker("Gemini CLI", "end", "[GEMINI_CLI_WARNING: Output truncated. {any}"),

    _marker("opencode", "end", "...{missing} {unit} truncated..."),
    _marker("opencode", "start", "...{missing} {unit} truncated..."),
    _marker("opencode", "start", "...output truncated..."),
    _marker("opencode", "middle", "... output truncated; full content saved to {any} ..."),
    _marker("opencode", "end",
            "(Showing lines {first}-{last} of {total}. Use offset={n} to continue.)"),
    _marker("opencode", "end",
            "(Output capped at {size}. Showing lines {n}-{kept}. Use offset={n} to continue.)",
            "lines"),
    _marker("opencode", "end", "(Results are truncated: showing first {kept} {unit}. {any}"),
    _marker("opencode", "start", "Found {kept} {unit} (more matches available)"),
    _marker("opencode", "end", "[Tool output truncated for compaction: omitted {missing} {unit}]"),
    _marker("opencode", "line", "... (line truncated to {n} chars)"),

    _marker("OpenHands", "inline",
            "<response clipped><NOTE>Due to the max output limit, only part of "),
    _marker("OpenHands", "middle", "[... Observation truncated due to length ...]"),
    _marker("OpenHands", "start",
            "[Previous command outputs are truncated. Showing the last {n} lines of {any}"),
    _marker("OpenHands", "end", "[Results truncated to first {kept} {unit}. {any}"),

    _marker("pi", "end", "[Showing lines {first}-{last} of {total}{any}. Full output: {any}]"),
    _marker("pi", "end",
            "[Showing lines {first}-{last} of {total}{any}. Use offset={n} to continue{any}]"),
    _marker("pi", "end", "[Showing last {size} of line {n} (line is {total_size}). {any}"),
    _marker("pi", "end", "[{missing} more {unit} in file. Use offset={n} to continue{any}]"),
    _marker("pi", "end", "[Output truncated. Full output: {any}]"),
    _marker("pi", "end", "[{kept} {unit} limit reached{any}]"),
    _marker("pi", "end", "[{kept_size} limit reached{any}]"),
    _marker("OpenClaw", "start", "Original size: {total} {unit}, {any}", header=_OPENCLAW_HEADER),
    _marker("OpenClaw", "end",
            "[... {missing} more {unit} truncated; rerun with narrower args if needed]"),
    _marker("OpenClaw", "end", "[... {missing} {unit} truncated; narrow args]"),

    _marker("Cline", "middle", "[... output truncated: {total} {unit} total. {any} ...]"),
    _marker("Cline", "middle", "[... search output truncated: {total} {unit} total. {any} ...]"),
    _marker("Cline", "middle", "... ({missing} {unit} truncated) ..."),
    _marker("Cline", "fifth", "[...{missing} {unit} omitted...]"),
    _marker("Cline", "end",
            "[FILE TRUNCATED: This content is {size} but only the first {size} is shown "
                            "({missing_size} truncated). {any}"),
    _marker("Cline", "end",
            "[Showing lines {first}-{last} of {total}{any}. Use start_line/end_line to {any}]"),
    _marker("Cline", "end", "[Content truncated: showing first {kept} of {total} {unit}]"),
    _marker("Cline", "end",
            "(Showing first {kept} {unit}. Refine your search for more specific results.)"),
    _marker("Cline", "line", " [line truncated]"),

    _marker("Goose", "start", "[Output exceeded {n} {any} limit ({total} {unit} total). {any}"),
    _marker("Goose", "end", "[Output exceeded {n} {any} limit ({total} {unit} total). {any}"),
    _marker("Continue", "start", "(previous {missing} {unit} truncated)"),
    _marker("Continue", "start", "(previous output truncated: {any}{missing} {unit} removed)"),
    _marker("VS Code", "start", "[... PREVIOUS OUTPUT TRUNCATED ...]"),
    _marker("Zed", "start", "Command output too long. The first {kept} {unit}:"),

    _marker("the fetch server", "end",
            "<error>Content truncated. Call the fetch tool with a start_index of {next} "
            "to get more content.</error>"),

    # SecRL's databases
    _marker(SOURCE, "start", "Retrieved {total} {unit}. Displaying first {kept} entries.{any}"),

    # Many other programs use these words, on a line in brackets or after dots. pi and Gemini CLI
    # mark long lines that they cut like this.
    _marker(SOURCE, "line", "... [truncated]"),
    *(
        _marker(SOURCE, place, f"{{opens}}{{missing}} {more}{{unit}} {word}{{any}}")
        for word in _WORDS
        for more in ("", "more ")
        for place in ("start", "end", "middle")
    ),
    _marker(SOURCE, "end", "{opens}{words}truncated{words}{closes}"),
)  # fmt: skip
