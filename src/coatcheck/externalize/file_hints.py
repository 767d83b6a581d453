"""The command line that a stub suggests for its file: one that works as it is, with a program that
the agent has."""

from __future__ import annotations

import re
import shlex
import shutil
from typing import Final

from coatcheck import media
from coatcheck.previews import Facts
from coatcheck.redaction import MARK

COMMANDS: Final = ("grep", "sed", "jq", "python3")
"""Programs that a hint may name."""

_PATTERN: Final = re.compile(r'grep="([^"\'\\]+)"')
"""A pattern that grep reads like RE2, and that needs no quoting."""

_LINES: Final = re.compile(r'lines="(\d+):(\d+)"')
_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_JSON: Final = "import json, sys; d = json.load(open(sys.argv[1])); print(len(d), list(d)[:20])"
_CSV: Final = (
    "import csv, sys; rows = list(csv.DictReader(open(sys.argv[1]))); print(len(rows), rows[:3])"
)


def commands_here() -> tuple[str, ...]:
    """Return the programs for hints that this machine has."""
    return tuple(name for name in COMMANDS if shutil.which(name))


def file_hint(file: str, about: Facts, commands: tuple[str, ...], *, is_masked: bool) -> str:
    """Say how to look into the file of an artifact. `is_masked` says whether secrets are masked in
    the file too."""
    command = _command(about, commands)
    hint = "the file has all that is stored"
    if command:
        hint = f"{command} {shlex.quote(file)} reads it"
    if MARK not in about.preview.text:
        return hint
    where = "in the file too" if is_masked else "in the preview, not in the file"
    return f"{hint}; secrets are masked {where}"


def _command(about: Facts, commands: tuple[str, ...]) -> str:
    """Return a command line without its file, the best one for the content; "" if there is none."""
    if about.tokens is None:  # not text
        return ""
    media_type = media.essence(about.media_type)
    pattern = _PATTERN.fullmatch(about.preview.ask)
    if "grep" in commands and pattern is not None and "(?" not in pattern[1]:
        return f"grep -nE '{pattern[1]}'"
    if media.is_json(media_type):
        return _json_command(about, commands)
    if media.is_jsonl(media_type) and "jq" in commands:
        return "jq -s 'length, .[0]'"
    if media_type == "text/csv" and "python3" in commands:
        return f"python3 -c {shlex.quote(_CSV)}"
    if "sed" in commands:
        lines = _LINES.fullmatch(about.preview.ask)
        return f"sed -n '{lines[1]},{lines[2]}p'" if lines else "sed -n '1,80p'"
    return "grep -nm 80 ''" if "grep" in commands else ""


def _json_command(about: Facts, commands: tuple[str, ...]) -> str:
    if "jq" not in commands:
        return f"python3 -c {shlex.quote(_JSON)}" if "python3" in commands else ""
    keys = about.preview.part.split("/")[1:]  # of the main list
    if keys and all(map(_KEY.fullmatch, keys)):
        return f"jq '.{'.'.join(keys)} | length, .[0]'"
    return "jq 'length, .[:3]'" if about.preview.text.startswith("[") else "jq keys"
