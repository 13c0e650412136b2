"""Decoding a calibration set at every threshold, into a folder that a later run can go on with."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Protocol

import apache_beam as beam

from calm_beam.calibration.asked_data import AskedData, DecodedExamples, FilesToDecode
from calm_beam.calibration.publish import EarlierResult, withdraw
from calm_beam.decoding.settings import DecodeSettings
from calm_beam.errors import UsageError
from calm_beam.exits.grid import descending_grid, uniform_grid
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.set_parts import Split
from calm_beam.manifest.plan_list import PlanList, home_of
from calm_beam.options import again, listed, option, switch
from calm_beam.options.call import documented, naming_arguments
from calm_beam.options.groups import (
    GRID_STEP,
    Chat,
    Copies,
    Decoding,
    ExitGrid,
    FactsOfAny,
    Failures,
    ModelSource,
    OutputSettings,
    Replacing,
)
from calm_beam.outputs import DecodeJob, FinishedSweep, StoredGenerations
from calm_beam.outputs.folder import SweepHome, check_may_choose
from calm_beam.outputs.request import SweepRequest
from calm_beam.storage import absolute, make_folder

from .decode import DecodeExamples
from .examples import ExamplesRead, ReadExamples
from .progress import NOWHERE, ProgressLog
from .upstream import maker_of


class Swept(Protocol):
    """A transform that yields one `FinishedSweep`, and knows of what.

    Attributes:
      job: What the generations are.
      folder: Where they are.
      on_error: What becomes of prompts that cannot be decoded.
      plans: Those that were asked of the outputs before.
      data: What plans are asked of.
      command: What asks.
    """

    job: DecodeJob
    folder: str
    on_error: str
    plans: PlanList
    data: AskedData
    command: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepOptions(FactsOfAny, Chat, OutputSettings, Decoding, Failures, Copies, Replacing):
    """What a sweep of `ReadExamples` is asked for."""

    model: str | os.PathLike[str] = option(dataclasses.MISSING, "folder of the model")
    output: str | os.PathLike[str] = option(dataclasses.MISSING, "output directory, in which generations/ is made")
    vocabulary: str | None = again(ModelSource, "vocabulary", belongs_to=())
    extra_ids: int | None = again(ModelSource, "extra_ids", belongs_to=())
    chat_template: str | None = again(Chat, "chat_template", belongs_to=())
    thresholds: float | Sequence[float] = again(
        ExitGrid, "thresholds", default=uniform_grid(GRID_STEP), sentence="the grid, tested from the top"
    )
    resume: bool = switch("go on with what an unfinished run has left there")
    exits: ExitRule = dataclasses.field(default_factory=ExitRule)
    runs_here: bool = True
    progress: ProgressLog = NOWHERE


@documented
class Sweep(SweepOptions, beam.PTransform):
    """Decodes the examples of `ReadExamples` at every threshold and by the full model, and stores all outputs.

        pipeline | ReadExamples("data/*.jsonl.gz") | Sweep(model="model", thresholds=grid(0.05), output="calibration")

    Model, vocabulary and the first examples are checked, and the folder is made, when the pipeline is put together.

    Attributes:
      exits: How tokens exit.
      runs_here: Whether this machine decodes, so that its memory has to do.
      progress: Where to report.
    """

    command = "Calibrate"

    def __post_init__(self) -> None:
        with naming_arguments(SweepOptions):
            super().__post_init__()

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, examples: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `FinishedSweep`, given `ExamplesRead`."""
        # Here, since it needs JAX, which calibrating stored generations does not.
        from calm_beam.outputs.prepared import prepare_sweep

        source = maker_of(ExamplesRead(*examples).shards, ReadExamples)
        if source is None:
            raise UsageError("Sweep takes what ReadExamples gives.")
        with naming_arguments(SweepOptions):
            prepared = prepare_sweep(
                self._request(source.shard_count(), source.part), source.files(), runs_here=self.runs_here
            ).without_weights()
            output = absolute(os.fspath(self.output))
            earlier = EarlierResult.found_in(output)
            earlier.check_may_go(output, overwrite=self.overwrite)
        self.prepared = prepared
        self.job: DecodeJob = prepared.job()
        self.data: AskedData = FilesToDecode(prepared.data)
        make_folder(output)
        # Before an earlier result is taken away, which shows what was asked for it.
        self.plans = PlanList(output)
        self.folder: str = SweepHome(output).begin(
            [self.job],
            resume=self.resume,
            overwrite=self.overwrite,
            tell=lambda _: None,
            withdraw=functools.partial(withdraw, output, earlier),
        )
        return examples | DecodeExamples([prepared.assignment(self.folder)], self.progress)

    def _request(self, num_shards: int, part: Split | None) -> SweepRequest:
        thresholds = descending_grid(listed(self.thresholds))
        settings = DecodeSettings.of(self, self.exits.with_source(), thresholds=thresholds)
        return SweepRequest.asked_by(self, settings, model=self.model, num_shards=num_shards, part=part)


@dataclasses.dataclass
class ReadGenerations(beam.PTransform):
    """Takes what an earlier `Sweep` has stored.

        pipeline | ReadGenerations("sweep") | Calibrate([Guarantee("textual", "token_f1", delta=0.05)])

    Every plan that `Calibrate` asks of it is listed beside it. Only the first is sure to have been settled before its
    losses were seen.

    Attributes:
      directory: Its output directory, or a folder below `generations/` in it.
      on_error: `worst_case` if prompts that could not be decoded are to count with loss 1.
    """

    directory: str
    _: dataclasses.KW_ONLY
    on_error: str = "fail"

    command = "Calibrate of ReadGenerations"

    def __post_init__(self) -> None:
        self.folder = SweepHome(absolute(self.directory)).only_folder()
        self.job = DecodeJob.read(self.folder)
        check_may_choose(self.folder, self.job)
        self.plans = PlanList(home_of(self.folder))

    @property
    def data(self) -> DecodedExamples:
        """What plans are asked of."""
        stored = StoredGenerations(directory=self.folder, job=self.job)
        return DecodedExamples(stored, FinishedSweep.read(self.folder, self.job))

    def expand(self, pipeline: beam.Pipeline) -> beam.PCollection:
        """Returns a PCollection of one `FinishedSweep`."""
        examples = self.data
        with naming_arguments(Failures):
            examples.check_failed(self.on_error)
        return pipeline | "TakeGenerations" >> beam.Create([examples.finished])
