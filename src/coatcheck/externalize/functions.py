"""Functions that return the externalized content of their results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from coatcheck.errors import InvalidArgument
from coatcheck.externalize.outcome import Outcome
from coatcheck.externalize.policy import Policy


def offloaded(
    externalize: Callable[..., Outcome],
    call: Callable[..., Any],
    tool: str | None,
    policy: Policy | None,
    resolve: Callable[[dict[str, Any]], Mapping[str, Any]] = dict,
) -> Callable[..., Any]:
    """Wrap a function so that it returns the externalized content of its result. An awaitable
    result is awaited first, and then stored in a thread. `resolve` is applied to its keyword
    arguments."""
    if not callable(call):
        raise InvalidArgument(f"cannot offload a {type(call).__name__}", hint="decorate a function")
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise InvalidArgument(
            "cannot offload a generator", hint="run it with a ToolExecutor, which streams it"
        )
    name = tool or getattr(call, "__name__", None)

    import asyncio  # here, so that importing coatcheck stays quick

    async def content_of(result: Awaitable[Any]) -> Any:
        value = await result
        return (await asyncio.to_thread(externalize, value, tool=name, policy=policy)).content

    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await content_of(call(*args, **await asyncio.to_thread(resolve, kwargs)))

        return awaited

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        value = call(*args, **resolve(kwargs))
        if inspect.isawaitable(value):  # an object with an async __call__, or a future
            return content_of(value)
        return externalize(value, tool=name, policy=policy).content

    return called
