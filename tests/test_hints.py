"""The call that a stub suggests: it suits the content, it works as written, and the stub stays
small."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import coatcheck
from coatcheck import Policy, Session, tokens, toolkit
from coatcheck.previews import Sample, excerpts, preview
from tests.token_samples import corpus_files

MOST_TOKENS = 450
CALL = re.compile(r'get_artifact\((pointer="[^"]*"(?:, \w+="[^"]*")?)\)')
ARGUMENT = re.compile(r'(\w+)="([^"]*)"')


class Example(NamedTuple):
    """Content of one kind, what its preview must show, and the arguments that its hint must
    suggest."""

    content: str
    shows: tuple[str, ...]
    ask: str


def lines(count: int, form: str) -> str:
    return "".join(form.format(n=n) + "\n" for n in range(count))


POD = "web-{n:04}-abcde          1/1     Running            0          3d\n"
DIFF = "diff --git a/{f} b/{f}\n--- a/{f}\n+++ b/{f}\n@@ -1,2 +1,3 @@\n one\n-two\n+2\n+3\n"
COMMIT = (
    "commit {n:040x}\nAuthor: Ann Example <ann@example.org>\nDate:   Mon Mar {n} 10:00:00 2026 +0000\n\n"
    "    Change {n}\n\n"
)
EXAMPLES: dict[str, Example] = {
    "pytest": Example(
        "==== test session starts ====\n"
        + lines(200, "tests/test_{n}.py .......... [  1%]")
        + "E   assert 1 == 2\nFAILED tests/test_a.py::test_login[x-1] - assert 1 == 2\n"
        + "ERROR tests/test_b.py::test_out\n"
        + "==== 1 failed, 199 passed, 1 error in 3.21s ====\n",
        (
            "1 failed, 199 passed, 1 error in 3.21s",
            "tests/test_a.py::test_login[x-1]",
            "tests/test_b.py::test_out",
        ),
        'grep="^(FAILED|ERROR|E) "',
    ),
    "unittest": Example(
        lines(200, "test_{n} (tests.A) ... ok")
        + "FAIL: test_x (tests.A.test_x)\nAssertionError: 1 != 2\n\n"
        "Ran 201 tests in 0.5s\n\nFAILED (failures=1)\n",
        ("FAILED (failures=1)", "test_x (tests.A.test_x)"),
        'grep="^(FAIL|ERROR|[A-Za-z.]*(Error|Exception)): "',
    ),
    "jest": Example(
        lines(200, "PASS src/a{n}.test.ts") + "  ● Cart › adds a thing\n\n    expect(received)\n"
        "Test Suites: 1 failed, 200 passed, 201 total\nTests:       1 failed, 400 passed, 401 total\n",
        ("Tests: 1 failed, 400 passed, 401 total", "Cart › adds a thing"),
        'grep="● |^FAIL "',
    ),
    "go test": Example(
        lines(200, "ok  \texample.org/shop/p{n}\t0.01s")
        + "--- FAIL: TestLogin (0.02s)\n    login_test.go:12: no\nFAIL\n"
        "FAIL\texample.org/shop\t0.5s\nFAIL\n",
        ("go test", "1 failed", "TestLogin"),
        'grep="--- FAIL|_test.go:|^FAIL|^panic"',
    ),
    "cargo test": Example(
        lines(200, "test shop::t{n} ... ok") + "test shop::cart::adds ... FAILED\n"
        "test result: FAILED. 200 passed; 1 failed; 0 ignored\n",
        ("200 passed; 1 failed", "shop::cart::adds"),
        'grep="FAILED|panicked at|^error"',
    ),
    "maven": Example(
        lines(200, "[INFO] Running org.example.A{n}Test")
        + "[ERROR] org.example.CartTest.adds:12 expected 1\n"
        "[ERROR] Tests run: 201, Failures: 1, Errors: 0, Skipped: 2\n",
        ("Tests run: 201, Failures: 1, Errors: 0, Skipped: 2", "org.example.CartTest.adds"),
        'grep="FAILURE!|ERROR!|^.ERROR. "',
    ),
    "mocha": Example(
        lines(200, "    ✓ does {n}")
        + "  200 passing (1s)\n  1 failing\n\n  1) Cart adds a thing\n     Error: no\n",
        ("1 failing", "Cart adds a thing"),
        'grep="failing|Error: "',
    ),
    "TAP": Example(
        "TAP version 14\n" + lines(200, "ok {n} - fine") + "not ok 201 - adds a thing\n# fail 1\n",
        ("fail 1", "adds a thing"),
        'grep="not ok"',
    ),
    "Python trace": Example(
        "starting\nTraceback (most recent call last):\n"
        + lines(40, '  File "/app/shop/p{n}.py", line {n}, in run\n    go()')
        + '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n    raise X\n'
        + "ValueError: no such cart\n",
        ("last cause, line 85: ValueError: no such cart", "/app/shop/p39.py:39"),
        'lines="70:100"',
    ),
    "Java trace": Example(
        'Exception in thread "main" java.lang.RuntimeException: outer\n'
        + lines(60, "\tat org.example.A.m{n}(A.java:{n})")
        + "Caused by: java.io.IOException: disk full\n\tat java.io.File.write(File.java:9)\n"
        + "\tat org.example.B.save(B.java:7)\n"
        + lines(20, "\tat org.example.C.m{n}(C.java:{n})"),
        ("Caused by: java.io.IOException: disk full", "B.java:7"),
        'lines="47:77"',
    ),
    "Go panic": Example(
        "panic: runtime error: index out of range\n\ngoroutine 1 [running]:\n"
        + lines(60, "example.org/shop.Buy{n}(0x1)\n\t/src/shop/cart{n}.go:{n} +0x1d"),
        ("panic: runtime error: index out of range", "/src/shop/cart0.go:0"),
        'lines="1:16"',
    ),
    "log": Example(
        lines(900, "2026-01-01 10:00:00 INFO served {n}") + "2026-01-01 10:00:01 ERROR disk full\n",
        ("ERROR 1 INFO 900", "first error, line 901: 2026-01-01 10:00:01 ERROR disk full"),
        'grep="ERROR"',
    ),
    "log of JSON": Example(
        lines(300, '{{"ts":"2026-01-01T10:00:00Z","level":"info","msg":"served {n}"}}')
        + '{"level":"error","msg":"no"}\n',
        ("ERROR 1 INFO 300", "301 records", "msg VARCHAR"),
        'grep=".level.:.error."',
    ),
    "log without levels": Example(
        lines(300, "2026-01-01T10:00:00Z served {n}")
        + "2026-01-01T10:00:00Z upload failed: no space\n",
        ("301 lines", "line 301: "),
        'grep="(?i)error|fail|panic|exception|fatal"',
    ),
    "git log": Example(
        "".join(COMMIT.format(n=n) for n in range(9, 30)),
        ("21 commits, Mar 29 2026 to Mar 9 2026", "Ann Example 21"),
        'grep="^commit |^    [^ ]"',
    ),
    "git log -p": Example(
        "".join(COMMIT.format(n=n) + DIFF.format(f=f"src/a{n % 3}.py") for n in range(9, 30)),
        ("21 commits", "3 files, +42 -21", "a0.py +14 -7"),
        'grep="^(commit |diff --git)"',
    ),
    "diff": Example(
        "".join(DIFF.format(f=f"src/a{n}.py") for n in range(30))
        + DIFF.format(f="src/big.py")
        + "+more\n" * 50,
        ("diff of 31 files, +112 -31, in src/", "big.py +52 -1"),
        'lines="241:298"',
    ),
    "kubectl get": Example(
        "NAME                    READY   STATUS             RESTARTS   AGE\n"
        + "".join(POD.format(n=n) for n in range(60))
        + "api-0001-abcde          0/1     CrashLoopBackOff   12         3d\n",
        ("61 rows × 5 columns", "STATUS Running 60|CrashLoopBackOff 1"),
        'grep="CrashLoopBackOff"',
    ),
    "kubectl describe": Example(
        "Name:             web\nNamespace:        shop\nLabels:           app=web\n"
        + lines(60, "                  l{n}=x")
        + "Status:           Running\nEvents:\n  Type     Reason   Age   From     Message\n"
        + "  Warning  BackOff  5m    kubelet  no\n",
        ("description of web", "1 warning event", "Events:65", "Warning BackOff"),
        'lines="65:125"',
    ),
    "pip list": Example(
        "Package    Version\n---------- -------\n" + lines(100, "package-{n:03} 1.{n}.0"),
        ("100 rows × 2 columns", "Version"),
        'grep="package-000"',
    ),
    "grep output": Example(
        lines(60, "src/shop/cart.py:{n}:def f{n}():")
        + lines(30, "src/shop/buy.py:{n}:def g{n}():"),
        ("90 lines from 2 files in src/shop/", "cart.py 60, buy.py 30"),
        'grep="cart.py"',
    ),
    "tsc": Example(
        lines(60, "src/a.ts({n},28): error TS2304: Cannot find name 'x{n}'.")
        + "src/b.ts(1,2): error TS2339: Property.\n",
        ("61 errors in 2 files in src/", "TS2304 ×60", "TS2339 ×1", "a.ts 60"),
        'grep="TS2304"',
    ),
    "mypy": Example(
        lines(60, "src/a.py:{n}: error: Name 'x' is not defined  [name-defined]")
        + "src/a.py:2: error: no  [attr-defined]\n",
        ("61 errors in 1 file", "name-defined ×60"),
        'grep="name-defined"',
    ),
    "paths": Example(
        lines(90, "./src/p{n}/a.py") + lines(10, "./docs/d{n}.md"),
        ("100 paths in ./", "src/ 90, docs/ 10", ".py 90, .md 10"),
        'grep="[.]py$"',
    ),
    "ls -l": Example(
        "total 12\n"
        + lines(60, "-rw-r--r-- 1 root root {n} Nov 17 04:33 f{n}.txt")
        + "drwxr-xr-x 2 root root 4096 Nov 17 04:33 d\n",
        ("60 files, 1 folder", "f59.txt 59"),
        'lines="1:60"',
    ),
    "settings": Example(
        lines(90, "SHOP_{n}=value {n}"), ("90 settings", "SHOP_0, SHOP_1"), 'grep="^SHOP_0="'
    ),
    "terraform plan": Example(
        "Terraform will perform the following actions:\n"
        + lines(30, "  # aws_instance.web[{n}] will be created\n  + resource x")
        + "Plan: 30 to add, 1 to change, 0 to destroy.\n",
        ("Plan: 30 to add, 1 to change, 0 to destroy.", "aws_instance.web[0] will be created"),
        'grep="^ *# |^Plan:|Error:"',
    ),
    "YAML": Example(
        "apiVersion: v1\nkind: List\nitems:\n"
        + lines(40, "- kind: Pod\n  metadata:\n    name: web-{n}"),
        ("objects: Pod ×40", "apiVersion:1, kind:2, items:3"),
        'grep="^(- |  )*kind:|^ {2,4}name:"',
    ),
    "accessibility snapshot": Example(
        "- Page URL: https://shop.example.org/cart\n- Page Title: Your cart\n- Page Snapshot:\n```yaml\n"
        '- heading "Your cart" [level=1] [ref=e1]\n'
        + lines(60, '  - link "Thing {n}" [ref=e{n}]:')
        + '  - textbox "Code" [ref=e90]\n  - button "Buy" [ref=e91]\n```\n',
        ("“Your cart” https://shop.example.org/cart: 60 links, 1 button, 1 field, 1 heading",),
        'grep="textbox|searchbox|combobox|button"',
    ),
    "HTML": Example(
        "<!doctype html><html><head><title>A shop</title></head><body>"
        + "<div class='x'>words</div>" * 900
        + "<h2>At the end</h2></body></html>",
        ("HTML “A shop”", "1:h2 At the end"),
        'query="text"',
    ),
    "Markdown": Example(
        "# Shop\n\n" + lines(40, "## Part {n}\n\nwords about it\n"),
        ("1:# Shop", "3:## Part 0"),
        'grep="^#"',
    ),
    "code": Example(
        "import os\n\n\n" + lines(300, "def function_{n}():\n    return {n}\n\n"),
        ("def function_0:4-5", "+"),
        'grep="^[a-z ]*def "',
    ),
    "CSV": Example(
        "id,name,state\n"
        + "".join(f"{n},user {n},{'open' if n % 3 else 'closed'}\n" for n in range(900)),
        ("900 rows × 3 columns", "state VARCHAR open 600|closed 300"),
        'query="SELECT state, count(*) FROM artifact GROUP BY 1 ORDER BY 2 DESC"',
    ),
    "JSON rows": Example(
        json.dumps([{"id": n, "name": f"user {n}"} for n in range(900)]),
        ("JSON array of 900 items", "id BIGINT 0..899"),
        'query="SELECT name, id FROM artifact LIMIT 20"',
    ),
    "API answer": Example(
        json.dumps(
            {
                "total": 3,
                "data": {
                    "items": [{"id": n, "state": ["open", "closed"][n % 2]} for n in range(90)]
                },
            }
        ),
        ("data.items: 90 objects: id BIGINT",),
        'query="SELECT state, count(*) FROM artifact GROUP BY 1 ORDER BY 2 DESC"',
    ),
    "Kubernetes list": Example(
        json.dumps(
            {
                "kind": "List",
                "items": [{"kind": "Pod", "metadata": {"name": f"web-{n}"}} for n in range(90)],
            }
        ),
        ("items: 90 objects: ",),
        'query="$.items[*].metadata.name"',
    ),
    "notebook": Example(
        json.dumps(
            {
                "nbformat": 4,
                "cells": [{"cell_type": "markdown", "source": ["# Sales\n"]}]
                + [{"cell_type": "code", "source": ["x = 1"], "outputs": []}] * 90,
            }
        ),
        ("notebook of 90 code, 1 markdown cells", "Sales"),
        'query="$.cells[*].source"',
    ),
    "JSON that is cut off": Example(
        json.dumps({"items": [{"name": f"user {n}", "age": n} for n in range(300)]})[:-40]
        + "... [truncated]",
        ("JSON, cut off or invalid: ", "items [≥"),
        'grep=".name."',
    ),
    "Python rows": Example(
        "Retrieved 900 entries.\n" + repr([(n, f"user {n}", "open, (closed)") for n in range(900)]),
        ("900 rows × 3 columns", "user 0"),
        "",
    ),
}


@pytest.fixture(scope="module")
def session() -> Session:
    return coatcheck.open("memory:").session("s")


def stub_of(session: Session, value: object) -> dict[str, Any]:
    text = session.externalize(value, tool="t", policy=Policy(tools={"t": "always"})).text
    assert tokens.exact(text) <= MOST_TOKENS, text
    stub = json.loads(text)
    assert isinstance(stub, dict)
    return stub


def answer(session: Session, hint: str) -> str:
    """Run the call that a hint suggests, as a model would write it."""
    match = CALL.match(hint)
    assert match is not None, hint
    return toolkit(session)[0].run(**dict(ARGUMENT.findall(match[1])))


def is_answered(page: str) -> bool:
    first = page.partition("\n")[0]
    return not first.startswith("[error") and "no match" not in first and "; 0 rows" not in first


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_stub_shows_what_to_ask_for_and_its_hint_works(kind: str, session: Session) -> None:
    example = EXAMPLES[kind]
    stub = stub_of(session, example.content)
    for part in example.shows:
        assert part in stub["preview"]
    assert example.ask in stub["hint"]
    assert is_answered(answer(session, stub["hint"]))


def test_stubs_of_real_files_are_small_and_their_hints_work(corpus: Path, session: Session) -> None:
    for path in [path for path in corpus_files(corpus) if path.stat().st_size < 200_000][:20]:
        stub = stub_of(session, path.read_text("utf-8", "replace"))
        assert is_answered(answer(session, stub["hint"])), path.name


@pytest.mark.parametrize(
    "odd", ['a"b', "a\nb", "a' OR 1=1 --", "select", "x" * 500, "a|b*(c", "\u202egnp", "a\\b"]
)
def test_odd_names_make_hints_that_still_work(odd: str, session: Session) -> None:
    rows = [{odd: n, "other": "x" * 40} for n in range(100)]
    path = odd.replace("\n", " ")
    for value in (
        json.dumps(rows),
        json.dumps({odd: rows}),
        f"src/{path}.py:1:x\n" * 90,
        f"{path}=1\n" * 90,
    ):
        assert is_answered(answer(session, stub_of(session, value)["hint"]))


def test_neither_previews_nor_hints_contain_secrets(session: Session) -> None:
    secret = "ghp_" + "Ab3dE5" * 6
    for value in (
        "2026-01-01 10:00:00 INFO fine\n" * 300 + f"2026-01-01 10:00:00 ERROR token {secret}\n",
        f"NAME   READY   STATUS\n{secret}   1/1   Running\n" + "web   1/1   Running\n" * 90,
        f"./src/{secret}/a.py\n" * 90,
        f"==== test session starts ====\nFAILED tests/a.py::test[{secret}]\n"
        + "x\n" * 900
        + "=== 1 failed in 1s ===\n",
        json.dumps([{"name": secret, secret: 1}] * 90),
    ):
        assert secret not in json.dumps(stub_of(session, value))


def test_hints_use_sql_only_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    content = EXAMPLES["CSV"].content
    monkeypatch.setattr(excerpts, "is_installed", lambda package: False)
    found = preview(Sample.of(content.encode()), media_type="text/csv")
    assert found.ask == 'lines="1:30"'


def test_a_preview_of_text_shows_whole_lines_at_both_ends() -> None:
    text = "".join(f"This is sentence {n} of a text without any form.\n" for n in range(300))
    found = preview(Sample.of(text.encode()), media_type="text/plain").text
    head, _, tail = found.partition(" …[")
    assert text.startswith(head)
    assert head.endswith("form.\n")
    assert tail.partition("]… ")[2].startswith("This is sentence ")


def test_a_hint_is_a_program_where_counting_needs_one_and_the_agent_can_run_it(
    session: Session,
) -> None:
    log = "".join(f"2026-01-01 10:00:00 {['put', 'get'][n % 2]} key-{n}\n" for n in range(900))
    users = {f"user{n}": {"role": ["admin", "guest"][n % 2]} for n in range(200)}
    for value, program in (
        (log, "print(Counter(w for l in lines for w in l.split()[2:3]).most_common(30))"),
        (
            json.dumps({"users": users}),
            "print(Counter(v.get('role') for v in data['users'].values()).most_common(20))",
        ),
    ):
        able = Policy(tools={"t": "always"}, read_arguments=("pointer", "lines", "grep", "code"))
        hint = json.loads(session.externalize(value, tool="t", policy=able).text)["hint"]
        assert hint.startswith('get_artifact(pointer="art:')
        assert f'", code="{program}")' in hint
        assert "code=" not in stub_of(session, value)["hint"]
