"""Google ADK: `App(…, plugins=[Coatcheck(store)])`, and `CoatcheckArtifacts(store)` as the artifact
service.

The plugin resolves pointers before a tool runs, and replaces large results in the event that
carries them: after every callback of other plugins and of the agent, and before the event reaches
the session and the model. Put it first in the list. Live runs (`run_live`) pass unchanged, because
ADK lets no plugin add tools there.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from coatcheck import Policy, Session, Store
from coatcheck._toolkit import Purpose
from coatcheck.adapters import (
    TTL,
    Adapter,
    ContentPart,
    Kit,
    Refusal,
    current_session,
    in_thread,
    missing,
    within,
)
from coatcheck.ids import SCHEME

try:
    from google.adk.agents.callback_context import CallbackContext
    from google.adk.agents.invocation_context import InvocationContext
    from google.adk.artifacts import artifact_util
    from google.adk.artifacts.base_artifact_service import (
        ArtifactVersion,
        BaseArtifactService,
        ensure_part,
    )
    from google.adk.errors.input_validation_error import InputValidationError
    from google.adk.events.event import Event
    from google.adk.models.llm_request import LlmRequest
    from google.adk.plugins.base_plugin import BasePlugin
    from google.adk.tools.base_tool import BaseTool
    from google.adk.tools.tool_context import ToolContext
    from google.genai import types
except ImportError as error:
    raise missing("google.adk", "google-adk>=2.13,<3") from error

__all__ = ["Coatcheck", "CoatcheckArtifacts"]

_FINAL: Final = frozenset({"set_model_response", "finish_task"})
"""Tools whose result is the answer of the run. It must reach the user whole."""

_MOST_SESSIONS: Final = 1_000  # sessions that are kept at hand
_SERIES: Final = "file:"
_DEPTH: Final = 5
"""The number of references from artifact to artifact that a load follows, as in ADK's own
services."""


class Coatcheck(BasePlugin):
    """A plugin that takes large tool results out of the context of every agent of an app,
    sub-agents included."""

    def __init__(
        self,
        store: Store | Session | str | Path,
        *,
        policy: Policy | None = None,
        ttl: float | None = TTL,
        only: Iterable[Purpose] | None = None,
        name: str = "coatcheck",
    ) -> None:
        super().__init__(name=name)
        self._adapter = Adapter(store, host="adk", policy=policy, ttl=ttl, only=only)
        self._kits: dict[str, Kit] = {}
        self._sessions: dict[str, Session] = {}

    def forget(self, *, app_name: str, user_id: str, session_id: str) -> None:
        """Drop what belongs to a session. Call it where you delete the session: ADK does not report
        that."""
        host_id = _host_id(app_name, user_id, session_id)
        self._sessions.pop(host_id, None)
        self._adapter.forget(host_id)

    async def before_run_callback(self, *, invocation_context: InvocationContext) -> None:
        await self.session(invocation_context.session)

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Add our tools after the agent's own, and replace large results that came another way:
        from the client, or from an earlier run that ended with one. Gemini rejects functions if an
        agent has only built-in tools or a response schema; such an agent gets none."""
        config = llm_request.config
        if not llm_request.tools_dict and (config.tools or config.response_schema):
            return
        kit = self._kits[callback_context.agent_name] = self._adapter.kit(llm_request.tools_dict)
        llm_request.append_tools([_ArtifactTool(self, kit, one) for one in kit.tools])
        for index, content in enumerate(llm_request.contents):
            llm_request.contents[index] = await self._slimmed(
                content, kit, callback_context.session
            )

    async def before_tool_callback(
        self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: ToolContext
    ) -> dict[str, Any] | None:
        """Resolve the pointers in a copy of the arguments: the event keeps them as they were
        sent."""
        if isinstance(tool, _ArtifactTool):
            return None
        session = await self.session(tool_context.session)
        within(
            session
        ).__enter__()  # ADK runs each call in a context of its own, so it ends with the call
        if SCHEME not in repr(
            tool_args
        ):  # most calls: nothing is awaited, and the order of calls is ADK's
            return None
        kit = self._kit(tool_context.agent_name)
        resolved = await in_thread(kit.arguments, session, tool.name, tool_args, _schema(tool))
        if isinstance(resolved, Refusal):
            return {"error": resolved.text}
        if resolved is not tool_args:
            tool_args.update(resolved)
        return None

    async def on_event_callback(
        self, *, invocation_context: InvocationContext, event: Event
    ) -> None:
        """Replace large results in an event with stubs, in place, so that later plugins still see
        the event. A result that ends the run stays whole."""
        if (
            invocation_context.live_request_queue is None
            and event.content
            and not event.is_final_response()
        ):
            event.content = await self._slimmed(
                event.content, self._kit(event.author), invocation_context.session
            )

    async def _slimmed(self, content: types.Content, kit: Kit, of: Any) -> types.Content:
        parts = content.parts or []
        if not kit.policy.enabled or not any(_is_result(part, kit) for part in parts):
            return content
        session = await self.session(of)
        slim = await in_thread(
            lambda: [_slim(kit, session, one) if _is_result(one, kit) else one for one in parts]
        )
        return (
            content
            if all(map(operator.is_, slim, parts))
            else content.model_copy(update={"parts": slim})
        )

    def _kit(self, agent: str) -> Kit:
        return self._kits.get(agent) or self._adapter.kit()

    async def session(self, session: Any) -> Session:
        """Return the store's session for a session of ADK. Inside a tool, it is the one of the run
        around it."""
        host_id = _host_id(session.app_name, session.user_id, session.id)
        if current_session() is not None:
            return self._adapter.session(host_id)
        if host_id not in self._sessions:
            found = await in_thread(self._adapter.session, host_id)
            while len(self._sessions) >= _MOST_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[host_id] = found
        return self._sessions[host_id]


class _ArtifactTool(BaseTool):
    """One of our tools, as ADK declares and runs it."""

    def __init__(self, plugin: Coatcheck, kit: Kit, tool: Any) -> None:
        super().__init__(name=tool.name, description=tool.description)
        self._plugin, self._kit, self._parameters = plugin, kit, tool.parameters

    def _get_declaration(self) -> types.FunctionDeclaration:
        return types.FunctionDeclaration(
            name=self.name, description=self.description, parameters_json_schema=self._parameters
        )

    async def run_async(self, *, args: dict[str, Any], tool_context: ToolContext) -> Any:
        session = await self._plugin.session(tool_context.session)
        text, *pictures = await in_thread(self._kit.answer, session, self.name, args)
        if not pictures:
            return text.text
        return [
            text.text,
            *(types.Part.from_bytes(data=one.data, mime_type=one.media_type) for one in pictures),
        ]


class CoatcheckArtifacts(BaseArtifactService):
    """An artifact service: equal content is stored once, every version can be read, nothing expires
    by default.

    It has a session of the store per app, user and session, and one per app and user for names with
    `user:`. The versions of a file are a series of records, so two processes never get the same
    number."""

    def __init__(self, store: Store | str | Path, *, ttl: float | None = None) -> None:
        self._adapter = Adapter(store, host="adk-files", ttl=ttl)

    async def save_artifact(
        self,
        *,
        app_name: str,
        user_id: str,
        filename: str,
        artifact: types.Part | dict[str, Any],
        session_id: str | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> int:
        part = ensure_part(artifact)
        blob, file = part.inline_data, part.file_data
        if blob is None and part.text is None and file is None:
            raise InputValidationError("Not supported artifact type.")
        if artifact_util.is_artifact_ref(part):
            _referenced(part, app_name, user_id, session_id, _DEPTH)
        mime_type = (
            blob.mime_type
            if blob
            else "text/plain"
            if part.text is not None
            else file and file.mime_type
        )
        about = ArtifactVersion(
            version=0, canonical_uri="", mime_type=mime_type, custom_metadata=custom_metadata or {}
        )
        shape = part.model_dump(
            mode="json", exclude={"text": True, "inline_data": {"data"}}, exclude_none=True
        )
        session = await self._session(app_name, user_id, session_id, filename)

        def save() -> int:
            content: str | bytes = (blob.data or b"") if blob else part.text or ""
            ref = session.put(content, name=filename, media_type=mime_type)
            body = {"id": ref.artifact_id, "part": shape, "version": about.model_dump(mode="json")}
            number = session.record(_SERIES + filename, json.dumps(body).encode())
            return [record for record, _ in _versions(session, filename)].index(number)

        return await in_thread(save)

    async def load_artifact(
        self,
        *,
        app_name: str,
        user_id: str,
        filename: str,
        session_id: str | None = None,
        version: int | None = None,
    ) -> types.Part | None:
        for depth in range(_DEPTH, -1, -1):
            session = await self._session(app_name, user_id, session_id, filename)
            part = await in_thread(_loaded, session, filename, version)
            if part is None or not artifact_util.is_artifact_ref(part):
                return part
            target = _referenced(part, app_name, user_id, session_id, depth)
            filename, session_id, version = target.filename, target.session_id, target.version
        return None

    async def list_artifact_keys(
        self, *, app_name: str, user_id: str, session_id: str | None = None
    ) -> list[str]:
        found = await in_thread((await self._session(app_name, user_id, None, "user:")).names)
        if session_id is not None:
            found += await in_thread((await self._session(app_name, user_id, session_id, "")).names)
        return sorted(found)

    async def delete_artifact(
        self, *, app_name: str, user_id: str, filename: str, session_id: str | None = None
    ) -> None:
        session = await self._session(app_name, user_id, session_id, filename)

        def delete() -> None:
            if _versions(session, filename):
                session.record(_SERIES + filename, b"null")  # the versions count from 0 again
            while session.forget(filename):
                pass

        await in_thread(delete)

    async def list_versions(
        self, *, app_name: str, user_id: str, filename: str, session_id: str | None = None
    ) -> list[int]:
        session = await self._session(app_name, user_id, session_id, filename)
        return list(range(len(await in_thread(_versions, session, filename))))

    async def list_artifact_versions(
        self, *, app_name: str, user_id: str, filename: str, session_id: str | None = None
    ) -> list[ArtifactVersion]:
        scope = None if filename.startswith("user:") else session_id
        session = await self._session(app_name, user_id, session_id, filename)
        found: list[ArtifactVersion] = []
        for number, (_, body) in enumerate(await in_thread(_versions, session, filename)):
            uri = artifact_util.get_artifact_uri(app_name, user_id, filename, number, scope)
            found.append(
                ArtifactVersion(**(body["version"] | {"version": number, "canonical_uri": uri}))
            )
        return found

    async def get_artifact_version(
        self,
        *,
        app_name: str,
        user_id: str,
        filename: str,
        session_id: str | None = None,
        version: int | None = None,
    ) -> ArtifactVersion | None:
        found = await self.list_artifact_versions(
            app_name=app_name, user_id=user_id, filename=filename, session_id=session_id
        )
        return _nth(found, version)

    async def _session(
        self, app_name: str, user_id: str, session_id: str | None, filename: str
    ) -> Session:
        """The session of a file's scope, even inside a tool, where the adapter would return the
        run's own."""
        scope = [app_name, user_id]
        if not filename.startswith("user:"):
            if session_id is None:
                raise InputValidationError(
                    "Session ID must be provided for session-scoped artifacts."
                )
            scope.append(session_id)
        name = self._adapter.session_id(_host_id(*scope))
        found: Session = await in_thread(self._adapter.store.session, name, ttl=self._adapter.ttl)
        return found


def _host_id(*names: str) -> str:
    return json.dumps(names, ensure_ascii=False, separators=(",", ":"))


def _schema(tool: BaseTool) -> dict[str, Any] | None:
    """The JSON schema of a tool's parameters. A tool that cannot declare itself has none."""
    try:
        declared = tool._get_declaration()
    except Exception:  # noqa: BLE001 - ADK reports what it cannot declare
        return None
    if declared is None:
        return None
    if declared.parameters is not None:
        return dict(
            declared.parameters.json_schema.model_dump(
                mode="json", exclude_none=True, by_alias=True
            )
        )
    return (
        declared.parameters_json_schema
        if isinstance(declared.parameters_json_schema, dict)
        else None
    )


def _is_result(part: types.Part, kit: Kit) -> bool:
    """Whether a part is the result of a tool that may become a stub. ADK reads answers to its own
    requests again."""
    name = part.function_response and part.function_response.name
    return (
        bool(name)
        and not kit.is_ours(name)
        and name not in _FINAL
        and not str(name).startswith("adk_")
    )


def _slim(kit: Kit, session: Session, part: types.Part) -> types.Part:
    """Return a part with stubs in place of what is large in its function response: the value, and
    files beside it. Pictures stay. It is the same object if nothing changed."""
    response = part.function_response
    assert response is not None
    about = {"tool": response.name, "call_id": response.id}
    given = response.response or {}
    shown = _slim_value(kit, session, given, about, has_files=bool(response.parts))
    files = [_part(one) for one in response.parts or []]
    left = kit.parts(session, files, **about)
    if shown is given and all(map(operator.is_, left, files)):
        return part
    stubs = [one.text for one in left if one.original is None and not one.media_type]
    shown = _with_files(shown, stubs)
    pictures = [one.original or _picture(one) for one in left if one.original or one.media_type]
    beside = pictures if response.parts else response.parts
    slim = response.model_copy(update={"response": shown, "parts": beside})
    return part.model_copy(update={"function_response": slim})


def _slim_value(
    kit: Kit, session: Session, given: dict[str, Any], about: dict[str, Any], *, has_files: bool
) -> dict[str, Any]:
    """Return the value of a function response with stubs in place of what is large; the same object
    if nothing changed. ADK puts a value that is not a dict under one of three keys."""
    if not given:
        return given
    key = next(iter(given))
    is_wrapped = len(given) == 1 and key in ("result", "output", "error")
    value = given[key] if is_wrapped else given
    if has_files and isinstance(value, list):  # texts: ADK has taken the pictures out of the list
        items = [kit.result(session, one, **about).content for one in value]
        content: Any = value if all(map(operator.is_, items, value)) else items
    else:
        content = kit.result(session, value, **about).content
    if content is value:
        return given
    if is_wrapped:
        return {key: content}
    return content if isinstance(content, dict) else {"result": content}


def _with_files(shown: dict[str, Any], stubs: list[str]) -> dict[str, Any]:
    """Return a value with the stubs of files beside it; the stubs are the value if it is empty."""
    if not stubs:
        return shown
    if shown:
        return {**shown, "files": stubs}
    return {"result": stubs[0] if len(stubs) == 1 else stubs}


def _part(part: types.FunctionResponsePart) -> ContentPart:
    blob = part.inline_data
    if blob is None or blob.data is None:
        return ContentPart(kept=part, original=part)
    return ContentPart(
        media_type=blob.mime_type or "application/octet-stream", data=blob.data, original=part
    )


def _picture(part: ContentPart) -> types.FunctionResponsePart:
    blob = types.FunctionResponseBlob(data=part.data, mime_type=part.media_type)
    return types.FunctionResponsePart(inline_data=blob)


def _versions(session: Session, filename: str) -> list[tuple[int, dict[str, Any]]]:
    """The records of a file since it was last deleted, with their numbers."""
    found = [
        (record.seq, json.loads(record.body)) for record in session.records(_SERIES + filename)
    ]
    deleted = [index for index, (_, body) in enumerate(found) if body is None]
    return found[deleted[-1] + 1 :] if deleted else found


def _loaded(session: Session, filename: str, version: int | None) -> types.Part | None:
    body = _nth([body for _, body in _versions(session, filename)], version)
    if body is None or session.ref(pointer := "art:" + body["id"]) is None:
        return None
    shape, content = body["part"], session.open(pointer).read()
    if "inline_data" in shape:
        blob = types.Blob(data=content, **shape.pop("inline_data"))
        part = types.Part(inline_data=blob, **shape)
        is_removed = (
            blob.mime_type == "application/octet-stream" and not content
        )  # the mark of ADK's rewind
        return None if is_removed else part
    return types.Part.model_validate(
        shape if "file_data" in shape else {**shape, "text": content.decode()}
    )


def _nth(found: list[Any], version: int | None) -> Any:
    number = len(found) - 1 if version is None else version
    return found[number] if 0 <= number < len(found) else None


def _referenced(
    part: types.Part, app_name: str, user_id: str, session_id: str | None, depth: int
) -> artifact_util.ParsedArtifactUri:
    """The target of a reference to another artifact. Raises `InputValidationError` if it is out of
    scope."""
    uri = part.file_data.file_uri if part.file_data else None
    return artifact_util.resolve_artifact_reference(
        file_uri=uri or "",
        app_name=app_name,
        user_id=user_id,
        session_id=session_id,
        remaining_depth=depth,
    )
