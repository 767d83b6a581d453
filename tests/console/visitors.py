"""A filled store, and visitors of the console over plain HTTP, without a browser."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx2

from coatcheck import Store
from coatcheck.console.site import POLICY, console_routes
from coatcheck.http.credentials import Access, Keyring
from tests.backends import wait_until
from tests.gateway.provider import Provider, Say, Seen, Think, Turn, Use, turn
from tests.gateway.talking import BIG, Chat, Talk, serving
from tests.http.servers import environment, running

TOKEN = "an-admin-token-for-tests"
READER = "a-read-token-for-tests"
WRITER = "a-write-token-for-tests"
SOME = "a-token-for-some-sessions"
ACME = "a-token-of-tenant-acme"
OTHER = "a-token-of-another-tenant"
METRICS = "a-token-for-the-metrics"
KEY = "a-key-that-works-once"
HOSTILE = "<script>alert(1)</script>\"'&{{7*7}}\x1b[31m\u202e\u2066"
SECRET = "sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789"
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


def keyring() -> Keyring:
    return Keyring(given={
        TOKEN: Access("admin", "admin"), READER: Access("reader", "read"), WRITER: Access("writer", "write"),
        SOME: Access("some", "write", sessions="support"), ACME: Access("acme", "admin", tenant="acme"),
        OTHER: Access("other", "admin", tenant="other"), METRICS: Access("metrics", "metrics"),
    })  # fmt: skip


def reader(seen: Seen) -> Turn:
    """A model that searches, reads the stub that it gets, and answers."""
    text = str(seen.messages)
    if "'grep'" in text or '"grep"' in text:
        return turn(Say("Job 7919 finished at 10:00:01."))
    if found := re.search(r"art:[0-9a-f]{12}", text):
        return turn(Think("I look for the job."), Use("get", {"pointer": found[0], "grep": "7919"}))
    return turn(Think("I should search."), Use("search", {"q": "jobs"}))


def fill(store: Store) -> None:
    """Record a conversation in each mode, with an error and a broken prefix, and put artifacts."""
    with (
        Provider(reader) as provider,
        serving(store, provider, is_one=True, mode="loop", session="support-1") as url,
    ):
        talk = Talk(url)
        talk.ask("When did the job 7919 finish?")
        talk.ask(talk.results(BIG))
    answers = [
        turn(Use("search", {"q": "x"})),
        turn(Say("Here.")),
        turn(status=429),
        turn(Say("Changed.")),
    ]
    with (
        Provider(answers) as provider,
        serving(store, provider, is_one=True, session="research") as url,
    ):
        talk = Talk(url, thinking=False, system="You are helpful.")
        talk.ask(f"Look for {HOSTILE} with {SECRET}")
        talk.ask(talk.results(BIG))
        with contextlib.suppress(Exception):
            talk.ask("Once more")
        talk.held.pop()
        talk.more["system"] = "You are very helpful."
        talk.ask("Again")
    answers = [turn(Use("search", {"q": "y"}))]
    with (
        Provider(answers) as provider,
        serving(store, provider, is_one=True, session="chat") as url,
    ):
        Chat(url).ask("Hello from chat completions")
    child = store.session("research/agent", parent="research", create=True)
    child.put("what the sub-agent found", name="note.txt", tool="fetch")
    things = store.session(f"things {HOSTILE}")
    things.put(
        "status,cents\npaid,5\nopen,7\npaid,8\n",
        name="orders.csv",
        kind="data",
        media_type="text/csv",
    )
    things.put(
        {"items": [{"id": number, "title": f"thing {number}"} for number in range(300)]},
        name="items.json",
    )
    things.put(
        f"first line\npassword is {SECRET}\n{HOSTILE}\n",
        name=HOSTILE,
        tool=HOSTILE,
        summary=HOSTILE,
    )
    things.put("first line\nsecond line\n", name="old.txt")
    things.put(PNG, name="dot.png", media_type="image/png")
    things.put(b"<svg onload=alert(1)>", name="evil.svg", media_type="image/svg+xml")
    things.put("x" * 10_000_000, name="long.txt")


@contextlib.contextmanager
def site(store: Store, **options: Any) -> Iterator[str]:
    """Serve the console, and yield its URL."""
    known = keyring()
    with running(
        store, known, routes=console_routes(store, known, key=KEY, token=TOKEN), **options
    ) as web:
        yield web.url


class Visitor:
    """Someone who has logged in. `page` returns the text of a page, and checks what every page must
    have."""

    def __init__(self, url: str, token: str | None = TOKEN) -> None:
        # Each connection ends with its answer, so that no test has to close a client.
        self.client = httpx2.Client(
            base_url=url, timeout=60, headers={"connection": "close"}, verify=False
        )
        if token is not None:
            answer = self.client.post("/console/login", data={"token": token})
            assert answer.status_code == 303, answer.text

    def get(self, path: str, **options: Any) -> httpx2.Response:
        return self.client.get(f"/console{path}", **options)

    def page(self, path: str = "", status: int = 200, **options: Any) -> str:
        answer = self.get(path, **options)
        return checked(answer, status)

    def post(self, path: str, *, csrf: str | None = None, **fields: str) -> httpx2.Response:
        given = {"csrf": self.csrf if csrf is None else csrf, **fields}
        return self.client.post(f"/console{path}", data=given)

    @property
    def csrf(self) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', self.get("/live").text)
        assert found is not None
        return found[1]


def checked(answer: httpx2.Response, status: int = 200) -> str:
    assert answer.status_code == status, answer.text[:2000]
    assert answer.headers["content-security-policy"] == POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"
    text = answer.text
    page = Parsed(text)
    assert not page.problems, page.problems
    return text


class Parsed(HTMLParser):
    """A page. `problems` are scripts, styles and handlers that are not ours, and control
    characters."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.words: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script" and not (given.get("src") or "").startswith("/console/static/"):
            self.problems.append(f"a script: {attrs}")
        if tag in ("style", "iframe", "object", "embed", "base"):
            self.problems.append(tag)
        self.problems += [name for name in given if name.startswith("on") or name == "style"]
        for name in ("href", "src", "action"):
            link = given.get(name)
            if link:
                self.links.append(link)
                if not link.startswith(("/console", "#")):
                    self.problems.append(f"a link to {link}")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if any(one in data for one in "\x1b\u202e\u2066\u202d\u200f\x00"):
            self.problems.append(f"a control character: {data!r}")

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))


def in_session(session_id: str, place: str = "") -> str:
    return f"/sessions/{quote(session_id, safe='')}{place}"


BROWSER = """
import pathlib, sys
place = pathlib.Path({place!r})
arguments = pathlib.Path("/proc/self/cmdline")
given = arguments.read_text() if arguments.exists() else "\\0".join(sys.argv)
place.with_suffix(".new").write_text(given)
place.with_suffix(".new").rename(place)
"""


@contextlib.contextmanager
def opened_console(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Run `coatcheck console --open` with a program in place of a browser. Yield the printed
    address, the page that the program was given, and all of its arguments."""
    program, place = folder / "browser.py", folder / "arguments"
    program.write_text(BROWSER.format(place=str(place)))
    env = environment(folder / "store", BROWSER=f"{sys.executable} {program} %s")
    command = [sys.executable, "-m", "coatcheck", "console", "--port", "0", "--open"]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = process.stderr.readline().split()[-1]
        wait_until(place.exists)
        arguments = place.read_text()
        uri = next(one for one in arguments.split("\0") if "://" in one)
        yield address, Path(unquote(urlsplit(uri).path)), arguments
    finally:
        process.terminate()
        process.wait(60)
        process.stderr.close()
