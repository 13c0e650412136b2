"""What the losses of a promise have come to, in parts that come one after the other."""

import dataclasses
from collections.abc import Iterable
from typing import Self

from calm_beam.risk.sampled_loss import SampledLoss, WatchedPromise, in_fixed_order

from .monitor import RiskMonitor


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedRisk:
    """The state of a promise after a part of its losses.

    Attributes:
      promise: What is watched.
      monitor: After this part and all before it.
      part: Losses of this part: all of a batch, or those of a window.
      end: When the window ended, in seconds since 1970; None for a batch.
      missing: How many of them are missing.
      is_new_alarm: Whether this part has raised the alarm: the risk exceeds delta, whatever missing losses are.
      is_new_missing_alarm: Whether this part has raised the other one, and no proof yet: the risk exceeds delta or
        losses are missing.
    """

    promise: WatchedPromise
    monitor: RiskMonitor
    part: int
    end: float | None
    missing: int
    is_new_alarm: bool
    is_new_missing_alarm: bool

    @classmethod
    def after(
        cls, losses: Iterable[SampledLoss], *, before: RiskMonitor | None, alpha: float, end: float | None = None
    ) -> Self:
        """Returns the state after a part, which depends neither on the order of its losses nor on how they came.

        Args:
          losses: Of one promise, at least one, in any order; those of a request count once.
          before: The monitor after the parts before; None for the first.
          alpha: Chance of ever raising a false alarm, in (0, 1).
          end: As the attribute.

        Raises:
          ValueError: If a loss is NaN or out of range, or `alpha` is.

        Source: as `RiskMonitor`; the order is ours.
        """
        ordered = in_fixed_order(losses)
        promise = ordered[0].promise
        if before is None:
            before = RiskMonitor.of_promise(promise, alpha=alpha)
        monitor = before.observe(loss.measured for loss in ordered)
        return cls(
            promise=promise,
            monitor=monitor,
            part=len(ordered),
            end=end,
            missing=monitor.missing - before.missing,
            is_new_alarm=before.alarm_at is None and monitor.alarm_at is not None,
            is_new_missing_alarm=before.missing_alarm_at is None
            and monitor.missing_alarm_at is not None
            and monitor.alarm_at is None,
        )
