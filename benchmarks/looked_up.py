"""40 questions that are answered by looking something up: a name, a value, a count of one word."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from benchmarks.contents import (
    ARTICLE,
    DIFF,
    ISSUES,
    KUBECTL,
    LISTED,
    MARVEL,
    MCP,
    OPENAPI,
    PROCESSES,
    REASONED,
    RECORDED,
    SIGNINS,
    STDLIB,
    TRANSCRIPT,
    Question,
    count,
    found,
    git,
    number,
    rows,
    run,
)
from benchmarks.peers.tools import Intent


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
        found = run(ruff, "check", "--isolated", "--select", code, "--output-format", "json", "argparse.py",
                     cwd=STDLIB, code=1)  # fmt: skip
        return rf"argparse\.py:{json.loads(found)[0]['location']['row']}:"

    return known


def _folder_of(name: str) -> Callable[[str], str]:
    """The folder's line with the file after it and no other folder between, or the path of the
    file."""

    def known(text: str) -> str:
        paths = [path for top in LISTED for path in (STDLIB / top).rglob(name)]
        folder, file = re.escape(str(paths[0].parent.relative_to(STDLIB))), re.escape(name)
        return rf"(?s)(?<![\w/]){folder}(?::(?:(?!\n\S*:\n).)*?|/){file}"

    return known


LOOKED_UP: Final = (
    Question(
        kind="CSV", content=MARVEL,
        ask="How many characters have ALIGN = Good Characters?",
        known=lambda text: count(sum(row["ALIGN"] == "Good Characters" for row in rows(text))),
        intents=(Intent(sql="SELECT count(*) FROM artifact WHERE ALIGN = 'Good Characters'"),
                 Intent(grep="Good Characters", count=True)),
        counted=",Good Characters,",
    ),
    Question(
        kind="CSV", content=MARVEL,
        ask="What is the FIRST APPEARANCE of the name Frank Castle (Earth-616)?",
        known=lambda text: next(
            rf"(?m)^\W*{r['FIRST APPEARANCE']}\W*$|Frank Castle \(.{{1,200}}{r['FIRST APPEARANCE']}"
            for r in rows(text) if r["name"] == "Frank Castle (Earth-616)"),
        intents=(Intent(sql="""SELECT "FIRST APPEARANCE" FROM artifact WHERE name = 'Frank Castle (Earth-616)'"""),
                 Intent(grep="Frank Castle")),
    ),
    Question(
        kind="OpenAPI", content=OPENAPI,
        ask="What is the operationId of POST /threads?",
        known=lambda text: rf"\b{json.loads(text)['paths']['/threads']['post']['operationId']}\b",
        intents=(Intent(path="$.paths['/threads'].post.operationId"), Intent(grep='"/threads"'),
                 Intent(grep='"/threads"', near=(0, 20))),
    ),
    Question(
        kind="OpenAPI", content=OPENAPI,
        ask="What is the maxLength of input in CreateSpeechRequest?",
        known=lambda text: number(
            json.loads(text)["components"]["schemas"]["CreateSpeechRequest"]["properties"]["input"]["maxLength"]),
        intents=(Intent(path="$.components.schemas.CreateSpeechRequest.properties.input.maxLength"),
                 Intent(path="$..CreateSpeechRequest..input.maxLength"),
                 Intent(grep='"CreateSpeechRequest"'), Intent(grep='"CreateSpeechRequest":', near=(0, 60))),
    ),
    Question(
        kind="API answers", content=ISSUES,
        ask="Which status did the request with method delete get?",
        known=lambda text: number(next(one["status"] for one in json.loads(text) if one["method"] == "delete")),
        intents=(Intent(sql="SELECT status FROM artifact WHERE method = 'delete'"),
                 Intent(path="$[?@.method=='delete'].status"), Intent(grep='"delete"'),
                 Intent(grep='"delete"', near=(0, 12))),
    ),
    Question(
        kind="API answers", content=ISSUES,
        ask="What is the node_id of the issue with the title 'Test issue 7'?",
        known=lambda text: next(
            one["response"]["node_id"] for one in json.loads(text) if one["body"] == {"title": "Test issue 7"}),
        intents=(Intent(path="$[?@.body.title=='Test issue 7'].response.node_id"), Intent(grep="Test issue 7"),
                 Intent(grep='"title": "Test issue 7"', near=(10, 20))),
    ),
    Question(
        kind="HTML", content=ARTICLE,
        ask="What is the calling code of the country?",
        known=lambda text: re.escape(re.findall(r"Calling code.{0,400}?(\+\d+)", text, re.DOTALL)[0]),
        intents=(Intent(grep="(?i)calling code", near=(0, 8)), Intent(grep="Calling code", near=(0, 8)),
                 Intent(text="all")),
    ),
    Question(
        kind="HTML", content=ARTICLE,
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
            re.escape(f"test_a_module_is_short[{path.name}]") for path in sorted(STDLIB.glob("*.py"))
            if len(path.read_text(errors="replace").splitlines()) >= 4_000),
        intents=(Intent(grep="FAILED"), Intent(lines="-15:")),
    ),
    Question(
        kind="test run", content="doctest",
        ask="How many tests passed?",
        known=lambda text: rf"{number(len(re.findall('(?m)^ok$', text)))} (?:tests? )?passed",
        intents=(Intent(lines="-10:"), Intent(grep="passed")),
    ),
    Question(
        kind="compiler", content="transcripts/pi/before-compaction.jsonl:137#/message/content/0/text",
        ask="How many errors did biome find?",
        known=found(r"(Found \d+ errors)"),
        intents=(Intent(lines="-20:"), Intent(grep="errors")),
    ),
    Question(
        kind="compiler", content="ruff",
        ask="On which line of argparse.py does ruff report PTH119?",
        known=_ruff_line("PTH119"),
        intents=(Intent(grep="PTH119"),),
    ),
    Question(
        kind="diff", content=DIFF,
        ask="How many files does this git diff change?",
        known=lambda text: count(len(re.findall("(?m)^diff --git ", text))),
        intents=(Intent(grep="^diff --git", count=True),),
        counted="diff --git ",
    ),
    Question(
        kind="diff", content=DIFF,
        ask="What is the new signature of the func GetTranscript?",
        known=found(r"(?m)^\+func \(s \*GitStore\) (GetTranscript\(.*?\))"),
        intents=(Intent(grep="func .*GetTranscript"), Intent(grep="GetTranscript")),
    ),
    Question(
        kind="git log -p", content="git log -p",
        ask="Which commit changed previews/excerpts.py?",
        known=lambda text: rf"(?s)\b{git('--format=%h', '--', 'src/coatcheck/previews/excerpts.py')}"
                           r"(?:(?!\n(?:\d+:)?commit ).)*?excerpts\.py",
        intents=(Intent(grep="^commit |previews/excerpts.py"), Intent(grep="previews/excerpts.py"),
                 Intent(grep="previews/excerpts.py", near=(200, 0))),
    ),
    Question(
        kind="git log -p", content="git log -p",
        ask="On which date was 'The store in memory may build on the SQLite catalog' committed?",
        known=lambda text: "|".join(
            git("--format=%ad", f"--date=format:{form}", "--grep", "The store in memory may build")
            for form in ("%a %b %e %H:%M:%S %Y", "%Y-%m-%d[T ]%H:%M")),
        intents=(Intent(grep="The store in memory may build", near=(4, 0)),),
    ),
    Question(
        kind="rows of SQL", content=SIGNINS,
        ask="How many sign-ins came from 177.96.29.181?",
        known=lambda text: count(sum(row[1] == "177.96.29.181" for row in ast.literal_eval(text))),
        intents=(Intent(sql="SELECT count(*) FROM artifact WHERE c2 = '177.96.29.181'"),
                 Intent(grep=r"177\.96\.29\.181", count=True)),
        counted="177.96.29.181",
    ),
    Question(
        kind="rows of SQL", content=PROCESSES,
        ask="Which script did powershell.exe run with -executionpolicy bypass?",
        known=lambda text: next(re.escape(row[1].split("Scripts")[1].strip('"'))
                                for row in ast.literal_eval(text) if "bypass" in row[1]),
        intents=(Intent(grep="executionpolicy bypass"), Intent(grep="powershell.exe")),
    ),
    Question(
        kind="MCP result", content=MCP + "/15/messages/5/content",
        ask="What does 'Apartment 2/pers' cost for 5 nights?",
        known=lambda text: r"(?s)2/pers(?:(?!for 5 nights).)*?{} for 5 nights".format(
            re.findall(r"Apartment 2/pers.*?([\d,]+) for 5 nights", text, re.DOTALL)[0]),
        intents=(Intent(grep="Apartment 2/pers", near=(0, 30)), Intent(grep="for 5 nights")),
    ),
    Question(
        kind="MCP result", content=MCP + "/12/messages/13/content",
        ask="When does train C2001 leave and arrive?",
        known=lambda text: rf"(?s)C2001\(.{{1,120}}{re.findall(r'C2001.*?([0-9:]+ -> [0-9:]+)', text)[0]}",
        intents=(Intent(grep="C2001"),),
    ),
    Question(
        kind="kubectl", content=KUBECTL,
        ask="Which pod is not Running?",
        known=lambda text: "(?s){0}.{{1,60}}Pending|Pending.{{1,60}}{0}".format(
            re.escape(re.findall(r"pod/(\S+)\s+0/1\s+Pending", text)[0])),
        intents=(Intent(grep="Pending"), Intent(grep="pod/")),
    ),
    Question(
        kind="kubectl", content=KUBECTL,
        ask="Which image does the deployment consul run?",
        known=found(r"deployment.apps/consul .*?(hashicorp/\S+)"),
        intents=(Intent(grep="deployment.*consul"), Intent(grep="consul")),
    ),
    Question(
        kind="YAML", content=RECORDED,
        ask="What are the values of stop_reason and output_tokens?",
        known=lambda text: "(?s)end_turn.*" + number(int(re.findall(r"output_tokens: (\d+)", text)[0])),
        intents=(Intent(grep="stop_reason|output_tokens"),),
    ),
    Question(
        kind="YAML", content=REASONED,
        ask="Which reasoning effort was requested?",
        known=found(r"(effort: \w+)"),
        intents=(Intent(grep="effort"),),
    ),
    Question(
        kind="log", content="dpkg.log",
        ask="Which version of ca-certificates did dpkg install?",
        known=found(r" install ca-certificates:\S+ <none> (\S+)"),
        intents=(Intent(grep=" install ca-certificates"), Intent(grep="ca-certificates")),
    ),
    Question(
        kind="log", content="dpkg.log",
        ask="How often is there a trigproc of libc-bin?",
        known=lambda text: count(len(re.findall(" trigproc libc-bin:", text))),
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
        known=found(r"(?m)^(RecursionError: \w+ \w+ \w+ \w+)"),
        intents=(Intent(grep="direct cause", near=(3, 0)), Intent(grep="Error")),
    ),
    Question(
        kind="transcript", content=TRANSCRIPT,
        ask="How many entries are of type assistant?",
        known=lambda text: count(sum(json.loads(line)["type"] == "assistant" for line in text.splitlines())),
        intents=(Intent(sql="SELECT count(*) FROM artifact WHERE type = 'assistant'"),
                 Intent(grep='"type":"assistant"', count=True)),
        counted='"type":"assistant"',
    ),
    Question(
        kind="transcript", content=TRANSCRIPT,
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
        known=found(r"([\w/]+\.go:\d+) TestChunkJSONL_OversizedLineInMiddle"),
        intents=(Intent(grep="TestChunkJSONL_OversizedLineInMiddle"),),
    ),
    Question(
        kind="search results", content="sessions/claude-code/21a2e002.jsonl:567#/toolUseResult/content",
        ask="How many matches are in strategy/auto_commit.go?",
        known=lambda text: count(len(re.findall("(?m)^cmd/entire/cli/strategy/auto_commit.go:", text))),
        intents=(Intent(grep="strategy/auto_commit.go:", count=True),),
        counted="strategy/auto_commit.go:",
    ),
    Question(
        kind="web page", content="runs/deerflow/d3e5adaf-084c-4dd5-9d29-94f1d6bccd98.json#/values/messages/3/content",
        ask="How many likes does the video have?",
        known=found(r"(\d+ likes)"),
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
        known=lambda text: number(next(STDLIB.rglob("xml/dom/expatbuilder.py")).stat().st_size),
        intents=(Intent(grep="expatbuilder.py"),),
    ),
    Question(
        kind="directory listing", content="ls -lR",
        ask="In which folder is expatbuilder.py?",
        known=_folder_of("expatbuilder.py"),
        intents=(Intent(grep=r"expatbuilder\.py|^\S+:$"), Intent(grep=r"expatbuilder\.py", near=(20, 0))),
    ),
)  # fmt: skip
