"""Metrics by name, and `checked_score`, through which every score passes."""

import difflib
import functools
import hashlib
import importlib
import numbers
import types
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from calm_beam.errors import CalmBeamError, UserCode, shown, text_of
from calm_beam.metrics import NO_SETTINGS, MetricSettings, SightedMetric
from calm_beam.metrics import Metric as Metric
from calm_beam.metrics.edit_distance import EDIT_DISTANCE_SIGHT, edit_distance
from calm_beam.metrics.rouge_l import ROUGE_L_SIGHT, ROUGE_L_UNICODE_SIGHT, rouge_l, rouge_l_unicode
from calm_beam.metrics.sacrebleu_scores import CHRF_SIGHT, SENTENCE_BLEU_SIGHT, chrf, sentence_bleu
from calm_beam.metrics.squad import SQUAD_SIGHT, exact_match, token_f1

METRICS: Mapping[str, SightedMetric] = types.MappingProxyType(
    {
        "rouge_l": SightedMetric(rouge_l, seen=ROUGE_L_SIGHT),
        "rouge_l_unicode": SightedMetric(rouge_l_unicode, seen=ROUGE_L_UNICODE_SIGHT),
        "token_f1": SightedMetric(token_f1, seen=SQUAD_SIGHT),
        "exact_match": SightedMetric(exact_match, seen=SQUAD_SIGHT, is_binary=True),
        "chrf": SightedMetric(chrf, seen=CHRF_SIGHT),
        "sentence_bleu": SightedMetric(sentence_bleu, seen=SENTENCE_BLEU_SIGHT),
        "edit_distance": SightedMetric(edit_distance, seen=EDIT_DISTANCE_SIGHT),
    }
)

DEFAULT_METRIC = "rouge_l_unicode"
"""The default metric: it reads every script."""

BLEURT = "bleurt"
"""The metric that needs a checkpoint; its full name is `bleurt@` and the first digits of the checkpoint's digest."""

_BLEURT_DIGITS = 16
# numpy's kinds of types whose scalars `float` would convert, or try to.
_NOT_REAL = tuple("SUOMmc")


class MetricError(CalmBeamError, ValueError):
    """A metric that is not available, failed on an example, or returned something that is not a score in [0, 1]."""


def get_metric(name: str, settings: MetricSettings = NO_SETTINGS) -> Metric:
    """Returns the metric of that name.

    Args:
      name: A key of `METRICS`; `bleurt`, or its `full_name`; or `module:function` for your own metric, which is
        then imported. The function takes (candidate, references) and returns a score in [0, 1]; it must be importable
        on every worker.
      settings: Settings that metrics need.

    Returns:
      The metric.

    Raises:
      MetricError: If the name is unknown, or its module or function cannot be imported or called; or if the BLEURT
        checkpoint of the settings is missing or is not the one in the name.
      BleurtError: If the BLEURT checkpoint cannot be read.
      OSError: If the BLEURT checkpoint is on Cloud Storage, and that cannot be read.

    Source: our own.

    >>> get_metric("exact_match")("Yes.", ["yes"])
    1.0
    """
    if ":" in name:
        return _import_metric(name)
    if name in METRICS:
        return METRICS[name]
    if is_bleurt(name):
        return _bleurt(name, settings)
    known = (*METRICS, BLEURT)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
    raise MetricError(
        f'metric "{name}" is not known.{hint} Known metrics: {", ".join(known)}; '
        "for one of your own write module:function."
    )


def metric_source_digest(name: str) -> str:
    """Returns `sha256:` and 64 digits of the file that defines a user's own metric.

    Args:
      name: `module:function`.

    Raises:
      MetricError: If it cannot be imported, or its module has no file.
    """
    path = _source_file(name)
    if path is None:
        raise MetricError(f'metric "{name}": its module has no file, so nothing could distinguish it from another.')
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def source_digests(names: Collection[str]) -> dict[str, str]:
    """Returns `metric_source_digest` of the users' own metrics among some, by name; skips modules without a file.

    Raises:
      MetricError: If one cannot be imported.
    """
    own = sorted(name for name in names if ":" in name)
    return {name: metric_source_digest(name) for name in own if _source_file(name) is not None}


def _source_file(name: str) -> str | None:
    """Returns the file that defines a user's own metric, after importing it; None if its module has no file."""
    _import_metric(name)
    return getattr(importlib.import_module(name.partition(":")[0]), "__file__", None)


def check_source(name: str, software: Mapping[str, str]) -> None:
    """Raises unless a user's own metric is defined by the same file as when it was calibrated; imports it.

    Args:
      name: Name of any metric.
      software: Software versions of a manifest. Manifests of earlier versions have no digest, nor have modules without
        a file.

    Raises:
      MetricError: If the file differs, or the metric cannot be imported.
    """
    calibrated = software.get(name) if ":" in name else None
    if calibrated is not None and (found := metric_source_digest(name)) != calibrated:
        raise MetricError(
            f'metric "{name}": its module is now {found}, calibrated was {calibrated}. Losses by another function are '
            "not those that were promised: take the file of then, or calibrate again."
        )


def full_name(name: str, settings: MetricSettings) -> str:
    """Returns the name under which scores may be compared: for `bleurt`, with its checkpoint's digest.

    Plans and manifests use this name, so that scores of two checkpoints are never compared.

    Raises:
      MetricError: If the BLEURT checkpoint of the settings is missing.
      BleurtError: If the checkpoint cannot be read.
      OSError: If the checkpoint is on Cloud Storage, and that cannot be read.
    """
    if name != BLEURT:
        return name
    # Imported here and in `_bleurt`, since few users need it.
    from calm_beam.metrics.bleurt import load_bleurt

    return f"{BLEURT}@{load_bleurt(_bleurt_checkpoint(name, settings))[1][:_BLEURT_DIGITS]}"


def is_binary(name: str) -> bool:
    """Returns whether every score of a metric is known to be 0 or 1; False for a user's own metric."""
    return name in METRICS and METRICS[name].is_binary


def is_bleurt(name: str) -> bool:
    """Returns whether a metric is BLEURT, with any checkpoint."""
    return name == BLEURT or name.startswith(f"{BLEURT}@")


def check_may_run(recorded: str, *, named: Collection[str], how: str) -> None:
    """Refuses to run a metric that is code named by a file, unless the caller names the same one.

    Loading it would import a module, so the author of the file would decide which code runs here.

    Args:
      recorded: Name of the metric in a manifest.
      named: Names of metrics that the caller gave.
      how: How to name it, for the message.

    Raises:
      MetricError: If it is `module:function` and the caller did not name it.
    """
    if ":" in recorded and recorded not in named:
        raise MetricError(
            f"metric {shown(recorded)} is code that the manifest names, and a manifest does not decide what runs here. "
            f"If you know and trust that code, {how}."
        )


def take_clipped(metric: Metric) -> int:
    """Returns how many scores the metric has clipped to [0, 1] since the last call; most metrics never clip."""
    # Looked up on the class, since a user's function may have any attribute.
    take = getattr(type(metric), "take_clipped", None)
    return 0 if take is None else take(metric)


def checked_score(metric: Metric, name: str, *, candidate: str, references: Sequence[str], example_id: str) -> float:
    """Returns the metric's score after checking that it is one.

    A score that is NaN or outside [0, 1] voids the guarantee for the whole calibration set, so it is refused here,
    where its example is known.

    Args:
      metric: Takes (candidate, references).
      name: The metric's name, for the message.
      candidate: The text to score.
      references: At least one text.
      example_id: The example's id, for the message.

    Returns:
      A score in [0, 1].

    Raises:
      MetricError: If the metric raises or tries to end the process (what it raised is the cause), or returns NaN, a
        value outside [0, 1] or something that is not a real number.

    Source: our own.

    >>> checked_score(METRICS["token_f1"], "token_f1", candidate="a cat", references=["the cat"], example_id="7")
    1.0
    """
    where = f'metric "{name}" on example "{example_id}"'
    # Converting the returned value to a float may run user code, too.
    with UserCode(lambda said: MetricError(f"{where}: raised {said}.")):
        value = metric(candidate, references)
        score = _as_float(value)
    if score is None:
        raise MetricError(f"{where}: returned {shown(value)}, expected a number in [0, 1].")
    if not 0 <= score <= 1:
        raise MetricError(
            f"{where}: returned {score}, expected a number in [0, 1]. "
            "The bounds hold for scores in that range only: normalize or clip the metric."
        )
    return score


def _bleurt(name: str, settings: MetricSettings) -> Metric:
    from calm_beam.metrics.bleurt import load_bleurt

    metric, fingerprint = load_bleurt(_bleurt_checkpoint(name, settings))
    expected = name.removeprefix(BLEURT).removeprefix("@")
    if expected and fingerprint[:_BLEURT_DIGITS] != expected:
        raise MetricError(
            f'metric "{name}": the checkpoint {settings.bleurt_checkpoint} is {BLEURT}@{fingerprint[:_BLEURT_DIGITS]}. '
            "Scores of different checkpoints are not comparable."
        )
    return metric


def _bleurt_checkpoint(name: str, settings: MetricSettings) -> str:
    if settings.bleurt_checkpoint is None:
        raise MetricError(
            f'metric "{name}" needs a checkpoint, which does not come with calm-beam: pass --bleurt_checkpoint, the '
            "folder of a published one."
        )
    return settings.bleurt_checkpoint


def _as_float(value: object) -> float | None:
    """Returns the value as a float, or None if it is not one real number."""
    # Scalars of numpy, JAX and the like are not numbers.Real, but have no axes; strings and lists are neither.
    is_number = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    # numpy's text scalars have no axes either, and `float` would parse them; complex scalars would lose a part.
    if not is_number or getattr(getattr(value, "dtype", None), "kind", "") in _NOT_REAL:
        return None
    try:
        return float(cast(float, value))
    except (TypeError, ValueError, OverflowError):
        return None


def _import_metric(name: str) -> Metric:
    module_name, _, path = name.partition(":")
    # A leading dot would be a relative import, and there is no package that it could be relative to.
    if not module_name or not path or module_name.startswith("."):
        raise MetricError(f'metric "{name}": expected module:function, for example "my_package.scores:chrf".')
    # The module is user code, and may raise anything when it runs.
    with UserCode(
        lambda said: MetricError(f'metric "{name}": cannot import module "{module_name}" (it raises {said}).')
    ):
        module, missing = _imported(module_name)
    if missing is not None:
        raise MetricError(
            f'metric "{name}": cannot import module "{module_name}" ({text_of(missing)}). '
            "It has to be installed or on the PYTHONPATH, here and on every worker."
        ) from missing
    # A module may compute its attributes on access.
    with UserCode(lambda said: MetricError(f'metric "{name}": "{path}" cannot be loaded (it raises {said}).')):
        found, nearest = _attribute(module, path)
    if nearest is not None:
        hint = f' Did you mean "{module_name}:{nearest}"?' if nearest else ""
        raise MetricError(f'metric "{name}": module "{module_name}" has no "{path}".{hint}')
    if not callable(found):
        raise MetricError(
            f'metric "{name}": "{path}" is not callable, it is of type {type(found).__name__}. '
            "Point to a function of (candidate, references)."
        )
    return cast(Metric, found)


def _imported(module_name: str) -> tuple[object, ImportError | None]:
    """Returns a module, or the error why there is none."""
    try:
        return importlib.import_module(module_name), None
    except ImportError as error:
        return None, error


def _attribute(module: object, path: str) -> tuple[object, str | None]:
    """Returns the attribute at a path in a module, and None; without one, None and the nearest name or an empty one."""
    try:
        return functools.reduce(getattr, path.split("."), module), None
    except AttributeError:
        return None, next(iter(difflib.get_close_matches(path, dir(module), n=1)), "")
