"""The operations of the HTTP API: one table that defines the routes, their validation and the
OpenAPI document.

Most operations are a function of `Asked` that runs in a thread and returns an answer of
`definitions`. Uploads, content and operations on the server itself are in `application`; the table
has only their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from coatcheck.errors import CoatcheckError, InvalidArgument, NotFound
from coatcheck.externalize import Policy, ResultSource, configured
from coatcheck.http import definitions as d
from coatcheck.http.credentials import Access, TokenScope
from coatcheck.ids import clip
from coatcheck.session import Session
from coatcheck.storage import ANY_SESSION, SessionFilter, SessionInfo
from coatcheck.store import Store

Lane = Literal["short", "long", "reading", "by size"]
API: Final = "/api/v1"
SESSIONS: Final = f"{API}/sessions"
SESSION: Final = f"{SESSIONS}/{{session_id}}"
ARTIFACTS: Final = f"{SESSION}/artifacts"
ARTIFACT: Final = f"{ARTIFACTS}/{{target}}"
JSON_BODY: Final = 1 << 20
VALUE_BODY: Final = 64 << 20
_LIMITS: Final = ("max_tokens", "max_chars", "max_bytes")


class Forbidden(Exception):
    """The token does not allow this. The message says what it lacks."""


def check_session(access: Access, session_id: str) -> None:
    """Check that a token covers a session."""
    if not access.covers(session_id):
        raise Forbidden(f"this token is only for sessions {access.limits}")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to an operation, after its validation: the store of the token's tenant, and the
    arguments."""

    store: Store
    access: Access
    path: Mapping[str, str]
    query: Any
    body: Any

    @property
    def session(self) -> Session:
        return self.store.session(self.path["session_id"])

    @property
    def target(self) -> str:
        return self.path["target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation. `scope` is what its token must allow, None if it needs none; `answers` are
    types by status, None for an answer that is not JSON; `errors` are those that it may return
    besides the common ones."""

    name: str
    methods: tuple[str, ...]
    path: str
    summary: str
    scope: TokenScope | None
    answers: Mapping[int, type | None]
    query: type | None = None
    body: type | None = None
    max_body: int = JSON_BODY
    call: Callable[[Asked], object] | None = None
    lane: Lane = "short"
    streams_in: bool = False
    streams_out: bool = False
    errors: tuple[int, ...] = ()

    @property
    def status(self) -> int:
        return next(iter(self.answers))


# Sessions


def list_sessions(asked: Asked) -> d.SessionList:
    options: d.SessionsOptions = asked.query
    prefix, own = options.prefix, asked.access.sessions
    if not prefix.startswith(own):
        if not own.startswith(prefix):
            return d.SessionList([], None)
        prefix = own
    shown, following = covered_sessions(
        asked.store, asked.access, prefix=prefix, after=options.after, limit=options.limit
    )
    return d.SessionList(list(map(d.SessionAnswer.of, shown)), following)


def covered_sessions(
    store: Store,
    access: Access,
    *,
    prefix: str,
    after: str | None,
    limit: int,
    wanted: SessionFilter = ANY_SESSION,
) -> tuple[list[SessionInfo], str | None]:
    """Return a page of the sessions that a token covers, newest first, and the cursor of the next
    page."""
    before = None if after is None else d.parse_place(after)
    found: list[SessionInfo] = []
    while len(found) <= limit:
        page = store.session_page(prefix=prefix, before=before, limit=limit + 1, wanted=wanted)
        found += [info for info in page if access.covers(info.session_id)]
        if len(page) <= limit:
            break
        before = page[-1].created, page[-1].session_id
    return found[:limit], d.place_after(found[limit - 1]) if len(found) > limit else None


def open_session(asked: Asked) -> d.SessionAnswer:
    options: d.SessionBody = asked.body
    session_id, given = asked.path["session_id"], dict[str, Any]()
    if options.parent is not None:
        check_session(asked.access, options.parent)
        given["parent"] = options.parent
    if options.ttl is not None:
        given["ttl"] = None if options.ttl == "none" else options.ttl
    if options.quota_bytes is not None:
        if not asked.access.allows("admin"):
            raise Forbidden("changing a quota needs a token with the scope admin")
        given["quota_bytes"] = None if options.quota_bytes == "none" else options.quota_bytes
    asked.store.session(session_id, create=True, **given)
    return show_session(asked)


def show_session(asked: Asked) -> d.SessionAnswer:
    info = asked.store.session_info(asked.path["session_id"])
    if info is None:
        raise NotFound(
            f"no session {clip(asked.path['session_id'])}", hint="it begins with its first put"
        )
    return d.SessionAnswer.of(info)


def end_session(asked: Asked) -> d.Ended:
    return d.Ended(asked.session.end())


# Artifacts


def list_artifacts(asked: Asked) -> d.ArtifactList:
    options: d.ListOptions = asked.query
    session, limit = asked.session, options.limit
    if options.name is not None or options.kind is not None:
        if options.after is not None:
            raise InvalidArgument(
                "after cannot be combined with name or kind", hint="raise limit instead"
            )
        found = session.list(name=options.name, kind=options.kind, limit=limit)
        return d.ArtifactList(list(map(d.Artifact.of, found)), None)
    try:
        found = session.artifacts(after=options.after, limit=limit + 1)
    except CoatcheckError as error:
        if options.after is None:
            raise
        raise InvalidArgument("invalid cursor", hint="leave `after` out to start again") from error
    page = found[:limit]
    return d.ArtifactList(
        list(map(d.Artifact.of, page)), page[-1].artifact_id if found[limit:] else None
    )


def show_artifact(asked: Asked) -> d.Artifact:
    session = asked.session
    ref = session.ref(asked.target)
    if ref is None:
        session.open(asked.target).close()  # raises the precise error
        raise NotFound(f"no artifact found for {clip(asked.target)}")
    return d.Artifact.of(ref)


def forget_artifact(asked: Asked) -> None:
    if not asked.session.forget(asked.target):
        raise NotFound(f"no artifact found for {clip(asked.target)}")


def read_artifact(asked: Asked) -> d.PageAnswer:
    return d.PageAnswer.like(asked.session.read(asked.target, **vars(asked.query)))


def preview_artifact(asked: Asked) -> d.PreviewAnswer:
    return d.PreviewAnswer.like(asked.session.preview(asked.target, limit=asked.query.limit))


def grant_artifact(asked: Asked) -> d.Artifact:
    check_session(asked.access, asked.body.to)
    return d.Artifact.of(asked.session.grant(asked.target, to=asked.body.to))


def pin_artifact(asked: Asked) -> d.Artifact:
    return d.Artifact.of(asked.session.pin(asked.target))


def unpin_artifact(asked: Asked) -> d.Artifact:
    return d.Artifact.of(asked.session.unpin(asked.target))


def search(asked: Asked) -> d.HitList:
    return d.HitList(
        list(map(d.SearchHit.of, asked.session.search(asked.query.q, limit=asked.query.limit)))
    )


def externalize(asked: Asked) -> d.Externalized:
    body: d.ExternalizeBody = asked.body
    policy = _policy(configured(asked.store.settings), body.policy)
    outcome = asked.session.externalize(
        body.value, tool=body.tool, call_id=body.call_id, policy=policy, source=ResultSource("http")
    )
    artifacts = list(map(d.Artifact.of, outcome.refs))
    return d.Externalized.like(
        outcome, artifacts=artifacts, reason=outcome.why.reason if outcome.why else None
    )


def _policy(policy: Policy, body: d.PolicyBody | None) -> Policy:
    changes = (
        {name: value for name, value in vars(body).items() if value is not None} if body else {}
    )
    return (
        policy.limited(**changes) if changes.keys() & set(_LIMITS) else replace(policy, **changes)
    )


# The store


def statistics(asked: Asked) -> d.Statistics:
    return d.Statistics.like(asked.store.stats())


def collect(asked: Asked) -> d.Collected:
    report = asked.store.collect(dry_run=asked.query.dry_run)
    return d.Collected.like(report, problems=len(report.problems))


_FOUND: Final = (404, 409, 410)  # errors of an operation that looks up an artifact
_FULL: Final = (413, 507)
_SLOW: Final = (408, 429, 503)  # errors of an operation whose body may be large
OPERATIONS: Final = (
    Operation(name="healthz", methods=("GET",), path="/healthz", scope=None,
              answers={200: d.Health},
              summary="Whether the server can reach its store.", errors=(503,)),
    Operation(name="metrics", methods=("GET",), path="/metrics", scope="metrics",
              answers={200: None},
              summary="Counts and times of requests, in the format of Prometheus."),
    Operation(name="openapi", methods=("GET",), path=f"{API}/openapi.json", scope=None,
              answers={200: None},
              summary="This document."),
    Operation(name="statistics", methods=("GET",), path=f"{API}/stats", scope="admin",
              answers={200: d.Statistics},
              summary="Count sessions, refs, artifacts, tombstones and bytes.", call=statistics,
              lane="long"),
    Operation(name="collect", methods=("POST",), path=f"{API}/collect", scope="admin",
              answers={200: d.Collected},
              query=d.CollectOptions, summary="Remove expired artifacts and compress cold content.",
              call=collect,
              lane="long"),
    Operation(name="list_sessions", methods=("GET",), path=SESSIONS, scope="read",
              answers={200: d.SessionList},
              query=d.SessionsOptions, summary="List sessions, newest first.", call=list_sessions),
    Operation(name="show_session", methods=("GET",), path=SESSION, scope="read",
              answers={200: d.SessionAnswer},
              summary="Show the limits, times and size of a session.", call=show_session,
              errors=(404,)),
    Operation(name="open_session", methods=("PUT",), path=SESSION, scope="write",
              answers={200: d.SessionAnswer},
              body=d.SessionBody, summary="Create a session, or change its options.",
              call=open_session),
    Operation(name="end_session", methods=("DELETE",), path=SESSION, scope="write",
              answers={200: d.Ended},
              summary="Forget everything in a session.", call=end_session, lane="long"),
    Operation(name="search", methods=("GET",), path=f"{SESSION}/search", scope="read",
              answers={200: d.HitList},
              query=d.SearchOptions, summary="Search names, tools, summaries and content.",
              call=search, lane="long"),
    Operation(name="externalize", methods=("POST",), path=f"{SESSION}/externalize", scope="write",
              answers={200: d.Externalized}, body=d.ExternalizeBody, max_body=VALUE_BODY,
              lane="by size",
              summary="Return what a model should get of a tool's result: the value, or a stub.",
              call=externalize,
              errors=_SLOW),
    Operation(name="list_artifacts", methods=("GET",), path=ARTIFACTS, scope="read",
              answers={200: d.ArtifactList},
              query=d.ListOptions, summary="List the artifacts that a session sees, newest first.",
              call=list_artifacts),
    Operation(name="put_artifact", methods=("POST", "PUT"), path=ARTIFACTS, scope="write",
              answers={201: d.Artifact},
              query=d.PutOptions, summary="Store the body as an artifact.", streams_in=True,
              errors=(*_FULL, *_SLOW, 415)),
    Operation(name="get_artifact", methods=("GET", "HEAD"), path=ARTIFACT, scope="read",
              answers={200: None, 206: None, 304: None}, query=d.GetOptions, streams_out=True,
              summary="Get the bytes of an artifact, or of a part of a JSON artifact.",
              errors=(*_FOUND, 412, 413, 416)),
    Operation(name="forget_artifact", methods=("DELETE",), path=ARTIFACT, scope="write",
              answers={204: None},
              summary="Drop an artifact from a session.", call=forget_artifact, errors=_FOUND),
    Operation(name="show_artifact", methods=("GET",), path=f"{ARTIFACT}/ref", scope="read",
              answers={200: d.Artifact},
              summary="Show the record of an artifact.", call=show_artifact, errors=_FOUND),
    Operation(name="read_artifact", methods=("GET",), path=f"{ARTIFACT}/read", scope="read",
              answers={200: d.PageAnswer}, query=d.ReadOptions,
              summary="Read one page of an artifact.",
              call=read_artifact, lane="reading", errors=(*_FOUND, *_FULL, 501)),
    Operation(name="preview_artifact", methods=("GET",), path=f"{ARTIFACT}/preview", scope="read",
              answers={200: d.PreviewAnswer}, query=d.PreviewOptions,
              summary="Preview an artifact.",
              call=preview_artifact, errors=_FOUND),
    Operation(name="grant_artifact", methods=("POST",), path=f"{ARTIFACT}/grant", scope="write",
              answers={200: d.Artifact}, body=d.GrantBody,
              summary="Let another session see an artifact.",
              call=grant_artifact, errors=(*_FOUND, *_FULL)),
    Operation(name="pin_artifact", methods=("PUT",), path=f"{ARTIFACT}/pin", scope="write",
              answers={200: d.Artifact},
              summary="Keep an artifact regardless of its time to live.", call=pin_artifact,
              errors=_FOUND),
    Operation(name="unpin_artifact", methods=("DELETE",), path=f"{ARTIFACT}/pin", scope="write",
              answers={200: d.Artifact}, summary="Let a pinned artifact expire again.",
              call=unpin_artifact,
              errors=_FOUND),
)  # fmt: skip
