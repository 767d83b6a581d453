"""Tokens: secrets that are known by how they begin, whoever writes them where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from .span import Span

_WORD: Final = "0-9A-Za-z"
_BASE64: Final = "0-9A-Za-z+/"  # so that nothing inside an image in base64 is taken for a key
_AWS_SECRET: Final = r"(?:[\s,:;|\"']{1,6}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?"


class _Shape(NamedTuple):
    """A token: what it begins with (of a fixed length), and the rest, which begins with a character that is rare."""

    label: str
    lead: str
    rest: str
    before: str = _WORD  # what may not stand before it


SHAPES: Final = (
    _Shape("aws key", "", rf"A[KS]IA[A-Z2-7]{{16}}(?![{_WORD}]){_AWS_SECRET}", _BASE64),
    _Shape("google key", "", r"AIza[\w-]{35}", _BASE64),
    _Shape("twilio key", "", rf"SK[0-9a-f]{{32}}(?![{_WORD}])", _BASE64),
    _Shape("github token", "gh[oprsu]", r"_[A-Za-z0-9]{20,}+"),
    _Shape("github token", "github_pat", r"_\w{20,}+"),
    _Shape("stripe key", "[rs]k", r"_(?:live|test)_[A-Za-z0-9]{10,}+"),
    _Shape("webhook secret", "whsec", r"_[A-Za-z0-9+/=]{16,}+"),
    _Shape("hugging face token", "hf", r"_[A-Za-z0-9]{20,}+"),
    _Shape("npm token", "npm", r"_[A-Za-z0-9]{30,}+"),
    _Shape("api key", "gsk", r"_[A-Za-z0-9]{30,}+"),
    _Shape("docker token", "dckr", r"_[op]at_[\w-]{20,}+"),
    _Shape("digitalocean token", "do[opr]", r"_v1_[0-9a-f]{32,}+"),
    _Shape("shopify token", "shp(?:at|ca|pa|ss)", r"_[0-9A-Fa-f]{32,}+"),
    _Shape("gitlab token", "gl(?:pat|ptt|cbt|imt)", r"-[\w.-]{20,}+"),
    _Shape("gitlab token", "gl(?:dt|rt|ft)", r"-[\w.-]{20,}+"),
    _Shape("slack token", "xox[abceoprs]", r"-[\w-]{10,}+"),
    _Shape("slack token", "xapp", r"-\d-[\w-]{10,}+"),
    _Shape("api key", "sk", r"-(?=[\w-]{0,120}[A-Za-z0-9]{12})(?=[\w-]{0,120}\d)[\w-]{20,}+"),
    _Shape("api key", "xai", r"-[A-Za-z0-9]{30,}+"),
    _Shape("api key", "pplx", r"-[A-Za-z0-9]{30,}+"),
    _Shape("api key", "nvapi", r"-[\w-]{30,}+"),
    _Shape("pypi token", "pypi", r"-[\w-]{32,}+"),
    _Shape("google secret", "GOCSPX", r"-[\w-]{20,}+"),
    _Shape("age key", "AGE", r"-SECRET-KEY-1[0-9A-Z]{20,}+"),
    _Shape("google token", "ya29", r"\.[\w-]{20,}+"),
    _Shape("vault token", "hv[bs]", r"\.[\w-]{20,}+"),
    _Shape("sendgrid key", "SG", r"\.[\w-]{16,64}\.[\w-]{16,}+"),
    _Shape("slack webhook", r"hooks\.slack", r"\.com/(?:services|workflows|triggers)/[\w/-]{20,}+"),
    _Shape("discord webhook", "discord", r"\.com/api/webhooks/\d{10,24}/[\w-]{20,}+"),
    _Shape("discord webhook", "discordapp", r"\.com/api/webhooks/\d{10,24}/[\w-]{20,}+"),
)
_LEADS: Final = tuple(re.compile(f"(?:{shape.lead})\\Z") for shape in SHAPES)
_LONGEST_LEAD: Final = 16
_PEEK: Final = {"_": r"(?=[\w+/=-]{10})", "-": r"(?=[\w.-]{10})", ".": r"(?=[\w-]{16}|com/)", "A": "", "S": ""}


def _alternatives(first: str) -> str:
    """All shapes whose rest begins with this character. It is matched once for them all: `re` skips ahead to it."""
    shapes = []
    for at, shape in enumerate(SHAPES):
        rest = shape.rest.removeprefix("\\")
        if rest[0] == first:
            lead = f"(?<={shape.lead}[{first}])" if shape.lead else ""
            shapes.append(f"{lead}(?<![{shape.before}]{shape.lead}[{first}]){rest[1:]}(?P<_{at}>)")
    return re.escape(first) + _PEEK[first] + f"(?:{'|'.join(shapes)})"


_TOKEN: Final = re.compile("|".join(map(_alternatives, _PEEK)), re.ASCII)
# Whether there is anything but names to look for: a token, or what all other shapes have.
HINT: Final = re.compile(
    rf"{_TOKEN.pattern}|J(?<=eyJ)|-(?:----(?:BEGIN|END)|Lines:|u |-user)|:(?:AA|//[^\s/@]{{1,400}}@)|Q~", re.ASCII
)
_JWT: Final = re.compile(r"eyJ(?<![\w-]eyJ)[\w-]{10,}+(?:\.[\w-]*+){1,4}", re.ASCII)
_TELEGRAM: Final = re.compile(r"(?<![\w:])\d{8,10}:AA[\w-]{30,}+", re.ASCII)
_AZURE: Final = re.compile(r"(?<![\w~.-])[\w~.-]{3}\dQ~[\w~.-]{30,}+", re.ASCII)


def tokens(text: str) -> Iterator[Span]:
    for match in _TOKEN.finditer(text):
        at = int(str(match.lastgroup)[1:])
        lead = _LEADS[at].search(text[max(0, match.start() - _LONGEST_LEAD) : match.start()])
        yield Span(match.start() - (len(lead.group()) if lead else 0), match.end(), SHAPES[at].label)
    if "eyJ" in text:
        yield from (Span(*match.span(), "jwt") for match in _JWT.finditer(text))
    if ":AA" in text:
        yield from (Span(*match.span(), "telegram token") for match in _TELEGRAM.finditer(text))
    if "Q~" in text:
        yield from (Span(*match.span(), "azure secret") for match in _AZURE.finditer(text))
