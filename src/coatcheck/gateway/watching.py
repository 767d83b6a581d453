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
import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from msgspec import Raw
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coatcheck import __version__
from coatcheck.context.metrics import SERIES as METRICS
from coatcheck.context.metrics import PromptMetrics
from coatcheck.externalize import Policy, Situation, configured
from coatcheck.externalize.decision import STUB_TOKENS, expected_costs
from coatcheck.externalize.storing import masked
from coatcheck.gateway.api import (
    FIRST,
    Api,
    ClientRequest,
    HeldFacts,
    Merger,
    Unreadable,
    fields_of,
    object_field,
    raw_of,
    text_field,
    value_of,
)
from coatcheck.gateway.ledger import WRITER
from coatcheck.gateway.sending import Outgoing
from coatcheck.ids import clip
from coatcheck.lanes import in_thread
from coatcheck.messages.cache import without_marks
from coatcheck.messages.cost import BoundedCache, Usage, usage_of
from coatcheck.models import Prices, model
from coatcheck.redaction import mask
from coatcheck.refs import RECORD_LIMIT
from coatcheck.tokens import roughly

if TYPE_CHECKING:
    from coatcheck.session import Session
    from coatcheck.store import Store

SERIES: Final = "gateway:calls"
EVENTS: Final = "gateway:events"
"""The series with only errors and broken prefixes, each with the number of its call: small, for
lists."""
_NewRecord = tuple[str, bytes, int | None]
_Work = Callable[["Exchange", float], "_Noted"]
_CONVERSATIONS: Final = 1_024
_LABELS: Final = ("api", "status")
_DIGITS: Final = 32  # of the digest of a part
_PAUSE: Final = 0.1  # seconds in which answers are gathered before they are recorded
_QUEUED: Final = 4 << 20  # maximum bytes of requests and answers that wait
_PER_TOKEN: Final = 4
_LARGEST: Final = 16 << 20  # bytes of an answer that are read
_KEPT: Final = 10_000  # calls of a session
_KEPT_EVENTS: Final = 1_000
_LOG: Final = logging.getLogger("coatcheck")


@dataclass(slots=True)
class Exchange:
    """A request for an answer, and what is sent for it. With `is_count`, it only asks for its token
    count."""

    api: Api
    session: Session
    outgoing: Outgoing
    started: float
    is_count: bool = False


def _counted(text: str) -> Any:
    """A figure that Prometheus gets, with this text."""
    return field(default=0, metadata={"help": text})


@dataclass(slots=True)
class Figures:
    """Sums over all answers. Costs are multiples of the price of an input token."""

    calls: int = _counted("Answers that were recorded.")
    errors: int = _counted("Answers of providers with an error.")
    steps: int = _counted("Calls of the model.")
    input_tokens: int = _counted("Input tokens, as providers report them.")
    cached_tokens: int = _counted("Input tokens from the cache.")
    output_tokens: int = _counted("Output tokens.")
    stubs: int = _counted("Results that became stubs.")
    tokens_saved: int = _counted("Tokens of results that were not sent.")
    reads: int = _counted("Further steps, in which the model read what was stored.")
    tokens_could_save: int = _counted("Tokens of results that would have become stubs.")
    broken_prefixes: int = _counted("Requests that did not begin like the one before.")
    tokens_rewritten: int = _counted("Tokens that were sent again because of that.")
    cost: float = 0.0
    saved: float = 0.0
    """What stubs saved, minus what the further steps cost."""

    def add(self, other: Figures) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def __str__(self) -> str:
        shown = f"{self.calls:,} answers, {self.input_tokens:,} input tokens"
        if self.input_tokens:
            shown += f" ({self.cached_tokens / self.input_tokens:.0%} from the cache)"
        if self.stubs or self.reads:
            total = self.cost + self.saved
            part = f", {self.saved / total:.0%} of the cost" if total > 0 else ""
            shown += (
                f"; saved {self.tokens_saved:,} input tokens with {self.stubs:,} "
                f"stubs{part}, {self.reads:,} reads"
            )
        elif self.tokens_could_save:
            shown += f"; stubs could keep out {self.tokens_could_save:,} tokens"
        if self.broken_prefixes:
            shown += (
                f"; {self.broken_prefixes:,} broken prefixes, {self.tokens_rewritten:,} "
                "tokens sent again"
            )
        return shown


class _Noted(NamedTuple):
    """The records of an answer, its call first, and what was wrong with it."""

    records: list[_NewRecord]
    event: dict[str, Any] | None = None


class _Part(NamedTuple):
    digest: str
    label: str
    size: int


_Parts = Sequence[_Part | HeldFacts]


@dataclass(slots=True)
class _Known:
    """The last request of a conversation: the digest over its parts, and the parts if this process
    has seen them, with what continues the digest."""

    count: int
    chain: str
    parts: _Parts = ()
    hashed: Any = None


class Watcher(Collector):
    """Records what passes. `figures` are the sums of this process, `answers` its answers by API and
    status. Both are given to Prometheus. No label is chosen by a client."""

    def __init__(self, store: Store, *, policy: Policy | None, is_enabled: bool) -> None:
        self._store = store
        self._policy = policy
        self._is_enabled = is_enabled
        self._known: BoundedCache[tuple[Store, str, str], _Known] = BoundedCache(_CONVERSATIONS)
        self._queue: list[tuple[Exchange, _Work, float]] = []
        self._queued = 0
        self._is_urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._has_failed = False
        self._running = 0
        self.answers: Counter[tuple[str, int]] = Counter()
        self.figures = Figures()

    def note(self, exchange: Exchange, status: int, media_type: str, data: bytes) -> None:
        """Note an answer that passed as bytes."""
        if exchange.is_count or not self._is_enabled:
            return
        is_streamed = "event-stream" in media_type
        self._later(
            exchange, partial(self._passed, status, data[:_LARGEST], is_streamed), len(data)
        )

    def note_steps(
        self, exchange: Exchange, merger: Merger, inside: Sequence[Raw], last: Sequence[Raw]
    ) -> None:
        """Note an answer that was joined from steps. `inside` are the messages of the steps that
        the client did not see unchanged, with our results; `last` are those of the last step, if it
        has none of our calls."""
        if not merger.usages or not self._is_enabled:
            return
        answer = list(last) or {"role": "assistant", "content": "\n\n".join(merger.texts)}
        work = partial(self._recorded, 200, list(merger.usages), answer, inside=list(inside))
        self._later(exchange, work, 0)

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

    def _later(self, exchange: Exchange, work: _Work, size: int) -> None:
        """Record an answer together with others: soon, or at once if they are large."""
        self._queue.append((exchange, work, time.time()))
        self._queued += size + len(exchange.outgoing.body)
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

    def _record(self, batch: Sequence[tuple[Exchange, _Work, float]]) -> None:
        """Record answers, with one transaction for each session."""
        noted: dict[tuple[Store, str], tuple[Session, list[_Noted]]] = {}
        for exchange, work, at in batch:
            session = exchange.session
            with self._never_failing():
                noted.setdefault((session.store, session.session_id), (session, []))[1].append(
                    work(exchange, at)
                )
        for session, some in noted.values():
            with self._never_failing():
                records = [record for one in some for record in one.records]
                numbers = session.record_all(records)
                calls = [
                    number
                    for (series, _, _), number in zip(records, numbers, strict=True)
                    if series == SERIES
                ]
                events = [
                    (call, one.event)
                    for call, one in zip(calls, some, strict=True)
                    if one.event is not None
                ]
                session.record_all([_event(call, event) for call, event in events])

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
        self, status: int, data: bytes, is_streamed: bool, exchange: Exchange, at: float
    ) -> _Noted:
        if status != 200:
            with self._lock:
                self.figures.add(Figures(errors=1))
            error = _error(data)
            call = self._call(exchange, {"status": status, "error": error}, at)
            return _Noted([call], {"at": round(at, 3), "status": status, "error": error})
        try:
            usage, answer = exchange.api.usage_in(data, is_streamed=is_streamed)
        except (Unreadable, ValueError, KeyError, TypeError, AttributeError):
            usage, answer = {}, None
        return self._recorded(status, [usage], answer, exchange, at)

    def _recorded(
        self,
        status: int,
        usages: Sequence[Any],
        answer: Any,
        exchange: Exchange,
        at: float,
        inside: Sequence[Raw] = (),
    ) -> _Noted:
        outgoing, session = exchange.outgoing, exchange.session
        request = outgoing.request
        policy = self._policy or configured(session.store.settings)
        prices = policy.prices or model(request.model).prices
        parts, key = _parts(request), (session.store, session.session_id, request.first)
        known = self._known_of(session, request)
        same, broke, rewritten = _compared(known, parts)
        before = known.hashed if known is not None and same == known.count else None
        hashed = _hashed(parts if before is None else parts[same:], before)
        whole = self._known.keep(key, _Known(len(parts), _chain(hashed), parts, hashed)).chain
        figures, used = _figures(usages, outgoing, prices)
        figures.broken_prefixes, figures.tokens_rewritten = int(broke is not None), rewritten
        could = [] if outgoing.adoption is not None else _could_leave(exchange, prices)
        figures.tokens_could_save = sum(tokens - STUB_TOKENS for _, tokens, _ in could)
        with self._lock:
            self.figures.add(figures)
        lead = len(parts) - len(request.messages)
        body: dict[str, Any] = {
            "status": status, "usage": list(usages), "steps": len(usages),
            "messages": len(request.messages), "same": same, "count": len(parts), "chain": whole,
            "new": request.messages[max(0, same - lead) :], "answer": answer,
        }  # fmt: skip
        if broke is not None:
            body["broke"] = broke
        if outgoing.adoption is not None:
            body |= {
                "mode": outgoing.adoption.mode,
                "sent": outgoing.sent_from(max(0, same - lead)),
            }
            if inside:
                body["inside"] = list(inside)
            body["judged"] = [
                {
                    "tool": one.tool,
                    "tokens": one.tokens,
                    "stub_tokens": one.stub_tokens,
                    "artifact": one.pointer,
                }
                for one in outgoing.judged
            ]
        elif could:
            body["could_leave"] = [
                {"tool": tool, "tokens": tokens, "saving": gain} for tool, tokens, gain in could
            ]
        event = None if broke is None else {"at": round(at, 3), "broke": broke, "tokens": rewritten}
        measured = self._measures(exchange, figures, used, could, at)
        return _Noted([self._call(exchange, body, at), *measured], event)

    def _known_of(self, session: Session, request: ClientRequest) -> _Known | None:
        """Return the last request of the conversation: from memory, else from the session's last
        record."""
        found = self._known.get((session.store, session.session_id, request.first))
        if found is not None:
            return found
        for record in session.records(SERIES, newest=True, limit=1):
            try:
                last = fields_of(record.body)
                if text_field(last, "conversation") == request.first and "chain" in last:
                    return _Known(value_of(last["count"]), value_of(last["chain"]))
            except ValueError:
                return None
        return None

    def _call(self, exchange: Exchange, body: dict[str, Any], at: float) -> _NewRecord:
        request, session = exchange.outgoing.request, exchange.session
        policy = self._policy or configured(session.store.settings)
        head = {
            "v": 1, "at": round(at, 3), "seconds": round(at - exchange.started, 3),
            "api": exchange.api.name, "model": request.model[:200], "conversation": request.first,
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

    def _measures(
        self, exchange: Exchange, figures: Figures, used: Usage, could: Sequence[Any], at: float
    ) -> Iterator[_NewRecord]:
        """Yield the figures of the answer, like those of any other model call."""
        settings, outgoing = exchange.session.store.settings, exchange.outgoing
        if not settings["metrics.enabled"]:
            return
        left = [one for one in outgoing.judged if one.pointer is not None]
        call = PromptMetrics(
            session=exchange.session.session_id,
            at=round(at, 3),
            release=settings["metrics.release"] or f"coatcheck {__version__}",
            model=outgoing.request.model[:200] or None,
            est_tokens=used.input_tokens or 0,
            tokens_saved=figures.tokens_saved,
            tokens_stubs=sum(one.stub_tokens for one in left),
            tokens_rewritten=figures.tokens_rewritten,
            results_left=len(left),
            results_kept=len(outgoing.judged) - len(left),
            expected_saving=round(sum(gain for _, _, gain in could), 1),
            cost=round(figures.cost),
            cost_without=max(0, round(figures.cost + figures.saved)),
            input_tokens=used.input_tokens,
            output_tokens=used.output_tokens,
            cached_tokens=used.cached_tokens,
            cache_write_tokens=used.cache_write_tokens,
        )
        yield METRICS, call.to_json().encode(), settings["metrics.keep"]


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


def _parts(request: ClientRequest) -> list[_Part | HeldFacts]:
    """Return the parts of a prompt in the order of a provider's cache: tools, system text,
    messages."""
    found: list[_Part | HeldFacts] = [_part(raw, "tool") for raw in request.tools]
    found += [
        _part(request.top[name], "system text")
        for name in ("system", "instructions")
        if name in request.top
    ]
    return found + request.facts


def _is_equal(one: _Part | HeldFacts, other: _Part | HeldFacts) -> bool:
    return one is other or one.digest == other.digest


def _part(raw: Raw, what: str) -> _Part:
    data = bytes(raw)
    if b'"cache_control"' in data:
        data = bytes(raw_of(without_marks(value_of(raw))))
    if what == "tool":
        try:
            inner = fields_of(raw)
            name = text_field(inner, "name") or text_field(fields_of(inner["function"]), "name")
            what = f"tool {name[:80]}"
        except (Unreadable, KeyError):
            pass
    return _Part(hashlib.blake2b(data, digest_size=16).hexdigest(), what, len(data))


def _hashed(parts: _Parts, before: Any = None) -> Any:
    """Return a hash over these parts, after those that were hashed before."""
    hashed = hashlib.sha256() if before is None else before.copy()
    hashed.update("".join([one.digest[:_DIGITS] for one in parts]).encode())
    return hashed


def _chain(hashed: Any) -> str:
    return str(hashed.hexdigest()[:40])


def _compared(known: _Known | None, parts: _Parts) -> tuple[int, dict[str, Any] | None, int]:
    """Return how many parts are the same as in the request before, where and why the prefix broke,
    and the tokens that are sent again because of it."""
    if known is None:
        return 0, None, 0
    if len(parts) >= known.count:
        if known.parts and all(map(_is_equal, known.parts, parts)):
            return known.count, None, 0
        if not known.parts and _chain(_hashed(parts[: known.count])) == known.chain:
            return known.count, None, 0
    before = known.parts
    if not before:
        return (
            0,
            {"part": None, "what": "unknown", "why": "it changed while no gateway was running"},
            0,
        )
    pairs = zip(before, parts, strict=False)
    same = next(
        (at for at, (old, new) in enumerate(pairs) if old.digest != new.digest),
        min(len(before), len(parts)),
    )
    rewritten = sum(one.size for one in parts[same:]) // _PER_TOKEN
    old = before[same] if same < len(before) else None
    new = parts[same] if same < len(parts) else None
    if old is None:
        return same, None, 0
    if new is None:
        why = "the conversation is shorter than before"
    elif old.label != new.label:
        why = f"{clip(old.label, 80)} was replaced by {clip(new.label, 80)}"
    else:
        why = f"{clip(new.label, 80)} changed from {old.size:,} to {new.size:,} bytes"
    return same, {"part": same, "what": old.label, "why": why}, rewritten


def _figures(usages: Sequence[Any], outgoing: Outgoing, prices: Prices) -> tuple[Figures, Usage]:
    found = Figures(calls=1, steps=len(usages), reads=len(usages) - 1)
    costs = []
    last = Usage()
    for one in usages:
        last = usage_of(one)
        sent, read, wrote = (
            last.input_tokens or 0,
            last.cached_tokens or 0,
            last.cache_write_tokens or 0,
        )
        found.input_tokens += sent
        found.cached_tokens += read
        found.output_tokens += last.output_tokens or 0
        fresh = max(0, sent - read - wrote)
        costs.append(
            fresh
            + read * prices.read
            + wrote * prices.write
            + (last.output_tokens or 0) * prices.output
        )
    found.cost = sum(costs)
    left = [one for one in outgoing.judged if one.pointer is not None]
    found.stubs = len(left)
    new = sum(one.tokens - one.stub_tokens for one in left)
    found.tokens_saved = max(new, outgoing.replaced // _PER_TOKEN)
    found.saved = new * prices.write + (found.tokens_saved - new) * prices.read - sum(costs[1:])
    return found, last


def _could_leave(exchange: Exchange, prices: Prices) -> list[tuple[str, int, float]]:
    """Return the tool, tokens and expected saving of each new result for which a stub would pay
    off."""
    request = exchange.outgoing.request
    behind = max(
        (at + 1 for at, one in enumerate(request.facts) if one.side == "answer"), default=0
    )
    tools = {call_id: name for one in request.facts for call_id, name in one.calls}
    context = sum(one.size for one in request.facts) // _PER_TOKEN
    found = []
    for number, results in request.replaceable().items():
        for result in results if number >= behind else ():
            if result.size <= FIRST:
                continue
            tool = tools.get(result.call_id, "")
            content = exchange.api.result_content(request.messages[number], result)
            text = content if isinstance(content, str) else str(content)
            situation = Situation(context_tokens=context, prices=prices)
            expected, limit = expected_costs(exchange.session, tool, situation, prices, None)
            tokens = round(roughly(text.encode("utf-8", "surrogatepass")))
            if expected is not None and tokens > limit:
                found.append(
                    (tool[:200], tokens, round(expected.decided(tokens, limit).expected_saving, 1))
                )
    return found
