"""The flags that name metrics, and finding out before work starts whether these can score."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from calm_beam.metrics.registry import BLEURT, METRICS, checked_score, full_name, get_metric, take_clipped
from calm_beam.metrics.settings import MetricSettings
from calm_beam.options import Options, option
from calm_beam.storage import absolute

from . import naming

METRIC_NAMES = f"{', '.join(METRICS)}, {BLEURT}, or module:function for your own"


GUARANTEE = "guarantee (lists are comma-separated; every combination is one manifest entry)"
"""Heading of what is to be promised."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricFiles(Options):
    """What metrics need."""

    SECTION: ClassVar[str | None] = GUARANTEE

    bleurt_checkpoint: str | None = option(
        None,
        "folder of a published BLEURT checkpoint, for the metric bleurt; may be gs://",
        belongs_to=("metric=bleurt",),
    )


def metric_settings(request: MetricFiles) -> MetricSettings:
    """Returns what a request says of the files of metrics, as workers have to name it.

    Raises:
      UsageError: If a path is on another object store than Google's.
    """
    checkpoint = request.bleurt_checkpoint
    with naming("--bleurt_checkpoint"):
        return MetricSettings(bleurt_checkpoint=None if checkpoint is None else absolute(checkpoint))


def checked_metrics(names: Sequence[str], settings: MetricSettings) -> tuple[str, ...]:
    """Returns the full names of metrics, each of which was tried on one pair of texts.

    One that cannot be called is better known before hours of decoding.

    Raises:
      ValueError: If a metric is not known, or cannot be had, or gives no score in [0, 1].
    """
    # Nothing else that a metric needs is a file of the flags.
    with naming("--bleurt_checkpoint"):
        full_names = tuple(full_name(name, settings) for name in names)
    for name in full_names:
        metric = get_metric(name, settings)
        # Different texts: of equal ones some say 1 without any of what they need.
        checked_score(
            metric, name, candidate="a text", references=("another text",), example_id="of the trial before the run"
        )
        # That was no score of the run.
        take_clipped(metric)
    return full_names
