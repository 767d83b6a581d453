"""What the operations of the HTTP API take and answer, as types. Requests are validated with them,
and the OpenAPI document is made of them.

Options come from the query string, or for a put from headers too. Bodies and answers are JSON. A
member that may be missing has a default.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, Strict

from coatcheck.checks import LARGEST
from coatcheck.errors import InvalidArgument
from coatcheck.media import ArtifactKind
from coatcheck.refs import SUMMARY_LIMIT, Ref, iso_time
from coatcheck.search import Hit
from coatcheck.storage import SessionInfo

MAX_PAGE: Final = 1_000
MAX_READ: Final = 1_000_000

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Text = Annotated[str, Strict(), Field(min_length=1)]
Seconds = Annotated[float, Field(ge=0)]
ExactSeconds = Annotated[float, Strict(), Field(ge=0)]


def _whole(value: object) -> object:
    """Accept a whole number of a JSON body as JSON Schema defines it: 1.0 is one, true and "1" are
    not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise ValueError("must be a whole number")
    return int(value)


ExactSize = Annotated[int, Field(ge=0, le=LARGEST), BeforeValidator(_whole)]
Positive = Annotated[int, Field(ge=1, le=LARGEST), BeforeValidator(_whole)]
_BLANK: Final = r"\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""What `str.isspace` accepts, spelled out: JSON Schema, pydantic and Python each mean something
else by `\\s`."""
Pointer = Annotated[str, Field(pattern=r"^art:[0-9a-f]{12,64}$")]
PageSize = Annotated[int, Field(ge=1, le=MAX_PAGE, description="Maximum number of entries.")]


def _about(description: str) -> Any:
    return Field(description=description)


# Options of the query string


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """No arguments. All types of arguments derive from this one, so that unknown arguments are
    refused."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class PutOptions(NoOptions):
    """What is known about the content of a put. Everything that is not given is detected."""

    name: (
        Annotated[Text, _about("Name in the session; the newest put under a name wins.")] | None
    ) = None
    kind: ArtifactKind | None = None
    tool: Annotated[Text, _about("The tool that produced it.")] | None = None
    media_type: (
        Annotated[Text, _about("Media type; detected from the content by default.")] | None
    ) = None
    summary: Annotated[str, Field(max_length=SUMMARY_LIMIT)] | None = None
    call_id: Annotated[Text, _about("Id of the tool call.")] | None = None
    parents: Annotated[list[Pointer], _about("Pointers of the artifacts that it was made of.")] = ()  # type: ignore[assignment]
    ttl: (
        Annotated[
            Seconds, _about("Seconds until it expires, if the session does not expire before.")
        ]
        | None
    ) = None
    codec: Annotated[
        Literal["bytes", "text"], _about("What Python's `session.get` returns. Text must be UTF-8.")
    ] = "bytes"


@dataclass(frozen=True, kw_only=True)
class GetOptions(NoOptions):
    text: Annotated[
        bool, _about("Answer as text/plain in UTF-8 instead of application/octet-stream.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ReadOptions(NoOptions):
    """What to read: slices, a grep, a query, a diff, or the beginning. See the page about
    reading."""

    lines: (
        Annotated[str, _about('Lines, counted from 1: "4100:4160", "-50:", "10:40,200:220".')]
        | None
    ) = None
    chars: Annotated[str, _about('Characters, counted from 0, end excluded: "0:2000".')] | None = (
        None
    )
    grep: (
        Annotated[str, _about("A regular expression in RE2 syntax; may be combined with lines.")]
        | None
    ) = None
    context: Annotated[int, Field(ge=0, le=100)] | Literal["auto"] | None = None
    ignore_case: bool = False
    invert: bool = False
    literal: Annotated[bool, _about("Treat the pattern of grep as plain text.")] = False
    count: Annotated[bool, _about("Numbers alone: matches, alternatives, values.")] = False
    last: Annotated[bool, _about("Begin with the last matches of grep.")] = False
    query: (
        Annotated[
            str,
            _about('"shape", a JSONPath, DuckDB SQL (FROM artifact), or "text" of a document.'),
        ]
        | None
    ) = None
    code: (
        Annotated[str, _about("A Python program over the whole content; answers what it prints.")]
        | None
    ) = None
    diff: Annotated[str, _about("Another artifact to compare with.")] | None = None
    exact: Annotated[bool, _about("Show lines as they are stored.")] = False
    cursor: (
        Annotated[str, _about("The next page; from the answer with the page before.")] | None
    ) = None
    max_chars: Annotated[int, Field(ge=200, le=MAX_READ)] | None = None


@dataclass(frozen=True, kw_only=True)
class PreviewOptions(NoOptions):
    limit: Annotated[int, Field(ge=1, le=10_000, description="Maximum number of characters.")] = 200


@dataclass(frozen=True, kw_only=True)
class SearchOptions(NoOptions):
    q: Annotated[
        str,
        Field(
            min_length=1,
            max_length=4_000,
            pattern=f"[^{_BLANK}]",
            description="Words to search for.",
        ),
    ]
    limit: Annotated[int, Field(ge=1, le=100, description="Maximum number of hits.")] = 8


@dataclass(frozen=True, kw_only=True)
class ListOptions(NoOptions):
    limit: PageSize = 50
    after: (
        Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="`next` of the page before.")]
        | None
    ) = None
    name: (
        Annotated[Text, _about("List what was put under this name. Cannot be combined with after.")]
        | None
    ) = None
    kind: (
        Annotated[
            ArtifactKind, _about("Only artifacts of this kind. Cannot be combined with after.")
        ]
        | None
    ) = None


@dataclass(frozen=True, kw_only=True)
class SessionsOptions(NoOptions):
    limit: PageSize = 50
    after: Annotated[str, _about("`next` of the page before.")] | None = None
    prefix: Annotated[str, _about("Only sessions whose ids begin with this text.")] = ""


@dataclass(frozen=True, kw_only=True)
class CollectOptions(NoOptions):
    dry_run: Annotated[bool, _about("Only report what would be removed.")] = False


# Bodies


@dataclass(frozen=True, kw_only=True)
class SessionBody(NoOptions):
    """Options of a session. Those that are not given stay as they were."""

    ttl: Annotated[
        ExactSeconds | Literal["none"] | None,
        _about('Seconds after the last use until it expires; "none" for never.'),
    ] = None
    parent: Annotated[Text, _about("A session whose artifacts this one can read.")] | None = None
    quota_bytes: Annotated[
        ExactSize | Literal["none"] | None,
        _about('Maximum size; "none" for no limit. Needs the scope admin.'),
    ] = None


@dataclass(frozen=True, kw_only=True)
class GrantBody(NoOptions):
    to: Annotated[Text, _about("The session that is to see the artifact.")]


@dataclass(frozen=True, kw_only=True)
class PolicyBody(NoOptions):
    """Changes to the configured policy: when a value becomes a stub, and what the stub looks
    like."""

    max_tokens: Positive | None = None
    max_chars: Positive | None = None
    max_bytes: Positive | None = None
    preview_chars: ExactSize | None = None
    read_tool: (
        Annotated[str, Strict(), Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
        | None
    ) = None
    model: Text | None = None
    expected_calls: ExactSize | None = None
    ttl: ExactSeconds | None = None


@dataclass(frozen=True, kw_only=True)
class ExternalizeBody(NoOptions):
    value: Annotated[
        Any, _about("The result of a tool: text, any JSON value, or a list of content blocks.")
    ]
    tool: Text | None = None
    call_id: Text | None = None
    policy: PolicyBody | None = None


# Answers


@dataclass(frozen=True)
class Answer:
    @classmethod
    def like(cls, source: object, **others: Any) -> Self:
        """Return an answer with the members of `source` that have the same names, and the
        `others`."""
        names = [one.name for one in fields(cls) if one.name not in others]
        return cls(**{name: getattr(source, name) for name in names}, **others)


@dataclass(frozen=True)
class ErrorDetail:
    code: str
    message: str
    hint: str


@dataclass(frozen=True)
class ErrorAnswer:
    error: ErrorDetail


@dataclass(frozen=True)
class Health:
    status: Literal["ok"]
    version: str


@dataclass(frozen=True)
class Artifact(Answer):
    """One artifact as one session has it."""

    pointer: str
    artifact_id: str
    session_id: str
    name: str | None
    kind: ArtifactKind
    media_type: str
    size_bytes: int
    codec: Literal["text", "json", "bytes"]
    summary: str
    tool: str | None
    call_id: str | None
    producer: str
    parents: list[str]
    created_at: Time
    expires_at: Time | None
    pinned: bool
    granted_by: str | None
    request: str | None

    @classmethod
    def of(cls, ref: Ref) -> Artifact:
        times = {"created_at": iso_time(ref.created), "expires_at": iso_time(ref.expires)}
        return cls.like(ref, parents=list(ref.parents), **times)


@dataclass(frozen=True)
class ArtifactList:
    artifacts: list[Artifact]
    next: Annotated[str | None, _about("Pass it as `after` for the next page; null at the end.")]


@dataclass(frozen=True)
class SessionAnswer(Answer):
    session_id: str
    parent: str | None
    ttl: float | None
    quota_bytes: int | None
    used_bytes: int
    created_at: Time
    used_at: Time
    expires_at: Time | None

    @classmethod
    def of(cls, info: SessionInfo) -> SessionAnswer:
        times = {"created_at": info.created, "used_at": info.used, "expires_at": info.expires()}
        shown = {name: iso_time(moment) for name, moment in times.items()}
        return cls.like(info, quota_bytes=info.quota, **shown)


@dataclass(frozen=True)
class SessionList:
    sessions: list[SessionAnswer]
    next: Annotated[str | None, _about("Pass it as `after` for the next page; null at the end.")]


@dataclass(frozen=True)
class Ended:
    artifacts: Annotated[
        int, _about("Artifacts that were removed: those that no other session has.")
    ]


@dataclass(frozen=True)
class PageAnswer(Answer):
    """One page of an artifact. `shown` says which part of the whole it is."""

    text: str
    shown: str
    pointer: str
    cursor: str | None
    derived: Annotated[
        str | None, _about("Pointer of the whole result, if it was too large for a page.")
    ]
    matches: int | None
    matches_exact: bool
    instead: str | None


@dataclass(frozen=True)
class PreviewAnswer(Answer):
    text: str
    shown: str
    ask: Annotated[str, _about("Arguments of the first read that suits the content.")]
    part: str


@dataclass(frozen=True)
class SearchHit:
    artifact: Artifact
    passage: str
    first_line: int | None
    last_line: int | None
    score: float

    @classmethod
    def of(cls, hit: Hit) -> SearchHit:
        first, last = hit.lines or (None, None)
        return cls(Artifact.of(hit.ref), hit.passage, first, last, hit.score)


@dataclass(frozen=True)
class HitList:
    hits: list[SearchHit]


@dataclass(frozen=True)
class Externalized(Answer):
    """What a model gets of a value."""

    text: Annotated[str, _about("What the model gets, as text.")]
    content: Annotated[Any, _about("The same in the shape of the value.")]
    is_stub: bool
    artifacts: list[Artifact]
    tokens_saved: int
    failure: str | None
    reason: Annotated[
        str | None, _about('Why it left or stayed: "cost", "limit", "rule", "off" or "small".')
    ]


@dataclass(frozen=True)
class Statistics(Answer):
    sessions: int
    refs: int
    artifacts: int
    tombstones: int
    stored_bytes: int
    referenced_bytes: int
    quarantined_bytes: int


@dataclass(frozen=True)
class Collected(Answer):
    dry_run: bool
    refs: int
    artifacts: int
    bytes: int
    orphans: int
    leftover_bytes: int
    compressed: int
    problems: int


def to_json(answer: object) -> bytes:
    """Return the JSON of an answer. It is ASCII, since texts may have lone surrogates."""
    return json.dumps(answer, default=_members, separators=(",", ":")).encode()


def _members(value: object) -> dict[str, Any]:
    if not is_dataclass(value):
        raise TypeError(f"a {type(value).__name__} cannot be part of an answer")
    return {field.name: getattr(value, field.name) for field in fields(value)}


# The place of a page in a list of sessions


def place_after(info: SessionInfo) -> str:
    """Return the cursor for the page of sessions after this one."""
    return (
        base64.urlsafe_b64encode(json.dumps([info.created, info.session_id]).encode())
        .decode()
        .rstrip("=")
    )


def parse_place(cursor: str) -> tuple[float, str]:
    try:
        created, session_id = json.loads(
            base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True)
        )
        if (
            isinstance(created, int | float)
            and not isinstance(created, bool)
            and isinstance(session_id, str)
        ):
            session_id.encode()
            return float(created), session_id
    except (ValueError, TypeError, binascii.Error, RecursionError, OverflowError):
        pass
    raise InvalidArgument("invalid cursor", hint="leave `after` out to start again")
