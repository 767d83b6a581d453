"""Who may see and change what, over plain HTTP."""

from __future__ import annotations

import html
import re
import subprocess
import time
from pathlib import Path

import httpx2
import pytest

import coatcheck
from coatcheck import Store
from coatcheck.console.site import console_routes
from coatcheck.console.views import Visit
from coatcheck.http.credentials import Access, Keyring, add_token
from tests import warm
from tests.console.visitors import (
    ACME,
    KEY,
    METRICS,
    OTHER,
    READER,
    SOME,
    TOKEN,
    WRITER,
    Visitor,
    checked,
    in_session,
    opened_console,
    site,
)
from tests.http.servers import WAIT, environment, running, serve

PLACES = (
    "",
    "/live",
    "/savings",
    "/search?q=x",
    "/events",
    in_session("support-1"),
    in_session("support-1", "/artifacts"),
)


def test_pages_need_a_login(url: str) -> None:
    stranger = Visitor(url, None)
    for place in PLACES:
        answer = stranger.get(place)
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/console/login")
    assert stranger.get("", headers={"hx-request": "true"}).status_code == 401
    assert "Log in" in checked(stranger.get("/login"))


def test_a_wrong_token_does_not_log_in(url: str) -> None:
    stranger = Visitor(url, None)
    for token in ("", "wrong", METRICS, "x" * 10_000):
        answer = stranger.client.post("/console/login", data={"token": token})
        assert "set-cookie" not in answer.headers
        assert token == "" or len(token) > 100 or token not in checked(answer, 401)


def test_the_cookie_is_opaque_and_only_for_this_site(url: str) -> None:
    answer = Visitor(url, None).client.post("/console/login", data={"token": TOKEN})
    cookie = answer.headers["set-cookie"]
    assert TOKEN not in cookie
    for words in ("HttpOnly", "SameSite=strict", "Path=/console"):
        assert words in cookie


@pytest.mark.parametrize(
    "target", ["https://evil.example", "//evil.example", "/console\\@evil", "/api", "javascript:x"]
)
def test_a_login_redirects_only_to_the_console(url: str, target: str) -> None:
    answer = Visitor(url, None).client.post("/console/login", data={"token": TOKEN, "next": target})
    assert answer.headers["location"] == "/console"


def test_a_login_redirects_back_to_the_page(url: str) -> None:
    stranger = Visitor(url, None)
    place = stranger.get(in_session("support-1", "/context")).headers["location"]
    assert "next=" in place
    target = f"/console{in_session('support-1', '/context')}"
    answer = stranger.client.post("/console/login", data={"token": TOKEN, "next": target})
    assert answer.headers["location"] == target


def test_the_printed_url_works_once(store: Store) -> None:
    with site(store) as url:
        first, second = Visitor(url, None), Visitor(url, None)
        assert first.get("/enter?key=wrong").status_code == 303
        assert "Welcome" in checked(first.get(f"/enter?key={KEY}"))
        assert "Sessions" in first.page()
        assert second.get(f"/enter?key={KEY}").status_code == 303
        assert second.get("").status_code == 303


def test_logging_out_ends_the_visit(url: str) -> None:
    visitor = Visitor(url)
    cookies = dict(visitor.client.cookies)
    assert visitor.post("/logout").status_code == 303
    with httpx2.Client(base_url=url, cookies=cookies) as again:
        assert again.get("/console").status_code == 303


def test_a_revoked_token_ends_its_visits(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    token = add_token(file, Access("ci", "read"))
    with coatcheck.open(tmp_path / "store") as store:
        keyring = Keyring(file)
        with running(store, keyring, routes=console_routes(store, keyring)) as web:
            visitor = Visitor(web.url, token)
            visitor.page()
            file.write_text("")
            keyring._checked = 0.0
            assert visitor.get("").status_code == 303


# Forms


def test_a_form_needs_its_own_csrf_token(store: Store, url: str) -> None:
    visitor, other = Visitor(url), Visitor(url)
    ref = store.session("forms").put("to be pinned")
    place = in_session("forms", f"/artifacts/{ref.pointer}")
    for csrf in ("", "wrong", other.csrf):
        for verb in ("pin", "forget", "secrets"):
            assert visitor.post(f"{place}/{verb}", csrf=csrf).status_code == 403
    assert not store.session("forms").list()[0].pinned
    assert (
        visitor.client.post(f"/console{place}/pin", json={"csrf": visitor.csrf}).status_code == 400
    )


def test_forms_pin_and_forget(store: Store, url: str) -> None:
    visitor, session = Visitor(url, WRITER), store.session("forms")
    ref = session.put("to be pinned, then forgotten")
    place = in_session("forms", f"/artifacts/{ref.pointer}")
    assert visitor.post(f"{place}/pin").status_code == 303
    assert "Unpin" in visitor.page(place)
    assert visitor.post(f"{place}/unpin").status_code == 303
    assert ">Pin<" in visitor.page(place)
    assert visitor.post(f"{place}/forget").status_code == 303
    assert session.ref(ref.pointer) is None
    visitor.page(place, status=404)


def test_a_form_cannot_be_sent_with_get(store: Store, url: str) -> None:
    visitor = Visitor(url)
    ref = store.session("forms").put("not by GET")
    for verb in ("pin", "forget", "secrets"):
        place = in_session("forms", f"/artifacts/{ref.pointer}/{verb}?csrf={visitor.csrf}")
        assert visitor.get(place).status_code == 405
    assert store.session("forms").ref(ref.pointer) is not None


def test_a_token_that_only_reads_cannot_change_anything(store: Store, url: str) -> None:
    visitor = Visitor(url, READER)
    ref = store.session("forms").put("read only")
    place = in_session("forms", f"/artifacts/{ref.pointer}")
    text = visitor.page(place)
    assert ">Pin<" not in text
    assert "Forget" not in text
    for verb in ("pin", "unpin", "forget"):
        assert visitor.post(f"{place}/{verb}").status_code == 403
    assert store.session("forms").ref(ref.pointer) is not None


def test_a_form_that_is_too_large_is_refused(url: str) -> None:
    visitor = Visitor(url)
    assert visitor.post("/logout", more="x" * 200_000).status_code == 413


# Limits


def test_a_token_for_some_sessions_sees_only_those(store: Store, url: str) -> None:
    visitor = Visitor(url, SOME)
    text = visitor.page()
    assert "support-1" in text
    assert "research" not in text
    for place in ("research", "research/agent", "chat", "coatcheck:savings"):
        missing, hidden = visitor.get(in_session("no such session")), visitor.get(in_session(place))
        assert hidden.status_code == missing.status_code == 404
    assert "note.txt" not in visitor.page("/search?q=sub-agent")
    assert "research" not in visitor.page("/live")
    assert "for some of its sessions" in visitor.page("/savings")
    ref = store.session("research/agent").ref("note.txt")
    assert ref is not None
    assert visitor.get(f"/search?q={ref.pointer}").status_code == 404
    assert visitor.get(in_session("support-1", f"/artifacts/{ref.pointer}")).status_code == 404


def test_a_child_whose_parent_is_hidden_is_listed_by_itself(store: Store, url: str) -> None:
    store.session("support-child", parent="research", create=True)
    text = Visitor(url, SOME).page()
    assert "support-child" in text
    assert "research" not in Visitor(url, SOME).page(in_session("support-child"))


def test_two_tenants_never_see_each_other(store: Store, url: str) -> None:
    acme, other = store.tenant("acme"), store.tenant("other")
    ref = acme.session("plan of acme").put("the plan of acme", name="plan.txt")
    other.session("plan of other").put("the plan of other", name="plan.txt")
    visitor, stranger, owner = Visitor(url, ACME), Visitor(url, OTHER), Visitor(url)
    assert "plan of acme" in visitor.page()
    place = in_session("plan of acme", f"/artifacts/{ref.pointer}")
    assert "the plan of acme" in visitor.page(place)
    for one in (stranger, owner):
        assert "acme" not in one.page("?own=1")
        assert "plan of acme" not in one.page("/live")
        assert "plan of acme" not in one.page("/search?q=plan+of+acme").replace(
            'value="plan of acme"', ""
        ).replace("“plan of acme”", "")
        for more in ("", "/content", "/lineage"):
            assert one.get(place + more).status_code == 404
        assert one.get(f"/search?q={ref.pointer}").status_code == 404
    assert "support-1" not in visitor.page()


def test_foreign_hosts_and_origins_are_refused(url: str) -> None:
    visitor = Visitor(url)
    assert visitor.get("", headers={"host": "evil.example"}).status_code == 403
    assert visitor.get("", headers={"origin": "http://evil.example"}).status_code == 403


def test_only_our_own_files_are_served(url: str) -> None:
    stranger = Visitor(url, None)
    for name in ("style.css", "console.js", "htmx.min.js", "icon.svg"):
        assert stranger.get(f"/static/{name}").status_code == 200
    for name in ("htmx.LICENSE.txt", "..%2Fsite.py", "%2e%2e", "none"):
        assert stranger.get(f"/static/{name}").status_code == 404


def test_events_report_a_new_record(store: Store, url: str) -> None:
    visitor = Visitor(url)
    with visitor.client.stream("GET", "/console/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        store.session("watched").record("series", b"something")
        assert any(line == "event: changed" for line in lines)


def test_events_report_records_between_loading_the_page_and_watching(
    store: Store, url: str
) -> None:
    visitor = Visitor(url)
    for place in ("/live", ""):
        since = re.search(r'data-since="([0-9.]+)"', visitor.get(place).text)
        assert since is not None
        store.session("between").record("series", b"something")
        for query, headers in (
            (f"?since={since[1]}", {}),
            ("?since=0", {"last-event-id": since[1]}),
        ):
            with visitor.client.stream("GET", f"/console/events{query}", headers=headers) as answer:
                assert (
                    next(line for line in answer.iter_lines() if line.startswith(("event", ":")))
                    == "event: changed"
                )


@pytest.mark.parametrize("since", ["", "nan", "-inf", "inf", "x" * 5000, "1e999", "99999999999"])
def test_events_work_with_any_start_time(url: str, since: str) -> None:
    with Visitor(url).client.stream("GET", "/console/events", params={"since": since}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        assert abs(time.time() - float(next(lines).removeprefix("id: "))) <= 86_401


# Commands


def test_the_command_prints_a_url_that_logs_in(tmp_path: Path) -> None:
    process = subprocess.Popen(
        warm.command("coatcheck", "console", "--port", "0", "--read-only"),
        env=environment(tmp_path / "store"), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        address = process.stderr.readline().split()[-1]
        url, _, path = address.partition("/console")
        visitor = Visitor(url, None)
        assert "Welcome" in checked(visitor.get(path))
        assert "Nothing is recorded yet" in visitor.page()
    finally:
        process.terminate()
        process.wait(WAIT)
        assert process.stderr is not None
        process.stderr.close()


def test_a_browser_that_the_command_opens_gets_no_key_in_its_arguments(tmp_path: Path) -> None:
    """Every user of a machine can read the arguments of all programs."""
    with opened_console(tmp_path) as (address, page, arguments):
        key = address.partition("key=")[2]
        assert len(key) > 20
        assert key not in arguments
        assert page.stat().st_mode & 0o777 == 0o600
        assert page.parent.stat().st_mode & 0o777 == 0o700
        link = re.search(r'url=([^"]+)"', page.read_text())
        assert link is not None
        assert html.unescape(link[1]) == address
        url, _, path = address.partition("/console")
        assert "Welcome" in checked(Visitor(url, None).get(path))
    assert not page.parent.exists()


def test_serve_has_the_console_too(tmp_path: Path) -> None:
    env = environment(tmp_path / "store", COATCHECK_HTTP_TOKEN=TOKEN)
    process = subprocess.Popen(serve("--port", "0"), env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        process.stderr.readline()
        line = process.stderr.readline()
        assert "console at" in line
        assert (
            "Nothing is recorded yet" in Visitor(line.split()[-1].removesuffix("/console")).page()
        )
    finally:
        process.terminate()
        process.wait(WAIT)
        assert process.stderr is not None
        process.stderr.close()


@pytest.mark.parametrize("missing", range(5, 40, 3))
def test_a_text_is_masked_before_it_is_cut(store: Store, missing: int) -> None:
    token = "gh" + "p_aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zAbC2d"
    visit = Visit(store, Access("a", "admin"))
    shown = visit.text("x " * ((600 - missing) // 2) + token + " tail", 600)
    assert not any(token[at : at + 12] in shown for at in range(len(token) - 11))
