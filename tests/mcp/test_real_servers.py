"""Real servers, called by the official client directly and behind a proxy. The client sees the
same, except for the three added tools, the stubs in place of large results, the links beside these
stubs, the schemas of results that may become stubs, and the capability `resources` of a server
without resources.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import http.server
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

import coatcheck
from coatcheck.context import savings
from coatcheck.tokens import estimate
from tests import warm
from tests.mcp.speaking import environment, proxy

pytestmark = pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")

OURS = {"get_artifact", "list_artifacts", "store_artifact"}
SESSION = "real"
TIMES = re.compile(r"\d{1,2}:\d\d:\d\d( [AP]M)?|\d{4}-\d\d-\d\dT[\d:.+Z-]+")
Calls = Sequence[tuple[str, dict[str, Any]]]
Modes = ["legacy", "auto"]


class Watched:
    """The client's handlers: they record and answer the server's requests and notifications."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.notified: list[str] = []
        self.news = asyncio.Event()

    async def sample(
        self, context: Any, params: types.CreateMessageRequestParams
    ) -> types.CreateMessageResult:
        self.asked.append(plain(params))
        content = types.TextContent(type="text", text="a sampled answer")
        return types.CreateMessageResult(
            role="assistant", content=content, model="none", stop_reason="endTurn"
        )

    async def elicit(self, context: Any, params: Any) -> types.ElicitResult:
        self.asked.append(plain(params))
        return types.ElicitResult(action="decline")

    async def roots(self, context: Any) -> types.ListRootsResult:
        return types.ListRootsResult(
            roots=[types.Root.model_validate({"uri": "file:///somewhere", "name": "somewhere"})]
        )

    async def log(self, params: types.LoggingMessageNotificationParams) -> None:
        self.notified.append("log")
        self.news.set()

    async def handle(self, message: Any) -> None:
        method = getattr(message, "method", None)
        if method is not None:
            self.notified.append(method)
            self.news.set()


@asynccontextmanager
async def connected(
    command: Sequence[str] | str, env: dict[str, str], mode: str
) -> AsyncIterator[tuple[Client, Watched]]:
    """A client of a command or a URL."""
    watched = Watched()
    with open(os.devnull, "w") as quiet:
        transport: AbstractAsyncContextManager[Any]
        if isinstance(command, str):
            transport = streamable_http_client(command)
        else:
            parameters = StdioServerParameters(command=command[0], args=list(command[1:]), env=env)
            transport = stdio_client(parameters, errlog=quiet)
        client = Client(
            transport,
            mode=mode,
            sampling_callback=watched.sample,
            elicitation_callback=watched.elicit,
            list_roots_callback=watched.roots,
            logging_callback=watched.log,
            message_handler=watched.handle,
        )
        async with client:
            yield client, watched


def plain(value: Any) -> Any:
    """A model as JSON, without times and other values that differ between calls."""
    return json.loads(TIMES.sub("<time>", value.model_dump_json(by_alias=True, exclude_none=True)))


async def outcome(call: Awaitable[Any]) -> Any:
    try:
        return plain(await call)
    except MCPError as error:
        return {"failed": [error.code, error.message, error.data]}


async def lists(client: Client) -> dict[str, Any]:
    """List everything that a client can list, and read each entry."""
    await asyncio.sleep(0)
    prompts = await outcome(client.list_prompts())
    resources = await outcome(client.list_resources())
    templates = await outcome(client.list_resource_templates())
    seen: dict[str, Any] = {
        "version": client.protocol_version,
        "info": plain(client.server_info) if client.server_info else None,
        "capabilities": plain(client.server_capabilities),
        "instructions": client.instructions,
        "tools": await outcome(client.list_tools()),
        "prompts": prompts,
        "resources": resources,
        "templates": templates,
    }
    for prompt in prompts.get("prompts", ()):
        given = {one["name"]: "1" for one in prompt.get("arguments", ())}
        seen[f"prompt {prompt['name']}"] = await outcome(client.get_prompt(prompt["name"], given))
        for name in given:
            ref = types.PromptReference(name=prompt["name"])
            seen[f"completion {prompt['name']} {name}"] = await outcome(
                client.complete(ref, {"name": name, "value": ""}, {"department": "Engineering"})
            )
    for resource in resources.get("resources", ()):
        seen[f"resource {resource['uri']}"] = await outcome(client.read_resource(resource["uri"]))
    for template in templates.get("resourceTemplates", ()):
        pattern = template["uriTemplate"]
        seen[f"from template {pattern}"] = await outcome(
            client.read_resource(re.sub(r"\{[^}]*\}", "1", pattern))
        )
        completion = client.complete(
            types.ResourceTemplateReference(uri=pattern), {"name": "resourceId", "value": "1"}
        )
        seen[f"completion {pattern}"] = await outcome(completion)
    seen["unknown resource"] = await outcome(client.read_resource("nowhere://at/all"))
    seen["unknown prompt"] = await outcome(client.get_prompt("no such prompt"))
    seen["unknown tool"] = await outcome(client.call_tool("no such tool"))
    return seen


async def calls_of(client: Client, calls: Calls) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for number, (tool, arguments) in enumerate(calls):
        steps: list[Any] = []

        async def note(
            progress: float, total: float | None, message: str | None, steps: list[Any] = steps
        ) -> None:
            steps.append((progress, total, message))

        key = f"{number} {tool} {json.dumps(arguments)[:80]}"
        seen[key] = await outcome(client.call_tool(tool, arguments, progress_callback=note))
        seen[f"{key}: progress"] = steps
    return seen


async def everything(client: Client, watched: Watched, calls: Calls) -> dict[str, Any]:
    return {
        **await lists(client),
        **await calls_of(client, calls),
        "asked of the client": watched.asked,
    }


def without_changes(seen: dict[str, Any], session: coatcheck.Session | None) -> dict[str, Any]:
    """Undo the changes of the proxy to tools and results. If nothing differs after that, there were
    no others."""
    tools = seen["tools"].get("tools", [])
    kept = [
        {k: v for k, v in one.items() if k != "outputSchema"}
        for one in tools
        if one["name"] not in OURS
    ]
    undone = {**seen, "tools": {**seen["tools"], "tools": kept}}
    whole = {
        key: _unstubbed(_without_links(value, session), session) for key, value in undone.items()
    }
    return json.loads(json.dumps(whole))  # type: ignore[no-any-return]


def _without_links(result: Any, session: coatcheck.Session | None) -> Any:
    """Check that a result ends with one link to each artifact of its stubs and has no other of our
    links, and remove them."""
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return result
    blocks = result["content"]
    links = [block for block in blocks if block.get("uri", "").startswith("art://")]
    kept = blocks[: len(blocks) - len(links)]
    linked = []
    if session is not None:
        refs = [session.ref(pointer) for pointer in _stubbed_in({**result, "content": kept})]
        linked = [
            {
                "type": "resource_link",
                "uri": f"art://{ref.artifact_id}",
                "name": ref.name or ref.pointer,
                "mimeType": ref.media_type,
                "size": ref.size_bytes,
                "annotations": {"audience": ["user"]},
            }
            for ref in refs
            if ref is not None
        ]
        assert None not in refs
    assert blocks[len(kept) :] == linked
    return {**result, "content": kept}


def _stubbed_in(value: Any) -> list[str]:
    """The pointers of the stubs in a result, each once."""
    if isinstance(value, str) and value.startswith('{"stub"'):
        return [str(json.loads(value)["artifact"])]
    if isinstance(value, dict) and "stub" in value:
        return [str(value["artifact"])]
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list):
        parts = value
    found = [pointer for part in parts for pointer in _stubbed_in(part)]
    return list(dict.fromkeys(found))


def _unstubbed(value: Any, session: coatcheck.Session | None) -> Any:
    """Replace stubs by the stored values."""
    if isinstance(value, list):
        return [_unstubbed(one, session) for one in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("text"), str) and value["text"].startswith('{"stub"'):
        assert session is not None
        stored = session.get(json.loads(value["text"])["artifact"])
        assert stored is not None
        back = TIMES.sub("<time>", stored) if isinstance(stored, str) else json.dumps(stored)
        value = (
            {**value, "text": back, "mimeType": "stub"}
            if "uri" in value
            else {**value, "text": back}
        )
    if isinstance(value.get("text"), str) and value["text"][:1] in ("{", "["):
        with contextlib.suppress(
            ValueError
        ):  # structured content is kept as a value: the same JSON with other whitespace
            value = {**value, "text": json.loads(value["text"])}
    if isinstance(value.get("blob"), str):
        decoded = base64.b64decode(value["blob"]).decode("latin-1")
        value = {**value, "blob": TIMES.sub("<time>", decoded)}
    structured = value.get("structuredContent")
    if isinstance(structured, dict) and "stub" in structured:
        assert session is not None
        structured = session.get(structured["artifact"])
    if (
        isinstance(structured, dict) and len(structured) == 1
    ):  # a wrapped value is stored without its wrapper
        (structured,) = structured.values()
    if structured is not None:
        value = {**value, "structuredContent": structured}
    return {key: _unstubbed(one, session) for key, one in value.items()}


def same_but_for_the_changes(
    place: Path,
    command: Sequence[str] | str,
    calls: Calls,
    *,
    mode: str,
    fresh: Callable[[], dict[str, str]] = dict,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compare a server directly and behind a proxy. Returns both observations."""

    async def run(start: Sequence[str] | str) -> dict[str, Any]:
        async with connected(start, environment(place) | fresh(), mode) as (client, watched):
            return await everything(client, watched, calls)

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        if isinstance(command, str):
            return await run(command), await run(proxy("--session", SESSION, "--url", command))
        return await run(command), await run(proxy("--session", SESSION, server=command))

    bare, proxied = asyncio.run(both())
    with coatcheck.open(place) as store:
        session = store.session(SESSION)
        expected, found = without_changes(bare, None), without_changes(proxied, session)
    if "resources" not in bare["capabilities"]:
        expected |= _with_empty_resources(expected)
    stubbed = {key for key in found if json.dumps(bare[key]) != json.dumps(proxied[key])}
    for key in expected:
        if key in stubbed and key.startswith(("resource ", "from template ")):
            expected[key] = _typed_as_stub(expected[key], found[key])
        assert found[key] == expected[key], key
    assert found.keys() == expected.keys()
    names = [tool["name"] for tool in proxied["tools"]["tools"]]
    assert set(names[-3:]) == OURS
    return bare, proxied


def _with_empty_resources(expected: dict[str, Any]) -> dict[str, Any]:
    """What the proxy adds to a server without resources."""
    return {
        "capabilities": {**expected["capabilities"], "resources": {}},
        "resources": plain(types.ListResourcesResult(resources=[])),
        "templates": plain(types.ListResourceTemplatesResult(resource_templates=[])),
    }


def _typed_as_stub(expected: Any, found: Any) -> Any:
    """Check that a resource replaced by a stub has the media type JSON."""
    contents = [
        {**one, "mimeType": "stub"} if new.get("mimeType") == "stub" else one
        for one, new in zip(expected["contents"], found["contents"], strict=True)
    ]
    return {**expected, "contents": contents}


# Each server

EVERYTHING: Calls = [
    ("echo", {"message": "hello"}),
    ("echo", {"message": "many words " * 5_000}),
    ("echo", {"wrong": 1}),
    ("get-annotated-message", {"messageType": "error", "includeImage": True}),
    ("get-resource-links", {"count": 3}),
    ("get-resource-reference", {"resourceType": "Text", "resourceId": 1}),
    ("get-resource-reference", {"resourceType": "Blob", "resourceId": 2}),
    ("get-structured-content", {"location": "Chicago"}),
    ("get-sum", {"a": 1.5, "b": 2}),
    ("get-tiny-image", {}),
    (
        "gzip-file-as-resource",
        {"name": "a.gz", "data": "data:text/plain,hello", "outputType": "resourceLink"},
    ),
    ("trigger-long-running-operation", {"duration": 0.2, "steps": 4}),
    ("trigger-sampling-request", {"prompt": "say something", "maxTokens": 10}),
    ("trigger-elicitation-request", {}),
    ("get-roots-list", {}),
]


@pytest.mark.parametrize("mode", Modes)
def test_everything_is_the_same(
    npm_server: Callable[[str], list[str]], place: Path, mode: str
) -> None:
    command = [*npm_server("server-everything"), "stdio"]
    bare, proxied = same_but_for_the_changes(place, command, EVERYTHING, mode=mode)
    assert len(bare["asked of the client"]) == 2
    large = next(key for key in proxied if key.startswith("1 echo"))
    assert len(json.dumps(proxied[large])) < len(json.dumps(bare[large])) / 20


@pytest.fixture
def everywhere(npm_server: Callable[[str], list[str]]) -> Iterator[str]:
    """The same server at a URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    process = subprocess.Popen(
        [*npm_server("server-everything"), "streamableHttp"],
        env={**os.environ, "PORT": port},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process, process.stdout as output:
        while "listening" not in (line := output.readline()):
            assert line, "the server has ended"
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def test_everything_is_the_same_over_http(everywhere: str, place: Path) -> None:
    bare, _ = same_but_for_the_changes(place, everywhere, EVERYTHING, mode="legacy")
    assert len(bare["asked of the client"]) == 2


def test_logs_updates_and_cancellation_pass_as_without_a_proxy(
    npm_server: Callable[[str], list[str]], place: Path
) -> None:
    """Run both at once: the server sends something only every few seconds."""
    command = [*npm_server("server-everything"), "stdio"]
    uri = "demo://resource/dynamic/text/1"

    async def run(start: Sequence[str]) -> set[str]:
        async with connected(start, environment(place), "legacy") as (client, watched):
            await client.session.set_logging_level("debug")
            await client.subscribe_resource(uri)
            await client.call_tool("toggle-simulated-logging")
            await client.call_tool("toggle-subscriber-updates")
            with pytest.raises(MCPError):  # the client times out, and cancels the call
                await client.call_tool(
                    "trigger-long-running-operation", {"duration": 60}, read_timeout_seconds=0.2
                )
            while not {"log", "notifications/resources/updated"} <= set(watched.notified):
                watched.news.clear()
                await asyncio.wait_for(watched.news.wait(), 60)
            await client.unsubscribe_resource(uri)
            assert plain(await client.call_tool("echo", {"message": "still here"}))
            return set(watched.notified)

    async def both() -> tuple[set[str], set[str]]:
        return await asyncio.gather(run(command), run(proxy(server=command)))

    bare, proxied = asyncio.run(both())
    assert bare == proxied


@pytest.mark.parametrize("mode", Modes)
def test_filesystem_is_the_same(
    npm_server: Callable[[str], list[str]], tmp_path: Path, mode: str
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "small.txt").write_text("a small file\n")
    (folder / "large.txt").write_text(
        "".join(f"line {number} of a large file\n" for number in range(30_000))
    )
    (folder / "pixel.png").write_bytes(bytes.fromhex("89504e470d0a1a0a") + b"\0" * 40)
    calls: Calls = [
        ("list_allowed_directories", {}),
        ("read_text_file", {"path": str(folder / "small.txt")}),
        ("read_text_file", {"path": str(folder / "large.txt")}),
        ("read_media_file", {"path": str(folder / "pixel.png")}),
        (
            "read_multiple_files",
            {"paths": [str(folder / "small.txt"), str(folder / "missing.txt")]},
        ),
        ("list_directory", {"path": str(folder)}),
        ("directory_tree", {"path": str(folder)}),
        ("search_files", {"path": str(folder), "pattern": "*.txt"}),
        ("read_text_file", {"path": "/outside"}),
    ]
    command = [*npm_server("server-filesystem"), str(folder)]
    _, proxied = same_but_for_the_changes(tmp_path / "store", command, calls, mode=mode)
    large = next(value for key, value in proxied.items() if key.startswith("2 read_text_file"))
    assert (
        json.loads(large["content"][0]["text"])["size_bytes"]
        == (folder / "large.txt").stat().st_size
    )


def test_a_file_is_stored_and_counted_once_as_its_text(
    npm_server: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """The server sends the text of a file twice: as a block, and as structured content."""
    folder, store = tmp_path / "files", tmp_path / "store"
    folder.mkdir()
    text = "".join(
        f"2026-01-01 12:00:{number % 60:02} INFO request {number}\n" for number in range(5_000)
    )
    (folder / "large.log").write_text(text)
    command = [*npm_server("server-filesystem"), str(folder)]

    async def read(start: Sequence[str]) -> Any:
        async with connected(start, environment(store), "auto") as (client, _):
            return plain(
                await client.call_tool("read_text_file", {"path": str(folder / "large.log")})
            )

    bare = asyncio.run(read(command))
    assert bare["structuredContent"] == {"content": bare["content"][0]["text"]}
    proxied = asyncio.run(read(proxy("--session", SESSION, server=command)))
    stub = json.loads(proxied["content"][0]["text"])
    assert proxied["structuredContent"] == stub
    with coatcheck.open(store) as opened:
        session = opened.session(SESSION)
        assert [session.get(ref) for ref in session.list()] == [text]
        assert (
            session.read(stub["artifact"], lines="3:3").text.splitlines() == text.splitlines()[2:3]
        )
        row = savings(opened).total
        assert row.results == 1
        assert row.tokens_kept_out < estimate(text) * 1.1


def test_a_pointer_is_written_to_a_file_as_its_value(
    npm_server: Callable[[str], list[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "large.txt").write_text("".join(f"line {number}\n" for number in range(30_000)))

    async def run() -> None:
        start = proxy(server=[*npm_server("server-filesystem"), str(folder)])
        async with connected(start, environment(tmp_path / "store"), "auto") as (client, _):
            read = plain(
                await client.call_tool("read_text_file", {"path": str(folder / "large.txt")})
            )
            pointer = json.loads(read["content"][0]["text"])["artifact"]
            await client.list_tools()
            await client.call_tool(
                "write_file", {"path": str(folder / "copy.txt"), "content": pointer}
            )

    asyncio.run(run())
    assert (folder / "copy.txt").read_text() == (folder / "large.txt").read_text()


def test_memory_is_the_same(npm_server: Callable[[str], list[str]], tmp_path: Path) -> None:
    people = [
        {
            "name": f"person {number}",
            "entityType": "person",
            "observations": [f"observation {number}"] * 5,
        }
        for number in range(300)
    ]
    calls: Calls = [
        ("create_entities", {"entities": people[:3]}),
        ("create_entities", {"entities": people}),
        (
            "create_relations",
            {"relations": [{"from": "person 1", "to": "person 2", "relationType": "knows"}]},
        ),
        ("read_graph", {}),
        ("search_nodes", {"query": "person 7"}),
        ("open_nodes", {"names": ["person 1"]}),
        ("delete_entities", {"entityNames": ["person 1"]}),
    ]
    numbers = iter(range(10))
    same_but_for_the_changes(
        tmp_path / "store", npm_server("server-memory"), calls, mode="auto",
        fresh=lambda: {"MEMORY_FILE_PATH": str(tmp_path / f"memory-{next(numbers)}.jsonl")},
    )  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a long history of one file."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git = functools.partial(subprocess.run, cwd=folder, check=True, capture_output=True)
    who = {
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "A",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    git(["git", "init", "-q", "-b", "main"])
    for number in range(3):
        (folder / "file.txt").write_text(
            "".join(f"line {line} in version {number}\n" for line in range(1_500))
        )
        git(["git", "add", "."])
        git(["git", "commit", "-q", "-m", f"version {number}"], env={**os.environ, **who})
    (folder / "file.txt").write_text("changed\n")
    return folder


@pytest.mark.parametrize("mode", Modes)
def test_git_is_the_same(repository: Path, tmp_path: Path, mode: str) -> None:
    place = {"repo_path": str(repository)}
    calls: Calls = [
        ("git_status", place),
        ("git_log", {**place, "max_count": 3}),
        ("git_diff_unstaged", place),
        ("git_show", {**place, "revision": "HEAD"}),
        ("git_branch", {**place, "branch_type": "local"}),
        ("git_show", {**place, "revision": "no-such-revision"}),
    ]
    command = warm.command("mcp_server_git", "--repository", str(repository))
    bare, proxied = same_but_for_the_changes(tmp_path / "store", command, calls, mode=mode)
    shown = next(key for key in proxied if key.startswith("3 git_show"))
    assert len(json.dumps(proxied[shown])) < len(json.dumps(bare[shown])) / 20


def test_time_is_the_same(place: Path) -> None:
    calls: Calls = [
        ("get_current_time", {"timezone": "Europe/Berlin"}),
        (
            "convert_time",
            {"source_timezone": "Asia/Tokyo", "time": "12:00", "target_timezone": "Europe/Berlin"},
        ),
        ("get_current_time", {"timezone": "Nowhere/AtAll"}),
    ]
    command = warm.command("mcp_server_time", "--local-timezone", "UTC")
    same_but_for_the_changes(place, command, calls, mode="auto")


@pytest.fixture
def page() -> Iterator[str]:
    """A long web page on this machine."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            lines = "".join(
                f"<p>Paragraph {number} of a long page with many words.</p>"
                for number in range(3_000)
            )
            body = f"<html><head><title>long</title></head><body><article>{lines}</article></body></html>".encode()
            self.send_response(404 if self.path == "/missing" else 200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that http.server uses
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_fetch_is_the_same(page: str, place: Path) -> None:
    calls: Calls = [
        ("fetch", {"url": f"{page}/long", "max_length": 500, "raw": True}),
        ("fetch", {"url": f"{page}/long", "max_length": 200_000, "raw": True}),
        ("fetch", {"url": f"{page}/long", "max_length": 60_000, "raw": True}),
        ("fetch", {"url": f"{page}/missing", "raw": True}),
    ]
    command = warm.command("mcp_server_fetch", "--allow-private-ips", "--ignore-robots-txt")
    bare, proxied = same_but_for_the_changes(place, command, calls, mode="auto")
    long = next(key for key in proxied if key.startswith("1 fetch"))
    assert len(json.dumps(proxied[long])) < len(json.dumps(bare[long])) / 20
    cut = next(key for key in proxied if key.startswith("2 fetch"))
    assert "Call the fetch tool with a start_index of 60000" in json.dumps(bare[cut])
    assert "incomplete: the fetch server left out what follows character 60,000; " in json.dumps(
        proxied[cut]
    )
