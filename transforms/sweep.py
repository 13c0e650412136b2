"""Decoding a calibration set at every threshold, into a folder that a later run can go on with."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import apache_beam as beam

from calm_beam.arithmetic import Arithmetic
from calm_beam.calibration.groups import groups_of_data, groups_of_stored
from calm_beam.calibration.publish import EarlierResult, withdraw
from calm_beam.decoding.settings import DecodeSettings, descending_grid, uniform_grid
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs.files import digest_of_files
from calm_beam.inputs.preview import count_examples
from calm_beam.inputs.set_parts import SetPart
from calm_beam.manifest import GroupRecord, Plan
from calm_beam.manifest.plan_list import AskedPlan, PlanList, home_of
from calm_beam.model.input_length import USUAL_INPUT_LENGTH
from calm_beam.options.option import shared
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
    """

    job: DecodeJob
    folder: str
    on_error: str
    plans: PlanList

    def asked_plan(self, plan: Plan) -> AskedPlan:
        """Returns a plan as it is asked of the outputs, to be listed."""
        ...

    def groups(self) -> tuple[GroupRecord, ...]:
        """Returns the groups of the examples, which were read with a key of groups."""
        ...

    def examples(self, *, at_most: int) -> int | None:
        """Returns how many examples there are; None if they are more than that many."""
        ...


@dataclasses.dataclass
class Sweep(beam.PTransform):
    """Decodes the examples of `ReadExamples` at every threshold and by the full model, and stores all outputs.

        pipeline | ReadExamples("data/*.jsonl.gz") | Sweep(model="model", thresholds=grid(0.05), output="calibration")

    Model, vocabulary and the first examples are checked, and the folder is made, when the pipeline is put together.

    Attributes:
      model: Folder of the model.
      output: Output directory, in which `generations/` is made.
      exits: How tokens exit.
      thresholds: The grid; it is tested from the top.
      vocabulary: Path of the SentencePiece model; None looks in and beside the model.
      extra_ids: Sentinels to add to it; None takes as many as tokenizer files beside it name.
      chat_template: `model` for the chat template beside the tokenizer, or the path of one, which makes prompts of
        inputs; `none` takes them as they are. Needed where there is a template.
      system: What every chat begins with; None if it begins with the input.
      task_prefix: Put before every input.
      max_input_length: In tokens, eos included; None for 512, or what the model has room for beside an output.
      max_decode_length: In tokens, eos included.
      dtype: `float32`, or `bfloat16` for weights, states, keys and values.
      matmul_precision: `highest`, `high` or `default`: of products of float32 numbers on GPUs and TPUs.
      on_long: `truncate` or `error`, for longer inputs.
      on_error: `fail`, or `worst_case`, which counts prompts that cannot be decoded with loss 1.
      max_failures: Most examples that may fail; None for few.
      batch_size: Most prompts decoded together; None goes by the memory that is free.
      token_budget: Most positions held at a time; None likewise.
      model_parallelism: Devices of a worker that share one model, each with a part of it; copies are on the others.
      exit_head: One of `EXIT_HEADS`: the form of the output head that decides. It moves outputs at near ties alone.
      engine: What decodes: `native`, `xla`, or `auto` for native code where this machine has it and decodes, else XLA.
        It is recorded, and outputs of two are never mixed.
      resume: Whether to go on with what an unfinished run has left there.
      overwrite: Whether to take away what is there.
      runs_here: Whether this machine decodes, so that its memory has to do.
      progress: Where to report.
    """

    _: dataclasses.KW_ONLY
    model: str
    output: str
    exits: ExitRule = dataclasses.field(default_factory=ExitRule)
    thresholds: Sequence[float] = dataclasses.field(default_factory=lambda: uniform_grid(0.05))
    vocabulary: str | None = None
    extra_ids: int | None = None
    chat_template: str | None = None
    system: str | None = None
    task_prefix: str = ""
    max_input_length: int | None = None
    max_decode_length: int = 64
    dtype: str = "float32"
    matmul_precision: str = "highest"
    on_long: str = "truncate"
    on_error: str = "fail"
    max_failures: int | None = None
    batch_size: int | None = None
    token_budget: int | None = None
    model_parallelism: int = 1
    exit_head: str = "auto"
    engine: str = "auto"
    resume: bool = False
    overwrite: bool = False
    runs_here: bool = True
    progress: ProgressLog = NOWHERE

    # Beam has no type hints for tuples of PCollections, and would say so at every run.
    @beam.typehints.decorators.no_annotations
    def expand(self, examples: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """Returns a PCollection of one `FinishedSweep`, given `ExamplesRead`."""
        # Here, since it needs JAX, which calibrating stored generations does not.
        from calm_beam.outputs.prepared import prepare_sweep

        source = maker_of(ExamplesRead(*examples).shards, ReadExamples)
        if source is None:
            raise UsageError("Sweep takes what ReadExamples gives.")
        prepared = prepare_sweep(
            self._request(source.shard_count(), source.part), source.files(), runs_here=self.runs_here
        ).without_weights()
        output = absolute(self.output)
        earlier = EarlierResult.found_in(output)
        if earlier.manifest and not self.overwrite:
            raise UsageError(f"output {output}: holds a manifest already. Choose another, or pass overwrite=True.")
        self.prepared = prepared
        self.job, self._data = prepared.job(), prepared.data
        make_folder(output)
        # Before an earlier result is taken away, which shows what was asked for it.
        self.plans = PlanList(output)
        self.folder = SweepHome(output).begin(
            [self.job],
            resume=self.resume,
            overwrite=self.overwrite,
            tell=lambda _: None,
            withdraw=functools.partial(withdraw, output, earlier),
        )
        return examples | DecodeExamples([prepared.assignment(self.folder)], self.progress)

    def asked_plan(self, plan: Plan) -> AskedPlan:
        """Returns a plan as it is asked of the data files, for which it reads them."""
        return AskedPlan.of(plan, data=digest_of_files(self.job.files), command="Calibrate", decodes=True)

    def groups(self) -> tuple[GroupRecord, ...]:
        """Returns the groups of the examples, for which it reads them."""
        return groups_of_data(self._data)

    def examples(self, *, at_most: int) -> int | None:
        """Returns how many examples there are, for which it reads them; None if they are more than that many."""
        return count_examples(self._data, at_most=at_most)

    def _request(self, num_shards: int, part: SetPart | None) -> SweepRequest:
        settings = DecodeSettings(
            rule=self.exits.with_source(),
            thresholds=descending_grid(self.thresholds),
            max_input_length=self.max_input_length or USUAL_INPUT_LENGTH,
            max_decode_length=self.max_decode_length,
            task_prefix=self.task_prefix,
            arithmetic=Arithmetic(dtype=self.dtype, matmul_precision=self.matmul_precision),
        )
        own = {
            "model": str(self.model),
            "settings": settings,
            "shortens_prompts": self.max_input_length is None,
            "num_shards": num_shards,
            "part": part,
        }
        return SweepRequest(**{**shared(self, SweepRequest), **own})


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

    def __post_init__(self) -> None:
        self.folder = SweepHome(absolute(self.directory)).only_folder()
        self.job = DecodeJob.read(self.folder)
        check_may_choose(self.folder, self.job)
        self.plans = PlanList(home_of(self.folder))

    def asked_plan(self, plan: Plan) -> AskedPlan:
        """Returns a plan as it is asked of the data that the generations were made of."""
        data = self.plans.data_of_outputs() or FinishedSweep.read(self.folder, self.job).digest()
        return AskedPlan.of(plan, data=data, command="Calibrate of ReadGenerations")

    def groups(self) -> tuple[GroupRecord, ...]:
        """Returns the groups of the examples, as they are stored."""
        stored = StoredGenerations(directory=self.folder, job=self.job)
        return groups_of_stored(stored, FinishedSweep.read(self.folder, self.job))

    def examples(self, *, at_most: int) -> int | None:
        """Returns how many examples are stored; None if they are more than that many."""
        stored = FinishedSweep.read(self.folder, self.job).examples
        return stored if stored <= at_most else None

    def expand(self, pipeline: beam.Pipeline) -> beam.PCollection:
        """Returns a PCollection of one `FinishedSweep`."""
        finished = FinishedSweep.read(self.folder, self.job)
        if finished.failed and self.on_error == "fail":
            raise UsageError(
                f"{finished.failed} of the examples in {self.folder} could not be decoded. Pass "
                "on_error='worst_case' to count them with loss 1 at every threshold."
            )
        return pipeline | "TakeGenerations" >> beam.Create([finished])
