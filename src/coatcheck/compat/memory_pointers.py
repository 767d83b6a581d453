"""Memory pointers: a large result becomes `{pointer, preview, sizeBytes, name}`, and three tools store, get and list.

tools = wrap_tools([search, read_logs], RunContext(), ArtifactsConfig(enabled=True))
"""

from __future__ import annotations

import json
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import coatcheck
from coatcheck import Ref, Session, Store
from coatcheck import approx_byte_size as approx_byte_size
from coatcheck import is_pointer as is_pointer
from coatcheck.checks import whole
from coatcheck.errors import CoatcheckError, InvalidArgument
from coatcheck.executor import resolve_arguments
from coatcheck.externalize import About, configured, offloaded, put
from coatcheck.refs import iso_time
from coatcheck.values import as_text

Tool = Callable[..., Any]
TOOLS: Final = ("storeArtifact", "getArtifact", "listArtifacts")
_STATE_KEY: Final = "coatcheck_session"
_IDLE: Final = 86_400.0  # seconds that artifacts in memory outlive the last use of their session
_PREVIEW: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactsConfig:
    """`max_tool_output_bytes` counts what `approx_byte_size` returns: the UTF-8 bytes of the stringified result."""

    enabled: bool = False
    max_tool_output_bytes: int = 51_200
    preview_chars: int = _PREVIEW

    def __post_init__(self) -> None:
        whole(self.max_tool_output_bytes, "max_tool_output_bytes", least=1)
        whole(self.preview_chars, "preview_chars")


class RunContext:
    """One run of an agent. Artifacts live as long as the run, in memory.

    Runs that are given the same `session_state` or `session_id` share their artifacts. With a `store`, artifacts are
    kept there, with the store's own time to live."""

    def __init__(
        self,
        session_state: MutableMapping[str, Any] | None = None,
        *,
        session_id: str | None = None,
        store: Store | None = None,
    ) -> None:
        is_run = session_state is None and session_id is None
        self.session_state: MutableMapping[str, Any] = {} if session_state is None else session_state
        known = session_id or self.session_state.get(_STATE_KEY) or f"run-{uuid.uuid4().hex}"
        self.session: Session = (store or _memory()).session(known)
        self.session_state[_STATE_KEY] = known
        if is_run and store is None:
            weakref.finalize(self, self.session.end)
        elif store is None:
            _memory().collect(grace=0, orphans=False, compress=False)


def wrap_tools(tools: Mapping[str, Tool] | Iterable[Tool], ctx: RunContext, config: ArtifactsConfig) -> Any:
    """Return the tools with bounded results, and the three artifact tools, in the shape of `tools`: a mapping of names
    or a list. Pointers in keyword arguments become the stored values. If the config is not enabled, the tools stay as
    they are. Raises `InvalidArgument` if one of the three names is taken."""
    is_named = isinstance(tools, Mapping)
    given: dict[str, Tool] = dict(tools) if isinstance(tools, Mapping) else {tool.__name__: tool for tool in tools}
    if not config.enabled:
        return given if is_named else list(given.values())
    if taken := [name for name in TOOLS if name in given]:
        raise InvalidArgument(f"there is a tool {taken[0]!r} already", hint="wrap each list of tools once")

    policy = configured(ctx.session.store.settings).limited(
        enabled=True, max_bytes=config.max_tool_output_bytes, preview_chars=config.preview_chars,
        render=lambda ref, preview: _json(_entry(ref, preview)),
    )  # fmt: skip
    session, resolve = ctx.session, partial(resolve_arguments, ctx.session, foreign=True)
    wrapped = {name: offloaded(session.externalize, tool, name, policy, resolve) for name, tool in given.items()}
    wrapped |= {tool.__name__: tool for tool in _tools(ctx, config)}
    return wrapped if is_named else list(wrapped.values())


def store_artifact(ctx: RunContext, value: Any, name: str | None = None, content_type: str | None = None) -> Ref:
    """Store a value and return its ref; `ref.pointer` is the pointer. Raises `InvalidArgument` for a name that looks
    like a pointer, and for values that JSON cannot represent."""
    return put(ctx.session, value, About(name=name, media_type=content_type, tool=TOOLS[0]))


def get_artifact(ctx: RunContext, pointer_or_name: str, default: Any = None) -> Any:
    """Return the value behind a pointer or name, with its type, or `default` if there is none."""
    found = ctx.session.get(pointer_or_name)
    return found if found is not None or ctx.session.ref(pointer_or_name) else default


def list_artifacts(ctx: RunContext, preview_chars: int = _PREVIEW) -> list[dict[str, Any]]:
    """Return one entry for each artifact: pointer, name, sizeBytes, preview, contentType and storedAt."""
    found = []
    for ref in ctx.session.list():
        with ctx.session.open(ref) as stream:
            preview = stream.read(4 * preview_chars).decode("utf-8", "ignore")[:preview_chars]
        found.append(_entry(ref, preview) | {"contentType": ref.media_type, "storedAt": iso_time(ref.created)})
    return found


def _tools(ctx: RunContext, config: ArtifactsConfig) -> tuple[Tool, Tool, Tool]:
    def storeArtifact(name: str, value: Any, contentType: str | None = None) -> str:  # noqa: N802, N803
        """Store a value under a name. Returns its pointer, a preview and its size."""
        try:
            ref = store_artifact(ctx, value, name, contentType)
        except CoatcheckError as error:
            return f"[error: {error}]"
        return _json(_entry(ref, as_text(value)[: config.preview_chars]))

    def getArtifact(pointerOrName: str) -> Any:  # noqa: N802, N803
        """Return the whole value of an artifact, by its pointer or name."""
        missing = object()
        try:
            found = get_artifact(ctx, pointerOrName, missing)
        except CoatcheckError as error:
            return f"[error: {error}]"
        return f"[no artifact found for '{pointerOrName}']" if found is missing else found

    def listArtifacts() -> str:  # noqa: N802
        """List the stored artifacts as JSON."""
        return _json(list_artifacts(ctx, config.preview_chars))

    return storeArtifact, getArtifact, listArtifacts


def _entry(ref: Ref, preview: str) -> dict[str, Any]:
    return {"pointer": ref.pointer, "name": ref.name, "sizeBytes": ref.size_bytes, "preview": preview}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@cache
def _memory() -> Store:
    return coatcheck.open("memory:", ttl=_IDLE)
