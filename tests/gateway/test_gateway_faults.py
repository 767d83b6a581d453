"""Kills, failing stores and providers that break: nothing is lost, and a conversation can always be
continued."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest

import coatcheck
from coatcheck import Session, Store
from coatcheck.errors import StoreUnavailable
from coatcheck.storage.disk import Disk
from coatcheck.storage.folder import open_folder_store
from coatcheck.storage.passages import Passages
from tests.faults.faulty import Crash, failing_catalog
from tests.gateway.provider import Provider, Say, Seen, Think, Turn, Use, turn
from tests.gateway.talking import BIG, Chat, Talk, assert_only_grows, serving
from tests.gateway.test_loop_messages import SEARCH, get

WRITES = ("put", "put_inline", "record", "record_all", "open_session")


def model(seen: Seen) -> Turn:
    """A model whose answer depends only on the history, so that a repeated request gets the same
    answer. If the store failed, it has none of our tools, or sees the whole result."""
    steps: list[Any] = [
        lambda _: SEARCH,
        lambda seen: turn(Think("a"), Say("Looking."), get(seen, lines="1:3")),
        lambda seen: turn(Think("b"), get(seen, lines="4:5"), Use("search", {"q": "more"})),
        lambda _: turn(Think("c"), Use("list")),
        lambda _: turn(Think("d"), Say("Found.")),
        lambda _: turn(Say("Bye.")),
    ]
    if '{\\"stub\\":' not in seen.raw.decode():
        steps = [steps[0], lambda _: turn(Think("b"), Use("search", {"q": "more"})), *steps[4:]]
    return steps[sum(one["role"] == "assistant" for one in seen.messages)](seen)  # type: ignore[no-any-return]


class Failing:
    """Raises at one write of the catalog: before it happens or after."""

    def __init__(
        self, at: int, error: type[BaseException], names: tuple[str, ...] = WRITES
    ) -> None:
        self.at, self.error, self.writes, self.names = at, error, 0, names

    def __call__(self, name: str) -> None:
        if name in self.names:
            self.writes += 1
            if self.writes == self.at:
                raise (
                    self.error("at this write")
                    if self.error is Crash
                    else StoreUnavailable("at this write")
                )


@contextlib.contextmanager
def store_that_fails(folder: Path, failing: Failing) -> Iterator[Store]:
    folder.mkdir(exist_ok=True)
    blobs, catalog = open_folder_store(folder, Disk(durable=False))
    store = Store(
        blobs,
        failing_catalog(catalog, failing),
        Passages(None),
        url=str(folder),
        session_type=Session,
    )
    try:
        yield store
    finally:
        failing.at = -1
        store.close()


def talk_with_retries(talk: Talk) -> None:
    """Run the conversation as an SDK would: a request that failed is sent again."""
    contents: list[Any] = ["find it", None, None, "thanks"]
    answers = {1: (BIG,), 2: ("little",)}
    for number, content in enumerate(contents):
        talk.held.append({"role": "user", "content": content or talk.results(*answers[number])})
        for _ in range(3):
            try:
                talk.send()
                break
            except (anthropic.APIError, httpx2.HTTPError):
                continue
        else:
            raise AssertionError("every attempt failed")


@pytest.mark.faults
@pytest.mark.parametrize("error", [Crash, StoreUnavailable], ids=["killed", "failing"])
def test_a_gateway_that_stops_at_any_write_leaves_a_conversation_that_continues(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with Provider(model) as provider:
        writes, at = 1, -1
        while at < writes:
            at += 1
            failing = Failing(at, error)  # the first run does not fail
            with store_that_fails(tmp_path / f"store{at}", failing) as store:
                before = len(provider.seen)
                with serving(store, provider, mode="loop", records=False) as url:
                    talk = Talk(url)
                    talk_with_retries(talk)
                assert provider.problems == [], at
                assert talk.last.content[-1].text == "Bye."
                assert all(
                    "artifact" not in json.dumps(one["content"])
                    for one in talk.held
                    if one["role"] == "assistant"
                )
                if at == 0:
                    writes = failing.writes
                assert len(provider.seen) - before >= 4
        assert writes >= 5


def test_a_killed_process_leaves_a_conversation_that_continues(tmp_path: Path) -> None:
    """The process is killed while the second step waits for the provider."""
    pause = threading.Event()
    script: list[Any] = [
        SEARCH,
        lambda seen: turn(Think("a"), get(seen, lines="1:3")),
        turn(Think("b"), Say("cut"), pause_after=3, pause=pause),
        lambda seen: turn(Think("a"), get(seen, lines="1:3")),
        turn(Think("b"), Say("Found.")),
        turn(Say("Bye.")),
    ]
    folder = tmp_path / "store"
    with Provider(script) as provider:
        command = [
            sys.executable,
            "-m",
            "coatcheck",
            "gateway",
            "--mode",
            "loop",
            "--no-token",
            "--port",
            "0",
            "--json",
        ]
        command += ["--store", str(folder), "--anthropic", provider.url, "--openai", provider.url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            talk = Talk(json.loads(process.stdout.readline())["address"])
            talk.ask("find it")
            talk.held.append({"role": "user", "content": talk.results(BIG)})

            def kill() -> None:
                while len(provider.answered) < 3:
                    pass
                os.kill(process.pid, signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            with pytest.raises(Exception, match=r"peer closed|Connection|incomplete|read"):
                talk.send()
            killer.join()
        finally:
            pause.set()
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        with coatcheck.open(folder) as store, serving(store, provider, mode="loop") as url:
            talk.address = url
            talk.send()
            talk.ask("thanks")
        assert provider.problems == []
        assert talk.last.content[-1].text == "Bye."


def test_a_result_is_sent_inline_for_good_if_the_store_fails(tmp_path: Path) -> None:
    failing = Failing(-1, StoreUnavailable, ("put", "put_inline"))
    script: list[Any] = [SEARCH, turn(Think(), Say("Read it.")), turn(Say("Bye."))]
    with (
        Provider(script) as provider,
        store_that_fails(tmp_path / "store", failing) as store,
        serving(store, provider, mode="loop", records=False) as url,
    ):
        talk = Talk(url)
        talk.ask("find it")
        failing.at = failing.writes + 1
        talk.ask(talk.results(BIG))
        assert provider.answered[1].messages[-1]["content"][0]["content"] == BIG
        talk.ask("thanks")
        assert_only_grows(provider)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_an_answer_whose_ledger_cannot_be_written_ends_with_an_error(
    tmp_path: Path, is_streamed: bool
) -> None:
    failing = Failing(-1, StoreUnavailable, ("record",))
    script: list[Any] = [SEARCH, lambda seen: turn(Think(), get(seen)), turn(Say("never"))]
    with (
        Provider(script) as provider,
        store_that_fails(tmp_path / "store", failing) as store,
        serving(store, provider, mode="loop", records=False) as url,
    ):
        talk = Talk(url, is_streamed=is_streamed)
        talk.ask("find it")
        talk.held.append({"role": "user", "content": talk.results(BIG)})
        failing.at = failing.writes + 2  # after the pin
        with pytest.raises(anthropic.APIError, match="cannot write its ledger"):
            talk.send()
        assert len(provider.answered) == 2


@pytest.mark.parametrize(
    "second",
    [
        turn(status=429, retry_after="0"),
        turn(status=529, retry_after="0"),
        turn(status=500, retry_after="0"),
    ],
    ids=["429", "529", "500"],
)
def test_a_later_step_is_retried_if_the_provider_is_overloaded(
    store: Store, second: Turn, is_streamed: bool
) -> None:
    script: list[Any] = [
        turn(Think(), Use("list")),
        second,
        turn(Think(), Say("Done.")),
        turn(Say("Bye.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed)
        assert talk.ask("go").content[-1].text == "Done."
        talk.ask("thanks")
        assert_only_grows(provider)


def test_a_later_step_that_is_refused_ends_the_answer_with_an_error_of_the_api(
    store: Store, is_streamed: bool
) -> None:
    script: list[Any] = [
        turn(Think(), Use("list")),
        *[turn(status=529, retry_after="0")] * 3,
        turn(Think(), Use("list")),
        turn(Say("Done.")),
    ]
    with Provider(script) as provider, serving(store, provider, mode="loop") as url:
        talk = Talk(url, is_streamed=is_streamed)
        with pytest.raises(anthropic.APIStatusError, match="529"):
            talk.ask("go")
        talk.send()
        assert provider.problems == []


@pytest.mark.parametrize(
    "broken",
    [
        turn(Say("Hello there."), break_after=4),
        turn(Say("Hello there."), break_after=4, break_inside=True),
        turn(Say("Hello there."), error_after=4),
    ],
    ids=["broken", "inside an event", "error event"],
)
def test_a_stream_that_breaks_ends_with_an_error_of_the_api(store: Store, broken: Turn) -> None:
    for api in (Talk, Chat):
        with (
            Provider([broken, turn(Say("Again."))]) as provider,
            serving(store, provider, mode="loop") as url,
        ):
            talk: Any = api(url)
            with pytest.raises(Exception, match=r"lost during the answer|is incomplete|verloaded"):
                talk.ask("go")


def test_a_broken_answer_stays_broken_in_observe_mode(store: Store) -> None:
    with (
        Provider([turn(Say("Hello there."), break_after=4)]) as provider,
        serving(store, provider) as url,
        pytest.raises(Exception, match=r"peer closed|incomplete"),
    ):
        Talk(url).ask("go")


def test_a_client_that_disconnects_ends_the_call_to_the_provider(store: Store) -> None:
    pause = threading.Event()
    script: list[Any] = [turn(Think(), Say("one two three"), pause_after=5, pause=pause)]
    for mode in ("observe", "loop"):
        pause.clear()
        with Provider(script) as provider, serving(store, provider, mode=mode) as url:
            talk = Talk(url)
            with anthropic.Anthropic(api_key="sk-test", base_url=url, max_retries=0) as client:
                request: Any = {
                    "model": "m",
                    "max_tokens": 99,
                    "messages": [{"role": "user", "content": "go"}],
                    "tools": talk.tools,
                }
                with client.messages.stream(**request) as stream:
                    next(iter(stream))
            while provider.open:
                pass
            assert not provider.seen[0].ended
            pause.set()


def test_pings_are_sent_while_a_step_waits(store: Store) -> None:
    pause = threading.Event()
    script: list[Any] = [turn(Think(), Use("list")), turn(Say("Done."), pause_after=0, pause=pause)]
    with (
        Provider(script) as provider,
        serving(store, provider, mode="loop", ping=0.02) as url,
        anthropic.Anthropic(api_key="sk-test", base_url=url, max_retries=0) as client,
    ):
        request: Any = {
            "model": "m",
            "max_tokens": 99,
            "messages": [{"role": "user", "content": "go"}],
            "tools": Talk(url).tools,
        }
        with client.messages.with_streaming_response.create(**request, stream=True) as response:
            lines = response.iter_lines()
            seen = 0
            for line in lines:
                seen += line == "event: ping"
                if seen == 4:
                    pause.set()
            assert seen >= 4
