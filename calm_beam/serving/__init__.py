"""Serving under a manifest: the calibrated decoder, or a clear refusal. Needs JAX, and no Beam.

What is asked and answered needs no JAX: what decodes is loaded when it is first used. `questions` and `host` are for
pipelines, where one process holds the model for others.
"""

from typing import TYPE_CHECKING

from calm_beam.extras import on_first_use

from .answer import Answer as Answer
from .answer import GrowingText as GrowingText
from .answer import OutputError as OutputError
from .answer import ProbedAnswer as ProbedAnswer
from .answer import PromptError as PromptError
from .answer import ServedRequest as ServedRequest
from .answer import Unanswered as Unanswered
from .answer import answer_row as answer_row
from .answer import token_texts as token_texts

if TYPE_CHECKING:
    from .continuous import BusyError as BusyError
    from .continuous import ContinuousGenerator as ContinuousGenerator
    from .generator import Generator as Generator
    from .loss_meter import AnsweredRequest as AnsweredRequest
    from .loss_meter import LossMeter as LossMeter
    from .loss_meter import MeasuredLoss as MeasuredLoss
    from .probe import LateReferences as LateReferences
    from .probe import LossProbe as LossProbe

# Modules that load JAX.
__getattr__ = on_first_use(
    __name__,
    {
        "continuous": ("BusyError", "ContinuousGenerator"),
        "generator": ("Generator",),
        "loss_meter": ("AnsweredRequest", "LossMeter", "MeasuredLoss"),
        "probe": ("LateReferences", "LossProbe"),
    },
)
