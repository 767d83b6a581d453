"""The gateway against a bare pass-through, LiteLLM and headroom: CPU for each request, and the time
to the first byte.

Each server runs in a process of its own before the same small upstream, which streams 65 events.
Bodies are those of conversations that grow: of 1 KB, 1 MB and 10 MB. The servers take turns, so
that other load on the machine slows all of them; the median of the rounds counts. CPU is that of
the server's process, from the operating system. Two hundred streams at once are counted too: what
came back, and the memory of the process before and at the most.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from benchmarks.bench import Bench
from benchmarks.peers import environment
from benchmarks.report import Row

SIZES = {"1 KB": 1 << 10, "1 MB": 1 << 20, "10 MB": 10 << 20}
EVENTS = 65
KEYS = {
    "x-api-key": "sk-none",
    "authorization": "Bearer sk-none",
    "anthropic-version": "2023-06-01",
}
ROUND = {"1 KB": 8, "1 MB": 3, "10 MB": 2}
"""Requests of one server in a round."""
_SHORT = 1 << 16  # bytes of a body: each round has a new conversation
_SETTLED = 0.4  # seconds: what is recorded after an answer counts too
_STREAMS = 200
_LOOPBACK_ONLY = {
    "DO_NOT_TRACK": "1", "HEADROOM_OFFLINE": "1", "HEADROOM_TELEMETRY": "off", "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}  # fmt: skip
"""The peers load nothing and report nothing while they are measured."""


async def upstream(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, and stream an answer of 65 events."""
    while (await receive()).get("more_body"):
        pass
    start = {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [],
            "usage": {"input_tokens": 9, "output_tokens": 1},
        },
    }
    block = {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    delta = {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "some words "},
    }
    end: list[dict[str, Any]] = [
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 60},
        },
        {"type": "message_stop"},
    ]
    events: list[dict[str, Any]] = [start, block, *[delta] * (EVENTS - 5), *end]
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"text/event-stream")],
        }
    )
    for one in events:
        data = f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode()
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def bare(target: str) -> Any:
    """The least that a pass-through does with starlette and httpx2."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    client = httpx2.AsyncClient(timeout=600)

    async def relay(request: Request) -> StreamingResponse:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in ("host", "content-length")
        }
        asked = client.build_request(
            request.method, target + request.url.path, headers=headers, content=await request.body()
        )
        answer = await client.send(asked, stream=True)

        async def chunks() -> Any:
            async for chunk in answer.aiter_raw():
                yield chunk
            await answer.aclose()

        return StreamingResponse(
            chunks(), answer.status_code, media_type=answer.headers["content-type"]
        )

    return Starlette(routes=[Route("/{path:path}", relay, methods=["POST"])])


def bare_with_aiohttp(target: str) -> Any:
    """The same pass-through with aiohttp as its client, as in the gateway."""
    import aiohttp
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    clients: list[aiohttp.ClientSession] = []

    async def relay(request: Request) -> StreamingResponse:
        clients[:] = clients or [
            aiohttp.ClientSession(auto_decompress=False)
        ]  # needs the running loop
        headers = {
            name: value
            for name, value in request.headers.items()
            if name not in ("host", "content-length")
        }
        url = target + request.url.path
        answer = await clients[0].request(
            request.method, url, headers=headers, data=await request.body()
        )
        chunks = answer.content.iter_any()
        return StreamingResponse(chunks, answer.status, media_type=answer.headers["content-type"])

    return Starlette(routes=[Route("/{path:path}", relay, methods=["POST"])])


BARE = {"bare": bare, "bare with aiohttp": bare_with_aiohttp}


def body_of(size: int, turn: int, number: int = 0) -> bytes:
    """A request of a conversation with results of 8 KB, which grows by one call and its result with
    each turn."""
    from coatcheck import toolkit

    with __import__("coatcheck").open("memory:") as store:
        tools = [tool.as_anthropic() for tool in toolkit(store.session("s"))]
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"begin {size} {number}"}]
    text = "a line of a result that an agent got\n" * min(220, max(1, size // 64))
    number = 0
    while sum(len(str(one["content"])) for one in messages[-2:]) and number * len(
        text
    ) < size + turn * len(text):
        use = {
            "type": "tool_use",
            "id": f"toolu_{number}",
            "name": "search",
            "input": {"q": number},
        }
        messages.append({"role": "assistant", "content": [use]})
        messages.append(
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": use["id"],
                        "content": f"{number}\n{text}",
                    }
                ],
            }
        )
        number += 1
    return json.dumps(
        {
            "model": "claude-opus-5-5",
            "max_tokens": 100,
            "stream": True,
            "tools": tools,
            "messages": messages,
        }
    ).encode()


@contextmanager
def process(command: Sequence[str], port: int, **variables: str) -> Iterator[int]:
    """Run a server until it accepts connections, and yield its process id."""
    child = subprocess.Popen(
        list(command),
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(1_200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if child.poll() is not None:
                raise RuntimeError(f"{command[0]} ended with {child.returncode}")
            time.sleep(0.1)
        yield child.pid
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu(pid: int) -> float:
    """Seconds of CPU that a process and its threads have used."""
    return time.clock_gettime((~pid << 3) | 2)  # its clock, as clock_getcpuclockid names it


def memory(pid: int, field: str = "VmRSS") -> float:
    """MiB of memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1_024 for line in lines if line.startswith(field))


def measured(
    client: httpx2.Client, url: str, pid: int, bodies: Sequence[bytes]
) -> tuple[float, list[float]]:
    """Milliseconds of CPU for a request, and to the first byte of each answer."""
    firsts = []
    before = cpu(pid)
    for body in bodies:
        begun = time.perf_counter()
        with client.stream(
            "POST", url, content=body, headers={**KEYS, "content-type": "application/json"}
        ) as response:
            chunks = response.iter_raw()
            next(chunks)
            firsts.append(1_000 * (time.perf_counter() - begun))
            for _ in chunks:
                pass
        if response.status_code != 200:
            raise RuntimeError(f"{url} answered {response.status_code}")
    time.sleep(_SETTLED)
    return 1_000 * (cpu(pid) - before) / len(bodies), firsts


def servers(target: str, folder: Path, peers: bool) -> Iterator[tuple[str, list[str], int]]:
    """Yield name, command and port of each server."""
    for name in BARE:
        port = free_port()
        yield (
            name,
            [sys.executable, "-m", "benchmarks.gateway", name, target, "--port", str(port)],
            port,
        )
    for mode in ("observe", "stub"):
        port = free_port()
        options = [
            "--mode",
            mode,
            "--no-token",
            "--port",
            str(port),
            "--store",
            str(folder / mode),
            "--anthropic",
            target,
            "--session",
            "bench",
        ]
        yield mode, [sys.executable, "-m", "coatcheck", "gateway", *options], port
    if not peers:
        return
    try:
        programs = environment.python().parent
    except environment.Missing as missing:
        print(f"the peers are not measured: {missing}", flush=True)
        return
    config = folder / "litellm.json"
    to = {"model": "anthropic/claude-opus-5-5", "api_base": target, "api_key": "sk-none"}
    config.write_text(
        json.dumps({"model_list": [{"model_name": "claude-opus-5-5", "litellm_params": to}]})
    )
    ports = free_port(), free_port()
    commands = {
        "litellm": ["--config", str(config), "--host", "127.0.0.1", "--port", str(ports[0])],
        "headroom": ["proxy", "--host", "127.0.0.1", "--port", str(ports[1]), "--no-rate-limit"],
    }
    commands["headroom"] += ["--anthropic-api-url", target]
    for port, (name, options) in zip(ports, commands.items(), strict=True):
        if (programs / name).exists():
            yield name, [str(programs / name), *options], port
        else:
            print(f"{name}: not installed in the peers' environment", flush=True)


async def crowd(url: str) -> int:
    """Ask for many streams at once, and return how many came back whole."""
    body = json.dumps(
        {
            "model": "claude-opus-5-5",
            "max_tokens": 100,
            "stream": True,
            "messages": [{"role": "user", "content": "go"}],
        }
    )

    async def ask(client: httpx2.AsyncClient) -> bool:
        async with client.stream("POST", url, content=body, headers=KEYS) as response:
            data = [chunk async for chunk in response.aiter_raw()]
        return b"".join(data).count(b"event: ") == EVENTS

    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
        return sum(await asyncio.gather(*(ask(client) for _ in range(_STREAMS))))


Found = dict[str, dict[str, tuple[float, float]]]


def compared(folder: Path, rounds: int, *, peers: bool) -> Found:
    """Milliseconds of CPU and to the first byte, by server and size."""
    port = free_port()
    config = uvicorn.Config(
        upstream, host="127.0.0.1", port=port, log_level="critical", lifespan="off", interface="asgi3",
        timeout_keep_alive=600,
    )  # fmt: skip
    threading.Thread(target=uvicorn.Server(config).run, daemon=True).start()
    target = f"http://127.0.0.1:{port}"
    found: Found = {}
    with ExitStack() as stack:
        running: dict[str, tuple[httpx2.Client, str, int]] = {}
        for name, command, own in servers(target, folder, peers):
            try:
                pid = stack.enter_context(
                    process(
                        command, own, ANTHROPIC_BASE_URL=target, HOME=str(folder), **_LOOPBACK_ONLY
                    )
                )
            except (OSError, RuntimeError) as error:
                print(f"{name}: not measured, {type(error).__name__}: {error}", flush=True)
                continue
            client = stack.enter_context(httpx2.Client(timeout=600, trust_env=False))
            running[name] = client, f"http://127.0.0.1:{own}/v1/messages", pid
        for label, size in SIZES.items():
            samples: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in running}
            for number in range(rounds + 1):
                many = range(ROUND[label])
                is_short = size < _SHORT
                bodies = [body_of(size, turn, number) for turn in many] if is_short else []
                bodies = bodies or [body_of(size, number * len(many) + turn) for turn in many]
                for name, (client, url, pid) in list(running.items()):
                    try:
                        samples[name].append(measured(client, url, pid, bodies))
                    except (OSError, RuntimeError, httpx2.HTTPError) as error:
                        print(f"{name}: not measured, {type(error).__name__}: {error}", flush=True)
                        del running[name]
            for name in running:
                counted = samples[name][1:]  # the first round is for warming up
                firsts = [one for _, some in counted for one in some]
                median = statistics.median(used for used, _ in counted), statistics.median(firsts)
                found.setdefault(name, {})[label] = median
        for name in ("observe", "stub"):
            if name in running:
                _, url, pid = running[name]
                before, whole = memory(pid), asyncio.run(crowd(url))
                print(f"{name}: {whole} of {_STREAMS} streams at once came back whole", flush=True)
                print(
                    f"  memory: {before:.0f} MiB before, at most {memory(pid, 'VmHWM'):.0f} MiB",
                    flush=True,
                )
    return found


def gateway(bench: Bench) -> Iterator[Row]:
    """CPU of a request through the gateway against a bare pass-through, and of the peers against
    the gateway."""
    if not Path("/proc/self/stat").exists():
        return
    found = compared(bench.new_folder("gateway"), 2 if bench.quick else 5, peers=not bench.quick)
    for label, (used, first) in found.get("bare with aiohttp", {}).items():
        note = f"first byte {first:.0f} ms"
        yield Row(
            f"bare with aiohttp, {label}: CPU",
            found["bare"][label][0] / 1_000,
            used / 1_000,
            None,
            note=note,
        )
    for mode in ("observe", "stub"):
        for label, (used, first) in found.get(mode, {}).items():
            note = f"first byte {first:.0f} ms, bare {found['bare'][label][1]:.0f} ms"
            yield Row(
                f"{mode}, {label}: CPU",
                found["bare"][label][0] / 1_000,
                used / 1_000,
                1.5,
                note=note,
            )
    for peer in ("litellm", "headroom"):
        for label, (used, _) in found.get(peer, {}).items():
            ours = found["observe"][label][0] / 1_000
            yield Row(
                f"{peer} against observe, {label}: CPU", ours, used / 1_000, 5.0, at_least=True
            )


def main(arguments: Sequence[str]) -> None:
    """Serve a bare pass-through, in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=BARE)
    parser.add_argument("target")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args(list(arguments))
    uvicorn.run(
        BARE[options.name](options.target),
        host="127.0.0.1",
        port=options.port,
        log_level="critical",
    )


if __name__ == "__main__":
    main(sys.argv[1:])
