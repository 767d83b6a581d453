"""Clients of a gateway on the official SDKs: agents that keep a conversation and send it back."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import anthropic
import httpx2
import openai

from coatcheck import Store
from coatcheck.gateway import Gateway, GatewaySettings, launch
from tests.gateway.provider import Provider

KEYS = {
    "authorization": "Bearer sk-test",
    "x-api-key": "sk-test",
    "anthropic-version": "2023-06-01",
}
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
BIG = "\n".join(
    f"2026-11-17 10:{i // 60 % 60:02}:{i % 60:02} INFO worker {i} finished job {i * 7919}"
    for i in range(2_000)
)
"""A result that is too large for the context."""


class Replicas:
    """A new gateway for every request, with only the store between them."""

    def __init__(self, store: Store, settings: GatewaySettings) -> None:
        self._store, self._settings = store, settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gateway = Gateway(self._store, self._settings)
        if scope["type"] == "lifespan":
            await gateway(scope, receive, send)
            return
        try:
            await gateway(scope, receive, send)
        finally:
            await gateway.close()


@contextlib.contextmanager
def serving(
    store: Store, provider: Provider, *, is_one: bool = False, **settings: Any
) -> Iterator[str]:
    """Serve in front of a provider, and yield the URL: a new gateway for every request, or one for
    all."""
    given = GatewaySettings(**{"anthropic": provider.url, "openai": provider.url, **settings})
    app: Any = Gateway(store, given) if is_one else Replicas(store, given)
    with launch.local_server() as server, launch.beside(app, server):
        yield server.url


class Talk:
    """An agent on Anthropic's SDK. `held` are the messages that it keeps."""

    def __init__(
        self,
        address: str,
        *,
        is_streamed: bool = True,
        thinking: bool = True,
        key: str = "sk-test",
        **more: Any,
    ) -> None:
        self.address = address
        self.key = key
        self.is_streamed = is_streamed
        self.held: list[dict[str, Any]] = []
        self.events: list[Any] = []
        self.tools = [{"name": "search", "description": "Search.", "input_schema": SCHEMA}]
        self.more: dict[str, Any] = {"thinking": {"type": "adaptive"}} if thinking else {}
        self.more |= more
        self.last: Any = None

    def ask(self, content: Any) -> Any:
        """Send a user message, and return the answer as the SDK returns it."""
        self.held.append({"role": "user", "content": content})
        return self.send()

    def send(self) -> Any:
        with anthropic.Anthropic(api_key=self.key, base_url=self.address, max_retries=0) as client:
            arguments: Any = {
                "model": "claude-opus-5-5",
                "max_tokens": 4_000,
                "messages": self.held,
                "tools": self.tools,
                **self.more,
            }
            if self.is_streamed:
                with client.messages.stream(**arguments) as stream:
                    self.events = list(stream)
                    answer = stream.get_final_message()
            else:
                answer = client.messages.create(**arguments)
        self.last = answer
        content = [
            block.model_dump(exclude_none=True, exclude={"parsed_output"})
            for block in answer.content
        ]
        self.held.append({"role": "assistant", "content": content})
        return answer

    def results(self, *texts: str) -> list[dict[str, Any]]:
        """The results of the calls in the last answer."""
        calls = [block for block in self.last.content if block.type == "tool_use"]
        assert len(calls) == len(texts), calls
        return [
            {"type": "tool_result", "tool_use_id": call.id, "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]


class Chat:
    """An agent on OpenAI's SDK, with chat completions."""

    def __init__(
        self, address: str, *, is_streamed: bool = True, key: str = "sk-test", **more: Any
    ) -> None:
        self.address = address
        self.key = key
        self.is_streamed = is_streamed
        self.held: list[dict[str, Any]] = []
        self.chunks: list[Any] = []
        self.tools = [
            {
                "type": "function",
                "function": {"name": "search", "description": "Search.", "parameters": SCHEMA},
            }
        ]
        self.more = more
        self.last: Any = None

    def ask(self, *messages: dict[str, Any] | str) -> dict[str, Any]:
        self.held += [
            {"role": "user", "content": one} if isinstance(one, str) else one for one in messages
        ]
        with openai.OpenAI(
            api_key=self.key, base_url=f"{self.address}/v1", max_retries=0
        ) as client:
            arguments: Any = {
                "model": "gpt-5.6",
                "messages": self.held,
                "tools": self.tools,
                **self.more,
            }
            if self.is_streamed:
                self.chunks = list(client.chat.completions.create(**arguments, stream=True))
                message = joined(self.chunks)
            else:
                self.last = client.chat.completions.create(**arguments)
                message = self.last.choices[0].message.model_dump(exclude_none=True)
        message.setdefault("content", None)
        self.held.append(message)
        return message

    def results(self, *texts: str) -> list[dict[str, Any]]:
        calls = self.held[-1].get("tool_calls", [])
        assert len(calls) == len(texts), calls
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, texts, strict=True)
        ]


RESPONSES_TOOLS: Any = [
    {
        "type": "function",
        "name": "search",
        "description": "Search.",
        "parameters": SCHEMA,
        "strict": False,
    }
]


class Agent:
    """An agent on OpenAI's SDK, with responses. It keeps the items itself, or refers to the
    previous response."""

    def __init__(
        self, url: str, *, is_streamed: bool, is_stored: bool, key: str = "sk-test"
    ) -> None:
        self.url, self.is_streamed, self.is_stored, self.key = url, is_streamed, is_stored, key
        self.held: list[Any] = []
        self.last: Any = None
        self.events: list[Any] = []

    def ask(self, *items: Any) -> Any:
        new = [{"role": "user", "content": one} if isinstance(one, str) else one for one in items]
        self.held += new
        arguments: Any = {"model": "gpt-5.6", "tools": RESPONSES_TOOLS, "store": self.is_stored}
        if self.is_stored:
            arguments |= {"input": new} | (
                {"previous_response_id": self.last.id} if self.last else {}
            )
        else:
            arguments |= {"input": self.held, "include": ["reasoning.encrypted_content"]}
        with openai.OpenAI(api_key=self.key, base_url=f"{self.url}/v1", max_retries=0) as client:
            if self.is_streamed:
                with client.responses.stream(**arguments) as stream:
                    self.events = list(stream)
                    self.last = stream.get_final_response()
            else:
                self.last = client.responses.create(**arguments)
        drop = {"parsed", "parsed_arguments", "status"}
        self.held += [
            {name: value for name, value in one.to_dict().items() if name not in drop}
            for one in self.last.output
        ]
        for item in self.held:
            for part in item.get("content", []) if isinstance(item.get("content"), list) else []:
                part.pop("parsed", None)
        return self.last

    def results(self, *texts: str) -> list[dict[str, Any]]:
        calls = [one for one in self.last.output if one.type == "function_call"]
        assert len(calls) == len(texts)
        return [
            {"type": "function_call_output", "call_id": call.call_id, "output": text}
            for call, text in zip(calls, texts, strict=True)
        ]


Api = Literal["anthropic", "chat", "responses held", "responses stored"]
APIS: tuple[Api, ...] = get_args(Api)


class Person:
    """Somebody who talks to an agent, in the same words on every API."""

    def __init__(
        self, api: Api, url: str, *, key: str = "sk-test", is_streamed: bool = True
    ) -> None:
        self.agent: Talk | Chat | Agent
        if api == "anthropic":
            self.agent = Talk(url, is_streamed=is_streamed, thinking=False, key=key)
        elif api == "chat":
            self.agent = Chat(url, is_streamed=is_streamed, key=key)
        else:
            is_stored = api == "responses stored"
            self.agent = Agent(url, is_streamed=is_streamed, is_stored=is_stored, key=key)

    def say(self, text: Any) -> None:
        message = {"role": "user", "content": text}
        self.agent.ask(text if isinstance(self.agent, Talk) else message)

    def give(self, *results: str) -> None:
        """Send the results of the calls in the last answer."""
        given: Any = self.agent.results(*results)
        if isinstance(self.agent, Talk):
            self.agent.ask(given)
        else:
            self.agent.ask(*given)


def joined(chunks: Sequence[Any]) -> dict[str, Any]:
    """Join the chunks of a completion as clients do, and check that they belong to one answer."""
    assert len({(one.id, one.created, one.model) for one in chunks}) == 1
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: list[dict[str, Any]] = []
    reasons = []
    for choice in (choice for one in chunks for choice in one.choices):
        message["content"] += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls):
                calls.append(
                    {
                        "id": part.id,
                        "type": "function",
                        "function": {"name": part.function.name, "arguments": ""},
                    }
                )
            calls[part.index]["function"]["arguments"] += part.function.arguments or ""
    assert len(reasons) == 1, reasons
    assert sum(1 for one in chunks for choice in one.choices if choice.delta.role) == 1
    return message | ({"tool_calls": calls} if calls else {})


def assert_only_grows(provider: Provider) -> None:
    """Check that every request to the provider extends the one before it, block for block, with the
    same tools."""
    assert provider.problems == []
    before: list[str] = []
    tools = None
    for seen in provider.answered:
        assert tools in (None, seen.body.get("tools"))
        tools = seen.body.get("tools")
        now = blocks(seen.body)
        assert now[: len(before)] == before, (before, now)
        before = now


def blocks(body: dict[str, Any]) -> list[str]:
    """The blocks of a request without cache marks, each as JSON."""
    found = []
    for message in body["input"] if "input" in body else body["messages"]:
        content = message.get("content")
        inner = content if isinstance(content, list) and "type" not in message else [message]
        if (
            isinstance(content, str)
            and message.get("role") != "tool"
            and "tool_calls" not in message
        ):
            inner = [{"type": "text", "text": content}]
        for block in inner:
            bare = {name: value for name, value in block.items() if name != "cache_control"}
            found.append(json.dumps([message.get("role"), bare], sort_keys=True))
    return found


def post(url: str, path: str, body: Any, **headers: str) -> httpx2.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with httpx2.Client(timeout=30, trust_env=False) as client:
        return client.post(
            url + path,
            content=data,
            headers={**KEYS, "content-type": "application/json", **headers},
        )
