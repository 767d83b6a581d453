"""Store what leaves the context, and write its stub.

If the store fails, the model gets a bounded head and tail that says so. If a value is a text that a
host has wrapped in blocks or in JSON, the text inside is stored.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final
from weakref import WeakKeyDictionary

from coatcheck.core_session import CoreSession
from coatcheck.errors import CoatcheckError
from coatcheck.externalize import wrapped
from coatcheck.externalize.judge import Judge
from coatcheck.externalize.outcome import Outcome
from coatcheck.externalize.policy import Policy
from coatcheck.externalize.savings import ResultSource
from coatcheck.externalize.storing import Prepared, described, masked, masked_labels
from coatcheck.externalize.stub import (
    LEAD,
    SHORTENED,
    head_and_tail,
    nothing_shown,
    reason,
    stub_of,
)
from coatcheck.intake import About, metadata_text
from coatcheck.previews import Facts, Preview
from coatcheck.redaction import CONTEXT, mask
from coatcheck.refs import Ref
from coatcheck.store import Store
from coatcheck.truncation import SOURCE, Truncation
from coatcheck.values import as_text

_ARGUMENT: Final = 80  # characters of one argument that are kept with a result
_ARGUMENTS: Final = 200  # characters of all of them
_MCP: Final = "mcp__"  # Claude Code and Codex name the tools of MCP servers mcp__<server>__<tool>
_LOG: Final = logging.getLogger("coatcheck")


class Failures:
    """Counts how often storing failed in this process. Logs the first failure of each kind for each
    store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: WeakKeyDictionary[Store, set[str]] = WeakKeyDictionary()
        self.count = 0

    def note(self, store: Store, error: Exception) -> None:
        """Note that a result could not be stored."""
        with self._lock:
            self.count += 1
        self._log(store, error, "storing a result failed, results are cut until it works: %s")

    def note_file(self, store: Store, error: Exception) -> None:
        """Note that a result was stored, but could not be written to its file."""
        self._log(store, error, "writing a file failed, stubs name none until it works: %s")

    def _log(self, store: Store, error: Exception, message: str) -> None:
        with self._lock:
            logged = self._logged.setdefault(store, set())
            is_new = message not in logged
            logged.add(message)
        if is_new:
            _LOG.warning(message, mask(f"{store!r}: {error}"))


FAILURES: Final = Failures()


@dataclass(frozen=True)
class Result:
    """What is known about a tool's result besides its value."""

    session: CoreSession
    policy: Policy
    tool: str | None
    call_id: str | None
    source: ResultSource
    judge: Judge
    arguments: Mapping[str, Any] | None = None
    cut: Truncation | None = None
    """What is missing from the value, if it does not say so itself."""

    @cached_property
    def about(self) -> About:
        """What is stored with the value, made only if it leaves."""
        labels = About(tool=self.tool, call_id=self.call_id, ttl=self.policy.ttl)
        metadata: dict[str, Any] = self.source.metadata()
        if self.arguments:
            shown = [f"{name}={as_text(one)[:_ARGUMENT]}" for name, one in self.arguments.items()]
            metadata["arguments"] = mask(", ".join(shown))[:_ARGUMENTS]
        return masked_labels(labels, self.policy)._replace(
            metadata_json=metadata_text(metadata) if metadata else None
        )


def put_and_stub(
    result: Result,
    prepared: Prepared,
    *,
    claimed: str | None = None,
    shown: str | None = None,
    sharing: int = 1,
) -> Outcome:
    """Store a value and return its stub. `claimed` is its media type by its source, `shown` the
    preview to use if there is one. `sharing` is the number of values that share the limit if
    storing fails."""
    policy, cut = result.policy, result.cut
    try:
        inner = _unwrapped(prepared.value, result.tool)
        if inner is not None:
            prepared = Prepared(inner.text, inner.text)
            cut = Truncation(SOURCE, "its end") if inner.is_cut else cut
        if policy.redact == "store":
            value = masked(prepared.value, policy)
            prepared = Prepared(value, as_text(value))
        media_type, kind = described(prepared.encoded, claimed)
        facts = prepared.facts(media_type, kind, policy.preview_chars, cut)
        entry = result.about._replace(media_type=media_type, kind=kind)
        ref = result.session.put_encoded(prepared.encoded, entry)
        if shown is None:
            return stub_outcome(result, ref, facts, prepared)
        facts = replace(facts, preview=Preview(mask(shown), "what the policy keeps of it"))
        return stub_outcome(result, ref, facts, prepared, SHORTENED)
    except Exception as error:  # noqa: BLE001 - third-party backends raise anything; the agent continues
        return failed(result, error, prepared, sharing)


def stub_outcome(
    result: Result, ref: Ref, facts: Facts, prepared: Prepared, lead: str = LEAD
) -> Outcome:
    """Return the outcome of a stored value: its stub, as the policy writes it."""
    policy = result.policy
    if policy.render is None:
        file = (
            None if policy.files is None else _file_of(result.session, ref, os.fspath(policy.files))
        )
        stub = stub_of(ref.pointer, facts, policy, lead=lead, file=file)
    else:
        most = policy.preview_chars
        stub = policy.render(ref, mask(prepared.text[: most + CONTEXT])[:most])
    tokens = round(prepared.tokens) if facts.tokens is None else facts.tokens
    return Outcome(stub, stub, ref, (ref,), is_stub=True, stored_tokens=tokens, stubs=(stub,))


def _file_of(session: CoreSession, ref: Ref, folder: str) -> str | None:
    """Write the file of an artifact, and return its path. If that fails, the stub names none."""
    try:
        return str(session.write_file(ref, folder))
    except CoatcheckError as error:
        FAILURES.note_file(session.store, error)
        return None


def failed(
    result: Result, error: Exception, prepared: Prepared | None, sharing: int = 1
) -> Outcome:
    """Return the outcome of a value that could not be stored: both ends of it, if it is a text.
    Without `prepared`, it is a stream that nobody can read again."""
    FAILURES.note(result.session.store, error)
    why = reason(error)
    if prepared is None:
        shown = nothing_shown("a stream:", why)
    elif _is_binary(prepared):
        shown = nothing_shown(f"{memoryview(prepared.value).nbytes:,} bytes:", why)  # type: ignore[arg-type]
    else:
        limit, count = result.judge.room, result.policy.count
        shown = head_and_tail(prepared.text, why, limit, count, sharing=sharing)
    return Outcome(shown, shown, failure=mask(str(error)) or type(error).__name__)


def _is_binary(prepared: Prepared) -> bool:
    """Whether a value is bytes that are not the text that a model would get for it."""
    value = prepared.value
    if not isinstance(value, bytes | bytearray | memoryview):
        return False
    start = bytes(memoryview(value)[:4_000]).decode("utf-8", "ignore")[:1_000]
    return prepared.text[:1_000] != start


def _unwrapped(text: object, tool: str | None) -> wrapped.Unwrapped | None:
    """Return the text inside content blocks or structured content that a host has written as text;
    None for any other value."""
    if not isinstance(text, str):
        return None
    if wrapped.begins_wrapped(text, 0, wrapped.WRAPPER):
        return wrapped.unwrapped(text)
    is_from_mcp = tool is not None and tool.startswith(_MCP)
    inner = wrapped.structured_text(text) if is_from_mcp else None
    return None if inner is None else wrapped.Unwrapped(inner)
