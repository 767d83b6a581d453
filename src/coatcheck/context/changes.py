"""What changed from one hot state to another, field by field, as a person would tell it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from coatcheck.context.hot_state import ORDER, HotState

__all__ = ["Change", "changes_between"]


@dataclass(frozen=True, slots=True)
class Change:
    """One field: what went and what came, in their order. A field that is one value has at most one of each."""

    field: str
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        return {"field": self.field, "removed": list(self.removed), "added": list(self.added)}


def changes_between(older: HotState, newer: HotState) -> tuple[Change, ...]:
    """The fields that differ, in the order of the rendering. Known secrets are masked: two values that differ in
    nothing else still count as changed."""
    before, after = older.shown(), newer.shown()
    return tuple(
        _change(name, _items(name, before.get(name)), _items(name, after.get(name)))
        for name in ORDER
        if getattr(older, name) != getattr(newer, name)
    )


def _change(name: str, old: list[str], new: list[str]) -> Change:
    removed: list[str] = []
    added: list[str] = []
    for what, start, end, new_start, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if what != "equal":
            removed += old[start:end]
            added += new[new_start:new_end]
    return Change(name, tuple(removed), tuple(added))


def _items(name: str, value: Any) -> list[str]:
    if not value:
        return []
    if name == "artifact_index":
        return [told(entry) for entry in value]
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def told(entry: dict[str, Any]) -> str:
    """An entry of an artifact index, as it is shown, on one line."""
    label, summary = entry.get("label"), entry.get("summary")
    words = [entry["artifact_id"], entry["type"], f"v{entry['version']}", *([label] if label else [])]
    return " ".join(words) + (f": {summary}" if summary else "")
