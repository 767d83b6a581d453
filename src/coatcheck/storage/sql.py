"""What the two databases share: their rows as values, and checks of their rows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from coatcheck.refs import Blob, Ref
from coatcheck.storage.entries import Entry, SessionInfo


class InList:
    """The parameters of SQLite's `IN (…)`: their SQL, and their values by name. (A text with a null
    character is not safe in SQLite's JSON.)"""

    def __init__(self, name: str, texts: Iterable[str]) -> None:
        self.values = {f"{name}_{number}": text for number, text in enumerate(texts)}
        self.sql = ", ".join(f":{name}" for name in self.values)


def entry_from(row: Mapping[str, Any]) -> Entry:
    """Return the entry of a row of the view `entry`."""
    artifact_id = row["digest"].hex()
    ref = Ref(
        artifact_id=artifact_id,
        session_id=row["session_id"],
        size_bytes=row["size"],
        media_type=row["media_type"],
        kind=row["kind"],
        codec=row["codec"],
        name=row["name"],
        tool=row["tool"],
        call_id=row["call_id"],
        producer=row["producer"],
        parents=tuple(json.loads(row["parents"])) if row["parents"] else (),
        summary=row["summary"],
        created=row["created"],
        expires=row["expires"],
        pinned=bool(row["pinned"]),
        granted_by=row["granted_by"],
        request=row["request"],
        metadata_json=row["metadata_json"],
    )
    blob = Blob(
        artifact_id,
        row["size"],
        row["coding"] or "inline",
        row["place"] or "",
        row["frames"] or b"",
    )
    session = SessionInfo(
        session_id=row["session_id"],
        parent=row["parent"],
        ttl=row["ttl"],
        quota=row["quota"],
        created=row["session_created"],
        used=row["used"],
        used_bytes=row["used_bytes"],
    )
    return Entry(ref, blob, session, content=row.get("content"), gone=row["gone"], seq=row["seq"])


def ref_values(ref: Ref) -> dict[str, Any]:
    """Return the columns of a ref in the table `ref`, by name."""
    return {
        "digest": bytes.fromhex(ref.artifact_id),
        "size": ref.size_bytes,
        "name": ref.name,
        "codec": ref.codec,
        "media_type": ref.media_type,
        "kind": ref.kind,
        "tool": ref.tool,
        "call_id": ref.call_id,
        "producer": ref.producer,
        "parents": json.dumps(ref.parents) if ref.parents else "",
        "summary": ref.summary,
        "created": ref.created,
        "expires": ref.expires,
        "pinned": ref.pinned,
        "granted_by": ref.granted_by,
        "request": ref.request,
        "metadata_json": ref.metadata_json,
    }


def session_from(row: Any) -> SessionInfo:
    """Return the session of a row of the table `session`."""
    return SessionInfo(
        session_id=row["session_id"],
        parent=row["parent"],
        ttl=row["ttl"],
        quota=row["quota"],
        created=row["created"],
        used=row["used"],
        used_bytes=row["used_bytes"],
    )


def blob_from(row: Any) -> Blob:
    """Return the blob of a row of the table `blob`."""
    return Blob(
        row["digest"].hex(), row["size"], row["coding"], row["place"], row["frames"], row["used"]
    )


@dataclass(frozen=True)
class Check:
    """Something that may be wrong with rows: a name, a query for the number of such rows, and what
    corrects them."""

    name: str
    count: str
    mend: str


def found_text(count: int, what: str, mends: bool) -> list[str]:
    """Return the sentence of a check that found something, or none."""
    return [f"{count} {what}" + (": set right" if mends else "")] if count else []
