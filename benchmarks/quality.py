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
    """Each chunk put as an artifact of its document's name: for how many questions the right one is
    found."""
    folder = corpus()
    if folder is None:
        print(f"\nsearch is skipped: {_NO_CORPUS}")
        return
    documents = json.loads((folder / "retrieval" / "codebase_chunks.json").read_text())
    questions = [
        json.loads(line)
        for line in (folder / "retrieval" / "queries.jsonl").read_text().splitlines()
    ]
    known: dict[str, set[tuple[str, int]]] = {}
    with bench.new_store("process") as store:
        session = store.session("bench")
        for document in documents:
            for chunk in document["chunks"]:
                ref = session.put(chunk["content"], name=document["doc_id"])
                known.setdefault(ref.artifact_id, set()).add(
                    (document["original_uuid"], chunk["original_index"])
                )
        for first, limit in _FIRST.items():
            right = 0
            for question in questions:
                golden = {(uuid, index) for uuid, index in question["golden_chunks"]}
                hits = session.search(question["query"], limit=first)
                right += any(known[hit.ref.artifact_id] & golden for hit in hits)
            title = f"{len(questions)} questions: right chunk among the first {first}"
            yield Row(title, None, right / len(questions), limit, "share", at_least=True)


def estimates(bench: Bench) -> Iterator[Row]:
    """Estimates of tokens against exact counts, for each file of the corpus and each text inside
    that is not small."""
    folder = corpus()
    if folder is None:
        print(f"\ntokens is skipped: {_NO_CORPUS}")
        return
    if find_spec("splintr") is None:
        print("\ntokens is skipped: splintr is not installed (the extra `tokens`)")
        return
    files = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    inside = ((name, text) for name, text in corpus_texts(folder) if name not in files)
    whole = ((name, path.read_bytes().decode()) for name, path in files.items())
    for title, texts in (("files", whole), ("texts inside them", inside)):
        large = [(name, text) for name, text in texts if len(text.encode()) > _SMALL]
        seen = large[::10] if bench.quick else large
        errors = {name: tokens.estimate(text) / tokens.exact(text) - 1 for name, text in seen}
        high, low = max(errors, key=errors.__getitem__), min(errors, key=errors.__getitem__)
        title = f"tokens of {len(errors)} {title}"
        yield Row(
            f"{title}: mean error",
            None,
            sum(map(abs, errors.values())) / len(errors),
            0.15,
            "share",
        )
        yield Row(
            f"{title}: the highest estimate is high by ({high})",
            None,
            max(0.0, errors[high]),
            0.25,
            "share",
        )
        yield Row(
            f"{title}: the lowest estimate is low by ({low})",
            None,
            max(0.0, -errors[low]),
            0.05,
            "share",
        )
