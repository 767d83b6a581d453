"""An agent with and without Coatcheck: run `make demo`. It needs no network and no key, and leaves
nothing behind.

The agent is the loop of `anthropic_agent.py` on Anthropic's own SDK, its tools are those of
`shop.py`, the store is real. Only the model is a script, behind a local server that speaks the
provider's protocol and counts tokens. A second session shows the other side: results that are worth
more in the context than out of it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anthropic import Anthropic
from rich.box import SIMPLE_HEAD, Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import coatcheck.tokens
from coatcheck import Session, toolkit
from coatcheck.context import PromptBuilder
from examples import shop
from examples.anthropic_agent import agent
from examples.standins import Call, Heard, Received, Reply, StandIn, Step, prompt_tokens

QUESTION = f"Customers say that they were charged twice on {shop.DAY}. How many, whom do we owe, and how much?"
CODER = "claude-opus-5-5"
WINDOW = 200_000
"""The context window of the model, in tokens."""

DOLLARS = 3.00
"""Price of a million input tokens. Output is left out."""

CACHE_READ, CACHE_WRITE, LEAST_CACHED = 0.1, 1.25, 1_024
"""Price factors for reading and writing a cached prefix, and the smallest prompt that is cached."""

_TAG = re.compile(r" ~(\d{1,9})\.[\w-]{8}(?=\\n|\")")
SCRIPTED = (
    "The model in this demo is a script: its words and calls were written beforehand. The loop, the SDK, the tools and "
    "the store are real. Tokens are estimated, or counted if the extra coatcheck[tokens] is installed."
)
REMARKS = (
    f"Each turn sends everything of the turn before again. Input costs ${DOLLARS:.2f} for a million tokens; with a "
    f"prompt cache, {CACHE_READ:g} of that for what was sent before, and {CACHE_WRITE:g} for what is new. Output is "
    "left out. The log, the orders and the charges went from tool to tool by pointer: without one, the model would "
    "have to write them out. A real model may take other turns: docs/effect.md has what recorded sessions cost."
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to the model and its reply. `got` has the results of its last calls: tool, text,
    tokens of the whole value. `tokens_without` counts the same conversation with complete results
    and without Coatcheck's tools."""

    got: tuple[tuple[str, str, int], ...]
    text: str
    asked: tuple[Call, ...]
    tokens_with: int
    tokens_without: int

    @property
    def is_refused_without(self) -> bool:
        """Whether the provider would refuse the request without Coatcheck: it is over the context
        window."""
        return self.tokens_without > WINDOW


def _fetch(heard: Heard) -> Reply:
    day = {"day": shop.DAY}
    return Reply(
        "I fetch the log of the checkout and the orders of that day.",
        (Call("fetch_log", {"service": "checkout", **day}), Call("export_orders", day)),
    )


def _look(heard: Heard) -> Reply:
    log, orders = heard.pointer("fetch_log"), heard.pointer("export_orders")
    return Reply(
        "Too large to read. I search for warnings, sum up the orders, and fetch the charges.",
        (
            Call("get_artifact", {"pointer": log, "grep": "WARN|ERROR"}),
            Call(
                "get_artifact",
                {
                    "pointer": orders,
                    "query": "SELECT status, count(*), sum(cents) FROM artifact GROUP BY 1",
                },
            ),
            Call("fetch_charges", {"day": shop.DAY}),
        ),
    )


def _compare(heard: Heard) -> Reply:
    pointers = {
        name: heard.pointer(tool)
        for name, tool in (
            ("log", "fetch_log"),
            ("orders", "export_orders"),
            ("charges", "fetch_charges"),
        )
    }
    return Reply(
        "Captures were sent again after timeouts. I compare all three by their pointers, and sum up what we owe by "
        "country with a program: it joins the charges with the orders.",
        (
            Call(
                "get_artifact",
                {"pointer": pointers["charges"], "code": _BY_COUNTRY.format(pointers["orders"])},
            ),
            Call("reconcile", pointers),
        ),
    )


def _answer(heard: Heard) -> Reply:
    found = json.loads(heard.last("reconcile"))
    by_country = re.findall(r"'([A-Z]{2})': (\d+)", heard.last("get_artifact"))
    countries = ", ".join(f"{int(cents) / 100:,.2f} to {country}" for country, cents in by_country)
    return Reply(
        f"{found['charged_twice']} customers were charged twice, each after a timeout. {found['refunded']} have their "
        f"money back. We owe {found['owed_cents'] / 100:,.2f} EUR to {', '.join(found['customers'])}: {countries}."
    )


_BY_COUNTRY = """\
country = {{row["order"]: row["country"] for row in artifact("{}")}}
owed = Counter()
for charge in data["charges"]:
    if charge["attempt"] == 2 and not charge["refund"]:
        owed[country[str(charge["order"])]] += charge["amount"]["cents"]
dict(owed.most_common())"""

SCRIPT: Sequence[Step] = (_fetch, _look, _compare, _answer)


def run() -> list[Turn]:
    """Run the agent with its tools and a store against a scripted model. The turns are the same
    every time."""
    with (
        tempfile.TemporaryDirectory() as folder,
        coatcheck.open(folder) as store,
        StandIn(SCRIPT, window=WINDOW) as api,
        Anthropic(api_key="none", base_url=api.anthropic_url) as client,
    ):
        session = store.session("demo")
        with contextlib.redirect_stdout(
            io.StringIO()
        ):  # the loop prints; here the turns are shown instead
            agent(client, session, QUESTION, shop.TOOLS)
        return [_turn(request, session) for request in api.requests]


@dataclass(frozen=True, slots=True)
class Kept:
    """A result of the second session: its call, why it left or stayed, and whether the model gets
    it unchanged."""

    call: str
    why: str
    is_same: bool


def fix_a_bug() -> list[Kept]:
    """Run a short coding session through `PromptBuilder`. The calls and the last two results are
    written here."""
    source = inspect.getsource(shop)
    steps = (
        ("Read", {"file_path": "shop.py"}, inspect.getsource(shop.reconcile)),
        (
            "Grep",
            {"pattern": "def "},
            "\n".join(line for line in source.splitlines() if "def " in line),
        ),
        ("Edit", {"file_path": "shop.py"}, "The file shop.py has been updated."),
        ("Bash", {"command": "python -m pytest"}, "........\n8 passed in 0.41s"),
    )
    kept = []
    with coatcheck.open("memory:") as store:
        session = store.session("bug")
        tools = [{"name": name, "input_schema": {"type": "object"}} for name, _, _ in steps]
        builder = PromptBuilder(
            session, provider="anthropic", model=CODER, tools=[*tools, *toolkit(session)]
        )
        history: list[Any] = [{"role": "user", "content": "Refunds are subtracted twice. Fix it."}]
        for number, (name, arguments, result) in enumerate(steps):
            call = {"type": "tool_use", "id": f"call{number}", "name": name, "input": arguments}
            block = {"type": "tool_result", "tool_use_id": f"call{number}", "content": result}
            messages = [
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [block]},
            ]
            prompt = builder.build([*history, *messages])
            history = list(prompt.history)
            shown = f"{name}({_arguments(Call(name, arguments))})"
            kept.append(Kept(shown, str(prompt.decisions[-1]), history[-1]["content"][-1] == block))
    return kept


def cost(counts: Sequence[int], *, cached: bool) -> float:
    """Return the dollars for prompts of these sizes, where each prompt begins with the one
    before."""
    if not cached:
        return sum(counts) * DOLLARS / 1_000_000
    paid, known = 0.0, 0
    for count in counts:
        paid += known * CACHE_READ + (count - known) * (CACHE_WRITE if count >= LEAST_CACHED else 1)
        known = count if count >= LEAST_CACHED else 0
    return paid * DOLLARS / 1_000_000


def _turn(request: Received, session: Session) -> Turn:
    assert request.reply is not None
    # The tag on a page depends on the store's key. A fixed one replaces it, so that every run
    # counts the same.
    body = json.loads(_TAG.sub(r" ~\1.Ub3kQ9xZ", request.raw.decode()))
    names = _names(body)
    last = body["messages"][-1]["content"]
    got = tuple(
        (
            names[block["tool_use_id"]],
            block["content"],
            coatcheck.tokens.count(_whole(block["content"], session)),
        )
        for block in (last if isinstance(last, list) else [])
    )
    counts = prompt_tokens(request.path, body), prompt_tokens(request.path, _without(body, session))
    return Turn(got, request.reply.text, request.reply.calls, *counts)


def _names(body: dict[str, Any]) -> dict[str, str]:
    blocks = (
        block
        for message in body["messages"]
        for block in message["content"]
        if isinstance(block, dict)
    )
    return {block["id"]: block["name"] for block in blocks if block["type"] == "tool_use"}


def _without(body: dict[str, Any], session: Session) -> dict[str, Any]:
    """Return the request without Coatcheck: complete results, and none of our tools and their
    calls."""
    ours = {tool.name for tool in toolkit(session)}
    names = _names(body)
    body = copy.deepcopy(body)
    body["tools"] = [tool for tool in body["tools"] if tool["name"] not in ours]
    for message in body["messages"]:
        if isinstance(message["content"], list):
            message["content"] = [
                {**block, "content": _whole(block["content"], session)}
                if block["type"] == "tool_result"
                else block
                for block in message["content"]
                if names.get(block.get("id") or block.get("tool_use_id", "")) not in ours
            ]
    return body


def _whole(text: str, session: Session) -> str:
    """Return the value behind a stub as the model would have got it, and any other text
    unchanged."""
    if not text.startswith('{"stub":'):
        return text
    value = session.get(json.loads(text)["artifact"])
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    )


def show(turns: Sequence[Turn], console: Console) -> None:
    """Print each turn, then the costs. Without colours if the output is not a terminal."""
    wide = min(console.width, 110) - 9

    def tell(label: str, text: str, style: str = "") -> None:
        lines = textwrap.wrap(text, wide, break_on_hyphens=False)
        for line, before in zip(lines, [label, *[""] * len(lines)], strict=False):
            console.print(Text.assemble((f"  {before:<7}", "bold"), (line, style)))

    console.print(Text(SCRIPTED, "dim"))
    console.print(Text(f"\n{QUESTION}", "bold"))
    for number, turn in enumerate(turns, 1):
        console.print(Text(f"\nturn {number}", "bold cyan"))
        for name, text, whole in turn.got:
            size = f"{coatcheck.tokens.count(text):,} tokens"
            tell(
                "gets",
                f"{name}: {size}"
                + (f" instead of {whole:,}" if text.startswith('{"stub":') else ""),
                "green",
            )
            for line in _shortened(text, wide):
                tell("", line, "dim")
        tell("says", turn.text)
        for call in turn.asked:
            tell("calls", f"{call.name}({_arguments(call)})", "yellow")
        over = f", refused: the window has {WINDOW:,}" if turn.is_refused_without else ""
        tell(
            "sent", f"{turn.tokens_with:,} tokens; without Coatcheck {turn.tokens_without:,}{over}"
        )
    console.print()
    console.print(_bill(turns, SIMPLE_HEAD if console.is_terminal else None))
    if refused := sum(turn.is_refused_without for turn in turns):
        note = (
            f"Without Coatcheck, {refused} of {len(turns)} requests are over the context window of {WINDOW:,} tokens, "
            "and the provider refuses them. The total leaves these turns out on both sides. With Coatcheck, all "
            f"{len(turns)} turns send {sum(turn.tokens_with for turn in turns):,} tokens."
        )
        console.print(Text(note))
    console.print(Text(REMARKS, "dim"))


def show_kept(results: Sequence[Kept], console: Console) -> None:
    """Print a session in which a stub would not pay, and the reason for each result."""
    console.print(
        Text(
            "\nA short coding session, scripted as well, with the same policy: stubs would not pay",
            "bold",
        )
    )
    for one in results:
        console.print(Text.assemble(("  calls  ", "bold"), (one.call, "yellow")))
        for number, line in enumerate(textwrap.wrap(one.why, min(console.width, 110) - 9)):
            console.print(
                Text.assemble(("  why    " if not number else " " * 9, "bold"), (line, "green"))
            )
    same = sum(one.is_same for one in results)
    note = "Costs are in the price of an input token. The tools of Coatcheck are described only once there is a stub."
    console.print(Text(f"{same} of {len(results)} results are sent as they are. {note}", "dim"))


def _bill(turns: Sequence[Turn], box: Box | None) -> Table:
    """Compare the turns that are possible on both sides."""
    table = Table(box=box, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("tokens sent")
    for name in ("with Coatcheck", "without", "ratio"):
        table.add_column(name, justify="right")

    def row(name: str, one: float, other: float, form: str, style: str = "") -> None:
        table.add_row(
            name, format(one, form), format(other, form), f"{other / one:,.1f}×", style=style
        )

    for number, turn in enumerate(turns, 1):
        if turn.is_refused_without:
            table.add_row(f"turn {number}", f"{turn.tokens_with:,}", "refused", "")
        else:
            row(f"turn {number}", turn.tokens_with, turn.tokens_without, ",")
    both = [turn for turn in turns if not turn.is_refused_without]
    small, large = [turn.tokens_with for turn in both], [turn.tokens_without for turn in both]
    row(
        "total" if both == [*turns] else f"total of {len(both)} turns",
        sum(small),
        sum(large),
        ",",
        style="bold",
    )
    for name, cached in (("dollars", False), ("dollars, cached", True)):
        row(name, cost(small, cached=cached), cost(large, cached=cached), ".4f")
    return table


def _shortened(text: str, wide: int) -> list[str]:
    """Shorten a result to fit the screen: some lines of a page, some characters of a line."""
    lines = text.splitlines()
    room = 4 * wide if len(lines) == 1 else wide
    shown = lines if len(lines) <= 5 else [*lines[:4], f"… {len(lines) - 4} more lines"]
    return [line if len(line) <= room else f"{line[: room - 1]}…" for line in shown]


def _arguments(call: Call) -> str:
    given = call.arguments if not isinstance(call.arguments, str) else {}
    return ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items()
    )


if __name__ == "__main__":
    screen = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    show(run(), screen)
    show_kept(fix_a_bug(), screen)
