"""Checking all that can be checked of a run of answers before a worker starts."""

import dataclasses
import itertools

from calm_beam.checkpoints import Checkpoint, Declared, load_checkpoint, stored_architecture
from calm_beam.decoding.engine_choice import Machine
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.inputs import DataFiles, is_seqio, place_of, read_examples
from calm_beam.inputs.examples import DataError
from calm_beam.manifest import Calibration, EngineRecord, Manifest
from calm_beam.manifest.versions import decoding_versions
from calm_beam.metrics.registry import check_may_run, check_source, get_metric, metric_source_digest
from calm_beam.serving.agreement import agreed_settings, recorded_vocabulary
from calm_beam.serving.engine import check_exact, other_engine_in_words, served_engine
from calm_beam.serving.loss_meter import check_exits, check_watchable
from calm_beam.storage import absolute

from .assignment import AnswerAssignment
from .job import AnswerJob, Probe
from .prepared import check_fits
from .request import AnswerRequest
from .shard_count import prompt_shards

# In every file; the rest is checked by the workers.
_PREVIEWED_PROMPTS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedAnswers:
    """A run whose manifest, model, vocabulary and first prompts have been found good.

    Attributes:
      request: What was asked for.
      data: The files, and how they are read.
      entry: The manifest's entry that answers prompts of no group.
      job: What is answered, by what, in which form.
      declared: What was found of the model that its arrays do not show.
      vocabulary_path: Where the vocabulary lies, if it was named.
      assumed: Sentences about what was assumed of the model.
      num_layers: Of the model's decoder.
      memory: A sentence on what the model takes, and the room that it leaves.
      other_engine: What is left of the promise where another engine serves than was calibrated; else nothing.
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
        """Returns what workers are told to answer into a folder."""
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
      request: What is asked for.
      data: The files, and how they are read.
      runs_here: Whether it is this machine that decodes, so that its memory has to do.

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
    request, engine = _with_engine(request, settings, checkpoint, runs_here=runs_here)
    config = checkpoint.config
    of_engine = dataclasses.replace(settings, engine=engine)
    memory = check_fits(request, of_engine, config, lanes=1, runs_here=runs_here)
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
    # Of the prompts' groups, some may have a risk where the whole has none.
    if all(each.threshold is None for each in request.manifest.of_same_promise(entry)):
        check_exits(entry)
    # Now, and not when the first loss is measured.
    named = request.choice.metric
    check_may_run(entry.metric, named=() if named is None else (named,), how="name it with --metric")
    check_source(entry.metric, request.manifest.software)
    get_metric(entry.metric, request.metric_settings)
    return Probe(
        share=request.probe_share,
        salt=request.probe_salt or request.manifest.digest,
        # Losses of two metrics are no stream that could be watched.
        metric_source=metric_source_digest(entry.metric) if ":" in entry.metric else None,
    )


def _check_prompts(data: DataFiles, manifest: Manifest) -> None:
    """Refuses files whose first rows are no prompts, or none that this manifest is about."""
    for path in data.files:
        first = list(itertools.islice(read_examples(path, data.reading), _PREVIEWED_PROMPTS))
        if not first and not is_seqio(path):
            raise DataError(f"{path}: holds no prompts.")
        text = next((example for example in first if example.input is not None), None)
        if text is not None and manifest.vocabulary is None:
            place = place_of(path, text.line, reading=data.reading)
            raise DataError(f"{place}: is text, but the manifest is about prompts of token ids.")


def _with_engine(
    request: AnswerRequest, settings: DecodeSettings, checkpoint: Checkpoint, *, runs_here: bool
) -> tuple[AnswerRequest, EngineRecord]:
    """Returns a request that asks workers for one engine, and that engine."""
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
    # Workers elsewhere may have another machine, and all have to do the same.
    asked = served.asked if runs_here else {**served.asked, "engine": served.batch.name}
    return dataclasses.replace(request, **asked), served.batch
