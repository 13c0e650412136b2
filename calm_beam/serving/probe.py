"""Measuring losses in service, for `calm-beam monitor`: a sample of prompts is decoded by the full model too.

How losses are sampled and measured stands in `loss_meter.py`; here they go to a file.
"""

import json
import os
from collections.abc import Sequence

from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings
from calm_beam.risk.monitor import SampledLoss, WatchedPromise
from calm_beam.storage import append_line, check_writable, is_cloud_path, is_folder, parent

from .answer import Answer
from .generator import Generator
from .loss_meter import LossMeter, MeasuredLoss, check_exits, check_share, check_watchable
from .request import AnyPrompt


class LossProbe(LossMeter):
    """Measures the losses of sampled requests as the calibration measured them, and adds them to a file.

    Each row is a JSON object: `id` of the request, `loss`, `failure` (why the loss is missing, and 1 stands there, else
    null), `manifest` (its digest) and `calibration` (the entry's place), so that losses of another promise are not
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
        check_share(share)
        check_exits(generator.entry)
        check_watchable(generator.manifest)
        self._path = os.fspath(path)
        if is_cloud_path(self._path):
            raise OSError(f"{self._path}: losses are added to a local file; copy it to Cloud Storage from there.")
        if not is_folder(parent(self._path)):
            raise FileNotFoundError(f"{self._path}: the folder {parent(self._path)} does not exist.")
        check_writable(self._path)
        super().__init__(generator, share=share, salt=salt, metric=metric, metric_settings=metric_settings)
        self._promise = WatchedPromise.of(generator.manifest, generator.entry)

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
          The loss; 1 if it cannot be measured, so that it is missing, the reason of which stands in the file.

        Raises:
          ValueError: If references are needed and there are none, or they cannot be held against the answer, or that
            was made for another group than the entry is about; nothing is written.
          OSError: If the file cannot be written.
        """
        return self.add(request_id, self.measure(request_id, prompt, answer=answer, references=references))

    def observe_failure(self, request_id: str, error: Exception) -> float:
        """Adds a missing loss for a sampled request that has no output and should have one, and returns the 1 for it.

        Raises:
          OSError: If the file cannot be written.
        """
        return self.add(request_id, MeasuredLoss.of_failure(error))

    def measure(
        self, request_id: str, prompt: AnyPrompt, *, answer: Answer, references: Sequence[str | Sequence[int]] = ()
    ) -> MeasuredLoss:
        """Returns what `observe` would add to the file, and adds nothing; arguments and `ValueError` are the same."""
        self.check_group(request_id, answer)
        return super().measure(request_id, prompt, answer=answer, references=references)

    def add(self, request_id: str, loss: MeasuredLoss) -> float:
        """Adds a loss to the file, and returns its value.

        Raises:
          OSError: If the file cannot be written.
        """
        row = SampledLoss(id=request_id, value=loss.value, failure=loss.failure, promise=self._promise)
        append_line(self._path, json.dumps(row.to_row()))
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


def _group_in_words(group: str | None) -> str:
    return "all prompts" if group is None else f"group {group!r}"
