"""Hostile content and arguments on the wire of every surface, with a budget of CPU seconds and
memory for each.

The rows are those of the table of limits in docs/reading.md. Budgets have a wide margin: they find
unlimited growth, not slowdowns. Every answer, including an error, stays within its cap.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import resource
import struct
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest

import coatcheck
from tests.conftest import LONG_FAULTS
from tests.counting import Counts
from tests.gateway.provider import Provider, Turn
from tests.gateway.talking import post, serving
from tests.http.servers import path_of, served
from tests.mcp.speaking import ODD, Speaker, environment, proxy

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="usage of processes as Linux reports it"),
]

MIB = 1 << 20
MAX_CHARS = 8_000
CAP = (
    10 * MAX_CHARS
)  # bytes of an answer on the wire, including escapes and what surrounds the page
SECONDS = 100.0  # of CPU for one row; the limits of a read are 10 to 30 seconds
PEAK = 1_600 * MIB  # of any process; the limit of a child that reads is 1 GiB


@cache
def _zeros(size: int) -> bytes:
    return bytes(size)


def _zip(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name, data in members:
            packed.writestr(name, data)
    return out.getvalue()


def _workbook() -> bytes:
    rows = b"<row>" + b"<c><v>1</v></c>" * 8_000_000
    return _zip(
        ("[Content_Types].xml", b"<Types/>"),
        (
            "xl/workbook.xml",
            b'<workbook><sheets><sheet name="a" sheetId="1" r:id="r1"/></sheets></workbook>',
        ),
        ("xl/worksheets/sheet1.xml", b"<worksheet><sheetData>" + rows),
    )


def _merged() -> bytes:
    """A workbook with two cells, and 5,000 merged ranges that each cover the 400,000 cells between
    them."""
    main = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
    rows = '<row r="1"><c r="A1"><v>1</v></c></row><row r="1000"><c r="OJ1000"><v>2</v></c></row>'
    merged = '<mergeCell ref="A1:OJ1000"/>' * 5_000
    sheet = f'<worksheet xmlns="{main}"><sheetData>{rows}</sheetData><mergeCells>{merged}</mergeCells></worksheet>'
    book = (
        f'<workbook xmlns="{main}" xmlns:r="{_RELATIONS}"><sheets><sheet name="a" sheetId="1" r:id="r1"/></sheets>'
        "</workbook>"
    )
    return _zip(
        ("_rels/.rels", _relations(("r1", "officeDocument", "xl/workbook.xml"))),
        ("xl/workbook.xml", book.encode()),
        ("xl/_rels/workbook.xml.rels", _relations(("r1", "worksheet", "worksheets/sheet1.xml"))),
        ("xl/worksheets/sheet1.xml", sheet.encode()),
    )


def _presentation() -> bytes:
    """A presentation of 1,000 slides, each with a few words and a relation to its layout."""
    spaces = f'xmlns:a="a" xmlns:p="p" xmlns:r="{_RELATIONS}"'
    numbers = range(1, 1_001)
    ids = "".join(f'<p:sldId id="{255 + number}" r:id="r{number}"/>' for number in numbers)
    members = [
        ("_rels/.rels", _relations(("r1", "officeDocument", "ppt/presentation.xml"))),
        ("ppt/presentation.xml", f"<p:presentation {spaces}>{ids}</p:presentation>".encode()),
        (
            "ppt/_rels/presentation.xml.rels",
            _relations(
                *((f"r{number}", "slide", f"slides/slide{number}.xml") for number in numbers)
            ),
        ),
        ("ppt/slideLayouts/slideLayout1.xml", f"<p:sldLayout {spaces}/>".encode()),
    ]
    for number in numbers:
        words = f"<p:sp><a:p><a:r><a:t>The words of slide {number}.</a:t></a:r></a:p></p:sp>"
        layout = _relations(("r1", "slideLayout", "../slideLayouts/slideLayout1.xml"))
        members.append(
            (f"ppt/slides/slide{number}.xml", f"<p:sld {spaces}>{words}</p:sld>".encode())
        )
        members.append((f"ppt/slides/_rels/slide{number}.xml.rels", layout))
    return _zip(*members)


_RELATIONS = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


def _relations(*all_of_them: tuple[str, str, str]) -> bytes:
    """The relations of a part of an office file: id, kind and target of each."""
    listed = "".join(
        f'<Relationship Id="{name}" Type="{_RELATIONS}/{kind}" Target="{target}"/>'
        for name, kind, target in all_of_them
    )
    space = "http://schemas.openxmlformats.org/package/2006/relationships"
    return f'<Relationships xmlns="{space}">{listed}</Relationships>'.encode()


def _office() -> bytes:
    return _zip(
        ("[Content_Types].xml", b"<Types/>"),
        ("word/document.xml", b"<w:document>" + b"<w:p>" * 25_000_000),
    )


def _png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 6, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(_zeros(100 * MIB), 1))
            + chunk(b"IEND", b""))  # fmt: skip


def _pdf() -> bytes:
    stream = zlib.compress(b"BT (x) Tj ET\n" * 20_000_000, 1)
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 4 0 R/Resources<<>>>>",
        b"<</Length %d/Filter/FlateDecode>>stream\n%s\nendstream" % (len(stream), stream),
    ]  # fmt: skip
    body = b"%PDF-1.4\n"
    places = []
    for number, one in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj%s endobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % at for at in places)
    return body + b"xref\n0 5\n0000000000 65535 f \n%strailer<</Root 1 0 R/Size 5>>\nstartxref\n%d\n%%%%EOF" % (
        table, len(body),
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row: content, the arguments of a read, and whether it is too costly for every run."""

    name: str
    make: Callable[[], bytes]
    arguments: dict[str, Any] = field(default_factory=dict)
    fragment: str = ""
    is_costly: bool = False


def _nested() -> bytes:
    return b"[" * 100_000 + b"]" * 100_000


def _line() -> bytes:
    return b"x" * (10 * MIB)


ROWS = [
    Row("nested brackets, JSONPath", _nested, {"query": "$..a"}),
    Row("nested brackets, shape", _nested, {"query": "shape"}),
    Row("nested brackets, fragment", _nested, fragment="#/0/0/0"),
    Row("a long line", _line, {"lines": "1:2"}),
    Row("a long line, grep", _line, {"grep": "x+y", "context": 3}),
    Row("a long line, last characters", _line, {"chars": "-100:"}),
    Row("a pattern that compiles to a large program", _line, {"grep": "(a?){1000}a{1000}b"}),
    Row("a long pattern", _nested, {"grep": "a" * 100_000}),
    Row("a long path", _nested, {"query": "$" + ".a" * 50_000}),
    Row("a long cursor", _nested, {"cursor": "A" * 100_000}),
    Row("many slices", _line, {"lines": ",".join(["1:2"] * 20_000)}),
    Row("a long fragment", _nested, fragment="#" + "/0" * 30_000),
    Row("many empty arrays", lambda: b"[" + b"[]," * 4_000_000 + b"1]", {"query": "$..*"}, is_costly=True),
    Row("a workbook", _workbook, {"query": "text"}, is_costly=True),
    Row("an office file", _office, {"query": "text"}, is_costly=True),
    Row("a PDF", _pdf, {"query": "text"}, is_costly=True),
    Row("a picture", _png, {"query": "text"}, is_costly=True),
    Row("a slow diff", lambda: b"".join(b"%d\n" % (n * 7 % 1009) for n in range(300_000)), {"diff": "a long line"},
        is_costly=True),
]  # fmt: skip


@dataclass
class Usage:
    """Resource usage of processes: the CPU seconds of all, and the highest memory peak of any
    one."""

    seconds: float
    peak: int

    def check(self, rows: int, what: str) -> None:
        assert self.seconds < SECONDS * rows, f"{what} took {self.seconds:.1f} CPU seconds"
        assert self.peak < PEAK, f"{what} took {self.peak >> 20} MiB"


MEASURED = """
import json, resource, subprocess, sys
subprocess.run(sys.argv[1:], stderr=subprocess.STDOUT)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
json.dump([used.ru_utime + used.ru_stime, used.ru_maxrss << 10], sys.stderr)
"""


def _used(command: list[str], env: dict[str, str]) -> tuple[str, Usage]:
    """Run a command to its end, and return its output and the usage of it and its children.

    A small process starts it: on Linux, the peak of a process begins with its parent's."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command], env=env, capture_output=True, check=True
    )
    return done.stdout.decode("utf-8", "replace"), Usage(*json.loads(done.stderr))


class Watched:
    """A running server and its children: their usage since this object was created."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._seconds()

    def usage(self) -> Usage:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        peak = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
        return Usage(self._seconds() - self._before, peak)

    def _seconds(self) -> float:
        """CPU seconds of the process and of its children that have ended."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A store with the content of each row, and the pointers by the names of the rows."""
    folder = tmp_path_factory.mktemp("budgets") / "store"
    with coatcheck.open(folder, durability="process") as store:
        session = store.session("s", ttl=None)
        refs = {row.name: session.put(row.make(), name=row.name) for row in _rows()}
    return folder, {name: ref.pointer for name, ref in refs.items()}


def _rows() -> list[Row]:
    return [row for row in ROWS if LONG_FAULTS or not row.is_costly]


LIBRARY = """
import json, sys, coatcheck
with coatcheck.open(sys.argv[1]) as store:
    for pointer, arguments in json.load(sys.stdin if sys.argv[2] == "-" else open(sys.argv[2])):
        session = store.session("s")
        for call in (lambda: session.read(pointer, **arguments).text, lambda: session.preview(pointer).text):
            try:
                print(len(call()))
            except coatcheck.errors.CoatcheckError as error:
                print(len(str(error)))
"""


def test_the_library_stays_within_its_budget(
    hostile: tuple[Path, dict[str, str]], tmp_path: Path, counts: Counts
) -> None:
    folder, pointers = hostile
    for row in _rows() if LONG_FAULTS else [None]:
        some = _rows() if row is None else [row]
        reads = tmp_path / "asked.json"
        reads.write_text(
            json.dumps([(pointers[one.name] + one.fragment, one.arguments) for one in some])
        )
        output, usage = _used(
            [sys.executable, "-c", LIBRARY, str(folder), str(reads)], environment(folder)
        )
        lengths = [int(line) for line in output.splitlines()]
        assert len(lengths) == 2 * len(some), output
        assert max(lengths) <= MAX_CHARS
        usage.check(len(some), row.name if row else "all rows")
        counts("hostile reads", len(some))


@pytest.mark.parametrize(
    ("make", "query", "expected"),
    [
        (_merged, "text", "A1: 1,1,1,1"),
        (_merged, "SELECT count(*) AS n FROM artifact", "n\n1000\n"),
        (_presentation, "slide 1000", "The words of slide 1000."),
    ],
    ids=["merged ranges as text", "merged ranges as a table", "a thousand slides"],
)
def test_an_office_file_with_much_structure_is_read_and_costs_little(
    make: Callable[[], bytes], query: str, expected: str, tmp_path: Path, counts: Counts
) -> None:
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        pointer = store.session("s", ttl=None).put(make()).pointer
    command = [
        sys.executable,
        "-m",
        "coatcheck",
        "read",
        pointer,
        "--session",
        "s",
        f"--query={query}",
    ]
    output, usage = _used(command, environment(tmp_path / "store"))
    assert expected in output
    assert usage.seconds < 6, f"{usage.seconds:.1f} CPU seconds"
    counts("hostile reads")


def test_the_command_line_stays_within_its_budget(
    hostile: tuple[Path, dict[str, str]], counts: Counts
) -> None:
    folder, pointers = hostile
    for row in _rows() if LONG_FAULTS else _rows()[1:9:5]:
        options = [f"--{name}={value}" for name, value in row.arguments.items()]
        command = [
            sys.executable,
            "-m",
            "coatcheck",
            "read",
            pointers[row.name] + row.fragment,
            "--session",
            "s",
        ]
        output, usage = _used([*command, *options], environment(folder))
        assert "Traceback" not in output
        assert len(output) <= CAP
        usage.check(1, row.name)
        counts("hostile reads")


def test_an_mcp_server_stays_within_its_budget(
    hostile: tuple[Path, dict[str, str]], counts: Counts
) -> None:
    folder, pointers = hostile
    command = [sys.executable, "-m", "coatcheck", "mcp", "--session", "s"]
    with Speaker(command, environment(folder)) as speaker:
        speaker.begin()
        watched = Watched(speaker.process.pid)
        for row in _rows():
            arguments = {"pointer": pointers[row.name] + row.fragment, **row.arguments}
            answer = speaker.ask("tools/call", {"name": "get_artifact", "arguments": arguments})
            assert len(json.dumps(answer)) <= CAP, row.name
            counts("hostile reads")
        long = "n" * MIB
        for name, arguments in (
            ("list_artifacts", {"search": long}),
            ("store_artifact", {"content": "x", "name": long}),
            (long, {}),
            ("get_artifact", {"pointer": long}),
            ("get_artifact", {long: long}),
        ):
            answer = speaker.ask("tools/call", {"name": name, "arguments": arguments})
            assert len(json.dumps(answer)) <= CAP, name[:20]
        watched.usage().check(len(_rows()), "the server")


def test_an_http_server_stays_within_its_budget(
    hostile: tuple[Path, dict[str, str]], counts: Counts
) -> None:
    folder, pointers = hostile
    with served(folder, is_warm=False) as web, web.client() as client:
        assert web.process is not None
        watched = Watched(web.process.pid)
        for row in _rows():
            if sum(map(len, map(str, row.arguments.values()))) + len(row.fragment) > 20_000:
                continue  # longer than a request line may be
            answer = client.get(
                path_of("s", pointers[row.name] + row.fragment, "/read"), params=row.arguments
            )
            assert answer.status_code != 500, row.name
            assert len(answer.content) <= CAP, row.name
            counts("hostile reads")
        watched.usage().check(len(_rows()), "the server")


@pytest.mark.parametrize("is_streamed", [True, pytest.param(False, marks=pytest.mark.repeated)])
def test_an_error_of_50_megabytes_from_a_provider_costs_the_gateway_little(
    is_streamed: bool, tmp_path: Path, counts: Counts
) -> None:
    size = 50 * MIB
    raw = b'{"type":"error","error":{"type":"api_error","message":"' + b"x" * size + b'"}}'
    before = resource.getrusage(resource.RUSAGE_SELF)
    body = {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": is_streamed,
    }
    with (
        coatcheck.open(tmp_path / "store", durability="process") as store,
        Provider(
            [Turn(status=500, raw=raw, content_type="application/json")], is_lenient=True
        ) as provider,
        serving(store, provider, mode="stub") as url,
    ):
        answer = post(url, "/v1/messages", body)
    assert answer.status_code >= 500
    assert len(answer.content) <= size + 1_000
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 60, (
        "CPU seconds of gateway, provider and client together"
    )
    counts("hostile answers")


@pytest.mark.slow
def test_twelve_bodies_that_unpack_to_60_megabytes_each_cost_the_gateway_little(
    tmp_path: Path, counts: Counts
) -> None:
    messages = [{"role": "user", "content": "x" * 60_000_000}]
    body = gzip.compress(json.dumps({"model": "m", "max_tokens": 9, "messages": messages}).encode())
    assert len(body) < 60_000
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    answers: list[httpx2.Response] = []
    with (
        Provider(lambda _: Turn(raw=b"{}"), is_lenient=True) as provider,
        _gateway(tmp_path / "store", provider.url) as (url, pid),
    ):
        assert httpx2.get(f"{url}/healthz").status_code == 200
        watched = Watched(pid)

        def ask() -> None:
            answers.append(
                httpx2.post(f"{url}/v1/messages", content=body, headers=headers, timeout=120)
            )

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        usage = watched.usage()
    assert len(answers) == 12
    assert {one.status_code for one in answers} <= {200, 400, 429}, [
        one.text[:200] for one in answers
    ]
    assert usage.peak < 600 * MIB
    usage.check(12, "the gateway")
    counts("hostile requests", 12)


@contextmanager
def _gateway(store: Path, provider: str) -> Iterator[tuple[str, int]]:
    """Run a gateway in a process of its own, and yield its address and process id."""
    command = [sys.executable, "-m", "coatcheck", "gateway", "--no-token", "--port", "0", "--json"]
    options = ["--store", str(store), "--anthropic", provider, "--openai", provider]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"], process.pid
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@pytest.mark.parametrize("is_error", [False, True])
def test_an_answer_of_50_megabytes_from_a_server_costs_the_proxy_little(
    is_error: bool, tmp_path: Path, counts: Counts
) -> None:
    command = proxy(server=ODD, is_warm=False)
    with Speaker(command, environment(tmp_path / "store")) as speaker:
        speaker.begin()
        watched = Watched(speaker.process.pid)
        answer = speaker.ask(
            "tools/call", {"name": "huge", "arguments": {"size": 50 * MIB, "is_error": is_error}}
        )
        assert len(json.dumps(answer)) <= CAP
        watched.usage().check(1, "the proxy")
    counts("hostile answers")


def test_a_name_of_a_megabyte_is_rejected_with_a_short_error(tmp_path: Path) -> None:
    long = "n" * MIB
    with coatcheck.open(tmp_path / "store", durability="process") as store:
        session = store.session("s")
        calls: list[Callable[[], object]] = [
            lambda: session.put("x", name=long), lambda: store.session(long), lambda: session.put("x", tool=long),
            lambda: session.put("x", media_type=long), lambda: session.grant("art:" + "0" * 12, to=long),
            lambda: session.read(long), lambda: store.tenant(long), lambda: session.claim(long),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(coatcheck.errors.CoatcheckError) as error:
                call()
            assert len(str(error.value)) < 2_000
