"""Monitoring the risk while a model serves: a test that may be evaluated after every loss, forever.

A bettor who believes that the risk exceeds delta multiplies its stake by 1 + bet (loss - delta) on every loss. If
the expected next loss, given all before it, is at most delta, the capital is a supermartingale, and the chance that it
ever reaches 1 / alpha is at most alpha (Ville's inequality), however long the stream is and however often it is tested.
Clustered losses are not such a stream, though their mean may be below delta: take one mean loss per cluster.

Two things make for a quick alarm. There are several bettors, since the best bet depends on how far the risk has moved
and on how the losses spread. And none of them stakes everything at the start: a little of the reserve is added
with every loss, so that a drift after a long good time is found by fresh money, although old stakes are long lost.

Some losses are missing: a label never came, or an output could not be measured. Two capitals are kept. In one a missing
loss counts as the lowest possible loss, so it is never above the capital of the true losses: only this one proves that
the risk exceeds delta. In the other it counts as 1: this one shows that the risk exceeds delta or losses are missing.
If no loss is missing both are the same, so one alpha is enough for the two alarms.

The capital depends on the order of the losses, and so does its promise: putting large losses first gives alarms
that mean nothing. A hash of the ids gives an order that is independent of the losses, and is the same wherever they
were measured and whichever came first. So each loss of a sampled request comes with its id and the promise it is about,
and the losses of a promise are watched in parts that come one after the other.
"""

import dataclasses
import hashlib
import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from calm_beam.risk import elementary
from calm_beam.risk.losses import LOSS_SCALE, require_signed_unit_interval, require_unit_interval, to_signed_fixed_point
from calm_beam.text import counted

if TYPE_CHECKING:
    from calm_beam.manifest import Calibration, Manifest, SettingCalibration, SettingManifest

# Shares of the largest bet that cannot lose everything, from slow drifts to sudden failure.
_SHARES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
_NO_STAKES = (0.0,) * len(_SHARES)
_LISTS = ("stakes", "worst_stakes")
# Stakes are capped: long bad streams stay within float64, and good ones still reduce the stake.
_RICHEST = 2.0**1000
# A trillion. Beyond it, the fresh stake added with each loss would be lost in rounding.
_MOST_LOSSES = 10**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedPromise:
    """The parts of a manifest's entry that monitoring needs.

    Attributes:
      manifest: The manifest's digest.
      calibration: The entry's index in it.
      group: Group that the entry is about; None for all prompts.
      delta: Risk tolerance, in (0, 1).
      is_signed: Whether losses lie in [-1, 1] and not in [0, 1].
    """

    manifest: str
    calibration: int
    group: str | None
    delta: float
    is_signed: bool

    @classmethod
    def of(cls, manifest: "Manifest | SettingManifest", entry: "Calibration | SettingCalibration") -> Self:
        """Returns the watched promise of an entry."""
        return cls(
            manifest=manifest.digest,
            calibration=manifest.calibrations.index(entry),
            group=entry.group,
            delta=entry.delta,
            is_signed=entry.is_signed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledLoss:
    """The loss of a sampled request.

    Attributes:
      id: Id of the request.
      value: The loss; 1 if it is missing.
      failure: Why it could not be measured; None if it was measured.
      promise: The promise that it is about.
    """

    id: str
    value: float
    failure: str | None
    promise: WatchedPromise

    @property
    def measured(self) -> float | None:
        """The loss as `RiskMonitor` takes it; None if it is missing."""
        return self.value if self.failure is None else None

    def to_row(self) -> dict[str, Any]:
        """Returns the loss as `calm-beam monitor` reads it."""
        return {
            "id": self.id,
            "loss": self.value,
            "failure": self.failure,
            "manifest": self.promise.manifest,
            "calibration": self.promise.calibration,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any], promises: Iterable[WatchedPromise]) -> Self:
        """Returns the loss in a row of a `LossProbe`.

        Args:
          row: As `to_row` returns it.
          promises: The promises that it may be about.

        Raises:
          ValueError: If it is about none of them, or is not such a row.
        """
        keys = ("id", "loss", "failure", "manifest", "calibration")
        if row.keys() != set(keys):
            raise ValueError(f"the row of a loss has the keys {', '.join(keys)}; got {sorted(map(str, row))}.")
        if not (row["failure"] is None or isinstance(row["failure"], str)):
            raise ValueError(
                f"the loss of request {row['id']!r:.60}: failure must be a text, or None where the loss was measured; "
                f"got {row['failure']!r:.60}."
            )
        for promise in promises:
            if (promise.manifest, promise.calibration) == (row["manifest"], row["calibration"]):
                return cls(id=str(row["id"]), value=row["loss"], failure=row["failure"], promise=promise)
        raise ValueError(
            f"the loss of request {row['id']!r:.60} was measured for another manifest or entry. The losses of one "
            "promise say nothing about another: name the manifest that it was measured for."
        )


def in_fixed_order(losses: Iterable[SampledLoss]) -> list[SampledLoss]:
    """Returns losses in an order that depends on their ids alone, each request once.

    A request whose loss occurs twice, for example when a source delivers a message again, counts with the smaller loss:
    duplicates must not cause more alarms than promised.

    Args:
      losses: Losses of one promise, in any order.

    Source: ours.
    """
    by_id: dict[str, SampledLoss] = {}
    for loss in losses:
        other = by_id.get(loss.id)
        if other is None or (loss.value, loss.failure or "") < (other.value, other.failure or ""):
            by_id[loss.id] = loss
    return sorted(by_id.values(), key=lambda loss: (hashlib.sha256(loss.id.encode()).digest(), loss.id))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RiskMonitor:
    """The state of the test: a small value that can be stored and resumed.

    Attributes:
      delta: Risk tolerance, in (0, 1).
      alpha: Chance of ever raising a false alarm, in (0, 1).
      is_signed: Whether losses lie in [-1, 1] and not in [0, 1].
      n: Number of losses seen, including missing ones.
      missing: Number of missing losses.
      loss_sum: Sum of the others in units of 2^-32, each rounded up.
      stakes: The bettors' stakes, in multiples of their starting capitals, where missing losses count as the lowest
        possible loss.
      worst_stakes: The same where missing losses count as 1.
      alarm_at: Number of the loss, from 1, at which it was proved that the risk exceeds delta, whatever the missing
        losses are; None before. An alarm stays.
      missing_alarm_at: Number of the loss at which it was proved that the risk exceeds delta or losses are missing;
        None before. Never after `alarm_at`.

    Source: Ville (1939); Shafer (2021), "Testing by betting"; staking bit by bit is the mixture over starting times of
      Shin, Ramdas and Rinaldo (2023), "E-detectors", with weights that add up to 1.

    >>> RiskMonitor.start(delta=0.1, alpha=0.05).observe([0.0] * 50 + [1.0] * 10).alarm_at
    56
    >>> monitor = RiskMonitor.start(delta=0.1, alpha=0.05).observe([0.0] * 50 + [None] * 10)
    >>> monitor.alarm_at, monitor.missing_alarm_at
    (None, 56)
    """

    delta: float
    alpha: float
    is_signed: bool
    n: int
    missing: int
    loss_sum: int
    stakes: tuple[float, ...]
    worst_stakes: tuple[float, ...]
    alarm_at: int | None
    missing_alarm_at: int | None

    def __post_init__(self) -> None:
        for name, value in (("delta", self.delta), ("alpha", self.alpha)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise ValueError(f"{name} must be in (0, 1), got {value!r:.40}. It is a fraction: for 5 % pass 0.05.")
        if not isinstance(self.is_signed, bool):
            raise ValueError(f"is_signed must be true or false, got {self.is_signed!r:.40}.")
        n = _require_count("n", self.n)
        if n > _MOST_LOSSES:
            raise ValueError(f"n must be at most {_MOST_LOSSES}, which no stream has; got {n!r:.40}.")
        measured = n - _require_count("missing", self.missing, highest=n, of=f"n = {n}")
        lowest = -measured * LOSS_SCALE if self.is_signed else 0
        of = f"n = {n}" if measured == n else f"n = {n} and missing = {self.missing}"
        _require_count("loss_sum", self.loss_sum, lowest=lowest, highest=measured * LOSS_SCALE, of=of)
        for name, stakes in (("stakes", self.stakes), ("worst_stakes", self.worst_stakes)):
            if len(stakes) != len(_SHARES) or not all(
                isinstance(value, float) and 0 <= value <= _RICHEST for value in stakes
            ):
                raise ValueError(f"{name} must be {len(_SHARES)} numbers from 0 to {_RICHEST:g}, got {stakes!r:.200}.")
        for name, place in (("alarm_at", self.alarm_at), ("missing_alarm_at", self.missing_alarm_at)):
            if place is not None:
                _require_count(name, place, lowest=1, highest=n, of=f"n = {n}")
        if self.alarm_at is not None and (self.missing_alarm_at is None or self.missing_alarm_at > self.alarm_at):
            raise ValueError(
                f"missing_alarm_at must be in [1, {self.alarm_at}] for alarm_at = {self.alarm_at}, got "
                f"{self.missing_alarm_at!r:.40}."
            )

    @classmethod
    def start(cls, *, delta: float, alpha: float, is_signed: bool = False) -> Self:
        """Returns the monitor before the first loss.

        Args:
          delta: Risk tolerance, in (0, 1).
          alpha: Chance of ever raising a false alarm, in (0, 1).
          is_signed: Whether losses lie in [-1, 1] and not in [0, 1].

        Raises:
          ValueError: If a number is out of range.

        Source: ours.
        """
        return cls(
            delta=delta,
            alpha=alpha,
            is_signed=is_signed,
            n=0,
            missing=0,
            loss_sum=0,
            stakes=_NO_STAKES,
            worst_stakes=_NO_STAKES,
            alarm_at=None,
            missing_alarm_at=None,
        )

    @classmethod
    def of_promise(cls, promise: WatchedPromise, *, alpha: float) -> Self:
        """Returns the monitor of a promise before the first loss; `alpha` and errors as in `start`."""
        return cls.start(delta=promise.delta, alpha=alpha, is_signed=promise.is_signed)

    def observe(self, losses: Iterable[float | None]) -> Self:
        """Returns the monitor after more losses, in their order.

        The same stream gives the same state, bit for bit, on every machine and however it is cut into parts. Losses
        after an alarm count in `n` and `loss_sum`; the alarm stays.

        Args:
          losses: Each in [0, 1], or in [-1, 1] for signed ones; None for a missing loss.

        Raises:
          ValueError: If a loss is NaN or out of range; no loss of the call is then counted.

        Source: as in the class.
        """
        require = require_signed_unit_interval if self.is_signed else require_unit_interval
        given = list(losses)
        measured = require([loss for loss in given if loss is not None], name="losses")
        least = -1.0 if self.is_signed else 0.0
        known = iter(measured.tolist())
        pairs = [(least, 1.0) if loss is None else (next(known),) * 2 for loss in given]
        # Stakes of both capitals, shape (2, bettors).
        stakes = np.array([self.stakes, self.worst_stakes])
        alarms = [self.alarm_at, self.missing_alarm_at]
        kept = kept_back(np.arange(self.n, self.n + len(pairs) + 1))
        for index, pair in enumerate(pairs):
            before, after = kept[index : index + 2]
            stakes = grown_stakes(
                stakes, np.array(pair), fresh=before - after, delta=self.delta, is_signed=self.is_signed
            )
            if None in alarms:
                for kind, capital in enumerate(capital_of(stakes, kept=after)):
                    if alarms[kind] is None and capital >= 1 / self.alpha:
                        alarms[kind] = self.n + index + 1
        return dataclasses.replace(
            self,
            n=self.n + len(given),
            missing=self.missing + len(given) - measured.size,
            loss_sum=self.loss_sum + int(to_signed_fixed_point(measured).sum()),
            stakes=tuple(stakes[0].tolist()),
            worst_stakes=tuple(stakes[1].tolist()),
            alarm_at=alarms[0],
            missing_alarm_at=alarms[1],
        )

    @property
    def mean_loss(self) -> float | None:
        """The mean of all losses so far that are not missing; None before the first."""
        measured = self.n - self.missing
        return self.loss_sum / LOSS_SCALE / measured if measured else None

    @property
    def capital(self) -> float:
        """The total capital now, in multiples of the start: the evidence against "the risk is at most delta".

        Missing losses count as the lowest possible loss. The alarm is raised when the capital first reaches 1 / alpha.
        Capital of a bettor beyond 2^1000 is not counted.
        """
        return self._capital_of(self.stakes)

    @property
    def worst_capital(self) -> float:
        """The capital where missing losses count as 1: evidence against "risk at most delta and no loss is missing"."""
        return self._capital_of(self.worst_stakes)

    def _capital_of(self, stakes: tuple[float, ...]) -> float:
        return float(capital_of(np.array(stakes), kept=float(kept_back(np.array(self.n)))))

    def to_dict(self) -> dict[str, object]:
        """Returns the state as plain JSON values; numbers read back exactly."""
        return {**dataclasses.asdict(self), **{name: list(getattr(self, name)) for name in _LISTS}}

    @classmethod
    def from_dict(cls, value: Mapping[str, object]) -> Self:
        """Returns the state from a dict of `to_dict`.

        Raises:
          ValueError: If a key is missing or unknown, or a value is impossible.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        _check_keys(value, names)
        lists = {name: _tuple_of(name, value[name]) for name in _LISTS}
        return cls(**{**value, **lists})  # type: ignore[arg-type]

    @classmethod
    def from_first_version(cls, value: Mapping[str, object]) -> Self:
        """Returns the monitor for a state of the first version, which counted missing losses as 1 without marking them.

        The capital won then is evidence that the risk exceeds delta or losses are missing. It counts for nothing
        else: the capital that proves continues with the reserve of that time, which is valid, but slower.

        Raises:
          ValueError: If a key is missing or unknown, or a value is impossible.
        """
        names = {field.name for field in dataclasses.fields(cls)} - {"missing", "worst_stakes", "missing_alarm_at"}
        _check_keys(value, names)
        changed = {
            "missing": 0,
            "stakes": _NO_STAKES,
            "worst_stakes": _tuple_of("stakes", value["stakes"]),
            "alarm_at": None,
            "missing_alarm_at": value["alarm_at"],
        }
        return cls(**{**value, **changed})  # type: ignore[arg-type]


def _check_keys(value: Mapping[str, object], names: set[str]) -> None:
    if value.keys() != names:
        raise ValueError(
            f"a monitor's state has the keys {', '.join(sorted(names))}; "
            f"missing: {sorted(names - value.keys())}, unknown: {sorted(value.keys() - names)}."
        )


def _tuple_of(name: str, value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {value!r:.100}.")
    return tuple(value)


def grown_stakes(stakes: np.ndarray, losses: np.ndarray, *, fresh: float, delta: float, is_signed: bool) -> np.ndarray:
    """Returns the stakes after one more loss.

    Uses sums and products only, which every machine rounds alike.

    Args:
      stakes: shape (..., bettors). Stakes before the loss, in multiples of the starting capitals.
      losses: shape (...). The loss, of one stream or of several.
      fresh: Share of the starting capitals that is added to the stakes before the loss.
      delta: Risk tolerance, in (0, 1).
      is_signed: Whether losses lie in [-1, 1].

    Returns:
      Shape (..., bettors), each at most 2^1000.

    Source: as in `RiskMonitor`.
    """
    # The factor is least at the least possible loss, 0 or -1, and still positive there.
    bets = np.array(_SHARES) / (delta + 1 if is_signed else delta)
    return np.minimum((stakes + fresh) * (1 + bets * (np.asarray(losses)[..., None] - delta)), _RICHEST)


def capital_of(stakes: np.ndarray, *, kept: float) -> np.ndarray:
    """Returns the total capital, staked and kept back, in multiples of the starting capital.

    Args:
      stakes: shape (..., bettors).
      kept: Share kept back.

    Returns:
      Shape (...).

    Source: as in `RiskMonitor`.
    """
    # `accumulate` adds from left to right, by definition.
    return np.asarray(np.add.accumulate(stakes, axis=-1)[..., -1] / len(_SHARES) + kept)


def kept_back(numbers: np.ndarray) -> np.ndarray:
    """Returns the share of the capital not yet staked after a number of losses.

    It falls so slowly that a drift at loss T is met with about 1 / (T log^2 T): the delay grows only with log T.

    Args:
      numbers: Any shape, whole numbers from 0 on.

    Returns:
      The same shape, in (0, 1], falling.

    Source: ours.
    """
    return 1 / (1 + elementary.log(1.0 + numbers))


def _require_count(name: str, value: object, *, lowest: int = 0, highest: int | None = None, of: str = "") -> int:
    """Returns a whole number after checking its range; `of` explains the upper end in the message."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool) or number < lowest:
        raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r:.40}.")
    if highest is not None and number > highest:
        raise ValueError(f"{name} must be in [{lowest}, {highest}] for {of}, got {value!r:.40}.")
    return number


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedRisk:
    """The state of a promise after a part of its losses; its `str` is a line for a log.

    Attributes:
      promise: The watched promise.
      monitor: The monitor after this part and all before it.
      part: Number of losses of this part: all of a batch, or those of a window.
      end: When the window ended, in seconds since 1970; None for a batch.
      missing: Number of losses of this part that are missing.
      is_new_alarm: Whether this part has raised the alarm: the risk exceeds delta, whatever missing losses are.
      is_new_missing_alarm: Whether this part has raised the other alarm without proof so far: the risk exceeds delta or
        losses are missing.
    """

    promise: WatchedPromise
    monitor: RiskMonitor
    part: int
    end: float | None
    missing: int
    is_new_alarm: bool
    is_new_missing_alarm: bool

    def __str__(self) -> str:
        monitor, group = self.monitor, "" if self.promise.group is None else f"group {self.promise.group}, "
        mean = "none measured" if monitor.mean_loss is None else f"mean {monitor.mean_loss:.4f}"
        losses = counted(monitor.n, "loss", several="losses")
        missing = f", {monitor.missing:,} missing" if monitor.missing else ""
        alarm = ""
        if monitor.alarm_at is not None:
            alarm = f"ALARM at loss {monitor.alarm_at:,}: "
        elif monitor.missing_alarm_at is not None:
            alarm = f"ALARM at loss {monitor.missing_alarm_at:,}, or losses are missing: "
        awaited = "" if alarm else f", and {1 / monitor.alpha:g} raises an alarm"
        return (
            f"{alarm}{group}delta {self.promise.delta:g}, {losses}{missing}, {mean}; capital "
            f"{monitor.capital:.3g}{awaited}"
        )

    @classmethod
    def after(
        cls, losses: Iterable[SampledLoss], *, before: RiskMonitor | None, alpha: float, end: float | None = None
    ) -> Self:
        """Returns the state after a part; it does not depend on the order in which its losses arrive.

        Args:
          losses: Losses of one promise, at least one, in any order; each request counts once.
          before: The monitor after the earlier parts; None for the first.
          alpha: Chance of ever raising a false alarm, in (0, 1).
          end: When the window ended, in seconds since 1970; None for a batch.

        Raises:
          ValueError: If a loss is NaN or out of range, or `alpha` is.

        Source: as in `RiskMonitor`; the order is ours.
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
