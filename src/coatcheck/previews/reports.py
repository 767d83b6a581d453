"""What test runners, compilers, package managers and crashing programs report: totals, what failed,
the last cause.

Each program is one row of `REPORTS`. To add one: its name, some text that its output always has, a
pattern for the line of totals, a pattern for what failed with its name as the first group, and the
pattern to search for. Patterns are in RE2 syntax and see the whole content, so that a failure in
the middle of a megabyte counts.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from coatcheck.deferred import lazy_pattern
from coatcheck.redaction import QuickPattern

from .drafts import Draft, Form, Kind, Section
from .excerpts import Body, Excerpt, line_pattern, masked_line, some, uncoloured

# after a time or a container's name
_AT: Final = r"^(?:\d{4}-\d\d-\d\dT[\d:.]+Z |[\w.-]{1,40} +\| |\x1b\[[0-9;]*m)?\s*"
_ITEMS: Final = 1_000
_LISTED: Final = 40
_TOTALS: Final = 10_000
_DIGITS: Final = lazy_pattern(r"\d+")
_NAME: Final = 90
_NEAR_END: Final = 1 << 18


class Reporter(NamedTuple):
    """How to read the output of one program. `ask` is the pattern that finds what failed, `noun`
    what is listed, and `skipped` the pattern for a reason why a test was skipped."""

    name: str
    cues: tuple[str, ...]
    totals: str
    failed: str
    ask: str
    noun: str = "failed"
    skipped: bytes = b""


REPORTS: Final = (
    Reporter("pytest", (" passed", " failed", "= test session starts =", "short test summary"),
             r"=* ?((?:\d+ (?:failed|passed|skipped|errors?|xfailed|xpassed|deselected|warnings?"
             r"|rerun)(?:, )?)+"
             r" in [\d.]+s)",
             r"(?:FAILED|ERROR) ([\w./\\-]+(?:::[^\n]+?|\.py))(?: - [^\n]*)?$",
             "^(FAILED|ERROR|E) ",
             skipped=rb"SKIPPED (?:\[\d+\] [^\n]{1,300}?\d: |\()([^\n]{1,300}?)\)?"
             rb"(?: +\[ *\d+%\])?$"),
    Reporter("unittest", ("\nRan ",),
             r"(FAILED \([^)\n]*\)|OK(?: \([^)\n]*\))?)\s*$|^(Ran \d+ tests? in [\d.]+s)",
             r"(?:FAIL|ERROR): (\S+ \([^)\n]*\))",
             "^(FAIL|ERROR|[A-Za-z.]*(Error|Exception)): ",
             skipped=rb"skipped ['\"]([^\n]{1,300}?)['\"]?$"),
    Reporter("jest", ("Test Suites: ",), r"(Tests: +[^\n]*total)", r"● ([^\n]* › [^\n]*)",
             "● |^FAIL "),
    Reporter("vitest", (" Test Files ",),
             r"(Tests +[^\n]*\(\d+\))", r"(?:FAIL|×) +([^\n]+? > [^\n]+)", "FAIL |Error: "),
    Reporter("go test", ("--- FAIL: ", "--- PASS: ", "\nok  \t", "\nFAIL\t"),
             r"(FAIL|ok)\s+\S+\s+[\d.(\[]", r"--- FAIL: (\S+)", "--- FAIL|_test.go:|^FAIL|^panic",
             skipped=rb"--- SKIP: [^\n]*\n\s+\S+\.go:\d+: ([^\n]+)"),
    Reporter("cargo test", ("test result: ",),
             r"(test result: [^\n]*)", r"test (\S+) \.\.\. FAILED", "FAILED|panicked at|^error"),
    Reporter("maven", ("Tests run: ",),
             r"(?:\[\w+\] +)?(Tests run: \d+, Failures: \d+, Errors: \d+(?:, Skipped: \d+)?)",
             r"\[ERROR\] +(?:Failures: |Errors: )?([\w.$]+(?:[.#:]\w+)+(?::\d+)?)",
             "FAILURE!|ERROR!|^.ERROR. "),
    Reporter("gradle", ("BUILD FAILED", "BUILD SUCCESSFUL"),
             r"(BUILD (?:FAILED|SUCCESSFUL) in [^\n]*|\d+ tests completed[^\n]*)",
             r"([\w.$]+ > [^\n]+?) FAILED", " FAILED|went wrong|error:"),
    Reporter("mocha", (" passing (",), r"(\d+ (?:passing|failing)[^\n]*)", r"\d+\) ([^\n]+)$",
             "failing|Error: "),
    Reporter("rspec", (" examples, ",),
             r"(\d+ examples?, \d+ failures?[^\n]*)", r"(rspec \./[^\n]+)",
             "^rspec |Failure/Error"),
    Reporter("phpunit", ("PHPUnit ",),
             r"(Tests: \d+, [^\n]*|OK \([^\n]*\))", r"\d+\) ([\w\\]+::\w+)",
             "^[0-9]+. |Failed asserting"),
    Reporter("dotnet test", ("!  - Failed:",),
             r"((?:Failed|Passed)!  - [^\n]*)", r"Failed ([\w.]+[^\n]*?) \[",
             "^ *Failed |Error Message"),
    Reporter("TAP", ("TAP version ", "\nnot ok ", "\n# fail "),
             r"# ((?:tests|pass|fail) \d+)", r"not ok \d+ (?:- )?([^\n]+)", "not ok"),
    Reporter("terraform", ("\nPlan: ", "Terraform will perform", "Apply complete!", "No changes."),
             r"((?:Plan: |Apply complete! |No changes\.|Destroy complete! )[^\n]*)",
             r"# ([^\n]+? (?:will be|must be|has been|has changed)[^\n]*)",
             "^ *# |^Plan:|Error:", "changes"),
    Reporter("docker build", ("#1 [internal]", "\nStep 1/", "naming to "),
             r"(Successfully \w+ \S+|#\d+ naming to \S+|ERROR: [^\n]*)",
             r"(#\d+ ERROR[^\n]*|#\d+ \[[^\n]*)", "ERROR|error:|failed to|^#[0-9]+ .", "steps"),
    Reporter("npm audit", ("# npm audit report", " vulnerabilities ("),
             r"(\d+ vulnerabilit(?:y|ies) \([^\n]*)", r"([@\w./-]+  [<>=*][^\n]*)$",
             "Severity|fix available|vulnerabilit", "vulnerable"),
    Reporter("npm", ("npm ERR! ", "npm error ", "added "),
             r"(added \d+ packages?[^\n]*|up to date[^\n]*|found \d+ [^\n]*)",
             r"npm (?:ERR!|error) ([^\n]+)", "npm (ERR!|error)|^added|vulnerab",
             "different error lines"),
    Reporter("pip install",
             ("Successfully installed ", "Requirement already satisfied", "Collecting "),
             r"(Successfully installed [^\n]*|ERROR: [^\n]*)", r"ERROR: ([^\n]*)",
             "^ERROR|Successfully|conflict", "different error lines"),
    Reporter("eslint", (" problems (", " problem ("),
             r"(✖ \d+ problems? \([^\n]*\))", r"\d+:\d+ +error +[^\n]*  ([\w@/-]+)$", " error  ",
             "rules with errors"),
    Reporter("cargo", ("error[E", "error: could not compile"),
             r"(error: could not compile [^\n]*)", r"error(?:\[E\d+\])?: ([^\n]+)", "^error|^ *-->",
             "different errors"),
    Reporter("diagnostics", ("--> ",),
             r"(Found \d+ errors?[^\n]*|\d+ errors? generated[^\n]*)", r"--> ([^\s:]+):\d+",
             "^ *-->", "files with findings"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Patterns:
    """The compiled patterns of a reporter."""

    totals: QuickPattern
    failed: QuickPattern
    skipped: re.Pattern[bytes] | None


def report(text: Excerpt, *, of: Reporter, patterns: _Patterns) -> Draft | None:
    """Preview of the totals, the names of what failed, and why tests were skipped. None if there
    are neither totals nor failures."""
    body = text.body
    near_end = patterns.totals.found(body.data[-_NEAR_END:], _TOTALS)
    failed = patterns.failed.found(body.data, _ITEMS)
    if not near_end and not failed:
        return None
    least = body.least or ("≥" if len(failed) == _ITEMS else "")
    names = Counter(map(_text, failed))
    every = list(map(_text, patterns.totals.found(body.data, _TOTALS))) if near_end else []
    totals = _totals(every) or (f"{least}{len(names)} {of.noun}" if names else "")
    if not totals and "FAIL" in every:  # only Go's totals are so short
        totals = f"FAIL in {every.count('FAIL')} of {some(len(every), 'package')}"
    if not totals:
        where = f" {text.within(len(body.data))}" if body.least else ""
        totals = f"no failures{where}"
    lead = f"{of.name}, {text.extent}: {totals}"
    sections = []
    if names:
        items = [f"{name} ×{times}" if times > 1 else name for name, times in names.items()]
        sections.append(Section(f"{of.noun}: ", items, of.noun, share=0.7))
    skipped = patterns.skipped.findall(body.data) if patterns.skipped else []
    if skipped:
        reasons = Counter(skipped).most_common()
        listed = [f"{_shown(reason)} ×{times}" for reason, times in reasons[:_LISTED]]
        label = f"why skipped ({body.least}{some(len(skipped), 'line')}): "
        sections.append(Section(label, listed, "reasons", len(reasons), share=0.5))
    ask = f'grep="{of.ask}"' if names else 'lines="-30:"'
    return Draft(lead, tuple(sections), shown="the totals", ask=ask)


def _totals(every: list[str]) -> str:
    """The last line of totals of each form; empty if they are too short to say something."""
    last: dict[str, str] = {}
    times: Counter[str] = Counter()
    for one in every:
        if one in ("FAIL", "ok", ""):
            continue
        form = " ".join(_DIGITS.sub("#", one).split()[:2])
        last[form] = one
        times[form] += 1
    parts = [
        f"{masked_line(one, 120)} (the last of {times[form]} such lines)"
        if times[form] > 1
        else masked_line(one, 120)
        for form, one in last.items()
    ]
    return ", ".join(parts[-4:])


def _form(of: Reporter) -> Form:
    return partial(
        report,
        of=of,
        patterns=_Patterns(
            line_pattern(f"{_AT}(?:{of.totals})"),
            line_pattern(_AT + of.failed),
            lazy_pattern(of.skipped, re.MULTILINE) if of.skipped else None,
        ),
    )


def _text(match: re.Match[bytes]) -> str:
    """The first group that took part in a match, on one line."""
    return _shown(next((one for one in match.groups() if one), b""))


def _shown(found: bytes) -> str:
    return masked_line(uncoloured(found[:400].decode("utf-8", "replace")).strip(), _NAME)


# Stack traces

_FRAMES: Final = line_pattern(
    r"^\s*(?:File \"([^\"\n]+)\", line (\d+)|at (?:[^\n(]{1,200} )?\(?([^\s()]+:\d+)(?::\d+)?\)?"
    r"|at ([\w.$<>/]+\([^)\n]*\))|(\S+\.go:\d+)|at (\S+\.rs:\d+))"
)
_FOREIGN: Final = lazy_pattern(
    rb"site-packages|dist-packages|/lib/python|<frozen |<string>|node_modules|node:|/usr/local/go/"
    rb"|/go/pkg/mod/|/rustc/"
    rb"|^(?:java|javax|jdk|sun|kotlin|scala|org\.(?:springframework|apache|junit|hibernate|eclipse"
    rb"|gradle))\b"
)
_CAUSE: Final = line_pattern(
    r"^[^\n]{0,80}?((?:Caused by: |Uncaught |Unhandled |Exception in thread \"[^\"\n]*\" |panic: "
    r"|fatal error: "
    r"|thread '[^'\n]*' (?:\(\d+\) )?panicked at )[^\n]+"
    r"|(?:[\w$]+\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)(?: \[\w+\])?(?::[^\n]*)?)$"
)


_DIRECT_CAUSE: Final = b"\nThe above exception was the direct cause of the following exception:"
TRACES: Final = ("Traceback (most", "\tat ", "Caused by: ", "\npanic: ")


class Cause(NamedTuple):
    """An exception: the offset of its line, the line, and the innermost frame of the program's own
    code."""

    at: int
    text: str
    frame: str
    before: str = ""  # the exception that Python calls its direct cause


def last_cause(body: Body) -> Cause | None:
    """The last exception in a text: the cause in Java, the last one raised in Python."""
    data = body.data[-_NEAR_END:]
    base = len(body.data) - len(data)
    found = _CAUSE.found(data, 2_000)
    if not found:
        return None
    causes = [match for match in found if match[1].startswith(b"Caused by")]
    match = causes[-1] if causes and causes[-1].start() > found[-1].start() - 20_000 else found[-1]
    at = match.start(1)
    is_python = data.rfind(b'\n  File "', max(0, at - 4_000), at) >= 0
    around = data[max(0, at - 8_000) : at] if is_python else data[at : at + 8_000]
    frames = [
        _text(one) + (f":{one[2].decode()}" if one[2] else "")
        for one in _FRAMES.found(around, 200)
        if not _FOREIGN.search(next(part for part in one.groups() if part))
    ]
    linked = data.rfind(_DIRECT_CAUSE, 0, at) if is_python else -1
    before = next((one for one in reversed(found) if one.start(1) < linked), None)
    frame = (frames[-1] if is_python else frames[0]) if frames else ""
    direct = body.line(base + before.start(1), 200) if before else ""
    return Cause(base + at, body.line(base + at, 200), frame, direct)


def trace(text: Excerpt) -> Draft | None:
    """Preview of a stack trace: its last cause, and where in the program's own code it came
    from."""
    body = text.body if is_trace(text) else None
    cause = last_cause(body) if body else None
    if body is None or cause is None:
        return None
    number = body.number(cause.at)
    lead = f"stack trace, {text.extent}; last cause, line {number}: {masked_line(cause.text, 400)}"
    sections = [Section("at ", [masked_line(cause.frame, 200)])] if cause.frame else []
    if cause.before:
        sections.append(Section("direct cause: ", [masked_line(cause.before, 200)]))
    return Draft(
        lead,
        tuple(sections),
        shown="the last cause and its frame",
        ask=f'lines="{max(1, number - 15)}:{number + 15}"',
    )


def is_trace(text: Excerpt) -> bool:
    """Whether many of the first or of the last lines are frames, or the text ends with a trace."""
    for part in (text.head[:4_096], (text.tail or text.head)[-2_048:]):
        lines = part.count("\n") + 1
        if len(_FRAMES.found(part.encode("utf-8", "replace"), 200)) * 6 >= lines > 2:
            return True
    end = (text.tail or text.head)[-2_048:].rstrip()
    last = end.rpartition("\n")[2].encode("utf-8", "replace")
    return any(cue in end for cue in TRACES) and bool(_CAUSE.found(last, 1))


KINDS: Final = (
    *(Kind(one.name, one.cues, _form(one)) for one in REPORTS),
    Kind("stack trace", (*TRACES, "    at ", "goroutine ", "panicked at "), trace),
)
