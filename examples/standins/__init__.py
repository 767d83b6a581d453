"""Local stand-ins for the APIs of OpenAI and Anthropic: a real protocol with a scripted model.

An HTTP server on loopback accepts what the providers' SDKs send, refuses what the providers refuse
(pairing of calls and results, roles, fields, schemas, length) with their messages and formats, and
streams replies as their events. It counts the tokens it receives. For demos and tests, without a
network or a key.
"""

from examples.standins.script import Call, Fault, Heard, Received, Reply, Result, Step, Usage
from examples.standins.server import StandIn, prompt_tokens

__all__ = [
    "Call",
    "Fault",
    "Heard",
    "Received",
    "Reply",
    "Result",
    "StandIn",
    "Step",
    "Usage",
    "prompt_tokens",
]
