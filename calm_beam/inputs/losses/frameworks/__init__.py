"""Scores of single examples from the logs of evaluation frameworks, one module for each framework.

This package lists them by name, and detects which one wrote a file.
"""

import types
from collections.abc import Mapping

from calm_beam.risk.testing import LossesError

from .example import ScoredExample as ScoredExample
from .example import ScoreFormat as ScoreFormat
from .example import glob_of as glob_of
from .helm import Helm
from .inspect_ai import InspectAi
from .lighteval import Lighteval
from .lm_eval import LmEval

FRAMEWORKS: Mapping[str, ScoreFormat] = types.MappingProxyType(
    {format_.name: format_ for format_ in (LmEval(), Lighteval(), InspectAi(), Helm())}
)


def format_of(path: str) -> ScoreFormat:
    """Returns the framework that wrote a file, by the file's content.

    Raises:
      LossesError: If there is none, or there are several candidates.
    """
    found = [format_ for format_ in FRAMEWORKS.values() if format_.is_of(path)]
    if len(found) != 1:
        several = f"could be of {' or '.join(format_.name for format_ in found)}" if found else "is of none"
        raise LossesError(
            f"{path}: {several} of the frameworks whose scores are read: {', '.join(FRAMEWORKS)}. Write the losses to "
            "a file for --losses instead."
        )
    return found[0]
