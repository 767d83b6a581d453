"""`@session.offload`: a plain function whose result is externalized."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from coatcheck.errors import InvalidArgument
from coatcheck.externalize import Outcome, Policy


def offloaded(
    externalize: Callable[..., Outcome], call: Callable[..., Any], tool: str | None, policy: Policy | None
) -> Callable[..., Any]:
    """The function, answering the content of an outcome. What it answers to be awaited is awaited first, and the store
    is then reached in a thread."""
    if not callable(call):
        raise InvalidArgument(f"cannot offload a {type(call).__name__}", hint="decorate a function")
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise InvalidArgument("cannot offload a generator", hint="run it with a ToolExecutor, which streams it")
    name = tool or getattr(call, "__name__", None)

    async def settled(waiting: Awaitable[Any]) -> Any:
        import asyncio  # here, so that importing coatcheck stays quick

        value = await waiting
        return (await asyncio.to_thread(externalize, value, tool=name, policy=policy)).content

    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            return await settled(call(*args, **kwargs))

        return awaited

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        value = call(*args, **kwargs)
        if inspect.isawaitable(value):  # an object whose __call__ is a coroutine function, a future
            return settled(value)
        return externalize(value, tool=name, policy=policy).content

    return called
