"""Calls to servers within a deadline: failures that may pass are tried again until then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from coatcheck.errors import StoreUnavailable

_WAIT = wait_random_exponential(multiplier=0.04, max=4)  # seconds; on average half of that
_T = TypeVar("_T")


def keep_trying(
    call: Callable[[float], _T],
    doing: str,
    *,
    patience: float,
    errors: tuple[type[Exception], ...],
    may_pass: Callable[[Exception], bool],
    whose: str,
    hint: str,
) -> _T:
    """Return the result of `call`, which gets its deadline (`time.monotonic`). It is repeated until
    then if it fails with one of these errors and the error `may_pass`. Raises `StoreUnavailable`
    with the hint if it does not."""

    def helps(error: BaseException) -> bool:
        return isinstance(error, errors) and may_pass(error)

    retrying = Retrying(
        retry=retry_if_exception(helps),
        wait=_WAIT,
        stop=stop_before_delay(patience),
        reraise=True,
    )
    try:
        return retrying(call, time.monotonic() + patience)
    except errors as error:
        may_retry = may_pass(error)
        # The text of the error may contain addresses, users and more: report only its kind.
        kind = getattr(error, "sqlstate", None) or type(error).__name__
        raise StoreUnavailable(
            f"the {whose} failed while {doing}: {kind}",
            hint="try again" if may_retry else hint,
            may_retry=may_retry,
        ) from None
