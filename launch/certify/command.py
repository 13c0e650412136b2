"""What `calm-beam certify` does once its flags are parsed: read all, settle the plan, test, write."""

import argparse

from calm_beam.calibration.guarantee import default_tests_in_words
from calm_beam.calibration.ledger import LEDGER
from calm_beam.calibration.publish import EarlierResult
from calm_beam.calibration.settings import entries_of, setting_manifest, setting_rows
from calm_beam.calibration.settings_plan import plan_of_settings, settled_order
from calm_beam.launch.flags import UsageError, as_usage, naming
from calm_beam.launch.terminal import say
from calm_beam.manifest import MANIFEST, plans_in_words
from calm_beam.manifest.plan_list import AskedPlan, PlanList
from calm_beam.manifest.versions import certifying_versions
from calm_beam.storage import absolute, check_writable, is_cloud_path, is_file, joined, remove_file
from calm_beam.text import counted

from .asked import groups_of, tests_of
from .flags import fill_in_sequential
from .published import NEXT_IDS, files_of, prepare_output, publish_and_tell
from .sequential import certify_sequentially, warn_of_counted
from .sources import Source, read_source


def certify(flags: argparse.Namespace) -> int:
    """Certifies as the flags of `certify_parser` say, tells about it and returns the exit status of the command."""
    with as_usage():
        fill_in_sequential(flags)
        output = _checked_output(flags)
        _check_order_flags(flags)
        # Whatever is wrong with these is told before a file is read.
        is_of_losses = flags.losses is not None or flags.sequential
        tests_of(flags, loss=flags.loss or ("given" if is_of_losses else "signed"), groups=(), losses=None)
    if flags.sequential:
        return certify_sequentially(flags, output)
    earlier = EarlierResult.found_in(output)
    if flags.overwrite:
        warn_of_counted(joined(output, LEDGER))
    else:
        _check_empty(output, earlier)
    source = read_source(flags, loss=flags.loss, group_key=flags.group_key, cluster_key=flags.cluster_key)
    sweep = source.sweep
    declared = _declared_costs(flags, source)
    tests = tests_of(flags, loss=source.loss, groups=groups_of(flags, sweep.groups), losses=sweep.losses.size)
    plan = plan_of_settings(
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
        direction=source.direction,
    )
    # Now, so that a log can show later what had been settled by then.
    say(f"plan {plan.digest}")
    if flags.p_value is None:
        say(default_tests_in_words(plan.tests))
    costs = declared or dict(sweep.costs)
    rows = setting_rows(sweep, plan, costs=costs)
    # Before anything is told of what was found.
    asked = AskedPlan.of(plan, data=sweep.fingerprint(), command="certify")
    earlier_plans = PlanList(output).ask(asked, is_answered=True)
    if words := plans_in_words(earlier_plans, of="losses"):
        say(words)
    manifest = setting_manifest(
        sweep,
        plan,
        entries=entries_of(plan, rows),
        costs=costs,
        patterns=source.patterns,
        software=certifying_versions(),
        earlier_plans=earlier_plans,
    )
    prepare_output(output)
    for name in (LEDGER, NEXT_IDS):
        # Of a sequential certification that is overwritten.
        remove_file(joined(output, name))
    publish_and_tell(output, manifest, rows=rows, earlier=earlier)
    say(f"{counted(len(sweep.ids), 'example')} under {counted(len(plan.order), 'setting')}: {joined(output, MANIFEST)}")
    return 0


def _check_order_flags(flags: argparse.Namespace) -> None:
    if flags.order and flags.order_by:
        raise UsageError("--order and --order_by both say the order: leave one of them out.")
    if (flags.losses is not None or flags.sequential) and not flags.order and not flags.order_by:
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


def _checked_output(flags: argparse.Namespace) -> str:
    """Returns the directory to write to, which can be written to."""
    with naming("--output"):
        output = absolute(flags.output)
        if is_file(output):
            raise UsageError(f"--output {output}: is a file, expected a directory.")
        # In a bucket nothing can be in the way of a name.
        for path in (joined(output, MANIFEST),) if is_cloud_path(output) else files_of(output):
            check_writable(path)
    return output


def _check_empty(output: str, earlier: EarlierResult) -> None:
    """Refuses a directory with an earlier result, or with what leads to one."""
    if is_file(joined(output, LEDGER)):
        raise UsageError(
            f"--output {output}: holds a sequential certification. Its losses have been looked at, so that a test "
            "for all examples at once proves nothing of them. Go on with --sequential, or choose another directory "
            "for other examples."
        )
    if earlier.manifest:
        raise UsageError(f"--output {output}: holds a manifest already. Choose another directory, or pass --overwrite.")
