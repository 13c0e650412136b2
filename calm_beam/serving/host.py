"""The host of a model: loaded once, it answers under any manifests that belong to it."""

import collections
import dataclasses
import threading
import time
from typing import NamedTuple

from calm_beam.checkpoints import Checkpoint, load_checkpoint
from calm_beam.decoding.compilation import use_compilation_cache
from calm_beam.decoding.memory import keep_freed_memory
from calm_beam.decoding.settings import recorded_precision
from calm_beam.errors import CalmBeamError
from calm_beam.manifest import EntryChoice, Manifest, ManifestError, read_manifest
from calm_beam.precision import Precision
from calm_beam.risk.monitor import SampledLoss, WatchedPromise

from .answer import Answer, OutputError, ProbedAnswer, PromptError, ServedRequest, Unanswered, exit_tests
from .generator import Generator, on_device
from .loss_meter import AnsweredRequest, LossMeter, MeasuredLoss
from .questions import HostedModel, NamedPrompt, Outcome, Question, Reply, Sampling
from .watched import check_sampled

# Most generators that are kept: each holds its decoder's form of the weights. Others are dropped, and rebuilt on
# request.
_MOST_KEPT = 32


class _Asked(NamedTuple):
    """What answers are made with: the file of a manifest, the entry of it, and which prompts are measured."""

    manifest: str
    choice: EntryChoice
    sampling: Sampling | None


class _Served(NamedTuple):
    """The generator, and the loss meter; no meter if nothing is measured."""

    generator: Generator
    meter: LossMeter | None


class ModelHost:
    """Holds a model and answers questions, one at a time; threads may share it.

    A manifest that does not belong to the model is refused once, and from then on the next one in the question answers.
    """

    def __init__(self, model: HostedModel) -> None:
        """Loads the model.

        Raises:
          CheckpointError: If it cannot be read.
        """
        keep_freed_memory()
        use_compilation_cache()
        start = time.perf_counter()
        self._model = model
        self._checkpoint = load_checkpoint(model.checkpoint, declared=model.declared)
        # By what manifests compute in, which is mostly the same.
        self._on_device: dict[Precision, Checkpoint] = {}
        self._load_msecs = [round(1000 * (time.perf_counter() - start))]
        self._turn = threading.Lock()
        # The most recently used one is last.
        self._kept: collections.OrderedDict[_Asked, _Served] = collections.OrderedDict()
        self._refused: dict[_Asked, str] = {}
        self._taken: dict[str, str] = {}

    def answer(self, question: Question) -> Reply:
        """Returns the result of every prompt.

        Raises:
          CalmBeamError: If the last manifest of the question is refused, too.
          OSError: If that cannot be read.
          ValueError: If prompts are to be sampled and one has no id.
        """
        if question.sampling is not None and any(prompt.id is None for prompt in question.prompts):
            raise ValueError(
                "prompts are sampled by their ids, and one has none: pass NamedPrompt(prompt=..., id=...). Equal "
                "prompts would else be measured all or never."
            )
        with self._turn:
            wanted, *others = question.manifests
            paths = list(dict.fromkeys((wanted, self._taken.get(question.asker, wanted), *others)))
            refused: dict[str, str] = {}
            for path in paths:
                try:
                    served = self._served(_Asked(path, question.choice, question.sampling))
                    break
                except (CalmBeamError, OSError, ValueError) as error:
                    if path == paths[-1]:
                        raise
                    refused[path] = str(error)
            self._taken[question.asker] = path
            generator = served.generator
            before, start = generator.batch_decoder().work, time.perf_counter()
            outcomes = _outcomes(generator, question.prompts, meter=served.meter)
            loads, self._load_msecs = self._load_msecs, []
            return Reply(
                outcomes=tuple(outcomes),
                manifest=path,
                digest=generator.manifest.digest,
                refused=refused,
                work=generator.batch_decoder().work - before,
                decode_seconds=time.perf_counter() - start,
                exit_tests=sum(
                    exit_tests(outcome.inference, generator.manifest)
                    for outcome in outcomes
                    if isinstance(outcome.inference, Answer)
                ),
                load_msecs=tuple(loads),
            )

    def _served(self, asked: "_Asked") -> "_Served":
        if asked in self._refused:
            raise ManifestError(self._refused[asked])
        if asked not in self._kept:
            try:
                self._kept[asked] = self._made(asked)
            except CalmBeamError as error:
                # Other errors, as of the file system or for want of memory, may pass.
                if not isinstance(error, OSError):
                    self._refused[asked] = str(error)
                raise
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(asked)
        return self._kept[asked]

    def _made(self, asked: "_Asked") -> "_Served":
        choice, sampling = asked.choice, asked.sampling
        manifest = read_manifest(asked.manifest)
        generator = Generator.from_manifest(
            manifest,
            self._checkpoint_for(manifest),
            vocabulary=self._model.vocabulary,
            choice=choice,
            **self._model.asked_of_decoder(),
            exact_engine=self._model.exact_engine,
        )
        if sampling is None:
            return _Served(generator=generator, meter=None)
        check_sampled(generator.manifest, generator.entry)
        meter = LossMeter(generator, share=sampling.share, salt=sampling.salt, metric=choice.metric)
        return _Served(generator=generator, meter=meter)

    def _checkpoint_for(self, manifest: Manifest) -> Checkpoint:
        """Returns the model with its weights on the device, as a manifest has them."""
        precision = recorded_precision(manifest.decode)
        if precision not in self._on_device:
            self._on_device[precision] = on_device(
                self._checkpoint, precision, model_parallelism=self._model.model_parallelism
            )
        return self._on_device[precision]


def _outcomes(generator: Generator, prompts: tuple[NamedPrompt, ...], *, meter: LossMeter | None) -> list[Outcome]:
    """Returns the results of prompts, in their order; a failing prompt does not affect the others."""
    inferences: list[Answer | PromptError | OutputError | None] = [None] * len(prompts)
    requests: list[ServedRequest] = []
    places: list[int] = []
    for place, prompt in enumerate(prompts):
        name = f"prompt {prompt.prompt!r:.60}" if prompt.id is None else f"prompt {prompt.id}"
        try:
            requests.append(generator.request(prompt.prompt, name=name, group=prompt.group))
        except PromptError as error:
            inferences[place] = error
        else:
            places.append(place)
    for index, ended in generator.generate_each(requests):
        inferences[places[index]] = ended
    losses = {} if meter is None else _losses(generator, prompts, inferences=inferences, meter=meter)
    outcomes = []
    for place, inference in enumerate(inferences):
        assert inference is not None, "a decoder yields every prompt"
        entry = generator.entry_for(prompts[place].group)
        outcomes.append(
            Outcome(
                inference=_with_loss(inference, losses.get(place)),
                calibration=generator.manifest.calibrations.index(entry),
            )
        )
    return outcomes


def _with_loss(inference: Answer | PromptError | OutputError, loss: SampledLoss | None) -> Answer | Unanswered:
    if not isinstance(inference, Answer):
        return Unanswered(error=inference, loss=loss)
    if loss is None:
        return inference
    return ProbedAnswer(
        **{field.name: getattr(inference, field.name) for field in dataclasses.fields(Answer)}, loss=loss
    )


def _losses(
    generator: Generator,
    prompts: tuple[NamedPrompt, ...],
    *,
    inferences: list[Answer | PromptError | OutputError | None],
    meter: LossMeter,
) -> dict[int, SampledLoss]:
    """Returns the losses of the prompts that are sampled and have a promise, by their place."""
    measured: dict[int, MeasuredLoss] = {}
    answered: list[AnsweredRequest] = []
    places: list[int] = []
    promises: dict[int, WatchedPromise] = {}
    for place, (prompt, inference) in enumerate(zip(prompts, inferences, strict=True)):
        promise = _promise(generator, prompt.group)
        assert prompt.id is not None
        if promise is None or isinstance(inference, PromptError) or not meter.is_sampled(prompt.id):
            continue
        promises[place] = promise
        if isinstance(inference, Answer):
            answered.append(AnsweredRequest(id=prompt.id, prompt=prompt.prompt, answer=inference))
            places.append(place)
        elif inference is not None:
            measured[place] = MeasuredLoss.of_failure(inference)
    for index, loss in meter.measure_each(answered):
        measured[places[index]] = loss
    return {
        place: SampledLoss(id=str(prompts[place].id), value=loss.value, failure=loss.failure, promise=promises[place])
        for place, loss in measured.items()
    }


def _promise(generator: Generator, group: str | None) -> WatchedPromise | None:
    """Returns what the answers to prompts of a group are held against; None where nothing is promised of them."""
    entry = generator.entry_for(group)
    if entry.threshold is None or entry.group != (group or generator.entry.group):
        return None
    return WatchedPromise.of(generator.manifest, entry)
