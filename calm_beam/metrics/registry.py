"""Metrics by name, and the one door through which every score passes."""

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
from calm_beam.metrics.chrf import CHRF_SIGHT, chrf
from calm_beam.metrics.edit_distance import EDIT_DISTANCE_SIGHT, edit_distance
from calm_beam.metrics.exact_match import SQUAD_SIGHT, exact_match
from calm_beam.metrics.rouge_l import ROUGE_L_SIGHT, rouge_l
from calm_beam.metrics.rouge_l_unicode import ROUGE_L_UNICODE_SIGHT, rouge_l_unicode
from calm_beam.metrics.sentence_bleu import SENTENCE_BLEU_SIGHT, sentence_bleu
from calm_beam.metrics.token_f1 import token_f1

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
# Kinds of numpy's types whose scalars `float` takes, or tries to.
_NOT_REAL = tuple("SUOMmc")


class MetricError(CalmBeamError, ValueError):
    """A metric that is not available, failed on an example, or returned something that is not a score in [0, 1]."""


def get_metric(name: str, settings: MetricSettings = NO_SETTINGS) -> Metric:
    """Returns the metric of that name.

    Args:
      name: A key of `METRICS`; `bleurt`, or its `full_name`; or `module:function` for a metric of your own, which is
        then imported. The function takes (candidate, references) and returns a score in [0, 1]; it has to be importable
        on every worker.
      settings: What metrics need.

    Returns:
      The metric.

    Raises:
      MetricError: If the name is not known, or what it points to cannot be imported or called; or if the BLEURT
        checkpoint of the settings is missing or is another than the name says.
      BleurtError: If it cannot be read.
      OSError: If the BLEURT checkpoint is on Cloud Storage, which cannot be read.

    Source: ours.

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
    """Returns `sha256:` and 64 digits of the file that defines a metric of the user's own.

    Args:
      name: `module:function`.

    Raises:
      MetricError: If it cannot be imported, or its module has no file.
    """
    path = _source_file(name)
    if path is None:
        raise MetricError(f'metric "{name}": its module has no file, so that nothing could tell it from another.')
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def source_digests(names: Collection[str]) -> dict[str, str]:
    """Returns `metric_source_digest` of those that are the user's own, by name; but of modules that have no file.

    Raises:
      MetricError: If one cannot be imported.
    """
    own = sorted(name for name in names if ":" in name)
    return {name: metric_source_digest(name) for name in own if _source_file(name) is not None}


def _source_file(name: str) -> str | None:
    """Returns the file that defines a metric of the user's own, which is imported; None of a module without one."""
    _import_metric(name)
    return getattr(importlib.import_module(name.partition(":")[0]), "__file__", None)


def check_source(name: str, software: Mapping[str, str]) -> None:
    """Checks that a metric of the user's own is defined by the file that it was calibrated with; it is imported.

    Args:
      name: Of any metric.
      software: Of a manifest. Manifests of earlier versions do not say, nor those of modules without a file.

    Raises:
      MetricError: If it is not, or cannot be imported.
    """
    calibrated = software.get(name) if ":" in name else None
    if calibrated is not None and (found := metric_source_digest(name)) != calibrated:
        raise MetricError(
            f'metric "{name}": its module is now {found}, calibrated was {calibrated}. Losses by another function are '
            "not those that were promised: take the file of then, or calibrate again."
        )


def full_name(name: str, settings: MetricSettings) -> str:
    """Returns the name under which a metric's scores may be compared: of `bleurt`, with its checkpoint's digest.

    Plans and manifests have this name, so that scores of two checkpoints are never compared.

    Raises:
      MetricError: If the BLEURT checkpoint of the settings is missing.
      BleurtError: If it cannot be read.
      OSError: If it is on Cloud Storage, which cannot be read.
    """
    if name != BLEURT:
        return name
    # Here, as in `_bleurt`, since few need it.
    from calm_beam.metrics.bleurt import load_bleurt

    return f"{BLEURT}@{load_bleurt(_bleurt_checkpoint(name, settings))[1][:_BLEURT_DIGITS]}"


def is_binary(name: str) -> bool:
    """Returns whether every score of a metric is known to be 0 or 1; of one of the user's own, nothing is known."""
    return name in METRICS and METRICS[name].is_binary


def is_bleurt(name: str) -> bool:
    """Returns whether a metric is BLEURT, by whatever checkpoint."""
    return name == BLEURT or name.startswith(f"{BLEURT}@")


def check_may_run(recorded: str, *, named: Collection[str], how: str) -> None:
    """Refuses a metric that a file names and that is code, unless the caller names the same one.

    Looking it up would import a module, so the author of the file would decide which code runs here.

    Args:
      recorded: Name of a metric, as a manifest has it.
      named: Names of metrics, as the caller has them.
      how: Says how to name it, for the message.

    Raises:
      MetricError: If it is `module:function` and not among them.
    """
    if ":" in recorded and recorded not in named:
        raise MetricError(
            f"metric {shown(recorded)} is code that the manifest names, and a manifest does not decide what runs here. "
            f"If you know and trust that code, {how}."
        )


def take_clipped(metric: Metric) -> int:
    """Returns how many scores the metric has clipped to [0, 1] since this was last asked; most never clip."""
    # Of its class, since a function of the user may have any attribute.
    take = getattr(type(metric), "take_clipped", None)
    return 0 if take is None else take(metric)


def checked_score(metric: Metric, name: str, *, candidate: str, references: Sequence[str], example_id: str) -> float:
    """Returns the metric's score, having checked that it is one.

    A score that is NaN or outside [0, 1] voids the guarantee for the whole calibration set, so it is refused where it
    can still be traced to its example.

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

    Source: ours.

    >>> checked_score(METRICS["token_f1"], "token_f1", candidate="a cat", references=["the cat"], example_id="7")
    1.0
    """
    where = f'metric "{name}" on example "{example_id}"'
    # Converting the returned value to a float may run code of the user, too.
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
    # Scalars of numpy, JAX and friends are no numbers.Real, but have no axes; strings and lists are neither.
    is_number = isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 0
    # Of numpy's scalars, texts have no axes either, and `float` would read them; complex ones would lose a part.
    if not is_number or getattr(getattr(value, "dtype", None), "kind", "") in _NOT_REAL:
        return None
    try:
        return float(cast(float, value))
    except (TypeError, ValueError, OverflowError):
        return None


def _import_metric(name: str) -> Metric:
    module_name, _, path = name.partition(":")
    # A leading dot would be a relative import, and there is nothing here that it could be relative to.
    if not module_name or not path or module_name.startswith("."):
        raise MetricError(f'metric "{name}": expected module:function, for example "my_package.scores:chrf".')
    # The module is the user's, and can fail in any way when it runs.
    with UserCode(
        lambda said: MetricError(f'metric "{name}": cannot import module "{module_name}" (it raises {said}).')
    ):
        module, missing = _imported(module_name)
    if missing is not None:
        raise MetricError(
            f'metric "{name}": cannot import module "{module_name}" ({text_of(missing)}). '
            "It has to be installed or on the PYTHONPATH, here and on every worker."
        ) from missing
    # A module may make up its names as they are asked for.
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
    """Returns a module, or why there is none."""
    try:
        return importlib.import_module(module_name), None
    except ImportError as error:
        return None, error


def _attribute(module: object, path: str) -> tuple[object, str | None]:
    """Returns what a path names in a module, and None; or if there is no such thing, the nearest name or no text."""
    try:
        return functools.reduce(getattr, path.split("."), module), None
    except AttributeError:
        return None, next(iter(difflib.get_close_matches(path, dir(module), n=1)), "")
