"""What others take for the same job: a large tool result goes to storage, and the model gets
something small.

Each runs in a child process of an environment of its own, ours in one too, in turns on the same
disk with the same content. `PEERS` says what each one is and what it leaves out, or does besides.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Peer(NamedTuple):
    """A package, what of it is measured, and how its promise differs from ours."""

    package: str
    what: str
    differs: str


OURS: Final = "coatcheck"
PEERS: Final = {
    "strands": Peer(
        "strands-agents",
        "ContextOffloader, files",
        "no digest, no dedup, files written in place; the list of all results is rewritten with each; the first"
        " 4,000 characters stay in the context; a token is four characters; reading without a range gives the whole",
    ),
    "deepagents": Peer(
        "deepagents",
        "FilesystemMiddleware, files",
        "no digest, no dedup, no expiry, files written in place; a token is four characters",
    ),
    "agno": Peer(
        "agno",
        "ResultStore, SQLite",
        "no digest, no dedup; two commits, each synced: it survives a power cut, as our durability `power` does",
    ),
    "headroom": Peer(
        "headroom-ai",
        "CompressionStore, SQLite",
        "no preview at all (its compressors are not measured), always the whole back, 1,000 entries, 30 minutes",
    ),
    "adk": Peer(
        "google-adk",
        "FileArtifactService",
        "nothing for the model: no limit, no preview, no stub; no digest, no dedup, always the whole back",
    ),
    "haystack": Peer(
        "haystack-ai",
        "ToolResultOffloadHook, files",
        "no digest, no dedup, no expiry, files written in place, no tool that reads them; the limit is in characters",
    ),
    "refcache": Peer(
        "mcp-refcache",
        "RefCache, SQLite",
        "no digest, no dedup, an hour; pages, no grep",
    ),
}  # fmt: skip
