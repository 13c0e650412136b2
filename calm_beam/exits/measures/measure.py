"""What a confidence measure is: a function, and what it needs to be computed."""

import dataclasses
import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # It loads JAX, and a manifest's reader must not.
    from calm_beam.exits.logit_summary import DistributionBounds, Summary


class Need(enum.Enum):
    """What a measure is computed from at a layer; sweep, served decoder and counts go by it, never by a name.

    LAYER: The number of the layer and the depth alone, so that every exit is known before anything is decoded.
    STATES: The output of the layer and its input.
    CLASSIFIER: The score of the exit classifier, which the checkpoint must have.
    LOGITS: What the head makes of the layer's output.
    TOKENS: The tokens predicted here and at the layers below that may exit.
    LAST_TOKEN: The tokens predicted here and at the last layer: such a measure saves nothing, and cannot be served.
    """

    LAYER = enum.auto()
    STATES = enum.auto()
    CLASSIFIER = enum.auto()
    LOGITS = enum.auto()
    TOKENS = enum.auto()
    LAST_TOKEN = enum.auto()

    @property
    def asks_head(self) -> bool:
        """Whether every layer that may exit is projected onto the vocabulary."""
        return self in (Need.LOGITS, Need.TOKENS, Need.LAST_TOKEN)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measure:
    """A confidence measure.

    Attributes:
      name: What flags and manifests call it.
      meaning: What its value is, in a few words.
      needs: What `confidence` takes.
      confidence: Returns float32 confidences, shape (...), of what it needs:
        LAYER: `(layer, num_layers)`, two ints; returns one number.
        STATES: `(state, below, layer)`: arrays (..., width), without the final norm, and the layer's number, from 1.
        CLASSIFIER: `(score)`: shape (...).
        LOGITS: `(logits)`: shape (..., vocabulary).
        TOKENS: `(token, earlier)`: int32, shape (...) and (..., patience - 1), the nearest layer's first, -1 where
          there was none. Works on numpy's arrays as on JAX's, with the same bits.
        LAST_TOKEN: `(token, last_token)`: int32, each of shape (...). Works on numpy's arrays as on JAX's.
      of_summary: The same confidence from a `Summary` of the logits and the size of the vocabulary, for LOGITS only:
        with it, packed rows are decided without all logits being stored. None where that cannot be had.
      summary_parts: Names of the parts of a `Summary` that `of_summary` reads, beside `largest` and `token`.
      bounds: The lowest and the highest confidence within `DistributionBounds`, given the size of the vocabulary, for
        LOGITS only: with it, most decisions need no exact head. None where that cannot be had.
      is_gap: Whether it is the gap of the two most likely tokens, so that 0 says that they tie.
      takes_schedule: Whether values are certainties, which thresholds that decay over positions may be compared with.
    """

    name: str
    meaning: str
    needs: Need
    confidence: Callable[..., Any]
    of_summary: "Callable[[Summary, int], Any] | None" = None
    summary_parts: frozenset[str] = frozenset()
    bounds: "Callable[[DistributionBounds, int], tuple[Any, Any]] | None" = None
    is_gap: bool = False
    takes_schedule: bool = True

    @property
    def sees_near_ties(self) -> bool:
        """Whether it is rounded, so that what comes near a threshold shows.

        Shares of agreeing layers, and numbers of layers, are not: the tokens behind them may be, which is unseen.
        """
        return self.needs not in (Need.TOKENS, Need.LAYER, Need.LAST_TOKEN)

    def test_operations(self, *, width: int, vocab_size: int) -> int:
        """Returns the floating point operations that one exit test adds to a token's decoding.

        Source: Elbayad et al. (2020), Appendix B: a projection for what is made of logits, a product for a classifier;
        comparing states is not counted.
        """
        if self.needs in (Need.LOGITS, Need.TOKENS):
            return 2 * width * vocab_size
        return 2 * width if self.needs is Need.CLASSIFIER else 0
