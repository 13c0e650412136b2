"""Answers to whole files of prompts under a manifest: what is asked for, told to workers, and stored by shards.

The decoding itself is in `calm_beam.serving`, and how the work is spread over workers in `calm_beam.transforms`.
"""

from calm_beam.tally import Tally as Tally

from .assignment import AnswerAssignment as AnswerAssignment
from .finished import FinishedAnswers as FinishedAnswers
from .job import FORMATS as FORMATS
from .job import JOB as JOB
from .job import AnswerJob as AnswerJob
from .job import Probe as Probe
from .paths import COMPLETE as COMPLETE
from .paths import FAILURES as FAILURES
from .read import read_answers as read_answers
from .request import AnswerRequest as AnswerRequest
from .shards import AnsweredShard as AnsweredShard
from .shards import AnswersError as AnswersError
from .shards import Failure as Failure
from .shards import ProbedLoss as ProbedLoss
