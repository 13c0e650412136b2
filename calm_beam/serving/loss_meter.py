"""Losses of answers in service: how they are sampled and measured, wherever they go then.

Which requests are measured is decided by a hash of their ids, before any output is seen: a sample that depended on
losses would tell nothing about the risk. Requests that are refused (`PromptError`) have no output and no loss.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Self

from calm_beam.decoding.batch import OnShape
from calm_beam.inputs.examples import AnyPrompt
from calm_beam.inputs.vocabularies.vocabulary import reference_text
from calm_beam.manifest import ManifestError
from calm_beam.metrics import NO_SETTINGS, MetricSettings
from calm_beam.metrics.registry import check_may_run, check_source, checked_score, get_metric
from calm_beam.risk.losses import losses_of_scores

from .answer import Answer, PromptError
from .generator import Generator
from .watched import check_watchable

_HASHED_BITS = 64
LONGEST_REASON = 200
"""Characters of a reason that a row has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """The loss of a request.

    Attributes:
      value: The loss; 1 if it is missing.
      failure: Why it is missing, as it could not be measured; None if it was. Missing losses prove no broken bound:
        `calm-beam monitor` counts them as the lowest loss there is, and as 1 for an alarm that says so.
    """

    value: float
    failure: str | None

    @classmethod
    def of_failure(cls, error: Exception) -> Self:
        """Returns what stands for the loss of a request that has no output, or whose loss could not be measured."""
        return cls(value=1.0, failure=f"{type(error).__name__}: {error}"[:LONGEST_REASON])


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnsweredRequest:
    """A sampled request with its answer, whose loss is to be measured.

    Attributes:
      id: Of the request.
      prompt: As it was given to the generator.
      answer: What that gave.
    """

    id: str
    prompt: AnyPrompt
    answer: Answer


class LossMeter:
    """Samples requests, and measures their losses as the calibration measured them; writes nothing."""

    def __init__(
        self,
        generator: Generator,
        *,
        share: float,
        salt: str,
        metric: str | None = None,
        metric_settings: MetricSettings = NO_SETTINGS,
    ) -> None:
        """Prepares the full model, which shares the generator's weights.

        Args:
          generator: What serves.
          share: Of the requests that are measured, in (0, 1]. Each costs a decode by the full model.
          salt: Decides which requests are measured. Keep it secret if clients choose the ids.
          metric: Name of the entry's metric. A metric of your own (`module:function`) is imported only if you name it
            here: a manifest does not decide what runs. Of others it may be left out.
          metric_settings: What the metric needs: for `bleurt`, where its checkpoint lies.

        Raises:
          ManifestError: If the promise is about clusters of prompts, of which single requests tell nothing, or about
            another metric than was named.
          MetricError: If the metric is not known, does not work here, or is code that was not named, or that changed.
          ValueError: If the share is out of range.
        """
        check_share(share)
        entry = generator.entry
        check_watchable(generator.manifest)
        if metric is not None and metric != entry.metric:
            raise ManifestError(f'the entry is about metric "{entry.metric}", not "{metric}".')
        check_may_run(
            entry.metric, named=() if metric is None else (metric,), how=f"name it: {type(self).__name__}(metric=...)"
        )
        check_source(entry.metric, generator.manifest.software)
        self._metric = get_metric(entry.metric, metric_settings)
        # Texts that differ: some metrics give equal ones 1 before they import what they need.
        checked_score(
            self._metric, entry.metric, candidate="a text", references=("other words",), example_id="of the trial"
        )
        self._entry = entry
        self._full = generator.full_model()
        self._share = share
        self._salt = salt

    def warm_up(self, *, on_shape: OnShape | None = None) -> None:
        """Compiles the full model for every width; `on_shape` is called as in `Generator.warm_up`."""
        self._full.warm_up(on_shape=on_shape)

    def is_sampled(self, request_id: str) -> bool:
        """Returns whether a request is measured: the same answer for the same id, whatever becomes of it.

        Args:
          request_id: Any text, different for different requests.
        """
        return is_sampled(request_id, share=self._share, salt=self._salt)

    @property
    def needs_references(self) -> bool:
        """Whether a loss is measured against right answers."""
        return self._entry.consistency == "risk"

    def measure(
        self, request_id: str, prompt: AnyPrompt, *, answer: Answer, references: Sequence[str | Sequence[int]] = ()
    ) -> MeasuredLoss:
        """Returns the loss of a sampled request that has been answered.

        Args:
          request_id: Of the request.
          prompt: As it was given to the generator.
          answer: What that gave.
          references: Right answers, which the losses of risk consistency need: texts, or lists of token ids, and only
            the latter under a manifest without a vocabulary.

        Returns:
          The loss; 1 with the reason if it cannot be measured and is missing.

        Raises:
          ValueError: If references are needed and there are none, or they cannot be held against the answer.
        """
        self._check_references(request_id, references)
        texts = self._reference_texts(request_id, references)
        try:
            full = self._full.generate(prompt)
        except Exception as error:
            # Left out, it would bias what is watched: the calibration counts an output that fails in the same way.
            return MeasuredLoss.of_failure(error)
        return self._measured(request_id, answer.text, full=full.text, references=texts)

    def measure_each(self, answered: Sequence[AnsweredRequest]) -> Iterator[tuple[int, MeasuredLoss]]:
        """Yields the losses of textual consistency of several requests, with the index of each, in the order they end.

        The full model decodes them together. One that has no loss does not take others along: its own is missing.

        Args:
          answered: What to measure.

        Raises:
          ValueError: If the losses need references, which `measure` takes.
        """
        if not answered:
            return
        self._check_references(answered[0].id, ())
        decoded: list[int] = []
        requests = []
        for index, one in enumerate(answered):
            try:
                requests.append(self._full.request(one.prompt, name=one.id))
            except PromptError as error:
                yield index, MeasuredLoss.of_failure(error)
            else:
                decoded.append(index)
        for place, full in self._full.generate_each(requests):
            index = decoded[place]
            one = answered[index]
            if isinstance(full, Answer):
                yield index, self._measured(one.id, one.answer.text, full=full.text, references=())
            else:
                yield index, MeasuredLoss.of_failure(full)

    def _measured(self, request_id: str, early: str, *, full: str, references: Sequence[str]) -> MeasuredLoss:
        name, against = self._entry.metric, references if self.needs_references else (full,)
        try:
            score, full_score = (
                checked_score(self._metric, name, candidate=text, references=against, example_id=request_id)
                for text in (early, full)
            )
            loss = losses_of_scores(self._entry.known_loss, early_score=score, full_score=full_score)
        except Exception as error:
            # As in `measure`: whatever a metric raises, the request keeps its place in the sample.
            return MeasuredLoss.of_failure(error)
        return MeasuredLoss(value=float(loss), failure=None)

    def _check_references(self, request_id: str, references: Sequence[str | Sequence[int]]) -> None:
        if self.needs_references and not references:
            raise ValueError(f"request {request_id}: risk consistency needs references to measure a loss, got none.")

    def _reference_texts(self, request_id: str, references: Sequence[str | Sequence[int]]) -> list[str]:
        """Returns references as the texts of answers are made, so that the two can be compared."""
        if isinstance(references, str):
            raise ValueError(
                f"request {request_id}: references must be a list of texts, got the text {references!r:.60}."
            )
        vocabulary = self._full.vocabulary
        texts = []
        for reference in references:
            if isinstance(reference, str):
                if vocabulary is None:
                    raise ValueError(
                        f"request {request_id}: a reference is text, but the manifest has no vocabulary, so that "
                        "answers are token ids. Give lists of token ids."
                    )
                texts.append(reference)
            elif all(type(index) is int for index in reference):
                texts.append(reference_text(reference, vocabulary))
            else:
                raise ValueError(
                    f"request {request_id}: a reference must be a text or a list of token ids, got {reference!r:.60}."
                )
        return texts


def is_sampled(request_id: str, *, share: float, salt: str) -> bool:
    """Returns whether a request is measured: the same answer for the same id, whatever becomes of it.

    Args:
      request_id: Any text, different for different requests.
      share: Of the requests that are measured, in (0, 1].
      salt: Decides which they are.
    """
    digest = hashlib.sha256(f"{salt}\n{request_id}".encode()).digest()
    return int.from_bytes(digest[: _HASHED_BITS // 8], "big") < share * (1 << _HASHED_BITS)


def check_share(share: float) -> None:
    """Raises ValueError for a share that is not in (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}. It is a fraction: for 5 % pass 0.05.")
