"""A function as a tool: its name, its description for a model, and the validation of arguments, all
from its signature.

Any argument may be a pointer, so the schema of an array or an object accepts a string too. Errors
tell the model what to change: which parameter is missing, unknown or of the wrong type.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import json
import operator
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass, replace
from types import GenericAlias
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    Protocol,
    TypeGuard,
    TypeVar,
    runtime_checkable,
)

from coatcheck._toolkit import Description, purpose_of
from coatcheck.checks import check_name
from coatcheck.errors import CoatcheckError, InvalidArgument
from coatcheck.executor.arguments import (
    Resolver,
    Unresolvable,
    Want,
    alternatives,
    argument_pointers,
    hints_of,
    takes_streams,
    want,
)
from coatcheck.externalize import Policy
from coatcheck.externalize.storing import masked
from coatcheck.ids import clip

if TYPE_CHECKING:
    import pydantic

    from coatcheck.executor.outcomes import ErrorCode, ToolCall
    from coatcheck.session import Session

_T = TypeVar("_T")
_STAYS_INLINE: Final = "stays_inline"
_MAX_PROBLEMS: Final = 8
_POINTERS: Final = "Arguments may be pointers (art:...)."
_WANTED: Final[dict[Want, str]] = {
    "pointer": "a pointer (art:...)",
    "ref": "a pointer (art:...)",
    "stream": "a pointer (art:...) to the content",
    "path": "a path, or a pointer (art:...) to the content",
}
_MAX_CHARS: Final = 1_024  # of a description, as OpenAI limits it
_LARGE: Final = ("array", "object")
_BY_NAME: Final = ("properties", "$defs", "patternProperties", "dependentSchemas")
_DATA: Final = ("default", "enum", "const", "examples")
_PLAIN_NOTES: Final = ("pydantic", "annotated_types", "typing_extensions", "typing")
_FRAMEWORKS: Final = (
    "ag2", "agent_framework", "agents", "agno", "autogen", "crewai", "deepagents", "fastmcp",
    "google", "haystack", "langchain", "langgraph", "llama_index", "mcp", "pydantic_ai",
    "smolagents", "strands",
)  # fmt: skip
_FROM_MODELS: Final = (str, int, float, list, tuple, dict, type(None))
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@runtime_checkable
class ToolObject(Protocol):
    """A tool that checks its own arguments, such as those of `coatcheck.toolkit`. It gets pointers
    unresolved."""

    @property
    def name(self) -> str: ...

    def run(self, **arguments: Any) -> Any: ...


class BadCall(Exception):
    """The call is invalid. `code` is the outcome's code; the message is for the model."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


def stays_inline(tool: _T) -> _T:
    """Mark a tool whose results an executor never replaces by stubs: it returns what is stored, or
    bounds its results itself. A rule of the policy for the tool comes first."""
    setattr(tool, _STAYS_INLINE, True)
    return tool


class BoundTool:
    """A named callable. `call` takes raw arguments and returns the tool's result. `purpose` is set
    if it is one of our own tools. `stays_inline` is True if its results are never replaced by
    stubs."""

    def __init__(
        self, name: str, function: Callable[..., Any], *, itself: ToolObject | None = None
    ) -> None:
        self.name = name
        self._function = function
        self._object = itself
        self.purpose = purpose_of(getattr(itself, "description", None))
        self.stays_inline = (
            getattr(function if itself is None else itself, _STAYS_INLINE, False) is True
        )
        try:
            self._signature = inspect.signature(function)
        except (ValueError, TypeError):  # some built-in functions have no signature
            self._signature = inspect.Signature(
                [inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)]
            )
        hints = {} if itself is not None else _hints_of_callable(function)
        self._hints = {one.name: _hint(one, hints) for one in self._signature.parameters.values()}

    @property
    def takes(self) -> frozenset[str] | None:
        """The names of its parameters; None if it takes any."""
        if self._object is not None:
            schema: object = getattr(self._object, "parameters", None)
            properties: object = schema.get("properties") if isinstance(schema, Mapping) else None
            return frozenset(map(str, properties)) if isinstance(properties, Mapping) else None
        return None if self._rest is not None else frozenset(self._signature.parameters)

    def accepts(self, name: str) -> bool:
        """Whether it takes an argument of this name."""
        return self.takes is None or name in self.takes

    @property
    def resolves(self) -> bool:
        """Whether pointers in its arguments are resolved before it runs."""
        return self._object is None and self.takes != frozenset()

    def description(self) -> Description:
        """Describe the tool: a function by its docstring, annotations and defaults."""
        if self._object is not None:
            return _description_of_object(self.name, self._object)
        parameters = list(self._signature.parameters.values())
        named = [one for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD]
        found, shared = self._schemas([one.name for one in named])
        properties = {one.name: _accepted(found[one.name], one) for one in named}
        required = [one.name for one in named if _is_required(one)]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
            "additionalProperties": len(named) < len(parameters),
            **({"$defs": shared} if shared else {}),
        }
        pointers = _POINTERS if any(map(_takes_pointers, properties.values())) else ""
        text = _cut(inspect.getdoc(self._function) or "", _MAX_CHARS - len(pointers) - 1)
        return Description(self.name, " ".join(filter(None, [text, pointers])), schema, None)

    def call(self, call: ToolCall, session: Session, resources: ExitStack, policy: Policy) -> Any:
        """Call the tool. A tool that stores gets its arguments masked as the policy says."""
        try:
            given = call.parsed()
        except InvalidArgument as error:
            raise BadCall("invalid_arguments", str(error)) from error
        if self._object is not None:
            if self.purpose == "store":
                given = {name: masked(value, policy) for name, value in given.items()}
            return self._function(**given)
        if not given and not self._signature.parameters:
            return self._function()
        args, kwargs = self._bound(given, Resolver(session, resources))
        return self._function(*args, **kwargs)

    def _bound(self, given: dict[str, Any], resolver: Resolver) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments, with defaults for those that are not
        given."""
        problems = [
            f"the parameter {name!r} is missing"
            for name, one in self._signature.parameters.items()
            if name not in given and _is_required(one)
        ]
        accepted = self._accepted(given, resolver, problems)
        if problems:
            raise BadCall("invalid_arguments", self._explained(problems))
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, one in self._signature.parameters.items():
            if one.kind is inspect.Parameter.VAR_POSITIONAL:
                args += accepted.get(name, ())
            elif one.kind is inspect.Parameter.VAR_KEYWORD:
                kwargs |= accepted.get(name, {})
            elif one.kind is inspect.Parameter.KEYWORD_ONLY:
                kwargs[name] = accepted.get(name, one.default)
            else:
                args.append(accepted.get(name, one.default))
        return args, kwargs

    def _accepted(
        self, given: dict[str, Any], resolver: Resolver, problems: list[str]
    ) -> dict[str, Any]:
        """Return the given values by parameter, checked. Arguments without a parameter of their own
        go to `**rest` as a dict, or are added to `problems`."""
        parameters = self._signature.parameters
        rest = self._rest
        accepted: dict[str, Any] = {}
        for name, value in given.items():
            if name in parameters and name != rest:
                accepted[name] = self._checked(name, name, value, resolver, problems)
            elif rest is not None:
                others = accepted.setdefault(rest, {})
                others[name] = self._checked(name, rest, value, resolver, problems)
            else:
                problems.append(f"there is no parameter {clip(name)}{nearest(name, parameters)}")
        return accepted

    def _explained(self, problems: Sequence[str]) -> str:
        """Return the problems of a call for the model, and what the tool takes."""
        text = "; ".join(problems[:_MAX_PROBLEMS])
        if len(problems) > _MAX_PROBLEMS:
            text += f"; and {len(problems) - _MAX_PROBLEMS} more"
        if self._rest is not None:
            return text
        names = list(self._signature.parameters)[:20]
        return f"{text}; {self.name} takes {', '.join(names) or 'no parameters'}"

    @property
    def _rest(self) -> str | None:
        """The name of the parameter that takes all other arguments by name, if there is one."""
        for name, one in self._signature.parameters.items():
            if one.kind is inspect.Parameter.VAR_KEYWORD:
                return name
        return None

    def resolved(
        self, given: Mapping[str, Any], session: Session, resources: ExitStack
    ) -> Mapping[str, Any]:
        """Return arguments that a host has checked already, with values in place of pointers; the
        same object if there are none. Only such values are checked here. Raises `BadCall`."""
        resolver, problems = Resolver(session, resources), list[str]()
        found = {
            name: self._checked(name, name, value, resolver, problems)
            for name, value in given.items()
            if name in self._hints and any(argument_pointers(value))
        }
        if problems:
            raise BadCall("invalid_arguments", "; ".join(problems[:_MAX_PROBLEMS]))
        return {**given, **found} if found else given

    def _checked(
        self, label: str, name: str, value: Any, resolver: Resolver, problems: list[str]
    ) -> Any:
        """Return the value for a parameter, resolved and converted, or add to `problems`."""
        try:
            resolved = resolver.resolve(value, self._hints[name])
        except Unresolvable as error:
            raise BadCall("unresolved_pointer", f"the parameter {clip(label)}: {error}") from error
        is_rest = self._signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        if is_rest and not isinstance(resolved, list):
            problems.append(f"the parameter {name!r} takes an array")
            return None
        adapter = self._adapters.get(name) if isinstance(value, _FROM_MODELS) else None
        if adapter is None:  # the host's own objects, which a model cannot send, are not checked
            return resolved
        import pydantic

        try:
            return adapter.validate_python(resolved)
        except pydantic.ValidationError as error:
            problems += _type_problems(label, value, error)
            return None

    @functools.cached_property
    def _adapters(self) -> dict[str, pydantic.TypeAdapter[Any]]:
        """What validates and describes each parameter. A parameter without one accepts any
        value."""
        checked = {
            name: hint
            for name, hint in self._hints.items()
            if hint is not Any and not takes_streams(hint)
        }
        found = ((name, _adapter(hint)) for name, hint in checked.items())
        return {name: adapter for name, adapter in found if adapter is not None}

    def _schemas(self, names: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the schema of each parameter, {} if it has none, and the shared definitions."""
        import pydantic

        found: dict[str, dict[str, Any]] = {}
        adapters: list[tuple[str, Literal["validation"], pydantic.TypeAdapter[Any]]] = []
        for name in names:
            wanted = want(self._hints[name])
            found[name] = (
                {"type": "string", "description": _WANTED[wanted]} if wanted in _WANTED else {}
            )
            adapter = self._adapters.get(name)
            if wanted not in _WANTED and adapter is not None:
                with contextlib.suppress(pydantic.PydanticUserError, TypeError, NameError):
                    adapter.json_schema()
                    adapters.append((name, "validation", adapter))
        schemas, whole = pydantic.TypeAdapter.json_schemas(adapters)
        for (name, _), schema in schemas.items():
            words = [
                one
                for one in getattr(self._hints[name], "__metadata__", ())
                if isinstance(one, str)
            ]
            found[name] = {**_untitled(schema), **({"description": words[0]} if words else {})}
        return found, _untitled(whole).get("$defs", {})


def _type_problems(label: str, value: Any, error: pydantic.ValidationError) -> Iterator[str]:
    """Describe why a value is not of its parameter's type, without the whole of the value."""
    if isinstance(value, str):
        got = clip(value)
    elif isinstance(value, int | float | None):
        got = str(value)[:80]
    else:
        got = f"a {type(value).__name__}"
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    for one in errors[:_MAX_PROBLEMS]:
        where = "".join(f"/{step}" for step in one["loc"])
        at = f" at {clip(where)}" if where else ""
        yield f"the parameter {clip(label)}{at}: {one['msg'][:200]} (got {got})"


def bind(tools: Iterable[object] | Mapping[str, Callable[..., Any]]) -> dict[str, BoundTool]:
    """Return the tools by name: the name of the function or object, or the key of a mapping."""
    found: dict[str, BoundTool] = {}
    named = tools.items() if isinstance(tools, Mapping) else ((None, tool) for tool in tools)
    for name, tool in named:
        bound = _bound(name, tool)
        check_name(bound.name, "tool name")
        if bound.name in found:
            raise InvalidArgument(
                f"two tools have the name {clip(bound.name)}", hint="pass a dict to rename them"
            )
        found[bound.name] = bound
    return found


def _bound(name: str | None, tool: object) -> BoundTool:
    if _is_object(tool):
        return BoundTool(tool.name if name is None else name, tool.run, itself=tool)
    if callable(tool):
        return BoundTool(_name_of(tool) if name is None else name, tool)
    raise InvalidArgument(
        f"a {type(tool).__name__} is not a tool",
        hint="pass functions, or objects with name and run",
    )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIADIC


def _is_object(tool: object) -> TypeGuard[ToolObject]:
    return (
        not inspect.isroutine(tool) and not isinstance(tool, type) and isinstance(tool, ToolObject)
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a suggestion to append to 'there is no …', or ""."""
    close = difflib.get_close_matches(name[:200], list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or name == "<lambda>":
        raise InvalidArgument(
            f"the tool has no name: {clip(repr(function))}",
            hint="pass a dict of names and functions",
        )
    return name


def _hints_of_callable(function: Any) -> dict[str, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        return hints_of(function.__dict__.get("__init__", function))
    if inspect.isroutine(function):
        return hints_of(function)
    return hints_of(type(function).__call__)


def _adapter(hint: Any) -> pydantic.TypeAdapter[Any] | None:
    import pydantic  # here, so that importing the executor stays quick

    try:
        try:
            return pydantic.TypeAdapter(
                hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True)
            )
        except pydantic.PydanticUserError:  # a model or dataclass has its own configuration
            return pydantic.TypeAdapter(hint)
    except (pydantic.PydanticUserError, CoatcheckError, TypeError, NameError):
        return None  # pydantic has no schema for this annotation


def _description_of_object(name: str, tool: object) -> Description:
    """Describe a tool that checks its own arguments: by its attributes, or as taking any
    arguments."""
    if isinstance(tool, Description):
        return tool if tool.name == name else replace(tool, name=name)
    schema: object = getattr(tool, "parameters", None)
    text: object = getattr(tool, "description", None)
    return Description(
        name,
        text if isinstance(text, str) else "",
        schema
        if isinstance(schema, Mapping)
        else {"type": "object", "properties": {}, "additionalProperties": True},
        getattr(tool, "read_only", None),
    )


def _cut(text: str, limit: int) -> str:
    """Cut a docstring after the last line that fits, or within its only line."""
    if len(text) <= limit:
        return text
    whole = text[: limit - 1].rpartition("\n")[0].rstrip()
    return f"{whole or text[: limit - 1]}…"


def _hint(parameter: inspect.Parameter, hints: Mapping[str, Any]) -> Any:
    hint = hints.get(parameter.name, Any)
    return (
        GenericAlias(list, (hint,)) if parameter.kind is inspect.Parameter.VAR_POSITIONAL else hint
    )


def _untitled(schema: Any) -> Any:
    """Remove titles from a schema: they only repeat names, and cost tokens in every request."""
    if isinstance(schema, list):
        return [_untitled(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title"}
    for key, value in kept.items():
        if key in _BY_NAME:
            kept[key] = {name: _untitled(one) for name, one in value.items()}
        elif key not in _DATA:
            kept[key] = _untitled(value)
    return kept


def _accepted(schema: dict[str, Any], parameter: inspect.Parameter) -> dict[str, Any]:
    """Return a parameter's schema with its default, accepting a pointer if the value may be large.
    If the default is None, null is left out."""
    if parameter.default is None:
        rest = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
        if len(rest) == 1:
            schema = {**rest[0], **{key: value for key, value in schema.items() if key != "anyOf"}}
    if parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
        schema = _or_pointer(schema)
    if parameter.default is inspect.Parameter.empty or parameter.default is None:
        return schema
    try:
        return {**schema, "default": json.loads(json.dumps(parameter.default, allow_nan=False))}
    except (TypeError, ValueError):
        return schema


def widened_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a tool's arguments with pointers allowed: an argument that takes an
    array or an object accepts a string too."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return dict(schema)
    accepted = {
        name: _or_pointer(one) if isinstance(one, dict) else one for name, one in properties.items()
    }
    return {**schema, "properties": accepted}


def widened(annotation: Any) -> Any:
    """Return the annotation of a parameter with pointers allowed: `list[Row]` becomes `list[Row] |
    str`.

    What a host injects stays as it is: classes of frameworks, and parameters with annotations of
    their own."""
    if typing.get_origin(annotation) is Annotated:
        inner, *notes = typing.get_args(annotation)
        if not all(isinstance(one, str) or _package_of(type(one)) in _PLAIN_NOTES for one in notes):
            return annotation
        changed = widened(inner)
        return annotation if changed is inner else Annotated[(changed, *notes)]
    among = alternatives(annotation)
    if any(one in (str, Any) for one in among) or not any(map(_may_be_large, among)):
        return annotation
    return functools.reduce(operator.or_, (annotation, str))


def _may_be_large(annotation: Any) -> bool:
    """Whether values of this type may be large, and come from a model."""
    bare = typing.get_origin(annotation) or annotation
    if not isinstance(bare, type) or _package_of(bare).startswith(_FRAMEWORKS):
        return False
    is_collection = issubclass(bare, Mapping | Sequence | set | frozenset | bytes | bytearray)
    is_model = hasattr(bare, "model_validate") or typing.is_typeddict(bare) or is_dataclass(bare)
    return is_collection or bare in (Iterable, Iterator) or is_model


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _or_pointer(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type") in _LARGE:
        return {**schema, "type": [schema["type"], "string"]}
    if "$ref" in schema:
        return {"anyOf": [{"$ref": schema["$ref"]}, {"type": "string"}], **_without(schema, "$ref")}
    among = schema.get("anyOf", [])
    if (
        any(one.get("type") in _LARGE or "$ref" in one for one in among)
        and {"type": "string"} not in among
    ):
        return {**schema, "anyOf": [*among, {"type": "string"}]}
    return schema


def _takes_pointers(schema: dict[str, Any]) -> bool:
    """Whether pointers make sense for a parameter: any text or bytes, or what may be large."""
    return any(
        not _without(one, "description")
        or ("string" in _types(one) and one.get("format", "binary") == "binary")
        for one in schema.get("anyOf", [schema])
        if "enum" not in one and "const" not in one
    )


def _types(schema: dict[str, Any]) -> list[Any]:
    found = schema.get("type", [])
    return found if isinstance(found, list) else [found]


def _without(schema: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != key}
