"""The console as routes of the HTTP server: who may look, forms, and pages.

A visitor logs in with a token of the server, or with the key of a printed address that works once.
The browser then has an opaque cookie; the token stays in this process and is looked up again with
each request, so that revoking a token ends its visits. A GET changes nothing in the store. A POST
needs the form's own secret. No page runs, loads or renders anything that is in a store: text is
text, and pictures come from a path with a policy of their own.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from importlib.resources import files
from traceback import format_exception
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode

import jinja2
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from coatcheck import __version__
from coatcheck.console import views
from coatcheck.console.views import Visit
from coatcheck.display import visible
from coatcheck.errors import CODES, CoatcheckError, InvalidArgument, NotFound
from coatcheck.http.credentials import Keyring, digest_of_token
from coatcheck.http.serving import is_same, prove
from coatcheck.http.streams import SAFE, ClientGone, ContentBody, Download, whole_body
from coatcheck.ids import is_pointer
from coatcheck.lanes import in_long_thread, in_reading_thread, in_thread
from coatcheck.redaction import mask
from coatcheck.store import Store

ROOT: Final = "/console"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
_HEADERS: Final = {
    "content-security-policy": POLICY, "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin", "cache-control": "no-store",
    "vary": "cookie, hx-request",
}  # fmt: skip
_STATIC: Final = {
    "style.css": "text/css; charset=utf-8", "console.js": "text/javascript; charset=utf-8",
    "htmx.min.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml",
}  # fmt: skip
_VISITS: Final = 1_000
_IDLE: Final = 12 * 3_600.0  # seconds after which a visitor must log in again
_FORM: Final = 64 << 10  # bytes
_STALL: Final = 30.0
_EVENTS: Final = 32  # visitors who watch at once
_WATCHED: Final = 20.0  # seconds of one watch; browsers connect again
_LOOK: Final = 1.0  # seconds between two looks at the store
_READ: Final = ("lines", "chars", "grep", "query", "diff", "cursor")
_FLAGS: Final = ("ignore_case", "invert", "literal", "exact")
_LOG: Final = logging.getLogger("coatcheck")


def console_routes(
    store: Store, keyring: Keyring, *, key: str | None = None, token: str = ""
) -> list[BaseRoute]:
    """Return the routes of the console. `key` logs in once, with the access of `token`."""
    return _Site(store, keyring, key, token).routes()


# Visitors


@dataclass(slots=True)
class _Login:
    token: str
    seen: float
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24))


class _Visitors:
    """Who is logged in, by the digest of their cookie."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._known: dict[str, _Login] = {}

    def enter(self, token: str) -> str | None:
        """Return a new cookie for a token, or None if it is unknown or opens no store."""
        access = self._keyring.find(token)
        if access is None or not access.allows("read"):
            return None
        cookie, now = secrets.token_urlsafe(32), time.monotonic()
        self._known = {name: one for name, one in self._known.items() if now - one.seen < _IDLE}
        while len(self._known) >= _VISITS:
            del self._known[min(self._known, key=lambda name: self._known[name].seen)]
        self._known[digest_of_token(cookie)] = _Login(token, now)
        return cookie

    def find(self, cookie: str | None) -> _Login | None:
        found = self._known.get(digest_of_token(cookie)) if cookie else None
        if found is None or time.monotonic() - found.seen > _IDLE:
            return None
        found.seen = time.monotonic()
        return found

    def leave(self, cookie: str | None) -> None:
        self._known.pop(digest_of_token(cookie or ""), None)


def _cookie_name(request: Request) -> str:
    """The name of the cookie. It contains the port: browsers send cookies to all ports of a
    host."""
    default = 443 if request.url.scheme == "https" else 80
    return f"coatcheck-console-{request.url.port or default}"


class _Refused(Exception):
    """A request that is answered with an error page."""

    def __init__(self, status: int, title: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.status, self.title, self.message, self.hint = status, title, message, hint


Handler = Callable[[Request, Visit], Awaitable[ASGIApp]]


class _Site:
    def __init__(self, store: Store, keyring: Keyring, key: str | None, token: str) -> None:
        self._store = store
        self._keyring = keyring
        self._key = key
        self._token = token
        self._visitors = _Visitors(keyring)
        self._watching = 0

    def routes(self) -> list[BaseRoute]:
        session = f"{ROOT}/sessions/{{session_id:segment}}"
        part = f"{session}/{{group}}/{{number:int}}/{{side}}/{{part:int}}"
        artifact = f"{session}/artifacts/{{target:segment}}"
        pages: list[tuple[str, Handler]] = [
            (ROOT, _sessions), (f"{ROOT}/", _sessions), (f"{ROOT}/search", _search),
            (f"{ROOT}/savings",
             _view("savings", views.savings, in_long_thread, days=partial(_whole, default=30))),
            (f"{ROOT}/live", _view("live", views.live)), (f"{ROOT}/events", self._events),
            (session, _view("session", views.conversation, after=_whole)),
            (f"{session}/context", _view("context", views.context)),
            (f"{session}/calls/{{number:int}}", _view("call", views.call)),
            (part, _view("body", views.body)),
            (f"{session}/artifacts",
             _view("artifacts", views.artifacts, after=str, kind=str, name=str)),
            (artifact, _artifact),
            (f"{artifact}/lineage", _view("lineage", views.lineage, in_long_thread)),
            (f"{artifact}/content", _content), (f"{artifact}/picture", _picture),
        ]  # fmt: skip
        forms: list[tuple[str, Handler]] = [
            *((f"{artifact}/{verb}", partial(_change, verb=verb)) for verb in ("pin", "unpin",
                                                                               "forget")),
            (f"{ROOT}/logout", self._logout), (f"{part}/secrets", _view("body", views.body)),
            (f"{artifact}/secrets", _artifact),
        ]  # fmt: skip
        return [
            Route(f"{ROOT}/static/{{name}}", _static),
            Route(f"{ROOT}/login", self._login, methods=["GET", "POST"]),
            Route(f"{ROOT}/enter", self._enter),
            *(Route(path, self._page(handler)) for path, handler in pages),
            *(Route(path, self._page(handler), methods=["POST"]) for path, handler in forms),
        ]

    # Access

    def _page(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Any:
            try:
                login = self._visitors.find(request.cookies.get(_cookie_name(request)))
                access = None if login is None else self._keyring.find(login.token)
                if login is None or access is None or not access.allows("read"):
                    return _to_login(request)
                prove(request.scope)
                store = (
                    self._store
                    if access.tenant is None
                    else await in_thread(self._store.tenant, access.tenant)
                )
                visit = Visit(store, access, login.csrf, is_unmasked=request.method == "POST")
                if request.method == "POST":
                    form = await _form(request)
                    if not is_same(form.get("csrf"), login.csrf):
                        raise _Refused(
                            403,
                            "Refused",
                            "the form expired or is from another page",
                            "reload the page",
                        )
                    request.state.form = form
                return await handler(request, visit)
            except _Refused as error:
                return _error_page(request, error)
            except ClientGone:
                return Response(None, 408)
            except CoatcheckError as error:
                title = "Not found" if isinstance(error, NotFound) else "Failed"
                refused = _Refused(CODES[error.code].http, title, error.message, error.hint or "")
                return _error_page(request, refused)
            except Exception as error:  # noqa: BLE001 - whatever it is, a visitor must not see it, nor the log its secrets
                _LOG.error(
                    "unexpected error in the console: %s", mask("".join(format_exception(error)))
                )
                return _error_page(
                    request, _Refused(500, "Error", "an unexpected error", "see the server's log")
                )

        return answer

    async def _login(self, request: Request) -> Response:
        if request.method == "GET":
            return _rendered(
                request, None, "login.html", {"next": _local(request.query_params.get("next", ""))}
            )
        try:
            form = await _form(request)
        except (CoatcheckError, ClientGone):
            return Response(None, 400, _HEADERS)
        cookie = self._visitors.enter(form.get("token", "").strip())
        target = _local(form.get("next", ""))
        if cookie is None:
            values = {"next": target, "error": "this token is unknown, or only for metrics"}
            return _rendered(request, None, "login.html", values, status=401)
        return _with_cookie(request, RedirectResponse(target or ROOT, 303, _HEADERS), cookie)

    async def _enter(self, request: Request) -> Response:
        """Log in with the key of the printed address, which works once. The page continues by
        itself: a redirect would arrive without the cookie if the address was opened from another
        site."""
        given, key = request.query_params.get("key"), self._key
        if key is None or not is_same(given, key):
            return _to_login(request)
        cookie = self._visitors.enter(self._token)
        if cookie is None:
            return _to_login(request)
        self._key = None
        return _with_cookie(request, _rendered(request, None, "enter.html", {}), cookie)

    async def _logout(self, request: Request, visit: Visit) -> Response:
        self._visitors.leave(request.cookies.get(_cookie_name(request)))
        answer = RedirectResponse(f"{ROOT}/login", 303, _HEADERS)
        answer.delete_cookie(_cookie_name(request), path=ROOT)
        return answer

    async def _events(self, request: Request, visit: Visit) -> Response:
        """Send an event when something was recorded. The page then loads it.

        A watch begins where the page or the watch before it ended, so that nothing recorded in
        between is missed.
        """
        if self._watching >= _EVENTS:
            raise _Refused(503, "Busy", "too many visitors are watching", "reload later")

        last = _since(request)

        async def stream() -> AsyncIterator[bytes]:
            nonlocal last
            self._watching += 1
            try:
                until = time.monotonic() + _WATCHED
                yield f"retry: 1000\nid: {last}\n\n".encode()
                while time.monotonic() < until:
                    await asyncio.sleep(_LOOK)
                    found = await in_thread(views.recent_sessions, visit, last)
                    if found:
                        last = found[0].used
                        yield f"id: {last}\nevent: changed\ndata: {len(found)}\n\n".encode()
                    else:
                        yield b": nothing new\n\n"
            finally:
                self._watching -= 1

        return StreamingResponse(stream(), 200, _HEADERS, media_type="text/event-stream")


# Pages


def _view(
    template: str,
    values: Callable[..., dict[str, Any]],
    run: Callable[..., Awaitable[dict[str, Any]]] = in_thread,
    **query: Callable[[str], object],
) -> Handler:
    """Return the handler of a page whose values depend on the path, and on these arguments of the
    query."""

    async def handler(request: Request, visit: Visit) -> Response:
        given = {name: read(request.query_params.get(name, "")) for name, read in query.items()}
        found = await run(values, visit, **request.path_params, **given)
        return _rendered(request, visit, f"{template}.html", found)

    return handler


async def _sessions(request: Request, visit: Visit) -> Response:
    given = request.query_params
    if is_pointer(wanted := given.get("contains", "").strip()):
        return await _opened(visit, wanted)
    values = await in_thread(
        views.sessions,
        visit,
        contains=wanted,
        after=given.get("after", ""),
        own=given.get("own") == "1",
    )
    return _rendered(request, visit, "sessions.html", values)


async def _opened(visit: Visit, pointer: str) -> Response:
    """Go to the artifact of a pointer, wherever it is."""
    session_id = await in_long_thread(views.find_pointer, visit, pointer)
    if session_id is None:
        raise _Refused(
            404, "Not found", f"no session that you may see has {pointer}", "it may have expired"
        )
    return RedirectResponse(link("artifact", session_id, pointer), 303, _HEADERS)


async def _search(request: Request, visit: Visit) -> Response:
    q = request.query_params.get("q", "")[:500]
    if is_pointer(q.strip()):
        return await _opened(visit, q.strip())
    values = await in_long_thread(
        views.search, visit, q=q, after=request.query_params.get("after", "")
    )
    return _rendered(request, visit, "search.html", values)


async def _artifact(request: Request, visit: Visit) -> Response:
    session_id, target = request.path_params["session_id"], request.path_params["target"]
    given: Mapping[str, str] = (
        request.state.form if request.method == "POST" else request.query_params
    )
    asked: dict[str, Any] = {name: given[name] for name in _READ if given.get(name)}
    asked |= {name: True for name in _FLAGS if given.get(name)}
    session = await in_thread(visit.session, session_id)
    work = partial(views.artifact, visit, session_id, target, asked)
    values = await in_reading_thread(session, target, asked, work)
    return _rendered(request, visit, "artifact.html", values)


async def _content(request: Request, visit: Visit) -> ASGIApp:
    """The bytes, for saving: never shown by the browser."""
    given = request.path_params
    session = await in_thread(visit.session, given["session_id"])
    found = await in_thread(ContentBody.of, session, given["target"])
    return Download(found, None, text=False, is_head=request.method == "HEAD", stall=_STALL * 2)


async def _picture(request: Request, visit: Visit) -> Response:
    """A picture, under a policy that runs nothing, in case it is opened by itself."""
    given = request.path_params

    def picture() -> tuple[str, bytes]:
        session = visit.session(given["session_id"])
        ref = session.ref(given["target"])
        kind = None if ref is None else views.picture_type(session, ref)
        if ref is None or kind is None:
            raise NotFound("this artifact is not a picture that can be shown", hint="download it")
        with session.open(ref) as source:
            return kind, source.read()

    kind, data = await in_thread(picture)
    return Response(data, 200, {**SAFE, "cache-control": "private, no-cache", "content-type": kind})


# Forms


async def _change(request: Request, visit: Visit, verb: str) -> Response:
    session_id, target = request.path_params["session_id"], request.path_params["target"]
    if not visit.may_write:
        raise _Refused(
            403, "Not allowed", "this token may only read", "log in with a token that may write"
        )

    def change() -> None:
        visit.info(session_id)
        getattr(visit.store.session(session_id), verb)(target)

    await in_thread(change)
    place = (
        link("artifacts", session_id) if verb == "forget" else link("artifact", session_id, target)
    )
    return RedirectResponse(place, 303, _HEADERS)


# Answers


def _whole(given: str, default: int = 0) -> int:
    """Return the number in a text, or the default."""
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 17 else default


def _since(request: Request) -> float:
    """Return the time a watch starts from: a browser's last event, else the page's own time; at
    most a day ago."""
    given = request.headers.get("last-event-id") or request.query_params.get("since", "")
    now = time.time()
    try:
        return min(now, max(now - 86_400.0, float(given[:30])))
    except ValueError:
        return now


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises `TooLarge`, `InvalidArgument` and `ClientGone`."""
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise InvalidArgument("this is not a form", hint="use the page")
    data = await whole_body(request.receive, request.headers, most=_FORM, stall=_STALL)
    try:
        return dict(parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=50))
    except ValueError as error:
        raise InvalidArgument("the form cannot be read", hint="reload the page") from error


def _local(target: str) -> str:
    """Return a path of the console, '' for anything else: a form must not lead to another site."""
    is_ours = target == ROOT or target.startswith((f"{ROOT}/", f"{ROOT}?"))
    return target if is_ours and target.isprintable() and "\\" not in target else ""


def _to_login(request: Request) -> Response:
    if request.headers.get("hx-request"):
        return Response(None, 401, {**_HEADERS, "hx-redirect": f"{ROOT}/login"})
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    here = (
        path
        if request.method == "GET" and not path.startswith((f"{ROOT}/enter", f"{ROOT}/events"))
        else ""
    )
    query = f"?{urlencode({'next': here})}" if _local(here) not in ("", ROOT) else ""
    return RedirectResponse(f"{ROOT}/login{query}", 303, _HEADERS)


def _with_cookie(request: Request, answer: Response, cookie: str) -> Response:
    is_secure = request.url.scheme == "https"
    answer.set_cookie(
        _cookie_name(request), cookie, path=ROOT, httponly=True, samesite="strict", secure=is_secure
    )
    return answer


def _error_page(request: Request, error: _Refused) -> Response:
    values = {
        "title": error.title,
        "message": error.message,
        "hint": error.hint,
        "status": error.status,
    }
    return _rendered(request, None, "error.html", values, status=error.status)


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _STATIC:
        return Response(None, 404, _HEADERS)
    return Response(
        _asset(name), 200, {**_HEADERS, "cache-control": "no-cache", "content-type": _STATIC[name]}
    )


@cache
def _asset(name: str) -> bytes:
    return files("coatcheck.console").joinpath("static", name).read_bytes()


def _rendered(
    request: Request,
    visit: Visit | None,
    template: str,
    values: Mapping[str, Any],
    *,
    status: int = 200,
) -> Response:
    """Return a page; for htmx, only the part that it asks for."""
    is_part = bool(request.headers.get("hx-request")) and not request.headers.get("hx-boosted")
    given = {
        "visit": visit,
        "path": request.url.path,
        "is_part": is_part,
        "now": time.time(),
        **values,
    }
    text = _templates().get_template(template).render(given)
    return Response(
        text.encode("utf-8", "backslashreplace"),
        status,
        _HEADERS,
        media_type="text/html; charset=utf-8",
    )


@cache
def _templates() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("coatcheck.console"), autoescape=True, finalize=_final,
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, auto_reload=False,
    )  # fmt: skip
    found.globals |= {"link": link, "version": __version__, "root": ROOT}
    found.filters |= {
        "size": size,
        "age": age,
        "when": when,
        "count": count,
        "kilo": kilo,
        "part": share,
    }
    found.filters["svg"] = Markup  # only for our own plots
    return found


def _final(value: Any) -> Any:
    """Make control characters and bidirectional marks in every text visible. The markup of
    templates stays."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def link(page: str, session_id: str = "", target: str = "", **query: object) -> str:
    """Return the path of a page."""
    place = f"{ROOT}/sessions/{quote(session_id, safe=':')}" if session_id else ROOT
    if page in ("artifact", "lineage", "content", "picture", "pin", "unpin", "forget", "secrets"):
        place += f"/artifacts/{quote(target, safe=':')}" + (
            "" if page == "artifact" else f"/{page}"
        )
    elif page not in ("sessions", "session"):
        place += f"/{page}"
    given = {name: value for name, value in query.items() if value not in ("", None, False, 0)}
    return place + (f"?{urlencode(given)}" if given else "")


def size(number: int) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if number >= unit:
            return f"{number / unit:.{0 if number >= 100 * unit else 1}f} {name}"
    return f"{number} B"


def kilo(number: float | None) -> str:
    """A number in at most five characters."""
    if number is None:
        return "–"
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            return f"{number / unit:.{0 if abs(number) / unit >= 100 else 1}f}{name}"
    return f"{number:.0f}"


def count(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"


def share(number: float | None) -> str:
    return "–" if number is None else f"{number:.0%}"


def age(seconds: float, now: float) -> str:
    passed = max(0.0, now - seconds)
    units = ((86_400, "d"), (3_600, "h"), (60, "min"))
    unit, name = next(((unit, name) for unit, name in units if passed >= unit), (1, "s"))
    return f"{int(passed // unit)} {name}"


def when(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return "–"
