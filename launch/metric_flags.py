"""The flags that name metrics, and finding out before work starts whether these can score."""

import argparse
from collections.abc import Sequence

from calm_beam.metrics.registry import BLEURT, METRICS, checked_score, full_name, get_metric
from calm_beam.metrics.settings import MetricSettings
from calm_beam.storage import absolute

METRIC_NAMES = f"{', '.join(METRICS)}, {BLEURT}, or module:function for your own"


def add_metric_settings(group: argparse._ActionsContainer) -> None:
    """Adds the flags that metrics need."""
    group.add_argument(
        "--bleurt_checkpoint", help="folder of a published BLEURT checkpoint, for the metric bleurt; may be gs://"
    )


def metric_settings(flags: argparse.Namespace) -> MetricSettings:
    """Returns what the flags of `add_metric_settings` say, as workers have to name it."""
    checkpoint = flags.bleurt_checkpoint
    return MetricSettings(bleurt_checkpoint=None if checkpoint is None else absolute(checkpoint))


def checked_metrics(names: Sequence[str], settings: MetricSettings) -> tuple[str, ...]:
    """Returns the full names of metrics, each of which was tried on one pair of texts.

    One that cannot be called is better known before hours of decoding.

    Raises:
      ValueError: If a metric is not known, or cannot be had, or gives no score in [0, 1].
      OSError: If what it needs cannot be read.
    """
    full_names = tuple(full_name(name, settings) for name in names)
    for name in full_names:
        metric = get_metric(name, settings)
        # Different texts: of equal ones some say 1 without any of what they need.
        checked_score(metric, name, "a text", ("another text",), example_id="of the trial before the run")
    return full_names
