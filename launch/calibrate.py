"""`calm-beam calibrate`: the main job, as a Beam pipeline.

With no flags it calibrates the embedded model on the embedded data. Writes `manifest.json`, `risk_table.csv` and
`generations/` into `--output`.
"""

import argparse
import datetime
import importlib.metadata
import platform
import sys
import time
from collections.abc import Sequence

import apache_beam as beam

from calm_beam import __version__
from calm_beam.calibration import Plan, RunRecord, Spec, all_specs
from calm_beam.calibration.specs import LOSSES
from calm_beam.demo import embedded
from calm_beam.manifest import ManifestError, ModelRecord, VocabularyRecord, read_manifest
from calm_beam.metrics.registry import METRICS, checked_score, get_metric
from calm_beam.risk.fwer import PROCEDURES
from calm_beam.risk.pvalues import P_VALUES
from calm_beam.storage import absolute, check_writable, is_cloud_path, is_file, joined, version
from calm_beam.transforms import CalibrateGenerations, DecodeExamples, ReadExamples

from .dataflow import add_job_flags, job_paths, prepare_job, template_location
from .flags import (
    FlagParser,
    UsageError,
    add_decode_flags,
    naming,
    numbers,
    parse_flags,
    texts,
    whole_number,
)
from .progress import shown_progress
from .run_metrics import metrics_in_words
from .runners import PipelineError, make_runner, may_report_progress, run_pipeline
from .setup_run import PreparedRun, prepare_run
from .staging import MANIFEST, staged
from .summary import print_summary


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = _parser()
    try:
        flags, options = parse_flags(parser, argv)
        _fill_in_defaults(flags)
        prepare_job(options, accelerator=flags.accelerator, paths=job_paths(flags), num_shards=flags.num_shards)
        specs = _specs(flags)
        output, replaces = _checked_output(flags)
        run = prepare_run(flags, needs_references="risk" in flags.consistency, cluster_key=flags.cluster_key)
        _check_servable(run)
        plan = _plan(flags, run, specs)
        pipeline = beam.Pipeline(runner=make_runner(options), options=options)
    except (UsageError, ValueError) as error:
        print(f"calm-beam calibrate: {error}", file=sys.stderr)
        return 2
    # Now, so that a log can show later what had been settled by then.
    print(f"plan {plan.record().digest}", file=sys.stderr)
    start = time.monotonic()
    try:
        with staged(output) as staging, shown_progress(enabled=may_report_progress(options)) as progress:
            needs_references = "risk" in flags.consistency
            decode_plan = run.plan(flags, joined(staging, "generations", run.generations_name()))
            _ = (
                pipeline
                | "ReadExamples"
                >> ReadExamples(run.paths, flags.num_shards, needs_references, progress, flags.cluster_key)
                | "DecodeExamples"
                >> DecodeExamples(
                    decode_plan,
                    progress,
                    accelerator_hint=flags.accelerator.hint() if flags.accelerator else None,
                    needs_accelerator=flags.accelerator is not None,
                )
                | "CalibrateGenerations"
                >> CalibrateGenerations(
                    plan=plan,
                    # Taken before any example is decoded, and compared with what was tested at the end.
                    plan_digest=plan.record().digest,
                    record=_record(flags, run),
                    output=staging,
                    # What is staged locally replaces nothing yet.
                    replaces=replaces if is_cloud_path(output) else "",
                )
            )
            metrics = run_pipeline(pipeline)
        if template := template_location(options):
            print(f"Template: {template}. It has not run.")
            return 0
        manifest = read_manifest(joined(output, MANIFEST))
    except (PipelineError, ManifestError, OSError) as error:
        print(f"calm-beam calibrate: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - start
    print(metrics_in_words(metrics, seconds=seconds), file=sys.stderr)
    print_summary(manifest, output, seconds=seconds)
    return 0


def _parser() -> FlagParser:
    parser = FlagParser(prog="calm-beam calibrate", description=(__doc__ or "").split("\n\n")[0])
    add_decode_flags(parser, default_grid_step=0.05)
    add_job_flags(parser)
    goal = parser.add_argument_group("guarantee (lists are comma-separated; every combination is one manifest entry)")
    goal.add_argument("--consistency", type=texts, help="textual, risk; default: textual (embedded model: both)")
    goal.add_argument(
        "--metric", type=texts, help="rouge_l (default), rouge_l_unicode, token_f1, exact_match, module:function"
    )
    goal.add_argument("--delta", type=numbers, help="risk tolerances in (0, 1); default: 0.1")
    goal.add_argument(
        "--epsilon", type=numbers, default=(0.05,), help="allowed probabilities of error in (0, 1); default: 0.05"
    )
    goal.add_argument(
        "--joint", action="store_true", help="let all entries hold together, with probability 1 - epsilon"
    )
    test = parser.add_argument_group("test")
    test.add_argument(
        "--risk_loss",
        choices=LOSSES["risk"],
        help="for risk consistency; relu is the paper's; default: signed, or relu if --p_value needs losses in [0, 1]",
    )
    test.add_argument(
        "--p_value",
        choices=tuple(P_VALUES),
        help="test of one threshold; default: signed_mixture for signed losses, else hoeffding_bentkus",
    )
    test.add_argument(
        "--procedure", choices=tuple(PROCEDURES), default="fixed_sequence", help="test of the grid of thresholds"
    )
    test.add_argument("--cluster_key", help="key of a row that names its cluster, where examples are drawn in clusters")
    test.add_argument("--seed", type=whole_number(0), default=0, help="of the order in which wsr bets on examples")
    goal.add_argument("--output", default="calibration", help="directory for manifest, risk table and generations")
    return parser


def _fill_in_defaults(flags: argparse.Namespace) -> None:
    """Sets what the user left open: the embedded task where neither model nor data were named."""
    if flags.checkpoint is None and flags.data is None:
        print("no --checkpoint and no --data: calibrating the embedded model on the embedded data", file=sys.stderr)
        flags.checkpoint = str(embedded.MODEL)
        flags.data = (str(embedded.CALIBRATION_SET),)
        if flags.grid_step is None:
            flags.thresholds = flags.thresholds or embedded.THRESHOLDS
        flags.consistency = flags.consistency or ("textual", "risk")
        flags.metric = flags.metric or ("rouge_l_unicode",)
        flags.delta = flags.delta or embedded.DELTAS
    flags.consistency = flags.consistency or ("textual",)
    flags.metric = flags.metric or ("rouge_l",)
    flags.delta = flags.delta or (0.1,)


def _specs(flags: argparse.Namespace) -> tuple[Spec, ...]:
    for name in flags.metric:
        # Tried on one pair of texts: a metric that cannot be called is better known before hours of decoding.
        checked_score(get_metric(name), name, "a text", ("a text",), example_id="of the trial before the run")
    fractional = [name for name in flags.metric if name in METRICS and name != "exact_match"]
    if flags.p_value == "exact_binomial" and fractional:
        # Losses in between would be found, but only after everything was decoded.
        raise UsageError(
            f"--p_value=exact_binomial is for losses of 0 and 1 only, and those of {fractional[0]} lie in between. "
            "Take hoeffding_bentkus, or --metric=exact_match."
        )
    return all_specs(
        consistencies=flags.consistency,
        metrics=flags.metric,
        deltas=flags.delta,
        epsilons=flags.epsilon,
        risk_loss=flags.risk_loss,
        p_value=flags.p_value,
        procedure=flags.procedure,
        joint=flags.joint,
    )


def _plan(flags: argparse.Namespace, run: PreparedRun, specs: tuple[Spec, ...]) -> Plan:
    return Plan.of(
        specs,
        run.settings,
        model=run.model_fingerprint,
        vocabulary=run.vocabulary_fingerprint(),
        joint_epsilon=flags.epsilon[0] if flags.joint else None,
        cluster_key=flags.cluster_key,
        seed=flags.seed,
        on_error=flags.on_error,
        on_long=flags.on_long,
    )


def _check_servable(run: PreparedRun) -> None:
    """Refuses what a manifest has no word for, and warns of what can be certified but not served."""
    rule = run.settings.rule
    if rule.token_from == "last_layer":
        raise UsageError(
            "--token_from=last_layer takes every token from the full model, so there is nothing to calibrate. decode "
            "accepts it."
        )
    if rule.needs_full_model():
        print(
            f"caution: confidence {rule.confidence} with state propagation {rule.state_propagation} runs every layer "
            "for every token. The manifest is for analysis; nothing can be served by it.",
            file=sys.stderr,
        )


def _checked_output(flags: argparse.Namespace) -> tuple[str, str]:
    """Returns the directory to write to, and the version of the manifest that it holds now."""
    with naming("--output"):
        # Absolute, since workers have folders of their own.
        output = absolute(flags.output)
        if is_file(output):
            raise UsageError(f"--output {output}: is a file, expected a directory.")
        replaces = version(joined(output, MANIFEST))
        check_writable(joined(output, MANIFEST))
    if replaces and not flags.overwrite:
        raise UsageError(f"--output {output}: holds a manifest already. Choose another directory, or pass --overwrite.")
    return output, replaces


def _record(flags: argparse.Namespace, run: PreparedRun) -> RunRecord:
    packages = ("apache-beam", "jax", "flax", "numpy", "scipy", "sentencepiece", "rouge-score")
    versions = {package: importlib.metadata.version(package) for package in packages}
    created = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    vocabulary = run.vocabulary
    return RunRecord(
        created=created.isoformat().replace("+00:00", "Z"),
        model=ModelRecord(
            uri=run.checkpoint.uri,
            fingerprint=run.model_fingerprint,
            layers=run.checkpoint.config.num_decoder_layers,
        ),
        vocabulary=VocabularyRecord(fingerprint=vocabulary.fingerprint, extra_ids=vocabulary.extra_ids)
        if vocabulary
        else None,
        settings=run.settings,
        patterns=flags.data,
        software={"calm-beam": __version__, "python": platform.python_version(), **versions},
    )
