"""`calm-beam verify` of a manifest of kind settings: tests its settings on fresh losses, without a model."""

import argparse
from collections.abc import Sequence

from calm_beam.calibration.anytime import AnytimeEvidence
from calm_beam.calibration.verification import Verdict
from calm_beam.calibration.verified_settings import (
    check_fresh,
    promised,
    unit_names,
    verify_settings,
    why_not_fresh,
    with_settings,
)
from calm_beam.inputs.losses.direction import LOWER
from calm_beam.launch.certify.options import SweepSource, WhichScores
from calm_beam.launch.certify.sources import Source, read_losses, read_scores
from calm_beam.launch.flags import FlagParser, UsageError, add_options, as_usage, parse_own_flags
from calm_beam.launch.flags.manifest import find_manifest
from calm_beam.launch.terminal import PlainConsole, say, tell
from calm_beam.launch.terminal.certification import loss_in_words
from calm_beam.launch.terminal.tables import PlainTable
from calm_beam.manifest import ExternalCalibration, ExternalManifest, read_any_manifest
from calm_beam.text import counted, printable_line

from .carried import add_anytime_flags, take_up
from .verdicts import BROKEN, check_alpha, conclude, verdict_in_words


def external_parser(doc: str | None) -> FlagParser:
    """Returns the parser of the command line; its help shows what the docstring says."""
    parser = FlagParser(prog="calm-beam verify", doc=doc)
    parser.add_argument(
        "--manifest", required=True, help="a manifest of kind settings, or the directory that holds one"
    )
    add_options(parser, SweepSource)
    add_options(parser.section(str(WhichScores.SECTION)), WhichScores)
    parser.add_argument(
        "--alpha", type=float, default=0.05, help="chance of calling any promise broken that is kept, in (0, 1)"
    )
    add_anytime_flags(parser)
    return parser


def verify_external(argv: Sequence[str], *, doc: str | None) -> int:
    """Tests as the flags say, tells about it and returns the exit status of the command."""
    with as_usage():
        flags = parse_own_flags(external_parser(doc), argv)
        check_alpha(flags.alpha)
    path = find_manifest(flags.manifest)
    manifest = read_any_manifest(path)
    if not isinstance(manifest, ExternalManifest):
        raise UsageError(
            f"--manifest {flags.manifest}: is one of calibrate, which is tested by decoding fresh data: pass --data. "
            "Losses test manifests of certify."
        )
    if not promised(manifest):
        tell("No entry of the manifest found a safe setting: there is nothing that could be broken.")
        return 0
    plan = manifest.plan
    if (plan.metric is None) != (flags.losses is not None):
        kind = "losses (--losses)" if plan.metric is None else "scores (--baseline and --candidates)"
        raise UsageError(f"the manifest was made of {kind}: name fresh ones.")
    flags.metric = plan.metric if flags.metric is None else flags.metric
    if plan.metric is not None and flags.metric != plan.metric:
        raise UsageError(f"--metric={flags.metric}: the manifest is about {plan.metric}.")
    if flags.direction is not None and plan.direction not in (None, flags.direction):
        raise UsageError(f"--direction={flags.direction}: the manifest says that a {plan.direction} score is better.")
    flags.direction = plan.direction if flags.direction is None else flags.direction
    source = _source(flags, manifest)
    if plan.metric is not None and plan.direction is None and source.direction == LOWER:
        raise UsageError(
            f"a lower {plan.metric} is better, and the manifest is of an earlier calm-beam, which took higher ones for "
            "better: it promises the opposite of what it says. Certify anew."
        )
    if plan.task is not None and source.task != plan.task:
        raise UsageError(f"the fresh runs are of task {source.task!r}, and the manifest is about {plan.task!r}.")
    check_fresh(source.sweep, manifest)
    if (caution := why_not_fresh(source.sweep, manifest)) is not None:
        say(f"caution: {caution}")
    state = take_up(flags, path, manifest=manifest.digest, promises=len(promised(manifest)))
    if state is None:
        verdicts = verify_settings(source.sweep, manifest, alpha=flags.alpha)
    else:
        names, unit = unit_names(source.sweep)
        state.check_new(names, are_own=True, unit=unit)
        state.keep(with_settings(state.evidence, names, sweep=source.sweep, manifest=manifest))
        verdicts = state.evidence.verdicts(promised(manifest))
    evidence = None if state is None else state.evidence
    _print(manifest, verdicts, examples=len(source.sweep.ids), alpha=flags.alpha, evidence=evidence)
    return BROKEN if any(verdict.is_broken for verdict in verdicts) else 0


def _source(flags: argparse.Namespace, manifest: ExternalManifest) -> Source:
    """Returns the fresh losses that flags name, read as the manifest's were."""
    named = SweepSource(losses=flags.losses, baseline=flags.baseline, candidates=flags.candidates)
    loss, plan = manifest.calibrations[0].loss, manifest.plan
    if named.baseline is None:
        if given := next((name for name in ("task", "metric", "direction") if getattr(flags, name) is not None), None):
            raise UsageError(f"--{given} belongs to --baseline, and --losses is given: leave one of them out.")
        return read_losses(named, loss=loss, group_key=plan.group_key, cluster_key=plan.cluster_key)
    return read_scores(
        named,
        loss=loss,
        task=flags.task,
        metric=flags.metric,
        direction=flags.direction,
        cluster_key=plan.cluster_key,
    )


def _print(
    manifest: ExternalManifest,
    verdicts: Sequence[Verdict[ExternalCalibration]],
    *,
    examples: int,
    alpha: float,
    evidence: AnytimeEvidence | None,
) -> None:
    console = PlainConsole()
    table = PlainTable("The manifest's entries on fresh losses")
    table.add_column("group\nloss", overflow="fold")
    table.add_column("setting", overflow="fold")
    table.add_numbers("delta\nepsilon", "risk then\nnow", "p proved\np broken", "verdict")
    for verdict in verdicts:
        entry = verdict.entry
        table.add_row(
            f"{'all' if entry.group is None else printable_line(entry.group)}\n{loss_in_words(entry)}",
            printable_line(entry.setting or ""),
            f"{entry.delta:g}\n{entry.epsilon:g}",
            f"{entry.risk:.4f}\n{verdict.risk:.4f}",
            f"{verdict.p_value:.2g}\n{verdict.excess_p_value:.2g}",
            verdict_in_words(verdict),
        )
    console.print(table)
    none = len(manifest.calibrations) - len(verdicts)
    console.print(f"{counted(examples, 'fresh example')}; {none} of the manifest's entries found no safe setting.")
    conclude(console, verdicts, alpha=alpha, evidence=evidence)
