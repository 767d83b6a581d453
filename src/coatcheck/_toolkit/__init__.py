"""The tools for models: `get_artifact`, `list_artifacts` and `store_artifact`, defined once for every surface.

A tool answers a text, always: bounded, its first line about what follows, and marked, so that it is never externalized
again. It raises nothing: what was wrong is said in words that a model can act on.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from coatcheck._toolkit.runs import Runs
from coatcheck.descriptions import Description
from coatcheck.errors import CoatcheckError, Damaged, InvalidArgument, StoreError
from coatcheck.ids import clip
from coatcheck.redaction import mask
from coatcheck.session import Session

LEAST_CHARS: Final = 1_500

Style = Literal["snake", "camel", "dotted"]
Purpose = Literal["get", "list", "store"]
_STYLES: Final[dict[str, tuple[str, str, str]]] = {
    "snake": ("get_artifact", "list_artifacts", "store_artifact"),
    "camel": ("getArtifact", "listArtifacts", "storeArtifact"),
    "dotted": ("artifacts.get", "artifacts.list", "artifacts.store"),
}
_TYPES: Final[dict[type, str]] = {
    bool: "a boolean", int: "a number", float: "a number", list: "an array", dict: "an object",
}  # fmt: skip
DESCRIPTIONS: Final = (
    "Read a stored artifact, a page per call. Large results come as a stub with a pointer (art:...).",
    "List stored artifacts, or search their names and content.",
    "Store a text or JSON under a name for later. Answers its pointer.",
)
"""What the tools say of themselves, by which they are known under any name."""

_PURPOSES: Final[tuple[Purpose, ...]] = ("get", "list", "store")

_PREFIX: Final = re.compile(r"[\w.:/-]{0,40}", re.ASCII)
_LOG: Final = logging.getLogger("coatcheck")


@dataclass(frozen=True, slots=True)
class Tool(Description):
    """One tool: what a model is told of it, in the form that its provider wants, and `run`."""

    _answer: Callable[[dict[str, Any]], str] = field(repr=False)
    _failed: Callable[[str], str] = field(repr=False)

    @property
    def reads(self) -> bool:
        """Whether this is the one that reads artifacts: stubs name it."""
        return "pointer" in self.parameters["properties"]

    def run(self, /, **arguments: object) -> str:
        """The tool's answer to what a model sent."""
        try:
            return self._answer(self._checked(arguments))
        except Damaged as error:
            return self._failed(str(error))
        except StoreError as error:
            _LOG.warning("%s failed: %s", self.name, error.code)
            return self._failed(f"{self.name} failed: {error.code}. The store cannot answer just now; try once more.")
        except CoatcheckError as error:
            return self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - a tool never raises, whatever is wrong below
            _LOG.error("%s failed: %s", self.name, mask("".join(traceback.format_exception(error))))
            return self._failed(f"{self.name} failed. The fault is not in the arguments; go on without it.")

    def as_mcp(self) -> dict[str, Any]:
        """For a listing of MCP. All three may be called again to no harm, and reach nothing but the store."""
        hints = {
            "readOnlyHint": self.read_only,
            "destructiveHint": False,
            "idempotentHint": True,
            "openWorldHint": False,
        }
        return {**self._described("inputSchema"), "annotations": hints}

    def _checked(self, arguments: dict[str, object]) -> dict[str, Any]:
        """The arguments that say something: models send null and "" for what they leave out."""
        known: Mapping[str, Any] = self.parameters["properties"]
        unknown = [name for name in arguments if name not in known]
        if unknown:
            raise InvalidArgument(
                f"unknown argument {', '.join(clip(name, 40) for name in unknown[:5])}",
                hint=f"{self.name} takes {', '.join(known)}",
            )
        given = {
            name: value for name, value in arguments.items() if value is not None and (value != "" or name == "value")
        }
        for name in self.parameters.get("required", ()):
            if name not in given:
                raise InvalidArgument(f"{name} is missing", hint=f"call {self.name}({name}=…)")
        for name, value in given.items():
            if name == "lines" and isinstance(value, int) and not isinstance(value, bool):
                given[name] = str(value)
            elif not isinstance(value, str) and not (name == "value" and isinstance(value, dict | list)):
                what = _TYPES.get(type(value), f"a {type(value).__name__}")
                raise InvalidArgument(f"{name} is {what}, not a string", hint=f'write {name}="…"')
        return given


def toolkit(
    session: Session,
    *,
    style: Style = "snake",
    prefix: str = "",
    max_chars: int | None = None,
    max_store_bytes: int | None = None,
) -> list[Tool]:
    """The three tools of a session: get, list, store.

    `style` names them `get_artifact`, `getArtifact` or `artifacts.get`, with a `prefix` before. No answer has more than
    `max_chars` characters; what a model stores has `max_store_bytes` at most. By default they are what the store's
    settings say: 8,000 characters and 512 KiB."""
    if not isinstance(session, Session):
        raise InvalidArgument(
            f"a {type(session).__name__} is no session", hint="coatcheck.aio has a toolkit for its own"
        )
    max_chars = session.store.settings["page.max_chars"] if max_chars is None else max_chars
    max_store_bytes = session.store.settings["tools.max_store_bytes"] if max_store_bytes is None else max_store_bytes
    if style not in _STYLES:
        raise InvalidArgument(f"{clip(str(style))} is no style", hint="one of " + ", ".join(_STYLES))
    if not _PREFIX.fullmatch(prefix):
        raise InvalidArgument(f"{clip(str(prefix))} is no prefix", hint="letters, digits and _.:/- up to 40")
    sizes: tuple[tuple[str, object, int], ...] = (
        ("max_chars", max_chars, LEAST_CHARS),
        ("max_store_bytes", max_store_bytes, 1),
    )
    for what, number, least in sizes:
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise InvalidArgument(f"{what} is {clip(str(number))}", hint=f"a whole number from {least} on")
    get, listing, store = (prefix + name for name in _STYLES[style])
    run = Runs(session, max_chars, max_store_bytes, list_tool=listing)
    return [
        Tool(
            get,
            DESCRIPTIONS[0],
            _schema(
                ["pointer"],
                pointer="or a name",
                lines="e.g. 4100:4160 or -50:",
                grep="RE2 regex",
                query="shape, JSONPath ($.a[0]) or SQL (SELECT ... FROM artifact)",
                cursor="given by the last page",
            ),
            True,
            run.get,
            run.failed,
        ),
        Tool(
            listing,
            DESCRIPTIONS[1],
            _schema([], query="words to search for", cursor="given by the last page"),
            True,
            run.list,
            run.failed,
        ),
        Tool(
            store,
            DESCRIPTIONS[2],
            _schema(["name", "value"], name="", value="", content_type="e.g. application/json"),
            False,
            run.store,
            run.failed,
        ),
    ]


def known_as(told: Any) -> tuple[Purpose, str] | None:
    """Which of our tools this is, as a provider was told of it, and its name there. Hosts rename tools, but do not
    rewrite them: what it says of itself tells."""
    inner = told.get("function", told) if isinstance(told, Mapping) else None
    if not isinstance(inner, Mapping) or inner.get("description") not in DESCRIPTIONS:
        return None
    name = inner.get("name")
    return (_PURPOSES[DESCRIPTIONS.index(inner["description"])], name) if isinstance(name, str) else None


def _schema(required: list[str], **properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            name: {"type": "string", **({"description": about} if about else {})} for name, about in properties.items()
        },
        **({"required": required} if required else {}),
        "additionalProperties": False,
    }
