"""Memory pointers: a large result becomes `{pointer, preview, sizeBytes, name}`, and three tools
store, get and list.

tools = wrap_tools([search, read_logs], RunContext(), ArtifactsConfig(enabled=True))
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import coatcheck
from coatcheck import Ref, Session, Store
from coatcheck import approx_byte_size as approx_byte_size
from coatcheck import is_pointer as is_pointer
from coatcheck.checks import valid, whole
from coatcheck.compat._heads import head_of
from coatcheck.compat._ids import id_prefix
from coatcheck.compat._stores import Place, folder_of, is_store
from coatcheck.errors import CoatcheckError, InvalidArgument, InvalidPointer, StoreError
from coatcheck.executor import Pointer, resolve_arguments, stays_inline
from coatcheck.externalize import About, Outcome, configured, offloaded, put
from coatcheck.ids import clip
from coatcheck.refs import iso_time

Tool = Callable[..., Any]
TOOLS: Final = ("storeArtifact", "getArtifact", "listArtifacts")
ARTIFACTS_KEY: Final = "__artifacts"
SESSION_KEY: Final = "coatcheck_session"

_MAX_TOOL_OUTPUT_BYTES: Final = 51_200
_PREVIEW_CHARS: Final = 200
_ORIGINAL_SETTINGS: Final = {
    "maxToolOutputBytes": "max_tool_output_bytes",
    "previewChars": "preview_chars",
}
_ORIGINAL_OPTIONS: Final = {
    "name": "name",
    "contentType": "content_type",
    "content_type": "content_type",
}
_OWNED: Final = "run-"  # how the ids of sessions begin that end with their state
_IDLE: Final = (
    86_400.0  # seconds that the artifacts of a named session in memory outlive its last use
)
_LOG: Final = logging.getLogger("coatcheck")


@dataclass(frozen=True, slots=True, init=False)
class ArtifactsConfig:
    """`max_tool_output_bytes` counts what `approx_byte_size` returns: the UTF-8 bytes of the
    stringified result.

    The settings are accepted under their original names too: `maxToolOutputBytes` and
    `previewChars`."""

    enabled: bool = False
    max_tool_output_bytes: int = _MAX_TOOL_OUTPUT_BYTES
    preview_chars: int = _PREVIEW_CHARS

    def __init__(
        self,
        *,
        enabled: bool = False,
        max_tool_output_bytes: int = _MAX_TOOL_OUTPUT_BYTES,
        preview_chars: int = _PREVIEW_CHARS,
        **original: int,
    ) -> None:
        settings = {"max_tool_output_bytes": max_tool_output_bytes, "preview_chars": preview_chars}
        for name, value in original.items():
            if name not in _ORIGINAL_SETTINGS:
                known = "enabled, maxToolOutputBytes and previewChars"
                raise InvalidArgument(
                    f"there is no setting {clip(name)}", hint=f"the settings are {known}"
                )
            settings[_ORIGINAL_SETTINGS[name]] = value
        valid(isinstance(enabled, bool), enabled, "enabled", "True or False")
        whole(settings["max_tool_output_bytes"], "max_tool_output_bytes", least=1)
        whole(settings["preview_chars"], "preview_chars")
        object.__setattr__(self, "enabled", enabled)
        for name, value in settings.items():
            object.__setattr__(self, name, value)


class ArtifactMap(dict[str, dict[str, Any]]):
    """The artifacts that a session state has stored, by id, each as `list_artifacts` shows it.

    Their values are in the store behind `session`. In memory, they live as long as this map. JSON
    and pickle write it as a plain dict, without the values; a copy of the state shares the map."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __copy__(self) -> ArtifactMap:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ArtifactMap:
        return self

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[str, dict[str, Any]]]]:
        return dict, (dict(self),)


class RunContext:
    """One run of an agent. Its artifacts are in `session_state["__artifacts"]`, and live as long as
    that state.

    Runs that are given the same `session_state`, or a copy of it while it exists, share their
    artifacts; so do runs with the same `session_id`. With a `store` (an open one, a folder, or an
    `s3://` address, which is opened once for the process), artifacts are kept there, with the
    store's own time to live."""

    def __init__(
        self,
        session_state: MutableMapping[str, Any] | None = None,
        *,
        session_id: str | None = None,
        store: Place | None = None,
    ) -> None:
        state: MutableMapping[str, Any] = {} if session_state is None else session_state
        if not isinstance(state, MutableMapping):
            raise InvalidArgument(f"session_state must be a dict, got a {type(state).__name__}")
        before = state.get(ARTIFACTS_KEY)
        if store is not None:
            known = session_id or state.get(SESSION_KEY) or _new_id()
            artifacts = ArtifactMap(_store_at(store).session(known))
        elif session_id is not None:
            artifacts = _named(session_id)
        elif isinstance(before, ArtifactMap):
            artifacts = before
        else:
            artifacts = _in_memory(state.get(SESSION_KEY))
        self._artifacts = artifacts
        self.session_state = state
        self.session = artifacts.session
        state[ARTIFACTS_KEY] = artifacts
        state[SESSION_KEY] = self.session.session_id
        if isinstance(before, Mapping) and before is not artifacts:
            self._restore(before)

    def note(self, ref: Ref) -> None:
        """Add an artifact to the map of the state."""
        self._artifacts[ref.artifact_id] = _entry(self.session, ref, _PREVIEW_CHARS)

    def _restore(self, before: Mapping[str, Any]) -> None:
        """Add the artifacts that the state had before: in another store, saved with their values,
        or just named."""
        other = before.session if isinstance(before, ArtifactMap) else None
        gone = 0
        for artifact_id, saved in before.items():
            entry = saved if isinstance(saved, Mapping) else {}
            own = _found(self.session, artifact_id)
            if own is not None:
                self.note(own)
            elif "value" in entry:
                store_artifact(self, entry["value"], entry.get("name"), entry.get("contentType"))
            elif other is None or not self._take(other, artifact_id):
                gone += 1
        if gone:
            _LOG.warning(
                "%d of the artifacts that a session state names are gone: without store=, "
                "RunContext keeps them in memory, as long as the state or a copy of it exists in "
                "this process",
                gone,
            )

    def _take(self, other: Session, artifact_id: object) -> bool:
        """Copy an artifact from a session in another store, and return whether it was there."""
        try:
            ref = _found(other, artifact_id)
            if ref is not None:
                store_artifact(self, other.get(ref), ref.name, ref.media_type)
        except StoreError:  # that store is closed, or fails
            return False
        return ref is not None


def wrap_tools(
    tools: Mapping[str, Tool] | Iterable[Tool], ctx: RunContext, config: ArtifactsConfig
) -> Any:
    """Return the tools with bounded results, and the three artifact tools, in the shape of `tools`:
    a mapping of names or a list. Pointers in keyword arguments become the stored values. Generators
    stream, and stay as they are. If the config is not enabled, all tools stay as they are. Raises
    `InvalidArgument` if one of the three names is taken."""
    if isinstance(tools, Mapping):
        given = list(tools.items())
    else:
        given = [(_name_of(tool), tool) for tool in tools]
    if config.enabled:
        wrapped = _wrapped(given, ctx, config)
    else:
        wrapped = given
    return dict(wrapped) if isinstance(tools, Mapping) else [tool for _, tool in wrapped]


def store_artifact(
    ctx: RunContext,
    value: Any,
    name: str | Mapping[str, Any] | None = None,
    content_type: str | None = None,
) -> Ref:
    """Store a value and return its ref; `ref.pointer` is the pointer. The options may be a mapping,
    as in the original: `{"name": …, "contentType": …}`. Raises `InvalidArgument` for a name that
    looks like a pointer, and for values that JSON cannot represent."""
    options: dict[str, Any] = {"name": name, "content_type": content_type}
    if isinstance(name, Mapping):
        options["name"] = None
        for key, option in name.items():
            if key not in _ORIGINAL_OPTIONS:
                raise InvalidArgument(
                    f"there is no option {clip(str(key))}", hint="use name and contentType"
                )
            options[_ORIGINAL_OPTIONS[key]] = option
    about = About(name=options["name"], media_type=options["content_type"], tool=TOOLS[0])
    ref = put(ctx.session, value, about)
    ctx.note(ref)
    return ref


def get_artifact(ctx: RunContext, pointer_or_name: str, default: Any = None) -> Any:
    """Return the value behind a pointer or name, with its type, or `default` if there is none. The
    other spellings of an id are accepted too: `art_` with 16 hex characters, and all 64 of them."""
    prefix = id_prefix(pointer_or_name)
    for target in (pointer_or_name, f"art:{prefix}" if prefix else None):
        try:
            if target is not None and ctx.session.ref(target) is not None:
                return ctx.session.get(target)
        except InvalidPointer:
            continue  # it begins like a pointer and is not one, so there is no artifact
    return default


def list_artifacts(ctx: RunContext, preview_chars: int = _PREVIEW_CHARS) -> list[dict[str, Any]]:
    """Return one entry for each artifact: pointer, name, sizeBytes, preview, contentType and
    storedAt. Secrets in previews are masked."""
    return [_entry(ctx.session, ref, preview_chars) for ref in ctx.session.list()]


def saved_artifacts(ctx: RunContext) -> dict[str, dict[str, Any]]:
    """Return the artifacts of a context with their values, to be kept in a storage of your own.
    Passing this later as `session_state["__artifacts"]` restores them."""
    saved: dict[str, dict[str, Any]] = {}
    for ref in ctx.session.list():
        saved[ref.artifact_id] = _entry(ctx.session, ref, _PREVIEW_CHARS) | {
            "value": ctx.session.get(ref)
        }
    return saved


def _wrapped(
    given: list[tuple[str, Tool]], ctx: RunContext, config: ArtifactsConfig
) -> list[tuple[str, Tool]]:
    for name, _ in given:
        if name in TOOLS:
            raise InvalidArgument(
                f"there is a tool {name!r} already", hint="wrap each list of tools once"
            )

    def render(ref: Ref, preview: str) -> str:
        ctx.note(ref)
        return _json(_pointer_entry(ref, preview))

    # The tools hold the context, so that its artifacts live at least as long as they do.
    def externalize(value: object, **options: Any) -> Outcome:
        return ctx.session.externalize(value, **options)

    def resolve(arguments: dict[str, Any]) -> Mapping[str, Any]:
        return resolve_arguments(ctx.session, arguments, foreign=True)

    policy = configured(ctx.session.store.settings).limited(
        enabled=True,
        max_bytes=config.max_tool_output_bytes,
        preview_chars=config.preview_chars,
        render=render,
    )
    wrapped: list[tuple[str, Tool]] = []
    for name, tool in given:
        if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
            wrapped.append((name, tool))
            continue
        bounded = offloaded(externalize, tool, name, policy, resolve)
        if not hasattr(tool, "__name__"):  # a partial, or an object that can be called
            bounded.__name__ = name
        wrapped.append((name, bounded))
    wrapped += [(tool.__name__, tool) for tool in _tools(ctx, config)]
    return wrapped


def _tools(ctx: RunContext, config: ArtifactsConfig) -> tuple[Tool, Tool, Tool]:
    @stays_inline
    def storeArtifact(name: str, value: str, contentType: str | None = None) -> str:  # noqa: N802, N803
        """Store a value under a name. Returns its pointer, a preview and its size."""
        try:
            ref = store_artifact(ctx, value, name, contentType)
            return _json(_pointer_entry(ref, head_of(ctx.session, ref, config.preview_chars)))
        except CoatcheckError as error:
            return f"[error: {error}]"

    @stays_inline
    def getArtifact(pointerOrName: Pointer) -> Any:  # noqa: N802, N803
        """Return the whole value of an artifact, by its pointer or name."""
        missing = object()
        try:
            found = get_artifact(ctx, pointerOrName, missing)
        except CoatcheckError as error:
            return f"[error: {error}]"
        return f"[no artifact found for '{pointerOrName}']" if found is missing else found

    @stays_inline
    def listArtifacts() -> str:  # noqa: N802
        """List the stored artifacts as JSON."""
        return _json(list_artifacts(ctx, config.preview_chars))

    return storeArtifact, getArtifact, listArtifacts


def _pointer_entry(ref: Ref, preview: str) -> dict[str, Any]:
    return {
        "pointer": ref.pointer,
        "preview": preview,
        "sizeBytes": ref.size_bytes,
        "name": ref.name,
    }


def _entry(session: Session, ref: Ref, preview_chars: int) -> dict[str, Any]:
    return {
        "pointer": ref.pointer,
        "name": ref.name,
        "sizeBytes": ref.size_bytes,
        "preview": head_of(session, ref, preview_chars),
        "contentType": ref.media_type,
        "storedAt": iso_time(ref.created),
    }


def _found(session: Session, artifact_id: object) -> Ref | None:
    """Return the ref of an id in any spelling."""
    prefix = id_prefix(artifact_id)
    return session.ref(f"art:{prefix}") if prefix else None


def _name_of(tool: Tool) -> str:
    function: Any = tool
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# Artifacts in memory. A session whose id begins with `run-` belongs to one map, and ends with it.
# Its id is never used again, so that the end of one state cannot remove the artifacts of another.
_lock = threading.Lock()
_live: weakref.WeakValueDictionary[str, ArtifactMap] = weakref.WeakValueDictionary()
_to_end: deque[Session] = deque()
_stores: dict[str, Store] = {}


def _in_memory(session_id: object) -> ArtifactMap:
    """Return the artifacts of the session that a state names, or new ones that end with the
    state."""
    if isinstance(session_id, str) and session_id:
        known = _live.get(session_id)
        if known is not None:
            return known
        if not session_id.startswith(_OWNED):
            return _named(session_id)
    _end_sessions()
    session = _memory().session(_new_id(), ttl=None)
    artifacts = ArtifactMap(session)
    _live[session.session_id] = artifacts
    weakref.finalize(artifacts, _end, session).atexit = False
    return artifacts


def _named(session_id: str) -> ArtifactMap:
    """Return the artifacts of a session in memory that outlive the state, until a day after their
    last use."""
    _memory().collect(grace=0, orphans=False, compress=False)
    return ArtifactMap(_memory().session(session_id))


def _end(session: Session) -> None:
    """End a session whose state is gone. The garbage collector may call this in the middle of
    another call to the store, which then refuses: the next state that is made ends it."""
    try:
        session.end()
    except StoreError:
        _to_end.append(session)


def _end_sessions() -> None:
    for _ in range(len(_to_end)):
        _end(_to_end.popleft())


def _new_id() -> str:
    return f"{_OWNED}{uuid.uuid4().hex}"


@functools.cache
def _memory() -> Store:
    return coatcheck.open("memory:", ttl=_IDLE)


def _store_at(place: Place) -> Store:
    """Return an open store as it is. One that is named by its address or folder is opened once for
    the process."""
    if isinstance(place, Store):
        return place
    address = str(place) if is_store(place) else str(folder_of(place, "store"))
    with _lock:
        if address not in _stores or _stores[address].closed:
            _stores[address] = coatcheck.open(address)
        return _stores[address]
