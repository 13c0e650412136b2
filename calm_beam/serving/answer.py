"""What a served prompt becomes, and what goes wrong instead."""

import dataclasses
from typing import Any

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.vocabularies.vocabulary import Vocabulary
from calm_beam.manifest import Calibration
from calm_beam.manifest.notebook import html_of
from calm_beam.risk.monitor import SampledLoss

from .pieces import END, token_texts


class PromptError(CalmBeamError, ValueError):
    """A prompt that is not served: whoever sent it has to change it."""


class OutputError(CalmBeamError, RuntimeError):
    """A prompt that was served as it should be, and has no output: the model or the device is broken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of one prompt.

    Attributes:
      text: The output, as the calibration's metrics saw it: without eos; under a manifest without a vocabulary, the
        generated ids joined by spaces.
      tokens: Generated ids, with the final eos if it was generated.
      exit_layers: Layers used for each token, from 1.
      confidences: Confidence at each token's exit layer.
      num_layers: Decoder depth: layers that the full model uses for each token.
      truncated: Whether the prompt was longer than the manifest allows, and was cut.
      group: The group that the prompt was said to belong to, or that the generator is for; None for none.
      entry: Entry of the manifest whose threshold let tokens exit. Only if its group is `group` does its promise cover
        the prompt. None where the full model answered whatever the manifest says.
      vocabulary: That of the model, for `token_texts`; taken when the answer is made, and no field.
    """

    text: str
    tokens: tuple[int, ...]
    exit_layers: tuple[int, ...]
    confidences: tuple[float, ...]
    num_layers: int
    truncated: bool
    group: str | None = None
    entry: Calibration | None = None
    vocabulary: dataclasses.InitVar[Vocabulary | None] = None

    def __post_init__(self, vocabulary: Vocabulary | None) -> None:
        # No field: an answer is compared, written as JSON and sent to other processes without it.
        object.__setattr__(self, "_vocabulary", vocabulary)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def token_texts(self) -> tuple[str, ...] | None:
        """The text of every token, as `calm_beam.serving.token_texts` gives them; None for an answer that was sent."""
        texts = token_texts(self.tokens, self.__dict__.get("_vocabulary"))
        return texts if "".join(text for text in texts if text != END) == self.text else None

    @property
    def layers_used(self) -> int:
        """Decoder layers that were run, over all tokens."""
        return sum(self.exit_layers)

    @property
    def layers_saved(self) -> int:
        """Decoder layers that the full model would have run besides, for the same tokens."""
        return self.num_layers * len(self.tokens) - self.layers_used

    def _repr_html_(self) -> str | None:
        """Returns what a notebook shows; None, for its text, in calm-beam-serving."""
        return html_of(self, "answer_html")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbedAnswer(Answer):
    """An answer whose prompt was sampled: the full model answered it as well.

    Attributes:
      loss: What the answer loses.
    """

    loss: SampledLoss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unanswered:
    """Stands where an answer would, among those of other prompts.

    Attributes:
      error: Why there is none.
      loss: What counts for it, if it was sampled and the promise is about it; None if not.
    """

    error: PromptError | OutputError
    loss: SampledLoss | None = None
