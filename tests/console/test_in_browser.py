"""The console in a real Chromium: what only a browser can check. The pages themselves are tested
without one."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from coatcheck import Store
from tests.browser import FLAGS, chromium
from tests.console.visitors import HOSTILE, SECRET, TOKEN, in_session, opened_console

THINGS = f"things {HOSTILE}"
WAIT = 60_000.0
expect.set_options(timeout=WAIT)
AXE = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=FLAGS, timeout=WAIT)
        yield launched
        launched.close()


@contextmanager
def visiting(
    browser: Browser, url: str, *, is_refused: bool = False, **options: Any
) -> Iterator[Page]:
    """A page after a login with the form. Nothing may fail or be refused by the policy, unless the
    test is about a refusal."""
    context = browser.new_context(base_url=url, **options)
    context.set_default_timeout(WAIT)
    page = context.new_page()
    problems: list[str] = []
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"a dialog: {dialog.message}"))
    page.goto("/console")
    page.fill("#token", TOKEN)
    page.click("main button")
    page.wait_for_url("**/console")
    yield page
    context.close()
    assert bool(problems) == is_refused, problems


def places(store: Store) -> dict[str, str]:
    """Every kind of page."""
    pointers = {ref.name: ref.pointer for ref in store.session(THINGS).list()}
    things = in_session(THINGS, "/artifacts")
    return {
        "sessions": "", "filtered": "?contains=research", "live": "/live", "savings": "/savings",
        "search": "/search?q=first+line", "conversation": in_session("support-1"), "foreign": in_session("research"),
        "call": in_session("support-1", "/calls/2"), "body": in_session("support-1", "/calls/2/held/2"),
        "context": in_session("research", "/context"), "without calls": in_session("research/agent"),
        "artifacts": things, "hostile": f"{things}/{pointers[HOSTILE]}", "picture": f"{things}/{pointers['dot.png']}",
        "long line": f"{things}/{pointers['long.txt']}", "error": f"{things}/{pointers['orders.csv']}?grep=%28",
        "lineage": f"{things}/{pointers['orders.csv']}/lineage", "missing": in_session("none"),
    }  # fmt: skip


def test_every_page_is_accessible_and_runs_nothing_in_both_colour_schemes(
    browser: Browser, url: str, store: Store
) -> None:
    found: dict[str, Any] = {}
    with visiting(browser, url, viewport={"width": 1280, "height": 900}) as page:
        for name, place in places(store).items():
            if name == "missing":
                continue  # a status of 404 is an error on the console of the browser
            page.goto(f"/console{place}")
            page.evaluate(AXE)
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                only = {} if scheme == "light" else {"runOnly": ["color-contrast"]}
                result = page.evaluate("options => axe.run(document, options)", only)
                for one in result["violations"]:
                    found[f"{name}, {scheme}: {one['id']}"] = [
                        node["html"][:200] for node in one["nodes"]
                    ][:3]
            assert page.evaluate("typeof window.ran") == "undefined"
    assert found == {}


def test_pages_fit_a_small_screen(browser: Browser, url: str, store: Store) -> None:
    with visiting(browser, url, viewport={"width": 400, "height": 800}) as page:
        for name, place in places(store).items():
            if name == "missing":
                continue
            page.goto(f"/console{place}")
            wide = page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, name


def test_a_body_is_loaded_in_place(browser: Browser, url: str) -> None:
    with visiting(browser, url) as page:
        page.goto(f"/console{in_session('support-1')}")
        original = page.locator(".replaced .pair > div").first
        original.get_by_role("link", name=re.compile("All .* characters")).click()
        expect(original).to_contain_text("worker 1999 finished")
        assert page.url.endswith("/support-1")
        original.get_by_role(
            "button", name="Show secrets"
        ).click()  # a form inside what was loaded works too
        expect(page.locator("main")).to_contain_text("Secrets are shown")


def test_the_live_page_follows_the_store(browser: Browser, url: str, store: Store) -> None:
    with visiting(browser, url) as page:
        page.goto("/console/live")
        store.session("just begun").record("gateway:calls", b'{"model":"brand-new-model"}')
        expect(page.locator("main")).to_contain_text("brand-new-model")
        page.goto("/console")
        notice = page.locator("[data-live-notice]")
        expect(notice).to_be_hidden()
        store.session("just begun").record("gateway:calls", b"{}")
        expect(notice).to_be_visible()


def test_everything_works_with_the_keyboard_and_without_script(
    browser: Browser, url: str, store: Store
) -> None:
    ref = store.session("by hand").put(f"by hand\n{SECRET}\n", name="by-hand.txt")
    with visiting(browser, url, java_script_enabled=False) as page:
        page.keyboard.press("Tab")
        assert page.locator(".skip").is_visible()
        page.goto(f"/console{in_session('by hand', '/artifacts')}")
        page.get_by_role("link", name="by-hand.txt").focus()
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/{ref.pointer}")
        page.get_by_label("Grep").fill("hand")
        page.keyboard.press("Enter")
        page.wait_for_url("**grep=hand**")
        assert "1 matches" in page.locator("main").inner_text()
        page.get_by_role("button", name="Show secrets").click()
        page.goto(f"/console{in_session('by hand', f'/artifacts/{ref.pointer}')}")
        page.get_by_role("button", name="Pin").click()
        page.get_by_role("button", name="Unpin").wait_for()
        assert store.session("by hand").list()[0].pinned
        page.get_by_text("Forget…").click()
        page.get_by_role("button", name="Forget it").click()
        page.wait_for_url("**/artifacts")
        assert store.session("by hand").ref(ref.pointer) is None
        page.goto("/console/live")
        assert page.locator("meta[http-equiv=refresh]").count() == 1


def test_a_download_is_saved_and_not_opened(browser: Browser, url: str, store: Store) -> None:
    pointer = next(ref.pointer for ref in store.session(THINGS).list() if ref.name == "evil.svg")
    with visiting(browser, url) as page, tempfile.TemporaryDirectory() as folder:
        page.goto(f"/console{in_session(THINGS, f'/artifacts/{pointer}')}")
        with page.expect_download() as waiting:
            page.get_by_role("link", name="Download").click()
        waiting.value.save_as(os.path.join(folder, "saved"))
        with open(os.path.join(folder, "saved"), "rb") as source:
            assert source.read() == b"<svg onload=alert(1)>"


def test_a_picture_is_drawn(browser: Browser, url: str, store: Store) -> None:
    with visiting(browser, url) as page:
        page.goto(f"/console{places(store)['picture']}")
        assert page.locator("img.picture").evaluate("image => image.naturalWidth") == 1


def test_attributes_cannot_run_scripts(browser: Browser, url: str) -> None:
    """If foreign markup ever reached a page, the policy and htmx would refuse to run it."""
    with visiting(browser, url, is_refused=True) as page:
        ran = page.evaluate(
            """async () => {
                const place = document.querySelector("main");
                place.innerHTML = '<button id="x" hx-on:click="window.ran = 1" onclick="window.ran = 1">x</button>'
                    + '<img src="none" onerror="window.ran = 1">';
                try { htmx.process(place); document.getElementById("x").click(); } catch (error) {}
                await new Promise((done) => setTimeout(done, 50));
                return typeof window.ran;
            }"""
        )
        assert ran == "undefined"


def test_the_page_that_the_command_opens_logs_in(browser: Browser, tmp_path: Path) -> None:
    with opened_console(tmp_path) as (_, file, _):
        page = browser.new_page()
        page.goto(file.as_uri())
        page.wait_for_url("**/console", timeout=WAIT)
        expect(page.get_by_text("Nothing is recorded yet")).to_be_visible()
        page.close()
