"""A value and a policy make what a model gets: the value itself if it is small, else a stub."""

from coatcheck.externalize.pipeline import FAILURES, Outcome, externalize, offloaded, put
from coatcheck.externalize.policy import Limit, Policy, configured
from coatcheck.intake import About

__all__ = ["FAILURES", "About", "Limit", "Outcome", "Policy", "configured", "externalize", "offloaded", "put"]
