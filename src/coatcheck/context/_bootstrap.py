"""Bootstrap files (AGENTS.md and its like) for the head of a prompt: small ones whole, large ones as references.

The text is a function of the files' names and bytes alone, so that an unchanged file never costs a cached prefix. What
a file says is the user's word to the model and stands there as it is; only where it is stored is it an artifact.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from coatcheck.errors import InvalidArgument, LimitExceeded, StoreError
from coatcheck.ids import clip, digest_of
from coatcheck.previews.text import line as one_line
from coatcheck.redaction import mask
from coatcheck.refs import Ref

if TYPE_CHECKING:
    from coatcheck.session import Session

__all__ = ["BootstrapFile", "Bootstrapped", "bootstrap"]

_LARGEST: Final = 64 * 1024 * 1024
_NAME: Final = 200
_HEAD_SHARE: Final = 2 / 3
NEWLINE: Final = "\n"

Status = Literal["whole", "reference", "repeated", "missing", "refused"]


@dataclass(frozen=True, slots=True)
class BootstrapFile:
    """What became of one file: shown `whole`, as a `reference`, or `repeated` (an earlier file has the same bytes);
    `missing` and `refused` ones are not in the text, and `reason` says why. `ref` is where its bytes are stored."""

    name: str
    status: Status
    ref: Ref | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """The text for a prompt, what became of each file in their order, and the refs of those that became one."""

    text: str
    files: tuple[BootstrapFile, ...] = ()

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple(file.ref for file in self.files if file.status == "reference" and file.ref is not None)


def bootstrap(
    session: Session,
    files: Iterable[str | Path],
    *,
    root: str | Path | None = None,
    enabled: bool | None = None,
    threshold_chars: int | None = None,
    shown_chars: int | None = None,
    read_tool: str | None = "get_artifact",
) -> Bootstrapped:
    """The files as a prompt carries them, in the order they are named.

    One with more than `threshold_chars` (8,000) characters becomes an artifact of the session, named like the file:
    the text then has a line `ArtifactRef: art:… (type=doc, sha256=…, bytes=…)` and its head and tail, `shown_chars`
    (4,000) together, with a line between them that says what is left out. A file that changed becomes a new artifact
    under the same name; the old one stays until the session ends. With `enabled=False` every file is shown whole.
    What is not given comes from the settings of the store (`bootstrap`).

    Relative names are looked up in `root`, by default the working directory. A link that leads out of it is refused, as
    is what is no regular file, cannot be read or is over 64 MB; a missing file is passed over. None of that raises."""
    said = session.store.settings.section("bootstrap")
    enabled = said["enabled"] if enabled is None else enabled
    if not isinstance(enabled, bool):
        raise InvalidArgument(f"enabled is {clip(repr(enabled))}", hint="True or False")
    most = _whole("threshold_chars", said["threshold_chars"] if threshold_chars is None else threshold_chars, 1)
    shown = _whole("shown_chars", said["shown_chars"] if shown_chars is None else shown_chars, 0)
    make = _Text(session, most if enabled else None, min(shown, most), read_tool)
    base = Path.cwd() if root is None else Path(root)
    return make.all((base, Path(file)) for file in files)


class _Text:
    def __init__(self, session: Session, threshold: int | None, shown: int, read_tool: str | None) -> None:
        self._session = session
        self._threshold = threshold
        self._shown = shown
        self._read_tool = read_tool
        self._seen: dict[str, str] = {}

    def all(self, files: Iterator[tuple[Path, Path]]) -> Bootstrapped:
        parts: list[str] = []
        done: list[BootstrapFile] = []
        for base, path in files:
            name = one_line(path.name if path.is_absolute() else path.as_posix(), _NAME)
            data, reason = _read(base, path)
            if data is None:
                done.append(BootstrapFile(name, "refused" if reason else "missing", reason=reason or "no such file"))
                continue
            text, file = self._part(name, data)
            parts.append(f"--- {name} ---\n{text}")
            done.append(file)
        return Bootstrapped("\n\n".join(parts), tuple(done))

    def _part(self, name: str, data: bytes) -> tuple[str, BootstrapFile]:
        digest = digest_of(data)
        if digest in self._seen and data:
            return f"[the same as {self._seen[digest]}]", BootstrapFile(name, "repeated")
        self._seen[digest] = name
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self._not_text(name, data)
        text = text.removeprefix("\ufeff").rstrip("\n")
        if self._threshold is None or len(text) <= self._threshold:
            return text, BootstrapFile(name, "whole")
        ref, failure = self._stored(name, data.decode())
        start, end = _cut(text, self._shown)
        lines = f"{text.count(NEWLINE, 0, start) + 1}:{text.count(NEWLINE, 0, end - 1) + 1}"
        note = f"[{end - start:,} characters are left out here, lines {lines.replace(':', '-')}{self._how(ref, lines)}]"
        said = (self._lead(ref, failure), text[:start].rstrip("\n"), note, text[end:])
        return "\n".join(part for part in said if part), BootstrapFile(name, "reference", ref, failure)

    def _not_text(self, name: str, data: bytes) -> tuple[str, BootstrapFile]:
        ref, failure = self._stored(name, data)
        said = f"{self._lead(ref, failure)}\n[not UTF-8 text: nothing of it is shown]"
        return said, BootstrapFile(name, "reference", ref, failure or "not UTF-8 text")

    def _stored(self, name: str, value: str | bytes) -> tuple[Ref | None, str]:
        """The artifact of a file, masked where the settings say that secrets are not stored; where the store fails,
        why. A prompt is made all the same."""
        if isinstance(value, str) and self._session.store.settings["policy.redact"] == "store":
            value = mask(value)
        try:
            return self._session.put(value, name=name, kind="doc", tool="bootstrap"), ""
        except (StoreError, LimitExceeded) as error:
            return None, one_line(mask(error.message), _NAME)

    def _lead(self, ref: Ref | None, failure: str) -> str:
        if ref is None:
            return f"[the whole file could not be stored: {failure}]"
        return f"ArtifactRef: {ref.pointer} (type={ref.kind}, sha256={ref.artifact_id}, bytes={ref.size_bytes})"

    def _how(self, ref: Ref | None, lines: str) -> str:
        if ref is None or self._read_tool is None:
            return ""
        return f'; {self._read_tool}(pointer="{ref.pointer}", lines="{lines}") reads them'


def _cut(text: str, shown: int) -> tuple[int, int]:
    """Where the part that is not shown begins and ends: at line ends, where there are some nearby."""
    start = int(shown * _HEAD_SHARE)
    end = len(text) - (shown - start)
    line = text.rfind(NEWLINE, start // 2, start) + 1
    start = line or start
    line = text.find(NEWLINE, end, end + (len(text) - end) // 2) + 1
    return start, line or end


def _read(base: Path, path: Path) -> tuple[bytes | None, str]:
    """A file's bytes; or None, and why: nothing where there is none. Only regular files, so that no pipe or device
    keeps a prompt waiting; a link may lead anywhere within the base, or the file's own folder where its path is
    absolute."""
    try:
        within = Path(os.path.realpath(path.parent if path.is_absolute() else base))
        plain = Path(os.path.normpath(within / (path.name if path.is_absolute() else path)))
        real = Path(os.path.realpath(plain))
        if real != plain and not real.is_relative_to(within):
            return None, "a link that leads out of the folder"
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except (OSError, ValueError, RuntimeError) as error:
        return None, (error.strerror if isinstance(error, OSError) else None) or "no name of a file"
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            return None, "no regular file"
        if about.st_size > _LARGEST:
            return None, f"{about.st_size:,} bytes, over {_LARGEST:,}"
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(_LARGEST), ""
    except OSError as error:
        return None, error.strerror or "it cannot be read"
    finally:
        os.close(handle)


def _whole(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name} is {clip(repr(value))}", hint=f"a whole number from {least} on")
    return value
