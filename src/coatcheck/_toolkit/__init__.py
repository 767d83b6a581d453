"""The tools for models: `get_artifact`, `list_artifacts` and `store_artifact`, defined once for
every surface.

A tool always returns text: bounded, with a first line that describes what follows, and marked, so
that it is never externalized again. It raises nothing: errors are returned as text that a model can
act on.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from coatcheck import programs
from coatcheck._toolkit.answers import Answers, Handles
from coatcheck.checks import one_of, whole
from coatcheck.errors import CoatcheckError, Damaged, InvalidArgument, StoreError
from coatcheck.externalize.policy import configured
from coatcheck.ids import clip
from coatcheck.parts import Part
from coatcheck.reading import sql
from coatcheck.redaction import mask
from coatcheck.session import Session

LEAST_CHARS: Final = 1_500
ALWAYS_LOAD: Final = "anthropic/alwaysLoad"

Style = Literal["snake", "camel", "dotted"]
Purpose = Literal["get", "list", "store", "wait"]
_STYLES: Final[dict[str, tuple[str, str, str, str]]] = {
    "snake": ("get_artifact", "list_artifacts", "store_artifact", "wait_for_call"),
    "camel": ("getArtifact", "listArtifacts", "storeArtifact", "waitForCall"),
    "dotted": ("artifacts.get", "artifacts.list", "artifacts.store", "calls.wait"),
}
_TYPES: Final[dict[type, str]] = {
    bool: "a boolean", int: "a number", float: "a number", list: "an array", dict: "an object",
}  # fmt: skip
DESCRIPTIONS: Final = (
    "Read a stored artifact, a page per call. A stub has its pointer (art:...). Ignore ~marks.",
    "List stored artifacts, or search them.",
    "Store text or JSON under a name.",
    "Get the result of a call that is still running, waiting for it if need be.",
)
_PURPOSES: Final[tuple[Purpose, ...]] = ("get", "list", "store", "wait")
_SCHEMA_KEYS: Final = ("parameters", "input_schema", "inputSchema")


_SQL: Final = ", DuckDB SELECT ... FROM artifact"
_CODE: Final = (
    "Python on the whole content: text, lines, data (JSON or rows); answers what it prints"
)


def _schema(required: list[str], **properties: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            name: {
                "type": _NOT_STRINGS.get(name, "string"),
                **({"description": about} if about else {}),
            }
            for name, about in properties.items()
        },
        **({"required": required} if required else {}),
    }


@functools.cache
def _schemas(*, has_sql: bool, has_programs: bool) -> tuple[dict[str, Any], ...]:
    """The schemas of the tools. They describe only what is installed."""
    code = {"code": _CODE} if has_programs else {}
    return (
        _schema(
            ["pointer"],
            pointer="or name; #/path for a part",
            lines="10:40,200:220 or -50:; narrows grep",
            grep="RE2 regex; counts each of A|B; count: numbers only; last: from the end; "
            "context: auto",
            context="",
            ignore_case="",
            count="",
            last="",
            query="text, shape, JSONPath $.a[0]" + _SQL * has_sql,
            **code,
            cursor="",
        ),
        _schema([], query="words", cursor=""),
        _schema(["name", "value"], name="", value="", content_type=""),
        _schema(["handle"], handle="", seconds="to wait, at most 60; 10 if left out, 0 only looks"),
    )


_NOT_STRINGS: Final = {
    "context": "integer",
    "ignore_case": "boolean",
    "count": "boolean",
    "last": "boolean",
}
_ARTICLES: Final = {"integer": "an integer", "boolean": "a boolean"}
_DIGITS: Final = 10
_BOOLEANS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_PREFIX: Final = re.compile(r"[\w.:/-]{0,40}", re.ASCII)
_LOG: Final = logging.getLogger("coatcheck")


@dataclass(frozen=True, slots=True)
class Description:
    """The name of a tool, what it does, and the JSON schema of its arguments. `read_only` is None
    if unknown.

    The `as_…` methods return it in the form of each provider, with the same bytes every time:
    providers cache them."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    read_only: bool | None

    def as_openai(self) -> dict[str, Any]:
        """For chat completions."""
        return {"type": "function", "function": self._described("parameters")}

    def as_openai_responses(self) -> dict[str, Any]:
        """For the Responses API. Not strict, since strict tools require every argument in every
        call."""
        return {"type": "function", **self._described("parameters"), "strict": False}

    def as_anthropic(self) -> dict[str, Any]:
        return self._described("input_schema")

    def as_mcp(self) -> dict[str, Any]:
        annotations = (
            {} if self.read_only is None else {"annotations": {"readOnlyHint": self.read_only}}
        )
        return {**self._described("inputSchema"), **annotations}

    def _described(self, schema: str) -> dict[str, Any]:
        return {
            "name": self.name,
            "description": self.description,
            schema: copy.deepcopy(dict(self.parameters)),
        }


@dataclass(frozen=True, slots=True)
class _Options:
    """What the tools of a kit have in common. `list_tool` is the name under which the model knows
    that tool, empty if it has none. A limit of None means the one in the store's settings."""

    max_chars: int | None
    max_store_bytes: int | None
    list_tool: str
    redact: Literal["store"] | None
    handles: Handles | None


@dataclass(frozen=True, slots=True)
class Tool(Description):
    """One tool: its description for a model, and `run` for the session that it is bound to."""

    purpose: Purpose
    _options: _Options = field(repr=False)
    _session: Session | None = field(repr=False, default=None)

    def bind(self, session: Session) -> Tool:
        """Return this tool for a session. Its description stays the same."""
        return replace(self, _session=_checked_session(session))

    def run(self, /, **arguments: object) -> str:
        """Run the tool with the arguments that a model sent, and return its answer. Raises
        `InvalidArgument` only if the tool is not bound to a session."""
        run = self._answers()
        try:
            answer: str = getattr(run, self.purpose)(self._checked(arguments))
        except CoatcheckError as error:
            if isinstance(error, Damaged) or not isinstance(error, StoreError):
                return run.failed(str(error))
            _LOG.warning("%s failed: %s", self.name, error.code)
            return run.failed(
                f"{self.name} failed: {error.code}. The store is unavailable at the moment; "
                "try again."
            )
        except Exception as error:  # noqa: BLE001 - a tool never raises
            _LOG.error("%s failed: %s", self.name, mask("".join(traceback.format_exception(error))))
            return run.failed(
                f"{self.name} failed. The arguments are not the cause; continue without it."
            )
        return answer

    def parts(self, /, **arguments: object) -> list[Part]:
        """Run the tool like `run`, for models that see: the answer, and the image itself if the
        artifact is one."""
        text = self.run(**arguments)
        given = {name: value for name, value in arguments.items() if value not in (None, "")}
        picture = self._answers().picture(given) if given.keys() == {"pointer"} else None
        return [Part(text), picture] if picture is not None else [Part(text)]

    def _answers(self) -> Answers:
        if self._session is None:
            raise InvalidArgument(
                f"{self.name} has no session", hint="call tool.bind(session) first"
            )
        options, settings = self._options, self._session.store.settings
        return Answers(
            self._session,
            settings["page.max_chars"] if options.max_chars is None else options.max_chars,
            settings["tools.max_store_bytes"]
            if options.max_store_bytes is None
            else options.max_store_bytes,
            options.list_tool,
            configured(settings, options.redact),
            options.handles,
        )

    def as_mcp(self) -> dict[str, Any]:
        """For MCP's list of tools. All three are idempotent, and reach only the store. Clients that
        load tools on demand are asked to load these at once, since stubs name them."""
        hints = {
            "readOnlyHint": self.read_only,
            "destructiveHint": False,
            "idempotentHint": True,
            "openWorldHint": False,
        }
        return {
            **self._described("inputSchema"),
            "annotations": hints,
            "_meta": {ALWAYS_LOAD: True},
        }

    def _checked(self, arguments: dict[str, object]) -> dict[str, Any]:
        """Return the arguments that are set: models send null and "" for arguments that they leave
        out."""
        known: Mapping[str, Any] = self.parameters["properties"]
        unknown = [name for name in arguments if name not in known]
        if unknown:
            raise InvalidArgument(
                f"unknown argument {', '.join(clip(name, 40) for name in unknown[:5])}",
                hint=f"{self.name} takes {', '.join(known)}",
            )
        given = {
            name: value
            for name, value in arguments.items()
            if value is not None and (value != "" or name == "value")
        }
        for name in self.parameters.get("required", ()):
            if name not in given:
                raise InvalidArgument(f"{name} is missing", hint=f"call {self.name}({name}=…)")
        return {name: _checked_value(name, value) for name, value in given.items()}


def toolkit(
    session: Session | None = None,
    *,
    style: Style = "snake",
    prefix: str = "",
    max_chars: int | None = None,
    max_store_bytes: int | None = None,
    redact: Literal["store"] | None = None,
    handles: Handles | None = None,
    only: Iterable[Purpose] | None = None,
    code: bool = True,
) -> list[Tool]:
    """Return the three tools of a session: get, list, store; or `only` some of them, e.g.
    `only=("get",)`. With `handles`, the executor whose calls the host starts, a fourth lets the
    model wait for them. Without a session, the tools are descriptions: `tool.bind(session)` returns
    one that runs.

    `style` names them `get_artifact`, `getArtifact` or `artifacts.get`, and `prefix` is put before
    the name. An answer has at most `max_chars` characters, and a model can store at most
    `max_store_bytes` in one call. The defaults come from the store's settings: 8,000 characters and
    512 KiB. `redact="store"`, here or in the settings, masks secrets in what a model stores.
    With the extra `programs`, reading takes `code`, unless `code=False`: for an agent that runs
    programs with a tool of its own (`coatcheck.executor.Programs`)."""
    if session is not None:
        _checked_session(session)
    one_of(style, "style", _STYLES)
    if not _PREFIX.fullmatch(prefix):
        raise InvalidArgument(
            f"prefix must be at most 40 letters, digits and any of _.:/-, got {clip(str(prefix))}"
        )
    whole(max_chars, "max_chars", least=LEAST_CHARS, optional=True)
    whole(max_store_bytes, "max_store_bytes", least=1, optional=True)
    one_of(redact, "redact", ("store",), optional=True)
    wanted = set(_PURPOSES[:3] if only is None else only)
    if isinstance(only, str) or not wanted or not wanted.issubset(_PURPOSES):
        raise InvalidArgument(
            f"only must be some of get, list and store, got {only!r}", hint='write only=("get",)'
        )
    wanted.discard("wait")
    if handles is not None:
        wanted.add("wait")
    names = [prefix + name for name in _STYLES[style]]
    options = _Options(
        max_chars, max_store_bytes, names[1] if "list" in wanted else "", redact, handles
    )
    schemas = _schemas(has_sql=sql.pool.is_installed, has_programs=code and programs.is_available())
    return [
        Tool(name, words, form, purpose != "store", purpose, options, session)
        for purpose, name, words, form in zip(_PURPOSES, names, DESCRIPTIONS, schemas, strict=True)
        if purpose in wanted
    ]


def _checked_session(session: object) -> Session:
    if not isinstance(session, Session):
        raise InvalidArgument(
            f"session must be a Session, got a {type(session).__name__}",
            hint="for async sessions, use coatcheck.aio.toolkit",
        )
    return session


def purpose_of(description: object) -> Purpose | None:
    """Return the purpose of the tool of ours that has exactly this description, or None."""
    if not isinstance(description, str):
        return None
    words = description.strip()
    return next(
        (one for one, text in zip(_PURPOSES, DESCRIPTIONS, strict=True) if words == text), None
    )


def function_of(described: object) -> Mapping[str, Any]:
    """Return the part of a tool's description, in any provider's format, that has its name; {} if
    there is none."""
    inner = described.get("function", described) if isinstance(described, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def known_as(described: object) -> tuple[Purpose, str] | None:
    """Recognise one of our tools in a provider's list of tools, and return its purpose and its name
    there.

    It has our description and our parameters, and its name ends with ours: hosts put a prefix
    before a name, and write the types of parameters in their own way. A tool that only resembles
    ours is a stranger's."""
    inner = function_of(described)
    purpose, name = purpose_of(inner.get("description")), inner.get("name")
    if purpose is None or not isinstance(name, str):
        return None
    place = _PURPOSES.index(purpose)
    endings = tuple(_plain_name(names[place]) for names in _STYLES.values())
    schema: Mapping[str, Any] = next(
        (inner[key] for key in _SCHEMA_KEYS if isinstance(inner.get(key), Mapping)), {}
    )
    has_ours = any(
        _has_parameters(schema, _schemas(has_sql=False, has_programs=has_programs)[place])
        for has_programs in (True, False)
    )
    return (purpose, name) if has_ours and _plain_name(name).endswith(endings) else None


def _plain_name(name: str) -> str:
    return name.replace(".", "_")  # as hosts write it if a provider accepts no dots


def _has_parameters(schema: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Whether a schema has exactly our parameters, and requires those that we require."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        return False
    return set(properties) == set(ours["properties"]) and set(ours.get("required", [])) <= set(
        map(str, required)
    )


def _checked_value(name: str, value: Any) -> Any:
    """An argument in its type. A number is accepted where a text is a number."""
    if name in _NOT_STRINGS:
        return _typed(name, value)
    if isinstance(value, str) or (name == "value" and isinstance(value, dict | list)):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and name in ("lines", "seconds"):
        return str(value)
    what = _TYPES.get(type(value), f"a {type(value).__name__}")
    raise InvalidArgument(f"{name} is {what}, not a string", hint=f'write {name}="…"')


def _typed(name: str, value: object) -> int | bool:
    """An integer or a boolean that a model may have sent as text."""
    text = str(value).strip().lower() if isinstance(value, str | int | float) else ""
    if _NOT_STRINGS[name] == "boolean" and text in _BOOLEANS:
        return _BOOLEANS[text]
    number = text.removesuffix(".0")
    if (
        _NOT_STRINGS[name] == "integer"
        and number.isascii()
        and number.isdigit()
        and len(number) < _DIGITS
    ):
        return int(number)
    example = "true" if _NOT_STRINGS[name] == "boolean" else "2"
    raise InvalidArgument(
        f"{name} must be {_ARTICLES[_NOT_STRINGS[name]]}", hint=f"write {name}={example}"
    )
