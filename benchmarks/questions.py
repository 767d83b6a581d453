"""80 questions with known answers about real content: how many calls and tokens an answer takes. 40
look something up (`looked_up`), 40 need counting, grouping or comparing (`counted`).

A scripted reader, the same for every system, sees only what a model would: the text in place of the
result, and the answers of the tools. Each question has a short list of intents that a careful
engineer would derive from the question. A name or a word in one must be part of the question or
have been shown before. The first call is the one that the stub proposes or the first intent,
whichever answers with fewer tokens; after that come the other intents, then more pages. A question
that needs more than eight calls, or more than 200,000 tokens, counts as unable.

Each answer is computed from the content (`contents`) without Coatcheck, so it is right on any
machine.
"""

from __future__ import annotations

import functools
import json
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import coatcheck
from benchmarks.bench import Bench
from benchmarks.contents import NotHere, Question, content_of, printed, text_of
from benchmarks.counted import COUNTED
from benchmarks.looked_up import LOOKED_UP
from benchmarks.peers import environment
from benchmarks.peers.compare import Side
from benchmarks.peers.tools import READERS, Call, Intent, Reader, request, shown_line
from benchmarks.report import Row
from coatcheck import tokens

QUESTIONS: Final = (*LOOKED_UP, *COUNTED)
MOST_CALLS: Final = 8
WINDOW: Final = 200_000  # tokens; what does not fit into a model's context answers nothing
_WORD: Final = re.compile(r"[A-Za-z_]{3,}")
_SQL_WORDS: Final = frozenset(
    [
        "select",
        "count",
        "distinct",
        "from",
        "artifact",
        "where",
        "group",
        "by",
        "order",
        "desc",
        "limit",
        "as",
        "and",
        "or",
        "is",
        "not",
        "null",
        "min",
        "max",
        "sum",
        "cast",
        "bigint",
        "n",
    ]
)


@dataclass(slots=True)
class Answer:
    """How a system answered a question: the calls, the tokens of all that the model saw and wrote,
    and whether the answer was among it."""

    calls: list[Call] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    tokens: int = 0
    right: bool = False


def answered(question: Question, reader: Reader) -> Answer:
    """Look for the answer as a model would: see above."""
    known = _known(question)
    answer = Answer()
    shown = reader.offload(content_of(question.content), question.ask)
    _see(answer, None, shown, known, question)
    waiting = list(question.intents)
    proposed: Call | None = reader.hint(shown)
    while not answer.right and len(answer.calls) < MOST_CALLS and answer.tokens <= WINDOW:
        tried = [
            (call, reader.run(call))
            for call in (proposed, _next(waiting, question, reader, answer.pages))
            if call is not None and call not in answer.calls
        ]
        if not tried:  # nothing is left but to read on
            call = reader.more(answer.calls[-1], answer.pages[-1]) if answer.calls else None
            if call is None:
                break
            tried = [(call, reader.run(call))]
        good = [one for one in tried if _answers(one[1], known, question, [])]
        call, page = min(good, key=lambda one: _tokens(*one)) if good else tried[-1]
        if call == proposed:
            proposed = None
        _see(answer, call, page, known, question)
        waiting = [one for one in waiting if reader.call_for(one, answer.pages) not in answer.calls]
    return answer


@functools.cache
def _known(question: Question) -> re.Pattern[str]:
    try:
        return re.compile(question.known(text_of(question.content)))
    except (LookupError, StopIteration, AssertionError) as error:
        raise NotHere("its answer is not in the content that this machine has") from error


def _next(
    waiting: list[Intent], question: Question, reader: Reader, pages: list[str]
) -> Call | None:
    """The call for the first intent that this system has a tool for and whose names are known by
    now."""
    for intent in waiting:
        if (
            is_known(intent, question.ask, pages)
            and (call := reader.call_for(intent, pages)) is not None
        ):
            return call
    return None


def is_known(intent: Intent, ask: str, pages: Sequence[str]) -> bool:
    """Whether every name in an intent was shown or is part of the question, and the columns of SQL
    were shown."""
    seen = "\n".join(pages).casefold()
    if intent.sql:
        names = re.sub(r"'[^']*'", "", intent.sql).replace('"', "")
        words = [
            word
            for word in re.findall(r"[A-Za-z_]\w*", f"{names} {intent.at}")
            if word.lower() not in _SQL_WORDS
        ]
        return all(re.search(rf"\b{word.casefold()}\b", seen) for word in words)
    quoted = " ".join(re.findall(r"\"[^\"]*\"|'[^']*'", intent.code))
    looked_for = re.sub(r"\(\?\w\)|\\.", " ", f"{intent.grep} {intent.path} {quoted}")
    return all(
        word.casefold() in seen or word.casefold() in ask.casefold()
        for word in _WORD.findall(looked_for)
    )


def _see(
    answer: Answer, call: Call | None, page: str, known: re.Pattern[str], question: Question
) -> None:
    answer.tokens += _tokens(call, page)
    answer.right = answer.tokens <= WINDOW and _answers(page, known, question, answer.pages)
    answer.pages.append(page)
    if call is not None:
        answer.calls.append(call)


def _answers(page: str, known: re.Pattern[str], question: Question, before: Sequence[str]) -> bool:
    """Whether the answer is on a page, as it is or in JSON; or may be counted on the pages so
    far."""
    if known.search(page) or known.search(page.replace("\\n", "\n").replace('\\"', '"')):
        return True
    if question.evidence and _has_shown_all(question, [page, *before]):
        return True
    if not question.counted:
        return False
    shown = 0
    for one in (
        page,
        *reversed(before[1:]),
    ):  # the last pages may be all that there is, without those before
        shown += one.count(question.counted)
        if known.search(str(shown)):
            return True
    return False


def _has_shown_all(question: Question, pages: Sequence[str]) -> bool:
    """Whether all lines were shown that the answer can be worked out from. No reader would have to
    be as careful, so this is in favour of systems that only show."""
    shown = "\n".join(pages)
    return all(line in shown for line in _evidence(question))


@functools.cache
def _evidence(question: Question) -> list[str]:
    lines = text_of(question.content).splitlines()
    return [line.strip() for line in lines if re.search(question.evidence, line)]


@functools.lru_cache(maxsize=4_096)
def _exact(text: str) -> int:
    return tokens.exact(text)


def _tokens(call: Call | None, page: str) -> int:
    return _exact(page) + (
        _exact(json.dumps(call.arguments, ensure_ascii=False)) if call is not None else 0
    )


class Ours:
    """Coatcheck with its defaults: `session.externalize`, and the three tools."""

    def __init__(self, session: coatcheck.Session) -> None:
        self.session = session
        self._tools = {tool.name: tool for tool in coatcheck.toolkit(session)}
        self._pointer = ""
        parameters = self._tools["get_artifact"].parameters["properties"]
        self.runs_code, self.counts = "code" in parameters, "count" in parameters

    @property
    def schemas(self) -> str:
        return json.dumps([tool.as_anthropic() for tool in self._tools.values()])

    def offload(self, content: str | bytes, ask: str) -> str:
        outcome = self.session.externalize(content, tool="run")
        self._pointer = outcome.ref.pointer if outcome.ref is not None else ""
        return str(outcome.text)

    def hint(self, shown: str) -> Call | None:
        """The first call in the stub's hint that leaves nothing to fill in: the one written out, or
        it with another argument after "or"."""
        proposed = _STUB_HINT.search(shown)
        written = json.loads(f'"{proposed[1]}"') if proposed else ""
        called = _CALL.search(written)
        if called is None:
            return None
        arguments = dict(_ARGUMENT.findall(called[2]))
        others = [
            {"pointer": arguments["pointer"], one[1]: one[2]}
            for one in _OR.finditer(written, called.end())
        ]
        return next(
            (
                Call(called[1], one)
                for one in (arguments, *others)
                if "…" not in "".join(one.values())
            ),
            None,
        )

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        if not self._pointer:
            return None
        asked: dict[str, Any] = {}
        before, after = intent.near
        at = shown_line(intent, r"(\d+)[:>]", pages)
        if at is not None:
            asked = {"lines": f"{max(1, at - before)}:{at + after}"}
        elif intent.grep:
            asked = {"grep": intent.grep}
            if intent.count and self.counts:
                asked["count"] = True
            if (before or after) and "context" in self._tools["get_artifact"].parameters[
                "properties"
            ]:
                asked["context"] = str(max(before, after))
        elif intent.code:
            asked = {"code": intent.code} if self.runs_code else {}
        elif intent.sql or intent.path:
            asked = {"query": intent.sql or intent.path}
        elif intent.lines:
            asked = {"lines": intent.lines}
        elif intent.text:
            last = re.search(r"(\d+) pages", pages[0])
            asked = {"query": f"page {last[1]}" if intent.text == "last" and last else "text"}
        return (
            Call("get_artifact", {"pointer": self._pointer + intent.at, **asked}) if asked else None
        )

    def more(self, call: Call, page: str) -> Call | None:
        found = re.search(r'more: (cursor|pointer)="([^"]+)"', page)
        if found is None:
            return None
        arguments = (
            {"pointer": self._pointer, "cursor": found[2]}
            if found[1] == "cursor"
            else {"pointer": found[2]}
        )
        return Call(call.tool, arguments)

    def run(self, call: Call) -> str:
        return self._tools[call.tool].run(**call.arguments)


_STUB_HINT: Final = re.compile(r'"hint":"((?:[^"\\]|\\.)*)"')
_CALL: Final = re.compile(r"(get_artifact)\(((?:[^()\"]|\"[^\"]*\")*)\)")
_ARGUMENT: Final = re.compile(r'(\w+)="([^"]*)"')
_OR: Final = re.compile(r' or (\w+)="([^"]*)"')


class Theirs:
    """A peer in a process of its own: see `benchmarks.peers.tools` for what it shows, and how it is
    asked.

    A PDF goes to the model as it is, which all of them can: it costs at least the tokens of its
    text."""

    def __init__(self, side: Side) -> None:
        self._side = side

    @property
    def schemas(self) -> str:
        return str(self._asked("schemas"))

    def offload(self, content: str | bytes, ask: str) -> str:
        return str(self._asked("offload", content, ask)) if isinstance(content, str) else printed()

    def hint(self, shown: str) -> Call | None:
        return self._call("hint", shown)

    def call_for(self, intent: Intent, pages: Sequence[str]) -> Call | None:
        return self._call("call_for", intent, pages)

    def more(self, call: Call, page: str) -> Call | None:
        return self._call("more", call, page)

    def run(self, call: Call) -> str:
        return str(self._asked("run", call))

    def _call(self, method: str, *arguments: object) -> Call | None:
        call = self._asked(method, *arguments)
        return Call(*call) if call is not None else None

    def _asked(self, method: str, *arguments: object) -> Any:
        answer = self._side.exchange(request(method, *arguments))
        if "answer" not in answer:
            raise RuntimeError(f"{self._side.name}: {answer.get('missing')}")
        return answer["answer"]


def _peers(bench: Bench) -> Iterator[tuple[str, Side]]:
    """Each peer, started; or why it cannot be asked, printed."""
    for name in READERS:
        side = Side(name, bench.new_folder(name), module="tools")
        try:
            python = environment.python()
            if name == "context-mode":
                os.environ["CONTEXT_MODE"] = os.pathsep.join(environment.context_mode())
            side.start(python)
        except (environment.Missing, OSError) as error:
            side.missing = f"not installed: {error}"
        if side.missing:
            print(f"\n{name} is not asked: {side.missing}", flush=True)
        else:
            yield name, side


def questions(bench: Bench) -> Iterator[Row]:
    """Ask every question of every system, and judge ours. A quick run asks only ours.

    Yields a row for each question: the tokens of ours beside the fewest of the others, and a remark
    that says what is to mend, and how the others did."""
    here = [question for question in QUESTIONS if _is_here(question)]
    with bench.new_store("process") as store:
        sides = {} if bench.quick else dict(_peers(bench))
        systems: dict[str, Reader] = {"coatcheck": Ours(store.session("questions"))}
        systems |= {name: Theirs(side) for name, side in sides.items()}
        answers = {
            name: [answered(question, reader) for question in here]
            for name, reader in systems.items()
        }
        print(f"\n{_systems(systems, answers)}", flush=True)
        for side in sides.values():
            side.close()
    ours = answers.pop("coatcheck")
    fewest = 0
    for number, question in enumerate(here):
        row = _row(
            question, ours[number], {name: others[number] for name, others in answers.items()}
        )
        fewest += ours[number].right and (row.floor is None or row.ours <= row.floor)
        yield row
    calls = [max(1, len(one.calls)) if one.right else MOST_CALLS + 1 for one in ours]
    asked = f"{len(here)} questions"
    in_one, in_two = sum(one <= 1 for one in calls), sum(one <= 2 for one in calls)
    yield Row(f"{asked}: answered in one call", None, in_one, 78, "count", at_least=True)
    yield Row(f"{asked}: answered in two calls", None, in_two, len(here), "count", at_least=True)
    sizes = [_exact(one.pages[0]) for one in ours if one.pages[0].startswith('{"stub"')]
    yield Row(f"{asked}: tokens of the largest stub", None, max(sizes), 450, "count")
    yield Row(f"{asked}: tokens of a stub, median", None, statistics.median(sizes), 300, "count")
    yield Row(f"{asked}: unable", None, sum(not one.right for one in ours), 0, "count")
    if answers:
        case = f"{asked}: fewest tokens of {len(answers) + 1}"
        yield Row(case, None, fewest, 70, "count", at_least=True)


def _is_here(question: Question) -> bool:
    try:
        _known(question)
    except NotHere as reason:
        print(f"\nnot asked: {question.ask} {reason}")
        return False
    return True


def _row(question: Question, ours: Answer, others: dict[str, Answer]) -> Row:
    best = min((one.tokens for one in others.values() if one.right), default=None)
    marks = [
        "UNABLE" if not ours.right else f"{len(ours.calls)} CALLS" if len(ours.calls) > 1 else ""
    ]
    marks.append("NOT FEWEST" if best is not None and ours.tokens > best else "")
    shown = [f"{name} {one.tokens:,} in {len(one.calls)}" if one.right else f"{name} unable"
             for name, one in others.items()]  # fmt: skip
    note = "; ".join([*filter(None, marks), ", ".join(shown)])
    return Row(f"{question.kind}: {question.ask}", best, ours.tokens, None, "count", note=note)


def _systems(systems: dict[str, Reader], answers: dict[str, list[Answer]]) -> str:
    heads = (
        "",
        "no call",
        "one call",
        "two calls",
        "more",
        "unable",
        "tokens: median",
        "mean",
        "tools, once",
    )
    lines: list[tuple[str, ...]] = [heads]
    for name, reader in systems.items():
        calls = [len(one.calls) for one in answers[name] if one.right]
        spent = [one.tokens for one in answers[name] if one.right] or [0]
        lines.append((
            name, *(str(calls.count(number)) for number in range(3)), str(sum(one > 2 for one in calls)),
            str(len(answers[name]) - len(calls)), f"{statistics.median(spent):,.0f}", f"{statistics.mean(spent):,.0f}",
            f"{_exact(reader.schemas):,}",
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)
