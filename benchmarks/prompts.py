"""The cost of building a prompt in a large session, and the quality of recall."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import coatcheck
from benchmarks.bench import Bench, corpus
from benchmarks.report import Row, timed_row
from benchmarks.timing import Side, interleaved
from coatcheck import toolkit
from coatcheck.context import HotState, PromptBuilder, artifact_index, recall

_FEW, _MANY = 100, 10_000
_NO_CORPUS = "there is no corpus (COATCHECK_CORPUS names no folder, and there is no ../shared/data)"
_QUESTIONS = {
    "rare words": "Which build had the needle?",
    "words of every artifact": "What was the result of the build?",
}


def prompt(bench: Bench) -> Iterator[Row]:
    """A prompt with a hot state, an index of artifacts and recall, among 10,000 artifacts and among
    100."""
    many = _MANY // 10 if bench.quick else _MANY
    sessions = []
    for count in (_FEW, many):
        session = bench.new_store("process").session("bench")
        for number in range(count):
            rare = " needle" if number % (count // 20) == 7 % (count // 20) else ""
            words = " ".join(f"w{number * step % 997}" for step in range(60))
            session.put(
                f"result of build {number}: {words}{rare}", name=f"build-{number}", tool="make"
            )
        sessions.append(session)
    for what, question in _QUESTIONS.items():
        few, lots = (_side(session, question) for session in sessions)
        times = interleaved(few, lots, bench.rounds(100))
        yield timed_row(f"build among {many:,}, a question of {what}", times, 1.2)
    for session in sessions:
        session.store.close()


def _side(session: coatcheck.Session, question: str) -> Side[None]:
    system, tools = "You are a careful agent.", toolkit(session)
    builder = PromptBuilder(session, provider="anthropic", system=system, tools=tools, recall=True)
    messages = [{"role": "user", "content": question}]

    def build(_: None) -> object:
        state = HotState(
            session_id=session.session_id, artifact_index=artifact_index(session, limit=8)
        )
        return builder.build(messages, hot_state=state)

    return Side(lambda: None, build)


def recalled(folder: Path, session: coatcheck.Session) -> tuple[int, int]:
    """The number of questions whose right chunk is in the recall block of 2,000 characters, and of
    all questions. Each chunk is stored as an artifact under its document's name."""
    documents = json.loads((folder / "retrieval" / "codebase_chunks.json").read_text())
    questions = [
        json.loads(line)
        for line in (folder / "retrieval" / "queries.jsonl").read_text().splitlines()
    ]
    pointers: dict[tuple[str, int], str] = {}
    for document in documents:
        for chunk in document["chunks"]:
            ref = session.put(chunk["content"], name=document["doc_id"])
            pointers[document["original_uuid"], chunk["original_index"]] = ref.pointer
    right = 0
    for question in questions:
        block = recall(session, question["query"], max_items=8, max_chars=2_000).text
        right += any(pointers[uuid, index] in block for uuid, index in question["golden_chunks"])
    return right, len(questions)


def recall_of_chunks(bench: Bench) -> Iterator[Row]:
    """Recall, on the questions that `search` is measured with."""
    folder = corpus()
    if folder is None:
        print(f"\nrecall is skipped: {_NO_CORPUS}")
        return
    with bench.new_store("process") as store:
        right, questions = recalled(folder, store.session("bench"))
    title = f"{questions} questions: right chunk in 2,000 characters"
    yield Row(title, None, right / questions, 0.7, "share", at_least=True)
