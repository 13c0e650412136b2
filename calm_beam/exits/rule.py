"""The exit rule: everything but the threshold that decides where a token exits."""

import dataclasses

CONFIDENCES = ("softmax", "softmax_max", "state", "classifier", "oracle", "static")
SCHEDULES = ("constant", "decay", "decay_t5x")
STATE_PROPAGATIONS = ("from_exit", "from_first_exit", "full_cache", "projected")
TOKEN_SOURCES = ("exit_layer", "last_layer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitRule:
    """How confidence is measured and compared, and what a skipped layer is given.

    Attributes:
      confidence: `softmax` (gap between the two largest probabilities), `softmax_max` (largest probability), `state`
        (cosine similarity of a layer's output to the one below), `classifier` (trained exit classifier), `oracle` (1
        where a layer predicts the token that the last layer would, else 0: any threshold above 0 exits at the first
        layer that agrees) or `static` (i / L at layer i: threshold m / L exits every token at layer m).
      schedule: `constant` (the threshold at every step), `decay` (CALM Eq. 5, decaying threshold) or `decay_t5x` (the
        formula in the released T5X code, whose last term is scaled by the threshold too; as released, that code never
        passes the position, and decodes as `constant` does).
      tau: Temperature of a decaying schedule; None with `constant`.
      state_propagation: What skipped layers make their keys and values from. `from_exit`: the state of the exit
        layer (CALM, "State propagation"). `from_first_exit`: the output of the first layer that may exit, whatever
        layer the token exited at (what the released T5X code does). `projected`: they copy keys and values of the exit
        layer (the paper's ablation). `full_cache`: nothing is skipped, the cache is the one that the full model would
        have for these tokens.
      token_from: `exit_layer`, or `last_layer`: the token is the last layer's prediction whatever layer exited, so that
        exits show in the cache only (T5X's `oracle_tok_noisy_cache`).
      min_exit_layer: Lowest layer that may exit, counted from 1.
      exit_interval: Distance between layers that may exit, from `min_exit_layer` on. The last layer always may.
    """

    confidence: str = "softmax"
    schedule: str = "constant"
    tau: float | None = None
    state_propagation: str = "from_exit"
    token_from: str = "exit_layer"
    min_exit_layer: int = 1
    exit_interval: int = 1

    def __post_init__(self) -> None:
        _check_choice("confidence", self.confidence, CONFIDENCES)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("state_propagation", self.state_propagation, STATE_PROPAGATIONS)
        _check_choice("token_from", self.token_from, TOKEN_SOURCES)
        if self.schedule == "constant" and self.tau is not None:
            raise ValueError(f"tau must not be given with schedule 'constant', got {self.tau}.")
        if self.schedule != "constant" and (self.tau is None or not 0 <= self.tau < float("inf")):
            raise ValueError(f"schedule {self.schedule!r} needs a finite tau of at least 0, got {self.tau}.")
        if self.schedule != "constant" and self.confidence in ("oracle", "static"):
            raise ValueError(
                f"schedule must be constant with confidence {self.confidence!r}, whose values are not certainties; got "
                f"{self.schedule!r}."
            )
        for name in ("min_exit_layer", "exit_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def needs_full_model(self) -> bool:
        """Returns whether every layer has to run for every token, so that exits save nothing: for analysis only."""
        return self.confidence == "oracle" or self.state_propagation == "full_cache" or self.token_from == "last_layer"

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
