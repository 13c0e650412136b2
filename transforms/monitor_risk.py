"""Watching a promise inside a pipeline: the losses of sampled answers, and an alarm once they show a broken bound.

Answers are what `RunInference` gives for prompts, with or without keys.

A loss with a `failure` is missing. It proves no broken bound: alarms that need it to be 1 have a separate output.

Answers come in an order that may depend on their losses, since a long output ends late. So no loss counts before all
of its batch or window are there, and then they count in the order of a hash of their ids.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import apache_beam as beam
from apache_beam.coders import PickleCoder
from apache_beam.metrics import Metrics
from apache_beam.transforms import trigger, userstate, window

from calm_beam.manifest import Manifest, read_manifest
from calm_beam.risk.monitor import RiskMonitor, SampledLoss, WatchedPromise, WatchedRisk

from .metrics import NAMESPACE

if TYPE_CHECKING:
    from apache_beam.ml.inference.base import PredictionResult


R = TypeVar("R")


def require_answer(result: R) -> R:
    """Returns a result that has an answer, and raises why there is none for others; for `with_postprocess_fn`.

    `RunInference(handler.with_postprocess_fn(require_answer))` fails at the first prompt without an answer. With
    `with_exception_handling()` after it, such prompts are among `failed_postprocessing[0]`, each with its reason.

    Args:
      result: A `PredictionResult`, or a key and one.

    Raises:
      PromptError: If the prompt was refused.
      OutputError: If it has no output.
    """
    from calm_beam.serving import Unanswered

    inference = prediction_of(result).inference
    if isinstance(inference, Unanswered):
        raise inference.error
    return result


def prediction_of(result: Any) -> "PredictionResult":
    """Returns a result without its key, if it has one."""
    # A result is a tuple, too, of three.
    return result[1] if len(result) == 2 else result


_ALARMS = "alarms"
_MISSING_ALARMS = "missing_alarms"
_STATES = "states"

_Key = tuple[str, int]


class MonitoredRisks(NamedTuple):
    """The outputs of `MonitorRisk`.

    Attributes:
      states: A `WatchedRisk` for every promise, after the batch or after each window that has losses of it.
      alarms: Those of them that raised the alarm: the losses prove that the risk exceeds delta, whatever missing ones
        are.
      missing_alarms: Those that raised the other one before any proof: the risk exceeds delta, or losses are missing.
    """

    states: beam.PCollection
    alarms: beam.PCollection
    missing_alarms: beam.PCollection


class SampledLosses(beam.PTransform):
    """Takes the losses out of the results of a handler with `probe_share`; results may have keys."""

    def expand(self, results: beam.PCollection) -> beam.PCollection:
        """Returns a PCollection of `SampledLoss`."""
        return results | "TakeLosses" >> beam.FlatMap(_losses_of)


@dataclasses.dataclass
class MonitorRisk(beam.PTransform):
    """Watches promises by the losses of sampled answers, each promise by itself.

    In the global window, which must be bounded, all losses count at once, and the state is that of `calm-beam monitor`
    after the same losses in the order of `in_fixed_order`. In fixed windows, a window counts when the watermark has
    passed its end, after all windows before it: the chance of ever raising a false alarm is at most alpha for all of
    the stream. Losses that come later than the watermark are dropped.

    Attributes:
      alpha: Chance of ever raising a false alarm, in (0, 1), of each promise.
      manifest: Where losses are rows of a `LossProbe`: the manifest that they are about, or its file. `SampledLoss` say
        it themselves.
    """

    _: dataclasses.KW_ONLY
    alpha: float = 0.05
    manifest: Manifest | str | None = None

    def __post_init__(self) -> None:
        super().__init__()
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be in (0, 1), got {self.alpha:g}. It is a probability: for 5 % pass 0.05.")

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, losses: beam.PCollection) -> MonitoredRisks:
        """Returns the states and the alarms, given `SampledLoss` or rows of a `LossProbe`.

        Raises:
          ValueError: If losses are in windows that are not fixed, or end more than once, or never.
        """
        windowing = losses.windowing.windowfn
        if not isinstance(windowing, window.GlobalWindows | window.FixedWindows):
            raise ValueError(
                f"losses must be in fixed windows, or in the global one; got {type(windowing).__name__}, in which a "
                "loss would count more than once, or windows overlap."
            )
        is_global = isinstance(windowing, window.GlobalWindows)
        if is_global and not losses.is_bounded:
            raise ValueError("losses of a stream never end: put them into windows, such as FixedWindows(3600).")
        if losses.windowing.triggerfn != trigger.DefaultTrigger() or losses.windowing.allowed_lateness.micros:
            raise ValueError(
                "windows of losses must end once, when the watermark passes: leave out their trigger and "
                "allowed_lateness. A part of a window has only the losses that were quick."
            )
        manifest = read_manifest(self.manifest) if isinstance(self.manifest, str) else self.manifest
        promises = () if manifest is None else tuple(_promises(manifest))
        by_promise = (
            losses
            | "KeyByPromise"
            >> beam.Map(_keyed, promises=promises).with_output_types(tuple[tuple[str, int], SampledLoss])
            | "GroupByPromise" >> beam.GroupByKey()
        )
        if is_global:
            states = by_promise | "WatchBatch" >> beam.Map(_watched, alpha=self.alpha)
        else:
            states = (
                by_promise
                | "NameWindows" >> beam.Map(_with_end).with_output_types(tuple[tuple[str, int], Any])
                | "ForgetWindows" >> beam.WindowInto(window.GlobalWindows())
                | "WatchWindows" >> beam.ParDo(_WatchWindows(self.alpha))
            )
        told = states | "RaiseAlarms" >> beam.ParDo(_RaiseAlarms()).with_outputs(_ALARMS, _MISSING_ALARMS, main=_STATES)
        return MonitoredRisks(told[_STATES], told[_ALARMS], told[_MISSING_ALARMS])


def _promises(manifest: Manifest) -> Iterator[WatchedPromise]:
    for entry in manifest.calibrations:
        if entry.threshold is not None:
            yield WatchedPromise.of(manifest, entry)


def _losses_of(result: Any) -> Iterator[SampledLoss]:
    from calm_beam.serving import ProbedAnswer, Unanswered

    inference = prediction_of(result).inference
    if isinstance(inference, ProbedAnswer | Unanswered) and inference.loss is not None:
        yield inference.loss


def _keyed(loss: SampledLoss | Mapping[str, Any], *, promises: tuple[WatchedPromise, ...]) -> tuple[_Key, SampledLoss]:
    if not isinstance(loss, SampledLoss):
        loss = SampledLoss.from_row(loss, promises)
    return (loss.promise.manifest, loss.promise.calibration), loss


def _watched(element: tuple[_Key, Iterable[SampledLoss]], *, alpha: float) -> WatchedRisk:
    return WatchedRisk.after(element[1], before=None, alpha=alpha)


def _with_end(
    element: tuple[_Key, Iterable[SampledLoss]], ends: Any = beam.DoFn.WindowParam
) -> tuple[_Key, tuple[int, list[SampledLoss]]]:
    """Returns the losses of a promise and a window, with the end of the window in microseconds."""
    key, losses = element
    return key, (ends.end.micros, list(losses))


class _RaiseAlarms(beam.DoFn):
    """Yields states, and those that raised an alarm once more in an output of that alarm."""

    def __init__(self) -> None:
        self._losses = Metrics.counter(NAMESPACE, "monitored-losses")
        self._missing = Metrics.counter(NAMESPACE, "missing-losses")
        self._alarms = Metrics.counter(NAMESPACE, "risk-alarms")
        self._missing_alarms = Metrics.counter(NAMESPACE, "missing-loss-alarms")

    def process(self, state: WatchedRisk) -> Iterator[Any]:
        """Yields one state."""
        self._losses.inc(state.part)
        self._missing.inc(state.missing)
        yield state
        if state.is_new_alarm:
            self._alarms.inc()
            yield beam.pvalue.TaggedOutput(_ALARMS, state)
        if state.is_new_missing_alarm:
            self._missing_alarms.inc()
            yield beam.pvalue.TaggedOutput(_MISSING_ALARMS, state)


class _WatchWindows(beam.DoFn):
    """Watches windows of a promise in their order, each once no earlier one can come."""

    _TIMER = userstate.TimerSpec("due", beam.TimeDomain.WATERMARK)
    _DUE = beam.DoFn.TimerParam(_TIMER)
    _PENDING = beam.DoFn.StateParam(userstate.BagStateSpec("pending", PickleCoder()))
    _STORED = beam.DoFn.StateParam(userstate.ReadModifyWriteStateSpec("monitor", PickleCoder()))

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha

    def process(
        self,
        element: tuple[_Key, tuple[int, list[SampledLoss]]],
        pending: Any = _PENDING,
        due: Any = _DUE,
    ) -> None:
        """Keeps a window until the watermark has passed its end."""
        pending.add(element[1])
        due.set(window.Timestamp(micros=min(end for end, _ in pending.read())))

    @userstate.on_timer(_TIMER)
    def watch(
        self,
        due_at: Any = beam.DoFn.TimestampParam,
        pending: Any = _PENDING,
        stored: Any = _STORED,
        due: Any = _DUE,
    ) -> Iterator[Any]:
        """Yields the states after all windows that have ended."""
        windows = sorted(pending.read(), key=lambda window: window[0])
        ready = [each for each in windows if each[0] <= due_at.micros]
        monitor: RiskMonitor | None = stored.read()
        for end, losses in ready:
            state = WatchedRisk.after(losses, before=monitor, alpha=self._alpha, end=end / 1e6)
            monitor = state.monitor
            yield state
        stored.write(monitor)
        pending.clear()
        for each in windows[len(ready) :]:
            pending.add(each)
        if len(ready) < len(windows):
            due.set(window.Timestamp(micros=windows[len(ready)][0]))
