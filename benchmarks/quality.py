"""Accuracy on real data: search hits and token estimates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.bench import Bench, corpus
from benchmarks.report import Row
from coatcheck import tokens
from tests.token_samples import corpus_texts

_NO_CORPUS = "there is no corpus (COATCHECK_CORPUS names no folder, and there is no ../shared/data)"
_FIRST: dict[int, float | None] = {1: None, 8: 0.85, 20: None}
_SMALL = 2_048


def search(bench: Bench) -> Iterator[Row]:
    """Each chunk put as an artifact of its document's name: for how many questions the right one is found."""
    folder = corpus()
    if folder is None:
        print(f"\nsearch is skipped: {_NO_CORPUS}")
        return
    documents = json.loads((folder / "retrieval" / "codebase_chunks.json").read_text())
    questions = [json.loads(line) for line in (folder / "retrieval" / "queries.jsonl").read_text().splitlines()]
    known: dict[str, set[tuple[str, int]]] = {}
    with bench.new_store("process") as store:
        session = store.session("bench")
        for document in documents:
            for chunk in document["chunks"]:
                ref = session.put(chunk["content"], name=document["doc_id"])
                known.setdefault(ref.artifact_id, set()).add((document["original_uuid"], chunk["original_index"]))
        for first, limit in _FIRST.items():
            right = 0
            for question in questions:
                golden = {(uuid, index) for uuid, index in question["golden_chunks"]}
                hits = session.search(question["query"], limit=first)
                right += any(known[hit.ref.artifact_id] & golden for hit in hits)
            title = f"{len(questions)} questions: right chunk among the first {first}"
            yield Row(title, None, right / len(questions), limit, "share", at_least=True)


def estimates(bench: Bench) -> Iterator[Row]:
    """Estimates of tokens against exact counts, for every text of the corpus that is not small."""
    folder = corpus()
    if folder is None:
        print(f"\ntokens is skipped: {_NO_CORPUS}")
        return
    if find_spec("splintr") is None:
        print("\ntokens is skipped: splintr is not installed (the extra `tokens`)")
        return
    texts = [text for _, text in corpus_texts(folder) if len(text.encode()) > _SMALL]
    errors = [tokens.estimate(text) / tokens.exact(text) - 1 for text in (texts[::10] if bench.quick else texts)]
    title = f"tokens of {len(errors)} texts"
    yield Row(f"{title}: mean error", None, sum(map(abs, errors)) / len(errors), 0.15, "share")
    yield Row(f"{title}: the lowest estimate is low by", None, max(0.0, -min(errors)), 0.05, "share")
