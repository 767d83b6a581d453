"""Expensive reads run in a child process and end with an error at a limit; short reads stay in this
process."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import coatcheck
from coatcheck import Session, ToolCall, ToolExecutor
from coatcheck.content import Content
from coatcheck.errors import (
    CoatcheckError,
    Damaged,
    InvalidArgument,
    InvalidPointer,
    LimitExceeded,
    TooLarge,
)
from coatcheck.executor import ToolError
from coatcheck.reading import diff as compare
from coatcheck.reading import grep, heavy, json_content, jsonpath, sandbox
from coatcheck.reading.page import PageDraft, QueryResult, Request
from coatcheck.reading.sandbox import Pool
from coatcheck.reading.text import DecodedText
from tests.mcp.speaking import gone
from tests.reading.framed import content_of, make_content
from tests.repeated import shown_by_first

SLOW = "(a?){1000}a{1000}b"
LINE = "a" * 1_000_000
JSON = "application/json"
linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="needs the limits and /proc of Linux"
)


def empty_arrays(count: int) -> bytes:
    """A document that takes far more memory parsed than as text."""
    return b"[" + b",".join([b"[]"] * count) + b"]"


@pytest.fixture(autouse=True)
def children(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test starts its own children, except those that only compare answers: they share one."""
    if "all_in_child" not in request.fixturenames:
        heavy.pool.close()
    yield
    if "all_in_child" not in request.fixturenames:
        heavy.pool.close()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with coatcheck.open(tmp_path / "store") as store:
        yield store.session("s")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Limits that are reached soon."""
    monkeypatch.setattr(heavy, "SECONDS", 0.5)
    monkeypatch.setattr(heavy, "GREP_SECONDS", 0.5)
    return monkeypatch


@pytest.fixture
def all_in_child(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMALL_JSON", "SMALL_PART", "SMALL_DIFF", "WORK"):
        monkeypatch.setattr(heavy, name, -1)


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# Limits


@linux_only
@pytest.mark.parametrize(
    ("value", "asked"),
    [
        (LINE, {"grep": SLOW}),
        (f"{LINE}\n" * 3, {"grep": SLOW, "invert": True}),
        ([LINE] * 3, {"query": f"$[?search(@, '{SLOW}')]"}),
        ([{"text": LINE, "pattern": SLOW}], {"query": "$[?search(@.text, @.pattern)]"}),
    ],
    ids=["grep", "inverted grep", "JSONPath", "pattern in the document"],
)
def test_a_slow_pattern_is_stopped_by_its_cpu_time(
    session: Session, brief: pytest.MonkeyPatch, value: object, asked: dict[str, object]
) -> None:
    ref = session.put(value)
    before = cpu_of_children()
    with pytest.raises(LimitExceeded) as raised:
        session.read(ref, **asked)  # type: ignore[arg-type]
    assert raised.value.code == "limit_exceeded"
    assert raised.value.hint
    assert cpu_of_children() - before < 8  # it would take minutes
    brief.undo()
    assert session.read(ref, query="shape" if "query" in asked else None, max_chars=500).text


@linux_only
@pytest.mark.parametrize(
    "path",
    [
        "$" + "..[*,*,*,*]" * 5 + ".zz",
        "$" + "[*,*,*,*,*,*,*,*]" * 8 + ".zz",
        "$..[?count($..*) == 1]",
        "$..[?count($..[?@ > 1]) == 1]",
    ],
)
def test_a_path_that_takes_forever_is_stopped_by_its_cpu_time(
    session: Session, brief: pytest.MonkeyPatch, path: str
) -> None:
    tree = [[[n, [n, [n, n]]] for n in range(100)] for _ in range(100)]
    with pytest.raises(LimitExceeded, match=r"0.5 s of CPU time") as raised:
        session.read(session.put(tree), query=path)
    assert "narrow the filter" in raised.value.hint


@pytest.mark.parametrize("pattern", [r"(\p{L}{30}){5}", r"((\pL|\pN){100})+"])
def test_a_pattern_that_compiles_to_too_much_is_refused_with_a_hint(
    session: Session, pattern: str
) -> None:
    text, document = session.put("some text"), session.put(["some text"])
    with pytest.raises(InvalidArgument) as raised:
        session.read(text, grep=pattern)
    assert "simplify" in raised.value.hint or "shorter" in raised.value.hint
    with pytest.raises(InvalidArgument):
        session.read(document, query=f"$[?search(@, '{pattern}')]".replace("\\", "\\\\"))


@linux_only
@pytest.mark.parametrize("asked", [{"query": "$..x"}, {"query": "shape"}], ids=["path", "shape"])
def test_a_read_that_needs_too_much_memory_is_stopped(
    session: Session, monkeypatch: pytest.MonkeyPatch, asked: dict[str, str]
) -> None:
    monkeypatch.setattr(heavy, "MEMORY", 32 << 20)
    ref = session.put(empty_arrays(5_000_000), media_type=JSON)
    with pytest.raises(LimitExceeded):
        session.read(ref, **asked)  # type: ignore[arg-type]
    monkeypatch.undo()
    assert session.read(session.put(list(range(100_000))), query="$[7]").text == "7"


_PEAKS = """
import resource, sys
import coatcheck
from coatcheck.errors import CoatcheckError

def peak():  # that of getrusage begins with the peak of the process that started this one
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

with coatcheck.open(sys.argv[1]) as store:
    session = store.session("s")
    ref = session.put(open(sys.argv[2], "rb"), media_type="application/json")
    before = peak()
    for asked in sys.argv[3:]:
        try:
            if asked == "get":
                got = session.get(ref.pointer + "#/7")
            else:
                got = session.read(ref, query=asked).text
        except CoatcheckError as error:
            got = error.code
        after = peak()
        print(asked, (after - before) // 1024, file=sys.stderr)
print((after - before) // 1024, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


@linux_only
def test_a_large_document_takes_its_memory_in_the_child_and_within_the_limit(
    tmp_path: Path,
) -> None:
    (tmp_path / "document").write_bytes(empty_arrays(1_500_000))
    asked = ["get", "$..x", "shape", "$[?@ == 1]"]
    command = [
        sys.executable,
        "-c",
        _PEAKS,
        str(tmp_path / "store"),
        str(tmp_path / "document"),
        *asked,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    ours, theirs = done.stdout.split()
    assert int(ours) < 50, done.stderr  # parsed here, it would be 100 and more
    assert int(theirs) < (heavy.MEMORY >> 20) + 400


# Fragments


def too_large(session: Session) -> str:
    return session.put(b"[" + b" " * (65 << 20) + b"1]", media_type=JSON).pointer + "#/0"


def read_as_argument(session: Session, pointer: str) -> None:
    def look(value: int) -> int:
        return value

    outcome = ToolExecutor(session, {"look": look}).run(ToolCall("1", "look", {"value": pointer}))
    if isinstance(outcome, ToolError):
        assert outcome.code == "unresolved_pointer"
        raise LimitExceeded(outcome.message)


WAYS: dict[str, Callable[[Session, str, Path], object]] = {
    "get": lambda session, pointer, folder: session.get(pointer),
    "open": lambda session, pointer, folder: session.open(pointer).read(),
    "read": lambda session, pointer, folder: session.read(pointer).text,
    "materialize": lambda session, pointer, folder: session.materialize(
        pointer, folder
    ).read_text(),
    "argument of a tool": lambda session, pointer, folder: read_as_argument(session, pointer),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_a_document_over_the_size_limit_is_refused(
    session: Session, tmp_path: Path, way: str
) -> None:
    with pytest.raises(LimitExceeded, match="67,108,864"):
        WAYS[way](session, too_large(session), tmp_path)


@pytest.mark.parametrize("way", shown_by_first(WAYS))
def test_a_part_of_a_document_of_too_many_values_is_refused(
    session: Session, tmp_path: Path, way: str
) -> None:
    ref = session.put(b"[" + b"0," * 10_100_000 + b"0]", media_type=JSON)
    with pytest.raises(LimitExceeded, match="10,000,000"):
        WAYS[way](session, ref.pointer + "#/0", tmp_path)


def test_a_part_of_a_document_that_is_nested_too_deeply_is_refused(session: Session) -> None:
    ref = session.put(b"[" * 200_000 + b"]" * 200_000, media_type=JSON)
    with pytest.raises(LimitExceeded):
        session.get(ref.pointer + "#/0")


def test_parts_of_a_large_document_are_exact(session: Session) -> None:
    rows = [
        {"id": number, "text": f"é \ud83d\ude00 \ud800 {number}", "share": number / 7}
        for number in range(17_000)
    ]
    ref = session.put({"rows": rows, "big": 10**50})
    assert ref.size_bytes > heavy.SMALL_PART
    assert session.get(f"{ref.pointer}#/rows/16999") == rows[16_999]
    assert session.get(f"{ref.pointer}#/rows") == rows
    assert session.get(f"{ref.pointer}#/big") == 10**50
    assert session.get(f"{ref.pointer}#/nothing/here") is None
    assert session.read(f"{ref.pointer}#/rows/7/id").text == "7"
    with pytest.raises(InvalidPointer, match="nothing at"):
        session.open(f"{ref.pointer}#/rows/17000")


def test_a_part_of_a_large_text_is_an_invalid_pointer(session: Session) -> None:
    ref = session.put("no JSON " * 200_000)
    with pytest.raises(InvalidPointer, match="not JSON"):
        session.get(f"{ref.pointer}#/0")


# The same answers


def outcome_of(call: Callable[[], QueryResult | PageDraft]) -> object:
    try:
        return call()
    except CoatcheckError as error:
        return type(error), error.message, error.hint


DOCUMENT = json.dumps(
    {"rows": [{"id": number, "text": f"é{number}"} for number in range(300)]}
).encode()
LINES = b'{"a": 1}\nnot json\n{"a": [1, 2]}\n'


@pytest.mark.parametrize(
    "path", ["$.rows[3]", "$..id", "$.rows[?search(@.text, '9$')]", "$.none", "$[", "$.rows[?"]
)
@pytest.mark.parametrize(
    ("data", "media_type"), [(DOCUMENT, JSON), (LINES, "application/x-ndjson"), (b"no", JSON)]
)
def test_a_path_has_the_same_answer_in_the_child(
    all_in_child: None, path: str, data: bytes, media_type: str
) -> None:
    content = make_content(data, media_type)
    assert outcome_of(lambda: heavy.find(content, path)) == outcome_of(
        lambda: jsonpath.find(content, path)
    )


@pytest.mark.parametrize(
    ("data", "media_type"), [(DOCUMENT, JSON), (LINES, "application/x-ndjson"), (b"no", JSON)]
)
def test_an_outline_has_the_same_answer_in_the_child(
    all_in_child: None, data: bytes, media_type: str
) -> None:
    content = make_content(data, media_type)
    expected = outcome_of(lambda: json_content.shape(content, max_chars=900))
    assert outcome_of(lambda: heavy.shape(content, max_chars=900)) == expected


def test_a_diff_has_the_same_answer_in_the_child(all_in_child: None) -> None:
    old, new = make_content(b"a\nb\nc\n", "text/plain"), make_content(b"a\nB\nc\nd\n", "text/plain")
    assert heavy.diff(old, new) == compare.diff(old, new)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_grep_has_the_same_pages_in_the_child(all_in_child: None, encoding: str) -> None:
    text = "\ufeff" + "".join(
        f"línea {number}\n" for number in range(10_000)
    )  # few enough to be counted in time
    content = content_of(text.encode(encoding) + b"\xff\xff\xff\xff")
    request = Request(grep=r"\p{L}+ \d*7$", context=1, max_chars=500)
    position: tuple[int, ...] | None = None
    for _ in range(3):
        page = heavy.search(content, request, position)
        expected = grep.search(DecodedText(content), request, position)
        assert (page.text, page.shown, page.position) == (
            expected.text,
            expected.shown,
            expected.position,
        )
        position = page.position
        assert position is not None


def test_short_reads_start_no_child(session: Session) -> None:
    document = session.put({"rows": [{"id": number} for number in range(1_000)]})
    log = session.put("".join(f"line {number}\n" for number in range(200_000)))
    assert session.get(f"{document.pointer}#/rows/7/id") == 7
    assert session.read(document, query="$.rows[7].id").text == "7"
    assert session.read(document, query="shape").text
    assert session.read(log, grep=r"line 19999\d").matches == 10
    assert session.read(log, grep="line 7", literal=True).text
    assert session.read(document, diff=session.put({"rows": []}).pointer).text
    assert heavy.pool.pids() == []


def test_damaged_content_is_an_error_of_the_store(all_in_child: None) -> None:
    def read(offset: int, length: int) -> bytes:
        raise Damaged("the bytes do not match")

    content = make_content(b"[1, 2, 3]", JSON)
    with pytest.raises(Damaged):
        heavy.find(Content(content.ref, b"", read), "$[0]")
    assert heavy.find(content, "$[0]").text == "1"


# Children


@linux_only
def test_a_child_at_work_ends_with_its_parent(tmp_path: Path) -> None:
    script = f"""
import threading, time
from coatcheck.reading import heavy, sandbox
from coatcheck.reading.page import Request
from tests.reading.framed import content_of
content = content_of("a" * 1_000_000)
threading.Thread(target=heavy.search, args=(content, Request(grep={SLOW!r}), None), daemon=True).start()
while not sandbox._alive:
    time.sleep(0.05)
print(next(iter(sandbox._alive)).pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pid = int(process.stdout.readline())
        process.kill()
        process.wait(30)
    assert gone(pid)


ODD = {
    "closes its pipe and runs on": "os.close(1); time.sleep(600)",
    "never reads": "time.sleep(600)",
    "asks for what it was not given": """
body = b'{"read": [7, 0, 100]}'
os.write(1, len(body).to_bytes(8, "big") + body)
time.sleep(600)""",
    "ends at once": "os._exit(0)",
    "announces a giant answer": 'os.write(1, (1 << 60).to_bytes(8, "big")); time.sleep(600)',
}


@pytest.mark.parametrize("way", ODD)
def test_a_misbehaving_child_is_an_error_and_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    name = f"odd_{list(ODD).index(way)}"
    body = "\n".join("    " + line for line in ODD[way].strip().splitlines())
    (tmp_path / f"{name}.py").write_text(f"import os, time\ndef main(folder):\n{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sandbox, "START", 1.0)
    pool = Pool(name)
    others = set(sandbox._alive)
    message = {"padding": "x" * 1_000_000}  # more than a pipe takes
    with pytest.raises(LimitExceeded):
        pool.ask(message, seconds=1, max_chars=1_000)
    assert not pool.pids()
    assert sandbox._alive <= others


def test_the_time_limit_of_a_call_begins_when_its_child_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_start.py").write_text(
        "import time\nfrom coatcheck.reading.sandbox import serve\ntime.sleep(2)\n"
        "def main(folder):\n    serve(folder, lambda message, contents: message['arguments'])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = Pool("odd_start")
    assert pool.ask({"given": 1}, seconds=0.5, max_chars=1_000) == {"given": 1}
    pool.close()


def test_a_call_that_gets_no_free_child_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_waiting.py").write_text(
        "import time\ndef main(folder):\n    time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sandbox, "QUEUE", 0.5)
    pool = Pool("odd_waiting")
    ended: list[type[BaseException]] = []
    others = set(sandbox._alive)

    def ask() -> None:
        try:
            pool.ask({}, seconds=60, max_chars=1_000)
        except LimitExceeded as error:
            ended.append(type(error))

    threads = [threading.Thread(target=ask) for _ in range(sandbox.MAX_BUSY)]
    for thread in threads:
        thread.start()
    while len(sandbox._alive - others) < sandbox.MAX_BUSY:
        threading.Event().wait(0.05)
    with pytest.raises(LimitExceeded, match="too many"):
        pool.ask({}, seconds=60, max_chars=1_000)
    for one in sandbox._alive - others:
        one.kill()
    for thread in threads:
        thread.join(60)
    assert ended == [LimitExceeded] * sandbox.MAX_BUSY


def test_an_idle_child_that_was_killed_is_replaced_silently() -> None:
    content = make_content(json.dumps(list(range(100_000))).encode(), JSON)
    assert heavy.find(content, "$[7]").text == "7"
    (pid,) = heavy.pool.pids()
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)
    assert heavy.find(content, "$[8]").text == "8"
    assert pid not in heavy.pool.pids()


def test_an_idle_child_that_dies_while_the_message_is_on_its_way_is_replaced_silently() -> None:
    content = make_content(json.dumps(list(range(100_000))).encode(), JSON)
    assert heavy.find(content, "$[7]").text == "7"
    (pid,) = heavy.pool.pids()
    os.kill(pid, signal.SIGSTOP)  # the pipe takes the message, but nobody reads it
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    assert heavy.find(content, "$[8]").text == "8"
    assert pid not in heavy.pool.pids()


def test_a_child_that_is_killed_at_work_is_an_error_and_its_work_is_not_repeated() -> None:
    data = json.dumps(list(range(100_000))).encode()
    assert heavy.find(make_content(data, JSON), "$[7]").text == "7"
    (pid,) = heavy.pool.pids()
    reads = 0

    def read(offset: int, length: int) -> bytes:
        nonlocal reads
        reads += 1
        os.kill(pid, signal.SIGKILL)
        return data[offset : offset + length]

    with pytest.raises(LimitExceeded, match="stopped"):
        heavy.find(Content(make_content(data, JSON).ref, b"", read), "$[8]")
    assert reads == 1


def test_sizes_over_the_limit_are_refused_without_reading(session: Session) -> None:
    content = make_content(b"", JSON)
    large = Content(
        coatcheck.Ref(content.ref.artifact_id, "s", 1 << 40, JSON, "data"),
        b"",
        lambda offset, length: b"[",
    )
    with pytest.raises(TooLarge):
        heavy.find(large, "$")
    with pytest.raises(TooLarge):
        heavy.shape(large, max_chars=500)
    with pytest.raises(TooLarge):
        heavy.part(large, "/0")
