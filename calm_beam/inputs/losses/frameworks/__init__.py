"""Scores of single examples, as frameworks of evaluation log them: a module for each, and all of them by name."""

from .example import ScoredExample as ScoredExample
from .example import ScoreFormat as ScoreFormat
from .example import glob_of as glob_of
from .registry import FRAMEWORKS as FRAMEWORKS
from .registry import format_of as format_of
