"""The store over HTTP, as a Starlette application: `store_app`.

Each request is checked in this order: the token, what it allows, the arguments. Then its operation
runs in a thread of `lanes`. Errors are JSON with the stable codes of `errors`; nothing unexpected
is ever shown to a client.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import fields
from functools import cache, partial
from traceback import format_exception
from typing import Any, Final, get_origin, get_type_hints
from urllib.parse import parse_qsl, quote, unquote_to_bytes

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coatcheck import __version__
from coatcheck.content import CHUNK
from coatcheck.errors import CODES, CoatcheckError, InvalidArgument, StoreUnavailable
from coatcheck.http import definitions as d
from coatcheck.http.credentials import Access, Keyring
from coatcheck.http.limits import PATIENCE, Busy, Shares
from coatcheck.http.openapi import HEADER, document
from coatcheck.http.operations import OPERATIONS, Asked, Forbidden, Operation, check_session
from coatcheck.http.serving import bearer, problem, prove
from coatcheck.http.streams import (
    SAFE,
    ClientGone,
    ContentBody,
    Download,
    NotSatisfiable,
    Upload,
    has_tag,
    requested_range,
    whole_body,
)
from coatcheck.ids import clip
from coatcheck.lanes import STREAMS, in_long_thread, in_reading_thread, in_stream_thread, in_thread
from coatcheck.redaction import mask
from coatcheck.store import Store

STALL: Final = 60.0
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE")
EXPOSED: Final = (
    "accept-ranges", "content-digest", "content-range", "etag", "location", "repr-digest",
    "www-authenticate",
)  # fmt: skip
_LOG: Final = logging.getLogger("coatcheck")
_CALLED: Final = "coatcheck.operation"
_MAX_OPTIONS: Final = 100
_UPLOADS: Final = STREAMS  # uploads that are read at once, each with a megabyte in memory
_BODIES: Final = 512 << 20  # bytes of JSON bodies over a megabyte that are in memory at once
_LARGE: Final = 256 << 10  # bytes from which a value is externalized with the long calls
_HEALTH: Final = (
    5.0,
    1.0,
)  # seconds that the store has to answer, and for which its answer is kept
_DEFAULT_TYPES: Final = (
    "",
    "application/octet-stream",
    "application/x-www-form-urlencoded",
    "text/plain",
)
_BROKEN: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CODES: Final = {
    401: "unauthorized", 403: "forbidden", 404: "not_found", 405: "method_not_allowed",
    408: "timeout", 412: "precondition_failed", 415: "unsupported_media_type",
    416: "range_not_satisfiable", 429: "too_many_requests", 503: "busy",
}  # fmt: skip
"""The codes of problems with HTTP itself. All others are in `errors.CODES`."""


def store_app(
    store: Store,
    keyring: Keyring,
    *,
    routes: Iterable[BaseRoute] = (),
    registry: CollectorRegistry | None = None,
    stall: float = STALL,
    patience: float = PATIENCE,
) -> Starlette:
    """Return the application for a store. Tokens come from the keyring; each opens the store of its
    tenant.

    `routes` are added, for example those of a console. `registry` gets the metrics. A client that
    needs more than `stall` seconds for a megabyte is disconnected. An upload waits up to `patience`
    seconds while its tenant's share of uploads is in use. The store stays open: the caller closes
    it."""
    meters = _Meters(registry or CollectorRegistry())
    api = _Api(store, keyring, meters, stall=stall, patience=patience)
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {}).update(dict.fromkeys(operation.methods, operation))
    own = [
        Route(
            re.sub(r"{(\w+)}", r"{\1:segment}", path),
            _Endpoint(api, operations),
            methods=list(operations),
        )
        for path, operations in by_path.items()
    ]
    app = Starlette(
        routes=[*own, *routes],
        middleware=[Middleware(meters.measured), Middleware(_by_raw_path)],
        exception_handlers={
            HTTPException: _http_problem,
            CoatcheckError: lambda request, error: failure(error),
            Exception: lambda request, error: _unexpected(),
        },
    )
    app.router.redirect_slashes = False  # `…/artifacts/` is not a session
    return app


# Errors


def failure(error: Exception) -> Response:
    """Return the response for an expected error."""
    if isinstance(error, CoatcheckError):
        status = CODES[error.code].http
        headers = (
            {"retry_after": "5"} if isinstance(error, StoreUnavailable) and error.may_retry else {}
        )
        return _problem(status, error.code, error.message, error.hint, **headers)
    if isinstance(error, Forbidden):
        return _problem(403, _CODES[403], str(error), "use a token that allows it")
    if isinstance(error, ClientGone):
        return _problem(408, _CODES[408], str(error), error.hint, connection="close")
    if isinstance(error, Busy):
        status = 429 if error.is_own else 503
        return _problem(
            status, _CODES[status], str(error), error.hint, retry_after="5", connection="close"
        )
    raise error


def _problem(status: int, code: str, message: str, hint: str = "", **headers: str) -> Response:
    return problem(status, code, message, hint, **{**SAFE, **headers})


def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: "there is nothing at this path", 405: "this path does not allow the method"}
    hints = {
        404: "the paths are in /api/v1/openapi.json",
        405: f"it allows {(error.headers or {}).get('Allow', '')}",
    }
    code = _CODES.get(error.status_code, "http_error")
    text = message.get(error.status_code, error.detail)
    return _problem(
        error.status_code, code, text, hints.get(error.status_code, ""), **(error.headers or {})
    )


def _unexpected() -> Response:
    return _problem(500, "error", "an unexpected error", "see the server's log")


# Paths


class _Segment(Convertor[str]):
    """One segment of a path, percent-encoded: a name may contain any character, even `/`."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return decoded(value)

    def to_string(self, value: str) -> str:
        return quote(value, safe="")


register_url_convertor("segment", _Segment())


def decoded(text: str) -> str:
    """Decode a percent-encoded text. Raises `InvalidArgument` if it is not UTF-8."""
    try:
        if not _BROKEN.search(text):
            return unquote_to_bytes(text.encode("latin-1")).decode()
    except UnicodeDecodeError:
        pass
    raise InvalidArgument(
        f"{clip(text)} is not percent-encoded UTF-8", hint="encode each part of a path on its own"
    )


def _by_raw_path(app: ASGIApp) -> ASGIApp:
    """Return the application with requests routed by the path as it was sent. In the decoded path,
    `%2F` looks like the end of a segment."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("raw_path") is not None:
            scope["path"] = scope["raw_path"].decode("latin-1")
        await app(scope, receive, send)

    return route


# Metrics


class _Meters:
    """The metrics of a server. No label is chosen by a client: they are names of operations, and
    statuses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        ProcessCollector(registry=registry)
        labels = ("operation", "status")
        self._requests = Counter(
            "coatcheck_http_requests", "Requests that were answered.", labels, registry=registry
        )
        self._seconds = Histogram(
            "coatcheck_http_request_seconds", "Time until the end of the answer.", ("operation",),
            registry=registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0),
        )  # fmt: skip
        self._running = Gauge(
            "coatcheck_http_requests_running", "Requests in progress.", registry=registry
        )
        self.received = Counter(
            "coatcheck_http_received_bytes", "Bytes of artifacts received.", registry=registry
        )
        self._sent = Counter("coatcheck_http_sent_bytes", "Bytes of answers.", registry=registry)
        self.abandoned = Counter(
            "coatcheck_http_abandoned",
            "Requests whose client left or was too slow.",
            registry=registry,
        )

    def measured(self, app: ASGIApp) -> ASGIApp:
        """Return the application with its requests measured."""

        async def measure(scope: Scope, receive: Receive, send: Send) -> None:
            status, began = 0, time.perf_counter()

            async def sent(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                else:
                    self._sent.inc(len(message.get("body", b"")))
                await send(message)

            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            with self._running.track_inprogress():
                try:
                    await app(scope, receive, sent)
                except Exception:
                    status = status or 500
                    raise
                finally:
                    name = scope.get(_CALLED, "none")
                    self._requests.labels(name, str(status or "none")).inc()
                    self._seconds.labels(name).observe(time.perf_counter() - began)

        return measure


# Requests


class _Endpoint:
    """The operations at one path, by method. An ASGI application."""

    def __init__(self, api: _Api, operations: Mapping[str, Operation]) -> None:
        self._api = api
        self._operations = operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = self._operations.get(scope["method"]) or self._operations["GET"]  # for HEAD
        scope[_CALLED] = operation.name
        has_begun = False

        async def sent(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            answer = await self._api.answer(operation, scope, receive)
            await answer(scope, receive, sent)
        except (CoatcheckError, Forbidden, ClientGone, Busy) as error:
            if isinstance(error, ClientGone):
                self._api.meters.abandoned.inc()
            if not has_begun:
                await failure(error)(scope, receive, sent)
            elif isinstance(
                error, CoatcheckError
            ):  # too late for an error: the client gets less than was announced
                _LOG.error("an answer was cut off: %s", error)
        except Exception as error:  # noqa: BLE001 - whatever it is, a client must not see it, nor the log its secrets
            _LOG.error(
                "unexpected error in %s: %s", operation.name, mask("".join(format_exception(error)))
            )
            if not has_begun:
                await _unexpected()(scope, receive, sent)


class _Api:
    """Answers requests: who asks, what for, and in which thread."""

    def __init__(
        self, store: Store, keyring: Keyring, meters: _Meters, *, stall: float, patience: float
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._stall = stall
        self._bodies = Shares(_BODIES, "memory for large bodies", patience=patience)
        self._uploads = Shares(_UPLOADS, "places for uploads", patience=patience)
        self.meters = meters
        self._probe: asyncio.Task[object] | None = None
        self._probed = 0.0
        self._special: dict[str, Callable[[Scope, Receive, Access], Awaitable[ASGIApp]]] = {
            "put_artifact": self._put, "get_artifact": self._get, "metrics": self._metrics,
        }  # fmt: skip

    async def answer(self, operation: Operation, scope: Scope, receive: Receive) -> ASGIApp:
        """Return the answer to a request. Raises the errors that `failure` knows."""
        if operation.name == "healthz":
            return await self._health()
        if operation.name == "openapi":
            return Response(_document(), 200, SAFE, media_type="application/json")
        access = self._keyring.find(bearer(scope))
        if access is None:
            text = "a bearer token is required"
            return _problem(
                401,
                _CODES[401],
                text,
                "send Authorization: Bearer TOKEN",
                www_authenticate="Bearer",
            )
        prove(scope)
        self._check(operation, scope, access)
        if operation.name in self._special:
            return await self._special[operation.name](scope, receive, access)
        kind = operation.query or d.NoOptions
        query = validated(kind, query_of(scope, kind))
        path, headers = dict(scope["path_params"]), Headers(scope=scope)
        if operation.body is None:
            return await self._called(operation, access, path, query, b"")
        if (refusal := _refused_type(headers, json_only=True)) is not None:
            return refusal
        async with AsyncExitStack() as stack:  # a large body keeps its share until it is processed

            async def hold(size: int) -> None:
                await stack.enter_async_context(self._bodies.held(access.tenant, size))

            data = await whole_body(
                receive, headers, most=operation.max_body, stall=self._stall, hold=hold
            )
            return await self._called(operation, access, path, query, data)

    @staticmethod
    def _check(operation: Operation, scope: Scope, access: Access) -> None:
        if operation.scope is not None and not access.allows(operation.scope):
            raise Forbidden(
                f"this needs a token with the scope {operation.scope}; this one has {access.scope}"
            )
        if (session_id := scope["path_params"].get("session_id")) is not None:
            check_session(access, session_id)

    def _store_of(self, access: Access) -> Store:
        return self._store if access.tenant is None else self._store.tenant(access.tenant)

    async def _called(
        self, operation: Operation, access: Access, path: Mapping[str, str], query: Any, data: bytes
    ) -> Response:
        """Run an operation in a thread, and return its answer."""
        call = operation.call
        assert call is not None

        def work() -> Response:
            body = None if operation.body is None else validated(operation.body, parsed(data))
            found = call(Asked(self._store_of(access), access, path, query, body))
            return (
                Response(None, operation.status, SAFE)
                if found is None
                else _answered(operation.status, found)
            )

        if operation.lane == "reading":
            session = await in_thread(lambda: self._store_of(access).session(path["session_id"]))
            return await in_reading_thread(session, path["target"], vars(query), work)
        is_long = operation.lane == "long" or (operation.lane == "by size" and len(data) > _LARGE)
        return await (in_long_thread if is_long else in_thread)(work)

    async def _put(self, scope: Scope, receive: Receive, access: Access) -> ASGIApp:
        """Stream the body into the store. A small body goes in one piece, without a thread that
        waits for it."""
        headers = Headers(scope=scope)
        if (refusal := _refused_type(headers, json_only=False)) is not None:
            return refusal
        given = options_of_headers(headers, d.PutOptions) | query_of(scope, d.PutOptions)
        about = dict(vars(validated(d.PutOptions, given)))
        upload = Upload(receive, stall=self._stall, is_text=about.pop("codec") == "text")
        session_id = scope["path_params"]["session_id"]

        def put(value: object) -> d.Artifact:
            return d.Artifact.of(self._store_of(access).session(session_id).put(value, **about))

        async with self._uploads.held(access.tenant):
            try:
                if await upload.fits(CHUNK):
                    data = await upload.next(CHUNK)
                    stored = await in_thread(
                        put, data.decode() if upload.is_text else io.BytesIO(data)
                    )
                else:
                    stored = await in_stream_thread(put, upload)
            finally:
                upload.abandon()
                self.meters.received.inc(upload.size)
        place = f"/api/v1/sessions/{quote(session_id, safe='')}/artifacts/{stored.pointer}"
        return _answered(201, stored, location=place, etag=f'"{stored.artifact_id}"')

    async def _get(self, scope: Scope, receive: Receive, access: Access) -> ASGIApp:
        """Send content: all of it, a range, or nothing new."""
        options: d.GetOptions = validated(d.GetOptions, query_of(scope, d.GetOptions))
        headers, path = Headers(scope=scope), scope["path_params"]
        session = await in_thread(lambda: self._store_of(access).session(path["session_id"]))
        found = await in_reading_thread(
            session, path["target"], {}, partial(ContentBody.of, session, path["target"])
        )
        try:
            is_head = scope["method"] == "HEAD"
            refusal, span = _preconditions(found, headers, is_head=is_head)
        except BaseException:
            await in_thread(found.close)
            raise
        if refusal is not None:
            await in_thread(found.close)
            return refusal
        return Download(found, span, text=options.text, is_head=is_head, stall=self._stall)

    async def _metrics(self, scope: Scope, receive: Receive, access: Access) -> ASGIApp:
        text = await in_thread(generate_latest, self.meters.registry)
        return Response(
            text, headers={**SAFE, "content-type": CONTENT_TYPE_LATEST, "cache-control": "no-store"}
        )

    async def _health(self) -> Response:
        """Ask the store something small. Only one such check runs at a time, however many clients
        ask for it."""
        patience, kept = _HEALTH
        probe = self._probe
        if probe is None or (probe.done() and time.monotonic() > self._probed + kept):
            self._probe = probe = asyncio.create_task(self._ask_store())
        await asyncio.wait({probe}, timeout=patience)
        if not probe.done():
            raise StoreUnavailable(
                f"the store does not answer within {patience:.0f} s", may_retry=True
            )
        if isinstance(error := probe.exception(), CoatcheckError):
            raise StoreUnavailable(f"the store does not answer: {error.code}", may_retry=True)
        probe.result()
        return _answered(200, d.Health("ok", __version__))

    async def _ask_store(self) -> object:
        try:
            return await in_thread(self._store.session_info, "healthz")
        finally:
            self._probed = time.monotonic()


def _preconditions(
    found: ContentBody, headers: Headers, *, is_head: bool
) -> tuple[Response | None, Any]:
    """Return an answer without content, if the conditions of a request ask for it, and the range
    that it asks for."""
    if "if-match" in headers and not has_tag(headers["if-match"], found.etag, strong=True):
        return _problem(
            412, _CODES[412], "the ETag does not match", "get it again", etag=found.etag
        ), None
    if "if-none-match" in headers and has_tag(headers["if-none-match"], found.etag):
        return Response(None, 304, found.headers()), None
    if is_head or "range" not in headers:
        return None, None
    if "if-range" in headers and not has_tag(headers["if-range"], found.etag, strong=True):
        return None, None
    try:
        return None, requested_range(headers["range"], found.size)
    except NotSatisfiable:
        text, place = f"the content has {found.size} bytes", f"bytes */{found.size}"
        return _problem(
            416, _CODES[416], text, "ask for a range within it", content_range=place
        ), None


def _refused_type(headers: Headers, *, json_only: bool) -> Response | None:
    """Return the refusal of a body with an encoding or a type that is not accepted."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        return _problem(
            415, _CODES[415], "the body must not be encoded", "send it without Content-Encoding"
        )
    if json_only and kind and kind != "application/json" and not kind.endswith("+json"):
        return _problem(
            415, _CODES[415], "the body must be JSON", "send Content-Type: application/json"
        )
    return None


@cache
def _document() -> bytes:
    return d.to_json(document())


def _answered(status: int, answer: object, **headers: str) -> Response:
    given = {**SAFE, "cache-control": "no-store", **headers}
    return Response(d.to_json(answer), status, given, media_type="application/json")


# Arguments


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _lists(kind: type) -> frozenset[str]:
    """The members of a type of options that may be repeated."""
    hints = get_type_hints(kind)
    return frozenset(one.name for one in fields(kind) if get_origin(hints[one.name]) is list)


def validated(kind: type, given: object) -> Any:
    """Return arguments as a value of their type. Raises `InvalidArgument`, which does not quote
    them."""
    try:
        return _adapter(kind).validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        names = {one.name for part in (kind, d.PolicyBody) for one in fields(part)}
        place = ".".join(str(one) for one in first["loc"] if one in names)
        if first["type"] == "unexpected_keyword_argument":
            raise InvalidArgument(
                f"unknown argument {clip(str(first['loc'][-1]))}",
                hint="it takes " + (", ".join(one.name for one in fields(kind)) or "none"),
            ) from None
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidArgument(
            f"{place}: {message}" if place else message, hint="see /api/v1/openapi.json"
        ) from None


def query_of(scope: Scope, kind: type) -> dict[str, Any]:
    """The arguments of a query string. Only those that are lists may be given several times."""
    try:
        pairs = parse_qsl(
            scope["query_string"].decode("ascii"),
            keep_blank_values=True,
            max_num_fields=_MAX_OPTIONS,
            errors="strict",
        )
    except ValueError as error:
        raise InvalidArgument(
            "the query string is not valid", hint="percent-encode each argument"
        ) from error
    given: dict[str, Any] = {}
    for name, value in pairs:
        if name in _lists(kind):
            given.setdefault(name, []).append(value)
        elif name in given:
            raise InvalidArgument(f"{clip(name)} was given twice")
        else:
            given[name] = value
    return given


def options_of_headers(headers: Headers, kind: type) -> dict[str, Any]:
    """The arguments of a put that are headers, percent-encoded. Content-Type is the media type,
    unless it is one that clients send by default."""
    given: dict[str, Any] = {}
    for one in fields(kind):
        value = headers.get(HEADER + one.name.replace("_", "-"))
        if value is not None and one.name not in _lists(kind):
            given[one.name] = decoded(value)
    media_type = headers.get("content-type", "")
    if media_type.partition(";")[0].strip().lower() not in _DEFAULT_TYPES:
        given.setdefault("media_type", media_type)
    return given


def parsed(data: bytes) -> object:
    """The JSON of a body; an empty one is an empty object."""

    def refuse(constant: str) -> object:
        raise ValueError(constant)

    try:
        return json.loads(data, parse_constant=refuse) if data else {}
    except (ValueError, RecursionError):
        raise InvalidArgument(
            "the body is not valid JSON", hint="send a JSON object in UTF-8"
        ) from None
