"""The main job as one function."""

import itertools
import os
from collections.abc import Sequence

from apache_beam.options.pipeline_options import PipelineOptions

from calm_beam.calibration.guarantee import Guarantee
from calm_beam.calibration.publish import EarlierResult
from calm_beam.decoding.settings import uniform_grid
from calm_beam.demo import embedded
from calm_beam.errors import UsageError
from calm_beam.exits.rule import ExitRule
from calm_beam.inputs import DataFiles, Reading
from calm_beam.inputs.set_parts import CALIBRATING, SetPart, salt_of
from calm_beam.launch.flags.metrics import checked_metrics
from calm_beam.launch.runners import Workers, is_local, run_pipeline
from calm_beam.manifest import MANIFEST, Manifest, read_manifest
from calm_beam.metrics.registry import DEFAULT_METRIC
from calm_beam.metrics.settings import NO_SETTINGS, MetricSettings
from calm_beam.outputs.folder import SweepHome
from calm_beam.storage import joined
from calm_beam.transforms import Calibrate, ReadExamples, Sweep, WriteManifest

from .confirm import check_parts_of_data, confirm, refuse_left_confirmation, remove_left
from .run import UNCONFIRMED


def calibrate(
    *,
    output: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    data: str | Sequence[str] | None = None,
    guarantees: Sequence[Guarantee] | None = None,
    exits: ExitRule | None = None,
    thresholds: Sequence[float] | None = None,
    vocabulary: str | None = None,
    extra_ids: int | None = None,
    chat_template: str | None = None,
    system: str | None = None,
    task_prefix: str = "",
    max_input_length: int | None = None,
    max_decode_length: int = 64,
    dtype: str = "float32",
    matmul_precision: str = "highest",
    cluster_key: str | None = None,
    group_key: str | None = None,
    joint: bool = False,
    serve: str | None = None,
    confirm_share: float | None = None,
    near_ties: str = "count",
    seed: int = 0,
    on_long: str = "truncate",
    on_error: str = "fail",
    max_failures: int | None = None,
    num_shards: int | None = None,
    batch_size: int | None = None,
    token_budget: int | None = None,
    model_parallelism: int = 1,
    exit_head: str = "auto",
    engine: str = "auto",
    metric_settings: MetricSettings = NO_SETTINGS,
    resume: bool = False,
    overwrite: bool = False,
    options: PipelineOptions | None = None,
) -> Manifest:
    """Calibrates a model on a data set, writes the result and returns its manifest.

        manifest = calm.calibrate(
            model="checkpoints/my_t5",
            data="data/*.jsonl.gz",
            guarantees=[calm.Guarantee("textual", "rouge_l_unicode", delta=0.1, epsilon=0.05)],
            output="calibration",
        )

    It does what `calm-beam calibrate` does, but for the report, which `calm-beam report` makes of what is written: it
    runs `ReadExamples`, `Sweep`, `Calibrate` and `WriteManifest` as one pipeline; what has to be confirmed is confirmed
    by another one. With neither model nor data, the
    embedded model is calibrated on the embedded data.

    Args:
      output: Directory for manifest, risk table and generations.
      model: Folder of the model: native, Hugging Face, T5X or Orbax.
      data: Paths or globs of the calibration set.
      guarantees: What is asked for; textual consistency by `rouge_l_unicode` with delta 0.1 and epsilon 0.05 if
        omitted.
      exits: How tokens exit; by the softmax measure if omitted.
      thresholds: The grid; multiples of 0.05 if omitted.
      vocabulary: Path of the SentencePiece model; looked for in and beside the model if omitted.
      extra_ids: Sentinels to add to it; as many as tokenizer files beside it name if omitted.
      chat_template: `model` for the chat template beside the tokenizer, or the path of one, which makes prompts of
        inputs; `none` for inputs that are prompts as they are. Needed where there is a template.
      system: What every chat begins with, before the input.
      task_prefix: Put before every input.
      max_input_length: In tokens, eos included; 512 if omitted, or what the model has room for beside an output.
      max_decode_length: In tokens, eos included.
      dtype: `float32`, or `bfloat16` for weights, states, keys and values; serving is then bfloat16, too.
      matmul_precision: `highest`, `high` or `default`: of products of float32 numbers on GPUs and TPUs.
      cluster_key: Key of a row that names its cluster, where examples are drawn in clusters.
      group_key: Key of a row that names its group, such as its language: each group then has entries of its own.
      joint: Whether all guarantees are to hold together with probability 1 - epsilon.
      near_ties: What becomes of outputs that hung on a decision within rounding, which another engine may make
        otherwise: `count`, or `worst_case` for loss 1.
      serve: The entry that will be served, such as `textual,0.05`, as `--serve` names it: `Generator` and `generate`
        take it where nothing else is asked for. None leaves that open.
      confirm_share: Share of the examples that choose nothing: they are decoded at the chosen thresholds, and at two
        that are safer, by the decoder that serves, and only thresholds that they prove again are promised. None
        promises what all of them chose.
      seed: Of the order in which `star_bets` and `wsr` bet on examples, and of which of them confirm.
      on_long: `truncate` or `error`, for longer inputs.
      on_error: `fail`, or `worst_case`, which counts examples that cannot be decoded or scored with loss 1.
      max_failures: Most examples that may fail.
      num_shards: Shards that examples are divided into; by the size of the data if omitted, or with `resume` as begun.
      batch_size: Most prompts decoded together; by the memory that is free if omitted.
      token_budget: Most positions held at a time, likewise.
      model_parallelism: Devices of a worker that share one model, each with a part of it.
      exit_head: One of `EXIT_HEADS`: the form of the output head that decides. It moves outputs at near ties alone.
      engine: What decodes: `native`, `xla`, or `auto` for native code where this machine has it, else XLA. It is
        recorded, and outputs of two are never mixed.
      metric_settings: What metrics need.
      resume: Whether to go on with what an unfinished run has left in `output`.
      overwrite: Whether to take away what is there.
      options: Of the pipeline, among them its runner; in this process if omitted.

    Raises:
      UsageError: If anything that was asked for is wrong; nothing has been written. Messages call arguments by the
        flags of the command line.
      PipelineError: If the pipeline fails; `resume=True` goes on from what it has stored.

    Source: CALM, section "Calibrating the confidence threshold", Algorithm "Learn-then-Test".
    """
    options = options if options is not None else PipelineOptions([])
    if (model is None) != (data is None):
        raise UsageError("model and data belong together: name both, or neither for the embedded ones.")
    is_embedded = model is None
    if guarantees is None:
        guarantees = _embedded_guarantees() if is_embedded else [Guarantee("textual", DEFAULT_METRIC, delta=0.1)]
    if thresholds is None:
        thresholds = embedded.THRESHOLDS if is_embedded else uniform_grid(0.05)
    checked_metrics([guarantee.metric for guarantee in guarantees], metric_settings)
    if max_failures is not None and on_error != "worst_case":
        raise UsageError(
            f"max_failures is {max_failures}, but on_error is {on_error!r}, which ends the run at the first that "
            "fails: pass on_error='worst_case' too, or leave max_failures out."
        )
    needs_references = any(guarantee.consistency == "risk" for guarantee in guarantees)
    files = DataFiles.found(
        str(embedded.CALIBRATION_SET) if data is None else data,
        reading=Reading(needs_references=needs_references, cluster_key=cluster_key, group_key=group_key),
    )
    directory = os.fspath(output)
    if num_shards is None and resume:
        num_shards = SweepHome(directory).begun_shards()
    part = None
    if confirm_share is not None:
        part = SetPart(name=CALIBRATING, confirm_share=confirm_share, salt=salt_of(seed))
        (exits or ExitRule()).check_served()
        check_parts_of_data(files, part)
        if not (resume or overwrite):
            refuse_left_confirmation(directory)
    sweep = Sweep(
        model=str(embedded.MODEL) if model is None else os.fspath(model),
        output=directory,
        exits=exits or ExitRule(),
        thresholds=thresholds,
        vocabulary=vocabulary,
        extra_ids=extra_ids,
        chat_template=chat_template,
        system=system,
        task_prefix=task_prefix,
        max_input_length=max_input_length,
        max_decode_length=max_decode_length,
        dtype=dtype,
        matmul_precision=matmul_precision,
        on_long=on_long,
        on_error=on_error,
        max_failures=max_failures,
        batch_size=batch_size,
        token_budget=token_budget,
        model_parallelism=model_parallelism,
        exit_head=exit_head,
        engine=engine,
        resume=resume,
        overwrite=overwrite,
        runs_here=is_local(options),
    )
    pipeline = Workers(options=options).new_pipeline()
    tests = Calibrate(
        guarantees,
        group_key=group_key,
        joint=joint,
        serve=serve,
        seed=seed,
        max_failures=max_failures,
        metric_settings=metric_settings,
        near_ties=near_ties,
        confirm_share=confirm_share,
    )
    result = directory if part is None else joined(directory, UNCONFIRMED)
    if part is not None:
        remove_left(directory, overwrite=overwrite)
    _ = pipeline | ReadExamples(files, num_shards=num_shards, part=part) | sweep | tests | WriteManifest(result)
    run_pipeline(pipeline)
    if part is not None:
        confirm(
            tests.plan.confirmed_by(confirm_share),
            sweep.prepared,
            output=directory,
            earlier=EarlierResult(),
            workers=Workers(options=options),
            max_failures=max_failures,
            metric_settings=metric_settings,
        )
    return read_manifest(joined(directory, MANIFEST))


def _embedded_guarantees() -> list[Guarantee]:
    """Returns what is asked of the embedded model by default."""
    asked = itertools.product(embedded.CONSISTENCIES, embedded.METRICS, embedded.DELTAS)
    return [Guarantee(consistency, metric, delta=delta) for consistency, metric, delta in asked]
