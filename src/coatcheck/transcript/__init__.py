"""A session's messages on disk, holding refs where payloads were: slim on disk, exact on demand.

transcript.externalize("session.jsonl", session)    # in place, with a backup
transcript.verify("session.jsonl", store)           # proves that nothing is lost
transcript.rehydrate("session.jsonl", store)        # the same bytes as before
"""

from coatcheck.transcript.formats import FORMATS, Format, detect
from coatcheck.transcript.migrate import externalize, forget, rehydrate, undo, verify
from coatcheck.transcript.refs import ArtifactRef
from coatcheck.transcript.report import FileReport, Report

__all__ = [
    "FORMATS",
    "ArtifactRef",
    "FileReport",
    "Format",
    "Report",
    "detect",
    "externalize",
    "forget",
    "rehydrate",
    "undo",
    "verify",
]
