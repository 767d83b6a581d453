"""The hot state: the small JSON object with the state of a session that every prompt carries.

It is validated whenever it is built, and again before it is rendered or written. `fitted` shortens
it to a budget: a ladder of renderings, each with a little less than the one above. The rungs depend
on the state alone, and the search for the highest that fits always tries the same rungs in the same
order. So a larger limit never shows less, whatever the counter does. Each rung lists what it leaves
out.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coatcheck.context.budget import Budget, Rendered, Violation, refusal
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.ids import MIN_PREFIX, clip, is_pointer, is_prefix, pointer_of, shared_prefix
from coatcheck.media import ArtifactKind
from coatcheck.redaction import mask
from coatcheck.shrink import least_step_that_fits
from coatcheck.tokens import TokenCounter, counted, estimate

if TYPE_CHECKING:
    from coatcheck.refs import Ref
    from coatcheck.session import Session

RiskLevel = Literal["low", "medium", "high"]

MINIMAL: Final = "all but ids and risk"
_LABEL: Final = 80
_REFS_PER_ENTRY: Final = 5  # a name that was put often fills a session with old versions
_SHOWN_ERRORS: Final = 3
_CONFIG: Final = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=False)

_IDS: Final = ("session_id", "session_key", "run_id", "risk_level", "current_plan_id")
_LISTS: Final = ("open_questions", "accepted_decisions", "constraints")  # the least important first
_TEXTS: Final = ("last_successful_step", "objective")
_SHORTEST: Final = 16  # characters: a text that would be shorter is left out
# Long text is cut twice, before artifacts are left out and before the first ones are: to this many
# characters of a label, a text and an item of a list, and this many items of a list.
_LEAST: Final = {
    "labels": (80, 24),
    **dict.fromkeys(_TEXTS, (200, 60)),
    "items": (200, 40),
    **dict.fromkeys(_LISTS, (8, 3)),
}


def _ordered(value: object) -> object:
    """Return a list as a tuple. Refuse unordered containers, which would give different bytes each
    time."""
    if not isinstance(value, list | tuple):
        raise ValueError("must be a list")
    return tuple(value)


def _whole_id(value: object) -> object:
    if isinstance(value, str) and (
        (is_pointer(value) and "#" not in value) or (is_prefix(value) and len(value) == 64)
    ):
        return value
    raise ValueError("must be an artifact id of 64 hex characters, or a pointer")


def _sendable(value: str) -> str:
    """Refuse half a surrogate pair, which has no UTF-8 encoding."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("contains half a surrogate pair") from None
    return value


Text = Annotated[str, AfterValidator(_sendable)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_ordered)]


class IndexEntry(BaseModel):
    """One artifact in a hot state: its id or pointer, its kind as `type`, a label, its version (its
    number under its name, a text, or None if it has none), and a summary."""

    model_config = _CONFIG

    artifact_id: Annotated[str, BeforeValidator(_whole_id)]
    type: ArtifactKind
    label: Text = ""
    version: (
        Annotated[int, Field(ge=1, le=1 << 53)]
        | Annotated[Text, Field(min_length=1, max_length=_LABEL)]
        | None
    ) = 1
    summary: Text = ""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidArgument(_problems("index entry", error), hint="") from error


class HotState(BaseModel):
    """The state of a session. Immutable. Lists run from the oldest to the newest, but
    `artifact_index` begins with the most important entry. Unknown fields are refused."""

    model_config = _CONFIG
    shows_whole_ids: ClassVar[bool] = False
    least_entries: ClassVar[tuple[int, int]] = (
        5,
        0,
    )  # entries of the index that remain after each cut of long text

    session_id: Text = Field(min_length=1)
    session_key: Text | None = None
    run_id: Text | None = None
    objective: Text | None = None
    current_plan_id: Text | None = None
    accepted_decisions: Texts = ()
    open_questions: Texts = ()
    constraints: Texts = ()
    last_successful_step: Text | None = None
    risk_level: RiskLevel | None = "low"
    artifact_index: Annotated[tuple[IndexEntry, ...], BeforeValidator(_ordered)] = ()

    def __init__(
        self,
        *,
        session_id: str,
        session_key: str | None = None,
        run_id: str | None = None,
        objective: str | None = None,
        current_plan_id: str | None = None,
        accepted_decisions: list[str] | tuple[str, ...] = (),
        open_questions: list[str] | tuple[str, ...] = (),
        constraints: list[str] | tuple[str, ...] = (),
        last_successful_step: str | None = None,
        risk_level: RiskLevel | None = "low",
        artifact_index: list[Any] | tuple[IndexEntry | Mapping[str, Any], ...] = (),
        **unknown: Any,
    ) -> None:
        try:
            super().__init__(
                session_id=session_id, session_key=session_key, run_id=run_id, objective=objective,
                current_plan_id=current_plan_id, accepted_decisions=accepted_decisions,
                open_questions=open_questions, constraints=constraints,
                last_successful_step=last_successful_step, risk_level=risk_level,
                artifact_index=artifact_index, **unknown,
            )  # fmt: skip
        except ValidationError as error:
            raise InvalidArgument(
                _problems("hot state", error), hint="valid fields: " + ", ".join(ORDER)
            ) from error

    @classmethod
    def parse(cls, value: str | bytes | Mapping[str, Any]) -> Self:
        """Read a hot state from its JSON or from a mapping. Raises `InvalidArgument`."""
        if isinstance(value, str | bytes):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(
                    "the hot state is not valid JSON", hint="pass one JSON object"
                ) from error
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise InvalidArgument(f"a hot state must be a JSON object, got {type(value).__name__}")
        if "session_id" not in value:
            raise InvalidArgument(
                "the hot state has no session_id", hint="session_id is the only required field"
            )
        return cls(**value)

    def replaced(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated like a new state."""
        return type(self)(**(self.content() | changes))

    def content(self) -> dict[str, Any]:
        """Return all fields in a fixed order, as `parse` accepts them and as the history keeps
        them."""
        return {name: _plain(getattr(self, name)) for name in ORDER}

    def shown(self) -> dict[str, Any]:
        """Return the fields as a model sees them, in a fixed order: known secrets masked, ids as
        pointers, empty fields left out."""
        checked = self.parse(
            self.content()
        )  # catches states that were made without the constructor
        fields = {
            name: _masked(getattr(checked, name)) for name in ORDER if name != "artifact_index"
        }
        fields["artifact_index"] = _shown_index(checked.artifact_index, self.shows_whole_ids)
        return {name: value for name, value in fields.items() if value or name == "session_id"}

    def render(self) -> str:
        """Return the complete state as one line of JSON. Equal content gives equal bytes."""
        return compact(self.shown())

    def fitted(self, budget: Budget | None = None, *, count: TokenCounter = estimate) -> Rendered:
        """Return the state within a budget (by default 1,000 tokens and 20 index entries),
        shortened only as far as necessary, with the steps that were taken.

        Raises `BudgetExceeded` if not even ids and risk fit, or if the counter fails."""
        budget = Budget() if budget is None else budget
        ladder = _Ladder(self.shown(), budget, count, self.least_entries)
        limit = budget.max_hot_state_tokens
        best = least_step_that_fits(
            ladder.rendered, ladder.last, lambda found: found.tokens <= limit
        )
        if best.tokens > limit:
            message = (
                f"even ids and risk alone have {best.tokens:,} tokens: "
                f"over max_hot_state_tokens ({limit:,})"
            )
            raise refusal([Violation("max_hot_state_tokens", limit, best.tokens, message)])
        return best


# The order of the rendering: fields that rarely change come first, so that most of it stays in a
# provider's cache.
ORDER: Final = (
    "session_id", "session_key", "run_id", "risk_level", "current_plan_id", "objective",
    "constraints", "accepted_decisions", "open_questions", "last_successful_step", "artifact_index",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Change:
    """The removed and added items of one field, in order. A field with a single value has at most
    one of each."""

    field: str
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        return {"field": self.field, "removed": list(self.removed), "added": list(self.added)}


def changes_between(older: HotState, newer: HotState) -> tuple[Change, ...]:
    """Return the fields that differ, in the order of the rendering. Known secrets are masked;
    values that differ only in a secret still count as changed."""
    before, after = older.shown(), newer.shown()
    return tuple(
        _change(name, _items(name, before.get(name)), _items(name, after.get(name)))
        for name in ORDER
        if getattr(older, name) != getattr(newer, name)
    )


def _change(name: str, old: list[str], new: list[str]) -> Change:
    removed: list[str] = []
    added: list[str] = []
    for what, start, end, new_start, new_end in SequenceMatcher(
        None, old, new, autojunk=False
    ).get_opcodes():
        if what != "equal":
            removed += old[start:end]
            added += new[new_start:new_end]
    return Change(name, tuple(removed), tuple(added))


def _items(name: str, value: Any) -> list[str]:
    if not value:
        return []
    if name == "artifact_index":
        return [entry_line(entry) for entry in value]
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def entry_line(entry: Mapping[str, Any]) -> str:
    """Format an entry of a rendered artifact index on one line."""
    label, summary, version = entry.get("label"), entry.get("summary"), entry.get("version")
    words = [entry["artifact_id"], entry["type"]]
    if version is not None:
        words.append(f"v{version}")
    if label:
        words.append(label)
    return " ".join(words) + (f": {summary}" if summary else "")


def artifact_index(
    session: Session, *, limit: int = 20, words: str | None = None
) -> tuple[IndexEntry, ...]:
    """Return an index of the artifacts in a session: the newest version of each name, newest first,
    at most `limit` entries. With `words`, the best matches come first."""
    if limit < 1:
        return ()
    best = (
        [hit.ref for hit in session.search(words, limit=limit)] if words and words.strip() else []
    )
    found = _first_of_each(best, session.list(limit=limit), limit)
    if len(found) < limit:
        found = _first_of_each(best, session.list(limit=limit * _REFS_PER_ENTRY), limit)
    return tuple(entry for entry in (_entry(session, ref) for ref in found) if entry is not None)


def _first_of_each(best: list[Ref], rest: list[Ref], limit: int) -> list[Ref]:
    """Return the best refs, then the first ref of each other artifact and name."""
    found = list(best)
    ids, names = {ref.artifact_id for ref in best}, {ref.name for ref in best}
    for ref in rest:
        if ref.artifact_id not in ids and (ref.name is None or ref.name not in names):
            found.append(ref)
            ids.add(ref.artifact_id)
            names.add(ref.name)
    return found[:limit]


def _entry(session: Session, ref: Ref) -> IndexEntry | None:
    try:
        version = session.version(ref)
    except NotFound:  # it was forgotten a moment ago
        return None
    label = _cut(ref.name or ref.tool or "", _LABEL)
    return IndexEntry(
        artifact_id=ref.pointer, type=ref.kind, label=label, version=version, summary=ref.summary
    )


def compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _masked(value: Any) -> Any:
    if isinstance(value, str):
        return mask(value)
    return [mask(item) for item in value] if isinstance(value, tuple) else value


def _shown_index(index: tuple[IndexEntry, ...], whole_ids: bool) -> list[dict[str, Any]]:
    """Return the entries with pointers instead of ids, each long enough to be unique among them, or
    with whole ids."""
    ids = [entry.artifact_id.removeprefix("art:") for entry in index]
    inside = sorted(set(ids))
    needed: dict[str, int] = dict.fromkeys(inside, MIN_PREFIX)
    for one, other in pairwise(inside):
        length = shared_prefix(one, other) + 1
        needed[one], needed[other] = max(needed[one], length), max(needed[other], length)
    shown = []
    for entry, artifact_id in zip(index, ids, strict=True):
        keeps = whole_ids or is_pointer(entry.artifact_id)
        pointer = entry.artifact_id if keeps else pointer_of(artifact_id, needed[artifact_id])
        fields = {
            "artifact_id": pointer, "type": entry.type, "label": mask(entry.label),
            "version": entry.version, "summary": mask(entry.summary),
        }  # fmt: skip
        shown.append({name: value for name, value in fields.items() if value})
    return shown


def _problems(what: str, error: ValidationError) -> str:
    """Describe what is wrong, field by field, without the values, which may be anything."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    found = [
        ": ".join(filter(None, (_field(one["loc"]), one["msg"].removeprefix("Value error, "))))
        for one in errors
    ]
    more = f"; and {len(errors) - _SHOWN_ERRORS} more" if len(errors) > _SHOWN_ERRORS else ""
    return f"invalid {what}: {'; '.join(found[:_SHOWN_ERRORS])}{more}"


def _field(location: tuple[int | str, ...]) -> str:
    return ".".join(
        str(part) if isinstance(part, int) or part in _KNOWN else clip(part, 40)
        for part in location
    )


_KNOWN: Final = frozenset(ORDER) | frozenset(IndexEntry.model_fields)


class _Cut(NamedTuple):
    """The sizes that one kind of step may leave of a field, from nearly all to nothing."""

    field: str
    left: range
    whole: int


class _Ladder:
    """The rungs of one state: 0 shows all that the limit of entries allows, `last` ids and risk
    alone. Long text goes before pointers do: summaries, then long labels, texts and lists, then all
    but the first artifacts."""

    def __init__(
        self,
        shown: Mapping[str, Any],
        budget: Budget,
        count: TokenCounter,
        least_entries: tuple[int, int],
    ) -> None:
        self._shown = shown
        self._budget = budget
        self._count = count
        index = shown.get("artifact_index", [])
        self._index = index[: budget.max_artifact_index_entries]
        longest = _longest(entry.get("summary", "") for entry in self._index)
        sizes = {
            "labels": _longest(entry.get("label", "") for entry in self._index),
            **{name: len(shown.get(name, "")) for name in _TEXTS},
            "items": _longest(item for name in _LISTS for item in shown.get(name, ())),
            **{name: len(shown.get(name, ())) for name in _LISTS},
        }
        left, entries = dict(sizes), len(self._index)
        self._cuts = [
            _Cut("summaries", _lengths(longest)[:-1], longest),
            _Cut("summarized", range(entries - 1, -1, -1) if longest else range(0), entries),
        ]
        for step, first in enumerate(least_entries):
            for name, whole in sizes.items():
                least = _LEAST[name][step]
                self._cuts.append(_Cut(name, range(left[name] - 1, least - 1, -1), whole))
                left[name] = min(left[name], least)
            self._cuts.append(_Cut("artifact_index", range(entries - 1, first - 1, -1), len(index)))
            entries = min(entries, first)
        self._cuts += [
            *(_Cut(name, range(left[name] - 1, -1, -1), sizes[name]) for name in _LISTS),
            *(_Cut(name, _lengths(left[name]), sizes[name]) for name in _TEXTS),
        ]
        self.last = sum(len(cut.left) for cut in self._cuts)

    def rendered(self, number: int) -> Rendered:
        """Render one rung. Raises `BudgetExceeded` if it cannot be counted."""
        fields, steps = self._rung(number)
        text = compact(fields)
        tokens = counted(self._count, text)
        if tokens is None:
            raise refusal(self._budget.hot_state_tokens(None))
        index = fields.get("artifact_index", [])
        return Rendered(
            text,
            tokens,
            len(text.encode()),
            steps,
            len(index),
            tuple(entry["type"] for entry in index),
        )

    def _rung(self, number: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields that a rung shows, and the steps down to it."""
        shortened = _Shortened(dict(self._shown), self._index)
        for cut in self._cuts:
            down = min(number, len(cut.left))
            number -= down
            if cut.field == "artifact_index":
                shortened.drop_entries(cut, down)
            elif down:
                shortened.take(cut, cut.left[down - 1])
        return shortened.finished()


class _Shortened:
    """A state while steps are taken, and the newest step of each kind."""

    def __init__(self, fields: dict[str, Any], index: list[dict[str, Any]]) -> None:
        self._fields = fields
        self._index = index
        self._taken: dict[str, _Taken] = {}

    def drop_entries(self, cut: _Cut, down: int) -> None:
        """Drop entries at the end of the index. Entries beyond the limit of entries are missing
        without a step too, and count as dropped."""
        if down:
            self._index = self._index[: cut.left[down - 1]]
        if len(self._index) < cut.whole:
            self._taken[cut.field] = _Taken(cut.field, len(self._index), cut.whole)

    def take(self, cut: _Cut, left: int) -> None:
        """Shorten a field, or the texts in the index, to what a step leaves."""
        name = cut.field
        if name in ("summaries", "summarized", "labels"):
            self._shorten_index(name, left)
        elif name == "items":
            self._shorten_items(left)
        elif name in _LISTS:
            first = max(0, len(self._fields[name]) - left)
            self._fields[name] = self._fields[name][first:]
        else:
            left = left if left >= _SHORTEST else 0
            self._fields[name] = _cut(self._fields[name], left)
        self._taken[name] = _Taken(name, left, cut.whole)

    def _shorten_index(self, what: str, left: int) -> None:
        """Cut labels or summaries to a length, or keep the summaries of the first entries."""
        if what == "summarized":
            others = [_with_text(entry, "summary", 0) for entry in self._index[left:]]
            self._index = [*self._index[:left], *others]
            if not left:
                self._taken.pop("summaries", None)  # their length is irrelevant: there are none
            return
        name = "summary" if what == "summaries" else "label"
        self._index = [_with_text(entry, name, left) for entry in self._index]

    def _shorten_items(self, left: int) -> None:
        for name in _LISTS:
            if self._fields.get(name):
                self._fields[name] = [_cut(item, left) for item in self._fields[name]]

    def finished(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields that are left, with a note of what is missing, and the steps."""
        shown = {**self._fields, "artifact_index": self._index}
        if not self._index:
            self._taken.pop("labels", None)
        if not any(shown.get(name) for name in _LISTS):
            self._taken.pop("items", None)
        fields = {name: value for name, value in shown.items() if value or name in _IDS}
        taken = self._taken.values()
        steps = tuple(str(one) for one in taken)
        if not taken:
            return fields, ()
        if fields.keys() <= set(_IDS):
            return {**fields, "truncated": [f"left out: {MINIMAL}"]}, (*steps, MINIMAL)
        return {**fields, "truncated": _truncated(taken)}, steps


class _Taken(NamedTuple):
    """A step that was taken: how much it left of how much."""

    field: str
    left: int
    whole: int

    def __str__(self) -> str:
        if self.field in ("summaries", "labels", "items"):
            return f"{self.field}: {self.left} characters at most"
        if self.field == "summarized":
            return f"summaries: {self.left or 'none'} of {self.whole}"
        how = "newest " if self.field in _LISTS else ""
        return f"{self.field}: {how}{self.left} of {self.whole}" + (
            " characters" if self.field in _TEXTS else ""
        )

    @property
    def gone(self) -> str:
        """Name a field of which nothing is left, in few words."""
        if self.field in _LISTS:
            return f"{self.whole} {self.field}"
        return {"summarized": "summaries", "artifact_index": f"{self.whole} artifacts"}.get(
            self.field, self.field
        )


def _truncated(taken: Collection[_Taken]) -> list[str]:
    """Describe the steps to the model, in few words because they count too."""
    gone = [one.gone for one in taken if not one.left]
    return [
        *(["left out: " + ", ".join(gone)] if gone else []),
        *(str(one) for one in taken if one.left),
    ]


def _lengths(whole: int) -> range:
    """Return the lengths to which a text can be cut. The last one means that it is left out."""
    return range(max(whole, _SHORTEST) - 1, _SHORTEST - 2, -1) if whole else range(0)


def _longest(texts: Iterable[str]) -> int:
    return max(map(len, texts), default=0)


def _with_text(entry: Mapping[str, Any], name: str, limit: int) -> dict[str, Any]:
    fields = dict(entry) | {name: _cut(entry.get(name, ""), limit)}
    return {name: value for name, value in fields.items() if value}


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return text[: limit - 1] + "…" if limit else ""
