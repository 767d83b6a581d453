"""How a gateway runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import urlsplit

from coatcheck.checks import one_of, valid, whole
from coatcheck.errors import InvalidArgument
from coatcheck.externalize import Policy
from coatcheck.ids import clip

Mode = Literal["observe", "stub", "loop"]
MODES: Final[tuple[Mode, ...]] = ("observe", "stub", "loop")
ANTHROPIC: Final = "https://api.anthropic.com"
OPENAI: Final = "https://api.openai.com"
TOKEN: Final = "COATCHECK_GATEWAY_TOKEN"
MIB: Final = 1 << 20
_SESSION_NAME: Final = re.compile(r"[\w.:@+=-]{1,200}", re.ASCII)
_RESERVED: Final = ("coatcheck:", "transcript:", "ledger:")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How a gateway runs. `anthropic` and `openai` are the providers' addresses, without `/v1`.

    `session` is the session of all requests that name none. `token` must be in each request, in the
    header `x-coatcheck-token` or in the path (`/t/TOKEN/v1/…`). `policy` decides about results; the
    default comes from the store's settings. `max_body` is the largest body that is read, in bytes.
    `ping` is in seconds; an answer has at most `max_steps` steps."""

    mode: Mode = "observe"
    anthropic: str = ANTHROPIC
    openai: str = OPENAI
    session: str | None = None
    token: str | None = field(default=None, repr=False)
    trusts_user: bool = False
    """Whether programs of the same user need no token. Only on Linux, where the server can tell
    them."""
    policy: Policy | None = None
    max_body: int = 64 * MIB
    ping: float = 15.0
    max_steps: int = 8
    max_wait: float = 60.0
    """Maximum number of seconds that a step waits for an overloaded provider."""
    body_timeout: float = 60.0
    """Seconds that a client has for each megabyte of its body, and for the rest."""
    proxy: str | None = None
    """Address of an HTTP proxy to the providers. Proxies in the environment are ignored."""
    records: bool = True
    """Whether transcripts and figures are recorded."""

    def __post_init__(self) -> None:
        one_of(self.mode, "mode", MODES)
        whole(self.max_body, "max_body", least=1)
        whole(self.max_steps, "max_steps", least=1)
        _check_address(self.anthropic, "anthropic")
        _check_address(self.openai, "openai")
        if self.session is not None:
            check_session(self.session)


def is_session_name(name: str) -> bool:
    """Whether clients may use a session of this name."""
    return bool(_SESSION_NAME.fullmatch(name)) and not name.startswith(_RESERVED)


def check_session(name: str) -> str:
    """Return a name that a client gave its session. Raises `InvalidArgument`."""
    if not is_session_name(name):
        raise InvalidArgument(
            f"invalid session {clip(name, 80)}",
            hint="use up to 200 letters, digits and any of _.:@+=- for its name",
        )
    return name


def _check_address(address: str, name: str) -> None:
    url = urlsplit(address)
    is_web = url.scheme in ("http", "https") and bool(url.hostname)
    is_plain = not url.query and not url.fragment and url.username is None
    valid(is_web and is_plain, address, name, "an address, e.g. https://host")
