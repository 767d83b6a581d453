"""Plain English: phrases that must not appear in docstrings, messages, help, documentation and
identifiers.

The list has the worst habits only. Where a word is used in its ordinary sense, add the line to
`ALLOWED`."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Paths that are checked: files, or folders of .py and .md files.
CHECKED = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "benchmarks", "examples", "src/coatcheck",
    "tests",
)  # fmt: skip

PHRASES = {
    r"\banew\b": "again",
    r"\bwhoever\b|\bwhomever\b": "anyone who",
    r"\bso many\b|\bso long\b(?! as)|\bso much\b": "a number, a limit",
    r"\bhow-many\b": "number",
    r"(?<!there )\b(is|are|was|were) no (?!longer\b|more\b)": "is not a",
    r"\bstands? (in|for|behind|before|beside|below|above|there|still|alone)\b": "is in, means",
    r"\bsaid to be\b|\bis (said|told)\b|\bare told\b|\bwas told\b|\bbe told\b": "reported",
    r"\bto be had\b|\bmay be had\b|\bcan be had\b": "available",
    r"\bgoes? on\b": "continues",
    r"\bover there\b|\bover here\b": "in the target, in the source",
    r"\bthis very\b|\bthe very\b": "exactly this",
    r"\bpasses? for\b": "is accepted as",
    r"\blet(s)? go\b": "drop",
    r"\bwhere not given\b|\bwhere none is\b": "by default",
    r"\bfor want of\b": "without",
    r"\bmade whole\b|\bmakes? whole\b": "restored",
}
"""What not to write, and what to write instead."""

NAMES = frozenset({"said", "told", "anew", "whoever", "stands", "sayings"})
"""Identifiers, or parts of them, that do not name a thing."""

ALLOWED: tuple[str, ...] = ()
"""Lines with a legitimate use of such a phrase or name."""


def files() -> Iterator[Path]:
    for path in map(ROOT.joinpath, CHECKED):
        found = (
            [path]
            if path.is_file()
            else sorted(one for one in path.rglob("*") if one.suffix in (".py", ".md"))
        )
        yield from (
            one
            for one in found
            if one != Path(__file__).resolve() and "node_modules" not in one.parts
        )


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a page without its code blocks, or the strings and comments of a module."""
    text = path.read_text()
    if path.suffix == ".md":
        text = re.sub(
            r"^```.*?^```$",
            lambda found: "\n" * found[0].count("\n"),
            text,
            flags=re.MULTILINE | re.DOTALL,
        )
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if (
            token.type in (tokenize.STRING, tokenize.COMMENT)
            or tokenize.tok_name[token.type] == "FSTRING_MIDDLE"
        ):
            yield from enumerate(token.string.splitlines(), token.start[0])


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """The names that a module defines or uses."""
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "arg", "attr", "name"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name


@pytest.mark.parametrize("path", list(files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_and_names_are_plain_english(path: Path) -> None:
    lines = path.read_text().splitlines()
    found = [
        f"{path.name}:{number}: {match[0]!r} (write: {instead})"
        for number, line in prose(path)
        for phrase, instead in PHRASES.items()
        if (match := re.search(phrase, line, re.IGNORECASE))
        and not any(one in line for one in ALLOWED)
    ]
    if path.suffix == ".py":
        found += [
            f"{path.name}:{number}: the name {name!r} does not say what it is"
            for number, name in identifiers(path)
            if NAMES & set(name.lower().split("_"))
            and not any(one in lines[number - 1] for one in ALLOWED)
        ]
    assert not found, "\n".join(found)
