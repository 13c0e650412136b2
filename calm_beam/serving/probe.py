"""Measuring losses in service, for `calm-beam monitor`: a sample of prompts is decoded by the full model too.

Which requests are measured is decided by a hash of their ids, before anybody sees an output: a sample that depended on
losses would tell nothing about the risk. Requests that are refused (`PromptError`) have no output and no loss.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Self

from calm_beam.manifest import ManifestError
from calm_beam.metrics.registry import check_may_run, checked_score, get_metric
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings
from calm_beam.risk.losses import losses_of_scores
from calm_beam.storage import append_line, check_writable, is_cloud_path, is_folder, parent
from calm_beam.vocabulary import reference_text

from .answer import Answer
from .generator import Generator
from .request import AnyPrompt

_HASHED_BITS = 64
LONGEST_REASON = 200
"""Characters of a reason that a row has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """The loss of a request.

    Attributes:
      value: The loss.
      failure: Why it is 1 without having been measured; None if it was measured.
    """

    value: float
    failure: str | None

    @classmethod
    def of_failure(cls, error: Exception) -> Self:
        """Returns the loss of a request that should have been answered and has no output."""
        return cls(value=1.0, failure=f"{type(error).__name__}: {error}"[:LONGEST_REASON])


class LossProbe:
    """Measures the losses of sampled requests as the calibration measured them, and adds them to a file.

    Each row is a JSON object: `id` of the request, `loss`, `failure` (why it has loss 1 without having been measured,
    else null), `manifest` (its digest) and `calibration` (the entry's place), so that losses of another promise are not
    taken for those of this one. Threads and processes may share the file.
    """

    def __init__(
        self,
        generator: Generator,
        path: str | os.PathLike[str],
        *,
        share: float,
        salt: str,
        metric: str | None = None,
        metric_settings: MetricSettings = NO_SETTINGS,
    ) -> None:
        """Prepares the full model, which shares the generator's weights.

        Args:
          generator: What serves.
          path: Local file to add to; made if there is none.
          share: Of the requests that are measured, in (0, 1]. Each costs a decode by the full model.
          salt: Decides which requests are measured. Keep it secret if clients choose the ids.
          metric: Name of the entry's metric. A metric of your own (`module:function`) is imported only if you name it
            here: a manifest does not decide what runs. Of others it may be left out.
          metric_settings: What the metric needs: for `bleurt`, where its checkpoint lies.

        Raises:
          ManifestError: If there is nothing to watch, as the entry never exits, or its promise is about clusters of
            prompts, of which single requests tell nothing; or if it is about another metric than was named.
          MetricError: If the metric is not known, does not work here, or is code that was not named.
          ValueError: If the share is out of range.
          OSError: If the file cannot be written.
        """
        manifest, entry = generator.manifest, generator.entry
        if not 0 < share <= 1:
            raise ValueError(f"share must be in (0, 1], got {share}. It is a fraction: for 5 % pass 0.05.")
        if entry.threshold is None:
            raise ManifestError("the entry says never exit: there is no risk to watch.")
        if manifest.data.clusters is not None:
            raise ManifestError(
                "the manifest is about clusters of prompts, whose mean losses are watched: single requests do not "
                "give them. Measure whole clusters, and give calm-beam monitor their means."
            )
        self._path = os.fspath(path)
        if is_cloud_path(self._path):
            raise OSError(f"{self._path}: losses are added to a local file; copy it to Cloud Storage from there.")
        if not is_folder(parent(self._path)):
            raise FileNotFoundError(f"{self._path}: the folder {parent(self._path)} does not exist.")
        check_writable(self._path)
        if metric is not None and metric != entry.metric:
            raise ManifestError(f'the entry is about metric "{entry.metric}", not "{metric}".')
        check_may_run(entry.metric, named=() if metric is None else (metric,), how="name it: LossProbe(metric=...)")
        self._metric = get_metric(entry.metric, metric_settings)
        # Texts that differ: some metrics give equal ones 1 before they import what they need.
        checked_score(
            self._metric, entry.metric, candidate="a text", references=("other words",), example_id="of the trial"
        )
        self._entry = entry
        self._about = {"manifest": manifest.digest, "calibration": manifest.calibrations.index(entry)}
        self._full = generator.full_model()
        self._share = share
        self._salt = salt

    def warm_up(self) -> None:
        """Compiles the full model for every width, as `Generator.warm_up` does with what serves."""
        self._full.warm_up()

    def is_sampled(self, request_id: str) -> bool:
        """Returns whether a request is measured: the same answer for the same id, whatever becomes of it.

        Args:
          request_id: Any text, different for different requests.
        """
        digest = hashlib.sha256(f"{self._salt}\n{request_id}".encode()).digest()
        return int.from_bytes(digest[: _HASHED_BITS // 8], "big") < self._share * (1 << _HASHED_BITS)

    def observe(
        self, request_id: str, prompt: AnyPrompt, *, answer: Answer, references: Sequence[str | Sequence[int]] = ()
    ) -> float:
        """Measures the loss of a sampled request that has been answered, adds it to the file, and returns it.

        May be called later and in another thread than the answer was made in. Whoever answers a sampled request has to
        call this or `observe_failure` in the end, once.

        Args:
          request_id: Of the request.
          prompt: As it was given to the generator.
          answer: What that gave.
          references: Right answers, which the losses of risk consistency need: texts, or lists of token ids, and only
            the latter under a manifest without a vocabulary. `LateReferences` is for those that come later. Live
            traffic has none: there, watch an entry of textual consistency, and give those of risk consistency to
            `calm-beam verify` with labelled data.

        Returns:
          The loss; 1 if it cannot be measured, the reason of which stands in the file.

        Raises:
          ValueError: If references are needed and there are none, or they cannot be held against the answer, or that
            was made for another group than the entry is about; nothing is written.
          OSError: If the file cannot be written.
        """
        return self.add(request_id, self.measure(request_id, prompt, answer=answer, references=references))

    def observe_failure(self, request_id: str, error: Exception) -> float:
        """Adds loss 1 for a sampled request that should have been answered and has no output, and returns it.

        Raises:
          OSError: If the file cannot be written.
        """
        return self.add(request_id, MeasuredLoss.of_failure(error))

    @property
    def needs_references(self) -> bool:
        """Whether a loss is measured against right answers."""
        return self._entry.consistency == "risk"

    def measure(
        self, request_id: str, prompt: AnyPrompt, *, answer: Answer, references: Sequence[str | Sequence[int]] = ()
    ) -> MeasuredLoss:
        """Returns what `observe` would add to the file, and adds nothing; arguments and `ValueError` are the same."""
        self.check_group(request_id, answer)
        if self.needs_references and not references:
            raise ValueError(f"request {request_id}: risk consistency needs references to measure a loss, got none.")
        texts = self._reference_texts(request_id, references)
        try:
            full = self._full.generate(prompt)
            return MeasuredLoss(
                value=self._loss(request_id, answer.text, full=full.text, references=texts), failure=None
            )
        except Exception as error:
            # Left out, it would bias what is watched: the calibration counts an output that fails in the same way.
            return MeasuredLoss.of_failure(error)

    def add(self, request_id: str, loss: MeasuredLoss) -> float:
        """Adds a loss to the file, and returns its value.

        Raises:
          OSError: If the file cannot be written.
        """
        row = {"id": request_id, "loss": loss.value, "failure": loss.failure, **self._about}
        append_line(self._path, json.dumps(row))
        return loss.value

    def check_group(self, request_id: str, answer: Answer) -> None:
        """Refuses an answer that was made for another group than the entry is about.

        Raises:
          ValueError: If it was.
        """
        if answer.group != self._entry.group:
            raise ValueError(
                f"request {request_id}: was answered for {_group_in_words(answer.group)}, but the probe is about "
                f"{_group_in_words(self._entry.group)}. Give each group a probe and a file of its own: "
                "Generator.from_manifest(group=...)."
            )

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

    def _loss(self, request_id: str, early: str, *, full: str, references: Sequence[str]) -> float:
        name, against = self._entry.metric, references if self._entry.consistency == "risk" else (full,)
        score, full_score = (
            checked_score(self._metric, name, candidate=text, references=against, example_id=request_id)
            for text in (early, full)
        )
        return float(losses_of_scores(self._entry.known_loss, early_score=score, full_score=full_score))


def _group_in_words(group: str | None) -> str:
    return "all prompts" if group is None else f"group {group!r}"
