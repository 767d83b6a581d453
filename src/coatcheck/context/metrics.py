"""Metrics of model calls: the size of each prompt, what stubs saved, what that cost, and warnings
when figures rise.

    meter = Meter(session, tools=toolkit(session))
    …
    answer = client.chat.completions.create(messages=messages, tools=…)
    meter.call(messages=messages, usage=answer.usage)

The figures are measured from the prompt itself, stored in the catalog, and sent where the settings
say. Nothing here breaks an agent: failures are counted, logged once, and skipped.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import Field, PlainValidator, TypeAdapter

from coatcheck import __version__
from coatcheck._toolkit import known_as
from coatcheck.checks import is_whole
from coatcheck.context.appended import STARTS
from coatcheck.context.budget import Budget, rendered
from coatcheck.errors import BudgetExceeded, CoatcheckError, InvalidArgument
from coatcheck.externalize.stub import is_ours, is_stub_object, stubs_in
from coatcheck.ids import clip
from coatcheck.messages.cache import Sent, compared
from coatcheck.messages.content import calls_named, spoken
from coatcheck.messages.cost import BoundedCache, Cost, Tally, Usage, usage_of
from coatcheck.redaction import mask
from coatcheck.tokens import TokenCounter, counted, estimate

if TYPE_CHECKING:
    from coatcheck.config import Settings
    from coatcheck.context.prompt import Prompt
    from coatcheck.executor import ToolOutcome
    from coatcheck.refs import Ref
    from coatcheck.session import Session
    from coatcheck.storage import Record
    from coatcheck.store import Store

__all__ = ["Baseline", "Meter", "Notice", "PromptMetrics", "Usage", "calls_of", "usage_of"]

TYPE: Final = "prompt_metrics"
_DERIVED: Final = ("hs_truncated", "budget_ok", "tokens_net", "tokens_without")
SERIES: Final = "metrics"
"""The series of a session that contains its calls."""
RECENT: Final = 3
"""Number of a session's newest calls that are compared with the earlier ones."""
EARLIER: Final = 5
"""Minimum number of earlier calls for a session's baseline."""
CALLS: Final = 10
"""Minimum number of calls of a release before it is compared."""
FLOORS: Final[Mapping[str, tuple[str, int]]] = {
    "est_tokens": ("the prompt's tokens", 500),
    "sys_chars": ("the system text's characters", 1_000),
    "hs_tokens": ("the hot state's tokens", 100),
    "artifacts": ("the index's artifacts", 3),
    "tokens_stubs": ("tokens of stubs", 200),
    "tokens_read_back": ("tokens read back", 500),
    "tokens_schemas": ("tokens of tool schemas", 50),
    "tokens_rewritten": ("tokens of rewritten prefix", 500),
}
"""The figures that are watched, their names in messages, and the smallest rise of each that is
reported."""

_LOG: Final = logging.getLogger("coatcheck")
_LARGEST: Final = 1 << 53  # JSON readers lose digits beyond this
_LONGEST: Final = 65_536
_MANY: Final = 1_000
_WINDOW: Final = 200  # calls in the baseline of a session
_LEARNED: Final = 20  # calls from which the error of the estimate is learned
_RELEASES: Final = "coatcheck:releases"  # the session that contains the figures of all releases
_LABELS: Final = "releases"
_KEPT_CALLS: Final = 500
_KEPT_LABELS: Final = 100
_BUILT: Final = (
    "hs_tokens", "hs_bytes", "artifacts", "sys_chars", "user_chars", "est_tokens", "ref_files",
    "budget_tokens",
)  # fmt: skip
_CACHED: Final = 65_536
_DEEPEST: Final = 12
_FILE: Final = re.compile(
    r"^ArtifactRef: (art:[0-9a-f]{12,64}) \(type=\w+, sha256=[0-9a-f]{64}, bytes=\d+\)$",
    re.MULTILINE,
)
_REGISTERED_FILE: Final = re.compile(
    r"^ArtifactRef: [0-9a-f]{64} \(type=[\w/.+-]+, sha256=[0-9a-f]{64}, bytes=\d+, "
    r"createdAt=[\w:.-]+\)$",
    re.MULTILINE,
)  # as `coatcheck.compat.artifact_refs` writes it: its registry is not a session
_LEFT_OUT: Final = re.compile(r"^\[([\d,]{1,20}) characters are left out here.*", re.MULTILINE)
_DECODER: Final = json.JSONDecoder()
_NEARLY_FULL: Final = 0.75  # the part of a budget from which a prompt is worth a warning
_THRESHOLDS: Final = (
    ("hs_tokens", "metrics.warn_hot_state_tokens", "a hot state of {} tokens"),
    ("artifacts", "metrics.warn_index_entries", "an index of {} artifacts"),
    ("est_tokens", "metrics.warn_prompt_tokens", "a prompt of {} tokens"),
)


Reason = Literal["over", "violation", "session", "release"]
Count = Annotated[int, Field(strict=True, ge=0, lt=_LARGEST)]
Number = (
    Annotated[int, Field(strict=True, gt=-_LARGEST, lt=_LARGEST)]
    | Annotated[float, Field(strict=True, gt=-_LARGEST, lt=_LARGEST)]
)
Text = Annotated[str, Field(strict=True, max_length=_LONGEST)]


@dataclass(frozen=True, slots=True)
class _ViolationRecord:
    field: Text
    limit: Number
    actual: Number | None = None
    message: Text = ""
    ambiguous: bool = False


def _violations(value: object) -> tuple[Mapping[str, Any], ...]:
    found = _reader(list[_ViolationRecord])(value)
    if len(found) > _MANY:
        raise ValueError("too many violations")
    return tuple(map(asdict, found))


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning about one figure: it is `over` a threshold, in `violation` of the budget, or has
    risen against the baseline of its `session` or of another `release`. `before` is that threshold,
    limit or baseline."""

    figure: Text
    reason: Reason
    before: Number
    actual: Number | None
    message: Text

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMetrics:
    """The figures of one model call.

    `hs_…` describe the hot state, and `hs_steps` how it was shortened; `artifacts` are the entries
    of its index, `ref_files` the bootstrap files that became references. A count is None if it
    could not be counted, which violates the budget. `tokens_saved` are the tokens of stored results
    that the prompt would contain without stubs; the other `tokens_…` are the cost of that. `cost`
    is the price of the input in uncached tokens, `cost_without` the same without stubs.
    `results_left` and `results_kept` count the new results that left the context or stayed, as the
    builder decided, and `expected_saving` is what those that left are expected to save, in units of
    the price of an input token. `input_tokens` and the following are the provider's counts, None if
    it did not report them. `tool_calls` and `tool_seconds` are the number and the durations of the
    tool calls since the previous one."""

    session: Text
    run: Text | None = None
    turn: Count | None = None
    at: Number = 0.0
    release: Text | None = None
    model: Text | None = None
    hs_tokens: Count | None = 0
    hs_bytes: Count = 0
    hs_steps: Annotated[tuple[Text, ...], Field(max_length=_MANY)] = ()
    artifacts: Count | None = 0
    artifact_types: Annotated[Mapping[Text, Count], Field(max_length=_MANY)] = field(
        default_factory=dict
    )
    sys_chars: Count = 0
    user_chars: Count = 0
    est_tokens: Count | None = 0
    ref_files: Count = 0
    budget_tokens: Count | None = None
    budget_violations: Annotated[tuple[Mapping[str, Any], ...], PlainValidator(_violations)] = ()
    tokens_saved: Count = 0
    tokens_read_back: Count = 0
    tokens_stubs: Count = 0
    tokens_schemas: Count = 0
    tokens_rewritten: Count = 0
    results_left: Count = 0
    results_kept: Count = 0
    expected_saving: Number = 0.0
    cost: Count | None = None
    cost_without: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    tool_calls: Count = 0
    tool_seconds: Number = 0.0
    warnings: Annotated[tuple[Notice, ...], Field(max_length=_MANY)] = ()

    @property
    def hs_truncated(self) -> bool:
        return bool(self.hs_steps)

    @property
    def budget_ok(self) -> bool:
        return not self.budget_violations

    @property
    def tokens_net(self) -> int:
        """The tokens saved, less everything that this cost."""
        spent = (
            self.tokens_read_back + self.tokens_stubs + self.tokens_schemas + self.tokens_rewritten
        )
        return self.tokens_saved - spent

    @property
    def tokens_without(self) -> int | None:
        """The size of the prompt with every stored result in it, and without stubs, pages and our
        tools."""
        if self.est_tokens is None:
            return None
        return (
            self.est_tokens
            + self.tokens_saved
            - self.tokens_stubs
            - self.tokens_read_back
            - self.tokens_schemas
        )

    def to_record(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        record = {"type": TYPE, **asdict(self), **{name: getattr(self, name) for name in _DERIVED}}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in record.items()
        }

    def to_json(self) -> str:
        """Return the figures as one line of ASCII JSON."""
        return json.dumps(self.to_record(), separators=(",", ":"))

    @classmethod
    def from_record(cls, record: object) -> Self:
        """Read figures from a record, ignoring unknown fields. Raises ValueError for an invalid
        record: records come from stores and files that anyone may have written."""
        if not isinstance(record, Mapping) or record.get("type") != TYPE:
            raise ValueError(f"not a record of {TYPE}")
        found: Self = _reader(PromptMetrics)(record)
        return found

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        try:
            return cls.from_record(json.loads(line))
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that validates a record of this type. It raises ValueError."""
    return TypeAdapter(kind).validate_python


@dataclass(frozen=True, slots=True)
class MeasuredFigure:
    """The median of a figure, and its 90th percentile."""

    median: Number
    p90: Number


@dataclass(frozen=True, slots=True)
class Baseline:
    """The figures of a release.

    Medians are compared with medians, so that one unusual turn changes nothing. A rise is reported
    once, and again only when the figure has risen as much above the reported value."""

    type: Literal["metrics_baseline"]
    label: Text
    calls: Number
    figures: Mapping[str, MeasuredFigure]

    @classmethod
    def of(cls, label: str, calls: Iterable[PromptMetrics]) -> Self:
        known = list(calls)
        tops = {
            name: values[(len(values) - 1) * 9 // 10] for name, values in _columns(known).items()
        }
        figures = {
            name: MeasuredFigure(median, tops[name]) for name, median in _medians(known).items()
        }
        return cls("metrics_baseline", label, len(known), figures)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a baseline. Raises `InvalidArgument` if it is not valid."""
        try:
            found: Self = _reader(Baseline)(json.loads(text))
        except (ValueError, RecursionError) as error:
            hint = "make one with 'coatcheck metrics --save-baseline FILE'"
            raise InvalidArgument("not a valid baseline of metrics", hint=hint) from error
        return replace(
            found, figures={name: one for name, one in found.figures.items() if name in FLOORS}
        )

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a baseline from a file. Raises `InvalidArgument`."""
        try:
            return cls.from_json(Path(path).expanduser().read_bytes())
        except OSError as error:
            raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error

    def rises(
        self, now: Sequence[PromptMetrics], percent: float, reported: Mapping[str, float]
    ) -> list[Notice]:
        """Return a notice for each figure that has risen in these calls of another release.
        `reported` has the value of each figure when it was last reported."""
        if self.calls < CALLS or len(now) < CALLS:
            return []
        where, medians = (
            f"in release {clip(self.label)}",
            {name: one.median for name, one in self.figures.items()},
        )
        return list(_rises("release", where, medians, _medians(now), percent, reported))


def session_rises(calls: Sequence[PromptMetrics], percent: float) -> list[Notice]:
    """Return a notice for each figure that has risen in the newest calls of a session, given oldest
    first."""
    if len(calls) < EARLIER + RECENT:
        return []
    before, after = _medians(calls[:-RECENT], EARLIER), _medians(calls[-RECENT:], RECENT)
    return list(
        _rises(
            "session", "in this session", before, after, percent, _reported(calls[:-1], "session")
        )
    )


def _reported(calls: Iterable[PromptMetrics], reason: Reason) -> dict[str, float]:
    """Return the value of each figure when it was last reported for this reason."""
    warnings = (one for call in calls for one in call.warnings)
    return {
        one.figure: one.actual
        for one in warnings
        if one.reason == reason and one.actual is not None
    }


def _columns(calls: Sequence[PromptMetrics], least: int = 1) -> dict[str, list[float]]:
    """Return the values of each figure, sorted, if it could be counted in enough calls."""
    columns = {
        name: sorted(v for one in calls if (v := getattr(one, name)) is not None) for name in FLOORS
    }
    return {name: values for name, values in columns.items() if len(values) >= least}


def _medians(calls: Sequence[PromptMetrics], least: int = 1) -> dict[str, float]:
    """Return the median of each figure; the lower of two, so that it is one of the values."""
    return {name: values[(len(values) - 1) // 2] for name, values in _columns(calls, least).items()}


def _rises(
    reason: Reason,
    where: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    percent: float,
    reported: Mapping[str, float],
) -> Iterator[Notice]:
    for name, (words, floor) in FLOORS.items():
        if name in before and name in after:
            old, new = before[name], after[name]
            known = max(old, reported.get(name, 0))
            if new - known >= floor and new > known * (1 + percent / 100):
                yield Notice(
                    name, reason, old, new, f"{words} rose from {old:,.0f} {where} to {new:,.0f}"
                )


class _Release:
    """The calls of one release so far, and the baseline of the previous release, if there is one.

    They are stored in a session that does not expire, one series for each label. Calls of other
    processes are read only when a process starts."""

    def __init__(self, store: Store, label: str, before: Baseline | None = None) -> None:
        self._session = store.session(_RELEASES, ttl=None)
        self._series = f"metrics:{label}"
        labels = labels_of(store)
        if labels[:1] != [label]:
            self._session.record(_LABELS, label.encode(), keep=_KEPT_LABELS)
        previous = next((one for one in labels if one != label), None)
        if before is None and previous is not None:
            records = self._session.records(f"metrics:{previous}", newest=True, limit=_KEPT_CALLS)
            before = Baseline.of(previous, _read_calls(records))
        self._before = before
        known = self._session.records(self._series, newest=True, limit=_KEPT_CALLS)[::-1]
        self._calls = list(_read_calls(known))
        self._reported = _reported(self._calls, "release")

    def rises(self, call: PromptMetrics, percent: float) -> list[Notice]:
        """Add a call, and return a notice for each figure that has risen against the previous
        release."""
        self._calls = [*self._calls[1 - _KEPT_CALLS :], call]
        found = (
            [] if self._before is None else self._before.rises(self._calls, percent, self._reported)
        )
        self._reported |= _reported([replace(call, warnings=tuple(found))], "release")
        figures = {name: getattr(call, name) for name in FLOORS}
        body = {
            "type": TYPE,
            "session": "-",
            **figures,
            "warnings": [one.to_record() for one in found],
        }
        self._session.record(
            self._series, json.dumps(body, separators=(",", ":")).encode(), keep=_KEPT_CALLS
        )
        return found


def labels_of(store: Store) -> list[str]:
    """Return the releases with stored figures, newest first."""
    found = store.session(_RELEASES).records(_LABELS, newest=True, limit=_KEPT_LABELS)
    return list(dict.fromkeys(record.body.decode("utf-8", "replace") for record in found))


def _read_calls(records: Iterable[Record]) -> Iterator[PromptMetrics]:
    for record in records:
        try:
            yield PromptMetrics.from_json(record.body)
        except ValueError:
            continue  # damaged, or of an unknown version


def _notices(call: PromptMetrics, settings: Settings, ratio: float = 1.0) -> list[Notice]:
    """Return the warnings about one call by itself. The size of a prompt is the provider's count;
    without one it is the estimate times `ratio`, the provider's count per estimated token in
    earlier calls."""
    found = []
    for name, key, words in _THRESHOLDS:
        value: int | None = getattr(call, name)
        if name == "est_tokens" and value is not None:
            value = round(value * ratio) if call.input_tokens is None else call.input_tokens
        threshold: int = settings[key]
        if name == "est_tokens" and call.budget_tokens and settings.origin(key).source == "default":
            threshold = max(threshold, int(call.budget_tokens * _NEARLY_FULL))
        if value is not None and value > threshold:
            found.append(
                Notice(
                    name,
                    "over",
                    threshold,
                    value,
                    f"{words.format(f'{value:,}')} is over {threshold:,}",
                )
            )
    found += [
        Notice(one["field"], "violation", one["limit"], one["actual"], one["message"])
        for one in call.budget_violations
    ]
    return found


def _ratio(calls: Sequence[PromptMetrics]) -> float:
    """Return the provider's count per estimated token: the median of the newest calls, 1 if it was
    never reported."""
    known = sorted(
        one.input_tokens / one.est_tokens
        for one in calls[-_LEARNED:]
        if one.input_tokens and one.est_tokens
    )
    return known[len(known) // 2] if known else 1.0


@dataclass(frozen=True, slots=True)
class _Part:
    """The contents of one message, the system text or the list of tools. `tokens` is None if it
    cannot be counted. `figures` has what the part adds to the figures of `PromptMetrics`."""

    digest: bytes
    tokens: int | None
    figures: Counter[str]

    @property
    def tokens_without(self) -> int:
        """The size of this part with every stored result in it, and without stubs, pages and our
        tools."""
        ours = sum(
            self.figures[name] for name in ("tokens_stubs", "tokens_read_back", "tokens_schemas")
        )
        return max(0, (self.tokens or 0) + self.figures["tokens_saved"] - ours)


class _Scale:
    """Measures the prompts of one session, with a cache, so that a turn costs only its new
    messages.

    Everything is measured from the prompt itself. A stub counts in every prompt that contains it,
    since the result it replaces would be sent each time too."""

    def __init__(self, session: Session, count: TokenCounter) -> None:
        self._session = session
        self._tally = Tally(count, document_tokens=0)
        self._cached: BoundedCache[tuple[bytes, frozenset[str]], _Part] = BoundedCache(_CACHED)

    def measure(self, messages: Iterable[Any], system: object, tools: Sequence[Any]) -> list[_Part]:
        """Return the parts of a prompt in the order in which a provider reads them. `tools` are in
        a provider's format, or the toolkit's."""
        described = [
            tool.as_openai() if callable(getattr(tool, "as_openai", None)) else tool
            for tool in tools
        ]
        ours = [(tool, known[1]) for tool in described if (known := known_as(tool)) is not None]
        names = frozenset(name for _, name in ours)
        parts = []
        if described:
            schemas = sum(self._tokens(_dumped(tool)) for tool, _ in ours)
            parts.append(
                _Part(*self._weighed({"tools": described})[1:], Counter(tokens_schemas=schemas))
            )
        if system:  # a text, or Anthropic's blocks
            text = "\n".join(one for one in _contents(system) if isinstance(one, str))
            parts.append(self._part({"role": "system", "content": text}, names))
        return parts + [self._part(message, names) for message in messages]

    def _part(self, message: Any, names: frozenset[str]) -> _Part:
        message, digest, tokens = self._weighed(message)
        known = self._cached.get((digest, names))
        if known is None:
            known = self._cached.keep(
                (digest, names), self._measured(message, digest, tokens, names)
            )
        return known

    def _measured(
        self, message: Any, digest: bytes, tokens: int | None, names: frozenset[str]
    ) -> _Part:
        figures: Counter[str] = Counter()
        is_system = isinstance(message, Mapping) and message.get("role") in ("system", "developer")
        for one in _contents(message):
            if isinstance(one, str) and self._was_read(one):
                figures["tokens_read_back"] += self._tokens(one)
                continue
            for stub, written in stubs_in(one) if isinstance(one, str) else [(one, _dumped(one))]:
                figures.update(tokens_stubs=self._tokens(written), tokens_saved=self._whole(stub))
            if isinstance(one, str):
                found, left_out = self._files(one)
                figures.update(ref_files=found, tokens_saved=left_out)
                if is_system:
                    figures["ref_files"] += len(_REGISTERED_FILE.findall(one))
        figures["tokens_read_back"] += sum(
            self._tokens(_dumped(call)) for call in calls_named(message, names)
        )
        author, texts = spoken(message)
        figures["user_chars" if author == "user" else "sys_chars"] += sum(map(len, texts))
        return _Part(digest, tokens, figures)

    def _whole(self, stub: Mapping[str, Any]) -> int:
        """Return the tokens of the result that a stub replaces, if they are plausible: anyone may
        have written it."""
        tokens, ref = stub.get("tokens"), self._ref(str(stub["artifact"]))
        return min(tokens, ref.size_bytes) if is_whole(tokens) and ref is not None else 0

    def _files(self, text: str) -> tuple[int, int]:
        """Count the bootstrap files that are references in a text, and estimate the tokens they
        leave out."""
        if "ArtifactRef: " not in text:
            return 0, 0
        refs = [ref for match in _FILE.finditer(text) if (ref := self._ref(match[1])) is not None]
        omitted = sum(int(match[1].replace(",", "") or 0) for match in _LEFT_OUT.finditer(text))
        chars = min(omitted, sum(ref.size_bytes for ref in refs))
        shown = _LEFT_OUT.sub("", _FILE.sub("", text))
        return len(refs), round(chars * self._tokens(shown) / max(1, len(shown)))

    def _ref(self, pointer: str) -> Ref | None:
        try:
            return self._session.ref(pointer)
        except CoatcheckError:
            return None

    def _was_read(self, text: str) -> bool:
        """Whether our tools wrote a text. A `PromptBuilder` marks what it appends too."""
        try:
            return is_ours(self._session.store.secret, text) and not text.startswith(STARTS)
        except CoatcheckError:
            return False

    def _weighed(self, value: Any) -> tuple[Any, bytes, int | None]:
        """Return a message as JSON, its digest and its tokens. Providers' libraries return objects,
        which hosts send back."""
        try:
            return value, *self._tally.digest_and_tokens(value)
        except TypeError:
            value = json.loads(_dumped(value))
            return value, *self._tally.digest_and_tokens(value)

    def _tokens(self, text: str) -> int:
        """Count a text, or estimate it if the counter fails, which is reported for the prompt as a
        whole."""
        found = self._tally.tokens(text)
        return estimate(text) if found is None else found


def _contents(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yield the texts in a message, and the stubs in it that are objects."""
    if isinstance(value, str) or is_stub_object(value):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth < _DEEPEST:
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _contents(one, depth + 1)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_object)


def _object(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json", exclude_none=True) if callable(dump) else str(value)


def _cost(
    parts: Sequence[_Part], stable: int, prices: tuple[float, float], name: str
) -> int | None:
    """Return the price of a prompt in uncached tokens, if the first `stable` parts are read from a
    cache and the others are written to it. `name` is "tokens", or "tokens_without"."""
    if any(part.tokens is None for part in parts):
        return None
    total: float = sum(getattr(part, name) * prices[at >= stable] for at, part in enumerate(parts))
    return round(total)


class Meter:
    """Measures the model calls of one session. Thread-safe.

    `run` names the run, `tools` are sent with every call, `budget` (by default from the settings)
    is what prompts are checked against, `release` is the label of the figures, and `baseline` what
    they are compared with. `failures` is the number of steps that failed: measuring, storing or
    sending."""

    def __init__(
        self,
        session: Session,
        *,
        run: str | None = None,
        tools: Sequence[Any] = (),
        budget: Budget | None = None,
        count: TokenCounter = estimate,
        provider: str | None = None,
        model: str | None = None,
        release: str | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        self._session = session
        self._settings = session.store.settings
        self._run = run
        self._tools = tuple(tools)
        self._budget = budget or Budget(**self._settings.section("budget"))
        self._count = count
        self._provider = provider
        self._model = model
        self._label: str = (
            release or self._settings["metrics.release"] or f"coatcheck {__version__}"
        )
        self._baseline = baseline
        self._scale = _Scale(session, count)
        self._lock = threading.Lock()
        self._before: Sent | None = None
        self._calls: list[PromptMetrics] | None = None
        self._release: _Release | None = None
        self._logged: set[str] = set()
        self.failures = 0

    def call(
        self,
        prompt: Prompt | BudgetExceeded | None = None,
        *,
        messages: Iterable[Any] = (),
        system: object = None,
        tools: Sequence[Any] | None = None,
        hot_state: Any = None,
        usage: object = None,
        model: str | None = None,
        outcomes: Iterable[ToolOutcome] = (),
    ) -> PromptMetrics | None:
        """Record one model call. Return its figures, or None if they cannot be measured.

        `prompt` is the result of a `PromptBuilder`, or the `BudgetExceeded` that it raised. Without
        it, pass the `messages` as the provider gets them, the `system` text if it is separate,
        `tools` and `hot_state`. `usage` is the provider's answer or its `usage`, `outcomes` are
        those of the tool calls before it. Call this once for each model call, inside the call's
        span if there is one."""
        with self._lock:
            try:
                used = usage_of(usage)
                call = PromptMetrics(
                    session=self._session.session_id,
                    run=self._run,
                    at=round(time.time(), 3),
                    release=self._label,
                    model=model or self._model,
                    budget_tokens=self._budget.max_prompt_tokens,
                    **asdict(used),
                )
                if isinstance(prompt, BudgetExceeded):
                    call = _refused(call, prompt)
                elif prompt is not None:
                    parts = self._scale.measure(prompt.messages, prompt.system, prompt.tools)
                    call = _built(self._with_parts(call, parts, used), prompt)
                else:
                    parts = self._scale.measure(
                        messages, system, self._tools if tools is None else tools
                    )
                    call = self._with_state(self._with_parts(call, parts, used), hot_state)
                spent = [outcome.duration for outcome in outcomes]
                call = replace(call, tool_calls=len(spent), tool_seconds=round(sum(spent), 3))
            except Exception as error:  # noqa: BLE001 - figures must never stop a run
                self._failed("measuring a prompt", error)
                return None
            if not self._settings["metrics.enabled"]:
                return replace(call, warnings=tuple(_notices(call, self._settings)))
            return self._kept(self._judged(call, was_logged=isinstance(prompt, BudgetExceeded)))

    def _with_parts(self, call: PromptMetrics, parts: list[_Part], used: Usage) -> PromptMetrics:
        """Return the call with the contents of its prompt, compared with the previous call."""
        sent = Sent(tuple(Cost(part.digest, part.tokens or 0) for part in parts), 0)
        comparison = compared(self._before, sent)
        self._before = sent
        prices = (
            self._settings["metrics.price_cached"],
            self._settings["metrics.price_cache_write"],
        )
        exact, stable = used.cost(*prices), comparison.stable.messages
        tokens = [part.tokens for part in parts if part.tokens is not None]
        sums: dict[str, Any] = sum((part.figures for part in parts), Counter())
        return replace(
            call,
            est_tokens=sum(tokens) if len(tokens) == len(parts) else None,
            tokens_rewritten=comparison.rewritten,
            cost=_cost(parts, stable, prices, "tokens") if exact is None else exact,
            cost_without=_cost(parts, stable, prices, "tokens_without"),
            **sums,
        )

    def _with_state(self, call: PromptMetrics, hot_state: Any) -> PromptMetrics:
        """Return the call with its hot state and the violations of the budget."""
        violations = self._budget.check(hot_state=hot_state, count=self._count)
        violations += self._budget.prompt_tokens(call.est_tokens)
        call = replace(call, budget_violations=tuple(one.to_record() for one in violations))
        if hot_state is None:
            return call
        text, types = rendered(hot_state)
        return replace(
            call,
            hs_tokens=None if text is None else counted(self._count, text),
            hs_bytes=0 if text is None else len(text.encode("utf-8", "surrogatepass")),
            hs_steps=tuple(getattr(hot_state, "steps", ())),
            artifacts=None if types is None else len(types),
            artifact_types=dict(Counter(sorted(types or ()))),
        )

    def _judged(self, call: PromptMetrics, *, was_logged: bool = False) -> PromptMetrics:
        """Return the call with its warnings, and log the new ones. Warnings of the previous call
        are not logged again, nor are violations that were logged when the prompt was refused."""
        percent = self._settings["metrics.warn_rise_percent"]
        known = self._tried("reading earlier figures", self._earlier) or []
        found = _notices(call, self._settings, _ratio(known))
        found += session_rises([*known, call], percent)
        found += self._tried("comparing releases", lambda: self._release_rises(call, percent)) or []
        before = {(one.figure, one.reason) for one in known[-1].warnings} if known else set()
        for one in found:
            if (one.figure, one.reason) not in before and not (
                was_logged and one.reason == "violation"
            ):
                _LOG.warning("session %s: %s", mask(ascii(call.session))[:200], one.message)
        call = replace(call, warnings=tuple(found))
        self._calls = [*known[1 - _WINDOW :], call]
        return call

    def _earlier(self) -> list[PromptMetrics]:
        if self._calls is None:
            self._calls = list(calls_of(self._session, limit=_WINDOW))
        return self._calls

    def _release_rises(self, call: PromptMetrics, percent: float) -> list[Notice]:
        if self._release is None:
            file = self._settings["metrics.baseline"]
            before = (
                Baseline.read(file)
                if self._baseline is None and file is not None
                else self._baseline
            )
            self._release = _Release(self._session.store, self._label, before)
        return self._release.rises(call, percent)

    def _kept(self, call: PromptMetrics) -> PromptMetrics:
        """Store a call and send it on. Each step may fail without affecting the others."""
        keep = self._settings["metrics.keep"]
        body = call.to_json().encode()
        number = self._tried(
            "storing figures", lambda: self._session.record(SERIES, body, keep=keep)
        )
        call = replace(call, turn=number)
        file, logger = self._settings["metrics.file"], self._settings["metrics.logger"]
        if file is not None:
            self._tried("writing figures to a file", lambda: _append(file, call))
        if logger is not None:
            self._tried(
                "logging figures", lambda: logging.getLogger(logger).info("%s", call.to_json())
            )
        if self._settings["metrics.opentelemetry"]:
            self._tried("sending figures to OpenTelemetry", lambda: self._sent(call))
        return call

    def _sent(self, call: PromptMetrics) -> None:
        from coatcheck.context.telemetry import (
            telemetry,
        )  # only imported if there are calls to send

        found = telemetry()
        if found is not None:
            found.record(call, self._provider)

    def _tried(self, doing: str, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - for example a full disk, or the host's exporter
            self._failed(doing, error)
            return None

    def _failed(self, doing: str, error: Exception) -> None:
        self.failures += 1
        if doing not in self._logged:
            self._logged.add(doing)
            _LOG.warning(
                "%s failed, the agent is not affected: %s",
                doing,
                mask(f"{type(error).__name__}: {error}"),
            )


def calls_of(session: Session, *, limit: int | None = None) -> Iterator[PromptMetrics]:
    """Yield the stored figures of a session, oldest first; with `limit`, of its newest calls.
    Damaged records are skipped."""
    for record in reversed(session.records(SERIES, newest=True, limit=limit)):
        for found in _read_calls([record]):
            yield replace(found, session=session.session_id, turn=record.seq, at=record.at)


def _append(path: str, call: PromptMetrics) -> None:
    """Append one line in one write, so that lines of several processes do not mix. Only the owner
    can read the file."""
    with open(
        Path(path).expanduser(), "ab", buffering=0, opener=partial(os.open, mode=0o600)
    ) as target:
        target.write(call.to_json().encode() + b"\n")


def _built(call: PromptMetrics, prompt: Prompt) -> PromptMetrics:
    """Return the call with the figures that the builder of its prompt knows more precisely."""
    left = [one for one in prompt.decisions if one.leaves]
    return replace(
        call,
        hs_steps=tuple(prompt.hs_truncated),
        artifact_types=dict(Counter(sorted(prompt.artifact_types))),
        tokens_rewritten=prompt.rewritten_tokens,
        results_left=len(left),
        results_kept=len(prompt.decisions) - len(left),
        expected_saving=round(sum(one.expected_saving for one in left), 1),
        budget_violations=tuple(one.to_record() for one in prompt.violations),
        **{name: getattr(prompt, name) for name in _BUILT},
    )


def _refused(call: PromptMetrics, error: BudgetExceeded) -> PromptMetrics:
    """Return the figures of a call that was not made: nothing was sent, and the violation has the
    prompt's size."""
    tokens = next(
        (one.actual for one in error.violations if one.field == "max_prompt_tokens"), None
    )
    violations = tuple(one.to_record() for one in error.violations)
    return replace(
        call, est_tokens=None if tokens is None else int(tokens), budget_violations=violations
    )
