"""A value and a policy make what a model gets: the value itself if it is small, else a stub."""

from coatcheck.externalize.decision import Decision, Situation
from coatcheck.externalize.functions import offloaded
from coatcheck.externalize.outcome import Outcome
from coatcheck.externalize.pipeline import externalize
from coatcheck.externalize.policy import Limit, Policy, configured
from coatcheck.externalize.savings import ResultSource
from coatcheck.externalize.storing import put
from coatcheck.externalize.stubbing import FAILURES
from coatcheck.intake import About
from coatcheck.models import Prices
from coatcheck.parts import Part as ContentPart

__all__ = [
    "FAILURES", "About", "ContentPart", "Decision", "Limit", "Outcome", "Policy", "Prices",
    "ResultSource", "Situation", "configured", "externalize", "offloaded", "put",
]  # fmt: skip
