"""Checks of a sweep, or of a run of answers, before any worker starts."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, Self

from calm_beam.checkpoints import Checkpoint, Declared, load_checkpoint, stored_architecture
from calm_beam.decoding.engine_choice import Machine, asked_like, chosen_engine
from calm_beam.decoding.memory import Demand, check_memory, checked_least_tokens, memory_in_words
from calm_beam.decoding.settings import DecodeSettings, settings_of_variant
from calm_beam.errors import UsageError
from calm_beam.exits.head_forms import check_head
from calm_beam.exits.measures import Need, check_traces, is_own
from calm_beam.inputs import DataFiles, Reading, is_seqio, place_of, read_examples
from calm_beam.inputs.examples import DataError, no_vocabulary_for
from calm_beam.inputs.preview import DataPreview, preview_data
from calm_beam.inputs.prompts import NO_TEMPLATE_FOR_TURNS
from calm_beam.inputs.set_parts import Split
from calm_beam.inputs.vocabularies.chat_templates import check_turns, chosen_chat
from calm_beam.inputs.vocabularies.vocabulary import EOS_ID, Vocabulary, open_vocabulary
from calm_beam.manifest import Calibration, ChatRecord, EngineRecord, Manifest, ModelRecord, Variant
from calm_beam.manifest.versions import decoding_versions
from calm_beam.metrics.registry import check_may_run, check_source, get_metric, metric_source_digest
from calm_beam.model import ModelConfig, architecture_of
from calm_beam.model.registry import default_input_length
from calm_beam.serving.agreement import (
    agreed_settings,
    check_exact,
    other_engine_in_words,
    recorded_vocabulary,
    served_engine,
)
from calm_beam.serving.watched import check_exits, check_watchable
from calm_beam.storage import absolute
from calm_beam.text import counted

from .job import AnswerJob, DecodeJob, Probe
from .request import BATCH, AnswerAssignment, AnswerRequest, SweepAssignment, SweepRequest, WorkerSettings
from .sharding import default_shards, prompt_shards

_WITHOUT_VOCABULARY = "but what was calibrated are token ids without a vocabulary. Take data that has"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """A sweep whose model, vocabulary, settings and first examples have passed the checks.

    Attributes:
      request: The request; its settings are those that are decoded.
      data: The files, and how they are read.
      checkpoint: The model.
      vocabulary: Its vocabulary, which turns outputs into text; None if the data are token ids and there is none.
      vocabulary_path: Path of the vocabulary.
      model_fingerprint: Fingerprint of the weights.
      memory: A sentence on the memory that the model takes and leaves.
    """

    request: SweepRequest
    data: DataFiles
    checkpoint: Checkpoint
    vocabulary: Vocabulary | None
    vocabulary_path: str | None
    model_fingerprint: str
    memory: str

    @property
    def settings(self) -> DecodeSettings:
        """The decode settings, which determine the outputs."""
        return self.request.settings

    @property
    def paths(self) -> tuple[str, ...]:
        """Data files, sorted."""
        return self.data.files

    @property
    def reading(self) -> Reading:
        """How the data files are read."""
        return self.data.reading

    @property
    def num_shards(self) -> int:
        """Number of shards that examples are divided into."""
        assert self.request.num_shards is not None, "it was found when the sweep was prepared"
        return self.request.num_shards

    def job(self) -> DecodeJob:
        """Returns the job, which identifies the generations of the sweep."""
        vocabulary = self.vocabulary
        return DecodeJob(
            model=ModelRecord(
                uri=self.checkpoint.uri,
                fingerprint=self.model_fingerprint,
                layers=self.checkpoint.config.num_decoder_layers,
            ),
            vocabulary=vocabulary.record() if vocabulary else None,
            settings=self.settings,
            on_long=self.request.on_long,
            cluster_key=self.reading.cluster_key,
            group_key=self.reading.group_key,
            patterns=self.data.patterns,
            files=self.data.files,
            reading=self.reading.choices(),
            num_shards=self.num_shards,
            order=self.request.order,
            part=self.request.part,
            end_ids=self.checkpoint.config.end_ids,
            decoder=self.request.decoder,
            exit_head=self.request.exit_head if self.request.decoder == BATCH else None,
            software=decoding_versions(),
        )

    def without_weights(self) -> Self:
        """Returns the sweep without its model's weights, which a process that only waits for workers need not hold."""
        return dataclasses.replace(self, checkpoint=dataclasses.replace(self.checkpoint, arrays={}))

    def with_upper_part(self, thresholds: int) -> Self:
        """Returns the sweep over the first thresholds of its grid only."""
        settings = dataclasses.replace(self.settings, thresholds=self.settings.thresholds[:thresholds])
        return dataclasses.replace(self, request=dataclasses.replace(self.request, settings=settings))

    def of_variant(self, variant: Variant) -> Self:
        """Returns the sweep with the exit rule of a variant.

        Raises:
          ValueError: If the schedule or the model does not allow it.
        """
        settings, config = settings_of_variant(self.settings, variant), self.checkpoint.config
        settings.rule.check_model(config.num_decoder_layers, has_classifier=bool(config.exit_classifier))
        return dataclasses.replace(self, request=dataclasses.replace(self.request, settings=settings))

    def check_branches(self, num_branches: int, *, runs_here: bool) -> None:
        """Refuses a number of branches for which there is no room.

        Args:
          num_branches: Number of branches: all thresholds of all variants that share a sweep, each with the full model.
          runs_here: Whether this machine decodes.

        Raises:
          ValueError: If there is no room; says which flag to change.
        """
        settings = self.settings
        checked_least_tokens(
            self.request.max_cache_tokens,
            num_branches=num_branches,
            steps=settings.max_decode_length,
            source=settings.max_input_length,
        )
        check_fits(self.request, settings, self.checkpoint.config, num_branches=num_branches, runs_here=runs_here)

    def that_confirms(self, thresholds: Sequence[float], *, variant: Variant | None, part: Split) -> Self:
        """Returns the sweep over the holdout by the serving decoder, at the thresholds that selection has chosen.

        Args:
          thresholds: The chosen thresholds, descending.
          variant: The variant that they were chosen for; None if there is only one.
          part: The holdout examples.
        """
        settings = self.settings if variant is None else settings_of_variant(self.settings, variant)
        request = dataclasses.replace(
            self.request,
            settings=dataclasses.replace(settings, thresholds=tuple(thresholds)),
            num_shards=math.ceil(self.num_shards * part.confirm_share),
            order=None,
            round_examples=None,
            part=part,
            decoder=BATCH,
        )
        return dataclasses.replace(self, request=request)

    def assignment(self, directory: str) -> SweepAssignment:
        """Returns the workers' assignment to decode into a folder."""
        request, config = self.request, self.checkpoint.config
        return SweepAssignment(
            directory=directory,
            job=self.job(),
            vocabulary_path=self.vocabulary_path,
            declared=stored_architecture(config).declared(config),
            **request.told_to_workers(),
        )


def prepare_sweep(
    request: SweepRequest,
    data: DataFiles,
    *,
    finds_vocabulary: bool = True,
    runs_here: bool = True,
    compares_texts: bool = True,
) -> PreparedSweep:
    """Returns a sweep whose model, vocabulary, settings and first examples have been checked.

    Args:
      request: The request.
      data: The files, and how they are read.
      finds_vocabulary: Whether to use a vocabulary in or next to the checkpoint if the request names none. False if the
        calibration had none.
      runs_here: Whether this machine decodes, so that the model must fit into its memory.
      compares_texts: Whether output texts are compared with others, so that they must not contain the end token.

    Raises:
      ValueError: If anything is wrong (`CheckpointError`, `VocabularyError`, `DataError`, `UsageError` among others).
      OSError: If a file cannot be read.
    """
    check_head(request.exit_head, request.settings.precision)
    machine = Machine.here() if runs_here else None
    preview = preview_data(data.files, data.reading)
    checkpoint = load_checkpoint(
        request.model,
        declared=Declared(activation=request.activation, relative_max_distance=request.relative_max_distance),
    )
    if request.shortens_prompts:
        request = _with_room(request, checkpoint.config)
    _check_token_budget(request)
    _check_exits(request, checkpoint)
    path = request.vocabulary or (checkpoint.vocabulary_uri if finds_vocabulary else None)
    if path is None:
        _check_needs_no_vocabulary(
            preview, checkpoint, finds_vocabulary=finds_vocabulary, compares_texts=compares_texts
        )
    vocabulary = None
    stop_strings = checkpoint.generation.stop_strings if request.stop_strings is None else request.stop_strings
    if path is not None:
        vocabulary = open_vocabulary(
            path, extra_ids=request.extra_ids, chat=_chat(request, path, preview), stop_strings=stop_strings
        )
        if preview.several_turns is not None:
            if vocabulary.chat is None:
                raise UsageError(f"{preview.several_turns}: {NO_TEMPLATE_FOR_TURNS}")
            check_turns(vocabulary.chat)
    elif stop_strings:
        raise UsageError(
            f"stop strings {', '.join(map(repr, stop_strings))} end outputs by their text, and there is no vocabulary: "
            "pass --vocabulary, or --stop_strings='[]' to go without."
        )
    _check_model(request, checkpoint.config)
    request = _swept_by_engine(request, checkpoint.config, machine)
    memory = check_fits(
        request,
        request.settings,
        checkpoint.config,
        num_branches=1 + len(request.settings.thresholds),
        runs_here=runs_here,
    )
    head = checkpoint.config.vocab_size
    if vocabulary is not None and vocabulary.size > head:
        raise UsageError(
            f"vocabulary {path} has {vocabulary.size} ids, the model's output head {head}: they do not belong together."
        )
    # Workers check the rows that are not previewed.
    reading = dataclasses.replace(data.reading, has_vocabulary=vocabulary is not None)
    if request.num_shards is None:
        request = dataclasses.replace(request, num_shards=default_shards(data, round_examples=request.round_examples))
    return PreparedSweep(
        request=request,
        data=dataclasses.replace(data, reading=reading),
        checkpoint=checkpoint,
        vocabulary=vocabulary,
        vocabulary_path=absolute(path) if path else None,
        model_fingerprint=checkpoint.fingerprint(),
        memory=memory,
    )


def _swept_by_engine(request: SweepRequest, config: ModelConfig, machine: Machine | None) -> SweepRequest:
    """Returns a request whose settings name the engine that decodes; `machine` is the argument of `chosen_engine`."""
    settings = request.settings
    given: dict[str, Any] = {
        "config": config,
        "rule": settings.rule,
        "precision": settings.precision,
        "machine": machine,
        "model_parallelism": request.model_parallelism,
    }
    # The settings of a manifest name the calibrated engine.
    asked = asked_like(settings.engine, engine=request.engine, exit_head=request.exit_head, **given)
    engine = chosen_engine(**asked, **given)
    if machine is None:
        # Workers may lack native code, and all must use the same engine.
        asked["engine"] = engine.name
    return dataclasses.replace(request, **asked, settings=dataclasses.replace(settings, engine=engine))


def _with_room(request: SweepRequest, config: ModelConfig) -> SweepRequest:
    """Returns the request with prompts no longer than the model has room for."""
    settings = request.settings
    room = default_input_length(config, steps=settings.max_decode_length)
    length = min(settings.max_input_length, room)
    return dataclasses.replace(request, settings=dataclasses.replace(settings, max_input_length=length))


def _check_token_budget(request: SweepRequest) -> None:
    settings = request.settings
    checked_least_tokens(
        request.max_cache_tokens,
        num_branches=1 + len(settings.thresholds),
        steps=settings.max_decode_length,
        source=settings.max_input_length,
    )


def _check_exits(request: SweepRequest, checkpoint: Checkpoint) -> None:
    rule = request.settings.rule
    rule.exit_layers(checkpoint.config.num_decoder_layers)
    if rule.measure().needs is Need.CLASSIFIER and not checkpoint.config.exit_classifier:
        raise UsageError(
            f"--confidence={rule.confidence} needs decoder/meta_cls in the checkpoint; {request.model} has none."
        )
    if is_own(rule.confidence):
        config = checkpoint.config
        check_traces(rule.confidence, rule.measure(), width=config.emb_dim, vocab_size=config.vocab_size)


def _chat(request: SweepRequest, vocabulary_path: str, preview: DataPreview) -> ChatRecord | None:
    """Returns how prompts become chats, from the request or a manifest; None if they do not."""
    if request.recorded_chat is not None:
        return request.recorded_chat
    return chosen_chat(
        request.chat_template,
        tokenizer=vocabulary_path,
        system=request.system,
        has_texts=preview.text_prompt is not None,
    )


def _check_needs_no_vocabulary(
    preview: DataPreview, checkpoint: Checkpoint, *, finds_vocabulary: bool, compares_texts: bool
) -> None:
    ends = checkpoint.config.end_ids
    if compares_texts and ends != (EOS_ID,):
        raise UsageError(
            f"no tokenizer.json in or next to {checkpoint.uri}: pass --vocabulary. This model ends its outputs with "
            f"{counted(len(ends), 'id')} of its own ({', '.join(map(str, ends))}), which only its tokenizer keeps out "
            "of the texts that are compared."
        )
    if preview.text_prompt:
        if not finds_vocabulary:
            raise UsageError(f"{preview.text_prompt}: its prompt is text, {_WITHOUT_VOCABULARY} input_ids.")
        raise UsageError(
            f"no vocabulary in or next to {checkpoint.uri}: pass --vocabulary, or data that has input_ids."
        )
    if preview.text_reference:
        if not finds_vocabulary:
            raise UsageError(
                f"{preview.text_reference}: its references are texts, {_WITHOUT_VOCABULARY} reference_ids."
            )
        raise UsageError(no_vocabulary_for(f"{preview.text_reference}: its"))


def _check_model(request: SweepRequest, config: ModelConfig) -> None:
    settings, architecture = request.settings, architecture_of(config)
    architecture.check_positions(config, source=settings.max_input_length, steps=settings.max_decode_length)


def check_fits(
    request: WorkerSettings, settings: DecodeSettings, config: ModelConfig, *, num_branches: int, runs_here: bool
) -> str:
    """Refuses a model that cannot fit into this machine's memory if it decodes, and returns a sentence on memory use.

    Args:
      request: How workers decode.
      settings: The decode settings, which name the engine.
      config: The model.
      num_branches: Branches of a prompt.
      runs_here: Whether this machine decodes.

    Raises:
      ValueError: If it does not fit; says which flag to lower.
    """
    assert settings.engine is not None, "it was chosen before"
    demand = Demand(
        num_branches=num_branches,
        steps=settings.max_decode_length,
        source=settings.max_input_length,
        max_cache_tokens=request.max_cache_tokens,
        exit_head=settings.engine.head,
        engine=settings.engine.name,
        precision=settings.precision,
    )
    if runs_here:
        check_memory(config, demand, copies=request.model_copies)
    return memory_in_words(config, demand, model_parallelism=request.model_parallelism, runs_here=runs_here)


# Per file; workers check the rest.
_PREVIEWED_PROMPTS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedAnswers:
    """A run of answers whose manifest, model, vocabulary and first prompts have passed the checks.

    Attributes:
      request: The request.
      data: The files, and how they are read.
      entry: The manifest's entry that answers prompts without a group.
      job: The job, which identifies the answers.
      declared: Facts about the model that its arrays do not show.
      vocabulary_path: Path of the vocabulary, if it was named.
      assumed: Sentences about assumptions on the model.
      num_layers: Number of the model's decoder layers.
      memory: A sentence on the memory that the model takes and leaves.
      other_engine: A sentence on what still holds if another engine serves than was calibrated; else empty.
    """

    request: AnswerRequest
    data: DataFiles
    entry: Calibration
    job: AnswerJob
    declared: Declared
    vocabulary_path: str | None
    assumed: tuple[str, ...]
    num_layers: int
    memory: str
    other_engine: str

    def assignment(self, directory: str) -> AnswerAssignment:
        """Returns the workers' assignment to answer into a folder."""
        request = self.request
        return AnswerAssignment(
            directory=directory,
            job=self.job,
            manifest=request.manifest,
            declared=self.declared,
            vocabulary_path=self.vocabulary_path,
            reading=self.data.reading,
            choice=request.choice,
            metric_settings=request.metric_settings,
            **request.told_to_workers(),
        )


def prepare_answers(request: AnswerRequest, data: DataFiles, *, runs_here: bool = True) -> PreparedAnswers:
    """Returns a run whose manifest, model, vocabulary and first prompts have been checked.

    Args:
      request: The request.
      data: The files, and how they are read.
      runs_here: Whether this machine decodes, so that the model must fit into its memory.

    Raises:
      ManifestError: If no entry of the manifest matches or several do, or model or vocabulary are not those that
        were calibrated.
      ValueError: If anything else is wrong (`CheckpointError`, `VocabularyError`, `DataError`, `MetricError`, ...).
      OSError: If a file cannot be read.
    """
    manifest = request.manifest
    entry = manifest.calibration(request.choice)
    probe = _checked_probe(request, entry)
    if probe is not None and entry.consistency == "risk":
        data = dataclasses.replace(data, reading=dataclasses.replace(data.reading, needs_references=True))
    _check_prompts(data, manifest)
    checkpoint = load_checkpoint(
        request.model or manifest.model.uri,
        declared=Declared(activation=request.activation, relative_max_distance=request.relative_max_distance),
    )
    vocabulary = recorded_vocabulary(manifest.vocabulary, checkpoint, path=request.vocabulary)
    settings = agreed_settings(
        manifest, entry, checkpoint=checkpoint, vocabulary=vocabulary, confidence=request.choice.confidence
    )
    request, engine = _answered_by_engine(request, settings, checkpoint, runs_here=runs_here)
    config = checkpoint.config
    of_engine = dataclasses.replace(settings, engine=engine)
    memory = check_fits(request, of_engine, config, num_branches=1, runs_here=runs_here)
    return PreparedAnswers(
        request=request,
        data=data,
        entry=entry,
        job=AnswerJob(
            manifest=manifest.digest,
            calibration=manifest.calibrations.index(entry),
            model=dataclasses.replace(manifest.model, uri=checkpoint.uri),
            vocabulary=manifest.vocabulary,
            output_format=request.output_format,
            patterns=data.patterns,
            files=data.files,
            reading=data.reading.choices(),
            group_key=data.reading.group_key,
            num_shards=prompt_shards(data) if request.num_shards is None else request.num_shards,
            probe=probe,
            software=decoding_versions(),
            engine=engine,
        ),
        declared=stored_architecture(config).declared(config),
        vocabulary_path=absolute(request.vocabulary) if request.vocabulary else None,
        assumed=tuple(checkpoint.assumed),
        num_layers=config.num_decoder_layers,
        memory=memory,
        other_engine=other_engine_in_words(manifest, entry, served=engine),
    )


def _checked_probe(request: AnswerRequest, entry: Calibration) -> Probe | None:
    if request.probe_share is None:
        if request.probe_salt is not None:
            raise UsageError("probe_salt belongs to probe_share, which is missing.")
        return None
    check_watchable(request.manifest)
    # A group of the prompts may have a risk although the whole set has none.
    if all(each.threshold is None for each in request.manifest.of_same_promise(entry)):
        check_exits(entry)
    # Checked now, and not when the first loss is measured.
    named = request.choice.metric
    check_may_run(entry.metric, named=() if named is None else (named,), how="name it with --metric")
    check_source(entry.metric, request.manifest.software)
    get_metric(entry.metric, request.metric_settings)
    return Probe(
        share=request.probe_share,
        salt=request.probe_salt or request.manifest.digest,
        # Losses of two metrics cannot be monitored as one stream.
        metric_source=metric_source_digest(entry.metric) if ":" in entry.metric else None,
    )


def _check_prompts(data: DataFiles, manifest: Manifest) -> None:
    """Refuses files whose first rows are not prompts, or not of the kind that this manifest is about."""
    for path in data.files:
        first = list(itertools.islice(read_examples(path, data.reading), _PREVIEWED_PROMPTS))
        if not first and not is_seqio(path):
            raise DataError(f"{path}: holds no prompts.")
        text = next((example for example in first if example.input is not None), None)
        if text is not None and manifest.vocabulary is None:
            place = place_of(path, text.line, reading=data.reading)
            raise DataError(f"{place}: is text, but the manifest is about prompts of token ids.")


def _answered_by_engine(
    request: AnswerRequest, settings: DecodeSettings, checkpoint: Checkpoint, *, runs_here: bool
) -> tuple[AnswerRequest, EngineRecord]:
    """Returns a request for one engine, and that engine."""
    served = served_engine(
        request.manifest,
        settings,
        config=checkpoint.config,
        engine=request.engine,
        exit_head=request.exit_head,
        machine=Machine.here() if runs_here else None,
        model_parallelism=request.model_parallelism,
    )
    if request.exact_engine:
        check_exact(served.batch, served.calibrated)
    # Remote workers may be other machines, and all must use the same engine.
    asked = served.asked if runs_here else {**served.asked, "engine": served.batch.name}
    return dataclasses.replace(request, **asked), served.batch
