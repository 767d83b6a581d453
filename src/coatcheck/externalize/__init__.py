"""A value and a policy make what a model gets: the value itself if it is small, else a stub."""

from coatcheck.externalize.pipeline import FAILURES, Outcome, externalize
from coatcheck.externalize.policy import Limit, Policy, configured

__all__ = ["FAILURES", "Limit", "Outcome", "Policy", "configured", "externalize"]
