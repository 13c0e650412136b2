"""Scoring a model by what it generates: the paper chooses its checkpoints by the full model's predictions."""

import math
import pathlib
from collections.abc import Callable, Sequence

from calm_beam.arithmetic import FLOAT32, Arithmetic
from calm_beam.checkpoints import Arrays, Checkpoint
from calm_beam.decoding.branches import Branch
from calm_beam.decoding.decoder import Decoder
from calm_beam.exits.rule import ExitRule
from calm_beam.metrics.registry import NO_SETTINGS, MetricSettings, checked_score, get_metric
from calm_beam.model import ModelConfig

_BATCH_SIZE = 32


class GenerationScore:
    """The mean score of the full model's greedy outputs, always of the same prompts."""

    def __init__(
        self,
        metric: str,
        model_config: ModelConfig,
        *,
        prompts: Sequence[Sequence[int]],
        references: Sequence[Sequence[str]],
        decode: Callable[[Sequence[int]], str],
        max_target_length: int,
        metric_settings: MetricSettings = NO_SETTINGS,
        arithmetic: Arithmetic = FLOAT32,
        model_parallelism: int = 1,
    ) -> None:
        """Prepares the score.

        Args:
          metric: Its name, as `get_metric` takes it.
          model_config: Sizes of the models to come.
          prompts: At least one, as decoding sees it.
          references: Right answers to each prompt.
          decode: Turns token ids into text.
          max_target_length: Most tokens to generate, the end included.
          metric_settings: What the metric needs.
          arithmetic: In which numbers the models compute.
          model_parallelism: Devices that share a model.

        Raises:
          ValueError: If the metric is not known, or lacks what it needs.
        """
        self.name = f"{metric} of {len(prompts)} outputs"
        self._metric_name, self._metric = metric, get_metric(metric, metric_settings)
        self._model_config, self._arithmetic = model_config, arithmetic
        self._prompts, self._references = prompts, references
        self._decode = decode
        self._max_target_length = max_target_length
        self._model_parallelism = model_parallelism

    def __call__(self, arrays: Arrays) -> float:
        """Returns the score, in [0, 1], of the model with the given weights.

        Raises:
          MetricError: If the metric fails on an output; names its place among the prompts.
        """
        nowhere = pathlib.Path()
        model = Checkpoint(
            config=self._model_config, arrays=arrays, directory=nowhere, vocabulary_path=None, layout="native"
        )
        decoder = Decoder(
            model,
            # The full model asks nobody; `state` is the measure that costs least.
            [Branch.at(ExitRule(confidence="state"), None, max_decode_length=self._max_target_length)],
            max_input_length=max(map(len, self._prompts)),
            batch_size=min(_BATCH_SIZE, len(self._prompts)),
            arithmetic=self._arithmetic,
            model_parallelism=self._model_parallelism,
        )
        scores = []
        for index, result in decoder.decode(self._prompts):
            text = self._decode(result.tokens[0, : result.lengths[0]].tolist())
            references, place = self._references[index], f"validation row {index + 1}"
            scores.append(
                checked_score(self._metric, self._metric_name, candidate=text, references=references, example_id=place)
            )
        # Outputs end in any order.
        return math.fsum(scores) / len(scores)
