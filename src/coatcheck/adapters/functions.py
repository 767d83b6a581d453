"""Plain functions in, plain functions out: `tools=slim([search, run_tests], session)`, for any
framework that takes functions as tools.

A wrapped function has the name, docstring and signature of the original, except that a parameter
that may be large accepts a pointer too. Its large results become stubs. Our three tools follow, as
functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Annotated, Any, get_origin

from coatcheck import Policy, Session, Store
from coatcheck._toolkit import Tool
from coatcheck.adapters import Adapter, Kit, Refusal, in_thread, shortened, widened, within
from coatcheck.executor.arguments import argument_pointers
from coatcheck.executor.binding import BadCall, BoundTool

Function = Callable[..., Any]


class _PassesPointers:
    """An annotation for frameworks that check arguments with pydantic: what has a pointer in it is
    checked later."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import core_schema

        def check(value: object, inner: Callable[[Any], Any]) -> Any:
            return value if any(argument_pointers(value)) else inner(value)

        return core_schema.no_info_wrap_validator_function(check, handler(source))

    def __repr__(self) -> str:
        return "PASSES_POINTERS"


_PASSES_POINTERS = _PassesPointers()

_TYPES = {"integer": int, "boolean": bool}


def slim(
    tools: Iterable[Function],
    session: Session | Store,
    *,
    policy: Policy | None = None,
    with_ours: bool = True,
) -> list[Function]:
    """Return the functions with large results as stubs and pointers as values, then our three tools
    as functions.

    Give each conversation a session of its own. With a store, all of these functions share one
    private session. A generator function stays as it is. `with_ours=False` leaves our tools out, if
    the host has them already."""
    given = list(tools)
    adapter = Adapter(session, host="functions", policy=policy)
    own = adapter.session(None)
    kit = adapter.kit(getattr(one, "__name__", "") for one in given)
    ours = [_as_function(tool.bind(own)) for tool in kit.tools] if with_ours else []
    return [*(_slimmed(one, own, kit) for one in given), *ours]


def _slimmed(function: Function, session: Session, kit: Kit) -> Function:
    if (
        not kit.policy.enabled
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    bound, signature = BoundTool(name, function), inspect.signature(function)

    def before(
        resources: ExitStack, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments | Refusal:
        """Return the arguments of the call, resolved. The function itself reports what the host got
        wrong."""
        call = signature.bind(*args, **kwargs)
        try:
            changed = bound.resolved(call.arguments, session, resources)
        except BadCall as error:
            return Refusal(f"[error: {name} was not called: {error}]")
        return inspect.BoundArguments(signature, dict(changed))

    def after(value: object) -> Any:
        return kit.result(session, value, tool=name).content

    def failed(error: Exception) -> None:
        """Shorten the message of an error that the host passes on to the model."""
        text = str(error)
        shown = kit.failure(session, text, tool=name)
        if shown != text:
            shortened(error, shown)

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def called_async(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as resources, within(session):
                call = await in_thread(before, resources, args, kwargs)
                if isinstance(call, Refusal):
                    return call.text
                try:
                    value = await function(*call.args, **call.kwargs)
                except Exception as error:
                    await in_thread(failed, error)
                    raise
                return await in_thread(after, value)

        return _described(called_async, function, signature)

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as resources, within(session):
            call = before(resources, args, kwargs)
            if isinstance(call, Refusal):
                return call.text
            try:
                value = function(*call.args, **call.kwargs)
            except Exception as error:
                failed(error)
                raise
            return after(value)

    return _described(called, function, signature)


def _described(wrapper: Any, function: Function, signature: inspect.Signature) -> Function:
    """Give a wrapper the signature of its function, with pointers allowed."""
    try:
        hints = inspect.get_annotations(function, eval_str=True)
    except (NameError, TypeError, AttributeError, SyntaxError):
        hints = dict(
            getattr(function, "__annotations__", {})
        )  # they name what only a type checker knows
    else:
        hints = {
            name: widened(hint) if name == "return" else _with_pointers(hint)
            for name, hint in hints.items()
        }
    parameters = [
        one.replace(annotation=hints.get(one.name, one.annotation))
        for one in signature.parameters.values()
    ]
    returns = hints.get("return", signature.return_annotation)
    wrapper.__signature__ = signature.replace(parameters=parameters, return_annotation=returns)
    wrapper.__annotations__ = hints
    return wrapper  # type: ignore[no-any-return]


def _with_pointers(hint: Any) -> Any:
    """Return the annotation of a parameter with pointers allowed. Our note is inside the union:
    frameworks treat a note on the parameter itself as its description."""
    wide = widened(hint)
    if wide is hint:
        return hint
    return (
        Annotated[wide, _PASSES_POINTERS]
        if get_origin(hint) is Annotated
        else Annotated[hint, _PASSES_POINTERS] | str
    )


def _annotation(form: Mapping[str, Any], *, is_required: bool) -> Any:
    kind: Any = _TYPES.get(form["type"], str)
    kind = kind if is_required else kind | None
    return Annotated[kind, form["description"]] if "description" in form else kind


def _as_function(tool: Tool) -> Function:
    """Return one of our tools as a function with a typed signature, and a docstring that describes
    each parameter."""

    def run(**arguments: Any) -> str:
        return tool.run(**arguments)

    properties, required = tool.parameters["properties"], tool.parameters.get("required", ())
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if name in required else None,
            annotation=_annotation(form, is_required=name in required),
        )
        for name, form in properties.items()
    ]
    signature = inspect.Signature(parameters, return_annotation=str)

    @functools.wraps(run)
    def called(*args: Any, **kwargs: Any) -> str:
        return run(**signature.bind(*args, **kwargs).arguments)

    lines = [f"    {name}: {form.get('description', name)}" for name, form in properties.items()]
    called.__name__ = called.__qualname__ = tool.name
    called.__doc__ = "\n".join([tool.description, "", "Args:", *lines])
    called.__signature__ = signature  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": str}
    return called
