"""A gateway between agents and model providers: `observe` records, `stub` and `loop` keep large
results out of requests.

`Gateway` is an ASGI application over a store. `coatcheck gateway` serves it, `coatcheck run` starts
a command behind one.
"""

from coatcheck.gateway.front import Gateway
from coatcheck.gateway.ledger import Ledger
from coatcheck.gateway.settings import GatewaySettings

__all__ = ["Gateway", "GatewaySettings", "Ledger"]
