"""The released T5X code's propagation: from `decoder_hidden`, which is the first exit's state."""

from .propagation import PassedOn, Propagation

FROM_FIRST_EXIT = Propagation(
    name="from_first_exit",
    meaning="skipped layers make keys and values of the state of the first layer that may exit",
    passed_on=PassedOn.FIRST_STATE,
)
