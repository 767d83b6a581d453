"""What it costs to solve 12 tasks that need several calls of tools: `make bench ARGS=programs`.

Each task of `tool_tasks` is solved in four ways, by scripts that do what a careful model would:

- inline: separate calls, whose results go into the context as they are;
- stubs: separate calls through a `ToolExecutor`; of each result that becomes a stub, one program
  reads what is needed;
- a file and a shell: separate calls, whose results are files; one command of Python for each;
- program: one program that calls the tools and prints the answer.

Counted are the calls that the model makes, and the tokens (o200k, exact) of everything that it
writes and sees: arguments, results, stubs, answers. Each call after the first also sends the
context again, which is not counted. The answer is computed without Coatcheck, and a way that does
not give it is unable.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import json
import re
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import coatcheck
from benchmarks.bench import KB, MB, Bench, size_name
from benchmarks.peers.contents import KINDS, content
from benchmarks.peers.tools import as_script
from benchmarks.report import Row
from benchmarks.timing import Side, interleaved
from benchmarks.tool_tasks import TASKS, TIME_LIMIT, Task, Toolbox, ToolFailed
from coatcheck import ToolCall, ToolExecutor, tokens
from coatcheck.errors import CoatcheckError

_TENTH: Final = 0.1
_POINTER: Final = re.compile(r"art:[0-9a-f]{12,}")


class Unable(Exception):
    """A way to solve a task that is not there. Says why."""


@dataclass(slots=True)
class Spent:
    """The calls of a model, and the tokens of what it wrote and saw."""

    calls: int = 0
    tokens: int = 0

    def add(self, arguments: object, answer: str) -> None:
        self.calls += 1
        self.tokens += tokens.exact(json.dumps(arguments, ensure_ascii=False)) + tokens.exact(
            answer
        )


@dataclass(frozen=True, slots=True)
class Large:
    """A result that the model was not shown: the value, and the name that it has there."""

    name: str
    value: Any


class Inline:
    """Results go into the context, and the model works out what it needs without a call."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.spent = Spent()
        self._tools = toolbox.tools

    def __call__(self, tool: str, code: str = "", **arguments: Any) -> Any:
        value = _called(self._tools[tool], arguments, self.spent)
        self.spent.add([tool, arguments], _text(value))
        return _worked_out(code, value) if code else value

    def kept(self, tool: str, **arguments: Any) -> Any:
        return self(tool, **arguments)

    def compared(self, one: Any, other: Any, code: str) -> Any:
        return _worked_out(code, one, other)


class Files:
    """Results are files, of which the model sees the name and the first 2 KB, and a shell."""

    def __init__(self, toolbox: Toolbox) -> None:
        self.spent = Spent()
        self._tools = toolbox.tools
        self._count = 0

    def __call__(self, tool: str, code: str = "", **arguments: Any) -> Any:
        given = {
            key: one.value if isinstance(one, Large) else one for key, one in arguments.items()
        }
        named = {key: one.name if isinstance(one, Large) else one for key, one in arguments.items()}
        value = _called(self._tools[tool], given, self.spent)
        text = _text(value)
        if len(text) <= 2_000:
            self.spent.add([tool, named], text)
            return _worked_out(code, value) if code else value
        self._count += 1
        name = f"result-{self._count}.txt"
        self.spent.add(
            [tool, named], f"{len(text):,} bytes are in {name}. It begins:\n{text[:2_000]}"
        )
        if not code:
            return Large(name, value)
        found = _worked_out(code, value)
        self.spent.add(
            {"command": f"python3 - <<'E'\n{as_script(code, name, text)}\nE"}, json.dumps(found)
        )
        return found

    def kept(self, tool: str, **arguments: Any) -> Any:
        return self(tool, **arguments)

    def compared(self, one: Any, other: Any, code: str) -> Any:
        found = _worked_out(code, one.value, other.value)
        script = code.replace('artifact("OTHER")', f"json.load(open({other.name!r}))")
        script = as_script(script, one.name, _text(one.value)[:2_000])
        self.spent.add({"command": f"python3 - <<'E'\n{script}\nE"}, json.dumps(found))
        return found


class Stubs:
    """Results go through a `ToolExecutor`, and programs read what is needed of the large ones."""

    def __init__(self, toolbox: Toolbox, session: coatcheck.Session) -> None:
        self.spent = Spent()
        self._executor = ToolExecutor(session, toolbox.tools, timeout=TIME_LIMIT)
        self._get = next(one for one in coatcheck.toolkit(session) if one.name == "get_artifact")
        if "code" not in self._get.parameters["properties"]:
            raise Unable("this build reads no artifact with a program")

    def __call__(self, tool: str, code: str = "", **arguments: Any) -> Any:
        given = {key: one.name if isinstance(one, Large) else one for key, one in arguments.items()}
        outcome = self._executor.run(ToolCall(f"call-{self.spent.calls}", tool, given))
        self.spent.add([tool, given], outcome.to_model_content())
        if outcome.is_error:
            raise ToolFailed(outcome.text)
        if outcome.ref is None:
            value = getattr(outcome, "content", outcome.text)
            return _worked_out(code, value) if code else value
        return self._read(outcome.ref.pointer, code) if code else Large(outcome.ref.pointer, None)

    def kept(self, tool: str, **arguments: Any) -> Any:
        return self(tool, **arguments)

    def compared(self, one: Any, other: Any, code: str) -> Any:
        return self._read(one.name, code.replace("OTHER", other.name))

    def _read(self, pointer: str, code: str) -> Any:
        arguments = {"pointer": pointer, "code": code}
        page = self._get.run(**arguments)
        self.spent.add(arguments, page)
        return _last_json(page)


def _solved(task: Task, way: Any, toolbox: Toolbox) -> Spent:
    found = task.one_by_one(way)
    if json.loads(json.dumps(found)) != json.loads(json.dumps(toolbox.answer)):
        raise Unable(f"the answer is wrong: {found!r}"[:200])
    return way.spent  # type: ignore[no-any-return]


def inline(task: Task, session: coatcheck.Session) -> Spent:
    toolbox = task.toolbox()
    return _solved(task, Inline(toolbox), toolbox)


def files(task: Task, session: coatcheck.Session) -> Spent:
    toolbox = task.toolbox()
    return _solved(task, Files(toolbox), toolbox)


def stubs(task: Task, session: coatcheck.Session) -> Spent:
    toolbox = task.toolbox()
    return _solved(task, Stubs(toolbox, session), toolbox)


def program(task: Task, session: coatcheck.Session) -> Spent:
    """Run the program of a task. While it waits for a person, that one approves."""
    toolbox = task.toolbox()
    make = getattr(import_module("coatcheck.executor"), "Programs", None)
    if make is None:
        raise Unable("this build runs no programs that call tools")
    executor = ToolExecutor(session, toolbox.tools, timeout=TIME_LIMIT)
    owner = make(
        executor,
        tools=list(toolbox.tools),
        approve=lambda call: None if call.name in task.approved else True,
    )
    spent = Spent()
    outcome = _ran(owner, task.program, spent)
    if outcome.error is not None and task.again:
        pointer = _POINTER.search(outcome.text)
        code = task.again.replace("POINTER", pointer[0] if pointer else "")
        outcome = _ran(owner, code, spent)
    if _last_json(outcome.text) != json.loads(json.dumps(toolbox.answer)):
        raise Unable(f"the answer is wrong: {outcome.text}"[:300])
    return spent


def _ran(owner: Any, code: str, spent: Spent) -> Any:
    outcome = owner.run(code)
    spent.add({"code": code}, outcome.text)
    while outcome.waiting is not None:
        outcome = owner.resume(outcome.waiting.token, code, approved=True)
        spent.tokens += tokens.exact(outcome.text)
    return outcome


def _called(tool: Callable[..., Any], arguments: dict[str, Any], spent: Spent) -> Any:
    start = time.monotonic()
    try:
        value = tool(**arguments)
        if time.monotonic() - start > TIME_LIMIT:
            raise TimeoutError(f"the tool did not answer within {TIME_LIMIT} s")
    except Exception as error:
        spent.add(arguments, str(error))
        raise ToolFailed(str(error)) from error
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _worked_out(code: str, value: Any, other: Any = None) -> Any:
    """What a program prints about a value, as JSON, in this process."""
    text = _text(value)
    data = list(csv.DictReader(io.StringIO(text))) if isinstance(value, str) else value
    names = {"text": text, "lines": text.splitlines(), "data": data, "Counter": Counter, "re": re}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names | {"artifact": lambda _: other})  # noqa: S102 - the benchmark's own code
    return _last_json(printed.getvalue())


def _last_json(shown: str) -> Any:
    """The last line of an answer that is JSON."""
    for line in reversed(shown.splitlines()):
        with contextlib.suppress(ValueError):
            return json.loads(line)
    raise Unable(f"there is no answer in: {shown}"[:300])


WAYS: Final[dict[str, Callable[[Task, coatcheck.Session], Spent]]] = {
    "inline": inline,
    "file and shell": files,
    "stubs": stubs,
    "program": program,
}


def programs(bench: Bench) -> Iterator[Row]:
    """Solve every task in every way. A row has the tokens of the program beside those of inline."""
    missed: list[str] = []
    tenths = 0
    with bench.new_store("process") as store:
        for number, task in enumerate(TASKS):
            spent: dict[str, Spent] = {}
            for name, solve in WAYS.items():
                try:
                    spent[name] = solve(task, store.session(f"{name} {number}"))
                except (Unable, CoatcheckError) as reason:
                    missed.append(f"{task.name}, {name}: {reason}")
            best = spent.get("program", spent.get("stubs"))
            if best is None:
                continue
            tenths += "program" in spent and best.tokens <= _TENTH * spent["inline"].tokens
            shown = ", ".join(
                f"{name} {one.tokens:,} in {one.calls}" for name, one in spent.items()
            )
            yield Row(task.name, spent["inline"].tokens, best.tokens, None, "count", note=shown)
    for one in missed:
        print(f"\nmissed: {one}")
    case = f"{len(TASKS)} tasks: a program takes at most a tenth of the tokens"
    yield Row(case, None, tenths, len(TASKS), "count", at_least=True)
    yield from _program_times(bench)
    yield from _stub_times(bench)


def _program_times(bench: Bench) -> Iterator[Row]:
    """What a program takes: one that does nothing, and one that parses 13 MB of JSON."""
    records = [
        {"id": number, "name": f"record {number}", "tags": ["a", "b"]} for number in range(10)
    ]
    size = len(json.dumps(records))
    large = json.dumps(records * (13 * MB // size))
    with bench.new_store("process") as store:
        session = store.session("programs")
        cases = (
            ("an empty program", "", "1", 0.005),
            ("a program over 13 MB of JSON", large, "len(data)", 0.2),
        )
        for case, content, code, limit in cases:
            ref = session.put(content or "a text")
            samples = []
            before = _cpu()
            rounds = bench.rounds(30)
            for _ in range(rounds):
                start = time.perf_counter()
                session.read(ref.pointer, code=code)
                samples.append(time.perf_counter() - start)
            note = f"{(_cpu() - before) / rounds * 1e3:.1f} ms of CPU, the child's included"
            yield Row(case, None, statistics.median(samples), limit, note=note)


def _stub_times(bench: Bench) -> Iterator[Row]:
    """What a stub takes over storing the content."""
    numbers = itertools.count(1)
    for size, rounds, limit in ((20 * KB, 100, 0.001), (MB, 20, 0.012)):
        for kind in KINDS:
            with bench.new_store("process") as store:
                session = store.session("stubs")
                new = functools.partial(_new, kind, size, numbers)
                externalize = functools.partial(session.externalize, tool="search")
                times = interleaved(
                    Side(new, session.put), Side(new, externalize), bench.rounds(rounds)
                )
                spent = []
                for text in [new() for _ in range(5)]:
                    before = _cpu()
                    externalize(text)
                    spent.append(_cpu() - before)
            case = f"a stub of {size_name(size)} of {kind}"
            note = f"{statistics.median(spent) * 1e3:.1f} ms of CPU"
            yield Row(case, times[0].p50, times[1].p50, limit, "over", times=times, note=note)


def _cpu() -> float:
    """The CPU time of this process and of the children that have ended, in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _new(kind: str, size: int, numbers: Iterator[int]) -> str:
    return content(kind, size, next(numbers))
