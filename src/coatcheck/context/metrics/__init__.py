"""Figures for each model call: how large the prompt was, what stubs saved, what that cost, and what to be warned of.

    meter = Meter(session, tools=toolkit(session))
    …
    answer = client.chat.completions.create(messages=messages, tools=…)
    meter.call(messages=messages, usage=answer.usage)

They are told from the prompt itself (`measure`), kept in the catalog, and sent where the settings say. Nothing here
breaks an agent: what fails is counted, logged once, and left out.
"""

from coatcheck.context.metrics.baseline import Baseline
from coatcheck.context.metrics.figures import Notice, PromptMetrics
from coatcheck.context.metrics.meter import Meter, calls_of
from coatcheck.context.metrics.usage import Usage, usage_of

__all__ = ["Baseline", "Meter", "Notice", "PromptMetrics", "Usage", "calls_of", "usage_of"]
