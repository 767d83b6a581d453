"""A LangChain agent whose context stays small. It runs offline: the model is a script behind
OpenAI's API.

    python -m examples.langchain_agent

Needs the packages `langchain` and `langchain-openai`. Prints what the model was sent in each turn,
with Coatcheck and without, and how large the checkpoints are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import SecretStr

import coatcheck
from coatcheck.adapters.langchain import Coatcheck
from examples.standins import Call, Heard, Reply, StandIn, Step

LOG = "\n".join(
    f"2026-11-17T{n // 3600:02}:{n // 60 % 60:02}:{n % 60:02}Z "
    f"{'ERROR payment refused' if n == 1_700 else 'INFO done'} request={n * 7919} took={n % 97}ms"
    for n in range(5_000)
)
ORDERS = [
    {"id": n, "customer": f"customer {n % 300}", "total": n * 7 % 1_000} for n in range(3_000)
]


def fetch_log() -> str:
    """Fetch the log of the last hour."""
    return LOG


def fetch_orders() -> list[dict[str, Any]]:
    """Fetch the orders of today."""
    return ORDERS


def count_lines(text: str, containing: str = "") -> int:
    """Count the lines of a text that contain a word."""
    return sum(containing in line for line in text.splitlines())


def sum_totals(orders: list[dict[str, Any]]) -> int:
    """Add up the totals of orders."""
    return sum(order["total"] for order in orders)


TOOLS = (fetch_log, fetch_orders, count_lines, sum_totals)


def ask(
    question: str,
    url: str,
    middleware: Sequence[AgentMiddleware[Any, Any, Any]],
    saver: InMemorySaver,
) -> str:
    """Ask an agent, in the thread of a support case."""
    model = ChatOpenAI(model="gpt-5.5", base_url=url, api_key=SecretStr("none"))
    agent = create_agent(model, TOOLS, middleware=middleware, checkpointer=saver)
    done = agent.invoke(
        {"messages": [("user", question)]}, {"configurable": {"thread_id": "case-17"}}
    )
    return str(done["messages"][-1].text)


def calls(name: str, **arguments: Any) -> Reply:
    return Reply(calls=(Call(name, arguments),))


def read_error(heard: Heard) -> Reply:
    return calls("get_artifact", pointer=heard.pointer("fetch_log"), grep="ERROR")


def count(heard: Heard) -> Reply:
    return calls("count_lines", text=heard.pointer("fetch_log"), containing="INFO")


def add(heard: Heard) -> Reply:
    return calls("sum_totals", orders=heard.pointer("fetch_orders"))


FINAL = Reply("One payment was refused; 4,999 requests went well; the orders amount to 1,498,500.")
WITH: Sequence[Step] = (calls("fetch_log"), read_error, count, calls("fetch_orders"), add, FINAL)
WITHOUT: Sequence[Step] = (
    calls("fetch_log"),
    calls("fetch_orders"),
    FINAL,
)  # the model sees all of both


def run(
    script: Sequence[Step], middleware: Sequence[AgentMiddleware[Any, Any, Any]]
) -> tuple[list[int], int, str]:
    """Run the agent, and return the tokens of each request, the bytes of all checkpoints, and the
    answer."""
    saver = InMemorySaver()
    with StandIn(script) as api:
        answer = ask(
            "What went wrong, and what is the sum of the orders?", api.openai_url, middleware, saver
        )
        sent = [one.usage.prompt for one in api.requests if one.usage is not None]
    saved = [data for _, data in saver.blobs.values()]
    saved += [value[2][1] for writes in saver.writes.values() for value in writes.values()]
    return sent, sum(map(len, saved)), answer


def main() -> None:
    without, large, _ = run(WITHOUT, [])
    with coatcheck.open("memory:") as store:
        slim, small, answer = run(WITH, [Coatcheck(store)])
    print("tokens of each request without Coatcheck:", *(f"{one:,}" for one in without))
    print("tokens of each request with Coatcheck:   ", *(f"{one:,}" for one in slim))
    print(f"checkpoints: {large:,} bytes without, {small:,} with")
    print(answer)


if __name__ == "__main__":
    main()
