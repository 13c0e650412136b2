"""Measuring losses in service, for `calm-beam monitor`: the full model also decodes a sample of prompts.

`loss_meter.py` says how losses are sampled and measured; here they are written to a file.

For promises of risk consistency, references may come later: answers are remembered until then, and none is left out.
Which references come, and which come first, may depend on the output: a bad answer is corrected, a good one is not.
So losses are added to the probe's file in the order in which the requests were answered, each once all before it
have one, and the loss of an answer whose references never come is added as missing. It proves nothing:
`calm-beam monitor` counts it as the lowest loss there is before it says that the risk exceeds delta, and as 1 before
it says that the risk does or losses are missing.
"""

import dataclasses
import json
import os
import threading
from collections.abc import Sequence
from typing import Self

from calm_beam.inputs.examples import AnyPrompt
from calm_beam.metrics import NO_SETTINGS, MetricSettings
from calm_beam.risk.monitor import SampledLoss, WatchedPromise
from calm_beam.storage import append_line

from .answer import Answer
from .generator import Generator
from .loss_meter import LONGEST_REASON, LossMeter, MeasuredLoss, check_share
from .watched import check_exits, check_watchable, make_losses_file


class LossProbe(LossMeter):
    """Measures the losses of sampled requests as the calibration measured them, and adds them to a file.

    Each row is a JSON object: `id` of the request, `loss`, `failure` (why the loss is missing and written as 1, else
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
        super().__init__(generator, share=share, salt=salt, metric=metric, metric_settings=metric_settings)
        make_losses_file(self._path)
        self._promise = WatchedPromise.of(generator.manifest, generator.entry)

    def observe(
        self, request_id: str, prompt: AnyPrompt, *, answer: Answer, references: Sequence[str | Sequence[int]] = ()
    ) -> float:
        """Measures the loss of a sampled request that has been answered, adds it to the file, and returns it.

        May be called later and in another thread than the answer was made in. For each sampled request, the server must
        call this or `observe_failure` exactly once.

        Args:
          request_id: Of the request.
          prompt: As it was given to the generator.
          answer: What that gave.
          references: Right answers, which the losses of risk consistency need: texts, or lists of token ids, and only
            the latter under a manifest without a vocabulary. `LateReferences` is for those that come later. Live
            traffic has none: there, watch an entry of textual consistency, and give those of risk consistency to
            `calm-beam verify` with labelled data.

        Returns:
          The loss; 1 if it cannot be measured, so that it is missing; the file holds the reason.

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


@dataclasses.dataclass
class _Remembered:
    """A sampled request.

    Attributes:
      prompt: As it was given to the generator; None if there is no answer.
      answer: What that gave; None if there is none.
      loss: None while its references are still to come.
      is_being_measured: Whether they have come, and the loss is on its way.
    """

    prompt: AnyPrompt | None
    answer: Answer | None
    _: dataclasses.KW_ONLY
    loss: MeasuredLoss | None = None
    is_being_measured: bool = False


class LateReferences:
    """Remembers sampled answers until their references come, and then measures their losses; threads may share it.

    What is remembered is in memory: `close` it, or use it in a `with` statement, so that all that still waits has a
    loss when the process ends. One that is killed leaves `waiting` and `held_back` without.
    """

    def __init__(self, probe: LossProbe, *, most: int = 10_000) -> None:
        """Prepares to remember.

        Args:
          probe: Measures the losses, and has the file that they are added to.
          most: Requests that are remembered at a time. If another comes, the oldest is given up.

        Raises:
          ValueError: If `most` is below 1, or the probe's losses need no references.
        """
        if most < 1:
            raise ValueError(f"most must be at least 1, got {most}.")
        if not probe.needs_references:
            raise ValueError("the entry is of textual consistency, whose losses need no references: call observe.")
        self._probe = probe
        self._most = most
        # Oldest first.
        self._remembered: dict[str, _Remembered] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the requests whose references have not come, oldest first."""
        with self._lock:
            return tuple(name for name, one in self._remembered.items() if not one.is_being_measured and not one.loss)

    @property
    def held_back(self) -> int:
        """How many losses are measured, or being measured, and not in the file, since one before them is waiting."""
        with self._lock:
            return sum(one.is_being_measured or one.loss is not None for one in self._remembered.values())

    def remember(self, request_id: str, prompt: AnyPrompt, *, answer: Answer) -> None:
        """Remembers a sampled request that has been answered.

        Args:
          request_id: Of the request.
          prompt: As it was given to the generator.
          answer: What that gave.

        Raises:
          ValueError: If a request of that id is remembered, or the answer was made for another group than the probe's
            entry is about.
          OSError: If the file cannot be written, where this makes room; the request is remembered all the same.
        """
        self._probe.check_group(request_id, answer)
        self._take(request_id, _Remembered(prompt, answer))

    def remember_failure(self, request_id: str, error: Exception) -> None:
        """Remembers a sampled request that should have been answered and has no output; `Raises` is as of `remember`.

        Its loss is missing, which is known, and takes its turn.
        """
        self._take(request_id, _Remembered(None, None, loss=MeasuredLoss.of_failure(error)))

    def observe(self, request_id: str, references: Sequence[str | Sequence[int]]) -> float:
        """Measures the loss of a request whose references have come, by the full model, and returns it.

        Args:
          request_id: Of a request that is `waiting`.
          references: As in `LossProbe.observe`.

        Returns:
          The loss that counts: 1 if it is missing, as it cannot be measured or the request was given up meanwhile.

        Raises:
          ValueError: If the request does not wait, or the references cannot be held against the answer. It waits on.
          OSError: If the file cannot be written. The loss is known, and is added with the next one.
        """
        with self._lock:
            one = self._of(request_id)
            one.is_being_measured = True
        assert one.prompt is not None
        assert one.answer is not None
        try:
            measured = self._probe.measure(request_id, one.prompt, answer=one.answer, references=references)
        except BaseException:
            one.is_being_measured = False
            raise
        with self._lock:
            one.is_being_measured = False
            # The code that gave it up has counted it.
            one.loss = one.loss or measured
            self._add_known()
            return one.loss.value

    def give_up(self, request_id: str, reason: str) -> None:
        """Counts the loss of a request as missing whose references will not come.

        Args:
          request_id: Of a request that is `waiting`.
          reason: Why they will not; written to the file.

        Raises:
          ValueError: If the request does not wait.
          OSError: As in `observe`.
        """
        with self._lock:
            self._of(request_id).loss = _given_up(reason)
            self._add_known()

    def close(self) -> None:
        """Gives up all requests that wait, and adds all losses to the file.

        Raises:
          OSError: If the file cannot be written.
        """
        with self._lock:
            self._give_up_oldest(len(self._remembered), "none had come when the probe was closed")

    def _of(self, request_id: str) -> _Remembered:
        one = self._remembered.get(request_id)
        if one is None or one.loss is not None or one.is_being_measured:
            raise ValueError(
                f"request {request_id}: does not wait for references. It was never remembered, has its loss already, "
                f"or was given up as {self._most} others came after it."
            )
        return one

    def _take(self, request_id: str, one: _Remembered) -> None:
        with self._lock:
            if request_id in self._remembered:
                raise ValueError(f"request {request_id}: is remembered already. Ids of requests must differ.")
            self._remembered[request_id] = one
            self._give_up_oldest(
                max(0, len(self._remembered) - self._most), f"none had come {self._most} requests later"
            )

    def _give_up_oldest(self, count: int, reason: str) -> None:
        for one in list(self._remembered.values())[:count]:
            one.loss = one.loss or _given_up(reason)
        self._add_known()

    def _add_known(self) -> None:
        """Adds losses from the oldest on, up to the first request that still waits."""
        while self._remembered:
            name, one = next(iter(self._remembered.items()))
            if one.loss is None:
                return
            self._probe.add(name, one.loss)
            # Not before it is in the file.
            del self._remembered[name]


def _given_up(reason: str) -> MeasuredLoss:
    return MeasuredLoss(value=1.0, failure=f"no references: {reason}"[:LONGEST_REASON])
