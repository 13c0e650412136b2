"""The exit rule: everything but the threshold that determines where a token exits.

It names a confidence measure, a schedule for the threshold over the positions of an output, and a state propagation,
which fills the cache of skipped layers. Standard library only, since manifests read this.
"""

import dataclasses
from typing import Self

from calm_beam.text import function_itself

from .measures import MEASURES, Measure, MeasureError, Need, is_measure_name, is_own, measure_named, source_digest
from .propagations import PROPAGATIONS, PassedOn, Propagation
from .schedules import SCHEDULES

TOKEN_SOURCES = ("exit_layer", "last_layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitRule:
    """How exits are decided: confidence measure, schedule, state propagation and exit layers.

    Attributes:
      confidence: Name of one of `MEASURES`, or of a user's measure, `module:name`.
      schedule: Name of one of `SCHEDULES`: how the threshold changes over positions.
      tau: Temperature of a decaying schedule; None with `constant`.
      state_propagation: Name of one of `PROPAGATIONS`: how the cache of skipped layers is filled.
      token_from: `exit_layer`, or `last_layer`: the token is then the last layer's prediction at any exit layer, so
        that exits show in the cache only (T5X's `oracle_tok_noisy_cache`).
      min_exit_layer: Lowest exit layer, counted from 1.
      exit_interval: Distance between exit layers, from `min_exit_layer` on. The last layer is always one.
      patience: How many layers a measure of predicted tokens compares; None with other measures.
      confidence_source: For a user's measure, `source_digest` of the file it was calibrated with; None for built-in
        measures, and where it is not recorded.
    """

    confidence: str = "softmax"
    schedule: str = "constant"
    tau: float | None = None
    state_propagation: str = "from_exit"
    token_from: str = "exit_layer"
    min_exit_layer: int = 1
    exit_interval: int = 1
    patience: int | None = None
    confidence_source: str | None = None

    def __post_init__(self) -> None:
        if found := function_itself(self.confidence):
            raise ValueError(f"confidence must be a name, got {found}.")
        if not is_measure_name(self.confidence):
            raise ValueError(f"confidence must be one of {', '.join(MEASURES)}; got {self.confidence!r}.")
        _check_choice("schedule", self.schedule, tuple(SCHEDULES))
        _check_choice("state_propagation", self.state_propagation, tuple(PROPAGATIONS))
        _check_choice("token_from", self.token_from, TOKEN_SOURCES)
        decays = SCHEDULES[self.schedule].decays
        if not decays and self.tau is not None:
            raise ValueError(f"tau must not be given with schedule {self.schedule!r}, got {self.tau}.")
        if decays and (self.tau is None or not 0 <= self.tau < float("inf")):
            raise ValueError(f"schedule {self.schedule!r} needs a finite tau of at least 0, got {self.tau}.")
        known = MEASURES.get(self.confidence)
        if decays and known is not None and not known.takes_schedule:
            raise ValueError(
                f"schedule must be constant with confidence {self.confidence!r}, whose values are not certainties; got "
                f"{self.schedule!r}."
            )
        for name in ("min_exit_layer", "exit_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if known is not None:
            self._check_patience(known)
        if self.confidence_source is not None and not is_own(self.confidence):
            raise ValueError(f"confidence_source must not be given with confidence {self.confidence!r}.")

    def _check_patience(self, measure: Measure) -> None:
        if measure.needs is not Need.TOKENS:
            if self.patience is not None:
                raise ValueError(f"patience must not be given with confidence {measure.name!r}, got {self.patience}.")
        elif self.patience is None or self.patience < 1:
            raise ValueError(
                f"confidence {measure.name!r} needs a patience of at least 1, the number of layers that it compares; "
                f"got {self.patience}."
            )

    def measure(self) -> Measure:
        """Returns the confidence measure. A user's measure is imported, which runs code.

        Raises:
          MeasureError: If it cannot be imported, or is not the one that was calibrated.
        """
        measure = measure_named(self.confidence)
        if self.confidence_source is not None:
            found = source_digest(self.confidence)
            if found != self.confidence_source:
                raise MeasureError(
                    f'confidence "{self.confidence}": its module is now {found}, calibrated was '
                    f"{self.confidence_source}. Another function exits elsewhere: calibrate again."
                )
        if is_own(self.confidence):
            self._check_patience(measure)
        return measure

    def with_source(self) -> Self:
        """Returns the rule with the current `confidence_source`, if it lacks one; for calibration.

        Raises:
          MeasureError: If the measure cannot be imported, or its module has no file.
        """
        if not is_own(self.confidence) or self.confidence_source is not None:
            return self
        return dataclasses.replace(self, confidence_source=source_digest(self.confidence))

    def propagation(self) -> Propagation:
        """Returns the state propagation."""
        return PROPAGATIONS[self.state_propagation]

    def needs_full_model(self) -> bool:
        """Returns whether every layer has to run for every token, so that exits save nothing; for analysis only."""
        return self.reason_for_full_model() is not None

    def reason_for_full_model(self) -> str | None:
        """Returns the first setting for which every layer has to run; None if there is none. Imports no measure."""
        known = MEASURES.get(self.confidence)
        # A user's measure may not need the last layer.
        if known is not None and known.needs is Need.LAST_TOKEN:
            return f"confidence {self.confidence!r}"
        if self.propagation().needs_full_model:
            return f"state_propagation {self.state_propagation!r}"
        return f"token_from {self.token_from!r}" if self.token_from != "exit_layer" else None

    def shares_sweep_by(self) -> tuple[object, ...]:
        """Returns a key that rules must have in common to share a sweep; it determines the cache of skipped layers.

        A rule that needs every layer for every token, or all logits of a row, shares no sweep.
        """
        measure = self.measure()
        takes_all_logits = measure.needs is Need.LOGITS and measure.of_summary is None
        if self.needs_full_model() or takes_all_logits:
            return (self,)
        propagation = self.propagation()
        first_layer = self.min_exit_layer if propagation.passed_on is PassedOn.FIRST_STATE else None
        return (propagation.name, self.token_from, first_layer)

    def check_served(self) -> None:
        """Checks that the rule lets tokens skip layers, so that it can be served.

        Raises:
          ValueError: If every layer has to run for every token.
        """
        if reason := self.reason_for_full_model():
            raise ValueError(
                f"nothing can be skipped with {reason}: it needs every layer for every token, and is meant for "
                "analysis. Decode it with the sweep, or serve another rule."
            )

    def check_model(self, num_layers: int, *, has_classifier: bool) -> None:
        """Checks that a model can decide exits by this rule.

        Args:
          num_layers: Decoder depth L.
          has_classifier: Whether the model has an exit classifier.

        Raises:
          ValueError: If the measure needs a classifier that the model lacks, or `min_exit_layer` exceeds its depth.
        """
        if self.measure().needs is Need.CLASSIFIER and not has_classifier:
            raise ValueError(
                f"confidence {self.confidence!r} needs decoder/meta_cls in the checkpoint, which has none."
            )
        self.exit_layers(num_layers)

    def exit_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns the layers at which a token may exit, ascending, the last layer included.

        Args:
          num_layers: Decoder depth L.

        Raises:
          ValueError: If `min_exit_layer` exceeds the decoder's depth.

        >>> ExitRule(min_exit_layer=2, exit_interval=3).exit_layers(8)
        (2, 5, 8)
        >>> ExitRule(exit_interval=3).exit_layers(8)
        (1, 4, 7, 8)
        """
        if self.min_exit_layer > num_layers:
            raise ValueError(
                f"min_exit_layer must be at most {num_layers}, the decoder's depth; got {self.min_exit_layer}."
            )
        allowed = range(self.min_exit_layer, num_layers + 1, self.exit_interval)
        return tuple(sorted({*allowed, num_layers}))


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}.")
