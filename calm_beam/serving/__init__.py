"""Serving under a manifest: the decoder that was calibrated, or a refusal in words. Needs JAX, and no Beam."""

from .answer import Answer as Answer
from .answer import OutputError as OutputError
from .answer import ProbedAnswer as ProbedAnswer
from .answer import PromptError as PromptError
from .answer import Unanswered as Unanswered
from .continuous import BusyError as BusyError
from .continuous import ContinuousGenerator as ContinuousGenerator
from .generator import Generator as Generator
from .late_references import LateReferences as LateReferences
from .loss_meter import AnsweredRequest as AnsweredRequest
from .loss_meter import LossMeter as LossMeter
from .loss_meter import MeasuredLoss as MeasuredLoss
from .pieces import GrowingText as GrowingText
from .pieces import token_texts as token_texts
from .probe import LossProbe as LossProbe
from .request import ServedRequest as ServedRequest
from .rows import answer_row as answer_row
