"""Bootstrap files (such as AGENTS.md) for the beginning of a prompt: small ones complete, large
ones as references.

The text depends only on the names and bytes of the files, so that an unchanged file never
invalidates a cached prefix. The files are instructions of the user and appear in the prompt
unchanged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from coatcheck.checks import one_of, whole
from coatcheck.errors import InvalidArgument, LimitExceeded, StoreError
from coatcheck.externalize import Policy, configured
from coatcheck.externalize.storing import put
from coatcheck.ids import clip, digest_of
from coatcheck.intake import About
from coatcheck.previews.excerpts import line as one_line
from coatcheck.redaction import mask
from coatcheck.refs import Ref

if TYPE_CHECKING:
    from coatcheck.session import Session

_LARGEST: Final = 64 * 1024 * 1024
_NAME: Final = 200
_HEAD_SHARE: Final = 2 / 3

Status = Literal["whole", "reference", "repeated", "missing", "refused"]


@dataclass(frozen=True, slots=True)
class BootstrapFile:
    """The outcome for one file: shown `whole`, as a `reference`, or `repeated` (an earlier file has
    the same bytes). Files that are `missing` or `refused` are not in the text, and `reason` says
    why. `ref` is the stored artifact."""

    name: str
    status: Status
    ref: Ref | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """The text for a prompt, and the outcome for each file in the given order."""

    text: str
    files: tuple[BootstrapFile, ...] = ()

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The refs of files that became references."""
        return tuple(
            file.ref for file in self.files if file.status == "reference" and file.ref is not None
        )


@dataclass(frozen=True, slots=True)
class Kept:
    """A file that was stored: the lines that refer to it in the prompt, and its ref if it is an
    artifact of the session. `failure` says why it could not be stored."""

    lead: str
    ref: Ref | None = None
    failure: str = ""


def bootstrap(
    session: Session,
    files: Iterable[str | Path],
    *,
    root: str | Path | None = None,
    enabled: bool | None = None,
    threshold_chars: int | None = None,
    shown_chars: int | None = None,
    read_tool: str | None = "get_artifact",
    redact: Literal["store"] | None = None,
    keep: Callable[[str, str | bytes], Kept] | None = None,
) -> Bootstrapped:
    """Return the files as a prompt carries them, in the given order.

    A file with more than `threshold_chars` (8,000) characters becomes an artifact of the session,
    named like the file. The text then has a line `ArtifactRef: art:… (type=doc, sha256=…, bytes=…)`
    and its head and tail, together `shown_chars` (4,000), with a line between them about what is
    left out. A changed file becomes a new artifact under the same name; the old one remains until
    the session ends. With `enabled=False` every file is shown whole. `redact="store"` masks secrets
    in the artifact; the text in the prompt is not masked. `keep` gets the name and the content of a
    file, and stores it elsewhere. Defaults come from the settings of the store (`bootstrap`, and
    `policy.redact`).

    Relative names are looked up in `root`, by default the working directory. Missing files are
    skipped. A link that leads out of the folder, a file that is not regular, cannot be read or is
    over 64 MB is refused. Neither raises."""
    settings = session.store.settings.section("bootstrap")
    enabled = settings["enabled"] if enabled is None else enabled
    if not isinstance(enabled, bool):
        raise InvalidArgument(f"enabled must be True or False, got {clip(repr(enabled))}")
    most: int = settings["threshold_chars"] if threshold_chars is None else threshold_chars
    shown: int = settings["shown_chars"] if shown_chars is None else shown_chars
    whole(most, "threshold_chars", least=1)
    whole(shown, "shown_chars")
    one_of(redact, "redact", ("store",), optional=True)
    policy = configured(session.store.settings, redact)
    make = _Text(
        keep=partial(_keep, session, policy) if keep is None else keep,
        threshold=most if enabled else None,
        shown=min(shown, most),
        read_tool=read_tool,
    )
    base = Path.cwd() if root is None else Path(root)
    return make.all((base, Path(file)) for file in files)


def _keep(session: Session, policy: Policy, name: str, value: str | bytes) -> Kept:
    """Store a file as an artifact of the session."""
    ref = put(session, value, About(name=name, kind="doc", tool="bootstrap"), policy)
    about = f"type={ref.kind}, sha256={ref.artifact_id}, bytes={ref.size_bytes}"
    return Kept(f"ArtifactRef: {ref.pointer} ({about})", ref)


@dataclass(slots=True)
class _Text:
    keep: Callable[[str, str | bytes], Kept]
    threshold: int | None
    shown: int
    read_tool: str | None
    seen: dict[str, str] = field(default_factory=dict)

    def all(self, files: Iterator[tuple[Path, Path]]) -> Bootstrapped:
        parts: list[str] = []
        done: list[BootstrapFile] = []
        for base, path in files:
            name = one_line(path.name if path.is_absolute() else path.as_posix(), _NAME)
            data, reason = _read(base, path)
            if data is None:
                done.append(
                    BootstrapFile(
                        name, "refused" if reason else "missing", reason=reason or "no such file"
                    )
                )
                continue
            text, file = self._part(name, data)
            parts.append(f"--- {name} ---\n{text}")
            done.append(file)
        return Bootstrapped("\n\n".join(parts), tuple(done))

    def _part(self, name: str, data: bytes) -> tuple[str, BootstrapFile]:
        digest = digest_of(data)
        if digest in self.seen and data:
            return f"[the same as {self.seen[digest]}]", BootstrapFile(name, "repeated")
        self.seen[digest] = name
        try:
            text = data.decode()
        except UnicodeDecodeError:
            kept = self._kept(name, data)
            shown = f"{kept.lead}\n[not UTF-8 text: nothing of it is shown]"
            return shown, BootstrapFile(
                name, "reference", kept.ref, kept.failure or "not UTF-8 text"
            )
        text = text.removeprefix("\ufeff").rstrip("\n")
        if self.threshold is None or len(text) <= self.threshold:
            return text, BootstrapFile(name, "whole")
        kept = self._kept(name, data.decode())
        start, end = _cut(text, self.shown)
        first, last = (text.count("\n", 0, at) + 1 for at in (start, end - 1))
        how = ""
        if kept.ref is not None and self.read_tool is not None:
            how = (
                f'; {self.read_tool}(pointer="{kept.ref.pointer}", '
                f'lines="{first}:{last}") reads them'
            )
        note = f"[{end - start:,} characters are left out here, lines {first}-{last}{how}]"
        parts = (kept.lead, text[:start].rstrip("\n"), note, text[end:])
        return "\n".join(part for part in parts if part), BootstrapFile(
            name, "reference", kept.ref, kept.failure
        )

    def _kept(self, name: str, value: str | bytes) -> Kept:
        """Store a file. If the store fails, the reason replaces the reference: the prompt is built
        anyway."""
        try:
            return self.keep(name, value)
        except (StoreError, LimitExceeded) as error:
            failure = one_line(mask(error.message), _NAME)
            return Kept(f"[the whole file could not be stored: {failure}]", failure=failure)


def _cut(text: str, shown: int) -> tuple[int, int]:
    """Return where the omitted part begins and ends: at line ends, if there are some nearby."""
    start = int(shown * _HEAD_SHARE)
    end = len(text) - (shown - start)
    line = text.rfind("\n", start // 2, start) + 1
    start = line or start
    line = text.find("\n", end, end + (len(text) - end) // 2) + 1
    return start, line or end


def _read(base: Path, path: Path) -> tuple[bytes | None, str]:
    """Read a file, or return None and the reason: '' if it is missing. Only regular files are read,
    so that no pipe or device blocks a prompt. A link may lead anywhere within the base, or the
    file's folder if its path is absolute."""
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
        return None, (
            error.strerror if isinstance(error, OSError) else None
        ) or "not a valid file name"
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            return None, "not a regular file"
        if about.st_size > _LARGEST:
            return None, f"{about.st_size:,} bytes, over the limit of {_LARGEST:,}"
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(_LARGEST), ""
    except OSError as error:
        return None, error.strerror or "cannot be read"
    finally:
        os.close(handle)
