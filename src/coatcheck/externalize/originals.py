"""The exact results behind shorter forms that refer to something else in their conversation.

A conversation that may be rewritten stores such a result when it arrives: the result itself, and
its shorter form as an artifact that is derived from it. So the result is found again from the text
that the host keeps, after a restart too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from coatcheck.errors import CoatcheckError
from coatcheck.externalize.storing import prepared, put_prepared
from coatcheck.ids import digest_of, pointer_of
from coatcheck.intake import About

if TYPE_CHECKING:
    from coatcheck.core_session import CoreSession
    from coatcheck.externalize.policy import Policy
    from coatcheck.refs import Ref

_SHORTER: Final = "a shorter form"


def keep_original(
    session: CoreSession, original: str, short: str, about: About, policy: Policy
) -> Ref:
    """Store a result and its shorter form, and return the ref of the result."""
    ref = put_prepared(session, prepared(original, policy), about, policy)
    derived = about._replace(parents=(ref.artifact_id,), request=_SHORTER)
    put_prepared(session, prepared(short, policy), derived, policy)
    return ref


def original_of(session: CoreSession, short: str, policy: Policy) -> Ref | None:
    """Return the ref of the result that was stored with this shorter form. None if there is
    none."""
    digest = digest_of(prepared(short, policy).encoded.data)
    try:
        derived = session.ref(pointer_of(digest, 64))
        if derived is None or derived.request != _SHORTER or not derived.parents:
            return None
        return session.ref(pointer_of(derived.parents[0], 64))
    except CoatcheckError:
        return None
