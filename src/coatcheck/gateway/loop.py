"""An answer in `loop` mode: steps until the model calls none of our tools, or also one of the
client's.

The ledger is written before the client is shown what it describes. An answer whose ledger cannot be
written ends with an error, since it could not be continued.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from msgspec import Raw

from coatcheck.errors import CoatcheckError
from coatcheck.gateway.answer import LoopStep
from coatcheck.gateway.connection import RefusedRequest
from coatcheck.gateway.ledger import Ledger, entry_key
from coatcheck.gateway.outgoing import Outgoing
from coatcheck.gateway.own_tools import run_calls
from coatcheck.gateway.raw_json import Unreadable, fields_of, raw_of, text_key
from coatcheck.gateway.upstream import HeaderList, ProviderAnswer, ProviderFailure, headers_of
from coatcheck.lanes import in_thread
from coatcheck.redaction import mask

if TYPE_CHECKING:
    from coatcheck.gateway.call import Call

_RETRIED: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_ATTEMPTS: Final = 3
_PAUSE: Final = 0.2  # seconds before a connection is tried again
_LOG: Final = logging.getLogger("coatcheck")
_LAST: Final = (
    "[This was the last read in this answer. Answer with what you have; "
    "you can read on in the next turn.]"
)
_UNREADABLE: Final = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Loop:
    """One answer that may have several steps. `_chain` has the messages of all steps so far with
    our results; `_inside` is the part of it that the client does not see unchanged, and `_last` the
    messages of a last step without calls of ours."""

    def __init__(self, call: Call, outgoing: Outgoing) -> None:
        assert outgoing.session is not None
        assert outgoing.conversation is not None
        self._call = call
        self._connection = call.connection
        self._settings = call.settings
        self._outgoing = outgoing
        self._api, self._request, self._session = outgoing.api, outgoing.request, outgoing.session
        self._adopted = outgoing.conversation.key
        self._merger = self._api.merger(outgoing.own, self._request)
        self._ledger = Ledger(self._session)
        self._chain: list[Raw] = []
        self._inside: list[Raw] = []
        self._last: list[Raw] = []
        self._written: set[str] = set()
        self._headers: HeaderList = []
        self._streams = False
        """Whether a streamed answer has begun, so that an error must be an event in it."""

    async def run(self) -> None:
        try:
            async with self._connection.leaving():
                await self._steps()
        except RefusedRequest as refusal:
            if not self._streams:
                raise
            event = self._api.error_event(refusal.status, refusal.message)
            await self._connection.end(event)
        finally:
            self._call.gateway.watcher.note_steps(
                self._outgoing, self._merger, self._inside, self._last
            )

    async def _steps(self) -> None:
        outgoing, request, api, merger = self._outgoing, self._request, self._api, self._merger
        response = await self._first_response()
        sent = list(outgoing.messages)
        left = self._settings.max_steps
        spent = 0
        while response is not None:
            left -= 1
            step = await self._step(response)
            if step is None:
                return
            spent += step.output_tokens
            results = await self._run(step, is_last=left == 1)
            more = api.settings(request, spent, is_last=left == 1)
            if more is None or left == 0 or not step.wants_results:
                is_out_of_tokens = left > 0 and step.wants_results
                cut = "output" if is_out_of_tokens else "steps"
                await self._end(step, results, cut=cut if left == 0 or is_out_of_tokens else None)
                return
            shown = merger.next_step()
            self._chain += [*step.messages, *results]
            self._inside = list(self._chain)
            await self._record([] if merger.last_key is None else [merger.last_key])
            await self._connection.send(shown)
            sent = api.following(request, sent, step.messages, results)
            settings = {**outgoing.settings, **more, **api.chained(request, merger)}
            response = await self._further_response(
                api.written(request, sent, outgoing.tools, **settings)
            )

    async def _first_response(self) -> ProviderAnswer | None:
        """Send the first step. If it is refused, the client gets the provider's own answer:
        None."""
        response, read = await self._call.opened_bound(self._outgoing)
        if response.status != 200:
            await self._call.pass_on(response, self._outgoing, read)
            return None
        self._headers = headers_of(response)
        if self._request.is_streamed:
            await self._connection.begin(response.status, self._headers)
            self._streams = True
        return response

    async def _further_response(self, body: bytes) -> ProviderAnswer | None:
        """Send a further step. Retry if the provider is overloaded. If it refuses, the client gets
        its answer: None."""
        waited = 0.0
        for attempt in range(1, _ATTEMPTS + 1):
            is_last = attempt == _ATTEMPTS
            try:
                response: ProviderAnswer = await self._while_pinging(
                    self._call.opened(body, is_plain=True)
                )
            except ProviderFailure as error:
                if is_last:
                    raise RefusedRequest(502, f"the provider cannot be reached: {error}") from error
                await self._while_pinging(asyncio.sleep(_PAUSE * attempt))
                continue
            if response.status == 200:
                return response
            pause = _pause(response, attempt)
            waited += pause
            if response.status not in _RETRIED or is_last or waited > self._settings.max_wait:
                await self._pass_refusal_on(response)
                return None
            response.close()
            await self._while_pinging(asyncio.sleep(pause))
        raise AssertionError("the last attempt returns or raises")

    async def _pass_refusal_on(self, response: ProviderAnswer) -> None:
        """Pass on the refusal of a further step: as an event inside a stream, else unchanged."""
        data = await response.read()
        response.close()
        if not self._streams:
            await self._connection.whole(response.status, data, headers_of(response))
            return
        try:
            fields_of(data)
        except Unreadable as error:
            raise RefusedRequest(
                response.status, f"the provider answered {response.status}"
            ) from error
        await self._connection.end(self._api.wrapped_error(data))

    async def _step(self, response: ProviderAnswer) -> LoopStep | None:
        """Read the answer to a step and show it. None if the answer has ended with the provider's
        error."""
        merger = self._merger
        try:
            await self._read(response)
        except ProviderFailure as error:
            raise _lost() from error
        except _UNREADABLE as error:
            _LOG.warning("the provider's answer cannot be read: %s", type(error).__name__)
            raise _lost() from error
        finally:
            response.close()
        if merger.has_failed:
            await self._connection.end()
            return None
        if not merger.is_complete:
            raise RefusedRequest(502, "the provider's answer is incomplete")
        return merger.end_step()

    async def _read(self, response: ProviderAnswer) -> None:
        if not self._request.is_streamed:
            self._merger.take(await response.read())
            return
        chunks = aiter(response.plain_chunks())
        while (chunk := await self._while_pinging(anext(chunks, None))) is not None:
            await self._connection.send(self._merger.feed(chunk))

    async def _run(self, step: LoopStep, *, is_last: bool) -> list[Raw]:
        """Run our calls, and return the messages with their results."""
        if not step.own:
            return []
        names, note = self._outgoing.names, _LAST if is_last else ""
        answers = await self._while_pinging(
            in_thread(run_calls, self._session, names, step.own, note)
        )
        return self._api.results(answers)

    # The end of an answer

    async def _end(self, step: LoopStep, results: list[Raw], cut: str | None) -> None:
        """End the answer: the ledger first. Our results wait for the client's."""
        merger = self._merger
        is_cut = cut is not None and bool(results) and not step.others
        end = merger.finish(self._api.stops[cut] if is_cut and cut is not None else None)
        if results:
            self._inside = [*self._chain, *step.messages, *results]
        else:
            self._last = step.messages
        keys = [] if merger.last_key is None else [merger.last_key]
        if merger.texts and not step.others:
            text = "".join(merger.texts)
            keys.append(text_key(text))
            if merger.last_key in self._written:  # a step came after it
                keys.append(text_key(text, merger.last_key))
        if merger.steps > 1 or results:
            self._chain += [*step.messages, *results]
            await self._record(keys)
        else:
            await self._note_end(keys)
        await self._write_links(results)
        if self._streams:
            await self._connection.end(end)
            return
        if merger.steps > 1:
            self._headers.append((b"x-coatcheck-usage", bytes(raw_of(merger.usages))))
        await self._connection.whole(200, end, self._headers)

    async def _write_links(self, results: Sequence[Raw]) -> None:
        """Write what a request needs that names this answer by its id."""
        merger = self._merger
        links = self._api.links(self._request, merger, self._adopted)
        for key, body in links.items():
            await self._link(key, body)
        for key, body in self._api.renamed(self._request, merger, results).items():
            await self._write(key, body)
        sessions, origin = self._call.sessions, self._call.origin
        if merger.answer_id and links and origin.owner and sessions is not None:
            with contextlib.suppress(CoatcheckError):  # then the next request must name its session
                await in_thread(sessions.remember, merger.answer_id, origin)

    async def _record(self, values: Sequence[str]) -> None:
        """Write what was sent for the answer so far, under values that the client was shown."""
        for value in values:
            if value in self._written:
                continue
            after = self._merger.after if value == self._merger.last_key else []
            key = entry_key(self._outgoing.prefix, value)
            await self._write(key, {"messages": self._chain, "after": after})
            await self._link(key, {})
            self._written.add(value)

    async def _note_end(self, values: Sequence[str]) -> None:
        """Note where the conversation is after an answer that the client has as it is. If that
        fails, the conversation continues in a new session."""
        keys = [entry_key(self._outgoing.prefix, value) for value in values]
        conversations = self._outgoing.conversations
        if conversations is None or not keys:
            return
        try:
            await in_thread(conversations.note, keys, self._session)
        except CoatcheckError as error:
            _LOG.warning("the end of an answer cannot be noted: %s", mask(error.message))

    async def _link(self, key: str, body: Mapping[str, Any]) -> None:
        """Write what the next request looks for first: which conversation it continues, with
        `body`."""
        conversations = self._outgoing.conversations
        if conversations is not None:
            await self._durably(partial(conversations.note, [key], self._session, **body))
        elif body:
            await self._write(key, body)

    async def _write(self, key: str, body: Mapping[str, Any]) -> None:
        await self._durably(partial(self._ledger.write, key, body))

    async def _durably(self, write: Callable[[], object]) -> None:
        """Write to the ledger, or end the answer with an error."""
        try:
            await in_thread(write)
        except CoatcheckError as error:
            _LOG.warning(
                "an answer ends with an error, its ledger cannot be written: %s",
                mask(error.message),
            )
            raise RefusedRequest(
                503,
                "the gateway cannot write its ledger, so this answer could not be continued; "
                "try again",
            ) from error

    async def _while_pinging(self, work: Awaitable[Any]) -> Any:
        """Wait for something, and send a ping now and then, so that the client does not give up."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=self._settings.ping)
                if done:
                    return task.result()
                if self._streams:
                    await self._connection.send(self._api.ping)
        finally:
            if not task.done():
                task.cancel()


def _lost() -> RefusedRequest:
    return RefusedRequest(502, "the connection to the provider was lost during the answer")


def _pause(response: ProviderAnswer, attempt: int) -> float:
    """Return how long to wait before a step is sent again, as the provider says."""
    try:
        return max(0.0, float(response.header("retry-after")))
    except ValueError:
        return float(min(8.0, 0.5 * 2**attempt))
