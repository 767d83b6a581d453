"""Our tools in a client's request: their names, which never collide with the client's, and the
answers to their calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from coatcheck._toolkit import Tool, function_of, known_as, toolkit
from coatcheck.gateway.answer import OwnCall
from coatcheck.gateway.ledger import Adoption
from coatcheck.gateway.raw_json import raw_of, value_of
from coatcheck.parts import Part

if TYPE_CHECKING:
    from coatcheck.session import Session

_PREFIX: Final = "coatcheck_"
_PURPOSES: Final = ("get", "list", "store")
_CALLS: Final = 8  # calls of our tools that are answered in one step


def run_calls(
    session: Session, names: Mapping[str, str], calls: Sequence[OwnCall], note: str
) -> list[tuple[OwnCall, list[Part]]]:
    """Return the answer to each call of our tools. `names` are their names by purpose. The last
    answer ends with the note."""
    tools = {
        tool.name: tool
        for tool in toolkit(session, prefix=names["get"].removesuffix("get_artifact"))
    }
    answers = []
    for number, call in enumerate(calls):
        arguments = (
            call.arguments if isinstance(call.arguments, dict) else {"arguments": call.arguments}
        )
        if number < _CALLS:
            parts = tools[call.name].parts(**arguments)
        else:
            parts = [Part(f"[error: at most {_CALLS} calls at once are answered; call again]")]
        answers.append((call, parts))
    if note and answers:
        last = answers[-1][1]
        last[0] = replace(last[0], text=f"{last[0].text}\n{note}")
    return answers


def own_tools(tools: Sequence[Raw]) -> Iterator[tuple[str, str]]:
    """Yield the purpose and name of our tools among those of a client, which may have them through
    MCP."""
    for raw in tools:
        if b"artifact" in bytes(raw):
            found = known_as(value_of(raw))
            if found is not None:
                yield found


def names_by_purpose(tools: Sequence[Tool]) -> dict[str, str]:
    """Return the names of our tools by purpose."""
    return dict(zip(_PURPOSES, (tool.name for tool in tools), strict=True))


def _names_of(tools: Sequence[Raw]) -> set[str]:
    return {str(function_of(value_of(one)).get("name")) for one in tools}


def free_prefix(tools: Sequence[Raw]) -> str:
    """Return a prefix for the names of our tools with which none of them is the name of one of
    these tools."""
    taken = _names_of(tools)
    for number in count():
        prefix = ("", _PREFIX)[number] if number < 2 else f"{_PREFIX}{number}_"
        if taken.isdisjoint(tool.name for tool in toolkit(prefix=prefix)):
            return prefix
    raise AssertionError("there is always another number")


def fitting_tools(adoption: Adoption, tools: Sequence[Raw]) -> tuple[list[Raw], Mapping[str, str]]:
    """Return our tools for a request that has these tools, and their names by purpose: those of the
    adoption. If the client has added a tool of the same name since, ours get other names, and the
    client's calls stay the client's."""
    if not adoption.tools or _names_of(tools).isdisjoint(adoption.names.values()):
        return adoption.tools, adoption.names
    prefix = free_prefix(tools)
    names = names_by_purpose(toolkit(prefix=prefix))
    renamed = []
    for raw, name in zip(adoption.tools, names.values(), strict=True):
        described = value_of(raw)
        if isinstance(described.get("function"), dict):
            described["function"]["name"] = name
        else:
            described["name"] = name
        renamed.append(raw_of(described))
    return renamed, names
