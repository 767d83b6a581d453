"""A function as a tool: its name, and the validation of a model's arguments against its signature.

Errors tell the model what to change: which parameter is missing, unknown or of the wrong type.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast, runtime_checkable

from coatcheck._toolkit import Description, purpose_of
from coatcheck.errors import CoatcheckError, InvalidArgument
from coatcheck.executor.arguments import Resolver, UnresolvedPointer, hints_of, takes_streams
from coatcheck.executor.calls import ErrorCode, ToolCall
from coatcheck.executor.schemas import description_of, description_of_object
from coatcheck.ids import check_name, clip

if TYPE_CHECKING:
    from coatcheck.externalize import Policy
    from coatcheck.session import Session

_MAX_PROBLEMS = 8
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


@runtime_checkable
class ToolObject(Protocol):
    """A tool that checks its own arguments, such as those of `coatcheck.toolkit`. It gets pointers unresolved."""

    @property
    def name(self) -> str: ...

    def run(self, **arguments: Any) -> Any: ...


class BadCall(Exception):
    """The call is invalid. `code` is that of the outcome; the message is for the model."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


class BoundTool:
    """A named callable. `call` takes raw arguments and returns the tool's result. `purpose` is that of one of our own
    tools."""

    def __init__(self, name: str, function: Callable[..., Any], *, itself: ToolObject | None = None) -> None:
        self.name = name
        self._function = function
        self._object = itself
        self.purpose = purpose_of(getattr(itself, "description", None))
        self._lock = threading.Lock()
        self._adapters: dict[str, Callable[[Any], Any] | None] = {}
        try:
            self._signature = inspect.signature(function)
        except (ValueError, TypeError):  # some built-in functions have no signature
            self._signature = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)])
        self._hints = {} if itself is not None else _hints_of_callable(function)

    @property
    def takes(self) -> frozenset[str] | None:
        """The names of its parameters; None if it takes any."""
        if self._object is not None:
            schema: object = getattr(self._object, "parameters", None)
            properties: object = schema.get("properties") if isinstance(schema, Mapping) else None
            return frozenset(map(str, properties)) if isinstance(properties, Mapping) else None
        parameters = self._signature.parameters.values()
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
            return None
        return frozenset(one.name for one in parameters)

    @property
    def resolves(self) -> bool:
        """Whether pointers in its arguments are resolved before it runs."""
        return self._object is None and self.takes != frozenset()

    def description(self) -> Description:
        if self._object is not None:
            return description_of_object(self.name, self._object)
        return description_of(self.name, self._function, self._signature, self._hints)

    def call(self, call: ToolCall, session: Session, resources: ExitStack, policy: Policy) -> Any:
        """Call the tool. A tool that stores gets its arguments masked as the policy says."""
        try:
            given = call.parsed()
        except InvalidArgument as error:
            raise BadCall("invalid_arguments", str(error)) from error
        if self._object is not None:
            if self.purpose == "store":
                from coatcheck.externalize.pipeline import masked  # here, to keep imports quick

                given = {name: masked(value, policy) for name, value in given.items()}
            return self._function(**given)
        bound = self._bound(given, Resolver(session, resources))
        return self._function(*bound.args, **bound.kwargs)

    def _bound(self, given: dict[str, Any], resolver: Resolver) -> inspect.BoundArguments:
        parameters = self._signature.parameters
        plain = [name for name, one in parameters.items() if one.kind not in _VARIADIC]
        rest = next((name for name, one in parameters.items() if one.kind is inspect.Parameter.VAR_KEYWORD), None)
        problems = [
            f"the parameter {name!r} is missing"
            for name in plain
            if name not in given and parameters[name].default is inspect.Parameter.empty
        ]
        accepted: dict[str, Any] = {}
        for name, value in given.items():
            known = parameters.get(name)
            if known is None or name == rest:
                if rest is None:
                    problems.append(f"there is no parameter {clip(name)}{nearest(name, parameters)}")
                else:
                    accepted.setdefault(rest, {})[name] = self._checked(name, rest, value, resolver, problems)
            elif known.kind is inspect.Parameter.VAR_POSITIONAL:
                hint = GenericAlias(list, (self._hints.get(name, Any),))
                items = self._resolved(name, value, hint, resolver)
                if not isinstance(items, list):
                    problems.append(f"the parameter {name!r} takes an array")
                else:
                    accepted[name] = tuple(self._validated(name, name, item, item, problems) for item in items)
            else:
                accepted[name] = self._checked(name, name, value, resolver, problems)
        if problems:
            names = [name for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD]
            takes = f"; {self.name} takes " + (", ".join(names[:20]) or "no parameters")
            more = f"; and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
            raise BadCall(
                "invalid_arguments", "; ".join(problems[:_MAX_PROBLEMS]) + more + (takes if rest is None else "")
            )
        in_order = {name: accepted[name] for name in parameters if name in accepted}
        bound = inspect.BoundArguments(self._signature, cast(Any, in_order))
        bound.apply_defaults()
        return bound

    def _checked(self, label: str, name: str, value: Any, resolver: Resolver, problems: list[str]) -> Any:
        """Return the value for a parameter, resolved and converted, or add to `problems`."""
        resolved = self._resolved(label, value, self._hints.get(name, Any), resolver)
        return self._validated(label, name, value, resolved, problems)

    def _validated(self, label: str, name: str, value: Any, resolved: Any, problems: list[str]) -> Any:
        adapter = self._adapter(name, self._hints.get(name, Any))
        if adapter is None:
            return resolved
        import pydantic

        try:
            return adapter(resolved)
        except pydantic.ValidationError as error:
            got = f"a {type(value).__name__}"
            if isinstance(value, str | int | float | None):
                got = clip(value) if isinstance(value, str) else str(value)[:80]
            for one in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_PROBLEMS]:
                where = "".join(f"/{step}" for step in one["loc"])
                at = f" at {clip(where)}" if where else ""
                problems.append(f"the parameter {clip(label)}{at}: {one['msg'][:200]} (got {got})")
            return None

    def _resolved(self, label: str, value: Any, hint: Any, resolver: Resolver) -> Any:
        try:
            return resolver.resolve(value, hint)
        except UnresolvedPointer as error:
            raise BadCall("unresolved_pointer", f"the parameter {clip(label)}: {error}") from error

    def _adapter(self, name: str, hint: Any) -> Callable[[Any], Any] | None:
        """Return the function that validates a parameter, or None if any value is accepted."""
        if hint is Any or takes_streams(hint):
            return None
        with self._lock:
            if name not in self._adapters:
                self._adapters[name] = _validator(hint)
            return self._adapters[name]


def bind(tools: Iterable[object] | Mapping[str, Callable[..., Any]]) -> dict[str, BoundTool]:
    """Return the tools by name: that of the function or object, or the key of a mapping."""
    found: dict[str, BoundTool] = {}
    named = tools.items() if isinstance(tools, Mapping) else ((None, tool) for tool in tools)
    for key, tool in named:
        if _is_object(tool):
            bound = BoundTool(tool.name if key is None else key, tool.run, itself=tool)
        elif callable(tool):
            bound = BoundTool(_name_of(tool) if key is None else key, tool)
        else:
            raise InvalidArgument(
                f"a {type(tool).__name__} is not a tool", hint="pass functions, or objects with name and run"
            )
        check_name(bound.name, "tool name")
        if bound.name in found:
            raise InvalidArgument(f"two tools have the name {clip(bound.name)}", hint="pass a dict to rename them")
        found[bound.name] = bound
    return found


def _is_object(tool: object) -> TypeGuard[ToolObject]:
    return not inspect.isroutine(tool) and not isinstance(tool, type) and isinstance(tool, ToolObject)


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
            f"the tool has no name: {clip(repr(function))}", hint="pass a dict of names and functions"
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


def _validator(hint: Any) -> Callable[[Any], Any] | None:
    import pydantic  # here, so that importing the executor stays quick

    try:
        try:
            adapter = pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(arbitrary_types_allowed=True))
        except pydantic.PydanticUserError:  # a model or dataclass has its own configuration
            adapter = pydantic.TypeAdapter(hint)
    except (pydantic.PydanticUserError, CoatcheckError, TypeError, NameError):
        return None  # pydantic has no schema for this annotation
    return adapter.validate_python
