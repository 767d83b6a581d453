"""A result as a list of parts, and the choice for each: it stays, or it leaves the context.

`split` reads the parts, `decide` makes the choices. A list of blocks leaves as a whole if too much
of it would stay, or if there would be too many stubs; only its images are still shown. In a list
with media of a framework, which have to stay, further texts leave instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from coatcheck.externalize.judge import TOGETHER, Judge
from coatcheck.externalize.storing import Prepared
from coatcheck.parts import (
    Part,
    as_block,
    extra_fields,
    is_block,
    leaves,
    message_fields,
    read,
    rebuilt,
    text_of,
    write,
)
from coatcheck.parts.objects import as_json
from coatcheck.truncation import Truncation, find_notice
from coatcheck.values import as_text

_MAX_STUBS: Final = 50  # in one list
_MAX_PARTS: Final = 1_000  # a longer list is data

Place = Literal["payload", "text_field", "string"]
"""Where the stub of a part is written: in place of its payload, as the text of a block, or as a
plain string."""


@dataclass(frozen=True, slots=True)
class Split:
    """A value as the objects in it. `rebuild` returns it with others in their place."""

    value: object
    items: list[Any]
    rebuild: Callable[[list[Any]], Any]
    fields: str = ""
    """What surrounds the items. It always stays."""
    cut: Truncation | None = None
    """What one of the items says was cut out of the others."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What becomes of a part: it leaves or stays. A part with others `inside` has a choice for each
    of them, and `split` puts them back."""

    part: Part
    leaves: bool = False
    inside: tuple[Choice, ...] = ()
    split: Split | None = None
    value: Prepared | None = None
    """What is stored of a part that is not a block of a provider: a plain text or data."""
    place: Place = "payload"

    @property
    def stubs(self) -> int:
        """The number of stubs in its place."""
        return sum(one.stubs for one in self.inside) if self.inside else int(self.leaves)


def split(value: object) -> Split | None:
    """Return the blocks in a result. None if it is a plain value."""
    if isinstance(value, list):
        return Split(value, value, rebuild=lambda items: items, cut=_notice_in(value))
    part = read(value)
    if part.kind == "foreign" or (as_block(value) is not None and any(leaves([part]))):
        return Split(value, [value], rebuild=lambda items: items[0])
    if part.kind == "message":
        return _split_message(part)
    return None


def _split_message(part: Part) -> Split:
    items = list(part.content)
    return Split(
        part.original,
        items,
        rebuild=lambda new: write(replace(part, content=tuple(new))),
        fields=as_text(message_fields(part)),
        cut=_notice_in(items),
    )


def _split_nested(part: Part) -> Split:
    """Return the blocks in a block, such as those of a tool's result."""
    block = part.block
    return Split(
        part.original,
        block["content"],
        rebuild=lambda new: rebuilt(part.original, {**block, "content": new}),
    )


def decide(found: Split, judge: Judge) -> list[Choice] | None:
    """Return a choice for each item of a result, or None if it is data, or too large in parts."""
    if found.fields and judge.limit.exceeded(found.fields, judge.policy.count):
        return None
    return _decide_list(found.items, judge)


def as_one_block(items: list[Any], judge: Judge) -> list[Choice]:
    """Return the choice for items as one value, whose stub is a text block."""
    value = Prepared(items, as_text(items))
    if not judge.leaves(value.text):
        return [Choice(read(one)) for one in items]
    part = Part(original=items, block={"type": "text"}, read_as="unknown")
    return [Choice(part, leaves=True, value=value, place="text_field")]


def _notice_in(items: Sequence[Any]) -> Truncation | None:
    """Return what a block of a list says was cut out of the others, as Claude Code does for the
    results of MCP."""
    if len(items) > _MAX_PARTS:
        return None
    for one in items:
        text = text_of(as_block(one))
        cut = None if text is None else find_notice(text)
        if cut is not None:
            return cut
    return None


def _decide_list(items: list[Any], judge: Judge) -> list[Choice] | None:
    parts = [read(one) for one in items]
    blocks = [as_block(one) for one in items]
    if len(items) <= _MAX_PARTS and 0 < _count_media(items, parts, blocks) <= _MAX_STUBS:
        return _decide_beside_media(items, judge)
    if not items or None in blocks:
        return None
    if _is_data(parts, judge):
        return _decide_images(parts, judge)
    choices = _decide_blocks(parts, judge)
    return _decide_images(parts, judge) if choices is None else choices


def _is_data(parts: Sequence[Part], judge: Judge) -> bool:
    """Whether too much of a list of blocks is nothing that a model is shown."""
    unknown = [part.block for part in parts if not is_block(part)]
    if len(unknown) == len(parts):
        return True
    if len(unknown) > _MAX_STUBS and judge.limit.exceeded(as_text(unknown), judge.policy.count):
        return True
    extra = [extra_fields(part) for part in parts if is_block(part)]
    extra = [fields for fields in extra if fields]
    return bool(extra) and judge.is_large_together([as_text(extra)])


# A list of blocks


class _Staying:
    """What stays of a list so far: texts, and the tokens of images."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._texts: list[str] = []
        self._image_tokens = 0

    def choice(self, part: Part) -> Choice:
        """Return the choice for a block."""
        if part.kind == "nested":
            inside = tuple(self.choice(one) for one in part.content)
            return Choice(part, inside=inside, split=_split_nested(part))
        if not part.has_payload:
            return Choice(part)
        billed = None if self._judge.always else part.billed
        if billed is not None:
            return Choice(part, leaves=not self._has_room(billed))
        if not self._judge.is_large(part.written):
            self._texts.append(part.written)
            return Choice(part)
        return Choice(part, leaves=not self._judge.stays_anyway(part.written))

    def _has_room(self, billed: int) -> bool:
        """Whether an image may stay, and count it if it does."""
        total = self._image_tokens + billed
        most = self._judge.image_tokens
        if most is not None and (billed > most or total > most * TOGETHER):
            return False
        self._image_tokens = total
        self._texts.append("")
        return True

    def is_too_large(self) -> bool:
        return not self._judge.always and self._judge.is_large_together(self._texts)


def _decide_blocks(parts: Sequence[Part], judge: Judge) -> list[Choice] | None:
    """Return the choices for blocks, or None if the list would still be too large."""
    before = judge.own_answer
    staying = _Staying(judge)
    choices = [staying.choice(part) for part in parts]
    if sum(one.stubs for one in choices) <= _MAX_STUBS and not staying.is_too_large():
        return choices
    judge.own_answer = before  # no part stays: the list is judged as a whole
    return None


def _decide_images(parts: Sequence[Part], judge: Judge) -> list[Choice] | None:
    """Return the choices for a list whose other blocks are too large together: one stub for them,
    and the images after it. None if there are no images, or nothing else."""
    images = [part.original for part in parts if part.billed is not None]
    others = [part.original for part in parts if part.billed is None]
    if not images or not others or judge.always:
        return None
    shown = _decide_list(images, judge)
    return None if shown is None else [*as_one_block(others, judge), *shown]


# A list with media of a framework, or with plain text between blocks


def _count_media(
    items: Sequence[Any], parts: Sequence[Part], blocks: Sequence[dict[str, Any] | None]
) -> int:
    """Count the media of frameworks in a list. In a list of blocks and plain texts, count those of
    providers too."""
    foreign = sum(part.kind in ("foreign", "message") for part in parts)
    if foreign or None not in blocks:
        return foreign
    for one, block in zip(items, blocks, strict=True):
        if block is None and text_of(one) is None:
            return 0
    return sum(part.is_encoded or part.kind == "reference" for part in parts)


def _decide_beside_media(items: list[Any], judge: Judge) -> list[Choice] | None:
    """Return the choices for a list in which media and unknown blocks pass unchanged. None if the
    rest is too large."""
    has_strings = any(
        isinstance(one, str) or getattr(one, "kind", None) == "binary" for one in items
    )
    choices: list[Choice] = []
    texts: list[str] = []
    for one in items:
        choice = _choice_of_media(one, judge)
        if choice is None:
            choice = _choice_of_text(one, judge, texts, has_strings=has_strings)
        choices.append(choice)
    if sum(one.stubs > 0 for one in choices) > _MAX_STUBS:
        return None
    return choices


def _choice_of_media(item: object, judge: Judge) -> Choice | None:
    """Return the choice for media, a message or a block; None for a text or data."""
    part = read(item)
    if part.kind == "foreign":
        return Choice(part)
    block = item if isinstance(item, str | dict) else as_json(item)
    if not isinstance(block, dict) or text_of(block) is not None:
        return None
    if part.kind == "message":
        found = _split_message(part)
        inside = decide(found, judge)
        if inside is not None:
            return Choice(part, inside=tuple(inside), split=found)
    if is_block(read(block)):
        choices = _decide_list([item], judge)
        if choices is not None:
            return choices[0]
    return None if as_block(block) is None else Choice(replace(part, block=block))


def _choice_of_text(item: object, judge: Judge, staying: list[str], *, has_strings: bool) -> Choice:
    """Return the choice for a text or for data, beside the texts that stay so far."""
    block = item if isinstance(item, str | dict) else as_json(item) or item
    found = text_of(block)
    value = Prepared(block, as_text(block)) if found is None else Prepared(found, found)
    staying.append(value.text)
    if not judge.leaves(value.text) and not judge.is_large_together(staying):
        return Choice(Part(original=item), value=value)
    staying.pop()
    if isinstance(item, str) or (has_strings and found is None):
        return Choice(Part(original=item), leaves=True, value=value, place="string")
    kept: dict[str, Any] = {}
    if isinstance(block, dict) and found is not None:
        kept = block
    elif isinstance(block, dict) and "type" in block:
        kept = {"type": "text"}
    part = Part(original=item, block=kept)
    return Choice(part, leaves=True, value=value, place="text_field")
