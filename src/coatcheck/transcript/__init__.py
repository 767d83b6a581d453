"""A session's messages on disk, with refs in place of large payloads: slim on disk, exact on
demand.

transcript.externalize("session.jsonl", session)    # in place, with a backup
transcript.verify("session.jsonl", store)           # proves that nothing is lost
transcript.rehydrate("session.jsonl", store)        # the same bytes as before

with transcript.Transcript("session.jsonl", session) as log:
    log.append(message)                             # payloads are stored, the line is durable
    list(log.messages(-100, mode="whole"))          # the last hundred, as they were given
    log.messages_for_model()                        # with stubs
"""

from coatcheck.messages import FORMATS, Format, detect
from coatcheck.messages.pairing import unpaired
from coatcheck.transcript.file import Appended, Line, Problem, Transcript
from coatcheck.transcript.migrate import externalize, forget, rehydrate, undo, verify
from coatcheck.transcript.prune import Pruned, prune
from coatcheck.transcript.reports import FileReport, Report
from coatcheck.transcript.safeguard import Index, SummaryCheck, check_summary, safeguard
from coatcheck.transcript.splice import ArtifactRef

__all__ = [
    "FORMATS",
    "Appended",
    "ArtifactRef",
    "FileReport",
    "Format",
    "Index",
    "Line",
    "Problem",
    "Pruned",
    "Report",
    "SummaryCheck",
    "Transcript",
    "check_summary",
    "detect",
    "externalize",
    "forget",
    "prune",
    "rehydrate",
    "safeguard",
    "undo",
    "unpaired",
    "verify",
]
