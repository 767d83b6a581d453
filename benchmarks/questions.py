"""40 questions with known answers about real content of 20 kinds: how many calls and tokens an
answer takes.

A scripted reader, the same for every system, sees only what a model would: the text in place of the
result, and the answers of the tools. Each question has a short list of intents that a careful
engineer would derive from the question. A name or a word in one must be part of the question or
have been shown before. The first call is the one that the stub proposes or the first intent,
whichever answers with fewer tokens; after that come the other intents, then more pages. A question
that needs more than eight calls, or more than 200,000 tokens, counts as unable.

The content comes from the corpus, from files that every Linux machine has, and from programs run
here. Each answer is computed from the content without Coatcheck (`known`), so it is right on any
machine.
"""

from __future__ import annotations

import ast
import csv
import functools
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import coatcheck
from benchmarks.bench import Bench, corpus
from benchmarks.peers import environment
from benchmarks.peers.compare import Side
from benchmarks.peers.tools import READERS, Call, Intent, Reader, request, shown_line
from benchmarks.report import Row
from coatcheck import tokens

MOST_CALLS: Final = 8
WINDOW: Final = 200_000  # tokens; what does not fit into a model's context answers nothing
_ROOT: Final = Path(__file__).resolve().parents[1]
_STDLIB: Final = Path(os.__file__).parent
_WORD: Final = re.compile(r"[A-Za-z_]{3,}")
_SQL_WORDS: Final = frozenset(("select", "count", "distinct", "from", "artifact", "where"))


class NotHere(Exception):
    """The content of a question is not on this machine. Says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`content` says where the content comes from: a path in the corpus (with a line of JSONL after
    `:` and a JSON pointer after `#`), or a name of `MADE`. `known` computes the answer from the
    content, without Coatcheck, as a regular expression that a page must match. If `counted` is set,
    the answer is also found where as many matches of it are shown: a reader can count them."""

    kind: str
    content: str
    ask: str
    known: Callable[[str], str]
    intents: tuple[Intent, ...]
    counted: str = ""


# --- content
# ---------------------------------------------------------------------------------------------------------


@functools.cache
def content_of(source: str) -> str | bytes:
    """Return the content that `source` names. Raises `NotHere` with the reason if this machine does
    not have it."""
    if source in MADE:
        return MADE[source]()
    folder = corpus()
    if folder is None:
        raise NotHere("there is no corpus (COATCHECK_CORPUS, or ../shared/data)")
    place, _, pointer = source.partition("#")
    name, _, number = place.partition(":")
    if not (folder / name).is_file():
        raise NotHere(f"the corpus has no {name}")
    text = (folder / name).read_text()
    if not pointer:
        return text
    value: Any = json.loads(text.splitlines()[int(number)] if number else text)
    for key in pointer.split("/")[1:]:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return str(value)


def text_of(source: str) -> str:
    """Return the text that answers are computed from: for the PDF, the text that was printed."""
    content = content_of(source)
    return content if isinstance(content, str) else _printed()


def _run(*command: str | Path, cwd: Path = _ROOT, code: int | None = 0) -> str:
    try:
        done = subprocess.run(
            list(map(str, command)), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, "LC_ALL": "C", "NO_COLOR": "1"},
        )  # fmt: skip
    except OSError as error:
        raise NotHere(f"{command[0]} cannot be run: {error.strerror}") from error
    if code is not None and done.returncode != code:
        raise NotHere(f"{command[0]} ended with {done.returncode}: {done.stdout.strip()[-100:]}")
    return done.stdout


_COMMIT: Final = "06edc66"
_COMMITS: Final = ("git", "log", "-n", "14", _COMMIT)
_LISTED: Final = (
    "asyncio",
    "concurrent",
    "email",
    "encodings",
    "http",
    "importlib",
    "json",
    "unittest",
    "xml",
)
_MODULES: Final = f"""
from pathlib import Path
import pytest

@pytest.mark.parametrize("name", sorted(path.name for path in Path({str(_STDLIB)!r}).glob("*.py")))
def test_a_module_is_short(name):
    assert len((Path({str(_STDLIB)!r}) / name).read_text(errors="replace").splitlines()) < 4_000
"""
_CRASH: Final = """
import copy, json

def load(text):
    return copy.deepcopy({"settings": json.loads(text)})

def start(text):
    try:
        return load(text)
    except RecursionError as error:
        raise ValueError("settings are nested too deeply to be copied") from error

start("[" * 600 + "]" * 600)
"""


def _pytest() -> str:
    options = (
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-o",
        "addopts=",
        "--rootdir",
        ".",
        "--tb=short",
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_modules.py").write_text(_MODULES)
        command = (sys.executable, "-m", "pytest", "-v", "--no-header", *options, "test_modules.py")
        return _run(*command, cwd=Path(folder), code=1)


def _dpkg_log() -> str:
    path = Path("/var/log/dpkg.log")
    if not path.is_file() or "install ca-certificates:" not in (text := path.read_text()):
        raise NotHere("there is no log of dpkg, or none from the beginning")
    return text


def _printed() -> str:
    return (_ROOT / "LICENSE").read_text()


def _pdf() -> bytes:
    """The project's licence as a PDF, 60 lines to a page, its streams compressed as printers do."""
    lines = _printed().splitlines()
    pages = [lines[at : at + 60] for at in range(0, len(lines), 60)]
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Courier /Encoding /WinAnsiEncoding >>",
    ]
    for number, page in enumerate(pages):
        escaped = [re.sub(r"([()\\])", r"\\\1", line) for line in page]
        drawn = "".join(f"({line}) Tj T*\n" for line in escaped)
        stream = zlib.compress(
            f"BT /F1 9 Tf 12 TL 50 780 Td\n{drawn}ET".encode("cp1252", "replace")
        )
        resources = "<< /Font << /F1 3 0 R >> >>"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Resources {resources}"
            f" /Contents {5 + 2 * number} 0 R >>".encode(),
            b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream" % (len(stream), stream),
        ]
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    return (
        data
        + (
            f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
            f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
        ).encode()
    )


MADE: Final[dict[str, Callable[[], str | bytes]]] = {
    "LICENSE as a PDF": _pdf,
    "pytest": _pytest,
    "doctest": lambda: _run(sys.executable, "-m", "doctest", "-v", _STDLIB / "_pydecimal.py", code=None),
    "ruff": lambda: _run(
        Path(sys.executable).with_name("ruff"), "check", "--isolated", "--select", "ALL", "--quiet", "--output-format",
        "concise", "argparse.py", cwd=_STDLIB, code=1,
    ),
    "git log -p": lambda: _run(*_COMMITS, "-p"),
    "dpkg.log": _dpkg_log,
    "traceback": lambda: _run(sys.executable, "-c", _CRASH, code=1),
    "argparse.py": lambda: (_STDLIB / "argparse.py").read_text(),
    "ls -lR": lambda: _run("ls", "-lR", *_LISTED, cwd=_STDLIB),
}  # fmt: skip


# --- answers, computed without Coatcheck
# -----------------------------------------------------------------------------


def _number(value: int) -> str:
    """A number on its own, with or without separators."""
    return rf"(?<![\d.,])(?:{value}|{value:,})(?![\d]|[.,]\d)"


def _count(value: int) -> str:
    """A number as the answer to "how many": on its own line, as a total, or before what was
    counted."""
    things = "match|row|line|occurrence|result|entr|file|time|hit|item"
    before = rf"(?<![-\d.,:]){value} (?:{things})|count\W{{1,4}}{value}\b"
    return rf"(?m)(?:^\W{{0,3}}|: ){value}\W{{0,3}}$|\bof {value}\b(?![-.:,])|{before}"


def _found(pattern: str) -> Callable[[str], str]:
    """The answer is a part of the content: the first group of this pattern."""

    def known(text: str) -> str:
        match = re.search(pattern, text)
        assert match is not None, pattern
        return re.escape(match[1])

    return known


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def _base_of(name: str) -> Callable[[str], str]:
    def known(text: str) -> str:
        classes = [
            one
            for one in ast.walk(ast.parse(text))
            if isinstance(one, ast.ClassDef) and one.name == name
        ]
        return rf"class {name}\({ast.unparse(classes[0].bases[0])}\)"

    return known


def _ruff_line(code: str) -> Callable[[str], str]:
    def known(text: str) -> str:
        ruff = Path(sys.executable).with_name("ruff")
        found = _run(ruff, "check", "--isolated", "--select", code, "--output-format", "json", "argparse.py",
                     cwd=_STDLIB, code=1)  # fmt: skip
        return rf"argparse\.py:{json.loads(found)[0]['location']['row']}:"

    return known


def _git(*arguments: str) -> str:
    return _run(*_COMMITS, *arguments).split("\n")[0]


def _folder_of(name: str) -> Callable[[str], str]:
    """The folder's line with the file after it and no other folder between, or the path of the
    file."""

    def known(text: str) -> str:
        paths = [path for top in _LISTED for path in (_STDLIB / top).rglob(name)]
        folder, file = re.escape(str(paths[0].parent.relative_to(_STDLIB))), re.escape(name)
        return rf"(?s)(?<![\w/]){folder}(?::(?:(?!\n\S*:\n).)*?|/){file}"

    return known


_OPENAPI: Final = "content/json/openai-openapi.json"
_ISSUES: Final = "content/json/github-issues.json"
_MARVEL: Final = "content/csv/marvel-wikia-data.csv"
_ARTICLE: Final = "content/html/wikipedia.html"
_SIGNINS: Final = "runs/secrl/incident_166_agent_log_gpt-4o_46_alert.json#/71/messages/11/content"
_PROCESSES: Final = "runs/secrl/agent_incident_322.json#/54/messages/21/content"
_MCP: Final = "runs/livemcp/tasks-half.json#"
_KUBECTL: Final = (
    "runs/sregym/fixtures/codex_run/sessions/2026/06/29/rollout-2026-06-29T16-58-06-019f1451-1903-7092-b4ca-"
    "73a57d9bdd9d.jsonl:21#/payload/output"
)
_DIFF: Final = "sessions/claude-code/6dd5f6de.jsonl:18#/toolUseResult/stdout"
_RECORDED: Final = "wire/pydantic-ai/test_anthropic/test_anthropic_web_search_tool.yaml"
_REASONED: Final = (
    "wire/pydantic-ai/test_openai_responses/test_openai_responses_model_thinking_part.yaml"
)
_TRANSCRIPT: Final = "transcripts/claude-code/189d8afc.jsonl"

QUESTIONS: Final = (
    Question(
        kind="CSV", content=_MARVEL,
        ask="How many characters have ALIGN = Good Characters?",
        known=lambda text: _count(sum(row["ALIGN"] == "Good Characters" for row in _rows(text))),
        intents=(Intent(sql="SELECT count(*) FROM artifact WHERE ALIGN = 'Good Characters'"),
                 Intent(grep="Good Characters", count=True)),
        counted=",Good Characters,",
    ),
    Question(
        kind="CSV", content=_MARVEL,
        ask="What is the FIRST APPEARANCE of the name Frank Castle (Earth-616)?",
        known=lambda text: next(
            rf"(?m)^\W*{r['FIRST APPEARANCE']}\W*$|Frank Castle \(.{{1,200}}{r['FIRST APPEARANCE']}"
            for r in _rows(text) if r["name"] == "Frank Castle (Earth-616)"),
        intents=(Intent(sql="""SELECT "FIRST APPEARANCE" FROM artifact WHERE name = 'Frank Castle (Earth-616)'"""),
                 Intent(grep="Frank Castle")),
    ),
    Question(
        kind="OpenAPI", content=_OPENAPI,
        ask="What is the operationId of POST /threads?",
        known=lambda text: rf"\b{json.loads(text)['paths']['/threads']['post']['operationId']}\b",
        intents=(Intent(path="$.paths['/threads'].post.operationId"), Intent(grep='"/threads"'),
                 Intent(grep='"/threads"', near=(0, 20))),
    ),
    Question(
        kind="OpenAPI", content=_OPENAPI,
        ask="What is the maxLength of input in CreateSpeechRequest?",
        known=lambda text: _number(
            json.loads(text)["components"]["schemas"]["CreateSpeechRequest"]["properties"]["input"]["maxLength"]),
        intents=(Intent(path="$.components.schemas.CreateSpeechRequest.properties.input.maxLength"),
                 Intent(path="$..CreateSpeechRequest..input.maxLength"),
                 Intent(grep='"CreateSpeechRequest"'), Intent(grep='"CreateSpeechRequest":', near=(0, 60))),
    ),
    Question(
        kind="API answers", content=_ISSUES,
        ask="Which status did the request with method delete get?",
        known=lambda text: _number(next(one["status"] for one in json.loads(text) if one["method"] == "delete")),
        intents=(Intent(sql="SELECT status FROM artifact WHERE method = 'delete'"),
                 Intent(path="$[?@.method=='delete'].status"), Intent(grep='"delete"'),
                 Intent(grep='"delete"', near=(0, 12))),
    ),
    Question(
        kind="API answers", content=_ISSUES,
        ask="What is the node_id of the issue with the title 'Test issue 7'?",
        known=lambda text: next(
            one["response"]["node_id"] for one in json.loads(text) if one["body"] == {"title": "Test issue 7"}),
        intents=(Intent(path="$[?@.body.title=='Test issue 7'].response.node_id"), Intent(grep="Test issue 7"),
                 Intent(grep='"title": "Test issue 7"', near=(10, 20))),
    ),
    Question(
        kind="HTML", content=_ARTICLE,
        ask="What is the calling code of the country?",
        known=lambda text: re.escape(re.findall(r"Calling code.{0,400}?(\+\d+)", text, re.DOTALL)[0]),
        intents=(Intent(grep="(?i)calling code", near=(0, 8)), Intent(grep="Calling code", near=(0, 8)),
                 Intent(text="all")),
    ),
    Question(
        kind="HTML", content=_ARTICLE,
        ask="What percentage of the population follows Hinduism?",
        known=lambda text: r"(?<![\d.])" + re.escape(re.findall(r"Hinduism</a>\s*\((\d\.\d%)\)", text)[0]),
        intents=(Intent(grep="Hinduism"), Intent(grep="Hinduism", near=(3, 3)), Intent(text="all")),
    ),
    Question(
        kind="PDF", content="LICENSE as a PDF",
        ask="What does the licence say about trademarks?",
        known=lambda text: re.findall("This License does not grant permission to use", text)[0],
        intents=(Intent(grep="(?i)trademarks", near=(0, 4)), Intent(text="all")),
    ),
    Question(
        kind="PDF", content="LICENSE as a PDF",
        ask="What does the last page end with?",
        known=lambda text: r"\s+".join(map(re.escape, text.split()[-5:])),
        intents=(Intent(text="last"), Intent(text="all")),
    ),
    Question(
        kind="test run", content="pytest",
        ask="Which tests failed?",
        known=lambda text: "(?s)" + ".*".join(
            re.escape(f"test_a_module_is_short[{path.name}]") for path in sorted(_STDLIB.glob("*.py"))
            if len(path.read_text(errors="replace").splitlines()) >= 4_000),
        intents=(Intent(grep="FAILED"), Intent(lines="-15:")),
    ),
    Question(
        kind="test run", content="doctest",
        ask="How many tests passed?",
        known=lambda text: rf"{_number(len(re.findall('(?m)^ok$', text)))} (?:tests? )?passed",
        intents=(Intent(lines="-10:"), Intent(grep="passed")),
    ),
    Question(
        kind="compiler", content="transcripts/pi/before-compaction.jsonl:137#/message/content/0/text",
        ask="How many errors did biome find?",
        known=_found(r"(Found \d+ errors)"),
        intents=(Intent(lines="-20:"), Intent(grep="errors")),
    ),
    Question(
        kind="compiler", content="ruff",
        ask="On which line of argparse.py does ruff report PTH119?",
        known=_ruff_line("PTH119"),
        intents=(Intent(grep="PTH119"),),
    ),
    Question(
        kind="diff", content=_DIFF,
        ask="How many files does this git diff change?",
        known=lambda text: _count(len(re.findall("(?m)^diff --git ", text))),
        intents=(Intent(grep="^diff --git", count=True),),
        counted="diff --git ",
    ),
    Question(
        kind="diff", content=_DIFF,
        ask="What is the new signature of the func GetTranscript?",
        known=_found(r"(?m)^\+func \(s \*GitStore\) (GetTranscript\(.*?\))"),
        intents=(Intent(grep="func .*GetTranscript"), Intent(grep="GetTranscript")),
    ),
    Question(
        kind="git log -p", content="git log -p",
        ask="Which commit changed previews/excerpts.py?",
        known=lambda text: rf"(?s)\b{_git('--format=%h', '--', 'src/coatcheck/previews/excerpts.py')}"
                           r"(?:(?!\n(?:\d+:)?commit ).)*?excerpts\.py",
        intents=(Intent(grep="^commit |previews/excerpts.py"), Intent(grep="previews/excerpts.py"),
                 Intent(grep="previews/excerpts.py", near=(200, 0))),
    ),
    Question(
        kind="git log -p", content="git log -p",
        ask="On which date was 'The store in memory may build on the SQLite catalog' committed?",
        known=lambda text: "|".join(
            _git("--format=%ad", f"--date=format:{form}", "--grep", "The store in memory may build")
            for form in ("%a %b %e %H:%M:%S %Y", "%Y-%m-%d[T ]%H:%M")),
        intents=(Intent(grep="The store in memory may build", near=(4, 0)),),
    ),
    Question(
        kind="rows of SQL", content=_SIGNINS,
        ask="How many sign-ins came from 177.96.29.181?",
        known=lambda text: _count(sum(row[1] == "177.96.29.181" for row in ast.literal_eval(text))),
        intents=(Intent(sql="SELECT count(*) FROM artifact WHERE c2 = '177.96.29.181'"),
                 Intent(grep=r"177\.96\.29\.181", count=True)),
        counted="177.96.29.181",
    ),
    Question(
        kind="rows of SQL", content=_PROCESSES,
        ask="Which script did powershell.exe run with -executionpolicy bypass?",
        known=lambda text: next(re.escape(row[1].split("Scripts")[1].strip('"'))
                                for row in ast.literal_eval(text) if "bypass" in row[1]),
        intents=(Intent(grep="executionpolicy bypass"), Intent(grep="powershell.exe")),
    ),
    Question(
        kind="MCP result", content=_MCP + "/15/messages/5/content",
        ask="What does 'Apartment 2/pers' cost for 5 nights?",
        known=lambda text: r"(?s)2/pers(?:(?!for 5 nights).)*?{} for 5 nights".format(
            re.findall(r"Apartment 2/pers.*?([\d,]+) for 5 nights", text, re.DOTALL)[0]),
        intents=(Intent(grep="Apartment 2/pers", near=(0, 30)), Intent(grep="for 5 nights")),
    ),
    Question(
        kind="MCP result", content=_MCP + "/12/messages/13/content",
        ask="When does train C2001 leave and arrive?",
        known=lambda text: rf"(?s)C2001\(.{{1,120}}{re.findall(r'C2001.*?([0-9:]+ -> [0-9:]+)', text)[0]}",
        intents=(Intent(grep="C2001"),),
    ),
    Question(
        kind="kubectl", content=_KUBECTL,
        ask="Which pod is not Running?",
        known=lambda text: "(?s){0}.{{1,60}}Pending|Pending.{{1,60}}{0}".format(
            re.escape(re.findall(r"pod/(\S+)\s+0/1\s+Pending", text)[0])),
        intents=(Intent(grep="Pending"), Intent(grep="pod/")),
    ),
    Question(
        kind="kubectl", content=_KUBECTL,
        ask="Which image does the deployment consul run?",
        known=_found(r"deployment.apps/consul .*?(hashicorp/\S+)"),
        intents=(Intent(grep="deployment.*consul"), Intent(grep="consul")),
    ),
    Question(
        kind="YAML", content=_RECORDED,
        ask="What are the values of stop_reason and output_tokens?",
        known=lambda text: "(?s)end_turn.*" + _number(int(re.findall(r"output_tokens: (\d+)", text)[0])),
        intents=(Intent(grep="stop_reason|output_tokens"),),
    ),
    Question(
        kind="YAML", content=_REASONED,
        ask="Which reasoning effort was requested?",
        known=_found(r"(effort: \w+)"),
        intents=(Intent(grep="effort"),),
    ),
    Question(
        kind="log", content="dpkg.log",
        ask="Which version of ca-certificates did dpkg install?",
        known=_found(r" install ca-certificates:\S+ <none> (\S+)"),
        intents=(Intent(grep=" install ca-certificates"), Intent(grep="ca-certificates")),
    ),
    Question(
        kind="log", content="dpkg.log",
        ask="How often is there a trigproc of libc-bin?",
        known=lambda text: _count(len(re.findall(" trigproc libc-bin:", text))),
        intents=(Intent(grep="trigproc libc-bin", count=True),),
        counted=" trigproc libc-bin",
    ),
    Question(
        kind="stack trace", content="traceback",
        ask="Which exception ended the program?",
        known=lambda text: re.escape(text.strip().splitlines()[-1]),
        intents=(Intent(lines="-10:"), Intent(grep="exception", near=(0, 6))),
    ),
    Question(
        kind="stack trace", content="traceback",
        ask="Which Error was the direct cause of it?",
        known=_found(r"(?m)^(RecursionError: \w+ \w+ \w+ \w+)"),
        intents=(Intent(grep="direct cause", near=(3, 0)), Intent(grep="Error")),
    ),
    Question(
        kind="transcript", content=_TRANSCRIPT,
        ask="How many entries are of type assistant?",
        known=lambda text: _count(sum(json.loads(line)["type"] == "assistant" for line in text.splitlines())),
        intents=(Intent(sql="SELECT count(*) FROM artifact WHERE type = 'assistant'"),
                 Intent(grep='"type":"assistant"', count=True)),
        counted='"type":"assistant"',
    ),
    Question(
        kind="transcript", content=_TRANSCRIPT,
        ask="Which gitBranch was it on?",
        known=lambda text: re.escape(json.loads(text.splitlines()[3])["gitBranch"]),
        intents=(Intent(sql="SELECT DISTINCT gitBranch FROM artifact"), Intent(grep="gitBranch")),
    ),
    Question(
        kind="source code", content="argparse.py",
        ask="Which class does RawTextHelpFormatter inherit from?",
        known=_base_of("RawTextHelpFormatter"),
        intents=(Intent(grep="class RawTextHelpFormatter"),),
    ),
    Question(
        kind="source code", content="transcripts/claude-code/062a8bdd.jsonl:40#/message/content/0/content",
        ask="Which functions (func) does the file define?",
        known=lambda text: "(?s)" + ".*".join(re.findall(r"→func (\w+)", text)),
        intents=(Intent(grep="func "),),
    ),
    Question(
        kind="search results", content="sessions/claude-code/afb1dd35.jsonl:744#/toolUseResult/stdout",
        ask="Where is TestChunkJSONL_OversizedLineInMiddle?",
        known=_found(r"([\w/]+\.go:\d+) TestChunkJSONL_OversizedLineInMiddle"),
        intents=(Intent(grep="TestChunkJSONL_OversizedLineInMiddle"),),
    ),
    Question(
        kind="search results", content="sessions/claude-code/21a2e002.jsonl:567#/toolUseResult/content",
        ask="How many matches are in strategy/auto_commit.go?",
        known=lambda text: _count(len(re.findall("(?m)^cmd/entire/cli/strategy/auto_commit.go:", text))),
        intents=(Intent(grep="strategy/auto_commit.go:", count=True),),
        counted="strategy/auto_commit.go:",
    ),
    Question(
        kind="web page", content="runs/deerflow/d3e5adaf-084c-4dd5-9d29-94f1d6bccd98.json#/values/messages/3/content",
        ask="How many likes does the video have?",
        known=_found(r"(\d+ likes)"),
        intents=(Intent(grep="likes"),),
    ),
    Question(
        kind="web page", content="runs/deerflow/3823e443-4e2b-4679-b496-a9506eae462b.json#/values/messages/19/content",
        ask="In which year did she earn her PhD?",
        known=lambda text: r"Caltech\) in " + re.findall(r"Caltech\) in (\d{4})", text)[0],
        intents=(Intent(grep="PhD"),),
    ),
    Question(
        kind="directory listing", content="ls -lR",
        ask="How many bytes has expatbuilder.py?",
        known=lambda text: _number(next(_STDLIB.rglob("xml/dom/expatbuilder.py")).stat().st_size),
        intents=(Intent(grep="expatbuilder.py"),),
    ),
    Question(
        kind="directory listing", content="ls -lR",
        ask="In which folder is expatbuilder.py?",
        known=_folder_of("expatbuilder.py"),
        intents=(Intent(grep=r"expatbuilder\.py|^\S+:$"), Intent(grep=r"expatbuilder\.py", near=(20, 0))),
    ),
)  # fmt: skip


# --- the reader
# ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """How a system answered a question: the calls, the tokens of all that the model saw and wrote,
    and whether the answer was among it."""

    calls: list[Call] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    tokens: int = 0
    right: bool = False


def answered(question: Question, reader: Reader) -> Answer:
    """Look for the answer as a model would: see above."""
    known = _known(question)
    answer = Answer()
    shown = reader.offload(content_of(question.content), question.ask)
    _see(answer, None, shown, known, question)
    waiting = list(question.intents)
    proposed: Call | None = reader.hint(shown)
    while not answer.right and len(answer.calls) < MOST_CALLS and answer.tokens <= WINDOW:
        tried = [
            (call, reader.run(call))
            for call in (proposed, _next(waiting, question, reader, answer.pages))
            if call is not None and call not in answer.calls
        ]
        if not tried:  # nothing is left but to read on
            call = reader.more(answer.calls[-1], answer.pages[-1]) if answer.calls else None
            if call is None:
                break
            tried = [(call, reader.run(call))]
        good = [one for one in tried if _answers(one[1], known, question, [])]
        call, page = min(good, key=lambda one: _tokens(*one)) if good else tried[-1]
        if call == proposed:
            proposed = None
        _see(answer, call, page, known, question)
        waiting = [one for one in waiting if reader.call_for(one, answer.pages) not in answer.calls]
    return answer


@functools.cache
def _known(question: Question) -> re.Pattern[str]:
    try:
        return re.compile(question.known(text_of(question.content)))
    except (LookupError, StopIteration, AssertionError) as error:
        raise NotHere("its answer is not in the content that this machine has") from error


def _next(
    waiting: list[Intent], question: Question, reader: Reader, pages: list[str]
) -> Call | None:
    """The call for the first intent that this system has a tool for and whose names are known by
    now."""
    for intent in waiting:
        if (
            is_known(intent, question.ask, pages)
            and (call := reader.call_for(intent, pages)) is not None
        ):
            return call
    return None


def is_known(intent: Intent, ask: str, pages: Sequence[str]) -> bool:
    """Whether every name in an intent was shown or is part of the question, and the columns of SQL
    were shown."""
    seen = "\n".join(pages).casefold()
    if intent.sql:
        names = re.sub(r"'[^']*'", "", intent.sql).replace('"', "")
        words = [
            word
            for word in re.findall(r"[A-Za-z_]\w*", f"{names} {intent.at}")
            if word.lower() not in _SQL_WORDS
        ]
        return all(re.search(rf"\b{word.casefold()}\b", seen) for word in words)
    looked_for = re.sub(r"\(\?\w\)|\\.", " ", f"{intent.grep} {intent.path}")
    return all(
        word.casefold() in seen or word.casefold() in ask.casefold()
        for word in _WORD.findall(looked_for)
    )


def _see(
    answer: Answer, call: Call | None, page: str, known: re.Pattern[str], question: Question
) -> None:
    answer.tokens += _tokens(call, page)
    answer.right = answer.tokens <= WINDOW and _answers(page, known, question, answer.pages)
    answer.pages.append(page)
    if call is not None:
        answer.calls.append(call)


def _answers(page: str, known: re.Pattern[str], question: Question, before: Sequence[str]) -> bool:
    """Whether the answer is on a page, as it is or in JSON; or may be counted on the pages so
    far."""
    if known.search(page) or known.search(page.replace("\\n", "\n").replace('\\"', '"')):
        return True
    if not question.counted:
        return False
    shown = 0
    for one in (
        page,
        *reversed(before[1:]),
    ):  # the last pages may be all that there is, without those before
        shown += one.count(question.counted)
        if known.search(str(shown)):
            return True
    return False


@functools.lru_cache(maxsize=4_096)
def _exact(text: str) -> int:
    return tokens.exact(text)


def _tokens(call: Call | None, page: str) -> int:
    return _exact(page) + (
        _exact(json.dumps(call.arguments, ensure_ascii=False)) if call is not None else 0
    )


class Ours:
    """Coatcheck with its defaults: `session.externalize`, and the three tools."""

    def __init__(self, session: coatcheck.Session) -> None:
        self.session = session
        self._tools = {tool.name: tool for tool in coatcheck.toolkit(session)}
        self._pointer = ""

    @property
    def schemas(self) -> str:
        return json.dumps([tool.as_anthropic() for tool in self._tools.values()])

    def offload(self, content: str | bytes, ask: str) -> str:
        outcome = self.session.externalize(content, tool="run")
        self._pointer = outcome.ref.pointer if outcome.ref is not None else ""
        return str(outcome.text)

    def hint(self, shown: str) -> Call | None:
        """The first call in the stub's hint that leaves nothing to fill in: the one written out, or
        it with another argument after "or"."""
        proposed = _STUB_HINT.search(shown)
        written = json.loads(f'"{proposed[1]}"') if proposed else ""
        called = _CALL.search(written)
        if called is None:
            return None
        arguments = dict(_ARGUMENT.findall(called[2]))
        others = [
            {"pointer": arguments["pointer"], one[1]: one[2]}
            for one in _OR.finditer(written, called.end())
        ]
        return next(
            (
                Call(called[1], one)
                for one in (arguments, *others)
                if "…" not in "".join(one.values())
            ),
            None,
        )

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        if not self._pointer:
            return None
        asked: dict[str, str] = {}
        before, after = intent.near
        at = shown_line(intent, r"(\d+)[:>]", pages)
        if at is not None:
            asked = {"lines": f"{max(1, at - before)}:{at + after}"}
        elif intent.grep:
            asked = {"grep": intent.grep}
            if (before or after) and "context" in self._tools["get_artifact"].parameters[
                "properties"
            ]:
                asked["context"] = str(max(before, after))
        elif intent.sql or intent.path:
            asked = {"query": intent.sql or intent.path}
        elif intent.lines:
            asked = {"lines": intent.lines}
        elif intent.text:
            last = re.search(r"(\d+) pages", pages[0])
            asked = {"query": f"page {last[1]}" if intent.text == "last" and last else "text"}
        return (
            Call("get_artifact", {"pointer": self._pointer + intent.at, **asked}) if asked else None
        )

    def more(self, call: Call, page: str) -> Call | None:
        found = re.search(r'more: (cursor|pointer)="([^"]+)"', page)
        if found is None:
            return None
        arguments = (
            {"pointer": self._pointer, "cursor": found[2]}
            if found[1] == "cursor"
            else {"pointer": found[2]}
        )
        return Call(call.tool, arguments)

    def run(self, call: Call) -> str:
        return self._tools[call.tool].run(**call.arguments)


_STUB_HINT: Final = re.compile(r'"hint":"((?:[^"\\]|\\.)*)"')
_CALL: Final = re.compile(r"(get_artifact)\(((?:[^()\"]|\"[^\"]*\")*)\)")
_ARGUMENT: Final = re.compile(r'(\w+)="([^"]*)"')
_OR: Final = re.compile(r' or (\w+)="([^"]*)"')


class Theirs:
    """A peer in a process of its own: see `benchmarks.peers.tools` for what it shows, and how it is
    asked.

    A PDF goes to the model as it is, which all of them can: it costs at least the tokens of its
    text."""

    def __init__(self, side: Side) -> None:
        self._side = side

    @property
    def schemas(self) -> str:
        return str(self._asked("schemas"))

    def offload(self, content: str | bytes, ask: str) -> str:
        return str(self._asked("offload", content, ask)) if isinstance(content, str) else _printed()

    def hint(self, shown: str) -> Call | None:
        return self._call("hint", shown)

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        return self._call("call_for", intent, pages)

    def more(self, call: Call, page: str) -> Call | None:
        return self._call("more", call, page)

    def run(self, call: Call) -> str:
        return str(self._asked("run", call))

    def _call(self, method: str, *arguments: object) -> Call | None:
        call = self._asked(method, *arguments)
        return Call(*call) if call is not None else None

    def _asked(self, method: str, *arguments: object) -> Any:
        answer = self._side.exchange(request(method, *arguments))
        if "answer" not in answer:
            raise RuntimeError(f"{self._side.name}: {answer.get('missing')}")
        return answer["answer"]


def _peers(bench: Bench) -> Iterator[tuple[str, Side]]:
    """Each peer, started; or why it cannot be asked, printed."""
    for name in READERS:
        side = Side(name, bench.new_folder(name), module="tools")
        try:
            python = environment.python()
            if name == "context-mode":
                os.environ["CONTEXT_MODE"] = os.pathsep.join(environment.context_mode())
            side.start(python)
        except (environment.Missing, OSError) as error:
            side.missing = f"not installed: {error}"
        if side.missing:
            print(f"\n{name} is not asked: {side.missing}", flush=True)
        else:
            yield name, side


# --- the table
# -------------------------------------------------------------------------------------------------------


def questions(bench: Bench) -> Iterator[Row]:
    """Ask every question of every system, and judge ours. A quick run asks only ours.

    Yields a row for each question: the tokens of ours beside the fewest of the others, and a remark
    that says what is to mend, and how the others did."""
    here = [question for question in QUESTIONS if _is_here(question)]
    with bench.new_store("process") as store:
        sides = {} if bench.quick else dict(_peers(bench))
        systems: dict[str, Reader] = {"coatcheck": Ours(store.session("questions"))}
        systems |= {name: Theirs(side) for name, side in sides.items()}
        answers = {
            name: [answered(question, reader) for question in here]
            for name, reader in systems.items()
        }
        print(f"\n{_systems(systems, answers)}", flush=True)
        for side in sides.values():
            side.close()
    ours = answers.pop("coatcheck")
    fewest = 0
    for number, question in enumerate(here):
        row = _row(
            question, ours[number], {name: others[number] for name, others in answers.items()}
        )
        fewest += ours[number].right and (row.floor is None or row.ours <= row.floor)
        yield row
    calls = [max(1, len(one.calls)) if one.right else MOST_CALLS + 1 for one in ours]
    of = f"{len(here)} questions"
    yield Row(
        f"{of}: answered in one call",
        None,
        sum(one <= 1 for one in calls),
        34,
        "count",
        at_least=True,
    )
    yield Row(
        f"{of}: answered in two calls",
        None,
        sum(one <= 2 for one in calls),
        len(here),
        "count",
        at_least=True,
    )
    yield Row(f"{of}: unable", None, sum(not one.right for one in ours), 0, "count")
    if answers:
        yield Row(
            f"{of}: fewest tokens of {len(answers) + 1}", None, fewest, 34, "count", at_least=True
        )


def _is_here(question: Question) -> bool:
    try:
        _known(question)
    except NotHere as reason:
        print(f"\nnot asked: {question.ask} {reason}")
        return False
    return True


def _row(question: Question, ours: Answer, others: dict[str, Answer]) -> Row:
    best = min((one.tokens for one in others.values() if one.right), default=None)
    marks = [
        "UNABLE" if not ours.right else f"{len(ours.calls)} CALLS" if len(ours.calls) > 1 else ""
    ]
    marks.append("NOT FEWEST" if best is not None and ours.tokens > best else "")
    shown = [f"{name} {one.tokens:,} in {len(one.calls)}" if one.right else f"{name} unable"
             for name, one in others.items()]  # fmt: skip
    note = "; ".join([*filter(None, marks), ", ".join(shown)])
    return Row(f"{question.kind}: {question.ask}", best, ours.tokens, None, "count", note=note)


def _systems(systems: dict[str, Reader], answers: dict[str, list[Answer]]) -> str:
    heads = (
        "",
        "no call",
        "one call",
        "two calls",
        "more",
        "unable",
        "tokens: median",
        "mean",
        "tools, once",
    )
    lines: list[tuple[str, ...]] = [heads]
    for name, reader in systems.items():
        calls = [len(one.calls) for one in answers[name] if one.right]
        spent = [one.tokens for one in answers[name] if one.right] or [0]
        lines.append((
            name, *(str(calls.count(number)) for number in range(3)), str(sum(one > 2 for one in calls)),
            str(len(answers[name]) - len(calls)), f"{statistics.median(spent):,.0f}", f"{statistics.mean(spent):,.0f}",
            f"{_exact(reader.schemas):,}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)
