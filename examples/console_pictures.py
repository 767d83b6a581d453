"""Photograph the console in the machine's Chromium: an agent talks to a scripted model through the
gateway."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import coatcheck
from coatcheck.console.site import console_routes, link
from coatcheck.http.credentials import Access, Keyring
from examples import shop
from tests.browser import FLAGS, chromium
from tests.gateway.provider import Provider, Say, Seen, Think, Turn, Use, turn
from tests.gateway.talking import Talk, serving
from tests.http.servers import running


def answer(seen: Seen) -> Turn:
    """Return the next turn of the scripted model: it reads the log, looks into the stub, and
    answers."""
    text = json.dumps(seen.messages)
    pointers = re.findall(r"art:[0-9a-f]{12}", text)
    if "48207|timeout" in text:
        return turn(
            Say(
                "Two payments of order 48207 were captured: the first call timed out, and the retry had a new key."
            )
        )
    if pointers:
        wanted = {"pointer": pointers[-1], "grep": "48207|timeout"}
        return turn(Think("The log is stored whole. I look for the order."), Use("get", wanted))
    return turn(
        Think("I need the log of the checkout."),
        Use("fetch_log", {"service": "checkout", "day": shop.DAY}),
    )


def talk(store: coatcheck.Store) -> None:
    """Record a conversation in the mode `loop`, one with a broken prefix, and what a sub-agent
    stored."""
    log = shop.fetch_log("checkout", shop.DAY)
    loop: dict[str, Any] = {"is_one": True, "mode": "loop", "session": "charged-twice"}
    with Provider(answer) as provider, serving(store, provider, **loop) as url:
        agent = Talk(url)
        agent.tools = [{**agent.tools[0], "name": "fetch_log"}]
        agent.ask("A customer was charged twice for order 48207. What happened?")
        agent.ask(agent.results(log))
    marked = {"cache_control": {"type": "ephemeral"}}
    noted = turn(Say("Noted."))
    with (
        Provider(lambda seen: noted) as provider,
        serving(store, provider, is_one=True, session="report") as url,
    ):
        agent = Talk(
            url,
            thinking=False,
            system=[{"type": "text", "text": "You write reports. " * 200, **marked}],
        )
        for number in range(24):
            if number == 15:
                agent.more["system"] = [
                    {"type": "text", "text": "You write short reports. " * 200, **marked}
                ]
            for message in agent.held[::2]:
                message["content"][0].pop("cache_control", None)
            agent.ask(
                [{"type": "text", "text": f"Fact {number}: " + "orders rose. " * 120, **marked}]
            )
    child = store.session("charged-twice/payments", parent="charged-twice", create=True)
    child.put(
        shop.export_orders(shop.DAY),
        name="orders.csv",
        tool="export_orders",
        kind="data",
        media_type="text/csv",
    )


def photograph(folder: Path) -> list[Path]:
    """Draw the pages of the console, and return the files."""
    token = "a-token-for-the-pictures"
    keyring = Keyring(given={token: Access("pictures", "admin")})
    written = []
    with (
        tempfile.TemporaryDirectory() as name,
        coatcheck.open(Path(name) / "store", durability="process") as store,
    ):
        talk(store)
        routes = console_routes(store, keyring, key="once", token=token)
        orders = store.session("charged-twice/payments").list()[0].pointer
        query = "SELECT status, count(*) AS orders, sum(cents) AS cents FROM artifact GROUP BY 1"
        places = {
            "sessions": (link("sessions"), "light"), "conversation": (link("session", "charged-twice"), "light"),
            "context": (link("context", "report"), "dark"),
            "artifact": (link("artifact", "charged-twice/payments", orders, query=query), "light"),
        }  # fmt: skip
        with running(store, keyring, routes=routes) as web, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
            page = browser.new_page(viewport={"width": 1100, "height": 760})
            page.goto(f"{web.url}/console/enter?key=once")
            page.wait_for_url("**/console")
            for place, (path, scheme) in places.items():
                page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
                page.goto(web.url + path)
                target = folder / f"console-{place}.png"
                height = 1400 if place == "conversation" else 760
                page.screenshot(
                    path=target,
                    clip={"x": 0, "y": 0, "width": 1100, "height": height},
                    full_page=True,
                )
                with Image.open(target) as picture:
                    picture.convert("RGB").quantize(128).save(target, optimize=True)
                written.append(target)
            browser.close()
    return written
