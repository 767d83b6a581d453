"""40 questions that need counting, grouping, joining, comparing, or the thing around a match."""

from __future__ import annotations

import ast
import dis
import json
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any, Final

from benchmarks.contents import (
    ARTICLE,
    ISSUES,
    MARVEL,
    OPENAPI,
    SIGNINS,
    STDLIB,
    TRANSCRIPT,
    Question,
    both,
    count,
    largest,
    most,
    number,
)
from benchmarks.contents import rows as rows_of
from benchmarks.peers.tools import Intent


def _actions(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def _stanzas(text: str) -> list[dict[str, str]]:
    found = []
    for stanza in text.split("\n\n"):
        pairs = re.findall(r"(?m)^([\w-]+): (.*)$", stanza)
        if pairs:
            found.append(dict(pairs))
    return found


def _changes(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines() if re.match(r"\d+\t\d+\t", line)]


def _added(text: str) -> dict[str, int]:
    """The number of added lines of each commit."""
    found = {}
    for commit in re.split(r"(?m)^commit ", text)[1:]:
        found[commit[:7]] = len(re.findall(r"(?m)^\+(?!\+\+)", commit))
    return found


def _folders(text: str) -> Iterator[tuple[str, list[str]]]:
    """The files of a listing: their folder, and the columns of their line."""
    folder = ""
    for line in text.splitlines():
        if line.endswith(":"):
            folder = line[:-1]
        elif line.startswith("-"):
            yield folder, line.split()


def _operations(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in json.loads(text)["paths"].values():
        yield from path.items()


def _methods(text: str) -> list[str]:
    found = []
    for one in ast.parse(text).body:
        if isinstance(one, ast.ClassDef):
            found += [one.name for inner in one.body if isinstance(inner, ast.FunctionDef)]
    return found


def _function_around(text: str, words: str) -> str:
    line = text[: text.index(words)].count("\n") + 1
    around = [
        one
        for one in ast.walk(ast.parse(text))
        if isinstance(one, ast.FunctionDef) and one.lineno <= line <= (one.end_lineno or 0)
    ]
    return max(around, key=lambda one: one.lineno).name


def _tools(text: str) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        content = (json.loads(line).get("message") or {}).get("content")
        for block in content if isinstance(content, list) else []:
            if isinstance(block, dict) and block.get("type") == "tool_use":
                found += [block["name"]]
    return found


def _times(text: str) -> list[str]:
    found = [json.loads(line).get("timestamp") for line in text.splitlines()]
    return sorted(one for one in found if one)


def _imports(text: str) -> list[tuple[int, str]]:
    rows = [line.split("|") for line in text.splitlines()[1:] if "|" in line]
    return [(int(row[0].split(":")[1]), row[2].strip()) for row in rows]


def _hashes(text: str) -> list[str]:
    """The name of the package for each hash in a lock file."""
    found, name = [], ""
    for line in text.splitlines():
        if "==" in line:
            name = line.split("==")[0]
        elif "--hash" in line:
            found.append(name)
    return found


def _opcodes() -> list[str]:
    """The instructions of argparse.py, of its functions too."""
    found: list[str] = []
    left = [compile((STDLIB / "argparse.py").read_text(), "argparse.py", "exec")]
    while left:
        code = left.pop()
        found += [one.opname for one in dis.get_instructions(code)]
        left += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found


def _posts(operations: int) -> str:
    return f"{count(operations)}|(?i:{both('post', operations)})"


def _called(text: str) -> list[tuple[int, str]]:
    """The functions of a profile with the number of their calls."""
    found = []
    for line in text.splitlines():
        columns = line.split(None, 5)
        if len(columns) == 6 and re.fullmatch(r"\d+(/\d+)? \d+\.\d+", " ".join(columns[:2])):
            found.append((int(columns[0].split("/")[0]), columns[5]))
    return found


COUNTED: Final = (
    Question(
        kind="log", content="dpkg.log",
        ask="Which action (the third word of a line) is most frequent, and how often?",
        known=lambda text: most(line[2] for line in _actions(text) if len(line) > 2),
        intents=(Intent(command="awk '{print $3}' F | sort | uniq -c | sort -rn | head -3"),
                 Intent(code="print(Counter(l.split()[2] for l in lines).most_common(3))")),
        evidence=".",
    ),
    Question(
        kind="log", content="dpkg.log",
        ask="On which day were the most lines with ' install ' written, and how many?",
        known=lambda text: most(line[0] for line in _actions(text) if len(line) > 2 and line[2] == "install"),
        intents=(Intent(command="grep ' install ' F | cut -d' ' -f1 | sort | uniq -c | sort -rn | head -2"),
                 Intent(code='print(Counter(l.split()[0] for l in lines if " install " in l).most_common(2))'),
                 Intent(grep=" install ")),
        evidence=" install ",
    ),
    Question(
        kind="stanzas", content="dpkg status",
        ask="Which Section has the most packages, and how many?",
        known=lambda text: most(one["Section"] for one in _stanzas(text) if "Section" in one),
        intents=(Intent(sql="SELECT Section, count(*) AS n FROM artifact GROUP BY Section ORDER BY n DESC LIMIT 2"),
                 Intent(command="grep '^Section: ' F | sort | uniq -c | sort -rn | head -2"),
                 Intent(code='print(Counter(l[9:] for l in lines if l.startswith("Section: ")).most_common(2))'),
                 Intent(grep="^Section: ")),
        evidence="^Section: ",
    ),
    Question(
        kind="stanzas", content="dpkg status",
        ask="Which Package has the largest Installed-Size, and how large is it?",
        known=lambda text: largest((one["Package"], one["Installed-Size"]) for one in _stanzas(text)
                                   if "Installed-Size" in one),
        intents=(Intent(sql='SELECT Package, "Installed-Size" FROM artifact ORDER BY CAST("Installed-Size" AS BIGINT) '
                            "DESC LIMIT 1"),
                 Intent(command="awk '/^Package: /{p=$2} /^Installed-Size: /{print $2, p}' F | sort -rn | head -1"),
                 Intent(code='p = None\nbest = (0, "")\nfor l in lines:\n    if l.startswith("Package: "):\n'
                             '        p = l[9:]\n    elif l.startswith("Installed-Size: "):\n'
                             "        best = max(best, (int(l[16:]), p))\nprint(best)"),
                 Intent(grep="^Package: |^Installed-Size: ")),
        evidence="^Package: |^Installed-Size: ",
    ),
    Question(
        kind="linter as JSON", content="ruff.json",
        ask="Which code has the most findings, and how many?",
        known=lambda text: most(one["code"] for one in json.loads(text)),
        intents=(Intent(sql="SELECT code, count(*) AS n FROM artifact GROUP BY code ORDER BY n DESC LIMIT 2"),
                 Intent(command="jq -r '.[].code' F | sort | uniq -c | sort -rn | head -2"),
                 Intent(code='print(Counter(f["code"] for f in data).most_common(2))'),
                 Intent(grep='"code":')),
        evidence='"code":',
    ),
    Question(
        kind="linter as JSON", content="ruff.json",
        ask="How many findings have no fix (fix is null)?",
        known=lambda text: count(sum(one["fix"] is None for one in json.loads(text))),
        intents=(Intent(sql="SELECT count(*) FROM artifact WHERE fix IS NULL"),
                 Intent(command="jq '[.[] | select(.fix == null)] | length' F"),
                 Intent(code='print(sum(f["fix"] is None for f in data))'),
                 Intent(grep='"fix": null', count=True)),
        counted='"fix": null',
    ),
    Question(
        kind="linter", content="ruff",
        ask="Which rule (such as D103) of argparse.py has the most findings, and how many?",
        known=lambda text: most(re.findall(r"(?m)^argparse\.py:\d+:\d+: ([A-Z]+\d+)", text)),
        intents=(Intent(command="grep '^argparse.py:' F | cut -d' ' -f2 | sort | uniq -c | sort -rn | head -2"),
                 Intent(code='print(Counter(l.split()[1] for l in lines if l.startswith("argparse.py:")).most_common(2))'),
                 Intent(grep="argparse.py:")),
        evidence=r"argparse\.py:",
    ),
    Question(
        kind="linter", content="ruff",
        ask="How many different rules (such as D103) are reported for argparse.py?",
        known=lambda text: count(len(set(re.findall(r"(?m)^argparse\.py:\d+:\d+: ([A-Z]+\d+)", text)))),
        intents=(Intent(command="grep '^argparse.py:' F | cut -d' ' -f2 | sort -u | wc -l"),
                 Intent(code='print(len({l.split()[1] for l in lines if l.startswith("argparse.py:")}))'),
                 Intent(grep="argparse.py:")),
        evidence=r"argparse\.py:",
    ),
    Question(
        kind="git log --numstat", content="git log --numstat",
        ask="Which file was changed by the most commits, and by how many?",
        known=lambda text: most(one[2] for one in _changes(text)),
        intents=(Intent(command=r"awk -F'\t' 'NF == 3 {print $3}' F | sort | uniq -c | sort -rn | head -2"),
                 Intent(code=r'print(Counter(l.split("\t")[2] for l in lines if l.count("\t") == 2).most_common(2))'),
                 Intent(grep=r"^\d+\t\d+\t")),
        evidence=r"^[\d-]+\t",
    ),
    Question(
        kind="git log --numstat", content="git log --numstat",
        ask="How many lines were added in all?",
        known=lambda text: number(sum(int(one[0]) for one in _changes(text))),
        intents=(Intent(command=r"awk -F'\t' 'NF == 3 {n += $1} END {print n}' F"),
                 Intent(code=r'print(sum(int(l.split("\t")[0]) for l in lines if re.match(r"\d+\t\d+\t", l)))'),
                 Intent(grep=r"^\d+\t\d+\t")),
        evidence=r"^\d+\t",
    ),
    Question(
        kind="git log -p", content="git log -p",
        ask="Which commit adds the most lines, and how many?",
        known=lambda text: largest((commit, str(n)) for commit, n in _added(text).items()),
        intents=(Intent(command="awk '/^commit /{c=$2} /^\\+/&&!/^\\+\\+\\+/{n[c]++} END{for(c in n) print n[c], c}' F "
                              "| sort -rn | head -1"),
                 Intent(code='n = Counter()\nfor l in lines:\n    if l.startswith("commit "):\n        c = l[7:47]\n'
                             '    elif l.startswith("+") and not l.startswith("+++"):\n        n[c] += 1\n'
                             "print(n.most_common(1))")),
        evidence=r"^commit |^\+",
    ),
    Question(
        kind="git log -p", content="git log -p",
        ask="How many different files do these commits change (diff --git)?",
        known=lambda text: count(len(set(re.findall(r"(?m)^diff --git a/(\S+) ", text)))),
        intents=(Intent(command="grep '^diff --git ' F | sort -u | wc -l"),
                 Intent(code='print(len({l.split()[2] for l in lines if l.startswith("diff --git ")}))'),
                 Intent(grep="^diff --git ")),
        evidence="^diff --git ",
    ),
    Question(
        kind="test run", content="pytest",
        ask="Which failed test has the largest number in its assert, and which is it (for example assert 6000 < 4000)?",
        known=lambda text: largest(re.findall(r"FAILED \S+\[(.+?)\] - assert (\d+)", text)),
        intents=(Intent(code='print([l for l in lines if l.startswith("FAILED")])'),
                 Intent(grep="FAILED.*assert")),
    ),
    Question(
        kind="test run", content="pytest",
        ask="How many PASSED tests of test_a_module_is_short are of a module with an underscore first ([_)?",
        known=lambda text: count(len(re.findall(r"(?m)^\S+\[_\S+ PASSED", text))),
        intents=(Intent(command="grep -c '\\[_.* PASSED' F"),
                 Intent(code='print(sum("[_" in l and "PASSED" in l for l in lines))'),
                 Intent(grep=r"\[_.* PASSED", count=True)),
        evidence=r"\[_\S+ PASSED",
    ),
    Question(
        kind="XML", content="junit.xml",
        ask="Which testcase has the longest time, and what is it?",
        known=lambda text: largest(re.findall(r'<testcase [^>]*?name="([^"]+)" time="([\d.]+)"', text)),
        intents=(Intent(command="grep -oE '<testcase [^>]*>' F | sed -E 's/.* name=\"([^\"]+)\" time=\"([0-9.]+)\".*/\\2 \\1/' "
                              "| sort -rn | head -1"),
                 Intent(code='found = re.findall(r\'<testcase [^>]*?name="([^"]+)" time="([0-9.]+)"\', text)\n'
                             "print(max(found, key=lambda f: float(f[1])))")),
        evidence="<testcase",
    ),
    Question(
        kind="XML", content="junit.xml",
        ask="How many testcase elements took 0.000 seconds (time)?",
        known=lambda text: count(len(re.findall(r'<testcase [^>]*time="0\.000"', text))),
        intents=(Intent(command="grep -oE '<testcase [^>]*time=\"0.000\"' F | wc -l"),
                 Intent(code='print(len(re.findall(r\'<testcase [^>]*time="0.000"\', text)))'),
                 Intent(grep='<testcase [^>]*time="0.000"', count=True)),
        counted='time="0.000"',
    ),
    Question(
        kind="directory listing", content="ls -lR",
        ask="Which folder has the most files that end in .py, and how many?",
        known=lambda text: most(folder for folder, line in _folders(text) if line[-1].endswith(".py")),
        intents=(Intent(command="awk '/:$/{d=$0} /\\.py$/{n[d]++} END{for(d in n) print n[d], d}' F | sort -rn | head -2"),
                 Intent(code='n = Counter()\nfor l in lines:\n    if l.endswith(":"):\n        d = l[:-1]\n'
                             '    elif l.endswith(".py"):\n        n[d] += 1\nprint(n.most_common(2))'),
                 Intent(grep=r":$|\.py$")),
        evidence=r":$|\.py$",
    ),
    Question(
        kind="directory listing", content="ls -lR",
        ask="Which file that ends in .py is the largest, and how many bytes has it?",
        known=lambda text: largest((line[-1], line[4]) for _, line in _folders(text) if line[-1].endswith(".py")),
        intents=(Intent(command="grep '\\.py$' F | sort -k5 -rn | head -1"),
                 Intent(code='print(max((int(l.split()[4]), l.split()[-1]) for l in lines if l.endswith(".py")))'),
                 Intent(grep=r"\.py$")),
        evidence=r"\.py$",
    ),
    Question(
        kind="CSV", content=MARVEL,
        ask="Which EYE do most Bad Characters (ALIGN) have, and how many?",
        known=lambda text: most(row["EYE"] for row in rows_of(text) if row["ALIGN"] == "Bad Characters" and row["EYE"]),
        intents=(Intent(sql="SELECT EYE, count(*) AS n FROM artifact WHERE ALIGN = 'Bad Characters' GROUP BY EYE "
                            "ORDER BY n DESC LIMIT 3"),
                 Intent(code='print(Counter(r["EYE"] for r in data if r["ALIGN"] == "Bad Characters").most_common(3))')),
        evidence="Bad Characters",
    ),
    Question(
        kind="CSV", content=MARVEL,
        ask="In which Year did the most characters appear first, and how many?",
        known=lambda text: most(row["Year"] for row in rows_of(text) if row["Year"]),
        intents=(Intent(sql='SELECT "Year", count(*) AS n FROM artifact WHERE "Year" IS NOT NULL GROUP BY "Year" '
                            "ORDER BY n DESC LIMIT 2"),
                 Intent(code='print(Counter(r["Year"] for r in data).most_common(2))')),
        evidence=".",
    ),
    Question(
        kind="OpenAPI", content=OPENAPI,
        ask="How many operations with the method post are there in paths?",
        known=lambda text: _posts(sum(method == "post" for method, _ in _operations(text))),
        intents=(Intent(command="jq -r '.paths[] | keys[]' F | sort | uniq -c"),
                 Intent(code='print(Counter(m for p in data["paths"].values() for m in p))')),
        evidence=".",
    ),
    Question(
        kind="OpenAPI", content=OPENAPI,
        ask="How many different tags do the operations in paths have?",
        known=lambda text: count(len({tag for _, one in _operations(text) for tag in one.get("tags", [])})),
        intents=(Intent(command="jq -r '.paths[][].tags[]?' F | sort -u | wc -l"),
                 Intent(code='print(len({t for p in data["paths"].values() for o in p.values() for t in o.get("tags", [])}))')),
        evidence=".",
    ),
    Question(
        kind="API answers", content=ISSUES,
        ask="How many requests of each method are there; how many with get?",
        known=lambda text: both("get", sum(one["method"] == "get" for one in json.loads(text))),
        intents=(Intent(sql="SELECT method, count(*) AS n FROM artifact GROUP BY method"),
                 Intent(command="jq -r '.[].method' F | sort | uniq -c"),
                 Intent(code='print(Counter(r["method"] for r in data))'),
                 Intent(grep='"method": ?"get"', count=True)),
        evidence=".",
    ),
    Question(
        kind="API answers", content=ISSUES,
        ask="How many requests got each status; how many got 200?",
        known=lambda text: both("200", sum(one["status"] == 200 for one in json.loads(text))),
        intents=(Intent(sql="SELECT status, count(*) AS n FROM artifact GROUP BY status ORDER BY n DESC"),
                 Intent(command="jq -r '.[].status' F | sort | uniq -c"),
                 Intent(code='print(Counter(r["status"] for r in data))')),
        evidence=".",
    ),
    Question(
        kind="web page", content=ARTICLE,
        ask="How many references (id=\"cite_note-…\") does the article have?",
        known=lambda text: count(len(re.findall(r'id="cite_note-', text))),
        intents=(Intent(command="grep -o 'id=\"cite_note-' F | wc -l"),
                 Intent(code="print(text.count('id=\"cite_note-'))"),
                 Intent(grep='id="cite_note-', count=True)),
        counted='id="cite_note-',
    ),
    Question(
        kind="web page", content=ARTICLE,
        ask="To which article (href=\"/wiki/…\") do the most links of the page go, and how many?",
        known=lambda text: most(re.findall(r'href="(/wiki/[^"#]*)', text)),
        intents=(Intent(command="grep -oE 'href=\"/wiki/[^\"#]*' F | sort | uniq -c | sort -rn | head -2"),
                 Intent(code="print(Counter(re.findall(r'href=\"(/wiki/[^\"#]*)', text)).most_common(2))"),
                 Intent(grep='href="/wiki/')),
        evidence='href="/wiki/',
    ),
    Question(
        kind="source code", content="_pydecimal.py",
        ask="Which class has the most methods (def), and how many?",
        known=lambda text: most(_methods(text)),
        intents=(Intent(command="awk '/^class /{c=$2} /^    def /{n[c]++} END{for(c in n) print n[c], c}' F | sort -rn | head -2"),
                 Intent(code='n = Counter()\nfor l in lines:\n    if l.startswith("class "):\n        c = l\n'
                             '    elif l.startswith("    def "):\n        n[c] += 1\nprint(n.most_common(2))'),
                 Intent(grep="^class |^    def ")),
        evidence="^class |^    def ",
    ),
    Question(
        kind="source code", content="_pydecimal.py",
        ask="Which function (def) contains 'cannot convert NaN to integer ratio'?",
        known=lambda text: rf"\b{_function_around(text, 'cannot convert NaN to integer ratio')}\b",
        intents=(Intent(command="awk '/ def /{f=$0} /cannot convert NaN to integer ratio/{print f}' F"),
                 Intent(code='for l in lines:\n    if l.lstrip().startswith("def "):\n        f = l\n'
                             '    if "cannot convert NaN to integer ratio" in l:\n        print(f)'),
                 Intent(grep="cannot convert NaN to integer ratio", near=(20, 0))),
    ),
    Question(
        kind="transcript", content=TRANSCRIPT,
        ask="How many tool_use blocks are there in all (type, in the content of a message)?",
        known=lambda text: count(len(_tools(text))),
        intents=(Intent(command="grep -o '\"type\":\"tool_use\"' F | wc -l"),
                 Intent(code='print(text.count(\'"type":"tool_use"\'))'),
                 Intent(grep='"type":"tool_use"', count=True)),
        counted='"type":"tool_use"',
    ),
    Question(
        kind="transcript", content=TRANSCRIPT,
        ask="What are the first and the last timestamp?",
        known=lambda text: "(?s)" + "|".join(
            f"{one[:10]}.{one[11:19]}.*{other[11:19]}" for one, other in [_times(text)[:: len(_times(text)) - 1]]),
        intents=(Intent(sql="SELECT min(timestamp), max(timestamp) FROM artifact"),
                 Intent(command="grep -oE '\"timestamp\":\"[^\"]+' F | sort | sed -n '1p;$p'"),
                 Intent(code='t = sorted(r["timestamp"] for r in data if r.get("timestamp"))\nprint(t[0], t[-1])'),
                 Intent(grep='"timestamp":"')),
    ),
    Question(
        kind="profile", content="cProfile",
        ask="Which function has the most calls (ncalls), and how many?",
        known=lambda text: largest((name[-40:], str(calls)) for calls, name in _called(text)),
        intents=(Intent(command="grep -E '^ *[0-9/]+ +0[.]' F | sort -n | tail -1"),
                 Intent(code='rows = [l.split(None, 5) for l in lines]\n'
                             'print(max((int(r[0].split("/")[0]), r[-1]) for r in rows if len(r) == 6 and r[1][:2] == "0."))')),
        evidence=r"^ *\d",
    ),
    Question(
        kind="profile", content="cProfile",
        ask="How many of the functions are methods (the text '{method ')?",
        known=lambda text: count(text.count("{method ")),
        intents=(Intent(command="grep -c '{method ' F"),
                 Intent(code='print(text.count("{method "))'),
                 Intent(grep="{method ", count=True)),
        counted="{method ",
    ),
    Question(
        kind="import times", content="importtime",
        ask="Which imported package has the largest self time, and how many us?",
        known=lambda text: largest((name, str(us)) for us, name in _imports(text)),
        intents=(Intent(command="sed 's/import time: *//' F | sort -n | tail -1"),
                 Intent(code='rows = [l.split("|") for l in lines[1:]]\n'
                             'print(max((int(r[0].split(":")[1]), r[2].strip()) for r in rows if len(r) == 3))')),
        evidence=".",
    ),
    Question(
        kind="import times", content="importtime",
        ask="How many packages have a self time over 500 us?",
        known=lambda text: count(sum(us > 500 for us, _ in _imports(text))),
        intents=(Intent(command="awk -F'[:|]' 'NR > 1 && $2 > 500' F | wc -l"),
                 Intent(code='print(sum(int(l.split("|")[0].split(":")[1]) > 500 for l in lines[1:]))'),
                 Intent(grep=r"^import time: +(5\d\d|[6-9]\d\d|\d{4,}) \|", count=True)),
        evidence=".",
    ),
    Question(
        kind="disassembly", content="dis",
        ask="Which opcode (such as LOAD_FAST) is the most frequent, and how often?",
        known=lambda text: most(_opcodes()),
        intents=(Intent(command="grep -oE ' [0-9]+ [A-Z_]{3,}' F | awk '{print $2}' | sort | uniq -c | sort -rn | head -2"),
                 Intent(code=r'print(Counter(re.findall(r" \d+ ([A-Z_]{3,})", text)).most_common(2))')),
        evidence=".",
    ),
    Question(
        kind="disassembly", content="dis",
        ask="How many times does LOAD_GLOBAL load ArgumentError (LOAD_GLOBAL … ArgumentError)?",
        known=lambda text: count(len(re.findall(r"LOAD_GLOBAL .*\bArgumentError\)", text))),
        intents=(Intent(command="grep -c 'LOAD_GLOBAL .*ArgumentError)' F"),
                 Intent(code='print(sum("LOAD_GLOBAL" in l and "ArgumentError)" in l for l in lines))'),
                 Intent(grep="LOAD_GLOBAL .*ArgumentError\\)", count=True)),
        counted="ArgumentError)",
    ),
    Question(
        kind="lock file", content="peers.txt",
        ask="Which package has the most hashes (--hash), and how many?",
        known=lambda text: most(_hashes(text)),
        intents=(Intent(command="awk -F== '/==/{p=$1} /--hash/{n[p]++} END{for(p in n) print n[p], p}' F | sort -rn | head -2"),
                 Intent(code='n = Counter()\nfor l in lines:\n    if "==" in l:\n        p = l.split("==")[0]\n'
                             '    elif "--hash" in l:\n        n[p] += 1\nprint(n.most_common(2))')),
        evidence=".",
    ),
    Question(
        kind="lock file", content="peers.txt",
        ask="How many packages are pinned (lines with ==)?",
        known=lambda text: count(len(re.findall(r"(?m)^\S+==", text))),
        intents=(Intent(command="grep -c == F"),
                 Intent(code='print(sum("==" in l for l in lines))'),
                 Intent(grep="==", count=True)),
        evidence="==",
    ),
    Question(
        kind="rows of SQL", content=SIGNINS,
        ask="From which address came the most sign-ins, and how many?",
        known=lambda text: most(row[1] for row in ast.literal_eval(text)),
        intents=(Intent(sql="SELECT c2, count(*) AS n FROM artifact GROUP BY c2 ORDER BY n DESC LIMIT 2"),
                 Intent(command=r"grep -oE '[0-9]+(\.[0-9]+){3}' F | sort | uniq -c | sort -rn | head -2"),
                 Intent(code=r'print(Counter(re.findall(r"\d+\.\d+\.\d+\.\d+", text)).most_common(2))')),
        evidence=".",
    ),
    Question(
        kind="rows of SQL", content=SIGNINS,
        ask="From how many different addresses did sign-ins come?",
        known=lambda text: count(len({row[1] for row in ast.literal_eval(text)})),
        intents=(Intent(sql="SELECT count(DISTINCT c2) FROM artifact"),
                 Intent(command=r"grep -oE '[0-9]+(\.[0-9]+){3}' F | sort -u | wc -l"),
                 Intent(code=r'print(len(set(re.findall(r"\d+\.\d+\.\d+\.\d+", text))))')),
        evidence=".",
    ),
)  # fmt: skip
