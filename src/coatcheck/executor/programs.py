"""`Programs`: a model's program calls the tools of an executor. Results stay in the program and in
the store; only what it prints comes back.

A program can call tools that only read, or that the host has named. A call that waits for a person
ends the program. Its record has what ran before; `resume` runs the program again, and the record
answers those calls, so none is repeated.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import hmac
import json
import keyword
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from coatcheck._toolkit import Description, purpose_of, toolkit
from coatcheck.errors import (
    CoatcheckError,
    InvalidArgument,
    MissingExtra,
    ProgramFailed,
    TooLarge,
)
from coatcheck.executor.binding import stays_inline
from coatcheck.executor.outcomes import TimedOut, ToolCall, ToolError, ToolOutcome
from coatcheck.executor.turns import Turn, checked_seconds
from coatcheck.externalize import Policy, configured
from coatcheck.externalize.storing import put
from coatcheck.externalize.stub import LENGTH, mark
from coatcheck.ids import clip, digest_of
from coatcheck.intake import About
from coatcheck.media import JSON
from coatcheck.previews.excerpts import count, line
from coatcheck.programs.engine import EXTRA, Limits, Program, check_source, is_available, run
from coatcheck.programs.prelude import awaits, program_in
from coatcheck.programs.reading import BEFORE, Contents, page_of, raised, value_of
from coatcheck.reading import Page, Request
from coatcheck.redaction import mask
from coatcheck.refs import Ref
from coatcheck.values import encode_text

if TYPE_CHECKING:
    from coatcheck.executor.run import ToolExecutor
    from coatcheck.programs.monty import Call

NAME: Final = "run_program"
SERIES: Final = "programs"
DESCRIPTION: Final = (
    "Run a Python program that reads artifacts and calls tools; only what it prints, and its last "
    'value, comes back. artifact("art:...") is a stored value (text, JSON, rows); keep(value, '
    '"name") stores one and answers its pointer. Tools are functions: rows = search(q="x"), or '
    "await asyncio.gather(...) for several at once. Full results stay inside and are kept as "
    "artifacts. json, re, csv, math, Counter are there. No files, no network, no yield, no "
    "inheritance."
)
_PARAMETERS: Final = {
    "type": "object",
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
    "additionalProperties": False,
}
_DIRECTLY: Final = "call it directly"
_KEPT_RECORDS: Final = 200
_RESERVED: Final = 1_500  # characters for the first line of an answer and the pointers at its end
_POINTERS: Final = 8
_SHOWN: Final = 300  # characters of arguments, and of an error, in a record
_OUTPUT: Final = 2_000  # characters of the output in a record
_PRINTED: Final = 1_000
_PARSED: Final = ("json", "jsonl", "bytes")
_MAX_ARGUMENTS: Final = 16 << 20
_MAX_NAME: Final = 200
_TOKEN: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{32})")
_EXCEPTIONS: Final = frozenset(
    (
        "ArithmeticError", "OverflowError", "ZeroDivisionError", "LookupError", "IndexError",
        "KeyError", "RuntimeError", "NotImplementedError", "RecursionError", "AttributeError",
        "NameError", "ValueError", "ImportError", "OSError", "FileNotFoundError",
        "FileExistsError", "IsADirectoryError", "NotADirectoryError", "PermissionError",
        "AssertionError", "MemoryError", "TimeoutError", "TypeError",
    )
)  # fmt: skip
_OURS: Final = frozenset(("artifact", "keep", "lines_of", "grep", "query", "text", "lines", "data"))

_TOOL: Final = """
{async_}def {name}(*args, **kwargs):
    form, body = {await_}__call({tool!r}, json.dumps([args, kwargs]))
    return __value(form, body)
"""
_KEEP: Final = """
def keep(value, name):
    if isinstance(value, str):
        return __keep(name, "text", value)
    return __keep(name, "json", json.dumps(value))
"""

Approve = Callable[[ToolCall], bool | None]


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """One call of a tool by a program: its arguments as text, with secrets masked, what came of it,
    and the pointer of its result. `at` is in seconds since the program began."""

    name: str
    arguments: str
    outcome: Literal["returned", "failed", "refused"]
    pointer: str | None = None
    error: tuple[str, str] | None = None
    at: float = field(default=0.0, compare=False)
    digest: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call that a person must approve. `token` is what `Programs.resume` takes."""

    token: str
    call: ToolCall


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """What a program came to. `text` is for the model: bounded, with the pointers of what the
    program's calls returned. `page` has the output alone, and is None if the program failed or
    waits."""

    text: str
    calls: tuple[ProgramCall, ...]
    page: Page | None = None
    error: ProgramFailed | None = None
    waiting: Waiting | None = None


class Programs:
    """Runs programs that call the tools of an executor.

    A program can call tools whose description says `read_only`, and those in `tools`; by default
    the setting `programs.tools`. Other tools raise `PermissionError` inside it. `approve` is asked
    before each call: True lets it run, False refuses it, None ends the program until a person has
    decided."""

    def __init__(
        self,
        executor: ToolExecutor,
        *,
        tools: Collection[str] | None = None,
        approve: Approve | None = None,
        limits: Limits | None = None,
        name: str = NAME,
    ) -> None:
        if isinstance(tools, str):
            raise InvalidArgument("tools must be several names, got text", hint='tools=["search"]')
        if not is_available():
            raise MissingExtra(EXTRA)
        self.executor = executor
        self.limits = limits or Limits()
        self.name = name
        self._approve = approve
        self._settings = executor.session.store.settings
        named = self._settings["programs.tools"] or ""
        self._named = frozenset(named.replace(",", " ").split() if tools is None else tools)

    @property
    def tool(self) -> ProgramTool:
        """The tool for a model, described and ready to run."""
        return ProgramTool(self.name, DESCRIPTION, _PARAMETERS, False, self)

    def tools(self) -> list[Description]:
        """The tools of an agent that runs programs: reading, listing and storing, and this one."""
        return [*toolkit(self.executor.session, code=False), self.tool]

    def run(self, code: str, *, deadline: float | None = None) -> ProgramOutcome:
        """Run a program and return what it came to. `deadline` is in seconds, for all of it."""
        return self._run(program_in(code), _Journal(now=int(time.time())), deadline)

    def resume(
        self, token: str, code: str, *, approved: bool, deadline: float | None = None
    ) -> ProgramOutcome:
        """Run a program again after the call that it waited for was decided. Calls that ran before
        are answered from its record. A decision counts once. Raises `InvalidArgument` for a second
        one, and for a token of another session or program."""
        code = program_in(code)
        journal = self._recorded(token, code, approved=approved)
        self._claim(token)
        return self._run(code, journal, deadline)

    def _run(self, code: str, journal: _Journal, deadline: float | None) -> ProgramOutcome:
        check_source(code)
        turn = Turn(checked_seconds(deadline, "deadline"))
        session = self.executor.session
        host = _Calls(self, Contents(session), turn, journal, is_async=awaits(code))
        now = datetime.fromtimestamp(journal.now, UTC)
        program = Program(code, now, {}, BEFORE + _KEEP + host.source)
        page, error, waiting = None, None, None
        max_chars = max(1_000, self._settings["page.max_chars"] - _RESERVED)
        try:
            printed = run(program, host, self.limits, deadline=turn.end)
            request = Request(code=code, max_chars=max_chars)
            page = page_of(host.contents, "", printed, request)
        except _Waits as waits:
            token = secrets.token_hex(8)
            waiting = Waiting(f"{token}-{self._tag(token, code)}", waits.call)
        except ProgramFailed as failed:
            error = failed
        except CoatcheckError as failed:
            if not host.calls:
                raise
            error = ProgramFailed(failed.message, hint=failed.hint)
        outcome = ProgramOutcome("", tuple(host.calls), page, error, waiting)
        self._record(code, journal.now, outcome, host.decided)
        return replace(outcome, text=self._text(outcome))

    def _text(self, outcome: ProgramOutcome) -> str:
        """What the model gets: a first line, the output, and the pointers of the calls."""
        rest = ""
        if outcome.waiting is not None:
            first = f"the program waits for approval of {line(outcome.waiting.call.name, 80)}"
        elif outcome.error is not None:
            first = f"error: {line(mask(str(outcome.error)), 1_000)}"
            printed = outcome.error.printed.rstrip()
            if printed:
                first += "; below is what it printed before"
                rest = printed if len(printed) <= _PRINTED else "…" + printed[-_PRINTED:]
        else:
            assert outcome.page is not None
            first, rest = outcome.page.shown, outcome.page.text
            if outcome.page.derived is not None:
                first += f'; more: pointer="{outcome.page.derived}"'
        footer = _footer(outcome)
        text = "\n".join(filter(None, (rest, footer)))
        room = self._settings["page.max_chars"] - LENGTH - len(text) - 3
        return mark(self.executor.session.store.secret, f"[{first[: max(0, room)]}]", text)

    def _record(
        self, code: str, now: int, outcome: ProgramOutcome, decided: Sequence[_Decision]
    ) -> None:
        """Keep a record of a program: its source and its calls, with secrets masked."""
        waiting = outcome.waiting
        body = {
            "now": now,
            "program": mask(code),
            "calls": [
                [call.name, call.arguments, call.outcome, call.pointer, call.error, call.digest,
                 round(call.at, 3)]
                for call in outcome.calls
            ],
            "token": None if waiting is None else waiting.token.partition("-")[0],
            "waits_for": None if waiting is None else [waiting.call.name, _digest(waiting.call)],
            "decided": [list(one) for one in decided],
            "output": "" if outcome.page is None else mask(outcome.page.text[:_OUTPUT]),
            "derived": None if outcome.page is None else outcome.page.derived,
            "error": None if outcome.error is None else mask(outcome.error.message),
        }  # fmt: skip
        self._append(body)

    def _append(self, body: Mapping[str, Any]) -> int:
        """Add a signed record."""
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        signed = self._signature(data).encode() + b"\n" + data
        return self.executor.session.record(SERIES, signed, keep=_KEPT_RECORDS)

    def _bodies(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The records of programs with their numbers, oldest first. Others' are left out."""
        for record in self.executor.session.records(SERIES):
            signature, _, data = record.body.partition(b"\n")
            if hmac.compare_digest(signature, self._signature(data).encode()):
                yield record.seq, json.loads(data)

    def _claim(self, token: str) -> None:
        """Note that the program was resumed. Of several attempts, only the first continues: the
        call must not run twice."""
        ours = self._append({"token": None, "resumes": token})
        first = next(number for number, body in self._bodies() if body.get("resumes") == token)
        if first != ours:
            raise InvalidArgument(
                "that program was resumed already", hint="its answer has what became of it"
            )

    def _recorded(self, token: str, code: str, *, approved: bool) -> _Journal:
        """The journal of the program that waits under a token, with the decision on its call."""
        match = _TOKEN.fullmatch(token)
        if match is None or not hmac.compare_digest(match[2], self._tag(match[1], code)):
            raise InvalidArgument(
                "that token is not one of this program", hint="resume the program as it was run"
            )
        for _, body in self._bodies():
            if body["token"] == match[1]:
                calls = tuple(_call_of(row) for row in body["calls"])
                decided = [_Decision(*one) for one in body["decided"]]
                decided.append(_Decision(body["waits_for"][1], approved))
                return _Journal(body["now"], calls, tuple(decided))
        raise InvalidArgument(
            "no program waits under that token", hint="its record may have expired: run it again"
        )

    def _signature(self, data: bytes) -> str:
        key = self.executor.session.store.secret
        return hashlib.blake2b(data, key=key, digest_size=16, person=b"coatcheck.progr").hexdigest()

    def _tag(self, token: str, code: str) -> str:
        """What binds a token to a program and to this session."""
        session_id = self.executor.session.session_id
        return self._signature(json.dumps([token, session_id, code]).encode())

    @functools.cached_property
    def callable_tools(self) -> Mapping[str, Description]:
        """The tools of the executor by their names in a program; our own are not among them."""
        found: dict[str, Description] = {}
        for tool in self.executor.tools:
            if tool.name != self.name and purpose_of(tool.description) is None:
                found.setdefault(_identifier(tool.name), tool)
        return found

    def may_call(self, tool: Description) -> bool:
        return tool.read_only is True or tool.name in self._named

    def approval(self, call: ToolCall) -> bool | None:
        return True if self._approve is None else self._approve(call)


@stays_inline
@dataclass(frozen=True, slots=True)
class ProgramTool(Description):
    """The tool `run_program`."""

    _programs: Programs = field(repr=False)

    def run(self, /, **arguments: object) -> str:
        """Run the program that a model sent, and return its answer. Errors are answers too."""
        unknown = [name for name in arguments if name != "code"]
        try:
            if unknown:
                raise InvalidArgument(
                    f"unknown argument {clip(unknown[0], 40)}", hint=f"{self.name} takes code"
                )
            code = arguments.get("code")
            check_source(code)
            return self._programs.run(str(code)).text
        except CoatcheckError as error:
            key = self._programs.executor.session.store.secret
            return mark(key, f"[error: {line(mask(str(error)), 1_000)}]")


class _Waits(Exception):
    """A call waits for a person."""

    def __init__(self, call: ToolCall) -> None:
        super().__init__(call.name)
        self.call = call


class _Decision(NamedTuple):
    """What a person decided on a call: it counts for this tool with these arguments, once."""

    digest: str
    approved: bool


@dataclass(frozen=True, slots=True)
class _Journal:
    """When a program first began, the calls that ran then, and what a person decided on calls that
    have not run."""

    now: int
    calls: tuple[ProgramCall, ...] = ()
    decided: tuple[_Decision, ...] = ()


class _Calls:
    """What a program can reach: content, and the tools."""

    def __init__(
        self, owner: Programs, contents: Contents, turn: Turn, journal: _Journal, *, is_async: bool
    ) -> None:
        self._owner, self.contents, self._turn, self._journal = owner, contents, turn, journal
        self._began = time.monotonic()
        self._policy: Policy = configured(contents.session.store.settings)
        self.calls: list[ProgramCall] = []
        self.decided = list(journal.decided)
        self._tools = {tool.name: tool for tool in owner.callable_tools.values()}
        self.names = contents.names | {"__call", "__keep"}
        self.later = frozenset({"__call"} if is_async else ())
        words = ("async ", "await ") if is_async else ("", "")
        self.source = "".join(
            _TOOL.format(async_=words[0], await_=words[1], name=name, tool=tool.name)
            for name, tool in owner.callable_tools.items()
        )

    def call(self, call: Call) -> object:
        if call.name == "__call":
            return self.call_all([call])[0]
        if call.name == "__keep":
            return self._kept(call)
        return self.contents.call(call)

    def call_all(self, calls: Sequence[Call]) -> Sequence[object]:
        """Answer a batch: calls that ran before from the journal, the others in one `run_all`."""
        answers: list[object] = [None] * len(calls)
        waiting: list[tuple[int, int, ToolCall]] = []
        ran, decided = len(self.calls), list(self.decided)
        try:
            for place, each in enumerate(calls):
                number = len(self.calls)
                answer = self._prepared(each, number)
                if isinstance(answer, ToolCall):
                    waiting.append((place, number, answer))
                else:
                    answers[place] = answer
        except _Waits:  # none of the batch has run
            self.calls, self.decided = self.calls[:ran], decided
            raise
        outcomes = self._owner.executor.run_all([call for *_, call in waiting], turn=self._turn)
        for (place, number, call), outcome in zip(waiting, outcomes, strict=True):
            answers[place] = self._answer(number, call, outcome)
        return answers

    def _prepared(self, call: Call, number: int) -> object:
        """The call to run, or its answer if it does not run: it ran before, or may not."""
        try:
            tool, made = self._read(call, number)
        except (ValueError, TypeError, RecursionError) as error:
            return _raise("TypeError", str(error))
        record = ProgramCall(
            made.name,
            line(mask(_arguments(made)), _SHOWN),
            "refused",
            at=time.monotonic() - self._began,
            digest=_digest(made),
        )
        if number < len(self._journal.calls):
            return self._replayed(self._journal.calls[number], record)
        self.calls.append(record)
        if number >= self._owner.limits.calls:
            return self._refused("RuntimeError", f"a program makes at most {number} calls of tools")
        if not self._owner.may_call(tool):
            return self._refused("PermissionError", f"{tool.name}: {_DIRECTLY}")
        allowed = self._decision(record.digest)
        if allowed is None:
            allowed = self._owner.approval(made)
        if allowed is None:
            raise _Waits(made)
        if not allowed:
            return self._refused("PermissionError", f"{tool.name} was refused")
        return made

    def _read(self, call: Call, number: int) -> tuple[Description, ToolCall]:
        """The tool and the arguments that a program has sent as JSON."""
        name, text = call.args
        tool = self._tools.get(name)
        if tool is None or not isinstance(text, str):
            raise TypeError("a tool is called by its own function")
        if len(text) > _MAX_ARGUMENTS:
            raise TypeError(
                f"the arguments of {tool.name} have {len(text):,} characters, the limit is "
                f"{_MAX_ARGUMENTS:,}: keep(value, name) them and pass the pointer"
            )
        args, kwargs = json.loads(text)
        parameters = list(tool.parameters.get("properties", {}))
        if len(args) > len(parameters):
            raise TypeError(f"{tool.name} takes {count(len(parameters), 'argument')}")
        given = dict(zip(parameters, args, strict=False))
        if given.keys() & kwargs.keys():
            raise TypeError(f"{tool.name} got an argument twice")
        return tool, ToolCall(f"program-{number + 1}", tool.name, given | kwargs)

    def _decision(self, digest: str) -> bool | None:
        """What a person decided on this call, which is then used up."""
        for place, one in enumerate(self.decided):
            if one.digest == digest:
                del self.decided[place]
                return one.approved
        return None

    def _refused(self, kind: str, message: str) -> object:
        self.calls[-1] = replace(self.calls[-1], error=(kind, message))
        return _raise(kind, message)

    def _replayed(self, before: ProgramCall, now: ProgramCall) -> object:
        """Answer a call from the record of the run before."""
        if before.digest != now.digest:
            raise ProgramFailed(
                f"the program now calls {now.name} where it called {before.name} before",
                hint="run it from the start",
            )
        self.calls.append(before)
        if before.error is not None:
            return _raise(*before.error)
        return self._value(before.pointer)

    def _answer(self, number: int, call: ToolCall, outcome: ToolOutcome) -> object:
        """The value of a call that ran, which is kept; or the exception that it raised."""
        if isinstance(outcome, ToolError | TimedOut):
            error = _exception(outcome)
            self.calls[number] = replace(self.calls[number], outcome="failed", error=error)
            return _raise(*error)
        ref = outcome.ref
        if ref is None and not self._turn.is_accepting_writes():
            self.calls[number] = replace(self.calls[number], outcome="failed")
            return _raise("TimeoutError", "the time for this turn is up")
        if ref is None:
            content: Any = getattr(outcome, "content", outcome.text)
            ref = self._put(content, About(tool=call.name, call_id=call.id))
        pointer = ref.pointer
        self.calls[number] = replace(self.calls[number], outcome="returned", pointer=pointer)
        return self._value(pointer)

    def _value(self, pointer: str | None) -> object:
        try:
            session = self.contents.session
            with session.content(pointer or "") as content:
                self.contents.read[content.ref.artifact_id] = None
                form, body = value_of(content, self.contents.notes)
                # A table stays text, as the tool returned it: another tool may take it.
                return (form if form in _PARSED else "text"), body
        except CoatcheckError as error:
            return raised(error)

    def _put(self, value: object, about: About) -> Ref:
        return put(self.contents.session, value, about, self._policy)

    def _kept(self, call: Call) -> object:
        """Store a value that the program keeps, and return its pointer."""
        try:
            name, form, body = call.args
            if not isinstance(name, str) or not isinstance(body, str):
                raise InvalidArgument("keep takes a value and a name", hint='keep(value, "name")')
            limit = self.contents.session.store.settings["tools.max_store_bytes"]
            size = len(encode_text(body))
            if size > limit:
                raise TooLarge(
                    f"the value has {size:,} bytes; at most {limit:,} can be kept",
                    hint="keep it in parts",
                )
            if not 0 < len(name) <= _MAX_NAME:
                raise InvalidArgument(f"a name has 1 to {_MAX_NAME} characters")
            value = json.loads(body) if form == "json" else body
            about = About(name=name, tool=NAME, media_type=JSON if form == "json" else None)
            return self._put(value, about).pointer
        except (CoatcheckError, ValueError, RecursionError) as error:
            return raised(error)


def _arguments(call: ToolCall) -> str:
    return json.dumps(call.arguments, ensure_ascii=False, sort_keys=True)


def _digest(call: ToolCall) -> str:
    """What tells a call from others: its tool and its exact arguments."""
    return digest_of(encode_text(f"{call.name} {_arguments(call)}"))


def _call_of(row: Sequence[Any]) -> ProgramCall:
    name, arguments, outcome, pointer, error, digest, at = row
    failed = None if error is None else (str(error[0]), str(error[1]))
    return ProgramCall(name, arguments, outcome, pointer, failed, at, digest)


def _raise(kind: str, message: str) -> object:
    from coatcheck.programs.monty import Raised

    return Raised(kind, message)


def _exception(outcome: ToolError | TimedOut) -> tuple[str, str]:
    """The name of a built-in exception for a call that failed, and its message."""
    if isinstance(outcome, TimedOut):
        return "TimeoutError", line(mask(outcome.text), _SHOWN)
    if outcome.cause is None:
        kind = "TypeError" if outcome.code == "invalid_arguments" else "RuntimeError"
        return kind, line(mask(outcome.message), 2 * _SHOWN)
    names = [each.__name__ for each in type(outcome.cause).__mro__]
    kind = next((name for name in names if name in _EXCEPTIONS), "RuntimeError")
    return kind, line(mask(str(outcome.cause)), 2 * _SHOWN)


def _footer(outcome: ProgramOutcome) -> str:
    """The calls that ran, with at most eight pointers; after an error, also those that failed."""
    ran = [call for call in outcome.calls if call.outcome == "returned"]
    parts = [f"{call.name} {call.pointer}" for call in ran[:_POINTERS]]
    if len(ran) > _POINTERS:
        parts.append(f"and {len(ran) - _POINTERS} more")
    if outcome.error is not None:
        others = [call for call in outcome.calls if call.outcome != "returned"]
        parts += [f"{call.name} {call.outcome}" for call in others[:_POINTERS]]
    return f"[calls: {', '.join(parts)}]" if parts else ""


def _identifier(name: str) -> str:
    """The name of a tool as a function of a program."""
    made = re.sub(r"\W", "_", name, flags=re.ASCII)
    if not made or made[0].isdigit() or made.startswith("__"):
        made = f"tool_{made}"
    is_taken = keyword.iskeyword(made) or made in _OURS or hasattr(builtins, made)
    return made + "_" if is_taken else made
