"""A configuration as it may be shown: what an environment or headers hold, secrets among arguments, and those of known
shapes elsewhere are masked, in comments too. Everything else stays where it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from typing import Final

from coatcheck.install import jsonc, tomltext
from coatcheck.install.jsonc import Splice, spliced
from coatcheck.redaction import mask

HOLDERS: Final = frozenset({"env", "environment", "headers", "http_headers"})
"""Where clients keep secrets: each value below these keys is masked in what is shown."""

_HIDDEN: Final = '"[masked]"'
_SETS: Final = ("-e", "--env")  # a variable of a container: its name may tell nothing of what it is
_QUERY: Final = re.compile(r"(https?://[^\s\"'?#]+\?)[^\s\"'#]+")
_JSON_COMMENT: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|(//[^\r\n]*|/\*.*?\*/)', re.DOTALL)
_TOML_OTHER: Final = re.compile(
    tomltext.STRING.pattern + r"|(#[^\r\n]*)|((?<=[=,\[\s])[+-]?\d[\w.:+-]*(?![\w.:+-]*[ \t]*=))", re.DOTALL
)


def masked_json(text: str) -> str:
    """Of a text that `jsonc` takes."""
    root = jsonc.parse(text)
    splices: list[Splice] = []
    todo = [root] if root else []
    while todo:
        node = todo.pop()
        for member in node.members:
            if member.key.lower() in HOLDERS:
                splices += _held(text, member.node)
            else:
                todo.append(member.node)
        todo += node.items
        splices += [(b.start, b.end, _HIDDEN) for a, b in pairwise(node.items) if _names_secret(a.value, b.value)]
    return _shown(text, splices)


def masked_toml(text: str) -> str:
    """Of a text that `tomltext` takes."""
    splices: list[Splice] = []
    found = list(tomltext.statements(text))
    for one, following in zip_longest(found, found[1:]):
        if not HOLDERS.isdisjoint(part.lower() for part in one.path):
            is_next = following is not None and not HOLDERS.isdisjoint(part.lower() for part in following.path)
            end = following.start if following is not None and is_next else one.end
            splices += _held_in_toml(text, one, end)
        elif one.value is not None:
            spans = list(tomltext.strings(text, *one.value))
            texts = [text[start + 1 : end - 1] for start, end in spans]
            splices += [(*spans[at], _HIDDEN) for at in range(1, len(spans)) if _names_secret(*texts[at - 1 : at + 1])]
    return _shown(text, splices)


def _held(text: str, node: jsonc.Node) -> Iterator[Splice]:
    for one in jsonc.leaves(node):
        if one.value is not None and not isinstance(one.value, bool):
            yield (one.start, one.end, _HIDDEN)
    for match in _JSON_COMMENT.finditer(text, node.start, node.end):
        if match[1]:
            yield (*match.span(1), "/* [masked] */" if match[1].startswith("/*") else "// [masked]")


def _held_in_toml(text: str, one: tomltext.Statement, end: int) -> Iterator[Splice]:
    start, stop = one.value or (one.end, one.end)
    strings = list(tomltext.strings(text, start, stop))
    for span in strings:
        yield (*span, _HIDDEN)
    for match in _TOML_OTHER.finditer(text, one.start, end):
        if match[1]:
            yield (*match.span(1), "# [masked]")
        elif match[2] and start <= match.start() < stop:
            yield (*match.span(2), _HIDDEN)


def _names_secret(flag: object, value: object) -> bool:
    """Whether an argument such as `--api-key` says that the next is a secret; on lines of their own, none would see."""
    if not isinstance(flag, str) or not flag.startswith("-") or not isinstance(value, str) or not value:
        return False
    return (flag in _SETS and "=" in value) or value not in mask(f'"{flag}", "{value}"')[len(flag) + 2 :]


def _shown(text: str, splices: list[Splice]) -> str:
    return mask(_QUERY.sub(r"\1[masked]", spliced(text, splices)))
