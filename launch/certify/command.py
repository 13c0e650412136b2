"""What `calm-beam certify` does once its flags are parsed: read all, settle the plan, test, write."""

import argparse
from collections.abc import Sequence

from calm_beam.calibration.groups import MOST_GROUPS
from calm_beam.calibration.publish import REPORT, EarlierResult, publish
from calm_beam.counted import counted
from calm_beam.errors import CalmBeamError
from calm_beam.external.plan import all_tests, plan_of, settled_order
from calm_beam.external.result import external_manifest, setting_rows
from calm_beam.launch.flags import UsageError, as_usage, naming
from calm_beam.launch.terminal import say, tell
from calm_beam.launch.terminal.certification import print_certification
from calm_beam.manifest import MANIFEST, ExternalTest
from calm_beam.storage import absolute, check_writable, is_file, joined, make_folder
from calm_beam.versions import certifying_versions

from .sources import Source, read_source


def certify(flags: argparse.Namespace) -> int:
    """Certifies as the flags of `certify_parser` say, tells about it and returns the exit status of the command."""
    with as_usage():
        output, earlier = _checked_output(flags)
        _check_order_flags(flags)
        # Whatever is wrong with these is told before a file is read.
        _tests(flags, loss=flags.loss or ("given" if flags.losses else "signed"), groups=())
    source = read_source(flags, loss=flags.loss, group_key=flags.group_key, cluster_key=flags.cluster_key)
    sweep = source.sweep
    declared = _declared_costs(flags, source)
    groups = sorted(set(sweep.groups or ()))
    if len(groups) > MOST_GROUPS:
        raise UsageError(
            f"--group_key={flags.group_key}: there are {len(groups)} groups, more than {MOST_GROUPS}. Each of them "
            "needs hundreds of examples to prove anything: name a column with few values."
        )
    tests = _tests(flags, loss=source.loss, groups=groups)
    plan = plan_of(
        tests,
        settled_order(
            sweep,
            order=flags.order if flags.order or flags.order_by else source.listed,
            order_by=flags.order_by,
            costs=declared,
        ),
        joint_epsilon=flags.epsilon[0] if flags.joint else None,
        group_key=flags.group_key,
        cluster_key=flags.cluster_key,
        seed=flags.seed,
        baseline=source.baseline,
        task=source.task,
        metric=source.metric,
    )
    # Now, so that a log can show later what had been settled by then.
    say(f"plan {plan.digest}")
    costs = declared or dict(sweep.costs)
    rows = setting_rows(sweep, plan, costs=costs)
    manifest = external_manifest(
        sweep, plan, rows=rows, costs=costs, patterns=source.patterns, software=certifying_versions()
    )
    make_folder(output)
    publish(output, manifest, rows=[row for of_test in rows for row in of_test], failures=(), earlier=earlier)
    print_certification(manifest, rows)
    _report(output)
    say(f"{counted(len(sweep.ids), 'example')} under {counted(len(plan.order), 'setting')}: {joined(output, MANIFEST)}")
    return 0


def _report(output: str) -> None:
    """Builds the report; says so if that fails, since the result stands without it."""
    # Here, since it loads what draws the other kind of report too.
    from calm_beam.launch.report import write_external_report

    path = joined(output, REPORT)
    try:
        write_external_report(output, path)
    except (CalmBeamError, OSError) as error:
        again = f"calm-beam report --calibration={output}"
        say(f"caution: no report ({error}). The result in {output} is whole; try: {again}")
    else:
        tell(f"Report: {path}")


def _tests(flags: argparse.Namespace, *, loss: str, groups: Sequence[str]) -> tuple[ExternalTest, ...]:
    """Returns what the flags ask."""
    return all_tests(
        groups=groups,
        deltas=flags.delta,
        epsilons=flags.epsilon,
        tails=flags.tail,
        loss=loss,
        p_value=flags.p_value,
        procedure=flags.procedure,
        joint=flags.joint,
        clustered=flags.cluster_key is not None,
    )


def _check_order_flags(flags: argparse.Namespace) -> None:
    if flags.order and flags.order_by:
        raise UsageError("--order and --order_by both say the order: leave one of them out.")
    if flags.losses is not None and not flags.order and not flags.order_by:
        raise UsageError(
            "the order of the settings is missing. Declare it before you look at the losses: --order=A,B,..., the "
            "safest first, or --order_by=cost."
        )


def _declared_costs(flags: argparse.Namespace, source: Source) -> dict[str, float]:
    """Returns the costs that `--costs` declares; empty without it."""
    if flags.costs is None:
        return {}
    if source.sweep.costs:
        raise UsageError("--costs and the column cost both say what settings cost: leave one of them out.")
    if set(flags.costs) != set(source.sweep.settings):
        raise UsageError(
            f"--costs must name every setting once: the settings are {', '.join(source.sweep.settings)}, it names "
            f"{', '.join(flags.costs)}."
        )
    return dict(flags.costs)


def _checked_output(flags: argparse.Namespace) -> tuple[str, EarlierResult]:
    """Returns the directory to write to, and the result that it holds now."""
    with naming("--output"):
        output = absolute(flags.output)
        if is_file(output):
            raise UsageError(f"--output {output}: is a file, expected a directory.")
        earlier = EarlierResult.found_in(output)
        check_writable(joined(output, MANIFEST))
    if earlier.manifest and not flags.overwrite:
        raise UsageError(f"--output {output}: holds a manifest already. Choose another directory, or pass --overwrite.")
    return output, earlier
