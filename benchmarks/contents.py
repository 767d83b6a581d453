"""The real content that questions are asked about, and how their answers are written.

It comes from the corpus, from files that every Linux machine has, and from programs run here.
Nothing of it is in the repository.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.bench import corpus
from benchmarks.peers.tools import Intent

ROOT: Final = Path(__file__).resolve().parents[1]
STDLIB: Final = Path(os.__file__).parent
OPENAPI: Final = "content/json/openai-openapi.json"
ISSUES: Final = "content/json/github-issues.json"
MARVEL: Final = "content/csv/marvel-wikia-data.csv"
ARTICLE: Final = "content/html/wikipedia.html"
SIGNINS: Final = "runs/secrl/incident_166_agent_log_gpt-4o_46_alert.json#/71/messages/11/content"
PROCESSES: Final = "runs/secrl/agent_incident_322.json#/54/messages/21/content"
MCP: Final = "runs/livemcp/tasks-half.json#"
KUBECTL: Final = (
    "runs/sregym/fixtures/codex_run/sessions/2026/06/29/rollout-2026-06-29T16-58-06-019f1451-1903-7092-b4ca-"
    "73a57d9bdd9d.jsonl:21#/payload/output"
)
DIFF: Final = "sessions/claude-code/6dd5f6de.jsonl:18#/toolUseResult/stdout"
RECORDED: Final = "wire/pydantic-ai/test_anthropic/test_anthropic_web_search_tool.yaml"
REASONED: Final = (
    "wire/pydantic-ai/test_openai_responses/test_openai_responses_model_thinking_part.yaml"
)
TRANSCRIPT: Final = "transcripts/claude-code/189d8afc.jsonl"


class NotHere(Exception):
    """The content of a question is not on this machine. Says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`content` says where the content comes from: a path in the corpus (with a line of JSONL after
    `:` and a JSON pointer after `#`), or a name of `MADE`. `known` computes the answer from the
    content, without Coatcheck, as a regular expression that a page must match. If `counted` is set,
    the answer is also found where as many matches of it are shown: a reader can count them. If
    `evidence` is set, the answer is also found once every line of the content that matches it was
    shown: a reader can work it out."""

    kind: str
    content: str
    ask: str
    known: Callable[[str], str]
    intents: tuple[Intent, ...]
    counted: str = ""
    evidence: str = ""


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
    return content if isinstance(content, str) else printed()


def run(*command: str | Path, cwd: Path = ROOT, code: int | None = 0) -> str:
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


COMMIT: Final = "06edc66"
COMMITS: Final = ("git", "log", "-n", "14", COMMIT)
LISTED: Final = (
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

@pytest.mark.parametrize("name", sorted(path.name for path in Path({str(STDLIB)!r}).glob("*.py")))
def test_a_module_is_short(name):
    assert len((Path({str(STDLIB)!r}) / name).read_text(errors="replace").splitlines()) < 4_000
"""
_IMPORTS: Final = "import asyncio, email.message, http.server, unittest.mock"
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
        return run(*command, cwd=Path(folder), code=1)


def _junit() -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_modules.py").write_text(_MODULES)
        run(
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=",
            "--rootdir", ".", "--tb=line", "--junitxml=report.xml", "test_modules.py", cwd=Path(folder), code=1,
        )  # fmt: skip
        return (Path(folder) / "report.xml").read_text()


def _ruff_json() -> str:
    ruff = Path(sys.executable).with_name("ruff")
    chosen = (
        "--isolated",
        "--select",
        "E,D103,D102,D107,ANN,UP,PLR",
        "--quiet",
        "--output-format",
        "json",
    )
    return run(ruff, "check", *chosen, "argparse.py", cwd=STDLIB, code=1)


def _status() -> str:
    path = Path("/var/lib/dpkg/status")
    if not path.is_file():
        raise NotHere("dpkg has no status file")
    return path.read_text()


def _dpkg_log() -> str:
    path = Path("/var/log/dpkg.log")
    if not path.is_file() or "install ca-certificates:" not in (text := path.read_text()):
        raise NotHere("there is no log of dpkg, or none from the beginning")
    return text


def printed() -> str:
    return (ROOT / "LICENSE").read_text()


def _pdf() -> bytes:
    """The project's licence as a PDF, 60 lines to a page, its streams compressed as printers do."""
    lines = printed().splitlines()
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
    "doctest": lambda: run(sys.executable, "-m", "doctest", "-v", STDLIB / "_pydecimal.py", code=None),
    "ruff": lambda: run(
        Path(sys.executable).with_name("ruff"), "check", "--isolated", "--select", "ALL", "--quiet", "--output-format",
        "concise", "argparse.py", cwd=STDLIB, code=1,
    ),
    "git log -p": lambda: run(*COMMITS, "-p"),
    "dpkg.log": _dpkg_log,
    "traceback": lambda: run(sys.executable, "-c", _CRASH, code=1),
    "argparse.py": lambda: (STDLIB / "argparse.py").read_text(),
    "ruff.json": _ruff_json,
    "junit.xml": _junit,
    "dpkg status": _status,
    "git log --numstat": lambda: run("git", "log", "-n", "400", "--numstat", COMMIT),
    "cProfile": lambda: run(sys.executable, "-m", "cProfile", "-s", "name", "-m", "json.tool", "--help"),
    "importtime": lambda: run(sys.executable, "-X", "importtime", "-c", _IMPORTS),
    "dis": lambda: run(sys.executable, "-m", "dis", "argparse.py", cwd=STDLIB),
    "peers.txt": lambda: (ROOT / "constraints" / "peers.txt").read_text(),
    "_pydecimal.py": lambda: (STDLIB / "_pydecimal.py").read_text(),
    "ls -lR": lambda: run("ls", "-lR", *LISTED, cwd=STDLIB),
}  # fmt: skip


def git(*arguments: str) -> str:
    return run(*COMMITS, *arguments).split("\n")[0]


def number(value: int) -> str:
    """A number on its own, with or without separators."""
    return rf"(?<![\d.,])(?:{value}|{value:,})(?![\d]|[.,]\d)"


def count(value: int) -> str:
    """A number as the answer to "how many": on its own line, as a total, or before what was
    counted."""
    things = "match|row|line|occurrence|result|entr|file|time|hit|item"
    before = rf"(?<![-\d.,:]){value} (?:{things})|count\W{{1,4}}{value}\b"
    return rf"(?m)(?:^\W{{0,3}}|: ){value}\W{{0,3}}$|\bof {value}\b(?![-.:,])|{before}"


def found(pattern: str) -> Callable[[str], str]:
    """The answer is a part of the content: the first group of this pattern."""

    def known(text: str) -> str:
        match = re.search(pattern, text)
        assert match is not None, pattern
        return re.escape(match[1])

    return known


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def both(name: str, value: int) -> str:
    """A name and its number, on one line and close to each other."""
    return _near(re.escape(name), rf"(?<![\d.])(?:{value}|{value:,})(?!\d)")


def most(values: Iterable[str]) -> str:
    """The most frequent value with its count. Raises `NotHere` if two are as frequent."""
    (first, times), *others = Counter(values).most_common(2)
    if others and others[0][1] == times:
        raise NotHere("two answers are right on this machine")
    return both(first, times)


def largest(values: Iterable[tuple[str, str]]) -> str:
    """A name with the largest figure, and the figure as it is written."""
    found = list(values)
    figure = max((one[1] for one in found), key=float)
    names = "|".join(re.escape(name) for name, one in found if one == figure)
    return _near(f"(?:{names})", rf"(?<![\d.]){re.escape(figure)}(?!\d)")


def _near(one: str, other: str) -> str:
    return rf"{one}[^\n]{{0,90}}?{other}|{other}[^\n]{{0,90}}?{one}"
