"""Deep Agents: `create_deep_agent(…, backend=Coatcheck(store))`. The agent's files are named
artifacts of its session.

The backend reaches every sub-agent. What Deep Agents offloads itself (`/large_tool_results/…`,
conversation history, pictures) is stored in the session too: once for equal content, out of the
checkpoint, until the thread is deleted.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from coatcheck import CoatcheckError, Session, Store
from coatcheck.adapters import LANGGRAPH, TTL, Adapter, missing
from coatcheck.errors import NotFound

try:
    from deepagents.backends.protocol import (
        FILE_NOT_FOUND,
        INVALID_PATH,
        BackendProtocol,
        DeleteResult,
        EditResult,
        FileData,
        FileDownloadResponse,
        FileInfo,
        FileUploadResponse,
        GlobResult,
        GrepMatch,
        GrepResult,
        LsResult,
        ReadResult,
        WriteResult,
    )
    from deepagents.backends.utils import (
        InvalidGlobPatternError,
        compile_grep_include_glob,
        perform_string_replacement,
        slice_read_response,
    )
    from langgraph.config import get_config
    from langgraph.runtime import get_runtime
except ImportError as error:
    raise missing("deepagents", "deepagents>=0.7.14,<0.8") from error


class Coatcheck(BackendProtocol):
    """Files of an agent as named artifacts: a path is a name in the session of the thread.

    A run without a thread id has a session of its own. Outside of a run, the backend has one
    private session."""

    def __init__(self, store: Store | Session | str | Path, *, ttl: float | None = TTL) -> None:
        self._adapter = Adapter(store, host=LANGGRAPH, ttl=ttl)
        self._private: WeakKeyDictionary[Any, Session] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def ls(self, path: str) -> LsResult:
        folder = path.rstrip("/") + "/"
        entries: dict[str, FileInfo] = {}
        try:
            session = self._session()
            for name in session.names(prefix=folder):
                first, slash, _ = name.removeprefix(folder).partition("/")
                if slash:
                    entries[folder + first + "/"] = FileInfo(
                        path=folder + first + "/", is_dir=True, size=0
                    )
                elif first:
                    entries[name] = _info(session, name)
        except CoatcheckError as error:
            return LsResult(error=str(error))
        return LsResult(entries=[entries[name] for name in sorted(entries)])

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        try:
            file = _file(self._session(), file_path)
        except CoatcheckError as error:
            return ReadResult(error=str(error))
        if file is None:
            return ReadResult(error=f"File '{file_path}' not found")
        return (
            ReadResult(file_data=file)
            if file["encoding"] == "base64"
            else slice_read_response(file, offset, limit)
        )

    def write(self, file_path: str, content: str) -> WriteResult:
        if not file_path.startswith("/"):
            return WriteResult(error=f"Error: the path must start with '/', got '{file_path}'")
        try:
            self._session().put(content, name=file_path)
        except CoatcheckError as error:
            return WriteResult(error=str(error))
        return WriteResult(path=file_path)

    def edit(
        self, file_path: str, old_string: str, new_string: str, replace_all: bool = False
    ) -> EditResult:
        try:
            session = self._session()
            file = _file(session, file_path)
            if file is None:
                return EditResult(error=f"Error: File '{file_path}' not found")
            if file["encoding"] == "base64":
                return EditResult(error="Error: Cannot edit binary files with text replacements.")
            edited = perform_string_replacement(
                file["content"], old_string, new_string, replace_all
            )
            if isinstance(edited, str):
                return EditResult(error=edited)
            session.put(edited[0], name=file_path)
        except CoatcheckError as error:
            return EditResult(error=str(error))
        return EditResult(path=file_path, occurrences=int(edited[1]))

    def delete(self, file_path: str) -> DeleteResult:
        path = file_path.rstrip("/")
        try:
            session = self._session()
            found = [
                name
                for name in session.names(prefix=path)
                if name == path or name.startswith(path + "/")
            ]
            for name in found:
                while session.forget(name):  # the earlier versions too
                    pass
        except CoatcheckError as error:
            return DeleteResult(error=str(error))
        return (
            DeleteResult(path=file_path)
            if found
            else DeleteResult(error=f"Error: File '{file_path}' not found")
        )

    def grep(
        self,
        pattern: str,
        path: str | None = None,
        glob: str | None = None,
        *,
        max_count: int | None = None,
    ) -> GrepResult:
        matches: list[GrepMatch] = []
        try:
            session = self._session()
            for name in sorted(_matching(session, path, glob)):
                file = _file(session, name)
                lines = (
                    []
                    if file is None or file["encoding"] == "base64"
                    else file["content"].split("\n")
                )
                for number, line in enumerate(lines, 1):
                    if pattern not in line:
                        continue
                    if max_count is not None and len(matches) >= max_count:
                        return GrepResult(matches=matches, truncated=True)
                    matches.append(GrepMatch(path=name, line=number, text=line))
        except (CoatcheckError, InvalidGlobPatternError) as error:
            return GrepResult(error=str(error))
        return GrepResult(matches=matches)

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        try:
            session = self._session()
            return GlobResult(
                matches=[_info(session, name) for name in _matching(session, path, pattern)]
            )
        except (CoatcheckError, InvalidGlobPatternError) as error:
            return GlobResult(error=str(error))

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [
            FileUploadResponse(path=path, error=self._upload(path, content))
            for path, content in files
        ]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [self._download(path) for path in paths]

    def forget(self, thread_id: str) -> None:
        """End the session of a thread. Call it where you delete the thread, if its checkpointer is
        not slimmed."""
        self._adapter.forget(thread_id)

    def _upload(self, path: str, content: bytes) -> str | None:
        if not path.startswith("/"):
            return str(INVALID_PATH)
        try:
            self._session().put(_decoded(content), name=path)
        except CoatcheckError as error:
            return str(error)
        return None

    def _download(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error=INVALID_PATH)
        try:
            with self._session().open(path) as stream:
                return FileDownloadResponse(path=path, content=stream.read())
        except NotFound:
            return FileDownloadResponse(path=path, error=FILE_NOT_FOUND)
        except CoatcheckError as error:
            return FileDownloadResponse(path=path, error=str(error))

    def _session(self) -> Session:
        """The session of the thread, or of the run if it has none: LangGraph makes one stream
        writer for each run."""
        run: Any = self
        thread: object = None
        try:
            thread = get_config()["configurable"].get("thread_id")
            run = get_runtime().stream_writer
        except (RuntimeError, KeyError):  # outside of a run
            pass
        if thread is not None:
            return self._adapter.session(str(thread))
        with self._lock:
            if run not in self._private:
                self._private[run] = self._adapter.session(None)
            return self._private[run]


def _matching(session: Session, path: str | None, glob: str | None) -> Iterator[str]:
    """The files in a folder, or the file of that name, that match a pattern; the newest first."""
    root = "/" + (path or "").strip("/")
    is_match = compile_grep_include_glob(glob) if glob else None
    for name in session.names(prefix=root):
        inside = (
            name.rpartition("/")[2] if name == root else name.removeprefix(root.rstrip("/") + "/")
        )
        if inside != name and (is_match is None or is_match(inside)):
            yield name


def _file(session: Session, path: str) -> FileData | None:
    ref = session.ref(path)
    if ref is None:
        return None
    with session.open(path) as stream:
        content = _decoded(stream.read())
    times = {"created_at": ref.created_at.isoformat(), "modified_at": ref.created_at.isoformat()}
    if isinstance(content, str):
        return FileData(content=content, encoding="utf-8", **times)
    return FileData(content=base64.b64encode(content).decode(), encoding="base64", **times)


def _decoded(content: bytes) -> str | bytes:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content


def _info(session: Session, path: str) -> FileInfo:
    ref = session.ref(path)
    if ref is None:  # it was deleted meanwhile
        return FileInfo(path=path)
    return FileInfo(
        path=path, is_dir=False, size=ref.size_bytes, modified_at=ref.created_at.isoformat()
    )
