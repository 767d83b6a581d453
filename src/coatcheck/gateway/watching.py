"""What passed through the gateway: transcripts, figures, and where a prefix broke.

One record for each answer, in the series `gateway:calls` of its session: what was new in the
request, the answer, the usage that the provider reported, and what was or would have been saved.
The figures are recorded like those of any other model call, so `coatcheck metrics` shows them.
Everything runs in a thread, a moment after the answer, so that several answers are written at once.
A failure here never reaches a client. Headers are not recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cachetools import LRUCache
from msgspec import Raw
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coatcheck import __version__
from coatcheck.context.metrics import SERIES as METRICS
from coatcheck.context.metrics import PromptMetrics
from coatcheck.externalize import Policy, configured
from coatcheck.externalize.decision import STUB_TOKENS
from coatcheck.externalize.storing import masked
from coatcheck.gateway.answer import Merger
from coatcheck.gateway.figures import Figures, candidates, figures_of
from coatcheck.gateway.judging import Judged
from coatcheck.gateway.ledger import WRITER
from coatcheck.gateway.outgoing import Outgoing
from coatcheck.gateway.prefixes import Change, Prefix
from coatcheck.gateway.raw_json import (
    Unreadable,
    fields_of,
    object_field,
    raw_of,
    text_field,
    value_of,
)
from coatcheck.gateway.request import Request
from coatcheck.lanes import in_thread
from coatcheck.messages.cost import Usage, usage_of
from coatcheck.models import model
from coatcheck.redaction import mask
from coatcheck.refs import RECORD_LIMIT

if TYPE_CHECKING:
    from coatcheck.session import Session
    from coatcheck.store import Store

SERIES: Final = "gateway:calls"
EVENTS: Final = "gateway:events"
"""The series with only errors and broken prefixes, each with the number of its call: small, for
lists."""
_Key = tuple["Store", str, str]  # the store, the session and the conversation
_NewRecord = tuple[str, bytes, int | None]
_Work = Callable[[Outgoing, float], "_Noted"]
_CONVERSATIONS: Final = 1_024
_LABELS: Final = ("api", "status")
_PAUSE: Final = 0.1  # seconds in which answers are gathered before they are recorded
_QUEUED: Final = 4 << 20  # maximum bytes of requests and answers that wait
_LARGEST: Final = 16 << 20  # bytes of an answer that are read
_KEPT: Final = 10_000  # calls of a session
_KEPT_EVENTS: Final = 1_000
_LOG: Final = logging.getLogger("coatcheck")


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An answer that waits to be recorded, and when it ended."""

    outgoing: Outgoing
    work: _Work
    at: float


class _Noted(NamedTuple):
    """The records of an answer, its call first, and what was wrong with it."""

    records: list[_NewRecord]
    event: dict[str, Any] | None = None


class Watcher(Collector):
    """Records what passes. `figures` are the sums of this process, `answers` its answers by API and
    status. Both are given to Prometheus. No label is chosen by a client."""

    def __init__(self, store: Store, *, policy: Policy | None, is_enabled: bool) -> None:
        self._store = store
        self._policy = policy
        self._is_enabled = is_enabled
        self._known: LRUCache[_Key, Prefix] = LRUCache(_CONVERSATIONS)
        self._queue: list[_Waiting] = []
        self._queued = 0
        self._is_urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._has_failed = False
        self._running = 0
        self.answers: Counter[tuple[str, int]] = Counter()
        self.figures = Figures()

    def note(self, outgoing: Outgoing, status: int, media_type: str, data: bytes) -> None:
        """Note an answer that passed as bytes."""
        if outgoing.is_count or not self._is_enabled:
            return
        is_streamed = "event-stream" in media_type
        work = partial(self._passed, status, data[:_LARGEST], is_streamed)
        self._later(outgoing, work, size=len(data))

    def note_steps(
        self, outgoing: Outgoing, merger: Merger, inside: Sequence[Raw], last: Sequence[Raw]
    ) -> None:
        """Note an answer that was joined from steps. `inside` are the messages of the steps that
        the client did not see unchanged, with our results; `last` are those of the last step, if it
        has none of our calls."""
        if not merger.usages or not self._is_enabled:
            return
        answer = list(last) or {"role": "assistant", "content": "\n\n".join(merger.texts)}
        work = partial(self._recorded, 200, list(merger.usages), answer, inside=list(inside))
        self._later(outgoing, work, size=0)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a request while it is in progress."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def collect(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "coatcheck_gateway_requests", "Requests by API and status.", None, _LABELS
        )
        for (api, status), number in self.answers.copy().items():
            answers.add_metric((api, str(status)), number)
        yield answers
        yield GaugeMetricFamily(
            "coatcheck_gateway_requests_running", "Requests in progress.", self._running
        )
        for one in fields(Figures):
            if text := one.metadata.get("help"):
                yield CounterMetricFamily(
                    f"coatcheck_gateway_{one.name}", text, getattr(self.figures, one.name)
                )

    async def finish(self) -> None:
        """Wait until everything is recorded."""
        while self._task is not None and not self._task.done():
            self._is_urgent.set()
            await asyncio.wait({self._task})

    def _later(self, outgoing: Outgoing, work: _Work, *, size: int) -> None:
        """Record an answer together with others: soon, or at once if they are large."""
        self._queue.append(_Waiting(outgoing, work, time.time()))
        self._queued += size + len(outgoing.body)
        if self._queued > _QUEUED:
            self._is_urgent.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        while self._queue:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_urgent.wait(), _PAUSE)
            self._is_urgent.clear()
            batch, self._queue, self._queued = self._queue, [], 0
            await in_thread(self._record, batch)

    def _record(self, batch: Sequence[_Waiting]) -> None:
        """Record answers, with one transaction for each session."""
        noted: dict[tuple[Store, str], list[_Noted]] = {}
        sessions: dict[tuple[Store, str], Session] = {}
        for one in batch:
            session = one.outgoing.session
            assert session is not None
            key = session.store, session.session_id
            sessions[key] = session
            with self._never_failing():
                noted.setdefault(key, []).append(one.work(one.outgoing, one.at))
        for key, some in noted.items():
            with self._never_failing():
                _write(sessions[key], some)

    @contextlib.contextmanager
    def _never_failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - recording must never stop a gateway
            if not self._has_failed:
                _LOG.warning(
                    "recording an answer failed: %s", mask(f"{type(error).__name__}: {error}")
                )
            self._has_failed = True

    def _passed(
        self, status: int, data: bytes, is_streamed: bool, outgoing: Outgoing, at: float
    ) -> _Noted:
        if status != 200:
            assert outgoing.session is not None
            with self._lock:
                self.figures.add(Figures(errors=1))
            failed = {"status": status, "error": _error(data)}
            call = self._call(outgoing, outgoing.session, failed, at)
            return _Noted([call], {"at": round(at, 3), **failed})
        try:
            usage, answer = outgoing.api.usage_in(data, is_streamed=is_streamed)
        except (Unreadable, ValueError, KeyError, TypeError, AttributeError):
            usage, answer = {}, None
        return self._recorded(status, [usage], answer, outgoing, at)

    def _recorded(
        self,
        status: int,
        usages: Sequence[Any],
        answer: Any,
        outgoing: Outgoing,
        at: float,
        inside: Sequence[Raw] = (),
    ) -> _Noted:
        request, session = outgoing.request, outgoing.session
        assert session is not None
        policy = self._policy or configured(session.store.settings)
        prices = policy.prices or model(request.model).prices
        prefix = Prefix.of(request)
        change = self._change(session, request, prefix)
        used = [usage_of(one) for one in usages]
        figures = figures_of(used, outgoing, prices)
        if change.broke is not None:
            figures.broken_prefixes, figures.tokens_rewritten = 1, change.broke.tokens
        could = [] if outgoing.conversation is not None else candidates(outgoing, prices)
        figures.tokens_could_save = sum(one.tokens - STUB_TOKENS for one in could)
        with self._lock:
            self.figures.add(figures)
        body: dict[str, Any] = {
            "status": status, "usage": list(usages), "steps": len(usages),
            "messages": len(request.messages), "same": change.same, "count": prefix.count,
            "chain": prefix.digest, "answer": answer,
        }  # fmt: skip
        body |= _messages_record(outgoing, change.same - (prefix.count - len(request.messages)))
        if inside:
            body["inside"] = list(inside)
        if could:
            body["could_leave"] = [one.as_json() for one in could]
        event = None
        if change.broke is not None:
            body["broke"] = change.broke.as_json()
            event = {"at": round(at, 3), "broke": body["broke"], "tokens": change.broke.tokens}
        records = [self._call(outgoing, session, body, at)]
        if session.store.settings["metrics.enabled"]:
            saving = sum(one.saving for one in could)
            records.append(_measured(outgoing, session, figures, used[-1], saving, at))
        return _Noted(records, event)

    def _change(self, session: Session, request: Request, prefix: Prefix) -> Change:
        """Compare a request with the one before, and remember it."""
        key = session.store, session.session_id, request.first
        before = self._known.get(key) or self._last_recorded(session, request)
        self._known[key] = prefix
        return Change() if before is None else before.change_to(prefix)

    def _last_recorded(self, session: Session, request: Request) -> Prefix | None:
        """Return the last request of the conversation from the session's last record."""
        for record in session.records(SERIES, newest=True, limit=1):
            try:
                last = fields_of(record.body)
                if text_field(last, "conversation") == request.first and "chain" in last:
                    return Prefix(value_of(last["count"]), value_of(last["chain"]))
            except ValueError:
                return None
        return None

    def _call(
        self, outgoing: Outgoing, session: Session, body: dict[str, Any], at: float
    ) -> _NewRecord:
        request = outgoing.request
        policy = self._policy or configured(session.store.settings)
        head = {
            "v": 1, "at": round(at, 3), "seconds": round(at - outgoing.started, 3),
            "api": outgoing.api.name, "model": request.model[:200], "conversation": request.first,
            "stream": request.is_streamed,
        }  # fmt: skip
        whole = raw_of(head | body)
        if policy.redact == "store":
            whole = raw_of(masked(value_of(whole), policy))
        if len(bytes(whole)) > RECORD_LIMIT // 2:
            ref = session.put(
                bytes(whole), media_type="application/json", tool=WRITER, name="gateway call"
            )
            kept = ("status", "count", "chain", "same", "messages", "usage", "mode", "broke")
            brief = {name: body[name] for name in kept if name in body}
            whole = raw_of(head | brief | {"artifact": ref.pointer})
        return SERIES, bytes(whole), _KEPT


def _measured(
    outgoing: Outgoing,
    session: Session,
    figures: Figures,
    used: Usage,
    expected_saving: float,
    at: float,
) -> _NewRecord:
    """Return the figures of an answer as a record, like those of any other model call."""
    settings = session.store.settings
    stubs = [one for one in outgoing.judged if one.pointer is not None]
    call = PromptMetrics(
        session=session.session_id,
        at=round(at, 3),
        release=settings["metrics.release"] or f"coatcheck {__version__}",
        model=outgoing.request.model[:200] or None,
        est_tokens=used.input_tokens or 0,
        tokens_saved=figures.tokens_saved,
        tokens_stubs=sum(one.stub_tokens for one in stubs),
        tokens_rewritten=figures.tokens_rewritten,
        results_left=len(stubs),
        results_kept=len(outgoing.judged) - len(stubs),
        expected_saving=round(expected_saving, 1),
        cost=round(figures.cost),
        cost_without=max(0, round(figures.cost + figures.saved)),
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        cached_tokens=used.cached_tokens,
        cache_write_tokens=used.cache_write_tokens,
    )
    return METRICS, call.to_json().encode(), settings["metrics.keep"]


def _messages_record(outgoing: Outgoing, same: int) -> dict[str, Any]:
    """Return what is recorded about the messages of a request after those that are the same as
    before."""
    start = max(0, same)
    found: dict[str, Any] = {"new": outgoing.request.messages[start:]}
    if outgoing.conversation is not None:
        found["mode"] = outgoing.conversation.adoption.mode
        found["sent"] = outgoing.sent_from(start)
        found["judged"] = [_judged_record(one) for one in outgoing.judged]
    return found


def _judged_record(judged: Judged) -> dict[str, Any]:
    return {
        "tool": judged.tool,
        "tokens": judged.tokens,
        "stub_tokens": judged.stub_tokens,
        "artifact": judged.pointer,
    }


def _write(session: Session, noted: Sequence[_Noted]) -> None:
    """Write records of answers, then events with the numbers of their calls."""
    records = [record for one in noted for record in one.records]
    numbers = session.record_all(records)
    calls = [
        number for (series, _, _), number in zip(records, numbers, strict=True) if series == SERIES
    ]
    events = []
    for call, one in zip(calls, noted, strict=True):
        if one.event is not None:
            events.append(_event(call, one.event))
    session.record_all(events)


def _event(call: int, body: dict[str, Any]) -> _NewRecord:
    return EVENTS, bytes(raw_of({"v": 1, "at": body["at"], "call": call, **body})), _KEPT_EVENTS


def _error(data: bytes) -> dict[str, str]:
    """Return the type and message of a provider's error, without secrets."""
    try:
        found = object_field(fields_of(data), "error")
        return {
            "type": str(found.get("type"))[:100],
            "message": mask(str(found.get("message")))[:300],
        }
    except Unreadable:
        return {"type": "unreadable", "message": ""}
