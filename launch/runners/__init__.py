"""Beam runners: which one executes a pipeline, its workers, and what its failures say."""

from .run import PipelineError as PipelineError
from .run import first_cause as first_cause
from .run import is_local as is_local
from .run import make_runner as make_runner
from .run import may_report_progress as may_report_progress
from .run import run_pipeline as run_pipeline
from .workers import Workers as Workers
