"""What an experiment works on: a model, prompts, and the metric that outputs are compared by."""

import dataclasses
from collections.abc import Iterable, Sequence

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.checkpoints import Checkpoint
from calm_beam.decoding.prompts import Prompt
from calm_beam.metrics.registry import checked_score, get_metric
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings
from calm_beam.vocabularies.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model, prompts and a metric.

    Attributes:
      checkpoint: The model.
      vocabulary: Its vocabulary; None if there is none, and all prompts are token ids.
      prompts: The sample.
      metric: Name of the metric, as in `get_metric`.
      metric_settings: What it needs.
      max_input_length: Most tokens of a prompt.
      max_decode_length: Most tokens of an output, eos included.
      batch_size: Most prompts decoded together; None for as many as memory and speed recommend.
      token_budget: Most positions held at a time; None for a share of the memory that is free.
      model_parallelism: Devices that share one model.
      exit_head: One of `EXIT_HEADS`: the form of the output head that decides. It moves outputs at near ties alone.
      engine: What decodes, one of `engine_choice.ENGINE_CHOICES`.
      arithmetic: In which numbers the model computes.
    """

    checkpoint: Checkpoint
    vocabulary: Vocabulary | None
    prompts: Sequence[Prompt]
    metric: str
    max_input_length: int
    max_decode_length: int
    batch_size: int | None = None
    token_budget: int | None = None
    model_parallelism: int = 1
    exit_head: str = "auto"
    engine: str = "auto"
    arithmetic: Arithmetic = FLOAT32
    metric_settings: MetricSettings = NO_SETTINGS

    def scores(self, prompt_id: str, texts: Iterable[str], *, references: Sequence[str]) -> dict[str, float]:
        """Returns the metric of each text, each distinct one scored once.

        Args:
          prompt_id: Id of the example, for messages.
          texts: What to score.
          references: At least one text.

        Raises:
          MetricError: If the metric fails or leaves [0, 1].
        """
        metric = get_metric(self.metric, self.metric_settings)
        return {
            text: checked_score(metric, self.metric, candidate=text, references=references, example_id=prompt_id)
            for text in dict.fromkeys(texts)
        }
