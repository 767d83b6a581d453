"""The hot state: the small JSON object that every prompt carries, so that an agent knows where it stands.

It is checked whenever it is built, and again before it is rendered or written. `fitted` makes it small enough for a
budget: step by step, and saying which steps it took.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from coatcheck.context.budget import Budget
from coatcheck.errors import InvalidArgument, NotFound
from coatcheck.ids import MIN_PREFIX, clip, is_pointer, is_prefix, pointer_of, shared_prefix
from coatcheck.redaction import mask
from coatcheck.tokens import TokenCounter, estimate

if TYPE_CHECKING:
    from coatcheck.context.fitting import Rendered
    from coatcheck.refs import Ref
    from coatcheck.session import Session

__all__ = ["HotState", "IndexEntry", "artifact_index"]

RiskLevel = Literal["low", "medium", "high"]
Kind = Literal["repo", "doc", "code", "log", "data", "plan", "result"]

_LABEL: Final = 80
_LOOKED_AT: Final = 5  # refs for each entry of an index: names that were put often fill a session with old versions
_SHOWN_ERRORS: Final = 3
_CONFIG: Final = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=False)


def _ordered(value: object) -> object:
    """A list as a tuple. What has no order of its own would give other bytes each time."""
    if not isinstance(value, list | tuple):
        raise ValueError("a list is wanted")
    return tuple(value)


def _whole_id(value: object) -> object:
    if isinstance(value, str) and ((is_pointer(value) and "#" not in value) or (is_prefix(value) and len(value) == 64)):
        return value
    raise ValueError("an artifact's id is 64 hex characters, or its pointer")


def _sendable(value: str) -> str:
    """A text that there is UTF-8 for: half a surrogate pair can neither be kept nor sent."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("half a character: a surrogate without the other") from None
    return value


Text = Annotated[str, AfterValidator(_sendable)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_ordered)]


class IndexEntry(BaseModel):
    """One artifact in a hot state: its id or pointer, its kind as `type`, a label, which version it is of what was put
    under its name, and a summary."""

    model_config = _CONFIG

    artifact_id: Annotated[str, BeforeValidator(_whole_id)]
    type: Kind
    label: Text = ""
    version: int = Field(default=1, ge=1, le=1 << 53)
    summary: Text = ""

    def __init__(self, **said: Any) -> None:
        try:
            super().__init__(**said)
        except ValidationError as error:
            raise InvalidArgument(_wrong("an index entry", error), hint="") from error


class HotState(BaseModel):
    """Where a session stands. Immutable; lists run from the oldest to the newest, but `artifact_index` begins with
    what matters most. Unknown fields are refused."""

    model_config = _CONFIG

    session_id: Text = Field(min_length=1)
    session_key: Text | None = None
    run_id: Text | None = None
    objective: Text | None = None
    current_plan_id: Text | None = None
    accepted_decisions: Texts = ()
    open_questions: Texts = ()
    constraints: Texts = ()
    last_successful_step: Text | None = None
    risk_level: RiskLevel = "low"
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
        risk_level: RiskLevel = "low",
        artifact_index: list[Any] | tuple[IndexEntry | Mapping[str, Any], ...] = (),
        **unknown: Any,
    ) -> None:
        try:
            super().__init__(
                session_id=session_id, session_key=session_key, run_id=run_id, objective=objective,
                current_plan_id=current_plan_id, accepted_decisions=accepted_decisions, open_questions=open_questions,
                constraints=constraints, last_successful_step=last_successful_step, risk_level=risk_level,
                artifact_index=artifact_index, **unknown,
            )  # fmt: skip
        except ValidationError as error:
            raise InvalidArgument(_wrong("a hot state", error), hint="its fields are " + ", ".join(ORDER)) from error

    @classmethod
    def parse(cls, said: str | bytes | Mapping[str, Any]) -> Self:
        """A hot state from its JSON, or from what that says. Raises `InvalidArgument`."""
        if isinstance(said, str | bytes):
            try:
                said = json.loads(said)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument("the hot state is no JSON", hint="it is one JSON object") from error
        if not isinstance(said, Mapping) or not all(isinstance(key, str) for key in said):
            raise InvalidArgument(f"a hot state is a JSON object, not a {type(said).__name__}")
        if "session_id" not in said:
            raise InvalidArgument("the hot state has no session_id", hint="it is the one field that must be there")
        return cls(**said)

    def replaced(self, **changes: Any) -> Self:
        """This state with some fields changed, checked like a new one."""
        return type(self)(**(self.content() | changes))

    def content(self) -> dict[str, Any]:
        """All fields as they are, in a fixed order: what `parse` takes, and what the history keeps."""
        return {name: _plain(getattr(self, name)) for name in ORDER}

    def shown(self) -> dict[str, Any]:
        """The fields as a model gets them, in a fixed order: known secrets masked, ids as pointers, what is empty left
        out."""
        checked = self.parse(self.content())  # whoever went around the constructor is stopped here
        told = {name: _masked(getattr(checked, name)) for name in ORDER if name != "artifact_index"}
        told["artifact_index"] = _shown_index(checked.artifact_index)
        return {name: value for name, value in told.items() if value or name in ("session_id", "risk_level")}

    def render(self) -> str:
        """The whole state as one line of JSON, nothing left out: equal content, equal bytes."""
        return compact(self.shown())

    def fitted(self, budget: Budget | None = None, *, count: TokenCounter = estimate) -> Rendered:
        """The state within a budget (1,000 tokens and 20 index entries by default), shortened only as far as it has to
        be, and saying how.

        Raises `BudgetExceeded` where not even ids and risk fit, and where the counter fails."""
        from coatcheck.context.fitting import fitted

        return fitted(self.shown(), Budget() if budget is None else budget, count)


# The order of the rendering: what stays the same for long first, so that a provider's cache keeps the most of it.
ORDER: Final = (
    "session_id", "session_key", "run_id", "risk_level", "current_plan_id", "objective", "constraints",
    "accepted_decisions", "open_questions", "last_successful_step", "artifact_index",
)  # fmt: skip


def artifact_index(session: Session, *, limit: int = 20, words: str | None = None) -> tuple[IndexEntry, ...]:
    """An index of what a session sees: the newest version of each name, the newest first.

    With `words`, what fits them best comes before that. `limit` is how many entries it may have."""
    if limit < 1:
        return ()
    best = [hit.ref for hit in session.search(words, limit=limit)] if words and words.strip() else []
    found = _first_of_each(best, session.list(limit=limit), limit)
    if len(found) < limit:
        found = _first_of_each(best, session.list(limit=limit * _LOOKED_AT), limit)
    return tuple(entry for entry in (_entry(session, ref) for ref in found) if entry is not None)


def _first_of_each(best: list[Ref], rest: list[Ref], limit: int) -> list[Ref]:
    """The best, then of the rest the first of each artifact and each name."""
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
    except NotFound:  # forgotten a moment ago
        return None
    label = _clipped(ref.name or ref.tool or "", _LABEL)
    said = {"artifact_id": ref.pointer, "type": ref.kind, "label": label, "version": version, "summary": ref.summary}
    return IndexEntry(**said)


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


def _shown_index(index: tuple[IndexEntry, ...]) -> list[dict[str, Any]]:
    """Entries with pointers in place of ids, each long enough to be told from the others."""
    ids = [entry.artifact_id.removeprefix("art:") for entry in index]
    inside = sorted(set(ids))
    needed: dict[str, int] = dict.fromkeys(inside, MIN_PREFIX)
    for one, other in pairwise(inside):
        length = shared_prefix(one, other) + 1
        needed[one], needed[other] = max(needed[one], length), max(needed[other], length)
    shown = []
    for entry, artifact_id in zip(index, ids, strict=True):
        given = entry.artifact_id if is_pointer(entry.artifact_id) else pointer_of(artifact_id, needed[artifact_id])
        told = {
            "artifact_id": given, "type": entry.type, "label": mask(entry.label), "version": entry.version,
            "summary": mask(entry.summary),
        }  # fmt: skip
        shown.append({name: value for name, value in told.items() if value})
    return shown


def _clipped(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _wrong(what: str, error: ValidationError) -> str:
    """What is wrong, field by field, in our own words and in bounds: the values may be anything."""
    wrong = error.errors(include_url=False, include_context=False, include_input=False)
    said = [": ".join(filter(None, (_place(one["loc"]), one["msg"].removeprefix("Value error, ")))) for one in wrong]
    more = f"; and {len(wrong) - _SHOWN_ERRORS} more" if len(wrong) > _SHOWN_ERRORS else ""
    return f"this is not {what}: {'; '.join(said[:_SHOWN_ERRORS])}{more}"


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) if isinstance(part, int) or part in _KNOWN else clip(part, 40) for part in location)


_KNOWN: Final = frozenset(ORDER) | frozenset(IndexEntry.model_fields)
