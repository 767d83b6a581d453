"""Local stand-ins for the APIs of OpenAI and Anthropic: the wire is real, the model is a script.

A real HTTP server on loopback takes what the providers' own SDKs send, refuses what the providers refuse (pairing of
calls and results, roles, fields, schemas, length) in their words and shapes, and streams answers with their events. It
counts the tokens that it was sent. For demonstrations and tests, without a network or a key.
"""

from examples.standins.script import Call, Fault, Heard, Received, Reply, Result, Step, Usage
from examples.standins.server import StandIn, prompt_tokens

__all__ = ["Call", "Fault", "Heard", "Received", "Reply", "Result", "StandIn", "Step", "Usage", "prompt_tokens"]
